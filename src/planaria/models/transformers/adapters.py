"""LoRA (arXiv 2106.09685) on stages: frozen weights come from the base model's files, and only adapters are state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from planaria.common import digests, documents
from planaria.common.errors import UserError, missing_package
from planaria.config.model_config import AdapterConfig
from planaria.models.seeding import seed_of
from planaria.models.transformers.loading import load_weights
from planaria.models.transformers.skeleton import in_one_line

LINEAR = "linear"
"""all matrices of decoder layers"""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAPTER = "lora_"
"""part of the names of adapters' parameters"""
_BASE = ".base_layer"
_NAME = ".default"
SETTINGS, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
"""files of adapters in a folder"""
_PREFIX = "base_model.model."
"""prefix of an adapter's name in a file"""
_DIGEST = "base_sha256"
"""metadata of a file of adapters: the digest of the base model's files"""
_FIX = "export the run again"
_PART = 1 << 22
"""most bytes of a base model's tensor that are read at a time"""
_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
"""matrices of dense layers and shared experts that ``peft`` takes for fused experts, unless they are named by weight"""


@dataclass(frozen=True)
class Lora:
    """Adapters of all decoder layers: W x + alpha / rank · B A x, with A [rank, in] and B [out, rank]."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """last parts of the matrices' names, or :data:`LINEAR`"""
    base: str
    """folder of the base model"""
    base_sha256: str
    """digest of its files (:func:`base_of`)"""
    precision: str = "fp32"
    """precision of the base model's weights in memory: a key of :data:`PRECISIONS`"""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base model's weights in memory; adapters are fp32."""
        return PRECISIONS[self.precision]

    def peft(self, layers: nn.Module) -> Any:
        """Return ``peft``'s configuration; the names of all matrices are those in ``layers``."""
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise missing_package("LoRA", "peft", "lora") from error
        from transformers.pytorch_utils import Conv1D

        named = {base_name(name): module for name, module in layers.named_modules() if ADAPTER not in name}
        linear = (nn.Linear.forward, Conv1D.forward)  # not that of routers which return several tensors
        matrices = {name.rpartition(".")[2] for name, module in named.items() if type(module).forward in linear}
        wanted = matrices if self.targets == (LINEAR,) else set(self.targets)
        if unknown := sorted(wanted - matrices):
            raise UserError(
                f"model.lora.targets: {unknown[0]!r} is not a linear layer of this model; it has "
                f"{', '.join(sorted(matrices))}"
            )
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=sorted(wanted),
            base_model_name_or_path=self.base,
            task_type="CAUSAL_LM",
        )


def inject(layers: nn.Module, lora: Lora) -> None:
    """Add fp32 adapters on the device "meta" to the matrices of decoder layers."""
    config = lora.peft(layers)
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    inject_adapter_in_model(config, layers, low_cpu_mem_usage=True)
    cast_adapter_dtype(layers, _NAME.removeprefix("."))


def merge(model: nn.Module) -> None:
    """Add adapters to their matrices in place."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def freeze(stage: nn.Module) -> list[str]:
    """Turn all parameters but adapters into buffers, which are neither trained nor part of a stage's state.

    Return their names.
    """
    frozen = [(name, parameter) for name, parameter in stage.named_parameters() if ADAPTER not in name]
    for name, parameter in frozen:
        owner, _, attribute = name.rpartition(".")
        module = stage.get_submodule(owner)
        del module._parameters[attribute]
        module.register_buffer(attribute, parameter.detach(), persistent=False)
    return [name for name, _ in frozen]


def load_base(stage: nn.Module, lora: Lora, text: str, frozen: Mapping[str, str]) -> None:
    """Copy the base model's weights into a stage, in the stage's dtypes.

    ``text``: its config.json; ``frozen``: the name of each weight in the stage → by the library.

    :raises UserError: if the base model's files are missing on this machine, or changed.
    """
    files, read = _files(lora), base_reader(lora, text)
    with torch.no_grad():
        for local, name in frozen.items():
            buffer = stage.get_buffer(local)
            try:
                if name in files and buffer.nbytes > _PART:
                    _copy_rows(files[name], name, buffer)
                else:
                    buffer.copy_(read(name))
            except RuntimeError as error:
                raise _wrong_base(lora, name, error) from None


def _copy_rows(file: Path, name: str, buffer: Tensor) -> None:
    """Copy a file's tensor with few rows in memory at a time: the pages of a closed file are not resident.

    :raises RuntimeError: if the shapes differ.
    """
    rows = max(1, _PART // buffer[0].nbytes)
    for start in range(0, len(buffer), rows):
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(name)
            if part.get_shape() != list(buffer.shape):
                raise RuntimeError(f"has shape {part.get_shape()}, not {list(buffer.shape)}")
            buffer[start : start + rows].copy_(part[start : start + rows])


def base_reader(lora: Lora, text: str) -> Callable[[str], Tensor]:
    """Return a reader of the base model's tensors by the library's names in memory; ``text``: its config.json.

    :raises UserError: as :func:`load_base`, also for each tensor.
    """
    files = _files(lora)

    def read(name: str) -> Tensor:
        try:
            if name not in files:
                return load_weights(Path(lora.base), text)[name]
        except KeyError as error:
            raise _wrong_base(lora, name, error) from None
        with safe_open(files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    return read


def _wrong_base(lora: Lora, name: str, error: Exception) -> UserError:
    return UserError(f"{lora.base}: {name}: {in_one_line(error)}; use the weights that the run started from")


def base_name(local: str) -> str:
    """Return the name that a frozen weight or its matrix has without adapters."""
    return local.replace(_BASE, "")


def base_of(folder: Path) -> dict[str, str]:
    """Return the settings of ``model.lora`` that name a base model and its contents."""
    return {"base": str(folder.absolute()), "base_sha256": _digest(folder)}


def _digest(folder: Path) -> str:
    """Return the SHA-256 (hex) of the names and digests of a folder's files of weights."""
    files = sorted(folder.glob("*.safetensors"))
    return digests.of("".join(f"{digests.of_file(file)}  {file.name}\n" for file in files).encode())


