"""The peer systems' side of ``benchmarks.field``: model, batch and trainer, and the programs of torchrun and torchft.

Imports only torch and safetensors, because it runs in the peer's own environment. The model is LLaMA as planaria trains
it, in plain PyTorch and with Hugging Face's names, so that one file of weights gives the same first losses.

torchrun: DistributedDataParallel over gloo, restarted from the newest checkpoint. Rank 0 writes weights and moments
atomically every few updates. When a rank dies, torch's elastic agent stops the others and restarts all ranks.

torchft: loop and time limits follow its example (train_ddp.py): a quorum per update, which is applied if all agree to
commit; a returning replica gets the state of another. As documented, its DistributedDataParallel averages gradients,
and each replica reads the samples of its own number, which are skipped while it is away. Tuned: its manager averages
one flat tensor, and samples follow the batches committed so far, by rank among the participants.

planaria's group: torchft's loop with ``planaria.host`` or ``planaria.join``, ``wrap`` and ``shard`` around it.
Gradients are averaged in every step, and the blocks of absent members are computed by the others.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from torchft import Manager

    from planaria import Group


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, named as in planaria's ``ModelConfig``."""

    vocab: int
    dim: int
    layers: int
    heads: int
    hidden: int
    context: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True)
class Job:
    """The job of a peer's process."""

    folder: str  # for its lines and checkpoints
    weights: str  # safetensors that training starts from
    samples: str  # safetensors with ``samples`` [N, context + 1]: sample n of the run, in planaria's order
    sizes: Sizes
    batch: int  # samples of one update, of all ranks together
    groups: list[list[str]]  # names of the parameters whose gradients are clipped together
    clip: float
    lr: float
    betas: tuple[float, float]
    eps: float
    save_every: int = 0  # torchrun: updates between checkpoints
    ranks: int = 1  # torchft: maximum number of replicas
    limits: tuple[float, float] = (5.0, 30.0)
    """torchft: time limits in seconds for an average over gloo, and for other waits of its manager"""
    tuned: bool = False  # torchft: one tensor is averaged, and samples follow from the batches committed so far


def job_of(path: str) -> Job:
    fields = json.loads(Path(path).read_text())
    pairs = {name: tuple(fields[name]) for name in ("betas", "limits")}
    return Job(**fields | pairs | {"sizes": Sizes(**fields["sizes"])})


class Block(nn.Module):
    """Attention, then SwiGLU, each after an RMSNorm with a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, hidden = sizes.dim, sizes.hidden
        self.heads = sizes.heads
        self.input_layernorm = nn.RMSNorm(dim, sizes.norm_eps)
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(dim, dim, bias=False) for name in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(dim, sizes.norm_eps)
        wide = {name: nn.Linear(dim, hidden, bias=False) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict({**wide, "down_proj": nn.Linear(hidden, dim, bias=False)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]; the tables of :func:`tables`."""
        batch, length, dim = x.shape
        h = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[f"{name}_proj"](h).view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        x = x + self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, length, dim))
        h = self.post_attention_layernorm(x)
        out: Tensor = x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))
        return out


def tables(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [context, d / 2]."""
    half = sizes.dim // sizes.heads // 2
    angles = torch.outer(torch.arange(sizes.context), sizes.rope_theta ** (-torch.arange(half) / half))
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, d] with channels j and j + d/2 turned as a pair."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(nn.Module):
    """The mean cross entropy of the next tokens, in nats."""

    def __init__(self, sizes: Sizes, weights: dict[str, Tensor]) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = nn.ModuleDict(
                {
                    "embed_tokens": nn.Embedding(sizes.vocab, sizes.dim),
                    "layers": nn.ModuleList(Block(sizes) for _ in range(sizes.layers)),
                    "norm": nn.RMSNorm(sizes.dim, sizes.norm_eps),
                }
            )
            self.lm_head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        self.load_state_dict(weights, assign=True)
        self.cos, self.sin = tables(sizes)

    def forward(self, windows: Tensor) -> Tensor:
        """Windows of tokens and the one after them, int64 [B, context + 1] → a scalar."""
        x = self.model["embed_tokens"](windows[:, :-1])
        layers: Any = self.model["layers"]
        for block in layers:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(self.model["norm"](x))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Trainer:
    """A process's model, optimizer, samples and report file."""

    def __init__(self, job: Job, place: int) -> None:
        torch.set_num_threads(1)
        self.job = job
        self.model = Llama(job.sizes, load_file(job.weights))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=job.lr, betas=job.betas, eps=job.eps, weight_decay=0.0, fused=True
        )
        named = dict(self.model.named_parameters())
        self._groups = [[named[name] for name in group] for group in job.groups]
        self._samples = load_file(job.samples)["samples"]
        self.samples = len(self._samples)
        self._lines = Path(job.folder, f"{place}.jsonl").open("a", buffering=1)  # noqa: SIM115
        self.say(pid=os.getpid())

    def windows(self, first: int, count: int) -> Tensor:
        """Return ``count`` samples from ``first``, int64 [count, context + 1].

        :raises IndexError: if the samples are exhausted.
        """
        if first + count > len(self._samples):
            raise IndexError(f"sample {first + count} of {len(self._samples)}: the run has more steps than samples")
        return self._samples[first : first + count].long()

    def clip(self) -> None:
        for group in self._groups:
            nn.utils.clip_grad_norm_(group, self.job.clip)

    def say(self, **fields: Any) -> None:
        self._lines.write(json.dumps({"t": time.monotonic(), **fields}) + "\n")


