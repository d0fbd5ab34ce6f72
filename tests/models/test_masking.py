"""Masks and merging: exact choice of numbers, packed files, and the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models import masking, task_vectors
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama
from planaria.models.masking import MaskNote
from planaria.models.moe_layer import ExpertRouting

SHAPES = {"b": (3, 5), "a": (7,), "c": (2, 2, 3)}
EXPORTED = {"a": "model.a", "b": "model.y", "c": "model.x"}
NOTE = MaskNote(safe="s", tuned=("t",), result="r")
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def weights(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def some_mask(seed: int) -> dict[str, Tensor]:
    return {name: tensor > 0 for name, tensor in weights(seed).items()}


seeds = st.integers(0, 2**31)


@given(seeds, seeds, seeds)
def test_every_number_belongs_to_exactly_one_model(a: int, b: int, c: int) -> None:
    safe, tuned, mask = weights(a), weights(b, 1e-3), some_mask(c)
    found = masking.select_by_mask(safe, tuned, mask)
    for name, tensor in found.items():
        wanted = [
            t if m else s for s, t, m in zip(*(x[name].flatten().tolist() for x in (safe, tuned, mask)), strict=True)
        ]
        assert tensor.flatten().tolist() == wanted


@given(seeds)
def test_a_packed_mask_has_one_bit_per_parameter_and_is_restored(seed: int) -> None:
    mask = some_mask(seed)
    packed = masking.pack(mask, ["c", "a", "b"])
    assert packed.numel() == -(-COUNT // 8)
    back = masking.unpack(packed, weights(0), ["c", "a", "b"])
    assert all(torch.equal(back[name], mask[name]) for name in mask)
    assert masking.density(mask) == sum(int(m.sum()) for m in mask.values()) / COUNT


def test_a_mask_file_consists_of_bits_and_a_header(tmp_path: Path) -> None:
    masks, note = [some_mask(n) for n in range(11)], MaskNote(safe="s", tuned=("t",) * 11, result="r")
    file = tmp_path / "mask.safetensors"
    file.write_bytes(masking.to_bytes(masks, note, EXPORTED))
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - header == 11 * -(-COUNT // 8)
    found, read = masking.read_masks(file, weights(0), EXPORTED)
    assert (read.safe, read.tuned, read.result) == (note.safe, note.tuned, note.result)
    for mine, theirs in zip(masks, found, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_bits_follow_the_tensors_named_in_the_file(tmp_path: Path) -> None:
    file, mask = tmp_path / "mask.safetensors", some_mask(1)
    file.write_bytes(masking.to_bytes([mask], NOTE, EXPORTED))
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()[masking.FORMAT])
        bits = [byte >> place & 1 for byte in opened.get_tensor("mask.0").tolist() for place in range(7, -1, -1)]
    assert about["tensors"] == [["model.a", [7]], ["model.x", [2, 2, 3]], ["model.y", [3, 5]]]
    assert "most significant first" in about["bits"]
    for name, shape in about["tensors"]:
        (own,) = (ours for ours, exported in EXPORTED.items() if exported == name)
        count = torch.Size(shape).numel()
        assert mask[own].flatten().int().tolist() == bits[:count]
        bits = bits[count:]


def test_a_mask_of_the_first_format_follows_the_names_in_memory(tmp_path: Path) -> None:
    file, mask = tmp_path / "mask.safetensors", some_mask(1)
    about = {masking.UNORDERED: '{"safe": "s", "tuned": ["t"], "result": "r"}'}
    save_file({"mask.0": masking.pack(mask, sorted(mask))}, file, metadata=about)
    (found,), note = masking.read_masks(file, weights(0), EXPORTED)
    assert note == NOTE and all(torch.equal(found[name], mask[name]) for name in mask)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([["model.a", [7]], ["model.x", [2, 2, 3]]], "names 2 tensors, this model has 3"),
        ([["model.a", [7]], ["model.a", [7]], ["model.y", [3, 5]]], "names 3 tensors, this model has 3"),
        ([["model.a", [7]], ["model.x", [2, 2, 3]], ["model.z", [3, 5]]], "which this model does not have"),
        ([["model.a", [7]], ["model.x", [2, 2, 3]], ["model.y", [5, 3]]], r"model.y has shape \[5, 3\]"),
        ([["model.a", [-7]]], r"model.a has shape \[-7\]"),
    ],
)
def test_an_order_of_other_tensors_is_refused(tmp_path: Path, tensors: list[object], complaint: str) -> None:
    about = json.dumps({"safe": "s", "tuned": ["t"], "result": "r", "tensors": tensors})
    save_file({"mask.0": masking.pack(some_mask(1), sorted(SHAPES))}, file := tmp_path / "m", {masking.FORMAT: about})
    with pytest.raises(UserError, match=complaint):
        masking.read_masks(file, weights(0), EXPORTED)


@pytest.mark.parametrize("experts", [0, 2])
def test_exported_names_match_the_exported_file(tmp_path: Path, experts: int) -> None:
    routing = ExpertRouting(experts=experts, top_k=1) if experts else None
    model = Llama(ModelConfig(vocab=257, dim=16, layers=11, heads=2, hidden=32, context=8), routing=routing)
    export_model(model, tmp_path / "model")
    exported = model.exported_names()
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as opened:
        for name, parameter in model.named_parameters():
            assert torch.equal(opened.get_tensor(exported[name]), parameter), name
        assert {*exported.values()} == {*opened.keys()}


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"format": "pt"}, "is not a mask"),
        ({masking.FORMAT: '{"safe": "s", "tuned": ["t", "u"], "result": "r"}'}, "has 1 masks for 2 models"),
        ({masking.FORMAT: '{"safe": "s", "tuned": 7, "result": "r"}'}, "tuned"),
        ({masking.FORMAT: "[" * 5000}, "use the mask"),
    ],
)
def test_masks_of_other_models_are_refused(tmp_path: Path, about: dict[str, str], complaint: str) -> None:
    save_file({"mask.0": masking.pack(some_mask(1), sorted(SHAPES))}, file := tmp_path / "m", metadata=about)
    with pytest.raises(UserError, match=complaint):
        masking.read_masks(file, weights(0), EXPORTED)


def test_masks_of_another_size_or_damaged_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mask.safetensors"
    file.write_bytes(masking.to_bytes([some_mask(1)], NOTE, EXPORTED))
    with pytest.raises(UserError, match="this model's have 2"):
        masking.read_masks(file, {"a": torch.zeros(9)}, EXPORTED)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be read"):
        masking.read_masks(file, weights(0), EXPORTED)


def test_the_straight_through_gradient_is_that_of_a_soft_mask() -> None:
    safe, delta, logits = torch.randn(20), torch.randn(20), torch.randn(20, requires_grad=True)
    target = torch.randn(20)
    soft = safe + torch.sigmoid(logits) * delta
    hard = (safe + (logits.detach() > 0) * delta).requires_grad_()
    (hard - target).square().sum().backward()
    assert hard.grad is not None
    soft.backward(hard.grad)
    assert logits.grad is not None
    torch.testing.assert_close(masking.straight_through(logits.detach(), hard.grad, delta), logits.grad)


@given(seeds)
def test_a_shuffled_mask_has_the_same_density_per_tensor(seed: int) -> None:
    mask = some_mask(seed)
    assert masking.kept_shares(masking.random_mask(mask, torch.Generator().manual_seed(seed))) == masking.kept_shares(
        mask
    )


def test_full_and_empty_masks_give_the_merged_model_and_its_parent() -> None:
    parent, added = weights(0), task_vectors.task_arithmetic([weights(1), weights(2)], 0.3)
    everything = {name: torch.ones(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    nothing = {name: ~bits for name, bits in everything.items()}
    whole, none = (masking.merge_masked(parent, added, [mask, mask]) for mask in (everything, nothing))
    assert task_vectors.digest(whole) == task_vectors.digest(task_vectors.add_contributions(parent, added))
    assert task_vectors.digest(none) == task_vectors.digest(parent)


def test_ties_matches_a_manual_example() -> None:
    one, other = {"w": torch.tensor([4.0, -3.0, 0.1, 2.0])}, {"w": torch.tensor([2.0, 5.0, -0.2, 0.1])}
    # Half of each is kept: (4, -3, 0, 0) and (2, 5, 0, 0); the elected signs are + and +.
    first, second = task_vectors.ties([one, other], 0.5, stays=0.5)
    assert first["w"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert second["w"].tolist() == [0.5, 2.5, 0.0, 0.0]


def test_dare_keeps_the_mean_and_is_reproducible() -> None:
    vector = {"w": torch.ones(20_000)}
    (found,), (again,) = (task_vectors.dare([vector], 1.0, 0.75, seed=3) for _ in range(2))
    assert set(found["w"].tolist()) == {0.0, 4.0} and torch.equal(found["w"], again["w"])
    assert abs(float(found["w"].mean()) - 1) < 0.1


def test_mixing_at_0_and_1_gives_the_models() -> None:
    parent, tuned = weights(0), weights(1)
    assert task_vectors.digest(task_vectors.interpolate(parent, tuned, 0.0)) == task_vectors.digest(parent)
    assert task_vectors.digest(task_vectors.interpolate(parent, tuned, 1.0)) == task_vectors.digest(tuned)
    own = task_vectors.interpolate(parent, tuned, {"a": 1.0, "b": 0.0, "c": 0.5})
    assert torch.equal(own["a"], tuned["a"]) and torch.equal(own["b"], parent["b"])
    torch.testing.assert_close(own["c"], (parent["c"] + tuned["c"]) / 2)
    assert task_vectors.agreement(parent, parent)["a"] == pytest.approx(1)


def test_models_of_other_shapes_are_refused() -> None:
    with pytest.raises(UserError, match=r"mine: a has shape \[9\], its parent's has \[7\]"):
        task_vectors.require_alike(weights(0), weights(1) | {"a": torch.zeros(9)}, "mine")
    assert task_vectors.relative_distance(task_vectors.task_vector(weights(1), weights(0)), weights(0)) > 1
