"""Members of a group in separate processes: their training, and their results for the test."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import planaria
from planaria.runtime.engine.run_fleet import PRELOAD
from planaria.runtime.fleet.spawner import spawner

SAMPLES = 240
_PRELOAD = [*PRELOAD, "planaria.group.group"]


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Random samples that a small network can learn; each contains its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 3, 4, 4, generator=generator)
        self.targets = self.inputs.mean((1, 2, 3), keepdim=False).unsqueeze(1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        return number, self.inputs[number], self.targets[number]


def residual(width: int = 4) -> nn.Module:
    """Return a small convolutional network with a shortcut and batch statistics."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, width, 1, bias=False), nn.BatchNorm2d(width)
            self.block, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Linear(width, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.norm(self.stem(x)))
            x = x + torch.relu(self.block(x))
            out: Tensor = self.head(x.mean((2, 3)))
            return out

    return Residual()


@dataclass
class Spec:
    """Train as one member."""

    seed: int
    address: str = ""
    """of the group; empty: it hosts"""
    exchange: dict[str, Any] = field(default_factory=lambda: {"exchange": "noloco", "every": 3})
    hosting: dict[str, Any] = field(default_factory=dict)
    joining: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    accumulate: int = 1
    width: int = 4
    batch: int = 6
    pause_s: float = 0.01
    dies_after: int = 0
    """batches after which it is killed"""
    leaves_after: int = 0
    breaks_after: int = 0
    """batches after which its weights are not finite"""


def train(spec: Spec, result: Path, key: Path) -> None:
    """Train as a member, and write used samples, steps and weights to ``result``."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    model = residual(spec.width)
    original = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Numbered(), spec.batch, shuffle=True)
    used: list[list[int]] = []
    try:
        group = (
            planaria.join(spec.address, key=key, **spec.joining)
            if spec.address
            else planaria.host(key=key, out=result.parent / "runs", **spec.hosting)
        )
        optimizer = group.wrap(original, model, **spec.exchange)
        for numbers, inputs, targets in group.shard(loader, epochs=spec.epochs, accumulate=spec.accumulate):
            if len(used) == 0 and not spec.address:
                result.with_suffix(".address").write_text(group.address)
            loss = nn.functional.mse_loss(model(inputs), targets) / spec.accumulate
            loss.backward()
            used.append(numbers.tolist())
            _note(result, used)
            group.log(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(spec.pause_s)
            if spec.dies_after and len(used) >= spec.dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if spec.breaks_after and len(used) == spec.breaks_after:
                model.head.weight.data.fill_(torch.nan)  # type: ignore[union-attr, operator]
            if spec.leaves_after and len(used) >= spec.leaves_after:
                break
        group.leave()
    except (planaria.UserError, planaria.RunStopped) as error:
        result.with_suffix(".error").write_text(str(error))
        return
    facts = {"steps": group.steps, "rounds": group.rounds, "folder": str(group.folder)}
    torch.save({**{n: t.clone() for n, t in model.state_dict().items()}}, result.with_suffix(".pt"))
    result.with_suffix(".done").write_text(json.dumps(facts))


def _note(result: Path, used: list[list[int]]) -> None:
    unfinished = result.with_suffix(".writing")
    unfinished.write_text(json.dumps(used))
    unfinished.replace(result)


class Members:
    """The processes of one group."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._children = folder, []
        self.key = folder / "key"

    def start(self, spec: Spec) -> int:
        """Start a member and return its number."""
        number = len(self._children)
        run = partial(train, spec, self._result(number), self.key)
        self._children.append(spawner().spawn("member", run, _PRELOAD))
        return number

    def host(self, spec: Spec, patience_s: float = 90.0) -> str:
        """Start the first member, and return the group's address once it trains."""
        self.start(spec)
        return self.address(patience_s)

    def address(self, patience_s: float = 90.0) -> str:
        file, until = self._result(0).with_suffix(".address"), time.monotonic() + patience_s
        while not file.exists() or not file.read_text():
            assert time.monotonic() < until, self.error(0) or "the host did not begin"
            time.sleep(0.05)
        return file.read_text()

    def wait(self, patience_s: float = 120.0) -> None:
        """Wait until all have ended."""
        for child in self._children:
            assert child.join(patience_s) is not None, "a member hangs"

    def close(self) -> None:
        for child in self._children:
            child.kill(5.0)

    def used(self, number: int) -> Sequence[Sequence[int]]:
        """Return the samples of a member's batches, also of one that was killed."""
        file = self._result(number)
        return json.loads(file.read_text()) if file.exists() else []

    def weights(self, number: int) -> dict[str, Tensor]:
        return torch.load(self._result(number).with_suffix(".pt"))

    def facts(self, number: int) -> dict[str, Any]:
        return json.loads(self._result(number).with_suffix(".done").read_text())

    def error(self, number: int) -> str:
        file = self._result(number).with_suffix(".error")
        return file.read_text() if file.exists() else ""

    @property
    def run(self) -> planaria.Run:
        """The group's run, once its controller has ended."""
        folder = self.folder / "runs" / "group"
        until = time.monotonic() + 90
        while not (folder / "report.html").exists():
            assert time.monotonic() < until, "the controller did not end"
            time.sleep(0.05)
        return planaria.load(folder)

    def _result(self, number: int) -> Path:
        return self.folder / f"member-{number}"
