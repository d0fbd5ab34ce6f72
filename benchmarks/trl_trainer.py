"""TRL's side of ``benchmarks.trl``: one run of its GRPOTrainer in a separate process and environment.

It receives a job as JSON (:class:`benchmarks.trl.Job`) and writes a folder ``checkpoint-N`` per examination. It uses
planaria's task, so that both sides have the same verifier.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from planaria.swarm.tasks.sums import Sums
from trl import GRPOConfig, GRPOTrainer


def main(job: dict[str, Any]) -> None:
    task = Sums()
    tokenizer = AutoTokenizer.from_pretrained(job["start"])
    tokenizer.pad_token = tokenizer.eos_token

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        """Score the text as the swarm's peers do; unfinished completions get 0."""
        ended = [ids[-1:] == [tokenizer.eos_token_id] for ids in completion_ids]
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [
            task.score(task.problem(n), text) if done else 0.0
            for n, text, done in zip(number, texts, ended, strict=True)
        ]

    prompts = [{"prompt": task.problem(number).prompt, "number": number} for number in job["problems"]]
    trainer = GRPOTrainer(
        model=job["start"],
        reward_funcs=reward,
        args=settings(job),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    Path(job["folder"], "rewards.json").write_text(json.dumps(rewards))


def settings(job: dict[str, Any]) -> GRPOConfig:
    """Return the swarm's recipe as TRL settings; others are TRL's defaults."""
    return GRPOConfig(
        output_dir=job["folder"],
        max_steps=job["rounds"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        seed=job["seed"],
        per_device_train_batch_size=job["prompts"] * job["group"],
        num_generations=job["group"],
        max_completion_length=job["max_new"],
        top_k=job["top_k"],
        shuffle_dataset=False,  # keep the swarm's order of problems
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        save_steps=job["every"],
        save_only_model=True,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
