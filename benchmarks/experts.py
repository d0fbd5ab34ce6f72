"""Mixtures of expert models by domain, ensemble weights for the worst domain, and one model merged from experts."""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import DATA, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, gaps, ratios, start
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.data.tokenizer import Tokenizer
from planaria.lab.commands.experts import RESULTS
from planaria.lab.experts import domains, manifest, merge, posterior, ridge, scoring
from planaria.lab.experts.budget import LARGER, LONGER, SYNCHRONISED
from planaria.lab.experts.experts_results import ArmResult, FittedWeights, Results, SeedResult
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec, VotesSpec, load
from planaria.lab.experts.log_probabilities import DomainLogProbabilities, DomainTexts, domain_samples, token_logps
from planaria.lab.experts.minimax_weights import MinimaxProblem, MinimaxWeights, Solver, make_problem, worst_domain
from planaria.lab.experts.scoring import fit_weights
from planaria.lab.experts.text_prior import RidgePrior, mean_states, text_sums
from planaria.lab.experts.training import Training, train_all, with_changes
from planaria.lab.experts.votes import VotesPrior, bayes_table, ridge_table, token_counts
from planaria.models.huggingface import import_model
from planaria.models.llama_stages import Llama
from planaria.report.observe.bars import JobsProgress

RECIPE = shipped.find("hdee")
HAND = {"dialogue": 0, "encyclopaedia": 1, "law": 1, "code": 2}
SOURCES = {"code": "stdlib"}  # of domains; of the others, the folder of their name
BEGINS = {"dialogue": r"(?<=\n\n)User:", "encyclopaedia": "^Background:", "law": "^(FEDERALIST No|LECTURE )"}
"""pattern that starts a document within a file"""
UNTRAINED = {
    "books": {"source": "books"},
    "shakespeare": {"source": "tinyshakespeare.txt"},
    "mathematics": {"source": "gsm8k", "field": "answer"},
    "exercises": {"source": "mbpp"},
    "wiki": {"source": "wikitext2"},
}


@benchmark(
    "experts",
    seeds=[1, 2, 3],
    texts=Flag("data", choices=("data", "stdlib")),
    data=Flag(DATA, "texts"),
    parents=Flag(3, "models of each size to branch off, in each seed"),
    scale=Flag(1.0, "of all steps of the recipe"),
    by=Flag(["probe", "sizes", "hand", "seed_loss"], "measures of difficulty"),
)
def run_experts(args: Namespace) -> Measurement:
    """Compare experts of unequal size or training with equal ones and with one model of their compute.

    Dialogue, encyclopaedia, Python code and law have an expert each; other domains are shown. One value per seed,
    averaged over its parents, or per parent for single arms; ratios of perplexities on the same test text. All but
    texts and sizes comes from the recipe hdee; with ``--texts stdlib`` the texts too.

    Texts below PLANARIA_DATA: dialogue/ (Schema-Guided Dialogue), encyclopaedia/ (The World Factbook), law/ (Project
    Gutenberg 1404 and 2449), books/ (nine novels from there), wikitext2/ and mbpp/ (as published), gsm8k/ (.jsonl with
    "answer"), tinyshakespeare.txt. Code is Python's library. A dialogue, a country, a paper of the Federalist, a
    lecture and a file of code are a document each.
    """
    found = run(args)
    rows = [*ensembles(found), *generalists(found), *unequal(found), *allotted(found), *one_lost(found)]
    return Result(rows, [], "experts" if args.texts == "data" else f"experts_{args.texts}")


def run(args: Namespace) -> Results:
    """Run what is left of the recipe; return its results. Each seed is a separate run."""
    import tomli_w

    from planaria.lab.commands.experts import start

    RUNS.mkdir(parents=True, exist_ok=True)
    name, found = f"experts-{args.texts}-{args.scale:g}-{args.parents}", list[Results]()
    for seed in args.seeds:
        own = f"{name}-{seed}"
        (file := RUNS / f"{own}.toml").write_text(tomli_w.dumps(asked(args, seed)))
        start(file, {"out": str(RUNS), "name": own}, dry_run=False, quiet=False)
        found.append(Results.model_validate_json((RUNS / own / RESULTS).read_text()))
        if lost := [f"{name} of seed {run.seed}" for run in found[-1].runs for name in run.lost]:
            raise SystemExit(f"{', '.join(lost)} could not be trained; run this again to take that up")
    return found[0].model_copy(update={"runs": [run for one in found for run in one.runs]})


def asked(args: Namespace, seed: int) -> dict[str, Any]:
    """Return the recipe for one seed."""
    tree = recipe.read(RECIPE)
    table: dict[str, Any] = tree["experts"]
    table |= {"seeds": [seed], "parents": args.parents}
    table["steps"] = [round(args.scale * steps) for steps in table["steps"]]
    table["seed"]["steps"] = round(args.scale * table["seed"]["steps"])
    table["probe"] = {"steps": round(args.scale * table["probe"]["steps"]), "by": args.by}
    if args.texts == "data":
        table["domains"], table["untrained"] = texts(args.data.resolve())
    return tree


