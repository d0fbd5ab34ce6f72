"""Training text and test text never overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.lab.experts.domains import (
    GENERAL,
    HELD_OUT,
    SPLIT_PARTS,
    TEST,
    TRAINED,
    read_pieces,
    split_documents,
    write_domains,
)
from planaria.lab.experts.experts_spec import DomainSpec, ExpertsSpec, expand_clusters


def lines(word: str, count: int) -> str:
    return "".join(f"{word} {n} {n * n}\n" for n in range(count))


def spec(domains: dict[str, Any], **more: Any) -> ExpertsSpec:
    found = {name: DomainSpec(**domain) for name, domain in domains.items()}
    return ExpertsSpec(domains=found, **{"sizes": {"M": 8}, "steps": [4]} | more)


HUNDREDS = r"^\w+ \d+00 "
"""Pattern of document starts in a file of lines."""


def parts_of(source: Path) -> dict[str, str]:
    """Return a domain of one file, in documents of a hundred lines."""
    return {"source": str(source), "begins": HUNDREDS}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "law").mkdir(parents=True)
    for number in range(3):
        (folder / "law" / f"{number}.txt").write_text(lines(f"law{number}", 4000))
    (folder / "talk.txt").write_text(lines("talk", 9000))
    records = [{"text": lines(f"{label}{n}", 700), "kind": label} for label in ("verse", "prose") for n in range(12)]
    (folder / "labelled.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


PARTS = (TRAINED, HELD_OUT, TEST)


def first_words(folder: Path, part: str, name: str) -> set[str]:
    """Return the first words of a part's pieces, which differ by document."""
    return {text.split()[0] for text in read_pieces(folder, part, name)}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Write twenty files of some pieces each, and all of them in one."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    texts = [lines(f"w{number}", 600 + 30 * number) for number in range(20)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "one.txt").write_text("".join(f"BOOK {text}" for text in texts))
    return folder


def test_documents_stay_whole_and_complete(shelf: Path, tmp_path: Path) -> None:
    wanted = spec({"files": {"source": str(shelf)}, "book": {"source": str(tmp_path / "one.txt"), "begins": "^BOOK "}})
    write_domains(wanted, tmp_path)
    for name in wanted.domains:
        parts = {part: read_pieces(tmp_path, part, name) for part in PARTS}
        assert all(len(found) >= 2 for found in parts.values())
        words = [
            {line.removeprefix("BOOK ").split()[0] for text in parts[p] for line in text.splitlines()} for p in PARTS
        ]
        assert [len(found) for found in words] == [16, 2, 2]
        assert len(set.union(*words)) == 20
        whole = "".join(file.read_text() for file in shelf.iterdir()).splitlines()
        found = "".join(text for texts in parts.values() for text in texts).replace("BOOK ", "").splitlines()
        assert sorted(found) == sorted(whole), "nothing is lost, nothing twice"


def test_equal_documents_are_in_one_part_whatever_their_source(shelf: Path, tmp_path: Path) -> None:
    for number in range(20):
        (shelf / f"again-{number}.txt").write_text(f"\n{(shelf / f'{number}.txt').read_text()}\n\n")
    other = tmp_path / "other"
    other.mkdir()
    for number in range(8):
        (other / f"{number}.txt").write_text((shelf / f"{number}.txt").read_text())
        (other / f"own-{number}.txt").write_text(lines(f"own{number}", 900))
    (tmp_path / "far.txt").write_text((shelf / "11.txt").read_text())
    two = {"shelf": {"source": str(shelf)}, "other": {"source": str(other)}}
    general = {"text": {"source": str(shelf)}}
    far = {"far": DomainSpec(source=str(tmp_path / "far.txt"))}
    write_domains(spec(two, untrained=far, seed=general), tmp_path / "run")
    found = {part: set.union(*(first_words(tmp_path / "run", part, name) for name in two)) for part in PARTS}
    assert (
        not found[TRAINED] & found[TEST] and not found[TRAINED] & found[HELD_OUT] and not found[HELD_OUT] & found[TEST]
    )
    assert "w11" in found[TEST], "an untrained domain's documents are never trained on"
    read = first_words(tmp_path / "run", GENERAL, GENERAL)
    assert read and not read & (found[TEST] | found[HELD_OUT])


