"""Compressors: message sizes, compression error, invalid messages, and random choices that all peers share."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.common.errors import UserError
from planaria.exchange import weight_message
from planaria.exchange.base import StageOuterState
from planaria.exchange.compress import chunks
from planaria.exchange.compress.base import Compressor, measure_delta
from planaria.exchange.compress.compression import COMPRESSORS, make_compression
from planaria.exchange.compress.dct import DCT, basis
from planaria.exchange.compress.sparse import RandK, TopK
from planaria.exchange.compress.topk2 import TopK2

ALL = [
    "32bits",
    "16bits",
    "8bits",
    "4bits",
    "2bits",
    "sign",
    "top1%",
    "top5%",
    "topk2",
    "released",
    "dct",
    "identity",
    "random",
    "rand1%",
    "rand20%",
]
TABLES = {
    "released": {"kind": "topk2", "levels": "released"},
    "identity": {"kind": "dct", "basis": "identity"},
    "random": {"kind": "dct", "basis": "random", "seed": 5},
}
EVERY = pytest.mark.parametrize("spec", ALL)
COUNTS = [1, 7, 128, 129, 1000, chunks.CHUNK - 1, chunks.CHUNK, chunks.CHUNK + 3, 2 * chunks.CHUNK + 100]


def made(spec: str) -> Compressor:
    return make_compression(TABLES.get(spec, spec)).compressor


def vector(count: int, seed: int = 0) -> Tensor:
    """Numbers of very unlike sizes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(2).exp() * 1e-4


@EVERY
@pytest.mark.parametrize("count", COUNTS)
def test_a_message_has_the_stated_size_and_count(spec: str, count: int) -> None:
    codec, exact = made(spec), vector(count)
    message = codec.encode(exact)
    assert message.ndim == 1 and message.nbytes == codec.bytes(count)
    assert count <= codec.count(message) < count + 128
    sent = codec.decode(message, count)
    assert (sent.dtype, sent.shape) == (torch.float32, (count,))
    assert codec.invalid_reason(message, codec.encode(vector(count, 1))) == ""
    assert torch.equal(codec.encode(exact), message), "and is the same wherever it is made"


@pytest.mark.slow_after(1)
@EVERY
@settings(max_examples=30)
@given(count=st.integers(1, 600), seed=st.integers(0, 99), scale=st.sampled_from([1e-12, 1.0, 1e3]))
def test_the_error_is_within_delta(spec: str, count: int, seed: int, scale: float) -> None:
    """For those without a guaranteed δ, check the direction alone."""
    codec, exact = made(spec), vector(count, seed) * scale
    if isinstance(codec, RandK):
        found = sum(measure_delta(codec, exact, draw) for draw in range(60)) / 60
        few = math.sqrt(count / codec.kept(count) / 60) * 3 * float(exact.abs().max() / exact.norm()) ** 2
        assert found >= codec.delta(count) - few - 0.01
    elif spec in ("sign", "2bits", "released"):
        assert float(codec.decode(codec.encode(exact), count) @ exact) >= 0
    else:
        rounding = 5e-3 if scale > 1e-9 or spec.startswith("top") else 1.0  # fp16 holds no numbers of 1e-12
        assert measure_delta(codec, exact) >= codec.delta(count) - rounding


@pytest.mark.parametrize(("spec", "least", "most"), [("sign", 0.62, 0.65), ("2bits", 0.87, 0.885)])
def test_delta_matches_a_normal_variable(spec: str, least: float, most: float) -> None:
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    assert least < measure_delta(made(spec), normal) < most
    assert made(spec).delta(200_000) == pytest.approx(measure_delta(made(spec), normal), abs=0.01)


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec != "released"])
def test_guaranteed_deltas_hold_for_sparse_vectors_too(spec: str) -> None:
    codec, spikes = made(spec), torch.zeros(16, 128)
    for large in range(1, 16):
        spikes[large, :large] = 1.0 + torch.arange(large)
    worst = min(measure_delta(codec, row) for row in spikes) if not isinstance(codec, RandK) else 1.0
    assert (worst >= codec.delta(128) - 5e-3) == codec.guaranteed
    assert 0.0 <= codec.reached(spikes[1]) <= codec.delta(128)


