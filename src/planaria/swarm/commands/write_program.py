"""``planaria generate --task``: write a program for one problem, in one draft, as the best of several, or as a tree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from planaria.common.errors import UserError
from planaria.swarm.policy.base import Policy, encode_prompt
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.policy.tree import Selection, Tree
from planaria.swarm.tasks.calls import Call
from planaria.swarm.tasks.programs import FENCE, OPENING, Programs

SURE, BOLD = 0.2, 0.8
"""temperatures of the first version and of the others. Source: arXiv 2405.20092, its released code"""
Strategy = Literal["once", "vote", "tree"]


def write_program(
    folder: Path,
    task: str,
    number: int,
    strategy: Strategy,
    tokens: int,
    top_k: int,
    seed: int,
    choose: Selection = "agreement",
) -> int:
    """Print the program, and its cost and test result on standard error; return the exit code.

    :raises UserError: naming a missing model, file or problem, or a problem without calls.
    """
    kind, _, path = task.partition(":")
    if kind != "programs" or not path:
        raise UserError(f"--task {task}: use programs:PATH, with a file of problems")
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: use 1 or more")
    problems = Programs.model_validate({"path": path})
    prompt, calls = _read_problem(problems, number, path, seed)
    policy = open_policy(str(folder))
    tree = Tree(
        PolicyWriter(policy, tokens, SURE, top_k), PolicyWriter(policy, tokens, BOLD, top_k), seed, choose=choose
    )
    name = calls[0].name
    if strategy == "once":
        program = tree.once(prompt, name)
    else:
        program = (tree.vote if strategy == "vote" else tree.tree)(prompt, name, calls)
    print(program)
    result = _test_result(problems, number, program)
    print(f"{tree.requests} requests, {tree.runs} programs run; {result}", file=sys.stderr)
    return 0


def _read_problem(problems: Programs, number: int, path: str, seed: int) -> tuple[str, list[Call]]:
    """Return a problem's prompt and calls of its function.

    :raises UserError: if the problem or calls are missing.
    """
    try:
        prompt = problems.problem(number).prompt
    except ValueError:
        last = problems.training + problems.held_out - 1
        raise UserError(f"--problem {number}: {path} has problems 0 to {last}") from None
    calls = problems.calls(number, seed)
    if not calls:
        raise UserError(f"--problem {number}: {path} has no calls of its function with literal arguments; try another")
    return prompt, calls


def _test_result(problems: Programs, number: int, program: str) -> str:
    if not program:
        return "the model wrote no Python"
    if number in problems.unlabelled:
        return "the problem has no tests"
    passes = problems.solves(problems.problem(number), f"{OPENING}\n{program}\n{FENCE}")
    return "it passes its tests" if passes else "it fails its tests"


@dataclass
class PolicyWriter:
    """A model prompted in plain language (:class:`planaria.swarm.checks.prompted_judge.Writer`)."""

    policy: Policy
    tokens: int
    """maximum tokens per request"""
    temperature: float
    top_k: int = 0
    reserved: Sequence[str] = ()

    def write(self, requests: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """Return the reply to each request, drawn with its seed, or None if it leaves no room."""
        return [self._write_one(request, seed) for request, seed in zip(requests, seeds, strict=True)]

    def _write_one(self, request: str, seed: int) -> str | None:
        prompt = encode_prompt(self.policy, request)
        room = min(self.tokens, self.policy.context - len(prompt))
        if room < 1:
            return None
        draws = torch.Generator().manual_seed(seed)
        ((drawn,),) = self.policy.sample([prompt], 1, room, self.temperature, self.top_k, draws)
        return self.policy.decode(drawn.ids)
