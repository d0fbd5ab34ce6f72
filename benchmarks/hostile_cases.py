"""Recipes, flags, topologies, traces and schedules that somebody wrote to see what happens; the same for one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it again and again\n" * 60
GOOD = """engine = "inline"
[model]
vocab = 300
dim = 32
layers = 4
heads = 4
hidden = 64
context = 32
[pipeline]
stages = 4
microbatches = 4
microbatch_size = 2
[network]
forward_s = [0.01, 0.02, 0.02, 0.02, 0.02]
backward_s = [0.02, 0.04, 0.04, 0.04, 0.04]
bandwidth = 1e8
store_bandwidth = 1e8
[data]
source = "{home}/text.txt"
tokenizer = "bytes"
cache = "{home}/cache"
[train]
steps = 2
eval_every = 1
"""
COMPARE = """
[compare]
seeds = [1]
[compare.trace]
hourly = 0.1
step_s = 10.0
[compare.arms.copies]
recovery.strategy = "echo"
"""
EXPERTS = """engine = "inline"
[model]
vocab = 257
dim = 32
layers = 2
heads = 4
context = 32
[pipeline]
stages = 1
microbatches = 1
[data]
tokenizer = "bytes"
[train]
eval_every = 0
[experts]
sizes = { S = 16, M = 32, L = 48 }
steps = [1, 2, 3]
seed = { steps = 2 }
probe = { steps = 1, by = ["probe"] }
[experts.domains]
one = { source = "text.txt", hand = 0 }
two = { source = "text.txt", hand = 1 }
three = { source = "text.txt", hand = 2 }
"""
SWARM = "size = 2\nrounds = { count = 1, prompts = 4, group = 4 }\nschool = { steps = 1 }\n"
DRILL = SWARM + '[drill]\nseeds = [1]\n[drill.arms.open]\nattack = { kind = "none" }\n'
TOPOLOGY = """matrix = "twelve_cities"
[[nodes]]
site = "London"
count = 3
[[nodes]]
site = "Iowa"
count = 3
"""
TRACE = '{"faults": [{"step": 1, "stage": 2}]}'
KINDS = {
    "train": (GOOD, ["train", "--dry-run"]),
    "plan": (GOOD, ["plan"]),
    "advise": (GOOD, ["advise"]),
    "compare": (GOOD + COMPARE, ["compare", "--quiet"]),
    "experts": (EXPERTS, ["experts", "--dry-run"]),
    "swarm": (SWARM, ["swarm", "--dry-run"]),
    "drill": (DRILL, ["drill", "--quiet"]),
}
"""command → its recipe, and the words before that"""
VALUES = (
    *("1000000000", "-1", "0", "1e308", "1e-300", "1e-9", "nan", "inf", "-inf", "true", "[]", "{}", "''", "none"),
    *("[[[[0]]]]", "[1, 2, 3]", "1979-05-27", "{a = {b = 1}}", "../../..", "/dev/zero", "/proc/self/mem"),
    *("[" * 3000, "9" * 5000, "9" * 19, "0x" + "f" * 5000, "x" * 70000),
    *('"\\u0000"', '"\\ud800"', "\udcff", "a\nb", "\u202e", "\x1b[2J"),
)
"""what a flag is given, whatever it is for"""
PATHS = ("HOME", "HOME/text.txt", "/dev/zero", "/dev/null", "/proc/self/mem", "x" * 5000, "\udcff.toml", "a\nb", "")
READERS = frozenset(("train", "plan", "advise"))
"""commands that read the same kind of recipe"""
FURTHER = {"export": ("--to", "HOME/x"), "generate": ("--prompt", "a"), "chaos": ("--kill", "stage=1")}
"""what a command needs beside a run"""


@dataclass(frozen=True)
class Case:
    """One command line, and the files that it is given, below a folder of its own."""

    name: str
    words: tuple[str, ...]
    """HOME stands for the folder"""
    files: tuple[tuple[str, bytes], ...] = ()
    refused: bool = False
    """must it be refused? Otherwise it may be taken too, if that is an answer"""

    def arguments(self, home: Path) -> list[str]:
        """The words as they are to be given, its files written."""
        for name, content in self.files:
            (home / name).write_bytes(content)
        return [word.replace("HOME", str(home)) for word in self.words]


def prepare(home: Path) -> None:
    """What is right beside what is wrong: a text, recipes, a topology, a trace, a schedule."""
    from benchmarks.command import carry_out

    (home / "text.txt").write_text(TEXT)
    for name, (text, _) in KINDS.items():
        (home / f"{name}.toml").write_text(text.replace("{home}", str(home)))
    (home / "topology.toml").write_text(TOPOLOGY)
    (home / "trace.json").write_text(TRACE)
    words = ["plan", "train.toml", "--network.topology", "topology.toml", "--routing.data_nodes", "2", "--budget"]
    said = carry_out([_at(home, w) for w in words] + ["50moves", "--quiet", "--to", str(home / "schedule.json")], 120)
    assert said.code == 0, said.err


def cases(home: Path, seed: int, values: int = 2) -> list[Case]:
    """All cases, with so many values for each flag of a recipe."""
    draw = random.Random(f"hostile {seed}")
    made = [*_flags(draw, values), *_recipes(home, draw), *_kinds(), *_topologies(draw), *_traces(), *_schedules(home)]
    return [*made, *_further()]


def _at(home: Path, word: str) -> str:
    return str(home / word) if (home / word).exists() else word


def _flags(draw: random.Random, values: int) -> Iterator[Case]:
    """Every setting of a recipe, with values that it was not made for."""
    from planaria.config.recipe import fields
    from planaria.config.schema import RunConfig
    from planaria.swarm.config import SwarmConfig

    for command, root in (("train", RunConfig), ("swarm", SwarmConfig)):
        for field, _ in fields(root):
            for value in draw.sample(VALUES, values):
                words = (command, f"HOME/{command}.toml", "--dry-run", f"--{field}={value}")
                yield Case(f"{command} --{field}={value[:20]!r}", words)


def _documents(good: str) -> dict[str, bytes]:
    """What somebody may give for a TOML document."""
    text = good.encode()
    return {
        "empty": b"",
        "binary": bytes(range(256)) * 8,
        "latin-1": text + '\n# Grüße\nprompt = "ü"\n'.encode("latin-1"),
        "utf-16": good.encode("utf-16"),
        "cut": text[: len(text) // 2] + b"[",
        "deep": text + b"\n[deep]\na = " + b"[" * 20000,
        "deep tables": text + b"\n[deep]\na = " + b"{a = " * 5000,
        "deep keys": b".".join([b"a"] * 20000) + b" = 1\n" + text,
        "digits": b"seed = " + b"9" * 5000 + b"\n" + text,
        "nul": b'name = "a\x00b"\n' + text,
        "spelt nul": b'name = "a\\u0000b"\n' + text,
        "surrogate": b'name = "\\ud800"\n' + text,
        "newlines": b'"a\\nb" = 1\n' + text,
        "escape": b'name = "\\u001b[2J\\n\\n"\n' + text,
        "long name": b'name = "' + b"x" * 5000 + b'"\n' + text,
        "large": text + b"\n#" + b"x" * (2 << 20),
        "huge value": b'name = ["' + b"x" * 200000 + b'"]\n' + text,
        "list of tables": b"[[model]]\nvocab = 3\n",
    }


def _recipes(home: Path, draw: random.Random) -> Iterator[Case]:
    for command, (_, words) in KINDS.items():
        good = (home / f"{command}.toml").read_text()
        for name, content in _documents(good).items():
            if command == "advise" and name in ("escape", "long name"):
                continue  # it is taken, and good advice takes its time
            files = (("bad.toml", content),)
            taken = name in ("empty", "escape", "long name") or command == "compare"
            yield Case(f"{command}: {name}", (words[0], "HOME/bad.toml", *words[1:]), files, not taken)
    for command, (_, words) in KINDS.items():
        for path in draw.sample(PATHS, 4):
            yield Case(f"{command} {path[:20]!r}", (words[0], path, *words[1:]), refused=True)


def _kinds() -> Iterator[Case]:
    """Recipes of one kind for another's command."""
    for command, (_, words) in KINDS.items():
        for other in KINDS.keys() - (READERS if command in READERS else {command}):
            if not (command == "compare" and other in READERS):
                yield Case(f"{command} {other}.toml", (words[0], f"HOME/{other}.toml", *words[1:]), refused=True)


