"""Validation of signed messages from untrusted peers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.board.claims import canonical_json, sign_claim
from planaria.swarm.board.envelope import seal, unseal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage, Completion, Goodbye, Hello, ProblemCompletions, Rollouts, RunRules
from planaria.swarm.board.message_limits import MessageLimits
from support.swarm.swarm_messages import RUN, goodbye, hello, rollouts, rules

ONE, OTHER = PeerIdentity.generate(), PeerIdentity.generate()
LIMITS = MessageLimits()
KINDS: tuple[Any, ...] = (RunRules, Hello, Rollouts, Goodbye)


def envelope(body: str, who: PeerIdentity = ONE, run: str = RUN, place: str = "rounds/000003.json") -> bytes:
    """Any body at all, signed as a peer would who wrote its own program."""
    signature = sign_claim(who, run, place, body).signature
    words = {"key": who.public.hex(), "run": run, "place": place, "signature": signature, "body": body}
    return json.dumps(words).encode()


def reason(raw: bytes, kind: Any = Rollouts, limits: MessageLimits = LIMITS, **expected: Any) -> str:
    with pytest.raises(BadMessage) as refusal:
        unseal(raw, limits, kind, **expected)
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
    assert unseal(raw, LIMITS, type(message), peer=ONE.peer) == message
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
    assert unseal(seal(ONE, message), LIMITS, Rollouts, peer=ONE.peer, run=RUN, place=message.place) == message


def test_sealing_for_another_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot sign a message of"):
        seal(OTHER, rollouts(ONE))


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


def test_oversized_messages_are_refused_before_parsing() -> None:
    raw = seal(ONE, rollouts(ONE))
    assert reason(raw, limits=replace(LIMITS, message_bytes=len(raw) - 1)) == "oversized"
    assert unseal(raw, replace(LIMITS, message_bytes=len(raw)), Rollouts)
    assert reason(b"x" * 11, limits=replace(LIMITS, message_bytes=10)) == "oversized"


@pytest.mark.parametrize(
    ("limit", "most", "why"),
    [
        ("groups", 2, "too many groups"),
        ("completions", 3, "too many completions"),
        ("characters", 4, "too many characters"),
        ("tokens", 5, "too many tokens"),
    ],
)
def test_limits_are_exact(limit: str, most: int, why: str) -> None:
    one = Completion(text="abcd", ended=True, ids=(1,) * 5)
    message = rollouts(ONE, groups=tuple(ProblemCompletions(problem=n, completions=(one,) * 3) for n in range(2)))
    assert unseal(seal(ONE, message), replace(LIMITS, **{limit: most}), Rollouts) == message
    assert reason(seal(ONE, message), limits=replace(LIMITS, **{limit: most - 1})) == why


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
    assert unseal(seal(ONE, rollouts(ONE, groups=())), LIMITS, Rollouts).groups == ()


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


def test_messages_are_immutable() -> None:
    with pytest.raises(ValidationError):
        rollouts(ONE).round = 5


# --- whatever bytes arrive ---------------------------------------------------------------------------------------


def accepted(raw: bytes, kinds: tuple[Any, ...] = KINDS) -> int:
    """Return the number of kinds that parse it; any other exception than BadMessage fails the test."""
    taken = 0
    for kind in kinds:
        try:
            assert isinstance(unseal(raw, LIMITS, kind, peer=ONE.peer), kind)
        except BadMessage as refusal:
            assert 0 < len(refusal.reason) < 120 and refusal.reason.isprintable()
        else:
            taken += 1
    return taken


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(raw: bytes) -> None:
    assert not accepted(raw)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("kind", "version", "run", "peer", "key", "round", "groups", "problem", "completions", "ids", "logps", "rules")


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), values))
def test_random_signed_json_is_refused(content: dict[str, Any]) -> None:
    assert not accepted(envelope(json.dumps(content)))
    assert not accepted(json.dumps(content).encode())


STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 0.5, math.nan, math.inf, -math.inf, "", "x" * 300, "\0", "\ud800", [], {}, [[]], [None],
    {"": {}}, "0" * 16, "0" * 32, "0" * 64, 2**63, -(2**63), 1e308, "rollouts", "hello", [0] * 300,
)  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from places(value)


def confuse(tree: Any, rng: random.Random) -> None:
    """Put something else somewhere: another type, another part of the message, one field more, one less."""
    container, key = rng.choice(list(places(tree)))
    match rng.randrange(5):
        case 0:
            container[key] = deepcopy(rng.choice(STRANGE))
        case 1:
            other, name = rng.choice(list(places(tree)))
            container[key] = json.loads(json.dumps(other[name]))
        case 2:
            del container[key]
        case 3:
            container[key] = [container[key]] * rng.randrange(3)
        case 4 if isinstance(container, dict):
            container[rng.choice(FIELDS)] = deepcopy(rng.choice(STRANGE))


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """A valid envelope cut off, with bits or bytes changed, or with two parts swapped."""
    at, to = sorted((rng.randrange(len(raw)), rng.randrange(len(raw))))
    match rng.randrange(4):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        case 2:
            return raw[:at] + rng.randbytes(rng.randrange(9)) + raw[to:]
        case _:
            return raw[to:] + raw[:at]


@pytest.mark.slow
def test_damaged_messages_are_refused_or_valid() -> None:
    rng = random.Random(20250101)
    messages = [m(ONE) for m in (rollouts, hello, goodbye, rules)]
    sealed = [seal(ONE, message) for message in messages]
    assert all(accepted(raw) == 1 for raw in sealed)
    taken = 0
    for n in range(4000):
        kind = (type(messages[n % 4]),)
        raw = damaged(sealed[n % 4], rng)
        assert raw in sealed or not accepted(raw, kind)
        body = messages[n % 4].model_dump(mode="json")
        for _ in range(rng.randrange(1, 4)):
            confuse(body, rng)
        text = json.dumps(body)
        where = messages[n % 4]
        taken += accepted(envelope(text, run=where.run, place=where.place), kind)
        cut = text[: rng.randrange(len(text))]
        assert not accepted(envelope(cut), kind)
    assert 0 < taken < 2000  # some confused messages are valid


def test_every_prefix_of_a_message_is_invalid() -> None:
    raw = seal(ONE, rollouts(ONE))
    assert {reason(raw[:n]) for n in range(len(raw))} == {"not JSON"}
