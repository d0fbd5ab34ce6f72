"""How fast a batch of texts is continued: our decoding against ``generate`` of ``transformers`` on the same weights.

Both continue the same prompts by as many tokens, drawn at temperature 1 from the 20 likeliest, with nothing that ends a
text, on one thread, and take turns; ours also finds every token's likelihood, which the swarm needs and theirs leaves
out. The claim: at least 0.9 of their tokens a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.decode import decode
from planaria.models.huggingface import export_model
from planaria.models.llama2c import import_llama2c
from planaria.models.stages import Llama, flops_per_token, parameter_count

NAME = "generation"
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, ["measured: our tokens a second / theirs"])


if __name__ == "__main__":
    start(main)
