"""What strategies keep, at work: copies cost no accuracy, come back as promised, and are gone with their host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import engine_of, losses

from planaria.config.schema import RunConfig
from planaria.lab.inline.engine import InlineEngine
from planaria.models.state import StageState
from planaria.pipeline.plan.build import plan_for
from planaria.pipeline.routing import routes
from planaria.recovery.chain import Plan
from planaria.runtime.engine.copy_costs import costs_of_copies
from planaria.runtime.engine.resolved import ResolvedRun

Recipe = Callable[..., RunConfig]
CLOCKED = {"warmup": 5, "schedule": "cosine", "weight_decay": 0.1, "clip": 0.5}
"""an optimizer to which it matters which step it is, how often it has stepped, and what norms it saw"""
SWAPPED = {"kind": "swapped"}


def raw(state: StageState) -> tuple[Any, ...]:
    """A stage's state, bit for bit."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in state.weights.items()}
    moments = {name: [t.numpy().tobytes() for t in pair.values()] for name, pair in state.moments.items()}
    return weights, moments, state.clocks, state.lr_scale, state.grad_norm, state.clipped_norm


def everything(engine: InlineEngine) -> dict[int, tuple[Any, ...]]:
    return {stage: raw(runner.state()) for stage, runner in engine.runners.items()}


def lose(engine: InlineEngine, *stages: int) -> Plan:
    """Lose ``stages`` for good: whatever comes back cannot come from the weights that were there."""
    for stage in stages:
        for parameter in engine.runners[stage].parameters.values():
            parameter.detach().fill_(math.nan)
    return engine.lose(stages)


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
def test_what_is_kept_changes_no_loss(recovery: dict[str, Any], config: Recipe) -> None:
    routing = SWAPPED if "plus" in recovery["strategy"] else {}
    plain = engine_of(config(routing=routing, optim=CLOCKED))
    keeping = engine_of(config(routing=routing, optim=CLOCKED, recovery=recovery))
    assert losses(keeping, 6) == losses(plain, 6)
    assert everything(keeping) == everything(plain)
    assert (keeping.parcel_bytes > 0) == (recovery["strategy"] != "identity, checkpoint")
    assert plain.parcel_bytes == 0


# ---- redundant


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("stages", "forward"), [([0], True), ([1], False), ([4], True), ([1, 3], True), ([0, 2], False)]
)
def test_twins_come_back_bit_for_bit(stages: list[int], forward: bool, config: Recipe) -> None:
    recipe = config(optim=CLOCKED, recovery={"strategy": "redundant", "options": {"forward": forward}})
    struck, untroubled = engine_of(recipe), engine_of(recipe)
    for engine in (struck, untroubled):
        for stage in stages:  # as if it had been reborn before
            engine.runners[stage].lr_scale = 1.1
        losses(engine, 3)
    assert lose(struck, *stages).reason == ""
    assert everything(struck) == everything(untroubled)
    assert losses(struck, 5) == losses(untroubled, 5)
    assert everything(struck) == everything(untroubled)


def test_a_twin_follows_the_new_holder_of_its_original(config: Recipe) -> None:
    engine = engine_of(config(recovery={"strategy": "redundant"}))
    losses(engine, 2)
    engine.become({2: StageState(engine.runners[3].state().weights, lr_scale=1.1)})
    losses(engine, 1)
    before = everything(engine)
    lose(engine, 2)
    assert everything(engine) == before


def test_neighbouring_twins_are_lost_together(config: Recipe) -> None:
    engine = engine_of(config(recovery={"strategy": "redundant"}))
    losses(engine, 2)
    assert engine.lose([2, 3]) == Plan(
        {2: ("redundant", (1,))}, None, "redundant cannot, stage 3's twin was at stage 2, which is lost too"
    )


# ---- checkfree_plus


@pytest.mark.parametrize("tied", [True, False])
def test_mirrored_ends_come_back_byte_for_byte(tied: bool, config: Recipe) -> None:
    recipe = config(model={"tied": tied}, routing=SWAPPED, optim=CLOCKED, recovery={"strategy": "checkfree_plus"})
    engine = engine_of(recipe)
    for _ in range(3):
        losses(engine, 1)
        before = raw(engine.runners[0].state())
        assert lose(engine, 0) == Plan({0: ("checkfree_plus", (1, 4))}, None, "")
        weights, *rest = raw(engine.runners[0].state())
        assert weights == before[0]
        assert rest == [{}, {}, 1.0, None, None], "without mirrored moments the optimizer starts anew"


@pytest.mark.parametrize("tied", [True, False])
def test_with_mirrored_moments_the_ends_go_on_as_if_nothing_had_been(tied: bool, config: Recipe) -> None:
    recovery = {"strategy": "checkfree_plus", "options": {"mirror_moments": True}}
    recipe = config(model={"tied": tied}, routing=SWAPPED, optim=CLOCKED, recovery=recovery)
    struck, untroubled = engine_of(recipe), engine_of(recipe)
    for engine in (struck, untroubled):
        losses(engine, 4)
    lose(struck, 0)
    assert everything(struck) == everything(untroubled)
    assert losses(struck, 5) == losses(untroubled, 5)


def test_seldom_mirrored_ends_come_back_as_they_were_when_last_mirrored(config: Recipe) -> None:
    recovery = {"strategy": "checkfree_plus", "options": {"mirror_every": 3, "mirror_moments": True}}
    engine = engine_of(config(routing=SWAPPED, optim=CLOCKED, recovery=recovery))
    history = []
    for committed, mirrored in [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 6), (7, 6)]:
        losses(engine, 1)
        history.append(raw(engine.runners[0].state()))
        struck = copy.deepcopy(engine)
        lose(struck, 0)
        assert raw(struck.runners[0].state()) == history[mirrored - 1], f"after {committed} steps"


