"""Bundles: export and import, the reasons for a refusal, and that no damaged or hostile file does any harm."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_cache.store.artifact_store import Artifact, ArtifactStore, content_of
from compile_cache.store.bundle import (
    BundleError,
    BundleReport,
    environments,
    export_bundle,
    import_bundle,
    read_contents,
)
from scripts.commands import bundle
from scripts.errors import SetupError

from ...programs import run_command
from .spoiled import INVALID, NAME, entry_of
from .test_artifact_store import HERE, store_in

ARTIFACTS = [Artifact(key * 64, "ResBlock", {"static": [number]}, b"code " + bytes(range(256)) * 4)
             for number, key in enumerate("a1f")]  # fmt: skip
FIRST = ARTIFACTS[0].name
SIZE = len(content_of(ARTIFACTS[0], HERE))
LIMIT = 1 << 20


@pytest.fixture
def here(tmp_path: Path) -> ArtifactStore:
    """A store with three artifacts."""
    store = store_in(tmp_path / "here")
    for artifact in ARTIFACTS:
        store.save(artifact)
    return store


@pytest.fixture
def there(tmp_path: Path) -> ArtifactStore:
    """The empty store of another machine with the same environment."""
    return store_in(tmp_path / "there")


@pytest.fixture
def file(here: ArtifactStore, tmp_path: Path) -> Path:
    export_bundle(here, tmp_path / "regions.bundle")
    return tmp_path / "regions.bundle"


def contents(store: ArtifactStore) -> list[Artifact]:
    return [store.read(name) for name in store.names()]


def expected() -> list[Artifact]:
    return sorted(ARTIFACTS, key=lambda artifact: artifact.name)


# --- there and back --------------------------------------------------------------------------------------------


def test_an_export_can_be_imported(here: ArtifactStore, there: ArtifactStore, tmp_path: Path) -> None:
    file = tmp_path / "regions.bundle"
    size = SIZE * len(ARTIFACTS)
    names = [artifact.name for artifact in expected()]
    assert export_bundle(here, file) == BundleReport(HERE, names, [], {}, size)
    assert import_bundle(file, there) == BundleReport(HERE, names, [], {}, size)
    assert contents(there) == expected()


def test_an_environment_without_artifacts_is_not_offered(here: ArtifactStore, tmp_path: Path) -> None:
    folder, updated = tmp_path / "here", replace(HERE, torch="2.10.0")
    store_in(folder, updated)
    known = {environment: name for name, environment in environments(folder).items()}
    with pytest.raises(SetupError, match="has nothing for this machine's environment") as caught:
        bundle.export_to(tmp_path / "a.bundle", bundle.Place(None, folder, known[updated]))
    there, *others = str(caught.value).splitlines()[1:]
    assert there == f"  --environment {known[HERE]} has: torch: 2.10.0 here, {HERE.torch} there"
    assert others == []


def test_an_empty_store_names_the_options_that_lead_to_another(tmp_path: Path) -> None:
    """A server with another base directory keeps its store there."""
    store_in(tmp_path / "empty")
    (known,) = environments(tmp_path / "empty")
    with pytest.raises(SetupError, match=r"sample once .* -- --base-directory FOLDER`, or name the store with --store"):
        bundle.export_to(tmp_path / "a.bundle", bundle.Place(None, tmp_path / "empty", known))


def test_the_same_artifacts_make_the_same_file(here: ArtifactStore, file: Path, tmp_path: Path) -> None:
    """The folder, the order of saving and the time do not matter."""
    elsewhere = store_in(tmp_path / "another" / "place")
    for artifact in reversed(ARTIFACTS):
        elsewhere.save(artifact)
    for path in elsewhere._folder.iterdir():
        os.utime(path, (1, 1))
    export_bundle(elsewhere, tmp_path / "second.bundle")
    assert (tmp_path / "second.bundle").read_bytes() == file.read_bytes()
    assert str(tmp_path).encode() not in file.read_bytes()


def test_importing_twice_changes_nothing(there: ArtifactStore, file: Path) -> None:
    import_bundle(file, there)
    before = {path: path.stat().st_mtime_ns for path in there._folder.iterdir()}
    report = import_bundle(file, there)
    assert (report.done, report.known, report.bytes) == ([], [artifact.name for artifact in expected()], 0)
    assert {path: path.stat().st_mtime_ns for path in there._folder.iterdir()} == before


def test_an_import_repairs_a_damaged_artifact_in_the_store(there: ArtifactStore, file: Path) -> None:
    import_bundle(file, there)
    (there._folder / f"{FIRST}.region").write_bytes(b"")
    assert import_bundle(file, there).done == [FIRST]
    assert contents(there) == expected()


def test_a_damaged_artifact_is_not_exported_and_not_touched(here: ArtifactStore, tmp_path: Path) -> None:
    (here._folder / f"{FIRST}.region").write_bytes(b"")
    report = export_bundle(here, tmp_path / "file")
    assert FIRST not in report.done
    assert len(report.done) == 2
    assert report.refused == {FIRST: "its manifest is damaged"}
    assert (here._folder / f"{FIRST}.region").exists()


def test_an_empty_store_exports_nothing_and_does_not_change_the_file(there: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(BundleError, match="no compiled region"):
        export_bundle(there, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "before"
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_file_that_cannot_be_written_is_one_sentence(here: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be written: No such file"):
        export_bundle(here, tmp_path / "nowhere" / "file")


def test_other_environments_are_listed_and_not_exported(
    here: ArtifactStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(HERE, device="NVIDIA L4, sm_89")
    store = store_in(tmp_path / "here", other)
    store.save(Artifact("9" * 64, "ResBlock", {}, b"for the other"))
    (tmp_path / "here" / "garbage").mkdir()
    (tmp_path / "here" / "garbage" / "environment.json").write_text("[")
    assert set(environments(tmp_path / "here").values()) == {HERE, other}
    assert "garbage is left out (its manifest is damaged)" in caplog.text
    assert set(environments(tmp_path / "here")) == {here._folder.name, store._folder.name}
    assert len(export_bundle(here, tmp_path / "file").done) == len(ARTIFACTS)


# --- room ------------------------------------------------------------------------------------------------------


def mine(number: int) -> Artifact:
    return replace(ARTIFACTS[0], key=f"{number:x}" * 64)


def test_an_import_never_evicts_a_region(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", limit=4 * SIZE)
    other = store_in(tmp_path / "there", replace(HERE, device="NVIDIA L4, sm_89"), 4 * SIZE)
    assert store.save(mine(7))
    assert other.save(mine(8))
    with pytest.raises(BundleError, match="nothing was imported"):
        import_bundle(file, store)
    assert (contents(store), contents(other)) == ([mine(7)], [mine(8)])
    larger = store_in(tmp_path / "there", limit=5 * SIZE)
    assert len(import_bundle(file, larger).done) == 3
    assert contents(other) == [mine(8)]
    assert mine(7) in contents(larger)


def test_the_refusal_names_the_numbers_and_what_to_set(here: ArtifactStore, tmp_path: Path) -> None:
    mega = 1 << 20
    here.save(Artifact("7" * 64, "Upsample", {}, bytes(5 * mega // 2)))
    export_bundle(here, tmp_path / "file")
    store = store_in(tmp_path / "there", limit=5 * mega)
    store.save(Artifact("8" * 64, "Upsample", {}, bytes(3 * mega)))
    with pytest.raises(BundleError) as refusal:
        import_bundle(tmp_path / "file", store)
    for text in ("adds 2.5 MB to the 3.0 MB", "limit is 5.0 MB", "Set RESOLUTE_STORE_MB to 6 or more"):
        assert text in str(refusal.value)
    assert store.report()["regions"] == 1


def test_artifacts_that_the_store_already_has_need_no_room(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", limit=4 * SIZE)
    for artifact in (mine(7), *ARTIFACTS[:2]):
        store.save(artifact)
    report = import_bundle(file, store)
    assert (report.done, len(report.known)) == ([ARTIFACTS[2].name], 2)
    assert len(contents(store)) == 4
    smaller = store_in(tmp_path / "there", limit=SIZE)  # nothing to write, so nothing to evict
    assert len(import_bundle(file, smaller).known) == 3
    assert len(contents(store)) == 4


def test_a_truncated_artifact_counts_with_its_missing_bytes(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", limit=4 * SIZE)
    for artifact in (mine(7), *ARTIFACTS):
        store.save(artifact)
    (store._folder / f"{FIRST}.region").write_bytes(b"half")
    with pytest.raises(BundleError, match="nothing was imported"):
        import_bundle(file, store_in(tmp_path / "there", limit=4 * SIZE - 1))
    assert import_bundle(file, store).done == [FIRST]
    assert len(contents(store)) == 4


# --- another environment ---------------------------------------------------------------------------------------


def test_every_difference_is_named(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", replace(HERE, torch="2.10.0", device="NVIDIA L4, sm_89"))
    with pytest.raises(BundleError, match=r"torch: 2\.10\.0 here, 2\.11\.0 there; device: NVIDIA L4, sm_89 here, "):
        import_bundle(file, store)
    assert store.names() == []


def test_a_digest_that_differs_is_explained(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", replace(HERE, source="another"))
    with pytest.raises(BundleError, match=r"source: another here, .*source is the code of comfy-kitchen and Resolute"):
        import_bundle(file, store)


# --- foreign files ---------------------------------------------------------------------------------------------


class Forged:
    """The members of a bundle, to be changed and written again: its environment, its first region, and the others."""

    def __init__(self, file: Path) -> None:
        self.members = members_of(file.read_bytes())
        self.environment = json.loads(self.members.pop("environment.json"))
        self.entry = entry_of(ARTIFACTS[0], HERE)
        del self.members[self.entry.file]

    def write(self, file: Path) -> Path:
        environment = {} if self.environment is None else {"environment.json": json.dumps(self.environment).encode()}
        file.write_bytes(packed({**environment, self.entry.file: self.entry.content(), **self.members}))
        return file


def members_of(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


Change = Callable[[Forged], object]


def environment(**values: Any) -> Change:
    return lambda forged: forged.environment.update(values)


def instead(environment: Any) -> Change:
    return lambda forged: setattr(forged, "environment", environment)


WHOLE: dict[str, tuple[Change, str]] = {
    "no environment": (instead(None), "environment.json is missing"),
    "another environment": (instead([]), "is no EnvironmentFingerprint"),
    "an unknown component": (environment(driver="580"), "has no ['driver']"),
    "a missing component": (lambda forged: forged.environment.pop("device"), "'device'"),
    "a component of another kind": (environment(torch=2), "2 is no str"),
    "a component for the terminal": (environment(torch="\x1b[2J"), "environment's 'torch' is not printable text"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_bundle_of_another_kind_is_refused_whole(there: ArtifactStore, file: Path, kind: str) -> None:
    change, reason = WHOLE[kind]
    forged = Forged(file)
    change(forged)
    with pytest.raises(BundleError) as refusal:
        import_bundle(forged.write(file), there)
    assert reason in str(refusal.value)
    assert there.names() == []


def special(kind: bytes, **values: Any) -> bytes:
    """The header of another kind of member, under the name of a region's payload."""
    member = tarfile.TarInfo(f"{FIRST}.region")
    member.type = kind
    for name, value in values.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT)


