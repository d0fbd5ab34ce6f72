"""Hidden states in a subspace: bytes, exactness before rounding, and messages and options that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.model_config import SubspaceConfig
from planaria.config.options import Options
from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.models.subspace import Subspace, basis, offsets
from planaria.pipeline.codecs import make_codec, make_model_codec
from planaria.pipeline.codecs.base import Visit
from planaria.pipeline.codecs.subspace import SubspaceCodec

VISIT = Visit(seed=7, sample=40, hop=2)
SHAPE = (2, 6, 48)


def codec(vocab: int = 100, dim: int = 48, rank: int = 12, **options: int) -> SubspaceCodec:
    model = ModelConfig(vocab=vocab, dim=dim, heads=4, tied=False, subspace=SubspaceConfig(rank=rank, seed=5))
    wire = Options({"kind": "subspace", "rank": rank, **options})
    made = make_model_codec(model, PipelineConfig(wire=wire))
    assert isinstance(made, SubspaceCodec)
    return made


def drawn(made: SubspaceCodec, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return hidden states in the subspace and their token ids."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, made.space.vocab, SHAPE[:2], generator=draw)
    return made.space.restore(torch.randn(*SHAPE[:2], made.rank, generator=draw), ids), ids


@pytest.mark.parametrize(
    ("vocab", "options", "forward", "backward"),
    [
        (50304, {"forward": 16, "backward": 16}, 322, 320),
        (50304, {"forward": 8, "backward": 8}, 172, 170),
        (50304, {"forward": 8, "backward": 4}, 172, 90),
        (70000, {"forward": 8, "backward": 4}, 173, 90),
        (50304, {"forward": 8, "backward": 4, "group": 64}, 167, 85),
    ],
)
def test_a_message_has_the_stated_bytes(vocab: int, options: dict[str, int], forward: int, backward: int) -> None:
    made, tokens = codec(vocab, 1024, 160, **options), 64
    assert made.bytes((2, tokens // 2, 1024)) == (forward * tokens, backward * tokens)


@pytest.mark.parametrize("vocab", [100, 70000])
@pytest.mark.parametrize(("bits", "error"), [(16, 2**-8), (8, 0.02)])
def test_hidden_states_and_ids_arrive(vocab: int, bits: int, error: float) -> None:
    """An error is that of rounding the k numbers; token ids are exact."""
    made = codec(vocab, forward=bits)
    x, ids = drawn(made)
    message = made.encode(x, "forward", VISIT, ids)
    assert (tuple(message.shape), message.dtype) == made.layout(SHAPE, "forward")
    assert not made.invalid_reason(message, SHAPE, "forward")
    sent = made.ids(message, SHAPE, "forward")
    assert sent is not None and torch.equal(sent, ids)
    assert (made.decode(message, SHAPE, "forward") - x).norm() / x.norm() < error


def test_a_gradient_is_exact_within_the_subspace() -> None:
    """⟨decoded g, U dy⟩ = ⟨g, U dy⟩ for every change dy, up to bfloat16; the rest is omitted."""
    made = codec(backward=16)
    g, change = torch.randn(SHAPE), made.space.restore(torch.randn(*SHAPE[:2], 12))
    message = made.encode(g, "backward", VISIT)
    assert made.ids(message, SHAPE, "backward") is None
    found = made.decode(message, SHAPE, "backward")
    assert float((found * change).sum()) == pytest.approx(float((g * change).sum()), abs=0.1)
    assert found.norm() / g.norm() == pytest.approx((12 / 48) ** 0.5, rel=0.2)


def test_gradients_are_rounded_by_visit() -> None:
    made, g = codec(), torch.randn(SHAPE)
    first = made.encode(g, "backward", VISIT)
    assert torch.equal(first, made.encode(g.clone(), "backward", VISIT))
    assert not torch.equal(first, made.encode(g, "backward", VISIT._replace(sample=9)))
    assert made.random and not codec(backward=16).random


def test_unknown_token_ids_are_refused() -> None:
    made = codec()
    x, ids = drawn(made)
    message = made.encode(x, "forward", VISIT, ids)
    message[-1] = 1
    assert made.invalid_reason(message, SHAPE, "forward").startswith(f"token id {256 + int(ids[-1, -1])} of a voc")
    x[0, 0, 0] = float("nan")
    message = made.encode(x, "forward", VISIT, ids)
    assert made.invalid_reason(message, SHAPE, "forward") == "a scale is not finite"


@pytest.mark.parametrize("rank", [1, 12, 48])
def test_the_basis_is_orthonormal_for_every_number_of_threads(rank: int) -> None:
    space, cpu = Subspace(100, 48, rank, 5), torch.device("cpu")
    found = basis(space, cpu)
    assert torch.allclose(found.T @ found, torch.eye(rank), atol=1e-6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(basis.__wrapped__(space, cpu), found)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(basis(space._replace(seed=6), cpu), found)


def test_an_offset_does_not_depend_on_the_vocabulary() -> None:
    few, many = (offsets(Subspace(vocab, 50, 8, 5), torch.device("cpu")) for vocab in (33, 90))
    assert torch.equal(few, many[:33])
    assert float(many.std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, r"pipeline\.wire\.rank: 'subspace' has no default"),
        ({"rank": 0}, r"pipeline\.wire\.rank = 0"),
        ({"rank": "8"}, r"pipeline\.wire\.rank = '8'"),
        ({"rank": 8, "forward": 12}, r"pipeline\.wire\.forward = 12: bits is 2 to 8, or 16 for bfloat16"),
        ({"rank": 8, "backward": 1}, r"pipeline\.wire\.backward = 1: bits is 2 to 8"),
        ({"rank": 8, "group": 48}, r"pipeline\.wire\.group = 48"),
        ({"rank": 8, "seed": 3}, r"pipeline\.wire\.seed: no option"),
    ],
)
def test_an_invalid_option_is_refused_by_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_codec(Options({"kind": "subspace", **options}))
