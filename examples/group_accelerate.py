"""A loop with ``accelerate`` (mixed precision, accumulation, clipping, a schedule) as a member of a group.

python examples/group_accelerate.py                    # the host
python examples/group_accelerate.py 127.0.0.1:29400    # any number of others, at any time
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import planaria


def quadrants(count: int = 800) -> TensorDataset:
    """Return points of a plane; the class is the quadrant."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long())


def main(address: str = "", epochs: int = 3, accumulate: int = 2) -> float:
    """Train as the host, or as a member of the group at ``address``; return the last loss."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=accumulate)
    model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(quadrants(), batch_size=8, shuffle=True)
    with planaria.join(address) if address else planaria.host(29400) as group:
        optimizer = group.wrap(optimizer, model, exchange="noloco", every=10)
        scheduler = LambdaLR(optimizer, lambda _: 1 / (1 + group.progress / 200))
        loss = torch.zeros(())
        for points, labels in group.shard(loader, epochs=epochs, accumulate=accumulate):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    group.log(loss.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"{group.steps} steps and {group.rounds} rounds here, last loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
