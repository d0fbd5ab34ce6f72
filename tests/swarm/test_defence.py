"""The layers of the defence together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.swarm.checks import make_checks
from planaria.swarm.checks.base import Check, Context, LayerFindings
from planaria.swarm.checks.defence import Defence, DefenceReport, PeerAccounts, configuration_warnings
from planaria.swarm.config.swarm_config import DefenceConfig
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.records.lines import UNKNOWN_PEERS
from support.swarm.tiny_swarm import CONTEXT, case

CALM = DefenceConfig(quarantine=0.0)


class Refusing:
    """A layer that rejects by a rule and records the completions that it examined."""

    def __init__(self, name: str, rule: Callable[[Rollout], bool], off: str = "") -> None:
        self.name, self.rule, self.off = name, rule, off
        self.fallible = name != "judge"
        self.shown: list[Rollout] = []

    def examine(self, cases: Sequence[Rollout], context: Context) -> LayerFindings:
        self.shown = list(cases)
        return LayerFindings({n: "bad" for n, c in enumerate(cases) if not self.off and self.rule(c)}, self.off)


def defended(config: DefenceConfig, layers: Sequence[object]) -> Defence:
    return Defence(config, cast(Sequence[Check], layers), CONTEXT)


def text_is(*texts: str) -> Callable[[Rollout], bool]:
    return lambda c: c.text in texts


def rule(config: DefenceConfig = CALM) -> Defence:
    """A defence with one layer that refuses "!"."""
    return defended(config, [Refusing("rule", text_is("!"))])


def from_peers(**texts: str) -> list[Rollout]:
    """One case for each letter of a peer's string."""
    return [case(peer, index=n, text=letter) for peer, letters in texts.items() for n, letter in enumerate(letters)]


def layer_of(report: DefenceReport) -> str:
    return " ".join(rollout.layer or "-" for rollout in report.rollouts)


def test_a_layer_examines_what_earlier_layers_accepted() -> None:
    first, second = Refusing("first", text_is("1")), Refusing("second", text_is("1", "2"))
    cases = from_peers(a="0000012")
    report = defended(CALM.model_copy(update={"max_median_rejection": 1.0}), [first, second]).examine(0, cases)
    assert layer_of(report) == "- - - - - first second"
    assert [c.text for c in second.shown] == [*"000002"]
    assert report.rollouts[5].passed == () and report.rollouts[6].passed == ("first",)
    assert report.rollouts[0].passed == ("first", "second") and report.rollouts[6].reason == "bad"
    assert report.rejected == {"first": {"a": (7, 1)}, "second": {"a": (6, 1)}}
    assert [c.name for c in report.accepted] == [c.name for c in cases[:5]]


def test_many_unknown_peers_do_not_switch_a_layer_off() -> None:
    defence = rule()
    for number in range(20):
        crowd = [case(f"s{number}-{n}", text="!", account=UNKNOWN_PEERS) for n in range(12)]
        report = defence.examine(number, [*from_peers(a="000", b="000", c="000"), *crowd])
        assert not report.off and len(report.accepted) == 9
        assert len(report.rejected["rule"]) == 15, "each of them is listed by name"


@given(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5), st.data())
def test_fewer_attackers_than_half_of_the_known_peers_cannot_switch_a_layer_off(
    attackers: int, more: int, invented: int, data: st.DataObject
) -> None:
    texts = {f"evil{n}": data.draw(st.text("0!", min_size=1, max_size=4)) for n in range(attackers)}
    honest = {f"honest{n}": "0" * 4 for n in range(attackers + 1 + more)}
    unknown = [case(f"s{n}", text="!", account=UNKNOWN_PEERS) for n in range(invented)]
    report = rule().examine(0, [*from_peers(**honest, **texts), *unknown])
    assert not report.off
    assert {rollout.text for rollout in report.accepted} == {"0"}


def test_one_invented_id_does_not_switch_a_layer_off() -> None:
    known = from_peers(a="0" * 100, b="0" * 99 + "!", evil="0" * 80 + "!" * 20)
    assert not rule().examine(0, known).off
    assert not rule().examine(0, [*known, case("invented", text="!", account=UNKNOWN_PEERS)]).off


