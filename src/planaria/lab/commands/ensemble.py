"""Commands on a finished ensemble: generate, evaluate, add, remove and weigh experts; evaluate a merged model."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from planaria.common.errors import UserError, suggestion
from planaria.config.names import require_name
from planaria.lab.experts import manifest
from planaria.lab.experts.domains import HELD_OUT, TEST, domains_with_text
from planaria.lab.experts.embedding import Embedding
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.experts_results import DomainScore
from planaria.lab.experts.log_probabilities import domain_samples, text_samples, token_logps
from planaria.lab.experts.manifest import ADDED, TOKENIZER, EnsembleManifest, Expert
from planaria.lab.experts.merge import count_shares
from planaria.lab.experts.minimax_weights import FLOOR, TOLERANCE
from planaria.lab.experts.scoring import fit_weights, score
from planaria.lab.report.worst_report import sentences, tables
from planaria.models import fused
from planaria.models.generate import texts
from planaria.report.observe.bars import CountProgress
from planaria.report.tables import Table, show
from planaria.runtime.api.completer import Completer, note_context
from planaria.runtime.api.import_export import export_run
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.weight_sources import open_model

MAX_WINDOWS = 500


def stream(
    folder: Path,
    prompt: str,
    max_new: int,
    temperature: float,
    top_k: int,
    seed: int,
    note: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """Yield the ensemble's continuation of ``prompt``, as :func:`planaria.runtime.api.completer.stream` does."""
    ensemble = Ensemble(folder)
    tokens = ensemble.tokenizer.encode_prompt(prompt) or [ensemble.tokenizer.end]
    new = ensemble.generate(tokens, max_new, temperature, top_k, seed)
    note_context(len(tokens) + max_new, ensemble.manifest.context, note)
    return texts(new, ensemble.tokenizer.decode)


def evaluate(folder: Path, text: str | None) -> int:
    """Print the perplexity of the ensemble and of its experts alone on ``text`` or on its domains' test texts."""
    torch.set_num_threads(1)
    ensemble = Ensemble(folder)
    if text is not None:
        _print_text(ensemble, folder, text)
        return 0
    _print_domains(ensemble, folder, _test_texts(folder))
    return 0


def _test_texts(folder: Path) -> list[Path]:
    if files := sorted((folder / TEST).glob("*.jsonl")):
        return files
    raise UserError(f"{folder / TEST} has no test texts; pass --text FILE")


def _print_text(ensemble: Ensemble, folder: Path, text: str) -> None:
    """Print a row for the ensemble and one for each expert."""
    logps, scored = _score_text(ensemble, folder, text)
    members = zip(ensemble.manifest.members, logps, scored.speaking, strict=True)
    rows = [
        ["ensemble", "", f"{scored.perplexity:.3f}", ""],
        *([m.name, m.domain, f"{math.exp(-float(own.mean())):.3f}", f"{share:.1%}"] for m, own, share in members),
    ]
    title = f"perplexity on {text}: {logps.shape[1]} samples of {logps.shape[2]} tokens"
    show([Table(title, ["model", "domain", "perplexity", "weight"], rows, numbers_from=2)])


def _print_domains(ensemble: Ensemble, folder: Path, tests: Sequence[Path]) -> None:
    """Print a row for each test text of the ensemble."""
    rows, names = [], [member.name for member in ensemble.manifest.members]
    for file in tests:
        logps, scored = _score_text(ensemble, folder, str(file), file.stem)
        best, largest = int(logps.mean((1, 2)).argmax()), max(range(len(names)), key=scored.speaking.__getitem__)
        cells = [f"{scored.perplexity:.3f}", names[best], f"{math.exp(scored.best):.3f}"]
        routed = "–" if scored.routed is None else f"{scored.routed:.1%}"
        rows.append([file.stem, *cells, names[largest], f"{scored.speaking[largest]:.1%}", routed])
    title = (
        f"perplexity on test texts of {folder}: at most {MAX_WINDOWS} samples of each; routed: share of samples at "
        "whose end the expert of their domain has the largest weight"
    )
    head = ["domain", "ensemble", "best expert", "of it alone", "largest weight", "share", "routed"]
    show([Table(title, head, rows)])
    print(f"mixture       {ensemble.manifest.mixture.describe()}")


