"""`benchmarks.field`: its accounting, the inputs of its peers, and real systems where installed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks.field import (
    FIRST,
    GROUP,
    PIPELINE,
    PLACES,
    REPLICAS,
    THEIRS,
    TORCHFT,
    TORCHRUN,
    TUNED,
    Pair,
    command_line,
    first_losses,
    refuse_senseless,
    require_alike,
    rows_of,
    systems,
)
from benchmarks.field_peer import Llama as PeerLlama
from benchmarks.field_peer import Sizes
from benchmarks.field_systems import (
    SMOOTHED,
    Line,
    Ran,
    Strike,
    Update,
    apart,
    lost,
    next_steps,
    ran,
    rate,
    standing,
    strikes,
    to_target,
    updates_of,
    versions,
)
from benchmarks.harness import ROOT
from hypothesis import given as over
from hypothesis import strategies as st

from benchmarks import field, field_systems
from planaria.common.errors import UserError
from planaria.models.llama_stages import Llama
from planaria.models.optimizers.base import LAYER

PYTHON = ROOT.parent / "venv-torchft/bin/python"
BATCH = 8


def flags(**more: object) -> argparse.Namespace:
    """Return the benchmark's default flags with a small model and few kills."""
    small = {
        "python": PYTHON,
        "kills": 2,
        "every": 8.0,
        "free": 4.0,
        "join_ms": 2000,
        "heartbeat_ms": 1000,
        "interval": 5,
        "source": __file__,
        "dim": 32,
        "context": 16,
        "batch": BATCH,
    }
    return argparse.Namespace(**vars(command_line().parse_args([])) | small | more)


def lines_of(
    t: float, step: int, ranks: int = 4, took: float = 0.5, loss: float = 1.0, used: int = BATCH
) -> list[Line]:
    """Return lines of ``ranks`` processes that apply an update about ``t``, each slightly later than the previous."""
    return [Line(t + r / 100, t - took + r / 100, step, used, (step + 1) * BATCH, loss + r) for r in range(ranks)]


def update(t: float, step: int, used: int = BATCH, loss: float = 1.0) -> Update:
    return Update(t, t - 0.5, step, used, (step + 1) * BATCH, loss)


def made(steps: Sequence[int]) -> list[Update]:
    """Return updates of these steps, one per second."""
    return [update(t + 1.0, step) for t, step in enumerate(steps)]


def run_of(updates: list[Update]) -> Ran:
    return Ran(updates, updates[0].t, updates[-1].t, [], 0.0, [1], 0.0, [])


@over(backs=st.lists(st.integers(0, 3), max_size=20), ranks=st.integers(1, 5))
def test_lines_of_several_processes_are_merged_into_updates(backs: list[int], ranks: int) -> None:
    steps, step = [], 0
    for back in backs:
        step = max(0, step - back)
        steps.append(step)
        step += 1
    lines = [line for t, step in enumerate(steps) for line in lines_of(float(t), step, ranks)]
    found = updates_of(reversed(lines))
    assert [one.step for one in found] == steps
    assert all(one.loss == pytest.approx(1.0 + (ranks - 1) / 2) for one in found)


@over(steps=st.lists(st.integers(0, 9), max_size=30))
def test_every_update_is_kept_or_undone(steps: list[int]) -> None:
    updates = made(steps)
    stand, undone = standing(updates)
    assert sorted(stand + undone, key=lambda u: u.t) == updates
    assert all(a.step < b.step for a, b in pairwise(stand))
    assert all(any(u.t > gone.t and u.step <= gone.step for u in updates) for gone in undone)


def test_the_share_of_a_missing_replica_is_lost() -> None:
    stand, _ = standing([update(1, 0), update(2, 1, used=BATCH - 2), update(3, 2, used=BATCH - 4)])
    assert lost(stand) == 6


def test_repeated_steps_are_neither_lost_nor_counted_twice() -> None:
    updates = made([0, 1, 2, 1, 2, 3])
    stand, undone = standing(updates)
    assert (lost(stand), len(undone)) == (0, 2)
    assert rate(updates, 1.0, 6.0, BATCH) == pytest.approx(3 / 5)


def test_an_update_after_the_end_undoes_nothing_before_it() -> None:
    assert rate(made([0, 1, 2, 0]), 1.0, 3.0, BATCH) == pytest.approx(2 / 2)


def test_the_next_step_is_new_and_begun_after_the_kill() -> None:
    updates = made([0, 1, 2, 1, 2, 3])  # each begins half a second before its end
    assert next_steps(updates, [1.2]) == [pytest.approx(0.8)]
    assert next_steps(updates, [1.8]) == [pytest.approx(1.2)], "a step in progress does not count"
    assert next_steps(updates, [3.1]) == [pytest.approx(2.9)], "a repeated step does not count"
    assert next_steps(updates, [5.9]) == [math.inf], "none came"


