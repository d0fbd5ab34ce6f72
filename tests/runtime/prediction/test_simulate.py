"""The simulator of pipelines: queueing, bytes, the bubble, deadlocks and shadows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import NetworkConfig
from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import UNIT, Costs
from planaria.pipeline.plan.actions import Key, StepPlan
from planaria.pipeline.plan.build import plan_routes
from planaria.pipeline.plan.simulation import SimulatedStep
from planaria.runtime.prediction.simulate import simulate

both = MessageBytes.both

MIXED = [(0, 1, 2, 3, 0), (0, 2, 1, 3, 0), (0, 1, 3, 0), (0, 3, 2, 0)] * 3
NETWORK = NetworkConfig(forward_s=[0.5, 1.0, 1.5, 0.7], backward_s=[1.0, 2.0, 3.0, 1.4], latency_s=0.3, bandwidth=2.0)
PRICES = Costs(NETWORK)


def ready_times(plan: StepPlan, result: SimulatedStep, message_bytes: int) -> dict[Key, float]:
    """When each action could have begun at the earliest, recomputed from what else happened: queueing by hand."""
    ends = {span.key: span.end for spans in result.spans.values() for span in spans}
    actions = [action for listed in plan.actions.values() for action in listed]
    arrivals: dict[Key, float] = {}
    links = {(a.source, a.node) for a in actions if a.source is not None}
    for link in links:
        free = 0.0
        receivers = [(ends[a.input_key], a) for a in actions if (a.source, a.node) == link and a.input_key]
        for sent, action in sorted(receivers, key=lambda pair: pair[0]):
            free = max(free, sent) + message_bytes / 2.0
            arrivals[action.key] = free + 0.3
    return {a.key: max([arrivals.get(a.key, 0.0), *(ends[k] for k in a.after)]) for a in actions}


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_workers_never_idle_beside_ready_work_and_prefer_their_lists(order: str) -> None:
    plan = plan_routes(MIXED, order, 5)
    result = simulate(plan, PRICES, both(1))
    assert result == simulate(plan, PRICES, both(1))
    ready = ready_times(plan, result, 1)
    for stage, spans in result.spans.items():
        place = {action.key: n for n, action in enumerate(plan.actions[stage])}
        free = 0.0
        for n, (key, start, end) in enumerate(spans):
            assert start >= max(free, ready[key]) - 1e-6
            assert end - start == pytest.approx(PRICES.compute(key.kind, stage, key.hop))
            for other, *_ in spans[n + 1 :]:  # what ran later was not ready, or stands further back in the list
                assert ready[other] > start - 1e-6 or place[other] > place[key]
            assert start == pytest.approx(max(free, min(ready[span.key] for span in spans[n:])))
            free = end
    assert result.step_s == max(spans[-1].end for spans in result.spans.values())


def test_at_most_in_flight_microbatches_are_alive() -> None:
    for in_flight in (1, 2, 5):
        result = simulate(plan_routes(MIXED, "gpipe", in_flight), PRICES, both(1))
        spans = {span.key: span for span in result.spans[0]}
        lives = [(spans[Key("forward", i, 0)].start, spans[Key("backward", i, 0)].end) for i in range(len(MIXED))]
        assert max(sum(start_s <= start < end_s for start_s, end_s in lives) for start, _ in lives) == in_flight


def test_the_directions_of_a_link_queue_independently() -> None:
    plan = plan_routes([(0, 1, 0)] * 2, "gpipe", 2)
    costs = Costs(NetworkConfig(latency_s=1.0, bandwidth=1.0))
    result = simulate(plan, costs, both(3))
    # Two messages of 3 s and 1 s latency leave at 0; each of the three further ways adds 4 s; the queue is paid once.
    assert result.step_s == 3 + 4 * 4
    assert result.sent_bytes == {(0, 1): 12, (1, 0): 12}


def test_bytes_follow_the_routes() -> None:
    result = simulate(plan_routes([(0, 1, 2, 0), (0, 2, 0)], "1f1b", 2), UNIT, both(10))
    # Forward and backward of the first make the ring both ways; the second adds a return trip in either direction.
    assert result.sent_bytes == {(0, 1): 10, (1, 0): 10, (1, 2): 10, (2, 1): 10, (0, 2): 30, (2, 0): 30}


def test_bubble_of_gpipe() -> None:
    stages, microbatches = 4, 8
    costs = Costs(NetworkConfig(forward_s=[0.0] + [1.0] * 4, backward_s=[0.0] + [2.0] * 4))
    result = simulate(plan_routes([(0, 1, 2, 3, 4, 0)] * microbatches, "gpipe", microbatches), costs, both(0))
    assert result.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert result.busy[0] == 0
    assert result.idle[2] == pytest.approx(1 - result.busy[2])


def test_a_deadlock_names_the_stuck_actions() -> None:
    plan = plan_routes([(0, 1, 2, 0)], "1f1b", 1)
    needs = {"forward": (Key("forward", 1, 2),)}
    waiting = tuple(replace(a, after=needs[a.kind]) if a.kind in needs else a for a in plan.actions[2])
    stuck = r"F0\.2←1→0 at stage 2 waits for \('forward', 1, 2\), which is not in the plan"
    with pytest.raises(UserError, match=stuck):
        simulate(replace(plan, actions=plan.actions | {2: waiting}), UNIT, both(0))


@pytest.mark.slow
def test_the_simulation_takes_linear_time() -> None:
    """A plan of 200 stages and 200 microbatches, 80,000 actions, is a matter of a second."""
    result = simulate(plan_routes([(0, *range(1, 201), 0)] * 200, "gpipe", 200), UNIT, both(0))
    assert result.step_s == (200 + 200) * 3


def test_a_shadow_occupies_its_worker_and_delays_no_other() -> None:
    """Stage 1 sends on before it computes for stage 2; with a second microbatch, that one waits for it."""
    network = NetworkConfig(forward_s=[0.0, 1.0, 4.0], backward_s=[0.0])
    route = (0, 1, 2, 0)
    alone = simulate(plan_routes([route], "1f1b", 1), Costs(network, {1: 2}), both(0))
    assert alone.step_s == pytest.approx(5.0)
    plain, shadowed = (simulate(plan_routes([route] * 2, "gpipe", 2), Costs(network, s), both(0)) for s in ({}, {1: 2}))
    assert plain.starts[1][:2] == pytest.approx([0.0, 1.0])
    assert shadowed.starts[1][:2] == pytest.approx([0.0, 5.0])
    assert shadowed.starts[2][0] == plain.starts[2][0] == pytest.approx(1.0)


def test_messages_of_all_senders_share_an_inbound_link() -> None:
    """Stage 1 gets one activation and one gradient at the same time; each takes a second."""
    plan = plan_routes([(0, 1, 0)], "1f1b", 1)
    for inbound, step_s in (("each", 4.0), ("shared", 4.0)):
        network = NetworkConfig(bandwidth=1.0, inbound=inbound)
        assert simulate(plan, Costs(network), both(1)).step_s == step_s
    crossing = plan_routes([(0, 1, 2, 0), (0, 2, 1, 0)], "gpipe", 2)
    apart, shared = (
        simulate(crossing, Costs(NetworkConfig(bandwidth=1.0, inbound=inbound)), both(1)).step_s
        for inbound in ("each", "shared")
    )
    assert apart < shared


def test_legs_of_different_sizes_take_their_own_times() -> None:
    plan = plan_routes([(0, 1, 0)], "1f1b", 1)
    result = simulate(plan, Costs(NetworkConfig(bandwidth=1.0)), MessageBytes(5, 3))
    assert result.step_s == 2 * 5 + 2 * 3
    assert result.sent_bytes == {(0, 1): 5 + 3, (1, 0): 5 + 3}
