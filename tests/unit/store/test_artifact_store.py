"""The artifact store: what it saves, what it refuses, and that an error never costs more than a compile."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compile_cache.keys import GraphKey, Role, Signature
from compile_cache.store.artifact_store import Artifact, ArtifactStore, StoreError
from compile_cache.store.fingerprint import EnvironmentFingerprint
from compile_cache.store.private_files import NotPrivateError
from compile_cache.store.shape_history import ShapeHistory
from scripts.places import ROOT

from .spoiled import INVALID, entry_of

HERE = EnvironmentFingerprint(
    torch="2.11.0",
    triton="3.6.0",
    python="3.11",
    platform="linux x86_64",
    device="NVIDIA H200, sm_90",
    settings="default",
    source="abc",
)
KEY = "a" * 64
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")


def store_in(folder: Path, environment: EnvironmentFingerprint = HERE, limit: int = 1 << 20) -> ArtifactStore:
    return ArtifactStore(folder, environment, limit)


def artifact(key: str = KEY, payload: bytes = b"machine code", **about: object) -> Artifact:
    return Artifact(key, "ResBlock", about, payload)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return store_in(tmp_path / "store")


def test_another_process_loads_a_saved_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    kept = artifact(static=[[0, 320]])
    store.save(kept)
    assert store_in(tmp_path / "store").load(KEY) == [kept]


def test_a_key_may_have_two_artifacts_and_known_ones_are_not_read_again(store: ArtifactStore) -> None:
    one, two = artifact(static=[1]), artifact(static=[2])
    store.save(one)
    store.save(two)
    assert {each.name for each in store.load(KEY)} == {one.name, two.name}
    assert store.load(KEY, frozenset({one.name})) == [two]


def test_a_folder_is_new_until_an_artifact_is_saved(tmp_path: Path) -> None:
    assert ArtifactStore.is_new(tmp_path / "none")
    store = store_in(tmp_path / "store")
    assert ArtifactStore.is_new(tmp_path / "store")
    store.save(artifact())
    assert not ArtifactStore.is_new(tmp_path / "store")
    assert not store_in(tmp_path / "store", replace(store.environment, torch="another")).names()


def test_a_save_that_fails_says_why(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store.save(artifact())
    assert "ResBlock was compiled but could not be stored ([Errno 28] No space left on device)" in caplog.text


def test_one_artifact_saved_twice_is_there_once(store: ArtifactStore) -> None:
    store.save(artifact())
    store.save(artifact())
    assert len(store.names()) == 1


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_artifact_is_refused_with_its_reason_removed_and_replaced(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    change, reason = INVALID[kind]
    whole, other = artifact(payload=b"\1" * 1029, static=[1]), artifact(static=[2])  # of one key
    store.save(other)
    entry = entry_of(whole, HERE)
    change(entry)
    (store._folder / entry.file).write_bytes(entry.content())
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) == [other]
    (message,) = caplog.messages
    assert "is invalid (" in message
    assert reason in message
    assert store.names() == [path.stem for path in store._folder.glob("*-*")] == [other.name]
    assert store.save(whole)
    assert whole in store.load(KEY)
    assert len(caplog.messages) == 1


def test_nesting_as_deep_as_a_formulas_is_saved(store: ArtifactStore) -> None:
    formula = json.loads("[" * 60 + "]" * 60)
    store.save(artifact(formula=formula))
    assert store.load(KEY) == [artifact(formula=formula)]


def test_a_key_that_begins_alike_keeps_its_artifact(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    """Both keys share their first 16 characters, so their file names begin alike; that is not damage."""
    other = "a" * 63 + "b"
    store.save(artifact(key=other))
    store.save(artifact())
    for key in (KEY, other):
        assert [each.key for each in store.load(key)] == [key]
    assert caplog.messages == []


@pytest.mark.parametrize("content", [b"", b"{", b"{}"])
def test_a_damaged_environment_file_is_rewritten(store: ArtifactStore, tmp_path: Path, content: bytes) -> None:
    path = store._folder / "environment.json"
    before = path.read_bytes()
    path.write_bytes(content)
    store_in(tmp_path / "store")
    assert path.read_bytes() == before


def test_one_artifact_is_read_by_name_and_not_counted_as_used(store: ArtifactStore) -> None:
    store.save(artifact())
    (path,) = store._folder.glob("*.region")
    os.utime(path, (1000, 1000))
    assert store.read(artifact().name) == artifact()
    assert path.stat().st_mtime == 1000
    store.load(KEY)
    assert path.stat().st_mtime > 1000
    with pytest.raises(FileNotFoundError):
        store.read("missing")


@pytest.fixture
def group_writable_umask() -> Iterator[None]:
    """Umask 002, the default of many Linux desktops: the user's group may write to new files."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@POSIX
