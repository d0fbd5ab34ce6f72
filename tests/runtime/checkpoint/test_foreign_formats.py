"""Folders of DCP and of DeepSpeed's universal layout: torch reads them, and reading is exact at any cut."""

from __future__ import annotations

import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.models.huggingface import export_folder, import_model
from planaria.runtime.checkpoint.foreign import huggingface
from planaria.runtime.checkpoint.foreign.reading import FolderStages
from planaria.runtime.checkpoint.loading import ParameterState, atoms_of_model, load_stage
from planaria.runtime.checkpoint.store import SealedCheckpoint
from support.foreign_checkpoints import KINDS_OF, SAMPLES, even, job, require_same, taken, written
from support.sample_checkpoints import STEP, config, save


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[SealedCheckpoint, Path]:
    """A checkpoint whose head is not its embedding table, and the folder of the universal layout made of it."""
    home, source = tmp_path_factory.mktemp("untied"), config(4, tied=False)
    saved = save(home / "checkpoints", source, even(source))
    folder = written(saved, home / "out", "universal")
    return saved, folder / (folder / "latest_universal").read_text()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("source", "stages"),
    [
        (config(4), 1),
        (config(4, tied=False), 12),
        (config(1, ends_layers=2), 3),
        (config(3, 2), 6),
        (config(2, 3, "allreduce"), 4),
    ],
)
@pytest.mark.parametrize("kind", ["dcp", "universal"])
def test_a_folder_is_read_back_bit_for_bit_at_any_cut(
    source: RunConfig, stages: int, kind: str, tmp_path: Path
) -> None:
    states = None if kind == "dcp" else even(source)
    saved = save(tmp_path / "checkpoints", source, states)
    wanted = config(stages, tied=source.model.tied)
    found = taken(written(saved, tmp_path / "out", kind), wanted, kind)
    assert found.keys() == set(range(stages + 1))
    for stage, held in found.items():
        require_same(held, load_stage(saved.folder, wanted, stage))
    if kind == "dcp":  # the states compared have several clocks and scales
        assert {clock for held in found.values() for clock in held.clocks.values()} >= {17, 30}
        assert {scale for held in found.values() for scale in (*held.scales.values(), held.lr_scale)} == {1.0, 1.1}


def test_torch_itself_reads_a_dcp_folder_bit_for_bit(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", config(4))
    folder, atoms = written(saved, tmp_path / "out", "dcp"), atoms_of_model(saved)
    moments = {a.name: {k: torch.zeros(a.shape) for k in KINDS_OF[1:]} | {"step": torch.tensor(0.0)} for a in atoms}
    state: dict[str, Any] = {"model": {a.name: torch.zeros(a.shape) for a in atoms}, "optim": {"state": moments}}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    for atom in atoms:
        own = state["optim"]["state"][atom.name]
        assert torch.equal(state["model"][atom.name], atom.read("weights"))
        assert all(torch.equal(own[kind], atom.read(kind)) for kind in KINDS_OF[1:])
        assert own["step"].item() == atom.clock
    read = torch_dcp.FileSystemReader(folder).read_metadata()
    keys = {f"model.{a.name}" for a in atoms}
    keys |= {f"optim.state.{a.name}.{kind}" for a in atoms for kind in (*KINDS_OF[1:], "step")}
    assert read.state_dict_metadata.keys() == keys
    assert read.storage_meta is not None and read.storage_meta.checkpoint_id is None


@pytest.mark.slow
def test_a_model_saved_by_torch_is_read(tmp_path: Path) -> None:
    """A folder of another program: the state is nested, beside settings that are no tensors."""
    wanted = config(3)
    states = even(wanted)
    atoms = atoms_of_model(save(tmp_path / "checkpoints", wanted, states))
    state = {a.name: {k: a.read(k) for k in KINDS_OF[1:]} | {"step": torch.tensor(30.0)} for a in atoms}
    groups = [{"lr": 0.1, "params": [a.name for a in atoms]}]
    model = {a.name: a.read("weights").clone() for a in atoms}
    whole = {"app": {"model": model, "optim": {"state": state, "param_groups": groups}}}
    torch_dcp.save(whole, checkpoint_id=tmp_path / "out", no_dist=True)
    reply = FolderStages(job(tmp_path / "out", wanted, "dcp")).carry_out()
    assert (reply.step, reply.samples) == (30, None) and "app.optim.param_groups.0.lr" in reply.notes[0]
    for stage, held in taken(tmp_path / "out", wanted, "dcp").items():
        require_same(held, states[0, stage])


@pytest.mark.parametrize("per", ["group", "parameter"])
def test_steps_in_parameter_groups_are_found(per: str, tmp_path: Path) -> None:
    wanted = config(3)
    atoms = atoms_of_model(save(tmp_path / "checkpoints", wanted))
    state = {a.name: {k: a.read(k) for k in KINDS_OF[1:]} for a in atoms}
    clocks = {a.clock for a in atoms}
    groups: Any = [{"step": clock, "params": [a.name for a in atoms if a.clock == clock]} for clock in clocks]
    assert len(groups) == 2
    if per == "parameter":
        groups = {a.name: {"step": a.clock} for a in atoms}
    model = {a.name: a.read("weights").clone() for a in atoms}
    whole = {"model": model, "optim": {"state": state, "param_groups": groups}}
    torch_dcp.save(whole, checkpoint_id=tmp_path / "out", no_dist=True)
    found = taken(tmp_path / "out", wanted, "dcp")
    assert {clock for held in found.values() for clock in held.clocks.values()} == {17, 30}
    assert set(found[1].clocks.values()) == {30}


def in_boxes(folder: Path, tensor: Tensor, boxes: list[tuple[tuple[int, int], tuple[int, int]]], key: str) -> None:
    """Spread a tensor of a folder that torch wrote over boxes (offsets, sizes), a file for each, as ranks would."""
    found = torch_dcp.FileSystemReader(folder).read_metadata()
    chunks = []
    for number, (offsets, sizes) in enumerate(boxes):
        area = tensor[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]].clone()
        file = folder / f"__{number}_0.part"
        torch.save(area, file)
        chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        index = torch_metadata.MetadataIndex(key, offsets, number)
        found.storage_data[index] = _StorageInfo(file.name, 0, file.stat().st_size)
    found.state_dict_metadata[key].chunks[:] = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(found))


