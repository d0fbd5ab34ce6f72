"""Prompts of problems: bare, after worked examples, or in the model's chat template.

A chat model answers a bare question in its own form, which no parser reads. The prompt states the form and shows it in
examples; small models follow examples more often than instructions (docs/swarm.md has the numbers).
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
from planaria.models.chat import Template, Turn
from planaria.models.model_metadata import ModelMetadata
from planaria.swarm.config.policy_config import PolicyConfig
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.policy.base import MAX_LOGITS, tokenizer_fingerprint
from planaria.swarm.tasks.base import Task, TaskProblem

EXAMPLES = 4
"""worked examples in a conversation by default"""
DRAWN, LONG = 2, 2.0
"""candidates drawn per example, and the maximum length of one in medians, since every problem's prompt is read with all
examples. The shortest are not preferred: they would be of one kind, which a small model then imitates"""
Example = tuple[TaskProblem, str]


@dataclass(frozen=True)
class PromptLayout:
    """Prompt parts before a problem."""

    template: Template | None
    """None for plain text"""
    instruction: str
    """required form of the answer; may be empty"""
    examples: tuple[Example, ...]
    """problems with worked solutions; the prompt shows ``shown`` of them, never the problem itself"""
    shown: int

    def ids(self, problem: TaskProblem, tokenizer: Tokenizer, reply: str = "") -> list[int]:
        """Return the prompt of ``problem`` followed by ``reply``; UserError as :meth:`Template.ids`."""
        examples = [each for each in self.examples if each[0].number != problem.number][: self.shown]
        if self.template is None:
            return tokenizer.encode_prompt(_plain_prompt(self.instruction, examples, problem) + reply)
        turns = _make_turns(self.template.takes_system(), self.instruction, examples, problem)
        return self.template.ids(turns, tokenizer, reply)

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits; equal if all prompts are equal."""
        parts = [self.template and self.template.text, self.instruction, self.shown]
        content = [*parts, [(problem.number, text) for problem, text in self.examples]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def prompt_layout(
    model_template: Template | None, tokenizer: Tokenizer, config: PolicyConfig, task: Task
) -> PromptLayout | None:
    """Return the prompt parts for a task and a template, or None for bare prompts; UserError if impossible."""
    if config.chat == "always" and model_template is None:
        raise UserError(
            "policy.chat = 'always': this model has no chat template (tokenizer_config.json, chat_template.jinja, or "
            "a GGUF file's tokenizer.chat_template); use 'auto', or an instruct model"
        )
    template = None if config.chat == "never" else model_template
    instruction = config.instruction
    if instruction is None:
        instruction = task.instruction if template else ""
    wanted = config.examples if config.examples is not None else EXAMPLES if template else 0
    examples = worked_examples(task, wanted + 1) if wanted else ()
    if wanted and config.examples is not None and len(examples) <= wanted:
        raise UserError(
            f"policy.examples = {wanted}: {task.name} has worked solutions of {max(0, len(examples) - 1)} besides the "
            "problem itself; use fewer"
        )
    layout = PromptLayout(template, instruction, examples, wanted)
    if template is not None:  # report template errors here rather than in a round
        layout.ids(task.problem(0), tokenizer)
    return layout if template or instruction or wanted else None


def worked_examples(task: Task, count: int) -> tuple[Example, ...]:
    """Draw up to ``count`` training problems with worked solutions, the same for all peers."""
    rng = random.Random(derive_seed("examples", task.fingerprint))
    numbers = rng.sample(range(task.training), min(DRAWN * count, task.training))
    problems = [task.problem(number) for number in numbers]
    results = [(problem, text) for problem in problems if (text := task.solution(problem, rng)) is not None]
    sizes = [len(problem.prompt) + len(text) for problem, text in results]
    limit = LONG * statistics.median(sizes) if sizes else 0.0
    return tuple(each for each, size in zip(results, sizes, strict=True) if size <= limit)[:count]


def _make_turns(system: bool, instruction: str, examples: Sequence[Example], problem: TaskProblem) -> list[Turn]:
    """Return the conversation before the answer; the instruction is a system turn or precedes the first question."""
    turns: list[Turn] = []
    for each, text in examples:
        turns += [("user", each.prompt.strip()), ("assistant", text)]
    turns.append(("user", problem.prompt.strip()))
    if not instruction:
        return turns
    if system:
        return [("system", instruction), *turns]
    return [("user", f"{instruction}\n\n{turns[0][1]}"), *turns[1:]]


def _plain_prompt(instruction: str, examples: Sequence[Example], problem: TaskProblem) -> str:
    before = [f"{each.prompt}{text}\n\n" for each, text in examples]
    return "".join([f"{instruction}\n\n" if instruction else "", *before, problem.prompt])


class PromptFormat:
    """Tokenizer and prompts of a model with rows for ``vocab`` ids."""

    max_logits: int = MAX_LOGITS
    """maximum number of logits in memory"""
    bf16: bool = False
    """whether passes compute in bf16"""
    template: Template | None = None
    """the model's chat template"""
    usage: ModelMetadata | None = None
    """further data that came with the model, kept by an export"""
    layout: PromptLayout | None = None
    """prompt parts, or None for bare prompts"""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """:raises UserError: if the tokenizer has more ids than the model."""
        if tokenizer.vocab > vocab:
            raise UserError(
                f"policy: the tokenizer has {tokenizer.vocab} ids, the model rows for {vocab} only; "
                "use the tokenizer that the model was trained with"
            )
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.end = tokenizer.end
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def prompt(self, problem: TaskProblem) -> list[int]:
        """Return the prompt ids of a problem; UserError if the chat template fails."""
        return self.encode_prompt(problem.prompt) if self.layout is None else self.layout.ids(problem, self.tokenizer)

    def encode_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode_prompt(text)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without end tokens and unknown ids."""
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def precision_context(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return the precision context of a pass through ``module``."""
        device = next(module.parameters()).device.type
        return torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext()

    def clone(self) -> Self:
        return copy.deepcopy(self, {id(self.tokenizer): self.tokenizer})
