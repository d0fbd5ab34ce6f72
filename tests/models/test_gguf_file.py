"""GGUF's container: agreement with the package ``gguf``, and refusal of inconsistent headers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria.common.errors import UserError
from planaria.models.gguf_file import read_metadata

gguf = pytest.importorskip("gguf")


def written(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (("uint8", 1), ("int8", -1), ("int16", -2), ("uint32", 3), ("int64", -4), ("float64", 0.5)):
        getattr(writer, f"add_{add}")(f"one.{add}", value)
    writer.add_bool("yes", True)
    writer.add_array("truths", [True, False])
    writer.add_array("texts", ["a", "Ġ", ""])
    writer.add_array("floats", [0.25, -1.5])
    writer.add_custom_alignment(64)
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    return path


def test_the_reader_agrees_with_the_library(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    ours, theirs = read_metadata(file), gguf.GGUFReader(file)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.values == expected and len(expected) > 10
    for tensor in theirs.tensors:
        located = ours.tensors[tensor.name]
        assert (located.begin, located.kind) == (tensor.data_offset, tensor.tensor_type)
        assert located.shape == tuple(reversed(tensor.shape.tolist()))
    assert ours.tensors.keys() == {"matrix", "vector"}


def header(version: int = 3, tensors: int = 0, values: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, values) + rest


def value(kind: int, content: bytes) -> bytes:
    return struct.pack("<Q1sI", 1, b"k", kind) + content


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(tensors=2**60), "entries in"),
        (header(values=2**63), "entries in"),
        (header(values=1, rest=value(8, struct.pack("<Q", 2**62))), "ends before byte"),
        (header(values=1, rest=value(9, struct.pack("<IQ", 8, 2**40))), "entries in"),
        (header(values=1, rest=value(9, struct.pack("<IQ", 12, 2**61))), "ends before byte"),
        (header(values=1, rest=value(99, bytes(8))), "kind 99"),
        (header(values=1, rest=value(9, struct.pack("<IQ", 9, 0))), "kind 9"),
        (header(tensors=1, rest=struct.pack("<Q1sI", 1, b"t", 9) + bytes(40)), "9 dimensions"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0)), r"shape \[0\]"),
    ],
)
def test_inconsistent_headers_are_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.gguf: truncated or damaged GGUF file.*{complaint}") as caught:
        read_metadata(file)
    assert "\n" not in str(caught.value)


def test_values_are_plain_python_objects(tmp_path: Path) -> None:
    found: dict[str, Any] = read_metadata(written(tmp_path / "m.gguf")).values
    assert type(found["one.uint8"]) is int and type(found["one.float64"]) is float and found["yes"] is True
    assert found["truths"] == [True, False]
