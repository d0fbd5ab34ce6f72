"""Batched text completion with a key-value cache: every token is read once.

R rows of different lengths, without left padding. Prompts fill the first slots of the cache; drawn tokens follow the
longest prompt, in the same slot for all rows. Each row rotates its keys by its own position and masks the slots between
its prompt and its first drawn token. So a step writes one slice, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.llama_layers import KeyValueCache
from planaria.models.llama_stages import BlockStage, Llama
from planaria.models.sampling import check_draws, check_ids, divisor, pick

KEPT_BYTES = 2**29
"""maximum bytes of keys and values held together; more rows are processed in turns, without effect on draws"""


@dataclass(frozen=True)
class DrawnCompletion:
    """The completion of one prompt."""

    ids: tuple[int, ...]
    """without the end token"""
    ended: bool
    """whether the end token was drawn; otherwise the length limit was reached"""
    logps: tuple[float, ...]
    """log-probability in nats of every id, and of the end token if drawn; see :func:`decode`"""


class DecodingBatch:
    """Rows that have read their prompts and advance token by token. ``logits`` [R, V] are those of the next token."""

    logits: Tensor

    @torch.inference_mode()
    def __init__(self, model: Llama, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Read ``prompts``, equal ones once, with space for ``room`` tokens after the longest.

        :raises UserError: for an empty prompt, one longer than the context, and ids outside the vocabulary.
        """
        check_prompts(model, prompts)
        self._model, self._config = model, model.config
        self._device = model.ends.embed_tokens.weight.device
        self._layers, (first, *_) = model.layers, model.stages
        assert isinstance(first, BlockStage)
        self._tables = (first.cos, first.sin)
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        positions = {prompt: n for n, prompt in enumerate(distinct)}
        rows = self._tensor([positions[tuple(prompt)] for prompt in prompts])
        lengths = self._tensor([len(prompt) for prompt in distinct])
        longest = max(map(len, distinct))
        read, logits = self._read_prompts(distinct, lengths, longest)
        self._kept = self._allocate(len(prompts), longest + room)
        self._kept[..., :longest, :] = read.index_select(2, rows)
        self.logits = logits[rows]
        self._positions = lengths[rows]
        slots = torch.arange(longest + room, device=self._device)
        hidden = (slots >= self._positions[:, None]) & (slots < longest)
        self._mask = torch.zeros(hidden.shape, device=self._device, dtype=self._kept.dtype)
        self._mask = self._mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        self._filled = longest

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> None:
        """Read one more token of every row, [R]."""
        rows, self._filled = len(tokens), self._filled + 1
        cos, sin = (table[self._positions].unsqueeze(1) for table in self._tables)
        keys, values = (tensor.unbind() for tensor in self._kept[:, :, :rows, :, : self._filled])
        mask = self._mask[..., : self._filled]
        x = self._model.ends.embed_tokens(tokens.unsqueeze(1))
        for layer, k, v in zip(self._layers, keys, values, strict=True):
            x = layer(x, cos, sin, KeyValueCache(k, v, mask))
        self._positions = self._positions + 1
        self.logits = self._model.ends.logits(x)[:, 0]

    @torch.inference_mode()
    def drop(self, stay: Tensor) -> Tensor:
        """Keep the rows where ``stay`` [R] is true; return their old indices [R'] in the new order.

        Rows from the back fill the gaps, so only as many rows are copied as were dropped.
        """
        left = int(stay.sum())
        order = torch.arange(left, device=self._device)
        free, last = (~stay[:left]).nonzero()[:, 0], left + stay[left:].nonzero()[:, 0]
        order[free] = last
        self._kept[:, :, free, :, : self._filled] = self._kept[:, :, last, :, : self._filled]
        self._positions, self._mask = self._positions[order], self._mask[order]
        return order

    def _read_prompts(self, prompts: list[tuple[int, ...]], lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [2, layers, N, K, longest, d] of N prompts, and the logits [N, V] after them.

        Slots past a prompt's end are undefined.
        """
        tokens = self._tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        cos, sin = (table[:longest] for table in self._tables)
        kept = self._allocate(len(prompts), longest)
        x = self._model.ends.embed_tokens(tokens)
        for n, layer in enumerate(self._layers):
            x = layer(x, cos, sin, KeyValueCache(kept[0, n], kept[1, n], None))
        newest = x[torch.arange(len(prompts), device=self._device), lengths - 1]
        return kept, self._model.ends.logits(newest)

    def _allocate(self, rows: int, slots: int) -> Tensor:
        config = self._config
        shape = (2, config.layers, rows, config.kv, slots, config.head_dim)
        return torch.empty(shape, device=self._device, dtype=self._model.ends.embed_tokens.weight.dtype)

    def _tensor(self, ids: object) -> Tensor:
        return torch.tensor(ids, device=self._device)


def decode(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    end: int | None = None,
) -> list[DrawnCompletion]:
    """Complete each prompt by at most ``max_new`` tokens, ``end`` included, within the context.

    Tokens are drawn by :func:`pick`. A log-probability is log softmax(logits / temperature) over the whole vocabulary,
    even with ``top_k``; for greedy draws it is as at temperature 1.

    Row n draws with the n-th ``max_new`` numbers of ``generator`` (on the CPU; default: a new one with seed 0). So a
    row does not depend on the rest of the batch, except for the rounding of sums.

    :raises UserError: for prompts that :func:`check_prompts` refuses, and an invalid temperature or top_k.
    """
    check_draws(temperature, top_k)
    check_prompts(model, prompts, at_most=model.config.context - 1)
    uniforms = torch.rand(len(prompts), max_new, generator=generator or torch.Generator().manual_seed(0))
    drawn: list[DrawnCompletion] = []
    config, longest = model.config, max(map(len, prompts), default=0)
    row_bytes = 2 * config.layers * config.kv * config.head_dim * (longest + max_new) * 4
    for start in range(0, len(prompts), at_once := max(1, KEPT_BYTES // row_bytes)):
        turn = slice(start, start + at_once)
        drawn += _continue(model, prompts[turn], uniforms[turn], temperature, top_k, end)
    return drawn


def check_prompts(model: Llama, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> None:
    """Check prompts.

    :raises UserError: if one is empty, longer than ``at_most`` (default: the context), or has ids outside the
        vocabulary.
    """
    room = at_most or model.config.context
    for prompt in prompts:
        check_ids(prompt, model.config.vocab)
        if len(prompt) > room:
            raise UserError(f"generate: a prompt of {len(prompt)} tokens; the context has room for {room} of them")


@torch.inference_mode()
def _continue(
    model: Llama, prompts: Sequence[Sequence[int]], uniforms: Tensor, temperature: float, top_k: int, end: int | None
) -> list[DrawnCompletion]:
    """Complete ``prompts`` in one batch, with the random numbers ``uniforms`` [R, steps]."""
    room = [min(uniforms.shape[1], model.config.context - len(prompt)) for prompt in prompts]
    if not max(room):
        return [DrawnCompletion((), False, ())] * len(prompts)
    reading = DecodingBatch(model, prompts, max(room))
    device = reading.logits.device
    uniforms = uniforms.T.to(device)
    ids = torch.zeros(max(room), len(prompts), dtype=torch.long, device=device)
    logps = torch.zeros(ids.shape, device=device)
    rows, limits = torch.arange(len(prompts), device=device), torch.tensor(room, device=device)
    for step in range(len(ids)):
        logits = reading.logits.float()
        chosen = pick(logits, temperature, top_k, uniforms[step, rows])
        ids[step, rows], logps[step, rows] = chosen, _logps(logits, chosen, temperature)
        alive = limits > step + 1
        if end is not None:
            alive &= chosen != end
        if not (left := int(alive.sum())):
            break
        if left < len(rows):
            order = reading.drop(alive)
            rows = rows[order]
            limits = limits[order]
            chosen = chosen[order]
        reading.read(chosen)
    return [_truncate(*row, end) for row in zip(ids.T.tolist(), logps.T.tolist(), room, strict=True)]


def _logps(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) [R] at ``chosen``; as at temperature 1 for greedy draws."""
    scaled = logits / divisor(temperature)
    return scaled.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def _truncate(ids: list[int], logps: list[float], room: int, end: int | None) -> DrawnCompletion:
    """Cut a row at its end token or its length limit."""
    if end is not None and end in ids[:room]:
        length = ids.index(end)
        return DrawnCompletion(tuple(ids[:length]), True, tuple(logps[: length + 1]))
    return DrawnCompletion(tuple(ids[:room]), False, tuple(logps[:room]))
