"""Settlement of credits in a simulated network and over a board in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.credits import (
    AMOUNT,
    EACH,
    HOPS,
    MEMBERS,
    WRITES,
    BoardMember,
    Route,
    expected,
    plain,
    publish,
    settled,
    verify_peer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.swarm.credits.messages import (
    CreditOrder,
    MemberVote,
    StandIn,
    Statement,
    StatementCertificate,
    is_valid,
    quorum,
)
from planaria.swarm.credits.payment_simulation import PaymentScene, SyncScene, simulate, simulate_sync
from planaria.swarm.credits.psync import CommitteeMember, CreditChannel

SEEDS = range(6)


@pytest.mark.parametrize(
    ("scene", "paid"),
    [
        (PaymentScene(byzantine=1), 1),
        (PaymentScene(hops=6, tolerated=2, byzantine=2), 1),
        (PaymentScene(byzantine=1, relay=True), 1),
        *((PaymentScene(byzantine=1, dry=dry), 0) for dry in range(4)),
    ],
)
def test_orders_with_f_byzantine_members_are_paid_unless_a_hop_is_dry(scene: PaymentScene, paid: int) -> None:
    for seed in SEEDS:
        found = simulate(scene, seed)
        assert (found.ended, found.mixed, found.conserved, found.paid) == (True, False, True, paid), seed


def test_f_plus_one_byzantine_members_block_but_do_not_split() -> None:
    found = [simulate(PaymentScene(byzantine=2), seed) for seed in range(20)]
    assert not any(one.mixed for one in found) and all(one.conserved for one in found)
    assert any(not one.ended for one in found), "f is what it bears, and no more"


@pytest.mark.parametrize("relay", [False, True])
def test_message_counts_match_the_formula(relay: bool) -> None:
    for hops, tolerated in ((1, 0), (1, 1), (4, 1), (3, 2)):
        scene = PaymentScene(hops=hops, tolerated=tolerated, relay=relay)
        assert {simulate(scene, seed).messages for seed in SEEDS} == {expected(scene)}
    assert expected(PaymentScene()) == 228


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1), st.integers(1, 9), st.integers(-1, 3), st.booleans(), st.integers())
def test_crossing_orders_end_without_losses(
    hops: int, byzantine: int, orders: int, dry: int, relay: bool, seed: int
) -> None:
    found = simulate(
        PaymentScene(hops=hops, byzantine=byzantine, orders=orders, dry=min(dry, hops - 1), relay=relay), seed
    )
    assert found.ended and not found.mixed and found.conserved


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.booleans()), max_size=12))
def test_a_channel_conserves_its_credits(orders: list[tuple[bool, int, bool]]) -> None:
    channel = CreditChannel("c", ("a", "b"), (10, 5))
    for forth, amount, paid in orders:
        payer = "a" if forth else "b"
        if channel.can_lock(payer, amount):
            channel = channel.lock(payer, amount)
        else:
            with pytest.raises(ValueError, match="cannot lock"):
                channel.lock(payer, amount)
        assert channel.total == 15 and min(channel.has) >= 0
        channel = channel.settle(paid)
        assert channel.total == 15 and not channel.locked
    assert channel.next == len(orders)


def route(**changed: object) -> CreditOrder:
    given: dict[str, object] = {"parties": ("p0", "p1"), "channels": ("c0",), "numbers": (0,), "amount": 3}
    return CreditOrder.model_validate(given | changed)


@pytest.mark.parametrize(
    "changed",
    [{"amount": 0}, {"amount": -1}, {"amount": 1.5}, {"numbers": (0, 1)}, {"parties": ("p0", "p0")}, {"channels": ()},
     {"numbers": (-1,)}, {"parties": ("p0", "../x")}],
)  # fmt: skip
def test_invalid_orders_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        route(**changed)


def certified(keys: StandIn, order: CreditOrder, by: list[str], **changed: object) -> StatementCertificate:
    statement = Statement(phase="lock", channel="c0", number=0, order=order.digest, yes=True)
    votes = tuple((name, MemberVote.of(statement, keys.signer(name)).signature) for name in by)
    return StatementCertificate.model_validate({"statement": statement, "order": order, "votes": votes, **changed})


def test_a_certificate_needs_a_quorum_of_distinct_members() -> None:
    keys, members = StandIn(), tuple(f"m{n}" for n in range(4))
    committees = {"c0": members, "c1": members}
    order = route().with_signature(keys.signer("operator"))
    for name in (*members, "x"):
        keys.signer(name)
    whole = certified(keys, order, ["m0", "m1", "m2"])
    assert is_valid(whole, committees, keys.verify)
    other = whole.statement.model_copy(update={"yes": False})
    forged = {
        "too few": certified(keys, order, ["m0", "m1"]),
        "one twice": certified(keys, order, ["m0", "m1", "m1"]),
        "a stranger": certified(keys, order, ["m0", "m1", "x"]),
        "another word": whole.model_copy(update={"statement": other}),
        "another order": whole.model_copy(update={"order": route(amount=4)}),
        "an unknown channel": whole.model_copy(update={"statement": other.model_copy(update={"channel": "c9"})}),
    }
    assert [what for what, one in forged.items() if is_valid(one, committees, keys.verify)] == []
    assert [quorum(n) for n in (1, 4, 5, 7)] == [1, 3, 4, 5]


def test_a_reused_number_gets_one_vote_per_member() -> None:
    keys, members = StandIn(), tuple(f"m{n}" for n in range(4))
    operator = keys.signer("operator")
    member = CommitteeMember(
        keys.signer("m0"), CreditChannel("c0", ("p0", "p1"), (10, 0)), {"c0": members}, "operator", keys.verify
    )
    first = member.receive(route().with_signature(operator))
    assert len(first) == 1 and member.receive(route(amount=4).with_signature(operator)) == []
    assert member.receive(route(amount=5)) == [], "not signed"


@pytest.mark.parametrize("wrong", [{"hops": 0}, {"byzantine": 5}, {"dry": 4}, {"tolerated": -1}, {"orders": 0}])
def test_invalid_scenes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"; use -?\d+ to \d+"):
        replace(PaymentScene(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="integers of at least 0"):
        CreditChannel("c", ("a", "b"), (-1, 2))
    with pytest.raises(UserError, match="delays above 0"):
        SyncScene(longest=0.0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dies", "at", "after"), [(0, 5, True), (1, 7, False), (2, 12, False)])
def test_a_member_killed_at_any_message_resumes(tmp_path: Path, dies: int, at: int, after: bool) -> None:
    killed, paid, has = settled(tmp_path, dies, at, after)
    assert killed and paid == [True] * HOPS * MEMBERS
    assert has == [(EACH - AMOUNT, EACH + AMOUNT)] * HOPS * MEMBERS
    assert len([*tmp_path.rglob("*.json")]) == sum(WRITES) + HOPS, "one file a message, and the order for each channel"


def test_over_a_board_a_hop_without_credits_drops_the_order(tmp_path: Path) -> None:
    killed, paid, has = settled(tmp_path, 1, 6, False, dry=1)
    assert killed and paid == [False] * HOPS * MEMBERS
    assert has == [(0 if hop == 1 else EACH, EACH) for hop in range(HOPS) for _ in range(MEMBERS)]


def seat(route: Route, folder: Path, hop: int = 0, place: int = 0) -> BoardMember:
    channel = CreditChannel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), (EACH, EACH))
    member = CommitteeMember(route.keys[hop][place], channel, route.committees(), route.operator.name, verify_peer)
    return BoardMember(member, route.committees(), plain(folder))


def test_a_restarted_member_keeps_its_vote(tmp_path: Path) -> None:
    """Although its operator has meanwhile signed the same number for another order."""
    route = Route.generate()
    order = route.order()
    other = order.model_copy(update={"amount": 1}).with_signature(route.operator)
    publish(plain(tmp_path), order)
    seat(route, tmp_path).look()
    with pytest.raises(UserError, match="another order has this number"):
        publish(plain(tmp_path), other)
    for path in tmp_path.rglob("order.json"):
        path.write_text(other.model_dump_json())
    again = seat(route, tmp_path)
    again.look()
    votes = [*tmp_path.rglob(f"lock/{again.member.name}.json")]
    assert len(votes) == 1 and order.digest in votes[0].read_text()
    assert again.member._slots[0].voted["lock"].order == order.digest


def test_a_timely_payment_without_faults_is_paid() -> None:
    found = [simulate_sync(SyncScene(hops=hops, faulty=False), seed) for hops in (1, 4, 7) for seed in range(10)]
    assert all(one.paid and not one.losers for one in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2), st.integers())
def test_honest_parties_lose_nothing_while_messages_are_timely(hops: int, tolerated: int, seed: int) -> None:
    assert simulate_sync(SyncScene(hops, tolerated), seed).losers == 0


def test_late_messages_can_cost_honest_parties_credits() -> None:
    found = [simulate_sync(SyncScene(faulty=False, longest=8.0), seed) for seed in range(60)]
    assert any(one.losers for one in found)


def test_some_faults_prevent_payment() -> None:
    found = {simulate_sync(SyncScene(), seed).paid for seed in range(40)}
    assert found == {True, False}
