"""Log-probabilities of texts' tokens by each model, computed once and stored next to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from planaria.common import atomic, digests
from planaria.common.errors import UserError
from planaria.common.tensors import all_finite
from planaria.config.schema import DataConfig, RunConfig
from planaria.data.shards import Data, Split, tokenise_corpus
from planaria.data.stream import Stream
from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts import embedding
from planaria.lab.experts.domains import HELD_OUT, TEST, TRAINED, read_pieces
from planaria.lab.experts.embedding import ClusterPrior, Embedding
from planaria.lab.experts.experts_spec import ExpertsSpec
from planaria.lab.experts.manifest import TOKENIZER
from planaria.models.huggingface import import_model
from planaria.report.phrases import format_count

BATCH = 32
"""windows per forward pass"""


@dataclass(frozen=True)
class DomainLogProbabilities:
    """Log-probabilities [N, T] in nats by one model, for each split and domain (``test.law``, ``held_out.law``)."""

    by_text: Mapping[str, Tensor]

    def of(self, split: str) -> dict[str, Tensor]:
        """Return domain → log-probabilities of a split, ``test`` or ``held_out``."""
        return {key.partition(".")[2]: p for key, p in self.by_text.items() if key.startswith(f"{split}.")}

    @property
    def losses(self) -> dict[str, float]:
        """Test domain → nats per token."""
        return {name: -float(logps.mean()) for name, logps in self.of("test").items()}

    @property
    def held_out_losses(self) -> dict[str, float]:
        """Trained domain → nats per token on its held-out text."""
        return {name: -float(logps.mean()) for name, logps in self.of("held_out").items()}


def stack_readings(readings: Sequence[DomainLogProbabilities]) -> dict[str, Tensor]:
    """Return split and domain → the log-probabilities of several models [E, N, T] in float64."""
    return {key: torch.stack([one.by_text[key] for one in readings]).double() for key in readings[0].by_text}


class DomainTexts:
    """The test and held-out text of a run's domains, as samples [N, context + 1]."""

    def __init__(self, folder: Path, spec: ExpertsSpec, base: RunConfig) -> None:
        """Load samples from the ``folder`` of a run, with the domains' texts and the tokenizer.

        :raises UserError: when a domain's text is too short for one sample.
        """
        self._folder = folder

        def samples(split: str, table: str, names: Iterable[str]) -> dict[str, Tensor]:
            sizes, cache = (base.model.vocab, base.model.context, spec.test_windows), base.data.cache
            return {
                name: domain_samples(
                    folder, spec.parts(name), split, *sizes, cache, f"experts.{table}.{name}: its {split} text"
                )
                for name in names
            }

        self.test = samples(TEST, "domains", spec.domains) | samples(TEST, "untrained", spec.untrained)
        self.held_out = samples(HELD_OUT, "domains", spec.domains)
        self.text_priors = self._cluster_priors(spec) if spec.mixture.prior == "clusters" else {}
        """with prior = "clusters", split and domain → ln π [active domains, N, T] by the text before each token"""

    def read(self, model: Path) -> DomainLogProbabilities:
        """Return the readings of the exported ``model``, which are stored in its parent folder."""
        file = model.with_name("readings.safetensors")
        readings = _read_stored(file)
        if readings is None:
            read = import_model(model).eval()
            readings = {key: token_logps(read, samples) for key, samples in self.samples.items()}
            write_tensors(file, readings)
        return DomainLogProbabilities({key: readings[key] for key in self.samples})

    @property
    def samples(self) -> dict[str, Tensor]:
        """Split and domain (``test.law``) → samples."""
        test = {f"test.{name}": samples for name, samples in self.test.items()}
        return test | {f"held_out.{name}": samples for name, samples in self.held_out.items()}

    def _cluster_priors(self, spec: ExpertsSpec) -> dict[str, Tensor]:
        if not (self._folder / embedding.FILE).is_file():
            trained = {
                name: [text for source in spec.parts(name) for text in read_pieces(self._folder, TRAINED, source)]
                for name in spec.domains
            }
            Embedding.fit(trained).save(self._folder)
        prior = ClusterPrior(Embedding.open(self._folder), Tokenizer.open(self._folder / TOKENIZER).decode)
        domains, temperature = spec.speaking, spec.mixture.temperature
        return {key: prior.priors(samples, domains, temperature) for key, samples in self.samples.items()}


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors next to a model, with metadata, and update the digests of the folder."""
    with atomic.replace_atomically(file) as unfinished:
        save_file(dict(tensors), unfinished, metadata=None if metadata is None else dict(metadata))
    if sums := digests.read(file.parent):
        digests.write(file.parent, sums | {file.name: (digests.of_file(file),)})


def read_sums(file: Path, shape: tuple[int, ...], fix: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors [*shape] by name from a file of :func:`planaria.lab.experts.ridge.sums`, and its metadata.

    Shapes are checked before tensors are loaded, so a wrong file takes no memory.

    :raises UserError: ending with ``fix``, if it is missing, damaged or of different shapes.
    """
    tensors = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                stored = opened.get_slice(name)
                if tuple(stored.get_shape()) == shape and stored.get_dtype() == "F64":
                    tensors[name] = opened.get_tensor(name)
                if name not in tensors or not all_finite(tensors[name]):
                    raise UserError(f"{file}: {name}: not {' × '.join(map(str, shape))} finite numbers in fp64; {fix}")
            return tensors, dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: missing or damaged ({error}); {fix}") from None


