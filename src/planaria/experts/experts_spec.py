"""The ``[experts]`` table of a recipe, beside the sections that say how each model trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria import recipe
from planaria.bounds import Natural, Positive
from planaria.config import ModelConfig, RunConfig, Section
from planaria.errors import UserError
from planaria.experts.worst import FLOOR
from planaria.trials.arms import Seeded, table_of
from planaria.trials.jobs import Processes

By = Literal["probe", "sizes", "hand", "seed_loss"]


class DomainSpec(Section):
    """Where a domain's text is."""

    source: str
    """a file, a folder, a glob, 'stdlib', a .jsonl file, or 'hf:NAME'"""
    field: str = "text"
    """the text's key in JSONL records"""
    where: dict[str, str] = Field(default_factory=dict)
    """of a labelled JSONL file: only records that have these values"""
    hand: Natural | None = None
    """difficulty as judged by hand; 0 is easiest"""


class SeedSpec(Section):
    """The models that experts branch off, one of each size, trained on all domains together."""

    steps: Positive = 500
    """optimizer updates"""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """peak learning rate"""


class ProbeSpec(Section):
    """A short training on each domain by itself, to see how hard it is."""

    steps: Annotated[int, Field(ge=4)] = 80
    """optimizer updates; the held-out loss is taken at a quarter, half, three quarters and the end of them"""
    by: list[By] = Field(default=["probe"], min_length=1)
    """what difficulty is read from: ``probe``, what more steps bring; ``sizes``, how far the largest seed model is
    before the smallest; domains' ``hand``; or ``seed_loss``; with several, the uneven arms are made once for each"""


class MixtureSpec(Section):
    """How the experts of an arm speak with one voice."""

    prior: Literal["uniform", "cached", "clusters", "worst", "ridge"] = "uniform"
    """what is believed of them before a text begins; ``worst``: what is best for the domain they do worst on;
    ``ridge``: what their parent makes of the text so far"""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.3
    """cached: weight of the newest held-out text in the moving average"""
    sequences: Positive = 100
    """cached: held-out texts that are looked at"""
    temperature: Annotated[float, Field(gt=0)] = 0.1
    """clusters: T in exp(-distance² / T); ridge: in exp(estimated probability / T)"""
    top_k: Natural = 0
    """experts that go on speaking after a text's first ``prefix`` tokens; 0 is all"""
    prefix: Natural = 32
    """tokens after which the others fall silent; 0: the prior alone chooses, and the others are not even loaded;
    worst: the tokens of a text that weights are fitted on"""

    @model_validator(mode="after")
    def _has_text_to_fit_on(self) -> Self:
        if self.prior == "worst" and not self.prefix:
            raise ValueError(
                "experts.mixture.prefix = 0: prior = 'worst' is fitted on a text's first so many tokens; give 1 or more"
            )
        return self


