"""A machine with a controller and all its workers is lost, folder and all; the run resumes elsewhere from its store."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import planaria
from harness import assert_no_orphans, digests, live, tiny, train
from planaria.runtime.checkpoint.mirror import Mirror

pytestmark = pytest.mark.timeout(200)
LONG_S = 100.0


def test_a_run_resumes_from_its_store_bit_for_bit(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    here, mirror = tmp_path / "here", Mirror(store, "run")
    slow = {"emulate": "links", "latency_s": 0.03}
    config = tiny(here, stages=2, steps=500, checkpoint={"every": 3, "store": store}, network=slow)
    with live(config) as run:
        run.wait_until(lambda _: len(mirror.names()) > 1, LONG_S)
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert_no_orphans(run.folder)
    step = int(mirror.names()[-1].removeprefix("step-"))
    shutil.move(here / "corpus.txt", tmp_path / "corpus.txt")
    shutil.rmtree(here)
    steps = {"train.steps": str(step + 4), "data.source": str(tmp_path / "corpus.txt"), "network.emulate": "false"}
    on = planaria.train(mirror.url, resume=True, progress=False, settings={"out": str(tmp_path / "there"), **steps})
    (tmp_path / "whole").mkdir()
    shutil.copy(tmp_path / "corpus.txt", tmp_path / "whole")
    whole = train(tiny(tmp_path / "whole", stages=2, steps=step + 4))
    assert digests(on.folder, step + 4) == digests(whole.folder, step + 4)
