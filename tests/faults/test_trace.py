from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.bounds import MAX_EXACT_INT
from planaria.faults import trace as traces
from planaria.faults.failure_groups import FailureDomain, failure_groups
from planaria.faults.trace import Fault, Trace, burst_sizes, digest, injection_order, is_pending, read, write
from planaria.faults.trace_generation import generate, hourly_of_all, per_step_probability

SEEDS = st.integers(-MAX_EXACT_INT, MAX_EXACT_INT)


def test_the_probability_of_one_step() -> None:
    assert per_step_probability(0.10, 91.3) == pytest.approx(0.00267, rel=0.01)
    assert per_step_probability(0.0, 91.3) == 0
    assert per_step_probability(0.3, 3600.0) == pytest.approx(0.3)


def test_the_probability_that_all_copies_fail_in_one_step() -> None:
    assert hourly_of_all(0.123, 91.3, 1) == 0.123
    p = per_step_probability(0.4, 900.0)
    assert hourly_of_all(0.4, 900.0, 3) == pytest.approx(1 - (1 - p**3) ** 4)
    assert hourly_of_all(0.0, 900.0, 2) == 0.0


@pytest.mark.slow
def test_the_empirical_rate_is_the_requested_one() -> None:
    p = per_step_probability(0.16, 600.0)
    faults = generate(3, 0.16, 600.0, stages=10, steps=100_000, exempt=set(), forbid_adjacent=False).faults
    assert len(faults) / 1e6 == pytest.approx(p, rel=0.03)
    assert sum(fault.offset for fault in faults) / len(faults) == pytest.approx(0.5, rel=0.03)
    for stage in range(1, 11):
        assert sum(fault.stage == stage for fault in faults) / 1e5 == pytest.approx(p, rel=0.1)


def test_only_the_later_neighbour_is_spared() -> None:
    free = generate(5, 0.5, 1800.0, 5, 500, set(), False).faults
    forbidden = set(generate(5, 0.5, 1800.0, 5, 500, set(), True).faults)
    struck = {(fault.step, fault.stage) for fault in forbidden}
    assert forbidden < set(free)
    assert all((fault.step, fault.stage - 1) in struck for fault in free if fault not in forbidden)


@given(SEEDS, st.sets(st.integers(1, 5)))
def test_exemptions_do_not_change_other_stages(seed: int, exempt: set[int]) -> None:
    everyone = generate(seed, 0.3, 600.0, 5, 60, set(), False).faults
    some = generate(seed, 0.3, 600.0, 5, 60, exempt, False).faults
    assert some == tuple(fault for fault in everyone if fault.stage not in exempt)


@given(SEEDS, st.sets(st.integers(0, 5)))
def test_failures_of_stage_0_do_not_change_other_stages(seed: int, exempt: set[int]) -> None:
    without = generate(seed, 0.3, 600.0, 5, 60, exempt, False).faults
    with_ends = generate(seed, 0.3, 600.0, 5, 60, exempt, False, ends=True).faults
    assert without == tuple(fault for fault in with_ends if fault.stage)
    assert all(fault.stage for fault in with_ends) or 0 not in exempt


def test_stage_0_fails_at_the_rate_of_any_stage() -> None:
    p = per_step_probability(0.16, 600.0)
    faults = generate(3, 0.16, 600.0, stages=1, steps=100_000, exempt=set(), forbid_adjacent=False, ends=True).faults
    assert sum(fault.stage == 0 for fault in faults) / 1e5 == pytest.approx(p, rel=0.1)


def test_stage_0_neighbours_the_first_and_the_last_stage() -> None:
    def pairs(forbid_adjacent: bool) -> dict[int, int]:
        """Stage → how often it and the next one on the ring fail in the same step."""
        faults = generate(5, 0.5, 1800.0, 6, 3000, set(), forbid_adjacent, ends=True).faults
        struck = {(fault.step, fault.stage) for fault in faults}
        return {stage: sum((step, (stage + 1) % 7) in struck for step, s in struck if s == stage) for stage in range(7)}

    assert not any(pairs(True).values())
    assert min(pairs(False).values()) > 0.8 * 3000 * per_step_probability(0.5, 1800.0) ** 2


