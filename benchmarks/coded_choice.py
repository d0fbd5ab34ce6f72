"""Ten kinds of delays, and whether the scheme that is chosen from a probe of each is among the quickest afterwards."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.coded_lab import bursts
from benchmarks.common import Claim, Row

if TYPE_CHECKING:
    from planaria.exchange.coded.simulate import Profile

N = 8
PROBE, LATER = 80, 200
"""rounds"""
Lag = Callable[[Any, int], Any]
"""a random generator and rounds → [rounds, N], how many times as long as an undisturbed worker each takes"""


def storms(draw: Any, rounds: int) -> Any:
    """Now and then, for two rounds in the mean, each worker is slow with a chance of one half."""
    import numpy as np

    lag, storm = np.ones((rounds, N)), False
    for now in range(rounds):
        storm = draw.random() >= 0.5 if storm else draw.random() < 0.05
        lag[now] = np.where(storm & (draw.random(N) < 0.5), draw.uniform(4, 6, N), 1.0)
    return lag


def drifting(draw: Any, rounds: int) -> Any:
    """One worker becomes slower by 2 % of its first time in each round, until it begins anew after 60."""
    import numpy as np

    lag = np.ones((rounds, N))
    lag[:, 3] += 0.02 * ((np.arange(rounds) + draw.integers(60)) % 60)
    return lag


def periodic(draw: Any, rounds: int) -> Any:
    """Each worker takes three times as long in every tenth round, each in another one."""
    import numpy as np

    return np.where((np.arange(rounds)[:, None] + draw.permutation(10)[:N]) % 10 == 0, 3.0, 1.0)


def two_classes(draw: Any, rounds: int) -> Any:
    """Half of the workers take 1.6 times as long, always."""
    import numpy as np

    return np.ones((rounds, N)) * np.where(np.arange(N) < N // 2, 1.6, 1.0)


def heavy_tails(draw: Any, rounds: int) -> Any:
    """A Pareto law whose tail falls with the power 1.2: the mean is finite and the variance is not."""
    return 1 + 0.2 * draw.pareto(1.2, (rounds, N))


def one_slow(draw: Any, rounds: int) -> Any:
    """One worker takes three times as long, always."""
    import numpy as np

    return np.ones((rounds, N)) + 2.0 * (np.arange(N) == 3)


LAGS: dict[str, Lag] = {
    "one always slow": one_slow,
    "heavy-tailed": heavy_tails,
    "storms": storms,
    "drifting": drifting,
    "periodic": periodic,
    "two classes": two_classes,
}


def profiles(rounds: int, seed: int) -> dict[str, Profile]:
    """What a probe of each kind sees, and with another seed what comes after."""
    import numpy as np

    from planaria.exchange.coded.simulate import Profile

    even = bursts(rounds, N, seed, enter=0.0)
    found = {
        "none": even,
        "rare": bursts(rounds, N, seed, enter=0.005),
        "bursty": bursts(rounds, N, seed, enter=0.02, leave=0.3),
        "fixed cost": bursts(rounds, N, seed, fixed=1.0, per_load=2.0),
    }
    for kind, lag in LAGS.items():
        found[kind] = Profile(even.seconds * lag(np.random.default_rng(seed), rounds), even.load, even.slope)
    return found


def choice(given: argparse.Namespace) -> list[Row]:
    """Chosen on one probe, judged by what comes after."""
    from planaria.exchange.coded.choose import choose, grid, timed

    rows, near, none, told = [], [], [], []
    for seed in given.seeds:
        later, found, ratios = profiles(LATER, seed + 100), {}, {}
        for kind, probe in profiles(PROBE, seed).items():
            found[kind] = choose(probe)
            least = min(timed(scheme, later[kind])[0] for _, scheme in grid(N))
            slow = found[kind].always_slow if found[kind].best.name == "none" else ()  # these are left out
            ratios[kind] = timed(found[kind].best.scheme, later[kind].without(slow))[0] / least
            rows.append(Row(f"choice: {kind}, probe {seed}", [ratios[kind]], f"{found[kind].best}"))
        near.append(sum(ratio <= 1.05 for ratio in ratios.values()))
        none.append(found["none"].best.name == "none")
        told.append([kind for kind, said in found.items() if said.always_slow] == ["one always slow"])
    return [
        *rows,
        Row(f"choice: within 5 % of the best of its grid, of {len(ratios)}", near, f"{len(ratios)}", Claim(low=9)),
        Row("choice: none where nothing pays", none, "1", Claim(low=1), judged="least"),
        Row("choice: one always slow, and no other, is no case for coding", told, "1", Claim(low=1), judged="least"),
    ]
