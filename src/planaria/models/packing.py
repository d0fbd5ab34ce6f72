"""Lossless serialisation of a stage's state, for messages between workers and stage files.

The bytes are a deterministic safetensors document: widest types first, then by name. Numbers that change every step
(clocks, scale, norms) are tensors too, so the header's length depends on names, types and shapes alone. If parameters
have their own learning-rate scales, one more tensor has all scales. ``sha256`` has a digest of every other entry. No
pickle is used, and every size in a header is checked against the available bytes before use.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.models.state import StageShapes, StageState

HEADROOM = 4 << 20
"""maximum size of a header, digests included"""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
_ALIGNED = 64
_LARGEST = 1 << 48
"""maximum bytes of a tensor"""
_MAX_SIDES = 64
_KINDS = ("weights", "generators", "outer", "further")
"""first part of a packed tensor's name; "further": :attr:`StageState.extra`"""
_KEY = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""name of an optimizer's tensor"""
_MAX_KEYS = 8
DIGEST_BYTES = hashlib.sha256().digest_size


class PackingError(ValueError):
    """Bytes are not a packed state; the message has the reason."""


def clocks_of(packed: Tensor | None, names: Collection[str]) -> dict[str, int]:
    """Return the clocks of the parameters that have moments, from the entry ``clocks``.

    :raises PackingError: if it is invalid.
    """
    if packed is None or (packed.dtype, packed.shape) != (torch.int64, (len(names),)) or bool((packed < 0).any()):
        raise PackingError("a packed state has one clock for each parameter with moments, none below zero")
    return dict(zip(sorted(names), packed.tolist(), strict=True))


def scales_of(packed: Tensor | None, names: Collection[str], stage: float) -> dict[str, float]:
    """Return the learning-rate scales that differ from the stage's, from the entry ``scales``.

    :raises PackingError: if it is invalid.
    """
    if packed is None:
        return {}
    if (packed.dtype, packed.shape) != (torch.float64, (len(names),)) or not all_finite(packed):
        raise PackingError("a packed state has a finite learning-rate scale for each parameter, or one for all")
    return {name: scale for name, scale in zip(sorted(names), packed.tolist(), strict=True) if scale != stage}


def numbers_of(packed: Tensor | None) -> tuple[float, float | None, float | None]:
    """Return the learning-rate scale and both norms; a norm may be unknown (NaN).

    :raises PackingError: if the entry is invalid.
    """
    if packed is None or (packed.dtype, packed.shape) != (torch.float64, (3,)):
        raise PackingError("a packed state has three numbers: its learning-rate scale and two norms")
    scale, *norms = packed.tolist()
    if not math.isfinite(scale) or any(map(math.isinf, norms)):
        raise PackingError(f"a packed state has a scale and norms that are finite, not {scale} and {norms}")
    grad_norm, clipped_norm = (None if math.isnan(norm) else norm for norm in norms)
    return scale, grad_norm, clipped_norm


Spec = tuple[torch.dtype, Sequence[int]]
"""a tensor's type and shape"""


class PackedTensor(NamedTuple):
    """A tensor of a packed state, without its numbers."""

    dtype: str
    shape: tuple[int, ...]
    sha256: bytes = b""
    """empty if unknown"""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def pack(state: StageState) -> Tensor:
    """Return a copy of ``state`` as a uint8 tensor on the CPU."""
    named = named_tensors(state)
    head, spans = layout({name: (tensor.dtype, tensor.shape) for name, tensor in named.items()})
    head_bytes = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([head_bytes, *(_as_bytes(named[name]) for name in spans)])


