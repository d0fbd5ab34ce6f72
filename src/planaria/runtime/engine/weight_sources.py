"""Sources of weights: a run, a folder of safetensors, a GGUF or llama2.c file, or a Hugging Face Hub model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.common import digests, documents
from planaria.common.errors import UserError, missing_package
from planaria.config.names import expanded
from planaria.config.schema import ModelConfig
from planaria.data.tokenizer import Tokenizer
from planaria.models.foreign_weights import WeightsFile
from planaria.models.gguf import open_gguf
from planaria.models.gguf_file import is_gguf
from planaria.models.hf_config import Unsupported
from planaria.models.huggingface import is_huggingface, open_folder
from planaria.models.llama2c import open_llama2c
from planaria.models.llama_stages import Llama
from planaria.models.transformers.adapters import ADAPTERS, base_of
from planaria.models.transformers.family import model_section
from planaria.models.transformers.files import open_decoder
from planaria.runtime.checkpoint.loading import weights_of
from planaria.runtime.engine import run_folders

HUB = "hf:"
FIXED = ("family", "vocab", "dim", "layers", "heads", "kv", "hidden", "tied", "rope_theta", "norm_eps")
"""properties of trained weights that a recipe cannot change"""
OF_ANY = ("family", "options", "lora", "vocab", "dim", "layers", "tied", "context", "ends_layers")
"""settings that a recipe may give beside weights of the family transformers"""
_PICKLES = (b"PK\x03\x04", b"\x80")


def open_weights(source: str | Path, family: str = "llama") -> WeightsFile:
    """Open the model at a path or "hf:OWNER/NAME"; for a run, its newest whole checkpoint.

    ``family``: of a Hugging Face folder's model; empty: llama if that supports the model, else transformers.

    :raises UserError: if there is no supported model, or it is damaged.
    """
    path = local_weights(source)
    if path.is_file():
        return open_gguf(path) if is_gguf(path) else _other_file(path)
    if is_huggingface(path):
        return _open_huggingface(path, family)
    if lone := sorted(path.glob("*.gguf")) if not (path / run_folders.CONFIG).exists() else []:
        raise UserError(f"{path}: no config.json is there; give the file {lone[0]}")
    if not (path / run_folders.CONFIG).exists():
        raise UserError(
            f"{path}: neither a run nor a model is there (no config.json); give one, a GGUF file, or {HUB}NAME"
        )
    bare = run_folders.config_of(path, run_folders.TOKENIZER).data.tokenization == "legacy"
    saved = run_folders.newest_whole(path)
    atoms = {atom.name: atom for atom in weights_of(saved)}
    shapes = {name: atom.shape for name, atom in atoms.items()}
    return WeightsFile(
        path,
        saved.manifest.model.dense,
        shapes,
        lambda name: atoms[name].read("weights"),
        path / run_folders.TOKENIZER,
        bare,
        usage=run_folders.model_metadata_of(path),
    )


def _open_huggingface(folder: Path, family: str) -> WeightsFile:
    if family == "transformers" or (not family and (folder / ADAPTERS).is_file()):
        return open_decoder(folder)
    try:
        return open_folder(folder)
    except Unsupported as error:
        if family:
            raise
        try:
            return open_decoder(folder)
        except UserError as other:
            raise UserError(f"{error}; model.family = 'transformers': {other}") from None


def open_model(source: str | Path) -> tuple[Llama, Tokenizer]:
    """Load a LLaMA into memory, with its tokenizer; UserError for other models."""
    weights = open_weights(source)
    return weights.model(), tokenizer_of(weights)


def tokenizer_of(weights: WeightsFile) -> Tokenizer:
    """Return the tokenizer beside a model's weights; UserError if there is none."""
    if weights.tokenizer is None:
        raise UserError(f"{weights.path}: no tokenizer.json; save its tokenizer there (the fast kind)")
    return Tokenizer.open(weights.tokenizer, bare=weights.bare)


def local_weights(source: str | Path) -> Path:
    """Return the local path of weights; a Hub model is downloaded first."""
    text = str(source)
    return download(text.removeprefix(HUB)) if text.startswith(HUB) else expanded(text)


def download(name: str) -> Path:
    """Download a Hub model without pickles and code, or one file as "OWNER/NAME:FILE"; return its path.

    :raises UserError: if it is unavailable.
    """
    repository, _, file = name.partition(":")
    try:
        import huggingface_hub
    except ImportError as error:
        raise missing_package(f"{HUB}{name}:", "huggingface_hub", "hub") from error
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        wanted = ["*.json", "*.safetensors", "*.jinja", digests.FILE]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{HUB}{name} cannot be downloaded ({reason}); check the name and the network") from error


