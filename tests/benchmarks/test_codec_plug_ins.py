"""The codecs of the benchmarks, examples of codecs outside planaria."""

from __future__ import annotations

import pytest
import torch
from benchmarks.learned_projection import Anchors
from benchmarks.wire_codecs import AnchoredGroups, RotatedGroups, hadamard

from planaria.common.errors import UserError
from planaria.config.consent import permit_code
from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.pipeline.codecs import make_codec
from planaria.pipeline.codecs.base import LEGS, Visit
from planaria.pipeline.codecs.group_quantisation import GroupQuantiser

SHAPE = (2, 5, 128)
VISIT = Visit(1, 2, 3)


def activations() -> torch.Tensor:
    """Return normal numbers with an outlier in one channel, and a group that two channels dominate."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    x[..., 7] *= 50
    x[..., 64:66] = 100.0
    return x


@pytest.mark.parametrize("size", [2, 32, 128])
def test_the_rotation_is_orthonormal_and_its_own_inverse(size: int) -> None:
    matrix = hadamard(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    torch.testing.assert_close(hadamard(matrix), torch.eye(size))


@pytest.mark.parametrize("rotate", ["none", "whole", "gated"])
def test_messages_have_the_stated_bytes_and_are_restored(rotate: str) -> None:
    own = RotatedGroups.model_validate({"rotate": rotate, "forward": 8, "backward": 8})
    plain = GroupQuantiser(forward=8, backward=8, group=32)
    for leg in LEGS:
        message = own.encode(activations(), leg, VISIT)
        flags = 5 if (rotate, leg) == ("gated", "forward") else 0  # 40 groups, a bit each
        assert len(message) == own.bytes(SHAPE).of(leg) == plain.bytes(SHAPE).of(leg) + flags
        decoded = own.decode(message, SHAPE, leg)
        assert (decoded - activations()).square().mean() < 1e-3 * activations().square().mean()
        assert own.invalid_reason(message, SHAPE, leg) == ""


def test_only_groups_with_a_single_outlier_are_rotated() -> None:
    def error(rotate: str) -> torch.Tensor:
        codec = RotatedGroups.model_validate({"rotate": rotate})
        decoded = codec.decode(codec.encode(activations(), "forward", VISIT), SHAPE, "forward")
        return (decoded - activations()).square().view(-1, 4, 32).mean((0, 2))

    gated, none = error("gated"), error("none")
    assert gated[0] < none[0] and gated[2] == none[2]


def test_a_recipe_names_the_codec_and_its_options() -> None:
    with permit_code(True):
        wire = {"kind": "benchmarks.wire_codecs:RotatedGroups", "rotate": "whole"}
        codec = make_codec(PipelineConfig.model_validate({"wire": wire}).wire)
    assert isinstance(codec, RotatedGroups) and codec.rotate == "whole"
    with pytest.raises(UserError, match="power of two"):
        codec.for_model(ModelConfig(dim=96))


def test_token_ids_of_anchored_messages_are_exact_and_below_the_vocabulary() -> None:
    codec = AnchoredGroups().for_model(ModelConfig(vocab=40_000))
    numbers, ids = torch.randn(2, 3, 32), torch.tensor([[0, 255, 256], [1, 39_999, 300]])
    x = Anchors.join(numbers, ids)
    for leg in LEGS:
        message = codec.encode(x, leg, VISIT)
        assert len(message) == codec.bytes(x.shape).of(leg)
        assert codec.invalid_reason(message, x.shape, leg) == "" and codec.magnitude(message, x.shape, leg) > 0
        decoded = codec.decode(message, x.shape, leg)
        assert decoded.shape == x.shape
        if leg == "forward":
            received, sent_ids = Anchors.split(decoded)
            assert sent_ids.equal(ids) and (received - numbers).abs().max() < 0.02
        else:
            assert not decoded[..., 32:].any()
    false = codec.encode(Anchors.join(numbers, ids + 40_000 - 39_999), "forward", VISIT)
    assert "vocabulary of 40000" in codec.invalid_reason(false, x.shape, "forward")