def test_a_member_that_is_no_plain_file_is_not_followed_expanded_or_looked_for(
    there: ArtifactStore, file: Path, tmp_path: Path
) -> None:
    """Links, devices, sparse files that expand, headers that rename, and sizes that lead out of the file or back."""
    (tmp_path / "outside").write_bytes(b"secret")
    headers = [
        special(tarfile.SYMTYPE, linkname=str(tmp_path / "outside")),
        special(tarfile.LNKTYPE, linkname="environment.json"),
        special(tarfile.FIFOTYPE),
        special(tarfile.DIRTYPE),
        special(tarfile.GNUTYPE_SPARSE, size=1 << 40),
        special(tarfile.XHDTYPE, size=1 << 40),
        special(tarfile.GNUTYPE_LONGNAME, size=1 << 40),
        special(tarfile.REGTYPE, size=1 << 40),
        special(tarfile.REGTYPE, size=-512),
    ]
    rest = file.read_bytes()
    for header in headers:
        file.write_bytes(header + rest)
        with pytest.raises(BundleError, match="is not a bundle of this version, or it is damaged"):
            import_bundle(file, there)
    file.write_bytes(rest[:1024] + rest)  # the environment's header and content come twice
    with pytest.raises(BundleError, match="is in it twice"):
        import_bundle(file, there)
    assert there.names() == []


