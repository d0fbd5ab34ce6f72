"""Error feedback: the vector to compress, and the state that keeps what a compressor loses.

Notation of arXiv 2402.10774 and 2311.05645: replica i has the exact vector g_i of the round and sends D_i = C(…), which
all members decode alike; e_i is its accumulated error, h_i an estimate of g_i determined by its messages, h̄ the mean
of these estimates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from planaria.config.registry import Choice
from planaria.exchange.base import Parts, StageOuterState, Weights


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32 or wider; may share memory."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


class Feedback(Choice, ABC):
    """A feedback rule; its fields are its options. Rules are pure and elementwise: arguments are not modified, and the
    vectors of several members may lie in one tensor.

    Its parts of the outer state have the vector's names and shapes; a missing one is zero.
    """

    estimates: ClassVar[bool] = False
    """whether members keep estimates of each other; then all must receive all messages, and a change of members
    restarts estimates with exact vectors"""

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Parts of the outer state, by name."""

    @abstractmethod
    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        """Return the vector to compress instead of ``exact``.

        :param delta: the compressor's δ: guaranteed, or the smallest measured for :meth:`measured_vectors`.
        """

    def measured_vectors(self, outer: StageOuterState, exact: Weights) -> Sequence[Weights]:
        """Return the vectors whose δ :meth:`target` needs; δ is measured only if the compressor guarantees none."""
        return ()

    @abstractmethod
    def next_parts(self, outer: StageOuterState, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        """Return the sender's own parts after others decoded ``sent`` from its message."""

    def settle_alone(self, kept: Mapping[str, Weights], sent: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """Return the value and the kept parts if no other member received the message."""
        return sent, kept

    def result(self, outer: StageOuterState, joined: Weights) -> tuple[Weights, dict[str, Weights]]:
        """Return the value with which members continue, after the aggregate ``joined`` of messages, and the new shared
        parts."""
        return joined, {}

    def parts_after_start(self, exact: Weights) -> dict[str, Weights]:
        """Return the sender's own parts after it has sent its first value, ``exact``, uncompressed."""
        return {}

    def shared(self, joined: Weights) -> dict[str, Weights]:
        """Return the shared parts after a round of exact vectors with the aggregate ``joined``."""
        return {}

    def scale(self, outer: StageOuterState, member: int) -> float:
        """Return the divisor of ``member``'s vector before compression; receivers multiply by it."""
        return 1.0

    def measuring(self, outer: StageOuterState) -> bool:
        """Whether this round's differences are sent uncompressed for :meth:`measure`."""
        return False

    def measure(self, outer: StageOuterState, sent: Mapping[int, Weights]) -> StageOuterState:
        """Return the state after measuring the differences that members ``sent`` uncompressed."""
        return outer

    def why_members_unsupported(self, members: int) -> str:
        """Return why the feedback does not support this number of members, or an empty string if it does."""
        return ""

    def why_unsupported(self, delta: float) -> str:
        """Return why the feedback does not support a compressor of this δ, or an empty string if it does."""
        return ""


class NoFeedback(Feedback):
    """D = C(g). The compressor's error is lost; with top-k this may diverge (arXiv 2002.12410, example 1)."""

    @property
    def parts(self) -> Parts:
        return {}

    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: at_least_fp32(tensor) for name, tensor in exact.items()}

    def next_parts(self, outer: StageOuterState, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {}


class EF14(Feedback):
    """D = C(e + g), e ← e + g − D: the error is fed back and stays bounded.

    Source: Seide et al. (2014) and Karimireddy et al. (arXiv 1901.09847, algorithm 2), at the sender, without decay.
    """

    @property
    def parts(self) -> Parts:
        return {"residual": "own"}

    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: at_least_fp32(tensor) + outer["residual"].get(name, 0.0) for name, tensor in exact.items()}

    def next_parts(self, outer: StageOuterState, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {"residual": {name: meant[name] - sent[name] for name in meant}}

    def settle_alone(self, kept: Mapping[str, Weights], sent: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """Return the exact value; the residual is zero."""
        residual = kept["residual"]
        return (
            {name: sent[name] + residual[name] for name in residual},
            {"residual": {name: torch.zeros_like(tensor) for name, tensor in residual.items()}},
        )


class DecayedErrorFeedback(EF14):
    """D = C(βe + g), e ← βe + g − D: the error of each round decays (arXiv 2508.15706); β = 1 is EF14.

    A coordinate that is never sent ends at g/(1 − β), and is lost if that stays below what the compressor sends.
    """

    decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """β, the factor of the error in each round"""

    def target(self, outer: StageOuterState, exact: Weights, delta: float) -> dict[str, Tensor]:
        decayed = {name: self.decay * error for name, error in outer["residual"].items()}
        return super().target(replace(outer, parts={"residual": decayed}), exact, delta)
