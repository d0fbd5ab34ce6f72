"""Groups of two processes whose loops use mixed precision, compilation, accumulation, LoRA, clipping or a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.joining import read_run_address
from planaria.runtime.fleet.spawner import spawner
from support.group_loops import PATIENCE_S, alone, member, once_exists, rank

pytestmark = pytest.mark.timeout(300)
KINDS = ["bf16_weights", "accumulated", "lora", "compiled", "compiled_part", "bf16_autocast", "clipped", "scheduled"]


def trained_by_two(folder: Path, kinds: Sequence[str], exchange: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the final states of a host and a member with these kinds of loops."""
    key, results = folder / "key", [folder / "0.pt", folder / "1.pt"]
    run_until_ended(
        folder,
        lambda address: [partial(member, kinds[address != ""], exchange, address, key, results[address != ""])],
    )
    return [torch.load(result) for result in results]


def run_until_ended(folder: Path, programs: Callable[[str], Sequence[Callable[[], None]]]) -> None:
    """Run the processes of a host (address ""), then those of a member that joins it."""
    preload = [*PRELOAD, "planaria.group.group"]
    children = [spawner().spawn("member", program, preload) for program in programs("")]
    try:
        run, until = folder / "runs" / "group", time.monotonic() + PATIENCE_S
        while not (run / "address.json").exists():
            assert time.monotonic() < until, "the group did not open"
            time.sleep(0.05)
        children += [spawner().spawn("member", program, preload) for program in programs(read_run_address(run).at)]
        assert [child.join(PATIENCE_S) for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill(1.0)


def plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in state.items()}


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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("exchange", [{"exchange": "allreduce"}, {"exchange": "diloco", "every": 3}])
def test_the_ranks_of_a_data_parallel_model_are_one_member(exchange: dict[str, Any], tmp_path: Path) -> None:
    """Two members of two ranks each; every rank uses one batch of each block."""

    def member_of(name: str, address: str, **options: Any) -> list[Callable[[], None]]:
        chosen = {**exchange, **options}
        return [partial(rank, number, chosen, address, tmp_path / "key", tmp_path / name) for number in (0, 1)]

    def programs(address: str) -> list[Callable[[], None]]:
        if not address:
            return member_of("host", "")
        joined = [
            partial(once_exists, tmp_path / "refused.1.error", program) for program in member_of("joined", address)
        ]
        return [*joined, *member_of("refused", address, compress="int8")]

    run_until_ended(tmp_path, programs)
    assert "wrap: compress is 'int8' here" in (tmp_path / "refused.0.error").read_text()
    assert (tmp_path / "refused.1.error").read_text() == "rank 0 is no longer a member; see its error"
    states = [torch.load(tmp_path / f"{name}.{number}.pt") for name in ("host", "joined") for number in (0, 1)]
    for state in states:
        assert state["facts"]["steps"] == 6
        require_equal(state["model"], states[0]["model"])
    if exchange["exchange"] == "allreduce":
        expected = alone("plain", blocks=4)
        for name, tensor in states[0]["model"].items():
            torch.testing.assert_close(tensor, expected[name.removeprefix("module.")], atol=1e-5, rtol=1e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("exchange", "sharded"), [("diloco", "joined"), ("noloco", "host"), ("diloco", "host")])
def test_a_sharded_member_and_a_data_parallel_one_are_the_same_group(
    exchange: str, sharded: str, tmp_path: Path
) -> None:
    """Two members of two ranks each; each rank of one of them has a part of every parameter."""

    def programs(address: str) -> list[Callable[[], None]]:
        name, chosen = "joined" if address else "host", {"exchange": exchange, "every": 3}
        return [
            partial(rank, number, chosen, address, tmp_path / "key", tmp_path / name, shards=name == sharded)
            for number in (0, 1)
        ]

    run_until_ended(tmp_path, programs)
    host, host_1, joined, joined_1 = (
        torch.load(tmp_path / f"{name}.{number}.pt") for name in ("host", "joined") for number in (0, 1)
    )
    require_equal(host["model"], host_1["model"])
    require_equal(joined["model"], joined_1["model"])
    assert host["facts"]["steps"] + joined["facts"]["steps"] == 12 and host["facts"]["rounds"] >= 1
    if exchange == "diloco":
        require_equal(host["model"], joined["model"])
