from __future__ import annotations

import contextlib
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.transport.wire import HEADER_BYTES, MAX_DIMS, Content, Header, WireError, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
LARGEST = 2**62

numbers = st.integers(-(2**31), 2**31 - 1)
headers = st.builds(
    Header,
    content=st.sampled_from(Content),
    generation=st.integers(0, 2**32 - 1),
    step=numbers,
    microbatch=numbers,
    hop=numbers,
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 2**12), max_size=MAX_DIMS).map(tuple),
    sent_at=st.floats(allow_nan=False, allow_infinity=False),
)
GOOD = Header(Content.FORWARD, 3, 7, 1, 2, torch.float32, (2, 3, 5), 1.5)


def forged(offset: int, layout: str, *values: object) -> bytearray:
    """A good header with other bytes at ``offset``."""
    raw = bytearray(pack(GOOD))
    struct.pack_into(layout, raw, offset, *values)
    return raw


@given(headers)
def test_a_header_survives_the_wire(header: Header) -> None:
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert unpack(raw, LARGEST) == header


@given(headers)
def test_a_header_announces_what_its_tensor_takes(header: Header) -> None:
    assert header.nbytes == torch.empty(header.shape, dtype=header.dtype, device="meta").nbytes
    with pytest.raises(WireError, match="at most"):
        unpack(pack(header), max((header.nbytes, *header.shape)) - 1)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (forged(0, "4s", b"GET "), "not a planaria frame"),
        (forged(4, "B", 2), "version 2"),
        (forged(5, "B", max(Content) + 1), "unknown content"),
        (forged(6, "B", 5), "dtype code 5"),
        (forged(7, "B", 5), "5 dimensions"),
        (forged(7, "B", 2), "shape"),  # two of three sides: not the bytes that are announced
        (forged(6, "B", 1), "shape"),  # half the bytes a number
        (forged(28, "<Q", 3), "shape"),
        (forged(60, "<Q", 0), "announces 0 bytes"),
        (forged(60, "<Q", 2**64 - 1), "announces 18446744073709551615 bytes"),
        (forged(28, "<4QQ", 2**62, 4, 2**62, 0, 4), "shape"),
        (forged(28, "<4QQ", 2**63, 0, 1, 0, 0), "at most"),  # no bytes, but no tensor either
        (forged(28, "<4QQ", 2**22, 2**22, 0, 2**22, 0), "at most"),
        (forged(68, "<d", math.nan), "nan"),
        (forged(68, "<d", math.inf), "inf"),
        (bytearray(HEADER_BYTES), "not a planaria frame"),
    ],
)
def test_a_malformed_header_is_refused(raw: bytearray, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        unpack(raw, 120)


def test_a_good_header_is_taken_up_to_the_last_byte() -> None:
    assert unpack(pack(GOOD), 120) == GOOD
    with pytest.raises(WireError, match="announces 120 bytes; this edge carries at most 119"):
        unpack(pack(GOOD), 119)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
def test_random_bytes_are_a_sound_header_or_refused(raw: bytes, disguised: bool) -> None:
    given_bytes = bytearray(b"PLNR\x01" + raw[5:] if disguised else raw)
    try:
        header = unpack(given_bytes, 1000)
    except WireError as error:
        assert "\n" not in str(error)
    else:
        assert 0 <= header.nbytes <= 1000
        torch.empty(header.shape, dtype=header.dtype)


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_wrong_byte_never_lets_more_in_than_the_edge_allows(header: Header, place: int, change: int) -> None:
    raw = bytearray(pack(header))
    raw[place] ^= change
    with contextlib.suppress(WireError):
        assert unpack(raw, 4096).nbytes <= 4096


def test_what_does_not_fit_a_frame_is_not_sent() -> None:
    with pytest.raises(WireError, match="5 dimensions"):
        pack(Header(Content.STATE, 0, 0, 0, 0, torch.float32, (1,) * 5))
    with pytest.raises(WireError, match=r"torch.float64 does not travel"):
        pack(Header(Content.STATE, 0, 0, 0, 0, torch.float64, (1,)))
