"""Command line of the lab: compare, advise, experts train and edit, lab demo.

Commands import their modules when they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from planaria.cli.flags import (
    DryRun,
    Quiet,
    command,
    flag,
    recipe_argument,
    reject_flags,
    run_argument,
    run_option,
    switch,
)
from planaria.cli.settings import Settings
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import Section
    from planaria.lab.compare.run_comparison import ComparisonRequest
    from planaria.models.fused import Routers

DELAYS = "choose a gradient code for replicas with the delays of this run (its folder)"
ADD = "the expert to add: for an ensemble, a run or an exported model with its tokenizer"
MERGE = (
    "make one model of the experts: a dense one, as the weighted sum of what each learned (sum), by TIES (ties) or "
    "DARE (dare), or as their mean (average); or a mixture of experts, with routers made without training (dume)"
)
TEXT = "with --add to a merged model: text of its domain, from which routers are made"
TO = "with --merge, or for a merged model: folder to write the model to"
LAMBDA = "sum, ties, dare: weight of each expert (default 0.3, ties 0.4); dume: of the ridge penalty (default 0.01)"
SAFE = "with --merge: the parent of all experts, if the run does not record it"
COMPARED = " with a [compare] or [drill] table, or any with --arms"
ARMS = "race only these arms, and strategies by name or as module:Class; of a drill, its arms and their controls"
DRY_RUN = "print what would run, and about how long unless it is a drill; run nothing"
PAPER = "also write table and figures for a paper: CSV, LaTeX, PDF, SVG; not for a drill"
REPAIR = "of a drill: also repair a poisoned peer of each attacked arm by all strategies (drill.repair)"
MergeMethod = Literal["sum", "ties", "dare", "average", "dume"]


class Compared(Settings):
    """A command with every field of a run's and of a swarm's recipe as a flag."""

    def roots(self) -> tuple[type[Section], ...]:
        from planaria.swarm.config.swarm_config import SwarmConfig

        return (*super().roots(), SwarmConfig)

    def section(self, param: Any, ctx: Any) -> str | None:
        title, name = super().section(param, ctx), self.keys.get(param.name, "")
        drills = title == "Common settings" and not _belongs_to(name, super().roots()[0])
        return "Common settings of a drill" if drills else title


def _belongs_to(setting: str, root: type[Section]) -> bool:
    return setting.partition(".")[0] in root.model_fields


@command("compare", cls=Compared, lasting=True, forks=True)
def _compare(
    recipe: Annotated[Path, recipe_argument(COMPARED, ("compare", "drill"))],
    *,
    arms: Annotated[str | None, flag("A,B", ARMS)] = None,
    seeds: Annotated[str | None, flag("1,2", "instead of the recipe's")] = None,
    adjacent_probability: Annotated[
        float | None, flag("P", "instead of the recipe's compare.trace.adjacent_probability; not for a drill")
    ] = None,
    failure_domain: Annotated[
        str | None, flag("DOMAIN", "stages that one failure takes: stage, adjacent, machine or region; not for a drill")
    ] = None,
    steps: Annotated[int | None, flag("N", "short for --train.steps; not for a drill")] = None,
    dry_run: Annotated[bool, switch("--dry-run", DRY_RUN)] = False,
    to: Annotated[Path | None, flag("DIR", PAPER)] = None,
    repair: Annotated[bool, switch("--repair", REPAIR)] = False,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Compare strategies on the same failures, or defences under attacks (a drill); resumable."""
    from planaria.config.kinds import kinds_of
    from planaria.config.recipe import read
    from planaria.config.schema import RunConfig

    numbers = _parse_seeds(seeds)
    if kinds_of(read(recipe)) == ["drill"]:
        others = {
            "adjacent-probability": adjacent_probability,
            "failure-domain": failure_domain,
            "steps": steps,
            "to": to,
        }
        reject_flags(others, f"is for a comparison of training runs, and {recipe} is a drill; remove it")
        return _drill(recipe, settings, numbers, repair, quiet, arms, dry_run)
    reject_flags({"repair": repair or None}, f"is for a drill, and {recipe} has no [drill] table; remove it")
    _require_settings_of(RunConfig, settings, f"is a setting of a swarm, and {recipe} has no [drill] table; remove it")
    from planaria.faults.failure_groups import failure_domain_of
    from planaria.lab.compare.api import trace_overrides
    from planaria.lab.compare.run_comparison import ComparisonRequest
    from planaria.lab.dry_run import dry_run as estimate
    from planaria.runtime.api.configure import merge_settings
    from planaria.runtime.fleet.spawner import fork_server

    fork_server(())  # races run in new processes
    changes = merge_settings({**settings} | ({} if steps is None else {"train.steps": steps}), {})
    names = None if arms is None else [name.strip() for name in arms.split(",")]
    overrides = trace_overrides(adjacent_probability, failure_domain_of(failure_domain))
    requested = ComparisonRequest(recipe, changes, numbers, names, overrides)
    if dry_run:
        estimate(requested, None if quiet else print)
        return 0
    return _race(requested, to, quiet)


