"""Top-k in chunks of 4,096 numbers, with 12-bit indices and 2-bit values, as SparseLoCo (arXiv 2508.15706) sends it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.exchange.compress import chunks
from planaria.exchange.compress.chunks import FixedCountChunks
from planaria.exchange.compress.sparse import largest_indices, require_inside, why_invalid_indices

INDEX_BITS = 12
CODE_BITS = 2
CHUNK = 1 << INDEX_BITS
_LARGEST = torch.finfo(torch.bfloat16).max
_BIN_EDGES_IN_SIGMA = (-2.25, -0.75, 0.75)
"""edges between the bins of ``released``, in standard deviations from the mean: four of width 6σ/4, the third about
zero"""


class TopK2(FixedCountChunks):
    """The k largest numbers of each chunk by magnitude, each in 14 bits: its index, and one of the chunk's four levels.

    A chunk's levels are bfloat16 numbers, each the mean of the numbers it stands for:

    - ``symmetric``: ±a and ±b, where a is the mean of the magnitudes up to their mean, and b of those above.
    - ``released``: of bins between mean − 2.25σ, mean − 0.75σ and mean + 0.75σ, as in the code released with
      arXiv 2603.08163. There mean and σ are those of a tensor; messages have no tensors, so here they are a chunk's.

    A message has 8 + Σ n (⌈12k/8⌉ + ⌈2k/8⌉ + 2L) bytes with L = 2 or 4 levels: the indices of all chunks of one length,
    then their codes, then their levels.
    """

    chunk: ClassVar[int] = CHUNK

    k: Annotated[int, Field(ge=1, le=CHUNK)] = 64
    """numbers sent of each chunk of 4,096; of a shorter chunk in proportion, at least one"""
    levels: Literal["symmetric", "released"] = "symmetric"
    """levels of the 2-bit values"""

    def chunk_bytes(self, size: int) -> int:
        packed = (chunks.packed_bytes(self.kept(size), bits) for bits in (INDEX_BITS, CODE_BITS))
        return sum(packed) + 2 * self._level_count

    def _encode_rows(self, rows: Tensor, draw: int) -> list[Tensor]:
        indices = largest_indices(rows, self.kept(rows.shape[1]))
        values = rows.gather(1, indices).double()
        codes, levels = _symmetric_levels(values) if self.levels == "symmetric" else _released_levels(values)
        finite = torch.where(levels.isfinite(), levels.clamp(-_LARGEST, _LARGEST), levels)
        return [
            chunks.pack_bits(indices, INDEX_BITS),
            chunks.pack_bits(codes, CODE_BITS),
            chunks.as_bytes(finite.bfloat16()),
        ]

    def _decode(self, reader: chunks.ArrayReader, rows: Tensor, draw: int) -> None:
        indices, codes, levels = self._read(reader, *rows.shape)
        require_inside(indices, rows)
        rows.scatter_(1, indices, levels.gather(1, codes))

    @property
    def guaranteed(self) -> bool:
        """True with ``symmetric`` levels: two means of magnitudes keep at least k times the square of one."""
        return self.levels == "symmetric"

    def delta(self, count: int) -> float:
        """Return the minimum over chunks of min(k/d, 1/k); δ is larger for normal variables, with either kind of
        levels.

        Write the k largest magnitudes as t + a_i, where t is the smallest, with the mean t + ā. The message keeps at
        least k(t + ā)², and ‖v‖² at most d·t² + 2tkā + Σa_i², where Σa_i² ≤ k²ā². [derived here]
        """
        kept = ((self.kept(size), size) for _, size in chunks.chunk_sizes(count, CHUNK))
        return min((min(k / size, 1 / k) for k, size in kept), default=1.0)

    @property
    def _level_count(self) -> int:
        return 2 if self.levels == "symmetric" else 4

    def _why_invalid(self, reader: chunks.ArrayReader, n: int, size: int) -> str:
        indices, _, levels = self._read(reader, n, size)
        return why_invalid_indices(indices, size) or ("" if all_finite(levels) else "not all of its numbers are finite")

    def _read(self, reader: chunks.ArrayReader, n: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices [n, k], codes [n, k] and levels [n, 4] of the next ``n`` chunks of ``size`` numbers."""
        k = self.kept(size)
        indices, codes = (
            chunks.unpack_bits(reader.take((n, chunks.packed_bytes(k, bits)), torch.uint8), k, bits)
            for bits in (INDEX_BITS, CODE_BITS)
        )
        levels = reader.take((n, self._level_count), torch.bfloat16).float()
        return indices, codes, torch.cat([-levels.flip(1), levels], 1) if self.levels == "symmetric" else levels


def _symmetric_levels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n, k] of −b, −a, a, b, and a and b [n, 2]."""
    sizes = values.abs()
    high = (sizes > sizes.mean(dim=1, keepdim=True)).long()
    return torch.where(values < 0, 1 - high, 2 + high), _code_means(sizes, high, 2)


def _released_levels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [n, k] and levels [n, 4] of the four bins."""
    mean, sigma = values.mean(dim=1, keepdim=True), values.std(dim=1, keepdim=True, correction=0)
    codes = sum(
        ((values > mean + edge * sigma).long() for edge in _BIN_EDGES_IN_SIGMA), torch.zeros(1, dtype=torch.long)
    )
    return codes, _code_means(values, codes, 4)


def _code_means(values: Tensor, codes: Tensor, count: int) -> Tensor:
    """Return the mean of the values of each code, 0 if there are none: [n, count]."""
    members = [codes == code for code in range(count)]
    return torch.stack([(values * each).sum(1) / each.sum(1).clamp(min=1) for each in members], 1)
