"""A model family of your own: recurrent instead of attention, trained by the same pipeline.

    cd examples
    planaria train demo --allow-code --model.family own_family:Recurrent --model.options.width 192

Kill any worker on the way (`planaria run chaos runs/demo --kill stage=2`): the stage is rebuilt like any other.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.config.schema import ModelConfig
from planaria.models.family import Family


class Block(nn.Module):
    """Hidden states [B, T, D] → [B, T, D]: normalised, through a GRU, added to what came in."""

    def __init__(self, dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.cells = nn.ModuleList(nn.GRU(dim, width, batch_first=True) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(width, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, cell, out in zip(self.norms, self.cells, self.outs, strict=True):
            x = x + out(cell(norm(x))[0])
        return x


class Ends(nn.Module):
    """Embeds tokens where a route starts; takes the loss where it returns."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(vocab, dim), nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Recurrent(Family):
    """GRU layers; ``width`` is that of their states."""

    width: int = Field(128, gt=0)

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> nn.Module:
        if stage == 0:
            return Ends(config.vocab, config.dim)
        return Block(config.dim, self.width, config.layers // stages)
