"""Compressed gradients where data are unlike: eight workers learn handwritten digits, each with a mix of its own.

A net of 64-64-10; shares of the ten digits at each worker are drawn from a Dirichlet distribution (0.3); 600 steps of
batches of 32; the better of two learning rates for every arm; training loss over all images at the end. With SGD and
top-5 % every feedback ends at 1.15 of the dense loss at most, and without feedback it is 1.5 or more; the rest is
shown. Needs the extra experts (scikit-learn's digits come with it).
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, parser

if TYPE_CHECKING:
    from torch import Tensor

NAME = "compression_digits"
RATES = {"sgd": (0.1, 0.3), "adamw": (1e-3, 3e-3)}
FEEDBACKS = ("none", "ef14", "ef21", "econtrol")


def shares(seed: int, workers: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Images, digits, and the rows of each worker."""
    import torch
    from sklearn.datasets import load_digits

    found = load_digits()
    images, digits = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mixes = torch.distributions.Dirichlet(torch.full((workers,), 0.3)).sample(torch.Size([10]))
    owner = torch.empty(len(digits), dtype=torch.long)
    for digit in range(10):
        rows = (digits == digit).nonzero().flatten()
        owner[rows] = torch.multinomial(mixes[digit], len(rows), replacement=True, generator=generator)
    return images, digits, [(owner == worker).nonzero().flatten() for worker in range(workers)]


def final_loss(given: argparse.Namespace, seed: int, optimizer: str, lr: float, said: str) -> float:
    """Training loss at the end; ``said`` is ``exchange.compress``, empty for dense gradients."""
    import torch

    from planaria.config.schema import ExchangeConfig
    from planaria.exchange import exchange
    from planaria.exchange.base import Outer
    from planaria.exchange.lab import Replica, meet

    images, digits, rows = shares(seed, given.workers)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = kinds[optimizer](net.parameters(), lr=lr)
    agreed = exchange(ExchangeConfig(kind="allreduce", compress=said))
    of = {worker: Replica({}, Outer()) for worker in range(given.workers)}
    generator = torch.Generator().manual_seed(seed)
    for step in range(given.steps):
        for worker, replica in of.items():
            own = rows[worker] if len(rows[worker]) else torch.arange(len(digits))
            batch = own[torch.randint(len(own), (32,), generator=generator)]
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(images[batch]), digits[batch]).backward()
            replica.fast = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        meet(agreed, of, step, seed)
        for name, parameter in net.named_parameters():
            parameter.grad = of[0].fast[name]
        update.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net(images), digits))


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--workers", type=int, default=8)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = []
    for optimizer in RATES:

        def best(said: str, kind: str = optimizer) -> list[float]:
            return [min(final_loss(given, seed, kind, lr, said) for lr in RATES[kind]) for seed in given.seeds]

        dense = best("")
        rows.append(Row(f"{optimizer}: dense", dense, ""))
        for keep, feedback in product((1, 5), FEEDBACKS):
            found = best(f"{feedback}:top{keep}%")
            over = [a / b for a, b in zip(found, dense, strict=True)]
            claim = (
                (Claim(low=1.5) if feedback == "none" else Claim(high=1.15))
                if optimizer == "sgd" and keep == 5
                else None
            )
            beside = {"loss": f"{statistics.median(found):.3f}"}
            rows.append(Row(f"{optimizer}, top-{keep} %, {feedback}: over dense", over, "", claim, beside))
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    raise SystemExit(main())