def main(path: str) -> None:
    job = job_of(path)
    dist.init_process_group("gloo")
    rank, share = dist.get_rank(), job.batch // dist.get_world_size()
    trainer = Trainer(job, rank)
    step = restored(trainer)
    module = DistributedDataParallel(trainer.model)
    while True:
        began = time.monotonic()
        trainer.optimizer.zero_grad()
        loss = module(trainer.windows(step * job.batch + rank * share, share))
        loss.backward()
        trainer.clip()
        trainer.optimizer.step()
        trainer.say(began=began, step=step, used=job.batch, upto=(step + 1) * job.batch, loss=loss.item())
        step += 1
        if rank == 0 and step % job.save_every == 0:
            save(trainer, step)


def file_of(trainer: Trainer) -> Path:
    return Path(trainer.job.folder, "checkpoint.pt")


def restored(trainer: Trainer) -> int:
    if not (file := file_of(trainer)).exists():
        return 0
    saved = torch.load(file, weights_only=True)
    trainer.model.load_state_dict(saved["model"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def save(trainer: Trainer, step: int) -> None:
    began, file = time.monotonic(), file_of(trainer)
    unfinished = file.with_suffix(".unfinished")
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), "step": step}
    torch.save(state, unfinished)
    os.replace(unfinished, file)  # noqa: PTH105
    trainer.say(saved=time.monotonic() - began)


# ---- torchft: one replica, a process that torchrun restarts when it dies

HEARTBEATS_S = 0.5  # time within which every live replica has reported to the lighthouse


def torchft(path: str) -> None:
    from torchft import Manager, ProcessGroupGloo, ddp

    job, place = job_of(path), int(os.environ["REPLICA_GROUP_ID"])
    trainer = Trainer(job, place)
    share = job.batch // job.ranks

    def state() -> dict[str, Any]:
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}

    def load(given: dict[str, Any]) -> None:
        trainer.model.load_state_dict(given["model"])
        trainer.optimizer.load_state_dict(given["optimizer"])

    # Without limits both wait 60 s, also for neighbours that gave up sooner.
    averages, others = (timedelta(seconds=limit) for limit in job.limits)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=averages),
        timeout=others,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"field_{place}",
        init_sync=False,  # all start with the same weights
    )
    module = trainer.model if job.tuned else ddp.DistributedDataParallel(manager, trainer.model)
    meet(Path(job.folder), place, job.ranks)
    while True:
        began = time.monotonic()
        manager.start_quorum()
        trainer.optimizer.zero_grad()
        loss = module(trainer.windows(first_of(job, manager, place, share), share))
        loss.backward()
        if job.tuned:
            average(manager, trainer.model)
        trainer.clip()
        if manager.should_commit():
            trainer.optimizer.step()
            step, taking_part = manager.current_step() - 1, manager.num_participants()
            upto = manager.batches_committed() * share if job.tuned else (step + 1) * job.batch
            own = {"loss": loss.item()} if manager.is_participating() else {}
            trainer.say(began=began, step=step, used=taking_part * share, upto=upto, **own)
        else:
            trainer.say(dropped=manager.current_step())


def average(manager: Manager, model: nn.Module) -> None:
    """Average all gradients over the participants as one tensor; after an error nothing is committed."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    manager.allreduce(flat).wait()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def meet(folder: Path, place: int, ranks: int) -> None:
    """At the first start, wait until all replicas have reported to the lighthouse."""
    ready = folder / f"ready-{place}"
    if ready.exists():
        return
    ready.touch()
    while len(list(folder.glob("ready-*"))) < ranks:
        time.sleep(0.05)
    time.sleep(HEARTBEATS_S)


def first_of(job: Job, manager: Manager, place: int, share: int) -> int:
    """Return the first sample of this replica's share; the results of a non-participant are ignored."""
    if not job.tuned:
        return manager.current_step() * job.batch + place * share
    return (manager.batches_committed() + (manager.participating_rank() or 0)) * share


# ---- a member of planaria's group: a process that torchrun restarts when it dies

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


def _joined(job: Job, place: int, port: int) -> Group:
    """Start the group in the first process of place 0; join it in all others."""
    import planaria

    key, hosted = Path(job.folder, "group.key"), Path(job.folder, "hosted")
    if place == 0 and not hosted.exists():
        hosted.touch()
        return planaria.host(port, key=key, out=job.folder, members=job.ranks)
    until = time.monotonic() + KEY_S
    while not key.exists() and time.monotonic() < until:  # a missing key is an error of join
        time.sleep(0.05)
    return planaria.join(f"127.0.0.1:{port}", key=key)
