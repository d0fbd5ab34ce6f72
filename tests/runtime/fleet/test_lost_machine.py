"""A machine with a controller and all its workers is lost, folder and all; the run goes on elsewhere from its store."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from harness import assert_no_orphans, live, tiny, train

import planaria
from planaria.models.packing import entries
from planaria.runtime.checkpoint.mirror import Mirror
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.timeout(200)
LONG_S = 100.0


def states(run: Path) -> list[dict[str, bytes]]:
    """Weights, moments, clocks and norms of each stage in the newest checkpoint, byte by byte.

    Generators are left out: nothing here draws from them, and each process comes with its own.
    """
    saved = CheckpointStore(run / "checkpoints").newest(whole_only=True)
    assert saved is not None
    found = [entries(read_stage(saved.folder, stage, saved.step)) for stage in saved.manifest.stages]
    return [
        {name: tensor.numpy().tobytes() for name, tensor in stage.items() if not name.startswith("generators.")}
        for stage in found
    ]


def test_a_run_goes_on_from_its_store_bit_for_bit(tmp_path: Path) -> None:
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
    assert states(on.folder) == states(whole.folder)
