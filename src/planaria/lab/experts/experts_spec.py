"""The ``[experts]`` table of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from planaria.common.errors import UserError, suggestion
from planaria.config import bounds, recipe
from planaria.config.bounds import Fraction, Natural, Positive
from planaria.config.names import KEY_RULE, is_key
from planaria.config.schema import ModelConfig, RunConfig, Section
from planaria.config.section import formerly
from planaria.lab.experts.budget import GENERALIST
from planaria.lab.experts.lineage import chains
from planaria.lab.experts.minimax_weights import FLOOR
from planaria.trials.arms import SeededTrials, read_table
from planaria.trials.jobs import JobSettings

By = Literal["probe", "sizes", "hand", "seed_loss"]


class TextSpec(Section):
    """The location of a text, and its division into documents."""

    source: str = ""
    """a file, a folder, a glob, 'stdlib', a .jsonl file, or 'hf:NAME'"""
    begins: str = ""
    """a regular expression: within a file (or record), a document begins wherever it matches, ^ at any line; default:
    each file and each record is one document"""
    field: str = "text"
    """the text's key in JSONL records"""
    where: dict[str, str] = Field(default_factory=dict)
    """values that a record of a labelled JSONL file must have"""

    @field_validator("begins")
    @classmethod
    def _check_begins(cls, begins: str) -> str:
        try:
            re.compile(begins)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return begins


class DomainSpec(TextSpec):
    """A domain."""

    of: list[str] = Field(default_factory=list)
    """domains whose text this one mixes, with equally many samples of each; instead of source"""
    after: str = ""
    """domain whose expert this one's branches off, instead of a parent; only the last expert of a chain is active"""
    hand: Natural | None = None
    """difficulty as judged by hand; 0 is easiest"""


class SeedSpec(Section):
    """The models that experts branch off, one of each size, trained on all domains together."""

    steps: Positive = 500
    """optimizer updates"""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """peak learning rate"""
    warmup: Natural | None = None
    """default: optim.warmup"""
    final_lr: Fraction | None = None
    """default: optim.final_lr"""
    text: TextSpec = TextSpec()
    """text to read instead of the domains', if it has a source"""


class ProbeSpec(Section):
    """A short training on each domain, which measures its difficulty."""

    steps: Annotated[int, Field(ge=4)] = 80
    """optimizer updates; the held-out loss is measured at a quarter, half, three quarters and the end of them"""
    by: list[By] = Field(default=["probe"], min_length=1)
    """measures of difficulty: ``probe``, the gain of more steps; ``sizes``, the gain of the largest seed model over the
    smallest; domains' ``hand``; or ``seed_loss``; with several, each has its own uneven arms"""


class VotesSpec(Section):
    """Prior ``votes``: each token votes for a domain by its input embedding."""

    by: Literal["votes", "average", "bayes"] = "votes"
    """share of the tokens' votes, mean of their scores, or, as control, mean log-probability by token counts alone"""
    keep: Natural = 0
    """tokens that vote: those whose scores have the lowest entropy; 0: all"""
    ridge: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-2
    """λ of the regression"""
    padding: bool = False
    """whether the separator of documents votes too"""


class MixtureSpec(Section):
    """The mixture of the experts of an arm."""

    prior: Literal["uniform", "cached", "clusters", "worst", "ridge", "votes"] = "uniform"
    """the experts' weights before a text begins; ``worst``: the best for the domain with the largest loss; ``ridge``:
    estimated from their parent's hidden states; ``votes``: from its input embeddings"""
    votes: VotesSpec = VotesSpec()
    decay: Annotated[float, Field(gt=0, le=1)] = 0.3
    """cached: weight of the newest held-out text in the moving average; the previous average keeps 1 - decay, so
    decay = 0.7 multiplies the old by 0.3, as in HDEE's code"""
    sequences: Positive = 100
    """cached: held-out texts to use"""
    temperature: Annotated[float, bounds.at_least(bounds.MIN_TEMPERATURE, "colder priors select a single expert")] = 0.1
    """clusters: T in exp(-distance² / T); ridge: in exp(estimated probability / T); votes:
    in exp(score / T)"""
    top_k: Natural = 0
    """experts that remain active after a text's first ``prefix`` tokens; 0 is all"""
    prefix: Natural = 32
    """tokens after which the others are dropped; 0: the prior alone chooses, and the others are not even loaded; worst:
    the tokens of a text on which weights are fitted"""

    @property
    def is_fitted_on_parent(self) -> bool:
        """Whether the prior is estimated by the model that the experts branched off."""
        return self.prior in ("ridge", "votes")

    def describe(self) -> str:
        """Return the prior, the options that apply to it, and the selection of experts; of votes, changed options."""
        shown = {"cached": ["decay", "sequences"], "clusters": ["temperature"], "ridge": ["temperature"]}
        options = {"prior": self.prior} | {name: getattr(self, name) for name in shown.get(self.prior, ())}
        if self.prior == "votes":
            votes = {"by": self.votes.by} | self.votes.model_dump(exclude_defaults=True)
            options |= {f"votes.{name}": option for name, option in votes.items()} | {"temperature": self.temperature}
        options |= {"top_k": self.top_k or "0 (all experts)"}
        if self.top_k or self.prior == "worst":
            options["prefix"] = self.prefix
        return ", ".join(f"{name} = {str(option).lower()}" for name, option in options.items())

    @model_validator(mode="after")
    def _check_votes(self) -> Self:
        if self.prior != "votes" and self.votes != VotesSpec():
            raise ValueError(
                f"experts.mixture.votes: prior = {self.prior!r} has no votes; remove it, or set prior = 'votes'"
            )
        if self.votes.by == "bayes" and self.votes.ridge != VotesSpec().ridge:
            raise ValueError("experts.mixture.votes.ridge: by = 'bayes' makes no regression; remove it")
        return self

    @model_validator(mode="after")
    def _check_prefix(self) -> Self:
        if self.prior == "worst" and not self.prefix:
            raise ValueError(
                "experts.mixture.prefix = 0: prior = 'worst' is fitted on a text's first tokens; use 1 or more"
            )
        return self


