"""GPU predictions are consistent, and follow from the formulas that measurements use."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks.harness import saved

from benchmarks import gpu as predicted
from planaria.config import recipe, shipped
from planaria.config.schema import ModelConfig, RunConfig
from planaria.models.llama_stages import flops_per_token
from planaria.pipeline.plan.simulation import PlanSimulation
from planaria.runtime.resolved_run import ResolvedRun

GIVEN = predicted.flags().parse_args([])


@pytest.mark.parametrize("model", [recipe.load(shipped.find(name), {}).model for name in predicted.PRESETS])
def test_the_stages_flops_add_up_to_the_models(model: ModelConfig) -> None:
    for own, stages in ((0, 3), (3, 3), (0, 6)):
        cut = model.model_copy(update={"ends_layers": own})
        flops = predicted.stage_flops(cut, stages)
        assert len(flops) == stages + 1 and min(flops) > 0
        assert sum(flops) == pytest.approx(flops_per_token(model))


@pytest.fixture(scope="module", params=["llama_124m", "llama_1_5b"])
def config(request: pytest.FixtureRequest) -> RunConfig:
    return predicted.predicted_preset(request.param, GIVEN)


def test_passes_have_the_given_utilisation(config: RunConfig) -> None:
    network, tokens = config.network, config.pipeline.microbatch_size * config.model.context
    passes = sum(network.forward_s) + sum(network.backward_s)
    assert flops_per_token(config.model) * tokens / passes == pytest.approx(0.45 * 989e12)


def test_one_device_serves_one_process_and_one_copy_per_direction_at_a_time(config: RunConfig) -> None:
    resolved = ResolvedRun(config)
    prices, plan = resolved.prices, resolved.training(0)
    clock = predicted.OneDevice(plan, prices)
    step = clock.run()
    spans = sorted((clock.starts[n], clock.ends[n]) for ran in clock.ran.values() for n in ran)
    assert len(spans) == sum(map(len, plan.actions.values()))
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(spans))
    sent = sum(clock.messages.values())
    assert step >= max(sum(end - start for start, end in spans), sent * prices.staging)
    assert set(clock.copied_off) == set(clock.copied_onto) == {0}


def test_overlapped_copies_are_faster_and_predictions_respect_their_limit(config: RunConfig) -> None:
    name = next(name for name in predicted.PRESETS if config.name == name)
    _, separate, separate_control, shared, shared_control = [
        row.value for row in predicted.predicted_rows_of(name, GIVEN)
    ]
    assert 1 > shared > shared_control > 0 and predicted.WORKERS > separate > separate_control > shared
    free = GIVEN.__class__(**vars(GIVEN) | {"staging": 1e9, "link": 1e9})
    unhindered = predicted.predicted_step_s(predicted.predicted_preset(name, free), PlanSimulation, overlap=True)
    assert unhindered < predicted.predicted_step_s(config, PlanSimulation, overlap=True)
    assert predicted.predicted_rows_of(name, free)[3].value == pytest.approx(1, abs=1e-3)


def test_the_saved_numbers_are_the_predictions() -> None:
    record = saved("gpu_predicted")
    rows = [row for name in predicted.PRESETS for row in predicted.predicted_rows_of(name, GIVEN)]
    assert {row["what"]: row["value"] for row in record["rows"]} == pytest.approx({row.what: row.value for row in rows})
    assert "not measured" in record["notes"][0]
