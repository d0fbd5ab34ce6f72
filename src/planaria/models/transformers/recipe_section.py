"""Recipes' ``[model]`` sections of the family ``transformers``, whose sizes are in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.config.names import expand_home
from planaria.config.schema import ModelConfig
from planaria.models.huggingface import open_folder
from planaria.models.start_settings import FIXED, is_equal, options_of, require_same
from planaria.models.transformers.adapters import Lora
from planaria.models.transformers.decoder import PLACE, Decoder
from planaria.models.transformers.skeleton import read_config

OF_ANY = ("family", "options", "lora", "vocab", "dim", "layers", "tied", "context", "ends_layers")
"""settings that a recipe may set beside weights of this family"""


def lora_of(config: ModelConfig) -> Lora | None:
    """Return the settings of a model's adapters, or None if it has none."""
    lora = config.lora
    targets = tuple(name.strip() for name in lora.targets.split(","))
    return Lora(lora.rank, lora.alpha, targets, lora.base, lora.base_sha256, lora.precision) if lora.rank else None


def decoder_of(config: ModelConfig) -> Decoder:
    """Return the decoder of a model of the family ``transformers``."""
    return Decoder(config.options["config"], config.options.get("attention", "sdpa"), lora_of(config))


def model_section(values: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the settings of ``[model]`` for the config.json ``location`` with these ``values``.

    :raises UserError: if the model cannot be cut.
    """
    if isinstance(values.get("text_config"), Mapping):  # a model that takes pictures: only its text model is exported
        text = read_config(values, location)
        values = {name: value for name, value in text.to_dict().items() if not name.startswith("_")}
        values |= {"model_type": text.model_type}
    decoder = Decoder.of(values)
    try:
        facts = decoder.facts
    except UserError as error:
        raise UserError(str(error).replace(PLACE, location, 1)) from None
    sizes = {"vocab": facts.vocab, "dim": facts.width, "layers": facts.layers, "tied": bool(facts.tied_head)}
    context = int(values.get("max_position_embeddings") or values.get("n_positions") or 2048)
    return {"family": "transformers", "options": {"config": decoder.text}, "context": context, **sizes}


def section_from_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a model of ``transformers`` from scratch, with the sizes in its config.json."""
    options = options_of(stated)
    if not isinstance(location := options.get("config"), str):
        return dict(stated)
    if location.lstrip().startswith("{"):  # its contents
        return dict(stated)
    location = str(expand_home(location))
    section = model_section(documents.read_json_object(Path(location)), location)
    _require_no_sizes(f"model.options.config = {location!r}", stated)
    require_same(f"model.options.config = {location!r}", ModelConfig.model_validate(section), stated)
    section["context"] = min(section["context"], ModelConfig().context)
    return {**section, **stated, "options": {**options, **section["options"]}}


def settings_beside(folder: Path, named: str, own: ModelConfig, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``stated`` beside the weights ``named`` in ``folder``, of the model ``own``.

    :raises UserError: if ``stated`` names a different config.json, or sizes that config.json determines.
    """
    kept = _without_sizes_of(folder, stated)
    config = options_of(kept).get("config")
    if config is None:
        _require_no_sizes(named, kept)
    elif config != own.options["config"]:  # a run's own configuration states all settings
        raise UserError(f"{named}: its model has a config.json; remove model.options.config")
    return kept


def _without_sizes_of(folder: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's section without sizes of the family llama that equal those of the LLaMA in ``folder``, so that a
    recipe for that family also serves adapters."""
    if "config" in options_of(stated) or not stated.keys() - {*OF_ANY}:
        return dict(stated)
    try:
        sizes = open_folder(folder).config
    except UserError:  # not a LLaMA
        return dict(stated)
    fields = {name: "kv" if name == "kv_heads" else name for name in stated}
    return {
        name: value
        for name, value in stated.items()
        if name in OF_ANY or fields[name] not in FIXED or not is_equal(value, getattr(sizes, fields[name]))
    }


def _require_no_sizes(named: str, stated: Mapping[str, object]) -> None:
    """Raise UserError for sizes of the family llama beside a model whose config.json has its own."""
    if sizes := ", ".join(f"model.{name}" for name in stated if name not in OF_ANY):
        raise UserError(f"{named}: config.json determines {sizes} (model.family = 'transformers'); remove them")
