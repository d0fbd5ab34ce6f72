"""A checkpoint of any cut read as any other: the state of each parameter, and the merging of replicas' copies."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange
from planaria.models.optimizers.adamw import KEYS
from planaria.models.packing import digest
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import check_stages, load_stage
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint
from support.sample_checkpoints import (
    KINDS,
    STEP,
    States,
    atom,
    config,
    named,
    save,
    scale,
    shapes,
    state,
    states_of,
)
from support.stage_states import assert_same_state

STAGES, REPLICAS = (1, 2, 3, 4, 6, 12), (1, 2, 3)
Shape = tuple[int, int]
"""stages, replicas"""
Source = Callable[[RunConfig], SealedCheckpoint]


# ---- saved states by global name, without recut's code


def loaded(saved: SealedCheckpoint, wanted: RunConfig, replicas: tuple[int, ...] | None = None) -> States:
    these = range(wanted.exchange.replicas) if replicas is None else replicas
    both = product(these, range(wanted.pipeline.stages + 1))
    return {(r, s): load_stage(saved.folder, wanted, s, r) for r, s in both}


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def check(was: RunConfig, now: RunConfig, found: States, exchange: bool = True) -> None:
    """Compare every parameter with the rules, written out here; ``exchange``: whether the manifest names it."""
    kept = was.exchange.replicas == now.exchange.replicas
    for (replica, stage), got in found.items():
        assert got.weights.keys() == shapes(now, stage).keys() == got.moments.keys() == got.clocks.keys()
        for local, shape in shapes(now, stage).items():
            name = named(now, stage, local)
            atoms = [atom(was, name, r, shape) for r in range(was.exchange.replicas)]
            if kept or was.exchange.kind == "allreduce":
                atoms = atoms[replica : replica + 1] if kept else atoms[:1]
            held = [[a["weight"] for a in atoms], *([a["moments"][key] for a in atoms] for key in KEYS)]
            mean = [torch.stack(of).mean(0) if len(of) > 1 else of[0] for of in held]
            assert same(got.weights[local], mean[0]), name
            assert all(same(a, b) for a, b in zip(got.moments[local].values(), mean[1:], strict=True)), name
            assert got.clocks[local] == min(a["clock"] for a in atoms)
            assert got.scales.get(local, got.lr_scale) == scale(name)
        if exchange:
            check_outer(was, now, replica, stage, got)
        else:
            assert not got.outer


def check_outer(was: RunConfig, now: RunConfig, replica: int, stage: int, got: StageState) -> None:
    if 1 in (was.exchange.replicas, now.exchange.replicas):
        assert not got.outer
        return
    kept, parts = was.exchange.replicas == now.exchange.replicas, make_exchange(was.exchange).parts
    assert int(got.outer["rounds"]) == (7 if kept else 0)
    assert len(got.outer) == 1 + len(parts) * len(got.weights)
    for local, shape in shapes(now, stage).items():
        all_ = [atom(was, named(now, stage, local), r, shape)["outer"] for r in range(was.exchange.replicas)]
        for part, sharing in parts.items():
            each = [own[part] for own in all_]
            if kept:
                expected = each[replica]
            elif sharing == "own":
                expected = sum(each[1:], each[0]) / len(each)
            else:
                expected = torch.stack(each).mean(0)
            assert same(got.outer[f"{part}/{local}"], expected), (part, local)


# ---- the grid


def pairs() -> list[tuple[str, bool, Shape, Shape]]:
    every = list(product(KINDS, (True, False), product(STAGES, REPLICAS), product(STAGES, REPLICAS)))
    return random.Random(34107).sample(every, 60)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Save a run of that shape once."""
    made: dict[str, SealedCheckpoint] = {}

    def saved(given: RunConfig) -> SealedCheckpoint:
        key = given.model_dump_json()
        return made[key] if key in made else made.setdefault(key, save(tmp_path_factory.mktemp("source"), given))

    return saved


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(("kind", "tied", "before", "after"), pairs())
def test_every_cut_reads_every_other(
    kind: str, tied: bool, before: Shape, after: Shape, source: Source, tmp_path: Path
) -> None:
    was, now = config(*before, kind, tied), config(*after, kind, tied)
    found = loaded(source(was), now, None if before[1] == after[1] else (after[1] - 1,))
    check(was, now, found)
    if before[1] == after[1]:
        back = loaded(save(tmp_path, now, found), was)
        truth = states_of(was)
        for place, got in back.items():
            norms = ("grad_norm", "clipped_norm") if before != after else ()
            assert_same_state(got, truth[place], but=("generators", "lr_scale", "scales", *norms))
            assert rates(got) == rates(truth[place])


def rates(held: StageState) -> dict[str, float]:
    return {name: held.scales.get(name, held.lr_scale) for name in held.weights}


@pytest.mark.parametrize(("stages", "ends"), [(4, 0), (5, 2), (2, 10), (1, 1), (3, 3)])
def test_layers_move_between_the_ends_and_the_stages(stages: int, ends: int, source: Source) -> None:
    was = config(2, 3, ends_layers=4)
    now = config(stages, 3, ends_layers=ends)
    check(was, now, loaded(source(was), now, replicas=(1,)))


