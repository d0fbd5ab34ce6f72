"""What do chunks of logits and recomputed activations save, and what do they cost?

The ends of a model with a vocabulary of 32,768, and a block stage of eight layers, each with one microbatch forward and
backward: the process's peak above what it had before, with and without; the gradients of both ways; seconds in turns.

glibc's malloc keeps the holes that freed activations leave, and its peak says little of what is in use: by default
eight recomputed layers take 0.49 of the memory. So the process is started with ``MALLOC_MMAP_THRESHOLD_`` = 256 KB, by
which large memory goes back at once. Workers can be started so too; touching fresh pages takes time, though: a
microbatch of eight layers 2.7 s in place of 1.7.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import peak, timed
from benchmarks.common import Claim, Row, conclude, interleaved, parser, start

if TYPE_CHECKING:
    from torch import Tensor

NAME = "activations"
WHOLE = 1 << 60
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"

Side = Callable[[], "list[Tensor]"]
"""one microbatch; the gradients"""


def ends(tokens: int, dim: int, vocab: int) -> tuple[Side, Side]:
    """The loss of so many tokens, with all logits at once and in chunks."""
    import torch

    from planaria.config.schema import ModelConfig
    from planaria.models import chunked_loss
    from planaria.models.families import build_stage

    model = ModelConfig(vocab=vocab, dim=dim, layers=1, heads=dim // 64, context=tokens // 8, tied=False)
    module: Any = build_stage(model, 1, 0, 1)
    draw = torch.Generator().manual_seed(1)
    given = torch.randn(8, tokens // 8, dim, generator=draw)
    targets = torch.randint(vocab, (8, tokens // 8), generator=draw)
    usual = chunked_loss.CPU_BYTES

    def side(chunk: int) -> list[Tensor]:
        chunked_loss.CPU_BYTES = chunk
        module.zero_grad()
        x = given.clone().requires_grad_()
        module.loss(x, targets).backward()
        return [x.grad, module.lm_head.weight.grad.clone()]

    return lambda: side(WHOLE), lambda: side(usual)


def block(layers: int, dim: int, tokens: int) -> tuple[Side, Side]:
    """A block stage's microbatch, with all activations kept and recomputed."""
    import torch

    from planaria.config.schema import ModelConfig
    from planaria.models.families import build_stage

    model = ModelConfig(vocab=64, dim=dim, layers=layers, heads=dim // 64, hidden=dim * 11 // 4, context=tokens // 8)
    module: Any = build_stage(model, 1, 1, 1)
    given = torch.randn(8, tokens // 8, dim, generator=torch.Generator().manual_seed(1))

    def side(recompute: bool) -> list[Tensor]:
        module.recompute = recompute
        module.zero_grad()
        x = given.clone().requires_grad_()
        module(x).square().mean().backward()
        return [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]

    return lambda: side(False), lambda: side(True)


def measured(name: str, before: Side, after: Side, most: float, repeats: int) -> list[Row]:
    """Memory, gradients and time of the new way over the old one."""
    used: list[float] = []
    for side in (after, before):  # what the larger one gives back would hide what the smaller one takes
        side()
        with peak(used):
            found = side()
        kept = sum(gradient.nbytes for gradient in found)
        used[-1] -= kept  # a copy that is made here
        del found
    old, new = before(), after()
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(new, old, strict=True))
    slow, quick = interleaved([lambda: timed(before), lambda: timed(after)], repeats)
    ratios = [new_s / old_s for new_s, old_s in zip(quick, slow, strict=True)]
    beside = {"before, MB": round(used[1] / 1e6), "now, MB": round(used[0] / 1e6)}
    return [
        Row(f"{name}: peak memory over before", [used[0] / used[1]], "1", Claim(high=most), beside),
        Row(f"{name}: gradients, apart from before", [apart], "1", Claim(high=1e-6)),
        Row(f"{name}: seconds over before", ratios, "1", None, {"seconds": round(median(quick), 3)}),
    ]


def arguments() -> argparse.Namespace:
    flags = parser(NAME, __doc__)
    flags.add_argument("--tokens", type=int, default=4096, help="of one microbatch")
    flags.add_argument("--dim", type=int, default=256)
    flags.add_argument("--vocab", type=int, default=32768)
    flags.add_argument("--layers", type=int, default=8)
    flags.add_argument("--repeats", type=int, default=3)
    return flags.parse_args()


def main() -> int:
    given = arguments()
    if ALLOCATOR not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.activations", *sys.argv[1:]],
            os.environ | {ALLOCATOR: str(256 << 10)},
        )
    loss = measured("the ends' loss", *ends(given.tokens, given.dim, given.vocab), 0.35, given.repeats)
    stage = measured("a block stage", *block(given.layers, given.dim, given.tokens), 0.4, given.repeats)
    return conclude(NAME, given, [*loss, *stage])


if __name__ == "__main__":
    start(main)
