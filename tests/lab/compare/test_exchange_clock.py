"""Time and traffic of replicas' exchange by the clock of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.config import shipped
from planaria.config.schema import NetworkConfig, RunConfig
from planaria.lab.compare.clock import activation_bytes, arm_clock, exchanged_bytes, traffic_per_weight_byte, waiting_s
from planaria.lab.compare.race_spec import load
from planaria.models.families import stage_parameters
from support.exchange_recipes import recipe


def largest(config: RunConfig) -> int:
    return max(stage_parameters(config.model, 2, stage) for stage in range(3))


def test_half_the_bytes_take_half_the_time_if_only_links_take_time() -> None:
    """The clock of comparisons and of advice; latencies stay."""
    links = {"latency_s": 0.0, "bandwidth": 1000.0}
    alone = recipe(1).model_copy(update={"network": NetworkConfig.model_validate(links)})
    half = alone.model_copy(update={"pipeline": alone.pipeline.model_copy(update={"wire": "bf16"})})
    assert arm_clock(half).step_s == pytest.approx(arm_clock(alone).step_s / 2)


def test_one_replica_never_waits() -> None:
    alone = recipe(1)
    assert waiting_s(alone) == exchanged_bytes(alone) == 0.0
    assert arm_clock(recipe(4, kind="local")).step_s == arm_clock(alone).step_s


def test_the_largest_stage_determines_the_wait_and_rounds_share_it_among_steps() -> None:
    pairs = recipe(4, kind="noloco", every=20)
    assert waiting_s(pairs) == pytest.approx((4 * largest(pairs) / 1000 + 0.5) / 20)
    every_step = recipe(4, kind="allreduce")
    assert waiting_s(every_step) == pytest.approx(3 * 4 * largest(pairs) / 1000 + 0.5)
    assert arm_clock(pairs).step_s == pytest.approx(arm_clock(recipe(1)).step_s + waiting_s(pairs))


def test_few_bits_shorten_the_wait_and_send_more() -> None:
    plain, coarse = (recipe(4, kind="noloco", every=20, bits=bits) for bits in (32, 8))
    assert waiting_s(coarse) < 0.4 * waiting_s(plain)
    assert exchanged_bytes(coarse) > exchanged_bytes(plain)


def test_activations_count_all_replicas_for_every_exchange() -> None:
    """A ring of three stages, there and back, for two microbatches of one sample in each of four replicas."""
    passed = 4 * 2 * 3 * 2 * (16 * 32 * 4)
    for kind in ("allreduce", "noloco", "local"):
        assert activation_bytes(recipe(4, kind=kind)) == passed
    assert activation_bytes(recipe(1)) == passed / 4


def test_shares_of_weights_match_manual_calculations() -> None:
    assert traffic_per_weight_byte(recipe(4, kind="allreduce")) == 3.0, "each gradient to three others"
    assert traffic_per_weight_byte(recipe(4, kind="diloco", every=20)) == pytest.approx(3 / 20)
    assert traffic_per_weight_byte(recipe(4, kind="noloco", every=20)) == pytest.approx(1 / 20)
    assert traffic_per_weight_byte(recipe(4, kind="local")) == traffic_per_weight_byte(recipe(1)) == 0.0


def test_the_documented_table_of_exchanges_has_the_shares_of_its_recipe() -> None:
    page = (Path(__file__).parents[3] / "docs" / "replicas.md").read_text()
    printed = [line.split("|")[-2].strip() for line in page.splitlines() if line.count("|") == 6 and " % |" in line]
    _, arms = load(shipped.find("exchange"), {})
    known = {f"{100 * traffic_per_weight_byte(arm.config):.3g} %" for arm in arms}
    assert len(printed) == 5 and set(printed) <= known
