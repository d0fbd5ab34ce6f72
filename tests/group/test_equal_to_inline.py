"""Members of a group compute what replicas of the reference engine compute, on the same model, samples and rates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import planaria
from planaria.config.schema import RunConfig
from planaria.data.stream import Stream
from planaria.models.families import build_stage
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.joining import read_run_address
from planaria.runtime.fleet.spawner import spawner
from support.tiny_recipe import written

STEPS = 200
LR, DECAY = 2e-3, 0.1


class Whole(nn.Module):
    """All stages of a recipe's model in one module."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        stages = config.pipeline.stages
        self.stages = nn.ModuleList(build_stage(config.model, stages, s, config.seed) for s in range(stages + 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        ends, *blocks = self.stages
        x = ends.embed(tokens)  # type: ignore[operator]
        for block in blocks:
            x = block(x)
        loss: Tensor = ends.loss(x, targets)  # type: ignore[operator]
        return loss


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The samples of a stream, by number."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self._stream.batch(number, 1)
        return tokens[0], targets[0]


def member(config: RunConfig, exchange: Mapping[str, Any], address: str, key: Path, result: Path) -> None:
    """Train as one of two members; the first hosts."""
    torch.set_num_threads(1)
    model, size = Whole(config), config.pipeline.microbatch_size
    data = Windows(planaria.streams(config)[0], 2 * STEPS * size)
    original = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    if address:
        group = planaria.join(address, key=key, seed=config.seed)
    else:
        group = planaria.host(key=key, out=result.parent / "groups", members=2, seed=config.seed)
    optimizer = group.wrap(original, model, **exchange)
    for tokens, targets in group.shard(DataLoader(data, size)):
        model(tokens, targets).backward()
        model.stages[0].fold_gradients()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), result)


CASES = [
    ("noloco", {"every": 5}),
    ("diloco", {"every": 5}),
    ("allreduce", {}),
    pytest.param("eager", {"every": 5}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_two_hundred_steps_are_equal(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {
        "pipeline.stages": 1, "pipeline.microbatches": 1, "pipeline.microbatch_size": 2, "pipeline.wire": "fp32",
        "model.layers": 1, "train.steps": STEPS, "train.eval_every": 0, "exchange.replicas": 2, "exchange.kind": kind,
        "exchange.options": options, "optim.lr": LR, "optim.schedule": "constant", "optim.warmup": 0, "optim.clip": 0.0,
        "optim.weight_decay": DECAY, "chaos.trace": None, "recovery.strategy": "checkpoint", "prompt": "",
    }  # fmt: skip
    config = planaria.configure(written(tmp_path), settings=settings)
    train, _ = planaria.streams(config)
    engine = planaria.ReferenceEngine(config, train)
    for _ in range(STEPS):
        engine.train_step()
    exchange, key = {"exchange": kind, **options}, tmp_path / "key"
    preload = [*PRELOAD, "planaria.group.group"]
    results = [tmp_path / "0.pt", tmp_path / "1.pt"]
    first = spawner().spawn("member", partial(member, config, exchange, "", key, results[0]), preload)
    until = time.monotonic() + 90
    while not (folder := tmp_path / "groups" / "group").joinpath("address.json").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    other = spawner().spawn(
        "member", partial(member, config, exchange, read_run_address(folder).at, key, results[1]), preload
    )
    try:
        assert (first.join(180), other.join(180)) == (0, 0)
    finally:
        first.kill(1.0)
        other.kill(1.0)
    for number, result in enumerate(results):
        own = torch.load(result)
        for stage in (0, 1):
            expected = engine.runners[2 * number + stage].state().weights
            for name, tensor in expected.items():
                torch.testing.assert_close(own[f"stages.{stage}.{name}"], tensor, atol=0, rtol=0)
