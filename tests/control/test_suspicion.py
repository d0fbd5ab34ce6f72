"""Whose offers are of no use again and again: whatever liars say and refuse, nobody honest is left out for it."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.exchange.kinds import exchange
from planaria.exchange.robust.equivocation import Findings
from planaria.exchange.robust.suspicion import Suspicion

NOTHING = Suspicion()


def after(strikes: int, *steps: dict[int, set[int]], liars: int = 1) -> Findings:
    robust = Options({"rule": "median", "liars": liars, "strikes": strikes})
    made, suspicion = exchange(ExchangeConfig(replicas=5, robust=robust)), NOTHING
    for step, refused in enumerate(steps):
        suspicion = suspicion.ended(step, refused, made)
    return suspicion.standing(made)


def test_one_whose_offers_all_refuse_is_left_out_after_so_many_steps() -> None:
    all_refuse: dict[int, set[int]] = {0: {2}, 1: {2}, 3: {2}, 4: {2}}
    assert after(2, all_refuse) == Findings() and after(0, *[all_refuse] * 9) == Findings()
    found = after(2, all_refuse, {}, all_refuse)
    assert found == Findings(useless=(2,)) and found.least == 1
    assert found.left_out == {2: "what it has said was of no use too often"}


def test_one_whom_a_single_member_refuses_is_not() -> None:
    assert after(1, {0: {2}}, {0: {2}}, {0: {2}}) == Findings(), "one of five may lie"
    assert after(1, {0: {2}}, {3: {2}}).useless == (2,), "but not both who say so"
    assert after(2, {0: {2}}, {3: {2}}, {0: {2}}) == Findings(), "of these one step is proved at most"
    assert after(1, {0: {2}, 3: {2}}).useless == (2,)
    assert after(1, {0: {2}, 3: {2}}, liars=2) == Findings()


class Steps(RuleBasedStateMachine):
    """The honest refuse what is of no use, and nothing else; liars say and refuse anything; digests are compared."""

    @initialize(f=st.integers(0, 2), more=st.integers(0, 2), strikes=st.integers(1, 3), data=st.data())
    def begin(self, f: int, more: int, strikes: int, data: st.DataObject) -> None:
        self.n = 2 * f + 1 + more
        assume(self.n > 2)
        self.liars = frozenset(data.draw(st.permutations(range(self.n)))[:f])
        robust = Options({"rule": "median", "liars": f, "strikes": strikes})
        self.rule = exchange(ExchangeConfig(replicas=self.n, robust=robust))
        self.suspicion, self.proved, self.steps = NOTHING, dict.fromkeys(range(self.n), 0), 0

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Everybody says something; what is heard is told, and the step is made again until all agree."""
        flawed = {liar: data.draw(st.sets(st.integers(0, self.n - 1))) for liar in self.liars}
        all_of = range(self.n)
        heard = {m: {o: f"{m in flawed[o]}" if o in self.liars else f"{o}" for o in all_of} for m in all_of}
        for liar in self.liars:
            heard[liar] = {o: data.draw(st.sampled_from(["True", "False", f"{o}"])) for o in all_of}
        while (found := self.suspicion.examine(heard, self.rule)).least:
            self.suspicion = self.suspicion.raised(found.all)
        without = self.suspicion.standing(self.rule).left_out
        refused = {m: {o for o in self.liars if m in flawed[o]} | without.keys() for m in all_of}
        for liar in self.liars:
            refused[liar] = data.draw(st.sets(st.integers(0, self.n - 1)))
        for liar in self.liars - without.keys():
            self.proved[liar] += len([m for m in refused if liar in refused[m]]) > self.rule.borne
        self.suspicion = self.suspicion.ended(self.steps, refused, self.rule)
        self.steps += 1

    @invariant()
    def nobody_honest_stands_accused_alone(self) -> None:
        standing = self.suspicion.standing(self.rule)
        assert set(standing.useless) <= self.liars and set(standing.liars) <= self.liars
        assert all(set(pair) & self.liars for pair in standing.disputes)
        assert standing.least <= len(self.liars), "each finding is a liar of its own, so that the rule bears the rest"

    @invariant()
    def who_is_proved_useless_often_enough_is_left_out(self) -> None:
        standing = self.suspicion.standing(self.rule).left_out
        assert {liar for liar, times in self.proved.items() if times >= self.rule.strikes} <= standing.keys()


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=25, stateful_step_count=12)
