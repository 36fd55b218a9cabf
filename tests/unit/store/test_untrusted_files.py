"""Manifests and bundles with any content: what is not right is refused, and no file outside the store's folder changes.

The drawn examples are the same in every run (`derandomize`), so that a change is the only reason for a new result.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_cache.calls.cache import GraphCache
from compile_cache.captures.attempts import CaptureAttempts
from compile_cache.captures.captures import Captures, capture_key
from compile_cache.config import CacheConfig
from compile_cache.errors import NoGainError
from compile_cache.stats import Stats
from compile_cache.store.artifact_store import (
    Artifact,
    ArtifactStore,
    InvalidArtifactError,
    checked_manifest,
    parse_json,
)
from compile_cache.store.bundle import BundleError, export_bundle, import_bundle, read_contents
from compile_cache.store.shape_history import ShapeHistory

from ..fakes import FakeProgram, Module
from .test_artifact_store import HERE
from .test_bundle import ARTIFACTS, LIMIT, packed

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


class TestManifests:
    def test_any_json_is_a_manifest_or_is_refused(self) -> None:
        @drawn
        @given(st.one_of(st.binary(max_size=100), values.map(lambda value: json.dumps(value).encode())))
        def check(content: bytes) -> None:
            try:
                assert type(checked_manifest(parse_json(content))) is dict
            except InvalidArtifactError as error:
                assert len(str(error)) < 300

        check()

    def test_a_manifest_that_was_changed_loads_nothing_and_costs_nothing(self, tmp_path: Path) -> None:
        artifact = ARTIFACTS[0]
        first = ArtifactStore(tmp_path / "first", HERE, LIMIT)
        first.save(artifact)
        (manifest,) = (path for path in first._folder.glob("*-*.json"))
        original = json.loads(manifest.read_bytes())
        text = manifest.read_bytes()

        @drawn
        @given(st.one_of(changed(original).map(lambda data: json.dumps(data).encode()), damaged(text)))
        def check(content: bytes) -> None:
            place = a_place(tmp_path)
            store = ArtifactStore(place / "store", HERE, LIMIT)
            store.save(artifact)
            (store._folder / f"{artifact.name}.json").write_bytes(content)
            found = within_memory(lambda: store.load(artifact.key))
            # A label is for people: it is the only part that no digest covers.
            assert [each.name for each in found] in ([], [artifact.name])
            assert [(each.key, each.about, each.payload) for each in found] in (
                [],
                [(artifact.key, artifact.about, artifact.payload)],
            )
            assert files_beside(place / "store") == set()

        check()

    def test_any_file_of_remembered_shapes_is_read_or_left(self, tmp_path: Path) -> None:
        @drawn
        @given(st.one_of(st.binary(max_size=100), values.map(lambda value: json.dumps(value).encode())))
        def check(content: bytes) -> None:
            place = a_place(tmp_path) / "store"
            place.mkdir()
            (place / f"{'a' * 16}.json").write_bytes(content)
            assert within_memory(lambda: ShapeHistory(place).models()) == []
            assert files_beside(place) == set()

        check()

    @pytest.mark.parametrize("kind", ["shapes", "captures"])
    def test_data_that_is_nearly_right_never_costs_a_call(self, tmp_path: Path, kind: str) -> None:
        program, call = FakeProgram(), Module().call()
        key = capture_key(program, call)

        def read(folder: Path) -> bool:
            if kind == "shapes":
                shapes = ShapeHistory(folder / kind)
                return bool(shapes.models() and shapes.of_model(key.graph.model))
            return CaptureAttempts(Captures(0), Stats(), CacheConfig(store_folder=folder)).gains_nothing(key)

        first = tmp_path / "first"
        program.capture_failure = NoGainError(0.25)
        GraphCache(CacheConfig(store_folder=first)).run(program, call)
        (file,) = (first / kind).iterdir()
        original = json.loads(file.read_text("utf-8"))
        assert read(first)

        @drawn
        @given(changed(original))
        def check(data: Any) -> None:
            place = a_place(tmp_path) / "store"
            (place / kind).mkdir(parents=True)
            (place / kind / file.name).write_text(json.dumps(data), "utf-8")
            assert within_memory(lambda: read(place)) in (True, False)
            assert files_beside(place) == set()

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

    @pytest.mark.parametrize("name", ["environment.json", f"{ARTIFACTS[0].name}.json"])
    def test_one_with_another_index_adds_only_what_is_whole(
        self, bundle: bytes, tmp_path: Path, outside: Path, name: str
    ) -> None:
        members = members_of(bundle)

        @drawn
        @given(changed(json.loads(members[name])))
        def check(data: Any) -> None:
            self.check(self.importing(tmp_path, packed({**members, name: json.dumps(data).encode()})), outside)

        check()

    def test_one_with_members_of_any_name_writes_none_of_them(
        self, bundle: bytes, tmp_path: Path, outside: Path
    ) -> None:
        part = st.sampled_from(["..", "outside", "regions", "", "/", "C:", "store", ARTIFACTS[0].name + ".bin"])
        names = st.lists(part, min_size=1, max_size=4).map("/".join)

        @drawn
        @given(st.dictionaries(names, st.binary(max_size=20), max_size=3))
        def check(more: dict[str, bytes]) -> None:
            self.check(self.importing(tmp_path, packed({**more, **members_of(bundle)})), outside)

        check()

    def test_a_member_of_more_bytes_than_its_manifest_says_is_not_read(
        self, bundle: bytes, tmp_path: Path, outside: Path
    ) -> None:
        for name in ("environment.json", f"{ARTIFACTS[0].name}.json", f"{ARTIFACTS[0].name}.bin"):
            content = packed({**members_of(bundle), name: bytes(96 << 20)})
            self.check(self.importing(tmp_path, content), outside)


def members_of(bundle: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
