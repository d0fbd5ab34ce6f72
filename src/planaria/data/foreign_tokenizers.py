"""Open untrusted tokenizers, after a trial in a child process."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from planaria.common import child_process, documents
from planaria.common.errors import UserError
from planaria.data.tokenizer_check import FIX, is_plain
from planaria.models.gguf import gguf_tokenizer

MEMORY, PER_BYTE = 512 << 20, 32
"""bytes that a trial may use, in total and per byte of the file"""
SECONDS, SLOWEST = 60.0, 1e5
"""seconds that a trial may take, and bytes of a file per further second"""


@contextmanager
def tokenizer_errors(location: object) -> Iterator[None]:
    """Turn the library's failures on a text, a plain ``Exception`` or a panic, into one line.

    :raises UserError: naming ``location``.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{location}: fails on a text ({reason}); {FIX}") from None


def open_tokenizer(source: bytes, location: str) -> tuple[tokenizers.Tokenizer, float]:
    """Return the tokenizer of a tokenizer.json, and the maximum growth of a text by its normalizers.

    All but plain byte-level BPE is first tried in a child process.

    :raises UserError: naming ``location``, if it is invalid or fails the trial.
    """
    if len(source) > documents.MAX_BYTES:
        raise UserError(f"{location} has more than {documents.MAX_BYTES} bytes; {FIX}")
    try:
        tree = json.loads(source)
        source = json.dumps(tree).encode()  # without repeated keys: tried as loaded
        growth = 1.0 if is_plain(tree) else _check_tokenizer(source, location)
        with tokenizer_errors(location):
            return tokenizers.Tokenizer.from_buffer(source), growth
    except RecursionError:
        raise UserError(f"{location} is not a tokenizer.json (nested too deep); use one, or 'bpe'") from None
    except ValueError as error:
        raise UserError(f"{location} is not a tokenizer.json ({error}); use one, or 'bpe'") from error


def gguf_as_json(path: Path) -> bytes:
    """Return the tokenizer in a GGUF file, as a tokenizer.json.

    :raises UserError: if there is none, or it is of another kind.
    """
    with tokenizer_errors(path):
        return gguf_tokenizer(path).to_str().encode()


@functools.lru_cache(maxsize=8)
def _check_tokenizer(source: bytes, location: str) -> float:
    memory, seconds = MEMORY + PER_BYTE * len(source), SECONDS + len(source) / SLOWEST
    request = location.encode(errors="replace").replace(b"\0", b"?") + b"\0" + source
    answer = child_process.call(
        "planaria.data.tokenizer_check:check_tokenizer", request, memory, seconds, location, FIX
    )
    return float(json.loads(answer)["growth"])
