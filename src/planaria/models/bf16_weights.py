"""bf16 copies of a stage's matrices, in which its passes compute, beside the fp32 weights that are trained.

Under autocast every pass casts every matrix to bf16, and keeps the result until its backward pass. With copies that are
made once per update, passes cast no matrix of a decoder layer, and microbatches in flight share one copy. Results are
equal to the last bit: each matrix is used once in a pass, so its gradient is the same bf16 product, and gradients of
microbatches are added up in fp32 as before. Embedding, head, norms, and matrices that layers share stay fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planaria.models.optimizers.base import LAYER

COPY_BYTES = 2
"""bytes of a number in a copy"""


class _Copy(NamedTuple):
    master: Tensor
    """fp32: trained, saved and recovered"""
    computed: nn.Parameter
    """bf16: the module's own parameter from now on"""


class Bf16Weights:
    """The copies in a stage's module. Their masters are the parameters that the module had before."""

    def __init__(self, module: nn.Module, wanted: bool = True) -> None:
        """Replace the matrices of ``module`` by copies, if ``wanted``; collect the optimizer's parameters before."""
        self._copies = [_replace(part) for part in list(_matrices(module))] if wanted else []

    def collect_gradients(self) -> None:
        """Move the gradients of a backward pass to the masters, and add them up there in fp32."""
        for master, computed in self._copies:
            if (grad := computed.grad) is not None:
                computed.grad = None
                master.grad = grad.float() if master.grad is None else master.grad.add_(grad)

    def refresh(self) -> None:
        """Copy the masters after they have changed."""
        with torch.no_grad():
            for master, computed in self._copies:
                computed.copy_(master)


def copied_bytes(module: nn.Module) -> int:
    """Return the bytes of a stage's copies; ``module`` may be on the device "meta"."""
    return sum(COPY_BYTES * part.weight.numel() for part in _matrices(module))


def _matrices(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the modules of a stage's decoder layers that are one product with a trained matrix of their own."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for name, part in module.named_modules():
        if LAYER.match(f"{name}.") and type(part).forward is nn.Linear.forward and uses[id(part.weight)] == 1:
            assert isinstance(part, nn.Linear)
            yield part


def _replace(part: nn.Linear) -> _Copy:
    copy = _Copy(part.weight, nn.Parameter(part.weight.detach().to(torch.bfloat16)))
    part.weight = copy.computed
    return copy
