"""A small model of the same architecture as a given one, for the check before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planaria.models.transformers.skeleton import DEPTHS

LAYERS = 4
VOCAB = 128
_WIDTHS = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "ffn_hidden_size", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window", "window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    "vocab_size": VOCAB,
    "global_head_dim": 32,
}
"""settings by the library's names, and the most that a small model has of them"""
_INNER = {"num_heads": "head_dim", "mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim"}
"""numbers of heads, and their sizes, whose products are the inner width of a state-space layer"""


def shrink_config(config: Any, layers: int = LAYERS, widths: bool = True) -> dict[str, Any]:
    """Return the config.json of a model with at most ``layers`` layers, which has all kinds of layers if they fit.

    Without ``widths`` only layers are left out.
    """
    values: dict[str, Any] = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    depth = int(config.num_hidden_layers)
    kept = choose_layers(values, depth, layers)
    for key in ("dtype", "torch_dtype", "architectures", "transformers_version"):
        values.pop(key, None)
    for key, value in values.items():
        if key in DEPTHS and value == depth:
            values[key] = len(kept)
        elif isinstance(value, list) and len(value) == depth:
            values[key] = [value[number] for number in kept]
        elif isinstance(value, dict) and value and all(str(number).isdecimal() for number in value):
            values[key] = {index: value[n] for index, number in enumerate(kept) for n in value if int(n) == number}
        elif widths and key in _WIDTHS and isinstance(value, int) and not isinstance(value, bool):
            values[key] = min(value, _WIDTHS[key])
        elif widths and key.endswith("_token_id") and isinstance(value, int | list):
            values[key] = 0 if value == 0 else 1
    if widths and values.get("num_key_value_heads") and config.num_key_value_heads == config.num_attention_heads:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if widths:
        _fit(values)
    return values | {"model_type": config.model_type}


def _fit(values: dict[str, Any]) -> None:
    """Adjust widths that must agree with others."""
    if "qk_rope_head_dim" in values:  # then head_dim is that of rotary positions
        values["head_dim"] = values["qk_rope_head_dim"]
    expand = values.get("mamba_expand", values.get("expand"))
    if isinstance(expand, int | float):
        inner = int(expand * values.get("hidden_size", 64))
        for heads, size in _INNER.items():
            if heads in values and isinstance(values.get(size), int):
                values[heads] = inner // values[size]
        if "mamba_d_ssm" in values:
            values["mamba_d_ssm"] = inner


def choose_layers(values: Mapping[str, Any], depth: int, layers: int) -> Sequence[int]:
    """Return the numbers of at most ``layers`` layers: the first of each kind, then the first others, in order.

    Kinds are distinguished by the lists in a configuration that have an entry for each layer.
    """
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == depth]
    kinds: dict[str, int] = {}
    for number in range(depth):
        kinds.setdefault(repr([entries[number] for entries in lists]), number)
    first = list(kinds.values())[:layers]
    others = [number for number in range(depth) if number not in first]
    return sorted([*first, *others[: max(0, layers - len(first))]])
