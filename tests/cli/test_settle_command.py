"""``planaria swarm settle`` as a user meets it."""

from __future__ import annotations

import pytest

from planaria.cli import main


def test_it_prints_what_came_of_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["swarm", "settle", "--hops", "3", "--seeds", "3"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "f = 1 of 4 members lie" in said and "hop 1 is dry" in said and "an honest party lost credits" in said
    assert "164" in said, "messages of three hops"


@pytest.mark.parametrize("wrong", [["--hops", "0"], ["--faulty", "-1"], ["--seeds", "0"]])
def test_what_cannot_be_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["swarm", "settle", *wrong])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "; give" in said
