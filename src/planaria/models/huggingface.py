"""Hugging Face folders: export a model for ``transformers``, and open Llama models that it saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from planaria.common import digests, documents
from planaria.common.atomic import new_folder, write_error
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.foreign_weights import WeightsFile
from planaria.models.hf_config import Unsupported, from_config, to_config
from planaria.models.llama_stages import Llama
from planaria.models.model_metadata import (
    BASE_CONFIG,
    CLASS,
    CONFIG,
    GENERATION,
    SETTINGS,
    ModelMetadata,
    metadata_of_folder,
    write_json,
)
from planaria.models.moe_layer import ExpertRouting, from_file, from_keys, to_file
from planaria.models.transformers.adapters import ADAPTERS

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
DTYPES = ("F32", "BF16", "F16")
"""supported types of weights"""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
LISTED = {"planaria": "sha256"}
"""metadata of a weights file that has a list of digests beside it"""
METADATA = {"format": "pt", **LISTED}
"""metadata of an exported weights file"""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096
"""rows of the embedding table and the head compared together"""
Files = dict[str, tuple[Path, str]]
"""global name → file, and the tensor's name in it"""


def export_model(
    model: Llama,
    folder: Path,
    tokenizer_file: Path | None = None,
    end: int | None = None,
    used: ModelMetadata | None = None,
) -> None:
    """Export a model in memory as :func:`export_folder` does, in fp32."""

    def write(unfinished: Path) -> None:
        named = to_file if model.routing else str
        state = {named(name): tensor.contiguous() for name, tensor in model.global_state().items()}
        save_file(state, unfinished / WEIGHTS, metadata=METADATA)

    export_folder(model.config, folder, write, tokenizer_file, end, routing=model.routing, used=used)


def export_folder(
    config: ModelConfig,
    folder: Path,
    write: Callable[[Path], None],
    tokenizer_file: Path | None = None,
    end: int | None = None,
    dtype: str = "float32",
    routing: ExpertRouting | None = None,
    used: ModelMetadata | None = None,
) -> None:
    """Write config.json (of adapters: base_config.json), generation_config.json, weights and, given a tokenizer.json,
    the tokenizer's files, atomically.

    ``write`` writes the weights, of type ``dtype``, into ``folder``. ``end`` is the id of the token that ends
    generation. ``used`` is the usage of the model from which training started: its context, special tokens, generation
    settings and chat template replace the defaults.

    :raises UserError: if the folder exists and is not empty, cannot be written, or the tokenizer does not match the
        model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"export: {folder} exists and is not an empty folder; remove it or export elsewhere")
    names = {} if tokenizer_file is None else _token_names(tokenizer_file, config)
    token, ids = None if end is None else names.get(end), {"bos_token_id": None, "eos_token_id": end}
    try:
        with new_folder(folder) as unfinished:
            kept = {} if used is None else used.config(config.context)
            name = BASE_CONFIG if config.lora.rank else CONFIG
            write_json(unfinished / name, to_config(config, routing) | {"torch_dtype": dtype} | ids | kept)
            write_json(unfinished / GENERATION, ids)
            write(unfinished)
            if tokenizer_file is not None:
                shutil.copyfile(tokenizer_file, unfinished / TOKENIZER)
                write_json(unfinished / SETTINGS, _tokenizer_config(config, token))
            if used is not None:
                used.write(unfinished)
            digests.replace_list(unfinished, [file.name for file in unfinished.iterdir()])
    except (SafetensorError, OSError) as error:
        raise UserError(f"export: {write_error(folder, error)}; make room, or export elsewhere") from error


def open_folder(folder: Path) -> WeightsFile:
    """Open the Llama in a Hugging Face folder, or a routed model that was exported: one safetensors file or several
    with an index.

    A head that differs from the embedding table is kept, whatever ``tie_word_embeddings`` is.

    :raises UserError: for missing or damaged files and features that this LLaMA does not support (``hf_config.py``).
    """
    if sums := digests.read(folder):  # it was exported here
        digests.require(folder, sums, sums)
    path = folder / "config.json"
    table = documents.read_json_object(path)
    config, routing = from_config(path, table), from_keys(path, table)
    if routing is not None and not routing.bias and not sums:  # its missing keys have other defaults
        raise Unsupported(f"{path}: this Mixtral was not exported here; use model.family = 'transformers'")
    shapes, files = tensor_shapes(folder, from_file if routing else str, exported=bool(sums))
    if config.tied and HEAD in files:
        if TABLE in files and shapes[HEAD] == shapes[TABLE] and _are_equal(files[HEAD], files[TABLE], shapes[HEAD][0]):
            del shapes[HEAD], files[HEAD]
        else:
            config = config.model_copy(update={"tied": False})

    used = metadata_of_folder(folder, table, config.context)
    return WeightsFile(
        folder, config, shapes, partial(read_tensor, files), tokenizer_of(folder), routing=routing, usage=used
    )


def tokenizer_of(folder: Path) -> Path | None:
    """Return the folder's tokenizer.json, or None if it has none."""
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None