def with_inherited_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's ``tree`` with missing settings taken from the weights of its ``train.start``, or from the
    config.json of a model of ``transformers``.

    :raises UserError: if they are missing, or conflict with a setting.
    """
    train, stated = (section if isinstance(section := tree.get(name), dict) else {} for name in ("train", "model"))
    if not isinstance(start := train.get("start"), str):
        return {**tree, "model": _from_library(stated)} if stated.get("family") == "transformers" else dict(tree)
    if not start.startswith(HUB) and not local_weights(start).exists():
        raise UserError(f"train.start = {start!r}: no such run, folder or file; check the path")
    settings = {name: value for name, value in stated.items() if value is not None}
    lora = dict(settings["lora"]) if isinstance(settings.get("lora"), Mapping) else {}
    weights = open_weights(start, settings.get("family", "transformers" if lora.get("rank") else ""))
    if "family" not in settings and weights.routing is not None and not weights.routing.bias:
        weights = open_weights(start, "transformers")
    require_dense(start, weights)
    named, trained = f"train.start = {start!r}", weights.config
    options = _options(settings)
    if trained.family == "transformers":
        settings = _without_sizes_of(weights.path, settings)
        _require_own_config(named, trained, settings)
    require_same(named, trained, {"kv" if name == "kv_heads" else name: value for name, value in settings.items()})
    model = {"kv_heads" if name == "kv" else name: getattr(trained, name) for name in FIXED}
    model["options"] = {**trained.options, **options}
    if trained.lora.rank:
        _require_own_adapters(named, trained, lora)
        lora = {**trained.lora.model_dump(), **lora}
    elif lora.get("rank") and lora.get("base") != str(weights.path.absolute()):
        lora |= base_of(weights.path)
    model["context"] = min(trained.context, ModelConfig().context)
    data = {} if weights.tokenizer is None else {"tokenizer": str(weights.tokenizer.absolute())}
    beneath = {
        "model": {**model, **settings, "options": model["options"], "lora": lora},
        "data": data | dict(tree.get("data", {})),
    }
    return {
        **tree,
        **beneath,
        "train": {**train, "start": str(local_weights(start)) if start.startswith(HUB) else start},
    }


def _from_library(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a model of ``transformers`` from scratch, with the sizes in its config.json."""
    options = _options(stated)
    if not isinstance(location := options.get("config"), str):
        return dict(stated)
    if location.lstrip().startswith("{"):  # its contents
        return dict(stated)
    location = str(expanded(location))
    section = model_section(documents.json_object(Path(location)), location)
    _require_no_sizes(f"model.options.config = {location!r}", stated)
    require_same(f"model.options.config = {location!r}", ModelConfig.model_validate(section), stated)
    section["context"] = min(section["context"], ModelConfig().context)
    return {**section, **stated, "options": {**options, **section["options"]}}


def _options(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a section of the model."""
    options = model.get("options")
    return dict(options) if isinstance(options, Mapping) else {}


def _require_own_config(named: str, own: ModelConfig, stated: Mapping[str, Any]) -> None:
    """Raise UserError if a recipe states another config.json than the weights', or sizes that config.json determines.

    A run's own configuration states all settings.
    """
    config = _options(stated).get("config")
    if config is None:
        _require_no_sizes(named, stated)
    elif config != own.options["config"]:
        raise UserError(f"{named}: its model has a config.json; leave model.options.config out")


def _require_own_adapters(named: str, own: ModelConfig, lora: Mapping[str, Any]) -> None:
    """Raise UserError if a recipe states other settings of adapters than those in the weights."""
    for name in sorted(lora.keys() & {"rank", "alpha", "targets"}):
        if lora[name] != (value := getattr(own.lora, name)):
            raise UserError(f"{named}: its adapters have {name} = {value}; leave model.lora.{name} out")


def _without_sizes_of(folder: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's section without sizes of the family llama that equal those of the LLaMA in ``folder``, so that a
    recipe for that family also serves adapters."""
    if "config" in _options(stated) or not stated.keys() - {*OF_ANY}:
        return dict(stated)
    try:
        sizes = open_folder(folder).config
    except UserError:  # not a LLaMA
        return dict(stated)
    fields = {name: "kv" if name == "kv_heads" else name for name in stated}
    return {
        name: value
        for name, value in stated.items()
        if name in OF_ANY or fields[name] not in FIXED or not _equal(value, getattr(sizes, fields[name]))
    }


def _equal(stated: object, value: object) -> bool:
    """Return whether two sizes are equal; numbers that were stored in fp32 have seven digits."""
    if isinstance(stated, float) and isinstance(value, float):
        return math.isclose(stated, value, rel_tol=1e-7)
    return stated == value


def _require_no_sizes(named: str, stated: Mapping[str, object]) -> None:
    """Raise UserError for sizes of the family llama beside a model whose config.json has its own."""
    if sizes := ", ".join(f"model.{name}" for name in stated if name not in OF_ANY):
        raise UserError(f"{named}: config.json determines {sizes} (model.family = 'transformers'); leave them out")


def require_dense(start: str, weights: WeightsFile) -> None:
    """Reject models with several feed-forward blocks in a layer; recipes cannot describe them."""
    if weights.routing is not None:
        raise UserError(
            f"train.start = {start!r}: {weights.routing.experts} feed-forward blocks in each layer; only models with "
            "one can be trained, so start from an expert"
        )


def require_same(named: str, own: ModelConfig, stated: Mapping[str, object]) -> None:
    """Raise UserError for the first of :data:`FIXED` whose ``stated`` value differs from the weights."""
    for name in FIXED:
        if name in stated and not _equal(stated[name], value := getattr(own, name)):
            setting = "kv_heads" if name == "kv" else name
            raise UserError(
                f"{named}: its model has {setting} = {value}, the recipe {stated[name]}; leave "
                f"model.{setting} out, or set it to the same"
            )


def _other_file(path: Path) -> WeightsFile:
    """Open a llama2.c file, which has no magic number; reject anything else."""
    with path.open("rb") as file:
        begun = file.read(4)
    if begun.startswith(_PICKLES):
        raise UserError(f"{path}: a pickle is not read, since it can run code; convert it to safetensors")
    if path.suffix != ".bin":
        raise UserError(f"{path}: not a known file of weights; give a GGUF file, or the folder of config.json")
    return open_llama2c(path)
