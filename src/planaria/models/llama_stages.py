"""The pipeline's stages of a LLaMA: stage 0 and equal block stages 1..S, and the whole model made of them.

Within a stage, parameters have local names (``layers.0.mlp.up_proj.weight``); in files and across cuts they have
Hugging Face's global names (:func:`global_name`). Initial weights depend on seed and global name only, so every cut of
a model starts from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, PassMode, block_bytes, ends_bytes
from planaria.models.chunked_loss import head_loss
from planaria.models.family import Family
from planaria.models.llama_layers import Linear, matrix_numbers, rotary_tables, run_layers
from planaria.models.moe_layer import ExpertRouting, MoELayer, to_file
from planaria.models.one_array import GAINS, SHARED, add_array, final_norm, layers_of
from planaria.models.seeding import normal
from planaria.models.sharing import stored_count
from planaria.models.subspace import EMBEDDING, Subspace, SubspaceEmbedding
from planaria.models.tied_head import TiedHead


def _add_rotary_tables(stage: nn.Module, config: ModelConfig) -> None:
    for name, table in zip(("cos", "sin"), rotary_tables(config), strict=True):
        stage.register_buffer(name, table, persistent=False)


class BlockStage(nn.Module):
    """Consecutive decoder layers."""

    cos: Tensor
    sin: Tensor
    recompute = False
    """see :func:`run_layers``"""

    def __init__(self, config: ModelConfig, numbers: range) -> None:
        """:param numbers: numbers of its layers in the whole model."""
        super().__init__()
        if config.one_array:
            add_array(self, config)
            self.embed_tokens, self.lm_head = _tables(config)
        self.layers = layers_of(self, config, numbers)
        _add_rotary_tables(self, config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map hidden states [B, T, D] to [B, T, D], T at most ``config.context``; ``mask`` as in ``Attention``."""
        return run_layers(self.layers, x, self.cos, self.sin, self.recompute, mask)


class LlamaEnds(TiedHead):
    """Stage 0: the embedding, where every microbatch starts; the norm, head and loss, where it returns.

    The first ``ends_layers`` decoder layers may follow the embedding here.
    """

    cos: Tensor
    sin: Tensor
    recompute = False
    """see :func:`run_layers``"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.one_array:
            add_array(self, config)
        self.embed_tokens, self.lm_head = _tables(config)
        self.layers = layers_of(self, config, range(config.ends_layers))
        if config.ends_layers:
            _add_rotary_tables(self, config)
        self.norm = final_norm(self, config)
        self.keep_tied()

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, D], through stage 0's own layers; ``mask`` as in
        ``Attention``."""
        hidden: Tensor = self.embed_tokens(tokens)
        return run_layers(self.layers, hidden, self.cos, self.sin, self.recompute, mask) if len(self.layers) else hidden

    def logits(self, x: Tensor, separate_gradient: bool = True) -> Tensor:
        """Map hidden states [B, T, D] to logits [B, T, V].

        Without ``separate_gradient`` a tied head's gradient is added to the table's directly; valid if only one
        backward pass runs at a time.
        """
        return F.linear(self.norm(x), self._head(separate_gradient))

    def _head(self, separate_gradient: bool) -> Tensor:
        head = self.head_alias if separate_gradient else self.embed_tokens.weight
        if self.lm_head is not None:
            head = self.lm_head.weight
        assert head is not None
        return head

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of hidden states [B, T, D] against the next tokens [B, T]; a scalar."""
        return head_loss(self.norm(x).flatten(0, 1), self._head(separate_gradient=True), targets.flatten())

    @property
    def table(self) -> Tensor:
        return self.embed_tokens.weight

    def _tie(self) -> None:
        self.head_alias = self.alias() if self.lm_head is None else None


def _tables(config: ModelConfig) -> tuple[nn.Embedding | SubspaceEmbedding, Linear | None]:
    """Return embedding and head, uninitialised; a tied head is the embedding's."""
    if config.subspace is not None:
        return SubspaceEmbedding(Subspace.of(config)), Linear(config.dim, config.vocab)
    # An explicit table: nn.Embedding would otherwise draw one from the global generator.
    table = nn.Embedding(config.vocab, config.dim, _weight=torch.empty(config.vocab, config.dim))
    return table, None if config.tied else Linear(config.dim, config.vocab)


