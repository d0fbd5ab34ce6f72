"""The file with a run's key: made whole by one of those who want it, for its owner alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.runtime.fleet.joining import kept_key
from planaria.runtime.transport.secure import new_key


def test_all_who_make_it_at_once_have_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for n in range(50):
            keys = [new_key() for _ in range(8)]
            found = set(pool.map(lambda key, n=n: kept_key(tmp_path / f"key{n}", key), keys))
            assert len(found) == 1 and found < set(keys)
            assert kept_key(tmp_path / f"key{n}", new_key()) in found
            assert (tmp_path / f"key{n}").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"key{n}" for n in range(50))


def test_where_it_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/key': cannot be made \(No such file or directory\)"):
        kept_key(tmp_path / "nowhere" / "key", new_key())
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(UserError, match="holds no key"):
        kept_key(tmp_path / "empty", new_key())
