"""The model behind a prompted judge: any causal language model that ``transformers`` reads (extra ``hf``)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.common.errors import UserError, missing_package
from planaria.config.names import expanded
from planaria.data.tokenizer import Tokenizer
from planaria.runtime.engine.weights import HUB, downloaded
from planaria.swarm.policy.chat import Template, template_of
from planaria.swarm.policy.huggingface import open_model, reading
from planaria.swarm.policy.policies import folder_tokenizer

TEMPERATURE, TOP_K, TOP_P = 0.6, 10, 0.9
"""how judgements are drawn. Source: arXiv 2511.09780, less its beams"""
ROWS = 16
"""requests at once"""
LEAST = 512
"""tokens that a judge must have room for besides what it writes: the order, the problem and the text"""


class ModelWriter:
    """Writes judgements (:class:`planaria.swarm.checks.prompted_judge.Writer`).

    No request can end its turn of the chat: names of control tokens in it are plain text.
    """

    def __init__(self, path: str, most: int) -> None:
        """The model in a Hugging Face folder or "hf:NAME", which writes at most ``most`` tokens to a request.

        The weights are read when the first request comes. Without a chat template, requests are texts to go on with.

        :raises UserError: when folder, tokenizer or the package are missing, or the chat template is of no use.
        """
        self._folder = downloaded(path.removeprefix(HUB)) if path.startswith(HUB) else expanded(path)
        self._most = most
        self._tokenizer, self._template = _opened(self._folder)
        self._room = _context(self._folder) - most
        if self._room < LEAST:
            raise UserError(
                f"defence.options.tokens = {most} leaves {self._room} of the context of {self._folder} for what is "
                f"to be read, which takes {LEAST} or more; give fewer"
            )
        self.reserved: Sequence[str] = sorted(self._tokenizer.added, key=lambda token: (-len(token), token))

    def write(self, requests: Sequence[str], seeds: Sequence[int]) -> list[str | None]:
        """What it writes to each request; None where request and judgement do not both fit into its context.

        What is asked beside a request moves its logits by rounding errors alone, and hardly ever a draw.
        """
        rows = [self._prompt(request) for request in requests]
        fitting = sorted((n for n, row in enumerate(rows) if len(row) <= self._room), key=lambda n: len(rows[n]))
        written: list[str | None] = [None] * len(rows)
        for start in range(0, len(fitting), ROWS):
            part = fitting[start : start + ROWS]
            for n, text in zip(part, self._judge([rows[n] for n in part], [seeds[n] for n in part]), strict=True):
                written[n] = text
        return written

    @functools.cached_property
    def _model(self) -> Any:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = open_model(self._folder, "auto" if device == "cuda" else torch.float32).to(device).eval()
        end = model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        ends = sorted({i for i in (*ends, self._tokenizer.end) if i is not None})
        # The folder's own settings for generating, a penalty on repetitions for instance, are not what is asked for.
        model.generation_config = type(model.generation_config)(eos_token_id=ends, pad_token_id=ends[0] if ends else 0)
        return model

    @torch.no_grad()
    def _judge(self, rows: list[list[int]], seeds: Sequence[int]) -> list[str]:
        model, longest = self._model, max(map(len, rows))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        new = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=self._most,
            do_sample=False,
            logits_processor=[_Drawing(seeds)],
        )[:, longest:]
        return [self._tokenizer.decode(row) for row in new.tolist()]

    def _prompt(self, request: str) -> list[int]:
        """The ids of a request: a turn of a chat, or a text to be continued where the model has no chat template."""
        if self._template is None:
            return self._tokenizer.encode_prompt(request)
        return self._template.ids([("user", request)], self._tokenizer)


class _Drawing:
    """Leaves of each row's next tokens but one, drawn by the row's own generator: rows do not depend on each other."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [N, V] → 0 for the token that was drawn and −inf for all others.

        The likeliest TOP_K; of them the fewest that hold TOP_P of their mass; of these one by its probability: with
        Gumbel noise on the logits the largest is such a draw.
        """
        top, ids = (scores.float() / TEMPERATURE).topk(min(TOP_K, scores.shape[1]))
        chances = top.softmax(1)
        top = top.masked_fill(chances.cumsum(1) - chances >= TOP_P, -torch.inf)
        noise = torch.stack([torch.rand(top.shape[1], generator=g) for g in self._generators]).to(top)
        drawn = ids.gather(1, (top - (-noise.log()).log()).argmax(1, keepdim=True))
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


def _opened(folder: Path) -> tuple[Tokenizer, Template | None]:
    """The folder's tokenizer, and its chat template if it has one.

    :raises UserError: when something is missing or invalid.
    """
    if importlib.util.find_spec("transformers") is None:
        raise missing_package(f"defence.checks: the model in {folder}", "transformers", "hf")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise UserError(f"defence.checks: {folder} has no {name}; name a Hugging Face folder, or hf:NAME")
    try:
        tokenizer, template = folder_tokenizer(folder), template_of(folder)
        if template is not None:
            template.ids([("user", "a request")], tokenizer)
    except UserError as error:
        raise UserError(f"defence.checks: {error}") from None
    return tokenizer, template


def _context(folder: Path) -> int:
    """Tokens that a model can see at once."""
    from transformers import AutoConfig

    with reading(f"defence.checks: {folder}: its config.json cannot be read", "fix it"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31  # none: without limit
