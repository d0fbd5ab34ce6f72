"""One side of ``benchmarks.fine_tuning`` in a separate process: a run by planaria or by TRL's SFTTrainer.

Both get the same samples in the same order: rows of packed dialogues as planaria prepares them. Processor time is
counted from the end of the first step to that of the last, so that neither start nor export counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import planaria
from planaria.config.schema import RunConfig
from planaria.models.chunked_loss import IGNORED

FINAL_LR = 0.1


class Clock:
    """Loss of each step in nats, and processor time at its end in seconds."""

    def __init__(self) -> None:
        self.losses = list[float]()
        self.at = list[float]()

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        self.at.append(time.process_time())


def recipe(job: dict[str, Any], family: str) -> RunConfig:
    """Return the run of a job."""
    return planaria.configure(
        RunConfig(name="run", out=job["folder"], engine="inline", seed=job["seed"]),
        settings={
            "model.family": family, "model.context": job["context"], "pipeline.stages": 1,
            "pipeline.microbatches": job["microbatches"], "pipeline.microbatch_size": 1,
            "data.format": "messages", "data.source": job["dialogues"], "data.cache": job["cache"],
            "optim.lr": job["lr"], "optim.beta2": 0.999, "optim.eps": 1e-8, "optim.weight_decay": 0.0,
            "optim.clip": 0.0, "optim.schedule": "cosine", "optim.final_lr": FINAL_LR, "train.steps": job["steps"],
            "train.eval_every": 0, "train.start": job["start"], "checkpoint.every": 0,
            "recovery.strategy": "checkpoint", "observe.trackers": "",
        },
    )  # fmt: skip


def ours(job: dict[str, Any], family: str, clock: Clock) -> None:
    planaria.train(recipe(job, family), progress=False, on_step=lambda step: clock.step(step.loss))


def theirs(job: dict[str, Any], clock: Clock) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from trl import SFTConfig, SFTTrainer

    found = list[float]()

    class Steps(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            clock.step(sum(found[-job["microbatches"] :]))

    class Trainer(SFTTrainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            found.append(loss.item())
            return loss

    arguments = SFTConfig(
        output_dir=job["folder"], max_steps=job["steps"], per_device_train_batch_size=1, learning_rate=job["lr"],
        gradient_accumulation_steps=job["microbatches"], adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        max_grad_norm=0.0, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": FINAL_LR},
        train_sampling_strategy="sequential", padding_free=True, max_length=None, use_cpu=True, bf16=False,
        activation_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True, seed=job["seed"],
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(job["start"], dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(rows(job)),
        processing_class=AutoTokenizer.from_pretrained(job["start"]),
        callbacks=[Steps()],
    )
    trainer.train()


def rows(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return planaria's samples without their padding, in TRL's form of packed dialogues."""
    stream, found = planaria.streams(recipe(job, "llama"))[0], []
    for number in range(job["steps"] * job["microbatches"]):
        tokens, targets = stream.batch(number, 1)
        documents = stream.documents(number, tokens)[0]
        length = int((targets[0] != IGNORED).nonzero().max()) + 2  # the last target is behind its token
        ids, labels = stream.sample(number)[:length].tolist(), [IGNORED, *targets[0, : length - 1].tolist()]
        lengths = documents[: length - 1].unique_consecutive(return_counts=True)[1].tolist()
        lengths[-1] += 1
        found.append({"input_ids": ids, "labels": labels, "seq_lengths": lengths})
    return found


def main(job: dict[str, Any]) -> None:
    """Run a job's side; write its losses and processor time to ``result.json`` in its folder."""
    torch.set_num_threads(1)
    clock = Clock()
    if job["side"] == "trl":
        theirs(job, clock)
    else:
        ours(job, job["side"], clock)
    found = {"losses": clock.losses, "cpu_s": clock.at[-1] - clock.at[0]}
    Path(job["folder"], "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