@given(st.integers(1, 400), st.floats(0.001, 1.0), st.integers(0, 50))
def test_top_k_sends_only_the_largest_numbers(count: int, keep: float, seed: int) -> None:
    codec, exact = TopK(keep=keep), torch.randn(count, generator=torch.Generator().manual_seed(seed))
    sent = codec.decode(codec.encode(exact), count)
    kept = codec.kept(count)
    largest = exact.abs().sort(descending=True).values
    assert int((sent != 0).sum()) == kept
    assert float(sent[sent != 0].abs().min()) == pytest.approx(float(largest[kept - 1]), rel=1e-3)
    assert torch.allclose(sent[sent != 0], exact[sent != 0], rtol=1e-3, atol=1e-4 * float(largest[0]))


def test_chunks_keep_their_own_largest_at_their_own_scale() -> None:
    exact = torch.cat([vector(chunks.CHUNK) * 1e6, vector(chunks.CHUNK, 1) * 1e-6])
    sent = TopK().decode(TopK().encode(exact), len(exact))
    counts = [int((part != 0).sum()) for part in sent.split(chunks.CHUNK)]
    assert counts == [656] * 2
    small = sent[chunks.CHUNK :]
    assert torch.allclose(small[small != 0], exact[chunks.CHUNK :][small != 0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
def test_random_places_are_shared_and_change_each_round(bits: int) -> None:
    codec, exact = RandK(keep=0.1, bits=bits), torch.ones(5000)
    found = [codec.decode(codec.encode(exact, draw), 5000, draw) != 0 for draw in (1, 1, 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    covered = torch.stack([codec.decode(codec.encode(exact, draw), 5000, draw) != 0 for draw in range(100)]).any(0)
    assert covered.float().mean() > 0.99, "in time every number has its turn"


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in ("32bits", "16bits")])
def test_invalid_messages_are_recognised(spec: str) -> None:
    codec, count = made(spec), 1000
    like = codec.encode(vector(count))
    for other in (like[:-1], torch.cat([like, like[:1]]), like.float(), like[:0]):
        assert codec.invalid_reason(other, like)
        with pytest.raises(ValueError, match="1000 numbers"):
            codec.decode(other, count)
    if spec not in ("8bits", "4bits", "2bits"):
        renumbered = torch.cat([chunks.encode_count(999), like[chunks.COUNT_BYTES :]])
        assert "999" in codec.invalid_reason(renumbered, like)
    for worst in (math.nan, math.inf):
        corrupt = torch.full((count,), worst) if isinstance(codec, RandK) else vector(count)
        corrupt[int(corrupt.abs().argmax())] = worst
        message = codec.encode(corrupt)
        clipped = spec in ("8bits", "4bits", "2bits") and worst == math.inf
        assert clipped or "finite" in codec.invalid_reason(message, like), worst


TOPS = [TopK(keep=0.05), TopK2(k=200), TopK2(k=201, levels="released"), DCT(), DCT(k=64, bits=32)]
OF_TOPS = pytest.mark.parametrize("codec", TOPS, ids=["topk", "symmetric", "released", "dct", "dct-whole"])


@OF_TOPS
@given(data=st.data())
def test_changed_and_random_messages_are_refused_or_harmless(codec: Compressor, data: st.DataObject) -> None:
    """With some bytes changed, or random bytes of any length behind an honest or a random header."""
    count = data.draw(st.sampled_from([1, 70, 700, 4096, 5000]))
    like = codec.encode(vector(count))
    message = like.clone()
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            message[data.draw(st.integers(0, len(like) - 1))] = data.draw(st.integers(0, 255))
    else:
        length = data.draw(st.sampled_from([len(like), len(like) - 1, len(like) + 1, 0, 8]))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
        message = torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)
        if data.draw(st.booleans()):
            message = torch.cat([chunks.encode_count(count), message[chunks.COUNT_BYTES :]])
    if not codec.invalid_reason(message, like):
        assert torch.isfinite(codec.decode(message, count)).all()


# ---- top-k with 12-bit places and 2-bit values


@pytest.mark.parametrize(("levels", "level_bytes"), [("symmetric", 4), ("released", 8)])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 100])
@pytest.mark.parametrize("k", [1, 64, 65, 4096])
def test_a_topk2_message_is_14_bits_for_each_number(k: int, count: int, levels: str, level_bytes: int) -> None:
    codec = TopK2(k=k, levels=levels)
    full, rest = divmod(count, 4096)
    size = 8 + full * (math.ceil(12 * k / 8) + math.ceil(2 * k / 8) + level_bytes)
    if rest:
        short = math.ceil(k * rest / 4096)
        size += math.ceil(12 * short / 8) + math.ceil(2 * short / 8) + level_bytes
    assert codec.bytes(count) == len(codec.encode(vector(count))) == size


