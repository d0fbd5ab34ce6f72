"""Commands on the results of a run: its model, its report, its log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from planaria.cli.flags import Run, Seed, command, flag, reject_flags, run_argument, run_option, switch
from planaria.cli.groups.checkpoint import Checkpoint, Format
from planaria.common.errors import UserError
from planaria.config import folders
from planaria.config.folders import PAGE, ReportPage

Precision = Literal["fp32", "bf16"]
Strategy = Literal["once", "vote", "tree"]
"""how a program is written: directly, as the best of several, or divided into functions"""
Selection = Literal["agreement", "plurality"]
"""how the best of several programs is selected"""
Experts = Annotated[Path | None, run_option("--experts", "an ensemble (`planaria experts train`) instead")]
STRATEGIES = "with --task: directly (once, the default), the best of eleven (vote), or divided into functions (tree)"
CHOICES = (
    "with --as vote or tree: by results that agree, call by call (agreement, the default), or by equal behaviour on "
    "all calls (plurality)"
)
CHAT = "answer the lines of standard input in one conversation, by the model's chat template; Ctrl-D ends it"
TOKENS = (
    "maximum number of new tokens (default 100; with --chat 512 an answer, with --task 768 a request); past its "
    "context, the model sees only the newest tokens"
)
FORMATS = (
    "hf: Hugging Face, only weights; with moments and clocks: dcp, of torch.distributed.checkpoint, or universal, "
    "DeepSpeed's"
)
WORST = (
    "with --experts: find the best weights for the domain with the largest loss, with a certificate and prices of "
    "domains; changes nothing"
)


@command("generate")
def _generate(
    run: Annotated[Path | None, run_argument("a run, or an exported model")] = None,
    *,
    experts: Experts = None,
    prompt: Annotated[str | None, flag("TEXT", "the text to complete; or use --task and --problem")] = None,
    chat: Annotated[bool, switch("--chat", CHAT)] = False,
    task: Annotated[str | None, flag("programs:PATH", "write a program for a problem of this file")] = None,
    problem: Annotated[int | None, flag("N", "with --task: the problem's number, from 0")] = None,
    strategy: Annotated[Strategy | None, Option("--as", help=STRATEGIES)] = None,
    choose: Annotated[Selection | None, Option(help=CHOICES)] = None,
    tokens: Annotated[int | None, flag("N", TOKENS)] = None,
    temperature: Annotated[float | None, flag("T", "0 is greedy (default 0.7; with --task 0.2 and 0.8)")] = None,
    top_k: Annotated[int, flag("K", "sample from the K most likely tokens")] = 40,
    seed: Seed = 0,
) -> int:
    """Complete a prompt with a run's model, or an exported one."""
    if chat:
        options = {
            "prompt": prompt,
            "experts": experts,
            "task": task,
            "problem": problem,
            "as": strategy,
            "choose": choose,
        }
        reject_flags(options, "cannot be combined with --chat; remove one of them")
        return _chat(run, tokens, 0.7 if temperature is None else temperature, top_k, seed)
    if task is not None:
        others = {"prompt": prompt, "experts": experts, "temperature": temperature}
        reject_flags(others, "cannot be combined with --task; remove one of them")
        return _write_program(
            run, task, problem, strategy or "once", choose, 768 if tokens is None else tokens, top_k, seed
        )
    if prompt is None or (problem, strategy, choose) != (None, None, None):
        raise UserError(
            "pass --prompt TEXT, --chat, or --task programs:PATH --problem N and optionally --as once, vote or tree"
        )
    from planaria.runtime.api.completer import stream

    complete = stream if experts is None else folders.find_kind("experts").function("complete")
    limits = (100 if tokens is None else tokens, 0.7 if temperature is None else temperature, top_k, seed)
    pieces = complete(_one_folder(run, experts), prompt, *limits, _print_note)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _chat(run: Path | None, tokens: int | None, temperature: float, top_k: int, seed: int) -> int:
    """Answer lines of standard input."""
    from planaria.models.sampling import Sampling
    from planaria.runtime.api import chat

    draws = Sampling(chat.TOKENS if tokens is None else tokens, temperature, top_k, seed)
    return chat.converse(_one_folder(run, None), draws, _print_note)


def _print_note(line: str) -> None:
    print(f"planaria: {line}", file=sys.stderr)


def _write_program(
    run: Path | None,
    task: str,
    problem: int | None,
    strategy: Strategy,
    choose: Selection | None,
    tokens: int,
    top_k: int,
    seed: int,
) -> int:
    if problem is None:
        raise UserError(f"--task {task}: pass --problem, such as --problem 0")
    if choose is not None and strategy == "once":
        raise UserError(f"--choose {choose} requires --as vote or --as tree")
    write_program = folders.find_kind("swarm").function("write_program")
    chosen = choose or "agreement"
    return int(write_program(_one_folder(run, None), task, problem, strategy, tokens, top_k, seed, chosen))


@command("eval")
def _eval(
    run: Annotated[Path | None, run_argument("a run, or an exported model")] = None,
    *,
    experts: Experts = None,
    text: Annotated[
        str | None,
        flag("SOURCE", "with --experts or an exported model: evaluate on this file or folder"),
    ] = None,
    omit: Annotated[str | None, flag("SHARES", "shares of the block stages to omit (default 0.25,0.5)")] = None,
    subsets: Annotated[int | None, flag("N", "maximum number of subsets per size (default 64)")] = None,
    microbatches: Annotated[int | None, flag("N", "validation microbatches (default: train.eval_microbatches)")] = None,
    worst: Annotated[bool, switch("--worst", WORST)] = False,
    tokens: Annotated[int | None, flag("T", "with --worst: of each text, from its beginning (default: prefix)")] = None,
    floor: Annotated[float | None, flag("W", "with --worst: least weight of an expert (default 0.01)")] = None,
    tolerance: Annotated[float | None, flag("R", "with --worst: residual to reach (default 0.001)")] = None,
) -> int:
    """Measure validation perplexity, whole and with stages omitted."""
    from planaria.models.huggingface import is_exported

    folder, ensembles = _one_folder(run, experts), folders.find_kind("experts").function
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
    from planaria.cli.commands.evaluate import evaluate

    return evaluate(folder, "0.25,0.5" if omit is None else omit, 64 if subsets is None else subsets, microbatches)


