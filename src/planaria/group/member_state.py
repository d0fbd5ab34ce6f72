"""The state of a member's program as named tensors: its model, optimizer and anything else with a ``state_dict``.

Weights are the trained parameters by name. All else (buffers, optimizer, schedulers, scalers) becomes a document of
JSON values whose tensors are stored beside it, so that nothing that comes from another member is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from planaria.common.errors import UserError
from planaria.common.tensors import all_finite
from planaria.models.packing import TYPES, digest

DOCUMENT = "document"
"""name of the JSON document, in UTF-8 bytes"""
_MAX_DOCUMENT_BYTES = 64 << 20
_MAX_DEPTH = 32
"""levels of nested values"""
_TENSOR, _LIST, _TUPLE, _DICT = "tensor", "list", "tuple", "dict"
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""names that ``torch.compile`` and activation checkpointing insert"""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model within ``torch.compile`` and ``DistributedDataParallel``.

    :raises UserError: if its parameters are flat shards.
    """
    while (
        inner := getattr(model, "_orig_mod", model.module if isinstance(model, DistributedDataParallel) else None)
    ) is not None:
        model = inner
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UserError(
            "wrap: the model is a FullyShardedDataParallel, whose parameters are flat parts of several tensors; use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return model


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; a sharded one is gathered on the CPU, in which all ranks must take part."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if gather is None else gather().cpu()


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the wrappers around its module, which members need not share."""
    return _WRAPPERS.sub("", name)


