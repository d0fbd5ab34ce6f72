"""llama2.c's files (version 0): checkpoints and tokenizers.

Neither format has names or checksums, so every size is checked against the file's before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import WeightsFile, checked_config
from planaria.models.llama_layers import to_rotate_half
from planaria.models.llama_stages import Llama, parameter_count

HEADER = struct.Struct("<7i")
"""dim, hidden, layers, heads, kv_heads, vocab (negative: untied head), context"""
NORM_EPS = 1e-5
"""llama2.c's constant; not in the file"""
BOS, EOS = 1, 2
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
        raise UserError(f"{checkpoint}: cannot be read ({error.strerror}); give a llama2.c checkpoint") from error
    config = _config(checkpoint, header)
    needed = HEADER.size + 4 * (parameter_count(config) + config.context * config.head_dim)
    if size != needed:
        raise UserError(f"{checkpoint}: {size} bytes, but its header announces {needed}; is it damaged?")
    shapes = {name: tuple(tensor.shape) for name, tensor in Llama(config, device="meta").global_state().items()}
    begins = dict(_begins(config, shapes))

    def read(name: str) -> Tensor:
        count = math.prod(shapes[name])
        flat = torch.from_numpy(np.fromfile(checkpoint, "<f4", count, offset=HEADER.size + 4 * begins[name]))
        if len(flat) < count:
            raise UserError(f"{checkpoint}: has become shorter; is it damaged?")
        weight = flat.view(shapes[name])
        heads = {"q_proj": config.heads, "k_proj": config.kv}.get(name.split(".")[-2])
        return weight if heads is None else to_rotate_half(weight, heads)

    return WeightsFile(checkpoint, config, shapes, read)


def import_llama2c(checkpoint: Path) -> Llama:
    """Load the model in a checkpoint into memory."""
    return open_llama2c(checkpoint).model()


def _config(path: Path, header: bytes) -> ModelConfig:
    if len(header) < HEADER.size:
        raise UserError(f"{path}: shorter than a llama2.c header; not a llama2.c checkpoint")
    dim, hidden, layers, heads, kv_heads, vocab, context = HEADER.unpack(header)
    values = {"dim": dim, "hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "context": context}
    return checked_config(path, {**values, "vocab": abs(vocab), "tied": vocab > 0, "norm_eps": NORM_EPS})


def _begins(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield global name and first number of every tensor; tensors of one kind are contiguous, layer by layer."""
    layers = [f"model.layers.{layer}.{kind}.weight" for kind in KINDS for layer in range(config.layers)]
    start = 0
    for name in ("model.embed_tokens.weight", *layers, "model.norm.weight"):
        yield name, start
        start += math.prod(shapes[name])
    if not config.tied:  # behind the rotary tables, which follow from the config
        yield "lm_head.weight", start + config.context * config.head_dim


class Llama2cTokenizer:
    """SentencePiece-like BPE from a tokenizer.bin: the pair whose union scores best is merged first."""

    def __init__(self, path: Path) -> None:
        """:raises UserError: if the file is unreadable or damaged."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); give a llama2.c tokenizer") from error
        entries = list(_entries(path, data))
        self.pieces = [piece for piece, _ in entries]
        self.scores = [score for _, score in entries]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        if missing := [byte for byte in range(256) if _byte_piece(byte) not in self.ids]:
            raise UserError(f"{path}: no token for byte {missing[0]}; not a whole llama2.c tokenizer")

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Return the token ids of ``text``; unknown characters become one token per UTF-8 byte. Takes quadratic
        time."""
        tokens: list[int] = []
        # SentencePiece starts every text with a space, so that its first word looks like any other.
        for character in f" {text}" if text else "":
            piece = character.encode()
            tokens += [self.ids[piece]] if piece in self.ids else [self.ids[_byte_piece(byte)] for byte in piece]
        while (best := self._best_pair(tokens)) is not None:
            tokens[best : best + 2] = [self.ids[self.pieces[tokens[best]] + self.pieces[tokens[best + 1]]]]
        return [BOS, *tokens] if bos else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; the space that :meth:`encode` prepends is removed after BOS only."""
        text = b""
        for before, token in zip([None, *tokens], tokens, strict=False):
            piece = b"" if token in (BOS, EOS) else self.pieces[token]
            if len(piece) == 6 and piece.startswith(b"<0x"):
                piece = bytes([int(piece[3:5], 16)])
            text += piece.removeprefix(b" ") if before == BOS else piece
        return text.decode(errors="replace")

    def _best_pair(self, tokens: list[int]) -> int | None:
        unions = (self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in pairwise(tokens))
        scored = [(self.scores[union], -i) for i, union in enumerate(unions) if union is not None]
        return -max(scored)[1] if scored else None


def _byte_piece(byte: int) -> bytes:
    return b"<0x%02X>" % byte


def _entries(path: Path, data: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield (piece, score) of every token: int32 longest piece, then per token float32 score, int32 length, bytes."""
    record = struct.Struct("<fi")
    longest = int.from_bytes(data[:4], "little", signed=True)
    start = 4
    while start < len(data):
        if start + record.size > len(data):
            raise UserError(f"{path}: ends within a token at byte {start}; not a whole llama2.c tokenizer")
        score, length = record.unpack_from(data, start)
        start += record.size
        if not 0 <= length <= min(longest, len(data) - start):
            raise UserError(f"{path}: a token of {length} bytes at byte {start}; not a llama2.c tokenizer")
        yield data[start : start + length], score
        start += length
