"""What peers generate and train on: completions of a round's problems, each with where it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drawn:
    """A completion as a policy samples it: token ids, without the prompt's and without the end token.

    ``logps`` are log-probabilities (nats) under the policy that drew it, of every id and then, if it ``ended``, of the
    end token: log softmax(logits / temperature) over the whole vocabulary, whatever top-k was drawn from, so that two
    peers with equal weights agree on them and their ratio is 1.
    """

    ids: tuple[int, ...]
    ended: bool
    """the policy drew the end token; else the length limit cut it off"""
    logps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One completion of one problem, read with this peer's own tokenizer and scored by this peer's own ground truth."""

    peer: str
    round: int
    problem: int
    index: int
    """its place among the completions that its peer sent for the problem"""
    text: str
    ids: tuple[int, ...]
    """with the end token, if it ended: the end is trained like every other token"""
    ended: bool
    reward: float
    logps: tuple[float, ...] | None = None
    """the generator's claim, one for each of ``ids``; None where tokenizers differ or it made none"""

    claimed: float | None = None
    """the generator's claim about the whole text, where its tokens are others than ``ids``"""

    @property
    def name(self) -> tuple[str, int, int, int]:
        """What identifies it in records and explanations."""
        return self.peer, self.round, self.problem, self.index
