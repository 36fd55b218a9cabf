"""Manifests and bundles with any content: what is not right is refused, and no file outside the store's folder changes.

The drawn examples are the same in every run (`derandomize`), so that a change is the only reason for a new result.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_cache.store.artifact_store import Artifact, ArtifactStore
from compile_cache.store.bundle import BundleError, export_bundle, import_bundle, read_contents

from .kept import KEPT, stored_regions
from .test_artifact_store import HERE
from .test_bundle import ARTIFACTS, LIMIT, members_of, packed

drawn = settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MOST_MEMORY = 32 << 20  # bytes; the files of these tests have some thousands

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=6),
        st.sampled_from(["../../outside", "/outside", "a" * 64, "\0", 2**60, ARTIFACTS[0].name]),
    ),
    lambda inside: st.one_of(st.lists(inside, max_size=3), st.dictionaries(st.text(max_size=4), inside, max_size=3)),
)
numbers = itertools.count()


@pytest.fixture(autouse=True)
def outside(tmp_path: Path) -> Path:
    """A file that nothing may touch."""
    (tmp_path / "outside").write_text("untouched")
    return tmp_path / "outside"


def a_place(tmp_path: Path) -> Path:
    """A folder for one example, in which the store is `store`."""
    folder = tmp_path / f"{next(numbers)}"
    folder.mkdir()
    return folder


def files_beside(store: Path) -> set[Path]:
    """Everything that is neither in the store nor was there."""
    known = {store, store.parent / "given.bundle"}
    inside = {path for path in store.rglob("*") if not path.is_symlink()} | known
    return set(store.parent.rglob("*")) - inside


def within_memory(call: Callable[[], Any]) -> Any:
    tracemalloc.start()
    try:
        return call()
    finally:
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        tracemalloc.stop()


@st.composite
def changed(draw: Any, original: dict[str, Any]) -> Any:
    """JSON that is nearly right: fields are taken out, added, or exchanged, also those inside."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    data = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        holder = data
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and draw(st.booleans()):
                holder = holder[key]
                continue
            if isinstance(holder, dict) and draw(st.booleans()):
                del holder[key]
            else:
                holder[key] = draw(values)
            break
    return data


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The same bytes with some exchanged, left out or added."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.sampled_from([0, 1, 4, 100]))] = draw(st.binary(max_size=8))
    return bytes(data)


@pytest.mark.parametrize("drawn_from", ["anything", "what is nearly right"])
@pytest.mark.parametrize("kind", KEPT)
def test_a_file_with_any_content_is_read_or_left(tmp_path: Path, kind: str, drawn_from: str) -> None:
    write, read, files = KEPT[kind]
    read = stored_regions if kind == "a region" else read  # which raises
    first = tmp_path / "first"
    write(first, 1)
    assert read(first) == {1}
    (file,) = first.glob(files)
    text = file.read_bytes()
    header, end, rest = text.partition(b"\n")
    nearly = st.one_of(
        changed(json.loads(header)).map(lambda data: json.dumps(data).encode() + end + rest), damaged(text)
    )
    anything = st.one_of(st.binary(max_size=100), values.map(lambda value: json.dumps(value).encode()))

    @drawn
    @given(anything if drawn_from == "anything" else nearly)
    def check(content: bytes) -> None:
        store = a_place(tmp_path) / "store"
        shutil.copytree(first, store)
        (store / file.relative_to(first)).write_bytes(content)
        found = within_memory(lambda: read(store))
        assert drawn_from != "anything" or not found
        assert files_beside(store) == set()

    check()


class TestBundles:
    @pytest.fixture
    def bundle(self, tmp_path: Path) -> bytes:
        store = ArtifactStore(tmp_path / "first", HERE, LIMIT)
        for artifact in ARTIFACTS:
            store.save(artifact)
        export_bundle(store, tmp_path / "first.bundle")
        return (tmp_path / "first.bundle").read_bytes()

    def importing(self, tmp_path: Path, content: bytes) -> list[Artifact]:
        """What a store has after the import of this file."""
        place = a_place(tmp_path)
        file = place / "given.bundle"
        file.write_bytes(content)
        store = ArtifactStore(place / "store", HERE, LIMIT)

        def call() -> None:
            try:
                read_contents(file)
                import_bundle(file, store)
            except BundleError as error:
                assert len(str(error)) < 3_000

        within_memory(call)
        assert files_beside(place / "store") == set()
        return [store.read(name) for name in store.names()]

    def check(self, found: list[Artifact], outside: Path) -> None:
        known = {artifact.name: artifact for artifact in ARTIFACTS}
        assert [(each.about, each.payload) for each in found] == [
            (known[each.name].about, known[each.name].payload) for each in found
        ]
        assert outside.read_text() == "untouched"

    def test_a_damaged_one_adds_only_what_is_whole(self, bundle: bytes, tmp_path: Path, outside: Path) -> None:
        @drawn
        @given(damaged(bundle))
        def check(content: bytes) -> None:
            self.check(self.importing(tmp_path, content), outside)

        check()

    @pytest.mark.parametrize("name", ["environment.json", f"{ARTIFACTS[0].name}.region"])
    def test_one_with_another_index_adds_only_what_is_whole(
        self, bundle: bytes, tmp_path: Path, outside: Path, name: str
    ) -> None:
        members = members_of(bundle)
        header, end, rest = members[name].partition(b"\n")

        @drawn
        @given(changed(json.loads(header)))
        def check(data: Any) -> None:
            content = json.dumps(data).encode() + end + rest
            self.check(self.importing(tmp_path, packed({**members, name: content})), outside)

        check()

    def test_one_with_members_of_any_name_writes_none_of_them(
        self, bundle: bytes, tmp_path: Path, outside: Path
    ) -> None:
        part = st.sampled_from(["..", "outside", "regions", "", "/", "C:", "store", ARTIFACTS[0].name + ".region"])
        names = st.lists(part, min_size=1, max_size=4).map("/".join)

        @drawn
        @given(st.dictionaries(names, st.binary(max_size=20), max_size=3))
        def check(more: dict[str, bytes]) -> None:
            self.check(self.importing(tmp_path, packed({**more, **members_of(bundle)})), outside)

        check()
