"""The exchange of a run in reports: its options, and weights that had no round."""

from __future__ import annotations

from planaria.common.errors import UserError
from planaria.control.log.run_record import RunRecord
from planaria.exchange.registry import make_exchange, too_few_steps
from planaria.report.run.round_history import settled_rounds, totals, totals_lines


def effective_options(record: RunRecord) -> str:
    """Return the kind with all its options, defaults included; of an unavailable class only those of the recipe."""
    settings = record.config.exchange
    try:
        options = make_exchange(settings).model_dump()
    except UserError:
        options = dict(settings.options)
    listed = ", ".join(f"{name} = {value!r}" for name, value in options.items())
    return f"{settings.kind} ({listed})" if listed else settings.kind


def exchange_lines(record: RunRecord) -> list[str]:
    """Return the totals of the exchange in words, or why there was no round."""
    histories = settled_rounds(record)
    return list(totals_lines(totals(histories))) if histories else [*filter(None, [rounds_missing(record)])]


def rounds_missing(record: RunRecord) -> str:
    """Return why a run had no round, if ``train.steps`` is too low for one; else, or if unknown, an empty string."""
    try:
        return "" if settled_rounds(record) else too_few_steps(record.config)
    except UserError:
        return ""
