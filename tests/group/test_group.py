"""Groups of real processes: members that train, die, leave and join."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import planaria
from planaria.control.facts import decisions as d
from planaria.control.log.reader import read_run
from planaria.group.member_runner import MemberRunner, OwnerLoopSteps
from planaria.group.membership import Membership
from planaria.group.shard import MappedBlocks
from planaria.report.run.sample_ledger import require_exactly_once
from planaria.report.run.summary import key_metrics, summary
from planaria.runtime.fleet.joining import read_run_address
from support.group_members import SAMPLES, Members, Numbered, Spec, residual


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    started = Members(tmp_path)
    yield started
    started.close()


def committed_samples(members: Members, batch: int, epochs: int) -> Counter[int]:
    """Return how often the log's committed blocks use each sample, by the order that all members draw."""
    blocks = MappedBlocks(DataLoader(Numbered(), batch, shuffle=True), 1, 0)
    begun, counts = {}, Counter[int]()
    for _, fact in members.run.record.history:
        if isinstance(fact, d.RunStep):
            begun[fact.replica] = fact.block
        elif isinstance(fact, d.Commit):
            for numbers, _, _ in blocks.batches(begun[fact.replica]):
                counts.update(numbers.tolist())
    return counts


def test_members_die_leave_and_join_and_every_sample_is_used_once(members: Members) -> None:
    epochs = 6
    address = members.host(Spec(seed=1, epochs=epochs, pause_s=0.08))
    killed = members.start(Spec(seed=2, address=address, epochs=epochs, pause_s=0.03, dies_after=10))
    leaving = members.start(Spec(seed=3, address=address, epochs=epochs, pause_s=0.03, leaves_after=8))
    late = members.start(Spec(seed=4, address=address, epochs=epochs, pause_s=0.03))
    members.wait()
    record = members.run.record
    require_exactly_once(record)
    assert committed_samples(members, 6, epochs) == Counter(dict.fromkeys(range(SAMPLES), epochs))
    assert len(members.used(killed)) == 10 and len(members.used(leaving)) == 8
    assert members.facts(late)["rounds"] > 0
    assert members.facts(0)["steps"] + members.facts(late)["steps"] >= epochs * SAMPLES / 6 - 18
    losses = members.run.losses
    assert sum(losses[-20:]) < sum(losses[:20])


def test_a_member_computes_its_next_block_before_that_step_is_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except after rounds, which change the weights; each commit reserves the block."""
    ahead = list[int]()

    def compute_ahead(self: OwnerLoopSteps, block: int) -> None:
        ahead.append(block)
        compute(self, block)

    compute = OwnerLoopSteps.compute_ahead
    monkeypatch.setattr(OwnerLoopSteps, "compute_ahead", compute_ahead)
    model = torch.nn.Linear(3, 1)
    with planaria.host(key=tmp_path / "key", out=tmp_path, notify=lambda line: None) as group:
        optimizer = group.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, exchange="noloco", every=4)
        for batch in group.shard(DataLoader(TensorDataset(torch.randn(48, 3)), 3)):
            model(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ahead == [block for block in range(16) if block % 4]
    assert group.folder is not None
    facts = [fact for _, fact in read_run(group.folder).history]
    reserved = [fact.next_block for fact in facts if isinstance(fact, d.Commit)]
    assert reserved == [block if block % 4 else None for block in range(1, 16)] + [None]
    record = read_run(group.folder)
    assert key_metrics(record).loss is None and not any("nan" in line for line in summary(record)), (
        "no loss was reported"
    )


@pytest.mark.parametrize(("every", "called"), [(4, (MemberRunner, "commit")), (1, (OwnerLoopSteps, "samples_of"))])
def test_a_dismissed_member_gets_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, called: tuple[type, str]
) -> None:
    """The order to exit arrives while the member applies its update, or while the next step begins."""
    batches = list[Tensor]()

    def dismiss(self: object, *args: Any, **named: Any) -> object:
        if len(batches) == 6:
            assert isinstance(group._member, Membership)
            group._member._pool.dismiss()
        return method(self, *args, **named)

    method = getattr(*called)
    monkeypatch.setattr(*called, dismiss)
    model = torch.nn.Linear(3, 1)
    with planaria.host(key=tmp_path / "key", out=tmp_path, notify=lambda line: None) as group:
        optimizer = group.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, exchange="noloco", every=every)
        for batch in group.shard(DataLoader(TensorDataset(torch.randn(48, 3)), 3)):
            batches.append(batch[0])
            model(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(batches) == 6


@pytest.mark.parametrize("dies_after", [0, 7])
def test_a_shared_gradient_does_not_depend_on_the_members(members: Members, dies_after: int) -> None:
    """Three members add up the gradients of steps of three blocks; after a death, two compute the same."""
    exchange = {"exchange": "allreduce"}
    hosting = {"members": 3}
    members.start(Spec(seed=1, hosting={**hosting, "port": 0}, exchange=exchange, epochs=1, width=4))
    address = _address_of_waiting_host(members)
    members.start(Spec(seed=2, address=address, exchange=exchange, epochs=1))
    members.start(Spec(seed=3, address=address, exchange=exchange, epochs=1, dies_after=dies_after))
    members.wait()
    first, second = members.weights(0), members.weights(1)
    trained = [name for name in first if "running" not in name and "batches" not in name]
    for name in trained:
        assert torch.equal(first[name], second[name]), name
    expected = _alone(3, 1)
    for name in trained:
        torch.testing.assert_close(first[name], expected[name], atol=2e-5, rtol=1e-4)
    require_exactly_once(members.run.record)
    assert members.facts(0)["steps"] == 14  # of 40 blocks, three each


def _address_of_waiting_host(members: Members) -> str:
    """Return the address at which a host that waits for others listens."""
    address = members.folder / "runs" / "group" / "address.json"
    return waited_for(lambda: read_run_address(address.parent).at if address.exists() else "")


def waited_for(found: Callable[[], str], patience_s: float = 90.0) -> str:
    until = time.monotonic() + patience_s
    while not (result := found()):
        assert time.monotonic() < until, "the group did not open"
        time.sleep(0.05)
    return result


def _alone(blocks: int, epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in one plain loop, with the batch statistics of each block."""
    torch.manual_seed(1)
    model = residual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = MappedBlocks(DataLoader(Numbered(), 6, shuffle=True), 1, 0)
    count = data.count(epochs)
    for first in range(0, count, blocks):
        numbers = range(first, min(first + blocks, count))
        optimizer.zero_grad()
        for number in numbers:
            for _, inputs, targets in data.batches(number):
                (torch.nn.functional.mse_loss(model(inputs), targets) / len(numbers)).backward()
        optimizer.step()
    return model.state_dict()


