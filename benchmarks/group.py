"""Groups of programs with loops of their own: what ``wrap`` costs a loop."""

from __future__ import annotations

import shutil
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import planaria
from benchmarks.common import RUNS, interleaved, ratios
from benchmarks.harness import Claim, Flag, Measurement, Row, benchmark, start

SKIP = 5
"""first steps, which are not timed"""


@benchmark("group_cost", repeats=Flag(10), steps=Flag(60), width=256, layers=4, batch=64)
def run_cost(given: Namespace) -> Measurement:
    """Steps of one member of a group and of the same loop without one, in turns, in this process. Claim: <= 1.01."""
    torch.set_num_threads(1)
    wrapped, plain = interleaved([lambda: _side(given, True), lambda: _side(given, False)], given.repeats)
    beside = {"with, ms": 1e3 * median(wrapped), "without, ms": 1e3 * median(plain)}
    return [Row("step of one member / of the plain loop", ratios(wrapped, plain), "1", Claim(high=1.01), beside)]


def _side(given: Namespace, member: bool) -> float:
    """Return the median seconds of a step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(given.width, 4, 4 * given.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(given.batch * given.steps, 16, given.width))
    loader = DataLoader(data, given.batch, shuffle=True)
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


if __name__ == "__main__":
    start(cost=run_cost)
