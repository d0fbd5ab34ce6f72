"""Text prior from the parent: ridge regression on its hidden states estimates the domain of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.lab.experts import ridge
from planaria.lab.experts.domains import TRAINED
from planaria.lab.experts.log_probabilities import BATCH, domain_samples, read_sums, write_tensors
from planaria.lab.experts.manifest import WEIGHTS, digest
from planaria.lab.experts.posterior import TextPrior
from planaria.models.huggingface import import_model
from planaria.models.llama_stages import Llama

FILE = "ridge.safetensors"
"""file next to the parent's model: the sums of each domain, and the digest of the model"""
SAMPLES = 256
"""maximum number of samples of each domain's training text"""


@torch.inference_mode()
def mean_states(model: Llama, tokens: Tensor) -> Tensor:
    """Return [N, T, D] for tokens [N, T]: the running mean of the normed last hidden states, in fp64."""
    sums = [model.ends.norm(model.hidden(batch)).double().cumsum(1) for batch in torch.split(tokens, BATCH)]
    return torch.cat(sums) / torch.arange(1, tokens.shape[1] + 1)[:, None]


def text_sums(model: Llama, samples: Tensor) -> Tensor:
    """Return :func:`ridge.sums` of the :func:`mean_states` of a domain's samples [N, T + 1]."""
    return ridge.sums(mean_states(model, samples[:, :-1]).flatten(0, 1))


class RidgePrior(TextPrior):
    """A model that estimates the domain of a text: the least-squares estimate of each domain's probability.

    Scores are [x̄ 1] W with the mean hidden state x̄ of the text.
    """

    def __init__(self, model: Llama, sums: Mapping[str, Tensor], lam: float = ridge.RIDGE) -> None:
        """Fit the regression. ``sums``: domain → :func:`text_sums` of its text.

        :raises UserError: as :func:`ridge.router`.
        """
        self._model, self.domains = model, list(sums)
        self._router = ridge.router(list(sums.values()), lam, unit=False)

    @classmethod
    def load_or_fit(
        cls, parent: Path, run: Path, texts: Mapping[str, Sequence[str]], cache: str | None = None
    ) -> RidgePrior:
        """Return the prior of the exported model ``parent``: stored, or fitted on training text in the folder ``run``.

        ``texts``: domain → the domains whose text it is, usually itself. Sums are stored in the model's folder; missing
        domains are added.

        :raises UserError: when the sums are damaged or another model's, or a domain has no text.
        """
        model = import_model(parent).eval()
        size = model.config.dim + 1
        data = run, model, texts, cache
        return cls(model, load_or_compute(parent, FILE, (size, size), data, lambda samples: text_sums(model, samples)))

    def prior(self, tokens: Sequence[int], domains: Sequence[str], temperature: float) -> Tensor:
        """Return ln π [E] after these tokens, limited to the model's context."""
        return super().prior(tokens[-self._model.config.context :], domains, temperature)

    def scores_at(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        rows = mean_states(self._model, tokens)[:, [length - 1 for length in lengths]]
        return F.pad(rows, (0, 1), value=1.0) @ self._router


def load_or_compute(
    parent: Path,
    name: str,
    shape: tuple[int, ...],
    data: tuple[Path, Llama, Mapping[str, Sequence[str]], str | None],
    compute: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return domain → its sums [*shape] from the file ``name`` next to ``parent``; compute and add missing ones.

    ``data``: the run's folder, the parent, domain → the domains whose training text it is, and the token cache;
    ``compute``: samples of that text [n, T + 1] → sums.

    :raises UserError: when the file is damaged or belongs to another model, or a domain has no text.
    """
    run, model, texts, cache = data
    vocab, context = model.config.vocab, model.config.context
    file, model_digest = parent.with_name(name), digest(parent / WEIGHTS)
    known = _read_sums(file, model_digest, shape) if file.is_file() else {}
    missing = {
        domain: compute(domain_samples(run, sources, TRAINED, vocab, context, SAMPLES, cache))
        for domain, sources in texts.items()
        if domain not in known
    }
    if missing:
        known |= missing
        write_tensors(file, known, {"model": model_digest})
    return {domain: known[domain] for domain in texts}


def _read_sums(file: Path, model_digest: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    fix = "remove it to compute it again"
    sums, metadata = read_sums(file, shape, fix)
    if metadata.get("model") != model_digest:
        raise UserError(f"{file} was not computed with the model next to it; {fix}")
    return sums
