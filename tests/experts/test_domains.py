"""What is learned from is never tested on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.errors import UserError
from planaria.experts.domains import TENTH, TEST, TRAINED, read_pieces, write_domains
from planaria.experts.experts_spec import DomainSpec, ExpertsSpec, expanded


def lines(word: str, count: int) -> str:
    return "".join(f"{word} {n} {n * n}\n" for n in range(count))


def spec(domains: dict[str, Any], **more: Any) -> ExpertsSpec:
    found = {name: DomainSpec(**domain) for name, domain in domains.items()}
    return ExpertsSpec(domains=found, **{"sizes": {"M": 8}, "steps": [4]} | more)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "law").mkdir(parents=True)
    for number in range(3):
        (folder / "law" / f"{number}.txt").write_text(lines(f"law{number}", 4000))
    (folder / "talk.txt").write_text(lines("talk", 9000))
    records = [{"text": lines(label, 700), "kind": label} for label in ("verse", "prose") for _ in range(12)]
    (folder / "labelled.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def test_no_piece_is_both_learned_from_and_tested_on(sources: Path, tmp_path: Path) -> None:
    wanted = spec({"law": {"source": str(sources / "law")}, "talk": {"source": str(sources / "talk.txt")}})
    write_domains(wanted, tmp_path)
    for name in wanted.domains:
        trained, test = (read_pieces(tmp_path, part, name) for part in (TRAINED, TEST))
        assert not set(trained) & set(test)
        assert len(test) == (len(trained) + len(test)) // TENTH
    whole = "".join(path.read_text() for path in sorted((sources / "law").iterdir()))
    found = read_pieces(tmp_path, TRAINED, "law") + read_pieces(tmp_path, TEST, "law")
    assert sorted("".join(found).splitlines()) == sorted(whole.splitlines()), "nothing is lost, nothing twice"


def test_untrained_domains_leave_test_text_only(sources: Path, tmp_path: Path) -> None:
    two = {name: {"source": str(sources / "law" / f"{n}.txt")} for n, name in enumerate(("a", "b"))}
    write_domains(spec(two, untrained={"talk": DomainSpec(source=str(sources / "talk.txt"))}), tmp_path)
    assert (tmp_path / TEST / "talk.jsonl").is_file()
    assert not (tmp_path / TRAINED / "talk.jsonl").exists()


def test_what_was_copied_stays_when_the_source_changes(sources: Path, tmp_path: Path) -> None:
    wanted = spec({"law": {"source": str(sources / "law")}, "talk": {"source": str(sources / "talk.txt")}})
    write_domains(wanted, tmp_path)
    before = read_pieces(tmp_path, TRAINED, "talk")
    (sources / "talk.txt").unlink()
    write_domains(wanted, tmp_path)
    assert read_pieces(tmp_path, TRAINED, "talk") == before


def test_labels_and_globs(sources: Path, tmp_path: Path) -> None:
    labelled = {"source": str(sources / "labelled.jsonl")}
    wanted = spec(
        {
            "verse": labelled | {"where": {"kind": "verse"}},
            "prose": labelled | {"where": {"kind": "prose"}},
            "law": {"source": str(sources / "law" / "*.txt")},
        }
    )
    write_domains(wanted, tmp_path)
    assert all(text.startswith("verse") for text in read_pieces(tmp_path, TRAINED, "verse"))
    assert all(text.startswith("prose") for text in read_pieces(tmp_path, TRAINED, "prose"))
    assert len(read_pieces(tmp_path, TEST, "law")) > 1


def test_a_glob_passes_over_what_is_no_text_and_knows_folders_with_odd_names(tmp_path: Path) -> None:
    folder = tmp_path / "[proj]" / "deep"
    folder.mkdir(parents=True)
    (folder / "a1.txt").write_text(lines("good", 9000))
    (folder / "__init__.txt").write_text("")
    (folder / "b1.txt").write_bytes(b"\0\1")
    wanted = spec(
        {
            "all": {"source": str(tmp_path / "[proj]" / "**" / "*.txt")},
            "named": {"source": str(folder / "[a-b]?.txt")},
        }
    )
    write_domains(wanted, tmp_path / "run")
    for name in wanted.domains:
        assert all(text.startswith("good") for text in read_pieces(tmp_path / "run", TRAINED, name))
    for path in folder.iterdir():
        path.write_text("")
    with pytest.raises(UserError, match="none of its 3 files holds UTF-8 text"):
        write_domains(wanted, tmp_path / "other")


@pytest.mark.parametrize(
    ("domain", "complaint"),
    [
        ({"source": "missing/folder"}, "experts.domains.bad: source = 'missing/folder'"),
        ({"source": "missing/*.txt"}, r"experts.domains.bad: source = 'missing/\*.txt': no file has such a name"),
        ({"source": "{}/empty.txt"}, "experts.domains.bad: source = .* holds no UTF-8 text"),
        ({"source": "{}/short.txt"}, "experts.domains.bad: 12 characters are too few"),
        ({"source": "{}/labelled.jsonl", "where": {"kind": "x"}}, "has no record with kind = 'x'"),
        ({"source": "{}/short.txt", "where": {"kind": "x"}}, "goes with a .jsonl file"),
    ],
)
def test_bad_domains_are_named(domain: dict[str, Any], complaint: str, sources: Path, tmp_path: Path) -> None:
    (sources / "empty.txt").write_text("  \n")
    (sources / "short.txt").write_text("twelve chars")
    bad = domain | {"source": domain["source"].format(sources)}
    with pytest.raises(UserError, match=complaint):
        write_domains(spec({"bad": bad, "talk": {"source": str(sources / "talk.txt")}}), tmp_path)


def test_unlabelled_text_is_cut_by_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = {"sea": "ship wave sail anchor tide", "law": "court judge appeal statute clause"}
    texts = [f"{words[kind]} number {n}\n" * 200 for n in range(24) for kind in ("sea", "law")]
    (tmp_path / "mixed.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    wanted = expanded(spec({"mixed": {"source": str(tmp_path / "mixed.jsonl")}}, clusters=2))
    assert list(wanted.domains) == ["mixed-0", "mixed-1"]
    write_domains(wanted, tmp_path)
    for name in wanted.domains:
        found = read_pieces(tmp_path, TRAINED, name) + read_pieces(tmp_path, TEST, name)
        assert len({text.split()[0] for text in found}) == 1
        assert len(found) >= 24


def test_what_is_cut_does_not_take_an_untrained_domains_name() -> None:
    with pytest.raises(UserError, match=r"experts\.untrained\.lib-0: experts.clusters makes a domain of that name"):
        expanded(spec({"lib": {"source": "x"}}, clusters=2, untrained={"lib-0": DomainSpec(source="y")}))
