"""CheckFree+ on real processes: any worker may die, stage 0 too, and others that are not its donors with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.faults.trace import Fault
from planaria.runtime.checkpoint.stage_file import read_stage
from support.live.harness import apart, digests, ending, inline, losses, outcomes, rebuilt, tiny, train

TOLERANCE = 1e-5
PLUS: dict[str, Any] = {"routing": {"kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}}
MOMENTS: list[Any] = ["forward", "backward", "any", "commit"]


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize(
    "lost", [[1], [3], [6], [0], [2, 5]], ids=["first", "middle", "last", "ends", "two not adjacent"]
)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_training_continues_whichever_worker_dies(tmp_path: Path, lost: list[int], moment: Any) -> None:
    config = tiny(tmp_path, stages=6, steps=10, fleet={"spares": 2}, train={"eval_every": 5}, **PLUS)
    record = train(config, [Fault(step=5, stage=stage, moment=moment, offset=0.5) for stage in lost])
    assert ending(record).outcome == "finished" and set(outcomes(record)) == {"started", "recovered"}
    assert {m.stage for m in rebuilt(record)} == set(lost)
    assert apart(losses(record), inline(record)[0]) <= TOLERANCE


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("ground")
@pytest.mark.parametrize(("moments", "tied"), [(True, True), (False, False), (True, False), (False, True)])
def test_stage_0_is_restored_bit_for_bit(tmp_path: Path, tied: bool, moments: bool) -> None:
    """Kill it between two saved steps. With its moments restored too, the run ends as if nothing had happened."""
    settings = PLUS | {
        "model": {"tied": tied},
        "recovery": {"strategy": "checkfree_plus", "options": {"mirror_moments": moments, "lr_scale": 1.0}},
        "checkpoint": {"every": 1, "keep": 99},
    }
    # A step apart: under load a fault may be late, when its step is already committed.
    faults = [Fault(step=3 + 2 * k, stage=0, moment=moment) for k, moment in enumerate(MOMENTS)]
    record = train(tiny(tmp_path, steps=11, **settings), faults)
    assert outcomes(record) == ["started"] + ["recovered"] * len(MOMENTS) and ending(record).outcome == "finished"
    unharmed = train(tiny(tmp_path / "unharmed", steps=11, **settings))
    if moments:
        assert losses(record) == losses(unharmed)
        assert digests(record.folder, 11)[0] == digests(unharmed.folder, 11)[0]
    assert weights_of_stage_0(record.folder, 3) == weights_of_stage_0(unharmed.folder, 3)
    # The loss of a step depends on the weights before it: those of the killed step on the mirrors alone.
    assert losses(record)[3] == losses(unharmed)[3]


def weights_of_stage_0(folder: Path, step: int) -> dict[str, bytes]:
    state = read_stage(folder / "checkpoints" / f"step-{step:08d}", 0, step)
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in state.weights.items()}


def test_a_stage_that_is_lost_with_its_donor_cannot_be_rebuilt(tmp_path: Path) -> None:
    config = tiny(tmp_path, fleet={"spares": 2}, **PLUS)
    record = train(config, [Fault(step=5, stage=0), Fault(step=5, stage=1)])
    assert ending(record).outcome == "cannot"
    assert "stage 0 requires stage 1, which is also lost" in ending(record).reason