@pytest.mark.parametrize("content", [b"", b"PK", b"no tar at all" * 99, b"PK\x05\x06" + bytes(18), bytes(2048)])
def test_a_file_that_is_not_a_bundle_is_refused(there: ArtifactStore, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BundleError, match=r"is not a bundle|environment\.json is missing"):
        import_bundle(tmp_path / "file", there)
    with pytest.raises(BundleError, match="There is no file"):
        import_bundle(tmp_path / "gone", there)
    with pytest.raises(BundleError, match="is not a bundle"):
        import_bundle(tmp_path, there)


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_entry_is_refused_with_its_reason_and_the_others_are_imported(
    there: ArtifactStore, file: Path, kind: str
) -> None:
    change, reason = INVALID[kind]
    forged = Forged(file)
    change(forged.entry)
    report = import_bundle(forged.write(file), there)
    assert any(reason in why for why in report.refused.values())
    assert contents(there) == [artifact for artifact in expected() if artifact.name != FIRST]
    assert report.done == there.names()


def test_files_that_are_no_part_of_a_region_are_reported_and_written_nowhere(
    there: ArtifactStore, file: Path, tmp_path: Path
) -> None:
    forged = Forged(file)
    evil = ["../../evil", f"regions/../../{FIRST}.bin", "/etc/evil.json", "\x1b[2J"]
    forged.members |= dict.fromkeys(evil, b"evil")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    report = import_bundle(forged.write(file), there)
    assert report.refused == {ascii(name): "it is no region" for name in evil}
    assert all(name.isprintable() for name in report.refused)
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent for path in new} == {there._folder}
    assert contents(there) == expected()


