"""Report on an ensemble's worst domain: value, bound, prices, and the cost of its best weights for other domains."""

from __future__ import annotations

from planaria.lab.experts.experts_results import WORST, FittedWeights
from planaria.report import page
from planaria.report.phrases import counted
from planaria.report.tables import Table


def tables(fitted: FittedWeights) -> list[Table]:
    """Return the domains with prices and losses, and the experts with weights."""
    priors = list(fitted.held_out)
    rows = [
        [
            name,
            f"{price:.3f}",
            *(f"{fitted.held_out[prior][name]:.4f}" for prior in priors),
            *(f"{fitted.test[prior][name]:.4f}" for prior in priors),
            f"{fitted.costs[name]:+.4f}",
        ]
        for name, price in fitted.prices.items()
    ]
    heads = [f"{split}, {prior}" for split in ("held out", "test") for prior in priors]
    title = f"the worst domain: nats per token of texts' first {fitted.tokens} tokens, by prior"
    weights = [[name, f"{weight:.3f}"] for name, weight in zip(fitted.experts, fitted.weights, strict=True)]
    return [
        Table(title, ["domain", "price", *heads, "test: worst less uniform"], rows),
        Table("the weights", ["expert", "weight"], weights),
    ]


def sentences(weights: FittedWeights) -> list[str]:
    """Return the results in words."""
    name, uniform = weights.worst(WORST), weights.worst("uniform")
    dearest = max(weights.prices, key=weights.prices.__getitem__)
    paid = [f"{domain} {cost:+.3f}" for domain, cost in weights.costs.items()]
    proved = "" if weights.certified else f"; not certified to {weights.tolerance:g}"
    return [
        f"Worst of {counted(len(weights.prices), 'domain')} on {counted(weights.texts, 'held-out text')}: {uniform}, "
        f"{weights.held_out['uniform'][uniform]:.4f} nats with the uniform prior; {name}, {weights.value:.4f} with "
        f"these weights. No weights of these experts, each at least {weights.floor:g}, come more than "
        f"{weights.gap:.2g} below that (bound {weights.bound:.4f}; residual {weights.residual:.2g}{proved}; "
        f"{weights.solver}, {weights.passes:.0f} passes).",
        f"Price on test text, over the uniform prior: {', '.join(paid)}.",
        f"{dearest}'s price is {weights.prices[dearest]:.2f}: it is the domain that wants a better expert.",
        f"A uniform prior leaves every text within ln {len(weights.experts)} / {weights.tokens} = {weights.most:.4f} "
        "nats per token of its best expert, so no weights gain more than that over it.",
    ]


def section(fitted: FittedWeights) -> str:
    """Return the results as a section of a page."""
    domains, weights = tables(fitted)
    return page.section(
        "The worst domain", " ".join(sentences(fitted)), domains.html("worst"), weights.html("worst-weights")
    )
