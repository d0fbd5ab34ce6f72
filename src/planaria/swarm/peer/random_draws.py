"""Random draws of a swarm, derived from the run's seed and their purpose, so that they can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch

from planaria.models.seeding import seed_of


def derive_seed(*parts: object) -> int:
    return seed_of("\0".join(map(str, parts))) >> 1


def seed_from_messages(seed: int, number: int, messages: Iterable[tuple[str, Sequence[str]]]) -> int:
    """Return a number derived from all (peer, texts) of round ``number``, unknown before all have published."""
    parts = [(peer, *texts) for peer, texts in sorted(messages)]
    return derive_seed("messages", seed, number, *(f"{len(part)} {part}" for texts in parts for part in texts))


def generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))


def shared_problems(seed: int, number: int, training: int, count: int) -> list[int]:
    """Return the problems of round ``number`` for all peers, each once; all problems if there are fewer."""
    return random.Random(derive_seed("problems", seed, number)).sample(range(training), min(count, training))


def chosen_problems(
    seed: int, peer: str, number: int, training: int, count: int, wanted: Callable[[int], bool], tries: int = 5000
) -> list[int]:
    """Return ``count`` problems that ``peer`` chooses for round ``number``, each once, wanted ones first."""
    rng = random.Random(derive_seed("problems", seed, peer, number))
    drawn = rng.sample(range(training), min(max(tries, count), training))
    liked = list(islice(filter(wanted, drawn), count))
    return (liked + [problem for problem in drawn if problem not in liked])[:count]
