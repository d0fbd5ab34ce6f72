"""The completions of an OpenAI-compatible server: what it is asked, and what its reply says.

Servers differ in how they tell token ids. vLLM and SGLang have a field ``token_ids``, older versions of vLLM name a
token "token_id:17", llama.cpp lists tokens with an ``id``. Of others only the tokens' texts are known: these are ours
where our tokenizer cuts the text into the same pieces. Log-probabilities are taken only where the ids are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.swarm.policy.base import Drawn

NAMED = "token_id:"
FLOOR = -1e4
"""nats; the least that a message can say"""


class BadReply(Exception):
    """A reply that holds no completions: one line that says why."""


@dataclass(frozen=True)
class Words:
    """The policy's tokenizer, as far as replies need it."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab: int
    end: int


def request(
    model: str, prompt: Sequence[int], count: int, most: int, top_k: int, seed: int, end: int
) -> dict[str, Any]:
    """The body for ``count`` completions of at most ``most`` tokens.

    Whatever else bends a draw is switched off: servers have defaults of their own, and models bring some along.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "n": count,
        "max_tokens": most,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": top_k or -1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "repeat_penalty": 1.0,
        "seed": seed % 2**31,
        "logprobs": 1,
        "stop_token_ids": [end],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }


def reply_bytes(count: int, most: int) -> int:
    """Bytes that the reply to such a request may have: each token has some words of JSON around it."""
    return (1 << 16) + count * most * 1024


def completions(reply: object, words: Words, most: int) -> list[Drawn]:
    """What a reply holds; log-probabilities are left out where it is not sure which tokens they are of.

    :raises BadReply: when it is no reply to a request for completions.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices:
        raise BadReply("the reply has no choices")
    return [_drawn(choice, words, most) for choice in choices]


def _drawn(choice: object, words: Words, most: int) -> Drawn:
    if not isinstance(choice, dict) or not isinstance(text := choice.get("text"), str):
        raise BadReply("a choice has no text")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise BadReply("a choice's text is not Unicode")
    stopped = choice.get("finish_reason") == "stop"
    logps = _logps(choice)
    ids = _ids(choice, text, words)
    if ids is None:  # our tokens for the text: nobody knows how likely they were
        own = words.encode(text)
        return Drawn(tuple(own[: most - stopped]), stopped and len(own) < most)
    if words.end in ids:
        ids = ids[: ids.index(words.end) + 1]
    if not ids or len(ids) > most:
        raise BadReply(f"a choice has {len(ids)} tokens, of 1 to {most}")
    known = logps is not None and len(logps) >= len(ids)
    claims = tuple(logps[: len(ids)]) if logps is not None and known else ()
    if ids[-1] == words.end:
        return Drawn(tuple(ids[:-1]), True, claims)
    if not stopped:
        return Drawn(tuple(ids), False, claims)
    # It stopped without telling the end, or at an end that is not ours: how likely ours was is not known.
    body = ids[:-1] if not words.decode(ids[-1:]) else ids
    return Drawn(tuple(body[: most - 1]), len(body) < most)


def _ids(choice: dict[str, Any], text: str, words: Words) -> list[int] | None:
    """The token ids of a choice; None where they are not told, or are none of ours."""
    found = choice.get("token_ids")
    if found is None:
        found = _told(choice.get("logprobs"), text, words)
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < words.vocab for i in found):
        return None
    whole = words.decode([i for i in found if i != words.end])
    return found if whole.strip() == text.strip() or whole.startswith(text) else None


def _told(told: object, text: str, words: Words) -> list[Any] | None:
    """Ids as the log-probabilities tell them."""
    if not isinstance(told, dict):
        return None
    if isinstance(listed := told.get("content"), list):
        return [each.get("id") if isinstance(each, dict) else None for each in listed]
    tokens = told.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    if tokens and all(token.startswith(NAMED) and token[len(NAMED) :].isdecimal() for token in tokens):
        return [int(token[len(NAMED) : len(NAMED) + 12]) for token in tokens]
    own = words.encode(text)
    pieces = [words.decode([i]) for i in own]
    if pieces == tokens[: len(own)] and len(tokens) - len(own) in (0, 1):
        return [*own, words.end] if len(tokens) > len(own) else own
    return None


def _logps(choice: dict[str, Any]) -> list[float] | None:
    """The log-probabilities of a choice's tokens in nats; None where one of them is no number."""
    told = choice.get("logprobs")
    if not isinstance(told, dict):
        return None
    found = told.get("token_logprobs")
    if isinstance(listed := told.get("content"), list):
        found = [each.get("logprob") if isinstance(each, dict) else None for each in listed]
    if not isinstance(found, list) or not all(type(p) in (int, float) and p == p for p in found):  # p != p: NaN
        return None
    return [float(min(0, max(FLOOR, p))) for p in found]  # bounded first: no float holds every int
