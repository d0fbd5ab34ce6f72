"""Commands given hostile input or damaged files: no traceback, one line per refusal."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import signal
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Claim, Flag, Measurement, Row, benchmark, start
from planaria.cli import main
from planaria.cli.entry import program
from planaria.config.recipe import fields
from planaria.config.schema import RunConfig
from planaria.lab.commands.trace import trace as generate_trace
from planaria.swarm.config.swarm_config import SwarmConfig

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
SWARM = "size = 2\nrounds = { count = 1, prompts = 4, group = 4 }\nwarmup = { steps = 1 }\n"
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
    "experts": (EXPERTS, ["experts train", "--dry-run"]),
    "swarm": (SWARM, ["swarm train", "--dry-run"]),
    "drill": (DRILL, ["compare", "--quiet"]),
}
"""kind of recipe, or command that reads the kind train → a recipe; the command and its first arguments"""
VALUES = (
    *("1000000000", "-1", "0", "1e308", "1e-300", "1e-9", "nan", "inf", "-inf", "true", "[]", "{}", "''", "none"),
    *("[[[[0]]]]", "[1, 2, 3]", "1979-05-27", "{a = {b = 1}}", "../../..", "/dev/zero", "/proc/self/mem"),
    *("[" * 3000, "9" * 5000, "9" * 19, "0x" + "f" * 5000, "x" * 70000),
    *('"\\u0000"', '"\\ud800"', "\udcff", "a\nb", "\u202e", "\x1b[2J"),
)
"""values tried for every flag"""
PATHS = ("HOME", "HOME/text.txt", "/dev/zero", "/dev/null", "/proc/self/mem", "x" * 5000, "\udcff.toml", "a\nb", "")
TRACE_PROGRAM = "planaria.lab.commands.trace"
"""first word of a command line of this program instead of ``planaria``"""
READERS = frozenset(("train", "plan", "advise"))  # commands that read the same kind of recipe
FURTHER = {"export": ("--to", "HOME/x"), "generate": ("--prompt", "a"), "run chaos": ("--kill", "stage=1")}
"""further arguments that a command needs"""


@dataclass(frozen=True)
class Case:
    """One command line and the files it reads, in its own folder."""

    name: str
    words: tuple[str, ...]  # HOME stands for the folder
    files: tuple[tuple[str, bytes], ...] = ()
    refused: bool = False  # must be refused; otherwise it may also be accepted

    def arguments(self, home: Path) -> list[str]:
        for name, content in self.files:
            (home / name).write_bytes(content)
        return [word.replace("HOME", str(home)) for word in self.words]


def prepare(home: Path) -> None:
    """Write valid inputs: a text, recipes, a topology, a trace and a schedule."""
    (home / "text.txt").write_text(TEXT)
    for name, (text, _) in KINDS.items():
        (home / f"{name}.toml").write_text(text.replace("{home}", str(home)))
    (home / "topology.toml").write_text(TOPOLOGY)
    (home / "trace.json").write_text(TRACE)
    words = ["plan", "train.toml", "--network.topology", "topology.toml", "--routing.data_nodes", "2", "--budget"]
    done = carry_out([_at(home, w) for w in words] + ["50moves", "--quiet", "--to", str(home / "schedule.json")], 120)
    assert done.code == 0, done.err


def cases(home: Path, seed: int, values: int = 2) -> list[Case]:
    draw = random.Random(f"hostile {seed}")
    made = [*_flags(draw, values), *_recipes(home, draw), *_kinds(), *_topologies(draw), *_traces(), *_schedules(home)]
    return [*made, *_further()]


def _at(home: Path, word: str) -> str:
    return str(home / word) if (home / word).exists() else word


def _flags(draw: random.Random, values: int) -> Iterator[Case]:
    for command, root in (("train", RunConfig), ("swarm", SwarmConfig)):
        for field, _ in fields(root):
            for value in draw.sample(VALUES, values):
                words = (*KINDS[command][1][0].split(), f"HOME/{command}.toml", "--dry-run", f"--{field}={value}")
                yield Case(f"{command} --{field}={value[:20]!r}", words)


def _documents(good: str) -> dict[str, bytes]:
    """Malformed and unusual TOML documents."""
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
            taken = name in ("empty", "escape", "long name") or words[0] == "compare"
            yield Case(f"{command}: {name}", (*words[0].split(), "HOME/bad.toml", *words[1:]), files, not taken)
    for command, (_, words) in KINDS.items():
        for path in draw.sample(PATHS, 4):
            yield Case(f"{command} {path[:20]!r}", (*words[0].split(), path, *words[1:]), refused=True)


def _kinds() -> Iterator[Case]:
    for command, (_, words) in KINDS.items():
        for other in KINDS.keys() - (READERS if command in READERS else {command}):
            if not (words[0] == "compare" and other in (*READERS, "compare", "drill")):
                yield Case(
                    f"{command} {other}.toml", (*words[0].split(), f"HOME/{other}.toml", *words[1:]), refused=True
                )


def _topologies(draw: random.Random) -> Iterator[Case]:
    of = ("plan", "HOME/train.toml", "--network.topology", "HOME/bad.toml", "--routing.data_nodes", "2")
    plan = (*of, "--budget", "50moves", "--quiet", "--to", "HOME/out.json")
    for name, content in _documents(TOPOLOGY).items():
        yield Case(f"topology: {name}", plan, (("bad.toml", content),), name != "large")
    for key in ("count", "speed", "memory", "site", "role"):
        for value in ("1000000000", "-1", "0", "1e308", "1e-300", "nan", "9" * 5000, '""', '"\\u0000"', "[]"):
            topology = f'matrix = "twelve_cities"\n[[nodes]]\nsite = "London"\ncount = 8\n{key} = {value}\n'
            topology = topology.replace("count = 8\ncount", "count").replace('site = "London"\nsite', "site")
            yield Case(f"topology: {key} = {value[:10]}", plan, (("bad.toml", topology.encode()),))
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
        '{"faults": [{"step": 1, "stage": 2, "signal": "\\ud800"}]}',
        '{"faults": [{"step": 1, "stage": 2}], "x": 1}',
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


def _words(flags: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for key, text in flags.items() for word in (f"--{key}", text))


def _further() -> Iterator[Case]:
    """Flags of commands that read no recipe, and paths that are not runs."""
    trace = {"hourly": "0.1", "step-seconds": "10", "stages": "4", "steps": "100"}
    for flag in trace:
        for value in ("1000000000", "-1", "nan", "inf", "1e-300", "9" * 5000, "", "x"):
            given = _words(trace | {flag: value})
            yield Case(f"trace --{flag} {value[:12]}", (TRACE_PROGRAM, "HOME/out.json", *given))
    for seed in ("-1", "9" * 30, "9" * 5000):
        yield Case(f"trace --seed {seed[:6]}", (TRACE_PROGRAM, "HOME/out.json", *_words(trace), f"--seed={seed}"))
    for command in (
        "report",
        "run check",
        "export",
        "eval",
        "generate",
        "run chaos",
        "join",
        "run check --accept",
        "swarm show",
    ):
        more = FURTHER.get(command, ())
        for path in PATHS:
            yield Case(f"{command} {path[:10]!r}", (*command.split(), path, *more), refused=True)
    for budget in ("1e999s", "-1s", "0s", "9" * 5000 + "s", "nan", "0.0moves"):
        words = ("plan", "HOME/train.toml", "--network.topology", "HOME/topology.toml", f"--budget={budget}")
        yield Case(f"plan --budget {budget[:8]}", words, refused=True)


Damage = Callable[[bytes, random.Random], bytes | None]  # the damaged content; None: the file is removed
PAGE = 4096


def _flip(content: bytes, low: int, high: int, draw: random.Random) -> bytes:
    """Flip one bit between ``low`` and ``high``."""
    high = min(high, len(content))
    place = draw.randrange(max(0, min(low, high - 1)), high)
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(max(1, len(content) - PAGE))
    return content[:start] + bytes(min(PAGE, len(content) - start)) + content[start + PAGE :]


DAMAGE_KINDS: dict[str, Damage] = {
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
"""appended while the run continues: no digest covers them, malformed lines are refused"""
MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class DamageCase:
    """One damaged file of one run, and the command that reads the run."""

    run: str
    file: str
    kind: str
    command: str
    read: bool  # the command needs this file

    @property
    def name(self) -> str:
        return f"{self.run}/{self.file}: {self.kind}: {self.command}"

    @property
    def log(self) -> bool:
        return Path(self.file).name in LOGS

    def damage(self, folder: Path, draw: random.Random) -> None:
        path = folder / self.file
        before = path.read_bytes()
        content = DAMAGE_KINDS[self.kind](before, draw) if before else b"\x00"
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
            "replay": ["run", "check", run],
        }[self.command]


def prepare_damage(home: Path, fleet: bool = True) -> None:
    """Train small runs below ``home``: one replica, two, and with ``fleet`` one on processes."""
    (home / "text.txt").write_text(TEXT)
    (home / "trace.json").write_text(TRACE.replace('"step": 1', '"step": 9'))
    (home / "recipe.toml").write_text(GOOD.replace("{home}", str(home)))
    base = ["train", str(home / "recipe.toml"), "--out", str(home), "--quiet", "--train.steps", "4"]
    base += ["--checkpoint.every", "2", "--recovery.strategy", "checkpoint"]
    runs = {"single": ["--chaos.trace", str(home / "trace.json")]}
    runs["replicas"] = ["--exchange.replicas", "2", "--exchange.kind", "noloco", "--exchange.options.every", "1"]
    if fleet:
        unemulated = ["--network.forward_s", "[]", "--network.backward_s", "[]"]
        runs["fleet"] = ["--engine", "fleet", "--pipeline.stages", "2", *unemulated]
    for name, more in runs.items():
        done = carry_out([*base, "--name", name, *more], 120)
        assert done.code == 0, done.err


def damage_cases(home: Path, seed: int, count: int | None = None) -> list[DamageCase]:
    made = [case for run in ("single", "replicas", "fleet") if (home / run).is_dir() for case in _of(home / run)]
    random.Random(f"damage {seed}").shuffle(made)
    return made[:count]


def copied(home: Path, case: DamageCase, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(home / case.run, place))


def _of(folder: Path) -> Iterator[DamageCase]:
    for file, commands in _readers(folder).items():
        for kind in DAMAGE_KINDS:
            for command in commands:
                yield DamageCase(folder.name, file, kind, command, True)
    if folder.name == "fleet":
        return
    for file, command in (("data.json", "generate"), ("trace.json", "export"), ("spans.jsonl", "generate")):
        if (folder / file).exists():
            yield from (DamageCase(folder.name, file, kind, command, False) for kind in DAMAGE_KINDS)


def _readers(folder: Path) -> dict[str, tuple[str, ...]]:
    """Map the files of a run to the commands that need them."""
    model, logs = ("resume", "generate", "export", "eval"), ("report", "replay")
    if folder.name == "fleet":  # other processes read its stages, whose files are those of inline runs
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


class TooSlow(BaseException):
    """The command took too long; not an Exception, so that no command handles it."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. ``code`` -1: traceback; -2: no answer in time."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]

    @property
    def kind(self) -> bool:
        """Return True for a proper refusal: exit code 2 and one line."""
        return self.code == 2 and len(self.lines) == 1 and self.lines[0].startswith("planaria: ")


