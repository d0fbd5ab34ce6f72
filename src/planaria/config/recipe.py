"""Recipes: a run's configuration from a TOML file and flags, with errors that name the location and the fix."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from planaria.common import documents
from planaria.common.errors import UserError, suggestion
from planaria.config import names, shipped
from planaria.config.kinds import require_kind, without_tables
from planaria.config.options import NAME, Options, choice_of
from planaria.config.schema import RunConfig, Section
from planaria.config.section import DERIVED, entry_of, meaning, refuse_unknown, section_of, settings_of

MAX_RECIPE_BYTES = 1 << 20
RUN = "config.json"
"""file of a run's folder with its configuration"""
Root = TypeVar("Root", bound=Section)
"""root section of a recipe; most are RunConfig"""
PATH_SETTINGS = (
    "data.source",
    "data.tokenizer",
    "data.template",
    "data.mixture.*.source",
    "train.start",
    "model.options.config",
)
"""settings that may name files next to a recipe: values that start with ./ or ../"""
FillDefaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""adds defaults to a recipe's tree with flags"""


def fields(section: type[Section] = RunConfig) -> Iterator[tuple[str, FieldInfo]]:
    """Yield all settings with dotted names, in the order of the recipe; without derived fields."""
    return ((dotted, owner.model_fields[name]) for dotted, owner, name in settings_of(section))


