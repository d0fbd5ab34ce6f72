"""``planaria generate --task``: write a program for one problem in one go, as the best of several, or as a tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from planaria.common.errors import UserError
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.policy.tree import Choice, Tree
from planaria.swarm.policy.writing import PolicyWriter
from planaria.swarm.tasks.programs import FENCE, OPENING, Programs

SURE, BOLD = 0.2, 0.8
"""temperatures of the first version and of the others. Source: arXiv 2405.20092, its released code"""
Way = Literal["once", "vote", "tree"]


def write_program(
    folder: Path, task: str, number: int, way: Way, tokens: int, top_k: int, seed: int, choose: Choice = "agreement"
) -> int:
    """Print the program, and its cost and test result on standard error; return the exit code.

    :raises UserError: naming the model, file or problem that is not there, or what it has no calls for.
    """
    kind, _, path = task.partition(":")
    if kind != "programs" or not path:
        raise UserError(f"--task {task}: write programs:PATH, of a file of problems")
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: give at least 1")
    problems = Programs.model_validate({"path": path})
    try:
        problem = problems.problem(number)
    except ValueError:
        most = problems.training + problems.held_out - 1
        raise UserError(f"--problem {number}: {path} has problems 0 to {most}") from None
    calls = problems.calls(number, seed)
    if not calls:
        raise UserError(f"--problem {number}: {path} has no calls of its function with literal arguments; take another")
    policy = open_policy(str(folder))
    tree = Tree(
        PolicyWriter(policy, tokens, SURE, top_k), PolicyWriter(policy, tokens, BOLD, top_k), seed, choose=choose
    )
    prompt, name = problem.prompt, calls[0].name
    program = (
        tree.once(prompt, name)
        if way == "once"
        else tree.vote(prompt, name, calls)
        if way == "vote"
        else tree.tree(prompt, name, calls)
    )
    print(program)
    print(f"{tree.requests} requests, {tree.runs} programs run; {_told(problems, number, program)}", file=sys.stderr)
    return 0


def _told(problems: Programs, number: int, program: str) -> str:
    if not program:
        return "the model wrote no Python"
    if number in problems.unlabelled:
        return "the problem has no tests"
    passes = problems.solves(problems.problem(number), f"{OPENING}\n{program}\n{FENCE}")
    return "it passes its tests" if passes else "it fails its tests"