def _score_text(ensemble: Ensemble, folder: Path, source: str, domain: str = "") -> tuple[Tensor, DomainScore]:
    """Return the experts' ln p of a text [E, N, T], and the ensemble's score. ``domain``: the text's, if known."""
    vocab, context = ensemble.manifest.vocab, ensemble.manifest.context
    samples = _samples(folder, source, vocab, context)
    readings = len(samples) * len(ensemble.manifest.members)
    with CountProgress(f"experts read {source}", "samples", readings) as progress:
        logps = ensemble.logps(samples, on_read=progress.advance)
    domains = [member.domain for member in ensemble.manifest.members]
    own = domains.index(domain) if domain in domains else None
    return logps, score(logps, ensemble.log_prior(samples), ensemble.manifest.mixture, own)


def _samples(folder: Path, source: str, vocab: int, context: int) -> Tensor:
    """Return samples [N, context + 1] of a file or folder; the models' tokenizer is in ``folder``."""
    try:
        return text_samples(folder, {"source": source}, vocab, context, MAX_WINDOWS)
    except UserError as error:
        raise UserError(str(error).removeprefix("data.source = ")) from None  # no setting, but a flag


def add_expert(folder: Path, source: Path, name: str, domain: str) -> int:
    """Copy the model of a run, or an exported one, into the ensemble; its prior is the mean of the others.

    :raises UserError: when its name is taken, or it is incompatible with the ensemble.
    """
    require_name(name, "--as")
    with _edit_manifest(folder) as ensemble_manifest:
        if any(member.name == name for member in ensemble_manifest.members):
            raise UserError(f"{folder} already has an expert {name!r}; choose another name with --as")
        parameters = _require_compatible(folder, ensemble_manifest, source, domain)
        path = _copy_model(source, folder / ADDED, name)
        beliefs = torch.tensor([member.belief for member in ensemble_manifest.members], dtype=torch.float64)
        member = Expert(
            name=name,
            domain=domain,
            model=f"{ADDED}/{path.name}",
            sha256=manifest.digest(path / manifest.WEIGHTS),
            parameters=parameters,
            belief=float(beliefs.logsumexp(0)) - math.log(len(beliefs)),
        )
        manifest.write(folder, ensemble_manifest.model_copy(update={"members": [*ensemble_manifest.members, member]}))
    print(f"{name} was added to {folder}, with {len(ensemble_manifest.members)} others")
    return 0


@contextmanager
def _edit_manifest(folder: Path) -> Iterator[EnsembleManifest]:
    manifest.read(folder)  # report an invalid manifest before a lock is made
    with run_folders.lock_for_training(folder):
        yield manifest.read(folder)


