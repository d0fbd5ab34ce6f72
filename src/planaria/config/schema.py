"""A run as strict typed data: the sections of a recipe, one class each.

Field descriptions are the help texts of the command line. ``config/recipe.py`` reads recipes and flags and reports
errors, ``config/section.py`` rejects unknown keys, and the package with a section's name uses its values.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from planaria.config import bounds
from planaria.config.bounds import Fraction, Natural, Positive, Seconds
from planaria.config.data_config import DataConfig as DataConfig
from planaria.config.fleet_config import FleetConfig as FleetConfig
from planaria.config.model_config import GROUP, SubspaceConfig, even_layers
from planaria.config.model_config import ModelConfig as ModelConfig
from planaria.config.names import Name
from planaria.config.network_config import NetworkConfig as NetworkConfig
from planaria.config.options import ChoiceName, Options
from planaria.config.section import Section as Section
from planaria.config.section import formerly


class PipelineConfig(Section):
    stages: bounds.BlockStages = 4
    """number of block stages; the ends stage is an additional worker"""
    layers: Annotated[tuple[Positive, ...], Field(strict=False)] | Literal["auto"] | None = None
    """decoder layers of each block stage, such as [7, 8, 8, 7]; auto: by the machines' measured speeds and memories;
    equal by default"""
    microbatches: bounds.Microbatches = 8
    """microbatches in one step"""
    microbatch_size: bounds.BatchSize = 4
    """samples in one microbatch"""
    order: Literal["1f1b", "gpipe"] = "1f1b"
    """order in which a worker processes ready microbatches: backward first (1f1b) or forward first (gpipe)"""
    in_flight: Positive | None = None
    """maximum number of microbatches in progress; by default two per worker under 1f1b, all under gpipe"""
    wire: str | Options = "fp32"
    """codec of activations and their gradients between stages: fp32, bf16, bits of both such as '6/4', a table such as
    {kind = "groups", forward = 6, backward = 4, group = 64}, {kind = "subspace", rank = 160}, or 'module:Class'"""

    @property
    def samples(self) -> int:
        """Samples in one step."""
        return self.microbatches * self.microbatch_size

    @property
    def has_uneven_stages(self) -> bool:
        """Whether block stages have different numbers of layers, now or later."""
        return self.layers == "auto" or len(set(self.layers or ())) > 1

    def subspace(self, seed: int) -> SubspaceConfig | None:
        """Return the subspace of the residual stream in a run with this ``seed``, if ``wire`` has one."""
        rank = self.wire.get("rank") if isinstance(self.wire, Options) and self.wire.get("kind") == "subspace" else None
        return SubspaceConfig(rank=rank, seed=seed) if isinstance(rank, int) and rank > 0 else None

    @property
    def cut(self) -> str:
        """Return ``layers`` as a recipe writes it."""
        return repr(self.layers) if isinstance(self.layers, str) else str(list(self.layers or ()))


class RoutingConfig(Section):
    kind: ChoiceName = "full"
    """routes of microbatches through the stages: full, swapped, skipping (random), given (by routes), or 'module:Class'
    """
    options: Options = Options()
    """options of a custom routing"""
    mixed: bool = False
    """with exchange.replicas: send every microbatch to a randomly drawn replica at each stage boundary"""
    skip: Fraction = 0.0
    """skipping and `planaria plan`: share of the block stages that each microbatch skips"""
    swaps: Natural = 2
    """skipping and `planaria plan`: steps back to the stage just before the furthest that a route may take"""
    max_jump: Annotated[Positive, formerly("max_jump", "jump")] = 4
    """skipping and `planaria plan`: maximum number of stages that one step of a route may advance beyond its
    furthest"""
    data_nodes: Positive = 1
    """`planaria plan`: ends workers, each of which handles its share of a step's microbatches"""
    wait_for_gradient_sums: Annotated[bool, formerly("wait_for_gradient_sums", "sums")] = False
    """`planaria plan`: a step ends when all nodes have their stage's gradient sums, not with its passes"""
    search: Literal["anneal", "flows"] = "anneal"
    """`planaria plan`: anneal whole plans by their simulated step, or flows by their edge costs, without gradient sums
    and swaps"""
    edge_cost: Literal["two_way", "sum"] = "two_way"
    """search = 'flows': transfer time of an edge, the mean of both directions, or that of the mean bandwidth (GWTF)"""
    routes: list[list[Natural]] = Field(default_factory=list)
    """given: the stages that each microbatch of a step visits, from 0 to 0"""
    schedule: str | None = None
    """schedule file of `planaria plan`, with several nodes per stage and routes over them; replaces kind"""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.search == "anneal" and self.edge_cost != "two_way":
            raise ValueError(
                f"routing.edge_cost = {self.edge_cost!r}: only routing.search = 'flows' uses it; set that, or remove it"
            )
        if self.search == "flows" and self.wait_for_gradient_sums:
            raise ValueError(
                "routing.search = 'flows' does not plan gradient sums; remove routing.wait_for_gradient_sums, or use "
                "'anneal'"
            )
        return self


