"""What lies in a folder that is about to be given away: weights as safetensors, plain text, and nothing that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.models.huggingface import is_ours, open_folder

WEIGHTS = (".safetensors",)
TEXTS = (".json", ".jinja", ".md", ".txt", ".sha256", ".model")
"""settings, templates, tokenizers, words for people"""
NAMES = ("LICENSE", "NOTICE", "README", ".gitattributes", ".gitignore")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".joblib", ".msgpack")
CODE = (".py", ".pyc", ".so", ".sh", ".js", ".exe", ".dll", ".dylib", ".ipynb", ".whl", ".zip", ".tar", ".gz")
MOST = 10_000
"""files of a folder that are looked at"""


@dataclass(frozen=True)
class Looked:
    """``faults``: what must not go out; ``facts``: what there is."""

    faults: tuple[str, ...]
    facts: tuple[str, ...]


def look(place: Path) -> Looked:
    """Into a model's folder, or at its one file; nothing in it is run or unpickled.

    :raises UserError: when it holds more files than anybody looks through.
    """
    if place.is_file():
        gguf = place.suffix == ".gguf"
        return Looked(() if gguf else (f"{place.name}: neither a folder nor a GGUF file",), (place.name,) * gguf)
    files = []
    for file in place.rglob("*"):
        if file.is_symlink() or not file.is_dir():  # links to folders are not gone into, and may not go out
            files.append(file)
        if len(files) > MOST:
            raise UserError(f"{place}: holds more than {MOST} files; give the model's own folder")
    names = {file.relative_to(place).as_posix(): file for file in sorted(files)}
    faults = [fault for name, file in names.items() if (fault := _fault(name, file))]
    listed, facts = _listed(place, names)
    stated, shapes = _stated(place)
    return Looked((*faults, *listed, *stated), (*facts, *shapes))


def _fault(name: str, file: Path) -> str:
    """Why a file must not go out; empty if it may."""
    suffix = file.suffix.lower()
    if not file.is_file():
        return f"{name}: is no file"
    if suffix in WEIGHTS and not _is_safetensors(file):
        return f"{name}: no safetensors, whatever its name says"
    if suffix in PICKLES:
        return f"{name}: weights or data in a form that can run code; convert them to safetensors"
    if suffix in CODE:
        return f"{name}: code, or an archive that may hold some"
    if suffix not in WEIGHTS + TEXTS and file.name not in NAMES:
        return f"{name}: nothing that belongs beside weights"
    if suffix == ".json" and _calls_code(file):
        return f"{name}: has an auto_map, which has programs fetched and run"
    return ""


def _is_safetensors(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _calls_code(file: Path) -> bool:
    try:
        found = documents.parse_json(documents.data(file), file)
    except UserError:
        return False  # whoever reads it says what is wrong with it
    return isinstance(found, dict) and bool(found.get("auto_map"))


def _listed(place: Path, names: dict[str, Path]) -> tuple[list[str], list[str]]:
    """Faults and facts of the list of digests."""
    try:
        sums = digests.read(place)
        if not sums:
            return [], ["no list of digests"]
        unlisted = [name for name in names if name not in sums and name != digests.FILE]
        digests.require(place, sums, sums)
    except UserError as error:
        return [str(error)], []
    faults = [f"{name}: {digests.FILE} does not name it, so something else wrote it" for name in unlisted]
    return faults, [] if faults else [f"{len(sums)} files are as {digests.FILE} says"]


def _stated(place: Path) -> tuple[list[str], list[str]]:
    """Faults and facts of shapes, against what config.json states."""
    try:
        if not is_ours(place):
            return [], ["no LLaMA of ours: shapes are looked at when it is opened"]
        weights = open_folder(place)
    except UserError as error:
        return [str(error)], []
    return [], [f"{len(weights.shapes)} tensors, shaped as config.json states"]
