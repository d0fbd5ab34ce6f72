"""Packed states: lossless, deterministic, and refused if invalid."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from planaria.models import packing
from planaria.models.optimizers.adamw import KEYS
from planaria.models.packing import HEADROOM, TYPES, PackingError, named_tensors, pack, state_of, unpack
from planaria.models.state import StageState

NAMES = st.text(max_size=12)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
NORMS = st.none() | st.floats(0, 1e30)
DTYPES = st.sampled_from(sorted(TYPES, key=str))


def bits(tensor: Tensor) -> tuple[object, ...]:
    """Return type, shape and every bit."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn, shape: list[int]) -> Tensor:
    """Draw any bits, including NaN payloads, negative zeros and subnormals, in any layout."""
    dtype = draw(DTYPES)
    size = math.prod(shape) * dtype.itemsize
    few, many = st.binary(min_size=size, max_size=size), st.integers(0, 1 << 30)
    raw = bytearray(draw(few) if size < 64 else Random(draw(many)).randbytes(size))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    made = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
    return made.T.contiguous().T if len(shape) == 2 and draw(st.booleans()) else made


@st.composite
def states(draw: st.DrawFn) -> StageState:
    shapes = draw(st.dictionaries(NAMES, SHAPES, max_size=5))
    moving = draw(st.lists(st.sampled_from(sorted(shapes)), unique=True)) if shapes else []
    others = {
        kind: {name: draw(tensors(shape)) for name, shape in draw(st.dictionaries(NAMES, SHAPES, max_size=2)).items()}
        for kind in ("generators", "outer")
    }
    return StageState(
        {name: draw(tensors(shape)) for name, shape in shapes.items()},
        {name: {key: draw(tensors(shapes[name])) for key in KEYS} for name in moving},
        {name: draw(st.integers(0, (1 << 63) - 1)) for name in moving},
        draw(st.floats(1e-6, 1e6)),
        draw(NORMS),
        draw(NORMS),
        **others,
    )


def some_state() -> StageState:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(5)
    generators, outer = {"cpu": torch.arange(7, dtype=torch.uint8)}, {"rounds": torch.tensor(3)}
    return StageState(
        {"a": a, "b": b}, {"b": {"exp_avg": b * 2, "exp_avg_sq": b * 3}}, {"b": 4}, 1.1, 2.5, None, generators, outer
    )


def assert_same(found: StageState, expected: StageState) -> None:
    """Bit for bit."""
    for kind in ("weights", "generators", "outer"):
        one, other = getattr(found, kind), getattr(expected, kind)
        assert {name: bits(tensor) for name, tensor in one.items()} == {name: bits(t) for name, t in other.items()}
    pairs = [
        {n: {key: bits(t) for key, t in pair.items()} for n, pair in state.moments.items()}
        for state in (found, expected)
    ]
    assert pairs[0] == pairs[1]
    for field in ("clocks", "lr_scale", "grad_norm", "clipped_norm"):
        assert getattr(found, field) == getattr(expected, field), field


@pytest.mark.slow
@given(states())
def test_a_state_is_restored_bit_for_bit(state: StageState) -> None:
    flat = pack(state)
    assert flat.dtype == torch.uint8 and flat.ndim == 1
    assert_same(unpack(flat), state)
    assert state.nbytes <= len(flat) < state.nbytes + HEADROOM


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        (torch.float32, 0x7FA00001),  # a signalling NaN with a payload
        (torch.float32, -0x80000000),  # negative zero
        (torch.float32, 1),  # the smallest subnormal number
        (torch.bfloat16, 0x7F81),
        (torch.float16, 0x7C01),
        (torch.int64, (1 << 62) + 1),  # not representable as a double
    ],
)
def test_special_bit_patterns_are_kept(dtype: torch.dtype, pattern: int) -> None:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd = torch.tensor([pattern], dtype=whole).view(dtype)
    found = unpack(pack(StageState({"w": odd})))
    assert found.weights["w"].dtype == dtype and found.weights["w"].view(whole).item() == pattern