def test_a_layer_that_would_refuse_the_median_peer_is_off() -> None:
    defence = rule()
    cases = from_peers(a="000", b="0!!", c="0!!", d="0!!")
    report = defence.examine(0, cases)
    assert report.accepted == cases and all(verdict.passed == () for verdict in report.rollouts)
    assert "67% of the median peer's" in report.off["rule"]
    assert report.rejected["rule"]["b"] == (3, 2), "reports what it would have rejected"


def test_neither_own_completions_nor_an_unsurprising_attacker_keep_a_layer_on() -> None:
    defence = rule()
    cases = from_peers(me="0" * 24, attacker="0" * 24, other="!" + "0" * 23, third="!!" + "0" * 22)
    assert "4% of the median peer's" in defence.examine(0, cases).off["rule"]
    assert not rule().examine(0, from_peers(me="000", attacker="!!!", other="000", third="000")).off


def test_a_layer_switches_on_again_after_its_window() -> None:
    defence = rule(CALM.model_copy(update={"window": 3}))
    bad, good = from_peers(a="!!!", b="!!!", c="!!!"), from_peers(a="000", b="000", c="000")
    assert defence.examine(0, bad).off
    assert [bool(defence.examine(n, good).off) for n in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_judge_is_never_switched_off() -> None:
    defence = defended(CALM, [Refusing("judge", text_is("!"))])
    report = defence.examine(0, from_peers(a="!!!", b="!!!", c="!!!"))
    assert not report.off and not report.accepted


def test_own_completions_are_examined_too() -> None:
    config = DefenceConfig(window=2)
    for me in "ab":  # a defence does not even know whose it is
        report = defended(config, [Refusing("judge", text_is("!"))]).examine(0, from_peers(a="00!", b="000"))
        assert layer_of(report) == "quarantine quarantine judge - - -", me


def test_a_quarantined_peer_is_still_examined() -> None:
    defence = defended(DefenceConfig(window=2), [Refusing("judge", text_is("!"))])
    honest = {"a": "000", "b": "000", "c": "000"}
    assert defence.examine(0, from_peers(**honest, x="0!!")).quarantined.keys() == {"x"}
    still = defence.examine(1, from_peers(**honest, x="000"))
    assert still.quarantined.keys() == {"x"} and len(still.accepted) == 9
    assert still.rollouts[-1].layer == "quarantine" and still.rollouts[-1].passed == ("judge",)
    assert not defence.examine(2, from_peers(**honest, x="000")).quarantined, (
        "its appeal: its completions since then were accepted"
    )


def test_layers_that_are_off_quarantine_no_peer() -> None:
    defence = rule(DefenceConfig())
    report = defence.examine(0, from_peers(a="!!!", b="!!!", c="000"))
    assert report.off and not report.quarantined and len(report.accepted) == 9


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("0001!")), max_size=20), min_size=1, max_size=8
    )
)
def test_every_completion_is_counted(rounds: list[list[tuple[str, str]]]) -> None:
    refusing = [Refusing("first", text_is("1")), Refusing("judge", text_is("!"))]
    defence = defended(DefenceConfig(window=2), refusing)
    for number, entries in enumerate(rounds):
        cases = [case(peer, index=n, text=text) for n, (peer, text) in enumerate(entries)]
        report = defence.examine(number, cases)
        assert [rollout.name for rollout in report.rollouts] == [c.name for c in cases]
        remaining = len(cases)
        for name, counts in report.rejected.items():
            assert sum(sent for sent, _ in counts.values()) == remaining
            refused = sum(verdict.layer == name for verdict in report.rollouts)
            assert refused == (0 if name in report.off else sum(k for _, k in counts.values()))
            remaining -= refused
        aside = sum(verdict.layer == "quarantine" for verdict in report.rollouts)
        assert len(report.accepted) == remaining - aside
        assert all(not verdict.layer or verdict.reason for verdict in report.rollouts)


