"""States as bytes: exact there and back, and whatever else comes is refused in one way."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from planaria.model.packing import HEADROOM, PackingError, pack, unpack
from planaria.model.state import StageState

NAMES = st.text(max_size=12)
SHAPES = st.lists(st.integers(1, 5), max_size=4)
NORMS = st.none() | st.floats(0, 1e30)
ODD = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, 3.4e38])
"""values that are easily lost on the way"""


@st.composite
def states(draw: st.DrawFn) -> StageState:
    shapes = draw(st.dictionaries(NAMES, SHAPES, max_size=5))
    moving = draw(st.lists(st.sampled_from(sorted(shapes)), unique=True)) if shapes else []
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def tensor(name: str) -> Tensor:
        values = torch.randn(shapes[name], generator=generator)
        spot = draw(st.integers(0, len(ODD) - 1))
        values.view(-1)[:1] = ODD[spot]
        return values

    weights = {name: tensor(name) for name in shapes}
    moments = {name: (tensor(name), tensor(name)) for name in moving}
    updates, scale = draw(st.integers(0, 1 << 40)), draw(st.floats(1e-6, 1e6))
    return StageState(weights, moments, updates, scale, draw(NORMS), draw(NORMS))


def some_state() -> StageState:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(5)
    return StageState({"a": a, "b": b}, {"b": (b * 2, b * 3)}, 4, 1.1, 2.5, None)


def assert_same(found: StageState, expected: StageState) -> None:
    """Bit for bit, in the same order."""
    assert list(found.weights) == list(expected.weights) and list(found.moments) == list(expected.moments)
    pairs = [(found.weights[name], expected.weights[name]) for name in expected.weights]
    pairs += [
        pair for name in expected.moments for pair in zip(found.moments[name], expected.moments[name], strict=True)
    ]
    for one, other in pairs:
        assert one.dtype == torch.float32 and one.shape == other.shape
        assert torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
    for field in ("updates", "lr_scale", "grad_norm", "clipped_norm", "rng"):
        assert getattr(found, field) == getattr(expected, field), field


# There and back


@given(states())
def test_a_state_comes_back_bit_for_bit(state: StageState) -> None:
    flat = pack(state)
    assert flat.dtype == torch.uint8 and flat.ndim == 1
    assert_same(unpack(flat), state)
    assert len(flat) % 4 == 0 and state.nbytes <= len(flat) < state.nbytes + HEADROOM


def test_the_generator_stays_at_home() -> None:
    state = some_state()
    state.rng = torch.get_rng_state()
    assert unpack(pack(state)).rng is None


def test_other_layouts_and_types_travel_as_rows_of_fp32() -> None:
    state = StageState({"t": torch.arange(6.0).view(2, 3).T, "h": torch.tensor([1.5, -2.0]).bfloat16()})
    assert_same(unpack(pack(state)), StageState({"t": state.weights["t"], "h": torch.tensor([1.5, -2.0])}))


def test_what_is_packed_is_a_copy_and_what_is_unpacked_is_not() -> None:
    state = some_state()
    flat = pack(state)
    state.weights["a"].zero_()
    unpacked = unpack(flat)
    assert_same(unpacked, some_state())
    unpacked.weights["a"].fill_(7.0)
    assert torch.equal(unpack(flat).weights["a"], torch.full((2, 3), 7.0)), "no second copy of a large state"


# Anything else


@given(st.binary(max_size=300), st.booleans())
@example(b"\x00" * 64, False)
def test_random_bytes_are_refused(raw: bytes, honest: bool) -> None:
    """``honest``: the header's length is right, so that its text is looked at."""
    if honest:
        raw = struct.pack("<I", len(raw)) + raw + bytes(-(4 + len(raw)) % 64)
    with pytest.raises(PackingError):
        unpack(torch.tensor(list(raw), dtype=torch.uint8))


