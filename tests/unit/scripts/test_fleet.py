"""The parts of a fleet that need no Ray: what a workflow needs, how replicas are ranked, and what the ingress keeps."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import mimetypes
import socket
import sqlite3
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import SetupError
from scripts.serving import command, config
from scripts.serving.background import Background
from scripts.serving.comfyui_client import files_in, moved
from scripts.serving.files import Files, RefusedError, content_type
from scripts.serving.need import Need, need_of
from scripts.serving.ranking import Candidate, Warmth, explain, rank, warmth
from scripts.serving.readiness import Readiness
from scripts.serving.records import Record, Records
from scripts.serving.warm_ups import WarmUps

from ...programs import run_command, run_python
from ..project.test_architecture import SOURCES, name_of, top_level

NEED = {"shapes": ["m 512x512x1"], "structures": ["s"], "files": ["f"], "chains": ["m"]}
CAPTURE = {"shapes": ["m 512x512x1"], "structures": ["s"], "files": ["f"]}


def workflow(width: int = 512, checkpoint: str = "a.safetensors", seed: int = 1) -> dict[str, Any]:
    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    return {
        "load": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "text": node("CLIPTextEncode", text="a lighthouse", clip=["load", 1]),
        "compiled": node("ResoluteCompileModel", model=["load", 0], backend="auto"),
        "latent": node("EmptyLatentImage", width=width, height=512, batch_size=1),
        "sample": node(
            "KSampler", model=["compiled", 0], positive=["text", 0], negative=["text", 0], latent_image=["latent", 0],
            seed=seed, steps=4, cfg=5.0,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["load", 2]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="x"),
    }  # fmt: skip


def groups(candidates: list[Candidate], imbalance: int = 4, **need: Any) -> list[list[str]]:
    return rank(candidates, {**NEED, **need}, imbalance).groups


class TestTheNeedOfAWorkflow:
    def test_it_has_the_workflow_its_models_and_their_files(self) -> None:
        need = need_of(workflow())
        assert [len(each) for each in (need.shapes, need.chains, need.files)] == [1, 1, 1]

    @pytest.mark.parametrize(
        ("node", "change"),
        [
            ("sample", {"seed": 2, "steps": 30, "cfg": 7.5, "denoise": 0.5}),
            ("sample", {"seed": ["dice", 0]}),
            ("text", {"text": "a cat"}),
            ("text", {"text": ["words", 0]}),
            ("save", {"filename_prefix": "y"}),
        ],
    )
    def test_seeds_texts_and_names_of_outputs_change_nothing(self, node: str, change: dict[str, Any]) -> None:
        other = workflow()
        other["words"] = {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "a cat"}}
        other["dice"] = {"class_type": "PrimitiveInt", "inputs": {"value": 7}}
        other["shown"] = {"class_type": "PreviewAny", "inputs": {"a": ["dice", 0], "b": ["words", 0]}}
        before = need_of(other)
        other[node]["inputs"] |= change
        other["words"]["inputs"]["value"] = "a dog"
        assert need_of(other) == before

    def test_the_ids_of_nodes_change_nothing(self) -> None:
        text = json.dumps(workflow())
        for number, name in enumerate(workflow()):
            text = text.replace(f'"{name}": {{', f'"{number}": {{').replace(f'["{name}",', f'["{number}",')
        assert set(json.loads(text)) == {str(number) for number in range(7)}
        assert need_of(json.loads(text)) == need_of(workflow())

    @pytest.mark.parametrize(
        ("node", "change"),
        [
            ("latent", {"batch_size": 2}),
            ("sample", {"cfg": 1.0}),
            ("compiled", {"backend": "eager"}),
            ("sample", {"model": ["load", 0]}),
        ],
    )
    def test_what_may_change_a_shape_or_the_code_makes_another_need(self, node: str, change: dict[str, Any]) -> None:
        other = workflow()
        other[node]["inputs"] |= change
        assert need_of(other).shapes != need_of(workflow()).shapes

    def test_a_picture_counts_with_its_size_in_place_of_its_name(self) -> None:
        def of(name: str) -> Need:
            prompt = workflow()
            prompt["latent"] = {"class_type": "LoadImage", "inputs": {"image": name}}
            return need_of(prompt, {"a.png": (64, 64), "b.png": (64, 64), "c.png": (72, 64)}.get)

        assert of("a.png") == of("b.png") != of("c.png")
        assert of("unknown.png") != of("missing.png")

    def test_another_size_is_another_shape_of_the_same_model(self) -> None:
        here, there = need_of(workflow()), need_of(workflow(width=768))
        assert here.chains == there.chains
        assert not set(here.shapes) & set(there.shapes)

    def test_another_checkpoint_is_another_model_and_file(self) -> None:
        here, there = need_of(workflow()), need_of(workflow(checkpoint="b.safetensors"))
        assert not set(here.chains) & set(there.chains)
        assert here.files != there.files

    @pytest.mark.parametrize("prompt", [None, [], {}, {"1": {}}, {"nodes": []}, {"1": {"class_type": "X"}}])
    def test_what_is_no_workflow_needs_nothing_known(self, prompt: Any) -> None:
        assert need_of(prompt) == Need()

    def test_a_workflow_that_leads_back_to_itself_needs_nothing_known(self) -> None:
        prompt = workflow()
        prompt["a"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["b", 0]}}
        prompt["b"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["a", 0]}}
        prompt["sample"]["inputs"]["model"] = ["a", 0]
        assert need_of(prompt) == Need()

    def test_a_long_chain_is_read_without_recursion(self) -> None:
        prompt = workflow()
        before = prompt["sample"]["inputs"]["model"]
        for number in range(5_000):
            prompt[f"{number}"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": before}}
            before = [f"{number}", 0]
        prompt["sample"]["inputs"]["model"] = before
        assert len(need_of(prompt).shapes) == 1


class TestRanking:
    def test_warmth_goes_from_a_capture_over_regions_and_the_model_to_any(self) -> None:
        reports = [{}, {"files": ["f"]}, {"structures": ["s"]}, CAPTURE]
        assert [warmth(NEED, each) for each in reports] == list(Warmth)

    def test_an_unknown_need_makes_nothing_warm(self) -> None:
        assert warmth(Need().plain(), CAPTURE) is Warmth.ANY

    def test_the_warmest_comes_first(self) -> None:
        found = groups(
            [Candidate("any", 0), Candidate("regions", 1, {"structures": ["s"]}), Candidate("hot", 2, CAPTURE)]
        )
        assert found == [["hot"], ["regions"], ["any"]]

    def test_a_replica_with_regions_and_the_file_comes_before_one_with_regions(self) -> None:
        both = {"structures": ["s"], "files": ["f"]}
        assert groups([Candidate("one", 0, {"structures": ["s"]}), Candidate("both", 1, both)]) == [["both"], ["one"]]

    @pytest.mark.parametrize(("load", "first"), [(4, "hot"), (5, "idle")])
    def test_warmth_counts_up_to_the_imbalance(self, load: int, first: str) -> None:
        assert groups([Candidate("hot", load, CAPTURE), Candidate("idle", 0)])[0] == [first]

    def test_of_cold_replicas_the_least_busy_comes_first_then_the_one_with_fewest_shapes(self) -> None:
        cold = [Candidate("busy", 1), Candidate("full", 0, {"shapes": ["x", "y"]}), Candidate("empty", 0)]
        assert groups(cold) == [["empty", "full", "busy"]]

    def test_one_that_restarts_and_one_that_refused_come_last(self) -> None:
        candidates = [
            Candidate("again", 0, {**CAPTURE, "ready": False}),
            Candidate("no", 0, CAPTURE),
            Candidate("any", 3),
        ]
        assert groups(candidates, avoid=["no"]) == [["any"], ["again"], ["no"]]

    def test_a_call_for_one_replica_goes_there_or_where_it_can(self) -> None:
        candidates = [Candidate("a", 9), Candidate("b", 0)]
        assert groups(candidates, only=["a"]) == [["a"]]
        assert groups(candidates, only=["gone"]) == [["b"], ["a"]]

    def test_no_candidates_give_no_groups(self) -> None:
        assert groups([]) == []

    def test_the_reason_names_the_warmth_and_what_was_too_busy(self) -> None:
        candidates = [Candidate("hot", 9, CAPTURE), Candidate("idle", 0)]
        found = rank(candidates, NEED, 4)
        assert explain(found, "hot", {"hot": 9}) == "capture: it ran this workflow (9 before it)"
        assert explain(found, "idle", {}) == "any: nothing of it is warm here; warmer but too busy: hot (0 before it)"


def cache(*states: str, model: str = "s") -> dict[str, Any]:
    shapes = [{"model": model, "latent_shape": [2, 4, 64, 64], "size": "512x512", "state": state} for state in states]
    return {"models": [{"model": model, "shapes": shapes}], "counters": {"captures": 1}}


class TestReadiness:
    RUNS = [
        {"prompt_id": "p", "structure": "s", "size": "512x512", "waited": 1.5, "counts": {"captures": 1, "replays": 3}}
    ]

    def test_it_learns_a_shape_from_a_prompt(self) -> None:
        ready = Readiness()
        report = ready.ran("p", NEED, self.RUNS, cache("memory"))
        assert report == {
            "structures": ["s"], "runs": 1, "waited": 1.5, "captures": 1, "region_compiles": 0, "region_loads": 0,
        }  # fmt: skip
        assert warmth(NEED, ready.plain()) is Warmth.CAPTURE

    def test_it_forgets_a_shape_that_the_cache_dropped(self) -> None:
        ready = Readiness()
        ready.ran("p", NEED, self.RUNS, cache("memory"))
        ready.check(cache("disk"))
        assert warmth(NEED, ready.plain()) is Warmth.REGIONS

    def test_a_prompt_that_left_nothing_in_memory_makes_no_shape_warm(self) -> None:
        ready = Readiness()
        ready.ran("p", NEED, [], cache("memory", model="another"))
        assert ready.plain()["shapes"] == []

    def test_what_is_queued_counts_as_ready(self) -> None:
        ready = Readiness()
        ready.expect("p", NEED)
        assert warmth(NEED, ready.plain()) is Warmth.CAPTURE
        ready.forget("p")
        assert warmth(NEED, ready.plain()) is Warmth.ANY

    def test_models_of_the_store_are_loaded_at_the_start(self) -> None:
        ready = Readiness()
        ready.started_with(cache("disk"))
        assert warmth(NEED, ready.plain()) is Warmth.REGIONS
        ready = Readiness()
        ready.started_with(cache("unknown"))
        assert warmth(NEED, ready.plain()) is Warmth.ANY


class TestRecords:
    def test_an_id_is_taken_once(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "a" / "prompts.sqlite")
        assert records.add(Record("p", 0, {"prompt": {}}))
        assert not records.add(Record("p", 1, {"prompt": {}}))
        records.drop("p")
        assert records.add(Record("p", 1, {"prompt": {}}))

    def test_a_prompt_has_one_result(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        records.add(Record("p", 0, {}))
        assert records.finish("p", {"outputs": 1})
        assert not records.finish("p", {"outputs": 2})
        assert records.history("p") == {"p": {"outputs": 1}}

    def test_the_next_ingress_finds_what_is_not_over(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        for number in range(3):
            records.add(Record(str(number), number, {"prompt": {"1": number}}))
        records.finish("1", {})
        again = Records(tmp_path / "prompts.sqlite")
        assert [each.prompt_id for each in again.unfinished()] == ["0", "2"]
        assert again.unfinished()[1].body == {"prompt": {"1": 2}}
        assert again.next_number() == 3

    def test_a_prompt_that_cannot_be_read_is_in_the_log_of_one_start(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "prompts.sqlite"
        Records(file).add(Record("0", 0.0, {"prompt": {}}))
        base = sqlite3.connect(file, isolation_level=None)
        base.execute("INSERT INTO prompts VALUES ('1', 1, '{', NULL, 1)")
        base.close()
        texts = []
        for _ in range(2):  # starts
            caplog.clear()
            assert [each.prompt_id for each in Records(file).unfinished()] == ["0"]
            texts.append(caplog.text)
        assert "prompt 1 cannot be read" in texts[0]
        assert texts[1] == ""

    def test_an_entry_that_was_taken_from_the_history_keeps_its_id(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        records.add(Record("p", 0, {}))
        records.finish("p", {})
        records.hide("p")
        assert records.history() == {}
        assert not records.add(Record("p", 0, {}))

    def test_one_entry_is_hidden_or_all_but_what_runs_stays(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        for name in "abc":
            records.add(Record(name, 0, {}))
        records.finish("a", {})
        records.finish("b", {})
        records.hide("a")
        assert records.history() == {"b": {}}
        records.hide()
        assert records.history() == {}
        records.finish("c", {})
        assert records.history() == {"c": {}}

    def test_the_most_used_workflows_and_their_share(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        for key in ("a", "b", "b", "b"):
            records.used(key, {"prompt": key})
        assert records.most_used(1) == [(3, {"prompt": "b"})]
        assert records.share("b") == 0.75
        assert records.share("c") == 0

    def test_workflows_that_were_used_least_are_forgotten(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        for key in ("a", "a", *map(str, range(600))):
            records.used(key, {"prompt": key})
        assert len(records.most_used(1_000)) == 500
        assert records.most_used(1) == [(2, {"prompt": "a"})]
        assert records.share("599") > records.share("0") == 0

    def test_on_a_full_disk_a_prompt_is_refused_and_a_result_stays_in_memory(self, tmp_path: Path) -> None:
        records = Records(tmp_path / "prompts.sqlite")
        records.add(Record("p", 0, {}))
        (pages,) = records._base.execute("PRAGMA page_count").fetchone()
        records._base.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(sqlite3.Error, match="full"):
            records.add(Record("q", 1, {"prompt": "x" * 100_000}))
        result = {"outputs": "x" * 100_000}
        assert records.finish("p", result)
        assert not records.finish("p", {"outputs": 2})
        assert records.history("p") == records.history() == {"p": result}
        records.hide("p")
        assert records.history() == {}

    def test_a_folder_that_is_a_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("")
        with pytest.raises(SetupError, match="taken"):
            Records(tmp_path / "taken" / "prompts.sqlite")


class Warming:
    """A handle whose replicas accept each warm-up, and end it once its future is done. It holds these weakly."""

    def __init__(self) -> None:
        self.ends: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    def options(self, **_: Any) -> Warming:
        return self

    @property
    def run(self) -> Warming:
        return self

    async def remote(self, body: Any, *, need: dict[str, Any], token: str, path: str) -> AsyncIterator[Any]:
        end = asyncio.get_running_loop().create_future()
        self.ends.add(end)
        yield "accepted", need["only"][0], {"prompt_id": need["only"][0]}
        await end
        yield "report", {"body": body}


def test_each_warm_up_that_runs_at_once_is_followed_to_its_end() -> None:
    async def go() -> tuple[int, dict[str, Any]]:
        handle, background = Warming(), Background()
        warm_ups = WarmUps(handle, Need.plain, background)
        for name in "abc":
            assert await warm_ups.start(name, {}, Need()) == {"prompt_id": name}
        await asyncio.sleep(0)  # each task waits for its replica now
        gc.collect()
        kept = len(handle.ends)
        for end in list(handle.ends):
            end.set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)
        assert background._tasks == set()
        return kept, warm_ups.states

    kept, states = asyncio.run(go())
    assert kept == 3
    assert states == {name: {"prompt_id": name, "is_over": True, "end": {"body": {}}} for name in "abc"}


class TestFiles:
    @pytest.mark.parametrize(
        "place",
        [
            ("output", "..", "a"),
            ("output", "", "../a"),
            ("output", "/etc", "passwd"),
            ("output", "", ""),
            ("x", "", "a"),
        ],
    )
    def test_a_name_that_leads_elsewhere_is_refused(self, tmp_path: Path, place: tuple[str, str, str]) -> None:
        with pytest.raises(RefusedError):
            Files(tmp_path).path(*place)

    def test_a_file_has_its_name_when_it_is_whole(self, tmp_path: Path) -> None:
        files, place = Files(tmp_path), {"type": "output", "subfolder": "replica/x", "filename": "a.png"}
        files.receive(place, b"one", is_first=True, is_last=False)
        assert not files.path("output", "replica/x", "a.png").exists()
        files.receive(place, b"two", is_first=False, is_last=True)
        assert files.path("output", "replica/x", "a.png").read_bytes() == b"onetwo"

    def test_uploads_keep_both_of_two_pictures_of_one_name(self, tmp_path: Path) -> None:
        files = Files(tmp_path)
        names = [files.upload("input", "", "a.png", content, overwrite=False) for content in (b"1", b"2", b"1")]
        assert names == ["a.png", "a (1).png", "a.png"]
        assert files.upload("input", "", "a.png", b"3", overwrite=True) == "a.png"

    @pytest.mark.parametrize(
        "ending", ["html", "svg", "xml", "xhtml", "rss", "xsl", "eml", "mht", "js", "css", "pdf", "x"]
    )
    def test_what_could_run_as_a_page_is_sent_as_bytes(self, ending: str) -> None:
        assert content_type(Path(f"a.{ending}")) == "application/octet-stream"

    @pytest.mark.parametrize("name", ["a.png", "a.webp", "a.mp4", "a.mp3", "a.txt", "a.json"])
    def test_pictures_and_their_like_are_shown(self, name: str) -> None:
        assert content_type(Path(name)) == mimetypes.guess_type(name)[0]


def test_files_of_an_answer_move_into_a_folder_of_their_replica() -> None:
    output = {
        "9": {"images": [{"filename": "a.png", "subfolder": "", "type": "output"}], "animated": (False,)},
        "10": {"images": [{"filename": "b.png", "subfolder": "x", "type": "temp"}], "text": ["a.png"]},
        "11": {"images": [{"filename": "c.png", "subfolder": "", "type": "input"}]},
    }
    found = moved(output, "r1")
    assert [each["subfolder"] for each in files_in(found)] == ["r1", "r1/x"]
    assert found["11"] == output["11"]
    assert found["10"]["text"] == ["a.png"]


class TestSettings:
    @pytest.fixture
    def comfyui(self, tmp_path: Path) -> Path:
        (tmp_path / "main.py").write_text("")
        return tmp_path

    def test_they_survive_the_way_to_an_actor(self, comfyui: Path) -> None:
        made = config.from_plain({"comfyui": str(comfyui), "folder": "x", "arguments": ["--cpu"], "replicas": 2})
        assert made.folder.is_absolute()
        assert config.from_plain(made.plain()) == made

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"replica": 2}, "no setting 'replica'"),
            ({"replicas": "two"}, "replicas: 'two'"),
            ({"replicas": 0}, "at least 1"),
            ({"router": "best"}, "router: 'best'"),
            ({"arguments": "--cpu"}, "arguments: '--cpu'"),
            ({"comfyui": "/nowhere"}, "main.py"),
            ({"folder": ""}, "needs 'folder'"),
            ({"enable_cors_header": "a\r\nb"}, "enable_cors_header: .* is no origin"),
        ],
    )
    def test_a_wrong_one_is_named(self, comfyui: Path, wrong: dict[str, Any], named: str) -> None:
        with pytest.raises(SetupError, match=named):
            config.from_plain({"comfyui": str(comfyui), "folder": "x", **wrong})


def test_without_ray_the_command_says_what_to_install() -> None:
    code, _, error = run_command("fleet", "up", "--comfyui", "x", options=("-I", "-S"))
    assert code == 1
    assert error.startswith("error: Ray is not installed")
    assert "requirements/fleet.txt" in error


class TestWhatCannotStart:
    """Each ends before Ray starts, with a sentence."""

    @pytest.fixture
    def given(self, tmp_path: Path) -> dict[str, Any]:
        (tmp_path / "main.py").write_text("")
        return {"comfyui": str(tmp_path), "folder": str(tmp_path / "fleet")}

    def test_a_port_in_use_is_named(self, given: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(SetupError, match=f"127.0.0.1:{port} cannot be used: .* Choose another --port"):
                command.up(None, {**given, "port": port}, [], None)

    # Root may write into a folder without permission, but nobody into /proc or below a file.
    @pytest.mark.parametrize("folder", ["/proc/fleet", "main.py/fleet"])
    def test_a_folder_that_cannot_be_written_is_named(self, given: dict[str, Any], folder: str) -> None:
        folder = str(Path(given["comfyui"]) / folder)
        with pytest.raises(SetupError, match=f"The fleet's folder {folder} cannot be written: ."):
            command.up(None, {**given, "folder": folder, "port": 0}, [], None)

    def test_the_folder_of_the_file_counts_and_the_options_win(self, given: dict[str, Any], tmp_path: Path) -> None:
        file, named = tmp_path / "fleet.yaml", "/proc/file"
        file.write_text(f"folder: {named}\n", "utf-8")
        with pytest.raises(SetupError, match=f"folder {named} cannot"):
            command.up(file, {"comfyui": given["comfyui"], "port": 0}, [], None)
        with pytest.raises(SetupError, match="folder /proc/option cannot"):
            command.up(file, {**given, "folder": "/proc/option", "port": 0}, [], None)

    def test_a_full_disk_is_named(self, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(SetupError, match="cannot be written: No space left on device"):
            command.up(None, {**given, "port": 0}, [], None)


@pytest.mark.parametrize("name", ["status", "down"])
def test_a_folder_without_a_fleet_is_named(name: str, tmp_path: Path) -> None:
    said = f"error: No fleet that `scripts/fleet up` started uses {tmp_path}.\n"
    assert run_command("fleet", name, "--folder", tmp_path) == (1, "", said)


def test_the_pack_imports_nothing_of_ray() -> None:
    servers = {"ray", "fastapi", "starlette"}
    assert [name_of(source.file) for source in SOURCES if top_level(source) & servers] == []
    imported = "from scripts.serving import config, need, ranking, readiness, records, files, command"
    assert run_python(f"import sys; {imported}; print(sorted(sys.modules.keys() & {servers}))") == "[]\n"
