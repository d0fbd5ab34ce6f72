"""The recorded command and environment of a run contain no secrets."""

from __future__ import annotations

from planaria.runtime.preparation.run_start import command_line


def test_a_command_line_keeps_its_words_and_loses_the_secrets_of_addresses() -> None:
    given = ["/opt/bin/planaria", "train", "my run.toml", "--data.source", "https://ann:secret@host/text?token=secret"]
    assert command_line(given) == "planaria train 'my run.toml' --data.source https://host/text"
    assert "secret" not in command_line(["planaria", "train", "--checkpoint.store=s3://key:secret@bucket/x"])
