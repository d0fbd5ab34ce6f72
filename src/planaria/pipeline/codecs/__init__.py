"""Codecs of activations and their gradients between stages: a registry of the codecs of ``pipeline.wire``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.registry import Registry
from planaria.config.schema import ModelConfig, PipelineConfig
from planaria.models.families import activation_shape
from planaria.pipeline.codecs.base import MessageBytes, WireCodec
from planaria.pipeline.codecs.floats import Bf16, Fp32
from planaria.pipeline.codecs.group_quantisation import GroupQuantiser
from planaria.pipeline.codecs.subspace import SubspaceCodec

CODECS: Registry[WireCodec] = Registry(
    "wire",
    "pipeline.wire",
    WireCodec,  # type: ignore[type-abstract]
    {"fp32": Fp32, "bf16": Bf16, "groups": GroupQuantiser, "subspace": SubspaceCodec},
    location="pipeline.wire",
)
_SHORT = re.compile(r"(\d+)/(\d+)")


@lru_cache(maxsize=64)
def make_codec(wire: str | Options) -> WireCodec:
    """Return the codec that ``pipeline.wire`` configures.

    :raises UserError: naming an unknown codec or option, or a value out of range.
    """
    kind, options = _parse(wire)
    return CODECS.make(kind, options)


def make_model_codec(model: ModelConfig, pipeline: PipelineConfig) -> WireCodec:
    """Return the codec of a run; UserError as :func:`make_codec`."""
    return make_codec(pipeline.wire).for_model(model)


def codec_class(wire: str | Options) -> type[WireCodec]:
    """Return the class of that codec; UserError if it is unknown or must not be imported."""
    return CODECS.find(_parse(wire)[0])


def message_bytes(model: ModelConfig, pipeline: PipelineConfig) -> MessageBytes:
    """Return the bytes on the wire of one activation (microbatch_size, context, dim) and of its gradient."""
    return make_model_codec(model, pipeline).bytes(activation_shape(model, pipeline))


def _parse(wire: str | Options) -> tuple[str, dict[str, Any]]:
    """Return the codec's name and options; ``"6/4"`` is short for groups of 6 bits forward and 4 backward."""
    if isinstance(wire, str):
        bits = _SHORT.fullmatch(wire)
        return (wire, {}) if bits is None else ("groups", {"forward": int(bits[1]), "backward": int(bits[2])})
    options = dict(wire)
    if not isinstance(kind := options.pop("kind", None), str):
        raise UserError(f"pipeline.wire = {wire!r}: set kind to one of {', '.join(CODECS.names)}")
    return kind, options
