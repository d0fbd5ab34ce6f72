"""The loop that one would write for one GPU without planaria: the whole model compiled, fused matrices, fused AdamW.

It shares the stream of samples with the engine that it is measured beside, and nothing else. Shapes, microbatches,
precision and clipping are the recipe's; the three projections of attention are one matrix, and so are the two that
SwiGLU reads; the loss is taken from all logits at once; one norm over all gradients clips them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.config.schema import ModelConfig, RunConfig
from planaria.data.stream import Stream


class Block(nn.Module):
    """A decoder layer with two fused input matrices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.width, self.hidden = config.heads, config.kv, config.head_dim, config.hidden
        self.gains = nn.Parameter(torch.ones(2, config.dim))
        self.qkv = nn.Parameter(torch.randn((self.heads + 2 * self.kv) * self.width, config.dim) * config.init_std)
        self.out = nn.Parameter(torch.randn(config.dim, self.heads * self.width) * config.init_std)
        self.gate_up = nn.Parameter(torch.randn(2 * self.hidden, config.dim) * config.init_std)
        self.down = nn.Parameter(torch.randn(config.dim, self.hidden) * config.init_std)
        self.eps = config.norm_eps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]; tables [T, d / 2]."""
        batch, length, dim = x.shape
        mixed = F.linear(F.rms_norm(x, (dim,), self.gains[0], self.eps), self.qkv)
        q, k, v = mixed.view(batch, length, -1, self.width).split([self.heads, self.kv, self.kv], 2)
        q, k, v = (one.transpose(1, 2) for one in (turned(q, cos, sin), turned(k, cos, sin), v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv < self.heads)
        x = x + F.linear(seen.transpose(1, 2).reshape(batch, length, -1), self.out)
        gate, up = F.linear(F.rms_norm(x, (dim,), self.gains[1], self.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Model(nn.Module):
    """Token ids and targets [B, T] → mean cross entropy in nats."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.gain = nn.Parameter(torch.ones(config.dim))
        self.head = nn.Parameter(torch.randn(config.vocab, config.dim) * config.init_std)
        nn.init.normal_(self.table.weight, std=config.init_std)
        rates = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.context)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.eps = config.norm_eps

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(F.rms_norm(x, (x.shape[-1],), self.gain, self.eps), self.head)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, d] with channels j and j + d / 2 turned by their position's angles."""
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class PlainGpuLoop:
    """One update at a time of a recipe's model, from the samples that planaria would take."""

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.config, self.stream, self.step = config, stream, 0
        with torch.device(config.train.device):
            self.model = Model(config.model)
        self._loss = torch.compile(self.model)
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def train_step(self) -> float:
        """One update; the mean loss of its microbatches in nats."""
        pipeline, device = self.config.pipeline, self.config.train.device
        total = torch.zeros((), device=device)
        for microbatch in range(pipeline.microbatches):
            first = self.step * pipeline.samples + microbatch * pipeline.microbatch_size
            given = self.stream.batch(first, pipeline.microbatch_size)
            tokens, targets = (one.pin_memory().to(device, non_blocking=True) for one in given)
            with torch.autocast(device, torch.bfloat16, enabled=self.config.train.precision == "bf16"):
                loss = self._loss(tokens, targets) / pipeline.microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return float(total)
