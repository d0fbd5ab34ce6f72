"""Sources of weights: a run, a folder of safetensors, a GGUF or llama2.c file, or a Hugging Face Hub model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.common import digests
from planaria.common.errors import UserError, missing_package
from planaria.config.names import expand_home
from planaria.config.schema import ModelConfig
from planaria.data.tokenizer import Tokenizer
from planaria.models.families import FAMILIES
from planaria.models.families import make_family as family_of
from planaria.models.foreign_weights import WeightsFile
from planaria.models.gguf import open_gguf
from planaria.models.gguf_file import is_gguf
from planaria.models.hf_config import Unsupported
from planaria.models.huggingface import is_huggingface, open_folder
from planaria.models.llama2c import open_llama2c
from planaria.models.llama_stages import Llama
from planaria.models.start_settings import FIXED, options_of, require_same
from planaria.models.transformers.adapters import ADAPTERS, base_of
from planaria.models.transformers.files import open_decoder
from planaria.runtime.checkpoint.loading import weights_of
from planaria.runtime.preparation import run_folders

HUB = "hf:"
RECOVERY_OF_ADAPTERS, WITH_REPLICAS = "redundant, checkpoint", "checkpoint"
"""defaults of recovery.strategy if only adapters are trained: of one replica, and of several, which keep no copies"""
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
        raise UserError(f"{path}: no config.json is there; use the file {lone[0]}")
    if not (path / run_folders.CONFIG).exists():
        raise UserError(
            f"{path}: neither a run nor a model is there (no config.json); use one, a GGUF file, or {HUB}NAME"
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
        expected=family_of(saved.manifest.model).global_shapes,
    )


def _open_huggingface(folder: Path, named: str) -> WeightsFile:
    """Open a folder of the family ``named``; empty: of any shipped one that supports its model."""
    if named:
        return FAMILIES.find(named).open_folder(folder) or open_folder(folder)
    if (folder / ADAPTERS).is_file():
        return open_decoder(folder)
    try:
        return open_folder(folder)
    except Unsupported as error:
        try:
            return open_decoder(folder)
        except UserError as other:
            raise UserError(f"{error}; model.family = 'transformers': {other}") from None


def open_model(source: str | Path) -> tuple[Llama, Tokenizer]:
    """Load a LLaMA into memory, with its tokenizer; UserError for other models."""
    weights = open_weights(source)
    return weights.model(), tokenizer_of(weights)


def tokenizer_of(weights: WeightsFile) -> Tokenizer:
    """Return the tokenizer next to a model's weights; UserError if there is none."""
    if weights.tokenizer is None:
        raise UserError(f"{weights.path}: no tokenizer.json; save its tokenizer there (the fast kind)")
    return Tokenizer.open(weights.tokenizer, bare=weights.bare)


def local_weights(source: str | Path) -> Path:
    """Return the local path of weights; a Hub model is downloaded first."""
    text = str(source)
    return download(text.removeprefix(HUB)) if text.startswith(HUB) else expand_home(text)


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
        return {**tree, "model": _complete_settings(stated)} if "family" in stated else dict(tree)
    if not start.startswith(HUB) and not local_weights(start).exists():
        raise UserError(f"train.start = {start!r}: no such run, folder or file; check the path")
    settings = {name: value for name, value in stated.items() if value is not None}
    lora = dict(settings["lora"]) if isinstance(settings.get("lora"), Mapping) else {}
    weights = open_weights(start, str(settings.get("family", "transformers" if lora.get("rank") else "")))
    if "family" not in settings and weights.routing is not None and not weights.routing.bias:
        weights = open_weights(start, "transformers")
    require_dense(start, weights)
    named, trained = f"train.start = {start!r}", weights.config
    options = options_of(settings)
    settings = FAMILIES.find(trained.family).settings_beside(weights.path, named, trained, settings)
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
    several = any(tree.get("exchange", {}).get(key, 1) not in (1, None) for key in ("replicas", "max_replicas"))
    strategy = WITH_REPLICAS if several else RECOVERY_OF_ADAPTERS
    recovery = {"strategy": strategy} if lora.get("rank") else {}
    beneath = {
        "model": {**model, **settings, "options": model["options"], "lora": lora},
        "data": data | dict(tree.get("data", {})),
        "recovery": recovery | dict(tree.get("recovery", {})),
    }
    return {
        **tree,
        **beneath,
        "train": {**train, "start": str(local_weights(start)) if start.startswith(HUB) else start},
    }


def _complete_settings(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's section of the model, completed by its family; as stated if the family is unavailable."""
    try:
        chosen = FAMILIES.find(str(stated["family"]))
    except UserError:  # the checks of the whole recipe report it
        return dict(stated)
    return chosen.completed_section(stated)


def _require_own_adapters(named: str, own: ModelConfig, lora: Mapping[str, Any]) -> None:
    """Raise UserError if a recipe states other settings of adapters than those in the weights."""
    for name in sorted(lora.keys() & {"rank", "alpha", "targets"}):
        if lora[name] != (value := getattr(own.lora, name)):
            raise UserError(f"{named}: its adapters have {name} = {value}; remove model.lora.{name}")


def require_dense(start: str, weights: WeightsFile) -> None:
    """Reject models with several feed-forward blocks in a layer; recipes cannot describe them."""
    if weights.routing is not None:
        raise UserError(
            f"train.start = {start!r}: {weights.routing.experts} feed-forward blocks in each layer; only models with "
            "one can be trained, so start from an expert"
        )


def _other_file(path: Path) -> WeightsFile:
    """Open a llama2.c file, which has no magic number; reject anything else."""
    with path.open("rb") as file:
        begun = file.read(4)
    if begun.startswith(_PICKLES):
        raise UserError(f"{path}: a pickle is not read, since it can run code; convert it to safetensors")
    if path.suffix != ".bin":
        raise UserError(f"{path}: not a known file of weights; use a GGUF file, or the folder of config.json")
    return open_llama2c(path)
