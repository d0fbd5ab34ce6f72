"""Predicted memory of stages on CUDA devices, and the settings chosen from it."""

from __future__ import annotations

from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.models.activations import PassMode, block_bytes, ends_bytes
from planaria.runtime.fleet.devices import Device, Inventory
from planaria.runtime.prediction.memory import USABLE, fit_to_memory, fit_to_this_machine, stage_memory

GB = 10**9
H100 = 85 * GB
FIXED = {"network.forward_s": "[]", "network.backward_s": "[]", "train.compile": "true", "train.recompute": "false"}
"""without the costs of the recipes' own cuts"""


def preset(name: str, **settings: object) -> RunConfig:
    flags = {key.replace("__", "."): str(value).lower() for key, value in settings.items()}
    return recipe.load(shipped.find(name), {**FIXED, **flags})


def devices(*gigabytes: int) -> Inventory:
    return Inventory(tuple(Device(f"GPU-{place}", size * GB) for place, size in enumerate(gigabytes)))


MEASURED_MB: list[tuple[str, int, dict[str, Any], float, float]] = [
    ("llama_124m", 3, {"compiled": True}, 2478.6, 337.6),
    ("llama_124m", 3, {"compiled": False}, 2916.4, 337.1),
    ("llama_124m", 3, {"compiled": False, "bf16": False}, 5340.1, 609.2),
    ("llama_124m", 3, {"compiled": True, "recompute": True}, 268.4, 1323.0),
    ("llama_500m", 4, {"compiled": True}, 3393.7, 343.9),
    ("llama_500m", 4, {"compiled": False}, 3964.1, 343.9),
]
"""recipe, layers, settings, bytes that a microbatch kept, and temporary bytes above them; torch 2.11 on an H100"""


@pytest.mark.parametrize(("name", "layers", "settings", "kept", "working"), MEASURED_MB)
def test_a_block_stage_takes_what_was_measured_on_an_h100(
    name: str, layers: int, settings: dict[str, Any], kept: float, working: float
) -> None:
    config = preset(name)
    passes = PassMode(config.pipeline.microbatch_size, H100, **{"bf16": True, **settings})
    found = block_bytes(config.model, layers, passes)
    assert found.kept / 1e6 == pytest.approx(kept, rel=0.01)
    assert found.working / 1e6 == pytest.approx(working, rel=0.15)


@pytest.mark.parametrize(("compiled", "kept", "loss", "working"), [(True, 67, 2231, 0), (False, 67, 200, 3572)])
def test_the_ends_take_what_was_measured_on_an_h100(compiled: bool, kept: float, loss: float, working: float) -> None:
    """Compiled, the loss kept all logits; eager, it ran in chunks."""
    config = preset("llama_124m")
    found = ends_bytes(config.model, PassMode(64, H100, bf16=True, compiled=compiled))
    assert [n / 1e6 for n in found] == pytest.approx([kept, loss, working], rel=0.03)


def test_every_microbatch_in_flight_counts() -> None:
    one, four = (stage_memory(preset("llama_124m", pipeline__in_flight=count), H100) for count in (1, 4))
    assert [a.kept * 4 for a in one[1:]] == [b.kept for b in four[1:]] and one[1].state == four[1].state


def test_the_loss_counts_once_under_1f1b_and_for_each_microbatch_under_gpipe() -> None:
    ends = [stage_memory(preset("llama_124m", pipeline__order=order), H100)[0].kept for order in ("1f1b", "gpipe")]
    assert 7 * 2.2 * GB < ends[1] - ends[0] < 7 * 2.3 * GB


@pytest.mark.parametrize(
    ("sizes", "in_flight", "recompute"),
    [((640,), None, False), ((80,), 5, False), ((40,), 2, False), ((24,), 4, True), ((24, 24, 24), None, True)],
)
def test_microbatches_in_flight_are_reduced_before_activations_are_recomputed(
    sizes: tuple[int, ...], in_flight: int | None, recompute: bool
) -> None:
    config = preset("llama_124m", train__recompute="auto")
    found, line = fit_to_memory(config, devices(*sizes), config.pipeline.stages + 2)
    assert (found.pipeline.in_flight, found.train.recompute) == (in_flight, recompute)
    assert ("pipeline.in_flight = " in line) == (in_flight is not None) and ("recompute" in line) == recompute
    chosen = {**config.pipeline.model_dump(), "in_flight": in_flight}
    assert found.pipeline.model_dump() == chosen, "nothing else changes"


def test_what_is_chosen_fits_the_fullest_device() -> None:
    for name, size in (("llama_124m", 80), ("llama_500m", 80), ("llama_1_5b", 80), ("llama_500m", 40)):
        config = preset(name, train__recompute="auto")
        found, _ = fit_to_memory(config, devices(size), config.pipeline.stages + 1)
        assert sum(one.peak for one in stage_memory(found, size * GB)) <= USABLE * size * GB


def test_stages_of_all_replicas_count() -> None:
    alone = preset("llama_124m")
    exchange = alone.exchange.model_copy(update={"replicas": 2})
    two = alone.model_copy(update={"exchange": exchange})
    chosen = [
        fit_to_memory(config, devices(160), workers)[0].pipeline.in_flight
        for config, workers in ((alone, 5), (two, 10))
    ]
    assert chosen == [None, 6]


def test_given_settings_stay_and_are_refused_with_the_fix_if_they_do_not_fit() -> None:
    given = preset("llama_124m", pipeline__in_flight=3)
    assert fit_to_memory(given, devices(80), 5)[0] == given
    with pytest.raises(UserError, match=r"5 workers on one device of 24.0 GB would take .* lower pipeline.in_flight"):
        fit_to_memory(given, devices(24), 5)
    with pytest.raises(UserError, match=r'a worker on one device of 3.0 GB .*: set train.recompute = "auto"$'):
        fit_to_memory(preset("llama_124m"), devices(3, 3, 3, 3, 3), 5)
    smallest = preset("llama_124m", train__recompute="auto", pipeline__in_flight=1)
    with pytest.raises(UserError, match=r": lower pipeline.microbatch_size, or use more pipeline.stages$"):
        fit_to_memory(smallest, devices(8), 5)


def test_on_cpus_nothing_is_predicted_or_recomputed() -> None:
    config = RunConfig.model_validate({"train": {"recompute": "auto"}})
    found, line = fit_to_this_machine(config)
    assert (found.train.recompute, found.pipeline.in_flight, line) == (False, None, "")
