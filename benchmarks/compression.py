"""Error feedback: the problems of its papers, coding speed, and digits learned with compressed gradients."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import fmean, median

import torch
from torch import Tensor

from benchmarks.exchange_in_process import Replica, exchange_once
from benchmarks.harness import ROOT, Claim, Flag, Measurement, Row, benchmark, ratios, saved, start, write
from planaria.common.errors import UserError
from planaria.config import shipped
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import StageOuterState
from planaria.exchange.compress.compression import FEEDBACKS
from planaria.exchange.compress.feedback import Feedback
from planaria.exchange.compress.sparse import TopK
from planaria.exchange.registry import make_exchange
from planaria.lab.commands.advise_compress import CodingTimes, CompressionArm, CompressionExperience
from planaria.lab.compare.experience import Range
from planaria.lab.compare.race_results import ArmRun, ArmScore, ComparisonResults
from planaria.lab.compare.race_spec import load

Compress = Callable[[Tensor], Tensor]  # [n, d] → [n, d], row by row
Gradients = Callable[[Tensor], Tensor]  # x [d] → each replica's gradient there [n, d]


def xi(delta: float) -> float:
    """Return ξ(δ) = (1 + √(1 − δ))/δ − 1, for a compressor with 0 < δ ≤ 1; 0 for a lossless one."""
    if not 0.0 < delta <= 1.0:
        raise ValueError(f"delta = {delta}: give more than 0, and at most 1")
    return (1.0 + math.sqrt(1.0 - delta)) / delta - 1.0


def arithmetic(smoothness: Sequence[float]) -> float:
    """Return L_AM = mean L_i."""
    return sum(smoothness) / len(smoothness)


def quadratic(smoothness: Sequence[float]) -> float:
    """Return L_QM = √(mean L_i²), at least the arithmetic mean."""
    return math.sqrt(sum(each * each for each in smoothness) / len(smoothness))


def old_rule(whole: float, smoothness: Sequence[float], delta: float) -> float:
    """Return γ = 1/(L + L_QM ξ), EF21's (arXiv 2106.05203, theorem 1); ``whole`` is L."""
    return 1.0 / (whole + quadratic(smoothness) * xi(delta))


def new_rule(whole: float, smoothness: Sequence[float], delta: float) -> float:
    """Return γ = 1/(L + L_AM ξ), EF21-W's, which also holds for EF21 (arXiv 2402.10774, theorem 3); ``whole`` is L."""
    return 1.0 / (whole + arithmetic(smoothness) * xi(delta))


def learn(results: ComparisonResults) -> list[CompressionArm]:
    """Return what a comparison of exchanges shows for each arm; the first arm, the reference, is dense.

    :raises UserError: when an arm stopped before its first loss, or dense gradients missed the target.
    """
    dense = results.arms[0]
    return [
        CompressionArm(
            name=arm.name if arm is not dense else "dense",
            changes=arm.changes,
            loss=range_of(
                _final(own, arm) / _final(free, dense) for own, free in zip(arm.runs, dense.runs, strict=True)
            ),
            steps=None if arm.missed else range_of(run.ratio or 0.0 for run in arm.runs),
            missed=arm.missed,
        )
        for arm in results.arms
    ]


def range_of(values: Iterable[float]) -> Range:
    numbers = list(values)
    return Range(mean=sum(numbers) / len(numbers), low=min(numbers), high=max(numbers))


def _final(run: ArmRun, arm: ArmScore) -> float:
    if run.final is None:
        raise UserError(f"{arm.name}: stopped before it had a loss; race it again")
    return run.final


def top(k: int) -> Compress:
    def compress(rows: Tensor) -> Tensor:
        places = rows.abs().topk(k, dim=1).indices
        return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places))

    return compress