def _topologies(draw: random.Random) -> Iterator[Case]:
    of = ("plan", "HOME/train.toml", "--network.topology", "HOME/bad.toml", "--routing.data_nodes", "2")
    plan = (*of, "--budget", "50moves", "--quiet", "--to", "HOME/out.json")
    for name, content in _documents(TOPOLOGY).items():
        yield Case(f"topology: {name}", plan, (("bad.toml", content),), name != "large")
    for key in ("count", "speed", "memory", "site", "role"):
        for value in ("1000000000", "-1", "0", "1e308", "1e-300", "nan", "9" * 5000, '""', '"\\u0000"', "[]"):
            told = f'matrix = "twelve_cities"\n[[nodes]]\nsite = "London"\ncount = 8\n{key} = {value}\n'
            told = told.replace("count = 8\ncount", "count").replace('site = "London"\nsite', "site")
            yield Case(f"topology: {key} = {value[:10]}", plan, (("bad.toml", told.encode()),))
    table = 'matrix = { latency_ms = "l.csv", bandwidth_mbit = "b.csv" }\n'
    table += "".join(f'[[nodes]]\nsite = "{site}"\ncount = 3\n' for site in "AB")
    good = b",A,B\nA,,1\nB,1,\n"
    for cell in ("1e-9", "1e-300", "1e308", "-1", "nan", "9" * 5000, "", "\x00", "x", '"', "1,1,1,1"):
        for bad in ("l.csv", "b.csv"):
            broken = f",A,B\nA,,{cell}\nB,{cell},\n".encode()
            files = {"l.csv": good, "b.csv": good, bad: broken, "bad.toml": table.encode()}
            yield Case(f"{bad}: {cell[:8]!r}", plan, tuple(files.items()))
    for content in (b"", b"\xff\xfe", b",A\n", b"A,B\n" * 9999, b"," * 100000):
        files = {"l.csv": content, "b.csv": good, "bad.toml": table.encode()}
        yield Case(f"l.csv: {content[:6]!r}", plan, tuple(files.items()), refused=True)


