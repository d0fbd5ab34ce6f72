"""Who told others different things: what follows from digests, whoever reports what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Offer
from planaria.exchange.kinds import exchange
from planaria.exchange.robust.equivocation import Findings, digest, findings, joined
from planaria.exchange.robust.rules import robust_of
from planaria.exchange.robust.suspicion import Suspicion

TRUE = {member: f"of {member}" for member in range(9)}


def honest(members: int) -> dict[int, dict[int, str]]:
    return {m: {other: TRUE[other] for other in range(members)} for m in range(members)}


def test_where_all_agree_nothing_is_found() -> None:
    for members in range(2, 9):
        assert findings(honest(members), range(members), 1) == Findings()


def test_one_who_tells_each_something_else_is_proved_to_lie_and_one_who_tells_a_single_one_is_not() -> None:
    heard = honest(5)
    for member in (0, 1, 3, 4):
        heard[member][2] = f"for {member}"
    assert findings(heard, range(5), 1) == Findings(liars=(2,))
    heard = honest(5)
    heard[4][2] = "for 4"
    assert findings(heard, range(5), 1) == Findings(disputes=((2, 4),)), "one of the two, and nobody knows which"
    assert findings(heard, range(5), 0) == Findings(liars=(2,)), "if there were no liars, this could not be"
    heard[4][2] = TRUE[2]
    del heard[2][2]
    assert findings(heard, range(5), 1) == Findings(liars=(2,)), "it does not say what it has said"


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[int, dict[int, str]], int, frozenset[int]]:
    """What members report, the liars among whom say, and are heard to have said, anything."""
    f = draw(st.integers(0, 3))
    members = draw(st.integers(2 * f + 1, 2 * f + 3))
    liars = frozenset(draw(st.permutations(range(members)))[: draw(st.integers(0, f))])
    words = st.sampled_from(["a", "b", "c"])
    heard = honest(members)
    for member in range(members):
        for other in range(members):
            if member in liars or other in liars:
                heard[member][other] = draw(words)
        if member not in liars:
            heard[member][member] = TRUE[member]
    return heard, f, liars


@given(scenes())
def test_no_honest_member_is_convicted_and_every_other_that_is_left_out_takes_a_liar_along(scene) -> None:  # type: ignore[no-untyped-def]
    heard, f, liars = scene
    found = findings(heard, heard.keys(), f)
    assert set(found.liars) <= liars
    assert all(set(pair) & liars for pair in found.disputes)
    assert found.least <= len(liars), "each finding is a liar of its own"
    left = heard.keys() - found.left_out.keys()
    for sender in left:
        assert {heard[member][sender] for member in left} == {heard[sender][sender]}, "those who are left agree"
    for rule in ("median", "multikrum", "nnm:trimmed_mean"):
        needs = robust_of({**_spelled(rule), "liars": f}, 99).least()
        if len(heard) >= needs:
            assert len(left) >= robust_of({**_spelled(rule), "liars": f - found.least}, 99).least()


def _spelled(rule: str) -> dict[str, object]:
    mix, _, name = rule.rpartition(":")
    return {"rule": name, "mix": mix or "none"}


def test_a_digest_is_of_all_parts_with_their_types_and_sizes() -> None:
    part = torch.arange(4, dtype=torch.float32)
    same = digest(Offer(part, part.clone()))
    assert same == digest(Offer(part.clone(), part)) and len(same) == 32
    different = [
        Offer(part),
        Offer(None, part),
        Offer(part, part.view(torch.int32)),
        Offer(part, part[:3]),
        Offer(part + 1, part),
        Offer(torch.empty(0), part),
    ]
    assert len({digest(offer) for offer in different} | {same}) == len(different) + 1


def test_what_is_heard_stage_by_stage_is_compared_as_a_whole() -> None:
    assert joined([{0: "a", 1: "b"}, {0: "c", 1: "d"}]) == {0: " a c", 1: " b d"}


def test_after_so_many_strikes_members_are_left_out_for_good() -> None:
    rule, never, once = (
        exchange(ExchangeConfig(replicas=5, robust=Options({"rule": "median", "strikes": n}))) for n in (2, 0, 1)
    )
    suspicion = Suspicion().raised([(2,)])
    assert suspicion.standing(rule).liars == (2,), "in the step under way"
    suspicion = suspicion.ended(0, {}, rule)
    assert suspicion.standing(rule) == suspicion.standing(never) == Findings()
    assert suspicion.standing(once).liars == (2,)
    suspicion = suspicion.raised([(2,), (1, 3)]).ended(1, {}, rule)
    assert suspicion.standing(rule) == Findings(liars=(2,))
    assert suspicion.standing(never) == Findings()
    again = suspicion.raised([(2, 3)])
    assert again.standing(rule) == Findings(liars=(2,)), "a dispute with one who is convicted convicts nobody else"


@pytest.mark.parametrize("strikes", [-1, 1.5, True, "three"])
def test_strikes_are_a_number(strikes: object) -> None:
    from planaria.common.errors import UserError

    with pytest.raises(UserError, match=r"exchange\.robust\.strikes = .*: give a number of steps, 0 or more"):
        robust_of({"rule": "median", "strikes": strikes}, 3)
