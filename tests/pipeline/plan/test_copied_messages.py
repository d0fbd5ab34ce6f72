"""Copies between devices and hosts: simulation, bounds, and refusal where they are not supported."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import NetworkConfig, RunConfig
from planaria.lab.compare.clock import arm_clock
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, MessageCosts
from planaria.pipeline.plan.actions import StepPlan
from planaria.pipeline.plan.build import plan_routes
from planaria.pipeline.plan.plan_bound import lower_bound
from planaria.runtime.prediction.simulate import simulate
from support.random_plans import costs, plans

both = MessageBytes.both


def staged(prices: Costs, bandwidth: float | None, overlap: bool = True) -> Costs:
    return Costs(prices.network.model_copy(update={"staging_bandwidth": bandwidth, "overlap": overlap}))


def straight(stages: int, microbatches: int, in_flight: int | None = None) -> StepPlan:
    return plan_routes([(0, *range(1, stages + 1), 0)] * microbatches, "1f1b", in_flight or microbatches)


def network(**given: Any) -> Costs:
    return Costs(NetworkConfig(forward_s=[0.0, 1.0, 1.0], backward_s=[0.0, 2.0, 2.0], **given))


def test_a_copy_off_and_a_copy_on_lengthen_each_message() -> None:
    """One microbatch, two stages: six messages, and 6 s of passes."""
    assert simulate(straight(2, 1), network(), both(1)).step_s == 6
    for overlap in (True, False):  # a single microbatch always waits for its copies
        step = simulate(straight(2, 1), network(staging_bandwidth=4.0, overlap=overlap), both(1))
        assert step.step_s == 6 + 6 * 2 * 0.25
        assert (
            lower_bound(straight(2, 1), network(staging_bandwidth=4.0, overlap=overlap), both(1)).step_s == step.step_s
        )


def test_short_copies_overlap_with_passes() -> None:
    """A stage's 20 microbatches take 60 s; each has four copies of a quarter second there."""
    plan = straight(2, 20)
    overlapped, blocking = (
        simulate(plan, network(staging_bandwidth=4.0, overlap=overlap), both(1)).step_s for overlap in (True, False)
    )
    plain = simulate(plan, network(), both(1)).step_s
    assert overlapped - plain <= 6 * 2 * 0.25, "at most one microbatch's messages"
    assert blocking >= 20 * (3 + 4 * 0.25)


def test_long_copies_bind_and_each_direction_is_sequential() -> None:
    """With 5 s per copy, a stage's 40 outgoing messages are copied one by one; 40 incoming ones too."""
    plan, prices = straight(2, 20), network(staging_bandwidth=1.0)
    bound, step = lower_bound(plan, prices, both(5)), simulate(plan, prices, both(5))
    assert bound.binds.startswith("copies o") and step.step_s >= bound.step_s >= 200
    assert simulate(plan, network(staging_bandwidth=1.0, overlap=False), both(5)).step_s > 1.5 * step.step_s


def test_a_device_copies_sequentially_for_both_neighbours() -> None:
    """Two messages arrive at stage 3 at the same time over separate links."""
    plan = plan_routes([(0, 1, 3, 0), (0, 2, 3, 0)], "gpipe", 2, backward=False)
    prices = Costs(NetworkConfig(forward_s=[0.0, 1.0, 1.0, 1.0], staging_bandwidth=1.0))
    # Copied off stage 0 at (1, 2), onto the next at (2, 3), computed at (3, 4), onto stage 3 at (5, 6), done at (6, 7).
    assert [(span.start, span.end) for span in simulate(plan, prices, both(1)).spans[3]] == [(5.0, 6.0), (6.0, 7.0)]
    late = Costs(prices.network.model_copy(update={"forward_s": [0.0, 2.0, 1.0, 0.5]}))
    # Both are computed at 4: the first is copied by 6, the second by 7.
    assert [(span.start, span.end) for span in simulate(plan, late, both(1)).spans[3]] == [(6.0, 6.5), (7.0, 7.5)]


