"""Commands on a finished ensemble: generate, evaluate, add and remove experts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from planaria.api.complete import note_context
from planaria.api.export import export_run
from planaria.common.errors import UserError, nearest
from planaria.config.names import require_name
from planaria.config.schema import DataConfig
from planaria.data.shards import prepare
from planaria.lab.experts import manifest
from planaria.lab.experts.domains import TEST, with_text
from planaria.lab.experts.embedding import Embedding
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.experts_results import Score
from planaria.lab.experts.manifest import ADDED, TOKENIZER, Manifest, Member
from planaria.lab.experts.reading import windows
from planaria.lab.experts.scoring import score
from planaria.models.generate import texts
from planaria.report.live.bars import CountProgress
from planaria.report.tables import Table, show
from planaria.runtime.engine import runs
from planaria.runtime.engine.weights import open_model

MOST_WINDOWS = 500


def stream(
    folder: Path,
    prompt: str,
    max_new: int,
    temperature: float,
    top_k: int,
    seed: int,
    note: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Return what the ensemble in ``folder`` adds to ``prompt``, as :func:`planaria.api.complete.stream` does."""
    ensemble = Ensemble(folder)
    tokens = ensemble.tokenizer.encode_prompt(prompt) or [ensemble.tokenizer.end]
    new = ensemble.generate(tokens, max_new, temperature, top_k, seed)
    note_context(len(tokens) + max_new, ensemble.manifest.context, note)
    return texts(new, ensemble.tokenizer.decode)


def evaluate(folder: Path, text: str | None) -> int:
    """Print the ensemble's perplexity, beside its experts' by themselves, on ``text`` or on its domains' test texts."""
    torch.set_num_threads(1)
    ensemble = Ensemble(folder)
    if text is not None:
        _print_text(ensemble, folder, text)
        return 0
    tests = sorted((folder / TEST).glob("*.jsonl"))
    if not tests:
        raise UserError(f"{folder / TEST}: has no test texts; name a text to be measured on with --text FILE")
    _print_domains(ensemble, folder, tests)
    return 0


def _print_text(ensemble: Ensemble, folder: Path, text: str) -> None:
    """A line for the ensemble and one for each expert."""
    logps, found = _measured(ensemble, folder, text)
    members = zip(ensemble.manifest.members, logps, found.speaking, strict=True)
    rows = [
        ["ensemble", "", f"{found.perplexity:.3f}", ""],
        *([m.name, m.domain, f"{math.exp(-float(own.mean())):.3f}", f"{share:.1%}"] for m, own, share in members),
    ]
    title = f"perplexity on {text}: {logps.shape[1]} samples of {logps.shape[2]} tokens"
    show([Table(title, ["who", "knows", "perplexity", "has its say"], rows, numbers_from=2)])


def _print_domains(ensemble: Ensemble, folder: Path, tests: Sequence[Path]) -> None:
    """A line for each test text that the ensemble was made with."""
    rows, names = [], [member.name for member in ensemble.manifest.members]
    for file in tests:
        logps, found = _measured(ensemble, folder, str(file))
        best, most = int(logps.mean((1, 2)).argmax()), max(range(len(names)), key=found.speaking.__getitem__)
        cells = [f"{found.perplexity:.3f}", names[best], f"{math.exp(found.best):.3f}"]
        rows.append([file.stem, *cells, names[most], f"{found.speaking[most]:.1%}"])
    title = f"perplexity on test texts of {folder}: at most {MOST_WINDOWS} samples of each"
    show([Table(title, ["domain", "ensemble", "best expert", "of it alone", "speaks most", "share"], rows)])


def _measured(ensemble: Ensemble, folder: Path, source: str) -> tuple[Tensor, Score]:
    """What the experts make of a text [E, N, T], ln p, and how they do together."""
    data = DataConfig(source=source, tokenizer=str(folder / TOKENIZER), validation=0.0)
    samples = windows(prepare(data, ensemble.manifest.vocab), "train", ensemble.manifest.context, MOST_WINDOWS)
    parts = len(samples) * len(ensemble.manifest.members)
    with CountProgress(f"experts read {source}", "samples", parts) as progress:
        logps = ensemble.logps(samples, on_read=progress.done)
    return logps, score(logps, ensemble.log_prior(samples), ensemble.manifest.mixture)


