"""The live page's caption, run by Node.js where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from planaria.report import live_page

STATIC = Path(live_page.__file__).with_name("static")
PROGRAM = """
import { Sentence } from "./panels.mjs";
const parts = Object.fromEntries([".text", ".sign", ".ago"].map((name) => [name, { textContent: "" }]));
const sentence = new Sentence({ querySelector: (name) => parts[name], dataset: {} }, null);
const seen = JSON.parse(process.argv[2]).map(([tone, text, t]) => {
  sentence.show({ tone, text }, t, 100 + t);
  return [parts[".text"].textContent, parts[".ago"].textContent];
});
console.log(JSON.stringify(seen));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_an_important_sentence_that_stays_states_its_age(tmp_path: Path) -> None:
    """A fast run trains several more steps while it is read."""
    shutil.copyfile(STATIC / "panels.js", tmp_path / "panels.mjs")
    (tmp_path / "main.mjs").write_text(PROGRAM)
    said = [("loss", "killed", 10.0), *(("calm", "training", t) for t in (10.5, 12.2, 13.6))]
    done = subprocess.run(
        ["node", "main.mjs", json.dumps(said)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [["killed", ""], ["killed", ""], ["killed", "2 s ago"], ["training", ""]]