def _traces() -> Iterator[Case]:
    fault = {"step": 1, "stage": 2}
    odd = [
        *("", "[]", "null", "{", "{}", "[" * 20000, '{"faults": ' + "[" * 20000, '{"faults": [' + "9" * 5000 + "]}"),
        *(
            '{"faults": [{"step": 1, "stage": 2, "signal": "\\ud800"}]}',
            '{"faults": [{"step": 1, "stage": 2}], "x": 1}',
        ),
        *(json.dumps({"faults": [fault | {k: v}]}) for k in fault for v in (-1, 1e308, 10**18, "1", None, True, [])),
        *(json.dumps({"faults": [fault | {"offset": v}]}) for v in (-0.1, 1, 1e308, "0")),
        *(json.dumps({"faults": [fault | {"resume_after_s": v, "signal": "stop"}]}) for v in (0, -1, 1e308)),
        json.dumps({"faults": [fault] * 3, "version": 2}),
    ]
    words = ("train", "HOME/train.toml", "--out", "HOME/none", "--quiet", "--chaos.trace", "HOME/bad.json")
    for number, text in enumerate(odd):
        if '"stage": 1000000000000000000' in text or ('"step": 1000000000000000000' in text and '"stage": 2' in text):
            continue  # far away, and right: it never strikes
        refused = 'resume_after_s": 1e+308' not in text
        yield Case(f"trace {number}: {text[:30]}", words, (("bad.json", text.encode()),), refused)
    for content in (b"\xff\xfe", b"\x00" * 64, TRACE.encode("utf-16"), TRACE.encode() + b"\xff"):
        yield Case(f"trace: {content[:8]!r}", words, (("bad.json", content),), True)


def _schedules(home: Path) -> Iterator[Case]:
    tree = json.loads((home / "schedule.json").read_text())
    words = ("train", "HOME/train.toml", "--dry-run", "--routing.schedule", "HOME/bad.json")
    for key in tree:
        for value in (None, -1, 10**18, 1e308, [], [[]], {}, "\x00", [[10**9]]):
            text = json.dumps(tree | {key: value})
            yield Case(f"schedule: {key} = {str(value)[:12]}", words, (("bad.json", text.encode()),))
    for content in (b"", b"[" * 30000, b"\xff", json.dumps(tree).encode()[:-9], b'{"a": ' * 9999, b"9" * 5000):
        yield Case(f"schedule: {content[:8]!r}", words, (("bad.json", content),), True)


def _words(said: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for key, text in said.items() for word in (f"--{key}", text))


def _further() -> Iterator[Case]:
    """Flags of commands that read no recipe, and runs that are none."""
    trace = {"hourly": "0.1", "step-seconds": "10", "stages": "4", "steps": "100"}
    for flag in trace:
        for value in ("1000000000", "-1", "nan", "inf", "1e-300", "9" * 5000, "", "x"):
            given = _words(trace | {flag: value})
            yield Case(f"trace --{flag} {value[:12]}", ("trace", "HOME/out.json", *given))
    for seed in ("-1", "9" * 30, "9" * 5000):
        yield Case(f"trace --seed {seed[:6]}", ("trace", "HOME/out.json", *_words(trace), f"--seed={seed}"))
    for command in ("report", "replay", "export", "eval", "generate", "chaos", "join", "accept", "swarm explain"):
        more = FURTHER.get(command, ())
        for path in PATHS:
            yield Case(f"{command} {path[:10]!r}", (*command.split(), path, *more), refused=True)
    for budget in ("1e999s", "-1s", "0s", "9" * 5000 + "s", "nan", "0.0moves"):
        words = ("plan", "HOME/train.toml", "--network.topology", "HOME/topology.toml", f"--budget={budget}")
        yield Case(f"plan --budget {budget[:8]}", words, refused=True)
