"""Labels of stage files, in memory and in checkpoints: a file is read only under the label it was written with."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.control.facts.run_started import SnapshotLabel
from planaria.models.state import StageState
from planaria.runtime.checkpoint.memory_folder import MemoryFolder
from planaria.runtime.checkpoint.stage_file import (
    StageLabel,
    checked_reader,
    read_contents,
    read_labelled,
    require_stage,
    stage_file,
    write_labelled,
)

numbers = itertools.count()


def state(value: float) -> StageState:
    return StageState({"w": torch.full((4,), value)}, outer={})


labels = st.builds(
    StageLabel,
    stage=st.integers(0, 2),
    step=st.integers(0, 2),
    index=st.integers(0, 1),
    part=st.sampled_from(["", "a", "b"]),
    generation=st.integers(-1, 1),
).filter(lambda label: bool(label.part) == (label.generation >= 0))


@given(labels, labels)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_read_only_under_its_own_label(tmp_path: Path, written: StageLabel, expected: StageLabel) -> None:
    """Every reader of stages' files, for all pairs of labels; the line names the first field that differs."""
    folder = tmp_path / str(next(numbers))
    write_labelled(folder, written, state(1.0))
    there = stage_file(folder, written.stage, written.index or 0)
    there.rename(stage_file(folder, expected.stage, expected.index or 0))
    fields = ("stage", "step", "index", "part", "generation")
    wrong = [name for name in fields if getattr(written, name) != getattr(expected, name)]
    readers = [lambda: read_labelled(folder, expected)]
    if not expected.part:
        of_checkpoints = expected.stage, expected.step
        readers += [
            lambda: read_contents(folder, *of_checkpoints, expected.index or 0),
            lambda: require_stage(folder, *of_checkpoints, "", expected.index or 0),
        ]
    for read in readers:
        if not wrong:
            read()
            continue
        with pytest.raises(UserError, match=f"holds {wrong[0]} "):
            read()


def test_a_file_replaced_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    """Tensors are read later than the header was, and from the same path."""
    write_labelled(tmp_path, StageLabel(stage=1, step=5, index=0), state(1.0))
    held = read_contents(tmp_path, 1, 5)
    write_labelled(tmp_path, StageLabel(stage=1, step=6, index=0), state(2.0))
    with pytest.raises(UserError, match="holds step 6, not 5"), checked_reader(held) as read:
        read("weights.w")


def memory(tmp_path: Path) -> MemoryFolder:
    made = MemoryFolder(tmp_path / "run", tmp_path)
    made.folder.mkdir(mode=0o700)
    return made


def label(step: int, generation: int = 1, part: str = "ab12") -> SnapshotLabel:
    return SnapshotLabel(part=part, generation=generation, step=step)


@pytest.mark.parametrize("source", [(label(44), 1), (label(48), 2), (label(48, 2), 1), (label(48, part="cd34"), 1)])
def test_a_snapshot_with_a_foreign_file_is_not_whole(tmp_path: Path, source: tuple[SnapshotLabel, int]) -> None:
    """Of another step, stage, generation or part of the run: copied over a file of step 48."""
    held = memory(tmp_path)
    for name in {source[0], label(48)}:
        for stage in (1, 2):
            held.write(stage, name, state(name.step + stage), {"p": torch.zeros(2)})
    assert held.whole_stages(label(48)) == {1, 2}
    (there,) = held.folder.glob(f"step-{source[0].step:08d}.g{source[0].generation}.{source[0].part}")
    (target,) = held.folder.glob("step-00000048.g1.ab12")
    shutil.copy(stage_file(there, source[1]), stage_file(target, 1))
    assert held.whole_stages(label(48)) == {2}
    with pytest.raises(UserError, match=r"holds (step 44|stage 2|generation 2|part cd34), not"):
        held.read(1, label(48))


def test_a_worker_keeps_its_two_newest_snapshots(tmp_path: Path) -> None:
    """After a rollback they have smaller steps; unfinished files of a killed writer are removed, too."""
    held = memory(tmp_path)
    for name in (label(28), label(32)):
        held.write(1, name, state(1.0), {})
    (folder,) = held.folder.glob("step-00000028.*")
    (folder / ".stage-0001.safetensors.77").write_text("half")
    held.write(1, label(24, 2), state(1.0), {})
    assert held.newest_first() == [label(32), label(24, 2)] and not folder.exists()
    held.write(2, label(32), state(1.0), {})
    held.write(1, label(28, 2), state(1.0), {})
    assert held.newest_first() == [label(32), label(28, 2), label(24, 2)]
    assert held.whole_stages(label(32)) == {2} and held.whole_stages(label(28, 2)) == {1}
    held.write(1, label(4, 1, "ff"), state(1.0), {})
    assert held.whole_stages(label(4, 1, "ff")) == {1}, "those of the present part are the newest"
