"""Export of a peer's policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from swarms import rounds, tiny, together

from command_line import refused
from planaria import cli
from planaria.common.digests import FILE
from planaria.runtime.engine import run_folders
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.records.lines import PEERS
from planaria.swarm.records.saved_state import rounds_kept


@pytest.fixture(scope="module")
def done(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds; the states after the last three savings are kept, the run's end among them."""
    folder = tmp_path_factory.mktemp("learned")
    config = tiny(pupil, size=2, rounds={"count": 5, "keep": 1, "kept": 3, "prompts": 4, "group": 4})
    run_folders.keep_config(folder, config)
    together(config, folder)
    return folder


@pytest.mark.parametrize("round", [None, 3])
def test_an_exported_policy_has_the_recorded_weights(done: Path, tmp_path: Path, round: int | None) -> None:
    to = tmp_path / "out"
    asked = [] if round is None else ["--round", str(round)]
    assert cli.run(["export", str(done), "--peer", "p1", "--to", str(to), *asked]) == 0
    found = weights_fingerprint(open_policy(str(to)).module)
    noted = rounds(done, "p1")
    assert found == noted[(round or 5) - 1].weights != noted[0].weights


def test_the_last_round_is_always_saved(pupil: Path, tmp_path: Path) -> None:
    together(tiny(pupil, size=2, rounds={"count": 3, "keep": 10, "prompts": 2, "group": 4}), tmp_path)
    assert rounds_kept(tmp_path / PEERS / "p0") == [3]


def test_the_configured_number_of_states_is_kept(done: Path) -> None:
    assert rounds_kept(done / PEERS / "p0") == rounds_kept(done / PEERS / "p1") == [3, 4, 5]


def test_transformers_matches_the_exported_policy(done: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cli.run(["export", str(done), "--peer", "p0", "--to", str(tmp_path / "out")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, tokens = open_policy(str(tmp_path / "out")), torch.arange(40, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(tokens), atol=1e-4, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12+34=")["input_ids"] == ours.encode("12+34=")


def test_an_exported_policy_starts_another_swarm(done: Path, tmp_path: Path) -> None:
    cli.run(["export", str(done), "--peer", "p0", "--to", str(tmp_path / "out")])
    together(tiny(tmp_path / "out", size=2, rounds={"count": 1, "prompts": 2, "group": 4}), tmp_path / "next")
    assert len(rounds(tmp_path / "next", "p0")) == 1


def test_invalid_exports_are_refused_in_one_line(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "give a peer with --peer" in refused(capsys, "export", done, "--to", out)
    assert "did you mean 'p1'?" in refused(capsys, "export", done, "--to", out, "--peer", "p7")
    assert "kept after 3, 4, 5" in refused(capsys, "export", done, "--to", out, "--peer", "p0", "--round", 2)
    assert "not a run of a swarm" in refused(capsys, "export", tmp_path, "--to", out, "--peer", "p0")
    out.mkdir()
    (out / "x").touch()
    assert "exists and is not an empty folder" in refused(capsys, "export", done, "--to", out, "--peer", "p0")
    state = done / PEERS / "p1" / "state-000004" / "peer" / "stage-0000.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "cannot be read" in refused(capsys, "export", done, "--to", tmp_path / "b", "--peer", "p1", "--round", 4)
    state.write_bytes(whole)
    assert (done / FILE).is_file()