def texts(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    trained = {
        name: {"source": SOURCES.get(name, str(data / name)), "begins": BEGINS.get(name, ""), "hand": hand}
        for name, hand in HAND.items()
    }
    return trained, {name: {**place, "source": str(data / place["source"])} for name, place in UNTRAINED.items()}


def row(what: str, values: list[float], claim: Claim | None = None) -> Row:
    return Row(what, values, "", claim)


def ensembles(found: Results) -> Iterator[Row]:
    """H2, H3: equal experts, alone and as an ensemble."""
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
    """Every ensemble against one model with the compute of all its experts, which the paper omits."""
    for rival in found.generalists:
        for arm in found.ensembles:
            if ", by " in arm:
                continue
            for name in found.domains:
                what = f"{arm} over {rival}: {name}, a {found.verdict(arm, name, rival)}"
                yield row(what, found.ratios(arm, name, rival))
            yield row(f"{arm} over {rival}: geometric mean, trained", found.overall(arm, rival, found.trained))
            yield row(f"{arm} over {rival}: geometric mean, all", found.overall(arm, rival), Claim(high=1.0))
            yield row(f"{arm} over {rival}: compute of a token", [found.times(arm, rival)])


def unequal(found: Results) -> Iterator[Row]:
    """H4: both uneven arms against the even one, by the domains' tiers (by default the probe's)."""
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
    """The uneven arms with tiers by probe, by hand and by the seed model's loss.

    The probe measures the gain of steps, seed models of all sizes that of size. The claim covers trained domains only.
    """
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
            ours = f"{arm}, by {by}"
            yield row(f"{ours}: over equal experts, trained", found.overall(ours, SYNCHRONISED, found.trained))
            yield row(f"{ours}: over equal experts, all", found.overall(ours))


def one_lost(found: Results) -> Iterator[Row]:
    """H5: the worst change on another trained domain when each expert is lost in turn."""
    worst = []
    for arm in (run.arms[SYNCHRONISED] for run in found.runs):
        pairs = [(lost, job) for lost in arm.experts for job in arm.experts if job != lost]
        worst.append(max(math.exp(arm.without[a.name][b.domain] - arm.scores[b.domain].loss) for a, b in pairs))
    yield row("one expert lost: worst perplexity on another's domain over before", worst, Claim(high=1.01))


def _expert(run: SeedResult, domain: str) -> str:
    return next(job.name for job in run.arms[SYNCHRONISED].experts if job.domain == domain)


def _over_best(arm: ArmResult, domain: str) -> float:
    return math.exp(arm.scores[domain].loss - arm.scores[domain].best)


def _by_tier(found: Results, arm: str, tier: int) -> list[float]:
    """Return the geometric mean over a tier's domains by seed; tiers may differ by seed."""
    means = []
    for n, seed in enumerate(found.seeds):
        names = [name for name, at in next(iter(found.of(seed)[0].tier.values())).items() if at == tier]
        means.append(math.exp(fmean(math.log(found.ratios(arm, name)[n]) for name in names)))
    return means


EXPERTS, DOMAINS, FLOOR, RESIDUAL = 6, 4, 0.01, 3e-3
FIRST = (4, 8, 32, 128)  # tokens of a text
TRAINED = [RUNS / f"experts-data-0.5-3-{seed}" for seed in (1, 2, 3)]


@benchmark(
    "worst_domain",
    seeds=[0, 1, 2, 3],
    rows=[1024, 4096, 16384],
    runs=Flag(TRAINED, "folders of `planaria experts train`, same domains", nargs="+"),
)
def run_worst_domain(args: Namespace) -> Measurement:
    """Measure weights for an ensemble's worst domain: the passes of two solvers, and the gain and price of the weights.

    The solvers run on synthetic rows (6 experts, 4 domains); a pass is an evaluation of every row. The gain uses the
    experts of finished runs (``--runs``; by default those of ``benchmarks.experts experts --scale 0.5 --parents 3 --by
    probe``), fitted on held-out texts and shown on test texts, also of untrained domains.
    """
    rows, notes = list(solvers(args.rows, args.seeds)), list[str]()
    runs = [run for run in args.runs if (run / "experts.json").is_file()]
    notes += [
        f"{run.name}: no ensemble there, so it is not among those measured" for run in args.runs if run not in runs
    ]
    if runs:
        rows += experts(runs)
    return Result(rows, notes)


def made(rows: int, domains: int, seed: int) -> MinimaxProblem:
    """Return random texts: experts differ by domain, and some domains are harder for all."""
    draw = np.random.default_rng(seed)
    hard, skill = draw.uniform(0, 1, domains), draw.normal(0, 1, (domains, EXPERTS))
    texts = {f"d{d}": draw.normal(skill[d] - 2 * hard[d], 1.0, (rows // domains, EXPERTS)) for d in range(domains)}
    return make_problem(texts, FLOOR)


def solvers(sizes: list[int], seeds: list[int]) -> Iterator[Row]:
    """Passes to one residual, distance of the weights found, and seconds."""
    passes: dict[int, list[float]] = {}
    for size in sizes:
        problems = [made(size, DOMAINS, seed) for seed in seeds]
        slow, slow_s = _solved(problems, "extragradient")
        fast, fast_s = _solved(problems, "halpern")
        passes[size] = [found.evaluations / size for found in fast]
        columns = {"rows": size}
        yield Row("extragradient: passes", [found.evaluations / size for found in slow], "", None, columns)
        yield Row("halpern: passes", passes[size], "", None, columns)
        over = [one.evaluations / other.evaluations for one, other in zip(fast, slow, strict=True)]
        yield Row("halpern over extragradient, passes", over, "", Claim(high=0.25) if size == 4096 else None, columns)
        yield Row("halpern over extragradient, seconds", ratios(fast_s, slow_s), "", None, columns)
        apart = [float(abs(one.w - other.w).max()) for one, other in zip(fast, slow, strict=True)]
        yield Row("weights apart", apart, "", Claim(high=5e-3) if size == 4096 else None, columns, "worst")
        open_gaps = [found.proof.gap for found in (*slow, *fast)]
        yield Row("gap, nats a text", open_gaps, "0", Claim(low=0.0), columns, "least")
        over = [_over_rivals(p, found) for p, found in zip(problems, slow, strict=True)]
        what = "value over the best of uniform weights and single experts"
        yield Row(what, over, "", Claim(high=0.0), columns, "worst")
    falls = statistics.mean(passes[min(sizes)]) / statistics.mean(passes[max(sizes)])
    yield Row(f"halpern: passes at {min(sizes)} rows over those at {max(sizes)}, means", [falls], "", Claim(low=2.0))


def _solved(problems: list[MinimaxProblem], solver: Solver) -> tuple[list[MinimaxWeights], list[float]]:
    found, seconds = [], []
    for given in problems:
        begun = time.perf_counter()
        found.append(worst_domain(given, RESIDUAL, solver=solver))
        seconds.append(time.perf_counter() - begun)
        if not found[-1].certified:
            raise SystemExit(f"{solver}: not certified to {RESIDUAL:g}")
    return found, seconds


def _over_rivals(given: MinimaxProblem, found: MinimaxWeights) -> float:
    """Return the worst domain's loss minus the least that simple weights reach there."""
    rivals = [np.full(EXPERTS, 1 / EXPERTS), *np.eye(EXPERTS)]
    return found.proof.value - min(float(given.losses(v).max()) for v in rivals)


def experts(runs: list[Path]) -> Iterator[Row]:
    """Fit on held-out text and show test text, one value per run; the only claim holds for any prior."""
    for tokens in FIRST:
        all_found = [_weighed(run, tokens) for run in runs]
        worst = [found.worst("uniform") for found in all_found]
        gains = [found.held_out["uniform"][name] - found.value for found, name in zip(all_found, worst, strict=True)]
        prices = [found.prices[name] for found, name in zip(all_found, worst, strict=True)]
        shown = [_worst_on_test(found) for found in all_found]
        limit = f"ln K / T = {all_found[0].most:.4f}"
        columns = {"tokens": all_found[0].tokens}
        named: dict[str, Any] = columns | {"worst": ", ".join(worst)}
        yield Row("held out: gain on the worst domain", gains, limit, Claim(high=all_found[0].most), named, "worst")
        yield Row("its cost", prices, "1", None, named)
        uniform, best, cached = ([one[prior] for one in shown] for prior in ("uniform", "worst", "cached"))
        yield Row("test: gain on the worst domain", gaps(uniform, best), limit, None, columns)
        yield Row("test: worst domain, cached over uniform", gaps(cached, uniform), "", None, columns)
        for other in all_found[0].test["uniform"]:
            costs = [found.test["worst"][other] - found.test["uniform"][other] for found in all_found]
            never = "" if other in all_found[0].prices else ", never trained"
            yield Row(f"test: {other}{never} pays", costs, "", None, columns)
        yield Row("gap, nats per token", [found.gap for found in all_found], "0", Claim(low=0.0), columns, "least")


def _worst_on_test(found: FittedWeights) -> dict[str, float]:
    return {prior: max(losses[name] for name in found.prices) for prior, losses in found.test.items()}


def _weighed(run: Path, tokens: int) -> FittedWeights:
    """Weigh the run's experts by their saved log-probabilities."""
    from safetensors.torch import load_file

    known = manifest.read(run)
    read = [load_file((run / member.model).with_name("readings.safetensors")) for member in known.members]
    held_out, test = (
        {key.partition(".")[2]: logps(read, key) for key in read[0] if key.startswith(f"{part}.")}
        for part in ("held_out", "test")
    )
    return fit_weights([member.name for member in known.members], held_out, test, known.mixture, tokens)


def logps(read: list[dict[str, Tensor]], key: str) -> Tensor:
    """Return the log-probabilities of each expert on a domain's texts, [E, N, T]."""
    return torch.stack([one[key] for one in read]).double()


# ---- one model instead of an ensemble (DUME), and ensembles whose experts the parent chooses

PROMPT = 32  # tokens that are given, where a text has a prompt


@dataclass
class Arm:
    """One arm's log-probabilities of a seed's texts."""

    logps: Mapping[str, Tensor]  # domain → [N, T], nats
    passes: float = 1.0  # complete models per token, including the parent's

    def loss(self, domain: str, given: int = 0) -> float:
        return -float(self.logps[domain][:, given:].mean())


def arms(
    args: Any,
    run: Path,
    parent: Path,
    experts: Sequence[Path],
    trained: Sequence[str],
    texts: DomainTexts,
    rival: Path | None = None,
) -> dict[str, Arm]:
    """Return all arms of one seed. ``rival``: a model with the compute of all experts."""
    read = [texts.read(expert) for expert in experts]
    logps = {name: torch.stack([one.of("test")[name] for one in read]).double() for name in texts.test}
    found = {"parent": Arm(texts.read(parent).of("test"))}
    found["own expert"] = Arm({name: logps[name][n] for n, name in enumerate(trained)})
    found["best single expert, known afterwards"] = Arm({d: own[own.mean((1, 2)).argmax()] for d, own in logps.items()})
    found |= ensemble_arms(read, logps) | ridge_priors(args, run, parent, trained, texts, logps)
    found |= merges(args, run, experts, trained, texts)
    if rival is not None:
        found["generalist"] = Arm(texts.read(rival).of("test"))
    return found


def ensemble_arms(read: Sequence[DomainLogProbabilities], logps: Mapping[str, Tensor]) -> dict[str, Arm]:
    """Ensembles weighted by the experts' likelihoods."""
    experts = len(read)
    held_out = {n: torch.stack([one.of("held_out")[n] for one in read]).double() for n in read[0].of("held_out")}
    beliefs = {
        "uniform": posterior.uniform_prior(experts),
        "cached": scoring.belief(MixtureSpec(prior="cached"), held_out),
    }
    found = {}
    for name, belief in beliefs.items():
        for k in (0, 1, 2):
            own = {}
            for domain, given in logps.items():
                log_w = posterior.keep_strongest(posterior.log_weights(given, belief), k, PROMPT)
                own[domain] = posterior.log_mixture(given, log_w)
            tokens = next(iter(own.values())).shape[-1]
            case = f"ensemble, {name} prior" + (f", top-{k} after {PROMPT} tokens" if k else "")
            found[case] = Arm(own, posterior.forward_passes_per_token(experts, tokens, k, PROMPT))
    return found


def ridge_priors(
    args: Any, run: Path, parent: Path, trained: Sequence[str], texts: DomainTexts, logps: Mapping[str, Tensor]
) -> dict[str, Arm]:
    """Ensembles weighted by the parent."""
    model, found = import_model(parent).eval(), {}
    sizes = model.config.vocab, model.config.context, args.samples
    listener = RidgePrior(
        model, {name: text_sums(model, domain_samples(run, [name], domains.TRAINED, *sizes)) for name in trained}
    )
    for temperature in args.temperatures:
        mixed: dict[str, dict[str, Tensor]] = {}
        switches: dict[str, list[float]] = {}
        for domain, samples in texts.test.items():
            prior = listener.priors(samples, trained, temperature)
            log_w, own = posterior.log_weights(logps[domain], prior), logps[domain]
            mixed.setdefault("all", {})[domain] = posterior.log_mixture(own, log_w)
            for k in (1, 2):
                once, again = kept(log_w, prior[..., PROMPT : PROMPT + 1], k), kept(log_w, prior, k)
                mixed.setdefault(f"top-{k} after a prompt", {})[domain] = posterior.log_mixture(own, once)
                mixed.setdefault(f"top-{k}, anew every 16 tokens", {})[domain] = posterior.log_mixture(own, again)
                ever = (~again.isneginf()).any(-1).sum(0).double().mean()
                switches.setdefault(f"top-{k}, anew every 16 tokens", []).append(float(ever))
        for case, own_logps in mixed.items():
            for_sender = switches.get(case, [float(case[4]) if case != "all" else float(len(trained))])
            listened = PROMPT / 128 if "prompt" in case else 1.0
            arm = f"ensemble, ridge prior (T = {temperature:g}), {case}"
            found[arm] = Arm(own_logps, fmean(for_sender) + listened)
    return found


def kept(log_w: Tensor, prior: Tensor, k: int) -> Tensor:
    """Return ln w [E, N, T] of the k experts with the largest ``prior`` [E, N, T] or [E, N, 1]."""
    chosen = torch.zeros_like(prior, dtype=torch.bool).scatter(0, prior.topk(k, 0).indices, True)
    return log_w.masked_fill(~chosen, -torch.inf).log_softmax(0)


def merges(args: Any, run: Path, experts: Sequence[Path], trained: Sequence[str], texts: DomainTexts) -> dict[str, Arm]:
    """Merge all experts into one model."""
    models = [import_model(expert).eval() for expert in experts]
    config, count = models[0].config, len(models)
    mean = Llama(config, initialise=False).eval()
    mean.load_global_state(merge.mean([model.global_state() for model in models]))
    found = {"weight average": Arm(logps_of(mean, texts))}
    model = merge.merge_experts(models, 1, bias=True)
    known = {}
    for number, name in enumerate(trained):
        with merge.force_block(model, number):
            known[name] = logps_of(model, texts, [name])[name]
    found["DUME's blocks, routed by the known domain"] = Arm(known)
    sums = []
    for number, name in enumerate(trained):
        samples = domain_samples(run, [name], domains.TRAINED, config.vocab, config.context, args.samples)
        sums.append(merge.domain_sums(model, number, samples[:, :-1]))
    for k in sorted({1, 2, count}):
        for temperature in (1.0, 0.1) if k > 1 else (1.0,):
            arm = f"DUME, k = {k}" + (f", T = {temperature:g}" if k > 1 else "")
            found[arm] = routed(model, sums, texts, k, temperature)
    return found


def routed(model: Any, sums: Sequence[Tensor], texts: DomainTexts, k: int, temperature: float) -> Arm:
    for at, layer in enumerate(model.layers):
        found = ridge.router([own[at] for own in sums], 1e-2).float() / temperature
        router, size = layer.mlp.router, model.config.dim
        router.weight.data.copy_(found[:size].T)
        router.bias.data.copy_(found[-1])
        layer.mlp.top_k = k
    return Arm(logps_of(model, texts))


def logps_of(model: Any, texts: DomainTexts, names: Sequence[str] = ()) -> dict[str, Tensor]:
    return {name: token_logps(model, texts.test[name]) for name in names or texts.test}


SIZE, WIDTH = "M", 256
ALL = "ensemble, uniform prior"  # the reference


@dataclass
class Found:
    """The domains, and the arms of each seed."""

    trained: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    seeds: list[dict[str, Arm]] = field(default_factory=list)

    def ratios(self, arm: str, to: str, domains: Sequence[str], given: int = 0) -> list[float]:
        """Return a ratio per seed: the geometric mean over the domains in both arms."""
        found = []
        for made in self.seeds:
            mine, theirs = made[arm], made[to]
            both = [name for name in domains if name in mine.logps and name in theirs.logps]
            found.append(math.exp(fmean(mine.loss(d, given) - theirs.loss(d, given) for d in both)))
        return found


@benchmark(
    "dume",
    seeds=[1, 2, 3],
    data=Flag(DATA, "texts"),
    parent_steps=400,
    steps=Flag(200, "of an expert"),
    near_steps=Flag(50, "of one that stays near its parent, at a tenth of the rate"),
    near_seeds=Flag([1, 2, 3], "seeds that have such experts, too", nargs="*"),
    windows=Flag(100, "test samples of each domain"),
    samples=Flag(256, "of each domain, for routers and the ridge prior"),
    temperatures=Flag([0.03, 0.1, 0.3], "of the ridge prior"),
)
def run_dume(args: Namespace) -> Measurement:
    """Compare merged experts (DUME, weight averaging) and ensembles whose experts the parent chooses with ensembles.

    Experts of one parent, by the recipe hdee with one size. With the texts of PLANARIA_DATA (see `experts`) dialogue,
    encyclopaedia, law and code have an expert each and five domains none; otherwise the recipe's own texts are used.
    All arms of a seed have the same parent, experts, data order and test text. One value per seed: the geometric mean
    over domains of perplexity over that of the full ensemble with a uniform prior. "After a prompt": the first 32
    tokens are given and do not count. A generalist of equal compute is shown. Trained models are kept.
    """
    far, near = measured(args)
    rows = [*table(far), *claims(far, args.temperatures), *(nearness(near) if near.seeds else ())]
    return Result(rows, [], "dume" if _dialogue(args) else "dume_stdlib")


def measured(args: Any) -> tuple[Found, Found]:
    """Train what is missing and measure: normal experts, and some near their parent. Each seed is a separate run."""
    torch.set_num_threads(1)
    far, near = Found(), Found()
    for seed in args.seeds:
        file = trained(args, seed)
        spec, base = load(file, {"out": str(RUNS)})
        run, names = RUNS / base.name, list(spec.domains)
        texts, place = DomainTexts(run, spec, base), run / f"seed-{seed}"
        parent = place / "seeds" / SIZE / "model"
        experts = [place / "experts" / f"{name}-{SIZE}-{args.steps}" / "model" for name in names]
        far.trained, far.untrained = near.trained, near.untrained = names, list(spec.untrained)
        far.seeds.append(arms(args, run, parent, experts, names, texts, generalist(run, place)))
        if seed in args.near_seeds:
            experts = near_experts(args, run, seed, parent, names, spec, base)
            near.seeds.append(arms(args, run, parent, experts, names, texts))
    return far, near


def _dialogue(args: Any) -> bool:
    return bool((args.data / "dialogue").is_dir())


def trained(args: Any, seed: int, tokenizer: Mapping[str, Any] | None = None) -> Path:
    """Run what is left of the recipe with one seed, with the recipe's ``tokenizer`` by default."""
    import tomli_w

    from planaria.lab.commands.experts import start

    tree = recipe.read(shipped.find("hdee"))
    table: dict[str, Any] = tree["experts"]
    if _dialogue(args):
        table["domains"], table["untrained"] = texts(args.data.resolve())
    table |= {"seeds": [seed], "sizes": {SIZE: WIDTH}, "steps": [args.steps], "workers": 1}
    table |= {"seed": {"steps": args.parent_steps, "lr": 3e-3}, "probe": {"by": ["hand"]}}
    table["test_windows"] = args.windows
    if tokenizer is not None:
        tree["data"]["tokenizer"], tree["model"]["vocab"] = tokenizer["tokenizer"], tokenizer["vocab"]
    RUNS.mkdir(parents=True, exist_ok=True)
    file = RUNS / f"{'dume' if tokenizer is None else 'votes'}-{seed}.toml"
    file.write_text(tomli_w.dumps(tree))
    start(file, {"out": str(RUNS)}, dry_run=False, quiet=False)
    if lost := Results.model_validate_json((file.with_suffix("") / RESULTS).read_text()).runs[0].lost:
        raise SystemExit(f"{file.stem}: {lost[0]} could not be trained; run this again to take that up")
    return file


def generalist(run: Path, place: Path) -> Path:
    """Return the model in ``place`` with the compute of all experts."""
    found = Results.model_validate_json((run / RESULTS).read_text())
    (job,) = found.runs[0].arms[found.generalists[0]].experts
    return place / "experts" / job.name / "model"


def near_experts(
    args: Any, run: Path, seed: int, parent: Path, names: Sequence[str], spec: ExpertsSpec, base: RunConfig
) -> list[Path]:
    """Train experts with a quarter of the steps at a tenth of the learning rate."""

    def training(name: str) -> Training:
        data = {"source": str(run / domains.TRAINED / f"{name}.jsonl"), "field": "text", "validation": 0.0}
        own = {"name": name, "out": str(run / f"seed-{seed}" / "near"), "seed": seed, "model": {"hidden": WIDTH}}
        own |= {"data": {**data, "tokenizer": str(run / "tokenizer.json")}, "optim": {"lr": base.optim.lr / 10}}
        return Training(with_changes(base, {**own, "train": {"steps": args.near_steps, "start": str(parent)}}))

    trainings = [training(name) for name in names]
    with JobsProgress(quiet=True) as progress:
        if lost := train_all(f"near experts of seed {seed}", trainings, spec, spec.retries, progress):
            raise SystemExit(f"{run}: near expert {lost[0]} could not be trained; run this again to take that up")
    return [one.model for one in trainings]


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} [{min(values):.3f} … {max(values):.3f}]" if values else "–"


def table(found: Found) -> Iterator[Row]:
    for arm, own in found.seeds[0].items():
        prompted = PROMPT if "after a prompt" in arm else 0
        domains = [name for name in found.untrained if name in own.logps]
        others = spread(found.ratios(arm, ALL, domains, prompted)) if domains else "–"
        columns = {"other domains": others, "passes": f"{own.passes:.2f}"}
        yield Row(arm, found.ratios(arm, ALL, found.trained, prompted), "", columns=columns)


def claims(found: Found, temperatures: Sequence[float]) -> Iterator[Row]:
    for temperature in temperatures:
        for case, given in (("top-1 after a prompt", PROMPT), ("top-1, anew every 16 tokens", 0)):
            arm = f"ensemble, ridge prior (T = {temperature:g}), {case}"
            values = found.ratios(arm, ALL, found.trained, given)
            yield Row(f"{arm}: over the full ensemble, trained domains", values, "", Claim(high=1.02), judged="worst")
    for arm in [name for name in found.seeds[0] if name.startswith("DUME,")]:
        values = found.ratios(arm, "weight average", found.trained)
        yield Row(f"{arm}: over weight average, trained domains", values, "", Claim(high=1.0), judged="worst")
    oracle = found.ratios("DUME's blocks, routed by the known domain", "own expert", found.trained)
    yield Row("DUME's blocks, routed by the known domain: over own expert", oracle, "")


def nearness(found: Found) -> Iterator[Row]:
    for arm in ("parent", "weight average", *[name for name in found.seeds[0] if name.startswith("DUME")]):
        claim = Claim(high=1.05) if arm.startswith("DUME,") else None
        values = found.ratios(arm, "own expert", found.trained)
        yield Row(f"near experts: {arm} over own expert, trained domains", values, "", claim, judged="worst")


# ---- routers by unigrams (IR3DE), and their controls

LENGTHS = (8, 32, 128)
"""tokens of a prompt; 128 is the whole text"""
INDICATIVE = 50
"""tokens that the control without the domains' format drops"""


@benchmark(
    "experts_votes",
    seeds=[1, 2, 3],
    data=Flag(Path("nowhere"), "texts; by default the recipe's own"),
    vocab=Flag(1024, "byte pairs"),
    parent_steps=200,
    steps=Flag(100, "of an expert"),
    windows=Flag(100, "test samples of each domain"),
    samples=Flag(256, "of each domain, for routers"),
    throughput=Flag(50, "times that all test text is routed, for its speed"),
)
def run_votes(args: Namespace) -> Measurement:
    """Route texts to experts by the votes of their tokens (IR3DE), and by controls.

    Each router names a domain for the first 8, 32 or all 128 tokens of every test text. Measured are the share of texts
    whose own domain it names, and the regret: nats per token of the named expert over the own domain's, on the whole
    text. Controls: naive Bayes on the same counts; its log-odds as votes; the nearest centroid of the domains' tf-idf
    vectors; random embeddings; without the 50 most indicative tokens; a ridge regression on hidden states; the experts'
    likelihoods after the prompt. Then a domain against itself with its tokens shuffled within each text: unigrams
    cannot tell these apart. Last, texts of 8, 32 and 128 tokens in one batch, in training too: with the padding masked,
    or counted like text, as the released code does.

    Claim: at least 100,000 tokens per second on one core. One value per seed.
    """
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {}
    for seed in args.seeds:
        for what, value in _routed_texts(args, seed):
            rows.setdefault(what, []).append(value)
    speed = {"tokens per second": Claim(low=1e5)}
    return Result([Row(what, values, "", speed.get(what)) for what, values in rows.items()], ["values by seed"])


def _routed_texts(args: Any, seed: int) -> Iterator[tuple[str, float]]:
    file = trained(args, seed, {"tokenizer": "bpe", "vocab": args.vocab})
    spec, base = load(file, {"out": str(RUNS)})
    run, names = RUNS / base.name, list(spec.domains)
    place, texts = run / f"seed-{seed}", DomainTexts(run, spec, base)
    tokens = torch.cat([texts.test[name][:, :-1] for name in names])
    own = torch.arange(len(names)).repeat_interleave(torch.tensor([len(texts.test[name]) for name in names]))
    experts = [place / "experts" / f"{name}-{SIZE}-{args.steps}" / "model" for name in names]
    logps = torch.stack(
        [torch.cat([logps_of(import_model(e).eval(), texts, names)[n] for n in names]) for e in experts]
    )
    sizes = base.model.vocab, base.model.context, args.samples
    samples = {name: domain_samples(run, [name], domains.TRAINED, *sizes)[:, :-1] for name in names}
    model, end = import_model(place / "seeds" / SIZE / "model").eval(), Tokenizer.open(run / manifest.TOKENIZER).end
    routers = _routers(model, samples, end) | {
        "experts' likelihoods": lambda prompt: logps[..., : prompt.shape[1]].sum(-1).T
    }
    losses = -logps.mean(-1)
    for name, scores in routers.items():
        for length in LENGTHS:
            chosen = scores(tokens[:, :length]).argmax(-1)
            yield f"{name}, {length} tokens: accuracy", float((chosen == own).double().mean())
            regret = losses.gather(0, chosen[None])[0] - losses.gather(0, own[None])[0]
            yield f"{name}, {length} tokens: regret", float(regret.mean())
    yield from _order_alone(model, samples[names[0]], texts.test[names[0]][:, :-1], end)
    yield from _padded(model, samples, tokens, own, end)
    began = time.process_time()
    for _ in range(args.throughput):
        routers["votes"](tokens)
    yield "tokens per second", args.throughput * tokens.numel() / (time.process_time() - began)


Router = Callable[[Tensor], Tensor]
"""tokens [N, T] → scores of the domains [N, D]"""


def _routers(
    model: Llama, samples: Mapping[str, Tensor], end: int, padding: bool = False, cut: bool = False
) -> dict[str, Router]:
    """Return all routers that are fitted on the domains' ``samples``.

    :param padding: whether ``end`` counts like other tokens.
    :param cut: whether the samples are those of :func:`_cut`, whose hidden states are masked.
    """
    vocab = model.config.vocab
    counts = {name: token_counts(own, vocab) for name, own in samples.items()}
    with torch.inference_mode():
        embeddings = model.ends.embed_tokens(torch.arange(vocab))
    drawn = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    found: dict[str, Router] = {}
    for name, spec, rows in (
        ("votes", {}, embeddings),
        ("average", {"by": "average"}, embeddings),
        ("votes, 10 tokens", {"keep": 10}, embeddings),
        ("votes, random embeddings", {}, drawn),
        ("naive Bayes", {"by": "bayes"}, embeddings),
    ):
        found[name] = VotesPrior(rows, counts, VotesSpec.model_validate(spec | {"padding": padding}), end).scores
    counted = torch.ones(vocab, dtype=torch.bool)
    counted[end] = padding
    centroids = _tfidf_table(list(samples.values()), counted)
    found["tf-idf"] = lambda tokens: _sums(centroids, tokens, counted[tokens])
    table = bayes_table(list(counts.values()))
    found["votes by log-odds"] = lambda tokens: _votes(table, tokens, tokens != end)
    indicative = (table - table.mean(1, keepdim=True)).abs().amax(1).argsort(descending=True)[:INDICATIVE]
    others = torch.ones(vocab, dtype=torch.bool).index_fill_(0, indicative, False)
    others[end] = False
    left = {name: own * others for name, own in counts.items()}
    fitted = ridge_table(embeddings, list(left.values()), ridge.RIDGE)
    found["votes, without 50 tokens"] = lambda tokens: _votes(fitted, tokens, others[tokens])
    found["naive Bayes, without 50 tokens"] = lambda tokens: _sums(
        bayes_table(list(left.values())), tokens, others[tokens]
    )
    found["ridge on hidden states"] = _by_states(model, samples, cut)
    return found


def _tfidf_table(samples: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Return [V, N]: idf times the centroid of each domain's tf-idf vectors; vectors and centroids have length 1.

    The sum over a text's tokens is the product of its tf-idf vector with each centroid. Each sample is a document; idf
    is ln((1 + documents) / (1 + those with the token)) + 1.
    """
    counts = [
        torch.zeros(len(own), len(counted)).scatter_add_(1, own, torch.ones(own.shape)).double() * counted
        for own in samples
    ]
    documents = torch.cat(counts)
    idf = ((1 + len(documents)) / (1 + (documents > 0).sum(0))).log() + 1
    unit = torch.nn.functional.normalize
    return idf[:, None] * torch.stack([unit(unit(own * idf, dim=1).sum(0), dim=0) for own in counts], 1)


def _votes(table: Tensor, tokens: Tensor, voters: Tensor) -> Tensor:
    best = torch.nn.functional.one_hot(table[tokens].argmax(-1), table.shape[1]).double()
    return (best * voters[..., None]).sum(1)


def _sums(table: Tensor, tokens: Tensor, voters: Tensor) -> Tensor:
    return (table[tokens] * voters[..., None]).sum(1)


def _by_states(model: Llama, samples: Mapping[str, Tensor], cut: bool) -> Router:
    """Return the existing prior `ridge`: a regression on the mean hidden states of the text."""
    masks = [_lengths(own)[1] if cut else torch.ones(own.shape, dtype=torch.bool) for own in samples.values()]
    states = [mean_states(model, own)[mask] for own, mask in zip(samples.values(), masks, strict=True)]
    weights = ridge.router([ridge.sums(own) for own in states], ridge.RIDGE, unit=False)
    return lambda tokens: torch.nn.functional.pad(mean_states(model, tokens)[:, -1], (0, 1), value=1.0) @ weights


def _order_alone(model: Llama, fitted: Tensor, tested: Tensor, end: int) -> Iterator[tuple[str, float]]:
    """Yield the accuracy for one domain against itself in another order."""
    rng = torch.Generator().manual_seed(0)

    def shuffled(tokens: Tensor) -> Tensor:
        return tokens.gather(1, torch.rand(tokens.shape, generator=rng).argsort(1))

    routers = _routers(model, {"own": fitted, "shuffled": shuffled(fitted)}, end)
    tokens = torch.cat([tested, shuffled(tested)])
    own = torch.arange(2).repeat_interleave(len(tested))
    for name in ("votes", "naive Bayes", "ridge on hidden states"):
        yield f"order alone, {name}: accuracy", float((routers[name](tokens).argmax(-1) == own).double().mean())


def _lengths(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lengths [N] of texts that are cut to each of LENGTHS in turn, and the mask [N, T] of their tokens."""
    lengths = torch.tensor(LENGTHS)[torch.arange(len(tokens)) % len(LENGTHS)]
    return lengths, torch.arange(tokens.shape[1]) < lengths[:, None]


def _cut(tokens: Tensor, end: int) -> Tensor:
    """Return texts cut to :func:`_lengths` and padded with ``end``."""
    return tokens.masked_fill(~_lengths(tokens)[1], end)


def _padded(
    model: Llama, samples: Mapping[str, Tensor], tokens: Tensor, own: Tensor, end: int
) -> Iterator[tuple[str, float]]:
    """Yield the accuracies for texts of unequal lengths in one batch, with the padding masked and counted."""
    short = {name: _cut(texts, end) for name, texts in samples.items()}
    lengths, batch = _lengths(tokens)[0], _cut(tokens, end)
    masked, counted = _routers(model, short, end, cut=True), _routers(model, short, end, padding=True)
    for name in ("votes", "average", "naive Bayes", "tf-idf", "ridge on hidden states"):
        for length in LENGTHS:
            of = lengths == length
            for case, scores in (
                ("masked", masked[name](tokens[of, :length])),
                ("counted", counted[name](batch[of])),
            ):
                right = scores.argmax(-1) == own[of]
                yield f"padding {case}, {name}, {length} tokens: accuracy", float(right.double().mean())


if __name__ == "__main__":
    start(experts=run_experts, worst_domain=run_worst_domain, dume=run_dume, votes=run_votes)