def _race(requested: ComparisonRequest, to: Path | None, quiet: bool) -> int:
    """Run a comparison and print its table; write files for a paper into ``to``, if given."""
    from planaria.lab.compare.api import ComparisonResult
    from planaria.lab.compare.run_comparison import run_remaining_races
    from planaria.lab.report.comparison_table import show_table

    comparison = ComparisonResult(*run_remaining_races(requested, quiet, None if quiet else print))
    show_table(comparison.results)
    print(f"report        {comparison.report}\nnumbers       {comparison.numbers}")
    if to is not None:
        print(f"for a paper   {', '.join(comparison.write(to))} in {to}")
    return 0


def _drill(
    recipe: Path,
    settings: Mapping[str, str],
    seeds: list[int] | None,
    repair: bool,
    quiet: bool,
    arms: str | None,
    dry_run: bool,
) -> int:
    """Run a drill; ``seeds`` and ``repair`` override its table, and ``arms`` selects some of its arms."""
    from planaria.swarm.commands.drill import drill
    from planaria.swarm.config.swarm_config import SwarmConfig

    _require_settings_of(SwarmConfig, settings, f"is not a setting of a swarm, and {recipe} is a drill; remove it")
    overrides = ({} if seeds is None else {"seeds": seeds}) | ({"repair": True} if repair else {})
    return drill(recipe, settings, quiet, overrides, arms, dry_run)


def _require_settings_of(root: type[Section], settings: Mapping[str, str], why: str) -> None:
    """Raise UserError for a setting that belongs to a different kind of recipe."""
    reject_flags({name: text for name, text in settings.items() if not _belongs_to(name, root)}, why)


def _parse_seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise UserError(f"--seeds {text}: use whole numbers separated by commas, as in --seeds 1,2,3")
    return [int(word) for word in words]


@command("advise", cls=Settings)
def _advise(
    recipe: Annotated[Path, recipe_argument(" whose [network] states costs and the failure rate")],
    *,
    delays: Annotated[Path | None, run_option("--delays", DELAYS)] = None,
    compress: Annotated[bool, switch("--compress", "choose a compression of all-reduced gradients")] = False,
    wire: Annotated[
        bool,
        switch("--wire", "choose a codec between stages (pipeline.wire), and machines of network.topology if set"),
    ] = False,
    settings: dict[str, str],
) -> int:
    """Predict which recovery strategy suits a recipe."""
    from planaria.lab.commands.advise import advise

    return advise(recipe, settings, delays, compress, wire)


