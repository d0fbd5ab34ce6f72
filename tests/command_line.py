"""Run commands of planaria in this process."""

from __future__ import annotations

import pytest

from planaria.cli import main


def exit_code(*words: object) -> int:
    """Run a command; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def refused(capture: pytest.CaptureFixture[str], *words: object, silent: bool = False) -> str:
    """Run a command that must fail with exit code 2 and one line on stderr; return the line.

    ``silent``: nothing may be on stdout either.
    """
    code = exit_code(*words)
    out, err = capture.readouterr()
    assert code == 2 and err.startswith("planaria: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert not (silent and out), out
    return err
