"""Hugging Face's folders: a model that ``transformers`` can load, and Llama models that it has saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from planaria import digests, documents
from planaria.atomic import new_folder, refused
from planaria.config import ModelConfig
from planaria.errors import UserError
from planaria.model.foreign import assemble, checked_config
from planaria.model.stages import Llama

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LISTED = {"planaria": "sha256"}
"""what the weights' file says when a list of digests lies beside it"""
METADATA = {"format": "pt", **LISTED}
"""of an exported file of weights"""


def export_model(model: Llama, folder: Path, tokenizer_file: Path | None = None, end: int | None = None) -> None:
    """Write a model in memory as :func:`export_folder` does, in fp32."""

    def write(made: Path) -> None:
        state = {name: tensor.contiguous() for name, tensor in model.global_state().items()}
        save_file(state, made / WEIGHTS, metadata=METADATA)

    export_folder(model.config, folder, write, tokenizer_file, end)


def export_folder(
    config: ModelConfig,
    folder: Path,
    write: Callable[[Path], None],
    tokenizer_file: Path | None = None,
    end: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write config.json, generation_config.json, weights and, given a tokenizer.json, the tokenizer's files.

    ``write`` puts the weights, of type ``dtype``, into the folder that it is given. ``end`` is the id of the token that
    ends a text, where generation is to stop. The folder appears at once and whole.

    :raises UserError: when it exists and is not empty, cannot be written, or the tokenizer does not fit the model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"export: {folder} exists and is not an empty folder; remove it or export elsewhere")
    names = {} if tokenizer_file is None else _token_names(tokenizer_file, config)
    token, ids = None if end is None else names.get(end), {"bos_token_id": None, "eos_token_id": end}
    try:
        with new_folder(folder) as made:
            _write(made / "config.json", _to_config(config) | {"torch_dtype": dtype} | ids)
            _write(made / "generation_config.json", ids)
            write(made)
            if tokenizer_file is not None:
                shutil.copyfile(tokenizer_file, made / "tokenizer.json")
                _write(made / "tokenizer_config.json", _tokenizer_config(config, token))
            digests.accept(made, [file.name for file in made.iterdir()])
    except (SafetensorError, OSError) as error:
        raise UserError(f"export: {refused(folder, error)}; make room, or export elsewhere") from error


def import_model(folder: Path) -> Llama:
    """The Llama in a Hugging Face folder, its weights as fp32; one safetensors file or several with an index.

    :raises UserError: on missing or damaged files and on what this LLaMA does not have: other architectures, scaled
        rotary positions, biases, heads that do not split the width evenly.
    """
    if sums := digests.read(folder):  # it was exported here
        digests.require(folder, sums, sums)
    place = folder / "config.json"
    config = _from_config(place, _read(place))
    state: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                if not sums and LISTED.items() <= (opened.metadata() or {}).items():
                    mend = f"bring it back, or make it anew with `planaria accept {folder}`"
                    raise UserError(f"{folder / digests.FILE}: is gone; {mend}")
                state.update((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not a readable safetensors file ({error}); download it again") from error
    # Older files repeat what follows from the config: a tied head, and the rotary frequencies.
    redundant = [n for n in state if n.endswith("rotary_emb.inv_freq") or (config.tied and n == "lm_head.weight")]
    for name in redundant:
        del state[name]
    return assemble(folder, config, state)


def is_exported(folder: Path) -> bool:
    """Are there weights as in Hugging Face's folders?"""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def is_ours(folder: Path) -> bool:
    """Whether :func:`import_model` knows the architecture of a Hugging Face folder; its weights are not looked at."""
    place = folder / "config.json"
    try:
        _from_config(place, _read(place))
    except UserError:
        return False
    return True


def _to_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _from_config(place: Path, found: dict[str, Any]) -> ModelConfig:
    _refuse_unsupported(place, found)
    rope = found.get("rope_parameters") or {}
    values = {
        "vocab": found.get("vocab_size"),
        "dim": found.get("hidden_size"),
        "layers": found.get("num_hidden_layers"),
        "heads": found.get("num_attention_heads"),
        "kv_heads": found.get("num_key_value_heads"),
        "hidden": found.get("intermediate_size"),
        "context": found.get("max_position_embeddings", 2048),
        "rope_theta": rope.get("rope_theta", found.get("rope_theta", 10000.0)),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "tied": found.get("tie_word_embeddings", False),
        "init_std": found.get("initializer_range", 0.02),
    }
    config = checked_config(place, values)
    if found.get("head_dim") not in (None, config.head_dim):
        raise UserError(f"{place}: head_dim = {found['head_dim']} must be hidden_size / num_attention_heads")
    return config


def _refuse_unsupported(place: Path, found: dict[str, Any]) -> None:
    """Anything that would change the numbers without a tensor to show for it must not pass silently."""
    if found.get("model_type") != "llama" or found.get("architectures", ["LlamaForCausalLM"]) != ["LlamaForCausalLM"]:
        kind = found.get("architectures") or found.get("model_type")
        raise UserError(f"{place}: architecture {kind} is not supported; give a LlamaForCausalLM")
    rope = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))) != "default":
        raise UserError(f"{place}: rope_scaling of type {kind!r} is not supported; only plain rotary positions are")
    for key, plain in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if found.get(key, plain) != plain:
            raise UserError(f"{place}: {key} = {found[key]!r} is not supported; this LLaMA has {key} = {plain!r}")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there; give a folder with safetensors weights")
    names = _read(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise UserError(f"{folder / INDEX}: weight_map must give a file of this folder for every tensor")
    files = [folder / name for name in sorted(set(names.values()))]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]}: missing, though {INDEX} names it; download it too")
    return files


def _token_names(file: Path, config: ModelConfig) -> dict[int, str]:
    """The tokens of a tokenizer.json by id."""
    found = _read(file)
    vocab, added = (found.get("model") or {}).get("vocab"), found.get("added_tokens") or []
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
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }


def _read(file: Path) -> dict[str, Any]:
    found = documents.parse_json(documents.data(file, mend="is the path right?"), file)
    if not isinstance(found, dict):
        raise UserError(f"{file}: not a JSON object")
    return found


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
