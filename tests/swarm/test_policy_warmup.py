"""The supervised warm-up and its cache."""

from __future__ import annotations

import queue
import random
import string
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.cache import hold_lock
from planaria.common.errors import UserError
from planaria.models.llama_stages import Llama
from planaria.swarm.config.policy_config import PolicyConfig, SupervisedWarmupConfig
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.policy.sources import warmup_model, with_stray_letters
from planaria.swarm.tasks.base import Task, TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import MODEL

WARMUP = SupervisedWarmupConfig(steps=3, batch=4)
PUPIL = PolicyConfig(model=MODEL)


class Dumb(Task):
    """A task without solutions."""

    training: ClassVar[int] = 9
    held_out: ClassVar[int] = 1

    def problem(self, number: int) -> TaskProblem:
        return TaskProblem(number, "?", "!")

    def score(self, problem: TaskProblem, completion: str) -> float:
        return 0.0


def small_policy(**model: int) -> PolicyConfig:
    return PUPIL.model_copy(update={"model": PUPIL.model.model_copy(update=model)})


def warmed_up(folder: Path, config: SupervisedWarmupConfig = WARMUP, **model: int) -> str:
    found, tokenizer = warmup_model(Sums(), config, small_policy(**model), folder)
    assert tokenizer.vocab == 257
    return weights_fingerprint(found)


def test_a_warmup_is_cached(tmp_path: Path) -> None:
    progress: list[str] = []
    first, _ = warmup_model(Sums(), WARMUP, PUPIL, tmp_path, progress.append)
    again, _ = warmup_model(Sums(), WARMUP, PUPIL, tmp_path, progress.append)
    assert weights_fingerprint(first) == weights_fingerprint(again) != weights_fingerprint(Llama(MODEL, seed=0))
    assert progress == ["warm-up: 3 steps on worked solutions of sums"]


def test_the_cache_distinguishes_warmups_tasks_and_models(tmp_path: Path) -> None:
    warmed_up(tmp_path)
    warmed_up(tmp_path, WARMUP.model_copy(update={"seed": 1}))
    warmed_up(tmp_path, WARMUP.model_copy(update={"noise": 0.5}))
    warmed_up(tmp_path, dim=32)
    warmup_model(Sums(style="words"), WARMUP, PUPIL, tmp_path)
    warmup_model(Sums(digits=3), WARMUP, PUPIL, tmp_path)
    files = sorted(tmp_path.glob("warmup-*.safetensors"))
    assert len(files) == 6 == len({file.read_bytes() for file in files})


def test_a_learned_tokenizer_depends_on_the_task_only_and_is_lossless(tmp_path: Path) -> None:
    pairs = small_policy(vocab=300).model_copy(update={"tokenizer": "bpe"})
    _, first = warmup_model(Sums(), WARMUP, pairs, tmp_path)
    _, other = warmup_model(Sums(), WARMUP.model_copy(update={"seed": 1}), pairs, tmp_path)
    assert first.to_json() == other.to_json()
    solution = Sums().solution(Sums().problem(7), random.Random(0))
    assert first.decode(first.encode(solution)) == solution and len(first.encode(solution)) < len(solution)
    assert first.decode(first.encode("hé 🦠")) == "hé 🦠"


def test_a_task_without_solutions_has_no_warmup(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'Dumb' has no worked solutions .*policy\.kind"):
        warmup_model(Dumb(), WARMUP, PUPIL, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_context_too_short_for_a_solution_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.model\.context = 16.* 2\d or more"):
        warmup_model(Sums(), WARMUP, small_policy(context=16), tmp_path)


def test_a_concurrent_process_waits_for_the_same_warmup(tmp_path: Path) -> None:
    first = warmed_up(tmp_path)
    (lock,), (file,) = tmp_path.glob("*.lock"), tmp_path.glob("*.safetensors")
    kept = tmp_path / "kept"
    file.rename(kept)
    progress: queue.Queue[str] = queue.Queue()
    found: list[Llama] = []
    with hold_lock(lock, lambda: None):  # a file lock, which blocks threads like processes
        late = threading.Thread(
            target=lambda: found.append(warmup_model(Sums(), WARMUP, PUPIL, tmp_path, progress.put)[0])
        )
        late.start()
        assert progress.get(timeout=60) == "waiting for another process with the same warm-up"
        kept.rename(file)
    late.join(60)
    assert weights_fingerprint(found[0]) == first and progress.empty(), "it used the other's result"


@given(st.text(string.digits + "+=,;[]\n", max_size=40), st.randoms(use_true_random=False))
def test_stray_letters_are_inserted_between_steps(solution: str, rng: random.Random) -> None:
    found = with_stray_letters(solution, rng)
    added = len(found) - len(solution)
    assert 1 <= added <= 4
    place = next(
        n for n in range(len(solution) + 1) if found[:n] == solution[:n] and found[n + added :] == solution[n:]
    )
    stray = found[place : place + added]
    assert set(stray) <= set(string.ascii_lowercase + " ")
    assert place == 0 or solution[place - 1] in ",;\n"