@pytest.mark.slow
@given(states(), st.integers(0, 1 << 30))
def test_the_same_state_has_the_same_bytes(state: StageState, seed: int) -> None:
    """Independently of insertion order and memory layout."""

    def shuffled(named: dict[str, Any]) -> dict[str, Any]:
        order = Random(seed).sample(sorted(named), len(named))
        return {name: named[name] for name in order}

    def moved(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    other = replace(
        state,
        weights={name: moved(tensor) for name, tensor in shuffled(state.weights).items()},
        moments=shuffled(state.moments),
        clocks=shuffled(state.clocks),
        outer=shuffled(state.outer),
    )
    assert torch.equal(pack(other), pack(state))


@pytest.mark.slow
@given(states(), st.data())
def test_the_header_does_not_depend_on_the_numbers(state: StageState, data: st.DataObject) -> None:
    """So two versions of a state can be compared tensor by tensor."""
    later = replace(
        state,
        clocks={name: data.draw(st.integers(0, 1 << 62)) for name in state.clocks},
        lr_scale=data.draw(st.floats(1e-6, 1e6)),
        grad_norm=data.draw(NORMS),
        clipped_norm=data.draw(NORMS),
    )
    one, other = pack(state), pack(later)
    length = 8 + int.from_bytes(one[:8].numpy().tobytes(), "little")
    assert len(one) == len(other) and torch.equal(one[:length], other[:length])


@pytest.mark.slow
@given(states())
def test_the_safetensors_library_reads_the_same(state: StageState) -> None:
    found = load(pack(state).numpy().tobytes())
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in named_tensors(state).items()}


def test_packing_copies_and_unpacking_shares_memory() -> None:
    state = some_state()
    flat = pack(state)
    state.weights["a"].zero_()
    unpacked = unpack(flat)
    assert_same(unpacked, some_state())
    begin, end = flat.data_ptr(), flat.data_ptr() + len(flat)
    assert all(begin <= tensor.data_ptr() < end for tensor in unpacked.weights.values()), "no second copy"


def test_a_part_omits_generators_and_outer_state() -> None:
    found = unpack(pack(some_state().part(lambda name: name == "b", moments=True)))
    assert (list(found.weights), found.clocks, found.generators, found.outer) == (["b"], {"b": 4}, {}, {})
    assert some_state().part(lambda name: True, moments=False).clocks == {}
    assert_same(some_state().trained, replace(some_state(), generators={}, outer={}))


def test_an_unsupported_type_is_refused() -> None:
    with pytest.raises(KeyError):
        pack(StageState({"w": torch.ones(2, dtype=torch.complex64)}))


@pytest.mark.slow
@given(states(), st.data())
def test_any_flipped_bit_is_detected(state: StageState, data: st.DataObject) -> None:
    flat = pack(state)
    place = data.draw(st.integers(0, len(flat) - 1))
    flat[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PackingError) as refusal:
        unpack(flat)
    assert "\n" not in str(refusal.value) and "packed state" in str(refusal.value)


@pytest.mark.parametrize("name", sorted(set(named_tensors(some_state())) - {"sha256"}))
def test_the_damaged_tensor_is_named(name: str) -> None:
    named = {key: tensor.clone() for key, tensor in named_tensors(some_state()).items()}
    named[name].reshape(-1).view(torch.uint8)[0] ^= 1
    with pytest.raises(PackingError, match=f"'{name}' of a packed state is damaged"):
        state_of(named)


def test_exchanged_tensors_are_detected() -> None:
    """They have the same shape, so only digests differ."""
    named = named_tensors(some_state())
    named["exp_avg.b"], named["exp_avg_sq.b"] = named["exp_avg_sq.b"], named["exp_avg.b"]
    with pytest.raises(PackingError, match=r"'exp_avg.b' of a packed state is damaged"):
        state_of(named)


@pytest.mark.slow
@given(states(), st.data())
def test_a_truncated_or_extended_state_is_refused(state: StageState, data: st.DataObject) -> None:
    flat = pack(state)
    with pytest.raises(PackingError):
        unpack(flat[: data.draw(st.integers(0, len(flat) - 1))].clone())
    with pytest.raises(PackingError):
        unpack(torch.cat([flat, flat[: data.draw(st.integers(1, 200))]]))


@given(st.binary(max_size=300), st.booleans())
@example(b"\x00" * 64, False)
@example(b"{}", True)
def test_random_bytes_are_refused(raw: bytes, valid_length: bool) -> None:
    """``valid_length``: the header's length is right, so that its text is parsed."""
    if valid_length:
        raw += b" " * (-(8 + len(raw)) % 64)
        raw = struct.pack("<Q", len(raw)) + raw
    with pytest.raises(PackingError):
        unpack(torch.tensor(list(raw), dtype=torch.uint8))


