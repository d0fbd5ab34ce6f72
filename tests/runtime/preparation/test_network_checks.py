"""Invalid settings of machines and addresses: one line with the setting and the fix, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.runtime.preparation import requirements as network_checks
from planaria.runtime.preparation.config_checks import check
from planaria.runtime.transport import secure


@pytest.mark.parametrize(
    ("fleet", "complaint"),
    [
        ({"host": "0.0.0.0"}, "fleet.advertise"),
        ({"host": "::"}, "fleet.advertise"),
        ({"advertise": "10.0.0.1 x"}, "a host name or an address"),
        ({"advertise": "example.org:7001"}, "the port is fleet.port"),
        ({"local_workers": 9}, "raise fleet.spares"),
        ({"local_workers": 0, "kind": "ray"}, "fleet.kind"),
        ({"ports": [7010, 7002]}, "the first and the last"),
        ({"ports": [7002, 7004]}, "3 ports for 6 workers"),
        ({"ports": [7002, 7010], "port": 7005}, "the controller's"),
        ({"key": "k", "relays": {"north": {"at": "somewhere"}}}, "fleet.relays.north.at = 'somewhere': use HOST:PORT"),
        ({"key": "k", "relays": {"north": {"at": "host:70000"}}}, "use HOST:PORT"),
        ({"key": "k", "relays": {"a": {"at": "host:7"}, "b": {"at": "host:7"}}}, "is also that of fleet.relays.a"),
        ({"relays": {"north": {"at": "host:7001"}}}, "set fleet.key"),
    ],
)
def test_an_invalid_setting_is_refused(fleet: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        check(RunConfig.model_validate({"fleet": fleet}))
    assert "\n" not in str(error.value) and "fleet." in str(error.value)


def test_a_system_without_proc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys reach OpenSSL through /proc/self/fd; also on a machine that joins, which has no recipe to check."""
    monkeypatch.setattr(network_checks, "Path", lambda _: tmp_path / "none")
    with pytest.raises(UserError, match="/proc/self/fd: missing"):
        check(RunConfig())
    monkeypatch.setattr(os, "memfd_create", lambda *_: os.open(os.devnull, os.O_WRONLY))
    monkeypatch.setattr(secure.ssl.SSLContext, "load_cert_chain", lambda _, path: (tmp_path / "none").read_bytes())
    with pytest.raises(UserError, match="/proc/self/fd: missing"):
        secure.prepare(secure.new_key())


@pytest.mark.parametrize(
    "fleet",
    [
        {"host": "0.0.0.0", "advertise": "203.0.113.5", "port": 7001, "ports": [7002, 7007]},
        {"advertise": "home.example.org", "local_workers": 0},
        {"host": "::1", "advertise": "2001:db8::1"},
        {"key": "k", "relays": {"north": {"at": "[::1]:7001"}, "south": {"at": "home.example.org:7001"}}},
    ],
)
def test_valid_settings_are_accepted(fleet: dict[str, Any]) -> None:
    check(RunConfig.model_validate({"fleet": fleet}))