def carry_out(arguments: Sequence[str], limit_s: float = 30.0) -> CommandResult:
    """Run one command line for at most ``limit_s``; main thread only."""
    out, err, code, begin = io.StringIO(), io.StringIO(), 0, time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _within(limit_s):
                if arguments[0] == TRACE_PROGRAM:
                    program(generate_trace, TRACE_PROGRAM, arguments[1:])
                main(list(arguments))
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except TooSlow:
            code = -2
        except BaseException:
            traceback.print_exc()
            code = -1
    return CommandResult(code, out.getvalue(), err.getvalue(), time.monotonic() - begin)


@contextlib.contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise TooSlow if the block takes longer."""

    def ring(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure(done: CommandResult) -> str:
    """Return why the end of a command is no answer, or "" if it accepted its input or refused it in one line."""
    if done.code == -2:
        return "no answer"
    if done.code not in (0, 2) or "Traceback" in done.err:
        return "traceback"
    return "not one line" if done.code == 2 and not done.kind else ""


DRY_S = 5.0


def verdict(case: Case, home: Path, limit_s: float = 30.0) -> tuple[str, float, str]:
    """Return the failure or "", the seconds and the output of a case."""
    none = home / "none"  # where runs would be created
    before = set(none.rglob("*"))
    done = carry_out(case.arguments(home), limit_s)
    left = {str(path) for path in set(none.rglob("*")) - before}
    if why := failure(done):
        return why, done.seconds, done.err[-400:]
    if case.refused and done.code == 0:
        return "taken", done.seconds, done.out[:200]
    if done.code == 2 and left:
        return "left something", done.seconds, min(left)
    return "", done.seconds, done.err.strip()


@benchmark(
    "hostile", seed=34107, values=Flag(3, "for each field of a recipe"), only=Flag("", "cases with this in their name")
)
def run_hostile(args: Namespace) -> Measurement:
    """Check answers to hostile recipes, flags, topologies, traces and schedules.

    Each case is one command in this process. It may accept or refuse the input, but must answer. A refusal has exit
    code 2, one line, and leaves nothing in the folder of runs. No tracebacks; `--dry-run` answers within 5 s.
    """
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        prepare(home)
        found = [case for case in cases(home, args.seed, args.values) if args.only in case.name]
        wrong, slowest = Counter[str](), 0.0
        for case in found:
            why, seconds, output = verdict(case, home)
            if "--dry-run" in case.words:
                slowest = max(slowest, seconds)
            wrong[why] += 1
            if why or seconds > DRY_S:
                print(f"{why or 'right':14} {seconds:4.1f} s  {case.name}: {output[:300]}", flush=True)
    counted = {
        "traceback": "tracebacks",
        "no answer": "no answer",
        "taken": "taken, though wrong",
        "not one line": "refused, but not in one line",
        "left something": "refused, with something left behind",
    }
    return [
        Row("cases", [len(found)], "", Claim(low=300)),
        *(Row(what, [wrong[how]], "0", Claim(high=0)) for how, what in counted.items()),
        Row("slowest --dry-run, s", [slowest], f"{DRY_S:g}", Claim(high=DRY_S)),
    ]


def damage_verdict(case: DamageCase, home: Path, place: Path, seed: int) -> tuple[str, str]:
    """Return the outcome of a case (refused, not read, read, or its failure) and its output."""
    folder = copied(home, case, place)
    case.damage(folder, random.Random(f"{seed} {case.name}"))
    before = _damage_there(folder)
    done = carry_out(case.arguments(folder), 60)
    answer = done.err.strip()[-300:]
    if done.code == 1 and case.command == "replay" and case.log:
        return "refused", answer  # the log does not explain the run, which replay must report
    if why := failure(done):
        return why, answer
    if done.code == 0:
        return ("read" if case.log else "believed" if case.read else "not read"), answer
    if Path(case.file).name not in done.err and Path(case.file).parent.name not in done.err:
        return "not named", answer
    return ("refused", answer) if _damage_there(folder) == before else ("left something", answer)


def _damage_there(folder: Path) -> dict[str, tuple[int, int]]:
    """Map the files of a folder, except locks, to sizes and times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@benchmark(
    "damage", seed=34107, cases=Flag(900, "of about two thousand"), only=Flag("", "cases with this in their name")
)
def run_damage(args: Namespace) -> Measurement:
    """Check answers to runs with one damaged, altered or missing file.

    Each case copies a small real run, damages one file and runs one command in this process. Damage to a file that the
    command needs and a digest covers must be refused: exit code 2, one line that names the file, nothing changed in the
    folder. Logs have no digest and may be read as far as their lines are complete. No tracebacks.
    """
    with tempfile.TemporaryDirectory() as place:
        home, ended = Path(place) / "runs", Counter[str]()
        home.mkdir()
        prepare_damage(home)
        found = [case for case in damage_cases(home, args.seed) if args.only in case.name][: args.cases]
        for case in found:
            how, output = damage_verdict(case, home, Path(place) / "run", args.seed)
            ended[how] += 1
            if how not in ("refused", "not read", "read"):
                print(f"{how:14} {case.name}: {output}", flush=True)
    wrong = {
        "traceback": "tracebacks",
        "no answer": "no answer",
        "believed": "damage believed",
        "not one line": "refused, but not in one line",
        "not named": "refused without the file's name",
        "left something": "refused, with something changed",
    }
    rows = [Row("cases", [len(found)], "", Claim(low=500))]
    rows += [Row(what, [ended[how]], "0", Claim(high=0)) for how, what in wrong.items()]
    shown = {
        "refused": "refused in one line",
        "not read": "not read by the command",
        "read": "logs read, as far as whole",
    }
    return [*rows, *(Row(what, [ended[how]], "") for how, what in shown.items())]


if __name__ == "__main__":
    start(hostile=run_hostile, damage=run_damage)
