"""How a policy puts a problem to its model: bare, after worked examples, or in the model's chat template.

A model that was trained to chat answers a bare question in its own way, and no parser finds an answer in that. It is
told the form, and shown it: small models keep to a form that they have seen, hardly ever to one that they were told
(docs/swarm.md has the numbers).
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.usage import Usage
from planaria.swarm.config import PolicyConfig
from planaria.swarm.draws import derived
from planaria.swarm.policy.base import ROOM, tokenizer_fingerprint
from planaria.swarm.policy.chat import Template, Turn
from planaria.swarm.tasks.base import Problem, Task

EXAMPLES = 4
"""worked examples in a conversation, unless the recipe says how many"""
DRAWN, LONG = 2, 2.0
"""so many times as many training problems are drawn as examples are wanted, and those that are so many times as long as
the median are left out: every token of a prompt is read for each problem. The shortest would be of one kind, in whose
way a small model then answers everything"""
Example = tuple[Problem, str]


@dataclass(frozen=True)
class Asking:
    """What is said before a problem."""

    template: Template | None
    """None: plain text"""
    instruction: str
    """what the answer must look like; may be empty"""
    examples: tuple[Example, ...]
    """problems with worked solutions: ``shown`` of them are shown, never the problem that is asked"""
    shown: int

    def ids(self, problem: Problem, tokenizer: Tokenizer, reply: str = "") -> list[int]:
        """What a policy is given to answer ``problem``, followed by ``reply``; UserError as :meth:`Template.ids`."""
        examples = [each for each in self.examples if each[0].number != problem.number][: self.shown]
        if self.template is None:
            return tokenizer.encode_prompt(_plain(self.instruction, examples, problem) + reply)
        turns = _turns(self.template.takes_system(), self.instruction, examples, problem)
        return self.template.ids(turns, tokenizer, reply)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal where all problems are put alike."""
        parts = [self.template and self.template.text, self.instruction, self.shown]
        told = [*parts, [(problem.number, text) for problem, text in self.examples]]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def asked(found: Template | None, tokenizer: Tokenizer, config: PolicyConfig, task: Task) -> Asking | None:
    """How the problems of ``task`` are put to a model that came with the template ``found``; None: as they stand.

    :raises UserError: when the recipe asks for a chat or for examples where there is no template, or no solutions.
    """
    if config.chat == "always" and found is None:
        raise UserError(
            "policy.chat = 'always': this model has no chat template (tokenizer_config.json, chat_template.jinja, or "
            "a GGUF file's tokenizer.chat_template); write 'auto', or give an instruct model"
        )
    template = None if config.chat == "never" else found
    instruction = config.instruction
    if instruction is None:
        instruction = task.instruction if template else ""
    wanted = config.examples if config.examples is not None else EXAMPLES if template else 0
    examples = worked_examples(task, wanted + 1) if wanted else ()
    if wanted and config.examples is not None and len(examples) <= wanted:
        raise UserError(
            f"policy.examples = {wanted}: {task.name} has worked solutions of {max(0, len(examples) - 1)} besides the "
            "problem that is asked; give fewer"
        )
    asking = Asking(template, instruction, examples, wanted)
    if template is not None:  # whatever is wrong with it is found here, not in a round
        asking.ids(task.problem(0), tokenizer)
    return asking if template or instruction or wanted else None


def worked_examples(task: Task, count: int) -> tuple[Example, ...]:
    """At most ``count`` training problems with the solutions that the task knows, drawn by the task, the same
    for all peers; none if it knows none."""
    rng = random.Random(derived("examples", task.fingerprint))
    numbers = rng.sample(range(task.training), min(DRAWN * count, task.training))
    problems = [task.problem(number) for number in numbers]
    found = [(problem, text) for problem in problems if (text := task.solution(problem, rng)) is not None]
    sizes = [len(problem.prompt) + len(text) for problem, text in found]
    most = LONG * statistics.median(sizes) if sizes else 0.0
    return tuple(each for each, size in zip(found, sizes, strict=True) if size <= most)[:count]


def _turns(system: bool, instruction: str, examples: Sequence[Example], problem: Problem) -> list[Turn]:
    """The conversation before the answer; the instruction opens it, or else its first question."""
    turns: list[Turn] = []
    for each, text in examples:
        turns += [("user", each.prompt.strip()), ("assistant", text)]
    turns.append(("user", problem.prompt.strip()))
    if not instruction:
        return turns
    if system:
        return [("system", instruction), *turns]
    return [("user", f"{instruction}\n\n{turns[0][1]}"), *turns[1:]]


def _plain(instruction: str, examples: Sequence[Example], problem: Problem) -> str:
    """The same as text to go on with."""
    before = [f"{each.prompt}{text}\n\n" for each, text in examples]
    return "".join([f"{instruction}\n\n" if instruction else "", *before, problem.prompt])


class Wording:
    """A tokenizer beside a model with rows for ``vocab`` ids."""

    room: int = ROOM
    """numbers of logits at once"""
    bf16: bool = False
    """whether passes compute in bf16"""
    template: Template | None = None
    """the chat template that came with the model"""
    usage: Usage | None = None
    """what else came with the model; an export keeps it"""
    asking: Asking | None = None
    """how problems are put to it; None: as they stand"""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """:raises UserError: when the tokenizer has ids that the model has no rows for."""
        if tokenizer.vocab > vocab:
            raise UserError(
                f"policy: the tokenizer has {tokenizer.vocab} ids, the model rows for {vocab} only; "
                "give the tokenizer that the model was trained with"
            )
        self.tokenizer, self.vocab, self.end = tokenizer, vocab, tokenizer.end
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def prompt(self, problem: Problem) -> list[int]:
        """The ids that it is given to answer a problem.

        :raises UserError: when its chat template fails.
        """
        return self.encode_prompt(problem.prompt) if self.asking is None else self.asking.ids(problem, self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text to be continued, with those that the tokenizer's template puts before a text."""
        return self.tokenizer.encode_prompt(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any separator."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; end tokens, and ids that the tokenizer does not have, leave nothing."""
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def passing(self, module: nn.Module) -> AbstractContextManager[object]:
        """What a pass through ``module`` runs in: its precision."""
        device = next(module.parameters()).device.type
        return torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext()

    def clone(self) -> Self:
        """An equal policy with weights of its own."""
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})
