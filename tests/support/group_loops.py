"""Loops of several kinds (mixed precision, compiled, accumulated, LoRA, ...), in a group or alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import planaria
from planaria.group.member_state import whole

PATIENCE_S = 140.0
"""for the start of up to seven processes, and for their end"""

SAMPLES, BATCH, WIDTH = 96, 4, 8
Backward = Callable[[Tensor], None]


@dataclass
class Loop:
    """A model and the parts of its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    clip: float = 0.0
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32

    def gradient(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradient of one batch."""
        with self.autocast():
            outputs = self.model(inputs.to(self.dtype))
            loss = nn.functional.mse_loss(outputs.float(), targets) / self.accumulate
        loss.backward()

    def finish(self) -> None:
        """Clip the gradient of a step."""
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def also(self) -> dict[str, Any]:
        return {} if self.scheduler is None else {"scheduler": self.scheduler}


def network() -> nn.Module:
    """Return a network whose names have two levels, with a norm."""
    body = nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
    return nn.Sequential(body, nn.GELU(), nn.Linear(16, 1))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["0.0", "0.3"])
    model: nn.Module = get_peft_model(network(), config)  # type: ignore[arg-type]
    return model


def compiled(inner: bool) -> nn.Module:
    """Return a compiled network, or one with a compiled part."""
    model = network()
    if not inner:
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    model[0] = torch.compile(model[0], backend="aot_eager")  # type: ignore[index, operator]
    return model


def loop_of(kind: str, seed: int = 0, base: int = 0) -> Loop:
    """Return a loop; models of the same ``base`` have the same frozen weights."""
    torch.manual_seed(base if kind == "lora" else seed)
    makes = {"lora": lora, "compiled": partial(compiled, False), "compiled_part": partial(compiled, True)}
    model = makes.get(kind, network)()
    if kind == "bf16_weights":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loop = Loop(model, optimizer)
    if kind == "bf16_weights":
        loop.dtype = torch.bfloat16
    elif kind == "bf16_autocast":
        loop.autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    elif kind == "clipped":
        loop.clip = 0.05
    elif kind == "accumulated":
        loop.accumulate = 3
    elif kind == "scheduled":
        loop.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return loop


def samples() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True).sin()), BATCH)


def member(kind: str, exchange: Mapping[str, Any], address: str, key: Path, result: Path) -> None:
    """Train as one of two members; the first hosts."""
    torch.set_num_threads(1)
    train(loop_of(kind, seed=2 if address else 1), exchange, address, key, result)


def sharded(model: nn.Module) -> nn.Module:
    """Return the model with its parameters sharded over all ranks."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def rank(number: int, exchange: Mapping[str, Any], address: str, key: Path, result: Path, shards: bool = False) -> None:
    """Train as one of the two ranks of a member."""
    torch.set_num_threads(1)
    loop = loop_of("plain", seed=2 if address else 1)
    dist.init_process_group("gloo", f"file://{result.with_suffix('.ranks')}", rank=number, world_size=2)
    if shards:
        sharded(loop.model)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    else:
        loop.model = nn.parallel.DistributedDataParallel(loop.model)
    try:
        train(loop, exchange, address, key, result.with_suffix(f".{number}.pt"))
    except (planaria.UserError, planaria.RunStopped) as error:
        result.with_suffix(f".{number}.error").write_text(str(error))
    dist.destroy_process_group()
    os._exit(0)  # the destructor of gloo's process group may wait forever if the other rank has exited


def once_exists(file: Path, program: Callable[[], None]) -> None:
    """Run ``program`` once ``file`` exists."""
    until = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < until, f"{file} is missing"
        time.sleep(0.05)
    program()


def train(loop: Loop, exchange: Mapping[str, Any], address: str, key: Path, result: Path) -> None:
    """Train a loop in a group of two members, and write its state."""
    if address:
        group = planaria.join(address, key=key)
    else:
        group = planaria.host(key=key, out=result.parent / "runs", members=2)
    optimizer = group.wrap(loop.optimizer, loop.model, also=loop.also(), **exchange)
    for seen, (inputs, targets) in enumerate(group.shard(samples(), accumulate=loop.accumulate), 1):
        loop.gradient(inputs, targets)
        if seen % loop.accumulate == 0:
            loop.finish()
        optimizer.step()
        if loop.scheduler is not None:
            loop.scheduler.step()
        optimizer.zero_grad()
    facts = {"steps": group.steps, "rounds": group.rounds, "progress": group.progress}
    weights = {name: whole(tensor) for name, tensor in loop.model.state_dict().items()}
    torch.save({"facts": facts, "model": weights, "optimizer": loop.optimizer.state_dict()["param_groups"]}, result)


def alone(kind: str, blocks: int = 2) -> dict[str, Tensor]:
    """Return the weights of one loop whose steps use the mean gradient of ``blocks`` blocks."""
    loop = loop_of(kind, seed=1)
    for step in _steps(iter(samples()), loop.accumulate, blocks):
        grads: list[list[Tensor]] = []
        for block in step:
            loop.optimizer.zero_grad()
            for inputs, targets in block:
                loop.gradient(inputs, targets)
            loop.finish()
            grads.append([p.grad.clone() for p in _trained(loop.model)])  # type: ignore[union-attr]
        for parameter, *parts in zip(_trained(loop.model), *grads, strict=True):
            parameter.grad = torch.stack([part.float() for part in parts]).mean(0).to(parameter.dtype)
        loop.optimizer.step()
        if loop.scheduler is not None:
            loop.scheduler.step()
    return loop.model.state_dict()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _steps(batches: Iterator[Any], accumulate: int, blocks: int) -> Iterator[list[list[Any]]]:
    listed = list(batches)
    grouped = [listed[at : at + accumulate] for at in range(0, len(listed), accumulate)]
    yield from (grouped[at : at + blocks] for at in range(0, len(grouped), blocks))
