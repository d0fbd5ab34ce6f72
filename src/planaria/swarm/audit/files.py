"""Check of a model folder before its release: weights as safetensors, plain text, and no code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.models.huggingface import is_ours, open_folder

WEIGHTS = (".safetensors",)
TEXTS = (".json", ".jinja", ".md", ".txt", ".sha256", ".model")
"""settings, templates, tokenizers, documentation"""
NAMES = ("LICENSE", "NOTICE", "README", ".gitattributes", ".gitignore")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".joblib", ".msgpack")
CODE = (".py", ".pyc", ".so", ".sh", ".js", ".exe", ".dll", ".dylib", ".ipynb", ".whl", ".zip", ".tar", ".gz")
MAX_FOLDER_FILES = 10_000
"""maximum number of files in a folder"""


@dataclass(frozen=True)
class FolderCheck:
    """Result of the check."""

    faults: tuple[str, ...]
    """reasons against a release"""
    facts: tuple[str, ...]


def check_files(path: Path) -> FolderCheck:
    """Check a model's folder or single file without running or unpickling any of it.

    :raises UserError: if it holds more than :data:`MAX_FOLDER_FILES` files.
    """
    if path.is_file():
        gguf = path.suffix == ".gguf"
        return FolderCheck(() if gguf else (f"{path.name}: neither a folder nor a GGUF file",), (path.name,) * gguf)
    files = []
    for file in path.rglob("*"):
        if file.is_symlink() or not file.is_dir():  # links to folders are not followed, and are faults
            files.append(file)
        if len(files) > MAX_FOLDER_FILES:
            raise UserError(f"{path} holds more than {MAX_FOLDER_FILES} files; use the model's own folder")
    names = {file.relative_to(path).as_posix(): file for file in sorted(files)}
    faults = [fault for name, file in names.items() if (fault := _fault(name, file))]
    listed, facts = _check_digests(path, names)
    stated, shapes = _check_shapes(path)
    return FolderCheck((*faults, *listed, *stated), (*facts, *shapes))


def _fault(name: str, file: Path) -> str:
    """Return why a file must not be released, or an empty string if there is no objection."""
    suffix = file.suffix.lower()
    if not file.is_file():
        return f"{name}: not a regular file"
    if suffix in WEIGHTS and not _is_safetensors(file):
        return f"{name}: not valid safetensors"
    if suffix in PICKLES:
        return f"{name}: a format that can run code; convert it to safetensors"
    if suffix in CODE:
        return f"{name}: code, or an archive that may contain code"
    if suffix not in WEIGHTS + TEXTS and file.name not in NAMES:
        return f"{name}: unexpected file type next to weights"
    if suffix == ".json" and _has_auto_map(file):
        return f"{name} has an auto_map, which downloads and runs code"
    return ""


def _is_safetensors(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def _has_auto_map(file: Path) -> bool:
    try:
        result = documents.parse_json(documents.read_bytes(file), file)
    except UserError:
        return False  # its reader reports the error
    return isinstance(result, dict) and bool(result.get("auto_map"))


def _check_digests(path: Path, names: dict[str, Path]) -> tuple[list[str], list[str]]:
    """Check the list of digests; return faults and facts."""
    try:
        sums = digests.read(path)
        if not sums:
            return [], ["no list of digests"]
        unlisted = [name for name in names if name not in sums and name != digests.FILE]
        digests.require(path, sums, sums)
    except UserError as error:
        return [str(error)], []
    faults = [f"{name}: not listed in {digests.FILE}, so written by another program" for name in unlisted]
    return faults, [] if faults else [f"{len(sums)} files match {digests.FILE}"]


def _check_shapes(path: Path) -> tuple[list[str], list[str]]:
    """Check tensor shapes against config.json; return faults and facts."""
    try:
        if not is_ours(path):
            return [], ["not a planaria LLaMA: its shapes are checked when it is opened"]
        weights = open_folder(path)
    except UserError as error:
        return [str(error)], []
    return [], [f"{len(weights.shapes)} tensors with the shapes of config.json"]
