"""Hugging Face's config.json, and the features in it that this LLaMA does not support."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import validate_config
from planaria.models.moe_layer import ExpertRouting, to_keys

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "planaria_routed": "PlanariaRoutedForCausalLM",
}
"""a LLaMA, and exports of models with its layers and :mod:`planaria.models.moe_layer`"""
SUPPORTED_VALUES: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_qk_norm": False,
    "qk_norm": False,
    "qk_layernorm": False,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "logit_scale": None,
    "scale_emb": 1.0,
    "scale_depth": None,
    "dim_model_base": None,
    "num_local_experts": None,
    "parallel_attn": False,
    "clip_qkv": None,
    "sliding_window": None,
}
"""a plain LLaMA's value of each optional key; null is ignored"""
_ROPE = {"rope_type": "default", "type": "default", "factor": 1.0, "partial_rotary_factor": 1.0}
"""the same for rotary positions"""


def to_config(config: ModelConfig, routing: ExpertRouting | None = None) -> dict[str, Any]:
    """Return a model's config.json for ``transformers``; it has no model for a ``routing`` with a bias."""
    if config.family == "transformers":
        return dict(json.loads(config.options["config"]))
    table = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    return table | (to_keys(routing) if routing else {})


class Unsupported(UserError):
    """The model has a feature that planaria's own LLaMA lacks."""


class _Rope(BaseModel):
    """A table of rotary positions; null and absent keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    partial_rotary_factor: float | None = None


class _Stated(BaseModel):
    """The types of the values read here; :data:`SUPPORTED_VALUES` has the others."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model_type: str | None = None
    architectures: list[str] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rms_norm_eps: float | None = None
    initializer_range: float | None = None
    tie_word_embeddings: bool | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


def _require_types(path: Path, table: Mapping[str, Any]) -> None:
    """Check the types of a config.json's values."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(rope := table.get(key), Mapping) and rope is not None:
            raise UserError(f"{path}: {key} = {rope!r:.80} is not a table; download it again")
    try:
        _Stated.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}: {documents.first_error(error)}; download it again") from None


def from_config(path: Path, table: Mapping[str, Any]) -> ModelConfig:
    """Return the model in the config.json ``path``.

    :raises UserError: for another architecture, features not in :data:`SUPPORTED_VALUES`, or invalid shapes.
    """
    _require_types(path, table)
    _refuse_unsupported(path, table)
    rope = table.get("rope_parameters") or {}
    settings = {
        "vocab": table.get("vocab_size"),
        "dim": table.get("hidden_size"),
        "layers": table.get("num_hidden_layers"),
        "heads": table.get("num_attention_heads"),
        "kv_heads": table.get("num_key_value_heads"),
        "hidden": table.get("intermediate_size"),
        "context": table.get("max_position_embeddings", 2048),
        "rope_theta": rope.get("rope_theta", table.get("rope_theta", 10000.0)),
        "norm_eps": table.get("rms_norm_eps", 1e-6),
        "tied": table.get("tie_word_embeddings", False),
        "init_std": table.get("initializer_range", 0.02),
    }
    config = validate_config(path, settings)
    if table.get("head_dim") not in (None, config.head_dim):
        raise Unsupported(f"{path}: head_dim = {table['head_dim']} must be hidden_size / num_attention_heads")
    return config


def _refuse_unsupported(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse anything that would change the results without a tensor that shows it."""
    model = str(table.get("model_type"))
    if model not in ARCHITECTURES or table.get("architectures") not in (None, [ARCHITECTURES[model]]):
        kind = table.get("architectures") or model
        raise Unsupported(f"{path}: architecture {kind} is not supported; use a {ARCHITECTURES['llama']}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = table.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        for name, plain in _ROPE.items():
            if rope.get(name, plain) not in (plain, None):
                also = "" if name in ("rope_type", "type") else f" with {name} = {rope[name]!r}"
                supported = "only plain rotary positions are"
                raise Unsupported(f"{path}: rope_scaling of type {kind!r}{also} is not supported; {supported}")
    routed = {"num_local_experts"} if model in ("mixtral", "planaria_routed") else set[str]()
    for key, plain in SUPPORTED_VALUES.items():
        if key not in routed and table.get(key, plain) not in (plain, None):
            shown = f"{table[key]!r:.80}"
            raise Unsupported(f"{path}: {key} = {shown} is not supported; this LLaMA has {key} = {plain!r}")
