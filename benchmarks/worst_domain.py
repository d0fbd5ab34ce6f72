"""Weights for an ensemble's worst domain: what two solvers need, what the weights gain, and what they cost.

The solvers are compared on made-up rows (6 experts, 4 domains), in passes: evaluations of single rows over their
number. The gain is measured with experts: those of runs that are there (``--runs``; by default the ones that
``benchmarks.experts --scale 0.5 --parents 3 --by probe`` trains, one for each seed), fitted on held-out texts and shown
on test texts, also of domains that nobody was trained on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import common
from benchmarks.common import RUNS, Cell, Claim, Row

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.lab.experts.experts_results import Weighing
    from planaria.lab.experts.worst import Array, Problem
    from planaria.lab.experts.worst_solvers import Solver, Weights

NAME = "worst_domain"
EXPERTS, DOMAINS, FLOOR, RESIDUAL = 6, 4, 0.01, 3e-3
FIRST = (4, 8, 32, 128)
"""tokens of a text"""
TRAINED = [RUNS / f"experts-data-0.5-3-1-all-{seed}" for seed in (1, 2, 3)]
NEAR = 1e-4
"""nats from the best plain mixture"""


def main() -> int:
    flags = common.parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    flags.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384])
    flags.add_argument(
        "--runs", type=Path, nargs="+", default=TRAINED, help="folders of planaria experts, same domains"
    )
    given = flags.parse_args()
    rows, notes = list(solvers(given.rows, given.seeds)), list[str]()
    rows += plain_mixtures(given.seeds)
    runs = [run for run in given.runs if (run / "experts.json").is_file()]
    notes += [
        f"{run.name}: no ensemble there, so it is not among those measured" for run in given.runs if run not in runs
    ]
    if runs:
        rows += experts(runs)
    return common.conclude(NAME, given, rows, notes)


def made(rows: int, domains: int, seed: int) -> Problem:
    """Texts drawn from normal distributions: each expert better on some domains, and some domains harder for all."""
    import numpy as np

    from planaria.lab.experts.worst import problem

    draw = np.random.default_rng(seed)
    hard, skill = draw.uniform(0, 1, domains), draw.normal(0, 1, (domains, EXPERTS))
    texts = {f"d{d}": draw.normal(skill[d] - 2 * hard[d], 1.0, (rows // domains, EXPERTS)) for d in range(domains)}
    return problem(texts, FLOOR)


def solvers(sizes: list[int], seeds: list[int]) -> Iterator[Row]:
    """Passes to one residual, whether both find the same weights, and seconds."""
    passes: dict[int, list[float]] = {}
    for size in sizes:
        problems = [made(size, DOMAINS, seed) for seed in seeds]
        slow, slow_s = _solved(problems, "extragradient")
        fast, fast_s = _solved(problems, "halpern")
        passes[size] = [found.evaluations / size for found in fast]
        beside: dict[str, Cell] = {"rows": size}
        yield Row("extragradient: passes", [found.evaluations / size for found in slow], "", None, beside)
        yield Row("halpern: passes", passes[size], "", None, beside)
        ratios = [one.evaluations / other.evaluations for one, other in zip(fast, slow, strict=True)]
        yield Row("halpern over extragradient, passes", ratios, "", Claim(high=0.25) if size == 4096 else None, beside)
        times = [one / other for one, other in zip(fast_s, slow_s, strict=True)]
        yield Row("halpern over extragradient, seconds", times, "", None, beside)
        apart = [float(abs(one.w - other.w).max()) for one, other in zip(fast, slow, strict=True)]
        yield Row("weights apart", apart, "", Claim(high=5e-3) if size == 4096 else None, beside, "worst")
        gaps = [found.proof.gap for found in (*slow, *fast)]
        yield Row("gap, nats a text", gaps, "0", Claim(low=0.0), beside, "least")
        over = [_over_rivals(p, found) for p, found in zip(problems, slow, strict=True)]
        yield Row(
            "value over the best of uniform weights and single experts", over, "", Claim(high=0.0), beside, "worst"
        )
    falls = statistics.mean(passes[min(sizes)]) / statistics.mean(passes[max(sizes)])
    yield Row(f"halpern: passes at {min(sizes)} rows over those at {max(sizes)}, means", [falls], "", Claim(low=2.0))


def _solved(problems: list[Problem], solver: Solver) -> tuple[list[Weights], list[float]]:
    from planaria.lab.experts.worst_solvers import worst_domain

    found, seconds = [], []
    for given in problems:
        begun = time.perf_counter()
        found.append(worst_domain(given, RESIDUAL, solver=solver))
        seconds.append(time.perf_counter() - begun)
        if not found[-1].certified:
            raise SystemExit(f"{solver}: not certified to {RESIDUAL:g}")
    return found, seconds


def _over_rivals(given: Problem, found: Weights) -> float:
    """What the worst domain loses, over the least that simple weights lose there."""
    import numpy as np

    rivals = [np.full(EXPERTS, 1 / EXPERTS), *np.eye(EXPERTS)]
    return found.proof.value - min(float(given.losses(v).max()) for v in rivals)


def plain_mixtures(seeds: list[int]) -> Iterator[Row]:
    """One domain, so that its price is fixed: expectation and maximisation against both solvers, passes to ``NEAR``."""
    problems = [made(4096, 1, seed) for seed in seeds]
    passes: dict[str, list[float]] = {"expectation and maximisation": [], "extragradient": [], "halpern": []}
    for given in problems:
        steps, best = _climbed(given)
        passes["expectation and maximisation"].append(float(steps))
        for solver in ("extragradient", "halpern"):
            passes[solver].append(_passes_to(given, solver, best + NEAR))
    for who, values in passes.items():
        yield Row(f"plain mixture: {who}, passes to {NEAR:g} nats", values, "", None, {"rows": 4096})


def _climbed(given: Problem) -> tuple[int, float]:
    """Steps until the loss is within ``NEAR`` of the one after 5,000, and that."""
    v: Array = given.middle()[: given.experts]
    losses = []
    for _ in range(5000):
        inner = given.rows @ v
        losses.append(float(given.losses(v)[0]))
        v = v * ((1 / inner) @ given.rows) / len(inner)
    return next(step for step, loss in enumerate(losses, 1) if loss <= losses[-1] + NEAR), losses[-1]


def _passes_to(given: Problem, solver: Solver, loss: float) -> float:
    """Passes with the largest tolerance, of halves, whose weights come to ``loss``."""
    from planaria.lab.experts.worst_solvers import worst_domain

    for halves in range(14):
        found = worst_domain(given, 0.1 / 2**halves, solver=solver)
        if found.proof.value <= loss:
            return found.evaluations / found.rows
    return float("inf")


def experts(runs: list[Path]) -> Iterator[Row]:
    """Held-out fit, test text shown, a value for each run; no claim but the one that holds for any prior."""
    for tokens in FIRST:
        all_found = [_weighed(run, tokens) for run in runs]
        worst = [found.worst("uniform") for found in all_found]
        gains = [found.held_out["uniform"][name] - found.value for found, name in zip(all_found, worst, strict=True)]
        prices = [found.prices[name] for found, name in zip(all_found, worst, strict=True)]
        shown = [_worst_on_test(found) for found in all_found]
        limit = f"ln K / T = {all_found[0].most:.4f}"
        beside: dict[str, Cell] = {"tokens": all_found[0].tokens}
        named: dict[str, Cell] = beside | {"worst": ", ".join(worst)}
        yield Row("held out: gain on the worst domain", gains, limit, Claim(high=all_found[0].most), named, "worst")
        yield Row("its price", prices, "1", None, named)
        yield Row(
            "test: gain on the worst domain", [one["uniform"] - one["worst"] for one in shown], limit, None, beside
        )
        yield Row(
            "test: worst domain, cached over uniform",
            [one["cached"] - one["uniform"] for one in shown],
            "",
            None,
            beside,
        )
        for other in all_found[0].test["uniform"]:
            costs = [found.test["worst"][other] - found.test["uniform"][other] for found in all_found]
            never = "" if other in all_found[0].prices else ", never trained"
            yield Row(f"test: {other}{never} pays", costs, "", None, beside)
        yield Row("gap, nats per token", [found.gap for found in all_found], "0", Claim(low=0.0), beside, "least")


def _worst_on_test(found: Weighing) -> dict[str, float]:
    """By prior, of the domains that have an expert."""
    return {prior: max(losses[name] for name in found.prices) for prior, losses in found.test.items()}


def _weighed(run: Path, tokens: int) -> Weighing:
    """What the run's experts made of its texts when they were trained, weighed."""
    from safetensors.torch import load_file

    from planaria.lab.experts import manifest
    from planaria.lab.experts.weighing import weigh

    known = manifest.read(run)
    read = [load_file((run / member.model).with_name("readings.safetensors")) for member in known.members]
    held_out, test = ({name: logps(read, part, name) for name in texts(read[0], part)} for part in ("held_out", "test"))
    return weigh([member.name for member in known.members], held_out, test, known.mixture, tokens)


def texts(read: dict[str, Tensor], part: str) -> list[str]:
    """The domains of which there is text of that part."""
    return [key.partition(".")[2] for key in read if key.startswith(f"{part}.")]


def logps(read: list[dict[str, Tensor]], part: str, name: str) -> Tensor:
    """What each expert makes of a domain's texts, [E, N, T]."""
    import torch

    return torch.stack([one[f"{part}.{name}"] for one in read]).double()


if __name__ == "__main__":
    common.start(main)
