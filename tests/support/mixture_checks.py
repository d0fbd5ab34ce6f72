"""Checks that an ensemble draws tokens from its mixture, which is recomputed for every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from planaria.lab.experts.ensemble import Ensemble


def next_log_p(ensemble: Ensemble, tokens: Sequence[int]) -> Tensor:
    """Return each expert's ln p of the token after ``tokens`` [E, V]."""
    window = torch.tensor(tokens[-ensemble.manifest.context :])[None]
    with torch.inference_mode():
        experts = map(ensemble.model, range(len(ensemble.manifest.members)))
        return torch.stack([expert(window)[0, -1].double().log_softmax(-1) for expert in experts])


def check_likeliest(drawn: int, log_p: Tensor, log_w: Tensor) -> None:
    """Check that no token is likelier than the drawn one under these weights [E]."""
    mixture = torch.logsumexp(log_p + log_w[:, None], 0)
    assert float(mixture[drawn]) == pytest.approx(float(mixture.max()), abs=1e-5)


def check_generation(ensemble: Ensemble, prompt: str, count: int) -> int:
    """Check that greedy tokens are the likeliest under the weights of the evaluation; return their number."""
    whole = ensemble.tokenizer.encode(prompt)
    found = list(ensemble.generate(whole, count))
    assert found and len(whole) + len(found) <= ensemble.manifest.context
    for drawn in found:
        log_w = ensemble.weights(torch.tensor([[*whole, 0]]))[:, 0, -1]
        check_likeliest(drawn, next_log_p(ensemble, whole), log_w)
        whole.append(drawn)
    return len(found)
