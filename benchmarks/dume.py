"""One model instead of an ensemble (DUME, weight averaging), and ensembles in which the parent chooses the experts.

Experts of one parent, by the recipe hdee with one size. With the texts of PLANARIA_DATA (see `benchmarks.experts`)
dialogue, encyclopaedia, law and code have an expert each and five domains none; otherwise the recipe's own texts are
used. All arms of a seed have the same parent, experts, data order and test text. One value per seed: the geometric mean
over domains of perplexity over that of the full ensemble with a uniform prior. "After a prompt": the first 32 tokens
are given and do not count. A generalist of equal compute from the same parent is shown. Trained models are kept in
runs/benchmarks.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import DATA, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.config import recipe, shipped
from planaria.config.schema import RunConfig
from planaria.lab.commands.experts import RESULTS
from planaria.lab.experts import merge, posterior, ridge, scoring
from planaria.lab.experts.domains import TRAINED
from planaria.lab.experts.experts_results import Results
from planaria.lab.experts.experts_spec import ExpertsSpec, MixtureSpec, load
from planaria.lab.experts.log_probabilities import DomainLogProbabilities, DomainTexts, domain_samples, token_logps
from planaria.lab.experts.text_prior import RidgePrior, text_sums
from planaria.lab.experts.training import Training, train_all, with_changes
from planaria.models.huggingface import import_model
from planaria.models.llama_stages import Llama
from planaria.report.observe.bars import JobsProgress

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
    found |= ensembles(read, logps) | ridge_priors(args, run, parent, trained, texts, logps)
    found |= merges(args, run, experts, trained, texts)
    if rival is not None:
        found["generalist"] = Arm(texts.read(rival).of("test"))
    return found


def ensembles(read: Sequence[DomainLogProbabilities], logps: Mapping[str, Tensor]) -> dict[str, Arm]:
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
        model, {name: text_sums(model, domain_samples(run, [name], TRAINED, *sizes)) for name in trained}
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
        samples = domain_samples(run, [name], TRAINED, config.vocab, config.context, args.samples)
        sums.append(merge.domain_sums(model, number, samples[:, :-1]))
    for k in sorted({1, 2, count}):
        for temperature in (1.0, 0.1) if k > 1 else (1.0,):
            arm = f"DUME, k = {k}" + (f", T = {temperature:g}" if k > 1 else "")
            found[arm] = routed(model, sums, texts, k, temperature)
    return found


def routed(model: Any, sums: Sequence[Tensor], texts: DomainTexts, k: int, temperature: float) -> Arm:
    """Measure the merged model with these routers."""
    for at, layer in enumerate(model.layers):
        found = ridge.router([own[at] for own in sums], 1e-2).float() / temperature
        router, size = layer.mlp.router, model.config.dim
        router.weight.data.copy_(found[:size].T)
        router.bias.data.copy_(found[-1])
        layer.mlp.top_k = k
    return Arm(logps_of(model, texts))


def logps_of(model: Any, texts: DomainTexts, names: Sequence[str] = ()) -> dict[str, Tensor]:
    return {name: token_logps(model, texts.test[name]) for name in names or texts.test}


NAME = "dume"
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
    NAME,
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
def main(args: Namespace) -> Measurement:
    far, near = measured(args)
    rows = [*table(far), *claims(far, args.temperatures), *(nearness(near) if near.seeds else ())]
    return Result(rows, [], NAME if _dialogue(args) else f"{NAME}_stdlib")


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
    """Return True if the benchmark's texts exist."""
    return bool((args.data / "dialogue").is_dir())


def trained(args: Any, seed: int) -> Path:
    """Run what is left of the recipe with one seed."""
    import tomli_w

    from benchmarks.experts import texts
    from planaria.lab.commands.experts import start

    tree = recipe.read(shipped.find("hdee"))
    table: dict[str, Any] = tree["experts"]
    if _dialogue(args):
        table["domains"], table["untrained"] = texts(args.data.resolve())
    table |= {"seeds": [seed], "sizes": {SIZE: WIDTH}, "steps": [args.steps], "workers": 1}
    table |= {"seed": {"steps": args.parent_steps, "lr": 3e-3}, "probe": {"by": ["hand"]}}
    table["test_windows"] = args.windows
    RUNS.mkdir(parents=True, exist_ok=True)
    file = RUNS / f"{NAME}-{seed}.toml"
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
        data = {"source": str(run / TRAINED / f"{name}.jsonl"), "field": "text", "validation": 0.0}
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
    """Every arm over the full ensemble, on trained and other domains."""
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
    """Experts near their parent."""
    for arm in ("parent", "weight average", *[name for name in found.seeds[0] if name.startswith("DUME")]):
        claim = Claim(high=1.05) if arm.startswith("DUME,") else None
        values = found.ratios(arm, "own expert", found.trained)
        yield Row(f"near experts: {arm} over own expert, trained domains", values, "", claim, judged="worst")


if __name__ == "__main__":
    start(main)
