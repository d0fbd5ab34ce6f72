"""Captions of rebuilt stages, and their display, run by Node.js where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from planaria.control.facts import decisions as d
from planaria.recovery import RECOVERIES
from planaria.report import live_page
from planaria.report.live_page.captions import Captions
from planaria.report.worker_assignments import WorkerAssignments

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
    printed = [("loss", "killed", 10.0), *(("calm", "training", t) for t in (10.5, 12.2, 13.6))]
    done = subprocess.run(
        ["node", "main.mjs", json.dumps(printed)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [["killed", ""], ["killed", ""], ["killed", "2 s ago"], ["training", ""]]


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("checkfree", "stages 1, 3 send their weights, and the weighted mean becomes the new stage 2"),
        ("random", "stage 2 gets new random weights"),
        (d.PEER, "stages 1, 3 has the same stage, and sends a copy"),
        ("not_here:Mine", "stages 1, 3 send the weights to rebuild stage 2 (not_here:Mine)"),
    ],
)
def test_a_strategy_describes_its_rebuilds(strategy: str, sentence: str) -> None:
    rebuilt = d.Member(worker="e", node=2, stage=2, source=d.Rebuild(by=strategy, donors=[1, 3]))
    form = d.Form(replica=0, generation=2, step=5, outcome="recovered", members=[rebuilt], links=[])
    caption = Captions(WorkerAssignments(), 4).caption(form)
    assert caption == ("recovery", f"Worker e takes over stage 2: {sentence}.")


@pytest.mark.parametrize("name", RECOVERIES.shipped)
def test_a_caption_has_no_unknown_placeholder(name: str) -> None:
    assert RECOVERIES.find(name).caption.format(donors="stage 1", stage="stage 2", strategy=name)
