"""``planaria generate``: complete a prompt, chat, or write a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from planaria.cli.flags import Experts, Seed, command, flag, one_folder, reject_flags, run_argument, switch
from planaria.common.errors import UserError
from planaria.config import folders

Strategy = Literal["once", "vote", "tree"]
"""how a program is written: directly, as the best of several, or divided into functions"""
Selection = Literal["agreement", "plurality"]
"""how the best of several programs is selected"""
STRATEGIES = "with --task: directly (once, the default), the best of eleven (vote), or divided into functions (tree)"
CHOICES = (
    "with --as vote or tree: by results that agree, call by call (agreement, the default), or by equal behaviour on "
    "all calls (plurality)"
)
CHAT = "answer the lines of standard input in one conversation, by the model's chat template; Ctrl-D ends it"
TOKENS_HELP = (
    "maximum number of new tokens (default 100; with --chat 512 an answer, with --task 768 a request); past its "
    "context, the model sees only the newest tokens"
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
    tokens: Annotated[int | None, flag("N", TOKENS_HELP)] = None,
    temperature: Annotated[float | None, flag("T", "0 is greedy (default 0.7; with --task 0.2 and 0.8)")] = None,
    top_k: Annotated[int, flag("K", "sample from the K most likely tokens")] = 40,
    seed: Seed = 0,
) -> int:
    """Complete a prompt with a run's model, or an exported one."""
    if chat:
        others: dict[str, object] = {"prompt": prompt, "experts": experts, "task": task}
        others |= {"problem": problem, "as": strategy, "choose": choose}
        reject_flags(others, "cannot be combined with --chat; remove one of them")
        from planaria.models.sampling import Sampling
        from planaria.runtime.api.chat import TOKENS, converse

        count, warmth = TOKENS if tokens is None else tokens, 0.7 if temperature is None else temperature
        return converse(one_folder(run, None), Sampling(count, warmth, top_k, seed), _print_note)
    if task is not None:
        others = {"prompt": prompt, "experts": experts, "temperature": temperature}
        reject_flags(others, "cannot be combined with --task; remove one of them")
        if problem is None:
            raise UserError(f"--task {task}: pass --problem, such as --problem 0")
        if choose is not None and strategy in (None, "once"):
            raise UserError(f"--choose {choose} requires --as vote or --as tree")
        write_program = folders.find_kind("swarm").function("write_program")
        limits = (768 if tokens is None else tokens, top_k, seed)
        folder = one_folder(run, None)
        return int(write_program(folder, task, problem, strategy or "once", *limits, choose or "agreement"))
    if prompt is None or (problem, strategy, choose) != (None, None, None):
        raise UserError(
            "pass --prompt TEXT, --chat, or --task programs:PATH --problem N and optionally --as once, vote or tree"
        )
    from planaria.runtime.api.completer import stream

    complete = stream if experts is None else folders.find_kind("experts").function("complete")
    draws = (100 if tokens is None else tokens, 0.7 if temperature is None else temperature, top_k, seed)
    pieces = complete(one_folder(run, experts), prompt, *draws, _print_note)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _print_note(line: str) -> None:
    print(f"planaria: {line}", file=sys.stderr)
