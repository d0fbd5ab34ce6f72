"""The notebook runs as printed: in one namespace, an empty folder, and without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_run.ipynb"
PLAIN = "import sys; sys.modules['pandas'] = None"
"""pretend that pandas is not installed"""


def cells() -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    tree = json.loads(NOTEBOOK.read_text())
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    assert {cell["cell_type"] for cell in tree["cells"]} == {"markdown", "code"}
    assert len({cell["id"] for cell in tree["cells"]}) == len(tree["cells"])
    for cell in tree["cells"]:
        assert isinstance(cell["metadata"], dict) and all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_cell_runs_as_printed(tmp_path: Path) -> None:
    last = (
        "print('RESULT', run.outcome, len(losses), [r.outcome for r in run.recoveries], len(run.table()), "
        "part.outcome, whole.outcome, len(comparison.table()), engine.step)"
    )
    program = f"cells = {[PLAIN, *cells(), last]!r}\nspace = {{}}\nfor cell in cells:\n    exec(cell, space)\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    expected = "RESULT finished 30 ['recovered'] 31 stopped: request finished 2 4"
    assert done.stdout.splitlines()[-1] == expected
    assert "\\begin{tabular}" in done.stdout