def pack_bare(state: StageState, memory: Callable[[int], Tensor]) -> Tensor:
    """Return the same without digests, copied into ``memory(size)``, for bytes that are checked otherwise."""
    named = entries(state)
    head, spans = layout({name: (tensor.dtype, tensor.shape) for name, tensor in named.items()})
    flat = memory(len(head) + max(end for _, end in spans.values()))
    flat[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for name, (begin, end) in spans.items():
        flat[len(head) + begin : len(head) + end] = _as_bytes(named[name])
    return flat


def bare_bytes(shapes: StageShapes) -> int:
    """Return the length of :func:`pack_bare` for a trained stage with these parameters, in fp32 on a CPU."""
    specs: dict[str, Spec] = {
        f"{kind}.{name}": (torch.float32, shape)
        for kind in ("weights", *shapes.state)
        for name, shape in shapes.items()
    }
    specs |= {"numbers": (torch.float64, (3,)), "clocks": (torch.int64, (len(shapes),))}
    specs["generators.cpu"] = (torch.uint8, torch.random.get_rng_state().shape)
    head, spans = layout(specs)
    return len(head) + max(end for _, end in spans.values())


def unpack(flat: Tensor, digests: bool = True) -> StageState:
    """Return the state packed by :func:`pack` or, without ``digests``, :func:`pack_bare`; shares memory with ``flat``.

    :raises PackingError: if the bytes are invalid or damaged.
    """
    if flat.dtype != torch.uint8 or flat.ndim != 1 or len(flat) < _ALIGNED:
        raise PackingError(f"a packed state is a row of bytes, not {flat.dtype} {list(flat.shape)}")
    length = int.from_bytes(flat[:8].numpy().tobytes(), "little")
    if length > min(len(flat) - 8, HEADROOM):
        raise PackingError(f"a packed state of {len(flat)} bytes cannot have a header of {length}")
    specs = header_of(flat[8 : 8 + length].numpy().tobytes()).specs
    head, spans = layout(specs)
    if head != flat[: len(head)].numpy().tobytes():
        raise PackingError("the header of a packed state does not match its tensors")
    body = flat[len(head) :]
    size = max((end for _, end in spans.values()), default=0)
    if len(body) != size:
        raise PackingError(f"a packed state announces {len(head) + size} bytes and has {len(flat)}")
    named = {name: body[a:b].view(specs[name][0]).view(specs[name][1]) for name, (a, b) in spans.items()}
    return state_of(named, digests)


def named_tensors(state: StageState) -> dict[str, Tensor]:
    """Return all of ``state`` as :func:`entries`, with the digest of each in ``sha256``.

    :raises KeyError: for an unsupported tensor type.
    """
    named = entries(state)
    return named | {"sha256": digest_table(digest(name, named[name]) for name in sorted(named))}


def digest_table(rows: Iterable[bytes]) -> Tensor:
    """Return the entry ``sha256``: uint8 [entries, 32], the digests of all others by name."""
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def entries(state: StageState) -> dict[str, Tensor]:
    """Return all of ``state`` as contiguous tensors on the CPU; they share memory where possible."""
    named = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    for name, tensors in state.moments.items():
        named |= {f"{key}.{name}": tensor for key, tensor in tensors.items()}
    named |= {f"generators.{name}": tensor for name, tensor in state.generators.items()}
    named |= {f"outer.{name}": tensor for name, tensor in state.outer.items()}
    named |= {f"further.{name}": tensor for name, tensor in state.extra.items()}
    norms = (math.nan if norm is None else norm for norm in (state.grad_norm, state.clipped_norm))
    named["numbers"] = torch.tensor([state.lr_scale, *norms], dtype=torch.float64)
    named["clocks"] = torch.tensor([state.clocks[name] for name in sorted(state.moments)], dtype=torch.int64)
    if state.scales:
        scales = [state.scales.get(name, state.lr_scale) for name in sorted(state.weights)]
        named["scales"] = torch.tensor(scales, dtype=torch.float64)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def state_of(named: Mapping[str, Tensor], digests: bool = True) -> StageState:
    """Return the state made from :func:`named_tensors`; shares memory.

    :raises PackingError: naming the tensor that is damaged, missing or unknown.
    """
    named = dict(named)
    if digests:
        _check_digests(named)
    kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    numbers, clocks, scales = (named.pop(key, None) for key in ("numbers", "clocks", "scales"))
    moments: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in named.items():
        kind, dot, name = entry.partition(".")
        if not dot or (kind not in kinds and not _KEY.fullmatch(kind)):
            raise PackingError(f"a packed state has no {entry!r}")
        if kind in kinds:
            kinds[kind][name] = tensor
        else:
            moments.setdefault(name, {})[kind] = tensor
    weights, generators, outer, extra = kinds.values()
    _require_complete({name: tensors.keys() for name, tensors in moments.items()})
    for name, tensors in moments.items():
        for key, tensor in tensors.items():
            if name not in weights or tensor.shape != weights[name].shape:
                raise PackingError(f"a packed state has {key} of {name!r} whose shape differs from its weights'")
    scale, grad_norm, clipped_norm = numbers_of(numbers)
    parameter_scales = scales_of(scales, weights, scale)
    clocks_by_name = clocks_of(clocks, moments)
    norms = grad_norm, clipped_norm
    return StageState(weights, moments, clocks_by_name, scale, *norms, generators, outer, parameter_scales, extra)


Numbers = tuple[float | None, float | None]
Summary = tuple[dict[str, PackedTensor], dict[str, int], float, dict[str, float], Numbers]
"""entries without numbers, clocks and scales; clocks; scale of the stage; scales; norms"""


def summary(specs: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], Tensor]) -> Summary:
    """Return the contents of :func:`named_tensors` without its large tensors; ``read`` reads an entry of ``specs``.

    :raises PackingError: if the small ones are missing or damaged.
    """
    keys = sorted(specs.keys() - {"sha256"})
    digests = read("sha256") if "sha256" in specs else None
    if digests is None or (digests.dtype, digests.shape) != (torch.uint8, (len(keys), DIGEST_BYTES)):
        raise PackingError("a packed state has a digest of each of its tensors")
    packed = {key: PackedTensor(*specs[key], row.numpy().tobytes()) for key, row in zip(keys, digests, strict=True)}
    small = {key: read(key) for key in ("numbers", "clocks", "scales") if key in packed}
    for key, tensor in small.items():
        require_digest(key, tensor, packed.pop(key).sha256)
    weights = [k.removeprefix("weights.") for k in keys if k.startswith("weights.")]
    moments: dict[str, set[str]] = {}
    for kind, _, name in (key.partition(".") for key in keys if "." in key):
        if kind not in _KINDS:
            moments.setdefault(name, set()).add(kind)
    _require_complete(moments)
    scale, *norms = numbers_of(small.get("numbers"))
    scales = scales_of(small.get("scales"), weights, scale)
    return packed, clocks_of(small.get("clocks"), moments), scale, scales, (norms[0], norms[1])


