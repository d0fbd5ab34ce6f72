"""Mixtures of expert models by domain, and ensemble weights for the worst domain."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks import common
from benchmarks.common import RUNS, Cell, Claim, Row, start
from planaria.config import shipped

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.lab.experts.budget import Spent
    from planaria.lab.experts.experts_results import ArmResult, Results, SeedResult, Weighing
    from planaria.lab.experts.worst import Array, Problem, Solver, Weights


EXPERTS_NAME = "experts"
RECIPE = shipped.find("hdee")
HAND = {"dialogue": 0, "encyclopaedia": 1, "law": 1, "code": 2}
SOURCES = {"code": "stdlib"}
"""of domains; of the others, the folder of their name"""
BEGINS = {"dialogue": r"(?<=\n\n)User:", "encyclopaedia": "^Background:", "law": "^(FEDERALIST No|LECTURE )"}
"""where a document begins within a file"""
UNTRAINED = {
    "books": {"source": "books"},
    "shakespeare": {"source": "tinyshakespeare.txt"},
    "mathematics": {"source": "gsm8k", "field": "answer"},
    "exercises": {"source": "mbpp"},
    "wiki": {"source": "wikitext2"},
}


def run_experts() -> int:
    """Compare experts of unequal size or training with equal ones and with one model of their compute.

    Dialogue, encyclopaedia, Python code and law have an expert each; what nobody is trained on stands beside them. One
    value for each seed, averaged over its parents, or for each parent where an arm is looked at by itself; all ratios
    are of perplexities on the same test text. Everything but the texts and the sizes below is from the recipe hdee.
    With ``--texts stdlib`` the texts are the recipe's too.

    The texts are folders and files below the one in PLANARIA_DATA: dialogue/ (Schema-Guided Dialogue), encyclopaedia/
    (The World Factbook), law/ (Project Gutenberg 1404 and 2449), books/ (nine novels from there), wikitext2/ and mbpp/
    (as published), gsm8k/ (.jsonl with "answer"), tinyshakespeare.txt. Code is Python's own library. A dialogue, a
    country, a paper of the Federalist, a lecture and a file of code are a document each.
    """
    flags = common.parser(EXPERTS_NAME, run_experts.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--texts", choices=("data", "stdlib"), default="data")
    flags.add_argument("--data", type=Path, default=Path(os.environ.get("PLANARIA_DATA", "data")), help="texts")
    flags.add_argument("--parents", type=int, default=3, help="models of each size to branch off, in each seed")
    flags.add_argument("--scale", type=float, default=1.0, help="of all steps of the recipe")
    flags.add_argument(
        "--by", nargs="+", default=["probe", "sizes", "hand", "seed_loss"], help="what difficulty is told by"
    )
    flags.add_argument("--even", action="store_true", help="equal experts and the generalist alone, without probes")
    flags.add_argument("--rate", type=float, default=1.0, help="of the experts' and the generalist's learning rate")
    given = flags.parse_args()
    name, found = run(given)
    rows = [*budget(found), *ensembles(found), *generalists(found)]
    if not given.even:
        rows += [*unequal(found), *luck(found), *allotted(found)]
        rows += [*beliefs(name, found), *fewer(found), *one_lost(found)]
    return common.conclude(EXPERTS_NAME if given.texts == "data" else f"{EXPERTS_NAME}_{given.texts}", given, rows)


def run(given: argparse.Namespace) -> tuple[str, Results]:
    """The recipe at this size with these texts, as far as it has not been run: its name, and what came of it.

    Each seed is a run of its own, so that further ones can be added.
    """
    import tomli_w

    from planaria.lab.commands.experts import RESULTS, start
    from planaria.lab.experts.experts_results import Results

    RUNS.mkdir(parents=True, exist_ok=True)
    sizes = [f"{given.scale:g}", f"{given.parents}", f"{given.rate:g}", "even" if given.even else "all"]
    name, found = "-".join([EXPERTS_NAME, given.texts, *sizes]), list[Results]()
    for seed in given.seeds:
        own = f"{name}-{seed}"
        (file := RUNS / f"{own}.toml").write_text(tomli_w.dumps(asked(given, seed)))
        start(file, {"out": str(RUNS), "name": own}, dry_run=False, quiet=False)
        found.append(Results.model_validate_json((RUNS / own / RESULTS).read_text()))
        if lost := [f"{name} of seed {run.seed}" for run in found[-1].runs for name in run.lost]:
            raise SystemExit(f"{', '.join(lost)} could not be trained; run this again to take that up")
    return name, found[0].model_copy(update={"runs": [run for one in found for run in one.runs]})


def asked(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The recipe for one seed."""
    from planaria.config import recipe

    tree = recipe.read(RECIPE)
    table: dict[str, Any] = tree["experts"]
    table |= {"seeds": [seed], "parents": given.parents}
    table["steps"] = [round(given.scale * steps) for steps in table["steps"]]
    table["seed"]["steps"] = round(given.scale * table["seed"]["steps"])
    table["probe"] = {"steps": round(given.scale * table["probe"]["steps"]), "by": given.by}
    tree["optim"]["lr"] *= given.rate
    if given.even:
        middle = len(table["steps"]) // 2
        table |= {"steps": [table["steps"][middle]], "sizes": dict([list(table["sizes"].items())[middle]])}
        table["probe"] = {"by": ["hand"]}
    if given.texts == "data":
        table["domains"], table["untrained"] = texts(given.data.resolve())
    return tree


