"""The store of checkpoints: sealing, listing, rotation, rollbacks and refused manifests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.families import build_stage
from planaria.models.llama_stages import Llama
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint, read_manifest

STAGES = 2
MODEL = ModelConfig(vocab=11, dim=8, layers=2, heads=2, hidden=12, context=6)
ALL = tuple(range(STAGES + 1))


def gather(store: CheckpointStore, step: int, stages: tuple[int, ...] = ALL) -> CheckpointManifest:
    for stage in stages:
        weights = {n: p.detach() for n, p in build_stage(MODEL, STAGES, stage, seed=step).named_parameters()}
        write_stage(store.unfinished(step), stage, step, StageState(weights))
    return CheckpointManifest(step=step, stages=list(stages), pipeline_stages=STAGES, model=MODEL)


def seal(store: CheckpointStore, step: int, stages: tuple[int, ...] = ALL, keep: int = 9) -> SealedCheckpoint:
    partial = "" if stages == ALL else ".partial"
    return store.seal(f"step-{step:08d}{partial}", gather(store, step, stages), keep)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def names(store: CheckpointStore) -> list[str]:
    return [saved.folder.name for saved in store.list()]


def test_the_store_is_empty_before_the_first_seal(store: CheckpointStore) -> None:
    assert store.list() == []
    assert store.newest() is None and store.newest_step_by_name() == 0
    store.discard_unfinished()


def test_a_sealed_checkpoint_holds_its_stages_and_a_manifest(store: CheckpointStore) -> None:
    saved = seal(store, 100)
    assert (saved.step, saved.whole) == (100, True)
    assert sorted(f.name for f in saved.folder.iterdir()) == [
        "manifest.json", "stage-0000.safetensors", "stage-0001.safetensors", "stage-0002.safetensors",
    ]  # fmt: skip
    assert store.newest() == saved
    assert not store.unfinished(100).exists()
    assert load_model(saved).global_state().keys() == Llama(MODEL).global_state().keys()
    fresh = Llama(MODEL, stages=1, seed=100).global_state()  # another cut, the same numbers
    for name, tensor in load_model(saved).global_state().items():
        assert torch.equal(tensor, fresh[name])


@pytest.mark.parametrize(("owner", "method"), [(Path, "unlink"), (CheckpointManifest, "model_dump"), (Path, "replace")])
def test_an_interrupted_seal_leaves_no_checkpoint(
    owner: type, method: str, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seal(store, 1)
    manifest = gather(store, 2)
    (store.unfinished(2) / ".stage-0001.safetensors.77").write_bytes(b"of a writer that died")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, method, killed)
        store.seal("step-00000002", manifest, 9)
    assert store.list() == [before]
    store.discard_unfinished()
    assert [folder.name for folder in store.folder.iterdir()] == ["step-00000001"]


def test_foreign_files_are_left_out_of_a_checkpoint(store: CheckpointStore) -> None:
    """A stage of a worker that died before the seal, and an unfinished file."""
    gather(store, 5)
    (store.unfinished(5) / ".stage-0001.safetensors.77").write_bytes(b"half")
    saved = store.seal(
        "step-00000005.partial", CheckpointManifest(step=5, stages=[0, 1], pipeline_stages=STAGES, model=MODEL), 2
    )
    assert sorted(f.name for f in saved.folder.iterdir()) == [
        "manifest.json", "stage-0000.safetensors", "stage-0001.safetensors",
    ]  # fmt: skip
    assert not saved.whole


def test_the_newest_whole_checkpoints_are_kept_and_partial_ones_do_not_count(store: CheckpointStore) -> None:
    seal(store, 1)
    seal(store, 2, stages=(0, 1))
    seal(store, 3)
    seal(store, 4, stages=(0, 2), keep=2)
    assert names(store) == ["step-00000001", "step-00000002.partial", "step-00000003", "step-00000004.partial"]
    seal(store, 10, keep=2)
    assert names(store) == ["step-00000002.partial", "step-00000003", "step-00000004.partial", "step-00000010"]


def test_a_run_resumed_from_an_earlier_step_keeps_its_checkpoints(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        seal(store, step)
    again = seal(store, 1, keep=1)
    assert again.folder.is_dir()
    (again.folder / "mark").touch()
    assert not (seal(store, 1).folder / "mark").exists(), "a checkpoint of the same step is replaced"
    assert names(store) == ["step-00000001", "step-00000002", "step-00000003"]


def test_the_reached_step_follows_from_folder_names(store: CheckpointStore) -> None:
    """A manifest may be removed between listing and reading, while the run drops old checkpoints."""
    sealed = [seal(store, 2), seal(store, 12), seal(store, 15, (0, 1))]
    gather(store, 20)
    for saved in sealed:
        (saved.folder / "manifest.json").unlink()
    assert store.newest_step_by_name() == 12


def test_newest_orders_by_step_with_partial_after_whole(store: CheckpointStore) -> None:
    seal(store, 9)
    seal(store, 10, stages=(0, 1))
    seal(store, 10)
    assert names(store) == ["step-00000009", "step-00000010", "step-00000010.partial"]
    newest, whole = store.newest(), store.newest(whole_only=True)
    assert (newest.folder.name, whole.folder.name) == ("step-00000010.partial", "step-00000010")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "no manifest.json, so it is not a checkpoint"),
        ("", "damaged or of another version"),
        ("{}", "damaged or of another version"),
        ('{"step": 1}', "damaged or of another version"),
        (b"\xff\xfe", "damaged or of another version"),
        ("FORMAT", "format 2; this planaria reads format 1"),
    ],
)
def test_an_invalid_manifest_is_refused_in_one_line(
    text: str | bytes | None, complaint: str, store: CheckpointStore
) -> None:
    saved = seal(store, 1)
    path = saved.folder / "manifest.json"
    if text is None:
        path.unlink()
    elif text == "FORMAT":
        path.write_text(saved.manifest.model_copy(update={"format": 2}).model_dump_json())
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (lambda: read_manifest(saved.folder), store.list, store.newest):
        with pytest.raises(UserError) as caught:
            read()
        assert complaint in str(caught.value)
        assert str(saved.folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_model_is_loaded_from_a_partial_or_damaged_checkpoint(store: CheckpointStore) -> None:
    with pytest.raises(UserError, match=r"stages \[1\] are missing; resume the run, or choose a whole checkpoint"):
        load_model(seal(store, 4, stages=(0, 2)))
    saved = seal(store, 4)
    shutil.copyfile(stage_file(saved.folder, 1), stage_file(saved.folder, 2))
    with pytest.raises(UserError, match="holds stage 1"):
        load_model(saved)


def test_checkpoints_after_the_resumed_one_are_set_aside(store: CheckpointStore) -> None:
    first = seal(store, 100)
    store.set_aside_after(seal(store, 200))
    assert names(store) == ["step-00000100", "step-00000200"], "after the newest there are none"
    seal(store, 250, (0, 1))
    store.set_aside_after(first)
    assert names(store) == ["step-00000100"]
    assert len(list(store.folder.glob("abandoned-*"))) == 2, "set aside, not destroyed"
    again = seal(store, 200)
    assert store.newest() == again
