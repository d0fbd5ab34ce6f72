from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.engine.packing import pack_donor, unpack_donor
from planaria.recovery.base import Donor

names = st.text("abcz.0", min_size=1)
norms = st.none() | st.floats(0, 2.0**100, width=32)


@given(st.dictionaries(names, st.lists(st.integers(0, 4), max_size=3), min_size=1), norms, norms)
def test_a_donor_survives_the_journey(shapes: dict[str, list[int]], norm: float | None, clipped: float | None) -> None:
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    flat = pack_donor(Donor(weights, norm, clipped))
    assert (flat.ndim, flat.dtype) == (1, torch.float32)
    like = {name: torch.empty(shape, device="meta") for name, shape in reversed(shapes.items())}
    arrived = unpack_donor(flat, like)
    assert (arrived.grad_norm, arrived.clipped_norm) == (norm, clipped)
    assert arrived.weights.keys() == weights.keys()
    assert all(torch.equal(arrived.weights[name], tensor) for name, tensor in weights.items())


def test_what_is_packed_is_a_copy() -> None:
    weights = {"w": torch.ones(3)}
    flat = pack_donor(Donor(weights, 1.0, 1.0))
    weights["w"].zero_()
    assert flat.tolist() == [1.0] * 5


@pytest.mark.parametrize("flat", [torch.zeros(4), torch.zeros(6), torch.zeros(5, dtype=torch.int64), torch.zeros(1, 5)])
def test_a_state_of_another_size_is_refused(flat: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="5 fp32 numbers"):
        unpack_donor(flat, {"w": torch.zeros(3)})
