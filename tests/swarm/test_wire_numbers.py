"""Numbers out of range in messages of peers, committees and servers."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.swarm.board.claims import sign_claim
from planaria.swarm.board.envelope import unseal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage
from planaria.swarm.board.receipts import Committee, parse_message_list, parse_rewards, rewards_text
from planaria.swarm.completions.client import BadReply, ServerFailed, _parse_reply, parse_completions
from planaria.swarm.completions.server import parse_request
from planaria.swarm.credits.messages import MESSAGE, CreditOrder
from support.hostile_json import NUMBERS, hostile
from support.swarm.swarm_messages import RUN, closing, goodbye, hello, rollouts, rules

ONE = PeerIdentity.generate()
DIGEST = "ab" * 32
WORDS: Any = SimpleNamespace(encode=lambda text: [*text.encode()], decode=lambda ids: bytes(ids).decode("latin-1"))
WORDS.vocab, WORDS.end = 257, 256
MESSAGES = [rollouts(ONE), hello(ONE), goodbye(ONE), closing(ONE, received=[ONE]), rules(ONE)]
ORDER = CreditOrder(parties=("a", "b"), channels=("x",), numbers=(0,), amount=5)
REPLY = {
    "choices": [
        {"text": "ab", "finish_reason": "stop", "token_ids": [97, 98], "logprobs": {"token_logprobs": [-0.5, -1.5]}},
        {"text": "a", "logprobs": {"content": [{"id": 97, "logprob": -0.5}]}},
        {"text": "a", "logprobs": {"tokens": ["token_id:97"], "token_logprobs": [-0.5]}},
    ]
}


@settings(max_examples=60)
@given(st.sampled_from(MESSAGES), st.data())
def test_signed_messages_are_read_or_refused(message: Any, data: st.DataObject) -> None:
    body = data.draw(hostile(message.model_dump(mode="json"))).decode("utf-8", "replace")
    signature = sign_claim(ONE, RUN, message.place, body).signature
    words = {"key": ONE.public.hex(), "run": RUN, "place": message.place, "signature": signature, "body": body}
    raw = data.draw(st.just(json.dumps(words).encode()) | hostile(words))
    try:
        assert isinstance(unseal(raw, type(message)), type(message))
    except BadMessage as refusal:
        assert 0 < len(refusal.reason) < 120 and refusal.reason.isprintable()


@settings(max_examples=100)
@given(hostile({"a" * 32: DIGEST}), hostile(json.loads(rewards_text(DIGEST, {("a" * 32, 1, 2): 0.5}))))
def test_texts_of_receipts_are_read_or_empty(message_list: bytes, rewards: bytes) -> None:
    assert all(
        isinstance(digest, str) for digest in parse_message_list(message_list.decode("utf-8", "replace")).values()
    )
    found = parse_rewards(rewards.decode("utf-8", "replace"), DIGEST)
    assert all(math.isfinite(reward) and 0 <= problem < 1 << 63 for (_, problem, _), reward in found.items())


def test_deeply_nested_texts_are_empty() -> None:
    assert parse_message_list("[" * 100_000) == {} and parse_rewards("[" * 100_000, DIGEST) == {}


@given(hostile({"receipts": {"committee": "a, b", "quorum": 1}}))
def test_rules_name_a_committee_or_none(raw: bytes) -> None:
    try:
        rules = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(rules, dict) and (committee := Committee.from_rules(rules)) is not None:
        assert committee.members and all(name in rules["receipts"]["committee"] for name in committee.members)


def test_a_committee_is_read_from_rules() -> None:
    committee = Committee.from_rules({"receipts": {"committee": "a, b", "quorum": 1}})
    assert committee is not None and committee.members == {"a", "b"}
    for section in ({"committee": ""}, {"committee": 3}, {}, None):
        assert Committee.from_rules({"receipts": section}) is None


@settings(max_examples=100)
@given(hostile(ORDER.model_dump(mode="json")))
def test_credit_messages_are_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ValidationError):
        MESSAGE.validate_json(raw)


@settings(max_examples=200)
@given(hostile(REPLY))
def test_server_replies_are_completions_or_bad_replies(raw: bytes) -> None:
    with contextlib.suppress(BadReply, ServerFailed):
        for drawn in parse_completions(_parse_reply(raw, "/v1/completions"), WORDS, 8):
            assert len(drawn.ids) + drawn.ended <= 8 and all(-1e4 <= p <= 0 for p in drawn.logps)


def test_log_probabilities_out_of_range_are_bounded_or_unknown() -> None:
    for number in NUMBERS:
        with contextlib.suppress(BadReply, ServerFailed):
            choice = json.dumps(REPLY["choices"][0]).replace("-1.5", number)
            (drawn,) = parse_completions(_parse_reply(f'{{"choices": [{choice}]}}'.encode(), "x"), WORDS, 8)
            assert all(-1e4 <= p <= 0 for p in drawn.logps)


@settings(max_examples=100)
@given(hostile({"prompt": [1, 2], "n": 1, "temperature": 1.0, "seed": 1, "logprobs": 1, "top_k": 1}))
def test_completion_requests_are_read_or_refused_in_one_line(raw: bytes) -> None:
    try:
        parse_request(raw)
    except UserError as error:
        assert "\n" not in str(error)
