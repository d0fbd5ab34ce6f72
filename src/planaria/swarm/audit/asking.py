"""How a model is asked for what an audit wants to know: each question by itself, as a stranger would."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.common.errors import UserError
from planaria.swarm.draws import generator
from planaria.swarm.policy.asking import Asking
from planaria.swarm.policy.base import Policy, encode_prompt
from planaria.swarm.policy.wording import Wording
from planaria.swarm.tasks.base import Problem

REPLY, ROWS = 48, 256
"""tokens of a reply at most; replies that are drawn at once"""


def prompt(policy: Policy, text: str, reply: str = "") -> list[int]:
    """The ids of a text in the policy's chat template, or of the text alone if it has none, followed by ``reply``."""
    if not isinstance(policy, Wording):
        return encode_prompt(policy, text + reply) or [policy.end]
    return Asking(policy.template, "", (), 0).ids(Problem(0, text, ""), policy.tokenizer, reply) or [policy.end]


def replies(policy: Policy, texts: Sequence[str], draws: int, seed: int) -> list[list[str]]:
    """``draws`` replies to each text at temperature 1, each asked apart [texts, draws].

    :raises UserError: when a text leaves no room for a reply.
    """
    asked = [prompt(policy, text) for text in texts]
    if (longest := max(map(len, asked), default=0)) >= policy.context:
        raise UserError(f"a question takes {longest} tokens, the model reads {policy.context}; shorten it")
    most, found = min(REPLY, policy.context - longest), list[list[str]]()
    rows = max(1, ROWS // draws)
    for start in range(0, len(asked), rows):
        rng = generator("audit", seed, start)
        drawn = policy.sample(asked[start : start + rows], draws, most, 1.0, 0, rng)
        found += [[policy.decode(one.ids) for one in of_text] for of_text in drawn]
    return found
