"""Commands on what a run has left: its model, its report, its log."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import command


def add(commands: Any) -> None:
    generate = command(commands, "generate", "let a run's model, or an exported one, complete a prompt", _generate)
    generate.add_argument("run", type=Path)
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--tokens", type=int, default=100, help="most tokens to add (default %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default %(default)s)")
    generate.add_argument("--top-k", type=int, default=40, help="draw among so many (default %(default)s)")
    generate.add_argument("--seed", type=int, default=0)

    evaluate = command(commands, "eval", "a run's validation perplexity, whole and with stages left out", _eval)
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument(
        "--omit", default="0.25,0.5", metavar="SHARES", help="of the block stages to leave out (default %(default)s)"
    )
    evaluate.add_argument(
        "--subsets", type=int, default=64, help="most subsets to try of each size (default %(default)s)"
    )
    evaluate.add_argument("--microbatches", type=int, help="validation text; as train.eval_microbatches unless given")

    export = command(commands, "export", "write a run's model as a Hugging Face folder", _export)
    export.add_argument("run", type=Path)
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")

    report = command(commands, "report", "write a run's HTML report", _report)
    report.add_argument("run", type=Path)
    report.add_argument("--to", type=Path, metavar="FILE")

    replay = command(commands, "replay", "fold a run's log again: the same events, the same decisions?", _replay)
    replay.add_argument("run", type=Path)


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
