"""``planaria experts weigh RUN --worst``: the best weights for an ensemble's worst domain, and what proves it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from planaria.cli.commands.ensemble import MOST_WINDOWS
from planaria.common.errors import UserError
from planaria.lab.experts.domains import HELD_OUT, TEST
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.reading import domain_samples
from planaria.lab.experts.weighing import weigh
from planaria.lab.experts.worst import FLOOR
from planaria.lab.experts.worst_solvers import TOLERANCE
from planaria.lab.report.worst_report import sentences, tables
from planaria.report.tables import show


def weigh_worst(folder: Path, tokens: int | None, floor: float | None, tolerance: float | None) -> int:
    """Fit on the held-out text of the domains of ``folder``, show the test text; the exit code, 0. Changes nothing.

    :raises UserError: when there is no ensemble or text, one expert only, or an option is out of range.
    """
    torch.set_num_threads(1)
    ensemble = Ensemble(folder)
    context = ensemble.manifest.context
    first = (ensemble.manifest.mixture.prefix or context) if tokens is None else tokens
    if tokens is not None and not 1 <= tokens <= context:
        raise UserError(f"--tokens {tokens}: texts have {context} tokens here; give 1 to {context}")
    if tolerance is not None and not 0 < tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g}: must be above 0 and below 1")
    experts = [member.name for member in ensemble.manifest.members]
    if len(experts) < 2:
        raise UserError(f"{folder}: has one expert only, and nothing to weigh; add another with `planaria experts add`")
    if floor is not None and not 0 < floor < 1 / len(experts):
        raise UserError(f"--floor {floor:g}: must be above 0 and below 1/{len(experts)}, or all weights are alike")
    held_out, test = _read(ensemble, folder, HELD_OUT), _read(ensemble, folder, TEST)
    found = weigh(experts, held_out, test, ensemble.manifest.mixture, first, floor or FLOOR, tolerance or TOLERANCE)
    console = show(tables(found))
    for line in sentences(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _read(ensemble: Ensemble, folder: Path, part: str) -> dict[str, Tensor]:
    """Domain that has an expert's text here → what the experts make of its held-out or test text [E, N, T]."""
    files = sorted((folder / HELD_OUT).glob("*.jsonl"))
    if not files:
        raise UserError(
            f"{folder / HELD_OUT}: has no domains' texts, which weights are fitted on; bring them back, or run the "
            "recipe again under another --name"
        )
    known = ensemble.manifest
    return {
        file.stem: ensemble.logps(domain_samples(folder, [file.stem], part, known.vocab, known.context, MOST_WINDOWS))
        for file in files
    }