@command("lab demo", cls=Settings, lasting=True, forks=True)
def _demo(
    name: Annotated[str, Argument(metavar="NAME", help="home-links: a pipeline over links of 200 Mbit/s and 50 ms")],
    *,
    to: Annotated[Path | None, flag("FILE", "also draw the chart as SVG or PDF; requires matplotlib")] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Train variants of one recipe in turn, and compare their loss over seconds."""
    from planaria.lab.commands.demo import demo

    return demo(name, settings, to, quiet)


@command("experts train", cls=Settings, lasting=True)
def _train(
    recipe: Annotated[Path, recipe_argument(" with an [experts] table", ("experts",))],
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
    text: Annotated[str | None, flag("SOURCE", TEXT)] = None,
    remove: Annotated[str | None, flag("NAME", "the expert to remove; in an ensemble, its name or domain")] = None,
    how: Annotated[MergeMethod | None, Option("--merge", help=MERGE)] = None,
    to: Annotated[Path | None, flag("FOLDER", TO)] = None,
    scale: Annotated[float | None, flag("L", LAMBDA, "--lambda")] = None,
    safe: Annotated[str | None, flag("MODEL", SAFE)] = None,
    seed: Annotated[int | None, flag("SEED", "dare: seed of the random drops (default 0)")] = None,
    top_k: Annotated[int | None, flag("K", "dume: blocks that a token passes; 0: all (default 1)")] = None,
    temperature: Annotated[float | None, flag("T", "dume: divides routers' logits (default 1)")] = None,
    samples: Annotated[int | None, flag("N", "dume: of each domain's text, at most (default 256)")] = None,
    no_bias: Annotated[bool, switch("--no-bias", "dume: routers as Mixtral's: transformers loads the folder")] = False,
) -> int:
    """Add an expert to an ensemble or a merged model, remove one, or merge an ensemble into one model."""
    actions = [name for name, given in {"--add": add, "--remove": remove, "--merge": how}.items() if given is not None]
    if len(actions) > 1:
        raise UserError(f"{' and '.join(actions)}: pass one of them; then change the result with the other")
    if add is None:
        reject_flags({"as": called, "domain": domain, "text": text}, "requires --add MODEL")
    routers = {"top-k": top_k, "temperature": temperature, "samples": samples, "no-bias": no_bias or None}
    options = {"lambda": scale, "seed": seed, **routers}
    if how is None:
        reject_flags({"safe": safe, **options}, "requires --merge HOW")
    elif to is None:
        raise UserError(f"--merge {how}: pass --to FOLDER, the folder to write the model to")
    else:
        return _merge_experts(run, to, how, safe, options)
    if add is not None:
        return _add_expert(run, to, add, called or Path(add).resolve().name, domain or "", text)
    if remove is not None:
        return _remove_expert(run, to, remove)
    raise UserError(f"experts edit {run}: pass --add MODEL, --remove NAME or --merge HOW")


def _add_expert(run: Path, to: Path | None, model: str, name: str, domain: str, text: str | None) -> int:
    from planaria.lab.commands import ensemble, merge

    folder = _folder(run, to, text)
    if folder is None:
        return ensemble.add_expert(run, Path(model), name, domain)
    if text is None:
        raise UserError(f"--add {model}: no text to make routers from; pass --text SOURCE")
    return merge.add_expert(run, folder, model, name, domain, text)


def _remove_expert(run: Path, to: Path | None, name: str) -> int:
    from planaria.lab.commands import ensemble, merge

    folder = _folder(run, to)
    return ensemble.remove_expert(run, name) if folder is None else merge.remove_expert(run, folder, name)


def _folder(run: Path, to: Path | None, text: str | None = None) -> Path | None:
    """Return the folder to write a changed model to, or None for an ensemble, which is changed in place."""
    from planaria.models.huggingface import is_exported

    if not is_exported(run):
        reject_flags({"to": to, "text": text}, f"is for a merged model, and {run} is an ensemble, changed in place")
        return None
    if to is None:
        raise UserError(f"{run} is a merged model, which is not changed in place; pass --to FOLDER for the result")
    return to


def _merge_experts(run: Path, to: Path, how: MergeMethod, safe: str | None, given: Mapping[str, Any]) -> int:
    """Merge an ensemble's experts into one model, with the ``given`` flags (None if not given)."""
    from planaria.lab.commands import merge
    from planaria.models.huggingface import is_exported

    if how != "dare":
        reject_flags({"seed": given["seed"]}, "is for --merge dare")
    if how != "dume":
        routers = {name: option for name, option in given.items() if name not in ("lambda", "seed")}
        reject_flags(routers, "is about routers, which only --merge dume makes")
    if how == "average":
        reject_flags({"lambda": given["lambda"]}, "does not apply to an average; remove it")
    if is_exported(run):
        raise UserError(f"{run} is already one model; --merge is for an ensemble of `planaria experts train`")
    if how == "dume":
        return merge.merge(run, to, _routers(given), not given["no-bias"], safe)
    return merge.fuse(run, to, how, given["lambda"], safe, given["seed"] or 0)


def _routers(given: Mapping[str, Any]) -> Routers:
    """Return the parameters of routers; raise UserError if they are invalid."""
    from planaria.config.bounds import MIN_TEMPERATURE
    from planaria.lab.experts.ridge import RIDGE
    from planaria.lab.experts.text_prior import SAMPLES
    from planaria.models.fused import Routers

    least = {"top-k": 0, "temperature": MIN_TEMPERATURE, "samples": 1, "lambda": 0}
    chosen = {name: given[name] for name in least if given[name] is not None}
    for name, number in chosen.items():
        if not least[name] <= number < float("inf"):
            note = " (all)" if name == "top-k" else ""
            raise UserError(f"--{name} {number:g} must be {least[name]:g}{note} or more")
    usual = {"top_k": 1, "temperature": 1.0, "samples": SAMPLES, "ridge": RIDGE}
    fields = {"top-k": "top_k", "lambda": "ridge"}
    chosen = {fields.get(name, name): number for name, number in chosen.items()}
    return Routers.model_validate(usual | chosen)
