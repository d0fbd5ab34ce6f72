"""A model of ``transformers`` in which only chosen decoder layers have memory.

A stage calls the library's own forward pass, so the library computes masks, positions, rotary tables and choices by
layer. Decoder layers that belong to other stages are replaced by :class:`AbsentLayer`; the first own layer takes the
stage's input instead of what arrives there, and the last one ends the call. Nothing here depends on an architecture.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError, missing_package

_HIDDEN = "hidden_states"
MAX_LAYERS = 1024
"""lists and layers are built for each, also of a hostile config.json"""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
"""settings with the number of layers"""
_SMALL = 1 << 12
"""numbers of a parameter whose constructor's values are kept: the library does not initialise all of them"""
_RANDOM = ("dropout", "pdrop", "drop_rate", "router_jitter_noise", "layerdrop")
"""parts of names of settings that make training random; a repeated step must be the same step"""
_REFUSED = {
    "auto_map": "needs code from its repository, which is not run; use a model of the library",
    "quantization_config": "is quantised; use the weights in bf16, fp16 or fp32",
}


def in_one_line(error: BaseException) -> str:
    """Return the beginning of an error's text in one line, or its type."""
    return " ".join(str(error).split())[:240] or type(error).__name__


def read_config(values: Mapping[str, Any], location: str) -> Any:
    """Return the library's text configuration for a config.json's ``values``, without randomness in training.

    :raises UserError: naming ``location``, if the library or the architecture is unknown or unsupported.
    """
    config = library_config(values, location)
    for name in random_settings(config):
        setattr(config, name, 0.0)
    config.use_cache = False
    return config


def random_settings(config: Any) -> dict[str, float]:
    """Return the settings of a library's configuration that make training random, with their values."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if any(word in name for word in _RANDOM) and isinstance(value, int | float) and value
    }


def library_config(values: Mapping[str, Any], location: str) -> Any:
    """Return the library's text configuration as it is; UserError as :func:`read_config`."""
    for key, why in _REFUSED.items():
        if values.get(key):
            raise UserError(f"{location}: {key}: the model {why}")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise missing_package(f"{location}:", "transformers", "hf") from error
    kind = values.get("model_type")
    _require_countable(values, location)
    try:
        whole = AutoConfig.for_model(str(kind), **{key: value for key, value in values.items() if key != "model_type"})
        config = whole.get_text_config()
        if not isinstance(config.num_hidden_layers, int) or not isinstance(config.vocab_size, int):
            raise ValueError("it has no num_hidden_layers or no vocab_size")
    except Exception as error:  # the library may raise anything
        raise UserError(f"{location}: model_type = {kind!r}: {in_one_line(error)}") from None
    return config


def _require_countable(values: Mapping[str, Any], location: str) -> None:
    """Refuse numbers of layers that the library would take minutes to build, in nested configurations too."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _require_countable(value, location)
        elif key in DEPTHS and isinstance(value, int) and not 0 < value <= MAX_LAYERS:
            raise UserError(f"{location}: {key} = {value} is not between 1 and {MAX_LAYERS}; download it again")


def skeleton(
    config: Any, attention: str, location: str, buffers: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the whole causal decoder of ``config`` in ``dtype`` with parameters on the device "meta".

    ``buffers``: whether buffers are real, on the CPU. Without them a layer can be called on "meta", experts included.

    :raises UserError: naming ``location``, if the library has no causal decoder for it.
    """
    last: Exception | None = None
    for implementation in (attention, "eager") if attention == "sdpa" else (attention,):
        try:
            with _parameters_on_meta() if buffers else torch.device("meta"):
                return build_decoder(config, implementation, None if buffers else "batched_mm", dtype)
        except Exception as error:  # the library may raise anything
            last = error
    assert last is not None
    raise UserError(f"{location}: {in_one_line(last)}")


def build_decoder(
    config: Any, attention: str, experts: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the library's causal decoder of ``config`` in ``dtype`` on the current device; it raises anything.

    As when the library loads weights, some parameters of a model in bf16 are fp32. ``experts``: the library's
    implementation of mixtures, or None for its default. "batched_mm" copies a matrix per token, but is the only one
    that "meta" supports.
    """
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    model: Any = build(config, dtype=dtype, attn_implementation=attention, experts_implementation=experts)
    for pattern, wider in model._get_dtype_plan(dtype).items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern.replace("*", ".*"), name) and tensor.is_floating_point():
                tensor.data = tensor.data.to(wider)
    model.tie_weights()
    return cast(nn.Module, model)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to "meta" when it is registered, before it is initialised; small ones keep their values.

    Torch's hook is global, so those that other threads register are left alone.
    """
    thread = get_ident()

    def move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or get_ident() != thread:
            return None
        meta = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
        if parameter.numel() <= _SMALL:
            meta.constructed = parameter.detach().clone()  # type: ignore[attr-defined]
        return meta

    hook = nn.modules.module.register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]
    try:
        with torch.device("cpu"):
            yield
    finally:
        hook.remove()


def decoder_layers(model: nn.Module, config: Any, location: str) -> tuple[str, nn.ModuleList]:
    """Return the path and list of the decoder layers: of lists with their number, the one with the most parameters."""
    candidates = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not candidates:
        raise UserError(f"{location}: model_type = {config.model_type!r} has no plain list of decoder layers")
    _, name, layers = max(candidates, key=lambda candidate: candidate[0])
    return name, layers


