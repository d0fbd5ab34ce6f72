"""Checkpoints of llama2.c, version 0.

The format has no names or checksums, so every size is checked against the file's before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import WeightsFile, validate_config
from planaria.models.llama_layers import to_rotate_half
from planaria.models.llama_stages import Llama, parameter_count

HEADER = struct.Struct("<7i")
"""dim, hidden, layers, heads, kv_heads, vocab (negative: untied head), context"""
NORM_EPS = 1e-5
"""llama2.c's constant; not in the file"""
KINDS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.down_proj",
    "mlp.up_proj",
)
"""a layer's tensors in the file's order"""


def open_llama2c(checkpoint: Path) -> WeightsFile:
    """Open the model in a version-0 checkpoint: header, then fp32 tensors in a fixed order.

    :raises UserError: if the file is unreadable, or its length does not match its header.
    """
    try:
        size = checkpoint.stat().st_size
        with checkpoint.open("rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise UserError(f"{checkpoint} cannot be read ({error.strerror}); use a llama2.c checkpoint") from error
    config = _config(checkpoint, header)
    needed = HEADER.size + 4 * (parameter_count(config) + config.context * config.head_dim)
    if size != needed:
        raise UserError(f"{checkpoint}: {size} bytes, but its header announces {needed}; restore an undamaged copy")
    shapes = {name: tuple(tensor.shape) for name, tensor in Llama(config, device="meta").global_state().items()}
    begins = dict(_tensor_offsets(config, shapes))

    def read(name: str) -> Tensor:
        count = math.prod(shapes[name])
        flat = torch.from_numpy(np.fromfile(checkpoint, "<f4", count, offset=HEADER.size + 4 * begins[name]))
        if len(flat) < count:
            raise UserError(f"{checkpoint}: truncated while it was read; restore an undamaged copy")
        weight = flat.view(shapes[name])
        heads = {"q_proj": config.heads, "k_proj": config.kv}.get(name.split(".")[-2])
        return weight if heads is None else to_rotate_half(weight, heads)

    return WeightsFile(checkpoint, config, shapes, read)


def _config(path: Path, header: bytes) -> ModelConfig:
    if len(header) < HEADER.size:
        raise UserError(f"{path}: shorter than a llama2.c header; not a llama2.c checkpoint")
    dim, hidden, layers, heads, kv_heads, vocab, context = HEADER.unpack(header)
    sizes = {"dim": dim, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "context": context}
    return validate_config(path, {**sizes, "vocab": abs(vocab), "tied": vocab > 0, "norm_eps": NORM_EPS})


def _tensor_offsets(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield global name and first number of every tensor; tensors of one kind are contiguous, layer by layer."""
    layers = [f"model.layers.{layer}.{kind}.weight" for kind in KINDS for layer in range(config.layers)]
    start = 0
    for name in ("model.embed_tokens.weight", *layers, "model.norm.weight"):
        yield name, start
        start += math.prod(shapes[name])
    if not config.tied:  # behind the rotary tables, which follow from the config
        yield "lm_head.weight", start + config.context * config.head_dim
