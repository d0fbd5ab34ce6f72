"""Damage to what runs have left: which file, where in it, of what kind, and the command that meets it; seeded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hostile_cases import GOOD, TEXT, TRACE

Damage = Callable[[bytes, random.Random], bytes | None]
"""what becomes of a file; None: it is gone"""
PAGE = 4096


def _flip(content: bytes, low: int, high: int, draw: random.Random) -> bytes:
    """One bit flipped, somewhere from ``low`` to ``high``."""
    high = min(high, len(content))
    place = draw.randrange(max(0, min(low, high - 1)), high)
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(max(1, len(content) - PAGE))
    return content[:start] + bytes(min(PAGE, len(content) - start)) + content[start + PAGE :]


KINDS: dict[str, Damage] = {
    "gone": lambda content, draw: None,
    "empty": lambda content, draw: b"",
    "truncated": lambda content, draw: content[: draw.randrange(1, max(2, len(content) - 1))],
    "bit at the beginning": lambda content, draw: _flip(content, 0, 64, draw),
    "bit in the middle": lambda content, draw: _flip(content, len(content) // 3, 2 * len(content) // 3, draw),
    "bit near the end": lambda content, draw: _flip(content, len(content) - 64, len(content), draw),
    "a page of zeros": _zeroed,
    "no UTF-8": lambda content, draw: content[: len(content) // 2] + b"\xff\xfe" + content[len(content) // 2 :],
    "nested": lambda content, draw: b"[" * 30000,
    "digits": lambda content, draw: b'{"step": ' + b"9" * 5000 + b"}",
    "another's": lambda content, draw: b'{"format": 1, "name": "another"}\n',
    "twice": lambda content, draw: content + content,
}
LOGS = ("events.jsonl", "spans.jsonl", "metrics.jsonl")
"""written line by line while the run goes on: no digest covers them, what is no line is refused"""
MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Case:
    """One damaged file of one run, and the command that is given this run."""

    run: str
    file: str
    kind: str
    command: str
    read: bool
    """does the command need this file?"""

    @property
    def name(self) -> str:
        return f"{self.run}/{self.file}: {self.kind}: {self.command}"

    @property
    def log(self) -> bool:
        return Path(self.file).name in LOGS

    def damage(self, folder: Path, draw: random.Random) -> None:
        path = folder / self.file
        before = path.read_bytes()
        content = KINDS[self.kind](before, draw) if before else b"\x00"
        assert content != before, self.name
        path.unlink() if content is None else path.write_bytes(content)

    def arguments(self, folder: Path) -> list[str]:
        run = str(folder)
        return {
            "resume": ["train", "--resume", run, "--train.steps", "6", "--quiet"],
            "generate": ["generate", run, "--prompt", "the", "--tokens", "2"],
            "generate model": ["generate", f"{run}/model", "--prompt", "the", "--tokens", "2"],
            "export": ["export", run, "--to", f"{run}/exported"],
            "eval": ["eval", run, "--omit", "0.25", "--subsets", "1", "--microbatches", "1"],
            "report": ["report", run],
            "replay": ["replay", run],
        }[self.command]


def prepare(home: Path, fleet: bool = True) -> None:
    """Small real runs below ``home``: one replica, two, and (``fleet``) one on processes, all whole."""
    from benchmarks.command import carry_out

    (home / "text.txt").write_text(TEXT)
    (home / "trace.json").write_text(TRACE.replace('"step": 1', '"step": 9'))
    (home / "recipe.toml").write_text(GOOD.replace("{home}", str(home)))
    base = ["train", str(home / "recipe.toml"), "--out", str(home), "--quiet", "--train.steps", "4"]
    base += ["--checkpoint.every", "2", "--recovery.strategy", "checkpoint"]
    runs = {"single": ["--chaos.trace", str(home / "trace.json")]}
    runs["replicas"] = ["--exchange.replicas", "2", "--exchange.kind", "noloco", "--exchange.options.every", "1"]
    if fleet:
        runs["fleet"] = [
            "--engine",
            "fleet",
            "--pipeline.stages",
            "2",
            "--network.forward_s",
            "[]",
            "--network.backward_s",
            "[]",
        ]
    for name, more in runs.items():
        said = carry_out([*base, "--name", name, *more], 120)
        assert said.code == 0, said.err


def cases(home: Path, seed: int, count: int | None = None) -> list[Case]:
    """So many of all cases, drawn; each file, kind and command about as often as it is among all."""
    made = [case for run in ("single", "replicas", "fleet") if (home / run).is_dir() for case in _of(home / run)]
    random.Random(f"damage {seed}").shuffle(made)
    return made[:count]


def copied(home: Path, case: Case, place: Path) -> Path:
    """The case's run, whole, in a place of its own."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(home / case.run, place))


def _of(folder: Path) -> Iterator[Case]:
    for file, commands in _readers(folder).items():
        for kind in KINDS:
            for command in commands:
                yield Case(folder.name, file, kind, command, True)
    if folder.name == "fleet":
        return
    for file, command in (("data.json", "generate"), ("trace.json", "export"), ("spans.jsonl", "generate")):
        if (folder / file).exists():
            yield from (Case(folder.name, file, kind, command, False) for kind in KINDS)


def _readers(folder: Path) -> dict[str, tuple[str, ...]]:
    """File of a run → the commands that need it."""
    model, logs = ("resume", "generate", "export", "eval"), ("report", "replay")
    if folder.name == "fleet":  # its stages are read by other processes; they are inline ones' files
        return {"state.json": ("resume", "replay"), "events.jsonl": logs, "spans.jsonl": logs, "config.json": logs}
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    stages = [file.relative_to(folder).as_posix() for file in sorted(newest.rglob("*.safetensors"))]
    found = {
        "config.json": (*model, "report"),
        "planaria.sha256": (*model, "report"),
        "tokenizer.json": model,
        "data.json": ("resume", "eval"),
        "trace.json": ("resume", "eval"),
        **dict.fromkeys([f"{newest.relative_to(folder)}/manifest.json", *stages], model),
        **{f"model/{name}": ("generate model",) for name in MODEL},
        "model/planaria.sha256": ("generate model",),
        **dict.fromkeys(LOGS, ("report",)),
    }
    return {file: commands for file, commands in found.items() if (folder / file).exists()}