@pytest.mark.usefixtures("group_writable_umask")
def test_every_new_folder_is_private_whichever_code_makes_it_first(tmp_path: Path) -> None:
    """Shapes lie below the store's folder, and the backend `cudagraph` writes them before there is a store."""
    (tmp_path / "given").mkdir(mode=0o755)
    root = tmp_path / "given" / "resolute" / "regions"
    key = GraphKey(Signature(()), Role.UNET, "model", "cudagraph")
    ShapeHistory(root / "shapes").record(key, Regions())
    store = store_in(root)
    made = [root.parent, root, root / "shapes", store._folder]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4
    assert (tmp_path / "given").stat().st_mode & 0o777 == 0o755
    assert store.save(artifact())


USES: dict[str, Callable[[ArtifactStore], object]] = {
    "save": lambda store: store.save(artifact()),
    "load": lambda store: store.load(KEY),
    "build_lock": lambda store: store.build_lock(KEY).release(),
}


@POSIX
@pytest.mark.usefixtures("group_writable_umask")
@pytest.mark.parametrize("what", ["all", "of the environment"])
@pytest.mark.parametrize("use", USES)
def test_a_folder_that_is_deleted_is_made_again_and_private(tmp_path: Path, what: str, use: str) -> None:
    store = store_in(tmp_path / "store")
    shutil.rmtree(tmp_path / "store" if what == "all" else store._folder)
    USES[use](store)
    for folder in (tmp_path / "store", store._folder):
        assert folder.stat().st_mode & 0o777 == 0o700
    store.save(artifact())
    assert store_in(tmp_path / "store").load(KEY) == [artifact()], "the next start accepts it"
    assert (store._folder / "environment.json").exists()


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("what", ["store", f"store/{HERE.digest()[:16]}"])
def test_a_folder_that_others_may_write_to_by_now_is_not_used(tmp_path: Path, what: str, mode: int) -> None:
    store = store_in(tmp_path / "store")
    store.save(artifact())
    (tmp_path / what).chmod(mode)
    with pytest.raises(NotPrivateError, match="is writable by others"):
        store.load(KEY)
    assert not store.save(artifact(payload=b"another"))
    USES["build_lock"](store)  # of no use then, and no error
    assert len(store.names()) == 1
    (tmp_path / what).chmod(0o700)
    assert store.load(KEY) == [artifact()]


class Regions:
    """A program without regions."""

    region_keys: frozenset[str] = frozenset()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be kept"):
        store_in(tmp_path / "file" / "store")


def test_the_least_recently_used_go_first_and_never_the_newest(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store", limit=3000)
    for number in range(3):
        store.save(artifact(key=f"{number}" * 64, payload=bytes(1000)))
        age = time.time() - 100 + number
        for path in store._folder.glob(f"{number}*"):
            os.utime(path, (age, age))
    assert store.load("1" * 64) != []  # used just now
    store.save(artifact(key="9" * 64, payload=bytes(1000)))
    assert {name[0] for name in store.names()} == {"1", "9"}
    store.save(artifact(key="8" * 64, payload=bytes(9000)))
    assert {name[0] for name in store.names()} == {"8"}


def test_regions_of_another_environment_count_and_go_first(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store", limit=3000)
    other = tmp_path / "store" / ("e" * 16) / f"{KEY[:16]}-1.region"
    other.parent.mkdir()
    other.write_bytes(bytes(2000))
    os.utime(other, (1, 1))
    store.save(artifact(payload=bytes(500)))
    assert other.exists()
    store.save(artifact(key="9" * 64, payload=bytes(2000)))
    assert not other.exists()
    assert len(store.names()) == 2


def test_half_written_files_of_a_killed_process_are_ignored_and_removed(store: ArtifactStore) -> None:
    old = time.time() - 7200
    path = store._folder / f"{KEY[:16]}-1.region.x.tmp"
    path.write_bytes(b"half")
    os.utime(path, (old, old))
    assert store.load(KEY) == []
    store.save(artifact())
    assert not path.exists()
    assert len(store.load(KEY)) == 1


def test_only_one_holds_the_build_lock_and_nobody_waits(store: ArtifactStore, tmp_path: Path) -> None:
    other = store_in(tmp_path / "store")
    lock = store.build_lock(KEY)
    assert lock is not None
    assert other.build_lock(KEY) is None
    of_another = other.build_lock("f" * 64)
    assert of_another is not None
    of_another.release()
    lock.release()
    again = other.build_lock(KEY)
    assert again is not None
    again.release()


def test_a_killed_process_releases_the_build_lock(store: ArtifactStore, tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from tests.unit.store.test_artifact_store import KEY, store_in
if lock := store_in(Path({str(tmp_path / "store")!r})).build_lock(KEY):
    print("holds", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == b"holds"
    assert store.build_lock(KEY) is None
    holder.kill()
    holder.wait()
    lock = store.build_lock(KEY)
    assert lock is not None
    lock.release()
