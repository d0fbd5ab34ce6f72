"""Texts from the Hugging Face hub, through the package ``datasets`` (the extra ``hub``)."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.data.records import text_of
from planaria.errors import UserError, nearest

PREFIX = "hf:"


def read_hub(source: str, field: str) -> Iterator[str]:
    """``field`` of every row of the split "train" of ``source``, which is 'hf:NAME' or 'hf:NAME:CONFIG'.

    The dataset is downloaded into its own cache at the first use and mapped from there, never held in memory. Raises
    UserError when the package is missing, the dataset or its configuration is unknown or unreachable, or the field is
    not there.
    """
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"data.source = {source!r} names no dataset; write 'hf:NAME' or 'hf:NAME:CONFIG'")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data.source = {source!r} needs the package 'datasets'; install it with: pip install -e '.[hub]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train")
    # OSError covers the network (ConnectionError and its kin) and datasets that are not there.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"data.source = {source!r}: cannot load it ({reason}); check the name and the network, or give local files"
        ) from error
    if field not in rows.column_names:
        hint = nearest(field, rows.column_names)
        raise UserError(f"data.source = {source!r}: no field {field!r} ({hint}); set data.field")
    for number, row in enumerate(rows.select_columns([field])):
        yield text_of(row, field, f"{source}, row {number}")