@given(plans(), costs(), st.integers(0, 3), st.sampled_from([1.0, 3.0]))
def test_no_execution_with_copies_beats_the_bound(plan: StepPlan, prices: Costs, size: int, bandwidth: float) -> None:
    for overlap in (True, False):
        found = staged(prices, bandwidth, overlap)
        assert simulate(plan, found, both(size)).step_s >= lower_bound(plan, found, both(size)).step_s


@given(plans(), costs(), st.integers(1, 3), st.sampled_from([1.0, 3.0]))
def test_copies_never_lower_the_bound(plan: StepPlan, prices: Costs, size: int, bandwidth: float) -> None:
    none, copied = (lower_bound(plan, staged(prices, rate), both(size)).step_s for rate in (None, bandwidth))
    assert none <= copied


@given(plans(), costs(), st.integers(1, 3), st.sampled_from([1.0, 3.0]))
def test_copies_change_no_passes_or_bytes_and_take_their_time(
    plan: StepPlan, prices: Costs, size: int, bandwidth: float
) -> None:
    plain, beside, stands = (
        simulate(plan, staged(prices, *given), both(size)) for given in ((None,), (bandwidth, True), (bandwidth, False))
    )
    assert plain.sent_bytes == beside.sent_bytes == stands.sent_bytes
    busy = [sum(end - start for spans in one.spans.values() for _, start, end in spans) for one in (plain, beside)]
    assert busy[0] == pytest.approx(busy[1])
    ends = {key: end for spans in beside.spans.values() for key, _, end in spans}
    starts = {key: start for spans in beside.spans.values() for key, start, _ in spans}
    found = MessageCosts(staged(prices, bandwidth), both(size))
    for action in (action for actions in plan.actions.values() for action in actions):
        if action.input_key is not None and action.source is not None:
            took = MessageCosts.seconds(2 * found.staging + found.carry(action.source, action.node, action.kind))
            assert starts[action.key] >= ends[action.input_key] + took - 1e-6
    waited = sum(end - start for spans in stands.spans.values() for _, start, end in spans)
    copies = 2 * sum(plain.sent_bytes.values()) / bandwidth
    assert waited == pytest.approx(busy[0] + copies, abs=1e-6)


def test_without_concurrency_overlap_has_no_effect() -> None:
    plan = straight(2, 6, in_flight=1)
    steps = [simulate(plan, network(staging_bandwidth=4.0, overlap=o), both(1)).step_s for o in (True, False)]
    assert steps == [6 * (6 + 3), 6 * (6 + 3)]


def recipe_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_predictions_include_copies() -> None:
    """Comparisons and advice use the simulator's clock."""
    base = {"forward_s": [1e-3], "backward_s": [2e-3]}
    plain, beside, stands = (
        arm_clock(recipe_of(network=base | more)).step_s
        for more in ({}, {"staging_bandwidth": 1e9}, {"staging_bandwidth": 1e9, "overlap": False})
    )
    assert plain < beside < stands


STAGED = {"network.staging_bandwidth": "5e10"}
PRICED = STAGED | {"network.forward_s": "[0.1]"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"network.overlap": "false"}, r"overlap = false: copies take no time; set network\.staging_bandwidth"),
        (STAGED, r"staging_bandwidth = 5e\+10: .*set network\.forward_s"),
        (PRICED | {"network.emulate": "true"}, r"staging_bandwidth = 5e\+10: an emulated fleet has no devices"),
        (PRICED | {"network.emulate": "links"}, r"staging_bandwidth = 5e\+10: an emulated fleet has no devices"),
        (PRICED | {"network.topology": "x.toml"}, r"staging_bandwidth = 5e\+10: on a topology, .* remove it"),
        (
            PRICED | {"routing.schedule": "x.json"},
            r"staging_bandwidth: a schedule has its own message times.* remove it",
        ),
    ],
)
def test_copies_are_refused_where_they_would_be_ignored(flags: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=rf"network\.{reason}"):
        recipe.load(None, flags)
    assert recipe.load(None, PRICED | {"network.overlap": "false"}).network.staging_bandwidth == 5e10
