"""llama.cpp's GGUF files of llama architecture: weights (dequantised to fp32) and byte-level tokenizers.

The format is read by the package ``gguf``, an extra that is imported only here and only when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from planaria.config import ModelConfig
from planaria.errors import UserError
from planaria.model.foreign import assemble, checked_config
from planaria.model.llama import to_rotate_half
from planaria.model.stages import Llama

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPLITS = ("gpt-2", "smollm")
"""Supported values of tokenizer.ggml.pre: how text is split before byte-pair merges"""
CONTROL, USER_DEFINED = 3, 4
"""Token types of pieces that are matched whole, before any merges"""


def import_gguf(path: Path) -> Llama:
    """The model in a GGUF file.

    :raises UserError: when the file is damaged, not a plain llama, or quantised in a way ``gguf`` cannot undo.
    """
    from gguf.quants import dequantize

    reader = _open(path)
    config = _config(path, reader)
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        try:
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except NotImplementedError as error:
            raise UserError(f"{path}: {tensor.name} is {tensor.tensor_type.name}, an unknown quantisation") from error
        name = _global_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.heads if name.endswith("q_proj.weight") else config.kv
            weight = to_rotate_half(weight, heads)
        state[name] = weight
    return assemble(path, config, state)


def gguf_tokenizer(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer in a GGUF file's metadata.

    :raises UserError: when there is none, or it is of another kind.
    """
    reader = _open(path)
    kind, split = _value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise UserError(f"{path}: tokenizer {kind!r} with split {split!r} is not supported; only gpt2 with {SPLITS} is")
    tokens = _value(reader, "tokenizer.ggml.tokens", [])
    types = _value(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges", [])]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise UserError(f"{path}: merge {' '.join(merge)!r} is not among the tokens; the file is damaged")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    whole = [t for t, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in whole])
    return tokenizer


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{path}: reading GGUF files needs the package gguf; pip install -e '.[gguf]'") from error
    try:
        return GGUFReader(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path}: not a whole GGUF file ({error})") from error


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _config(path: Path, reader: Any) -> ModelConfig:
    if (kind := _value(reader, "general.architecture")) != "llama":
        raise UserError(f"{path}: architecture {kind!r} is not supported; give a llama")
    if (scaling := _value(reader, "llama.rope.scaling.type", "none")) != "none":
        raise UserError(f"{path}: rope scaling {scaling!r} is not supported; give a model with plain rotary positions")
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in reader.tensors}
    heads = _value(reader, "llama.attention.head_count")
    values = {
        "vocab": shapes.get("token_embd.weight", (0, 0))[-1],
        "dim": _value(reader, "llama.embedding_length"),
        "layers": _value(reader, "llama.block_count"),
        "heads": heads,
        "kv_heads": _value(reader, "llama.attention.head_count_kv", heads),
        "hidden": _value(reader, "llama.feed_forward_length"),
        "context": _value(reader, "llama.context_length"),
        "rope_theta": _short(_value(reader, "llama.rope.freq_base", 10000.0)),
        "norm_eps": _short(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "tied": "output.weight" not in shapes,
    }
    config = checked_config(path, values)
    for key in ("llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"):
        if _value(reader, key, config.head_dim) != config.head_dim:
            raise UserError(f"{path}: {key} is not embedding_length / head_count = {config.head_dim}: not supported")
    return config


def _short(number: float | None) -> float | None:
    """The shortest decimal that is this fp32 number: 1e-05, not 9.999999747378752e-06."""
    return None if number is None else float(str(np.float32(number)))


def _global_name(name: str) -> str:
    """Unknown names stay as they are, for :meth:`Llama.load_global_state` to complain about."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    return f"{ENDS[parts[0]]}.weight" if len(parts) == 1 and parts[0] in ENDS else name
