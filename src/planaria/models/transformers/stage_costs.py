"""Memory and work of a decoder's stages: one layer of each kind is counted, and stages are sums of layers.

Passes are counted on fake tensors (``torch._subclasses``), which have a shape, a type and a device, and take no memory.
So a pass of any size is counted in about a second. Counted are eager passes on a CPU; kernels of a GPU save the same
tensors.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, PassMode
from planaria.models.bf16_weights import Bf16Weights
from planaria.models.llama_stages import stage_layers
from planaria.models.transformers.decoder import Decoder

log = logging.getLogger(__name__)
_PLAIN = PassMode(samples=1, device_bytes=0)


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
        masters = [*built.parameters()]
        Bf16Weights(built, wanted=passes.bf16_weights)
        trained = [parameter for parameter in masters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        existing = (
            *masters,
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


def pass_bytes(decoder: Decoder, model: ModelConfig, stages: int, stage: int, passes: PassMode) -> PassBytes | None:
    """Return the memory of a stage's passes, or None if one of its layers cannot be counted.

    Memory that layers share, such as rotary tables, counts for each of them.
    """
    counts = [_count_layer(decoder, model, number, passes) for number in stage_layers(model, stages, stage)]
    if stage == 0:
        counts.append(_count_ends(decoder, model, passes))
    passes_of = [layer.bytes for layer in counts if layer is not None]
    if len(passes_of) < len(counts):
        return None
    kept = sum(layer.kept for layer in passes_of)
    working = max(layer.working for layer in passes_of)
    if passes.recompute and stage:  # one layer at a time keeps its tensors, in its backward pass
        alone = [
            _count_layer(decoder, model, n, passes._replace(recompute=False))
            for n in stage_layers(model, stages, stage)
        ]
        working = max(working, *(layer.bytes.kept + layer.bytes.working for layer in alone if layer is not None))
    return PassBytes(kept, passes_of[-1].loss if stage == 0 else 0, working)


def layer_work(decoder: Decoder, model: ModelConfig) -> tuple[float, ...]:
    """Return the FLOPs of each layer's passes of one sample; their parameters where these cannot be counted."""
    counts = [_count_layer(decoder, model, number, _PLAIN) for number in range(model.layers)]
    if any(layer is None for layer in counts):
        return tuple(map(float, layer_parameters(decoder, model)))
    return tuple(layer.work for layer in counts if layer is not None)


def layer_parameters(decoder: Decoder, model: ModelConfig) -> tuple[int, ...]:
    """Return the number of parameters of each layer, frozen ones included."""
    kinds = decoder.facts.kinds
    alone = _one_layer_stages(decoder, model)
    return tuple(_layer_size(decoder, kinds.index(kinds[number]), alone) for number in range(model.layers))


def _one_layer_stages(decoder: Decoder, model: ModelConfig) -> ModelConfig:
    """Return the whole model with one layer in each stage."""
    return model.model_copy(update={"layers": decoder.facts.layers, "ends_layers": 0, "block_layers": None})


@lru_cache(maxsize=256)
def _layer_size(decoder: Decoder, number: int, alone: ModelConfig) -> int:
    with torch.device("meta"):
        built = decoder.build(alone, alone.layers, number + 1)
    frozen = built.layers.buffers() if decoder.lora is not None else ()
    return sum(tensor.numel() for tensor in (*built.layers.parameters(), *frozen))


def _count_layer(decoder: Decoder, model: ModelConfig, number: int, passes: PassMode) -> Count | None:
    kinds = decoder.facts.kinds
    return _count_stage(decoder, _one_layer_stages(decoder, model), kinds.index(kinds[number]) + 1, passes)


def _count_ends(decoder: Decoder, model: ModelConfig, passes: PassMode) -> Count | None:
    return _count_stage(decoder, _one_layer_stages(decoder, model), 0, passes)


@lru_cache(maxsize=256)
def _count_stage(decoder: Decoder, alone: ModelConfig, stage: int, passes: PassMode) -> Count | None:
    """Count a stage of one layer, or the ends without layers; return None if an operation cannot be counted."""
    try:
        with torch.device("meta"):
            built = decoder.build(alone, alone.layers, stage)
        built.recompute = passes.recompute and stage > 0
        with suppress(ValueError):  # of a model without experts
            built.frame.model.set_experts_implementation("grouped_mm")  # type: ignore[operator]  # as in training
        return count(built, stage == 0, decoder.facts.width, alone.context, passes)
    except Exception as error:  # the library may raise anything
        log.debug("stage %d of %s cannot be counted: %s", stage, decoder.config.model_type, error)
        return None
