"""Command line of the lab: compare, advise, experts train, edit and merge.

Commands import their modules when they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from planaria.cli.flags import DryRun, Quiet, command, flag, recipe_argument, refuse, run_argument, run_option, switch
from planaria.cli.settings import Settings
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.lab.commands.merge import MergeOptions

DELAYS = "choose a gradient code for replicas as late as those of this run (its folder)"
ADD = "the expert to add: for an ensemble, a run or an exported model with its tokenizer"
BY = (
    "one dense model: weighted sum of what each learned (sum), TIES (ties), DARE (dare) or the plain mean (average); "
    "or all feed-forward blocks behind routers made without training (dume)"
)
LAMBDA = "sum, ties, dare: weight of each (default .3, ties .4); dume: of the ridge regression (default .01)"
SAFE = "the parent of all experts, if the run does not name it"


@command("compare", cls=Settings, lasting=True)
def _compare(
    recipe: Annotated[Path, recipe_argument(" with a [compare] table, or any with --arms", "compare")],
    *,
    arms: Annotated[
        str | None,
        flag("A,B", "race only these arms, and strategies by name or as module:Class"),
    ] = None,
    seeds: Annotated[str | None, flag("1,2", "instead of the recipe's")] = None,
    together: Annotated[float | None, flag("P", "instead of the recipe's compare.trace.together")] = None,
    lost: Annotated[
        str | None,
        flag("WHAT", "what one failure takes instead: stage, adjacent, machine or region"),
    ] = None,
    steps: Annotated[int | None, flag("N", "short for --train.steps")] = None,
    dry_run: Annotated[bool, switch("--dry-run", "print what would run, and about how long; run nothing")] = False,
    to: Annotated[
        Path | None,
        flag("DIR", "also write the table and figures there, for a paper: CSV, LaTeX, PDF, SVG"),
    ] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Compare strategies on the same failures; resumable."""
    from planaria.faults.failure_groups import lost_of
    from planaria.lab.compare.api import compare, trace_laid
    from planaria.lab.compare.run_comparison import ComparisonRequest
    from planaria.lab.dry_run import dry_run as estimate
    from planaria.lab.report.comparison_table import show_table

    changes: dict[str, object] = {**settings} | ({} if steps is None else {"train.steps": steps})
    names = None if arms is None else [name.strip() for name in arms.split(",")]
    numbers, progress, taken = _seeds(seeds), not quiet, lost_of(lost)
    if dry_run:
        estimate(
            ComparisonRequest(recipe, changes, numbers, names, trace_laid(together, taken)), print if progress else None
        )
        return 0
    result = compare(
        recipe, seeds=numbers, arms=names, together=together, lost=taken, settings=changes, progress=progress
    )
    show_table(result.found)
    print(f"report        {result.report}\nnumbers       {result.numbers}")
    if to is not None:
        print(f"for a paper   {', '.join(result.write(to))} in {to}")
    return 0


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise UserError(f"--seeds {text}: give whole numbers with commas between them, as in --seeds 1,2,3")
    return [int(word) for word in words]


@command("advise", cls=Settings)
def _advise(
    recipe: Annotated[Path, recipe_argument(" whose [network] states costs and the failure rate")],
    *,
    delays: Annotated[Path | None, run_option("--delays", DELAYS)] = None,
    compress: Annotated[bool, switch("--compress", "choose a compression of all-reduced gradients")] = False,
    settings: dict[str, str],
) -> int:
    """Predict which recovery strategy suits a recipe."""
    from planaria.lab.commands.advise import advise

    return advise(recipe, settings, delays, compress)


