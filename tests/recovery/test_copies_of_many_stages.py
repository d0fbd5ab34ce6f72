"""Copies of many stages at one host: a parity of all block stages at stage 0 restores any one of them, bit for bit.

The strategy exists here only: it shows that engines deliver messages of several stages to one, version by version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.packing import pack, unpack
from planaria.models.state import StageShapes, StageState
from planaria.recovery import RECOVERIES
from planaria.recovery.base import (
    Copy,
    CopyCost,
    DamagedReplica,
    Holder,
    Moment,
    Original,
    RebuildInputs,
    Recovery,
    Sender,
    StrategyPlan,
)
from planaria.recovery.checkfree_plus import MirrorSender
from support.tiny_engine import Recipe, engine_of, lose, losses, whole


class Parity(Recovery):
    """Block stages are equal in size, so their packed states are too; stage 0 keeps the XOR of all."""

    def copies(self, stages: int) -> tuple[Copy, ...]:
        return (Copy(tuple(range(1, stages + 1)), 0),)

    def sender(self, copy: Copy, stage: int) -> Sender:
        return MirrorSender(lambda name: True, every=1, moments=True)

    def holder(self, copy: Copy, originals: Mapping[int, Original]) -> Holder:
        assert originals.keys() == set(copy.sources)
        return ParityHolder(copy.sources)

    def cost(self, copy: Copy, shapes: Mapping[int, StageShapes]) -> CopyCost:
        raise NotImplementedError

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        if 0 in lost or len(lost) > 1 or not replica.staleness[0]:
            return StrategyPlan(refused=dict.fromkeys(lost, "one block stage at most comes back from a whole parity"))
        others = [stage for stage in range(replica.stages + 1) if stage not in lost]
        return StrategyPlan({stage: tuple(others) for stage in lost})

    def donate(self, lost: int, own: StageState, kept: Mapping[Copy, StageState]) -> StageState:
        for parity in kept.values():
            return parity
        return StageState({"bytes": pack(own.trained)})

    def rebuild(self, stage: int, donated: Mapping[int, StageState], inputs: RebuildInputs) -> StageState:
        return unpack(xored(part.weights["bytes"] for part in donated.values()))


def xored(parts: Any) -> Tensor:
    found, *others = parts
    for other in others:
        found = found ^ other
    return found


class ParityHolder:
    def __init__(self, sources: tuple[int, ...]) -> None:
        self._sources, self._held = set(sources), torch.empty(0, dtype=torch.uint8)
        self._pending: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def restart(self) -> None: ...

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("after",)

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        assert source in self._sources - self._pending.keys()
        self._pending[source] = message

    def on_forward_output(self, microbatch: int, x: Tensor) -> None: ...

    def commit(self, step: int) -> None:
        assert self._pending.keys() == self._sources, "a step is committed when all have sent"
        self._held = xored(self._pending.values())
        self._pending.clear()

    def drop(self) -> None:
        self._pending.clear()

    def state(self) -> StageState:
        return StageState({"bytes": self._held})


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECOVERIES.shipped, "parity", Parity)


def parity_engine(config: Recipe, **sections: Any) -> ReferenceEngine:
    return engine_of(config(recovery={"strategy": "parity"}, optim={"weight_decay": 0.1, "clip": 0.5}, **sections))


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_any_block_stage_is_restored_from_the_others_and_their_parity(lost: int, config: Recipe) -> None:
    disturbed, undisturbed = parity_engine(config), parity_engine(config)
    assert losses(disturbed, 3) == losses(undisturbed, 3)
    assert lose(disturbed, lost).reason == ""
    assert whole(disturbed) == whole(undisturbed)
    assert losses(disturbed, 2) == losses(undisturbed, 2)
    assert lose(disturbed, 5 - lost).reason == "", "the next one too: the rebuilt stage has sent again"
    assert whole(disturbed) == whole(undisturbed)


def test_a_lost_parity_is_invalid_until_all_have_sent_again(config: Recipe) -> None:
    engine = parity_engine(config)
    losses(engine, 2)
    engine.load_states({0: engine.runners[0].state()})
    assert "whole parity" in lose(engine, 2).reason


NORMS = st.none() | st.floats(0, 1e30)


def made(seed: int, clock: int, norm: float | None) -> StageState:
    generator = torch.Generator().manual_seed(seed)
    w, m, v = (torch.randn(3, 5, generator=generator) for _ in range(3))
    return StageState({"w": w}, {"w": {"exp_avg": m, "exp_avg_sq": v}}, {"w": clock}, 1.0 + clock, norm, norm)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True), st.data())
def test_a_parity_restores_any_state_bit_for_bit(seeds: list[int], data: st.DataObject) -> None:
    """With any clocks and norms: all headers have the same length."""
    states = {seed: made(seed, data.draw(st.integers(1, 1 << 62)), data.draw(NORMS)) for seed in seeds}
    lost = data.draw(st.sampled_from(seeds))
    parity = StageState({"bytes": xored(pack(each) for each in states.values())})
    given_ = {seed: Parity().donate(lost, each, {}) for seed, each in states.items() if seed != lost}
    rebuilt = Parity().rebuild(lost, {**given_, -1: unpack(pack(parity))}, RebuildInputs(dict, (0.9, 0.999)))
    assert torch.equal(pack(rebuilt), pack(states[lost]))
