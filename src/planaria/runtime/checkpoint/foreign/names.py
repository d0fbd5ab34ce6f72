"""The assignment of a foreign folder's tensors to parameters: by Hugging Face's names, or by a map of names. Pure.

A map is a TOML file, a line for each pattern. ``{n}`` matches a number, ``*`` any text, each once at most::

    "embedding.weight" = { parts = ["model.embed_tokens.weight"], padded = true }
    "decoder.{n}.attention.dense.weight" = "model.layers.{n-3}.self_attn.o_proj.weight"
    "decoder.{n}.qkv.weight" = { parts = ["….q_proj.weight", "….k_proj.weight", "….v_proj.weight"], slices = 2 }
    "rotary.*" = ""
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.common import documents
from planaria.common.errors import UserError

_REDUNDANT = ".rotary_emb.inv_freq"
_FIELDS = {"parts", "slices", "padded"}
_MAX_SLICES = 1 << 16
_NUMBER = re.compile(r"\{n(?:-(\d{1,6}))?\}")
ModelShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NameRule:
    """A line of a map: names that match ``pattern`` are these ``parts`` of the model, consecutive along dimension 0."""

    pattern: str
    parts: tuple[str, ...]
    """empty: left out on purpose"""
    slices: int | None = None
    """equal slices that each hold a share of every part (``folder.split``)"""
    padded: bool = False
    """whether rows beyond the model's are padding to cut off"""

    def fits(self, name: str) -> tuple[str, ...] | None:
        """Return the model's parameters for ``name``, or None if it does not match the pattern."""
        match = re.fullmatch(_regular_expression(self.pattern), name, re.DOTALL)
        return None if match is None else tuple(_fill_in(part, match.groupdict()) for part in self.parts)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the folder, and the parameters in it."""

    name: str
    parts: tuple[str, ...]
    slices: int | None = None
    padded: bool = False


@dataclass(frozen=True)
class TensorAssignment:
    """The use of a folder's tensors."""

    wholes: tuple[NamedTensor, ...]
    head: str | None
    """name of the tensor that must equal the embedding table, in a tied model"""
    left: tuple[str, ...]
    """names that are left out"""


def assign(
    path: Path,
    names: Collection[str],
    model: ModelShapes,
    head: str,
    rules: Sequence[NameRule] = (),
    source: Path | None = None,
) -> TensorAssignment:
    """Assign each of ``names`` to parameters of the ``model``; ``source``: the file of the rules.

    ``head``: the head's name, which a tied ``model`` lacks.

    :raises UserError: if a name has no parameter, two have the same, a parameter is missing, a rule matches nothing, or
        two rules match one name.
    """
    used: set[str] = set()
    wholes: list[NamedTensor] = []
    unused: list[str] = []
    for name in sorted(names):
        matching = [(rule, parts) for rule in rules if (parts := rule.fits(name)) is not None]
        if len(matching) > 1:
            both = " and ".join(repr(rule.pattern) for rule, _ in matching[:2])
            raise UserError(f"{source}: {both} match {name}; keep one of them")
        used |= {rule.pattern for rule, _ in matching}
        if not matching:
            wholes.append(NamedTensor(name, (name,)))
        elif matching[0][1]:
            rule, parts = matching[0]
            wholes.append(NamedTensor(name, parts, rule.slices, rule.padded))
        else:
            unused.append(name)
    if idle := [rule.pattern for rule in rules if rule.pattern not in used]:
        raise UserError(f"{source}: {idle[0]!r} matches no tensor of {path}; correct it, or remove it")
    unused += [whole.name for whole in wholes if whole.name.endswith(_REDUNDANT) and whole.parts == (whole.name,)]
    tied = next((w.name for w in wholes if w.parts == (head,) and head not in model), None)
    wholes = [whole for whole in wholes if whole.name not in unused and whole.name != tied]
    _require_each_once(path, wholes, model)
    return TensorAssignment(tuple(wholes), tied, tuple(unused))


def _require_each_once(path: Path, wholes: Iterable[NamedTensor], model: ModelShapes) -> None:
    """Raise UserError for the first parameter that is unknown, duplicated or missing."""
    holders: dict[str, str] = {}
    for whole in wholes:
        for part in whole.parts:
            if part not in model:
                mapped = "" if part == whole.name else f" (mapped to {part})"
                raise UserError(f"{path}: {whole.name}{mapped} is not a parameter of this model; map it with --names")
            if part in holders:
                raise UserError(f"{path}: {part} is listed twice, as {holders[part]} and as {whole.name}; remove one")
            holders[part] = whole.name
    for part, shape in model.items():
        if part not in holders:
            raise UserError(f"{path}: {part} is missing; it should have shape {list(shape)}")


def read(path: Path) -> tuple[NameRule, ...]:
    """Read a map from a file; UserError for the first invalid pattern."""
    return tuple(_parse_rule(path, pattern, value) for pattern, value in documents.read_toml(path).items())


def _parse_rule(path: Path, pattern: str, value: Any) -> NameRule:
    table = {"parts": [value] if value else []} if isinstance(value, str) else value
    if not isinstance(table, dict) or not table.keys() <= _FIELDS or "parts" not in table:
        raise UserError(f"{path}: {pattern!r}: use a name in quotes, or a table of parts, slices and padded")
    parts = table["parts"]
    slices, padded = table.get("slices"), table.get("padded", False)
    if not isinstance(parts, list) or not all(isinstance(part, str) and part for part in parts):
        raise UserError(f"{path}: {pattern!r}: parts must be a list of names of the model")
    if slices is not None and (type(slices) is not int or not 1 <= slices <= _MAX_SLICES):
        raise UserError(f"{path}: {pattern!r}: slices = {documents.quote(slices)} must be 1 or more")
    if not isinstance(padded, bool) or (padded and len(parts) != 1):
        raise UserError(f"{path}: {pattern!r}: padded = true goes with one part")
    if pattern.count("*") > 1 or pattern.count("{n}") > 1:
        raise UserError(f"{path}: {pattern!r} has {{n}} or * more than once")
    for part in parts:
        if part.count("*") > pattern.count("*") or (_NUMBER.search(part) and "{n}" not in pattern):
            raise UserError(f"{path}: {pattern!r}: {part!r} has a {{n}} or * that is not in the pattern")
    return NameRule(pattern, tuple(parts), slices, padded)


def _regular_expression(pattern: str) -> str:
    """Return the regular expression of a pattern, without ambiguous alternatives."""
    pieces = re.split(r"(\{n\}|\*)", pattern)
    return "".join({"{n}": r"(?P<n>\d{1,9})", "*": "(?P<rest>.*)"}.get(piece, re.escape(piece)) for piece in pieces)


def _fill_in(part: str, captured: Mapping[str, str]) -> str:
    filled = _NUMBER.sub(lambda less: str(int(captured["n"]) - int(less[1] or 0)), part)
    return filled.replace("*", captured.get("rest", "")) if "rest" in captured else filled
