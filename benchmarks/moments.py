"""Do moments matter when a run goes on with another number of replicas?

Four replicas that gossip learn for a while; then three go on, with the mean of the moments, or with fresh ones, and
the four themselves, undisturbed. A few steps later each arm's one model is validated. The claim: with averaged moments
the loss is at most 0.01 nats above that with fresh ones, in each of three seeds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Claim, Row, conclude, parser, start

NAME = "moments"
ARMS = {"averaged": 3, "fresh": 3, "undisturbed": 4}
"""replicas that go on"""


def begin(given: argparse.Namespace, seed: int, place: Path) -> Path:
    """The run that all arms go on with; its folder."""
    import planaria
    from planaria.config.schema import RunConfig

    model = {"vocab": 260, "dim": given.dim, "layers": 4, "heads": 4, "hidden": given.dim * 11 // 4, "context": 64}
    made = {
        "name": f"seed-{seed}",
        "out": str(place),
        "engine": "inline",
        "seed": seed,
        "model": model,
        "pipeline": {"stages": 2, "microbatches": 1, "microbatch_size": given.samples},
        "data": {"tokenizer": "bytes"},
        "optim": {"lr": given.lr, "warmup": 20},
        "train": {"steps": given.before, "eval_every": given.before + given.after, "eval_microbatches": 16},
        "exchange": {"kind": "noloco", "replicas": ARMS["undisturbed"], "options": {"every": given.every}},
        "observe": {"trackers": ""},
    }
    planaria.train(RunConfig.model_validate(made), progress=False)
    return place / f"seed-{seed}"


@contextmanager
def fresh_moments() -> Iterator[None]:
    """Stages that are loaded begin without moments, as after an exchange of weights alone."""
    from planaria.runtime.engine.runner import StageRunner

    real = StageRunner.load

    def bare(self: StageRunner, state: Any) -> None:
        real(self, state.part(lambda name: True, moments=False))

    StageRunner.load = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageRunner.load = real  # type: ignore[method-assign]


def go_on(given: argparse.Namespace, source: Path, arm: str) -> float:
    """The validation loss of the one model, in nats."""
    import planaria
    from planaria.control.logs import read_run

    folder = Path(shutil.copytree(source, source.with_name(f"{source.name}-{arm}")))
    settings: Mapping[str, object] = {"train.steps": given.before + given.after, "exchange.replicas": ARMS[arm]}
    if arm == "fresh":
        with fresh_moments():
            planaria.train(folder, resume=True, settings=settings, progress=False)
    else:
        planaria.train(folder, resume=True, settings=settings, progress=False)
    return list(read_run(folder).validated)[-1].val_loss


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--before", type=int, default=150, help="steps of the four")
    flags.add_argument("--after", type=int, default=20, help="steps until the validation")
    flags.add_argument("--every", type=int, default=10, help="steps between rounds")
    flags.add_argument("--dim", type=int, default=64)
    flags.add_argument("--samples", type=int, default=8, help="of a replica's step")
    flags.add_argument("--lr", type=float, default=3e-3)
    given = flags.parse_args()
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="planaria-") as place:
        for seed in given.seeds:
            source = begin(given, seed, Path(place))
            for arm, losses in found.items():
                losses.append(go_on(given, source, arm))
            print(f"seed {seed}: " + ", ".join(f"{arm} {losses[-1]:.4f}" for arm, losses in found.items()), flush=True)
    apart = [own - other for own, other in zip(found["averaged"], found["fresh"], strict=True)]
    rows = [Row("averaged − fresh, nats", apart, "", Claim(high=0.01), judged="worst")]
    rows += [Row(f"{arm} ({count} replicas), nats", found[arm], "") for arm, count in ARMS.items()]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