@command("experts train", cls=Settings, lasting=True)
def _train(
    recipe: Annotated[Path, recipe_argument(" with an [experts] table", "experts")],
    *,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Train one expert per domain and combine them into one model."""
    from planaria.lab.commands.experts import start

    return start(recipe, settings, dry_run, quiet)


@command("experts edit", lasting=True)
def _edit(
    run: Annotated[Path, run_argument("an ensemble, or a merged model")],
    *,
    add: Annotated[str | None, flag("MODEL", ADD)] = None,
    called: Annotated[str | None, flag("NAME", "with --add: its name (default: its folder's)", "--as")] = None,
    domain: Annotated[str | None, flag("NAME", "with --add: its domain, for reports")] = None,
    text: Annotated[
        str | None,
        flag("SOURCE", "with --add to a merged model: text of its domain, from which routers are made"),
    ] = None,
    remove: Annotated[str | None, flag("NAME", "the expert to remove")] = None,
    to: Annotated[Path | None, flag("FOLDER", "for a merged model: folder to write the changed model to")] = None,
) -> int:
    """Add an expert to an ensemble or a merged model, or remove one."""
    from planaria.lab.commands import ensemble, merge
    from planaria.models.huggingface import is_exported

    if add is not None and remove is not None:
        raise UserError("--add and --remove: give one of them; change the result with the second")
    if add is None:
        refuse({"as": called, "domain": domain, "text": text}, "goes with --add MODEL")
    name = called or Path(add or ".").resolve().name
    if not is_exported(run):
        refuse({"to": to, "text": text}, f"is for a merged model, and {run} is an ensemble, changed in place")
        if add is not None:
            return ensemble.add_expert(run, Path(add), name, domain or "")
        if remove is not None:
            return ensemble.remove_expert(run, remove)
    elif to is None:
        raise UserError(f"{run}: is a merged model, which is not changed in place; give --to FOLDER for the result")
    elif add is not None:
        if text is None:
            raise UserError(f"--add {add}: of which text? give --text SOURCE, from which routers are made")
        return merge.add_expert(run, to, add, name, domain or "", text)
    elif remove is not None:
        return merge.remove_expert(run, to, remove)
    raise UserError(f"experts edit {run}: give --add MODEL or --remove NAME")


@command("experts merge", lasting=True)
def _merge(
    run: Annotated[Path, run_argument("an ensemble")],
    *,
    to: Annotated[Path, flag("FOLDER", "folder to write the model to")],
    by: Annotated[Literal["sum", "ties", "dare", "average", "dume"], Option(help=BY)] = "dume",
    scale: Annotated[float | None, flag("L", LAMBDA, "--lambda")] = None,
    safe: Annotated[str | None, flag("MODEL", SAFE)] = None,
    seed: Annotated[int | None, flag("SEED", "dare: seed of the dropping (default 0)")] = None,
    top_k: Annotated[int | None, flag("K", "dume: blocks that a token passes; 0: all (default 1)")] = None,
    temperature: Annotated[float | None, flag("T", "dume: divides routers' logits (default 1)")] = None,
    samples: Annotated[int | None, flag("N", "dume: of each domain's text, at most (default 256)")] = None,
    no_bias: Annotated[bool, switch("--no-bias", "dume: routers as Mixtral's: transformers loads the folder")] = False,
) -> int:
    """Merge an ensemble's experts into one model."""
    from planaria.lab.commands import merge

    if by != "dare":
        refuse({"seed": seed}, "is for --by dare")
    routers = {"top-k": top_k, "temperature": temperature, "samples": samples}
    if by != "dume":
        refuse(routers, "is about routers, which only --by dume makes")
        if no_bias:
            raise UserError("--no-bias: is about routers, which only --by dume makes; leave it out")
    if by == "average":
        refuse({"lambda": scale}, "is no part of an average; leave it out")
    if by == "average" or by == "dume":
        return merge.merge(run, to, _wanted(by, routers | {"lambda": scale}, not no_bias), safe)
    return merge.fuse(run, to, by, scale, safe, seed or 0)


def _wanted(by: Literal["average", "dume"], given: Mapping[str, float | None], bias: bool) -> MergeOptions:
    """Return the options of a merged model; raise UserError if they are invalid."""
    from planaria.config.bounds import COLDEST
    from planaria.lab.commands.merge import MergeOptions
    from planaria.lab.experts.fused import Routers
    from planaria.lab.experts.ridge import RIDGE
    from planaria.lab.experts.text_prior import SAMPLES

    least = {"top-k": 0, "temperature": COLDEST, "samples": 1, "lambda": 0}
    for name, value in given.items():
        if value is not None and not least[name] <= value < float("inf"):
            note = " (all)" if name == "top-k" else ""
            raise UserError(f"--{name} {value:g}: must be {least[name]:g}{note} or more")
    usual = {"top_k": 1, "temperature": 1.0, "samples": SAMPLES, "ridge": RIDGE}
    fields = {"top-k": "top_k", "lambda": "ridge"}
    chosen = {fields.get(name, name): value for name, value in given.items() if value is not None}
    return MergeOptions(by, Routers.model_validate(usual | chosen), bias)