@dataclass
class Replicas:
    """The error feedback of all replicas."""

    feedback: Feedback
    compress: Compress
    delta: float
    weights: Tensor | None = None
    """[n], of EF21-W: replica i compresses g_i/(n w_i), and counts n w_i; equal unless given"""
    outer: StageOuterState | None = field(default=None)

    def agree(self, gradients: Tensor) -> Tensor:
        """Return the common direction for these gradients, one row per replica."""
        factor = 1.0 if self.weights is None else (len(gradients) * self.weights).unsqueeze(1)
        exact = {"x": gradients / factor}
        if self.outer is None and self.feedback.estimates:
            joined = {"x": (factor * exact["x"]).mean(0)}
            self.outer = StageOuterState({**self.feedback.parts_after_start(exact), **self.feedback.shared(joined)})
            return joined["x"]
        outer = self.outer or StageOuterState()
        meant = self.feedback.target(outer, exact, self.delta)
        sent = {"x": self.compress(meant["x"])}
        reached, shared = self.feedback.result(outer, {"x": (factor * sent["x"]).mean(0)})
        self.outer = StageOuterState({**self.feedback.next_parts(outer, exact, meant, sent), **shared})
        return reached["x"]


def descend(replicas: Replicas, gradients: Gradients, x: Tensor, gamma: float, steps: int) -> Tensor:
    for _ in range(steps):
        x = x - gamma * replicas.agree(gradients(x))
    return x


def iterations(replicas: Replicas, gradients: Gradients, x: Tensor, gamma: float, most: int = 100_000) -> float:
    """Return the steps until the mean gradient has 1/1,000 of its first norm, or inf after ``most``."""
    first = float(gradients(x).mean(0).norm())
    for step in range(most):
        each = gradients(x)
        if float(each.mean(0).norm()) <= 1e-3 * first:
            return step
        x = x - gamma * replicas.agree(each)
    return math.inf


# ---- problems


def quadratics(seed: int, n: int, d: int, spread: float) -> tuple[list[float], Gradients]:
    """f_i = (L_i/2)‖x − b_i‖², the logarithms of the L_i normal of this ``spread``: the L_i, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    smooth = (spread * torch.randn(n, generator=generator, dtype=torch.float64)).exp()
    centres = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return smooth.tolist(), lambda x: smooth.unsqueeze(1) * (x - centres)


def least_squares(seed: int, n: int, d: int, zeta: float, sigma: float) -> tuple[Tensor, Gradients]:
    """f_i = ‖A_i x‖²/2m + ζ u_iᵀx with Σu_i = 0 and mean ‖u_i‖² = 1, so that x* = 0 and f* = 0; gradients have noise of
    norm σ. The Hessian of f, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 2 * d, d, generator=generator, dtype=torch.float64)
    hessians = rows.transpose(1, 2) @ rows / (2 * d)
    pulls = torch.randn(n, d, generator=generator, dtype=torch.float64)
    pulls -= pulls.mean(0)
    pulls *= zeta / pulls.square().sum(1).mean().sqrt()

    def gradients(x: Tensor) -> Tensor:
        noise = torch.randn(n, d, generator=generator, dtype=torch.float64) * (sigma / math.sqrt(d)) if sigma else 0.0
        return hessians @ x + pulls + noise

    return hessians.mean(0), gradients


EXPERIENCE = ROOT / "src" / "planaria" / "lab" / "compare" / "compression.json"
CODING, CODED = "7: coding top-1 % of 16 M numbers, s", 1 << 24


def compression_quadratics(seeds: Sequence[int]) -> list[Row]:
    """n = 100, d = 20, top-1, to a thousandth of the first gradient."""
    rows, start = [], torch.zeros(20, dtype=torch.float64)
    for spread in (0.2, 1.0, 1.5, 2.0):
        saved_, laws = [], []
        for seed in seeds:
            own, gradients = quadratics(seed, 100, 20, spread)
            steps = [rule(arithmetic(own), own, 1 / 20) for rule in (old_rule, new_rule)]
            saved_.append(iterations_saved(gradients, start, steps, 1 / 20))
            laws.append(quadratic(own) / arithmetic(own))
        columns, law = {"ratio": f"{median(saved_):.2f}"}, f"L_QM/L_AM {median(laws):.2f}"
        what = f"2: iterations saved over L_QM/L_AM, spread {spread:g}"
        rows.append(Row(what, ratios(saved_, laws), law, Claim(0.95, 1.05), columns))
    return rows


def iterations_saved(gradients: Gradients, start: Tensor, steps: Sequence[float], delta: float) -> float:
    """Return the iterations of EF21 with the first of two step sizes over those with the second."""
    made = partial(Replicas, FEEDBACKS.make("ef21", {}), top(1), delta)
    old, new = (iterations(made(), gradients, start, gamma) for gamma in steps)
    return old / new