def _one_folder(run: Path | None, experts: Path | None) -> Path:
    """Return the given folder of a run or an ensemble."""
    if run is not None and experts is not None:
        raise UserError(f"{run} --experts {experts}: use a run or an ensemble, not both")
    folder = run or experts
    if folder is None:
        raise UserError("name a run such as runs/demo, or pass --experts RUN")
    return folder


@command("export")
def _export(
    run: Annotated[Path, run_argument("a run, or a merged model")],
    *,
    to: Annotated[Path, flag("FOLDER", "folder to write")],
    kind: Annotated[Format, Option("--format", help=FORMATS)] = "hf",
    checkpoint: Checkpoint = None,
    precision: Annotated[Precision | None, Option(help="hf: type of weights (default fp32)")] = None,
    shard: Annotated[
        int | None, Option(metavar="MB", min=1, max=1 << 20, help="hf: largest file of weights (default 4096)")
    ] = None,
    peer: Annotated[str | None, flag("NAME", "in a swarm's run: the model of this peer")] = None,
    number: Annotated[
        int | None, flag("N", "with --peer: after N rounds (default: the newest kept)", "--round")
    ] = None,
) -> int:
    """Export a run's model as a Hugging Face folder, or its checkpoint for another program."""
    from planaria.cli.commands.checkpoint import export
    from planaria.models.huggingface import is_exported
    from planaria.runtime.api.import_export import export_again

    swarm, merged = folders.find_kind("swarm"), is_exported(run)
    if peer is None and (swarm.matches(run) or number is not None):
        raise UserError(f"{run}: pass --peer, such as --peer p0")
    if peer is None and not merged:
        print("\n".join(export(run, checkpoint, kind, to, precision, shard)))
        return 0
    source = "a swarm's peer" if peer is not None else "an exported model"
    options = {
        "format": None if kind == "hf" else kind,
        "checkpoint": checkpoint,
        "precision": precision,
        "shard": shard,
    }
    reject_flags(options, f"is for a run's checkpoint, and {run} is {source}; remove it")
    print(export_again(run, to) if peer is None else swarm.function("export_peer")(run, peer, to, number, print))
    return 0


@command("report")
def _report(
    run: Run,
    *,
    to: Annotated[Path | None, flag("FILE", "file to write (default: in the run's folder)")] = None,
    csv: Annotated[Path | None, flag("FOLDER", "also write every figure and table as a CSV file")] = None,
    perfetto: Annotated[
        bool, switch("--perfetto", "write a trace for ui.perfetto.dev instead (default RUN/perfetto.json.gz)")
    ] = False,
    waits: Annotated[
        bool, switch("--waits", "print the waiting times of a run's workers instead, and what is slow")
    ] = False,
) -> int:
    """Write a report of a run, comparison, drill or schedule; or a trace."""
    if perfetto or waits:
        reject_flags({"csv": csv}, f"requires a report; remove {'--perfetto' if perfetto else '--waits'}")
    if waits:
        from planaria.cli.commands.diagnose import diagnose

        reject_flags({"to": to, "perfetto": perfetto or None}, "cannot be combined with --waits, which only prints")
        print(diagnose(run))
    elif perfetto:
        from planaria.report.run.perfetto import write_trace

        print(write_trace(run, to))
    else:
        from planaria.report.page import write_sheets

        page = _report_page(run)
        print(page.write(to or page.file))
        for written in () if csv is None else write_sheets(csv, page.body()):
            print(written)
        page.check()
    return 0


def _report_page(run: Path) -> ReportPage:
    """Return the report of a folder or a schedule; UserError if there is none."""
    if run.is_file():
        return _schedule_report(run)
    kind = folders.kind_of(run)
    return _run_report(run) if kind is None else kind.report(run)


def _run_report(run: Path) -> ReportPage:
    from planaria.control.log.reader import read_run
    from planaria.report.run.report import body, write_page
    from planaria.report.run.sample_ledger import require_exactly_once
    from planaria.runtime.preparation import run_folders

    if (run / run_folders.CONFIG).is_file():
        run_folders.verify_digests(run, run_folders.CONFIG)
    record = read_run(run)
    return ReportPage(
        run / PAGE,
        lambda to: write_page(record, to),
        lambda: body(record),
        lambda: require_exactly_once(record),
    )


def _schedule_report(file: Path) -> ReportPage:
    from planaria.planner.schedule import read
    from planaria.report.run.schedule_figures import step_of
    from planaria.report.run.schedule_page import body, write_page

    plan = read(file)
    return ReportPage(file.with_suffix(".html"), lambda to: write_page(plan, to), lambda: body(plan, step_of(plan)))


@command("run check")
def _check(
    run: Annotated[Path, run_argument("a run; with --accept also an exported model")],
    *,
    accept: Annotated[bool, switch("--accept", "accept manual changes to the folder, and check nothing")] = False,
) -> int:
    """Replay a run's log, and compare the decisions."""
    if accept:
        from planaria.cli.commands.check import accept_changes

        print("\n".join(accept_changes(run)))
    else:
        from planaria.cli.commands.check import replay_run

        print(replay_run(run))
    return 0