QUARTERS = [((0, 0), (3, 8)), ((3, 0), (8, 5)), ((3, 5), (8, 3))]


@pytest.mark.slow
def test_a_tensor_written_in_boxes_by_ranks_is_assembled(tmp_path: Path) -> None:
    wanted = config(3)
    saved = save(tmp_path / "checkpoints", wanted)
    folder, key = written(saved, tmp_path / "out", "dcp"), "model.model.embed_tokens.weight"
    table = next(a for a in atoms_of_model(saved) if a.name == "model.embed_tokens.weight").read("weights")
    in_boxes(folder, table, QUARTERS, key)
    assert torch.equal(taken(folder, wanted, "dcp")[0].weights["embed_tokens.weight"], table)
    for wrong, problem in (
        (QUARTERS[:2], "some are missing or repeated"),
        ([*QUARTERS[:2], ((3, 4), (8, 3))], "overlaps another"),
    ):
        in_boxes(folder, table, wrong, key)
        with pytest.raises(UserError, match=f"embed_tokens.weight: .*{problem}"):
            taken(folder, wanted, "dcp")


def test_a_universal_folder_has_the_files_of_the_layout(untied: tuple[SealedCheckpoint, Path]) -> None:
    saved, tag = untied

    def loaded(*parts: str) -> Any:
        return torch.load(tag.joinpath(*parts), weights_only=True)

    for atom in atoms_of_model(saved):
        files = {path.name for path in (tag / "zero" / atom.name).iterdir()}
        assert files == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}
        for kind, file in zip(KINDS_OF, ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"), strict=True):
            held = loaded("zero", atom.name, file)
            assert torch.equal(held["param"], atom.read(kind))
            assert held.get("vocab_tensor", False) == (atom.shape[0] == 11 and len(atom.shape) == 2)
            assert held["param"].untyped_storage().nbytes() == held["param"].nbytes
        assert loaded("zero", atom.name, "step.pt").item() == STEP
    states = loaded("mp_rank_00_model_states.pt")
    assert states["universal_checkpoint_info"]["universal_checkpoint_version"] == 0.4
    assert (states["global_steps"], states["global_samples"]) == (STEP, SAMPLES)
    (group,) = loaded("zero", "optimizer_state.pt")["param_groups"]
    assert (group["step"], group["betas"]) == (STEP, (0.9, 0.999))


def test_tensor_parallel_ranks_compute_the_same_from_a_universal_folder(untied: tuple[SealedCheckpoint, Path]) -> None:
    """A loader cuts tensors larger than its own parameter along ``cat_dim``, or along dimension 0 without one."""
    saved, tag = untied
    zero = tag / "zero"
    held = {p.name: torch.load(p / "exp_avg.pt", weights_only=True) for p in zero.iterdir() if p.is_dir()}
    whole = {name: one["param"].double() for name, one in held.items()}

    def of_rank(rank: int, name: str) -> Tensor:
        return whole[name].chunk(2, held[name].get("cat_dim", 0))[rank]

    layer = "model.layers.2."
    ups = [f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"]
    output, down = f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"
    x = torch.randn(3, whole[ups[0]].shape[1], dtype=torch.float64)
    heads = torch.randn(3, whole[output].shape[1], dtype=torch.float64)

    def perceptron(weights: list[Tensor], last: Tensor) -> Tensor:
        return (torch.sigmoid(x @ weights[0].T) * (x @ weights[1].T)) @ last.T

    parts = [perceptron([of_rank(rank, name) for name in ups], of_rank(rank, down)) for rank in (0, 1)]
    assert torch.allclose(parts[0] + parts[1], perceptron([whole[name] for name in ups], whole[down]))
    parts = [half @ of_rank(rank, output).T for rank, half in enumerate(heads.chunk(2, 1))]
    assert torch.allclose(parts[0] + parts[1], heads @ whole[output].T)
    norms = {name for name in whole if "norm" in name}
    assert norms and {name for name in whole if "cat_dim" not in held[name]} == norms, "each rank has all of a norm"
    assert {name for name in whole if held[name].get("cat_dim") == 1} == {
        f"model.layers.{n}.{module}.weight"
        for n in range(saved.manifest.model.layers)
        for module in ("self_attn.o_proj", "mlp.down_proj")
    }


def test_unequal_clocks_cannot_be_written_to_a_universal_folder(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", config(4))
    with pytest.raises(UserError, match=r"a single step, but .* has 30 updates and model.layers.5.* 17; use"):
        written(saved, tmp_path / "out", "universal")


def test_a_universal_folder_without_a_note_has_its_own_counters(tmp_path: Path) -> None:
    source = config(4)
    folder = written(save(tmp_path / "checkpoints", source, even(source)), tmp_path / "out", "universal")
    (folder / "planaria.json").unlink()
    tag = folder / (folder / "latest_universal").read_text()
    reply = FolderStages(job(folder, source, "universal")).carry_out()
    assert (reply.step, reply.samples) == (STEP, SAMPLES)
    for path in (tag / "zero").glob("*/step.pt"):
        path.unlink()
    assert FolderStages(job(tag, source, "universal")).carry_out().step == STEP
    (tag / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(UserError, match="no step of model"):
        FolderStages(job(folder, source, "universal"))


def test_weights_can_be_read_without_moments(tmp_path: Path) -> None:
    source = config(4)
    bare = {at: held.part(lambda name: True, moments=False) for at, held in even(source).items()}
    folder = written(save(tmp_path / "checkpoints", source, bare), tmp_path / "out", "dcp")
    reply = FolderStages(job(folder, source, "dcp")).carry_out()
    assert reply.notes == ("without moments: they are reset",)
    assert all(not held.moments for held in taken(folder, source, "dcp").values())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_hugging_face_weights_are_written_in_shards(
    precision: Any, dtype: torch.dtype, untied: tuple[SealedCheckpoint, Path], tmp_path: Path
) -> None:
    saved, _ = untied
    atoms, most = atoms_of_model(saved), 2000
    export_folder(
        saved.manifest.model, tmp_path / "hf", lambda made: huggingface.write_llama(atoms, made, precision, most)
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held = {file: load_file(tmp_path / "hf" / file) for file in files}
    assert all(index["weight_map"][name] == file for file, tensors in held.items() for name in tensors)
    assert all(sum(t.nbytes for t in tensors.values()) <= most or len(tensors) == 1 for tensors in held.values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in held.values() for t in tensors.values())
    model = import_model(tmp_path / "hf").global_state()
    assert model.keys() == {atom.name for atom in atoms}
    assert all(torch.equal(model[atom.name], atom.read("weights").to(dtype).float()) for atom in atoms)


@pytest.mark.parametrize("kind", ["dcp", "universal", "hf"])
def test_an_export_holds_at_most_two_tensors(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = config(4, 2)
    saved = save(tmp_path / "checkpoints", source, even(source))
    living, most, real = list[weakref.ref[Tensor]](), 0, ParameterState.read

    def read(self: ParameterState, what: str) -> Tensor:
        nonlocal most
        living[:] = [one for one in living if one() is not None]
        most = max(most, len(living))
        tensor = real(self, what)
        living.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ParameterState, "read", read)
    if kind == "hf":
        (tmp_path / "out").mkdir()
        huggingface.write_llama(atoms_of_model(saved), tmp_path / "out", "fp32", 1 << 30)
    else:
        written(saved, tmp_path / "out", kind)
    assert most <= 2
