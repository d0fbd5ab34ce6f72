"""Exclusion after repeated invalid updates never hits an honest member, whatever Byzantine members report."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.equivocation import Exclusions
from planaria.exchange.robust.suspicion import Suspicion

NOTHING = Suspicion()


def after(strikes: int, *steps: dict[int, set[int]], byzantine: int = 1) -> Exclusions:
    robust = Options({"rule": "median", "byzantine": byzantine, "strikes": strikes})
    made, suspicion = make_exchange(ExchangeConfig(replicas=5, robust=robust)), NOTHING
    for step, refused in enumerate(steps):
        suspicion = suspicion.end_round(step, refused, made)
    return suspicion.exclusions(made)


def test_a_member_that_all_reject_is_excluded_after_the_configured_strikes() -> None:
    all_refuse: dict[int, set[int]] = {0: {2}, 1: {2}, 3: {2}, 4: {2}}
    assert after(2, all_refuse) == Exclusions() and after(0, *[all_refuse] * 9) == Exclusions()
    found = after(2, all_refuse, {}, all_refuse)
    assert found == Exclusions(invalid=(2,)) and found.min_byzantine == 1
    assert found.left_out == {2: "its updates were invalid too often"}


def test_a_member_that_a_single_member_rejects_is_not_excluded() -> None:
    assert after(1, {0: {2}}, {0: {2}}, {0: {2}}) == Exclusions(), "one of five may be Byzantine"
    assert after(1, {0: {2}}, {3: {2}}).invalid == (2,), "but not both accusers"
    assert after(2, {0: {2}}, {3: {2}}, {0: {2}}) == Exclusions(), "at most one step of these is proved"
    assert after(1, {0: {2}, 3: {2}}).invalid == (2,)
    assert after(1, {0: {2}, 3: {2}}, byzantine=2) == Exclusions()


class Steps(RuleBasedStateMachine):
    """Honest members reject exactly the invalid updates; Byzantine ones send and reject anything."""

    @initialize(f=st.integers(0, 2), more=st.integers(0, 2), strikes=st.integers(1, 3), data=st.data())
    def begin(self, f: int, more: int, strikes: int, data: st.DataObject) -> None:
        self.n = 2 * f + 1 + more
        assume(self.n > 2)
        self.byzantine = frozenset(data.draw(st.permutations(range(self.n)))[:f])
        robust = Options({"rule": "median", "byzantine": f, "strikes": strikes})
        self.rule = make_exchange(ExchangeConfig(replicas=self.n, robust=robust))
        self.suspicion, self.proved, self.steps = NOTHING, dict.fromkeys(range(self.n), 0), 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """All send updates and report digests; the step is repeated until all agree."""
        flawed = {
            byzantine_member: data.draw(st.sets(st.integers(0, self.n - 1))) for byzantine_member in self.byzantine
        }
        all_of = range(self.n)
        digests = {m: {o: f"{m in flawed[o]}" if o in self.byzantine else f"{o}" for o in all_of} for m in all_of}
        for byzantine_member in self.byzantine:
            digests[byzantine_member] = {o: data.draw(st.sampled_from(["True", "False", f"{o}"])) for o in all_of}
        while (found := self.suspicion.examine(digests, self.rule)).min_byzantine:
            self.suspicion = self.suspicion.with_findings(found.all)
        without = self.suspicion.exclusions(self.rule).left_out
        refused = {m: {o for o in self.byzantine if m in flawed[o]} | without.keys() for m in all_of}
        for byzantine_member in self.byzantine:
            refused[byzantine_member] = data.draw(st.sets(st.integers(0, self.n - 1)))
        for byzantine_member in self.byzantine - without.keys():
            self.proved[byzantine_member] += (
                len([m for m in refused if byzantine_member in refused[m]]) > self.rule.tolerated
            )
        self.suspicion = self.suspicion.end_round(self.steps, refused, self.rule)
        self.steps += 1

    @invariant()
    def no_honest_member_is_accused_alone(self) -> None:
        standing = self.suspicion.exclusions(self.rule)
        assert set(standing.invalid) <= self.byzantine and set(standing.byzantine) <= self.byzantine
        assert all(set(pair) & self.byzantine for pair in standing.disputes)
        assert standing.min_byzantine <= len(self.byzantine), "each finding is a distinct Byzantine member"

    @invariant()
    def members_with_enough_proved_strikes_are_excluded(self) -> None:
        standing = self.suspicion.exclusions(self.rule).left_out
        assert {
            byzantine_member for byzantine_member, times in self.proved.items() if times >= self.rule.strikes
        } <= standing.keys()


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=25, stateful_step_count=12)
