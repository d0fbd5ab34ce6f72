"""Copies that recovery strategies keep: they change no loss, restore as promised, and are lost with their host."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.common.errors import UserError
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.state import StageState
from planaria.pipeline.plan.build import build_plan
from planaria.pipeline.routing import routes
from planaria.recovery.chain import ChainPlan
from planaria.runtime.prediction.copy_costs import costs_of_copies
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.resolved_run import ResolvedRun
from support.schedules import on_schedule, shape
from support.tiny_engine import Recipe, config_in, engine_of, lose, losses, raw, whole

CLOCKED = {"warmup": 5, "schedule": "cosine", "weight_decay": 0.1, "clip": 0.5}
"""an optimizer to which it matters which step it is, how often it has stepped, and what norms it saw"""
SWAPPED = {"kind": "swapped"}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "recovery",
    [
        {"strategy": "redundant"},
        {"strategy": "redundant", "options": {"forward": False}},
        {"strategy": "snapshot", "options": {"tolerate": 2}},
        {"strategy": "echo", "options": {"bits": 2, "every": 3}},
        {"strategy": "identity, checkpoint"},
        {"strategy": "checkfree_plus", "options": {"mirror_moments": True}},
        {"strategy": "checkfree_plus, echo, redundant, checkpoint", "options": {"mirror_every": 3, "distance": 2}},
    ],
    ids=lambda recovery: recovery["strategy"],
)
def test_copies_change_no_loss(recovery: dict[str, Any], config: Recipe) -> None:
    routing = SWAPPED if "plus" in recovery["strategy"] else {}
    plain = engine_of(config(routing=routing, optim=CLOCKED))
    keeping = engine_of(config(routing=routing, optim=CLOCKED, recovery=recovery))
    assert losses(keeping, 6) == losses(plain, 6)
    assert whole(keeping) == whole(plain)
    assert (keeping.copy_bytes > 0) == (recovery["strategy"] != "identity, checkpoint")
    assert plain.copy_bytes == 0


# ---- redundant


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("stages", "forward"), [([0], True), ([1], False), ([4], True), ([1, 3], True), ([0, 2], False)]
)
def test_redundant_copies_are_restored_bit_for_bit(stages: list[int], forward: bool, config: Recipe) -> None:
    recipe = config(optim=CLOCKED, recovery={"strategy": "redundant", "options": {"forward": forward}})
    disturbed, undisturbed = engine_of(recipe), engine_of(recipe)
    for engine in (disturbed, undisturbed):
        for stage in stages:  # as if it had been rebuilt before
            engine.runners[stage].lr_scale = 1.1
        losses(engine, 3)
    assert lose(disturbed, *stages).reason == ""
    assert whole(disturbed) == whole(undisturbed)
    assert losses(disturbed, 5) == losses(undisturbed, 5)
    assert whole(disturbed) == whole(undisturbed)


def test_a_redundant_copy_follows_the_new_holder_of_its_stage(config: Recipe) -> None:
    engine = engine_of(config(recovery={"strategy": "redundant"}))
    losses(engine, 2)
    engine.load_states({2: StageState(engine.runners[3].state().weights, lr_scale=1.1)})
    losses(engine, 1)
    before = whole(engine)
    lose(engine, 2)
    assert whole(engine) == before


# ---- checkfree_plus


@pytest.mark.parametrize("tied", [True, False])
def test_mirrored_stage_0_is_restored_byte_for_byte(tied: bool, config: Recipe) -> None:
    recipe = config(model={"tied": tied}, routing=SWAPPED, optim=CLOCKED, recovery={"strategy": "checkfree_plus"})
    engine = engine_of(recipe)
    for _ in range(3):
        losses(engine, 1)
        before = raw(engine.runners[0].state())
        assert lose(engine, 0) == ChainPlan({0: ("checkfree_plus", (1, 4))}, None, "")
        weights, *rest = raw(engine.runners[0].state())
        assert weights == before[0]
        assert rest == [{}, {}, 1.0, None, None], "without mirrored moments the optimizer restarts"


@pytest.mark.parametrize("tied", [True, False])
def test_with_mirrored_moments_stage_0_continues_undisturbed(tied: bool, config: Recipe) -> None:
    recovery = {"strategy": "checkfree_plus", "options": {"mirror_moments": True}}
    recipe = config(model={"tied": tied}, routing=SWAPPED, optim=CLOCKED, recovery=recovery)
    disturbed, undisturbed = engine_of(recipe), engine_of(recipe)
    for engine in (disturbed, undisturbed):
        losses(engine, 4)
    lose(disturbed, 0)
    assert whole(disturbed) == whole(undisturbed)
    assert losses(disturbed, 5) == losses(undisturbed, 5)


def test_outer_stages_become_copies_of_their_partners(config: Recipe) -> None:
    engine = engine_of(config(routing=SWAPPED, recovery={"strategy": "checkfree_plus"}))
    losses(engine, 2)
    assert lose(engine, 1, 4).rebuilt == {1: ("checkfree_plus", (2,)), 4: ("checkfree_plus", (3,))}
    for stage, partner in ((1, 2), (4, 3)):
        weights, *rest = raw(engine.runners[stage].state())
        assert weights == raw(engine.runners[partner].state())[0]
        assert rest == [{}, {}, 1.1, None, None]
    assert math.isfinite(engine.train_step().loss)


# ---- echo


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.002), (4, 0.006), (2, 0.03)])
def test_an_echo_is_near_its_stage(bits: int, worst: float, config: Recipe) -> None:
    """Near the weights sent last, that is without the last update."""
    engine = engine_of(config(recovery={"strategy": "echo", "options": {"bits": bits, "every": 1}}, optim={"lr": 1e-4}))
    losses(engine, 6)
    sent = {s: {n: w.clone() for n, w in runner.state().weights.items()} for s, runner in engine.runners.items()}
    losses(engine, 1)
    for stage, weights in sent.items():
        disturbed = copy.deepcopy(engine)
        lose(disturbed, stage)
        echo = disturbed.runners[stage].state()
        assert raw(echo)[1:] == ({}, {}, 1.0, None, None)
        error = torch.cat([(echo.weights[name] - weight).flatten() for name, weight in weights.items()])
        assert error.norm() < worst * torch.cat([weight.flatten() for weight in weights.values()]).norm()


def test_two_adjacent_stages_survive_with_more_distant_echoes(config: Recipe) -> None:
    plans = {}
    for distance in (1, 2):
        engine = engine_of(config(recovery={"strategy": "echo", "options": {"every": 2, "distance": distance}}))
        losses(engine, 3)
        plans[distance] = lose(engine, 2, 3)
    assert plans[2] == ChainPlan({2: ("echo", (4,)), 3: ("echo", (0,))}, None, "")
    assert losses(engine, 2)[-1] < math.log(257) + 0.5
    assert plans[1].reason == "echo cannot rebuild it: stage 2's echo was at stage 3, which is lost too"


# ---- all that is kept


@pytest.mark.parametrize(
    ("recovery", "original", "host", "steps"),
    [
        ({"strategy": "redundant"}, 2, 1, 1),
        ({"strategy": "echo", "options": {"every": 3}}, 2, 3, 3),
        ({"strategy": "checkfree_plus"}, 0, 1, 1),
        ({"strategy": "checkfree_plus", "options": {"mirror_every": 3}}, 0, 4, 1),
    ],
    ids=lambda value: value["strategy"] if isinstance(value, dict) else str(value),
)
def test_copies_of_a_dead_host_are_lost_until_sent_again(
    recovery: dict[str, Any], original: int, host: int, steps: int, config: Recipe
) -> None:
    engine = engine_of(config(routing=SWAPPED, recovery=recovery))
    losses(engine, 3)
    before = whole(engine)[host]
    assert lose(engine, host).reason == ""
    if "redundant" in recovery["strategy"]:
        assert whole(engine)[host] == before, "its own state is kept elsewhere"
    if recovery["strategy"] != "echo":  # which allots its memory at once
        assert engine.copies[host].nbytes == 0
    for _ in range(steps):
        untouched = whole(engine)
        assert "is incomplete" in engine.lose([original]).reason
        assert whole(engine) == untouched
        losses(engine, 1)
    weights = raw(engine.runners[original].state())[0]
    assert lose(engine, original).reason == ""
    if recovery["strategy"] != "echo" and "mirror_moments" not in recovery.get("options", {}):
        assert raw(engine.runners[original].state())[0] == weights


def half_a_step(engine: ReferenceEngine) -> None:
    """Do a step without its commit, then drop it, as when another worker dies."""
    pipeline = engine.config.pipeline
    engine._deliver("before")
    plan = build_plan(pipeline, routes(engine.config, engine.step))
    engine._run_plan(plan, engine._train, engine.step * pipeline.samples, train=True)
    for runner in engine.runners.values():
        runner.finish()
    engine._deliver("after")
    for stage, runner in engine.runners.items():
        runner.drop()
        engine.copies[stage].drop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recovery",
    [
        {"strategy": "redundant"},
        {"strategy": "snapshot"},
        {"strategy": "echo", "options": {"bits": 4, "every": 2}},
        {"strategy": "checkfree_plus, checkpoint", "options": {"mirror_moments": True}},
    ],
    ids=lambda recovery: recovery["strategy"],
)
def test_a_dropped_step_leaves_copies_unchanged(recovery: dict[str, Any], config: Recipe) -> None:
    recipe = config(routing=SWAPPED, optim=CLOCKED, recovery=recovery)
    troubled, undisturbed = engine_of(recipe), engine_of(recipe)
    for committed in range(4):
        before = whole(troubled)
        for _ in range(committed % 3):
            half_a_step(troubled)
        assert whole(troubled) == before
        assert losses(troubled, 1) == losses(undisturbed, 1)
        disturbed, other = copy.deepcopy(troubled), copy.deepcopy(undisturbed)
        half_a_step(disturbed)
        for engine in (disturbed, other):
            lose(engine, 0)
        assert whole(disturbed) == whole(other)


def test_copies_take_the_stated_memory(config: Recipe) -> None:
    """A redundant copy has weights and moments, 12 bytes a parameter; an echo 2, at either side."""
    for strategy, each in (("redundant", 12), ("echo", 4), ("checkfree", 0)):
        engine = engine_of(config(recovery={"strategy": strategy}))
        losses(engine, 2)
        parameters = sum(p.numel() for runner in engine.runners.values() for p in runner.parameters.values())
        assert sum(copies.nbytes for copies in engine.copies.values()) == each * parameters


@pytest.mark.parametrize(
    ("recovery", "messages"),
    [
        ({"strategy": "redundant"}, 5),
        ({"strategy": "checkfree_plus", "options": {"mirror_moments": True}}, 2),
        ({"strategy": "echo", "options": {"every": 3}}, 0),
    ],
    ids=["redundant", "checkfree_plus", "echo"],
)
def test_copies_send_the_stated_bytes_and_headers(recovery: dict[str, Any], messages: int, config: Recipe) -> None:
    """A header has each tensor's name, type, shape, place and digest, within 200 bytes; echoes have none."""
    recipe = config(routing=SWAPPED, recovery=recovery)
    engine = engine_of(recipe)
    losses(engine, 3)
    first = engine.copy_bytes
    losses(engine, 6)
    sent = (engine.copy_bytes - first) / 6
    stated = sum(len(copy.sources) * cost.step_bytes for copy, cost in costs_of_copies(ResolvedRun(recipe)))
    tensors = 3 * max(len(runner.parameters) for runner in engine.runners.values()) + 3
    assert round(stated) <= sent <= round(stated) + 200 * tensors * messages


