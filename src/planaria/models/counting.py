"""Memory and work of a stage's passes, counted on fake tensors: the operations of a real pass without its numbers.

A fake tensor (``torch._subclasses``) has a shape, a type and a device, and takes no memory, so a pass of any size is
counted in about a second. Counted are eager passes on a CPU; kernels of a GPU save the same tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planaria.models.activations import PassBytes, PassMode


class Count(NamedTuple):
    """A stage's forward and backward pass of one microbatch."""

    bytes: PassBytes
    work: float
    """FLOPs of matrix products and attention"""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the memory of tensors that operations create, while it is in use, and FLOPs."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        """:param existing: tensors that existed before, which are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.flops = 0.0
        self._seen = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = func is torch.ops.aten._grouped_mm.default
        out = _grouped_product_shape(*args, **(kwargs or {})) if grouped else func(*args, **(kwargs or {}))
        if grouped:  # every row of the first matrix meets one matrix
            self.flops += 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for leave in tree_leaves(out):
            if isinstance(leave, Tensor):
                self._add(leave.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def _grouped_product_shape(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the result's shape of a grouped product; PyTorch's own rule accepts bf16 only."""
    assert offs is not None
    shape = (len(offs), a.shape[0], b.shape[1]) if a.ndim == b.ndim == 2 else (a.shape[0], b.shape[-1])
    return a.new_empty(shape)


def count(built: nn.Module, ends: bool, width: int, context: int, passes: PassMode) -> Count:
    """Count the passes of a stage of shapes [samples, ``context``, ``width``].

    ``built``: a stage on "meta", which is not usable afterwards. Gradients exist already, as from the second microbatch
    on.

    :raises RuntimeError: or what else the stage raises, if an operation cannot be counted.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        built.to_empty(device="cpu")
        trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        existing = (
            *built.parameters(),
            *built.buffers(),
            *(parameter.grad for parameter in trained if parameter.grad is not None),
        )
        shape = passes.samples, context
        mask = [torch.ones(passes.samples, 1, context, context, dtype=torch.bool)] if passes.masked else []
        precision = torch.autocast("cpu", torch.bfloat16) if passes.bf16 else nullcontext()
        with _Counter((*existing, *mask)) as counter, precision:
            if not ends:
                return _count_passes(counter, lambda: built(_empty_input(*shape, width), *mask))
            tokens: Tensor = torch.zeros(shape, dtype=torch.long)
            embedding = _count_passes(counter, lambda: built.embed(tokens, *mask))  # type: ignore[operator]
            head = _count_passes(counter, lambda: built.loss(_empty_input(*shape, width), tokens))  # type: ignore[operator]
    working = max(embedding.bytes.working, head.bytes.working)
    return Count(PassBytes(embedding.bytes.kept, head.bytes.kept, working), embedding.work + head.work)


def _empty_input(*shape: int) -> Tensor:
    return torch.empty(shape, requires_grad=True)


def _count_passes(counter: _Counter, forward: Callable[[], Tensor]) -> Count:
    """Count one pass and its backward pass; ``kept`` is what the first leaves for the second."""
    before, flops = counter.bytes, counter.flops
    counter.peak = before
    out = forward()
    kept = counter.bytes - before
    if out.requires_grad:
        torch.autograd.backward(out, torch.empty_like(out))
    return Count(PassBytes(kept, 0, counter.peak - before - kept), counter.flops - flops)