# ---- what belongs to a stage, not to a parameter


def test_norms_of_merged_stages_add_up_and_those_of_parts_are_unknown(
    source: Source,
) -> None:
    saved = source(config(4))
    merged, split = loaded(saved, config(2)), loaded(saved, config(12))
    assert (merged[0, 1].grad_norm, merged[0, 1].clipped_norm) == pytest.approx((18**0.5, 32**0.5))
    assert (split[0, 3].grad_norm, split[0, 3].clipped_norm) == (None, None)
    for found in (merged, split):
        assert (found[0, 0].grad_norm, found[0, 0].clipped_norm) == (3.0, 4.0), "the ends are as they were"


def test_an_uncut_stage_keeps_its_generators(source: Source) -> None:
    was = config(4)
    found = loaded(source(was), config(2))
    assert same(found[0, 0].generators["cpu"], state(was, 0, 0).generators["cpu"])
    assert not found[0, 1].generators


@pytest.mark.slow
def test_replicas_saved_as_one_start_with_their_mean_residual(tmp_path: Path) -> None:
    """As a fleet saves all-reduced replicas: one file per stage, and one for each further outer state."""
    was, now = config(4, 3, "allreduce"), config(2, 2, "allreduce")
    store, digests = CheckpointStore(tmp_path), {}
    for stage, replica in product(range(5), range(3)):
        held = state(was, stage, replica)
        held = StageState({}, outer=held.outer) if replica else held
        written = write_stage(store.unfinished(STEP), stage, STEP, held, replica)
        digests[stage_file(Path(), stage, replica).name] = written.sha256
    manifest = CheckpointManifest(
        step=STEP, stages=list(range(5)), pipeline_stages=4, digests=digests, model=was.model, exchange=was.exchange
    )
    saved = store.seal(f"step-{STEP:08d}", manifest, 9)
    for wanted in (now, config(6, 3, "allreduce")):
        check(was, wanted, loaded(saved, wanted))


@pytest.mark.slow
def test_a_checkpoint_without_its_exchange_yields_means(tmp_path: Path) -> None:
    """As an older planaria wrote them: another number of replicas does not use the outer states."""
    was, now = config(4, 3), config(2, 2)
    check(was, now, loaded(save(tmp_path, was, exchange=None), now), exchange=False)


@pytest.mark.slow
def test_another_exchange_takes_weights_and_moments_alone(source: Source) -> None:
    was = config(4, 3, "noloco")
    for kind, equal in (("pair_mean", False), ("diloco", True)):
        found = loaded(source(was), config(4, 3, kind))
        assert not any(got.outer for got in found.values())
        one, other = found[0, 2].weights, found[2, 2].weights
        assert all(same(one[n], other[n]) for n in one) == equal, "only some exchanges need replicas to be equal"
        assert found[0, 2].moments


def test_files_of_version_1_are_read_at_any_cut(tmp_path: Path) -> None:
    """As planaria 0.1 wrote them: no digests of single tensors, one clock and one scale for a stage."""
    was, store, digests = config(4), CheckpointStore(tmp_path), {}
    for stage in range(5):
        held, path = state(was, stage, 0), stage_file(store.unfinished(STEP), stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"weights.{n}": t for n, t in held.weights.items()} | {"rng": held.generators["cpu"]}
        tensors |= {f"{key}.{n}": tensor for n, pair in held.moments.items() for key, tensor in pair.items()}
        label = {"version": 1, "stage": stage, "step": STEP, "updates": 20 + stage, "lr_scale": 1.0 + stage}
        save_file(tensors, path, {"planaria": json.dumps(label | {"grad_norm": 3.0, "clipped_norm": None})})
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = CheckpointManifest(step=STEP, stages=list(range(5)), pipeline_stages=4, digests=digests, model=was.model)
    saved, now = store.seal(f"step-{STEP:08d}", manifest, 9), config(2)
    check_stages(tmp_path, dict.fromkeys(range(3), saved.folder.name), now)
    for (_, stage), got in loaded(saved, now).items():
        for local, shape in shapes(now, stage).items():
            name = named(now, stage, local)
            old = 1 + int(name.split()[1]) // 3 if name.startswith("layer ") else 0
            assert same(got.weights[local], atom(was, name, 0, shape)["weight"])
            assert same(got.moments[local]["exp_avg"], atom(was, name, 0, shape)["moments"]["exp_avg"])
            assert (got.clocks[local], got.scales.get(local, got.lr_scale)) == (20 + old, 1.0 + old)
    assert same(loaded(saved, now)[0, 0].generators["cpu"], state(was, 0, 0).generators["cpu"])


# ---- what is refused


