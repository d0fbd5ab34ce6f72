"""A LLaMA whose stages send learned projections of hidden states: a family of models that is no part of planaria.

A stage sends y = A x, r numbers per token, and its receiver computes with B y. A [r, D] and B [D, r] are parameters of
their stages, so autograd gives all gradients and nothing else is sent. MAPL (arXiv 2606.05484) has one orthonormal
matrix for both sides of a boundary instead, and adds anchors by token id.

    planaria train demo --allow-code --model.family benchmarks.learned_projection:ProjectedLlama --pipeline.wire 8/4
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.config.schema import ModelConfig
from planaria.models.llama_layers import Linear
from planaria.models.llama_stages import BlockStage, LlamaEnds, LlamaFamily, stage_layers

PROJECTIONS = ("received", "sent")


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


class ProjectedBlock(BlockStage):
    """Decoder layers between the projections ``received`` and ``sent``."""

    received: Projection
    sent: Projection

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, r] → [B, T, r]."""
        return self.sent(super().forward(self.received(x), mask))


class ProjectedEnds(LlamaEnds):
    """The ends, which send embeddings and receive the last hidden states."""

    received: Projection
    sent: Projection

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.sent(super().embed(tokens, mask))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.received(x)
        return hidden.sum() if x.is_meta else super().loss(hidden, targets)  # the loss does not run on shapes alone


class ProjectedLlama(LlamaFamily):
    """LLaMA decoders with ``rank`` numbers per token between stages."""

    has_global_names: ClassVar[bool] = False
    completes_texts: ClassVar[bool] = False
    supports_subspaces: ClassVar[bool] = False
    rank: Annotated[int, Field(gt=0)] = 32
    rate: Annotated[float, Field(gt=0)] = 0.01
    """learning rate of projections, as a part of that of other weights"""

    def boundary_width(self, config: ModelConfig) -> int:
        return self.rank

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        built: ProjectedEnds | ProjectedBlock = ProjectedEnds(config)
        if stage:
            built = ProjectedBlock(config, stage_layers(config, stages, stage))
        built.received = Projection(self.rank, config.dim, self.rate)
        built.sent = Projection(config.dim, self.rank, self.rate)
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
