"""The state that a new member receives: complete, by name, and rejected if it does not fit or is not sound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.group.member_runner import MemberRunner, shares
from planaria.group.member_state import DOCUMENT, MemberState
from planaria.group.optimizer import GroupOptimizer
from planaria.models.packing import PackingError, pack, unpack
from planaria.models.state import StageState


class Tied(nn.Module):
    """A network with a tied table, batch statistics, a frozen part and state of its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, width), nn.BatchNorm1d(width)
        self.head, self.frozen = nn.Linear(width, 5, bias=False), nn.Linear(width, width)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(self.frozen(self.norm(self.table(tokens))))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def made(seed: int, kind: str = "AdamW", width: int = 4, steps: int = 0) -> MemberState:
    torch.manual_seed(seed)
    model = Tied(width)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, kind)([{"params": trained[:1]}, {"params": trained[1:], "lr": 0.01}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randint(5, (6,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return MemberState(model, optimizer, {"schedule": schedule})


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor", "RMSprop", "NAdam"])
def test_a_new_member_continues_exactly_like_the_donor(kind: str) -> None:
    donor, receiver = made(1, kind, steps=5), made(2, kind)
    assert donor.layout != receiver.layout, "frozen weights belong to it"
    receiver.model.frozen.load_state_dict(donor.model.frozen.state_dict())  # type: ignore[union-attr, operator]
    del receiver.layout
    assert donor.layout == receiver.layout
    sent = unpack(pack(StageState(donor.weights(), extra=donor.extra_state())))
    runner = MemberRunner(RunConfig.model_construct(), receiver, sums_gradients=False)
    runner.load(sent)
    for member in (donor, receiver):
        torch.manual_seed(3)
        member.model(torch.randint(5, (6,))).square().sum().backward()
        member.optimizer.step()
        member.also["schedule"].step()  # type: ignore[attr-defined]
    trained = donor.weights()
    assert trained.keys() == {"table.weight", "norm.weight", "norm.bias"}, "tied once, frozen not at all"
    assert all(torch.equal(tensor, receiver.weights()[name]) for name, tensor in trained.items())
    assert torch.equal(donor.model.norm.running_mean, receiver.model.norm.running_mean)  # type: ignore[union-attr]
    assert donor.model.calls == receiver.model.calls == 6
    assert [g["lr"] for g in donor.optimizer.param_groups] == [g["lr"] for g in receiver.optimizer.param_groups]


def test_state_that_cannot_be_sent_is_named() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"thing": object()}]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(UserError, match=r"also.odd.deep.0.thing is a object; only tensors"):
        MemberState(model, optimizer, {"odd": Odd()}).extra_state()
    with pytest.raises(UserError, match=r"does not update parameter 'norm\.weight'"):
        MemberState(model, torch.optim.SGD([model.table.weight]), {})
    with pytest.raises(UserError, match="no parameter that requires a gradient"):
        MemberState(nn.Flatten(), optimizer, {})
    with pytest.raises(UserError, match=r"'weight' is torch.complex64"):
        complex_layer = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
        MemberState(complex_layer, torch.optim.SGD(complex_layer.parameters()), {})


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_wrappers_do_not_change_names_and_flat_shards_are_refused(one_rank: DeviceMesh) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))

    def owned(model: nn.Module) -> MemberState:
        return MemberState(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), {})

    plain, inner = owned(network()), network()
    inner[0], inner[1] = torch.compile(inner[0], backend="eager"), checkpoint_wrapper(inner[1])
    parallel = nn.parallel.DistributedDataParallel(network())
    for model in (inner, torch.compile(network(), backend="eager"), parallel, torch.compile(parallel, backend="eager")):
        state = owned(model)
        assert state.layout == plain.layout
        state.load_extra_state(plain.extra_state())
        assert state.extra_state().keys() == plain.extra_state().keys()

    class FullyShardedDataParallel(nn.Sequential):
        """Torch's class of this name cannot be made without an accelerator."""

    with pytest.raises(UserError, match=r"wrap: the model is a FullyShardedDataParallel, .* use .*fully_shard"):
        owned(FullyShardedDataParallel(network()))


