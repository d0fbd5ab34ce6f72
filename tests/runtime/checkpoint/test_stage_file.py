"""Files of stages: exact states, refused damage, and writes that are complete or leave no trace."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from planaria.common.errors import UserError
from planaria.models.state import StageState
from planaria.runtime.checkpoint import tensor_file
from planaria.runtime.checkpoint.stage_file import read_contents, read_stage, require_stage, stage_file, write_stage
from support.stage_states import assert_same_state


def state(seed: int = 1) -> StageState:
    generator = torch.Generator().manual_seed(seed)
    weights = {"layers.0.a": torch.randn(3, 4, generator=generator), "norm": torch.randn(5, generator=generator)}
    weights["norm"][0] = -0.0
    weights["norm"][1] = 1e-42  # a subnormal number
    moments = {name: {"exp_avg": t * 0.3, "exp_avg_sq": t * t} for name, t in weights.items()}
    clocks = {"layers.0.a": 17, "norm": 3}
    return StageState(weights, moments, clocks, 1.1, 0.1 + 0.2, 1 / 3, {"cpu": generator.get_state()})


def assert_same(found: StageState, expected: StageState) -> None:
    assert_same_state(found, expected, but=())


def refused(folder: Path, stage: int = 2) -> str:
    """Return the one line with which reading fails."""
    with pytest.raises(UserError) as caught:
        read_stage(folder, stage, 1)
    line = str(caught.value)
    assert "\n" not in line
    assert str(stage_file(folder, stage)) in line
    return line


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"grad_norm": None, "clipped_norm": None},
        {"moments": {}, "clocks": {}, "generators": {}},
        {"weights": {"t": torch.randn(4, 6).T, "h": torch.randn(1, 2).bfloat16()[:, 0]}, "moments": {}, "clocks": {}},
        {"outer": {"rounds": torch.tensor(1 << 60), "slow/norm": torch.randn(5).half()}},
    ],
)
def test_a_stage_is_read_back_bit_for_bit(changed: dict[str, object], tmp_path: Path) -> None:
    kept = replace(state(), **changed)
    written = write_stage(tmp_path / "made" / "on demand", 2, 40, kept)
    folder = tmp_path / "made" / "on demand"
    assert [file.name for file in folder.iterdir()] == ["stage-0002.safetensors"]
    content = stage_file(folder, 2).read_bytes()
    assert written.bytes == len(content)
    for known in (written.sha256, hashlib.sha256(content).hexdigest()):  # the latter as older manifests have it
        assert_same(read_stage(folder, 2, 40, known), kept)
        require_stage(folder, 2, 40, known)
    for read in (read_stage, require_stage):
        with pytest.raises(UserError, match="has changed since it was written"):
            read(folder, 2, 40, "0" * 64)
    read_contents(folder, 2, 40)


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, (1 << 63) - 1),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_are_read_back_exactly(tmp_path: Path, scale: float, norm: float | None, clock: int) -> None:
    w = torch.ones(2)
    kept = StageState({"w": w}, {"w": {"exp_avg": w, "exp_avg_sq": w}}, {"w": clock}, scale, norm, norm)
    write_stage(tmp_path, 1, 0, kept)
    assert_same(read_stage(tmp_path, 1, 0), kept)


def test_a_missing_file_is_named_and_a_new_one_replaces_the_old(tmp_path: Path) -> None:
    assert "missing; choose another checkpoint" in refused(tmp_path)
    write_stage(tmp_path, 2, 1, state(1))
    write_stage(tmp_path, 2, 1, state(2))
    assert_same(read_stage(tmp_path, 2, 1), state(2))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    write_stage(tmp_path, 2, 1, state())
    path = stage_file(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:length])
    assert "damaged" in refused(tmp_path)
    with pytest.raises(UserError, match="damaged"):
        read_contents(tmp_path, 2, 1)


def file_of(folder: Path) -> tuple[Path, bytearray, int]:
    """Return the path and content of stage 2's file, and the length of its header."""
    path = stage_file(folder, 2)
    raw = bytearray(path.read_bytes())
    return path, raw, struct.unpack_from("<Q", raw)[0]


@pytest.mark.parametrize(
    "change", [{"version": 3}, {"version": 1}, {"stage": "many"}, {"step": 1.5}, {"x": 1}, {"version": None}]
)
def test_an_invalid_label_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    write_stage(tmp_path, 2, 1, state())
    path, raw, length = file_of(tmp_path)
    header, rest = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header["__metadata__"]["planaria"] = json.dumps(json.loads(header["__metadata__"]["planaria"]) | change)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    assert "damaged or of another version" in refused(tmp_path)


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    """As planaria 0.1 wrote it: numbers in the header, one clock for all, one generator."""
    kept = state()
    tensors = {f"weights.{name}": tensor for name, tensor in kept.weights.items()}
    for name, pair in kept.moments.items():
        tensors |= {f"{key}.{name}": tensor for key, tensor in pair.items()}
    tensors |= {"rng": kept.generators["cpu"], "outer.rounds": torch.tensor(4)}
    label = {"version": 1, "stage": 2, "step": 9, "updates": 17, "lr_scale": 1.1, "grad_norm": 0.5}
    save_file(tensors, stage_file(tmp_path, 2), {"planaria": json.dumps(label | {"clipped_norm": None})})
    expected = replace(kept, clocks=dict.fromkeys(kept.moments, 17), grad_norm=0.5, clipped_norm=None)
    assert_same(read_stage(tmp_path, 2, 9), replace(expected, outer={"rounds": torch.tensor(4)}))
    read_contents(tmp_path, 2, 9)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_in_a_tensor_is_found_without_a_manifest(tmp_path: Path, data: st.DataObject) -> None:
    """The tensor is named."""
    write_stage(tmp_path, 2, 1, state())
    path, raw, length = file_of(tmp_path)
    raw[data.draw(st.integers(8 + length, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    assert "of a packed state is damaged" in refused(tmp_path)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_is_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    write_stage(tmp_path, 2, 1, state())
    path, raw, length = file_of(tmp_path)
    raw[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        read_stage(tmp_path, 2, 1)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stage(tmp_path, 2, 1, state(1))

    def full(file: BinaryIO, *rest: object) -> str:
        file.write(b"half of it")
        raise OSError(28, "No space left")

    monkeypatch.setattr(tensor_file, "write", full)
    with pytest.raises(OSError, match=r"cannot write .*stage-0002.safetensors \(.*No space left.*MB free"):
        write_stage(tmp_path, 2, 2, state(2))
    assert [file.name for file in tmp_path.iterdir()] == ["stage-0002.safetensors"]
    assert_same(read_stage(tmp_path, 2, 1), state(1))


def test_two_processes_may_write_the_same_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen worker resumes its write after its successor has written the stage."""
    real = tensor_file.write

    def frozen(file: BinaryIO, *rest: Any) -> str:
        monkeypatch.setattr(tensor_file, "write", real)
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            write_stage(tmp_path, 2, 1, state(2))
        file.write(b"late bytes of the frozen writer")
        assert_same(read_stage(tmp_path, 2, 1), state(2))
        file.seek(0)
        return real(file, *rest)

    monkeypatch.setattr(tensor_file, "write", frozen)
    write_stage(tmp_path, 2, 1, state(1))
    assert_same(read_stage(tmp_path, 2, 1), state(1))
