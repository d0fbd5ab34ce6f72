"""Valid swarm messages, signed claims and rules for tests."""

from __future__ import annotations

from typing import Any

from planaria.swarm.board.claims import Claim, sign_claim
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Closing, Completion, Goodbye, Hello, ProblemCompletions, Rollouts, RunRules

RUN = "0123456789abcdef" * 2
TOKENIZER = "00112233aabbccdd"


def rollouts(who: PeerIdentity, run: str = RUN, round: int = 3, **changes: Any) -> Rollouts:
    completions = (
        Completion(text="3 + 4 = 7 [7]", ended=True, ids=(1, 2, 3), logps=(-0.5, -1e-6, 0.0)),
        Completion(text="né \U0001f9e0 \0", ended=False),
    )
    words = {"tokenizer": TOKENIZER, "weights": "", "groups": (ProblemCompletions(problem=7, completions=completions),)}
    return Rollouts(run=run, peer=who.peer, round=round, **(words | changes))


def hello(who: PeerIdentity, run: str = RUN, **changes: Any) -> Hello:
    words = {"name": "a peer", "tokenizer": TOKENIZER, "model": "llama, 2 layers", "joined": 0}
    return Hello(run=run, peer=who.peer, key=who.public.hex(), **(words | changes))


def goodbye(who: PeerIdentity, run: str = RUN, after: int = 5) -> Goodbye:
    return Goodbye(run=run, peer=who.peer, after=after)


def rules(who: PeerIdentity, **content: Any) -> RunRules:
    return RunRules(
        peer=who.peer, nonce="ab" * 16, rules=content or {"task": "sums", "group": 12, "loss": {"clip": 0.2}}
    )


def claim(who: PeerIdentity, message: Any) -> Claim:
    """Return the proof that its peer signed this message."""
    return sign_claim(who, message.run, message.place, message.model_dump_json())


def closing(who: PeerIdentity, run: str = RUN, round: int = 3, received: Any = (), **changes: Any) -> Closing:
    """``received``: identities that published :func:`rollouts`."""
    words = tuple(claim(other, rollouts(other, run, round)) for other in received)
    return Closing(run=run, peer=who.peer, round=round, **({"words": words} | changes))
