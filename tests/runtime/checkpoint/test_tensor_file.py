"""Files that the safetensors library reads, written without stopping other threads of the process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file

from planaria.models.packing import TYPES
from planaria.runtime.checkpoint import tensor_file

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    kind = draw(st.sampled_from(list(TYPES)))
    return made.to(kind).T if len(shape) == 2 else made.to(kind)


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@given(st.dictionaries(NAMES, tensors(), max_size=5), st.dictionaries(NAMES, st.text(max_size=9), max_size=2))
def test_the_library_reads_written_files(
    tmp_path_factory: pytest.TempPathFactory, given: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "given.safetensors"
    with path.open("wb") as file:
        head = tensor_file.write(file, specs(given), given.__getitem__, metadata)
    assert path.read_bytes().startswith(head)
    with tensor_file.open_file(path) as ours:
        assert (ours.head, ours.header.metadata, ours.header.specs.keys()) == (head, metadata, given.keys())
        assert all(torch.equal(ours.tensor(name), tensor) for name, tensor in given.items())
    for found in (load_file(path), load(path.read_bytes())):
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in given.items())
    with safe_open(path, framework="pt") as opened:
        assert (opened.metadata() or {}) == metadata


def test_other_threads_run_while_the_disk_hangs(tmp_path: Path) -> None:
    """A pipe without a reader stands for a disk that hangs."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    beats, over = [], threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            beats.append(time.monotonic())
            if len(beats) == 20:
                os.set_blocking(reading, True)
                threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reading, 1 << 20), b"")]).start()

    threading.Thread(target=beat).start()
    with path.open("wb") as file:
        large = {"large": torch.zeros(1 << 20)}
        tensor_file.write(file, specs(large), large.__getitem__, {})
    over.set()
    assert len(beats) >= 20, "they ran meanwhile"
