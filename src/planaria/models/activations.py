"""Memory of a LLaMA stage's passes, by formula.

The terms are the tensors that autograd saves for the backward pass, listed with ``saved_tensors_hooks``;
``python -m benchmarks.gpu memory`` compares the sums with real peaks on a GPU, and tests those on a CPU with
counted passes (``transformers/stage_costs.py``). n tokens of a microbatch, D = ``model.dim``,
h = ``model.hidden``, H and K heads of d channels, V = ``model.vocab``; matrix products have w bytes per number, 2 under
bf16 and 4 otherwise. Residuals and norms are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from planaria.config.schema import ModelConfig
from planaria.models.chunked_loss import EAGER_BYTES, chunk_rows
from planaria.models.llama_layers import matrix_numbers

FP32 = 4


class PassMode(NamedTuple):
    """Mode in which a stage computes a microbatch."""

    samples: int
    """samples of ``model.context`` tokens in a microbatch"""
    device_bytes: int
    """memory of the CUDA device, which decides the chunks of the loss; 0: a CPU"""
    bf16: bool = False
    bf16_weights: bool = False
    compiled: bool = False
    recompute: bool = False
    masked: bool = False
    """whether attention has document masks"""

    @property
    def number_bytes(self) -> int:
        """w: bytes of a number in a matrix product."""
        return 2 if self.bf16 else FP32


class PassBytes(NamedTuple):
    """Bytes that passes take besides weights, gradients and moments."""

    kept: int
    """bytes held by each microbatch from its forward to its backward pass; at the ends, from its embedding"""
    loss: int
    """bytes held by each microbatch from its loss to that loss's backward pass; 0 at block stages"""
    working: int
    """bytes of temporary tensors in the largest pass"""


def layer_bytes(model: ModelConfig, passes: PassMode) -> int:
    """Return the bytes that one decoder layer keeps for its backward pass, without its input.

    n · w · (2h + h + (H + 2K) d + (2H + K) d + 2D) for gate and up, their product, the joint projection of q, k and v,
    rotated q and k, attention's output, and both normed inputs; n · 4 · (2D + H + 2) for residuals, log-sums of
    attention and norms. Eager layers also keep silu(gate), n · w · h. Weights are kept as bf16 copies, unless the stage
    has them, or on a GPU as the joint matrices of one product.
    """
    n, w = passes.samples * model.context, passes.number_bytes
    heads, kv = model.heads * model.head_dim, model.kv * model.head_dim
    numbers = 3 * model.hidden + (heads + 2 * kv) + (2 * heads + kv) + 2 * model.dim
    numbers += 0 if passes.compiled else model.hidden
    joint = model.dim * (heads + 2 * kv + 2 * model.hidden)
    weights = w * joint if passes.device_bytes else 0
    if passes.bf16 and not passes.bf16_weights:
        weights = w * matrix_numbers(model)
    mask = passes.samples * model.context**2 * (1 + w) if passes.masked else 0
    return n * (w * numbers + FP32 * (2 * model.dim + model.heads + 2)) + weights + mask


def block_bytes(model: ModelConfig, layers: int, passes: PassMode) -> PassBytes:
    """Return the bytes of a block stage.

    The gradients of gate and up, n · w · 2h, and of the output are the largest temporaries. With ``recompute`` a
    microbatch keeps the layers' inputs only, and one layer at a time is computed again.
    """
    n, w = passes.samples * model.context, passes.number_bytes
    residual = n * FP32 * model.dim
    working = n * w * 2 * model.hidden + residual
    if passes.recompute:
        return PassBytes(kept=(layers + 1) * residual, loss=0, working=working + layer_bytes(model, passes))
    output = n * model.dim * w if passes.compiled else residual
    return PassBytes(kept=layers * layer_bytes(model, passes) + output, loss=0, working=working)


def ends_bytes(model: ModelConfig, passes: PassMode) -> PassBytes:
    """Return the bytes of the ends: embedding, their own layers, and the loss, whole or in chunks.

    A whole compiled loss keeps the logits, n · w · V. In chunks it keeps the gradients of its input and of the head.
    """
    n = passes.samples * model.context
    w = passes.number_bytes
    vocab = model.vocab
    dim = model.dim
    residual, head = n * FP32 * dim, w * vocab * dim if passes.bf16 else 0
    kept, working = residual, 0
    if model.ends_layers:
        layers = block_bytes(model, model.ends_layers, passes)
        kept, working = kept + layers.kept, layers.working
    rows = chunk_rows(vocab, w, passes.device_bytes, passes.compiled)
    if n > rows:
        each = 2 * w if passes.compiled else EAGER_BYTES
        head = head if passes.device_bytes else FP32 * vocab * dim  # a chunk's gradient
        return PassBytes(kept, 2 * residual + FP32 * vocab * dim, max(working, rows * vocab * each + head))
    if passes.compiled:
        return PassBytes(kept, residual + n * w * dim + n * w * vocab + head, working)
    return PassBytes(kept, residual + n * w * dim + n * FP32 * vocab + head, max(working, n * vocab * (FP32 + w)))