def _copy_model(source: Path, folder: Path, name: str) -> Path:
    """Copy the model of a run, or an exported one, to ``folder``, as ``name`` or, if taken, ``name-2`` and so on."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    path = next(folder / free for free in names if not (folder / free).exists())
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if (source / manifest.WEIGHTS).exists():
            shutil.copytree(source, unfinished)
        else:
            export_run(source, unfinished)
        return unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _require_compatible(folder: Path, ensemble_manifest: EnsembleManifest, source: Path, domain: str) -> int:
    """Return the parameters of a model for the ensemble; raise UserError if it is incompatible."""
    model, tokenizer = open_model(source)
    if model.config.vocab != ensemble_manifest.vocab:
        raise UserError(
            f"{source}: its vocabulary has {model.config.vocab} ids, the ensemble's {ensemble_manifest.vocab}; experts "
            "of one ensemble need the same vocabulary"
        )
    if tokenizer.to_json() != Ensemble(folder).tokenizer.to_json():
        raise UserError(
            f"{source}: its tokenizer is not the ensemble's; train it with data.tokenizer = {folder / TOKENIZER}"
        )
    if model.config.context < ensemble_manifest.context:
        raise UserError(
            f"{source}: its context is {model.config.context} tokens, the ensemble's {ensemble_manifest.context}"
        )
    prior, names = ensemble_manifest.mixture.prior, [domain]
    if prior == "clusters":
        names = list(Embedding.open(folder).centres)
    elif ensemble_manifest.mixture.is_fitted_on_parent:
        names = [*domains_with_text(folder), *ensemble_manifest.mixes]
    if domain not in names:
        raise UserError(f"--domain {domain!r}: prior = {prior!r} needs a known domain; {suggestion(domain, names)}")
    return sum(parameter.numel() for parameter in model.global_state().values())


def remove_expert(folder: Path, name: str) -> int:
    """Remove an expert, given its name or its domain, from the ensemble; its files stay.

    :raises UserError: when there is none, several of that domain, or it is the last.
    """
    with _edit_manifest(folder) as ensemble_manifest:
        member = ensemble_manifest.member(name)
        if len(ensemble_manifest.members) == 1:
            raise UserError(f"{folder}: {member.name!r} is its only expert; an ensemble needs one")
        left = [expert for expert in ensemble_manifest.members if expert != member]
        removed = ensemble_manifest.removed if member.added else [*ensemble_manifest.removed, member.name]
        manifest.write(folder, ensemble_manifest.model_copy(update={"members": left, "removed": removed}))
    print(f"{member.name} was removed from {folder}; its files stay in {folder / member.model}")
    return 0


def weigh_worst(folder: Path, tokens: int | None, floor: float | None, tolerance: float | None) -> int:
    """Fit weights on held-out text, and print losses on test text; return the exit code. Nothing is changed.

    :raises UserError: when there is no ensemble or text, only one expert, or an option is out of range.
    """
    torch.set_num_threads(1)
    ensemble = Ensemble(folder)
    context = ensemble.manifest.context
    first = (ensemble.manifest.mixture.prefix or context) if tokens is None else tokens
    if tokens is not None and not 1 <= tokens <= context:
        raise UserError(f"--tokens {tokens}: texts have {context} tokens here; use 1 to {context}")
    if tolerance is not None and not 0 < tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g} must be above 0 and below 1")
    experts = [member.name for member in ensemble.manifest.members]
    if len(experts) < 2:
        raise UserError(
            f"{folder} has only one expert, so there are no weights; add another with `planaria experts edit`"
        )
    if floor is not None and not 0 < floor < 1 / len(experts):
        raise UserError(f"--floor {floor:g} must be above 0 and below 1/{len(experts)}, so that weights can differ")
    held_out, test = _read_texts(ensemble, folder, HELD_OUT), _read_texts(ensemble, folder, TEST)
    fitted = fit_weights(
        experts, held_out, test, ensemble.manifest.mixture, first, floor or FLOOR, tolerance or TOLERANCE
    )
    console = show(tables(fitted))
    for line in sentences(fitted):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _read_texts(ensemble: Ensemble, folder: Path, split: str) -> dict[str, Tensor]:
    """Return domain → the experts' ln p of its held-out or test text [E, N, T]; only domains with text here."""
    files = sorted((folder / HELD_OUT).glob("*.jsonl"))
    if not files:
        raise UserError(
            f"{folder / HELD_OUT} has no texts of domains, on which weights are fitted; restore them, or run the "
            "recipe again with another --name"
        )
    known = ensemble.manifest
    return {
        file.stem: ensemble.logps(domain_samples(folder, [file.stem], split, known.vocab, known.context, MAX_WINDOWS))
        for file in files
    }


def evaluate_model(folder: Path, text: str | None) -> int:
    """Print the perplexity of the model in ``folder`` on ``text``, or on the test texts of its experts.

    :raises UserError: when there is no such text, or it is shorter than one sample.
    """
    torch.set_num_threads(1)
    model, merge_record = Completer(folder), fused.read(folder)
    routing = model.llama.routing if model.llama is not None else None
    names = [] if merge_record is None or routing is None else [expert.name for expert in merge_record.parts]
    if routing is not None and len(names) != routing.experts:
        names = [f"block {number}" for number in range(routing.experts)]
    rows = [
        [name, *_cells(folder, model, source, names)]
        for name, source in _test_sources(folder, merge_record, text).items()
    ]
    head = ["text", "perplexity"] + (["passes most", "of all passes"] if names else [])
    show([Table(f"perplexity of {folder}: at most {MAX_WINDOWS} samples of each text", head, rows)])
    return 0


def _test_sources(folder: Path, merge_record: fused.Fused | None, text: str | None) -> dict[str, str]:
    if text is not None:
        return {text: text}
    if merge_record is None or not merge_record.run:
        raise UserError(f"{folder}: has no test texts; pass --text FILE")
    return {file.stem: str(file) for file in _test_texts(Path(merge_record.run))}


def _cells(folder: Path, model: Completer, source: str, names: list[str]) -> list[str]:
    """Return the table cells of one text; ``names`` are those of a routed model's blocks."""
    samples = _samples(folder, source, model.vocab, model.context)
    with (
        CountProgress(f"the model reads {source}", "samples", len(samples)) as progress,
        count_shares(model.llama) if names and model.llama is not None else nullcontext(torch.ones(1)) as passed,
    ):
        perplexity = math.exp(-float(token_logps(model.logits, samples, progress.advance).mean()))
    if not names:
        return [f"{perplexity:.3f}"]
    largest = int(passed.argmax())
    return [f"{perplexity:.3f}", names[largest], f"{float(passed[largest] / passed.sum()):.1%}"]