def test_outer_stages_become_their_partners(config: Recipe) -> None:
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
def test_an_echo_is_near_what_it_echoes(bits: int, worst: float, config: Recipe) -> None:
    """Near the weights that were sent last: what is lost is theirs, less the last update."""
    engine = engine_of(config(recovery={"strategy": "echo", "options": {"bits": bits, "every": 1}}, optim={"lr": 1e-4}))
    losses(engine, 6)
    sent = {s: {n: w.clone() for n, w in runner.state().weights.items()} for s, runner in engine.runners.items()}
    losses(engine, 1)
    for stage, weights in sent.items():
        struck = copy.deepcopy(engine)
        lose(struck, stage)
        echo = struck.runners[stage].state()
        assert raw(echo)[1:] == ({}, {}, 1.0, None, None)
        error = torch.cat([(echo.weights[name] - weight).flatten() for name, weight in weights.items()])
        whole = torch.cat([weight.flatten() for weight in weights.values()])
        assert error.norm() < worst * whole.norm()


def test_two_neighbours_survive_where_echoes_lie_further_away(config: Recipe) -> None:
    plans = {}
    for distance in (1, 2):
        engine = engine_of(config(recovery={"strategy": "echo", "options": {"every": 2, "distance": distance}}))
        losses(engine, 3)
        plans[distance] = lose(engine, 2, 3)
    assert plans[2] == Plan({2: ("echo", (4,)), 3: ("echo", (0,))}, None, "")
    assert losses(engine, 2)[-1] < math.log(257) + 0.5
    assert plans[1].reason == "echo cannot, stage 2's echo was at stage 3, which is lost too"


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
def test_a_host_that_dies_loses_what_it_kept_until_it_is_whole_again(
    recovery: dict[str, Any], original: int, host: int, steps: int, config: Recipe
) -> None:
    engine = engine_of(config(routing=SWAPPED, recovery=recovery))
    losses(engine, 3)
    before = everything(engine)[host]
    assert lose(engine, host).reason == ""
    if "redundant" in recovery["strategy"]:
        assert everything(engine)[host] == before, "its own state is another's to give"
    if recovery["strategy"] != "echo":  # which allots its memory at once
        assert engine.keeping[host].nbytes == 0
    for _ in range(steps):
        untouched = everything(engine)
        assert "not whole yet" in engine.lose([original]).reason
        assert everything(engine) == untouched
        losses(engine, 1)
    weights = everything(engine)[original][0]
    assert lose(engine, original).reason == ""
    if recovery["strategy"] != "echo" and "mirror_moments" not in recovery.get("options", {}):
        assert everything(engine)[original][0] == weights


def half_a_step(engine: InlineEngine) -> None:
    """All of a step but its commit; then it is dropped, as when some other worker dies."""
    pipeline = engine.config.pipeline
    engine._deliver("before")
    plan = plan_for(pipeline, routes(engine.config, engine.step))
    engine._carry_out(plan, engine._train, engine.step * pipeline.samples, train=True)
    for runner in engine.runners.values():
        runner.finish()
    engine._deliver("after")
    for stage, runner in engine.runners.items():
        runner.drop()
        engine.keeping[stage].drop()


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
def test_a_dropped_step_leaves_what_is_kept_as_it_was(recovery: dict[str, Any], config: Recipe) -> None:
    recipe = config(routing=SWAPPED, optim=CLOCKED, recovery=recovery)
    troubled, untroubled = engine_of(recipe), engine_of(recipe)
    for committed in range(4):
        before = everything(troubled)
        for _ in range(committed % 3):
            half_a_step(troubled)
        assert everything(troubled) == before
        assert losses(troubled, 1) == losses(untroubled, 1)
        struck, other = copy.deepcopy(troubled), copy.deepcopy(untroubled)
        half_a_step(struck)
        for engine in (struck, other):
            lose(engine, 0)
        assert everything(struck) == everything(other)


def test_what_is_kept_takes_memory_as_it_says(config: Recipe) -> None:
    """Weights and moments of a twin: 12 bytes a parameter. An echo: 2, at either side."""
    for strategy, each in (("redundant", 12), ("echo", 4), ("checkfree", 0)):
        engine = engine_of(config(recovery={"strategy": strategy}))
        losses(engine, 2)
        parameters = sum(p.numel() for runner in engine.runners.values() for p in runner.parameters.values())
        assert sum(keeping.nbytes for keeping in engine.keeping.values()) == each * parameters


@pytest.mark.parametrize(
    ("recovery", "messages"),
    [
        ({"strategy": "redundant"}, 5),
        ({"strategy": "checkfree_plus", "options": {"mirror_moments": True}}, 2),
        ({"strategy": "echo", "options": {"every": 3}}, 0),
    ],
    ids=["redundant", "checkfree_plus", "echo"],
)
def test_what_is_sent_is_what_is_stated_and_headers(recovery: dict[str, Any], messages: int, config: Recipe) -> None:
    """Of each tensor its name, type, shape, place and digest, within 200 bytes; echoes have no header at all."""
    recipe = config(routing=SWAPPED, recovery=recovery)
    engine = engine_of(recipe)
    losses(engine, 3)
    first = engine.parcel_bytes
    losses(engine, 6)
    sent = (engine.parcel_bytes - first) / 6
    stated = sum(len(copy.sources) * cost.step_bytes for copy, cost in costs_of_copies(ResolvedRun(recipe)))
    tensors = 3 * max(len(runner.parameters) for runner in engine.runners.values()) + 3
    assert round(stated) <= sent <= round(stated) + 200 * tensors * messages