def test_a_round_without_completions_is_valid() -> None:
    report = defended(DefenceConfig(), make_checks(DefenceConfig())).examine(0, [])
    assert not report.rollouts and not report.off


@pytest.mark.parametrize(
    ("check_list", "names"),
    [
        (DefenceConfig().checks, ["claims", "support", "surprisal", "duplicates", "judge"]),
        ("noisy,  support", ["judge", "support"]),
        ("", []),
    ],
)
def test_layers_follow_the_configured_order(check_list: str, names: list[str]) -> None:
    config = DefenceConfig(checks=check_list, options=Options({"rate": 0.5} if "noisy" in check_list else {}))
    assert [check.name for check in make_checks(config)] == names


@pytest.mark.parametrize(
    ("check_list", "options", "fix"),
    [
        ("suport", {}, r"defence\.checks = 'suport': no such choice; did you mean 'support'"),
        ("support", {"threshold": 3}, r"defence\.options\.threshold: no option of 'support'"),
        ("surprisal", {"threshold": 0}, r"defence\.options\.threshold = 0: input should be greater than 0"),
        ("surprisal", {"surprisal": {"treshold": 2}}, r"defence\.options\.surprisal\.treshold: unknown; .*'threshold'"),
        ("support, support", {}, r"every layer \(support\) can occur only once"),
        ("steps, noisy", {"rate": 0.5}, r"every layer \(judge, judge\) can occur only once"),
    ],
)
def test_invalid_checks_are_refused(check_list: str, options: dict[str, object], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        make_checks(DefenceConfig(checks=check_list, options=Options(options)))


def test_two_peers_are_warned_about_the_median() -> None:
    found = make_checks(DefenceConfig())
    (warning,) = configuration_warnings(found, CONTEXT, 2)
    assert "support, surprisal, duplicates" in warning and "judge" not in warning
    assert configuration_warnings(found, CONTEXT, 3) == []
    assert configuration_warnings([], CONTEXT, 2) == []


CROWD = [f"stranger {n}" for n in range(400)]
rounds = st.lists(st.frozensets(st.sampled_from("abcdefgh"), max_size=8), max_size=60)


def known(accounts: PeerAccounts, number: int, received: list[str]) -> set[str]:
    return {peer for peer, account in accounts.record_senders(number, received).items() if account == peer}


@given(rounds, st.integers(1, 9))
def test_at_most_one_peer_becomes_known_per_window(received: list[frozenset[str]], window: int) -> None:
    known_peers, before = PeerAccounts("ab", 2, window, seed=1), {"a", "b"}
    for number, peers in enumerate(received):
        accounts = known_peers.record_senders(number, peers)
        assert accounts.keys() == peers
        assert all(account in (peer, UNKNOWN_PEERS) for peer, account in accounts.items())
        now = set(known_peers.known)
        assert before <= now and len(now) <= 2 + -(-(number + 1) // window)
        assert {peer for peer, account in accounts.items() if account == peer} == before & peers
        before = now


def test_a_single_new_peer_becomes_known_after_a_window() -> None:
    accounts = PeerAccounts("ab", 2, 8, seed=1)
    assert [known(accounts, n, ["a", "b", "c"]) == {*"abc"} for n in range(10)] == [False] * 8 + [True] * 2


def test_without_founders_the_first_size_peers_are_known() -> None:
    found = [known(PeerAccounts((), 4, 8, seed=1), 0, list(order)) for order in (CROWD, CROWD[::-1])]
    assert found[0] == found[1] and len(found[0]) == 4


@given(rounds)
def test_standing_is_restored_from_memory(received: list[frozenset[str]]) -> None:
    one, other = (Defence(DefenceConfig(window=3), [], CONTEXT, "a") for _ in range(2))
    for number, peers in enumerate(received):
        (again := Defence(DefenceConfig(window=3), [], CONTEXT)).load_state(other.state())
        other = again
        accounts = [defence.accounts.record_senders(number, peers) for defence in (one, other)]
        assert list(accounts[0].items()) == list(accounts[1].items())
