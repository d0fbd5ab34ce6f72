"""Groups of programs with loops of their own: what ``wrap`` costs a loop, and one member of ``benchmarks.field``.

The member's loop is that of torchft's arm, with ``planaria.host`` or ``planaria.join``, ``wrap`` and ``shard`` around
it: gradients are averaged in every step, and the blocks of absent members are computed by the others.
"""

from __future__ import annotations

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

import planaria
from benchmarks.field_peer import Job, Trainer, job_of
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, interleaved, ratios, start

SKIP = 5
"""first steps, which are not timed"""


@benchmark("group_cost", repeats=Flag(10), steps=Flag(60), width=256, layers=4, batch=64)
def run_cost(args: Namespace) -> Measurement:
    """Steps of one member of a group and of the same loop without one, in turns, in this process. Claim: <= 1.01."""
    torch.set_num_threads(1)
    wrapped, plain = interleaved([lambda: _side(args, True), lambda: _side(args, False)], args.repeats)
    columns = {"with, ms": 1e3 * median(wrapped), "without, ms": 1e3 * median(plain)}
    return [Row("step of one member / of the plain loop", ratios(wrapped, plain), "1", Claim(high=1.01), columns)]


def _side(args: Namespace, member: bool) -> float:
    """Return the median seconds of a step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(args.batch * args.steps, 16, args.width))
    loader = DataLoader(data, args.batch, shuffle=True)
    if not member:
        return _timed(model, optimizer, _rows(loader))
    shutil.rmtree(RUNS / "group", ignore_errors=True)
    with planaria.host(key=RUNS / "group.key", out=RUNS) as group:
        wrapped = group.wrap(optimizer, model, exchange="noloco", every=50)
        return _timed(model, wrapped, group.shard(loader))


def _rows(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches in the way in which ``shard`` reads them: by number, in this thread."""
    dataset, collate = loader.dataset, loader.collate_fn
    for numbers in loader.batch_sampler:
        yield collate([dataset[number] for number in numbers])


def _timed(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Tensor, ...]]) -> float:
    seconds, since = [], time.monotonic()
    for (inputs,) in batches:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        seconds.append(now - since)
        since = now
    return median(seconds[SKIP:])


# ---- the arm ``group`` of ``benchmarks.field``: one member, a process that torchrun restarts when it dies

KEY_S = 60.0  # limit for the host's start


class Windows(Dataset[Tensor]):
    """The samples of a job, in order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return self._trainer.samples

    def __getitem__(self, number: int) -> Tensor:
        return self._trainer.windows(number, 1)[0]


def member(path: str) -> None:
    job, place, port = job_of(path), int(os.environ["PLACE"]), int(os.environ["GROUP_PORT"])
    trainer = Trainer(job, place)
    trainer.optimizer.register_step_pre_hook(lambda *_: trainer.clip())  # of the averaged gradient
    group = _joined(job, place, port)
    optimizer = group.wrap(trainer.optimizer, trainer.model, exchange="allreduce")
    losses: list[float] = []
    began = time.monotonic()
    for windows in group.shard(DataLoader(Windows(trainer), job.batch // job.ranks)):
        loss = trainer.model(windows)
        loss.backward()
        losses.append(loss.item())
        updates = group.progress
        optimizer.step()
        optimizer.zero_grad()
        if group.progress == updates:  # the update needs further blocks of this member
            continue
        step = group.progress - 1
        trainer.say(began=began, step=step, used=job.batch, upto=(step + 1) * job.batch, loss=sum(losses) / len(losses))
        losses, began = [], time.monotonic()


def _joined(job: Job, place: int, port: int) -> planaria.Group:
    """Start the group in the first process of place 0; join it in all others."""
    key, hosted = Path(job.folder, "group.key"), Path(job.folder, "hosted")
    if place == 0 and not hosted.exists():
        hosted.touch()
        return planaria.host(port, key=key, out=job.folder, members=job.ranks)
    until = time.monotonic() + KEY_S
    while not key.exists() and time.monotonic() < until:  # a missing key is an error of join
        time.sleep(0.05)
    return planaria.join(f"127.0.0.1:{port}", key=key)


if __name__ == "__main__":
    start(cost=run_cost)