def burst(seed: int, together: float, exempt: set[int] | None = None, ends: bool = True) -> Trace:
    return generate(seed, 0.3, 600.0, 5, 60, exempt or set(), False, ends, together)


@given(SEEDS, st.floats(0, 0.99), st.floats(0, 0.99), st.sets(st.integers(0, 5)))
def test_bursts_only_add_failures_and_respect_exemptions(seed: int, one: float, other: float, exempt: set[int]) -> None:
    low, high = sorted((one, other))
    few, many = ({(f.step, f.stage, f.offset) for f in burst(seed, p, exempt).faults} for p in (low, high))
    alone = set(burst(seed, 0.0, exempt).faults)
    assert alone <= set(burst(seed, low, exempt).faults)
    assert {fault[:2] for fault in few} <= {fault[:2] for fault in many}
    assert not {stage for _, stage, _ in many} & exempt
    assert len({fault[:2] for fault in many}) == len(many), "a stage fails at most once per step"


def test_bursts_take_neighbours_at_one_moment_with_geometric_sizes() -> None:
    rate, together = 0.001, 0.4
    trace = generate(3, rate, 3600.0, 20, 100_000, set(), False, True, together)
    sizes = burst_sizes(trace)
    total, expected = sum(sizes.values()), 21 * 100_000 * rate
    assert total == pytest.approx(expected, rel=0.05)
    for size in (1, 2, 3, 4):
        assert sizes[size] / total == pytest.approx((1 - together) * together ** (size - 1), rel=0.1)
    groups: dict[object, list[int]] = {}
    for fault in trace.faults:
        groups.setdefault((fault.step, injection_order(fault)), []).append(fault.stage)
    for group in groups.values():
        assert any({(first + k) % 21 for k in range(len(group))} == set(group) for first in group), group


def test_a_trace_without_bursts_is_unchanged_by_the_feature(tmp_path: Path) -> None:
    """Its file and digest are those from before bursts existed."""
    trace, written = generate(5, 0.5, 1800.0, 5, 30, {3}, False), traces.trace_text(burst(1, 0.0))
    assert digest(trace) == "7baa246648fa2a542f4568e96308d5a47fe19f1c6537ee429017b1213f81d39b"
    assert "adjacent_probability" not in written and '"adjacent_probability": 0.5' in traces.trace_text(burst(1, 0.5))
    write(burst(1, 0.5), tmp_path / "t.json")
    assert read(tmp_path / "t.json") == burst(1, 0.5)
    assert len({digest(burst(1, p)) for p in (0.0, 0.4, 0.5)}) == 3


def test_bursts_and_forbid_adjacent_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"adjacent_probability = 0\.5 .*forbid_adjacent"):
        generate(1, 0.1, 1.0, 4, 5, set(), True, False, 0.5)
    with pytest.raises(UserError, match="adjacent_probability"):
        generate(1, 0.1, 1.0, 4, 5, set(), False, False, 1.0)


def test_the_seed_determines_the_trace() -> None:
    """Papers and logs quote the digest, so it must not change."""
    trace = generate(34107, 0.16, 91.3, 6, 1000, {1, 6}, True)
    assert digest(trace) == digest(generate(34107, 0.16, 91.3, 6, 1000, {6, 1}, True))
    assert digest(trace) != digest(generate(34108, 0.16, 91.3, 6, 1000, {1, 6}, True))
    with_ends = generate(34107, 0.16, 91.3, 6, 1000, {1, 6}, True, ends=True)
    assert digest(with_ends) == digest(generate(34107, 0.16, 91.3, 6, 1000, {1, 6}, True, ends=True))
    assert digest(with_ends) != digest(trace)
    assert (
        digest(Trace(faults=(Fault(step=3, stage=2),)))
        == "7f64493594fc407093493418bb9f696aa05553305873d0ed580eba4bb678f249"
    )


@pytest.mark.parametrize(
    ("argument", "value"), [("hourly", 1.0), ("step_s", 0.0), ("stages", 0), ("steps", -1), ("exempt", {7})]
)
def test_numbers_out_of_range_are_refused(argument: str, value: object) -> None:
    good: dict[str, object] = {"hourly": 0.1, "step_s": 1.0, "stages": 4, "steps": 5, "exempt": set()}
    with pytest.raises(UserError, match=argument):
        generate(seed=1, forbid_adjacent=False, **(good | {argument: value}))  # type: ignore[arg-type]


