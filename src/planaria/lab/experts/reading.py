"""What models make of texts: the log-probability of each token, read once and kept beside the model."""

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
from planaria.config.schema import DataConfig, RunConfig
from planaria.data.shards import Data, Split, prepare
from planaria.data.stream import Stream
from planaria.data.tokenizer import Tokenizer
from planaria.lab.experts import embedding
from planaria.lab.experts.domains import HELD_OUT, TEST, TRAINED, read_pieces
from planaria.lab.experts.embedding import Embedding
from planaria.lab.experts.experts_spec import ExpertsSpec
from planaria.lab.experts.manifest import TOKENIZER
from planaria.models.huggingface import import_model
from planaria.models.stages import Llama

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
        self._folder = folder

        def samples(part: str, table: str, names: Iterable[str]) -> dict[str, Tensor]:
            sizes, cache = (base.model.vocab, base.model.context, spec.test_windows), base.data.cache
            return {
                name: domain_samples(
                    folder, spec.parts(name), part, *sizes, cache, f"experts.{table}.{name}: its {part} text"
                )
                for name in names
            }

        self.test = samples(TEST, "domains", spec.domains) | samples(TEST, "untrained", spec.untrained)
        self.held_out = samples(HELD_OUT, "domains", spec.domains)
        self.places = self._places(spec) if spec.mixture.prior == "clusters" else {}
        """prior = "clusters": what :meth:`told` says of where the text before each token lies"""

    def read(self, model: Path) -> Readings:
        """What the exported ``model`` makes of them; kept in the folder it lies in."""
        file = model.with_name("readings.safetensors")
        kept = _kept(file)
        if kept is None:
            read = import_model(model).eval()
            found = {f"test.{name}": token_logps(read, samples) for name, samples in self.test.items()}
            found |= {f"held_out.{name}": token_logps(read, samples) for name, samples in self.held_out.items()}
            keep(file, found)
            kept = found
        return Readings(
            {name: kept[f"test.{name}"] for name in self.test},
            {name: kept[f"held_out.{name}"] for name in self.held_out},
        )

    def told(self, prior: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Part and domain ("test.law") → ln π [domains that speak, N, T] of its samples, told by the text."""
        samples = {f"test.{name}": found for name, found in self.test.items()}
        samples |= {f"held_out.{name}": found for name, found in self.held_out.items()}
        return {part: prior(found) for part, found in samples.items()}

    def _places(self, spec: ExpertsSpec) -> dict[str, Tensor]:
        if not (self._folder / embedding.FILE).is_file():
            trained = {
                name: [text for part in spec.parts(name) for text in read_pieces(self._folder, TRAINED, part)]
                for name in spec.domains
            }
            Embedding.fitted(trained).save(self._folder)
        known, tokenizer = Embedding.open(self._folder), Tokenizer.open(self._folder / "tokenizer.json")
        domains, temperature = spec.speaking, spec.mixture.temperature
        return self.told(lambda samples: known.priors(samples, tokenizer.decode, domains, temperature))


def keep(file: Path, found: Mapping[str, Tensor], said: Mapping[str, str] | None = None) -> None:
    """Write tensors beside a model, with a word on them, and into the list of its folder's digests."""
    with atomic.replacing(file) as unfinished:
        save_file(dict(found), unfinished, metadata=None if said is None else dict(said))
    if sums := digests.read(file.parent):
        digests.write(file.parent, sums | {file.name: (digests.of_file(file),)})


def kept_sums(file: Path, shape: tuple[int, ...], mend: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors [*shape] by name from a file of :func:`planaria.lab.experts.ridge.sums`, and what is said of them.

    Shapes are looked at first: a file that lies about them takes no memory.

    :raises UserError: ending with ``mend``, when it is missing or damaged, or has others.
    """
    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                if tuple(part.get_shape()) == shape and part.get_dtype() == "F64":
                    found[name] = opened.get_tensor(name)
                if name not in found or not found[name].isfinite().all():
                    raise UserError(f"{file}: {name}: not {' × '.join(map(str, shape))} finite numbers in fp64; {mend}")
            return found, dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: missing or damaged ({error}); {mend}") from None


def _kept(file: Path) -> dict[str, Tensor] | None:
    """What was read before; None if nothing, or if it is damaged: then it is read again."""
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
    part: str,
    vocab: int,
    context: int,
    most: int,
    cache: str | None = None,
    place: str = "",
) -> Tensor:
    """At most ``most`` samples [N, context + 1] of a ``part`` (``TRAINED``, ``HELD_OUT`` or ``TEST``) of a run's text.

    Of one domain, or as many of each that another mixes. ``place``: how errors name it, if not by its files.

    :raises UserError: when there is no such text, or less of it than one sample.
    """
    try:
        told = sources(domains, folder / part)
        data = DataConfig(**told, tokenizer=str(folder / TOKENIZER), validation=0.0, cache=cache)
        return windows(prepare(data, vocab), "train", context, most)
    except UserError as error:
        files = ", ".join(str(folder / part / f"{name}.jsonl") for name in domains)
        place = place or f"domain {', '.join(map(repr, domains))} ({files})"
        raise UserError(f"{place}: {str(error).removeprefix('data.')}") from None


def sources(domains: Sequence[str], folder: Path) -> dict[str, Any]:
    """What of ``[data]`` makes a model read these domains, whose files are in ``folder``: as many samples of each."""
    files = {name: str((folder / f"{name}.jsonl").absolute()) for name in domains}
    if len(files) == 1:
        return {"source": next(iter(files.values()))}
    mixture = {name: {"source": file, "weight": 1.0} for name, file in files.items()}
    return {"source": DataConfig().source, "mixture": mixture}


def windows(dataset: Data, split: Split, context: int, most: int) -> Tensor:
    """At most ``most`` samples of a split, each once, in an order that is always the same: int64 [N, context + 1].

    Of several sources, as many of each.

    :raises UserError: when the split is shorter than one.
    """
    stream = Stream(dataset, split, context, seed=0)
    each = min(source.windows for source in stream.sources.values())
    return torch.stack([stream.sample(n) for n in range(min(most, each * len(stream.sources)))])


@torch.inference_mode()
def token_logps(model: Llama, samples: Tensor, on_read: Callable[[int], object] = lambda _: None) -> Tensor:
    """Return ln p(x_t | x_<t) [N, T] of samples [N, T + 1], in nats, float64; the first token of each is given.

    ``on_read`` receives the number of samples of each batch once it is read.
    """
    found = []
    for batch in torch.split(samples, BATCH):
        log_p = model(batch[:, :-1]).double().log_softmax(-1)
        found.append(log_p.gather(-1, batch[:, 1:, None])[..., 0])
        on_read(len(batch))
    return torch.cat(found)