class LastLayerReached(Exception):
    """A call reached the layer at which it ends."""

    def __init__(self, hidden: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """:param hidden: the hidden states there; the rest are the layer's arguments."""
        super().__init__()
        self.hidden = hidden
        self.args_given = args
        self.kwargs = dict(kwargs or {})


class Passage:
    """State of one call of the library's forward pass, shared by a stage's layers."""

    given: Tensor | None = None
    """hidden states that replace those which arrive at the first own layer, or after all layers"""
    stop_at: int = -1
    """number of the layer at which the call ends before it runs; -1: none"""

    def replace(self, arriving: Tensor) -> Tensor:
        """Return the hidden states that replace ``arriving``, in its dtype; ``arriving`` if there are none."""
        return arriving if self.given is None else self.given.to(arriving.dtype)


class AbsentLayer(nn.Module):
    """Stands in for a decoder layer: returns hidden states as the layer does, and may end the call."""

    def __init__(self, layer: nn.Module, number: int, passage: Passage, in_tuple: int) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple: not registered
        self._number = number
        self._passage = passage
        self._in_tuple = in_tuple

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer: some models read, say, its type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[_HIDDEN]
        if self._passage.stop_at == self._number:
            raise LastLayerReached(hidden, args, kwargs)
        return self._layer_output(self._passage.replace(hidden))

    def _layer_output(self, hidden: Tensor) -> Any:
        return (hidden, *(None,) * (self._in_tuple - 1)) if self._in_tuple else hidden


class OwnLayer(AbsentLayer):
    """A decoder layer of a block stage, at its index in the library's list."""

    def __init__(
        self, layer: nn.Module, number: int, passage: Passage, in_tuple: int, first: bool = False, last: bool = False
    ) -> None:
        """``first`` takes the passage's hidden states; ``last`` ends the call with its output."""
        super().__init__(layer, number, passage, in_tuple)
        self._first, self._last = first, last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._first and args:
            args = (self._passage.replace(args[0]), *args[1:])
        elif self._first:
            kwargs = {**kwargs, _HIDDEN: self._passage.replace(kwargs[_HIDDEN])}
        out = self._layer[0](*args, **kwargs)
        if self._last:
            raise LastLayerReached(out[0] if isinstance(out, tuple) else out)
        return out


class EndsLayer(AbsentLayer):
    """One of the first decoder layers, in the ends stage: skipped when the call is for the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._passage.given is not None:
            return self._layer_output(self._passage.replace(args[0] if args else kwargs[_HIDDEN]))
        return self._layer[0](*args, **kwargs)


class AbsentModule(nn.Module):
    """Stands in for a module outside of layers whose weights a block stage lacks: zeros of its output's shape."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (copy.deepcopy(module).to("meta"),)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), torch.device("cpu"))

        def move_to_meta(argument: Any) -> Any:
            return argument.to("meta") if isinstance(argument, Tensor) else argument

        out = self._module[0](*map(move_to_meta, args), **{name: move_to_meta(value) for name, value in kwargs.items()})
        return out.new_zeros((), device=device).expand(out.shape) if isinstance(out, Tensor) else out


def layer_output(model: nn.Module, layers: nn.ModuleList, location: str) -> tuple[int, int]:
    """Return the size of the tuple that a decoder layer returns, 0 for a tensor, and the width of hidden states.

    Runs one layer of a model on "meta", with the first form of attention mask that it accepts.

    :raises UserError: naming ``location``, if hidden states are not [B, T, D], or the layer cannot be run there.
    """
    length = 4
    with torch.device("meta"):
        masks = (torch.zeros(1, 1, length, length), torch.ones(1, length, dtype=torch.long), None)
    failure: BaseException | None = None
    for mask in masks:
        try:
            hidden, out = _first_layer(model, layers, length, mask)
        except Exception as error:  # the library may raise anything
            failure = failure or error
            continue
        if hidden.ndim == 3:
            return len(out) if isinstance(out, tuple) else 0, hidden.shape[-1]
        failure = ValueError(
            f"hidden states have shape {list(hidden.shape)}; only [batch, tokens, width] can be passed between stages"
        )
    assert failure is not None
    raise UserError(f"{location}: a decoder layer cannot be called alone: {in_one_line(failure)}")


def _first_layer(model: nn.Module, layers: nn.ModuleList, length: int, mask: Tensor | None) -> tuple[Tensor, Any]:
    """Run the first layer on "meta"; return the hidden states before it, and its output."""
    first, passage = layers[0], Passage()
    passage.stop_at = 0
    layers[0] = AbsentLayer(first, 0, passage, in_tuple=0)
    try:
        with torch.device("meta"), torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.long), attention_mask=mask, use_cache=False)
    except LastLayerReached as reached:
        with torch.device("meta"), torch.no_grad():
            return reached.hidden, first(*reached.args_given, **reached.kwargs)
    finally:
        layers[0] = first
    raise ValueError("the first layer is never called")


def materialise(module: nn.Module, device: torch.device | str) -> None:
    """Give parameters on "meta" memory on ``device``; tied ones stay tied.

    Small ones have the numbers that their module's constructor gave them, all others NaN.
    """
    parameters: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in parameters:
                    numbers = torch.full_like(parameter, torch.nan, device=device)
                    if hasattr(parameter, "constructed"):
                        numbers = parameter.constructed.to(device, parameter.dtype)
                    parameters[id(parameter)] = type(parameter)(numbers, requires_grad=parameter.requires_grad)
                submodule._parameters[name] = parameters[id(parameter)]


def initialise(model: nn.Module, module: nn.Module) -> None:
    """Initialise a module and its submodules as the library does, from torch's global generator.

    :raises UserError: if the library leaves a parameter without values.
    """
    from transformers.initialization import guard_torch_init_functions

    with torch.no_grad(), guard_torch_init_functions():
        for submodule in reversed(list(module.modules())):  # children first
            model._init_weights(submodule)  # type: ignore[operator]
    for name, parameter in module.named_parameters():
        if parameter.isnan().any():
            raise UserError(
                f"model.family = 'transformers': the library gives {name} no initial values; set train.start"
            )
