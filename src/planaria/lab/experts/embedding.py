"""Embedding of texts: hashed words, tf-idf, and truncated SVD (c-BTM).

Feature hashing, k-means and SVD are scikit-learn's; the result is three tensors in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from planaria.common import atomic
from planaria.common.errors import UserError, missing_package
from planaria.lab.experts.posterior import TextPrior, centre_scores

FILE = "embedding.safetensors"
FEATURES = 2**14
DIMENSIONS = 64
_CENTRE = "centre."


@dataclass(frozen=True)
class Embedding:
    """Embedding of texts as unit vectors [D]."""

    idf: Tensor
    """[F]"""
    components: Tensor
    """[D, F]"""
    centres: Mapping[str, Tensor]
    """domain → mean of its texts [D]"""

    @classmethod
    def fit(cls, domains: Mapping[str, Sequence[str]]) -> Embedding:
        """Fit the embedding to the texts of each domain; deterministic.

        :raises UserError: when scikit-learn is missing.
        """
        learn = _sklearn()
        counts = _count_words([text for texts in domains.values() for text in texts])
        documents = counts.shape[0]
        documents_with_word = torch.from_numpy((counts > 0).sum(0)).flatten().double()
        idf = ((1 + documents) / (1 + documents_with_word)).log() + 1
        size = min(DIMENSIONS, documents - 1)
        reduced = learn.decomposition.TruncatedSVD(size, random_state=0).fit(_weight_counts(counts, idf))
        made = cls(idf.float(), torch.from_numpy(reduced.components_).float(), {})
        centres = {name: made.embed(texts).mean(0) for name, texts in domains.items()}
        return cls(made.idf, made.components, centres)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors [N, D]; zero for a text without known words."""
        weighted = _weight_counts(_count_words(texts), self.idf.double())
        projected = torch.from_numpy(weighted @ self.components.double().numpy().T)
        return torch.nn.functional.normalize(projected, dim=1).float()

    def save(self, folder: Path) -> None:
        """Write the embedding atomically."""
        tensors = {"idf": self.idf, "components": self.components}
        tensors |= {f"{_CENTRE}{name}": centre for name, centre in self.centres.items()}
        with atomic.replace_atomically(folder / FILE) as unfinished:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)

    @classmethod
    def open(cls, folder: Path) -> Embedding:
        """Read an embedding written by :meth:`save`.

        :raises UserError: when it is missing or damaged.
        """
        _sklearn()
        try:
            tensors = load_file(folder / FILE)
            centres = {name.removeprefix(_CENTRE): t for name, t in tensors.items() if name.startswith(_CENTRE)}
            return cls(tensors["idf"], tensors["components"], centres)
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{folder / FILE}: missing or damaged ({error}); restore it") from None


class ClusterPrior(TextPrior):
    """Prior by the distance of an embedded text to each domain's centre; uniform for one without known words."""

    def __init__(self, embedding: Embedding, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode``: tokens → text."""
        self._embedding, self._decode, self.domains = embedding, decode, list(embedding.centres)
        self._centres = torch.stack(list(embedding.centres.values()))

    def scores_at(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        texts = [self._decode(text[:length]) for text in tokens.tolist() for length in lengths]
        positions = self._embedding.embed(texts)
        scores = torch.where(positions.any(1, keepdim=True), centre_scores(positions, self._centres), 0.0)
        return scores.view(len(tokens), len(lengths), -1)


def k_means_groups(texts: Sequence[str], count: int) -> list[int]:
    """Return the group of each text after k-means (seed 0) into ``count`` groups, the largest group first.

    :raises UserError: when there are fewer texts than groups, or scikit-learn is missing.
    """
    if len(texts) <= count:
        raise UserError(f"experts.clusters = {count}: the text has only {len(texts)} pieces; use fewer")
    positions = Embedding.fit({"all": texts}).embed(texts).numpy()
    groups = _sklearn().cluster.KMeans(count, n_init=4, random_state=0).fit_predict(positions).tolist()
    ranked = sorted(range(count), key=lambda group: -groups.count(group))
    return [ranked.index(group) for group in groups]


def _count_words(texts: Iterable[str]) -> Any:
    """Hash words into columns: a sparse matrix [N, F]."""
    vectorizer = _sklearn().feature_extraction.text.HashingVectorizer(
        n_features=FEATURES, alternate_sign=False, norm=None, token_pattern=r"\w+"
    )
    return vectorizer.transform(texts)


def _weight_counts(counts: Any, idf: Tensor) -> Any:
    """Return rows of tf · idf, of length 1."""
    return _sklearn().preprocessing.normalize(counts.multiply(idf.numpy()[None]).tocsr())


def _sklearn() -> Any:
    try:
        import sklearn.cluster
        import sklearn.decomposition
        import sklearn.feature_extraction.text
        import sklearn.preprocessing
    except ImportError:
        label = "experts.clusters (and experts.mixture.prior = 'clusters')"
        raise missing_package(label, "scikit-learn", "experts") from None
    return sklearn
