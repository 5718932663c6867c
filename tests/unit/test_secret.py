"""The secret that a user gives to nodes that are started one by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import secret
from phalanx.errors import UsageError

TEXT = "correct horse battery staple"


@pytest.fixture(autouse=True)
def without_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_own", None)


def taken(file: Path | None, variable: str | None = None) -> str | None:
    secret.keep(None)
    secret.load(None if file is None else str(file), {} if variable is None else {secret.VARIABLE: variable})
    return secret.text()


def test_a_file_and_the_variable_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    found = taken(path)
    assert found is not None
    assert len(found) == 64
    assert found == taken(None, TEXT) == taken(None, str(path)) == taken(path, "the flag beats the variable")
    assert taken(None) is None
    secret.keep("ab" * 32)
    secret.load(str(path), {})
    assert secret.text() == "ab" * 32, "the one that came with the order is the run's"


def test_a_file_that_is_not_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(UsageError, match=r"cannot be read: No such file or directory\.$"):
        taken(path)
    path.write_text(TEXT)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(UsageError, match=r"can be read by others; keep it for yourself: chmod 600\.$"):
            taken(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(UsageError, match=r"--secret-file .* holds 5 characters, which can be guessed"):
        taken(path)
    with pytest.raises(UsageError, match=r"PHALANX_SECRET holds 5 characters"):
        taken(None, "short")
    if os.geteuid() == 0:
        path.write_text(TEXT)
        os.chown(path, 12001, 12001)
        with pytest.raises(UsageError, match=r"belongs to another user \(uid 12001\)"):
            taken(path)
