"""Stages of a decoder of ``transformers``: block stages with consecutive decoder layers, and the ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from planaria.common.errors import UserError
from planaria.models.chunked_loss import IGNORED
from planaria.models.tied_head import TiedHead
from planaria.models.transformers.skeleton import (
    AbsentLayer,
    AbsentModule,
    EndsLayer,
    LastLayerReached,
    OwnLayer,
    Passage,
    decoder_layers,
    skeleton,
)

LOGIT_BYTES = 1 << 28
"""largest logits of one chunk of the loss, in fp32"""
_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class ModelFrame:
    """The library's whole model on "meta", cut for one stage."""

    def __init__(
        self,
        config: Any,
        attention: str,
        location: str,
        in_tuple: int,
        buffers: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``in_tuple``: size of the tuple that decoder layers return, or 0; ``buffers``: whether they have memory.

        ``dtype``: of weights and of hidden states inside; a stage takes and returns fp32.
        """
        self.config = config
        self.model = skeleton(config, attention, location, buffers, dtype)
        self.dtype = dtype
        self.path, self.layers = decoder_layers(self.model, config, location)
        self.in_tuple, self.passage = in_tuple, Passage()

    def outside(self) -> list[tuple[str, nn.Module]]:
        """Return all modules outside of the decoder layers that have parameters or buffers of their own."""
        inside = f"{self.path}."
        return [
            (name, module)
            for name, module in self.model.named_modules()
            if not name.startswith(inside)
            and (any(True for _ in module.parameters(False)) or any(True for _ in module.buffers(False)))
        ]

    def call(self, module: nn.Module, **inputs: Any) -> Any:
        """Run a forward pass of the library; return its output, or the hidden states at which it ended."""
        try:
            return module(use_cache=False, **inputs)
        except LastLayerReached as reached:
            return reached.hidden
        finally:
            self.passage.given, self.passage.stop_at = None, -1

    def blank(self, x: Tensor) -> Tensor:
        """Return input embeddings of the shape that belongs to hidden states ``x``; they are not used."""
        width = self.model.get_input_embeddings().embedding_dim  # type: ignore[operator]
        return x.new_zeros((), dtype=self.dtype).expand(*x.shape[:2], width)

    def documents(self, mask: Tensor | None) -> dict[str, Any]:
        """Return position ids and attention masks for the documents in ``mask`` [B, 1, T, T]; empty without a mask.

        Position ids [B, T] restart in every document; the library's own attention masks are by type of layer. Many
        models derive the same masks from the position ids alone; others ignore the ids.
        """
        if mask is None:
            return {}
        from transformers.masking_utils import create_masks_for_generate

        ids = mask.sum(-1).squeeze(1) - 1
        like = mask.new_zeros((), dtype=self.dtype).expand(*ids.shape, 1)
        masks: Any = create_masks_for_generate(self.model.config, like, None, None, ids)  # type: ignore[arg-type]
        return {"position_ids": ids, "attention_mask": masks}


class _Stage(nn.Module, ABC):
    """Common part of block stages and of the ends."""

    layers: nn.ModuleList

    def __init__(self, frame: ModelFrame) -> None:
        super().__init__()
        self._frames = (frame,)  # in a tuple: its modules are not registered

    @property
    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """Modules that are initialised one by one: those around the layers, then each layer."""

    @property
    def frame(self) -> ModelFrame:
        return self._frames[0]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each own decoder layer."""
        for layer in self.layers:
            layer.compile(*args, **kwargs)

    @property
    def recompute(self) -> bool:
        """Whether activations within layers are computed again in the backward pass."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        for layer in self.layers:
            if wanted and not hasattr(layer, "gradient_checkpointing"):
                raise UserError(
                    f"train.recompute: layers of model_type = {self.frame.config.model_type!r} cannot be recomputed; "
                    "remove it"
                )
            layer.gradient_checkpointing = wanted  # type: ignore[assignment]
            layer._gradient_checkpointing_func = _recomputed  # type: ignore[assignment]


class TransformersBlock(_Stage):
    """Consecutive decoder layers, named ``layers.0``, ``layers.1``, … in every stage."""

    def __init__(self, frame: ModelFrame, numbers: range) -> None:
        super().__init__(frame)
        whole, passage = frame.layers, frame.passage
        self.layers = nn.ModuleList(whole[number] for number in numbers)
        self.around = nn.ModuleList()
        for number, layer in enumerate(whole):
            if number in numbers:
                first, last = number == numbers[0], number == numbers[-1]
                whole[number] = OwnLayer(layer, number, passage, frame.in_tuple, first, last)
            else:
                whole[number] = AbsentLayer(layer, number, passage, frame.in_tuple)
        for name, module in frame.outside():
            if any(True for _ in module.parameters(False)):
                if not any(True for _ in module.children()) and name:
                    _replace(frame.model, name, AbsentModule(module))
            else:
                self.around.append(module)

    @property
    def parts(self) -> list[nn.Module]:
        return [self.around, *self.layers]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map hidden states [B, T, D] to [B, T, D]; ``mask`` bool [B, 1, T, T]: whether a token attends to another."""
        frame = self.frame
        document_inputs = frame.documents(mask)
        frame.passage.given = x
        out: Tensor = frame.call(frame.model.base_model, inputs_embeds=frame.blank(x), **document_inputs)  # type: ignore[arg-type]
        return out.float()


class TransformersEnds(TiedHead, _Stage):
    """All modules outside of decoder layers: embeddings, final norm, head; and the first ``ends_layers`` layers.

    The gradients of a tied table are summed separately (:mod:`planaria.models.tied_head`).
    """

    def __init__(self, frame: ModelFrame, own: int) -> None:
        super().__init__(frame)
        whole, passage = frame.layers, frame.passage
        self.own = own
        for number, layer in enumerate(whole):
            kind = EndsLayer if number < own else AbsentLayer
            whole[number] = kind(layer, number, passage, frame.in_tuple)
        self.layers = nn.ModuleList(module._layer[0] for module in whole if isinstance(module, EndsLayer))
        self.whole = frame.model
        self.keep_tied()

    @property
    def parts(self) -> list[nn.Module]:
        return [self.whole, *self.layers]

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, D] before the first block stage."""
        document_inputs = self.frame.documents(mask)
        self.frame.passage.stop_at = self.own
        out: Tensor = self.frame.call(self.whole, input_ids=tokens, **document_inputs)
        return out.float()

    def logits(self, x: Tensor) -> Tensor:
        """Map hidden states [B, T, D] to logits [B, T, V], with the model's own norm, head and scaling."""
        frame = self.frame
        frame.passage.given = x
        out: Tensor = frame.call(self.whole, inputs_embeds=frame.blank(x)).logits
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of hidden states [B, T, D] against the next tokens [B, T]; a scalar.
        Targets of -100 are left out.

        Large logits are computed in chunks of rows, and again in the backward pass.
        """
        rows, targets = x.flatten(0, 1), targets.flatten()
        most = max(1, LOGIT_BYTES // (4 * int(self.frame.config.vocab_size)))
        if len(rows) <= most:
            return self._cross_entropy_sum(x, targets) / (targets != IGNORED).sum()
        sums = [
            _recomputed(self._cross_entropy_sum, chunk[None], wanted)
            for chunk, wanted in zip(torch.split(rows, most), torch.split(targets, most), strict=True)
        ]
        return torch.stack(sums).sum() / (targets != IGNORED).sum()

    def _cross_entropy_sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets, reduction="sum")

    @property
    def table(self) -> Tensor:
        return cast(Tensor, cast(Any, self.whole).get_input_embeddings().weight)

    def _tie(self) -> None:
        head = cast(Any, self.whole).get_output_embeddings()
        if head is None or (self.head_alias is None and head.weight is not self.table):
            return
        head._parameters.pop("weight", None)
        self.head_alias = self.alias()
        head.weight = self.head_alias


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def build(frame: ModelFrame, numbers: range, stage: int) -> TransformersBlock | TransformersEnds:
    """Build the ends (stage 0) or a block stage with the layers ``numbers``; its parameters have no memory."""
    return TransformersBlock(frame, numbers) if stage else TransformersEnds(frame, len(numbers))