def level(name: str, zeta: float, sigma: float, gamma: float, seed: int, n: int = 10) -> float:
    """f − f* after 8,000 steps of least squares, d = 50, top-2, η = 0.04; with noise the mean of the last 2,000."""
    whole, gradients = least_squares(seed, n, 50, zeta, sigma)
    replicas = Replicas(FEEDBACKS.make(name, {"eta": 0.04} if name == "econtrol" else {}), top(2), 0.04)
    x = descend(replicas, gradients, torch.ones(50, dtype=torch.float64), gamma, 6000)
    late = []
    for _ in range(2000):
        x = descend(replicas, gradients, x, gamma, 1)
        late.append(float(x @ whole @ x) / 2)
    return fmean(late) if sigma else late[-1]


def with_noise(seeds: Sequence[int]) -> list[Row]:
    """The levels where methods stall, σ = 5: medians of ratios by seed."""
    at = {
        (name, zeta): [level(name, zeta, 5, 0.01, seed) for seed in seeds]
        for name in ("econtrol", "ef21", "ef14")
        for zeta in (0, 10, 100)
    }
    many = {n: [level("econtrol", 100, 5, 0.003, seed, n) for seed in seeds] for n in (4, 16, 64)}

    best = {zeta: at["econtrol", zeta] for zeta in (0, 10, 100)}
    columns = {"ratio": f"level {median(best[100]):.3g}"}
    return [
        Row("6: EControl's level, ζ = 100 over 0", ratios(best[100], best[0]), "1", Claim(0.95, 1.05), columns),
        Row("6: EF21 over EControl, ζ = 100", ratios(at["ef21", 100], best[100]), "", Claim(low=3)),
        Row("6: EF14 over EControl, ζ = 100", ratios(at["ef14", 100], best[100]), "", Claim(low=10)),
        Row("6: EF14 over EControl, ζ = 10 (below 1 EF14 is ahead)", ratios(at["ef14", 10], best[10]), ""),
        Row("6: EF14 over EControl, ζ = 0 (below 1 EF14 is ahead)", ratios(at["ef14", 0], best[0]), ""),
        Row("6: EControl's level with 4 replicas over 16", ratios(many[4], many[16]), "4", Claim(low=2.5)),
        Row("6: EControl's level with 16 replicas over 64", ratios(many[16], many[64]), "4", Claim(low=2.5)),
    ]


def coding(repeats: int) -> list[Row]:
    """Coding on one core, compared with copies of as much memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vector, codec = torch.randn(CODED), TopK()

    def seconds(work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    codec.decode(codec.encode(vector), len(vector))
    taken = [seconds(lambda: codec.decode(codec.encode(vector), len(vector))) for _ in range(repeats)]
    copy = median(seconds(vector.clone) for _ in range(repeats))
    torch.set_num_threads(threads)
    dense = f"dense at 1 Gb/s {vector.nbytes * 8 / 1e9:.2f} s"
    copies = [t / copy for t in taken]
    return [
        Row(CODING, taken, dense, Claim(high=0.25)),
        Row("7: the same, in copies of that memory", copies, f"a copy {copy * 1e3:.0f} ms", Claim(high=6)),
    ]


def experience_of(comparison: str) -> CompressionExperience:
    """Return the experience from a comparison (JSON) and of this benchmark's saved results."""
    found = ComparisonResults.model_validate_json(comparison)
    config, free = load(shipped.find(found.name), {})[1][0].config, found.arms[0].runs
    timed = saved("compression")
    taken = next(row["values"] for row in timed["rows"] if row["what"] == CODING)
    model, optim = config.model, config.optim
    return CompressionExperience(
        source=f"`planaria compare {found.name}`",
        setting=f"{config.exchange.replicas} replicas of {model.layers} layers of width {model.dim}, vocabulary "
        f"{model.vocab}, {found.steps} steps of {optim.kind} with one learning rate, {optim.lr:g}, for all",
        seeds=[run.seed for run in free],
        steps=found.steps,
        target=range_of(run.ticks or math.inf for run in free).mean,
        arms=learn(found),
        coding=CodingTimes(source=f"compression.json, {timed['machine']}", numbers=CODED, seconds=range_of(taken)),
    )


