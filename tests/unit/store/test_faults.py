"""What is kept on disk, under each fault: of a file, of the disk at any one operation, of a killed process.

The matrix: what is kept (regions, remembered shapes, choices, refused captures) by fault. A fault costs what was kept,
never an error, and the next write repairs it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_cache.store import artifact_store

from .disk import failing, killed_in_a_child
from .kept import KEPT, regions, save_region
from .test_artifact_store import KEY, store_in


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def instead(put: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.rename(path.parent.parent / "outside")
        put(path)

    return damage


def with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("a user's")


FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": content(lambda _: b""),
    "cut": content(lambda data: data[:-1]),
    "longer": content(lambda data: data + b"!"),
    "too long": content(lambda data: data + b" " * (17 << 20)),
    "other bytes": content(lambda data: b"\xff\xfe\0" + data[3:]),
    "a list": content(lambda _: b"[]"),
    "null": content(lambda _: b"null"),
    "a number": content(lambda _: b"7"),
    "nested lists": content(lambda _: b"[" * 100_000),
    "nested objects": content(lambda _: b'{"a":' * 100_000),
    "a link": instead(lambda path: path.symlink_to(path.parent.parent / "outside")),
    "a link to nowhere": instead(lambda path: path.symlink_to("gone")),
    "a pipe": instead(lambda path: os.mkfifo(path)),
    "a user's folder": instead(with_a_file),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")
def test_a_file_that_is_not_right_costs_what_it_kept_and_is_replaced(
    tmp_path: Path, name: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    write, read, files = KEPT[name]
    write(tmp_path, 1)
    (path,) = tmp_path.glob(files)
    FAULTS[fault](path)
    outside = {each: each.read_bytes() for each in path.parent.parent.glob("outside")}
    assert read(tmp_path) == set()
    is_said = name == "a region" and fault != "missing"
    assert caplog.text.count("is invalid (") == is_said
    write(tmp_path, 2)
    is_in_the_way = path.is_dir()  # what a user may have put there stays, and nothing can be kept
    assert read(tmp_path) == (set() if is_in_the_way else {2})
    assert {each: each.read_bytes() for each in outside} == outside, "nothing follows a link"
    assert len(list(tmp_path.rglob("precious"))) == (fault == "a user's folder")


@pytest.mark.parametrize(
    ("name", "part"),
    [("a region", "about"), ("shapes", "graphs"), ("choices", "entries"), ("refused captures", "entries")],
)
def test_no_depth_of_nesting_raises(tmp_path: Path, name: str, part: str) -> None:
    """Near Python's recursion limit, JSON can still be parsed although walking through it fails."""
    write, read, files = KEPT[name]
    write(tmp_path, 1)
    (path,) = tmp_path.glob(files)
    kept = {each: each.read_bytes() for each in path.parent.iterdir()}
    header, end, rest = path.read_text().partition("\n")
    text = json.dumps({**json.loads(header), part: {"x": "NESTED"}}) + end + rest
    for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit() + 1):
        for each, content in kept.items():
            each.write_bytes(content)
        path.write_text(text.replace('"NESTED"', "[" * depth + "]" * depth))
        assert read(tmp_path) == set()


NONE, GONE = float("nan"), object()
FORMATS: Any = [99, 0, -1, "\x1b[2J", None, [], True]
ENTRIES: Any = [None, {}, [[1]], GONE]
LATENT, SIGNATURE = "graphs/0/key/signature/tensors/0/1/", "graphs/0/key/signature/"
# By the place in a file, the values that are not right there. GONE: the place is missing.
VALUES: dict[str, dict[str, list[Any]]] = {
    "shapes": {
        "format": FORMATS, "name": [{}], "graphs": ["graphs", ["graph"], {}, None, GONE],
        "graphs/0/key/role": ["sculptor", []], "graphs/0/key/backend": [[]],
        SIGNATURE + "values": [[["name", {"a": 1}]], [[1, 2]], [["name", json.loads("[" * 300 + "]" * 300)]]],
        SIGNATURE + "tensors": [[["latent", "x"]], [["latent", ["shape"]]], [["latent", None]], 3],
        LATENT + "shape": ["large", [float("inf")], [1, -4, 8, 8], [1.5], [True], [1 << 63]],
        LATENT + "dtype": [16], LATENT + "memory_format": [None], LATENT + "address": [1],
        "graphs/0/seconds": [NONE, float("inf"), -1, 10**400], "graphs/0/used": ["yesterday"],
        "graphs/0/regions": [[7], ["/etc/passwd"], ["**"], [""]],
    },
    "choices": {
        "format": FORMATS, "entries": ENTRIES, "entries/0/0/q": [[1, 2, -3, 4]], "entries/0/0/k": [[1, 2]],
        "entries/0/0/mask": [[1, 2]], "entries/0/0/mask_dtype": [1], "entries/0/1/chosen": [["cudnn"]],
        "entries/0/1/seconds": [[1]], "entries/0/1/runs": [{"math": 1}], "entries/0/1/like": [[1, 2, 3]],
    },
    "refused captures": {"format": FORMATS, "entries": ENTRIES, "entries/0/1": ["soon", NONE, None, []]},
}  # fmt: skip
SPOILED = [(name, place, value) for name, places in VALUES.items() for place, each in places.items() for value in each]


