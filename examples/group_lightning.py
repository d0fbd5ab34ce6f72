"""A ``Trainer`` of Lightning as a member of a group.

python examples/group_lightning.py                    # the host
python examples/group_lightning.py 127.0.0.1:29400    # any number of others, at any time
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import planaria
from planaria.group.integrations.lightning import GroupCallback


class Regression(LightningModule):
    """A network that adds two of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(address: str = "") -> None:
    """Train as the host, or as a member of the group at ``address``."""
    inputs = torch.randn(1200, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1] + inputs[:, 1:2]), batch_size=10, shuffle=True)
    group = planaria.join(address) if address else planaria.host(29400)
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = GroupCallback(group, exchange="noloco", every=10)
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **plain)
    module = Regression()
    trainer.fit(module, group.shard(loader, epochs=3))
    loss = nn.functional.mse_loss(module.net(inputs), inputs[:, :1] + inputs[:, 1:2])
    print(f"{group.steps} steps and {group.rounds} rounds here, loss {loss.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