def test_topk2_sends_a_140th_of_fp32() -> None:
    """Without levels and header it would be 32/(14/64) = 146."""
    count = 1 << 24
    assert 4 * count / TopK2().bytes(count) == pytest.approx(141.2, abs=0.1)
    assert 4 * count / TopK2(levels="released").bytes(count) == pytest.approx(136.5, abs=0.1)


@pytest.mark.parametrize("levels", ["symmetric", "released"])
@given(count=st.integers(1, 9000), k=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_topk2_follows_its_rule(levels: str, count: int, k: int, seed: int) -> None:
    codec, exact = TopK2(k=k, levels=levels), torch.randn(count, generator=torch.Generator().manual_seed(seed))
    sent = codec.decode(codec.encode(exact), count)
    for chunk, found in zip(exact.split(4096), sent.split(4096), strict=True):
        places = chunk.abs().sort(descending=True, stable=True).indices[: codec.kept(len(chunk))].sort().values
        kept, expected = chunk[places].double(), torch.zeros(len(chunk))
        if levels == "symmetric":
            high = kept.abs() > kept.abs().mean()
            groups = [(half, sign) for half in (high, ~high) for sign in (-1.0, 1.0)]
            masks = [half & (kept.sign() == sign) for half, sign in groups]
            level = [sign * kept[half].abs().mean() for half, sign in groups]
        else:
            z = (kept - kept.mean()) / kept.std(correction=0).clamp(min=1e-30)
            edges = [-math.inf, -2.25, -0.75, 0.75, math.inf]
            masks = [(z > low) & (z <= high) for low, high in itertools.pairwise(edges)]
            level = [kept[mask].mean() for mask in masks]
        for mask, value in zip(masks, level, strict=True):
            if mask.any():
                expected[places[mask]] = value.float()
        assert torch.allclose(found, expected, rtol=5e-3, atol=0), "levels are bfloat16"


def test_released_levels_match_a_manual_example() -> None:
    """Two lobes: two of the four levels are below the mean, one above, and the bin about zero is empty."""
    exact = torch.tensor([-3.0] + [-1.0] * 31 + [1.0] * 31 + [2.0])
    codec = TopK2(k=4096, levels="released")
    message = codec.encode(exact)
    assert message[-8:].view(torch.bfloat16).tolist() == [-3.0, -1.0, 0.0, 33 / 32]
    assert codec.decode(message, 64).tolist() == [-3.0] + [-1.0] * 31 + [33 / 32] * 32


@pytest.mark.parametrize(
    "chosen",
    [
        *({"kind": "topk2", "levels": levels} for levels in ("symmetric", "released")),
        *({"kind": "dct", "basis": basis, "decay": 0.999} for basis in ("dct", "identity", "random")),
    ],
    ids=lambda chosen: chosen.get("levels", chosen.get("basis")),
)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_the_sender_subtracts_what_others_decode(chosen: dict[str, object], scale: float) -> None:
    made = make_compression({"feedback": "decayed", **chosen})
    exact = {"w": vector(6000) * scale, "b": vector(100, 1) * scale}
    update = made.update(StageOuterState(), exact)
    received = weight_message.unpack(update.blocking.clone(), exact, made.compressor)
    for name, tensor in exact.items():
        assert torch.equal(update.kept["residual"][name], tensor - received[name]), "to the last bit"


@pytest.mark.parametrize(
    ("codec", "indices", "equal", "outside", "numbers"),
    [
        *((TopK2(levels=levels), slice(8, 8 + 24), [0x00] * 24, [0xFF] * 24, slice(-2, None))
          for levels in ("symmetric", "released")),
        # 15 chunks of 64 with 8 coefficients, and one of 40 with 5; 63 is outside the last one.
        (DCT(bits=16), slice(-14, -10), [0] * 4, [0, 0x10, 0x83, 0xF0], slice(8 + 15 * 6, 8 + 15 * 22)),
    ],
    ids=["symmetric", "released", "dct"],
)  # fmt: skip
def test_hostile_messages_are_refused(
    codec: Compressor, indices: slice, equal: list[int], outside: list[int], numbers: slice
) -> None:
    count = 1000
    like = codec.encode(vector(count))

    def changed(where: slice, to: list[int]) -> Tensor:
        message = like.clone()
        message[where] = torch.tensor(to, dtype=torch.uint8)
        return message

    for invalid in (equal, outside):
        assert "indices" in codec.invalid_reason(changed(indices, invalid), like)
    with pytest.raises(ValueError, match="outside its chunk"):
        codec.decode(changed(indices, outside), count)
    for hostile in ([0x80, 0x7F], [0xC0, 0x7F], [0x80, 0xFF]):  # inf, nan, -inf
        assert codec.invalid_reason(changed(slice(-2, None), hostile), like) == "not all of its numbers are finite"
    huge = changed(numbers, [0x7F, 0x7F] * (len(like[numbers]) // 2))
    assert codec.invalid_reason(huge, like) == "" and torch.isfinite(codec.decode(huge, count)).all()


@pytest.mark.parametrize("spec", ["topk2", "released", "dct", "random"])
def test_messages_and_what_they_decode_to_are_the_same_with_any_number_of_threads(spec: str) -> None:
    codec, exact, threads = made(spec), vector(300_000), torch.get_num_threads()
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        message = codec.encode(exact)
        found.append((message, codec.decode(message, len(exact))))
    torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@settings(max_examples=200)
@given(k=st.integers(1, 64), large=st.integers(1, 64), ratio=st.floats(1.0, 1e4), seed=st.integers(0, 99))
def test_symmetric_levels_keep_the_guaranteed_share(k: int, large: int, ratio: float, seed: int) -> None:
    """Few magnitudes far above the others are the hard case of two levels."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.ones(4096)
    exact[:large] = torch.logspace(0, math.log10(ratio), large)
    exact *= torch.randint(0, 2, (4096,), generator=generator) * 2 - 1
    assert measure_delta(TopK2(k=k), exact) >= TopK2(k=k).delta(4096) * (1 - 1e-2)


# ---- top-k of coefficients in a basis of 64 numbers


BASES = pytest.mark.parametrize("kind", ["dct", "identity", "random"])


@BASES
@pytest.mark.parametrize("size", [1, 2, 7, 63, 64])
def test_a_basis_is_orthonormal(kind: str, size: int) -> None:
    assert torch.allclose(basis(kind, size) @ basis(kind, size).T, torch.eye(size).double(), rtol=0, atol=1e-6)


def test_the_dct_matches_a_manual_example() -> None:
    """A constant is the first coefficient alone, times √d; a cosine of the basis is one coefficient."""
    sent = DCT(k=1, bits=32).decode(message := DCT(k=1, bits=32).encode(torch.full((64,), 3.0)), 64)
    assert message[8:].tolist() == [0, *torch.tensor([24.0]).view(torch.uint8).tolist()]
    assert torch.allclose(sent, torch.full((64,), 3.0), atol=1e-6)
    wave = torch.cos(math.pi / 64 * 5 * (torch.arange(64) + 0.5))
    assert torch.allclose(DCT(k=1, bits=32).decode(DCT(k=1, bits=32).encode(wave), 64), wave, atol=1e-6)
    assert measure_delta(DCT(k=1, basis="identity"), wave) < 0.04


def test_random_bases_follow_their_seed() -> None:
    assert torch.equal(basis("random", 64, 1), basis("random", 64, 1))
    assert not torch.allclose(basis("random", 64, 1), basis("random", 64, 2))


@BASES
@given(count=st.integers(1, 300), seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1.0, 1e20]))
def test_all_coefficients_restore_the_vector(kind: str, count: int, seed: int, scale: float) -> None:
    codec, exact = DCT(k=64, bits=32, basis=kind), torch.randn(count, generator=torch.Generator().manual_seed(seed))
    sent = codec.decode(codec.encode(exact * scale), count) / scale
    assert torch.allclose(sent, exact, rtol=0, atol=1e-6)


@BASES
@given(count=st.integers(1, 300), k=st.integers(1, 64), seed=st.integers(0, 99))
def test_the_error_has_the_energy_of_the_dropped_coefficients(kind: str, count: int, k: int, seed: int) -> None:
    """By a DCT from its definition, chunk by chunk, the shorter last one too."""
    codec, exact = DCT(k=k, bits=32, basis=kind), torch.randn(count, generator=torch.Generator().manual_seed(seed))
    sent = codec.decode(codec.encode(exact), count)
    for chunk, found in zip(exact.split(64), sent.split(64), strict=True):
        d = len(chunk)
        if kind == "dct":
            waves = [[math.cos(math.pi * i * (2 * j + 1) / (2 * d)) for j in range(d)] for i in range(d)]
            rows = torch.nn.functional.normalize(torch.tensor(waves, dtype=torch.float64), dim=1)
        else:
            rows = basis(kind, d)
        sizes = (rows @ chunk.double()).square().sort(descending=True).values
        dropped = float(sizes[math.ceil(k * d / 64) :].sum())
        assert float((chunk - found).double().square().sum()) == pytest.approx(dropped, rel=1e-4, abs=1e-9)


@BASES
@pytest.mark.parametrize(("bits", "k"), [(16, 1), (16, 8), (16, 9), (32, 64)])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_a_dct_message_is_6_bits_and_a_value_for_each_coefficient(kind: str, bits: int, k: int, count: int) -> None:
    codec = DCT(k=k, bits=bits, basis=kind)
    full, rest = divmod(count, 64)
    short = math.ceil(k * rest / 64)
    size = 8 + full * (math.ceil(6 * k / 8) + k * bits // 8) + math.ceil(6 * short / 8) + short * bits // 8
    assert codec.bytes(count) == len(codec.encode(vector(count))) == size


@pytest.mark.parametrize(
    ("spec", "kind", "options", "feedback"),
    [
        ("econtrol:top1%", "topk", {"keep": 0.01}, "EControl"),
        ("ef21:rand2.5%", "randk", {"keep": 0.025}, "EF21"),
        ("4bits", "quantised", {"bits": 4}, "EF14"),
        ("none:16bits", "plain", {"bits": 16}, "NoFeedback"),
        ("ef14:sign", "sign", {}, "EF14"),
        ({"kind": "topk", "keep": 0.1, "bits": 8, "feedback": "econtrol"}, "topk", {"bits": 8}, "EControl"),
        ({"kind": "topk", "keep": 0.1, "feedback": "econtrol", "eta": 0.05}, "topk", {"keep": 0.1}, "EControl"),
        ("topk2", "topk2", {"k": 64}, "EF14"),
        ("decayed:topk2", "topk2", {"k": 64}, "DecayedErrorFeedback"),
        ({"kind": "topk2", "k": 32, "feedback": "decayed", "decay": 0.9}, "topk2", {"k": 32}, "DecayedErrorFeedback"),
        ({"kind": "quantised"}, "quantised", {"bits": 8}, "EF14"),
        ("decayed:dct", "dct", {"k": 8, "bits": 16}, "DecayedErrorFeedback"),
    ],
)
def test_compression_is_short_or_a_table(spec: object, kind: str, options: dict[str, float], feedback: str) -> None:
    found = make_compression(spec)
    assert type(found.compressor) is COMPRESSORS.find(kind) and type(found.feedback).__name__ == feedback
    assert {name: getattr(found.compressor, name) for name in options} == pytest.approx(options)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("top0%", r"exchange\.compress\.keep = 0\.0: .*greater than 0"),
        ("top200%", r"exchange\.compress\.keep = 2\.0: .*less than or equal to 1"),
        ("top1.2.3%", "'1.2.3' is not a percentage"),
        ("top 1 per cent", "use FEEDBACK:COMPRESSOR"),
        ("econtrl:top1%", r"exchange\.compress\.feedback = 'econtrl': no such choice; did you mean 'econtrol'\?"),
        ("ef14:signs", r"exchange\.compress\.kind = 'signs': no such choice; did you mean 'sign'\?"),
        ("3bits", r"exchange\.compress\.bits = 3"),
        ({"kind": "topk2", "k": 4097}, r"^exchange\.compress\.k = 4097: .*less than or equal to 4096$"),
        ({"kind": "topk2", "k": 0}, r"^exchange\.compress\.k = 0: .*greater than or equal to 1$"),
        ({"kind": "topk2", "levels": "even"}, r"^exchange\.compress\.levels = 'even': .*'symmetric' or 'released'$"),
        ({"kind": "dct", "k": 65}, r"^exchange\.compress\.k = 65: .*less than or equal to 64$"),
        ({"kind": "dct", "basis": "dst"}, r"^exchange\.compress\.basis = 'dst': .*'dct', 'identity' or 'random'$"),
        ({"kind": "dct", "seed": 3}, r"^exchange\.compress: seed = 3: basis = 'dct' has no random draw; remove seed$"),
        ({"keep": 0.1}, "set kind to one of"),
        (
            {"kind": "topk", "kep": 0.1},
            r"exchange\.compress\.kep: no option of 'topk' or 'ef14'; did you mean 'keep'\?",
        ),
        ({"kind": "sign", "feedback": "ef14", "eta": 1}, "no option of 'sign' or 'ef14'; there are none"),
        ({"kind": "topk", "feedback": "econtrol", "eta": 0.1}, "eta = 0.1 is above the compressor's delta = 0.01"),
    ],
)
def test_invalid_settings_are_refused_by_name(spec: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_compression(spec)
    forced = {"kind": "topk", "feedback": "econtrol", "eta": 0.1, "force": True}
    assert make_compression(forced).feedback.eta == 0.1, "above delta"
