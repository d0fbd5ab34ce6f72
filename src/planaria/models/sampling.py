"""Draws of tokens: greedy, or by temperature and top-k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.common.documents import quote
from planaria.common.errors import UserError
from planaria.config.bounds import MIN_TEMPERATURE

MAX_NEW = 1_000_000
"""maximum number of tokens of one completion"""


class Sampling(NamedTuple):
    """Settings for the completion of one text."""

    max_new: int
    """maximum number of tokens"""
    temperature: float = 0.0
    """0 is greedy; otherwise draw with probability softmax(logits / temperature)"""
    top_k: int | None = None
    """number of most likely tokens to sample from, or None for all"""
    seed: int = 0

    def check(self) -> None:
        """Check the settings.

        :raises UserError: if one is out of range.
        """
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"generate: top_k = {self.top_k}; use at least 1, or remove it to draw from all tokens")
        check_draws(self.temperature, self.top_k or 0)
        if not 1 <= self.max_new <= MAX_NEW:
            raise UserError(f"generate: tokens = {self.max_new}; use 1 to {MAX_NEW:,}")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"generate: seed = {quote(self.seed)} has more than 64 bits; use a smaller one")

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token by ``logits`` [1, V] and one number of ``generator``.

        On the CPU, where both are the same for every device.
        """
        uniform = torch.rand(1, generator=generator)
        return int(pick(logits.float().cpu(), self.temperature, self.top_k or 0, uniform))


def pick(logits: Tensor, temperature: float, top_k: int, uniforms: Tensor) -> Tensor:
    """Draw one token id [R] for each row of ``logits`` [R, V], by one number from [0, 1) each, ``uniforms`` [R].

    Temperatures below ``bounds.MIN_TEMPERATURE`` are greedy. Otherwise draw from the ``top_k`` likeliest (0: all) with
    probability softmax(logits / temperature): the first id at which the cumulative probability exceeds the number.
    """
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(-1)
    if 0 < top_k < logits.shape[-1]:
        top_logits, ids = logits.topk(top_k)
        return ids.gather(-1, pick(top_logits, temperature, 0, uniforms).unsqueeze(-1)).squeeze(-1)
    sums = (logits / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, uniforms.unsqueeze(-1) * sums[:, -1:], right=True).squeeze(-1)


def check_ids(prompt: Sequence[int], vocab: int) -> None:
    """Check a prompt.

    :raises UserError: if it is empty, or has ids outside a vocabulary of ``vocab`` tokens.
    """
    if not prompt:
        raise UserError("generate: the prompt has no tokens; it needs at least one")
    if unknown := [token for token in prompt if not 0 <= token < vocab]:
        raise UserError(f"generate: token {unknown[0]} is outside the model's vocabulary of {vocab}")


def check_draws(temperature: float, top_k: int) -> None:
    """Check the settings of draws.

    :raises UserError: if the temperature or top_k is negative, or the temperature is not finite.
    """
    if not 0 <= temperature < math.inf:
        raise UserError(f"generate: temperature = {temperature} must be finite and at least 0; 0 is greedy")
    if top_k < 0:
        raise UserError(f"generate: top_k = {top_k}; use at least 1, or remove it to draw from all tokens")


def divisor(temperature: float) -> float:
    """Return the divisor of logits for log-probabilities: the temperature; 1 for greedy draws."""
    return temperature if temperature >= MIN_TEMPERATURE else 1.0