FAULTS = st.builds(
    Fault,
    step=st.integers(0, 10**6),
    stage=st.integers(0, 1000),
    signal=st.just("stop"),
    moment=st.sampled_from(["any", "forward", "backward", "commit", "transfer"]),
    offset=st.floats(0, 1, exclude_max=True),
    resume_after_s=st.none() | st.floats(0, 1e6, exclude_min=True),
)


@pytest.mark.slow
@given(st.lists(FAULTS, max_size=5))
def test_a_written_trace_is_read_back(tmp_path_factory: pytest.TempPathFactory, faults: list[Fault]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    trace = Trace(faults=tuple(faults))
    write(trace, path)
    assert read(path) == trace
    assert digest(read(path)) == digest(trace)
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]


GOOD = {"step": 1, "stage": 2}
CORRUPT = {**GOOD, "signal": "corrupt_update"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ("[]", "should be an object"),
        ({}, "faults: missing; add it"),
        ({"version": 2, "faults": []}, "version = 2: input should be 1"),
        ({"fautls": []}, "fautls: unknown key; did you mean 'faults'"),
        ({"faults": [GOOD, {"step": 1, "stge": 2}]}, r"faults\.1\.stge: unknown key; did you mean 'stage'"),
        ({"faults": [GOOD, {"step": "1", "stage": 2}]}, r"faults\.1\.step = '1': .*integer"),
        ({"faults": [GOOD | {"stage": -1}]}, r"faults\.0\.stage = -1: "),
        ({"faults": [GOOD | {"signal": "term"}]}, r"faults\.0\.signal = 'term': "),
        ({"faults": [GOOD | {"offset": 1.0}]}, r"faults\.0\.offset = 1.0: "),
        ({"faults": [GOOD | {"resume_after_s": 1.0}]}, r"faults\.0 = .*: a killed worker cannot resume"),
        (
            {"faults": [CORRUPT | {"attack": "sign_flop"}]},
            r"faults\.0 = .*: .*'sign_flop': no such choice; did you mean 'sign_",
        ),
        (
            {"faults": [CORRUPT | {"attack": "os:system"}]},
            r"faults\.0 = .*: .*'os:system': no such choice; known here: alie",
        ),
        ({"faults": [CORRUPT | {"attack": 3}]}, r"faults\.0\.attack = 3: .*string"),
        ({"faults": [CORRUPT | {"attack": "zero", "strength": 2.0}]}, r"faults\.0 = .*: attack 'zero' has no strength"),
        ({"faults": [CORRUPT | {"strength": 2.0}]}, r"faults\.0 = .*: attack 'nan' has no strength"),
        ({"faults": [CORRUPT | {"attack": "alie", "strength": -1.0}]}, r"faults\.0\.strength = -1.0: "),
        ({"faults": [CORRUPT | {"until": 1}]}, r"faults\.0 = .*: until = 1 must be after the fault's first step, 1"),
        (
            {"faults": [GOOD | {"until": 4}]},
            r"faults\.0 = .*: signal 'kill' has no until; remove it, or use signal 'corrupt_update'",
        ),
        ({"faults": [GOOD | {"attack": "zero"}]}, r"faults\.0 = .*: signal 'kill' has no attack"),
    ],
)
def test_an_invalid_file_is_refused_with_place_and_field(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=rf"bad\.json: .*{complaint}"):
        read(path)


def test_an_attack_has_kind_and_end_and_older_traces_keep_their_meaning(tmp_path: Path) -> None:
    """Newer fields and names change only the digests of traces that use newer fields."""
    old = Fault(step=3, stage=2, signal="corrupt_update")
    new = Fault(step=3, stage=2, signal="corrupt_update", attack="ipm", until=9)
    (tmp_path / "old.json").write_text('{"faults": [{"step": 3, "stage": 2, "signal": "lie", "strength": null}]}')
    assert read(tmp_path / "old.json").faults == (old,)
    assert digest(Trace(faults=(old,))) == "37b5fc9fdf35bf01341e8de65d96b1a6febf86b048b651953ba4afebb21533f4"
    assert len({digest(Trace(faults=(fault,))) for fault in (old, new, new.model_copy(update={"until": 8}))}) == 3
    write(Trace(faults=(new,)), tmp_path / "t.json")
    assert read(tmp_path / "t.json").faults == (new,)


