"""Commands on the results of a run: its model, its report, its log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.cli.flags import Commands, command
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.swarm.commands.write_program import Way
    from planaria.swarm.policy.tree import Choice


def add(commands: Commands) -> None:
    _add_generate(commands)
    _add_eval(commands)
    _add_export(commands)
    _add_report(commands)
    accept = command(commands, "run accept", "accept manual changes to a run's folder", _accept, code=False)
    accept.add_argument("run", type=Path)
    replay = command(commands, "run replay", "replay a run's log, and compare the decisions", _replay)
    replay.add_argument("run", type=Path)


def _add_generate(commands: Commands) -> None:
    generate = command(commands, "generate", "complete a prompt with a run's model, or an exported one", _generate)
    generate.add_argument("run", type=Path, nargs="?")
    generate.add_argument("--experts", type=Path, metavar="RUN", help="an ensemble (`planaria experts train`) instead")
    generate.add_argument("--prompt", help="the text to complete; or use --task and --problem")
    generate.add_argument("--task", metavar="programs:PATH", help="write a program for a problem of this file")
    generate.add_argument("--problem", type=int, metavar="N", help="with --task: the problem's number, from 0")
    generate.add_argument(
        "--as",
        dest="way",
        choices=("once", "vote", "tree"),
        help="with --task: directly (once, the default), the best of eleven (vote), or divided into functions (tree)",
    )
    generate.add_argument(
        "--choose",
        choices=("agreement", "plurality"),
        help="with --as vote or tree: by results that agree, call by call (agreement, the default), or by equal "
        "behaviour on all calls (plurality)",
    )
    generate.add_argument(
        "--tokens",
        type=int,
        help="maximum number of new tokens (default 100; with --task 768 a request); past its context, the model sees "
        "only the newest tokens",
    )
    generate.add_argument("--temperature", type=float, help="0 is greedy (default 0.7; with --task 0.2 and 0.8)")
    generate.add_argument(
        "--top-k", type=int, default=40, help="sample from the K likeliest tokens (default %(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0)


def _add_eval(commands: Commands) -> None:
    evaluate = command(commands, "eval", "validation perplexity, whole and with stages left out", _eval)
    evaluate.add_argument("run", type=Path, nargs="?", help="a run, or an exported model")
    evaluate.add_argument("--experts", type=Path, metavar="RUN", help="an ensemble (`planaria experts train`) instead")
    evaluate.add_argument(
        "--text", metavar="SOURCE", help="with --experts or an exported model: evaluate on this file or folder"
    )
    evaluate.add_argument(
        "--omit",
        default="0.25,0.5",
        metavar="SHARES",
        help="shares of the block stages to leave out (default %(default)s)",
    )
    evaluate.add_argument(
        "--subsets", type=int, default=64, help="maximum number of subsets per size (default %(default)s)"
    )
    evaluate.add_argument("--microbatches", type=int, help="validation microbatches (default: train.eval_microbatches)")


def _add_export(commands: Commands) -> None:
    export = command(commands, "export", "export a run's model as a Hugging Face folder", _export)
    export.add_argument("run", type=Path, help="a run, or a merged model")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    export.add_argument("--peer", metavar="NAME", help="in a swarm's run: the model of this peer")
    export.add_argument("--round", type=int, metavar="N", help="with --peer: after N rounds (default: the newest kept)")


def _add_report(commands: Commands) -> None:
    report = command(commands, "report", "write a report of a run, comparison, drill or schedule; or a trace", _report)
    report.add_argument("run", type=Path)
    report.add_argument("--to", type=Path, metavar="FILE")
    report.add_argument("--csv", type=Path, metavar="FOLDER", help="write every figure and table as a CSV file, too")
    report.add_argument(
        "--perfetto",
        nargs="?",
        const=True,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev instead (default RUN/perfetto.json.gz)",
    )


def _generate(given: argparse.Namespace) -> int:
    if given.task is not None:
        return _generate_program(given)
    if given.prompt is None or any(getattr(given, name) is not None for name in ("problem", "way", "choose")):
        raise UserError(
            "give --prompt TEXT, or --task programs:PATH --problem N and optionally --as once, vote or tree"
        )
    from planaria.lab.commands import ensemble
    from planaria.runtime.complete import stream

    tokens = 100 if given.tokens is None else given.tokens
    temperature = 0.7 if given.temperature is None else given.temperature
    complete = stream if given.experts is None else ensemble.stream
    folder = _one_of(given.run, given.experts)
    pieces = complete(folder, given.prompt, tokens, temperature, given.top_k, given.seed, _note)
    print(given.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _note(line: str) -> None:
    print(f"planaria: {line}", file=sys.stderr)


def _generate_program(given: argparse.Namespace) -> int:
    for name in ("prompt", "experts", "temperature"):
        if getattr(given, name) is not None:
            raise UserError(f"--{name} {getattr(given, name)}: cannot be combined with --task; leave one of them out")
    if given.problem is None:
        raise UserError(f"--task {given.task}: give --problem, such as --problem 0")
    way: Way = given.way or "once"
    if given.choose is not None and way == "once":
        raise UserError(f"--choose {given.choose}: requires --as vote or --as tree")
    from planaria.swarm.commands.write_program import write_program

    tokens = 768 if given.tokens is None else given.tokens
    choose: Choice = given.choose or "agreement"
    folder = _one_of(given.run, None)
    return write_program(folder, given.task, given.problem, way, tokens, given.top_k, given.seed, choose)


def _eval(given: argparse.Namespace) -> int:
    from planaria.cli.commands.evaluate import evaluate
    from planaria.lab.commands import ensemble
    from planaria.lab.commands.ensemble import evaluate_model
    from planaria.models.huggingface import is_exported

    folder = _one_of(given.run, given.experts)
    if given.experts is not None:
        return ensemble.evaluate(folder, given.text)
    if is_exported(folder):
        return evaluate_model(folder, given.text)
    if given.text is not None:
        raise UserError(f"--text {given.text}: requires --experts RUN or an exported model")
    return evaluate(folder, given.omit, given.subsets, given.microbatches)


def _one_of(run: Path | None, experts: Path | None) -> Path:
    """Return the given folder of a run or an ensemble."""
    if run is not None and experts is not None:
        raise UserError(f"{run} --experts {experts}: give a run or an ensemble, not both")
    folder = run or experts
    if folder is None:
        raise UserError("give a run such as runs/demo, or --experts RUN")
    return folder


def _export(given: argparse.Namespace) -> int:
    from planaria.models.huggingface import is_exported
    from planaria.runtime.foreign import export_again, export_run
    from planaria.swarm.trained_policy import export_peer

    swarm = (given.run / "peers").is_dir()
    if given.peer is None and (swarm or given.round is not None):
        raise UserError(f"{given.run}: give a peer with --peer, such as --peer p0")
    if given.peer is None and is_exported(given.run):
        print(export_again(given.run, given.to))
    elif given.peer is None:
        print(export_run(given.run, given.to))
    else:
        print(export_peer(given.run, given.peer, given.to, given.round, print))
    return 0


def _report(given: argparse.Namespace) -> int:
    if given.perfetto is not None:
        return _trace(given)
    from planaria.cli.commands.report import report

    for written in report(given.run, given.to, given.csv):
        print(written)
    return 0


def _trace(given: argparse.Namespace) -> int:
    from planaria.report.run.perfetto import write_trace

    if given.to is not None:
        raise UserError(f"--to {given.to}: requires a report; give the trace's file after --perfetto")
    if given.csv is not None:
        raise UserError(f"--csv {given.csv}: requires a report; leave out --perfetto")
    print(write_trace(given.run, None if given.perfetto is True else Path(given.perfetto)))
    return 0


def _accept(given: argparse.Namespace) -> int:
    from planaria.cli.commands.accept import accept

    print("\n".join(accept(given.run)))
    return 0


def _replay(given: argparse.Namespace) -> int:
    from planaria.cli.commands.replay import replay_run

    print(replay_run(given.run))
    return 0
