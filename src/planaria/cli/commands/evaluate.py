"""``planaria eval``: a run's validation perplexity, whole and with stages omitted."""

from __future__ import annotations

import json
from pathlib import Path

from planaria.common.errors import UserError
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.report.observe.bars import CountProgress
from planaria.report.tables import Table, show
from planaria.runtime.api.stage_omission import Omission, evaluations, omissions
from planaria.runtime.checkpoint.loading import load_stages
from planaria.runtime.preparation import run_folders
from planaria.runtime.worker.step_samples import batches, learned_targets, masks

FILE = "omission.json"


def evaluate(folder: Path, omit: str, max_subsets: int, microbatches: int | None) -> int:
    """Evaluate the newest whole checkpoint of a run, print a table, and write it as JSON to the run's folder."""
    config = run_folders.config_of(folder, *run_folders.RUN_FILES)
    saved = run_folders.newest_whole(folder)
    stages = saved.manifest.pipeline_stages
    shares = parse_shares(omit, stages)
    if max_subsets < 1:
        raise UserError(f"--subsets {max_subsets}: use 1 or more")
    model = load_stages(saved)
    dataset = tokenise_corpus(config.data, config.model.vocab, context=config.model.context)
    stream = Stream(dataset, "validation", config.model.context, config.seed)
    count = microbatches or config.train.eval_microbatches
    batch = batches(stream, 0, config.pipeline.microbatch_size)
    document_masks = masks(config.data, stream, batch, 0, config.pipeline.microbatch_size)
    counts = learned_targets(stream, 0, config.pipeline.microbatch_size, count)
    total = evaluations(stages, shares, max_subsets)
    with CountProgress("evaluating the whole model and subsets of stages", "evaluations", total) as progress:
        measured = omissions(
            model, batch, count, shares, max_subsets, config.seed, document_masks, counts, progress.advance
        )
    unfinished = folder / f".{FILE}"
    unfinished.write_text(json.dumps([omission.model_dump() for omission in measured], indent=1))
    unfinished.replace(folder / FILE)
    _show(measured, stages)
    print(f"results       {folder / FILE}")
    return 0


def parse_shares(text: str, stages: int) -> list[float]:
    """Parse shares of the block stages, such as '0.25,0.5'; UserError if one omits none or all of them."""
    shares = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            share = float(word)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1 or not 0 < round(share * stages) < stages:
            raise UserError(
                f"--omit {text}: {word} of {stages} block stages is not between one stage and all but one; use shares "
                "such as 0.25,0.5"
            )
        shares.append(share)
    return shares


def _show(measured: list[Omission], stages: int) -> None:
    rows = [
        [
            f"{omission.stages}",
            f"{omission.subsets} of {omission.possible}",
            f"{omission.perplexity:.3f}",
            f"{omission.least:.3f} … {omission.most:.3f}" if omission.subsets > 1 else "",
            f"{omission.over_full - 1:+.1%}" if omission.stages else "",
        ]
        for omission in measured
    ]
    head = ["omitted", "subsets", "perplexity", "least … most", "over the whole model"]
    show([Table(f"validation perplexity, of {stages} block stages", head, rows, numbers_from=0)])