def _read_stored(file: Path) -> dict[str, Tensor] | None:
    """Return stored readings, or None if there are none or they are damaged."""
    sums = digests.read(file.parent)
    if not file.is_file() or (sums and digests.of_file(file) not in sums.get(file.name, ())):
        return None
    try:
        return load_file(file)
    except SafetensorError:
        return None


def domain_samples(
    folder: Path,
    domains: Sequence[str],
    split: str,
    vocab: int,
    context: int,
    limit: int,
    cache: str | None = None,
    location: str = "",
) -> Tensor:
    """Return at most ``limit`` samples [N, context + 1] of a ``split`` (``TRAINED``, ``HELD_OUT`` or ``TEST``).

    The text is of one domain, or of equal shares of the ``domains`` that another mixes. Errors name ``location``.

    :raises UserError: when there is no such text, or less of it than one sample.
    """
    try:
        return text_samples(folder, sources(domains, folder / split), vocab, context, limit, cache)
    except UserError as error:
        files = ", ".join(str(folder / split / f"{name}.jsonl") for name in domains)
        location = location or f"domain {', '.join(map(repr, domains))} ({files})"
        raise UserError(f"{location}: {str(error).removeprefix('data.')}") from None


def text_samples(
    folder: Path, text: Mapping[str, Any], vocab: int, context: int, limit: int, cache: str | None = None
) -> Tensor:
    """Return at most ``limit`` samples [N, context + 1] of a text, with the tokenizer of the model in ``folder``.

    ``text``: settings of ``[data]`` that name it.

    :raises UserError: when there is no such text, or less of it than one sample.
    """
    data_config = DataConfig(**text, tokenizer=str(folder / TOKENIZER), validation=0.0, cache=cache)
    corpus = tokenise_corpus(data_config, vocab)
    for name, dataset in corpus.parts.items():
        if not dataset.windows("train", context):
            raise UserError(
                f"{name or text['source']} has {format_count(dataset.tokens('train'), 'token')}, but one sample takes "
                f"the context of the model + 1 = {context + 1}; use a longer text"
            )
    return windows(corpus, "train", context, limit)


def sources(domains: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the ``[data]`` settings that read these domains' files in ``folder``, in equal shares."""
    files = {name: str((folder / f"{name}.jsonl").absolute()) for name in domains}
    if len(files) == 1:
        return {"source": next(iter(files.values()))}
    mixture = {name: {"source": file, "weight": 1.0} for name, file in files.items()}
    return {"source": DataConfig().source, "mixture": mixture}


def windows(dataset: Data, split: Split, context: int, limit: int) -> Tensor:
    """Return at most ``limit`` samples of a split, each once, in a fixed order: int64 [N, context + 1].

    Several sources have equal shares.

    :raises UserError: when the split is shorter than one.
    """
    stream = Stream(dataset, split, context, seed=0)
    each = min(source.windows for source in stream.sources.values())
    return torch.stack([stream.sample(n) for n in range(min(limit, each * len(stream.sources)))])


@torch.inference_mode()
def token_logps(
    model: Callable[[Tensor], Tensor], samples: Tensor, on_read: Callable[[int], object] = lambda _: None
) -> Tensor:
    """Return ln p(x_t | x_<t) [N, T] of samples [N, T + 1], in nats, float64; the first token of each is given.

    ``model`` maps token ids [B, T] to logits [B, T, V].
    ``on_read`` gets the number of samples of each batch that was read.
    """
    logps = []
    for batch in torch.split(samples, BATCH):
        log_p = model(batch[:, :-1]).double().log_softmax(-1)
        logps.append(log_p.gather(-1, batch[:, 1:, None])[..., 0])
        on_read(len(batch))
    return torch.cat(logps)