def texts(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Domains with an expert, and without."""
    trained = {
        name: {"source": SOURCES.get(name, str(data / name)), "begins": BEGINS.get(name, ""), "hand": hand}
        for name, hand in HAND.items()
    }
    return trained, {name: {**place, "source": str(data / place["source"])} for name, place in UNTRAINED.items()}


def row(what: str, values: list[float], claim: Claim | None = None) -> Row:
    return Row(what, values, "", claim)


def budget(found: Results) -> Iterator[Row]:
    """H1: what the arms spent, all parameters and without embeddings."""
    for what in ("flops", "parameter_tokens", "inner_parameter_tokens"):
        bills = [[getattr(arm, what) for arm in run.arms.values()] for run in found.runs]
        yield row(f"dearest over cheapest arm, {what}", [max(b) / min(b) for b in bills], Claim(high=1.01))


def ensembles(found: Results) -> Iterator[Row]:
    """H2, H3: equal experts, each by itself and together."""
    from planaria.lab.experts.budget import SYNCHRONISED

    runs = [(run, run.arms[SYNCHRONISED]) for run in found.runs]
    over = [
        min(s.averaged - s.loss for arm in found.ensembles for s in run.arms[arm].scores.values()) for run in found.runs
    ]
    yield row("mean of the experts' losses less the mixture's, least", over, Claim(low=0.0))
    for name in found.trained:
        own = [math.exp(run.single[_expert(run, name)][name] - run.parent[name]) for run, _ in runs]
        yield row(f"{name}: its expert over the seed model", own, Claim(high=0.8))
    for name in found.trained:
        yield row(f"{name}: ensemble over best expert", [_over_best(arm, name) for _, arm in runs], Claim(high=1.02))
    for name in found.untrained:
        yield row(f"{name}, never trained: ensemble over best expert", [_over_best(arm, name) for _, arm in runs])
    together = [math.exp(fmean(math.log(_over_best(arm, name)) for name in found.untrained)) for _, arm in runs]
    yield row("never trained, geometric mean: ensemble over best expert", together, Claim(high=0.9999))


def generalists(found: Results) -> Iterator[Row]:
    """Every ensemble against one model that had the compute of all its experts: what the paper has no arm for."""
    for rival in found.generalists:
        for arm in found.ensembles:
            if ", by " in arm:
                continue
            for name in found.domains:
                yield row(
                    f"{arm} over {rival}: {name}, a {found.verdict(arm, name, rival)}", found.ratios(arm, name, rival)
                )
            yield row(f"{arm} over {rival}: geometric mean, trained", found.overall(arm, rival, found.trained))
            yield row(f"{arm} over {rival}: geometric mean, all", found.overall(arm, rival), Claim(high=1.0))
            yield row(f"{arm} over {rival}: compute of a token", [found.times(arm, rival)])


def luck(found: Results) -> Iterator[Row]:
    """What the parent alone makes of an arm: one value for each parent, over the mean of its seed's."""
    for arm in found.arms[1:]:
        if ", by " not in arm:
            yield row(f"{arm} over equal experts: by parent, over the seed's mean", found.luck(arm))
    for size in found.runs[0].parents:
        seeds = found.branched(size)
        means = [math.exp(fmean(map(math.log, values))) for values in seeds]
        apart = [value / mean for values, mean in zip(seeds, means, strict=True) for value in values]
        yield row(f"parents of size {size}: perplexity, over the seed's mean", apart)


def unequal(found: Results) -> Iterator[Row]:
    """H4: both uneven arms against the even one, by the tier that a domain was put into, by default by the probe."""
    from planaria.lab.experts.budget import LARGER, LONGER

    claims = {0: Claim(high=1.1), 1: Claim(low=0.995, high=1.005), 2: Claim(high=0.97)}
    for arm in (LONGER, LARGER):
        for tier, title in enumerate(("easy", "moderate", "hard")):
            yield row(f"{arm}: {title} domains over equal experts", _by_tier(found, arm, tier), claims[tier])
        for name in found.domains:
            yield row(f"{arm}: {name}, a {found.verdict(arm, name)}", found.ratios(arm, name))
        yield row(f"{arm}: geometric mean over all domains", found.overall(arm))
    best = min((LONGER, LARGER), key=lambda arm: fmean(found.overall(arm)))
    yield row(f"the better uneven arm ({best}), geometric mean", found.overall(best), Claim(high=1.0))


def allotted(found: Results) -> Iterator[Row]:
    """The uneven arms as what was measured, a person, and the seed model's loss would have them.

    What more steps bring is measured by the probe, what size brings by seed models of all sizes. The claim is about
    domains that have experts: neither knows anything of texts that nobody is trained on.
    """
    from planaria.lab.experts.budget import LARGER, LONGER, SYNCHRONISED

    if set(found.runs[0].difficulty) != {"probe", "sizes", "hand", "seed_loss"}:
        return
    for arm, measures in ((LONGER, ("probe",)), (LARGER, ("probe", "sizes"))):
        for measure in measures:
            ours = arm if measure == "probe" else f"{arm}, by {measure}"
            for by in ("hand", "seed_loss"):
                other, claim = f"{arm}, by {by}", Claim(high=1.0) if by == "hand" else None
                yield row(f"{arm}: by {measure} over by {by}", found.overall(ours, other, found.trained), claim)
                yield row(f"{arm}: the same, never trained domains too", found.overall(ours, other))
        for by in ("sizes", "hand", "seed_loss"):
            yield row(
                f"{arm}, by {by}: over equal experts, trained",
                found.overall(f"{arm}, by {by}", SYNCHRONISED, found.trained),
            )
            yield row(f"{arm}, by {by}: over equal experts, all", found.overall(f"{arm}, by {by}"))


def beliefs(name: str, found: Results) -> Iterator[Row]:
    """The even arm once more with other priors, all experts speaking and one of them after the prefix."""
    from planaria.lab.experts.budget import SYNCHRONISED
    from planaria.lab.experts.experts_spec import MixtureSpec, load
    from planaria.lab.experts.lineage import called
    from planaria.lab.experts.reading import Texts
    from planaria.lab.experts.scoring import arm_result

    priors = {"cached": MixtureSpec(prior="cached"), "cached, old times 0.3": MixtureSpec(prior="cached", decay=0.7)}
    for prior, mixture in (priors | {"clusters": MixtureSpec(prior="clusters")}).items():
        ratios = {"all": list[float](), "top-1": list[float]()}
        for seed in found.seeds:
            spec, base = load(RUNS / f"{name}-{seed}.toml", {"out": str(RUNS)})
            other = spec.model_copy(update={"mixture": mixture})
            texts, own = Texts(RUNS / f"{name}-{seed}", other, base), RUNS / f"{name}-{seed}/seed-{seed}/experts"
            for run in found.of(seed):
                arm = run.arms[SYNCHRONISED]
                readings = {job.name: texts.read(own / called(job.name, run.line) / "model") for job in arm.experts}
                again = arm_result(arm.experts, _spent(arm), readings, other, texts.places)
                pairs = {"all": (again.scores, arm.scores), "top-1": (again.fewer["top-1"], arm.fewer["top-1"])}
                for k, (mine, theirs) in pairs.items():
                    ratios[k].append(math.exp(fmean(mine[d].loss - theirs[d].loss for d in found.domains)))
        for k, values in ratios.items():
            yield row(f"{prior} prior over uniform, {k} speaking", values)


def fewer(found: Results) -> Iterator[Row]:
    """What letting only the strongest go on after the prefix costs, and saves."""
    from planaria.lab.experts.budget import SYNCHRONISED

    arms = [run.arms[SYNCHRONISED] for run in found.runs]
    for k in arms[0].fewer:
        worse = [math.exp(fmean(a.fewer[k][d].loss - a.scores[d].loss for d in found.domains)) for a in arms]
        yield row(f"{k}: perplexity over all speaking", worse)
        yield row(f"{k}: forward passes a token", [arm.passes[k] for arm in arms])


def one_lost(found: Results) -> Iterator[Row]:
    """H5: each expert of the even arm lost in turn; the worst change on any other trained domain."""
    from planaria.lab.experts.budget import SYNCHRONISED

    worst = []
    for arm in (run.arms[SYNCHRONISED] for run in found.runs):
        worst.append(
            max(
                math.exp(arm.without[lost.name][job.domain] - arm.scores[job.domain].loss)
                for lost in arm.experts
                for job in arm.experts
                if job != lost
            )
        )
    yield row("one expert lost: worst perplexity on another's domain over before", worst, Claim(high=1.01))


def _spent(arm: ArmResult) -> Spent:
    from planaria.lab.experts.budget import Spent

    return Spent("", arm.flops, arm.parameter_tokens, arm.inner_parameter_tokens, arm.token_flops)


def _expert(run: SeedResult, domain: str) -> str:
    from planaria.lab.experts.budget import SYNCHRONISED

    return next(job.name for job in run.arms[SYNCHRONISED].experts if job.domain == domain)


def _over_best(arm: ArmResult, domain: str) -> float:
    return math.exp(arm.scores[domain].loss - arm.scores[domain].best)


def _by_tier(found: Results, arm: str, tier: int) -> list[float]:
    """The geometric mean over the domains of a tier, seed by seed: the probe may see them otherwise with each seed."""
    means = []
    for n, seed in enumerate(found.seeds):
        names = [name for name, at in next(iter(found.of(seed)[0].tier.values())).items() if at == tier]
        means.append(math.exp(fmean(math.log(found.ratios(arm, name)[n]) for name in names)))
    return means


WORST_DOMAIN_NAME = "worst_domain"
EXPERTS, DOMAINS, FLOOR, RESIDUAL = 6, 4, 0.01, 3e-3
FIRST = (4, 8, 32, 128)
"""tokens of a text"""
TRAINED = [RUNS / f"experts-data-0.5-3-1-all-{seed}" for seed in (1, 2, 3)]
NEAR = 1e-4
"""nats from the best plain mixture"""


def run_worst_domain() -> int:
    """Weights for an ensemble's worst domain: what two solvers need, what the weights gain, and what they cost.

    The solvers are compared on made-up rows (6 experts, 4 domains), in passes: evaluations of single rows over their
    number. The gain is measured with experts: those of runs that are there (``--runs``; by default the ones that
    ``benchmarks.experts experts --scale 0.5 --parents 3 --by probe`` trains, one for each seed), fitted on held-out
    texts and shown on test texts, also of domains that nobody was trained on.
    """
    flags = common.parser(WORST_DOMAIN_NAME, run_worst_domain.__doc__)
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
    return common.conclude(WORST_DOMAIN_NAME, given, rows, notes)


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
    from planaria.lab.experts.worst import worst_domain

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
    from planaria.lab.experts.worst import worst_domain

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
    from planaria.lab.experts.scoring import weigh

    known = manifest.read(run)
    read = [load_file((run / member.model).with_name("readings.safetensors")) for member in known.members]
    held_out, test = (
        {name: logps(read, part, name) for name in worst_domain_texts(read[0], part)} for part in ("held_out", "test")
    )
    return weigh([member.name for member in known.members], held_out, test, known.mixture, tokens)


def worst_domain_texts(read: dict[str, Tensor], part: str) -> list[str]:
    """The domains of which there is text of that part."""
    return [key.partition(".")[2] for key in read if key.startswith(f"{part}.")]


def logps(read: list[dict[str, Tensor]], part: str, name: str) -> Tensor:
    """What each expert makes of a domain's texts, [E, N, T]."""
    import torch

    return torch.stack([one[f"{part}.{name}"] for one in read]).double()


if __name__ == "__main__":
    start(experts=run_experts, worst_domain=run_worst_domain)
