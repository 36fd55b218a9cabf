"""Folders that code is loaded from: who may write to them, and what is said where that cannot be checked."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from compile_cache.store import private_files
from compile_cache.store.artifact_store import ArtifactStore, StoreError
from compile_cache.store.private_files import why_not_private

from .test_artifact_store import HERE
from .test_bundle import LIMIT


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where folders have access lists. Gives the user's profile."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(private_files, "_warned", [])
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "profile")
    return tmp_path / "profile"


@pytest.mark.skipif(sys.platform == "win32", reason="who may write to a folder is not in its mode")
class TestElsewhere:
    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_a_folder_that_others_may_write_to_is_not_private(self, tmp_path: Path, mode: int) -> None:
        tmp_path.chmod(mode)
        assert why_not_private(tmp_path) == f"{tmp_path} is writable by others"
        with pytest.raises(StoreError, match="so no code is loaded from it: chmod 700 it, or set RESOLUTE_STORE"):
            ArtifactStore(tmp_path, HERE, LIMIT)

    def test_one_that_they_may_read_is(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        assert why_not_private(tmp_path) is None

    def test_one_of_another_user_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert why_not_private(tmp_path) == f"{tmp_path} belongs to another user"


class TestOnWindows:
    def test_a_store_outside_of_the_profile_is_used_and_named_once(
        self, windows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            for name in ("portable", "another"):
                ArtifactStore(tmp_path / name, HERE, LIMIT)
        assert caplog.text.count("is outside of your user profile. Windows may let other users") == 1
        assert "set RESOLUTE_STORE to a folder in your profile" in caplog.text

    def test_a_store_in_the_profile_is_used_without_a_word(
        self, windows: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            ArtifactStore(windows / "store", HERE, LIMIT)
        assert caplog.text == ""
