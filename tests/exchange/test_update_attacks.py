"""Attacks against their formulas written out; and invalid messages, each refused in one line."""

from __future__ import annotations

import math
from statistics import NormalDist, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.exchange.base import Update
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.compression import COMPRESSORS
from planaria.exchange.compress.dense import Sign
from planaria.exchange.update_attacks import ATTACKS, AttackView, MessageAttack, UpdateAttack, largest_z, make_attack
from planaria.exchange.update_validation import invalid_updates

DIM = 300
CODECS: dict[str, Compressor] = {
    "32 bits": COMPRESSORS.make("plain", {}),
    "16 bits": COMPRESSORS.make("plain", {"bits": 16}),
    "8 bits": COMPRESSORS.make("quantised", {}),
    "2 bits": COMPRESSORS.make("quantised", {"bits": 2}),
    "top": COMPRESSORS.make("topk", {"keep": 0.1}),
    "top, 8 bits": COMPRESSORS.make("topk", {"keep": 0.1, "bits": 8}),
    "rand": COMPRESSORS.make("randk", {"keep": 0.1}),
    "sign": COMPRESSORS.make("sign", {}),
}


def drawn(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed))


def scene(honest: int = 5, byzantine: int = 2, seed: int = 3, **changes: object) -> AttackView:
    """A round of members 0 and up, of which the last are Byzantine."""
    of = {member: drawn(100 + member) for member in range(honest)}
    plain: dict[str, object] = {
        "own": drawn(7), "known": of, "members": honest + byzantine, "byzantine": byzantine, "round": 4,
        "generator": torch.Generator().manual_seed(seed),
    }  # fmt: skip
    return AttackView(**(plain | changes))


def vector(name: str, at: AttackView, strength: float | None = None) -> Tensor:
    return make_attack(name, strength).vector(at)


def by_hand(name: str, at: AttackView, strength: float) -> list[float]:
    """Coordinate by coordinate."""
    columns = [[float(x[j]) for x in at.known.values()] for j in range(DIM)]
    means = [sum(column) / len(column) for column in columns]
    match name:
        case "sign_flip" | "ipm":
            return [-strength * mean for mean in means]
        case "own_flip":
            return [-strength * float(x) for x in at.own]
        case "zero":
            return [0.0] * DIM
        case "huge":
            return [1e38] * DIM
        case "alie":
            return [mean - strength * stdev(column) for mean, column in zip(means, columns, strict=True)]
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "usual", "strength"),
    [("sign_flip", 10, 3), ("own_flip", 10, 0.5), ("ipm", 0.1, 1.1), ("zero", 0, None), ("huge", 0, None),
     ("alie", None, 1.5)],
)  # fmt: skip
def test_an_attack_follows_its_formula(name: str, usual: float | None, strength: float | None) -> None:
    at = scene()
    if usual is not None:
        assert vector(name, at).tolist() == pytest.approx(by_hand(name, at, usual), rel=1e-5, abs=1e-6)
    if strength is not None:
        assert vector(name, at, strength).tolist() == pytest.approx(by_hand(name, at, strength), rel=1e-4, abs=1e-5)


def test_alie_uses_the_largest_z_of_its_formula() -> None:
    assert largest_z(15, 3) == pytest.approx(0.2104, abs=1e-4), "(15 − 3 − 5)/12"
    assert largest_z(50, 12) == pytest.approx(NormalDist().inv_cdf((50 - 12 - 14) / 38))
    assert [largest_z(n, f) for n, f in ((5, 1), (4, 1), (2, 1), (2, 2), (4, 3))] == [None] * 5
    at = scene(honest=12, byzantine=3)
    assert torch.equal(vector("alie", at), vector("alie", at, largest_z(15, 3)))
    assert torch.equal(vector("alie", scene(honest=4, byzantine=1)), vector("alie", scene(honest=4, byzantine=1), 1.5))
    alone = scene(known={2: drawn(2)})
    assert torch.equal(vector("alie", alone), drawn(2)), "no spread is known"


def test_noise_has_its_stated_length_and_is_drawn_per_receiver() -> None:
    at = scene()
    for name, times in (("random", 10.0), ("equivocate", 1.0)):
        corrupt = vector(name, at)
        assert float(corrupt.norm()) == pytest.approx(times * float(at.own.norm()), rel=1e-5)
        assert abs(float(corrupt @ at.own) / float(corrupt.norm() * at.own.norm())) < 0.3, "no own direction"
        assert torch.equal(vector(name, scene(seed=9)), vector(name, scene(seed=9)))
        assert not torch.equal(vector(name, scene(seed=9)), vector(name, scene(seed=10)))
    assert ATTACKS["equivocate"].equivocates and not ATTACKS["random"].equivocates


def test_mimic_copies_the_extreme_member_of_the_first_round() -> None:
    odd = {0: drawn(0), 1: drawn(0) + 0.1, 2: drawn(0) - 0.1, 3: drawn(0) + 5 * drawn(50)}
    later = {member: drawn(60 + member) for member in odd}
    assert torch.equal(vector("mimic", scene(known=later, first=odd)), later[3])
    assert torch.equal(vector("mimic", scene(known=odd)), odd[3])
    assert torch.equal(vector("mimic", scene(known={0: later[0]}, first=odd)), drawn(7)), "unheard: what is its own"


