"""Report on an ensemble's worst domain: value, bound, prices, and the cost of its best weights for other domains."""

from __future__ import annotations

from planaria.lab.experts.experts_results import WORST, FittedWeights
from planaria.report import page
from planaria.report.phrases import format_count
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
            f"{fitted.costs[name]:+z.4f}",
        ]
        for name, price in fitted.prices.items()
    ]
    heads = [f"{split}, {prior}" for split in ("held out", "test") for prior in priors]
    title = f"the worst domain: nats per token over the first {fitted.tokens} tokens of each text, by prior"
    weights = [[name, f"{weight:.3f}"] for name, weight in zip(fitted.experts, fitted.weights, strict=True)]
    return [
        Table(title, ["domain", "price", *heads, "test: worst less uniform"], rows),
        Table("the weights", ["expert", "weight"], weights),
    ]


def sentences(weights: FittedWeights) -> list[str]:
    """Return the results in words."""
    name, uniform = weights.worst(WORST), weights.worst("uniform")
    priciest = max(weights.prices, key=weights.prices.__getitem__)
    costs = [f"{domain} {cost:+z.3f}" for domain, cost in weights.costs.items()]
    proved = "" if weights.certified else f"; not certified to {weights.tolerance:g}"
    return [
        f"Worst of {format_count(len(weights.prices), 'domain')} on "
        f"{format_count(weights.texts, 'held-out text')}: {uniform}, "
        f"{weights.held_out['uniform'][uniform]:.4f} nats with the uniform prior; {name}, {weights.value:.4f} with "
        f"these weights. No weights of these experts, each at least {weights.floor:g}, reach more than "
        f"{weights.gap:.2g} below that (bound {weights.bound:.4f}; residual {weights.residual:.2g}{proved}; "
        f"{weights.solver}, {weights.passes:.0f} passes).",
        f"Price on test text, over the uniform prior: {', '.join(costs)}.",
        f"{priciest}'s price is {weights.prices[priciest]:.2f}: a better expert for this domain would help most.",
        f"With a uniform prior, every text is within ln {len(weights.experts)} / {weights.tokens} = {weights.most:.4f} "
        "nats per token of its best expert, so no weights can gain more than that.",
    ]


def section(fitted: FittedWeights) -> str:
    """Return the results as a section of a page."""
    domains, weights = tables(fitted)
    return page.section(
        "The worst domain", " ".join(sentences(fitted)), domains.html("worst"), weights.html("worst-weights")
    )