class OptimConfig(Section):
    kind: ChoiceName = "adamw"
    """adamw; muon: Muon for matrices of decoder layers, with beta1 as momentum, and AdamW for the rest; sgd: with beta1
    as momentum; or 'module:Class'"""
    options: Options = Options()
    """options of the kind"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """peak learning rate; Muon's is scaled to the update sizes of AdamW"""
    beta1: Fraction = 0.9
    """decay of the first moment"""
    beta2: Fraction = 0.999
    """decay of the second moment"""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """decoupled weight decay"""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """largest L2 norm of a gradient, of the parts in ``clip_by``; 0 disables clipping"""
    clip_by: Literal["stage", "layer"] = "stage"
    """unit of clipping: each stage's gradient, or each decoder layer's, with embedding, final norm and head separate;
    layers do not depend on the number of stages"""
    warmup: Natural = 0
    """steps of linear warm-up"""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """learning rate after warm-up; wsd: constant (stable), then linear decay"""
    final_lr: Fraction = 0.1
    """cosine and wsd: final share of lr"""
    decay: Annotated[Fraction, Field(gt=0)] = 0.2
    """wsd: share of the steps, at the end, with decay"""


class TrainConfig(Section):
    steps: bounds.Steps = 300
    """optimizer updates in the run"""
    schedule_steps: Natural = 0
    """length of the learning-rate schedule in steps, at least train.steps; 0: train.steps"""
    start: str | None = None
    """weights to start from, with fresh moments: a run, a folder of safetensors, a GGUF file, or 'hf:OWNER/NAME'
    (Hugging Face); they determine model sizes and tokenizer"""
    pretrained: bool = False
    """whether the recipe is meant for pretrained weights; without start, the run warns that weights are random"""
    eval_every: Natural = 100
    """steps between validations; 0 disables them"""
    eval_microbatches: Positive = 8
    """microbatches per validation"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device on which stages compute"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products under autocast; weights and moments stay fp32"""
    bf16_weights: bool = False
    """with precision = "bf16": keep bf16 copies of the layers' matrices, so that passes cast none; results are equal"""
    compile: bool = False
    """compile each stage with torch.compile"""
    recompute: bool | Literal["auto"] = False
    """recompute activations within layers in the backward pass: less memory, more time; auto: on CUDA devices, if they
    have too little memory otherwise"""


class RecoveryConfig(Section):
    strategy: ChoiceName = "checkfree"
    """replacement of a lost stage: one strategy, or several in order of preference ('echo, checkpoint'); names, or
    'module:Class'; default with model.lora: 'redundant, checkpoint', or 'checkpoint' with replicas"""
    options: Options = Options()
    """options of the strategies: each applies to all that declare it; a table with a strategy's name, to that one"""
    meanwhile: Literal["wait", "skip"] = "wait"
    """while a lost block stage has no worker: wait for one, or train with the stage skipped (with a schedule: by a new
    plan for the remaining nodes)"""