def sound(state: MemberState) -> StageState:
    return StageState({n: t.clone() for n, t in state.weights().items()}, extra=dict(state.extra_state()))


def test_a_state_that_does_not_fit_is_refused_with_one_line() -> None:
    donor = made(1, steps=2)
    runner = MemberRunner(RunConfig.model_construct(), made(2), sums_gradients=False)
    nan, other, lacking, buffers = (sound(donor) for _ in range(4))
    nan.weights["norm.bias"][0] = torch.nan
    other.weights["norm.bias"] = torch.zeros(7)
    lacking.extra.pop(DOCUMENT)
    name = next(name for name in buffers.extra if name.endswith("running_mean"))
    buffers.extra[name] = torch.zeros(9)
    for state, text in ((nan, "not finite"), (other, r"norm.bias is \[7\]"), (lacking, "invalid"), (buffers, "buffer")):
        with pytest.raises(UserError, match=text) as caught:
            runner.load(state)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="does not fit"):
        runner.load(sound(made(1, "Adagrad", steps=1)))


def test_a_thousand_damaged_states_are_refused() -> None:
    """Each is a sound message with bytes changed, cut or added, or a document whose tree was changed."""
    drawn, donor = random.Random(34107), made(1, steps=2)
    packed = pack(sound(donor))
    runner = MemberRunner(RunConfig.model_construct(), made(2), sums_gradients=False)
    document = sound(donor).extra[DOCUMENT].numpy().tobytes()
    refused = 0
    for number in range(1000):
        state = sound(donor)
        try:
            if number % 2:
                flat = packed.clone()
                place = drawn.randrange(len(flat))
                flat[place] = int(flat[place]) ^ drawn.randrange(1, 256)
                state = unpack(flat[: drawn.randrange(len(flat))] if number % 10 == 1 else flat)
            else:
                text = bytearray(document)
                for _ in range(drawn.randrange(1, 4)):
                    text[drawn.randrange(len(text))] = drawn.choice(b'{}[]",:0123456789abcxyz')
                if bytes(text) == document:
                    continue
                state.extra[DOCUMENT] = torch.frombuffer(text, dtype=torch.uint8)
            runner.load(state)
        except (UserError, PackingError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused >= 800  # a changed digit may be another sound number


def test_blocks_of_absent_members_go_to_the_present_ones() -> None:
    assert shares(4, []) == {0: [0], 1: [1], 2: [2], 3: [3]}
    assert shares(4, [0, 2]) == {1: [1, 0], 3: [3, 2]}
    assert shares(3, [0, 1]) == {2: [2, 0, 1]}
    for absent in ([], [1], [0, 3]):
        assert sorted(block for blocks in shares(4, absent).values() for block in blocks) == [0, 1, 2, 3]


def test_within_a_block_the_optimizer_waits_for_its_last_batch() -> None:
    state, calls, within = made(1), list[str](), [True]
    optimizer = GroupOptimizer(state.optimizer, lambda: calls.append("step"), lambda: within[0])
    state.model(torch.randint(5, (6,))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not calls and state.has_gradient()
    within[0] = False
    assert optimizer.step(lambda: 3.0) == 3.0 and calls == ["step"]
    optimizer.register_step_post_hook(lambda *_: None)
    assert optimizer.param_groups is state.optimizer.param_groups
    state.parameters["norm.bias"].grad[0] = torch.inf  # type: ignore[index]
    assert not state.has_gradient(), "a gradient scaler skips this step"
    optimizer.zero_grad()
    assert not state.has_gradient()


def test_a_gradient_of_other_weights_is_computed_again() -> None:
    """Weights that a round settles replace those of which a block was computed ahead."""
    runner = MemberRunner(RunConfig.model_construct(), made(2), sums_gradients=False)
    runner.take_gradient(7, updates=True)
    assert runner.computed == {7}
    runner.drop()
    assert runner.computed == {7}, "a repeated step has the same weights"
    runner.set_weights({name: parameter + 1 for name, parameter in runner.parameters.items()})
    assert not runner.computed
