"""Integers in groups: sizes, errors, rounding, packing, and messages that are refused."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.common.quantisation import pack, planes, unpack
from planaria.config.options import Options
from planaria.pipeline.codecs import make_codec
from planaria.pipeline.codecs.base import LEGS, Leg, Visit
from planaria.pipeline.codecs.group_quantisation import ROW, GroupQuantiser, offsets, table

VISIT = Visit(seed=7, sample=40, hop=2)
SHAPES = [(2, 8, 64), (1, 7, 33), (3, 130, 512)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return an activation with outliers: a few channels that are twenty times as large."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made[..., :2] *= 20
    return made


def sent(codec: GroupQuantiser, x: Tensor, leg: Leg = "forward", visit: Visit = VISIT) -> Tensor:
    return codec.decode(codec.encode(x, leg, visit), x.shape, leg)


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_are_packed_without_gaps(bits: int) -> None:
    count = 40 * planes(bits)[0]
    numbers = torch.randint(0, 1 << bits, (count,), dtype=torch.uint8)
    packed = pack(numbers, bits)
    assert len(packed) == count * bits // 8
    assert torch.equal(unpack(packed, bits).view(-1), numbers)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("leg", LEGS)
def test_a_message_has_the_stated_bytes(shape: tuple[int, ...], leg: Leg) -> None:
    codec = GroupQuantiser(forward=6, backward=4)
    groups = math.ceil(math.prod(shape) / 64)
    assert codec.bytes(shape) == (groups * (2 + 48), groups * (2 + 32))
    message = codec.encode(drawn(shape), leg, VISIT)
    assert (tuple(message.shape), message.dtype) == codec.layout(shape, leg)
    assert codec.decode(message, shape, leg).shape == shape


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_an_error_is_at_most_half_a_step_or_a_step(shape: tuple[int, ...], bits: int) -> None:
    """Rounding to the nearest level is off by half a step at most, random rounding by less than one."""
    codec, x = GroupQuantiser(forward=bits, backward=bits), drawn(shape)
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 64)).view(-1, 64)
    step = (flat.abs().amax(1) / ((1 << (bits - 1)) - 1) * (1 + 2**-7)).repeat_interleave(64)[: x.numel()].view(shape)
    assert ((sent(codec, x) - x).abs() <= step * 0.5001).all()
    assert ((sent(codec, x, "backward") - x).abs() <= step * 1.0001).all()


def test_random_rounding_has_the_right_mean_and_nearest_rounding_does_not() -> None:
    x = torch.full((1, 64, 64), 0.3)
    x[..., 0] = 7.0  # one step is 1
    random = torch.stack([sent(GroupQuantiser(backward=4), x, "backward", VISIT._replace(sample=m)) for m in range(40)])
    nearest = sent(GroupQuantiser(backward=4, rounding="nearest"), x, "backward")
    assert float(random[..., 1:].mean()) == pytest.approx(0.3, abs=0.005)
    assert float(nearest[..., 1:].abs().max()) == 0.0


def test_equal_visits_round_alike_and_others_do_not() -> None:
    x, codec = drawn((2, 700, 64)), GroupQuantiser(backward=4)
    first = codec.encode(x, "backward", VISIT)
    assert torch.equal(first, codec.encode(x.clone(), "backward", VISIT))
    for name in Visit._fields:
        assert not torch.equal(first, codec.encode(x, "backward", VISIT._replace(**{name: 9})))
    forward = GroupQuantiser(forward=4).encode(x, "forward", VISIT)
    assert torch.equal(forward, GroupQuantiser(forward=4).encode(x, "forward", VISIT._replace(sample=9)))


def test_random_numbers_are_golden() -> None:
    """A run that is resumed by another release must round as before."""
    cpu = torch.device("cpu")
    assert offsets(VISIT, "backward", 3) == [40514, 717737, 210114]
    assert (table(cpu)[:4] * 4096).tolist() == [3618.5, 1767.5, 108.5, 3976.5]
    assert float(table(cpu).min()) > 0 and float(table(cpu).max()) < 1


MESSAGES = {
    2: ("63b598bdbc9e5603", "143497798b1118ee"),
    3: ("8bfeb21a242f0f96", "7dc77c9b117db4ce"),
    4: ("a79e9f4e51f87a95", "11ed04d390f2b2fd"),
    5: ("534965bf924a23a2", "b557319e0245a433"),
    6: ("c26baa0926a9747b", "28e42d22e00f7f89"),
    7: ("a769c35aa1d5e609", "79cde148741df3f6"),
    8: ("e2294830d8fa6390", "a8159ca0c4287564"),
}
"""bits → digests of a forward and a backward message"""


@pytest.mark.parametrize("bits", MESSAGES)
def test_messages_are_golden(bits: int) -> None:
    """Workers of different releases exchange the same bytes."""
    x = ((torch.arange(7 * 33) * 7919 % 2003 - 1001) / 64).view(1, 7, 33)
    messages = [GroupQuantiser(forward=bits, backward=bits).encode(x, leg, VISIT) for leg in LEGS]
    assert tuple(hashlib.sha256(m.numpy().tobytes()).hexdigest()[:16] for m in messages) == MESSAGES[bits]


def test_rows_do_not_depend_on_the_size_of_the_message() -> None:
    x = drawn((1, ROW // 64 + 5, 64))
    whole = sent(GroupQuantiser(), x, "backward")
    assert torch.equal(whole[:, :100], sent(GroupQuantiser(), x[:, :100], "backward"))


@given(st.floats(2.0**-120, 3e38), st.integers(2, 8))
def test_every_scale_of_fp32_is_represented(largest: float, bits: int) -> None:
    x = torch.tensor([[[largest, -largest, 0.0, largest / 2]]])
    codec = GroupQuantiser(forward=bits, group=32)
    message = codec.encode(x, "forward", VISIT)
    if not codec.invalid_reason(message, x.shape, "forward"):
        found = codec.decode(message, x.shape, "forward").flatten()
        assert found[0] == pytest.approx(largest, rel=2**-7) and found[1] == -found[0] and found[2] == 0


def test_zeros_and_tiny_numbers_become_zeros() -> None:
    for x in (torch.zeros(1, 1, 64), torch.full((1, 1, 64), 1e-42)):
        assert not sent(GroupQuantiser(), x).any() and not sent(GroupQuantiser(), x, "backward").any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3.4e38])
def test_numbers_that_are_not_finite_are_found_in_the_message(wrong: float) -> None:
    x = drawn((2, 8, 64))
    x[1, 3, 5] = wrong
    message = GroupQuantiser(forward=2).encode(x, "forward", VISIT)
    assert GroupQuantiser(forward=2).invalid_reason(message, x.shape, "forward") == "a scale is not finite"


@given(st.data())
def test_any_bytes_decode_to_bounded_numbers_or_are_refused(data: st.DataObject) -> None:
    codec, shape = GroupQuantiser(forward=data.draw(st.integers(2, 8))), (1, 4, 64)
    message = codec.encode(drawn(shape), "forward", VISIT)
    for _ in range(data.draw(st.integers(1, 6))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    if not codec.invalid_reason(message, shape, "forward"):
        scales = message[:8].view(torch.bfloat16).float()
        found = codec.decode(message, shape, "forward").view(4, 64)
        assert (found.abs() <= scales.unsqueeze(1) * (1 << (codec.forward - 1))).all()


@pytest.mark.parametrize(
    ("wire", "codec"),
    [
        ("6/4", GroupQuantiser(forward=6, backward=4)),
        ("8/3", GroupQuantiser(forward=8, backward=3)),
        (Options({"kind": "groups", "group": 32, "rounding": "nearest"}), GroupQuantiser(group=32, rounding="nearest")),
    ],
)
def test_a_wire_is_short_or_a_table(wire: str | Options, codec: GroupQuantiser) -> None:
    assert make_codec(wire) == codec


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        ("fp16", r"pipeline\.wire = 'fp16': no such choice"),
        ("9/4", r"pipeline\.wire\.forward = 9"),
        ("6/1", r"pipeline\.wire\.backward = 1"),
        (Options({"forward": 6}), r"pipeline\.wire = \{'forward': 6\}: set kind"),
        (Options({"kind": "groups", "bits": 6}), r"pipeline\.wire\.bits: no option of 'groups'"),
        (Options({"kind": "bf16", "group": 64}), r"pipeline\.wire\.group: no option of 'bf16'"),
    ],
)
def test_an_invalid_wire_is_refused_by_name(wire: str | Options, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_codec(wire)
