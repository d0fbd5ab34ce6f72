"""Random routes, plans and costs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from planaria.config.schema import NetworkConfig
from planaria.pipeline.network.costs import Costs
from planaria.pipeline.plan.actions import Route, StepPlan
from planaria.pipeline.plan.build import plan_routes


@st.composite
def routes(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 6) -> list[Route]:
    """Draw closed routes that skip stages, permute them, and sometimes repeat one."""
    stages = draw(st.integers(1, max_stages))
    walk = st.lists(st.integers(1, stages), min_size=1, max_size=stages + 2)
    found = draw(st.lists(walk, min_size=1, max_size=max_microbatches))
    no_repeats = [[s for hop, s in enumerate(walk) if hop == 0 or s != walk[hop - 1]] for walk in found]
    return [(0, *walk, 0) for walk in no_repeats]


@st.composite
def plans(draw: st.DrawFn, backward: bool | None = None) -> StepPlan:
    chosen = draw(routes())
    order = draw(st.sampled_from(["1f1b", "gpipe"]))
    in_flight = draw(st.integers(1, len(chosen)))
    return plan_routes(chosen, order, in_flight, draw(st.booleans()) if backward is None else backward)


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    seconds = st.lists(st.integers(0, 30).map(lambda n: n / 10), min_size=6, max_size=6)
    staging = draw(st.none() | st.sampled_from([1.0, 2.5, 10.0]))
    return Costs(
        NetworkConfig(
            forward_s=draw(seconds),
            backward_s=draw(seconds),
            latency_s=draw(st.integers(0, 20)) / 10,
            bandwidth=draw(st.none() | st.sampled_from([1.0, 2.5, 10.0])),
            staging_bandwidth=staging,
            overlap=staging is None or draw(st.booleans()),
        )
    )