# ---- stages with several nodes: the first node of each sends and keeps for all of them


REDUNDANT: dict[str, Any] = {"strategy": "redundant"}


def scheduled(folder: Path, recovery: dict[str, Any]) -> ReferenceEngine:
    """Two nodes to each of four block stages, and two data nodes."""
    return engine_of(on_schedule(config_in(folder, recovery=recovery, **shape(0.5)), folder))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_stage_without_nodes_is_restored_from_its_copy(stage: int, tmp_path: Path) -> None:
    disturbed, undisturbed = scheduled(tmp_path, REDUNDANT), scheduled(tmp_path, REDUNDANT)
    plain = scheduled(tmp_path, {"strategy": "checkfree"})
    assert losses(disturbed, 2) == losses(undisturbed, 2) == losses(plain, 2), "what is kept changes no loss"
    assert lose(disturbed, *disturbed.active_nodes.nodes(stage)).reason == ""
    assert whole(disturbed) == whole(undisturbed)
    assert losses(disturbed, 3) == losses(undisturbed, 3)


def test_a_copy_is_lost_with_the_node_that_kept_it(tmp_path: Path) -> None:
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    host, second = engine.active_nodes.nodes(1)
    assert engine.copies[second].nbytes == 0 < engine.copies[host].nbytes
    assert "is incomplete" in lose(engine, host, *engine.active_nodes.nodes(2)).reason
    engine = scheduled(tmp_path, REDUNDANT)
    losses(engine, 2)
    assert lose(engine, host).reason == "", "it is copied from the other node of its stage"
    losses(engine, 1)
    before = whole(engine)
    assert lose(engine, *engine.active_nodes.nodes(2)).reason == "" and whole(engine) == before, (
        "and keeps a twin again"
    )


def test_copies_need_one_replica_and_partners_need_swapped_routes(tmp_path: Path) -> None:
    for strategy in ("redundant", "echo, checkpoint"):
        check(on_schedule(config_in(tmp_path, recovery={"strategy": strategy}, **shape(0.5)), tmp_path))
    with pytest.raises(UserError, match="a lost stage is copied from another replica"):
        check(config_in(tmp_path, recovery=REDUNDANT, exchange={"replicas": 2, "kind": "noloco"}))
    swapped = {"routing": {**shape(0.5)["routing"], "kind": "swapped"}, "recovery": {"strategy": "checkfree_plus"}}
    with pytest.raises(UserError, match=r"needs routing.kind = 'swapped', not 'a schedule'"):
        check(on_schedule(config_in(tmp_path, **{**shape(0.5), **swapped}), tmp_path))
