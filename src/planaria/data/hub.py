"""Texts from the Hugging Face hub, through the package ``datasets`` (the extra ``hub``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from planaria.common.errors import UserError, missing_package, nearest
from planaria.data.records import text_of

PREFIX = "hf:"


def read_hub(source: str, field: str) -> Iterator[str]:
    """``field`` of every row of the split "train" of ``source``, which is 'hf:NAME' or 'hf:NAME:CONFIG'.

    The dataset is streamed: nothing of it is stored, and no more downloaded than is read. Raises UserError when the
    package is missing, the dataset or its configuration is unknown or out of reach, or the field is not there.
    """
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"data.source = {source!r} names no dataset; write 'hf:NAME' or 'hf:NAME:CONFIG'")
    try:
        import datasets
    except ImportError as error:
        raise missing_package(f"data.source = {source!r}", "datasets", "hub") from error
    with _loaded(source):
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        columns = rows.column_names  # None where only the rows themselves tell
    if columns is not None and field not in columns:
        raise UserError(f"data.source = {source!r}: no field {field!r} ({nearest(field, columns)}); set data.field")
    with _loaded(source):
        left = iter(rows if columns is None else rows.select_columns([field]))
    for number in count():
        with _loaded(source):
            row = next(left, None)
        if row is None:
            return
        yield text_of(row, field, f"{source}, row {number}")


@contextmanager
def _loaded(source: str) -> Iterator[None]:
    """The package streams through others, whose failures may be of any kind."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"data.source = {source!r}: cannot load it ({reason}); check the name and the network, or give local files"
        ) from error