def packed_with(body: int, **entry: Any) -> Tensor:
    """Return a header of one tensor with changed fields, before ``body`` bytes."""
    fields = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **entry}
    text = json.dumps(
        {"weights.a": {k: v for k, v in fields.items() if v != "left out"}}, separators=(",", ":")
    ).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return torch.tensor(list(struct.pack("<Q", len(text)) + text + bytes(body)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (20, {}),
        (28, {}),
        (0, {"shape": [1 << 47, 1 << 47, 0], "data_offsets": [0, 0]}),
        (24, {"shape": [1 << 40, 1 << 40]}),
        (24, {"shape": [1 << 48]}),
        (24, {"shape": [-2, -3]}),
        (24, {"shape": [2.5, 3]}),
        (24, {"shape": [2.0, 3]}),
        (24, {"shape": "a"}),
        (24, {"shape": [True, 6]}),
        (24, {"shape": [[2], [3]]}),
        (24, {"shape": {"2": 3}}),
        (4, {"shape": [1] * 65, "data_offsets": [0, 4]}),
        (24, {"dtype": ["F32"]}),
        (24, {"shape": [3, 3]}),
        (24, {"dtype": "F99"}),
        (24, {"dtype": "F64"}),
        (24, {"dtype": 1}),
        (24, {"data_offsets": [8, 32]}),
        (24, {"data_offsets": [0, 10**30]}),
        (24, {"data_offsets": [-8, 16]}),
        (24, {"data_offsets": "left out"}),
        (24, {"extra": 1}),
        (24, {}),  # a valid header, but no digests
    ],
)
def test_an_inconsistent_header_is_refused(body: int, changes: dict[str, Any]) -> None:
    with pytest.raises(PackingError) as refusal:
        unpack(packed_with(body, **changes))
    assert "\n" not in str(refusal.value) and "packed state" in str(refusal.value)


CHANGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object]]] = {
    "of an unknown kind": ("no 'W.a'", lambda named: named.update({"W.a": torch.zeros(1)})),
    "without a kind": ("no 'a'", lambda named: named.update(a=torch.zeros(1))),
    "one moment of two": (
        "exp_avg_sq of other parameters, and none of 'a'",
        lambda named: named.update({"exp_avg.a": torch.ones(2, 3)}),
    ),
    "moments of nothing": ("exp_avg of 'b' whose shape differs", lambda named: named.pop("weights.b")),
    "moments of another shape": (
        "exp_avg of 'b' whose shape differs",
        lambda named: named.update({"exp_avg.b": torch.zeros(5, 1)}),
    ),
    "too many tensors": ("over 8", lambda named: named.update({f"k{n}.b": torch.ones(5) for n in range(7)})),
    "no clocks": ("one clock", lambda named: named.pop("clocks")),
    "a clock too many": ("one clock", lambda named: named.update(clocks=torch.tensor([4, 4]))),
    "a clock of a wrong type": ("one clock", lambda named: named.update(clocks=torch.tensor([4.0]))),
    "a clock below zero": ("one clock", lambda named: named.update(clocks=torch.tensor([-1]))),
    "no numbers": ("three numbers", lambda named: named.pop("numbers")),
    "a number too few": ("three numbers", lambda named: named.update(numbers=torch.zeros(2).double())),
    "no scale": ("finite", lambda named: named.update(numbers=torch.tensor([math.nan, 1, 1]).double())),
    "an endless norm": ("finite", lambda named: named.update(numbers=torch.tensor([1, math.inf, 1]).double())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_invalid_states_with_valid_digests_are_refused(change: str) -> None:
    why, apply = CHANGES[change]
    named = named_tensors(some_state())
    del named["sha256"]
    apply(named)
    digests = b"".join(packing.digest(name, named[name]) for name in sorted(named))
    named["sha256"] = torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32)
    with pytest.raises(PackingError, match=f"packed state.*{why}"):
        state_of(named)


def test_a_name_that_is_not_unicode_is_refused() -> None:
    text = b'{"weights.\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
    text += b" " * (-(8 + len(text)) % 64)
    with pytest.raises(PackingError):
        unpack(torch.tensor(list(struct.pack("<Q", len(text)) + text + bytes(4)), dtype=torch.uint8))


@pytest.mark.parametrize("length", [57, HEADROOM, (1 << 64) - 1])
def test_a_header_longer_than_the_bytes_is_refused(length: int) -> None:
    flat = torch.zeros(64, dtype=torch.uint8)
    flat[:8] = torch.tensor(list(struct.pack("<Q", length)))
    with pytest.raises(PackingError, match=f"64 bytes cannot have a header of {length}"):
        unpack(flat)


def test_a_deeply_nested_header_is_refused() -> None:
    text = b"[" * 5000 + b" " * 24
    raw = struct.pack("<Q", len(text)) + text
    with pytest.raises(PackingError, match="header of a packed state"):
        unpack(torch.tensor(list(raw), dtype=torch.uint8))


@pytest.mark.parametrize("flat", [torch.zeros(64), torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(0).byte()])
def test_anything_but_a_row_of_bytes_is_refused(flat: Tensor) -> None:
    with pytest.raises(PackingError, match="a row of bytes, not"):
        unpack(flat)