class Stateful(Protocol):
    """A learning-rate scheduler, gradient scaler or other object whose state a new member needs."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class MemberState:
    """The model, the optimizer and the other objects of one member."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, also: Mapping[str, Stateful]) -> None:
        """:raises UserError: if a trained parameter is in no group of the optimizer, or has a type that is not sent."""
        model = unwrap(model)
        self.model = model
        self.optimizer = optimizer
        self.also = dict(also)
        self._names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self.parameters = {self._names[id(p)]: p for p in model.parameters() if p.requires_grad}
        optimised = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.parameters.items():
            if (kind := type(parameter.data).__name__) not in ("Tensor", "DTensor"):
                raise UserError(
                    f"wrap: parameter {name!r} is a {kind}, which cannot be sent; use plain tensors, or FSDP2"
                )
            if parameter.dtype not in TYPES or not parameter.dtype.is_floating_point:
                raise UserError(f"wrap: parameter {name!r} is {parameter.dtype}; use a model in fp32, bf16 or fp16")
            if id(parameter) not in optimised:
                raise UserError(
                    f"wrap: the optimizer does not update parameter {name!r}; pass it to the optimizer, or set its "
                    "requires_grad to False"
                )
        if not self.parameters:
            raise UserError("wrap: the model has no parameter that requires a gradient")

    @cached_property
    def layout(self) -> str:
        """Digest of the properties that all members share: names and shapes of trained parameters; frozen weights."""
        rows = [f"{name} {list(parameter.shape)}" for name, parameter in sorted(self.parameters.items())]
        frozen = sorted((self._names[id(p)], p) for p in self.model.parameters() if not p.requires_grad)
        rows += [digest(name, whole(parameter).cpu().contiguous()).hex() for name, parameter in frozen]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def max_state_bytes(self) -> int:
        """Limit for the bytes of the whole state: weights, five tensors of optimizer state for each, and buffers."""
        weights = sum(parameter.nbytes for parameter in self.parameters.values())
        return (
            6 * max(weights, 4 * self.parameter_count)
            + 2 * sum(buffer.nbytes for buffer in self.model.buffers())
            + (64 << 20)
        )

    def has_gradient(self) -> bool:
        """Return whether the parameters hold a gradient: one that is finite and not zero."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        finite = all(map(all_finite, gradients))
        return finite and any(bool(gradient.any()) for gradient in gradients)

    @property
    def optimizer_kind(self) -> str:
        """Name and options of the optimizer, which all members share."""
        groups = [sorted(group.keys() - {"params"}) for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} with {len(groups)} groups of {', '.join(groups[0])}"[:400]

    def weights(self) -> dict[str, Tensor]:
        """Return the trained parameters by name; they share memory."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the trained parameters."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def step(self) -> None:
        """Apply the gradient."""
        self.optimizer.step()

    def require_sendable(self) -> None:
        """Raise UserError if :meth:`extra_state` does."""
        self.extra_state()

    def extra_state(self) -> dict[str, Tensor]:
        """Return everything but the weights, as named tensors.

        :raises UserError: naming a value that is neither a tensor nor JSON.
        """
        tensors: dict[str, Tensor] = {}
        values = {"buffers": self._buffers(), "optimizer": self._optimizer_state()}
        values |= {f"also.{name}": owner.state_dict() for name, owner in self.also.items()}
        document = {name: _flat(value, name, tensors, 0) for name, value in values.items()}
        text = json.dumps(document, separators=(",", ":")).encode()
        return {**tensors, DOCUMENT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def load_extra_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load another member's :meth:`extra_state`.

        :raises UserError: if it is invalid, or does not fit this member's model and optimizer.
        """
        self._load_document(document_of(tensors), lambda path: tensors[path].clone())

    def _load_document(self, document: Any, fetch: Callable[[str], Tensor]) -> None:
        """Load a state whose tensors ``fetch`` returns by path."""
        values = {name: _tree(value, fetch) for name, value in document.items()}
        expected = {"buffers", "optimizer", *(f"also.{name}" for name in self.also)}
        if differing := sorted(values.keys() ^ expected):
            raise UserError(
                f"the state of another member: differs in {differing[0].removeprefix('also.')!r}; use the same "
                "wrap(also=...) at all members"
            )
        self._load_buffers(values["buffers"])
        try:
            self.optimizer.load_state_dict(self._with_numbers(values["optimizer"]))
            for name, owner in self.also.items():
                owner.load_state_dict(values[f"also.{name}"])
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
            raise UserError(f"the state of another member does not fit this one ({str(error)[:120]})") from None

    def _buffers(self) -> dict[str, Any]:
        """Return the entries of the model's state that are not parameters."""
        named = {plain_name(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        entries = {plain_name(name): value for name, value in self.model.state_dict().items()}
        return {name: value for name, value in entries.items() if name not in named}

    def _load_buffers(self, received: object) -> None:
        buffers = self._buffers()
        if not isinstance(received, dict) or received.keys() != buffers.keys():
            raise UserError(
                "the state of another member: its model has other buffers; use the same model at all members"
            )
        for name, value in buffers.items():
            theirs = received[name]
            if isinstance(value, Tensor):
                if not isinstance(theirs, Tensor) or (theirs.shape, theirs.dtype) != (value.shape, value.dtype):
                    raise UserError(f"the state of another member: buffer {name!r} has another shape or type")
                with torch.no_grad():
                    value.copy_(theirs)
        if any(not isinstance(value, Tensor) for value in buffers.values()):
            state = self.model.state_dict().items()
            self.model.load_state_dict({name: received.get(plain_name(name), value) for name, value in state})

    @property
    def _in_order(self) -> list[str]:
        """Names of the optimizer's parameters, in the order of its numbers."""
        return [self._names.get(id(p), "") for group in self.optimizer.param_groups for p in group["params"]]

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state with the names of parameters instead of their numbers."""
        names = self._in_order
        state = self.optimizer.state_dict()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        return {"state": {names[number]: value for number, value in state["state"].items()}, "groups": groups}

    def _with_numbers(self, received: Any) -> dict[str, Any]:
        """Return a state for ``Optimizer.load_state_dict``; ValueError for another optimizer's."""
        state = self.optimizer.state_dict()
        numbers = {name: number for number, name in enumerate(self._in_order)}
        if unknown := sorted(received["state"].keys() - numbers.keys()):
            raise ValueError(f"its optimizer holds {unknown[0]!r}, but this optimizer does not")
        if len(received["groups"]) != len(state["param_groups"]):
            raise ValueError("its optimizer has a different number of parameter groups")
        groups = []
        for theirs, mine in zip(received["groups"], state["param_groups"], strict=True):
            if theirs.keys() != mine.keys() - {"params"}:
                raise ValueError("its optimizer has other options")
            groups.append({**theirs, "params": mine["params"]})
        return {"state": {numbers[name]: value for name, value in received["state"].items()}, "param_groups": groups}


def document_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the document of an :meth:`MemberState.extra_state`.

    :raises UserError: if it is none, or names a tensor that is missing.
    """
    try:
        text = tensors[DOCUMENT]
        if text.dtype != torch.uint8 or text.ndim != 1 or len(text) > _MAX_DOCUMENT_BYTES:
            raise ValueError("its document is not a one-dimensional tensor of bytes")
        document = dict(json.loads(text.numpy().tobytes()))
        if missing := [path for path in tensor_paths(document) if path not in tensors]:
            raise ValueError(f"its document names the tensor {missing[0]!r}, which is missing")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UserError(f"the state of another member is invalid ({str(error)[:120]})") from None
    return document


def tensor_paths(document: Mapping[str, Any]) -> list[str]:
    """Return the paths of a document's tensors in order; ValueError, TypeError or RecursionError if it is invalid."""
    paths: list[str] = []
    for value in document.values():
        _tree(value, paths.append)
    return paths


def _flat(value: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    """Return ``value`` in JSON; its tensors are added to ``tensors`` by path."""
    if depth > _MAX_DEPTH:
        raise UserError(f"wrap: the state at {path} has more than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.dtype not in TYPES:
            raise UserError(f"wrap: the state at {path} has dtype {value.dtype}, which cannot be sent")
        tensors[path] = whole(value)
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        rows = [[key, _flat(item, f"{path}.{key}", tensors, depth + 1)] for key, item in value.items()]
        if wrong := [key for key, _ in rows if not isinstance(key, str | int)]:
            raise UserError(f"wrap: the state at {path} has the key {wrong[0]!r}; keys must be text or whole numbers")
        return {_DICT: rows}
    if isinstance(value, list | tuple):
        kind = _LIST if isinstance(value, list) else _TUPLE
        return {kind: [_flat(item, f"{path}.{index}", tensors, depth + 1) for index, item in enumerate(value)]}
    raise UserError(
        f"wrap: the state at {path} is a {type(value).__name__}; only tensors, numbers, text, lists and tables are sent"
    )


def _tree(value: Any, fetch: Callable[[str], Any], depth: int = 0) -> Any:
    """Return the value that :func:`_flat` wrote, whose tensors ``fetch`` returns by path; ValueError or TypeError if it
    cannot be its result.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("too many levels")
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return fetch(content)
    if kind == _DICT:
        return {key: _tree(item, fetch, depth + 1) for key, item in content}
    if kind not in (_LIST, _TUPLE):
        raise ValueError(f"unknown {str(kind)[:20]!r}")
    items = [_tree(item, fetch, depth + 1) for item in content]
    return items if kind == _LIST else tuple(items)