class LlamaFamily(Family):
    """LLaMA decoders. Every parameter has its own generator on the CPU, seeded by ``seed`` and its global name."""

    has_global_names: ClassVar[bool] = True
    completes_texts: ClassVar[bool] = True
    accepts_document_mask: ClassVar[bool] = True
    supports_subspaces: ClassVar[bool] = True
    resizable_settings: ClassVar[frozenset[str]] = frozenset({"vocab"})

    def accepts_shorter_samples(self) -> bool:
        return True

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> LlamaEnds | BlockStage:
        """:raises ValueError: if there is no such stage, or the layers do not divide into the stages."""
        if not 0 <= stage <= stages or config.why_uncuttable(stages):
            raise ValueError(f"no stage {stage} of {stages} in a model of {config.layers} layers")
        return LlamaEnds(config) if stage == 0 else BlockStage(config, stage_layers(config, stages, stage))

    def global_name(self, config: ModelConfig, stages: int, stage: int, local: str) -> str:
        """Return the Hugging Face name; ValueError for a name outside of the stage's layers."""
        return global_name(config, stages, stage, local)

    def parameter_counts(self, config: ModelConfig, stages: int, stage: int) -> tuple[int, int, int]:
        fixed = 0 if config.subspace is None else Subspace.of(config).nbytes
        return stage_parameters(config, stages, stage), 0, fixed

    def tables(self, config: ModelConfig) -> tuple[str, str]:
        return EMBEDDING, "lm_head.weight"

    def pass_bytes(self, config: ModelConfig, stages: int, stage: int, passes: PassMode) -> PassBytes:
        if stage == 0:
            return ends_bytes(config, passes)
        return block_bytes(config, len(stage_layers(config, stages, stage)), passes)

    def check(self, config: ModelConfig, stages: int, masked: bool) -> None:
        """Check the subspace of the residual stream, if there is one."""
        if config.subspace is None:
            return
        wire = f"pipeline.wire.rank = {config.subspace.rank}"
        if config.subspace.rank > config.dim:
            raise UserError(f"{wire}: more dimensions than model.dim = {config.dim}; set it to at most that")
        if config.tied:
            raise UserError(f"{wire}: a subspace factors the embedding, not the head; set model.tied = false")
        if config.share > 1:
            raise UserError(f"{wire}: factored matrices share no numbers; remove model.share = {config.share}")

    def initialise(self, built: nn.Module, config: ModelConfig, stages: int, stage: int, seed: int) -> None:
        """Set norm gains to 1, and draw all else from N(0, init_std²), the embedding from N(0, embedding_std²)."""
        with torch.no_grad():
            for local, parameter in built.named_parameters():
                if local.endswith(SHARED) or (parameter.dim() > 1 and local != GAINS):
                    name = global_name(config, stages, stage, local)
                    std = config.embedding_std if name == EMBEDDING else None
                    parameter.copy_(normal(parameter.shape, std or config.init_std, seed, name))


def global_name(config: ModelConfig, stages: int, stage: int, local: str) -> str:
    """Return the Hugging Face name of a stage's parameter; layers are counted through the whole model.

    >>> global_name(ModelConfig(layers=8), stages=4, stage=2, local="layers.1.mlp.up_proj.weight")
    'model.layers.3.mlp.up_proj.weight'
    """
    if stage == 0 or config.one_array:
        return local if local.startswith("lm_head.") else f"model.{local}"
    _, index, rest = local.split(".", 2)
    layers = stage_layers(config, stages, stage)
    if not 0 <= int(index) < len(layers):
        raise ValueError(f"{local}: stage {stage} has {len(layers)} layers")
    return f"model.layers.{layers[int(index)]}.{rest}"


