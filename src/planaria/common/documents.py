"""Read JSON and TOML from untrusted or damaged files, with bounds.

Every such file is read here: any size, encoding, depth or number in it either parses or raises a :class:`UserError`
that names the file.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import re
import reprlib
import tomllib
from collections.abc import AsyncIterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from planaria.common.errors import UserError, suggestion

MAX_BYTES = 64 << 20
"""default maximum size of a document"""
_PIECE = 1 << 16
ModelType = TypeVar("ModelType", bound=BaseModel)
_LONG_KEY = re.compile(r"(?:\.[ \t]*[\w\"'-]{1,64}[ \t]*){100}")
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80
_BRIEF.maxdict, _BRIEF.maxlist = 3, 6


class Record(BaseModel):
    """Base of written records: immutable, no unknown keys; non-finite numbers are JSON strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def former_names(**renamed: str) -> Any:
    """Return a validator for a model that also reads records of older versions.

    :param renamed: present name of each renamed field → its name in older versions.
    """

    def current(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        present = {was: name for name, was in renamed.items() if name not in values}
        return {present.get(name, name): value for name, value in values.items()}

    return model_validator(mode="before")(current)


def read_bytes(path: Path, max_bytes: int = MAX_BYTES, fix: str = "restore it") -> bytes:
    """Return a file's bytes, at most ``max_bytes``; ``fix`` is the advice in errors.

    :raises UserError: if it is missing, not a regular file, larger, or unreadable.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe blocks, and a device has no end
            raise UserError(f"{path} is not a file; {fix}")
        with path.open("rb") as file:
            content = read_bounded(file, max_bytes)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise UserError(f"{path} cannot be read ({reason}); {fix}") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: larger than {max_bytes} bytes, the limit for this kind of file; {fix}")
    return content


def read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    """Read a stream to its end, or ``max_bytes`` + 1 bytes, in pieces: memory use follows the content, not the
    bound."""
    pieces, left = list[bytes](), max_bytes + 1
    while left and (piece := file.read(min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


async def read_body(stream: AsyncIterable[bytes], max_bytes: int, within_s: float) -> bytes | None:
    """Read an HTTP request body; return None if it exceeds ``max_bytes`` bytes or ``within_s`` seconds."""
    body = b""
    try:
        async with asyncio.timeout(within_s):
            async for chunk in stream:
                body += chunk
                if len(body) > max_bytes:
                    return None
    except TimeoutError:
        return None
    return body


def read_text(path: Path, max_bytes: int = MAX_BYTES, fix: str = "restore it") -> str:
    """Return a file's UTF-8 text; UserError as in :func:`read_bytes`, or if it is not UTF-8."""
    try:
        return read_bytes(path, max_bytes, fix).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 (byte {error.start}); {fix}") from None


def parse_toml(source: str, location: object) -> dict[str, Any]:
    """Return the tables of a TOML text.

    :raises UserError: naming ``location``, if it is not TOML, nested too deep, or has a number over 64 bits.
    """
    if _LONG_KEY.search(source):  # the parser takes the square of its length
        raise UserError(f"{location}: not valid TOML: a key with more than 100 parts; use a shorter key")
    try:
        tables = tomllib.loads(source)
    except RecursionError:
        raise UserError(f"{location}: not valid TOML: nested too deeply; reduce the nesting") from None
    except ValueError as error:  # also what Python says of a number with thousands of digits
        raise UserError(f"{location}: not valid TOML: {error}") from None
    refuse_nul(source, location)
    _refuse_huge(tables, location)
    return tables


def read_toml(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the tables of a TOML file; UserError as in :func:`parse_toml`, or if it is unreadable."""
    source = read_bytes(path, max_bytes, "use a TOML file")
    try:
        return parse_toml(source.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid TOML: not UTF-8 text (byte {error.start})") from None


def parse_json(source: bytes | str, location: object, fix: str = "restore it") -> Any:
    """Return the value of a JSON text; UserError, naming ``location``, as in :func:`parse_toml`."""
    try:
        return json.loads(source)
    except RecursionError:
        raise UserError(f"{location}: not JSON: nested too deep; {fix}") from None
    except ValueError as error:  # also invalid UTF-8
        raise UserError(f"{location}: not JSON: {error}; {fix}") from None


def read_json_object(path: Path, fix: str = "check the path") -> dict[str, Any]:
    """Return the JSON object in a file; UserError, naming the file, if it contains none."""
    tree = parse_json(read_bytes(path, fix=fix), path, fix)
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object; {fix}")
    return tree


def parse_model(kind: type[ModelType], source: bytes | str, location: object, fix: str = "restore it") -> ModelType:
    """Return the ``kind`` in a JSON text; UserError, naming ``location`` and the key, if it is invalid."""
    refuse_nul(source, location)
    try:
        return kind.model_validate_json(source)
    except ValidationError as error:
        raise UserError(f"{location}: {first_error(error, kind)}; {fix}") from None


def read_model(path: Path, kind: type[ModelType], max_bytes: int = MAX_BYTES, fix: str = "restore it") -> ModelType:
    """Return the ``kind`` in a JSON file; UserError, naming file and key, if it is invalid."""
    return parse_model(kind, read_bytes(path, max_bytes, fix), path, fix)


def seal(document: BaseModel) -> str:
    """Return a document as JSON with its own digest, ``sha256``, for :func:`read_sealed`."""
    tree = document.model_dump(mode="json")
    return json.dumps(tree | {"sha256": digest(tree)}, indent=2)


def read_sealed(path: Path, kind: type[ModelType], max_bytes: int = MAX_BYTES, fix: str = "restore it") -> ModelType:
    """Return a document written by :func:`seal`, or by an older planaria without a digest.

    :raises UserError: if it is missing, damaged or changed.
    """
    source = read_bytes(path, max_bytes, fix)
    refuse_nul(source, path)
    try:
        tree = json.loads(source)
        if isinstance(tree, dict) and "sha256" in tree and tree.pop("sha256") != digest(tree):
            raise UserError(f"{path} has changed since it was written (SHA-256 mismatch); {fix}")
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        reason = first_error(error, kind)
    except RecursionError:
        reason = "nested too deep"
    except ValueError as error:  # not JSON, or not UTF-8
        reason = str(error)
    raise UserError(f"{path}: damaged or of another version ({reason}); {fix}")


def digest(tree: object) -> str:
    """Return the SHA-256 (hex) of a JSON value, independent of its layout."""
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_nul(source: bytes | str, location: object) -> None:
    """Raise UserError if a text contains or escapes a NUL character, which no file name may have."""
    spelt = ("\x00", "\\u0000", "\\U00000000")
    if any((word.encode() if isinstance(source, bytes) else word) in source for word in spelt):  # type: ignore[operator]
        raise UserError(f"{location}: a NUL character; remove it")


def _refuse_huge(tree: object, location: object) -> None:
    """Raise UserError for numbers of more than 64 bits, which TOML does not have."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, int) and value.bit_length() > 64:
            raise UserError(f"{location}: not valid TOML: a number of {value.bit_length()} bits; it has at most 64")
        rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def first_error(
    error: ValidationError, kind: type[BaseModel] | None = None, values: bool = False, section: str = ""
) -> str:
    """Describe the first error of a document: its key, with ``values`` its value, and the reason.

    An unknown key comes first, because the intended key is then reported as missing. For a union of types, the deepest
    error counts.

    :param kind: the document's type, for suggestions of keys.
    :param section: location of the document in another one, such as ``recovery.options``.
    """
    problem = min(error.errors(include_url=False), key=lambda e: (e["type"] != "extra_forbidden", -len(e["loc"])))
    positions, keys = _locate(kind, problem["loc"]) if kind is not None else (problem["loc"], ())
    key = ".".join(filter(None, (section, *map(str, positions))))
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key" + (f"; {suggestion(str(positions[-1]), keys)}" if keys else "")
    value = f" = {quote(problem['input'])}" if values and positions and problem["type"] != "missing" else ""
    fix = "; add it" if values and problem["type"] == "missing" else ""
    return f"{key}{value}: {error_reason(problem)}{fix}" if key else error_reason(problem)


def error_reason(problem: ErrorDetails) -> str:
    """Return pydantic's reason for an error, as the end of a message."""
    if problem["type"] == "missing":
        return "missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = re.findall("'([^']+)'", problem["ctx"]["expected"])
        if close := difflib.get_close_matches(problem["input"], choices, n=1, cutoff=0.7):
            message += f"; did you mean {close[0]!r}?"
    return message[0].lower() + message[1:] if message.startswith("Input") else message


def _locate(kind: type[BaseModel], location: Sequence[int | str]) -> tuple[list[int | str], list[str]]:
    """Return pydantic's location of an error as the document has it, and the keys known there.

    For a union of types, pydantic's location also contains the type that it tried.
    """
    models, path = [kind], list[int | str]()
    for step in location[:-1]:
        if chosen := [candidate for candidate in models if candidate.__name__ == step]:
            models = chosen
            continue
        path.append(step)
        if any(step in candidate.model_fields for candidate in models):
            fields = (candidate.model_fields[str(step)] for candidate in models if step in candidate.model_fields)
            models = [inner for field in fields for inner in _models(field.annotation)]
    keys = sorted({name for candidate in models for name in candidate.model_fields})
    tried = {"str", "int", "float", "bool", *(candidate.__name__ for candidate in models)} - {*keys}
    return [*path, *(step for step in location[-1:] if step not in tried)], keys


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models within a type such as ``list[Node]`` or ``str | Files``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def quote(value: object) -> str:
    """Return a short repr of a value for messages."""
    try:
        return _BRIEF.repr(value)
    except ValueError:  # a number with more digits than Python prints
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a huge number"