def test_steps_to_a_target_count_undone_ones() -> None:
    clean = [update(t, t, loss=100.0 - t) for t in range(20)]
    target = 100.0 - (19 - (SMOOTHED - 1) / 2)
    assert to_target(clean, 0.0, target) == (20, 19)
    again = [*clean[:5], *(update(one.t + 5, one.step, loss=one.loss) for one in clean)]
    assert to_target(again, 0.0, target) == (25, 24)
    assert to_target(clean, 0.0, target - 1e-6) is None


def test_losses_of_the_same_updates_are_compared() -> None:
    other = [update(t, t, loss=1.0 + 0.1 * (t == 2)) for t in range(5)]
    assert apart(made([0, 1, 2, 3]), other) == pytest.approx(0.1)
    again = [*other, update(6, 2), update(7, 3)]
    assert apart(made([0, 1, 2, 3]), again) == 0.0, "undone updates do not count"
    assert apart(made([0, 1, 2]), [*made([0, 1]), update(3, 2, loss=math.nan)]) == 0.0, "nor missing losses"


@over(seed=st.integers(0, 99), kills=st.integers(1, 20), every=st.floats(1, 60))
def test_each_interval_has_one_strike_at_a_valid_place(seed: int, kills: int, every: float) -> None:
    planned = strikes(seed, kills, every)
    assert planned == strikes(seed, kills, every)
    assert [int(one.at // every) for one in planned] == list(range(kills))
    assert all(0 <= one.place(PLACES) < PLACES for one in planned)
    assert Strike(0, 0.999).place(4) == 3


def test_arms_with_different_work_are_refused() -> None:
    ours, other = made([0, 1, 2]), [update(t, t, loss=1.0 + 2e-4 * t) for t in range(3)]
    require_alike({"a": run_of(ours), "b": run_of(made([0, 1, 2, 3]))}, BATCH)
    with pytest.raises(Exception, match=r"b: its first losses are up to 0\.0004 nats"):
        require_alike({"a": run_of(ours), "b": run_of(other)}, BATCH)
    with pytest.raises(Exception, match="b: not all processes took part"):
        require_alike({"a": run_of(ours), "b": run_of([update(1, 0, used=2)])}, BATCH)
    assert first_losses([update(1, 0), update(2, 1, used=4), update(3, 2)], BATCH) == [1.0]
    torn = [*updates_of([*lines_of(1.0, 0), *lines_of(2.0, 1)]), *updates_of(lines_of(3.0, 2)[:2])]
    assert first_losses(torn, BATCH) == [2.5, 2.5], "losses of incomplete updates do not count"
    assert apart(torn, updates_of(lines_of(3.0, 2))) == 0.0


def pair(pause: float, undone: int = 0, used: int = BATCH) -> Pair:
    """Return forty updates, one per second, without kills, and with one that delays the next by ``pause`` seconds."""
    free = [update(float(t), t, loss=5.0 - t / 10) for t in range(40)]
    back = [
        update(20 + pause + n, step, used if n == 0 else BATCH, 5.0 - step / 10)
        for n, step in enumerate(range(20 - undone, 40))
    ]
    faulty = Ran([*free[:20], *back], 0.0, back[-1].t, [19.2], 3.0, [int(2e9)], 1.0, [])
    return Pair(Ran(free, 0.0, 39.0, [], 3.0, [int(2e9)], 39.0, []), faulty)


def test_the_table_has_recovery_times_losses_and_costs() -> None:
    found = {
        PIPELINE: [pair(0.1)],
        TORCHFT: [pair(5.0, used=BATCH - 2)],
        TUNED: [pair(0.6)],
        TORCHRUN: [pair(4.0, undone=3)],
    }
    rows = {row.what: row for row in rows_of(flags(), found)}
    found_s = {arm: rows[f"s from a kill to the next step: {arm}"].value for arm in found}
    assert found_s == pytest.approx({PIPELINE: 0.9, TORCHFT: 5.8, TUNED: 1.4, TORCHRUN: 7.8})
    sooner = [rows[f"  {PIPELINE} over {arm}, medians"].verdict for arm in (TORCHFT, TUNED, TORCHRUN)]
    assert sooner == ["PASS", "FAIL", ""]
    gone = {arm: rows[f"samples lost: {arm}"] for arm in found}
    assert {arm: row.value for arm, row in gone.items()} == {PIPELINE: 0, TORCHFT: 2, TUNED: 0, TORCHRUN: 0}
    assert [row.columns["computed again"] for row in gone.values()] == [0, 0, 0, 3 * BATCH]
    assert [row.columns["smaller steps"] for row in gone.values()] == [0, 1, 0, 0]
    useful = [rows[f"useful steps a second over the same without kills: {arm}"].value for arm in found]
    assert useful[0] > useful[2] > useful[1] > useful[3]
    steps = {arm: rows[f"steps to the same loss: {arm}"].value for arm in found}
    assert steps == {PIPELINE: 32, TORCHFT: 32, TUNED: 32, TORCHRUN: 35}
    assert rows[f"nats from the same run without kills: {TORCHRUN}"].value == 0.0
    assert rows[f"GB of memory, all processes: {TUNED}"].value == 2.0
    assert rows[f"processor seconds of a step: {TUNED}"].value == pytest.approx(1.0)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (field, field_systems):
        monkeypatch.setattr(module, "RUNS", tmp_path)
    return tmp_path


def test_peers_start_from_the_weights_and_samples_of_planaria(runs: Path) -> None:
    config = field.recipe(flags(), 7, PIPELINE)
    job = field.job(flags(kills=1, every=0.1), 7)
    from safetensors.torch import load_file

    windows = load_file(job.samples)["samples"].long()
    ours, theirs = Llama(config.model, 1, 7), PeerLlama(job.sizes, load_file(job.weights))
    with torch.no_grad():
        loss = ours.loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        assert theirs(windows).item() == pytest.approx(loss.item(), abs=1e-5)
    assert isinstance(job.sizes, Sizes) and len(windows) % BATCH == 0


def test_peers_clip_the_groups_that_planaria_clips(runs: Path) -> None:
    config = field.recipe(flags(), 7, PIPELINE)
    weights, _ = field.laid_out(flags(kills=1, every=0.1), config)
    found = field.groups(config.model.layers, weights)
    names = [name for name, _ in Llama(config.model, 1, 7)._parameters_by_name()]
    assert sorted(name for group in found for name in group) == sorted(names)
    for group in found:
        layers = {layer[0] if (layer := LAYER.match(name)) else name for name in group}
        assert len(layers) == 1
    assert len(found) == config.model.layers + 3


def test_both_planaria_arms_have_four_processes_and_equal_batches() -> None:
    shapes = [field.recipe(flags(), 7, arm) for arm in (PIPELINE, REPLICAS)]
    assert [one.samples for one in shapes] == [BATCH, BATCH]
    assert [(one.pipeline.stages + 1) * one.exchange.replicas for one in shapes] == [PLACES, PLACES]
    assert shapes[0].model.dense.model_copy(update={"block_layers": None}) == shapes[1].model.dense.model_copy(
        update={"block_layers": None}
    )


def test_a_missing_environment_is_refused_with_instructions() -> None:
    with pytest.raises(UserError) as refused:
        refuse_senseless(flags(python=Path("nowhere")))
    line = str(refused.value)
    assert "\n" not in line and "nowhere" in line and "torchft-nightly safetensors" in line
    assert line.endswith("--arms pipeline replicas group torchrun")
    refuse_senseless(flags(python=Path("nowhere"), arms=["pipeline", "torchrun"]))
    with pytest.raises(UserError, match="--kills 0"):
        refuse_senseless(flags(arms=["torchrun"], kills=0))
    with pytest.raises(UserError, match="--batch 6"):
        refuse_senseless(flags(arms=["torchrun"], batch=6))
    with pytest.raises(UserError, match="--layers 4"):
        refuse_senseless(flags(arms=["torchrun"], layers=4))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arm", [PIPELINE, REPLICAS, GROUP, TORCHRUN, TORCHFT, TUNED])
def test_each_system_continues_after_kills(arm: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if arm in THEIRS and versions(PYTHON) is None:
        pytest.skip(f"torchft's environment is not in {PYTHON}")
    torch.set_num_threads(1)
    monkeypatch.setattr(field, "MAX_RATE", 100)  # so small a model is fast
    given = flags()
    system = systems(given, 3)[arm]
    found = ran(system, "faulty", strikes(3, given.kills, given.every), (given.kills + 1) * given.every)
    stand, undone = standing(found.updates)
    assert len(found.kills) == given.kills and not found.problems
    assert all(4.0 < loss < 7.0 for loss in first_losses(found.updates, BATCH)), "about ln 260"
    assert len(first_losses(found.updates, BATCH)) == FIRST
    assert max(next_steps(found.updates, found.kills)) < math.inf
    assert (lost(stand) == 0) == (arm != TORCHFT)
    assert bool(undone) == (arm == TORCHRUN)
    assert all(memory > 1e8 for memory in found.memory)
