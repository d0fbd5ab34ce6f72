"""The command line: how words become a call of something in ``commands``."""

from planaria.cli.entry import main, run

__all__ = ["main", "run"]