def add_expert(folder: Path, source: Path, name: str, domain: str) -> int:
    """Copy the model of a run, or an exported one, into the ensemble; it starts with the mean belief of the others.

    :raises UserError: when its name is taken, or it cannot speak together with the others.
    """
    require_name(name, "--as")
    with _changing(folder) as kept:
        if any(member.name == name for member in kept.members):
            raise UserError(f"{folder}: has an expert {name!r} already; choose another name with --as")
        parameters = _fitting(folder, kept, source, domain)
        place = _copied(source, folder / ADDED, name)
        beliefs = torch.tensor([member.belief for member in kept.members], dtype=torch.float64)
        member = Member(
            name=name,
            domain=domain,
            model=f"{ADDED}/{place.name}",
            sha256=manifest.digest(place / manifest.WEIGHTS),
            parameters=parameters,
            belief=float(beliefs.logsumexp(0)) - math.log(len(beliefs)),
        )
        manifest.write(folder, kept.model_copy(update={"members": [*kept.members, member]}))
    print(f"{name} speaks in {folder} now, with {len(kept.members)} others")
    return 0


@contextmanager
def _changing(folder: Path) -> Iterator[Manifest]:
    """The manifest, while nobody else changes it or trains its experts."""
    manifest.read(folder)  # whatever is wrong with it is said before a lock is made
    with runs.held(folder):
        yield manifest.read(folder)


def _copied(source: Path, shelf: Path, name: str) -> Path:
    """The model of a run, or an exported one, in a folder of its own: ``name``, or ``name-2`` and so on if taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    place = next(shelf / free for free in names if not (shelf / free).exists())
    unfinished = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if (source / manifest.WEIGHTS).exists():
            shutil.copytree(source, unfinished)
        else:
            export_run(source, unfinished)
        return unfinished.replace(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fitting(folder: Path, kept: Manifest, source: Path, domain: str) -> int:
    """The parameters of a model that can speak together with the others; UserError when it cannot."""
    model, tokenizer = open_model(source)
    if model.config.vocab != kept.vocab:
        raise UserError(
            f"{source}: a vocabulary of {model.config.vocab} ids, the ensemble's has {kept.vocab}; experts can speak "
            "together only with one vocabulary"
        )
    if tokenizer.to_json() != Ensemble(folder).tokenizer.to_json():
        raise UserError(
            f"{source}: its tokenizer is not the ensemble's; train it with data.tokenizer = {folder / TOKENIZER}"
        )
    if model.config.context < kept.context:
        raise UserError(f"{source}: reads {model.config.context} tokens at once, the ensemble {kept.context}")
    prior, names = kept.mixture.prior, [domain]
    if prior == "clusters":
        names = list(Embedding.open(folder).centres)
    elif prior == "ridge":
        names = [*with_text(folder), *kept.mixes]
    if domain not in names:
        raise UserError(
            f"--domain {domain!r}: prior = {prior!r} needs a domain that is known; {nearest(domain, names)}"
        )
    return sum(parameter.numel() for parameter in model.global_state().values())


def remove_expert(folder: Path, name: str) -> int:
    """Take an expert out of the ensemble; its files stay.

    :raises UserError: when there is none of that name, or it is the last.
    """
    with _changing(folder) as kept:
        member = kept.member(name)
        if len(kept.members) == 1:
            raise UserError(f"{folder}: {name!r} is its only expert; an ensemble needs one")
        left = [one for one in kept.members if one != member]
        removed = kept.removed if member.added else [*kept.removed, name]
        manifest.write(folder, kept.model_copy(update={"members": left, "removed": removed}))
    print(f"{name} does not speak in {folder} any more; its files stay in {folder / member.model}")
    return 0
