"""The state of a member whose two ranks each have a part of every parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from planaria.common.errors import RunStopped, UserError
from planaria.group.group import Group
from planaria.group.member_state import MemberState
from planaria.group.ranks import Follower, Ranks
from planaria.group.settings import GroupSettings
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.spawner import spawner
from support.group_loops import sharded

pytestmark = pytest.mark.timeout(200)
JOIN_S = 140.0


def network(seed: int) -> nn.Sequential:
    """Return a network whose rows do not divide evenly, with buffers and a frozen layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 1).requires_grad_(False))


def trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Train ``model`` on the same samples at every rank."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        model(torch.linspace(-1, 1, 12).reshape(4, 3) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def member(seed: int, steps: int) -> MemberState:
    """Return the state of a member of one process; all have the same frozen weights."""
    model = network(seed)
    model[3].load_state_dict(network(0)[3].state_dict())
    return MemberState(model, trained(model, steps), {})


def at_rank(number: int, folder: Path, check: Callable[[Ranks, MemberState], None]) -> None:
    """Be a rank of a sharded member that trained two steps; rank 0 runs ``check``, and the other one follows it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'ranks'}", rank=number, world_size=2)
    model = network(1)
    model[3].load_state_dict(network(0)[3].state_dict())
    ranks = Ranks(sharded(model))
    owned = ranks.state_of(model, trained(model, 2), {})
    try:
        owned.require_sendable()
        if number:
            Follower(ranks, owned).advance()
        else:
            with ranks.lead():
                check(ranks, owned)
                raise RunStopped("done")
    except RunStopped as stopped:
        (folder / f"{number}.done").write_text(str(stopped))
    os._exit(0)  # the destructor of gloo's process group may wait forever if the other rank has exited


def run_ranks(folder: Path, check: Callable[[Ranks, MemberState], None]) -> None:
    preload = [*PRELOAD, "planaria.group.group"]
    children = [spawner().spawn("rank", partial(at_rank, number, folder, check), preload) for number in (0, 1)]
    try:
        assert [child.join(JOIN_S) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill(1.0)
    assert (folder / "0.done").read_text() == "done"
    assert (folder / "1.done").read_text() == "rank 0 is no longer a member; see its error"


def require_same_state(owned: MemberState, expected: MemberState) -> None:
    require_close(owned.weights(), expected.weights())
    require_close(owned.extra_state(), expected.extra_state())


def require_close(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(tensors[name]) in (Tensor, nn.Parameter) and tensors[name].device.type == "cpu"
        torch.testing.assert_close(tensors[name].detach(), tensor.detach(), msg=lambda text, n=name: f"{n}: {text}")


def is_the_state_of_a_whole_model(ranks: Ranks, owned: MemberState) -> None:
    plain = member(1, 2)
    assert (ranks.count, ranks.rank) == (2, 0)
    assert (owned.layout, owned.parameter_count) == (plain.layout, plain.parameter_count)
    assert (owned.optimizer_kind, owned.max_state_bytes) == (plain.optimizer_kind, plain.max_state_bytes)
    require_same_state(owned, plain)


def takes_the_state_of_another_member(ranks: Ranks, owned: MemberState) -> None:
    donor = member(2, 3)
    owned.set_weights(donor.weights())
    owned.load_extra_state(donor.extra_state())
    require_same_state(owned, donor)
    parameter = owned.parameters["0.weight"]
    assert isinstance(parameter.data, DTensor) and parameter.data.to_local().shape == (3, 3)
    own_state = owned.optimizer.state[parameter]
    assert isinstance(own_state["exp_avg"], DTensor) and own_state["exp_avg"].to_local().shape == (3, 3)


def refuses_an_invalid_state(ranks: Ranks, owned: MemberState) -> None:
    """Both ranks refuse it, and their state can still be read."""
    other = network(2)
    foreign = MemberState(other, torch.optim.SGD([p for p in other.parameters() if p.requires_grad]), {})
    with pytest.raises(UserError, match="does not fit"):
        owned.load_extra_state(foreign.extra_state())
    damaged = foreign.extra_state()
    damaged.pop("document")
    with pytest.raises(UserError, match="invalid"):
        owned.load_extra_state(damaged)
    require_close(owned.weights(), member(1, 2).weights())


@pytest.mark.parametrize(
    "check",
    [is_the_state_of_a_whole_model, takes_the_state_of_another_member, refuses_an_invalid_state],
    ids=lambda check: check.__name__,
)
def test_a_sharded_member(check: Callable[[Ranks, MemberState], None], tmp_path: Path) -> None:
    run_ranks(tmp_path, check)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_shared_gradient_of_shards_is_refused(one_rank: DeviceMesh) -> None:
    model = fully_shard(network(1), mesh=one_rank)
    group = Group(b"", GroupSettings(), "127.0.0.1:1")
    with pytest.raises(UserError, match="exchange='allreduce' would gather a sharded model's gradient in every step"):
        group.wrap(trained(model, 0), model, exchange="allreduce")


def test_a_mesh_that_rank_0_cannot_divide_is_refused(one_rank: DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    for name in ("weight", "bias"):
        shard = DTensor.from_local(getattr(model, name).detach(), one_rank, [Partial()])
        setattr(model, name, nn.Parameter(shard))
    with pytest.raises(UserError, match=r"parameter 'weight' has the placement Partial.*; use Shard or Replicate"):
        Ranks(model)
