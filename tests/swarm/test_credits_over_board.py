"""The same members over a board in a folder: killed at a message and started again, they go on from what lies there."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.credit_seats import AMOUNT, EACH, HOPS, MEMBERS, WRITES, Route, plain, settled

from planaria.common.errors import RunStopped, UserError
from planaria.swarm.credits.channel import Channel
from planaria.swarm.credits.messages import Statement, Vote, verify_peer
from planaria.swarm.credits.over_board import Seat, publish, take_part
from planaria.swarm.credits.psync import Member


@pytest.mark.parametrize(("dies", "at", "after"), [(0, 5, True), (1, 7, False), (2, 12, False)])
def test_who_is_killed_at_a_message_goes_on_from_what_lies_there(
    tmp_path: Path, dies: int, at: int, after: bool
) -> None:
    killed, paid, has = settled(tmp_path, dies, at, after)
    assert killed and paid == [True] * HOPS * MEMBERS
    assert has == [(EACH - AMOUNT, EACH + AMOUNT)] * HOPS * MEMBERS
    assert len([*tmp_path.rglob("*.json")]) == sum(WRITES) + HOPS, "one file a message, and the order for each channel"


def test_over_a_board_a_dry_hop_drops_it_for_all(tmp_path: Path) -> None:
    killed, paid, has = settled(tmp_path, 1, 6, False, dry=1)
    assert killed and paid == [False] * HOPS * MEMBERS
    assert has == [(0 if hop == 1 else EACH, EACH) for hop in range(HOPS) for _ in range(MEMBERS)]


def seat(route: Route, folder: Path, hop: int = 0, place: int = 0) -> Seat:
    channel = Channel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), (EACH, EACH))
    member = Member(route.keys[hop][place], channel, route.committees(), route.operator.name, verify_peer)
    return Seat(member, route.committees(), plain(folder))


def test_what_strangers_put_there_changes_nothing(tmp_path: Path) -> None:
    route = Route.fresh()
    order = route.order()
    publish(plain(tmp_path), order)
    at = tmp_path / "credits" / "c0" / "000000"
    names = route.committees()["c0"]
    told = Statement(phase="lock", channel="c0", number=0, order=order.digest, yes=False)
    forged = Vote.of(told, route.keys[1][0]).model_copy(update={"member": names[2]})
    (at / "lock").mkdir()
    (at / "lock" / f"{names[1]}.json").write_bytes(b"{" * 9999)
    (at / "lock" / f"{names[2]}.json").write_text(forged.model_dump_json())
    (at / "lock" / f"{names[3]}.json").write_bytes(b" " * (2**18 + 1))
    one = seat(route, tmp_path)
    while one.look():
        pass
    assert (at / "lock" / f"{names[0]}.json").is_file() and not (at / "settle").exists()
    assert one.member.settled == {}


def test_a_restarted_member_stays_by_its_vote(tmp_path: Path) -> None:
    """Although its operator has meanwhile signed the same number for another order."""
    route = Route.fresh()
    order = route.order()
    other = order.model_copy(update={"amount": 1}).signed(route.operator)
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
    assert again.member._slots[0].said["lock"].order == order.digest


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="c0 not settled within 0 s; start again to go on"):
        take_part([seat(Route.fresh(), tmp_path)], 1, 0.0)
