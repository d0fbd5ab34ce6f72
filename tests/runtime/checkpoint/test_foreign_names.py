"""Fused, padded and renamed tensors of other programs: split with a map of names, refused without one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.runtime.checkpoint.foreign import names
from planaria.runtime.checkpoint.foreign.folder import split
from planaria.runtime.checkpoint.loading import ParameterState, atoms_of_model, load_stage
from planaria.runtime.checkpoint.store import SealedCheckpoint
from support.foreign_checkpoints import KINDS_OF, even, require_same, taken, written
from support.sample_checkpoints import config, save

FILES = dict(zip(KINDS_OF, ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"), strict=True))
QKV = [f"model.layers.{{n}}.self_attn.{part}_proj.weight" for part in "qkv"]
GATE_UP = [f"model.layers.{{n}}.mlp.{part}_proj.weight" for part in ("gate", "up")]
TOKENS, FILLED = 11, 16
RANKS = 2
Place = Callable[[str], Tensor]
"""name of a parameter → one of its tensors"""


# ---- folders as a tensor-parallel run of another program writes them


def sliced(whole: Tensor, rank: int) -> Tensor:
    return whole.chunk(RANKS)[rank]


def fused_by_ranks(parts: list[Tensor]) -> Tensor:
    """Concatenate the ranks' tensors, each a concatenation of its slices of all parts."""
    return torch.cat([torch.cat([sliced(part, rank) for part in parts]) for rank in range(RANKS)])


def fused_whole(parts: list[Tensor]) -> Tensor:
    """Slices joined part by part."""
    return torch.cat([torch.cat([sliced(part, rank) for rank in range(RANKS)]) for part in parts])


def fill(table: Tensor) -> Tensor:
    return torch.cat([table, torch.full((FILLED - len(table), table.shape[1]), 9.0)])


def by_hand(saved: SealedCheckpoint, folder: Path, fuse: Callable[[list[Tensor]], Tensor], **marks: Any) -> Path:
    """A universal folder with other names, fused QKV and gate-up, a padded table, and layers that count from 3."""
    atoms = {atom.name: atom for atom in atoms_of_model(saved)}
    zero = folder / "global_step30" / "zero"
    made: dict[str, list[str]] = {
        "embedding.weight": ["model.embed_tokens.weight"],
        "final.weight": ["model.norm.weight"],
    }
    for n in range(12):
        made[f"{n + 3}.attention.qkv.weight"] = [name.format(n=n) for name in QKV]
        made[f"{n + 3}.mlp.gate_up.weight"] = [name.format(n=n) for name in GATE_UP]
        made[f"{n + 3}.attention.dense.weight"] = [f"model.layers.{n}.self_attn.o_proj.weight"]
        made[f"{n + 3}.mlp.down.weight"] = [f"model.layers.{n}.mlp.down_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{n + 3}.{norm}.weight"] = [f"model.layers.{n}.{norm}.weight"]
    for name, parts in made.items():
        (zero / name).mkdir(parents=True)
        for kind, file in FILES.items():
            held = _tensor([atoms[part] for part in parts], kind, fuse)
            more = {"vocab_tensor": True} if name == "embedding.weight" else marks if len(parts) > 1 else {}
            torch.save({"param": held, "cat_dim": 0, **more}, zero / name / file)
        torch.save(30, zero / name / "step.pt")
    torch.save(
        {"universal_checkpoint_info": {"original_vocab_size": TOKENS}}, zero.parent / "mp_rank_00_model_states.pt"
    )
    (folder / "latest_universal").write_text("global_step30\n")
    return folder


def _tensor(atoms: list[ParameterState], kind: str, fuse: Callable[[list[Tensor]], Tensor]) -> Tensor:
    parts = [atom.read(kind).clone() for atom in atoms]
    if len(parts) > 1:
        return fuse(parts)
    return fill(parts[0]) if atoms[0].name == "model.embed_tokens.weight" else parts[0]


def map_of(folder: Path, slices: int | None) -> Path:
    option = "" if slices is None else f", slices = {slices}"
    shifted = [[name.replace("{n}", "{n-3}") for name in group] for group in (QKV, GATE_UP)]
    path = folder / "names.toml"
    path.write_text(
        f"""
        "embedding.weight" = "model.embed_tokens.weight"
        "final.weight" = "model.norm.weight"
        "{{n}}.attention.qkv.weight" = {{ parts = {shifted[0]}{option} }}
        "{{n}}.mlp.gate_up.weight" = {{ parts = {shifted[1]}{option} }}
        "{{n}}.attention.dense.weight" = "model.layers.{{n-3}}.self_attn.o_proj.weight"
        "{{n}}.mlp.down.weight" = "model.layers.{{n-3}}.mlp.down_proj.weight"
        "{{n}}.input_layernorm.weight" = "model.layers.{{n-3}}.input_layernorm.weight"
        "{{n}}.post_attention_layernorm.weight" = "model.layers.{{n-3}}.post_attention_layernorm.weight"
        """
    )
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SealedCheckpoint:
    source = config(4)
    return save(tmp_path_factory.mktemp("saved"), source, even(source))


