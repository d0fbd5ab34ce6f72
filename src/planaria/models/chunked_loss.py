"""Cross entropy behind a large head, without all logits in memory.

[N, V] logits in fp32, their softmax and its gradient are the largest tensors of stage 0: 39 GB for 65,536 tokens and a
vocabulary of 49,152. Here a chunk of rows is computed at a time together with its gradients; the backward pass only
scales the gradients, [N, D] and [V, D]. No product is computed twice.

A CPU is fastest while a chunk fits its caches. A GPU wants few large products: each chunk costs a round of kernel
launches and one pass over the gradient of the head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""target that is left out, as in PyTorch's cross entropy"""
CPU_BYTES = 32 << 20
"""bytes of fp32 logits in a chunk on a CPU"""
DEVICE_SHARE = 1 / 16
"""share of a CUDA device's memory for one chunk"""
_EAGER_BYTES = 14
"""extra bytes per logit that limit a chunk that is not compiled: an fp32 copy, log-softmax, softmax, and a mask"""
EAGER_BYTES = 12
"""bytes per logit that such a chunk takes at its peak"""


def head_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of hidden states [N, D] behind the head [V, D] against targets [N]; fp32
    scalar. Targets of -100 are left out.

    If one chunk holds all rows, the logits are computed as a whole.
    """
    rows = rows_on(x.device, len(head), _product_dtype(x).itemsize)
    if len(x) <= rows:
        return F.cross_entropy(F.linear(x, head).float(), targets)
    return cast(Tensor, _ChunkedLoss.apply(x, head, targets, rows))  # type: ignore[no-untyped-call]


def rows_on(device: torch.device, vocab: int, itemsize: int) -> int:
    """Return the number of rows in a chunk of logits of ``itemsize`` bytes on a device."""
    if device.type != "cuda":
        return chunk_rows(vocab, itemsize, 0, False)
    return chunk_rows(vocab, itemsize, _device_bytes(device.index or 0), torch.compiler.is_compiling())


def chunk_rows(vocab: int, itemsize: int, device_bytes: int, compiled: bool) -> int:
    """Return the number of rows in a chunk on a GPU of ``device_bytes``, or on a CPU if that is 0.

    It depends on total, not free, memory: sums must not depend on other processes.
    """
    if not device_bytes:
        return max(1, CPU_BYTES // (4 * vocab))
    each = 2 * itemsize + (0 if compiled else _EAGER_BYTES)
    return max(1, int(DEVICE_SHARE * device_bytes) // (each * vocab))


def _device_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def compile_pass(module: Any, stage: int) -> None:
    """Compile the pass of a block stage, or the norm, head and loss of the ends (stage 0).

    The device's memory is a constant of the compiled code. Set at its definition, the mark would import torch._dynamo
    at every start.
    """
    torch.compiler.assume_constant_result(_device_bytes)  # type: ignore[no-untyped-call]
    if stage:
        module.compile()
    else:
        module.loss = torch.compile(module.loss)


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a product with ``x`` in the current context."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, targets: Tensor, rows: int) -> Tensor:
        kind, product = x.device.type, _product_dtype(x)
        wanted = any(ctx.needs_input_grad[:2])
        matrix = head.to(product)
        total = x.new_zeros((), dtype=torch.float32)
        x_grad, head_grad = (torch.zeros_like(x), torch.zeros_like(head)) if wanted else (x, head)
        count = (targets != IGNORED).sum()
        with torch.autocast(kind, enabled=False):
            for at in range(0, len(x), rows):
                chunk, aims = x[at : at + rows].to(product), targets[at : at + rows]
                logits = F.linear(chunk, matrix).float()
                total += F.cross_entropy(logits, aims, reduction="sum")
                if wanted:
                    # The gradient of a row's cross entropy by its logits is its softmax, less 1 at the target.
                    slopes = logits.softmax(-1)
                    slopes[torch.arange(len(aims), device=x.device), aims.clamp(min=0)] -= 1
                    slopes, kept = slopes.div_(count).to(product), (aims != IGNORED)[:, None]
                    x_grad[at : at + rows] = slopes @ matrix * kept
                    head_grad += slopes.T @ (chunk * kept)
        if wanted:
            ctx.save_for_backward(x_grad, head_grad)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (scale,) = grads
        x_grad, head_grad = ctx.saved_tensors
        return x_grad * scale, head_grad * scale, None, None