def _require_complete(moments: Mapping[str, Set[str]]) -> None:
    """Check that all parameters with optimizer state have the same tensors."""
    keys = set().union(*moments.values())
    if len(keys) > _MAX_KEYS:
        raise PackingError(f"a packed state has {len(keys)} tensors of its optimizer for a parameter, over {_MAX_KEYS}")
    for name, tensors in sorted(moments.items()):
        if lacking := sorted(keys - tensors):
            raise PackingError(f"a packed state has {lacking[0]} of other parameters, and none of {name!r}")


def layout(
    specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header of a safetensors document with such tensors, and each tensor's span after it, in order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    # The widest first, as the library does it: each tensor is aligned.
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        spans[name] = (begin, end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text, spans


class SafetensorsHeader(NamedTuple):
    """The header of a safetensors document."""

    specs: dict[str, Spec]
    spans: dict[str, tuple[int, int]]
    """each tensor's span after the header, unchecked"""
    metadata: dict[str, str]


def header_of(text: bytes) -> SafetensorsHeader:
    """Parse a header.

    :raises PackingError: if it is invalid.
    """
    try:
        tree = json.loads(text)
        metadata = dict(tree.pop("__metadata__", {}))
        specs = {name: (_DTYPES[entry["dtype"]], entry["shape"]) for name, entry in tree.items()}
        spans = {name: (entry["data_offsets"][0], entry["data_offsets"][1]) for name, entry in tree.items()}
        for _, shape in specs.values():
            if len(shape) > _MAX_SIDES or any(type(side) is not int or side < 0 for side in shape):
                raise ValueError("invalid dimensions")
            if math.prod(side for side in shape if side) >= _LARGEST:  # some may be absurd although one is 0
                raise ValueError(f"a tensor with {_LARGEST} or more elements")
        if any(type(offset) is not int for span in spans.values() for offset in span):
            raise ValueError("an offset that is not an integer")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PackingError(f"header of a packed state: {type(error).__name__}, {str(error)[:80]!r}") from None
    return SafetensorsHeader(specs, spans, metadata)


def _check_digests(named: dict[str, Tensor]) -> None:
    """Remove the digests and check all other tensors against them."""
    digests = named.pop("sha256", None)
    if digests is None or (digests.dtype, digests.shape) != (torch.uint8, (len(named), DIGEST_BYTES)):
        raise PackingError("a packed state has a digest of each of its tensors")
    for name, expected in zip(sorted(named), digests, strict=True):
        require_digest(name, named[name], expected.numpy().tobytes())


def weights_digest(rows: Mapping[str, bytes]) -> str:
    """Return one digest (hex) of all weights of a state, from each entry's :func:`digest`, or an empty string if there
    are none.

    It is equal for two states exactly if all their weights are, bit for bit.
    """
    weight_rows = [row for name, row in sorted(rows.items()) if name.startswith("weights.")]
    return hashlib.sha256(b"".join(weight_rows)).hexdigest() if weight_rows else ""


def require_digest(name: str, tensor: Tensor, expected: bytes) -> None:
    """:raises PackingError: if an entry does not have this digest."""
    if digest(name, tensor) != expected:
        raise PackingError(f"{name!r} of a packed state is damaged: it does not have its digest")


def digest(name: str, tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's name, type, shape and bytes."""
    hasher = start_digest(name, tensor.dtype, tensor.shape)
    hasher.update(_as_bytes(tensor).numpy().data)
    return hasher.digest()


def start_digest(name: str, dtype: torch.dtype, shape: Sequence[int]) -> hashlib._Hash:
    """Return a tensor's :func:`digest` before its bytes are added."""
    return hashlib.sha256(f"{name} {TYPES[dtype]} {list(shape)} ".encode(errors="surrogatepass"))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single number may have any stride