class ExchangeConfig(Section):
    replicas: bounds.Replicas = 1
    """copies of the model with separate samples, synchronised by kind"""
    max_replicas: Annotated[bounds.Replicas | None, formerly("max_replicas", "most")] = None
    """fleet: largest number of replicas as machines join; replicas by default"""
    kind: ChoiceName = "allreduce"
    """exchange between replicas: allreduce, local (none), diloco, streaming_diloco, decoupled, eager, noloco,
    pair_mean, gasloc, monna, 'module:Class'"""
    options: Options = Options()
    """options of the kind"""
    compress: str | Options = ""
    """compression of messages: FEEDBACK:COMPRESSOR, such as 'econtrol:top1%', 'ef21:rand5%', 'ef14:4bits' or 'sign'; or
    a table of kind (topk, topk2, dct, randk, sign, quantised, plain, 'module:Class'), feedback (none, ef14, decayed,
    ef21, ef21w, econtrol, 'module:Class') and their options"""
    robust: str | Options = ""
    """robust aggregation instead of the mean, against Byzantine replicas: RULE or MIX:RULE, such as 'multikrum' or
    'nnm:median'; or a table of rule (median, trimmed_mean, krum, multikrum, geometric_median, clipping, flag,
    'module:Class'), byzantine, mix (none, nnm, bucketing), scope (stage, replica) and the rule's options"""
    coded: str | Options = ""
    """gradient coding, which recovers the exact gradient without late replicas: a scheme (gc, srsgc, msgc, none,
    'module:Class'), or a table of scheme, its options, jobs (parts of a step that are decoded separately) and slow
    (multiple of the fastest replica's time after which others are late)"""
    steps_between_rounds: Annotated[
        tuple[Positive, ...], Field(strict=False), formerly("steps_between_rounds", "inner")
    ] = ()
    """fleet: inner steps between rounds of each replica in turn, for machines of unequal speed"""
    patience_s: Seconds = 10.0
    """how long a replica waits for its group; then it continues with those present, or alone"""
    strikes: bounds.Strikes = 3
    """fleet: steps or rounds with provably invalid updates after which a replica's workers are replaced; 0: never"""

    @property
    def has_several_replicas(self) -> bool:
        """Whether replicas exchange updates, now or once others have joined."""
        return (self.max_replicas or self.replicas) > 1


class CheckpointConfig(Section):
    every: Natural | Literal["best"] = 100
    """steps between checkpoints; 0: only at the end; 'best' measures steps and saves, then chooses"""
    keep: Positive = 2
    """number of newest checkpoints to keep"""
    store: str | None = None
    """additional location for checkpoints, such as s3://bucket/runs (any fsspec URL), from which another machine can
    resume the run; each is copied there during training"""
    background: bool = False
    """fleet: each worker copies its stage and writes the copy during training; the final save is awaited"""


class ChaosConfig(Section):
    trace: str | None = None
    """file of faults to inject on the fleet (see `python -m planaria.lab.commands.trace`), or none"""

    @field_validator("trace")
    @classmethod
    def _check_trace(cls, trace: str | None) -> str | None:
        if trace == "":
            raise ValueError(
                "chaos.trace is empty; set it to a file of `python -m planaria.lab.commands.trace`, or none"
            )
        return trace


class ObserveConfig(Section):
    trackers: ChoiceName = "tensorboard"
    """receivers of losses and other metrics: names, or 'module:Class', separated by commas; none if empty"""
    options: Options = Options()
    """options of the trackers: each applies to all that declare it; a table with a tracker's name, to that one"""


