"""Validation of signed messages from untrusted peers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.board.claims import canonical_json, sign_claim
from planaria.swarm.board.envelope import seal, unseal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage, Completion, Goodbye, Hello, ProblemCompletions, Rollouts, RunRules
from support.swarm.boards import lower_limits
from support.swarm.swarm_messages import RUN, goodbye, hello, rollouts, rules

ONE, OTHER = PeerIdentity.generate(), PeerIdentity.generate()


def envelope(body: str, who: PeerIdentity = ONE, run: str = RUN, place: str = "rounds/000003.json") -> bytes:
    """Any body at all, signed as a peer would who wrote its own program."""
    signature = sign_claim(who, run, place, body).signature
    words = {"key": who.public.hex(), "run": run, "place": place, "signature": signature, "body": body}
    return json.dumps(words).encode()


def reason(raw: bytes, kind: Any = Rollouts, **expected: Any) -> str:
    with pytest.raises(BadMessage) as refusal:
        unseal(raw, kind, **expected)
    return refusal.value.reason


def changed(**changes: Any) -> str:
    """Why a message with these fields changed, signed by its own peer, is refused."""
    return reason(envelope(json.dumps(rollouts(ONE).model_dump(mode="json") | changes)))


def completion(**changes: Any) -> str:
    words = {"text": "x", "ended": True, "ids": None, "logps": None} | changes
    return changed(groups=[{"problem": 1, "completions": [words]}])


@pytest.mark.parametrize("message", [rollouts(ONE), hello(ONE), goodbye(ONE), rules(ONE)], ids=lambda m: m.kind)
def test_sealed_messages_are_unsealed_unchanged(message: Any) -> None:
    raw = seal(ONE, message)
    assert unseal(raw, type(message), peer=ONE.peer) == message
    assert raw == seal(ONE, message)


texts = st.text(max_size=30)
claims = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0.0)), max_size=20)


@given(st.lists(st.tuples(texts, st.booleans(), st.none() | claims), min_size=1, max_size=4), st.integers(0, 999_999))
def test_texts_and_numbers_arrive_bit_for_bit(sent: Any, round: int) -> None:
    completions = [
        Completion(text=text, ended=ended)
        if claim is None
        else Completion(text=text, ended=ended, ids=tuple(i for i, _ in claim), logps=tuple(p for _, p in claim))
        for text, ended, claim in sent
    ]
    message = rollouts(ONE, round=round, groups=(ProblemCompletions(problem=0, completions=tuple(completions)),))
    assert unseal(seal(ONE, message), Rollouts, peer=ONE.peer, run=RUN, place=message.place) == message


def test_forged_messages_are_refused() -> None:
    words = json.loads(seal(ONE, rollouts(ONE)))
    assert reason(seal(ONE, rollouts(ONE)), peer=OTHER.peer) == "forged"  # its own key, in another's place
    assert reason(envelope(rollouts(ONE).model_dump_json(), OTHER)) == "forged"  # in another's name
    for body in (words["body"] + " ", words["body"].replace("3 + 4", "3 + 5")):
        assert reason(json.dumps(words | {"body": body}).encode()) == "forged"
    assert reason(json.dumps(words | {"key": OTHER.public.hex()}).encode()) == "forged"
    assert reason(json.dumps(words | {"signature": "0" * 128}).encode()) == "forged"
    bare = ONE.sign(words["body"].encode()).hex()  # something else that this key once signed
    assert reason(json.dumps(words | {"signature": bare}).encode()) == "forged"


@pytest.mark.parametrize(
    ("once", "twice"),
    [
        ('"round":3', '"round":3,"round":3'),
        ('"round":3', '"round":4,"round":3'),
        ('"text":', '"text":"other","text":'),
        ('"round":3', '"round":3,"\\u0072ound":3'),
    ],
)
def test_duplicate_keys_are_refused(once: str, twice: str) -> None:
    body = rollouts(ONE).model_dump_json()
    assert once in body and reason(envelope(body.replace(once, twice, 1))) == "a key twice"
    raw = seal(ONE, rollouts(ONE)).decode()
    assert reason(raw.replace('{"key"', '{"body":"","key"', 1).encode()) == "a key twice"


def test_a_hello_contains_the_signing_key() -> None:
    sent = hello(ONE).model_dump(mode="json")
    assert reason(envelope(json.dumps(sent | {"key": OTHER.public.hex()})), Hello) == "malformed: contents"
    assert reason(seal(OTHER, hello(OTHER)), Hello, peer=ONE.peer) == "forged"


def test_messages_of_other_rounds_or_runs_are_refused() -> None:
    raw = seal(ONE, rollouts(ONE, round=3))
    assert reason(raw, place="rounds/000004.json") == "replayed"
    assert reason(raw, run="f" * 32, place="rounds/000003.json") == "another run"
    for kind, message in ((Hello, hello(ONE)), (Goodbye, goodbye(ONE)), (RunRules, rules(ONE))):
        assert reason(seal(ONE, message), kind, run="f" * 32) == "another run"
    assert reason(seal(ONE, hello(ONE))) == "malformed: kind"


def test_oversized_messages_are_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = seal(ONE, rollouts(ONE))
    lower_limits(monkeypatch, message_bytes=len(raw))
    assert unseal(raw, Rollouts)
    assert reason(b"x" * (len(raw) + 1)) == "oversized"


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [
        ("groups", 2, "too many groups"),
        ("completions", 3, "too many completions"),
        ("characters", 4, "too many characters"),
        ("tokens", 5, "too many tokens"),
    ],
)
def test_limits_are_exact(limit: str, most: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Completion(text="abcd", ended=True, ids=(1,) * 5)
    message = rollouts(ONE, groups=tuple(ProblemCompletions(problem=n, completions=(one,) * 3) for n in range(2)))
    lower_limits(monkeypatch, **{limit: most})
    assert unseal(seal(ONE, message), Rollouts) == message
    lower_limits(monkeypatch, **{limit: most - 1})
    assert reason(seal(ONE, message)) == why


def test_the_invalid_field_is_named() -> None:
    assert changed(round=-1) == changed(round=10**6) == changed(round="3") == changed(round=True) == "malformed: round"
    assert changed(round=3.0) == changed(round=None) == "malformed: round"
    assert changed(version=1) == changed(version="2") == "another version"
    assert changed(tokenizer="0" * 15) == changed(tokenizer="0" * 16 + "\n") == "malformed: tokenizer"
    assert changed(weights="00") == "malformed: weights"
    assert changed(groups={}) == changed(groups="") == "malformed: groups"
    assert completion(text=5) == "malformed: groups.0.completions.0.text"
    assert completion(ended=1) == "malformed: groups.0.completions.0.ended"
    assert completion(extra=1) == "malformed: groups.0.completions.0.unknown field"
    assert reason(b'{"key": "", "run": "", "place": "", "signature": "", "body": ""}') == "malformed: key"
    assert reason(b"[]") == "malformed: contents"
    assert reason(envelope("nonsense")) == reason(b"nonsense") == reason(b"") == "not JSON"


def test_a_problem_is_a_number_with_one_nonempty_group() -> None:
    texts = [{"text": "x", "ended": True, "ids": None, "logps": None}]
    for problem in (-1, 2**63, 1.5, "1", None):
        assert changed(groups=[{"problem": problem, "completions": texts}]) == "malformed: groups.0.problem"
    assert changed(groups=[{"problem": 1, "completions": []}]) == "malformed: groups.0.completions"
    assert changed(groups=[{"problem": 1, "completions": texts}] * 2) == "malformed: contents"
    assert unseal(seal(ONE, rollouts(ONE, groups=())), Rollouts).groups == ()


@pytest.mark.parametrize("logp", [1.1e-4, 1.0, -1.1e4, "NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"-1"'])
def test_a_log_probability_is_a_finite_number_below_zero(logp: Any) -> None:
    body = rollouts(ONE).model_dump_json().replace("-0.5", str(logp))
    assert reason(envelope(body)) in ("malformed: groups.0.completions.0.logps.0", "not JSON")


def test_probabilities_rounded_above_one_are_clipped() -> None:
    one = Completion(text="", ended=True, ids=(1, 2, 3), logps=(1e-4, 5e-7, -1e4))
    assert one.logps == (0.0, 0.0, -1e4)


def test_claims_have_one_log_probability_per_id() -> None:
    assert completion(ids=[1, 2], logps=[-1.0]) == completion(logps=[-1.0]) == "malformed: groups.0.completions.0"
    assert completion(ids=[-1]) == completion(ids=[2**31]) == "malformed: groups.0.completions.0.ids.0"
    assert (
        completion(ids=[True])
        == completion(ids=["1"])
        == completion(ids=[1.0])
        == ("malformed: groups.0.completions.0.ids.0")
    )


def test_text_is_unicode() -> None:
    raw = rollouts(ONE).model_dump_json()
    assert reason(envelope(raw.replace("3 + 4", "\\ud800"))) == "not JSON"
    assert reason(seal(ONE, rollouts(ONE)).replace(b"3 + 4", b"\xed\xa0\x80")) == "not JSON"
    assert reason(seal(ONE, rollouts(ONE)).replace(b"3 + 4", b"\xff")) == "not JSON"
    with pytest.raises(ValidationError):
        Completion(text="\ud800", ended=True)


@pytest.mark.parametrize("name", ["", "x" * 41, "a\nb", "a\x1b[31m", "a‮b", " a", "a ", "a\0"])
def test_a_display_name_is_one_short_printable_line(name: str) -> None:
    raw = envelope(json.dumps(hello(ONE).model_dump(mode="json") | {"name": name}))
    assert reason(raw, Hello) == "malformed: name"


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"groups":[', "[{}", "9", '"\\u'])
def test_deep_and_truncated_json_is_refused(opening: str) -> None:
    raw = (opening * 200_000).encode()
    assert reason(raw) == "not JSON"
    assert reason(envelope(raw.decode())) == "not JSON"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("unit", ["[]", "{}", "0", '""', "null"])
def test_four_megabytes_of_wrong_types_are_refused(unit: str) -> None:
    many = ",".join([unit] * (2**22 // (len(unit) + 1) - 100))
    assert reason(f'{{"key":[{many}]}}'.encode()) == "malformed: key"
    assert (
        changed(groups=json.loads(f"[{many[: 2**20].rpartition(',')[0]}]"))
        == f"malformed: groups.0{'.problem' * (unit == '{}')}"
    )


@pytest.mark.slow
def test_half_a_million_unknown_fields_are_not_repeated() -> None:
    raw = "{" + ",".join(f'"{n:x}":0' for n in range(2**22 // 10)) + "}"
    assert reason(raw.encode()) == "malformed: many fields"


def test_a_reason_contains_no_text_of_the_sender() -> None:
    made_up = "‮\x1b[31m" + "x" * 10_000
    assert changed(**{made_up: 1}) == "malformed: unknown field"
    body = json.dumps(rules(ONE).model_dump(mode="json") | {"rules": {made_up: {made_up: 0.125}}})
    body = body.replace("0.125", "1e999")
    assert reason(envelope(body), RunRules) == "malformed: rules"


def test_rules_are_identified_by_content() -> None:
    one = rules(ONE, a=1, b=[True, None, "ß"])
    assert one.fingerprint == rules(OTHER, b=[True, None, "ß"], a=1).fingerprint
    others = [rules(ONE, a=v, b=[True, None, "ß"]) for v in (1.0, True, "1", 2)]
    assert len({r.fingerprint for r in [one, *others]}) == 5
    runs = [one, *others, one.model_copy(update={"nonce": "f" * 32}), rules(OTHER, a=1, b=[True, None, "ß"])]
    assert len({r.run for r in runs}) == 7 and all(len(r.run) == 32 for r in runs)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {"\udfff": 1}])
def test_rules_contain_only_valid_json(value: Any) -> None:
    with pytest.raises(ValidationError):
        rules(ONE, a=value)


def test_deeply_nested_rules_are_refused() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        canonical_json(deep)


def test_every_prefix_of_a_message_is_invalid() -> None:
    raw = seal(ONE, rollouts(ONE))
    assert {reason(raw[:n]) for n in range(len(raw))} == {"not JSON"}
