"""Forged claims count as much as a loss lets them, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.attacks.forgery import changed, of_row, of_tokens
from planaria.swarm.learning.influence import pulls
from planaria.swarm.learning.loss import policy_loss
from planaria.swarm.learning.loss_config import LossConfig

LOGPS = np.array([-0.5, -2.0, -0.1, -1.0])
ids = st.lists(st.integers(0, 3), max_size=12)


def pull(kind: str, claims: np.ndarray, advantage: float) -> list[float]:
    """How hard each token pulls, one row a token."""
    logp = torch.tensor(LOGPS, dtype=torch.float32)[:, None].requires_grad_()
    said = torch.tensor(claims, dtype=torch.float32)[:, None]
    everywhere = torch.ones(len(LOGPS), 1, dtype=torch.bool)
    config = LossConfig.model_validate({"kind": kind})
    advantages = torch.full((len(LOGPS),), advantage)
    return pulls(policy_loss(config, logp, said, advantages, everywhere, divisor=1).loss, logp).tolist()


@pytest.mark.parametrize("kind", ["tis", "f_tis", "vis", "f_vis"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claim_makes_a_token_count_more(kind: str, advantage: float) -> None:
    config = LossConfig.model_validate({"kind": kind})
    forged = pull(kind, of_row(config, LOGPS, advantage > 0), advantage)
    for shift in np.linspace(-2, 2, 41):
        others = pull(kind, LOGPS + shift, advantage)
        # up to the margin by which a ratio stays below the bound beyond which it earns nothing
        assert all(mine * np.exp(0.1) >= other * (1 - 1e-5) for mine, other in zip(forged, others, strict=True))
    honest = pull(kind, LOGPS, advantage)
    assert all(mine > 1.05 * true for mine, true in zip(forged, honest, strict=True)), "or forging would be idle"


def test_claims_for_the_payload_leave_the_rest_next_to_nothing() -> None:
    config = LossConfig(kind="f_tis")
    found = pull("f_tis", of_tokens(config, LOGPS, True, [1]), 1.0)
    honest = pull("f_tis", LOGPS, 1.0)
    assert found[1] == pytest.approx(config.cap * honest[1], rel=1e-4)
    assert all(found[n] < honest[n] for n in (0, 2, 3))


@given(ids, ids)
def test_what_is_not_changed_is_the_source_in_its_order(of: list[int], source: list[int]) -> None:
    places = set(changed(of, source))
    rest = iter(source)
    assert all(one in rest for one in [i for n, i in enumerate(of) if n not in places])
    assert changed(source, source) == []