def test_a_lasting_attack_continues_in_a_resumed_run() -> None:
    once = Fault(step=3, stage=2, signal="corrupt_update")
    lasting = Fault(step=3, stage=2, signal="corrupt_update", until=6)
    assert [is_pending(once, step) for step in (3, 4)] == [True, False]
    assert [is_pending(lasting, step) for step in (3, 5, 6)] == [True, True, False]


def test_unreadable_or_unwritable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"nowhere cannot be read .* use a trace file"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cannot write the trace .*nowhere"):
        write(Trace(faults=()), tmp_path / "nowhere" / "t.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot write the trace"):
        write(Trace(faults=()), tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]
    monkeypatch.setattr(traces, "MAX_BYTES", 10)
    with pytest.raises(UserError, match="too many"):
        write(Trace(faults=()), tmp_path / "t.json")
    (tmp_path / "large").write_text(" " * 11)
    with pytest.raises(UserError, match="larger than 10 bytes"):
        read(tmp_path / "large")


LOST = st.sampled_from(("adjacent", "machine", "region"))


@pytest.mark.slow
@given(LOST, st.integers(2, 9), st.integers(1, 4), st.booleans(), st.data())
def test_failure_groups_cover_exactly_the_stages_that_can_fail(
    lost: FailureDomain, stages: int, machine: int, ends: bool, data: Any
) -> None:
    everybody = range(0 if ends else 1, stages + 1)
    struck = set(everybody) - data.draw(st.sets(st.sampled_from(list(everybody))))
    found = failure_groups(lost, struck, stages, machine)
    assert {stage for one in found for stage in one} == struck
    counts = Counter(stage for one in found for stage in one)
    if lost == "adjacent":
        assert all(len(one) <= 2 for one in found) and max(counts.values(), default=0) <= 2
        if 0 in struck:
            assert all(count == 2 for count in counts.values()), "at half the rate per group"
    else:
        assert all(count == 1 for count in counts.values()), "a stage is in one group"


@pytest.mark.parametrize(("lost", "size"), [("adjacent", 2), ("machine", 3), ("region", 4)])
def test_failure_groups_are_lost_together_at_the_rate_of_single_stages(lost: FailureDomain, size: int) -> None:
    steps, p = 40_000, per_step_probability(0.1, 91.3)
    faults = generate(3, 0.1, 91.3, 6, steps, set(), False, True, failure_domain=lost, machine=3).faults
    counts, steps_of = Counter(f.stage for f in faults), defaultdict[int, set[int]](set)
    for fault in faults:
        steps_of[fault.step].add(fault.stage)
    assert all(counts[stage] / steps == pytest.approx(p, rel=0.25) for stage in range(7))
    assert Counter(map(len, steps_of.values())).most_common(1)[0][0] in (size, size - 1)
    assert not any(len(lost_together) == 1 for lost_together in steps_of.values()) or lost == "machine"
    moments = {(f.step, f.stage): f.offset for f in faults}
    some = min(step for step, stages in steps_of.items() if len(stages) == size)
    assert len({moments[some, stage] for stage in steps_of[some]}) == 1, "they fail at the same moment"


def test_traces_of_single_losses_are_unchanged_by_the_feature() -> None:
    plain = generate(1, 0.5, 600.0, 4, 50, set(), False)
    assert "failure_domain" not in plain.model_dump()["generated"] and "machine" not in plain.model_dump()["generated"]
    assert digest(plain).startswith("efc2974908dab940a5c7b6f5b2620ef4")


@pytest.mark.parametrize("other", [{"forbid_adjacent": True}, {"forbid_adjacent": False, "adjacent_probability": 0.1}])
def test_failure_groups_exclude_bursts_and_forbid_adjacent(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="failure_domain = 'machine' takes several stages; remove"):
        generate(1, 0.5, 600.0, 4, 50, set(), failure_domain="machine", **other)