@benchmark(
    "compression",
    seeds=[1, 2, 3],
    repeats=Flag(7, "of what is timed"),
    learn=Flag(False, "write the data of `planaria advise --compress` from saved results, and stop"),
)
def run_compression(args: Namespace) -> Measurement:
    """Measure error feedback on the problems of its papers, and the time of compression.

    Claims by experiment: (2) EF21-W's new step size saves iterations by the ratio of quadratic and arithmetic mean of
    the L_i; (6) with noise EControl's level does not depend on the difference of replicas, and falls with their number,
    and error feedback of 2014 stalls above it; (7) coding 1 % of 16 M numbers takes at most 0.25 s and six copies of
    memory.
    """
    if args.learn:
        write(EXPERIENCE, experience_of(json.dumps(saved("compression_race"))).model_dump_json(indent=1) + "\n")
        return 0
    return [*coding(args.repeats), *compression_quadratics(args.seeds), *with_noise(args.seeds)]


RATES = {"sgd": (0.1, 0.3), "adamw": (1e-3, 3e-3)}
SCHEMES = ("none", "ef14", "ef21", "econtrol")


def shares(seed: int, workers: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return images, digits, and the rows of each worker."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, digits = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mixes = torch.distributions.Dirichlet(torch.full((workers,), 0.3)).sample(torch.Size([10]))
    owner = torch.empty(len(digits), dtype=torch.long)
    for digit in range(10):
        rows = (digits == digit).nonzero().flatten()
        owner[rows] = torch.multinomial(mixes[digit], len(rows), replacement=True, generator=generator)
    return images, digits, [(owner == worker).nonzero().flatten() for worker in range(workers)]


def final_loss(args: Namespace, seed: int, optimizer: str, lr: float, compress: str) -> float:
    """Return the final training loss; ``compress`` is ``exchange.compress``, empty for dense gradients."""
    images, digits, rows = shares(seed, args.workers)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    update = kinds[optimizer](net.parameters(), lr=lr)
    agreed = make_exchange(ExchangeConfig(kind="allreduce", compress=compress))
    of = {worker: Replica({}, StageOuterState()) for worker in range(args.workers)}
    generator = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        for worker, replica in of.items():
            own = rows[worker] if len(rows[worker]) else torch.arange(len(digits))
            batch = own[torch.randint(len(own), (32,), generator=generator)]
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(images[batch]), digits[batch]).backward()
            replica.fast = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        exchange_once(agreed, of, step, seed)
        for name, parameter in net.named_parameters():
            parameter.grad = of[0].fast[name]
        update.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net(images), digits))


@benchmark("compression_digits", seeds=[1, 2, 3], steps=600, workers=8)
def run_digits(args: Namespace) -> Measurement:
    """Measure compressed gradients on unlike data: eight workers with different mixes of handwritten digits.

    A net of 64-64-10; the workers' shares of digits are drawn from a Dirichlet distribution (0.3); 600 steps of batches
    of 32; the better of two learning rates per arm; final training loss over all images. Claims for SGD and top-5 %:
    every feedback ends at most at 1.15 of the dense loss, no feedback at least at 1.5. Needs the extra experts.
    """
    torch.set_num_threads(1)
    rows = []
    for optimizer in RATES:

        def best(compress: str, kind: str = optimizer) -> list[float]:
            return [min(final_loss(args, seed, kind, lr, compress) for lr in RATES[kind]) for seed in args.seeds]

        dense = best("")
        rows.append(Row(f"{optimizer}: dense", dense, ""))
        for keep, feedback in product((1, 5), SCHEMES):
            found, claim = best(f"{feedback}:top{keep}%"), None
            if optimizer == "sgd" and keep == 5:
                claim = Claim(low=1.5) if feedback == "none" else Claim(high=1.15)
            columns = {"loss": f"{median(found):.3f}"}
            rows.append(
                Row(f"{optimizer}, top-{keep} %, {feedback}: over dense", ratios(found, dense), "", claim, columns)
            )
    return rows


if __name__ == "__main__":
    start(compression=run_compression, digits=run_digits)
