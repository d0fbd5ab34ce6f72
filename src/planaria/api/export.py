"""A run's model, taken elsewhere."""

from __future__ import annotations

from pathlib import Path

from planaria.checkpoint.loading import load_model
from planaria.data.tokenizer import Tokenizer
from planaria.engine import runs
from planaria.model.huggingface import export_model


def export_run(folder: Path, to: Path) -> Path:
    """Write the newest whole checkpoint of the run in ``folder`` as a Hugging Face model into ``to``."""
    runs.config_of(folder, runs.TOKENIZER)
    tokenizer = folder / runs.TOKENIZER
    export_model(load_model(runs.newest_whole(folder)), to, tokenizer, Tokenizer.open(tokenizer).end)
    return to