class RunConfig(Section):
    """A whole run: the root of a recipe, documented in docs/settings.md."""

    name: Name = "run"
    """name of the run's folder in out"""
    out: str = "runs"
    """folder of runs"""
    seed: Natural = 34107
    """seed of initial weights and data order"""
    engine: Literal["fleet", "inline", "simulate"] = "fleet"
    """fleet: real processes; inline: all stages in this process; simulate: only a simulated clock"""
    prompt: str = ""
    """text that the trained model completes at the end of the run"""
    model: ModelConfig = ModelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    routing: RoutingConfig = RoutingConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    fleet: FleetConfig = FleetConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    chaos: ChaosConfig = ChaosConfig()
    observe: ObserveConfig = ObserveConfig()

    def with_seed(self, seed: int) -> Self:
        """Return the same run with another seed."""
        model = self.model.model_copy(update={"subspace": self.pipeline.subspace(seed)})
        return self.model_copy(update={"seed": seed, "model": model})

    @property
    def samples(self) -> int:
        """Samples in one step of all replicas."""
        return self.pipeline.samples * self.exchange.replicas

    @model_validator(mode="after")
    def _derive_model(self) -> Self:
        model, pipeline, space = self.model, self.pipeline, self.pipeline.subspace(self.seed)
        layers: tuple[int, ...] | None
        if pipeline.layers == "auto":  # even until the machines are measured
            layers = even_layers(model.layers - model.ends_layers, pipeline.stages)
        elif pipeline.layers is None and model.block_layers is not None:
            raise ValueError("model.block_layers is derived from pipeline.layers; set that")
        else:
            layers = pipeline.layers
        if model.subspace not in (None, space):
            raise ValueError("model.subspace follows from pipeline.wire and seed; remove it")
        if (model.block_layers, model.subspace) != (layers, space):
            derived = model.model_copy(update={"block_layers": layers, "subspace": space})
            object.__setattr__(self, "model", derived)  # frozen, except for this derivation
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.pipeline.stages == 0 and self.model.family != GROUP:
            raise ValueError("pipeline.stages = 0: use 1 or more")
        if why := self.model.why_uncuttable(self.pipeline.stages):
            raise ValueError(why)
        together = self.exchange.replicas if self.engine == "inline" or self.routing.mixed else 1
        passes = 2 * (self.pipeline.stages + 1) * self.pipeline.microbatches * together
        if passes > bounds.MAX_PASSES:
            replicas = f" × exchange.replicas = {together}" if together > 1 else ""
            raise ValueError(
                f"pipeline.stages = {self.pipeline.stages} × pipeline.microbatches = {self.pipeline.microbatches}"
                f"{replicas} makes {passes} passes per step; the planner supports at most {bounds.MAX_PASSES}; "
                "lower pipeline.microbatches and raise pipeline.microbatch_size"
            )
        return self

    @model_validator(mode="after")
    def _check_link_times(self) -> Self:
        for field in ("forward_s", "backward_s"):
            count = len(getattr(self.network, field))
            if count == 1 and self.pipeline.has_uneven_stages:
                raise ValueError(
                    f"network.{field} has one number for stages of {self.pipeline.cut} layers; set one for each of "
                    f"the {self.pipeline.stages + 1} stages 0..{self.pipeline.stages}"
                )
            if count not in (0, 1, self.pipeline.stages + 1):
                raise ValueError(
                    f"network.{field} has {count} numbers; set one, or one for each of the "
                    f"{self.pipeline.stages + 1} stages 0..{self.pipeline.stages}"
                )
        if self.network.staging_bandwidth is not None and self.routing.schedule is not None:
            raise ValueError("network.staging_bandwidth: a schedule has its own message times; remove it")
        return self

    @model_validator(mode="after")
    def _check_replicas_and_training(self) -> Self:
        if self.exchange.max_replicas is not None and self.exchange.max_replicas < self.exchange.replicas:
            raise ValueError(
                f"exchange.max_replicas = {self.exchange.max_replicas} is less than exchange.replicas = "
                f"{self.exchange.replicas}"
            )
        if len(self.exchange.steps_between_rounds) not in (0, self.exchange.replicas):
            raise ValueError(
                f"exchange.steps_between_rounds has {len(self.exchange.steps_between_rounds)} numbers; set one "
                f"for each of exchange.replicas = {self.exchange.replicas}"
            )
        if 0 < self.train.schedule_steps < self.train.steps:
            raise ValueError(
                f"train.schedule_steps = {self.train.schedule_steps} ends before train.steps = {self.train.steps} do; "
                "set it to at least train.steps"
            )
        if self.train.precision == "bf16" and self.train.device == "cpu":
            raise ValueError("train.precision = 'bf16' needs train.device = 'cuda': on CPUs it is many times slower")
        return self
