"""A LLaMA whose stages send learned projections of hidden states: a family of models that is no part of planaria.

A stage sends y = A x, r numbers per token, and its receiver computes with B y. A [r, D] and B [D, r] are parameters of
their stages, so autograd gives all gradients and nothing else is sent. With ``anchors``, y = A (x − F[id]) and the
receiver computes with F[id] + B y; F is fixed, the embedding starts as F, and an id takes two further numbers, which
are exact in bfloat16 and in ``benchmarks.wire_codecs:AnchoredGroups``. MAPL (arXiv 2606.05484) has one orthonormal
matrix for both sides of a boundary instead, and learned anchors.

    planaria train demo --allow-code --model.family benchmarks.learned_projection:ProjectedLlama --pipeline.wire 8/4
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import Linear
from planaria.models.llama_stages import BlockStage, LlamaEnds, LlamaFamily, stage_layers
from planaria.models.subspace import Subspace, offsets

PROJECTIONS = ("received", "sent")
ANCHOR_SEED = 0
ID_DIGITS, BASE = 2, 256
"""numbers that carry a token id, and values of each"""


class Anchors(NamedTuple):
    """F [V, D] ~ N(0, 1), the same at all stages; and token ids as numbers beside those of a projection."""

    space: Subspace

    def of(self, ids: Tensor) -> Tensor:
        """Return F[id] of ids [B, T]: [B, T, D]."""
        return offsets(self.space, ids.device)[ids]

    @staticmethod
    def join(y: Tensor, ids: Tensor) -> Tensor:
        """Return y [B, T, r] and the digits of ids [B, T]: [B, T, r + 2]."""
        return torch.cat([y, torch.stack([ids // BASE, ids % BASE], -1).to(y)], -1)

    @staticmethod
    def split(message: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`join` joined."""
        high, low = message[..., -ID_DIGITS:].detach().long().unbind(-1)
        return message[..., :-ID_DIGITS], BASE * high + low


class Projection(Linear):
    """A matrix that learns at ``rate`` of the learning rate, since ``weight`` is stored divided by it."""

    def __init__(self, inputs: int, outputs: int, rate: float) -> None:
        super().__init__(inputs, outputs)
        self.rate = rate

    def begin(self) -> None:
        """Start as the first channels: rotated channels round worse, as the largest ones' errors reach all."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(*self.weight.shape) / self.rate)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rate * self.weight)


class Projected(nn.Module):
    """A stage between the projections ``received`` and ``sent``."""

    received: Projection
    sent: Projection
    anchors: Anchors | None = None

    def receive(self, message: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, T, D] and, with anchors, token ids [B, T]."""
        if self.anchors is None:
            return self.received(message), None
        y, ids = self.anchors.split(message)
        return self.received(y) + (0 if y.is_meta else self.anchors.of(ids)), ids

    def send(self, x: Tensor, ids: Tensor | None) -> Tensor:
        if self.anchors is None or ids is None:
            return self.sent(x)
        return self.anchors.join(self.sent(x if x.is_meta else x - self.anchors.of(ids)), ids)


class ProjectedBlock(Projected, BlockStage):
    """Decoder layers."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Messages → messages."""
        hidden, ids = self.receive(x)
        return self.send(super().forward(hidden, mask), ids)


class ProjectedEnds(Projected, LlamaEnds):
    """The ends, which send embeddings and receive the last hidden states."""

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.send(super().embed(tokens, mask), tokens)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.receive(x)
        return hidden.sum() if x.is_meta else super().loss(hidden, targets)  # the loss does not run on shapes alone


class ProjectedLlama(LlamaFamily):
    """LLaMA decoders with ``rank`` numbers per token between stages."""

    has_global_names: ClassVar[bool] = False
    completes_texts: ClassVar[bool] = False
    supports_subspaces: ClassVar[bool] = False
    rank: Annotated[int, Field(gt=0)] = 32
    rate: Annotated[float, Field(gt=0)] = 0.01
    """learning rate of projections, as a part of that of other weights"""
    anchors: bool = False
    """send hidden states relative to a fixed table, and token ids in two numbers, which few bits do not hold"""

    def boundary_width(self, config: ModelConfig) -> int:
        return self.rank + (ID_DIGITS if self.anchors else 0)

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        built: ProjectedEnds | ProjectedBlock = ProjectedEnds(config)
        if stage:
            built = ProjectedBlock(config, stage_layers(config, stages, stage))
        built.received = Projection(self.rank, config.dim, self.rate)
        built.sent = Projection(config.dim, self.rank, self.rate)
        built.anchors = Anchors(Subspace(config.vocab, config.dim, self.rank, ANCHOR_SEED)) if self.anchors else None
        return built

    def parameter_counts(self, config: ModelConfig, stages: int, stage: int) -> tuple[int, int, int]:
        trained, frozen, fixed = super().parameter_counts(config, stages, stage)
        return trained + 2 * self.rank * config.dim, frozen, fixed

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        projections = {name: built._modules.pop(name) for name in PROJECTIONS}
        super().initialise(built, config, stages, stage, seed)
        built._modules |= projections
        for projection in projections.values():
            assert isinstance(projection, Projection)
            projection.begin()
        if isinstance(built, ProjectedEnds) and built.anchors is not None:
            with torch.no_grad():
                built.embed_tokens.weight.copy_(offsets(built.anchors.space, built.embed_tokens.weight.device))