def test_members_with_other_settings_or_models_are_refused_by_name(members: Members) -> None:
    address = members.host(Spec(seed=1, epochs=2, pause_s=0.05))
    cases = {
        members.start(Spec(seed=2, address=address, width=5)): "wrap: the model has 7 trained tensors",
        members.start(Spec(seed=2, address=address, exchange={"exchange": "diloco", "every": 3})): "wrap: exchange is",
        members.start(Spec(seed=2, address=address, exchange={"exchange": "noloco", "every": 4})): "wrap: options is",
        members.start(Spec(seed=2, address=address, batch=5)): "shard: batch_size × accumulate × ranks is 5 here and 6",
        members.start(Spec(seed=2, address=address, epochs=3)): "blocks is 120 here and 80 in the group",
    }
    members.wait()
    for number, text in cases.items():
        assert text in members.error(number)
    assert members.facts(0)["steps"] == 80


@pytest.mark.parametrize("kind", ["noloco", "allreduce"])
def test_a_group_ends_once_no_member_has_its_weights(members: Members, kind: str) -> None:
    """A new member's first weights are those of another model."""
    exchange, several = {"exchange": kind}, 2
    hosting = {"members": several}
    members.start(Spec(seed=1, hosting=hosting, exchange=exchange, epochs=9, dies_after=12))
    address = _address_of_waiting_host(members)
    members.start(Spec(seed=2, address=address, exchange=exchange, epochs=9, dies_after=9))
    waited_for(lambda: "lost" if len(members.used(0)) >= 12 and len(members.used(1)) >= 9 else "")
    assert "all members with the group's weights are lost" in members.run.outcome
    members.wait()


def test_a_member_with_invalid_updates_is_excluded_and_others_continue(members: Members) -> None:
    exchange = {"exchange": "noloco", "every": 2}
    members.start(Spec(seed=1, hosting={"members": 3}, exchange=exchange, epochs=8))
    address = _address_of_waiting_host(members)
    members.start(Spec(seed=2, address=address, exchange=exchange, epochs=8))
    wrong = members.start(Spec(seed=3, address=address, exchange=exchange, epochs=8, breaks_after=5))
    members.wait()
    assert re.search(r"no longer a member: the updates of replica \d were invalid in 3 rounds", members.error(wrong))
    for number in (0, 1):
        assert all(bool(tensor.isfinite().all()) for tensor in members.weights(number).values())
    require_exactly_once(members.run.record)