def compare(saved: SealedCheckpoint, folder: Path, map_: Path) -> None:
    for stage, held in taken(folder, config(3), "universal", map_).items():
        require_same(held, load_stage(saved.folder, config(3), stage))


def test_a_fused_folder_needs_a_map(saved: SealedCheckpoint, tmp_path: Path) -> None:
    folder = by_hand(saved, tmp_path / "in", fused_by_ranks)
    with pytest.raises(
        UserError, match=r"10\.attention\.dense\.weight is not a parameter of this model; map it with --names"
    ):
        taken(folder, config(3), "universal")
    with pytest.raises(UserError, match=r"has an unknown order of parts; use slices"):
        taken(folder, config(3), "universal", map_of(tmp_path, None))
    compare(saved, folder, map_of(tmp_path, RANKS))
    compare(saved, by_hand(saved, tmp_path / "whole", fused_whole), map_of(tmp_path, 1))


@dataclass
class SubparamShape:
    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> type[SubparamShape]:
    """The class under the name by which DeepSpeed's files have it."""
    module = "deepspeed.checkpoint.universal_checkpoint"
    there = types.ModuleType(module)
    there.SubparamShape = SubparamShape
    for name in ("deepspeed", "deepspeed.checkpoint", module):
        monkeypatch.setitem(sys.modules, name, there if name == module else types.ModuleType(name))
    monkeypatch.setattr(SubparamShape, "__module__", module)
    return SubparamShape


