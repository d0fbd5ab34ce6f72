"""``planaria eval`` of an exported model: perplexity on texts; of a merged one, also which blocks they pass."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch

from planaria.cli.commands.ensemble import MOST_WINDOWS
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data.shards import prepare
from planaria.lab.experts import fused
from planaria.lab.experts.domains import TEST
from planaria.lab.experts.manifest import TOKENIZER
from planaria.lab.experts.merge import shares
from planaria.lab.experts.reading import token_logps, windows
from planaria.models.stages import Llama
from planaria.report.live.bars import CountProgress
from planaria.report.tables import Table, show
from planaria.runtime.engine.weights import open_model


def evaluate_model(folder: Path, text: str | None) -> int:
    """Print the perplexity of the model in ``folder`` on ``text``, or on the test texts of the experts it was made of.

    :raises UserError: when there is no such text, or it is shorter than one sample.
    """
    torch.set_num_threads(1)
    model, _ = open_model(folder)
    model.eval()
    made = fused.read(folder)
    names = [] if made is None or model.routing is None else [part.name for part in made.parts]
    if model.routing is not None and len(names) != model.routing.experts:
        names = [f"block {number}" for number in range(model.routing.experts)]
    rows = [[name, *_measured(folder, model, source, names)] for name, source in _sources(folder, made, text).items()]
    head = ["text", "perplexity"] + (["passes most", "of all passes"] if names else [])
    show([Table(f"perplexity of {folder}: at most {MOST_WINDOWS} samples of each text", head, rows)])
    return 0


def _sources(folder: Path, made: fused.Fused | None, text: str | None) -> dict[str, str]:
    """Texts by name."""
    if text is not None:
        return {text: text}
    if made is None or not made.run:
        raise UserError(f"{folder}: knows no test texts; name a text to be measured on with --text FILE")
    tests = sorted((Path(made.run) / TEST).glob("*.jsonl"))
    if not tests:
        raise UserError(f"{Path(made.run) / TEST}: has no test texts; name one to be measured on with --text FILE")
    return {file.stem: str(file) for file in tests}


def _measured(folder: Path, model: Llama, source: str, names: list[str]) -> list[str]:
    """Cells of one text."""
    data = DataConfig(source=source, tokenizer=str(folder / TOKENIZER), validation=0.0)
    samples = windows(prepare(data, model.config.vocab), "train", model.config.context, MOST_WINDOWS)
    with (
        CountProgress(f"the model reads {source}", "samples", len(samples)) as progress,
        shares(model) if names else nullcontext(torch.ones(1)) as passed,
    ):
        found = math.exp(-float(token_logps(model, samples, progress.done).mean()))
    if not names:
        return [f"{found:.3f}"]
    most = int(passed.argmax())
    return [f"{found:.3f}", names[most], f"{float(passed[most] / passed.sum()):.1%}"]
