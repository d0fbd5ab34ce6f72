"""The configuration of a run, from a recipe's name, file or object, and settings that override it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath

from planaria.common.errors import UserError, suggestion
from planaria.config import recipe as recipes
from planaria.config.options import NAME
from planaria.config.schema import RunConfig
from planaria.config.section import present_name, section_of
from planaria.config.shipped import find
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.runtime.preparation.prepare import streams as streams_of
from planaria.runtime.preparation.prepare import with_absolute_paths
from planaria.runtime.preparation.weight_sources import with_inherited_settings

Recipe = str | Path | RunConfig
"""a name from ``planaria recipes``, a TOML file, or a configuration"""
Settings = Mapping[str, object]
"""dotted name of a setting → value: text, parsed as on the command line, or an object, such as a class or a Path"""


def configure(recipe: Recipe, *, settings: Settings | None = None, **short: object) -> RunConfig:
    """Return the configuration that :func:`planaria.train` would train: a recipe with settings applied.

    ``settings`` have the names of recipes and the command line: ``{"recovery.strategy": "echo"}``. A keyword names a
    setting by its last part if that is unique (``steps=200``, ``lr=1e-3``), or in full with ``**{"recovery.strategy":
    "echo"}``.

    :raises UserError: if the recipe or a setting is unknown or invalid; the message suggests the nearest name.
    """
    given = merge_settings(settings, short)
    if isinstance(recipe, RunConfig):
        config = recipes.with_flags(recipe, given, "the configuration", with_inherited_settings)
        return with_absolute_paths(config, None)
    file = find(str(recipe))
    return with_absolute_paths(recipes.load(file, given, "train", fill_defaults=with_inherited_settings), file)


def streams(config: RunConfig) -> tuple[Stream, Stream]:
    """Return the training and validation samples of a configuration, for an :class:`planaria.ReferenceEngine`.

    Tokenises the text, or uses the cache. Sample ``n`` is int64 [model.context + 1].
    :raises UserError: if the text is unavailable, or too short for one sample.
    """
    dataset = tokenise_corpus(config.data, config.model.vocab, context=config.model.context)
    train, validation = streams_of(config, dataset)
    return train, validation or Stream(dataset, "validation", config.model.context, config.seed)


def merge_settings(settings: Settings | None, short: Settings) -> dict[str, object]:
    """Merge both forms of settings into dotted name → value; UserError if one is unknown, ambiguous, or given twice."""
    names = [name for name, _ in recipes.fields()]
    given: dict[str, object] = {}
    for word, value in [*(settings or {}).items(), *short.items()]:
        section, option, _ = word.partition(f".{NAME}.")
        own = recipes.find_setting(word) is not None or (option and f"{section}.{NAME}" in names)
        _refuse_former(word)
        meant = [word] if own else [n for n in names if n.rpartition(".")[2] == word and word in short]
        if not meant:
            raise UserError(f"{word}: unknown setting; {_nearest(word, names)}")
        if len(meant) > 1:
            raise UserError(f"{word}: could be {' or '.join(meant)}; write settings={{{meant[0]!r}: {value!r}}}")
        if meant[0] in given:
            raise UserError(f"{meant[0]} is given twice; remove one of them")
        given[meant[0]] = _as_text(value)
    return given


def _as_text(value: object) -> object:
    """Return a class as MODULE:CLASS and a path as text, as recipes have them; other values as they are."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value) if isinstance(value, PurePath) else value


def _refuse_former(word: str) -> None:
    """:raises UserError: if older versions had a setting ``word``; names its present spelling."""
    head, _, key = word.rpartition(".")
    section = section_of(RunConfig.model_fields[head].annotation) if head in RunConfig.model_fields else None
    if section is not None and (name := present_name(section, key)) != key:
        raise UserError(f"{word} is now {head}.{name}")


def _nearest(word: str, names: list[str]) -> str:
    hint = suggestion(word, names if "." in word else {*names, *(name.rpartition(".")[2] for name in names)})
    return hint if hint.startswith("did") else "`planaria train --help` lists them all"
