"""Everything random in a swarm, from the run's seed and who draws what for: it can all be drawn again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence

import torch


def derived(*parts: object) -> int:
    """A 63-bit seed from all parts; different parts give different seeds."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def of_messages(seed: int, number: int, messages: Iterable[tuple[str, Sequence[str]]]) -> int:
    """A number that follows from all (peer, texts) of round ``number``: nobody knows it before all have published."""
    parts = [(peer, *texts) for peer, texts in sorted(messages)]
    return derived("messages", seed, number, *(f"{len(part)} {part}" for texts in parts for part in texts))


def generator(*parts: object) -> torch.Generator:
    """A generator on the CPU seeded from all parts."""
    return torch.Generator().manual_seed(derived(*parts))


def shared_problems(seed: int, number: int, training: int, count: int) -> list[int]:
    """The problems of round ``number`` that all peers work on, each once; all problems if there are not so many."""
    return random.Random(derived("problems", seed, number)).sample(range(training), min(count, training))


def own_problems(
    seed: int, peer: str, number: int, training: int, count: int, wanted: Callable[[int], bool], tries: int = 5000
) -> list[int]:
    """``count`` problems that ``peer`` chooses for round ``number``, each once, first of all such as it wants."""
    rng = random.Random(derived("problems", seed, peer, number))
    drawn = rng.sample(range(training), min(max(tries, count), training))
    liked: list[int] = []
    for problem in drawn:
        if wanted(problem):
            liked.append(problem)
        if len(liked) == count:
            return liked
    others = [problem for problem in drawn if problem not in liked]
    return (liked + others)[:count]
