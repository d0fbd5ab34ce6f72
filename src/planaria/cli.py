"""The command line. Every mistake of the user's ends in one line and exit code 2; a run that had to stop in 1."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from planaria import __version__, recipe
from planaria.config import RunConfig
from planaria.errors import RunStopped, UserError, nearest
from planaria.swarm.config import SwarmConfig

SECOND_WORDS = ("swarm join", "swarm explain")
"""commands of two words"""
SWARMS = ("swarm", "swarm join", "drill")
"""commands whose recipes are swarms'"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``planaria``."""
    try:
        code = run(sys.argv[1:] if arguments is None else list(arguments))
    except UserError as error:
        print(f"planaria: {error}", file=sys.stderr)
        code = 2
    except RunStopped as stopped:
        print(f"planaria: {stopped}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("planaria: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        print(f"planaria: {error.filename or 'the operating system'}: {error.strerror or error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Parse and carry out one command; its exit code."""
    parser = _make_parser()
    if " ".join(arguments[:2]) in SECOND_WORDS:
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    given, rest = parser.parse_known_args(arguments)
    if rest:
        flag = rest[0].partition("=")[0]
        known = (
            [f"--{name}" for name, _ in recipe.fields(_sections(given.command))]
            if given.command in ("train", "plan", "compare", "advise", "topology", *SWARMS)
            else []
        )
        mend = nearest(flag, known) if flag.startswith("--") and known else f"see `planaria {given.command} --help`"
        raise UserError(f"{rest[0]}: unknown flag; {mend if len(mend) < 200 else 'see `planaria train --help`'}")
    code: int = given.action(given)
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="planaria", description="Trains language models on machines that fail, lag and lie.")
    parser.add_argument("--version", action="version", version=f"planaria {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_training(commands)
    _add_comparisons(commands)
    _add_networks(commands)
    _add_models(commands)
    _add_faults(commands)
    _add_swarms(commands)
    return parser


def _add_training(commands: Any) -> None:
    train = _command(commands, "train", "train a recipe, or resume a run", _train)
    train.add_argument("recipe", nargs="?", type=Path, help="a TOML file")
    train.add_argument("--resume", type=Path, metavar="RUN", help="train on where this run stopped")
    train.add_argument("--checkpoint", metavar="NAME", help="with --resume: from this checkpoint, not the newest")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    train.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(train)

    join = _command(commands, "join", "lend this machine to a run that is under way, until Ctrl-C", _join)
    join.add_argument("run", type=Path)
    join.add_argument("--workers", type=int, metavar="N", help="processes; as many as one replica has unless given")
    join.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to call a run again that cannot be reached any more (default %(default)g)",
    )

    plan = _command(
        commands,
        "plan",
        "draw the plan of one step; on a topology, search for an arrangement of its nodes and for routes",
        _plan,
    )
    plan.add_argument("recipe", nargs="?", type=Path, help="a TOML file")
    plan.add_argument("--skip", metavar="SHARE", help="the same as --routing.skip")
    plan.add_argument("--budget", metavar="SIZE", default="60s", help="60s, 5min, or 300000moves (default %(default)s)")
    plan.add_argument("--to", type=Path, metavar="FILE", help="the schedule; a page of the same name lies beside it")
    plan.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(plan)


def _add_comparisons(commands: Any) -> None:
    compare = _command(commands, "compare", "race recovery strategies on the same failures; resumable", _compare)
    compare.add_argument("recipe", type=Path, help="a TOML file with a [compare] table")
    compare.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(compare)

    advise = _command(commands, "advise", "which recovery strategy suits a recipe, and how sure that is", _advise)
    advise.add_argument(
        "recipe", type=Path, help="a TOML file whose [network] says what things cost and how often they fail"
    )
    _add_fields(advise)


def _add_networks(commands: Any) -> None:
    topology = commands.add_parser("topology", help="measure a network for `planaria plan`", allow_abbrev=False)
    whats = topology.add_subparsers(dest="what", required=True, metavar="WHAT")
    measure = _command(whats, "measure", "time the links between nodes, and write the topology", _measure)
    measure.add_argument("recipe", type=Path, help="a TOML file; its network.topology names the nodes, if given")
    measure.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for the topology's files")
    measure.add_argument("--nodes", type=int, metavar="N", help="without a topology; one for each stage unless given")
    measure.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(measure)


def _add_models(commands: Any) -> None:
    generate = _command(commands, "generate", "let a run's model, or an exported one, complete a prompt", _generate)
    generate.add_argument("run", type=Path)
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--tokens", type=int, default=100, help="most tokens to add (default %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default %(default)s)")
    generate.add_argument("--top-k", type=int, default=40, help="draw among so many (default %(default)s)")
    generate.add_argument("--seed", type=int, default=0)

    evaluate = _command(commands, "eval", "a run's validation perplexity, whole and with stages left out", _eval)
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument(
        "--omit", default="0.25,0.5", metavar="SHARES", help="of the block stages to leave out (default %(default)s)"
    )
    evaluate.add_argument(
        "--subsets", type=int, default=64, help="most subsets to try of each size (default %(default)s)"
    )
    evaluate.add_argument("--microbatches", type=int, help="validation text; as train.eval_microbatches unless given")

    export = _command(commands, "export", "write a run's model as a Hugging Face folder", _export)
    export.add_argument("run", type=Path)
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")

    report = _command(commands, "report", "write a run's HTML report", _report)
    report.add_argument("run", type=Path)
    report.add_argument("--to", type=Path, metavar="FILE")

    replay = _command(commands, "replay", "fold a run's log again: the same events, the same decisions?", _replay)
    replay.add_argument("run", type=Path)


def _add_faults(commands: Any) -> None:
    chaos = _command(commands, "chaos", "strike a worker of a live run", _chaos)
    chaos.add_argument("run", type=Path)
    blow = chaos.add_mutually_exclusive_group(required=True)
    for action, what in (("kill", "SIGKILL"), ("stop", "SIGSTOP")):
        blow.add_argument(f"--{action}", metavar="TARGET", help=f"{what} to stage=N, worker=NAME or controller")
    chaos.add_argument("--resume-after", type=float, metavar="S", help="with --stop: SIGCONT after so many seconds")

    trace = _command(commands, "trace", "draw a trace of faults from a failure rate", _trace)
    trace.add_argument("file", type=Path)
    trace.add_argument("--hourly", type=float, required=True, help="probability that a stage fails within an hour")
    trace.add_argument("--step-seconds", type=float, required=True, help="seconds of one step")
    trace.add_argument("--stages", type=int, required=True)
    trace.add_argument("--steps", type=int, required=True)
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--exempt", type=int, nargs="*", default=[], metavar="STAGE", help="stages that never fail")
    trace.add_argument("--forbid-adjacent", action="store_true", help="never two neighbours in the same step")


def _add_swarms(commands: Any) -> None:
    swarm = _command(commands, "swarm", "peers that learn from each other's completions; also: join, explain", _swarm)
    swarm.add_argument("recipe", type=Path, help="a TOML file")
    swarm.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    swarm.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(swarm, "swarm")

    join = _command(commands, "swarm join", "be one peer of a swarm, wherever its board is", _swarm_join)
    join.add_argument("recipe", nargs="?", type=Path, help="a TOML file; what the board has agreed on goes before it")
    join.add_argument("--model", metavar="PATH", help="the same as --policy.path")
    join.add_argument("--task", metavar="NAME", help="the same as --task.name")
    join.add_argument(
        "--as", dest="called", metavar="NAME", default="me", help="what to be called (default %(default)s)"
    )
    join.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(join, "swarm join")

    explain = _command(commands, "swarm explain", "where what a peer learned from came from", _swarm_explain)
    explain.add_argument("run", type=Path)
    explain.add_argument("--peer", default="p0", help="whose records (default %(default)s)")
    explain.add_argument("--round", type=int, metavar="N", help="of this round only")
    explain.add_argument("--problem", type=int, metavar="N", help="of this problem only, with the texts")
    explain.add_argument("--source", metavar="PEER", help="from this peer only")
    explain.add_argument("--refused", action="store_true", help="what was refused only")

    drill = _command(commands, "drill", "attack a swarm of one's own, with and without defences", _drill)
    drill.add_argument("recipe", type=Path, help="a TOML file with a [drill] table")
    drill.add_argument("--quiet", action="store_true", help="no progress display")
    _add_fields(drill, "drill")


def _sections(command: str) -> Any:
    """The root section of the recipes that a command reads."""
    return SwarmConfig if command in SWARMS else RunConfig


def _command(commands: Any, name: str, what: str, action: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    parser.set_defaults(action=action)
    return parser


def _add_fields(parser: argparse.ArgumentParser, command: str = "train") -> None:
    """Every field of a recipe as a flag."""
    groups: dict[str, Any] = {}
    for name, field in recipe.fields(_sections(command)):
        section = name.rpartition(".")[0] or "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        default = f" (default {field.default})" if field.default not in (None, "", []) else ""
        help_text = f"{field.description}{default}".replace("%", "%%")
        choices = [a for a in get_args(field.annotation) if isinstance(a, str)]
        metavar = "|".join(choices) if choices else name.rpartition(".")[2].upper()
        groups[section].add_argument(
            f"--{name}", dest=f"set {name}", default=argparse.SUPPRESS, metavar=metavar, help=help_text
        )


def _flags(given: argparse.Namespace) -> dict[str, str]:
    return {name.removeprefix("set "): text for name, text in vars(given).items() if name.startswith("set ")}


# Commands import what they need when they run: `planaria --help` should not wait for torch.


def _train(given: argparse.Namespace) -> int:
    from planaria.commands import train
    from planaria.commands.resume import resume

    if given.resume is None and given.checkpoint is not None:
        raise UserError(f"--checkpoint {given.checkpoint}: goes with --resume RUN")
    if given.resume is not None and given.dry_run:
        raise UserError("--dry-run: goes with a recipe, not with --resume")
    if given.resume is not None:
        if given.recipe is not None:
            raise UserError(f"train {given.recipe} --resume {given.resume}: give a recipe or a run to resume, not both")
        return resume(given.resume, _flags(given), given.quiet, given.checkpoint)
    if given.recipe is None:
        raise UserError("train: give a recipe such as recipes/demo.toml, or --resume runs/NAME")
    return train.start(given.recipe, _flags(given), given.dry_run, given.quiet)


def _join(given: argparse.Namespace) -> int:
    from planaria.commands.join import lend

    lend(given.run, given.workers, given.patience)
    return 0


def _plan(given: argparse.Namespace) -> int:
    from planaria.commands.plan import describe
    from planaria.commands.train import check

    flags = _flags(given) | ({"routing.skip": given.skip} if given.skip is not None else {})
    config = recipe.load(given.recipe, flags)
    if config.network.topology is not None or given.skip is not None:
        from planaria.commands.schedule import plan_routes

        return plan_routes(config, given.recipe, given.budget, given.to, given.quiet)
    check(config)
    print(describe(config))
    return 0


def _compare(given: argparse.Namespace) -> int:
    from planaria.commands.compare import compare

    return compare(given.recipe, _flags(given), given.quiet)


def _advise(given: argparse.Namespace) -> int:
    from planaria.commands.advise import advise

    return advise(given.recipe, _flags(given))


def _measure(given: argparse.Namespace) -> int:
    from planaria.commands.topology import measure

    return measure(recipe.load(given.recipe, _flags(given)), given.recipe, given.to, given.nodes, given.quiet)


def _generate(given: argparse.Namespace) -> int:
    from planaria.commands.generate import complete

    print(complete(given.run, given.prompt, given.tokens, given.temperature, given.top_k, given.seed))
    return 0


def _eval(given: argparse.Namespace) -> int:
    from planaria.commands.evaluate import evaluate

    return evaluate(given.run, given.omit, given.subsets, given.microbatches)


def _export(given: argparse.Namespace) -> int:
    from planaria.commands.export import export_run

    print(export_run(given.run, given.to))
    return 0


def _report(given: argparse.Namespace) -> int:
    if (given.run / "peers").is_dir():
        from planaria.commands import swarm

        print(swarm.report(given.run, given.to))
        return 0
    from planaria.observe.report import write_report

    print(write_report(given.run, given.to))
    return 0


def _replay(given: argparse.Namespace) -> int:
    from planaria.commands.replay import replay_run

    print(replay_run(given.run))
    return 0


def _chaos(given: argparse.Namespace) -> int:
    from planaria.commands.chaos import SIGNALS, strike

    action = next(name for name in SIGNALS if getattr(given, name) is not None)
    if given.resume_after is not None and action != "stop":
        raise UserError("--resume-after: goes with --stop; what is killed stays dead")
    print(strike(given.run, action, getattr(given, action), given.resume_after))
    return 0


def _trace(given: argparse.Namespace) -> int:
    from planaria.chaos.trace import digest, generate, write

    exempt = set(given.exempt)
    trace = generate(
        given.seed, given.hourly, given.step_seconds, given.stages, given.steps, exempt, given.forbid_adjacent
    )
    write(trace, given.file)
    print(f"{given.file}: {len(trace.faults)} faults, digest {digest(trace)[:16]}")
    return 0


def _swarm(given: argparse.Namespace) -> int:
    from planaria.commands.swarm import start

    return start(given.recipe, _flags(given), given.dry_run, given.quiet)


def _swarm_join(given: argparse.Namespace) -> int:
    from planaria.commands.swarm_join import take_part

    short = {"policy.path": given.model, "task.name": given.task}
    flags = _flags(given) | {name: text for name, text in short.items() if text is not None}
    return take_part(given.recipe, flags, given.called, given.quiet)


def _swarm_explain(given: argparse.Namespace) -> int:
    from planaria.commands.swarm_explain import Wanted, explain

    explain(given.run, given.peer, Wanted(given.round, given.problem, given.source, given.refused))
    return 0


def _drill(given: argparse.Namespace) -> int:
    from planaria.commands.drill import drill

    return drill(given.recipe, _flags(given), given.quiet)
