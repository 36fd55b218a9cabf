"""Compiled regions on disk: what is kept, what is refused, and that nothing in there costs more than a compile."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from compile_cache.artifact_store import Artifact, ArtifactStore, StoreError
from compile_cache.fingerprint import EnvironmentFingerprint
from scripts.support.places import ROOT

HERE = EnvironmentFingerprint(
    torch="2.11.0",
    triton="3.6.0",
    python="3.11",
    platform="linux x86_64",
    device="NVIDIA H200, sm_90",
    precision="tf32 matmul off",
    settings="default",
    source="abc",
)
KEY = "a" * 64


def store_in(folder: Path, environment: EnvironmentFingerprint = HERE, limit: int = 1 << 20) -> ArtifactStore:
    return ArtifactStore(folder, environment, limit)


def artifact(key: str = KEY, payload: bytes = b"machine code", **about: object) -> Artifact:
    return Artifact(key, "ResBlock", about, payload)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return store_in(tmp_path / "store")


def only_file(store: ArtifactStore, ending: str) -> Path:
    (found,) = store._folder.glob(f"*-*{ending}")
    return found


def test_what_is_saved_is_found_by_another_process(store: ArtifactStore, tmp_path: Path) -> None:
    kept = artifact(static=[[0, 320]])
    store.save(kept)
    assert store_in(tmp_path / "store").load(KEY) == [kept]


def test_two_artifacts_of_one_key_live_side_by_side_and_known_ones_are_not_read_again(store: ArtifactStore) -> None:
    one, two = artifact(static=[1]), artifact(static=[2])
    store.save(one)
    store.save(two)
    assert {each.name for each in store.load(KEY)} == {one.name, two.name}
    assert store.load(KEY, frozenset({one.name})) == [two]


def test_keys_that_begin_alike_are_not_taken_for_each_other(store: ArtifactStore) -> None:
    store.save(artifact(key="a" * 63 + "b"))
    assert store.load(KEY) == []


def test_one_artifact_saved_twice_is_there_once(store: ArtifactStore) -> None:
    store.save(artifact())
    store.save(artifact())
    assert len(store.names()) == 1


@pytest.mark.parametrize("name", [field.name for field in fields(EnvironmentFingerprint)])
def test_another_environment_finds_nothing(store: ArtifactStore, tmp_path: Path, name: str) -> None:
    store.save(artifact())
    other = replace(HERE, **{name: 99 if name == "format" else "other"})
    assert store_in(tmp_path / "store", other).load(KEY) == []
    assert len(store.load(KEY)) == 1


def truncated(store: ArtifactStore) -> None:
    path = only_file(store, ".bin")
    path.write_bytes(path.read_bytes()[:-1])


def flipped(store: ArtifactStore) -> None:
    path = only_file(store, ".bin")
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def without_payload(store: ArtifactStore) -> None:
    only_file(store, ".bin").unlink()


def changed(**values: object) -> Callable[[ArtifactStore], None]:
    def change(store: ArtifactStore) -> None:
        path = only_file(store, ".json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def no_json(store: ArtifactStore) -> None:
    only_file(store, ".json").write_text("{")


DAMAGES = {
    "truncated payload": truncated,
    "one byte differs": flipped,
    "payload is missing": without_payload,
    "manifest is no JSON": no_json,
    "manifest is no object": lambda store: only_file(store, ".json").write_text("[]") and None,
    "a future format": changed(format=99),
    "an older format": changed(format=0),
    "no checksum": changed(sha256=None),
    "about is no object": changed(about=3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_or_foreign_is_refused_with_its_reason_and_removed(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store.save(artifact())
    DAMAGES[damage](store)
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) == []
    assert "is not used (" in caplog.text
    assert list(store._folder.glob("*-*.*")) == []
    store.save(artifact())
    assert len(store.load(KEY)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    store_in(tmp_path / "store")
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StoreError, match="can be written by others"):
        store_in(tmp_path / "store")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_the_folder_is_its_users_alone(store: ArtifactStore, tmp_path: Path) -> None:
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be kept"):
        store_in(tmp_path / "file" / "store")


def test_the_least_recently_used_go_first_and_never_the_newest(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store", limit=2500)
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


def test_what_a_killed_process_left_half_written_is_no_artifact_and_goes(store: ArtifactStore) -> None:
    old = time.time() - 7200
    for name in (f"{KEY[:16]}-1.bin.x.tmp", f"{KEY[:16]}-2.bin"):
        (store._folder / name).write_bytes(b"half")
        os.utime(store._folder / name, (old, old))
    assert store.load(KEY) == []
    store.save(artifact())
    assert len(list(store._folder.glob("*-*.*"))) == 2
    assert len(store.load(KEY)) == 1


def test_where_nothing_can_be_written_it_says_so_and_goes_on(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        store.save(artifact())
    assert "No space left on device" in caplog.text
    assert list(store._folder.glob("*-*.*")) == []


def test_one_builds_and_the_others_wait(store: ArtifactStore, tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def build(number: int) -> None:
        with store_in(tmp_path / "store").building(KEY, lambda: None):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    threads = [threading.Thread(target=build, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_waiting_can_be_cancelled_and_the_lock_stays_with_its_holder(store: ArtifactStore, tmp_path: Path) -> None:
    class Cancelled(BaseException):
        pass

    def cancel() -> None:
        raise Cancelled

    with store.building(KEY, lambda: None):
        with pytest.raises(Cancelled), store_in(tmp_path / "store").building(KEY, cancel):
            raise AssertionError("it did not wait")
        with pytest.raises(Cancelled), store_in(tmp_path / "store").building(KEY, cancel):
            raise AssertionError("it did not wait")


def test_a_process_that_is_killed_lets_go(store: ArtifactStore, tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from tests.unit.test_artifact_store import KEY, store_in
with store_in(Path({str(tmp_path / "store")!r})).building(KEY, lambda: None):
    print("holds", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == b"holds"
    holder.kill()
    holder.wait()
    with store.building(KEY, lambda: pytest.fail("it waits for a dead process")):
        pass