def test_declared_pieces_are_checked_against_the_map(
    saved: SealedCheckpoint, tmp_path: Path, deepspeed: type[SubparamShape]
) -> None:
    """Unequal ones by size, equal ones by number; with them the map needs no slices."""
    folder = by_hand(saved, tmp_path / "in", fused_whole)
    zero = folder / "global_step30" / "zero"

    def mark(sizes: tuple[int, ...]) -> None:
        for path in zero.glob("*.qkv.weight/[ef]*.pt"):
            held = torch.load(path, weights_only=False)
            torch.save(held | {"sub_param_shape": deepspeed([], (sizes, 8), 0)}, path)

    mark((8, 4, 4))
    for path in zero.glob("*.gate_up.weight/[ef]*.pt"):
        torch.save(torch.load(path) | {"param_n_sub_params": 2}, path)
    compare(saved, folder, map_of(tmp_path, None))
    with pytest.raises(UserError, match=r"declared as consecutive pieces of \[8, 4, 4\] rows, .* in 2 slices"):
        taken(folder, config(3), "universal", map_of(tmp_path, 2))
    mark((4, 8, 4))
    with pytest.raises(
        UserError, match=r"qkv.weight is declared as consecutive pieces of \[4, 8, 4\] rows, .* to \[8, 4, 4\]"
    ):
        taken(folder, config(3), "universal", map_of(tmp_path, None))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"original_vocab_size": 12},
            r"embedding.weight has shape \[16, 8\], not \[11, 8\] .*\(16 rows for 11 tokens\)",
        ),
        ({}, r"embedding.weight has shape \[16, 8\], not \[11, 8\]"),
    ],
)
def test_padding_rows_are_cut_only_where_the_folder_counts_them(
    saved: SealedCheckpoint, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    folder = by_hand(saved, tmp_path / "in", fused_by_ranks)
    states = folder / "global_step30" / "mp_rank_00_model_states.pt"
    torch.save({"universal_checkpoint_info": change}, states)
    path = map_of(tmp_path, RANKS)
    with pytest.raises(UserError, match=complaint):
        taken(folder, config(3), "universal", path)
    padded = '"embedding.weight" = { parts = ["model.embed_tokens.weight"], padded = true }'
    path.write_text(path.read_text().replace('"embedding.weight" = "model.embed_tokens.weight"', padded))
    compare(saved, folder, path)


@pytest.mark.parametrize(
    ("marks", "complaint"),
    [
        ({"cat_dim": 2}, "cat_dim = 2"),
        ({"param_n_sub_params": 2, "cat_dim": 1}, "sub-parameters that are not pieces along dimension 0"),
        ({"is_expert_param": True}, "is marked 'is_expert_param', which is not known"),
        (
            {"param_n_sub_params": 2},
            r"declared as consecutive pieces of \[8, 8\] rows, and mapped to \[8, 4, 4\]",
        ),
    ],
)
def test_unknown_or_inconsistent_marks_are_refused(
    saved: SealedCheckpoint, tmp_path: Path, marks: dict[str, Any], complaint: str
) -> None:
    folder = by_hand(saved, tmp_path / "in", fused_whole, **marks)
    with pytest.raises(UserError, match=complaint):
        taken(folder, config(3), "universal", map_of(tmp_path, None))


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_splitting_inverts_any_number_of_slices(slices: int) -> None:
    parts = [torch.randn(rows, 3) for rows in (16, 4, 8)]
    fused = torch.cat([torch.cat([part.chunk(slices)[one] for part in parts]) for one in range(slices)])
    assert all(torch.equal(*both) for both in zip(split(fused, (16, 4, 8), slices), parts, strict=True))


# ---- the assignment alone

MODEL = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
TABLE, NORM = MODEL


@pytest.mark.parametrize(
    ("given", "rules", "complaint"),
    [
        ([TABLE], [], r"model.norm.weight is missing; it should have shape \[8\]"),
        ([TABLE, NORM, "x"], [], "in: x is not a parameter of this model; map it with --names"),
        ([TABLE, "a", "b"], [("a", NORM), ("b", NORM)], "model.norm.weight is listed twice, as a and as b"),
        ([TABLE, NORM], [("a", NORM)], "names.toml: 'a' matches no tensor of in"),
        ([TABLE, "n.1"], [("n.{n}", NORM), ("n.*", NORM)], r"'n.\{n\}' and 'n.\*' match n.1; keep one"),
        (
            [TABLE, "n.1"],
            [("n.{n}", "model.layers.{n-3}.w")],
            r"n.1 \(mapped to model.layers.-2.w\) is not a",
        ),
    ],
)
def test_every_parameter_is_assigned_once(given: list[str], rules: list[tuple[str, str]], complaint: str) -> None:
    made = [names.NameRule(pattern, (part,)) for pattern, part in rules]
    with pytest.raises(UserError, match=complaint):
        names.assign(Path("in"), given, MODEL, "lm_head.weight", made, Path("names.toml"))


def test_derived_tensors_are_left_out_and_a_tied_head_is_noted() -> None:
    given = [*MODEL, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "cos.3"]
    found = names.assign(Path("in"), given, MODEL, "lm_head.weight", [names.NameRule("cos.*", ())])
    assert {whole.name for whole in found.wholes} == set(MODEL) and found.head == "lm_head.weight"
    assert set(found.left) == {"cos.3", "model.layers.0.self_attn.rotary_emb.inv_freq"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = 3", "'a': use a name in quotes, or a table of parts"),
        ("a.b = 'c'", "'a': use a name in quotes"),
        ("a = { parts = 'b' }", "'a': parts must be a list of names"),
        ("a = { parts = ['b', 'c'], slices = 0 }", "slices = 0 must be 1 or more"),
        ("a = { parts = ['b', 'c'], padded = true }", "padded = true goes with one part"),
        ("'a.{n}.{n}' = 'b'", "has {n} or [*] more than once"),
        ("a = 'b.{n}'", "'b.{n}' has a {n} or [*] that is not in the pattern"),
        ("a = ", "not valid TOML"),
    ],
)
def test_an_invalid_map_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text(text)
    with pytest.raises(UserError, match=f"names.toml: .*{complaint}"):
        names.read(tmp_path / "names.toml")


@pytest.mark.slow
def test_a_tied_head_must_equal_its_table(saved: SealedCheckpoint, tmp_path: Path) -> None:
    source, folder = config(4), written(saved, tmp_path / "out", "universal")
    zero = folder / "global_step30_universal" / "zero"
    table = torch.load(zero / TABLE / "fp32.pt")["param"]
    (zero / "lm_head.weight").mkdir()
    torch.save({"param": table}, zero / "lm_head.weight" / "fp32.pt")
    taken(folder, source, "universal")
    table[3, 3] += 0.25
    torch.save({"param": table}, zero / "lm_head.weight" / "fp32.pt")
    with pytest.raises(
        UserError, match=r"weights of lm_head.weight and of .*, which is tied to it, differ by up to 0.25"
    ):
        taken(folder, source, "universal")
