"""Snapshots by every shipped code at every number of stages: tolerated losses are rebuilt exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from itertools import combinations, islice, product
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import RecoveryConfig, RunConfig
from planaria.models.state import StageState
from planaria.recovery import codes, make_chain, with_strategy
from planaria.recovery.base import Copy, DamagedReplica, Holder, MachineProperties
from planaria.recovery.codes import CODES
from planaria.recovery.snapshot import ParityGroup, Snapshot
from planaria.recovery.snapshot_schedule import SnapshotSchedule
from planaria.runtime.api.configure import configure
from planaria.runtime.resolved_run import ResolvedRun
from support.stage_states import INPUTS, assert_same, assert_same_state, state

HAMMING = {"shards": 8, "distance": 4, "checks": [[0, 1, 2, 4], [0, 1, 3, 5], [0, 2, 3, 6], [1, 2, 3, 7]]}
"""the extended Hamming code: half of its shards are parities, and any three can be lost"""
SETS = 3
"""maximum number of sets of lost stages to try per group"""


class Group:
    """The stages of a replica after one step, with the copies that each holds."""

    def __init__(self, strategy: Snapshot, stages: int) -> None:
        self.strategy, self.members = strategy, range(stages + 1)
        self.states = {stage: state(seed=stage, updates=2 + stage % 2) for stage in self.members}
        self.kept: dict[int, dict[Copy, Holder]] = {stage: {} for stage in self.members}
        for copy in strategy.copies(stages):
            self.kept[copy.host][copy] = strategy.holder(copy, {})
        holders = {copy: holder for kept in self.kept.values() for copy, holder in kept.items()}
        for source, own in self.states.items():
            for copy in (copy for copy in holders if source in copy.sources):
                message = strategy.sender(copy, source).message_after_gradient(0, own, StageState({}))
                assert message is not None
                holders[copy].take(0, source, "after", message)
        for holder in holders.values():
            holder.commit(0)
        self.given = {
            who: strategy.donate(-1, self.states[who], {copy: holder.state() for copy, holder in kept.items()})
            for who, kept in self.kept.items()
        }
        """what each sends for any lost stage"""
        self.replica = DamagedReplica(stages, dict.fromkeys(self.members, 1), frozenset(self.members))

    def lose(self, lost: Collection[int]) -> None:
        """Rebuild each lost stage, and its copies, from the others."""
        answer = self.strategy.donors(frozenset(lost), self.replica)
        assert not answer.refused and answer.donors.keys() == set(lost), answer
        for stage, donors in answer.donors.items():
            assert not set(donors) & set(lost)
            given = {who: self.given[who] for who in donors}
            assert_same_state(self.strategy.rebuild(stage, given, INPUTS), self.states[stage])
            for copy, holder in self.kept[stage].items():
                restored = self.strategy.rebuild_copy(copy, given)
                assert restored is not None
                assert_same(restored.weights, holder.state().weights)


def sets_of(members: int, size: int) -> list[tuple[int, ...]]:
    """Return all sets of this size, or a sample if there are many."""
    first = list(islice(combinations(range(members), size), SETS + 1))
    rng = random.Random(members)
    return first if len(first) <= SETS else [tuple(rng.sample(range(members), size)) for _ in range(SETS)]


def accepted(strategy: Snapshot, stages: int) -> bool:
    try:
        strategy.copies(stages)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("stages", [range(1, 8), pytest.param(range(8, 16), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", sorted(CODES.shipped))
def test_every_code_rebuilds_tolerated_losses_at_every_number_of_stages(kind: str, stages: range) -> None:
    tried = []
    for strategy, count in product((Snapshot(code=kind, tolerate=tolerate) for tolerate in (1, 2, 3)), stages):
        if accepted(strategy, count):
            group = Group(strategy, count)
            for lost in sets_of(count + 1, strategy.tolerate):
                group.lose(lost)
            blocks = [len(copy.sources) for copy in strategy.copies(count) if 0 in copy.sources]
            assert sum(1 / parts for parts in blocks) == pytest.approx(strategy.copies_sent_per_snapshot(count + 1))
            tried.append((strategy.tolerate, count))
    assert {count for _, count in tried} >= {*stages} - {1}
    assert kind == "xor" or {tolerate for tolerate, _ in tried} == {1, 2, 3}


def test_a_code_file_rebuilds_tolerated_losses(tmp_path: Path) -> None:
    file = tmp_path / "code.json"
    file.write_text(json.dumps(HAMMING))
    for tolerate in (1, 2, 3):
        strategy = Snapshot(code=str(file), tolerate=tolerate)
        group = Group(strategy, 7)
        for lost in sets_of(8, tolerate):
            group.lose(lost)
        assert strategy.copies_sent_per_snapshot(8) == 4 and not accepted(strategy, 8)


def test_a_run_keeps_the_contents_of_its_code_file(tmp_path: Path) -> None:
    """Decisions depend on the code, and other machines lack the file."""
    file = tmp_path / "code.json"
    file.write_text(json.dumps(HAMMING))
    recipe = tmp_path / "mine.toml"
    options = 'strategy = "snapshot, checkfree"\noptions = { code = "code.json", tolerate = 3 }'
    recipe.write_text(f"[recovery]\n{options}\n[pipeline]\nstages = 7\n[model]\nlayers = 7\n")
    config = configure(str(recipe))
    file.unlink()
    again = RunConfig.model_validate_json(config.model_dump_json())
    (strategy,) = [s for s in ResolvedRun(again).recovery.strategies.values() if isinstance(s, Snapshot)]
    assert json.loads(strategy.code) == HAMMING and strategy.copies_sent_per_snapshot(8) == 4
    with pytest.raises(UserError, match=r"^recovery.options.code: not the contents of a code file \(shards"):
        Snapshot(code='{"distance": 4, "checks": [[0, 1]]}', tolerate=3).copies_sent_per_snapshot(8)


@pytest.mark.parametrize(("kind", "tolerate", "sent"), [("auto", 2, 2), ("local", 1, 2), ("local", 3, 4)])
def test_the_best_slices_follow_from_the_codes_traffic(kind: str, tolerate: int, sent: int) -> None:
    """Each of 8 stages sends one block, a k-th of its state, per parity in k stripes."""
    best = Snapshot(code=kind, tolerate=tolerate, every="best")
    at = MachineProperties(8, step_s=1.0, state_bytes=1000, bandwidth=1000.0, memory_bandwidth=None, hourly=0.01)
    assert best.copies_sent_per_snapshot(8) == sent and best.resolve_best(at)["slices"] == 4 * sent


@pytest.mark.parametrize("options", [{"outlive": True}, {"snapshot": {"outlive": True}}, {"persist": True}])
def test_snapshots_in_files_are_selected_by_the_options_former_name_too(options: dict[str, object]) -> None:
    config = RecoveryConfig(strategy="snapshot, checkpoint", options=Options({"every": 2, **options}))
    for given in (config, with_strategy(config, "snapshot")):
        assert make_chain(given, 4).snapshot_strategy.snapshot_schedule == SnapshotSchedule(2, persist=True)


GROUPS = pytest.mark.parametrize(("members", "tolerate"), [(4, 1), (4, 2), (6, 2), (8, 3)])


def group(members: int, tolerate: int, kind: str = "auto") -> ParityGroup:
    return ParityGroup(codes.make_code(kind, members, tolerate))


@GROUPS
def test_all_members_give_and_hold_equally(members: int, tolerate: int) -> None:
    made = group(members, tolerate)
    for stripe in range(members):
        assert made.parity_members(stripe) == tuple((stripe + n) % members for n in range(tolerate))
        assert sorted(made.data_members(stripe) + made.parity_members(stripe)) == list(range(members))
        shards = [made.shard(stripe, member) for member in (*made.data_members(stripe), *made.parity_members(stripe))]
        assert shards == list(range(members))
    assert {len(made.data_stripes(member)) for member in range(members)} == {members - tolerate}


@GROUPS
def test_a_rebuild_reads_k_blocks_per_stripe_and_too_many_losses_have_none(members: int, tolerate: int) -> None:
    made = group(members, tolerate)
    reads = made.members_to_read([2], 2)
    assert reads is not None and {len(donors) for donors in reads.values()} == {members - tolerate}
    assert reads.keys() == {*range(members)} and not any(2 in donors for donors in reads.values())
    assert made.members_to_read(range(tolerate + 1), 0) is None


def test_a_rebuild_reads_three_blocks_per_stripe_with_local_groups() -> None:
    reads = group(16, 6, "local").members_to_read([5], 5)
    assert reads is not None and len(reads) == 16 and {len(donors) for donors in reads.values()} == {3}
