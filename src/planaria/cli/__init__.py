"""The command line: parses arguments and calls ``commands``."""

from planaria.cli.entry import main, run

__all__ = ["main", "run"]