class ExpertsSpec(SeededTrials, JobSettings):
    """Settings of an experts run."""

    sizes: dict[str, Positive] = Field(default_factory=lambda: {"S": 128, "M": 256, "L": 384})
    """size → width of the feed-forward layers, smallest first; symmetric about the middle one"""
    steps: list[Positive] = Field(default_factory=lambda: [150, 200, 250])
    """steps of an expert, easiest domain first; symmetric about the middle"""
    schedule_steps: Natural = 0
    """steps of a learning rate schedule shared by all experts; 0: each expert's schedule has the length of its run"""
    parents: Positive = 1
    """models of each size to branch off; all arms are made from each, and averaged"""
    generalists: list[str] | None = None
    """sizes for which one model continues from its parent on all domains' text, with the compute of all experts
    together; default: the middle one"""
    domains: dict[str, DomainSpec]
    """domains that have an expert each"""
    untrained: dict[str, DomainSpec] = Field(default_factory=dict)
    """domains without an expert, which measure how far the ensemble generalises"""
    max_chars: Annotated[Positive, formerly("max_chars", "most")] = 4_000_000
    """maximum characters of a domain that are used"""
    clusters: Natural = 0
    """number of domains into which a single domain of unlabelled text is cut by content; 0: not cut"""
    test_windows: Positive = 200
    """samples of each domain's test text on which perplexity is measured"""
    retries: Natural = 2
    """maximum number of times that an expert whose process dies is resumed"""
    seed: SeedSpec = SeedSpec()
    probe: ProbeSpec = ProbeSpec()
    mixture: MixtureSpec = MixtureSpec()

    @model_validator(mode="after")
    def _check_sizes_and_domains(self) -> Self:
        count = len(self.sizes)
        if count % 2 == 0 or len(self.steps) != count:
            raise ValueError(
                f"experts.sizes has {count} and experts.steps {len(self.steps)} entries; use equally many, an odd "
                "number: the middle one is for all experts of the even arm"
            )
        widths = list(self.sizes.values())
        if widths != sorted(widths) or self.steps != sorted(self.steps):
            raise ValueError("experts.sizes and experts.steps: list the smallest first")
        if "sizes" in self.probe.by and count == 1:
            raise ValueError(
                "experts.probe.by has 'sizes': experts.sizes has only one; use three, or change experts.probe.by"
            )
        shared = sorted(self.domains.keys() & self.untrained.keys())
        if shared:
            raise ValueError(f"experts.untrained.{shared[0]} is also in experts.domains; rename one of them")
        if "hand" in self.probe.by and (unjudged := [n for n, d in self.domains.items() if d.hand is None]):
            raise ValueError(
                f"experts.probe.by has 'hand': experts.domains.{unjudged[0]}.hand is missing; set it, 0 for the easiest"
            )
        self._check_names()
        if self.clusters == 1 or (self.clusters and len(self.domains) != 1):
            raise ValueError(
                f"experts.clusters = {self.clusters}: cuts one domain into two or more; set exactly one domain"
            )
        if len(self.domains) < 2 and not self.clusters:
            raise ValueError("experts.domains: set at least two, or set experts.clusters to cut one into several")
        domains, label = (self.clusters or len(self.speaking)), "chains" if any(self.after.values()) else "domains"
        if domains < count:
            raise ValueError(
                f"experts.sizes: {count} sizes for {domains} {label} leave the outer tiers empty, and all arms "
                f"equal; use at most {domains - 1 + domains % 2}"
            )
        return self

    @property
    def middle(self) -> str:
        """The size of the even arm's experts."""
        return list(self.sizes)[len(self.sizes) // 2]

    @property
    def rivals(self) -> list[str]:
        """Sizes of the generalists."""
        return [self.middle] if self.generalists is None else self.generalists

    @property
    def after(self) -> dict[str, str]:
        """Domain → the domain whose expert its own branches off, or ""."""
        return {name: domain.after for name, domain in self.domains.items()}

    @property
    def speaking(self) -> list[str]:
        """Domains whose experts are active: the last of each chain."""
        return [chain[-1] for chain in chains(self.after)]

    def parts(self, name: str) -> list[str]:
        """Return the domains whose text ``name`` reads: itself, those it mixes, or, for generalists, all plain ones."""
        if name == GENERALIST:
            return [name for name, domain in self.domains.items() if not domain.of]
        return (self.domains[name].of if name in self.domains else []) or [name]

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        plain = [name for name, domain in self.domains.items() if not domain.of]
        for table, domains in (("domains", self.domains), ("untrained", self.untrained)):
            for name, domain in domains.items():
                where = f"experts.{table}.{name}"
                if bool(domain.source) == bool(domain.of):
                    raise ValueError(f"{where}: set source, or of (the domains that it mixes)")
                for source in domain.of:
                    if source not in plain:
                        raise ValueError(
                            f"{where}.of: {source!r} is not a domain with text; {suggestion(source, plain)}"
                        )
                if table == "untrained" and (domain.after or domain.of):
                    key = "after" if domain.after else "of"
                    raise ValueError(f"{where}.{key}: requires an expert, and this domain has none; remove it")
        if not self.seed.text.source and self.seed.text != TextSpec():
            raise ValueError("experts.seed.text.source is missing; set it, or remove experts.seed.text")
        for size in self.rivals:
            if size not in self.sizes:
                raise ValueError(f"experts.generalists: there is no size {size!r}; {suggestion(size, self.sizes)}")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if 0 < self.schedule_steps < self.steps[-1]:
            raise ValueError(
                f"experts.schedule_steps = {self.schedule_steps} is less than the longest of experts.steps = "
                f"{self.steps[-1]}; use at least that"
            )
        return self

    @model_validator(mode="after")
    def _check_number_of_experts(self) -> Self:
        experts = self.clusters or len(self.speaking)
        if self.mixture.top_k > experts:
            raise ValueError(
                f"experts.mixture.top_k = {self.mixture.top_k} is more than the {experts} experts; use fewer, or 0 for "
                "all"
            )
        if self.mixture.prior == "worst" and experts * FLOOR >= 1:
            raise ValueError(
                f"experts.mixture.prior = 'worst': each expert's weight is at least {FLOOR:g}, so {experts} experts "
                "leave no choice; use another prior"
            )
        return self

    def _check_names(self) -> None:
        for table, names in (("sizes", self.sizes), ("domains", (*self.domains, *self.untrained))):
            if invalid := [name for name in names if not is_key(name)]:
                raise ValueError(f"experts.{table}.{invalid[0]}: not a valid name; {KEY_RULE}")
        if GENERALIST in self.domains:
            raise ValueError(f"experts.domains.{GENERALIST} is the name of an arm; rename the domain")


def load(path: Path, flags: Mapping[str, str]) -> tuple[ExpertsSpec, RunConfig]:
    """Return the table of the recipe ``path``, and the recipe of its models with ``flags`` applied.

    :raises UserError: naming file, key and fix.
    """
    spec, tree = read_table(path, "experts", ExpertsSpec, "train")
    return spec, recipe.from_tree(tree, flags, path)


def expand_clusters(spec: ExpertsSpec) -> ExpertsSpec:
    """Return the table with the domains that ``clusters`` cuts its one domain into; otherwise unchanged.

    :raises UserError: when one of these has the name of an untrained domain.
    """
    if not spec.clusters:
        return spec
    name, domain = next(iter(spec.domains.items()))
    cut = {f"{name}-{number}": domain for number in range(spec.clusters)}
    if shared := sorted(cut.keys() & spec.untrained.keys()):
        raise UserError(f"experts.untrained.{shared[0]}: experts.clusters makes a domain of that name; rename it")
    return spec.model_copy(update={"domains": cut})


def step_tokens(base: RunConfig) -> int:
    """Return the tokens of one step."""
    return base.samples * base.model.context


def expert_shapes(base: ModelConfig, spec: ExpertsSpec) -> dict[str, ModelConfig]:
    """Return size → shape: the recipe's model with another width of the feed-forward layers."""
    return {size: base.model_copy(update={"hidden": width}) for size, width in spec.sizes.items()}
