"""From peers' messages to completions: read with our own tokenizer, scored by our own ground truth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planaria.swarm.board.message import Completion, Rollouts
from planaria.swarm.checks.truth import Schedule, unscheduled
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.reading import Reading
from planaria.swarm.rollout import Asked, Asking, Rollout
from planaria.swarm.scoring import Scored, Scoring

NO_ACCOUNTS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Turned:
    """A completion that was turned away before any policy read it."""

    peer: str
    problem: int
    index: int
    reason: str


def take_in(
    messages: Mapping[str, Rollouts],
    schedule: Schedule,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    asked: Asking,
    weights: str = "",
    accounts: Mapping[str, str] = NO_ACCOUNTS,
) -> tuple[list[Rollout], list[Turned]]:
    """The completions of one round in an order that is the same for all peers: by problem, peer, and place.

    ``weights``: the fingerprint of the reader's own. ``accounts``: peer → under whose part of the schedule it comes
    (:mod:`planaria.swarm.checks.standing`), in the order in which those of one account are served; itself unless given.
    """
    sent = [
        (peer, group.problem, index, completion)
        for peer, message in messages.items()
        for group in message.groups
        for index, completion in enumerate(group.completions)
    ]
    sent.sort(key=lambda entry: (entry[1], entry[0], entry[2]))
    refused = _beyond([entry[:3] for entry in sent], schedule, accounts)
    found, turned = [], [Turned(*sent[place][:3], reason) for place, reason in refused.items()]
    for place, (peer, number, index, completion) in enumerate(sent):
        if place in refused:
            continue
        account = accounts.get(peer, "")
        taken = _taken(messages[peer], completion, scoring, policy, max_new, asked(number), account or peer, index)
        if isinstance(taken, str):
            turned.append(Turned(peer, number, index, taken))
        else:
            alike = taken.logps is not None and messages[peer].weights == weights != ""
            found.append(replace(taken, peer=peer, index=index, alike=alike, account=account))
    return found, turned


def _beyond(sent: Sequence[tuple[str, int, int]], schedule: Schedule, accounts: Mapping[str, str]) -> Mapping[int, str]:
    """Place among ``sent``, (peer, problem, index) → why it is none of this round's. Of those who share an account,
    everybody's first comes before anybody's second."""
    lot = {peer: place for place, peer in enumerate(accounts)}
    order = sorted(range(len(sent)), key=lambda n: (sent[n][2], lot.get(sent[n][0], 0)))
    asked = [(accounts.get(sent[n][0], sent[n][0]), sent[n][1]) for n in order]
    found = {order[place]: reason for place, reason in unscheduled(asked, schedule).items()}
    shared = {n for n in found if accounts.get(sent[n][0], sent[n][0]) != sent[n][0]}
    return {n: f"{reason}, all newcomers together" if n in shared else reason for n, reason in sorted(found.items())}


def _taken(
    message: Rollouts,
    completion: Completion,
    scoring: Scoring,
    policy: Policy,
    max_new: int,
    asked: Asked,
    account: str,
    index: int,
) -> Rollout | str:
    """One completion of a message, scored; a text: why it is turned away."""
    problem, prompt = asked
    same = message.tokenizer == policy.tokenizer_fingerprint
    ids, logps = _own_ids(policy, completion, same)
    claimed = math.fsum(completion.logps) if logps is None and completion.logps is not None else None
    limit = min(max_new, policy.context - len(prompt))
    if objection := _wrong_length(len(ids), limit, completion.ended or not same):
        return objection
    scored = scoring.score(problem, completion.text, account, message.peer, index) if completion.ended else Scored()
    if scored is None:
        return f"what it sent took more than {scoring.seconds(account):g} s to score"
    text, ended = completion.text, completion.ended
    found = Rollout(problem, prompt, text, ids, ended, logps, round=message.round, claimed=claimed)
    return replace(found, reward=scored.reward, behaviour=scored.behaviour)


def _wrong_length(tokens: int, limit: int, may_be_short: bool) -> str:
    """Why a completion cannot have so many tokens; empty if it can. What did not end went on to the limit."""
    if not tokens or tokens > limit:
        return f"{tokens} tokens, of at most {limit}"
    return "" if may_be_short or tokens == limit else f"it broke off after {tokens} tokens, of {limit}"


def _own_ids(policy: Policy, completion: Completion, same: bool) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """The completion as our token ids, with the end token if it ended, and the claims that belong to them.

    A sender's ids are taken only where they say what its text says: what is scored and judged is what is trained on.
    Otherwise the text is tokenised again, and claims about other tokens mean nothing.
    """
    ids = completion.ids
    if same and ids is not None and all(0 <= i < policy.vocab for i in ids):
        body = ids[:-1] if completion.ended and ids and ids[-1] == policy.end else ids
        whole = len(body) + completion.ended == len(ids)
        if whole and policy.end not in body and _says(policy, body, completion.text):
            return tuple(ids), None if completion.logps is None else tuple(completion.logps)
    own = policy.encode(completion.text)
    return tuple([*own, policy.end] if completion.ended else own), None


def _says(policy: Policy, ids: Sequence[int], text: str) -> bool:
    """Whether the ids are a way to write the text, with none among them that nobody could read.

    Special tokens, and rows of a model that its tokenizer does not know, leave nothing in a text: between its letters
    they would be trained on unseen.
    """
    if policy.decode(ids) != text:
        return False
    silent = {i for i in ids if not policy.decode([i])}
    return not silent or policy.decode([i for i in ids if i not in silent]) != text


def with_reading(rollout: Rollout, reading: Reading) -> Rollout:
    """As this peer's policy reads it; a claim about a whole text, by another tokenizer, is spread over our tokens.

    Every token's ratio then is the sequence's geometric mean, exp((log π_θ − log π_gen) / T), and so is the
    divergence: Σ log p of a text does not depend on how it is cut, as far as both tokenizers cut it their usual way.
    """
    if rollout.claimed is None:
        return replace(rollout, reading=reading)
    shift = (math.fsum(reading.logps) - rollout.claimed) / len(rollout.ids)
    return replace(rollout, reading=reading, logps=tuple((reading.logps - shift).tolist()))
