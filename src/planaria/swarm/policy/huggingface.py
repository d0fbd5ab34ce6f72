"""Causal language models of ``transformers`` (extra ``hf``) as policies, trained whole or with LoRA (``lora``)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from planaria.common.atomic import new_folder
from planaria.common.errors import UserError, missing_package
from planaria.config.bounds import MIN_TEMPERATURE
from planaria.data.tokenizer import Tokenizer
from planaria.models.sampling import divisor
from planaria.swarm.policy.base import SampledCompletion
from planaria.swarm.policy.prompts import PromptFormat


class HuggingFacePolicy(PromptFormat):
    """A model of ``transformers`` as a policy (:class:`planaria.swarm.policy.base.Policy`).

    With ``lora_rank`` (arXiv 2106.09685) the weights are frozen. Every matrix but the head gets a trained product of
    rank ``lora_rank``, scaled by 2, zero at first and initialized from ``seed``.

    The model is in evaluation mode, where likelihoods are deterministic. Its default generation settings are dropped: a
    repetition penalty would change the sampling distribution.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, lora_rank: int = 0, seed: int = 0) -> None:
        """:raises UserError: if the tokenizer has more ids than the model, or LoRA's package or layers are missing."""
        super().__init__(tokenizer, model.get_input_embeddings().weight.shape[0])
        config = model.config.get_text_config()
        self.context: int = getattr(config, "max_position_embeddings", None) or 2**31  # None: no position limit
        model.generation_config = type(model.generation_config)(eos_token_id=self.end, pad_token_id=self.end)
        self._model = model.eval()
        self.splits = self._has_plain_head()
        self.module: nn.Module = _with_lora(model, lora_rank, seed) if lora_rank else model

    def logits(self, tokens: Tensor) -> Tensor:
        with self.precision_context(self.module):
            result: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return result

    def states(self, tokens: Tensor) -> Tensor:
        with self.precision_context(self.module):
            result: Tensor = self._model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return result

    def head(self, states: Tensor) -> Tensor:
        """States [..., D] → logits [..., V]; incomplete for some models (:attr:`splits`)."""
        with self.precision_context(self.module):
            result: Tensor = self._model.get_output_embeddings()(states)
        return result

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        max_new: int,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
    ) -> list[list[SampledCompletion]]:
        """Sample ``count`` completions of every prompt: at most ``max_new`` tokens each, including the end token.

        All completions get the room that the context leaves the longest prompt. One number from ``generator`` seeds all
        draws, so a completion depends on what is sampled with it; PyTorch's global generator is unchanged. A separate
        forward pass computes the log-probabilities; for greedy draws they are the model's own.

        :raises UserError: for an empty prompt or one that fills the context.
        """
        rows = [list(prompt) for prompt in prompts for _ in range(count)]
        if not rows or max_new < 1:
            return [[SampledCompletion((), False)] * count for _ in prompts]
        longest = max(map(len, rows))
        if not min(map(len, rows)) or longest >= self.context:
            raise UserError(f"policy: prompts must have 1 to {self.context - 1} tokens; one has none or {longest}")
        seed = int(torch.randint(2**62, (), generator=generator))
        new = self._generate(rows, min(max_new, self.context - longest), temperature, top_k, seed)
        cut = [ids[: ids.index(self.end) + 1] if self.end in ids else ids for ids in new]
        logps = self._sampled_logps(rows, cut, divisor(temperature))
        drawn = [self._completion(ids, value) for ids, value in zip(cut, logps, strict=True)]
        return [drawn[start : start + count] for start in range(0, len(rows), count)]

    def export(self, folder: Path) -> None:
        """Write model, with LoRA merged, and tokenizer as a Hugging Face folder, atomically. UserError if not empty."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"export: {folder} exists and is not an empty folder; remove it or export elsewhere")
        module: Any = self.module
        whole = module if module is self._model else copy.deepcopy(module).merge_and_unload()
        with new_folder(folder) as unfinished:
            whole.save_pretrained(unfinished)
            self.tokenizer.save(unfinished / "tokenizer.json")
            if self.usage is not None:
                self.usage.write(unfinished)

    @property
    def adapted(self) -> bool:
        return self.module is not self._model

    def save_adapters(self, folder: Path, base: str) -> None:
        """Write the adapters in ``peft``'s format, atomically. OSError if the folder is not empty or writable."""
        module: Any = self.module
        with new_folder(folder) as unfinished:
            module.save_pretrained(unfinished)

    def _generate(
        self, rows: list[list[int]], steps: int, temperature: float, top_k: int, seed: int
    ) -> list[list[int]]:
        """Return the ids that ``transformers`` draws after each row, including those after the end token."""
        device = self._model.device
        drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
        options = drawn if temperature >= MIN_TEMPERATURE else {"do_sample": False}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            with self.precision_context(self.module):
                return generate(self._model, rows, steps, self.end, **options)

    @torch.no_grad()
    def _sampled_logps(self, rows: list[list[int]], new: list[list[int]], temperature: float) -> list[list[float]]:
        """Return log softmax(logits / temperature) of each row's ``new`` ids over the whole vocabulary."""
        whole = [row + ids for row, ids in zip(rows, new, strict=True)]
        length = max(map(len, whole))
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in whole], device=self._model.device)
        results: list[list[float]] = []
        for part in torch.split(tokens, max(1, self.max_logits // (length * self.vocab))):
            scaled = self.logits(part)[:, :-1].float() / temperature
            picked = scaled.gather(-1, part[:, 1:, None])[..., 0] - scaled.logsumexp(-1)
            results += picked.tolist()
        return [
            logps[len(row) - 1 : len(row) - 1 + len(ids)] for logps, row, ids in zip(results, rows, new, strict=True)
        ]

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Return whether the logits are exactly the head's output, neither scaled nor capped, by a test input."""
        self.module = self._model
        tokens = torch.tensor([[self.end, 0]], device=self._model.device)
        try:
            return torch.equal(self.head(self.states(tokens)), self.logits(tokens))
        except (AttributeError, NotImplementedError, TypeError):
            return False

    def _completion(self, ids: list[int], logps: list[float]) -> SampledCompletion:
        ended = ids[-1] == self.end
        return SampledCompletion(tuple(ids[:-1] if ended else ids), ended, tuple(logps))


@torch.no_grad()
def generate(model: Any, rows: Sequence[Sequence[int]], steps: int, padding: int, **options: Any) -> list[list[int]]:
    """Return ``steps`` ids that a model of ``transformers`` writes after each row; rows are padded on the left."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[padding] * (longest - len(row)) + [*row] for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    written = model.generate(tokens, attention_mask=mask, max_new_tokens=steps, **options)
    new: list[list[int]] = written[:, longest:].tolist()
    return new


@contextmanager
def convert_errors(location: str, fix: str) -> Iterator[None]:
    """Convert errors of ``transformers`` on invalid files to a UserError naming ``location``, reason and ``fix``."""
    from huggingface_hub.errors import StrictDataclassError

    invalid = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError)
    try:
        yield
    except (*invalid, AssertionError, ImportError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{location} ({reason}); {fix}") from error


def open_model(folder: Path, dtype: torch.dtype | Literal["auto"] = torch.float32) -> Any:
    """Load the causal language model in a Hugging Face folder with ``transformers``, as ``dtype`` ("auto": as saved).

    It reads safetensors only and runs no code from the folder.

    :raises UserError: if ``transformers`` is missing or cannot read the whole model.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise missing_package(f"{folder}: this model", "transformers", "hf") from error
    with convert_errors(f"{folder}: transformers cannot read it", "use a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
    model, result = loaded
    if missing := sorted(result["missing_keys"]):
        raise UserError(f"{folder}: {missing[0]} is missing from its weights; download it again")
    return model


def _with_lora(model: Any, rank: int, seed: int) -> nn.Module:
    """Add trained low-rank products to ``model`` in place and freeze its weights."""
    try:
        import peft
    except ImportError as error:
        raise missing_package("policy: LoRA", "peft", "lora") from error
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        module: nn.Module = peft.get_peft_model(model, config).eval()
    return module
