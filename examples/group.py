"""A PyTorch loop of your own, trained by several programs together.

python examples/group.py                    # the host: waits up to a minute for a second member
python examples/group.py 127.0.0.1:29400    # any number of others, at any time
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import planaria


class Residual(nn.Module):
    """A small convolutional network with a shortcut and batch statistics."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.block, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = x + torch.relu(self.block(x))
        return self.head(x.mean((2, 3)))


def pictures(count: int = 1200) -> TensorDataset:
    """Return noisy squares; the class is the corner in which the square is."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(4, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    for image, corner in zip(images, corners.tolist(), strict=True):
        image[:, 4 * (corner // 2) : 4 * (corner // 2) + 3, 4 * (corner % 2) : 4 * (corner % 2) + 3] += 1.0
    return TensorDataset(images, corners)


def main(address: str = "", epochs: int = 40) -> float:
    """Train as the host, or as a member of the group at ``address``; return the last loss."""
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(pictures(), batch_size=16, shuffle=True)
    with planaria.join(address) if address else planaria.host(29400, members=2) as group:
        optimizer = group.wrap(optimizer, model, exchange="noloco", every=10)
        loss = torch.zeros(())
        for images, corners in group.shard(loader, epochs=epochs):
            loss = nn.functional.cross_entropy(model(images), corners)
            loss.backward()
            group.log(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        print(f"{group.steps} steps and {group.rounds} rounds here, last loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (planaria.UserError, planaria.RunStopped) as error:
        sys.exit(f"planaria: {error}")