def tampered(saved: SealedCheckpoint, stage: int, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change a file and its digests; return its path."""
    path = stage_file(saved.folder, stage)
    tensors = load_file(path)
    change(tensors)
    weights = [key.removeprefix("weights.") for key in sorted(tensors) if key.startswith("weights.")]
    first = [key.removeprefix("exp_avg.") for key in sorted(tensors) if key.startswith("exp_avg.")]
    tensors["clocks"] = torch.full((len(first),), 30)
    if "scales" in tensors:
        tensors["scales"] = torch.ones(len(weights), dtype=torch.float64)
    del tensors["sha256"]
    rows = b"".join(digest(key, tensors[key]) for key in sorted(tensors))
    tensors["sha256"] = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, 32)
    save_file(tensors, path, {"planaria": json.dumps({"version": 2, "stage": stage, "step": STEP})})
    manifest = saved.manifest.model_copy(update={"digests": {}})
    (saved.folder / "manifest.json").write_text(documents.seal(manifest))
    return path


def refused(saved: SealedCheckpoint, wanted: RunConfig) -> str:
    """Return the one line of the refusal before any worker starts."""
    load = dict.fromkeys(range(wanted.pipeline.stages + 1), saved.folder.name)
    with pytest.raises(UserError) as caught:
        check_stages(saved.folder.parent, load, wanted)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NORM = "layers.1.input_layernorm.weight"


def put(key: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: tensor})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda t: [t.pop(f"{kind}.{NORM}") for kind in ("weights", *KEYS)],
            "model.layers.4.input_layernorm.weight is missing; it should be F32 [8]",
        ),
        (put(f"weights.{NORM}", torch.ones(9)), "model.layers.4.input_layernorm.weight is F32 [9], not F32 [8]"),
        (
            put(f"exp_avg_sq.{NORM}", torch.ones(7)),
            "exp_avg_sq of model.layers.4.input_layernorm.weight is F32 [7], not F32 [8]",
        ),
        (
            lambda t: t.update({f"weights.{NORM}": t[f"weights.{NORM}"].bfloat16()}),
            "model.layers.4.input_layernorm.weight is BF16 [8], not F32 [8]",
        ),
        (
            put("weights.layers.01.input_layernorm.weight", torch.ones(8)),
            "model.layers.4.input_layernorm.weight (layers.01.input_layernorm.weight) is not of this",
        ),
        (
            put("weights.layers.3.input_layernorm.weight", torch.ones(8)),
            "stage 2: layers.3.input_layernorm.weight (layers.3.input_layernorm.weight) is not of this model",
        ),
        (put("weights.layers.1.bias", torch.ones(8)), "model.layers.4.bias (layers.1.bias) is not of this model"),
    ],
)
def test_an_invalid_parameter_is_named(
    change: Callable[[dict[str, Tensor]], object], complaint: str, tmp_path: Path
) -> None:
    path = tampered(save(tmp_path, config(4)), 2, change)
    for wanted in (config(2), config(4)):
        line = refused(CheckpointStore(tmp_path).list()[0], wanted)
        assert complaint in line
        assert str(path) in line


def test_unequal_copies_of_all_reduced_replicas_are_named(tmp_path: Path) -> None:
    """Their weights, or their clocks."""
    up, norm = "layers.0.mlp.up_proj.weight", "layers.0.input_layernorm.weight"
    given = config(4, 3, "allreduce")
    states = states_of(given)
    states[2, 3].weights[up] = states[2, 3].weights[up] + 1e-6
    line = refused(save(tmp_path / "weights", given, states), config(2, 2, "allreduce"))
    assert "model.layers.6.mlp.up_proj.weight differs between replicas 0 and 2" in line
    given = config(4, 2, "allreduce")
    states = states_of(given)
    states[1, 1].clocks[norm] += 1
    line = refused(save(tmp_path / "clocks", given, states), config(2, 3, "allreduce"))
    assert "model.layers.0.input_layernorm.weight differs between replicas 0 and 1" in line


def test_mixed_partial_and_other_models_checkpoints_are_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "mixed", config(4))
    sealed = documents.seal(saved.manifest.model_copy(update={"step": STEP + 1}))
    (saved.folder / "manifest.json").write_text(sealed)
    assert f"holds step {STEP}, not {STEP + 1}" in refused(saved, config(2))
    saved = save(tmp_path / "partial", config(4), stages=[0, 1, 3, 4])
    assert "stages [2] are missing, and only a whole checkpoint can be re-cut" in refused(saved, config(2))
    assert "another shape" in refused(save(tmp_path / "other", config(4)), config(2, tied=False))


def flip_a_bit(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.4, 0.9])
def test_a_flipped_bit_is_refused_before_any_worker_starts(place: float, tmp_path: Path) -> None:
    saved = save(tmp_path, config(4))
    path = stage_file(saved.folder, 3)
    flip_a_bit(path, place)
    assert str(path) in refused(saved, config(2))


def test_a_bit_flipped_after_the_check_is_found_by_the_worker(tmp_path: Path) -> None:
    saved, wanted = save(tmp_path, config(4)), config(2)
    check_stages(tmp_path, {1: saved.folder.name}, wanted)
    flip_a_bit(stage_file(saved.folder, 2), 0.5)
    with pytest.raises(UserError, match=r"stage-0002.*has changed since it was written"):
        load_stage(saved.folder, wanted, 1)
