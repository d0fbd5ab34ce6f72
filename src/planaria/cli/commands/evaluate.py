"""``planaria eval``: a run's validation perplexity, whole and with stages omitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planaria.cli.flags import Experts, command, flag, one_folder, reject_flags, run_argument, switch
from planaria.common.errors import UserError
from planaria.config import folders

if TYPE_CHECKING:
    from planaria.runtime.api.stage_omission import Omission

FILE = "omission.json"
SHARES = (0.25, 0.5)
"""shares of the block stages that are omitted by default, if that leaves some"""
WORST = (
    "with --experts: find the best weights for the domain with the largest loss, with a certificate and prices of "
    "domains; changes nothing"
)


@command("eval")
def _eval(
    run: Annotated[Path | None, run_argument("a run, or an exported model")] = None,
    *,
    experts: Experts = None,
    text: Annotated[
        str | None,
        flag("SOURCE", "with --experts or an exported model: evaluate on this file or folder"),
    ] = None,
    omit: Annotated[
        str | None, flag("SHARES", "shares of the block stages to omit; '' for none (default 0.25,0.5)")
    ] = None,
    subsets: Annotated[int | None, flag("N", "maximum number of subsets per size (default 64)")] = None,
    microbatches: Annotated[int | None, flag("N", "validation microbatches (default: train.eval_microbatches)")] = None,
    worst: Annotated[bool, switch("--worst", WORST)] = False,
    tokens: Annotated[int | None, flag("T", "with --worst: of each text, from its beginning (default: prefix)")] = None,
    floor: Annotated[float | None, flag("W", "with --worst: least weight of an expert (default 0.01)")] = None,
    tolerance: Annotated[float | None, flag("R", "with --worst: residual to reach (default 0.001)")] = None,
) -> int:
    """Measure validation perplexity, whole and with stages omitted."""
    from planaria.models.huggingface import is_exported

    folder, ensembles = one_folder(run, experts), folders.find_kind("experts").function
    run_flags = {"omit": omit, "subsets": subsets, "microbatches": microbatches}
    if worst or experts is not None or is_exported(folder):
        reject_flags(run_flags, "applies to runs; ensembles and exported models are evaluated whole; remove it")
    if worst:
        if experts is None:
            raise UserError(f"{folder} --worst requires an ensemble; pass --experts RUN")
        reject_flags({"text": text}, "cannot be combined with --worst, which reads the ensemble's own texts")
        return int(ensembles("weigh_worst")(folder, tokens, floor, tolerance))
    reject_flags({"tokens": tokens, "floor": floor, "tolerance": tolerance}, "requires --worst")
    if experts is not None:
        return int(ensembles("evaluate")(folder, text))
    if is_exported(folder):
        return int(ensembles("evaluate_exported")(folder, text))
    reject_flags({"text": text}, "requires --experts RUN or an exported model")
    return evaluate(folder, omit, 64 if subsets is None else subsets, microbatches)


def evaluate(folder: Path, omit: str | None, max_subsets: int, microbatches: int | None) -> int:
    """Evaluate the newest whole checkpoint of a run, print a table, and write it as JSON to the run's folder."""
    from planaria.data.shards import tokenise_corpus
    from planaria.data.stream import Stream
    from planaria.report.observe.bars import CountProgress
    from planaria.runtime.api.stage_omission import evaluations, omissions
    from planaria.runtime.checkpoint.loading import load_stages
    from planaria.runtime.preparation import run_folders
    from planaria.runtime.worker.step_samples import batches, learned_targets, masks

    config = run_folders.config_of(folder, *run_folders.RUN_FILES)
    saved = run_folders.newest_whole(folder)
    stages = saved.manifest.pipeline_stages
    shares = [share for share in SHARES if leaves_some(share, stages)] if omit is None else parse_shares(omit, stages)
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


def leaves_some(share: float, stages: int) -> bool:
    """Return whether a share of the block stages is at least one stage and not all."""
    return 0 <= share < 1 and 0 < round(share * stages) < stages


def parse_shares(text: str, stages: int) -> list[float]:
    """Parse shares of the block stages, such as '0.25,0.5'; UserError if one omits none or all of them."""
    shares = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            share = float(word)
        except ValueError:
            share = -1.0
        if not leaves_some(share, stages):
            one, most = 1 / stages, (stages - 1) / stages
            fix = f"use shares from {one:.2g} to {most:.2g}" if stages > 1 else 'use --omit ""'
            raise UserError(
                f"--omit {text}: {word} of {stages} block stages is not between one stage and all but one; {fix}"
            )
        shares.append(share)
    return shares


def _show(measured: list[Omission], stages: int) -> None:
    from planaria.report.tables import Table, show

    rows = [
        [
            f"{omission.stages}",
            f"{omission.subsets} of {omission.possible}",
            f"{omission.perplexity:.3f}",
            f"{omission.min_perplexity:.3f} … {omission.max_perplexity:.3f}" if omission.subsets > 1 else "",
            f"{omission.over_full - 1:+z.1%}" if omission.stages else "",
        ]
        for omission in measured
    ]
    head = ["omitted", "subsets", "perplexity", "least … most", "over the whole model"]
    show([Table(f"validation perplexity, of {stages} block stages", head, rows, numbers_from=0)])