def test_an_artifact_that_cannot_be_written_is_refused_and_not_counted(
    there: ArtifactStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    report = import_bundle(file, there)
    assert (report.done, report.bytes, len(report.refused)) == ([], 0, 3)
    assert there.names() == []


def test_reading_a_bundles_index_writes_nothing(file: Path, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    found = read_contents(file)
    assert found.environment == HERE
    assert found.artifacts == [(artifact.name, "ResBlock", SIZE) for artifact in expected()]
    assert set(tmp_path.rglob("*")) == before


# --- the command -----------------------------------------------------------------------------------------------


def command(*arguments: object, answer: str = "") -> tuple[int, str, str]:
    return run_command("bundle", *arguments, given=answer)


@pytest.fixture
def onto(there: ArtifactStore) -> list[object]:
    """Options that name the store, so that the command does not have to start ComfyUI."""
    return ["--store", there._root, "--environment", there._folder.name]


def test_show_lists_the_contents(file: Path) -> None:
    code, output, _ = command("show", file)
    assert code == 0
    assert "3 compiled regions" in output
    assert "ResBlock: 3" in output
    assert "device: NVIDIA H200, sm_90" in output


def test_export_and_import_by_command(
    here: ArtifactStore, there: ArtifactStore, onto: list[object], tmp_path: Path
) -> None:
    file = tmp_path / "by-command"
    code, output, _ = command("export", file, "--store", here._root, "--environment", here._folder.name)
    assert (code, output) == (0, f"3 regions (0.0 MB) exported to {file}.\n")
    code, output, _ = command("import", file, *onto, "--yes")
    assert code == 0
    assert "A bundle is compiled code" in output
    assert "3 regions (0.0 MB) imported" in output
    assert contents(there) == expected()
    assert "3 were in the store already" in command("import", file, *onto, "--yes")[1]


@pytest.mark.parametrize("answer", ["", "no\n", "y\n"])
def test_nothing_is_imported_without_the_answer_yes(
    there: ArtifactStore, file: Path, onto: list[object], answer: str
) -> None:
    code, output, error = command("import", file, *onto, answer=answer)
    assert code == 1
    assert "A bundle is compiled code" in output
    assert "nothing was imported" in error
    assert there.names() == []
    assert command("import", file, *onto, answer="yes\n")[0] == 0
    assert contents(there) == expected()


def test_another_environments_bundle_is_refused_before_the_question(file: Path, tmp_path: Path) -> None:
    store = store_in(tmp_path / "there", replace(HERE, torch="2.10.0"))
    options = ["--store", store._root, "--environment", store._folder.name, "--yes"]
    code, output, error = command("import", file, *options)
    assert (code, output) == (1, "")
    assert "torch: 2.10.0 here, 2.11.0 there" in error
    assert "Traceback" not in error


def test_a_refused_entry_is_reported_and_sets_the_exit_code(
    there: ArtifactStore, file: Path, onto: list[object]
) -> None:
    forged = Forged(file)
    INVALID["one byte differs"][0](forged.entry)
    code, output, error = command("import", forged.write(file), *onto, "--yes")
    assert code == 1
    assert "2 regions" in output
    assert error == f"refused: {FIRST}: {NAME}\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "/nowhere/file"], "There is no file"),
        (["export", "file"], "--comfyui must name ComfyUI's folder"),
        (["export", "file", "--comfyui", "/nowhere"], "--comfyui must name ComfyUI's folder"),
        (["export", "file", "--store", "/nowhere", "--environment", "abc"], "has no environment 'abc'; it has none"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", "/nowhere")
    code, output, error = command(*arguments)
    assert (code, output) == (1, "")
    assert error.startswith("error: ")
    assert reason in error
    assert len(error.splitlines()) == 1


def test_the_file_is_a_plain_tar_of_the_stores_folder(here: ArtifactStore, file: Path) -> None:
    with tarfile.open(file) as tar:
        members = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
        assert all((each.mtime, each.uid, each.uname) == (0, 0, "") for each in tar.getmembers())
    assert members == {path.name: path.read_bytes() for path in here._folder.iterdir()}
