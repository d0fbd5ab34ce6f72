"""Selection of logged spans: those that the report draws, few others, and all byte counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from planaria.control.facts.events import Span, WorkReport
from planaria.report.observe.run_observer import AFTER_FORMING, STEPS_PER_SAMPLE, ReportSampling, span_interval

SPANS = [Span(action="backward", microbatch=0, hop=0, start=1.0, end=2.0)]


def work(
    node: int,
    step: int,
    sent: dict[int, int] | None = None,
    dropped: bool = False,
    generation: int = 1,
    peaks: tuple[int, int] = (0, 0),
) -> WorkReport:
    return WorkReport(
        worker=f"w{node}", node=node, stage=node, generation=generation, step=step, dropped=dropped, spans=SPANS,
        sent_bytes=sent or {}, peak_bytes=peaks[0], device_peak_bytes=peaks[1],
    )  # fmt: skip


WORKS = st.builds(
    work,
    st.integers(0, 2),
    st.integers(0, 3000),
    st.dictionaries(st.integers(0, 2), st.integers(0, 99)),
    st.booleans(),
    st.integers(1, 3),
    st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)),
)


@given(st.lists(WORKS, max_size=60), st.dictionaries(st.integers(0, 60), st.integers(0, 3000), max_size=4))
def test_no_byte_is_lost_and_what_the_report_draws_is_kept(works: list[WorkReport], forms: dict[int, int]) -> None:
    sample, written = ReportSampling(), []
    formed = 0
    drawn = []
    for place, one in enumerate(works):
        if place in forms:
            formed = forms[place]
            sample.restart(0, formed)
        if one.dropped or one.step <= formed + AFTER_FORMING:
            drawn.append((float(place), one))
        written += sample.select(float(place), one, 0)
    written += sample.flush()
    assert sample.flush() == []
    kept = [(t, one) for t, one in written if one.spans]
    assert [entry for entry in kept if entry in drawn] == drawn

    def sent(several: list[WorkReport]) -> Counter[tuple[int, str, int, bool, int]]:
        found: Counter[tuple[int, str, int, bool, int]] = Counter()
        for one in several:
            for peer, count in one.sent_bytes.items():
                found[one.node, one.worker, one.generation, one.dropped, peer] += count
        return found

    assert sent([one for _, one in written]) == sent(works)

    def peaks(several: list[WorkReport]) -> dict[str, tuple[int, int]]:
        own = {one.worker: [other for other in several if other.worker == one.worker] for one in several}
        return {w: (max(o.peak_bytes for o in by), max(o.device_peak_bytes for o in by)) for w, by in own.items()}

    assert peaks([one for _, one in written]) == peaks(works)


def test_ten_times_the_steps_have_few_spans_more() -> None:
    sample, lines, drawn = ReportSampling(), 0, 0
    sample.restart(0, 0)
    for step in range(30_000):
        for _, one in sample.select(float(step), work(0, step, {1: 5}), 0):
            lines += 1
            drawn += bool(one.spans)
    assert 250 < drawn < 320, "fifty of each doubling"
    assert lines < 30_000 / 30


def test_the_sample_of_a_step_thins_by_half_whenever_the_run_is_twice_as_long() -> None:
    intervals = [span_interval(step) for step in (0, 999, 1000, 1999, 2000, 3999, 4000, 999_999)]
    assert intervals == [STEPS_PER_SAMPLE * factor for factor in (1, 1, 1, 1, 2, 2, 4, 512)]