def test_stale_sends_the_oldest_remembered_update() -> None:
    assert torch.equal(vector("stale", scene(past=[drawn(1), drawn(2)])), drawn(1))
    assert torch.equal(vector("stale", scene()), drawn(7))
    assert (make_attack("stale", None).remembers, make_attack("stale", 3).remembers) == (50, 3)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_messages_are_refused_in_one_line_and_others_are_valid(name: str, codec: Compressor) -> None:
    attack: UpdateAttack = make_attack(name, None)
    at = scene()
    honest = codec.encode(at.own, at.round)
    before = honest.clone()
    updates = {0: Update(honest), 1: Update(attack.message(at, honest, codec))}
    found = invalid_updates(updates, Update(honest), codec)
    overflows = name == "huge" and isinstance(codec, Sign)  # the sum of so large numbers is none
    if isinstance(attack, MessageAttack) or overflows:
        assert found.keys() == {1} and "\n" not in found[1] and len(found[1]) < 200
    else:
        assert found == {}
        message = updates[1].blocking
        assert message is not None and (message.dtype, message.shape) == (honest.dtype, honest.shape)
        assert torch.isfinite(codec.decode(message, DIM, at.round)).all()
    assert torch.equal(honest, before), "what was computed stays what it was"


def test_an_update_must_have_the_expected_parts() -> None:
    whole, part = Update(drawn(1), drawn(2)), Update(drawn(1))
    assert invalid_updates({0: whole, 1: part}, whole, CODECS["32 bits"]) == {1: "its prefetched part: missing"}
    assert invalid_updates({0: whole, 1: part}, part, CODECS["32 bits"]) == {0: "its prefetched part: not expected"}
    assert invalid_updates({0: Update()}, part, CODECS["32 bits"]) == {0: "its blocking part: missing"}


# ---- messages from strangers

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
"""that travel on edges"""


@st.composite
def messages(draw: st.DrawFn, honest: Tensor) -> Tensor:
    """Draw a frame: an honest message with some bytes changed, or a tensor of any type and shape."""
    if draw(st.booleans()):
        data = honest.clone().view(torch.uint8)
        for place, byte in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=8)):
            data[place] = byte
        return data.view(honest.dtype)
    dtype, dims = draw(st.sampled_from(TYPES)), draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims))
    size = math.prod(shape) * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    return (data.view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_any_message_is_refused_in_one_line_or_has_finite_numbers(codec: Compressor) -> None:
    """Without an error, and with no more memory than an honest message."""
    honest = codec.encode(drawn(7), 4)
    like, seen = Update(honest), {"refused": 0, "taken": 0}

    @given(messages(honest))
    def whatever(message: Tensor) -> None:
        found = invalid_updates({1: Update(message)}, like, codec)
        if found:
            assert found[1].startswith("its blocking part: ") and "\n" not in found[1] and len(found[1]) < 200
        else:
            vector = codec.decode(message, DIM, 4)
            assert vector.shape == (DIM,) and torch.isfinite(vector).all()
        seen["refused" if found else "taken"] += 1

    whatever()
    assert min(seen.values()) > 0, "both cases occur"


@pytest.mark.parametrize("codec", [CODECS["top"], CODECS["top, 8 bits"], CODECS["rand"]])
def test_a_scale_that_overflows_is_found(codec: Compressor) -> None:
    """Each number is finite, but their products are not."""
    message = codec.encode(torch.full((DIM,), 3.4e38))
    assert codec.invalid_reason(message, message) == ""
    kept = math.ceil(0.1 * DIM)
    numbers = message[-kept * (1 if codec.bits == 8 else 2) :]
    large = torch.full((kept,), -128, dtype=torch.int8) if codec.bits == 8 else torch.full((kept,), 60000.0).half()
    numbers.copy_(large.view(torch.uint8))
    assert codec.invalid_reason(message, message) == "not all of its numbers are finite"


# ---- what a trace may say


@pytest.mark.parametrize(
    ("name", "strength", "complaint"),
    [
        ("sign_flop", None, "attack = 'sign_flop': no such choice; did you mean 'sign_flip'"),
        ("os:system", None, "attack = 'os:system': no such choice; known here: alie, "),
        ("zero", 2.0, "attack 'zero' has no strength; remove it"),
        (None, 2.0, "attack 'nan' has no strength"),
        ("stale", 0.5, "strength = 0.5 of attack 'stale': .*greater than or equal to 1"),
    ],
)
def test_an_invalid_attack_is_refused_by_name(name: str | None, strength: float | None, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_attack(name, strength)


def test_every_attack_has_defaults() -> None:
    assert {type(make_attack(name, None)) for name in ATTACKS} == {*ATTACKS.values()} and len(ATTACKS) == 15
    assert type(make_attack(None, None)) is ATTACKS["nan"]
