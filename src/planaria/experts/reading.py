"""What models make of texts: the log-probability of each token, read once and kept beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from planaria import atomic, digests
from planaria.config import DataConfig, RunConfig
from planaria.data.shards import Data, Split, prepare
from planaria.data.stream import Stream
from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.experts import embedding
from planaria.experts.domains import HELD_OUT, TEST, TRAINED, read_pieces
from planaria.experts.embedding import Embedding
from planaria.experts.experts_spec import ExpertsSpec
from planaria.model.huggingface import import_model
from planaria.model.stages import Llama

BATCH = 32
"""windows that are read at once"""


@dataclass(frozen=True)
class Readings:
    """Log-probabilities [N, T] in nats that one model gave, for each domain."""

    test: Mapping[str, Tensor]
    held_out: Mapping[str, Tensor]

    @property
    def losses(self) -> dict[str, float]:
        """Test domain → nats per token."""
        return {name: -float(logps.mean()) for name, logps in self.test.items()}

    @property
    def held_out_losses(self) -> dict[str, float]:
        """Trained domain → nats per token on its held-out text."""
        return {name: -float(logps.mean()) for name, logps in self.held_out.items()}


class Texts:
    """The test and held-out text of a run's domains, as samples [N, context + 1] of its models."""

    def __init__(self, folder: Path, spec: ExpertsSpec, base: RunConfig) -> None:
        """``folder``: the run's, with the domains' texts and the tokenizer.

        :raises UserError: when a domain's text is too short for one sample.
        """
        self._folder, self._spec, self._base = folder, spec, base
        self.test = {name: self._windows(TEST, name) for name in (*spec.domains, *spec.untrained)}
        self.held_out = {name: self._windows(HELD_OUT, name) for name in spec.domains}
        self.places = self._places(spec) if spec.mixture.prior == "clusters" else {}
        """part and domain → ln π [domains, N, T] of its samples by where the text before each token lies"""

    def read(self, model: Path) -> Readings:
        """What the exported ``model`` makes of them; kept in the folder it lies in."""
        file = model.with_name("readings.safetensors")
        kept = _kept(file)
        if kept is None:
            read = import_model(model).eval()
            found = {f"test.{name}": token_logps(read, samples) for name, samples in self.test.items()}
            found |= {f"held_out.{name}": token_logps(read, samples) for name, samples in self.held_out.items()}
            with atomic.replacing(file) as unfinished:
                save_file(found, unfinished)
            if sums := digests.read(file.parent):
                digests.write(file.parent, sums | {file.name: (digests.of_file(file),)})
            kept = found
        return Readings(
            {name: kept[f"test.{name}"] for name in self.test},
            {name: kept[f"held_out.{name}"] for name in self.held_out},
        )

    def _places(self, spec: ExpertsSpec) -> dict[str, Tensor]:
        if not (self._folder / embedding.FILE).is_file():
            trained = {
                name: [text for part in spec.parts(name) for text in read_pieces(self._folder, TRAINED, part)]
                for name in spec.domains
            }
            Embedding.fitted(trained).save(self._folder)
        known, tokenizer = Embedding.open(self._folder), Tokenizer.open(self._folder / "tokenizer.json")
        samples = {f"test.{name}": found for name, found in self.test.items()}
        samples |= {f"held_out.{name}": found for name, found in self.held_out.items()}
        temperature = spec.mixture.temperature
        return {
            part: known.priors(found, tokenizer.decode, list(spec.domains), temperature)
            for part, found in samples.items()
        }

    def _windows(self, part: str, name: str) -> Tensor:
        tokenizer, cache = str(self._folder / "tokenizer.json"), self._base.data.cache
        told = sources(self._spec.parts(name), self._folder / part)
        data = DataConfig(**told, tokenizer=tokenizer, validation=0.0, cache=cache)
        try:
            found = prepare(data, self._base.model.vocab)
            return windows(found, "train", self._base.model.context, self._spec.test_windows)
        except UserError as error:
            where = f"experts.{'domains' if name in self._spec.domains else 'untrained'}.{name}"
            raise UserError(f"{where}: its {part} text: {error}") from None


def sources(domains: Sequence[str], folder: Path) -> dict[str, Any]:
    """What of ``[data]`` makes a model read these domains, whose files are in ``folder``: as many samples of each."""
    files = {name: str((folder / f"{name}.jsonl").absolute()) for name in domains}
    if len(files) == 1:
        return {"source": next(iter(files.values()))}
    mixture = {name: {"source": file, "weight": 1.0} for name, file in files.items()}
    return {"source": DataConfig().source, "mixture": mixture}


def _kept(file: Path) -> dict[str, Tensor] | None:
    """What was read before; None if nothing, or if it is damaged: then it is read again."""
    sums = digests.read(file.parent)
    if not file.is_file() or (sums and digests.of_file(file) not in sums.get(file.name, ())):
        return None
    try:
        return load_file(file)
    except SafetensorError:
        return None


def windows(dataset: Data, split: Split, context: int, most: int) -> Tensor:
    """At most ``most`` samples of a split, each once, in an order that is always the same: int64 [N, context + 1].

    Of several sources, as many of each.

    :raises UserError: when the split is shorter than one.
    """
    stream = Stream(dataset, split, context, seed=0)
    each = min(source.windows for source in stream.sources.values())
    return torch.stack([stream.sample(n) for n in range(min(most, each * len(stream.sources)))])


@torch.inference_mode()
def token_logps(model: Llama, samples: Tensor) -> Tensor:
    """ln p(x_t | x_<t) [N, T] of samples [N, T + 1], in nats, float64; the first token of each is given."""
    found = []
    for batch in torch.split(samples, BATCH):
        log_p = model(batch[:, :-1]).double().log_softmax(-1)
        found.append(log_p.gather(-1, batch[:, 1:, None])[..., 0])
    return torch.cat(found)
