"""Groups of two processes whose loops use mixed precision, compilation, accumulation, LoRA, clipping or a schedule."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import alone, member
from torch import Tensor

from planaria.runtime.engine.process_engine import PRELOAD
from planaria.runtime.fleet.joining import read_run_address
from planaria.runtime.fleet.spawner import spawner

KINDS = ["bf16_weights", "accumulated", "lora", "compiled", "compiled_part", "bf16_autocast", "clipped", "scheduled"]


def trained_by_two(folder: Path, kinds: Sequence[str], exchange: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the final states of a host and a member with these kinds of loops."""
    key, results = folder / "key", [folder / "0.pt", folder / "1.pt"]
    preload = [*PRELOAD, "planaria.group.group"]
    host = spawner().spawn("member", partial(member, kinds[0], exchange, "", key, results[0]), preload)
    run, until = folder / "runs" / "group", time.monotonic() + 90
    while not (run / "address.json").exists():
        assert time.monotonic() < until, "the group did not open"
        time.sleep(0.05)
    other = partial(member, kinds[1], exchange, read_run_address(run).at, key, results[1])
    children = [host, spawner().spawn("member", other, preload)]
    try:
        assert [child.join(90) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill(1.0)
    return [torch.load(result) for result in results]


def plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}


def require_equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert plain(state).keys() == plain(expected).keys()
    for name, tensor in plain(expected).items():
        torch.testing.assert_close(plain(state)[name], tensor, atol=0, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", KINDS)
def test_members_that_share_a_gradient_end_with_the_weights_of_one_loop(kind: str, tmp_path: Path) -> None:
    first, second = trained_by_two(tmp_path, [kind, kind], {"exchange": "allreduce"})
    require_equal(first["model"], second["model"])
    require_equal(first["model"], alone("plain" if kind.startswith("compiled") else kind))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_outer_step_gives_all_members_the_same_weights(kind: str, tmp_path: Path) -> None:
    every = 2 if kind == "accumulated" else 4
    first, second = trained_by_two(tmp_path, [kind, kind], {"exchange": "diloco", "every": every})
    require_equal(first["model"], second["model"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["compiled_part", "compiled"])
def test_a_compiled_member_and_a_plain_one_are_the_same_group(kind: str, tmp_path: Path) -> None:
    first, second = trained_by_two(tmp_path, ["plain", kind], {"exchange": "allreduce"})
    require_equal(first["model"], second["model"])
    require_equal(first["model"], alone("plain"))