class ExpertsSpec(Seeded, Processes):
    """The table itself."""

    sizes: dict[str, Positive] = Field(default_factory=lambda: {"S": 128, "M": 256, "L": 384})
    """size → width of the feed-forward layers, smallest first; symmetric about the middle one"""
    steps: list[Positive] = Field(default_factory=lambda: [150, 200, 250])
    """steps of an expert, easiest domain first; symmetric about the middle"""
    domains: dict[str, DomainSpec]
    """domains that have an expert each"""
    untrained: dict[str, DomainSpec] = Field(default_factory=dict)
    """domains that nobody is trained on: how far does the ensemble reach?"""
    most: Positive = 4_000_000
    """characters of a domain that are used"""
    clusters: Natural = 0
    """with a single domain of unlabelled text: cut it into so many by what it says"""
    test_windows: Positive = 200
    """samples of each domain's test text on which perplexity is measured"""
    retries: Natural = 2
    """how often an expert whose process dies is taken up again before it is given up"""
    seed: SeedSpec = SeedSpec()
    probe: ProbeSpec = ProbeSpec()
    mixture: MixtureSpec = MixtureSpec()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        count = len(self.sizes)
        if count % 2 == 0 or len(self.steps) != count:
            raise ValueError(
                f"experts.sizes has {count} and experts.steps {len(self.steps)} entries; give as many of each, an odd "
                "number: the middle is what all experts of the even arm get"
            )
        widths = list(self.sizes.values())
        if widths != sorted(widths) or self.steps != sorted(self.steps):
            raise ValueError("experts.sizes and experts.steps: name the smallest first")
        if "sizes" in self.probe.by and count == 1:
            raise ValueError("experts.probe.by has 'sizes': experts.sizes names one only; give three, or another way")
        both = sorted(self.domains.keys() & self.untrained.keys())
        if both:
            raise ValueError(
                f"experts.untrained.{both[0]}: is one of experts.domains too; give one of them another name"
            )
        if "hand" in self.probe.by and (open_ := [n for n, d in self.domains.items() if d.hand is None]):
            raise ValueError(
                f"experts.probe.by has 'hand': experts.domains.{open_[0]}.hand is missing; give 0 for easiest"
            )
        self._names_can_be_files()
        if self.clusters == 1 or (self.clusters and len(self.domains) != 1):
            raise ValueError(f"experts.clusters = {self.clusters}: cuts one domain into two or more; name just one")
        if len(self.domains) < 2 and not self.clusters:
            raise ValueError("experts.domains: name at least two, or set experts.clusters to cut one into several")
        domains = self.clusters or len(self.domains)
        if domains < count:
            raise ValueError(
                f"experts.sizes: {count} of them for {domains} domains leave nobody at the ends, and all arms alike; "
                f"name {domains - 1 + domains % 2} at most"
            )
        return self

    @model_validator(mode="after")
    def _leaves_a_choice_of_weights(self) -> Self:
        experts = self.clusters or len(self.domains)
        if self.mixture.prior == "worst" and experts * FLOOR >= 1:
            raise ValueError(
                f"experts.mixture.prior = 'worst': each expert has at least {FLOOR:g}, and {experts} leave no choice; "
                "use another prior"
            )
        return self

    def _names_can_be_files(self) -> None:
        for table, names in (("sizes", self.sizes), ("domains", (*self.domains, *self.untrained))):
            if odd := [name for name in names if not name.replace("-", "").replace("_", "").isalnum()]:
                raise ValueError(f"experts.{table}.{odd[0]}: letters, digits, - and _ only; it becomes a file's name")


def load(path: Path, flags: Mapping[str, str]) -> tuple[ExpertsSpec, RunConfig]:
    """The table of the recipe ``path``, and how each of its models trains, with ``flags`` laid over that.

    :raises UserError: naming file, key and mend.
    """
    spec, tree = table_of(path, "experts", ExpertsSpec, "train")
    return spec, recipe.from_tree(tree, flags, path)


def expanded(spec: ExpertsSpec) -> ExpertsSpec:
    """The table with the domains that ``clusters`` cuts its one domain into; otherwise as it is.

    :raises UserError: when one of these has the name of an untrained domain.
    """
    if not spec.clusters:
        return spec
    name, domain = next(iter(spec.domains.items()))
    cut = {f"{name}-{number}": domain for number in range(spec.clusters)}
    if both := sorted(cut.keys() & spec.untrained.keys()):
        raise UserError(f"experts.untrained.{both[0]}: experts.clusters makes a domain of that name; give it another")
    return spec.model_copy(update={"domains": cut})


def step_tokens(base: RunConfig) -> int:
    """Tokens of one step."""
    return base.samples * base.model.context


def sized(base: ModelConfig, spec: ExpertsSpec) -> dict[str, ModelConfig]:
    """Size → shape; all have the recipe's model but for the width of the feed-forward layers."""
    return {size: base.model_copy(update={"hidden": width}) for size, width in spec.sizes.items()}
