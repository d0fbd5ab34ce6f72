"""What each way of using some experts makes of a seed's texts: every one by itself, together, and as one model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.lab.experts.reading import Readings, Texts

PROMPT = 32
"""tokens that are given, where a text has a prompt"""


@dataclass
class Arm:
    """What one way makes of a seed's texts."""

    logps: Mapping[str, Tensor]
    """domain → [N, T], nats"""
    passes: float = 1.0
    """whole models that read each token, the parent's listening among them"""

    def loss(self, domain: str, given: int = 0) -> float:
        return -float(self.logps[domain][:, given:].mean())


def arms(
    given: Any,
    run: Path,
    parent: Path,
    experts: Sequence[Path],
    trained: Sequence[str],
    texts: Texts,
    rival: Path | None = None,
) -> dict[str, Arm]:
    """All arms of one seed. ``rival``: one model that had the compute of all experts."""
    import torch

    read = [texts.read(expert) for expert in experts]
    logps = {name: torch.stack([one.test[name] for one in read]).double() for name in texts.test}
    found = {"parent": Arm(texts.read(parent).test)}
    found["own expert"] = Arm({name: logps[name][n] for n, name in enumerate(trained)})
    found["best single expert, known afterwards"] = Arm({d: own[own.mean((1, 2)).argmax()] for d, own in logps.items()})
    found |= ensembles(read, logps) | ridge_priors(given, run, parent, trained, texts, logps)
    found |= merges(given, run, experts, trained, texts)
    if rival is not None:
        found["generalist"] = Arm(texts.read(rival).test)
    return found


def ensembles(read: Sequence[Readings], logps: Mapping[str, Tensor]) -> dict[str, Arm]:
    """Who speaks is told by what the experts make of a text."""
    import torch

    from planaria.lab.experts import posterior, prior, scoring
    from planaria.lab.experts.experts_spec import MixtureSpec

    experts = len(read)
    held_out = {n: torch.stack([one.held_out[n] for one in read]).double() for n in read[0].held_out}
    beliefs = {"uniform": prior.uniform(experts), "cached": scoring.belief(MixtureSpec(prior="cached"), held_out)}
    found = {}
    for name, belief in beliefs.items():
        for k in (0, 1, 2):
            own = {}
            for domain, given in logps.items():
                log_w = posterior.speakers(posterior.log_weights(given, belief), k, PROMPT)
                own[domain] = posterior.mixed(given, log_w)
            tokens = next(iter(own.values())).shape[-1]
            told = f"ensemble, {name} prior" + (f", top-{k} after {PROMPT} tokens" if k else "")
            found[told] = Arm(own, posterior.passes(experts, tokens, k, PROMPT))
    return found


def ridge_priors(
    given: Any, run: Path, parent: Path, trained: Sequence[str], texts: Texts, logps: Mapping[str, Tensor]
) -> dict[str, Arm]:
    """Who speaks is told by the parent."""
    from planaria.lab.experts import posterior
    from planaria.lab.experts.domains import TRAINED
    from planaria.lab.experts.listening import Listener, heard
    from planaria.lab.experts.reading import domain_samples
    from planaria.models.huggingface import import_model

    model, found = import_model(parent).eval(), {}
    sizes = model.config.vocab, model.config.context, given.samples
    listener = Listener(model, {name: heard(model, domain_samples(run, [name], TRAINED, *sizes)) for name in trained})
    for temperature in given.temperatures:
        mixed: dict[str, dict[str, Tensor]] = {}
        switches: dict[str, list[float]] = {}
        for domain, samples in texts.test.items():
            prior = listener.priors(samples, trained, temperature)
            log_w, own = posterior.log_weights(logps[domain], prior), logps[domain]
            mixed.setdefault("all", {})[domain] = posterior.mixed(own, log_w)
            for k in (1, 2):
                once, again = kept(log_w, prior[..., PROMPT : PROMPT + 1], k), kept(log_w, prior, k)
                mixed.setdefault(f"top-{k} after a prompt", {})[domain] = posterior.mixed(own, once)
                mixed.setdefault(f"top-{k}, anew every 16 tokens", {})[domain] = posterior.mixed(own, again)
                ever = (~again.isneginf()).any(-1).sum(0).double().mean()
                switches.setdefault(f"top-{k}, anew every 16 tokens", []).append(float(ever))
        for told, own_logps in mixed.items():
            speaking = switches.get(told, [float(told[4]) if told != "all" else float(len(trained))])
            listened = PROMPT / 128 if "prompt" in told else 1.0
            found[f"ensemble, ridge prior (T = {temperature:g}), {told}"] = Arm(
                own_logps, statistics.fmean(speaking) + listened
            )
    return found


