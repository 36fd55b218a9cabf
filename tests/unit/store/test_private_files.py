"""Folders that code is loaded from: who may write to them, and what is said where that cannot be checked."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from compile_cache.store import private_files
from compile_cache.store.artifact_store import Artifact, ArtifactStore, StoreError
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
        remedy = "so no code is loaded from it: chmod 700 it, or set RESOLUTE_STORE"
        with pytest.raises(StoreError, match=f"^compiled code cannot be kept: .*, {remedy}"):  # as problems.md says
            ArtifactStore(tmp_path, HERE, LIMIT)

    def test_one_that_they_may_read_is(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        assert why_not_private(tmp_path) is None

    def test_one_of_another_user_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert why_not_private(tmp_path) == f"{tmp_path} belongs to another user"

    @pytest.mark.parametrize("mode", [0o777, 0o707, 0o770])
    @pytest.mark.parametrize("levels", [1, 2])
    def test_one_whose_parent_others_may_write_to_can_be_exchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, levels: int
    ) -> None:
        monkeypatch.setattr(private_files, "_own_groups", lambda: frozenset({0} - {tmp_path.stat().st_gid}))
        store = tmp_path / "shared" / "/".join("abc"[:levels]) / "store"
        store.mkdir(mode=0o700, parents=True)
        (tmp_path / "shared").chmod(mode)
        assert why_not_private(store) == f"{tmp_path / 'shared'} is writable by others"
        with pytest.raises(StoreError, match="is writable by others, so no code is loaded from it"):
            ArtifactStore(store, HERE, LIMIT)
        (tmp_path / "shared").chmod(mode | 0o1000)  # as the temporary folder: only owners may rename
        assert why_not_private(store) is None

    def test_a_parent_that_the_group_of_this_user_alone_may_write_to_is_private(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "store").mkdir(mode=0o700)
        tmp_path.chmod(0o770)
        monkeypatch.setattr(private_files, "_own_groups", lambda: frozenset({tmp_path.stat().st_gid}))
        assert why_not_private(tmp_path / "store") is None

    def test_a_link_that_others_may_exchange_is_on_the_way_too(self, tmp_path: Path) -> None:
        target, open_to_all = tmp_path / "target", tmp_path / "open"
        target.mkdir(mode=0o700)
        open_to_all.mkdir()
        (open_to_all / "link").symlink_to(target, target_is_directory=True)
        (tmp_path / "way").symlink_to(open_to_all / "link", target_is_directory=True)
        assert why_not_private(tmp_path / "way") is None
        open_to_all.chmod(0o777)
        assert why_not_private(target) is None
        assert why_not_private(tmp_path / "way") == f"{open_to_all} is writable by others"

    def test_a_parent_of_another_user_can_be_exchanged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "store").mkdir(mode=0o700)
        status = Path.stat

        def stat(self: Path, **given: bool) -> os.stat_result:
            found = status(self, **given)
            return owned_by_another(found) if self == tmp_path else found

        monkeypatch.setattr(Path, "stat", stat)
        assert why_not_private(tmp_path / "store") == f"{tmp_path} belongs to another user"


def owned_by_another(status: os.stat_result) -> os.stat_result:
    return os.stat_result((*status[:4], status.st_uid + 4242, *status[5:10]))


@pytest.mark.skipif(sys.platform == "win32", reason="files have no owners there that Python knows")
class TestFiles:
    ARTIFACT = Artifact("a" * 64, "ResBlock", {}, b"machine code")

    @pytest.fixture
    def store(self, tmp_path: Path) -> ArtifactStore:
        store = ArtifactStore(tmp_path / "store", HERE, LIMIT)
        store.save(self.ARTIFACT)
        return store

    def test_a_link_that_takes_the_place_of_a_file_before_it_is_opened_is_not_followed(
        self, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (path,) = store._folder.glob("*.region")
        opened = os.open

        def exchanged_first(name: Path, *given: int) -> int:
            if name == path and not path.is_symlink():
                path.rename(tmp_path / "elsewhere")
                path.symlink_to(tmp_path / "elsewhere")
            return opened(name, *given)

        monkeypatch.setattr(os, "open", exchanged_first)
        assert store.load(self.ARTIFACT.key) == []
        assert (tmp_path / "elsewhere").read_bytes().endswith(self.ARTIFACT.payload)


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
