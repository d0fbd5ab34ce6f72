"""Command line of the lab: compare, advise, experts train, add, remove, weigh, fuse and merge.

Commands import their modules when they run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import Commands, add_fields, add_recipe, command, flagged
from planaria.common.errors import UserError


def add(commands: Commands) -> None:
    """Add every command of the lab."""
    _add_compare(commands)
    _add_advise(commands)
    _add_experts(commands)
    _add_members(commands)
    _add_fuse(commands)
    _add_merge(commands)
    _add_weigh(commands)


def _add_compare(commands: Commands) -> None:
    compare = command(commands, "compare", "compare strategies on the same failures; resumable", _compare, lasting=True)
    add_recipe(compare, " with a [compare] table, or any with --arms")
    compare.add_argument(
        "--arms", metavar="A,B", help="race only these arms, and strategies by name or as module:Class"
    )
    compare.add_argument("--seeds", metavar="1,2", help="instead of the recipe's")
    compare.add_argument("--together", type=float, metavar="P", help="instead of the recipe's compare.trace.together")
    compare.add_argument(
        "--lost", metavar="WHAT", help="what one failure takes instead: stage, adjacent, machine or region"
    )
    compare.add_argument("--steps", type=int, metavar="N", help="short for --train.steps")
    compare.add_argument("--dry-run", action="store_true", help="print what would run, and about how long; run nothing")
    compare.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="also write the table and figures there, for a paper: CSV, LaTeX, PDF, SVG",
    )
    compare.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(compare)


def _add_advise(commands: Commands) -> None:
    advise = command(commands, "advise", "predict which recovery strategy suits a recipe", _advise)
    add_recipe(advise, " whose [network] states costs and the failure rate")
    advise.add_argument(
        "--delays",
        type=Path,
        metavar="RUN",
        help="choose a gradient code for replicas as late as those of this run (its folder)",
    )
    advise.add_argument("--compress", action="store_true", help="choose a compression of all-reduced gradients")
    add_fields(advise)


def _add_experts(commands: Commands) -> None:
    experts = command(
        commands,
        "experts train",
        "train one expert per domain and combine them into one model",
        _experts,
        lasting=True,
    )
    add_recipe(experts, " with an [experts] table")
    experts.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    experts.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(experts)


def _add_members(commands: Commands) -> None:
    adding = command(commands, "experts add", "add an expert to an ensemble", _add, lasting=True)
    adding.add_argument("run", type=Path)
    adding.add_argument("model", type=Path, help="a run or an exported model with the ensemble's tokenizer")
    adding.add_argument("--as", dest="called", metavar="NAME", help="its name (default: its folder's name)")
    adding.add_argument("--domain", default="", help="its domain, for reports")

    removing = command(commands, "experts remove", "remove an expert from an ensemble", _remove, lasting=True)
    removing.add_argument("run", type=Path)
    removing.add_argument("name", help="its name in experts.json")


def _add_fuse(commands: Commands) -> None:
    fusing = command(commands, "experts fuse", "fuse an ensemble's experts into one model", _fuse, lasting=True)
    fusing.add_argument("run", type=Path)
    fusing.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    methods = "weighted sum of what each learned, TIES, or DARE (default %(default)s)"
    fusing.add_argument("--by", choices=("sum", "ties", "dare"), default="sum", help=methods)
    fusing.add_argument("--lambda", dest="scale", type=float, metavar="L", help="weight of each (default .3, ties .4)")
    fusing.add_argument("--safe", metavar="MODEL", help="the parent of all experts, if the run does not name it")
    fusing.add_argument("--seed", type=int, default=0, help="dare: seed of the dropping")


def _add_merge(commands: Commands) -> None:
    merging = command(
        commands, "experts merge", "merge an ensemble's experts into one mixture-of-experts model", _merge, lasting=True
    )
    merging.add_argument("run", type=Path, help="an ensemble; with --add or --remove, a merged model")
    merging.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    methods = "keep all feed-forward blocks behind routers made without training, or plain mean (default dume)"
    merging.add_argument("--by", choices=("average", "dume"), help=methods)
    merging.add_argument("--top-k", type=int, metavar="K", help="blocks that a token passes; 0: all (default 1)")
    merging.add_argument("--temperature", type=float, metavar="T", help="divides routers' logits (default 1)")
    merging.add_argument(
        "--lambda", dest="ridge", type=float, metavar="L", help="of the ridge regression (default .01)"
    )
    merging.add_argument("--samples", type=int, metavar="N", help="of each domain's text, at most (default 256)")
    merging.add_argument("--no-bias", action="store_true", help="routers as Mixtral's: transformers loads the folder")
    merging.add_argument("--safe", metavar="MODEL", help="the parent of all experts, if the run does not name it")
    merging.add_argument("--add", metavar="MODEL", help="an expert to add, with --as, --domain and --text")
    merging.add_argument("--as", dest="called", metavar="NAME", help="with --add: its name (default: its folder's)")
    merging.add_argument("--domain", help="with --add: its domain, for reports")
    merging.add_argument("--text", metavar="SOURCE", help="with --add: text of its domain, from which routers are made")
    merging.add_argument("--remove", metavar="NAME", help="an expert to remove")


def _add_weigh(commands: Commands) -> None:
    weighing = command(
        commands, "experts weigh", "find the best weights for an ensemble's worst domain", _weigh, lasting=True
    )
    weighing.add_argument("run", type=Path)
    worst = "weights for the domain with the largest loss, with a certificate and prices of domains; changes nothing"
    weighing.add_argument("--worst", action="store_true", required=True, help=worst)
    weighing.add_argument("--tokens", type=int, metavar="T", help="of each text, from its beginning (default: prefix)")
    weighing.add_argument("--floor", type=float, help="least weight of an expert (default .01)")
    weighing.add_argument("--tolerance", type=float, help="residual to reach (default .001)")


def _compare(given: argparse.Namespace) -> int:
    from planaria.faults.failure_groups import lost_of
    from planaria.lab.compare.api import compare, trace_laid
    from planaria.lab.compare.run_comparison import Asked
    from planaria.lab.dry_run import dry_run
    from planaria.lab.report.comparison_table import show_table

    settings: dict[str, object] = dict(flagged(given))
    if given.steps is not None:
        settings["train.steps"] = given.steps
    arms = None if given.arms is None else [name.strip() for name in given.arms.split(",")]
    seeds, progress, lost = _seeds(given.seeds), not given.quiet, lost_of(given.lost)
    if given.dry_run:
        laid = trace_laid(given.together, lost)
        dry_run(Asked(given.recipe, settings, seeds, arms, laid), print if progress else None)
        return 0
    result = compare(
        given.recipe, seeds=seeds, arms=arms, together=given.together, lost=lost, settings=settings, progress=progress
    )
    show_table(result.found)
    print(f"report        {result.report}\nnumbers       {result.numbers}")
    if given.to is not None:
        print(f"for a paper   {', '.join(result.write(given.to))} in {given.to}")
    return 0


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        raise UserError(f"--seeds {text}: give whole numbers with commas between them, as in --seeds 1,2,3")
    return [int(word) for word in words]


def _advise(given: argparse.Namespace) -> int:
    from planaria.lab.commands.advise import advise

    return advise(given.recipe, flagged(given), given.delays, given.compress)


def _experts(given: argparse.Namespace) -> int:
    from planaria.lab.commands.experts import start

    return start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _add(given: argparse.Namespace) -> int:
    from planaria.lab.commands.ensemble import add_expert

    return add_expert(given.run, given.model, given.called or given.model.resolve().name, given.domain)


def _remove(given: argparse.Namespace) -> int:
    from planaria.lab.commands.ensemble import remove_expert

    return remove_expert(given.run, given.name)


def _weigh(given: argparse.Namespace) -> int:
    from planaria.lab.commands.ensemble import weigh_worst

    return weigh_worst(given.run, given.tokens, given.floor, given.tolerance)


def _fuse(given: argparse.Namespace) -> int:
    from planaria.lab.commands.merge import fuse

    return fuse(given.run, given.to, given.by, given.scale, given.safe, given.seed)


def _merge(given: argparse.Namespace) -> int:
    from planaria.lab.commands import merge

    making = ("by", "top_k", "temperature", "ridge", "samples", "safe")
    adding = ("called", "domain", "text")
    if given.add is not None and given.remove is not None:
        raise UserError("--add and --remove: give one of them; give the model written by the first to the second")
    if given.add is not None or given.remove is not None:
        _refuse(given, making, "is what the merged model was made with; merge the ensemble again to change it")
        if given.no_bias:
            raise UserError("--no-bias: is for making a merged model; leave it out, and the model stays as it is")
    if given.add is None:
        _refuse(given, adding, "goes with --add MODEL")
    if given.remove is not None:
        return merge.remove_expert(given.run, given.to, given.remove)
    if given.add is not None:
        if given.text is None:
            raise UserError(f"--add {given.add}: of which text? give --text SOURCE, from which routers are made")
        name = given.called or Path(given.add).resolve().name
        return merge.add_expert(given.run, given.to, given.add, name, given.domain or "", given.text)
    return merge.merge(given.run, given.to, _wanted(given), given.safe)


def _wanted(given: argparse.Namespace) -> Any:
    """Return the options of a merged model; raise UserError if they are invalid."""
    from planaria.config.bounds import COLDEST
    from planaria.lab.commands.merge import Wanted
    from planaria.lab.experts.fused import Routers
    from planaria.lab.experts.ridge import RIDGE
    from planaria.lab.experts.text_prior import SAMPLES

    if given.by == "average":
        _refuse(given, ("top_k", "temperature", "ridge", "samples"), "is about routers, and an average has none")
        if given.no_bias:
            raise UserError("--no-bias: is about routers, and an average has none; leave it out")
    ranges = {"top_k": (0, "0 (all) or more"), "ridge": (0, "0 or more"), "samples": (1, "1 or more")}
    for name, (least, bound) in ranges.items():
        value = getattr(given, name)
        if value is not None and not least <= value < float("inf"):
            raise UserError(f"--{_FLAGS.get(name, name)} {value:g}: must be {bound}")
    if given.temperature is not None and not COLDEST <= given.temperature < float("inf"):
        raise UserError(f"--temperature {given.temperature:g}: must be {COLDEST:g} or more")
    defaults = {"top_k": 1, "temperature": 1.0, "ridge": RIDGE, "samples": SAMPLES}
    chosen = {name: getattr(given, name) if getattr(given, name) is not None else own for name, own in defaults.items()}
    return Wanted(given.by or "dume", Routers.model_validate(chosen), not given.no_bias)


_FLAGS = {"top_k": "top-k", "ridge": "lambda", "called": "as"}
"""Flags of arguments with another name in the program."""


def _refuse(given: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raise UserError naming the first of these flags that was given."""
    for name in names:
        if (value := getattr(given, name)) is not None:
            raise UserError(f"--{_FLAGS.get(name, name)} {value}: {why}")