@given(states(), st.data())
def test_a_state_cut_short_or_drawn_out_is_refused(state: StageState, data: st.DataObject) -> None:
    flat = pack(state)
    with pytest.raises(PackingError):
        unpack(flat[: data.draw(st.integers(0, len(flat) - 1))].clone())
    with pytest.raises(PackingError):
        unpack(torch.cat([flat, flat[: data.draw(st.integers(1, 200))]]))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_state_with_wrong_bytes_is_a_state_or_refused(changes: list[tuple[int, int]]) -> None:
    flat = pack(some_state())
    for place, byte in changes:
        flat[place % len(flat)] = byte
    try:
        state = unpack(flat)
    except PackingError:
        return
    assert sorted(tensor.numel() for tensor in state.weights.values()) == [5, 6]


def packed_with(body: int, **changes: Any) -> Tensor:
    """A header with single fields changed, before ``body`` bytes of tensors."""
    fields = {"weights": [["a", [2, 3]]], "moments": [], "updates": 1, "lr_scale": 1.0, "grad_norm": None}
    header = {**fields, "clipped_norm": None, **changes}
    text = json.dumps({name: value for name, value in header.items() if value != "left out"}).encode()
    raw = struct.pack("<I", len(text)) + text
    return torch.tensor(list(raw + bytes(-len(raw) % 64 + body)), dtype=torch.uint8)


def test_the_header_that_the_lies_start_from_is_good() -> None:
    assert_same(unpack(packed_with(24)), StageState({"a": torch.zeros(2, 3)}, updates=1))


@pytest.mark.parametrize(
    ("body", "lie"),
    [
        (20, {}),
        (28, {}),
        (0, {"weights": [["a", [0, 3]]]}),
        (0, {"weights": [["a", [1 << 47, 1 << 47, 0]]]}),
        (24, {"weights": [["a", [1 << 40, 1 << 40]]]}),
        (24, {"weights": [["a", [1 << 48]]]}),
        (24, {"weights": [["a", [-2, -3]]]}),
        (24, {"weights": [["a", [2.5, 3]]]}),
        (24, {"weights": [["a", [1 << 31, 1 << 31, 1 << 31]]]}),
        (48, {"weights": [["a", [2, 3]], ["a", [2, 3]]]}),
        (24, {"weights": [[1, [2, 3]]]}),
        (24, {"weights": "a"}),
        (72, {"moments": ["b"]}),
        (120, {"moments": ["a", "a"]}),
        (24, {"moments": ["a"]}),
        (24, {"updates": -1}),
        (24, {"updates": 1 << 60}),
        (24, {"updates": 10**500}),
        (24, {"lr_scale": math.nan}),
        (24, {"grad_norm": math.inf}),
        (24, {"grad_norm": "x"}),
        (24, {"clipped_norm": "left out"}),
        (24, {"extra": 1}),
    ],
)
def test_a_header_that_lies_is_refused_in_one_line(body: int, lie: dict[str, Any]) -> None:
    with pytest.raises(PackingError) as refusal:
        unpack(packed_with(body, **lie))
    assert "\n" not in str(refusal.value) and "packed state" in str(refusal.value)


@pytest.mark.parametrize("length", [61, 1 << 20, (1 << 32) - 1])
def test_a_header_longer_than_what_came_is_refused_unread(length: int) -> None:
    flat = torch.zeros(64, dtype=torch.uint8)
    flat[:4] = torch.tensor(list(struct.pack("<I", length)))
    with pytest.raises(PackingError, match=f"64 bytes cannot have a header of {length}"):
        unpack(flat)


def test_a_header_deeper_than_any_is_refused() -> None:
    text = b"[" * 5000
    raw = struct.pack("<I", len(text)) + text
    with pytest.raises(PackingError, match="header of a packed state"):
        unpack(torch.tensor(list(raw + bytes(-len(raw) % 64)), dtype=torch.uint8))


@pytest.mark.parametrize("flat", [torch.zeros(64), torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(0).byte()])
def test_only_a_row_of_bytes_is_looked_at(flat: Tensor) -> None:
    with pytest.raises(PackingError, match="a row of bytes, not"):
        unpack(flat)
