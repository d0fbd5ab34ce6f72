"""Mistakes on the command line."""

from __future__ import annotations

import pytest

from planaria import cli


def refused(capsys: pytest.CaptureFixture[str], *words: object, warned: bool = False) -> str:
    """Return the single error line of a mistake; ``warned``: warnings may precede it."""
    with pytest.raises(SystemExit) as ending:
        cli.main([str(word) for word in words])
    assert ending.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not warned or "warning" not in line]
    return line