def tensor_shapes(
    folder: Path, renamed: Callable[[str], str], exported: bool, file: str = ""
) -> tuple[dict[str, tuple[int, ...]], Files]:
    """Return the shape of every tensor in a folder's safetensors files, and its offset, by its ``renamed`` name.

    ``exported``: whether the folder has a list of digests; ``file``: the only file to read.

    :raises UserError: if a file is missing, damaged, a pickle, or has tensors of another type.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files: Files = {}
    for path in [folder / file] if file else _weight_files(folder):
        with _open(path) as opened:
            if not exported and LISTED.items() <= (opened.metadata() or {}).items():
                fix = f"restore it, or create it again with `planaria run check {folder} --accept`"
                raise UserError(f"{folder / digests.FILE} is missing; {fix}")
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if name.endswith("rotary_emb.inv_freq"):  # older files repeat what follows from the config
                    continue
                stored = opened.get_slice(name)
                if stored.get_dtype() not in DTYPES:
                    raise UserError(f"{path}: {name} is {stored.get_dtype()}; weights in {', '.join(DTYPES)} are read")
                shapes[renamed(name)], files[renamed(name)] = tuple(stored.get_shape()), (path, name)
    return shapes, files


def read_tensor(files: Files, name: str) -> Tensor:
    """Return a tensor named by :func:`tensor_shapes`, in its own memory."""
    file, theirs = files[name]
    with _open(file) as opened:  # closed again, it keeps no pages of the file in memory
        tensor: Tensor = opened.get_tensor(theirs)
        return tensor.clone()


def _are_equal(left: tuple[Path, str], right: tuple[Path, str], rows: int) -> bool:
    """Return whether two matrices in safetensors files are equal, with few rows in memory at a time."""
    with _open(left[0]) as first, _open(right[0]) as second:
        matrices = [opened.get_slice(name) for opened, (_, name) in ((first, left), (second, right))]
        starts = range(0, rows, _ROWS)
        return all(torch.equal(*(matrix[at : at + _ROWS].float() for matrix in matrices)) for at in starts)


def import_model(folder: Path) -> Llama:
    """Load the model in a Hugging Face folder into memory, as fp32."""
    return open_folder(folder).model()


def is_exported(folder: Path) -> bool:
    """Whether a folder has Hugging Face's weights, or adapters."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX, ADAPTERS))


def is_huggingface(folder: Path) -> bool:
    """Whether a folder is Hugging Face's, with weights of any kind or none; a run's config.json names no model type."""
    weights = any((folder / name).exists() for name in (WEIGHTS, INDEX, ADAPTERS, *PICKLED))
    path = folder / "config.json"
    return weights or (path.is_file() and "model_type" in documents.read_json_object(path))


def is_ours(folder: Path) -> bool:
    """Whether a Hugging Face folder's config.json is a plain LLaMA's; weights are not read."""
    path = folder / "config.json"
    try:
        table = documents.read_json_object(path)
        from_config(path, table)
        return from_keys(path, table) is None
    except UserError:
        return False


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error}); download it again") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if pickled := [name for name in PICKLED if not (folder / INDEX).is_file() and (folder / name).exists()]:
        fix = "convert them to safetensors (`save_pretrained` of transformers writes them)"
        raise UserError(f"{folder / pickled[0]}: weights of a pickle are not read, for it could run any code; {fix}")
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there; use a folder with safetensors weights")
    names = documents.read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise UserError(f"{folder / INDEX}: weight_map must name a file of this folder for every tensor")
    files = [folder / name for name in sorted(set(names.values()))]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing, though {INDEX} names it; download it too")
    return files


def _token_names(file: Path, config: ModelConfig) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by id."""
    tree = documents.read_json_object(file)
    vocab, added = (tree.get("model") or {}).get("vocab"), tree.get("added_tokens") or []
    if isinstance(vocab, list):  # a unigram model's (token, score) pairs in the order of their ids
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    if not isinstance(vocab, dict):
        raise UserError(f"{file}: not a tokenizer.json (it has no model.vocab)")
    names: dict[int, str] = {i: token for token, i in vocab.items()} | {t["id"]: t["content"] for t in added}
    if (last := max(names, default=0)) >= config.vocab:
        raise UserError(f"{file}: its ids go up to {last}, but the model has rows for {config.vocab} tokens only")
    return names


def _tokenizer_config(config: ModelConfig, end: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": CLASS,
        "model_max_length": config.context,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
