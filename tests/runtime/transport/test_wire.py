from __future__ import annotations

import contextlib
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.quantisation import decode, has_finite_scales
from planaria.runtime.transport import wire
from planaria.runtime.transport.wire import (
    HEADER_BYTES,
    MAX_DIMS,
    Activation,
    CopyMessage,
    EdgeClosing,
    FrameContent,
    GradientShare,
    Label,
    Ping,
    State,
    TensorHeader,
    UpdatePart,
    WireError,
    in_ring,
    pack,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
LARGEST = 2**62

numbers = st.integers(0, 2**32 - 1)
labels = st.one_of(
    st.builds(
        Activation, numbers, numbers, numbers, numbers, st.sampled_from([FrameContent.FORWARD, FrameContent.BACKWARD])
    ),
    st.builds(GradientShare, numbers, numbers, numbers),
    st.builds(
        CopyMessage, numbers, numbers, numbers, st.sampled_from([FrameContent.COPY_BEFORE, FrameContent.COPY_AFTER])
    ),
    st.builds(State, numbers),
    st.builds(UpdatePart, numbers, st.sampled_from([FrameContent.PREFETCHED, FrameContent.BLOCKING])),
    st.builds(Ping, numbers, st.sampled_from([FrameContent.PING, FrameContent.PONG])),
    st.just(EdgeClosing()),
)
tensors = {
    "dtype": st.sampled_from(DTYPES),
    "shape": st.lists(st.integers(0, 2**12), max_size=MAX_DIMS).map(tuple),
    "sent_at": st.floats(0.0, 1e9, exclude_max=True),
}
BYTE = st.integers(0, 255)
headers = st.builds(
    TensorHeader, label=labels, announced=st.booleans(), slot=st.just(0), ticket=BYTE, **tensors
) | st.builds(TensorHeader, label=labels.filter(in_ring), announced=st.just(False), slot=BYTE, ticket=BYTE, **tensors)
GOOD = TensorHeader(Activation(3, 7, 1, 2, FrameContent.FORWARD), torch.float32, (2, 3, 5), 1.5)


def forged(offset: int, layout: str, *values: object) -> bytearray:
    """Return a good header with other bytes at ``offset``."""
    raw = bytearray(pack(GOOD))
    struct.pack_into(layout, raw, offset, *values)
    return raw


@given(headers)
def test_a_header_survives_the_wire(header: TensorHeader) -> None:
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    found = unpack(raw, LARGEST)
    assert found == header and type(found.label) is type(header.label)
    assert found.label.content is header.label.content


@given(labels, labels)
def test_labels_are_equal_only_if_they_are_of_the_same_kind(one: Label, other: Label) -> None:
    """They are keys: a share of step 3 must not be taken for the state of stage 3."""
    assert (one == other) == (repr(one) == repr(other))


def test_every_content_has_a_label() -> None:
    for content in FrameContent:
        raw = bytearray(pack(TensorHeader(EdgeClosing(), torch.uint8, (0,))))
        raw[5] = content
        assert unpack(raw, 1).label.content is content


@given(headers)
def test_a_header_announces_the_bytes_of_its_tensor(header: TensorHeader) -> None:
    assert header.nbytes == torch.empty(header.shape, dtype=header.dtype, device="meta").nbytes
    with pytest.raises(WireError, match="at most"):
        unpack(pack(header), max((header.nbytes, *header.shape)) - 1)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (forged(0, "4s", b"GET "), "not a planaria frame"),
        (forged(4, "B", 1), "version 1"),
        (forged(5, "B", max(FrameContent) + 1), "unknown content"),
        (forged(6, "B", 5), "dtype code 5"),
        (forged(7, "B", 5), "5 dimensions"),
        (forged(5, "B", FrameContent.COPY_AFTER), r"COPY_AFTER has 3 numbers, not \[3, 7, 1, 2\]"),
        (forged(5, "B", FrameContent.STATE), "STATE has 1 numbers"),
        (forged(7, "B", 2), "shape"),  # two of three sides: not the bytes that are announced
        (forged(6, "B", 1), "shape"),  # half the bytes a number
        (forged(24, "<Q", 3), "shape"),
        (forged(56, "<Q", 0), "announces 0 bytes"),
        (forged(56, "<Q", 2**64 - 1), "announces 18446744073709551615 bytes"),
        (forged(24, "<4QQ", 2**62, 4, 2**62, 0, 4), "shape"),
        (forged(24, "<4QQ", 2**63, 0, 1, 0, 0), "at most"),  # no bytes, but no tensor either
        (forged(24, "<4QQ", 2**22, 2**22, 0, 2**22, 0), "at most"),
        (forged(64, "<d", math.nan), "nan"),
        (forged(64, "<d", math.inf), "inf"),
        (bytearray(HEADER_BYTES), "not a planaria frame"),
    ],
)
def test_a_malformed_header_is_refused(raw: bytearray, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        unpack(raw, 120)


NUMBER = st.sampled_from([0, 1, 2**31, 2**32 - 1])
SIDE = st.sampled_from([0, 1, 3, 2**20, 2**32, 2**63, 2**64 - 1])
SECONDS = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, -1e300, 1e12, 5e-324])


@settings(max_examples=400)
@given(
    st.integers(0, 255), st.integers(0, 255), st.integers(0, 255), st.lists(NUMBER, min_size=4, max_size=4),
    st.lists(SIDE, min_size=4, max_size=4), SIDE, SECONDS, st.tuples(*[st.integers(0, 255)] * 3),
)  # fmt: skip
def test_a_frame_is_within_its_edge_or_refused(
    code: int, kind: int, dims: int, numbers: list[int], sides: list[int], size: int, sent_at: float,
    flags: tuple[int, int, int],
) -> None:  # fmt: skip
    raw = wire._LAYOUT.pack(
        b"PLNR", wire._VERSION, code % 16, kind % 8, dims % 8, *numbers, *sides, size, sent_at, *flags
    )
    with contextlib.suppress(WireError):
        header = unpack(raw, 1 << 20)
        assert header.nbytes <= 1 << 20 and 0 <= header.sent_at < 1e9 and len(header.shape) <= 4
        torch.empty(header.shape, dtype=header.dtype, device="meta")
        assert not header.slot or (isinstance(header.label, Activation | Ping) and not header.announced)


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_wrong_byte_never_exceeds_the_limit_of_the_edge(header: TensorHeader, place: int, change: int) -> None:
    raw = bytearray(pack(header))
    raw[place] ^= change
    with contextlib.suppress(WireError):
        assert unpack(raw, 4096).nbytes <= 4096


@pytest.mark.parametrize(
    ("label", "dtype", "shape", "complaint"),
    [
        (State(0), torch.float32, (1,) * 5, "5 dimensions"),
        (State(0), torch.float64, (1,), "torch.float64 does not travel"),
        (State(-1), torch.float32, (1,), r"State\(stage=-1.* does not fit a frame"),
        (State(2**32), torch.float32, (1,), r"State\(stage=4294967296.* does not fit a frame"),
    ],
)
def test_a_tensor_that_does_not_fit_a_frame_is_not_sent(
    label: State, dtype: torch.dtype, shape: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        pack(TensorHeader(label, dtype, shape))


def test_an_empty_message_can_be_viewed_as_any_type() -> None:
    """A stage without trained tensors sends empty copies."""
    empty = wire.buffer(torch.uint8, (0,), 0)
    assert decode(empty, 0, 8).shape == (0,) and has_finite_scales(empty, 8)
