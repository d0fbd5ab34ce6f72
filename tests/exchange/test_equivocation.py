"""Detecting equivocation from digests, whichever members report what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Update
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.equivocation import Exclusions, digest, find_equivocations, join_digests
from planaria.exchange.robust.rules import make_robust_aggregator
from planaria.exchange.robust.suspicion import Suspicion

TRUE = {member: f"of {member}" for member in range(9)}


def honest(members: int) -> dict[int, dict[int, str]]:
    return {m: {other: TRUE[other] for other in range(members)} for m in range(members)}


def test_agreement_yields_no_findings() -> None:
    for members in range(2, 9):
        assert find_equivocations(honest(members), range(members), 1) == Exclusions()


def test_equivocation_towards_all_is_proved_and_towards_one_is_a_dispute() -> None:
    received = honest(5)
    for member in (0, 1, 3, 4):
        received[member][2] = f"for {member}"
    assert find_equivocations(received, range(5), 1) == Exclusions(byzantine=(2,))
    received = honest(5)
    received[4][2] = "for 4"
    assert find_equivocations(received, range(5), 1) == Exclusions(disputes=((2, 4),)), "one of the two, unknown which"
    assert find_equivocations(received, range(5), 0) == Exclusions(byzantine=(2,)), (
        "impossible with honest members alone"
    )
    received[4][2] = TRUE[2]
    del received[2][2]
    assert find_equivocations(received, range(5), 1) == Exclusions(byzantine=(2,)), "it does not report its own update"


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[int, dict[int, str]], int, frozenset[int]]:
    """Reports of members, in which Byzantine members report, and are reported with, anything."""
    f = draw(st.integers(0, 3))
    members = draw(st.integers(2 * f + 1, 2 * f + 3))
    byzantine = frozenset(draw(st.permutations(range(members)))[: draw(st.integers(0, f))])
    words = st.sampled_from(["a", "b", "c"])
    received = honest(members)
    for member in range(members):
        for other in range(members):
            if member in byzantine or other in byzantine:
                received[member][other] = draw(words)
        if member not in byzantine:
            received[member][member] = TRUE[member]
    return received, f, byzantine


@given(scenes())
def test_only_byzantine_members_are_convicted_and_each_dispute_has_one(scene) -> None:
    received, f, byzantine = scene
    found = find_equivocations(received, received.keys(), f)
    assert set(found.byzantine) <= byzantine
    assert all(set(pair) & byzantine for pair in found.disputes)
    assert found.min_byzantine <= len(byzantine), "each finding is another Byzantine member"
    left = received.keys() - found.left_out.keys()
    for sender in left:
        assert {received[member][sender] for member in left} == {received[sender][sender]}, (
            "the remaining members agree"
        )
    for rule in ("median", "multikrum", "nnm:trimmed_mean"):
        needs = make_robust_aggregator({**_spelled(rule), "byzantine": f}, 99).min_members()
        if len(received) >= needs:
            assert (
                len(left)
                >= make_robust_aggregator({**_spelled(rule), "byzantine": f - found.min_byzantine}, 99).min_members()
            )


def _spelled(rule: str) -> dict[str, object]:
    mix, _, name = rule.rpartition(":")
    return {"rule": name, "mix": mix or "none"}


def test_a_digest_covers_all_parts_with_types_and_sizes() -> None:
    part = torch.arange(4, dtype=torch.float32)
    same = digest(Update(part, part.clone()))
    assert same == digest(Update(part.clone(), part)) and len(same) == 32
    different = [
        Update(part),
        Update(None, part),
        Update(part, part.view(torch.int32)),
        Update(part, part[:3]),
        Update(part + 1, part),
        Update(torch.empty(0), part),
    ]
    assert len({digest(update) for update in different} | {same}) == len(different) + 1
    assert join_digests([{0: "a", 1: "b"}, {0: "c", 1: "d"}]) == {0: " a c", 1: " b d"}, "of all stages"


def test_members_are_left_out_permanently_after_enough_strikes() -> None:
    rule, never, once = (
        make_exchange(ExchangeConfig(replicas=5, robust=Options({"rule": "median", "strikes": n}))) for n in (2, 0, 1)
    )
    suspicion = Suspicion().with_findings([(2,)])
    assert suspicion.exclusions(rule).byzantine == (2,), "in the step under way"
    suspicion = suspicion.end_round(0, {}, rule)
    assert suspicion.exclusions(rule) == suspicion.exclusions(never) == Exclusions()
    assert suspicion.exclusions(once).byzantine == (2,)
    suspicion = suspicion.with_findings([(2,), (1, 3)]).end_round(1, {}, rule)
    assert suspicion.exclusions(rule) == Exclusions(byzantine=(2,))
    assert suspicion.exclusions(never) == Exclusions()
    again = suspicion.with_findings([(2, 3)])
    assert again.exclusions(rule) == Exclusions(byzantine=(2,)), "a dispute with a convicted member convicts no other"


@pytest.mark.parametrize("strikes", [-1, 1.5, True, "three"])
def test_strikes_must_be_a_number_of_steps(strikes: object) -> None:
    with pytest.raises(UserError, match=r"exchange\.robust\.strikes = .*: use 0 or more steps"):
        make_robust_aggregator({"rule": "median", "strikes": strikes}, 3)
