"""Code is loaded only from files that no other user could have written, and whose content the store's digest covers."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir, temporary_cache_dir
from torch._inductor.triton_bundler import TritonBundle, TritonBundler, TritonKernelArtifact, TritonKernelArtifacts

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.lower import private_cache
from compile_cache.backends.inductor.lower.private_cache import place_binaries

from ....rig import TOLERANCE, Model, Rig, inputs, seeded

LIBRARY, SOURCE = (".so", ".pyd", ".dll"), (".py",)
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="who may write to a folder is not in its mode")


def process(store: Path | None) -> Rig:
    return Rig(InductorBackend(), store_folder=store, source="one", workers=0)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, bytes]]:
    """A store with the two regions of the model, and the files that a load puts into inductor's cache, by place."""
    store, cache = tmp_path_factory.mktemp("kept") / "store", tmp_path_factory.mktemp("cache")
    process(store).bind(seeded(Model))(*inputs())
    with temporary_cache_dir(str(cache)):
        load(store)
    return store, content(cache)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a temporary directory for each test. Gives the home."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    private_cache._temporary_folder.cache_clear()
    private_cache._warn.cache_clear()
    yield tmp_path / "home"
    private_cache._temporary_folder.cache_clear()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Inductor's cache folder, empty and private."""
    folder = tmp_path / "inductor"
    folder.mkdir(mode=0o700)
    with temporary_cache_dir(str(folder)):
        yield folder


def load(store: Path) -> None:
    """Both regions come from the store, and are right."""
    rig = process(store)
    with rig.expect(region_loads=2, region_calls=4, graph_calls=1):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plant(cache: Path, files: dict[Path, bytes], suffixes: tuple[str, ...]) -> set[Path]:
    """Other files in the places of those."""
    planted = {name for name in files if name.suffix in suffixes}
    for name in planted:
        (cache / name).parent.mkdir(exist_ok=True)
        (cache / name).write_bytes(b"raise SystemError('planted')")
    return planted


@pytest.mark.parametrize("suffixes", [LIBRARY, SOURCE], ids=["library", "source"])
def test_a_planted_file_is_replaced_before_it_is_loaded(
    kept: tuple[Path, dict[Path, bytes]], cache: Path, suffixes: tuple[str, ...]
) -> None:
    store, files = kept
    planted = plant(cache, files, suffixes)
    assert planted
    load(store)
    assert {name: (cache / name).read_bytes() for name in planted} == {name: files[name] for name in planted}


def test_a_folder_that_others_may_write_to_is_refused(
    kept: tuple[Path, dict[Path, bytes]], cache: Path, places: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, files = kept
    plant(cache, files, (*LIBRARY, *SOURCE))
    cache.chmod(0o777)
    before = content(cache)
    with caplog.at_level(logging.WARNING):
        load(store)
    assert caplog.text.count(f"{cache} is writable by others, so no compiled code is loaded from it") == 1
    assert content(cache) == before
    ours = places / ".cache" / "resolute" / "inductor"
    assert {name for name in files if name.suffix in LIBRARY} <= content(ours).keys()
    assert ours.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)


def test_a_folder_of_another_user_is_refused(
    kept: tuple[Path, dict[Path, bytes]], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, files = kept
    plant(cache, files, (*LIBRARY, *SOURCE))
    before, real = content(cache), os.geteuid()
    theirs = private_cache.why_not_private

    def as_another_user(folder: Path) -> str | None:
        if folder.is_relative_to(store):
            return theirs(folder)
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        try:
            return theirs(folder)
        finally:
            monkeypatch.setattr(os, "geteuid", lambda: real)

    monkeypatch.setattr(private_cache, "why_not_private", as_another_user)
    with caplog.at_level(logging.WARNING):
        load(store)
    assert f"{cache} belongs to another user" in caplog.text
    assert content(cache) == before
    (ours,) = Path(tempfile.gettempdir()).glob("resolute-*")  # the home is another user's too
    assert {name for name in files if name.suffix in LIBRARY} <= content(ours).keys()


def test_nothing_is_compiled_into_a_refused_folder_either(cache: Path) -> None:
    cache.chmod(0o777)
    rig = process(None)
    with rig.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert content(cache) == {}


def test_a_folder_that_inductor_would_make_for_a_group_too_is_made_private_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = os.umask(0o002)
    try:
        with private_cache.private_cache():
            used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert used == Path(default_cache_dir())
            assert used.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_no_header_is_compiled_in_from_a_refused_folder(tmp_path: Path) -> None:
    """Inductor has them below its default folder, whatever its cache is."""
    assert private_cache.header_settings() == {}
    default = Path(default_cache_dir())
    assert default.is_relative_to(tmp_path)
    default.chmod(0o777)
    assert private_cache.header_settings() == {"cpp_cache_precompile_headers": False}


def test_tritons_own_folder_is_checked_too(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = tmp_path / "triton"
    triton.mkdir()
    triton.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton))
    with private_cache.private_cache():
        assert not Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(triton)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
    assert os.environ["TRITON_CACHE_DIR"] == str(triton)


def test_what_inductor_sets_inside_our_folder_does_not_stay(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    cache.chmod(0o777)
    with private_cache.private_cache():
        os.environ["TRITON_CACHE_DIR"] = "as its first kernel does"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_planted_binary_of_triton_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "HASH"
    folder.mkdir()
    for name in ("kernel.cubin", "kernel.json"):
        (folder / name).write_bytes(b"planted")
    files = [
        TritonKernelArtifact("kernel.cubin", b"machine code"),
        TritonKernelArtifact("kernel.json", b'{"child": "' + TritonBundler._REPLACE_BYTES + b'/kernel.cubin"}'),
        TritonKernelArtifact("kernel.ttir", b"text"),
    ]
    bundle = TritonBundle([TritonKernelArtifacts("HASH", 0, files)], [])
    TritonBundler.read_and_emit(bundle)  # it leaves a folder that is not empty
    place_binaries(bundle)
    assert (folder / "kernel.cubin").read_bytes() == b"machine code"
    assert (folder / "kernel.json").read_text() == f'{{"child": "{folder}/kernel.cubin"}}'


@pytest.mark.parametrize("keeps", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_folder_with_a_space_in_its_name_is_no_place_for_the_compiler(
    tmp_path: Path, places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keeps: bool
) -> None:
    """Torch's commands for the C++ compiler end at a space, so every region would fail."""
    (tmp_path / "my temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "my temporary"))
    with temporary_cache_dir(str(tmp_path / "my cache")):
        rig = process(tmp_path / "my store" if keeps else None)
        assert rig.bind(seeded(Model)).error(*inputs()) <= TOLERANCE
    assert rig.cache.stats.counters.compile_failures == 0
    assert rig.cache.stats.counters.region_compiles == 2
    # A region that is kept is compiled in a temporary folder, any other one in inductor's cache.
    assert ("my cache has a space in its name" in caplog.text) == (not keeps)
    assert bool(content(places)) == (not keeps), "it is compiled below the home folder"