def meanings(section: type[Section] = RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the description of each setting, in the order of :func:`fields`."""
    return ((dotted, meaning(owner, name)) for dotted, owner, name in settings_of(section))


def find_setting(name: str, section: type[Section] = RunConfig) -> FieldInfo | None:
    """Return the setting of this dotted name, also of an entry in a table with free names, or None if there is none."""
    key, _, rest = name.partition(".")
    field = section.model_fields.get(key)
    if field is None or field.json_schema_extra == DERIVED:
        return None
    if inner := section_of(field.annotation):
        return find_setting(rest, inner)
    if rest and (inner := entry_of(field.annotation)):
        return find_setting(rest.partition(".")[2], inner)
    return None if rest else field


def in_table(name: str) -> bool:
    """Return whether this dotted name is in a table with free names."""
    return any(name.startswith(f"{path}.") for path, field in fields() if entry_of(field.annotation))


def load(
    recipe: Path | None, flags: Mapping[str, object], *kinds: str, fill_defaults: FillDefaults = lambda tree: tree
) -> RunConfig:
    """Return the configuration of ``recipe`` (None for all defaults) with ``flags`` (dotted name → text, or value)
    applied.

    :param kinds: accepted kinds of recipe; by default any, and only the run's own tables count.
    :param fill_defaults: adds values that are not stated, before defaults apply.
    :raises UserError: naming file or flag, key, and the nearest known key or the expected value.
    """
    if recipe is None:
        return _validate_with_flags(RunConfig, {}, flags, "the defaults", fill_defaults)
    tree = read(recipe)
    if kinds:
        require_kind(tree, recipe, *kinds)
    return resolve(RunConfig, without_tables(tree), flags, recipe, fill_defaults=fill_defaults)


def from_tree(tree: Mapping[str, Any], flags: Mapping[str, object], recipe: Path, location: str = "") -> RunConfig:
    """Return the configuration of ``tree`` from the file ``recipe``; ``location`` is its location within the file.

    :raises UserError: as in :func:`load`.
    """
    return resolve(RunConfig, tree, flags, recipe, location)


def resolve(
    section_type: type[Root],
    tree: Mapping[str, Any],
    flags: Mapping[str, object],
    recipe: Path,
    location: str = "",
    fill_defaults: FillDefaults = lambda tree: tree,
) -> Root:
    """Return the configuration of ``tree``, a named recipe with this root section, as :func:`from_tree` does."""
    where = f"{recipe}: {location}" if location else str(recipe)
    refuse_unknown(tree, section_type, where)
    settings = map_paths(json.loads(json.dumps(tree, default=str)), lambda name: _path_next_to(recipe, name))
    settings.setdefault("name", names.name_of_recipe(recipe.stem))
    return _validate_with_flags(section_type, settings, flags, where, fill_defaults)


def with_flags(
    config: RunConfig,
    flags: Mapping[str, object],
    location: str = "the run's config.json",
    fill_defaults: FillDefaults = lambda tree: tree,
) -> RunConfig:
    """Return ``config``, which came from ``location``, with ``flags`` applied.

    :raises UserError: as in :func:`load`, which also describes ``fill_defaults``.
    """
    tree = config.model_dump(mode="json", exclude_unset=True)
    for derived in ("block_layers", "subspace"):  # from settings that flags may change
        tree.get("model", {}).pop(derived, None)
    return _validate_with_flags(RunConfig, tree, flags, location, fill_defaults)


def parse(tree: str, location: str) -> RunConfig:
    """Return the configuration from a run folder's JSON; errors name ``location``."""
    documents.refuse_nul(tree, location)
    try:
        return RunConfig.model_validate_json(tree)
    except ValidationError as error:
        raise UserError(f"{location}: {documents.first_error(error)}") from None


def flatten(config: Section | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all settings by dotted name, including tables with free names and options of choices."""
    settings: dict[str, Any] = {}
    for name, value in dict(config).items():
        inner = isinstance(value, Section | Mapping)
        settings |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return settings


def dump(config: Section, **tables: Section) -> str:
    """Return the configuration as a recipe with every field, and extra ``tables``."""
    sections = {name: section.model_dump(mode="json", exclude_none=True) for name, section in tables.items()}
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True) | sections)


def read(recipe: Path) -> dict[str, Any]:
    """Return the unvalidated tables of a recipe.

    :raises UserError: if there is no such file, or it is not TOML.
    """
    if (recipe / RUN).is_file():
        raise UserError(f"{recipe} is a run, not a recipe; continue it with `planaria train --resume {recipe}`")
    if recipe.is_dir():
        raise UserError(f"{recipe} is a folder, not a recipe; use a TOML file or a name that `planaria recipes` lists")
    if not recipe.is_file():
        neighbours = [p.name for p in recipe.parent.glob("*.toml")] if recipe.parent.is_dir() else []
        fix = (
            suggestion(recipe.name, neighbours)
            if recipe.suffix and neighbours
            else suggestion(str(recipe), shipped.names())
        )
        raise UserError(f"{recipe}: no such recipe; {fix}")
    if recipe.stat().st_size > MAX_RECIPE_BYTES:
        raise UserError(
            f"{recipe}: {recipe.stat().st_size} bytes is too large for a recipe (at most {MAX_RECIPE_BYTES})"
        )
    return documents.read_toml(recipe, MAX_RECIPE_BYTES)


def merge_tables(tree: Mapping[str, Any], changes: Mapping[str, Any], section: type[Section] | None) -> dict[str, Any]:
    """Return ``tree`` with the tables ``changes`` applied key by key. A changed choice starts without options.

    :param section: the class of ``tree``, or None for a table with free names.
    """
    merged = dict(tree)
    choice = choice_of(section) if section else None
    if choice is not None and choice in changes and changes[choice] != tree.get(choice):
        merged.pop(NAME, None)
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            field = section.model_fields.get(key) if section else None
            merged[key] = merge_tables(inner, value, section_of(field.annotation) if field else None)
        else:
            merged[key] = value
    return merged


def map_paths(tree: Mapping[str, Any], change: Callable[[str], str], prefix: str = "") -> dict[str, Any]:
    """Return ``tree`` with each of its :data:`PATH_SETTINGS` changed."""
    changed = dict(tree)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            changed[key] = map_paths(value, change, f"{name}.")
        elif isinstance(value, str) and any(fnmatchcase(name, location) for location in PATH_SETTINGS):
            changed[key] = change(value)
    return changed


def _path_next_to(recipe: Path, name: str) -> str:
    """Return the full path of a file next to the recipe if it exists; other text unchanged."""
    file = recipe.parent / name
    return os.path.normpath(file.absolute()) if name.startswith(("./", "../")) and file.exists() else name


def table(section_type: type[Root], value: Any, name: str, recipe: Path) -> Root:
    """Return the extra table ``name`` of a recipe, such as ``[compare]``.

    :raises UserError: naming file, key and the problem.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{recipe}: {name} is a section; set its keys below [{name}]")
    refuse_unknown(value, section_type, str(recipe), f"{name}.")
    try:
        return section_type.model_validate(dict(value))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error" and isinstance(first["input"], Mapping):  # names the fields it is about
            raise UserError(f"{recipe}: {documents.error_reason(first)}") from None
        raise UserError(f"{recipe}: {documents.first_error(error, section_type, values=True, section=name)}") from None


def _value(section_type: type[Section], name: str, text: object) -> Any:
    """Return a flag's text as a TOML value; bare words are strings, and none unsets optional settings."""
    if not isinstance(text, str):
        return text  # set by a program
    documents.refuse_nul(text, f"--{name}")
    field = find_setting(name, section_type)
    annotation = None if field is None else field.annotation  # None for an option, whose type its choice knows
    if text == "none" and type(None) in get_args(annotation):
        return None
    is_table = Options in get_args(annotation) and text.lstrip().startswith("{")
    if annotation is str or (str in get_args(annotation) and not is_table):
        return text
    try:
        return documents.parse_toml(f"value = {text}", f"--{name}")["value"]
    except UserError:
        return text


def _validate_with_flags(
    section_type: type[Root],
    tree: dict[str, Any],
    flags: Mapping[str, object],
    location: str,
    fill_defaults: FillDefaults = lambda tree: tree,
) -> Root:
    for name, text in flags.items():
        _set(tree, name, _value(section_type, name, text))
    try:
        return section_type.model_validate_json(json.dumps(fill_defaults(tree), default=str))
    except ValidationError as error:
        raise UserError(_explain(error, location, flags)) from None


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, key = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def _explain(error: ValidationError, location: str, flags: Mapping[str, object]) -> str:
    first = error.errors()[0]
    key = ".".join(str(p) for p in first["loc"] if not isinstance(p, int))
    if key in flags:
        return f"--{key} {documents.quote(str(flags[key]))[1:-1]}: {documents.error_reason(first)}"
    if first["type"] == "value_error":  # a rule about several fields mentions them
        return f"{location}{' with these flags' if flags else ''}: {documents.error_reason(first)}"
    if first["type"] == "missing":
        return f"{location}: {key} is missing; set it"
    return f"{location}: {key} = {documents.quote(first['input'])}: {documents.error_reason(first)}"
