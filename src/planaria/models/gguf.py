"""llama.cpp's GGUF files of llama architecture: weights (dequantised to fp32) and byte-level tokenizers.

Quantised numbers are read by the package ``gguf``, an extra that is imported on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from planaria.common.errors import UserError, missing_package
from planaria.config.schema import ModelConfig
from planaria.models import model_metadata
from planaria.models.foreign_weights import WeightsFile, validate_config
from planaria.models.gguf_file import GgufFile, read_metadata
from planaria.models.llama_layers import to_rotate_half

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
"""supported values of tokenizer.ggml.pre, the split before byte-pair merges"""
SUPPORTED_VALUES = {
    "rope.scaling.factor": 0.0,
    "rope.scale_linear": 1.0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
    "expert_count": 0,
}
"""a plain LLaMA's value of each optional key"""
_AT_ONCE = 1 << 22
"""numbers of a tensor that are dequantised together"""
CONTROL, USER_DEFINED = 3, 4
"""token types that are matched whole, before any merges"""


def open_gguf(path: Path) -> WeightsFile:
    """Open the model in a GGUF file.

    :raises UserError: if the file is damaged, not a plain llama, or quantised in a way that ``gguf`` does not support.
    """
    contents = read_metadata(path)
    config = _config(contents)
    reading = {_global_name(name): _row_reader(contents, name) for name in contents.tensors}
    shapes = {_global_name(name): entry.shape for name, entry in contents.tensors.items()}

    def read(name: str) -> Tensor:
        heads = {"q_proj": config.heads, "k_proj": config.kv}.get(name.split(".")[-2])
        return reading[name]() if heads is None else to_rotate_half(reading[name](), heads)

    usage = model_metadata.metadata_of_gguf(contents.values, config.context)
    return WeightsFile(path, config, shapes, read, path, usage=usage)


def _row_reader(contents: GgufFile, name: str) -> Callable[[], Tensor]:
    """Return a reader of a tensor that dequantises a few rows at a time."""
    quants = _import_quants(contents.path)
    path, entry = contents.path, contents.tensors[name]
    rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
    try:
        kind = quants.GGMLQuantizationType(entry.kind)
        (row_bytes,) = quants.quant_shape_to_byte_shape((columns,), kind)
        if entry.begin + rows * row_bytes > contents.size:
            raise UserError(f"{path}: truncated GGUF file ({name} extends past its end); download it again")
        quants.dequantize(np.zeros((1, row_bytes), np.uint8), kind)
    except (NotImplementedError, ValueError) as error:
        label = f"{name} is of a type that cannot be read ({error})"
        raise UserError(f"{path}: {label}; use a file in F32, F16, BF16 or a quantisation that gguf knows") from None
    at_once = max(1, _AT_ONCE // columns)

    def read() -> Tensor:
        numbers = np.empty((rows, columns), np.float32)
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            raw = np.fromfile(path, np.uint8, count * row_bytes, offset=entry.begin + first * row_bytes)
            if raw.size < count * row_bytes:
                raise UserError(f"{path}: truncated while it was read; download it again")
            numbers[first : first + count] = quants.dequantize(raw.reshape(count, row_bytes), kind)
        return torch.from_numpy(numbers).view(entry.shape)

    return read


def _import_quants(path: Path) -> Any:
    try:
        from gguf import quants
    except ImportError as error:
        raise missing_package(f"{path}: reading GGUF files", "gguf", "gguf") from error
    return quants


def gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the byte-level BPE tokenizer in a GGUF file's metadata.

    :raises UserError: if there is none, or it is of another kind.
    """
    metadata = read_metadata(path).values
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or split not in SPLITS:
        raise UserError(f"{path}: tokenizer {kind!r} with split {split!r} is not supported; only gpt2 with {SPLITS} is")
    tokens, types, joined = (metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type", "merges"))
    if not all(isinstance(x, list) for x in (tokens, types, joined)) or not all(isinstance(t, str) for t in tokens):
        raise UserError(f"{path}: damaged GGUF file (its tokens are not lists of strings); download it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(str(merge).split(" ")) for merge in joined]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise UserError(f"{path}: merge {' '.join(merge)!r} is not among the tokens; the file is damaged")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(first, second) for first, second in merges]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    whole = [t for t, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in whole])
    control_ids = {name: _boundary_token(path, metadata, name, len(tokens)) for name in ("bos", "eos")}
    added = {name: number for name, number in control_ids.items() if number is not None}
    if added:  # under names without a colon, which would end them in a template
        named: list[Any] = [{"id": name, "ids": [added[name]], "tokens": [tokens[added[name]]]} for name in added]
        single = [name for name in ("bos", "$A", "eos") if name in added or name == "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return tokenizer


def _boundary_token(path: Path, metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """Return the token id that a file adds to every text as its first ("bos") or last ("eos"), or None.

    :raises UserError: if the id is not below ``count``.
    """
    if metadata.get(f"tokenizer.ggml.add_{name}_token") is not True:
        return None
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if type(number) is not int or not 0 <= number < count:
        raise UserError(f"{path}: {name}_token_id = {number!r} is not among the tokens; the file is damaged")
    return number


def _config(contents: GgufFile) -> ModelConfig:
    path, metadata = contents.path, contents.values
    if (kind := metadata.get("general.architecture")) != "llama":
        raise UserError(f"{path}: architecture {kind!r} is not supported; use a file of architecture 'llama'")
    _refuse_unsupported(path, metadata)
    shapes = {name: entry.shape for name, entry in contents.tensors.items()}
    heads = metadata.get("llama.attention.head_count")
    settings = {
        "vocab": shapes.get("token_embd.weight", (0, 0))[0],
        "dim": metadata.get("llama.embedding_length"),
        "layers": metadata.get("llama.block_count"),
        "heads": heads,
        "kv_heads": metadata.get("llama.attention.head_count_kv", heads),
        "hidden": metadata.get("llama.feed_forward_length"),
        "context": metadata.get("llama.context_length"),
        "rope_theta": _short(metadata.get("llama.rope.freq_base", 10000.0)),
        "norm_eps": _short(metadata.get("llama.attention.layer_norm_rms_epsilon")),
        "tied": "output.weight" not in shapes,
    }
    config = validate_config(path, settings)
    for key in ("llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"):
        if metadata.get(key, config.head_dim) != config.head_dim:
            raise UserError(f"{path}: {key} is not embedding_length / head_count = {config.head_dim}: not supported")
    return config


def _refuse_unsupported(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse features that change the results without a tensor that shows it."""
    if (scaling := metadata.get("llama.rope.scaling.type", "none")) != "none":
        raise UserError(f"{path}: rope scaling {scaling!r} is not supported; use a model with plain rotary positions")
    for name, plain in SUPPORTED_VALUES.items():
        if (setting := metadata.get(f"llama.{name}", plain)) != plain:
            raise UserError(f"{path}: llama.{name} = {setting!r} is not supported; use a model without it")


def _short(number: object) -> object:
    """Return the shortest decimal of an fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _global_name(name: str) -> str:
    """Return a tensor's global name; unknown names are unchanged, so that :class:`WeightsFile` refuses them."""
    components = name.removesuffix(".weight").split(".")
    if len(components) == 3 and components[0] == "blk" and components[2] in LAYER:
        return f"model.layers.{components[1]}.{LAYER[components[2]]}.weight"
    return f"{ENDS[components[0]]}.weight" if len(components) == 1 and components[0] in ENDS else name