def kept(log_w: Tensor, prior: Tensor, k: int) -> Tensor:
    """ln w [E, N, T] of those whom ``prior`` [E, N, T], or [E, N, 1] for all tokens, has among its first k."""
    import torch

    chosen = torch.zeros_like(prior, dtype=torch.bool).scatter(0, prior.topk(k, 0).indices, True)
    return log_w.masked_fill(~chosen, -torch.inf).log_softmax(0)


def merges(given: Any, run: Path, experts: Sequence[Path], trained: Sequence[str], texts: Texts) -> dict[str, Arm]:
    """One model of all experts."""
    from planaria.lab.experts import merge
    from planaria.lab.experts.domains import TRAINED
    from planaria.lab.experts.reading import domain_samples
    from planaria.models.huggingface import import_model
    from planaria.models.stages import Llama

    models = [import_model(expert).eval() for expert in experts]
    config, count = models[0].config, len(models)
    mean = Llama(config, initialise=False).eval()
    mean.load_global_state(merge.mean([model.global_state() for model in models]))
    found = {"weight average": Arm(logps_of(mean, texts))}
    model = merge.merged(models, 1, bias=True)
    known = {}
    for number, name in enumerate(trained):
        with merge.forced(model, number):
            known[name] = logps_of(model, texts, [name])[name]
    found["DUME's blocks, routed by the known domain"] = Arm(known)
    sums = []
    for number, name in enumerate(trained):
        samples = domain_samples(run, [name], TRAINED, config.vocab, config.context, given.samples)
        sums.append(merge.domain_sums(model, number, samples[:, :-1]))
    tokens = sum(float(one[0, -1, -1]) for one in sums)
    for k in sorted({1, 2, count}):
        for temperature in (1.0, 0.1) if k > 1 else (1.0,):
            told = f"DUME, k = {k}" + (f", T = {temperature:g}" if k > 1 else "")
            found[told] = routed(model, sums, texts, k, temperature)
    found["DUME, k = 1, no bias"] = routed(model, sums, texts, 1, bias=False)
    found["DUME, k = 1, λ on means"] = routed(model, sums, texts, 1, lam=1e-2 * tokens)
    found["DUME, k = 1, columns as they are"] = routed(model, sums, texts, 1, unit=False)
    return found


def routed(
    model: Any, sums: Sequence[Tensor], texts: Texts, k: int, temperature: float = 1.0, lam: float = 1e-2,
    bias: bool = True, unit: bool = True,
) -> Arm:  # fmt: skip
    """The merged model with such routers."""
    from planaria.lab.experts import ridge

    for at, layer in enumerate(model.layers):
        found = ridge.router([own[at] for own in sums], lam, bias, unit).float() / temperature
        router, size = layer.mlp.router, model.config.dim
        router.weight.data.copy_(found[:size].T)
        router.bias.data.copy_(found[-1]) if bias else router.bias.data.zero_()
        layer.mlp.top_k = k
    return Arm(logps_of(model, texts))


def logps_of(model: Any, texts: Texts, names: Sequence[str] = ()) -> dict[str, Tensor]:
    from planaria.lab.experts.reading import token_logps

    return {name: token_logps(model, texts.test[name]) for name in names or texts.test}