@pytest.mark.parametrize(("name", "place", "value"), SPOILED, ids=[f"{name} {place}" for name, place, _ in SPOILED])
def test_a_value_that_is_not_right_costs_the_file_which_is_replaced(
    tmp_path: Path, name: str, place: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write, read, files = KEPT[name]
    write(tmp_path, 1)
    (path,) = tmp_path.glob(files)
    holder = data = json.loads(path.read_text())
    *parts, last = (int(part) if part.isdigit() else part for part in place.split("/"))
    for part in parts:
        holder = holder[part]
    assert (last in holder if isinstance(holder, dict) else last < len(holder)) or last == "address"
    if value is GONE:
        del holder[last]
    else:
        holder[last] = value
    path.write_text(json.dumps(data))
    assert read(tmp_path) == set()
    write(tmp_path, 2)
    assert read(tmp_path) == {2}
    assert name != "shapes" or caplog.messages == []


@pytest.fixture
def fault_of_opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, str], None]]:
    def set_fault(path: Path, fault: str) -> None:
        opened, status, theirs = os.open, os.fstat, path.stat().st_ino

        def refuse(name: Any, *given: Any, **named: Any) -> int:  # chmod would not stop a test that runs as root
            if name == path:
                raise PermissionError(13, "Permission denied")
            return opened(name, *given, **named)

        def of_another(number: int) -> os.stat_result:
            found = status(number)
            changed = (*found[:4], found.st_uid + 4242, *found[5:10])
            return os.stat_result(changed) if found.st_ino == theirs else found

        if fault == "unreadable":
            monkeypatch.setattr(os, "open", refuse)
        else:
            monkeypatch.setattr(os, "fstat", of_another)

    yield set_fault


@pytest.mark.parametrize("fault", ["unreadable", "another user's"])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.skipif(sys.platform == "win32", reason="files have no owners there that Python knows")
def test_a_file_that_may_not_be_read_is_not_used(
    tmp_path: Path, name: str, fault: str, fault_of_opening: Callable[[Path, str], None]
) -> None:
    write, read, files = KEPT[name]
    write(tmp_path, 1)
    (path,) = tmp_path.glob(files)
    fault_of_opening(path, fault)
    assert read(tmp_path) == set()
    assert path.exists() is (name != "a region" or fault == "unreadable")


# --- the disk at any one operation, and a process that is killed there ---------------------------------------------

ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "denied": errno.EACCES, "broken": errno.EIO}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_disk_that_fails_anywhere_costs_only_what_is_kept(tmp_path: Path, name: str, error: str, verb: str) -> None:
    """The first operation fails, then from a fresh start the second, and so on until none is left to fail."""
    write, read, _ = KEPT[name]
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        write(folder, 1)
        operations = failing(folder, number, ERRORS[error])
        with operations.watched():
            if verb == "write":
                write(folder, 2)
            else:
                assert read(folder) <= {1}
        assert list(folder.rglob("*.tmp")) == []
        assert read(folder) <= {1, 2}
        write(folder, 3)
        assert 3 in read(folder)
        if not operations.reached:
            assert verb == "read" or 2 in read(folder)
            break
    fewest = {"write": 3, "read": 1}[verb] + 3 * (name == "a region")
    assert number > fewest, "it found too few operations"


def test_no_error_number_of_the_system_deletes_a_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any one operation of a read, and within it."""
    save_region(tmp_path, 1)
    for code in errno.errorcode:
        for number in itertools.count(1):
            operations = failing(tmp_path, number, code)
            with operations.watched():
                assert regions(tmp_path) <= {1}
            assert regions(tmp_path) == {1}, (errno.errorcode[code], number)
            if not operations.reached:
                break
        assert number > 4, "it found too few operations"
        store = store_in(tmp_path)
        with monkeypatch.context() as patch:

            def fail(*given: Any, code: int = code) -> bytes:
                raise OSError(code, os.strerror(code))

            patch.setattr(artifact_store, "read_regular_file", fail)
            assert store.load(KEY) == []
        assert store.load(KEY) == [], "this process reads it no more"
        assert regions(tmp_path) == {1}, errno.errorcode[code]


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.skipif(sys.platform == "win32", reason="a copy of the process needs fork")
def test_a_kill_anywhere_in_a_write_leaves_the_old_or_the_new(tmp_path: Path, name: str) -> None:
    write, read, _ = KEPT[name]
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        write(folder, 1)
        killed = killed_in_a_child(folder, number, lambda folder=folder: write(folder, 2) and None)  # type: ignore
        assert read(folder) in ({1}, {1, 2})
        for path in folder.rglob("*.*"):
            os.utime(path, (time.time() - 7200,) * 2)
        write(folder, 3)
        assert read(folder) >= {1, 3}
        if not killed:
            assert read(folder) == {1, 2, 3}
            break
    assert number > 3
    assert name != "a region" or list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("name", KEPT)
def test_two_writers_at_once_leave_a_whole_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read, _ = KEPT[name]
    write(tmp_path, 1)
    both, replace = threading.Barrier(2), os.replace

    def together(source: Any, target: Any) -> None:
        both.wait(60)
        replace(source, target)

    monkeypatch.setattr(os, "replace", together)
    threads = [threading.Thread(target=write, args=(tmp_path, number)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(tmp_path) & {2, 3} and read(tmp_path) <= {1, 2, 3}
