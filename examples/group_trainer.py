"""A ``Trainer`` of Hugging Face (or TRL's ``SFTTrainer``) as a member of a group.

python examples/group_trainer.py                    # the host
python examples/group_trainer.py 127.0.0.1:29400    # any number of others, at any time
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import planaria
from planaria.group.integrations.trainer import GroupCallback


def counting(rows: int = 480, length: int = 16, vocab: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count in steps of 1 to 8, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 9, (rows,), generator=generator)
    sequences = [torch.arange(length) * step % vocab for step in steps]
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def main(address: str = "", epochs: float = 2) -> float:
    """Train as the host, or as a member of the group at ``address``; return the mean loss of the last steps."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=epochs,
            learning_rate=1e-2,
            logging_steps=5,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=counting())
        group = planaria.join(address) if address else planaria.host(29400)
        trainer.add_callback(GroupCallback(group, trainer, exchange="noloco", every=10))
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        print(f"{group.steps} steps and {group.rounds} rounds here, loss {losses[-1]:.3f}")
        return float(losses[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
