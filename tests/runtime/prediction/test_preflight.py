"""The table before a run: its rows are the run's stages, its lines few, and too little memory is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.lab.compare.clock import activation_bytes
from planaria.models.llama_stages import parameter_count
from planaria.runtime.fleet.devices import NO_INVENTORY, Device, Inventory, free_memory
from planaria.runtime.prediction.memory import combined_peak, own_workers, require_room, stage_memory
from planaria.runtime.prediction.preflight_table import MAX_ROWS, StageRow, stage_lines, stage_rows, table
from planaria.runtime.resolved_run import ResolvedRun

GB = 10**9


def run(name: str = "demo", **settings: object) -> RunConfig:
    return recipe.load(shipped.find(name), {key.replace("__", "."): str(value) for key, value in settings.items()})


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.sampled_from(["full", "swapped"]), st.sampled_from([1, 3]))
def test_rows_add_up_to_the_run(stages: int, microbatches: int, kind: str, replicas: int) -> None:
    config = run(pipeline__stages=stages, pipeline__microbatches=microbatches, exchange__replicas=replicas)
    if kind == "swapped" and stages == 4 and replicas == 1:
        config = config.model_copy(update={"routing": config.routing.model_copy(update={"kind": kind})})
    rows = stage_rows(ResolvedRun(config))
    assert sum(row.parameters for row in rows) == sum(row.trained for row in rows) == parameter_count(config.model)
    assert [number for row in rows for number in row.layers] == [*range(config.model.layers)]
    assert replicas * sum(row.sent for row in rows) == activation_bytes(config)
    assert all(row.memory is not None and row.memory.peak > row.state == 16 * row.parameters for row in rows)
    assert all((row.exchanged > 0) == (replicas > 1) for row in rows)


@given(st.integers(1, 200), st.booleans())
def test_lines_are_few_and_aligned(stages: int, known: bool) -> None:
    memory = stage_memory(run())[1] if known else None
    rows = [StageRow(n, range(max(0, n - 1), n), 10**6, 10**6, 1, memory, 5, 0.0) for n in range(stages + 1)]
    head, *lines = stage_lines(rows)
    assert len(lines) == min(stages + 1, MAX_ROWS) and {len(line) for line in lines} == {len(head)}
    assert lines[-1].split()[:2] == [str(stages), str(stages - 1)]
    if stages >= MAX_ROWS:
        first = MAX_ROWS - 2
        assert lines[-2].split()[0] == (f"{first}–{stages - 1}" if stages - 1 > first else str(first))


@pytest.mark.parametrize(("every", "when"), [(1, "every step"), (8, "every 8 steps")])
def test_bytes_between_replicas_have_their_interval(every: int, when: str) -> None:
    config = run(exchange__replicas=2, exchange__kind="diloco", exchange__options__every=every)
    (line,) = (line for line in table(config) if line.startswith("sent"))
    assert line.endswith(f"from each replica to others, {when}")


def test_time_is_stated_only_if_costs_are() -> None:
    (stated,) = (line for line in table(run()) if line.startswith("time"))
    (unknown,) = (line for line in table(run(network__forward_s="[]", network__backward_s="[]")) if "time" in line[:5])
    assert "58 s for 400 steps" in stated and "unknown until step 3" in unknown
    assert table(run(), 100, 12.0)[-1] == "time          60 min for 300 steps, at the speed of the steps before"


def test_in_one_process_passes_and_memory_add_up() -> None:
    costs = {"network__forward_s": "[0.1]", "network__backward_s": "[0.2]", "network__latency_s": 9.0}
    config = run(engine="inline", pipeline__stages=2, pipeline__microbatches=4, train__steps=10, **costs)
    assert table(config)[-1].startswith("time          36 s for 10 steps")  # three stages, four microbatches
    cuda = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda"})})
    memory = stage_memory(cuda, 80 * GB)
    tensors = sum(stage.state + stage.kept + stage.working for stage in memory)
    assert combined_peak(cuda, memory, 1) == tensors + memory[0].process


def test_machines_that_join_are_named() -> None:
    lines = table(run(fleet__own=2))
    assert any("this machine: 2 workers" in line for line in lines)
    assert any("3 workers on machines that join" in line for line in lines)


def test_too_little_memory_is_one_line_with_a_fix() -> None:
    config = run(pipeline__microbatch_size=64)
    needed = combined_peak(config, stage_memory(config), own_workers(config))
    require_room(config, own_workers(config), NO_INVENTORY, needed)
    with pytest.raises(UserError) as refused:
        require_room(config, own_workers(config), NO_INVENTORY, needed - 1)
    assert str(refused.value) == (
        f"train.device = 'cpu': 6 workers on this machine would take {needed / GB:.1f} GB, and {needed / GB:.1f} GB "
        "are free: set train.recompute = true"
    )
    require_room(config, own_workers(config), NO_INVENTORY, 0)


def test_a_joining_machines_devices_are_checked_with_activations() -> None:
    flags = {"train.compile": "true", "train.recompute": "false"}
    config = recipe.load(shipped.find("llama_124m"), flags)
    require_room(config, 2, Inventory((Device("a", 80 * GB), Device("b", 80 * GB))), 0)
    with pytest.raises(UserError, match=r"2 workers on device a of there would take .* train.recompute"):
        require_room(config, 2, Inventory((Device("a", 40 * GB),)), 0, "there")


def test_free_memory_is_within_the_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\nSwapFree: 2 kB\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 9 << 10
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, free in (("5000\n", 4000), ("max\n", 9 << 10), ("500\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_memory(tmp_path / "meminfo", tmp_path) == free
    assert free_memory(tmp_path / "none", tmp_path) == 0