@given(st.sets(st.text("0123456789abcdef", min_size=4, max_size=4), min_size=3, max_size=60), st.data())
def test_a_tenth_is_for_tests_and_a_tenth_held_out_in_any_order(digests: set[str], data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(st.sampled_from(sorted(digests)), st.sampled_from(PARTS)))
    found = split_documents(sorted(digests), known)
    assert found == split_documents(sorted(digests, reverse=True) * 2, known)
    assert found.keys() == digests - known.keys()
    tenth = -(-len(found) // SPLIT_PARTS)
    assert list(found.values()).count(TEST) == tenth
    if len(found) >= 3:
        assert list(found.values()).count(HELD_OUT) == tenth and TRAINED in found.values()


def test_too_few_documents_are_rejected_with_a_fix(sources: Path, tmp_path: Path) -> None:
    talk = {"source": str(sources / "talk.txt")}
    law = {"source": str(sources / "law")}
    with pytest.raises(
        UserError, match=r"experts\.domains\.talk: none of its 1 documents .*experts\.domains\.talk\.begins"
    ):
        write_domains(spec({"law": law, "talk": talk}), tmp_path)


def test_copied_text_stays_when_its_source_changes(sources: Path, tmp_path: Path) -> None:
    wanted = spec({"law": {"source": str(sources / "law")}, "talk": parts_of(sources / "talk.txt")})
    write_domains(wanted, tmp_path)
    before = read_pieces(tmp_path, TRAINED, "talk")
    (sources / "talk.txt").unlink()
    write_domains(wanted, tmp_path)
    assert read_pieces(tmp_path, TRAINED, "talk") == before


def test_sources_may_be_labelled_records_and_globs(sources: Path, tmp_path: Path) -> None:
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


def test_a_glob_skips_empty_files_and_handles_special_folder_names(tmp_path: Path) -> None:
    folder = tmp_path / "[proj]" / "deep"
    folder.mkdir(parents=True)
    (folder / "a1.txt").write_text(lines("good", 9000))
    (folder / "__init__.txt").write_text("")
    (folder / "b1.txt").write_text(" \n")
    wanted = spec(
        {
            "all": parts_of(tmp_path / "[proj]" / "**" / "*.txt"),
            "named": parts_of(folder / "[a-b]?.txt"),
        }
    )
    write_domains(wanted, tmp_path / "run")
    for name in wanted.domains:
        assert all(text.startswith("good") for text in read_pieces(tmp_path / "run", TRAINED, name))
    for path in folder.iterdir():
        path.write_text("")
    with pytest.raises(UserError, match="none of its 3 files holds UTF-8 text"):
        write_domains(wanted, tmp_path / "other")


@pytest.mark.parametrize("reason", ["not UTF-8 text", "Permission denied", "No such file"])
def test_an_unreadable_file_of_a_glob_is_rejected(
    reason: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = sources / "law" / "9.txt", Path.read_bytes

    def unless_locked(path: Path) -> bytes:
        if path == file and reason == "Permission denied":  # root could read it
            raise PermissionError(13, reason, str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", unless_locked)
    if reason == "No such file":
        file.symlink_to(sources / "absent")
    else:
        file.write_bytes(b"\xff" if "UTF" in reason else b"text")
    wanted = spec({"law": {"source": str(sources / "law" / "*.txt")}, "talk": parts_of(sources / "talk.txt")})
    with pytest.raises(UserError, match=rf"experts\.domains\.law: .*9\.txt.*{reason}") as refused:
        write_domains(wanted, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("domain", "complaint"),
    [
        ({"source": "missing/folder"}, "experts.domains.bad: source = 'missing/folder'"),
        ({"source": "missing/*.txt"}, r"experts.domains.bad: source = 'missing/\*.txt': no file matches"),
        ({"source": "{}/empty.txt"}, "experts.domains.bad: source = .* holds no UTF-8 text"),
        ({"source": "{}/short.txt"}, "experts.domains.bad: 12 characters are too few"),
        ({"source": "{}/labelled.jsonl", "where": {"kind": "x"}}, "has no record with kind = 'x'"),
        ({"source": "{}/short.txt", "where": {"kind": "x"}}, "applies to a file of records"),
    ],
)
def test_invalid_domains_are_named(domain: dict[str, Any], complaint: str, sources: Path, tmp_path: Path) -> None:
    (sources / "empty.txt").write_text("  \n")
    (sources / "short.txt").write_text("twelve chars")
    bad = domain | {"source": domain["source"].format(sources)}
    with pytest.raises(UserError, match=complaint):
        write_domains(spec({"bad": bad, "talk": parts_of(sources / "talk.txt")}), tmp_path)


@pytest.mark.slow
def test_unlabelled_text_is_clustered_by_content(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = {"sea": "ship wave sail anchor tide", "law": "court judge appeal statute clause"}
    texts = [f"{words[kind]} number {n}\n" * 200 for n in range(24) for kind in ("sea", "law")]
    (tmp_path / "mixed.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    wanted = expand_clusters(spec({"mixed": {"source": str(tmp_path / "mixed.jsonl")}}, clusters=2))
    assert list(wanted.domains) == ["mixed-0", "mixed-1"]
    write_domains(wanted, tmp_path)
    for name in wanted.domains:
        found = [text for part in PARTS for text in read_pieces(tmp_path, part, name)]
        assert len({text.split()[0] for text in found}) == 1
        assert len(found) >= 24


def test_a_cluster_must_not_have_an_untrained_domain_s_name() -> None:
    with pytest.raises(UserError, match=r"experts\.untrained\.lib-0: experts.clusters makes a domain of that name"):
        expand_clusters(spec({"lib": {"source": "x"}}, clusters=2, untrained={"lib-0": DomainSpec(source="y")}))