@lru_cache(maxsize=1)
def _files(lora: Lora) -> Mapping[str, Path]:
    """Return the file of each of the base model's tensors, by its name there.

    :raises UserError: if the files are missing on this machine, or changed.
    """
    folder, files = Path(lora.base), dict[str, Path]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        raise UserError(f"{folder}: the base model is not on this machine; copy its folder there")
    if _digest(folder) != lora.base_sha256:
        raise UserError(f"{folder}: the base model has changed since the run started; restore its files")
    return files


def initialise_adapters(named: Iterator[tuple[str, nn.Parameter]], seed: int) -> None:
    """Draw A as ``peft`` does, from ``seed`` and its global name; B is zero."""
    for name, parameter in named:
        if ".lora_B." in name:
            nn.init.zeros_(parameter)
            continue
        nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=adapter_generator(f"{seed} {name}"))


def adapter_generator(label: str) -> torch.Generator:
    """Return the generator of the adapter ``label``."""
    return torch.Generator().manual_seed(seed_of(label) >> 1)


def write_adapters(lora: Lora, layers: nn.Module, named: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapters, by global name, as a folder that ``peft`` loads.

    :raises OSError: if the disk is full.
    """
    tensors = {f"{_PREFIX}{name.replace(_NAME, '')}": tensor.contiguous() for name, tensor in named.items()}
    config = lora.peft(layers)
    if any(name.endswith(".gate_up_proj") and parameter.dim() == 3 for name, parameter in layers.named_parameters()):
        dense = config.target_modules & _OF_EXPERTS
        config.target_modules -= dense
        config.target_parameters = sorted(f"{name}.weight" for name in dense) or None
    config.save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTERS, metadata={"format": "pt", _DIGEST: lora.base_sha256})


def global_name_of(name: str) -> str:
    """Return the global name of an adapter's tensor by its name in the file.

    >>> global_name_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    'model.layers.0.mlp.up_proj.lora_A.default.weight'
    """
    return f"{name.removeprefix(_PREFIX).removesuffix('.weight')}{_NAME}.weight"


def settings_of(folder: Path) -> AdapterConfig:
    """Return the settings of the adapters that :func:`write_adapters` wrote into ``folder``.

    :raises UserError: if the files are damaged.
    """
    path = folder / SETTINGS
    settings = documents.parse_json(documents.read_bytes(path, fix=_FIX), path, _FIX)
    try:
        with safe_open(folder / ADAPTERS, framework="pt") as opened:
            sha256 = (opened.metadata() or {})[_DIGEST]
        targets = (*settings["target_modules"], *(settings.get("target_parameters") or ()))
        return AdapterConfig(
            rank=settings["r"],
            alpha=float(settings["lora_alpha"]),
            targets=",".join(sorted(name.removesuffix(".weight") for name in targets)),
            base=settings["base_model_name_or_path"],
            base_sha256=sha256,
        )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: its adapters are not readable ({in_one_line(error)}); {_FIX}") from None
