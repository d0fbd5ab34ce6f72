"""Low-rank adapters: a trained product of two thin matrices beside each frozen one (arXiv 2106.09685)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.common.atomic import new_folder
from planaria.models.llama_layers import Linear
from planaria.models.llama_stages import Llama, global_name

DOWN, UP = "lora_down", "lora_up"


class Adapted(Linear):
    """W x + (alpha / rank) · B A x (arXiv 2106.09685, eq. 3).

    W [out, in] is frozen; A [rank, in] and B [out, rank] are trained. B starts at 0, so that nothing is added; A is
    drawn from N(0, 1/in).
    """

    def __init__(self, plain: Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)  # not Linear's, which would make another matrix
        self.out_features, self.in_features = plain.weight.shape
        self.weight, self.scale = plain.weight.requires_grad_(False), scale
        self.register_parameter("bias", None)
        down = torch.empty(rank, self.in_features).normal_(0.0, self.in_features**-0.5, generator=generator)
        self.lora_down = nn.Parameter(down.to(plain.weight.device))
        self.lora_up = nn.Parameter(torch.zeros(self.out_features, rank, device=plain.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_down), self.lora_up * self.scale)

    def whole(self) -> Tensor:
        """Return the equivalent single matrix."""
        return self.weight + self.scale * self.lora_up.detach() @ self.lora_down.detach()


def adapt(model: Llama, rank: int, alpha: int, seed: int) -> None:
    """Add adapters of ``rank`` to all matrices of a model's layers, scaled by ``alpha`` / ``rank``.

    Only adapters are trained afterwards. Each is drawn by ``seed`` and its matrix's global name.
    """
    model.requires_grad_(False)
    for name, parent, child in list(_matrices(model)):
        digest = hashlib.sha256(f"lora {seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        setattr(parent, child, Adapted(getattr(parent, child), rank, alpha / rank, generator))


def has_adapters(model: Llama) -> bool:
    return any(_adapters(model))


def merged(model: Llama) -> dict[str, Tensor]:
    """Return the global state of the equivalent model without adapters."""
    whole = {f"{name}.weight": adapted.whole() for name, adapted in _adapters(model)}
    return {name: whole.get(name, own) for name, own in model.global_state().items() if not _is_adapter(name)}


def save_adapters(model: Llama, folder: Path, base: str) -> None:
    """Write the adapters as a ``peft`` folder, which inference servers load, atomically.

    ``base``: name or path of the base model.

    :raises OSError: if the folder is not empty or cannot be written.
    """
    result = dict(_adapters(model))
    first = next(iter(result.values()))
    rank = len(first.lora_down)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in result}),
    }
    tensors = {}
    for name, adapted in result.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapted.lora_down.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapted.lora_up.detach().cpu().contiguous()
    with new_folder(folder) as made:
        (made / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, made / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapters(model: Llama, state: Mapping[str, Tensor]) -> None:
    """Load the tensors that :func:`save_adapters` wrote."""
    with torch.no_grad():
        for name, adapted in _adapters(model):
            adapted.lora_down.copy_(state[f"base_model.model.{name}.lora_A.weight"])
            adapted.lora_up.copy_(state[f"base_model.model.{name}.lora_B.weight"])


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (DOWN, UP)


def _adapters(model: Llama) -> Iterator[tuple[str, Adapted]]:
    for name, parent, child in _matrices(model):
        if isinstance(result := getattr(parent, child), Adapted):
            yield name, result


def _matrices(model: Llama) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (global name, parent module, attribute name) of every matrix of the layers."""
    for stage, part in enumerate((model.ends, *model.stages)):
        for local, module in part.named_modules():
            if isinstance(module, Linear) and local.startswith("layers."):
                parent, _, child = local.rpartition(".")
                yield global_name(model.config, len(model.stages), stage, local), part.get_submodule(parent), child