def stage_layers(config: ModelConfig, stages: int, stage: int) -> range:
    """Return the decoder layers of a stage of 0..``stages``, as the whole model counts them.

    >>> stage_layers(ModelConfig(layers=8, ends_layers=2), stages=3, stage=3)
    range(6, 8)
    """
    ends_layers = config.ends_layers
    if stage == 0:
        return range(ends_layers)
    counts = config.block_layers or ((config.layers - ends_layers) // stages,) * stages
    return range(ends_layers + sum(counts[: stage - 1]), ends_layers + sum(counts[:stage]))


class Llama(nn.Module):
    """The whole model in one process, for reference, generation and export.

    It consists of the pipeline's stages; logits and loss are bitwise equal for every cut.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        initialise: bool = True,
        routing: ExpertRouting | None = None,
    ) -> None:
        """``routing``: routing of layers with several feed-forward blocks, or None if each has one."""
        super().__init__()
        if config.one_array:
            raise ValueError("stages of one array each hold the whole model; put together what dense_state gives")
        self.config, self.routing = config, routing
        family = LlamaFamily()
        with torch.device(device):
            ends, *blocks = (family.build_stage(config, stages, stage) for stage in range(stages + 1))
            assert isinstance(ends, LlamaEnds)
            self.ends, self.stages = ends, nn.ModuleList(blocks)
            if routing is not None:
                for layer in self.layers:
                    layer.mlp = MoELayer(config, routing)
        if initialise and torch.device(device).type != "meta":
            for stage, built in enumerate((ends, *blocks)):
                family.initialise(built, config, stages, stage, seed)

    @property
    def layers(self) -> list[nn.Module]:
        """All decoder layers, in order."""
        return [layer for stage in (self.ends, *self.stages) for layer in stage.layers]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to hidden states [B, T, D] before the final norm and head."""
        x = self.ends.embed(tokens)
        for stage in self.stages:
            x = stage(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to logits [B, T, V]."""
        return self.ends.logits(self.hidden(tokens))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of the next tokens ``targets`` [B, T] after ``tokens`` [B, T]; a
        scalar."""
        return self.ends.loss(self.hidden(tokens), targets)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.ends.zero_grad(set_to_none)

    def global_state(self) -> dict[str, Tensor]:
        """Return every parameter by its global name, sharing memory; a tied head is not listed twice."""
        return {name: parameter.detach() for name, parameter in self._parameters_by_name()}

    def load_global_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in by global name.

        :raises UserError: naming the first tensor that is missing, of another shape, or unknown; the model is then
            unchanged.
        """
        parameters = dict(self._parameters_by_name())
        require_shapes(
            *({name: tuple(tensor.shape) for name, tensor in named.items()} for named in (parameters, state))
        )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])

    def exported_names(self) -> dict[str, str]:
        """Return the name of each parameter in an exported file, by its name in :meth:`named_parameters`."""
        to_name = to_file if self.routing else str
        exported = {id(parameter): to_name(name) for name, parameter in self._parameters_by_name()}
        return {name: exported[id(parameter)] for name, parameter in self.named_parameters()}

    def _parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, stage in enumerate((self.ends, *self.stages)):
            for local, parameter in stage.named_parameters():
                yield global_name(self.config, len(self.stages), number, local), parameter


def require_llama(config: ModelConfig, location: object) -> None:
    """Raise UserError, naming ``location``, if a model is of another family."""
    if config.family != "llama":
        raise UserError(f"{location}: model.family = {config.family!r}: only a LLaMA can be used here")


def require_shapes(expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check ``shapes`` tensor shapes against a model's ``expected``.

    :raises UserError: naming the first tensor that is missing, of another shape, or unknown.
    """
    for name, shape in expected.items():
        if name not in shapes:
            raise UserError(f"weights: {name} is missing; it should have shape {list(shape)}")
        if shapes[name] != shape:
            raise UserError(f"weights: {name} has shape {list(shapes[name])}, not {list(shape)}")
    for name in shapes:
        if name not in expected:
            raise UserError(f"weights: {name} is not a parameter of this model")


def parameter_count(config: ModelConfig) -> int:
    """Return the number of stored parameters of the whole model; a tied table counts once."""
    layer, together = matrix_numbers(config), config.layers if config.one_array else 1
    arrays = config.layers // together * stored_count(together * layer, config.share)
    tables = config.vocab * (config.written if config.tied else config.written + config.dim)
    return tables + arrays + 2 * config.layers * config.dim + config.dim


def stage_parameters(config: ModelConfig, stages: int, stage: int) -> int:
    """Return the number of parameters of one stage of 0..``stages``."""
    if config.one_array:
        return parameter_count(config)
    bare = parameter_count(config.model_copy(update={"layers": 0}))
    layer = (parameter_count(config) - bare) // config.layers
    return len(stage_layers(config, stages, stage)) * layer + (0 if stage else bare)


def flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of training on one token: 6 N + 12 L D T (PaLM, arXiv 2204.02311, appendix B).

    N counts the parameters that multiply: all but an untied input table; a stored number that stands for several
    weights counts for each. T is the context; as in the paper, attention counts as if it were not causal. This is the
    numerator of model FLOPs utilisation.
    """
    lookup = 0 if config.tied else config.vocab * config.dim
    return 6.0 * (parameter_count(config.dense) - lookup) + 12.0 * config.layers * config.dim * config.context
