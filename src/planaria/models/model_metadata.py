"""Settings of a model beside its weights: context, special tokens, generation settings, chat template.

Training changes none of them, so an export of a fine-tuned model keeps those of the original model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from planaria.common import documents
from planaria.common.documents import Record

CONFIG, BASE_CONFIG = "config.json", "base_config.json"
"""a model's configuration; in a folder of adapters, where transformers would look for weights beside config.json, that
of their base model"""
GENERATION, SETTINGS, TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
CLASS = "PreTrainedTokenizerFast"
"""class of a tokenizer that consists of its tokenizer.json"""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MAX_FILE_BYTES = 4 << 20
"""maximum bytes of one of the files"""
_FIX = "download it again"


class ModelMetadata(Record):
    """The settings beside a model's weights and tokenizer."""

    context: int
    """tokens of the longest text that the model reads"""
    ids: dict[str, int | list[int] | None]
    """ids of special tokens, by their key in config.json; a model may have several end tokens"""
    generation: dict[str, Any] = Field(default_factory=dict)
    """generation_config.json"""
    tokenizer: dict[str, Any] = Field(default_factory=dict)
    """tokenizer_config.json"""
    template: str = ""
    """chat_template.jinja; older models have theirs in tokenizer_config.json"""

    def config(self, context: int) -> dict[str, Any]:
        """Return the keys of config.json for a model that was trained further on texts of ``context`` tokens."""
        return {"max_position_embeddings": max(context, self.context), **self.ids}

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text, those of the generation settings included."""
        stated = (self.ids.get("eos_token_id"), self.generation.get("eos_token_id"))
        return tuple(i for ids in stated for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int)

    def write(self, folder: Path) -> None:
        """Write the files into an exported model's folder, replacing those of the same names."""
        if self.generation:
            write_json(folder / GENERATION, self.generation)
        if self.tokenizer:
            write_json(folder / SETTINGS, self.tokenizer)
        if self.template:
            (folder / TEMPLATE).write_text(self.template, encoding="utf-8")


def config_file(folder: Path) -> Path:
    """Return the configuration of the model in a Hugging Face folder, or of its adapters' base model."""
    base = folder / BASE_CONFIG
    return base if base.is_file() else folder / CONFIG


def metadata_of_folder(folder: Path, config: Mapping[str, Any], context: int) -> ModelMetadata:
    """Return the settings of a model in a Hugging Face folder; ``config`` is its config.json.

    :raises UserError: naming a file that is damaged or too large.
    """
    template = folder / TEMPLATE
    settings = json_table(folder / SETTINGS)
    if "auto_map" in settings:  # a custom class, which would have to be downloaded and executed
        settings = {key: setting for key, setting in settings.items() if key != "auto_map"} | {"tokenizer_class": CLASS}
    return ModelMetadata(
        context=context,
        ids={key: config[key] for key in _IDS if _is_id(config.get(key))},
        generation=json_table(folder / GENERATION),
        tokenizer=settings,
        template=documents.read_text(template, _MAX_FILE_BYTES, _FIX) if template.is_file() else "",
    )


def metadata_of_gguf(metadata: Mapping[str, Any], context: int) -> ModelMetadata:
    """Return the settings of a model in a GGUF file, from the file's ``metadata``."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = tokens if isinstance(tokens, list) else []

    def token(kind: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(names) else None

    ends = list(dict.fromkeys(end for kind in ("eos", "eot") if (end := token(kind)) is not None))
    ids: dict[str, int | list[int] | None] = {
        "bos_token_id": token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token("padding"),
    }
    named = {f"{kind}_token": names[token_id] for kind in ("bos", "eos") if (token_id := token(kind)) is not None}
    settings = {"tokenizer_class": CLASS, "model_max_length": context, "clean_up_tokenization_spaces": False, **named}
    template = metadata.get("tokenizer.chat_template")
    return ModelMetadata(
        context=context,
        ids=ids,
        generation=ids,
        tokenizer=settings if names else {},
        template=template if isinstance(template, str) and len(template) <= _MAX_FILE_BYTES else "",
    )


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a table as a JSON file in Hugging Face's format."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_id(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(token_id) is int for token_id in value))


def json_table(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model; empty if there is none. UserError if the file is damaged."""
    content = (
        documents.parse_json(documents.read_bytes(file, _MAX_FILE_BYTES, _FIX), file, _FIX) if file.is_file() else {}
    )
    return content if isinstance(content, dict) else {}
