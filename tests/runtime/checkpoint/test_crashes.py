"""A process that saves or seals is killed at every visible step: checkpoints listed afterwards are whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import copies_of_stages, cut_of, require_file
from planaria.runtime.checkpoint.recut import require_whole
from planaria.runtime.checkpoint.stage_file import checked_reader
from planaria.runtime.checkpoint.store import CheckpointStore
from support.sample_checkpoints import config, gather, shapes

KEEP = 2
SEEN = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "fsync"}
"""audit events that change files or the order in which they become durable"""


def state(given: RunConfig, stage: int, step: int) -> StageState:
    weights = {name: torch.full(shape, float(step)) for name, shape in shapes(given, stage).items()}
    moments = {name: {"exp_avg": weight + 1, "exp_avg_sq": weight + 2} for name, weight in weights.items()}
    return StageState(weights, moments, dict.fromkeys(weights, step))


def save(folder: Path, step: int, replicas: int, report: Callable[[bytes], object]) -> None:
    """Write and seal a checkpoint."""
    store, given = CheckpointStore(folder), config(2, replicas, layers=2)
    states = {(replica, stage): state(given, stage, step) for replica in range(replicas) for stage in range(3)}
    manifest = gather(store, given, states, step)
    report(b"s")
    store.seal(f"step-{step:08d}", manifest, KEEP)
    report(b".")


def in_a_process(work: Callable[[Callable[[bytes], object]], object], kill_after_s: float | None = None) -> bytes:
    """Return the bytes that ``work`` reported before it was killed, with ``!`` after its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            work(lambda word: os.write(writer, word))
            os.write(writer, b"!")
        finally:
            os._exit(0)
    os.close(writer)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    reported = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    assert reported.endswith(b"!") or os.WIFSIGNALED(status), "it failed by itself"
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return reported


def strike_at(number: int) -> None:
    """Kill this process just before its ``number``-th visible change of files."""
    seen = 0

    def crash_at(event: str, arguments: object) -> None:
        nonlocal seen
        if event in SEEN:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(crash_at)
    real = os.fsync
    os.fsync = lambda handle: (crash_at("fsync", handle), real(handle))[1]


def require_all_whole(folder: Path) -> list[int]:
    """Read every listed checkpoint to the last byte; return their steps."""
    found = CheckpointStore(folder).list()
    for saved in found:
        assert saved.whole
        copies = copies_of_stages(saved.folder, saved.manifest, saved.manifest.stages)
        require_whole(cut_of(saved.manifest), copies)
        for copy in copies.values():
            for held in copy.stages.values():
                require_file(saved.folder, held)
                with checked_reader(held) as read:
                    assert (read("weights." + held.names("weights")[0]) == saved.step).all()
    return [saved.step for saved in found]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there"])
def test_a_saver_may_be_killed_at_every_step(replicas: int, step: int, tmp_path: Path) -> None:
    """Each time from the same two checkpoints; then another process saves beside the files of the killed one."""
    for before in (1, 2):
        save(tmp_path / "before", before, replicas, bytes)
    ends = []
    for number in range(1, 200):
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))

        def work(report: Callable[[bytes], object], folder: Path = folder, number: int = number) -> None:
            strike_at(number)
            save(folder, step, replicas, report)

        ends.append(in_a_process(work))
        require_all_whole(folder)
        CheckpointStore(folder).bring_back()  # as a resumed run does
        steps = require_all_whole(folder)
        assert 2 in steps, "the old checkpoint is kept"
        assert step in steps or not ends[-1].endswith((b".", b"!")), "a reported seal is found"
        save(folder, 4, replicas, bytes)
        assert require_all_whole(folder)[-1] == 4
        assert {left.suffix for left in folder.iterdir()} == {""}, "the killed process leaves nothing"
        shutil.rmtree(folder)
        if ends[-1].endswith(b"!"):
            break
    assert ends[-1] == b"s.!" and ends.count(b"") > 10 * replicas and ends.count(b"s") > 10


@pytest.mark.slow
def test_a_saver_may_be_killed_at_random_moments(tmp_path: Path) -> None:
    draw, first, sealing = random.Random(34107), 2, 0
    save(tmp_path, 1, 2, bytes)  # slow the first time only
    for _ in range(50):

        def work(report: Callable[[bytes], object], first: int = first) -> None:
            for step in range(first, first + 1000):
                save(tmp_path, step, 2, report)

        reported = in_a_process(work, draw.uniform(0.02, 0.4))
        steps = require_all_whole(tmp_path)
        sealed = first + reported.count(b".") - 1
        if sealed >= first:
            assert sealed in steps
        sealing += reported.endswith(b"s")
        first = max([*steps, first - 1]) + 1
    assert sealing and first > 10
