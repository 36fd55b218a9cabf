"""The prompt that warms up a workflow: its Warm Up nodes, the nodes that it keeps, and its warnings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from ..scan.test_scan import BASE, BUNDLED, Prompt, advanced, decoder, empty, node, sampler, workflow

Build = Callable[[Prompt], Any]

INPUTS = {
    "sizes", "batch_sizes", "prompt_chunks", "cfg", "tile_size", "overlap",
    "model", "vae", "control_net", "positive", "negative",
}  # fmt: skip


@pytest.fixture(scope="module")
def build(pack: Any) -> Build:
    """`build(workflow)`: the WarmUpPrompt of a workflow. Every image file is 768x512."""
    scan, make = pack("nodes.adapters.scan.workflow").scan, pack("nodes.adapters.warm_up.prompt").warm_up_prompt
    return lambda prompt: make(prompt, scan(prompt, image_size=lambda name: (768, 512)))


def warm_ups(built: Any) -> list[dict[str, Any]]:
    """The inputs of the Warm Up nodes, in their order."""
    return [each["inputs"] for each in built.prompt.values() if each["class_type"] == "ResoluteWarmUp"]


def kept(built: Any) -> set[str]:
    return {name for name, each in built.prompt.items() if each["class_type"] != "ResoluteWarmUp"}


VIDEOS = [path for path in BUNDLED if path.stem.endswith("_to_video")]


@pytest.mark.parametrize("path", VIDEOS, ids=lambda path: path.stem)
def test_a_video_is_refused_and_its_sampler_is_named(build: Build, user_error: type[Exception], path: Path) -> None:
    with pytest.raises(user_error, match=r"(KSampler|Custom Sampler|High noise) \d+: Warm Up makes no videos"):
        build(json.loads(path.read_text("utf-8")))


@pytest.mark.parametrize("path", [path for path in BUNDLED if path not in VIDEOS], ids=lambda path: path.stem)
class TestBundledWorkflows:
    def test_nothing_is_sampled_decoded_or_saved(self, build: Build, path: Path) -> None:
        classes = {each["class_type"] for each in build(json.loads(path.read_text("utf-8"))).prompt.values()}
        assert not classes & {"KSampler", "VAEDecode", "VAEEncode", "SaveImage", "PreviewImage", "PreviewAny"}

    def test_every_linked_node_is_kept_unchanged(self, build: Build, path: Path) -> None:
        original = json.loads(path.read_text("utf-8"))
        built = build(original).prompt
        for name, each in built.items():
            links = [value for value in each["inputs"].values() if isinstance(value, list)]
            assert {source for source, _ in links} <= built.keys()
            assert each["class_type"] == "ResoluteWarmUp" or each == original[name]

    def test_one_node_is_enough(self, build: Build, path: Path) -> None:
        (inputs,) = warm_ups(build(json.loads(path.read_text("utf-8"))))
        assert inputs.keys() <= INPUTS
        assert {"model", "vae", "positive", "negative"} <= inputs.keys()


def test_the_node_has_every_size_the_largest_first(build: Build) -> None:
    tour = json.loads(next(path for path in BUNDLED if path.stem == "resolution_tour").read_text("utf-8"))
    (inputs,) = warm_ups(build(tour))
    assert inputs["sizes"] == "960x720, 896x768, 640x960, 720x720, 584x456"


def test_a_node_has_all_inputs_of_warm_up(build: Build) -> None:
    (inputs,) = warm_ups(
        build(workflow(latent=empty(720, 960, 2), sample=sampler("latent"), picture=decoder("sample")))
    )
    assert inputs == {
        "sizes": "720x960",
        "batch_sizes": "2",
        "prompt_chunks": "1",
        "cfg": 7.0,
        "tile_size": 0,
        "overlap": 64,
        "model": ["model", 0],
        "vae": ["vae", 0],
        "positive": ["text", 0],
        "negative": ["text", 0],
    }


def test_each_batch_and_each_cfg_has_its_own_node(build: Build) -> None:
    built = build(
        workflow(
            one=empty(),
            two=empty(batch=2),
            first=sampler("one"),
            second=sampler("two"),
            third=sampler("one", cfg=1.0),
        )
    )
    assert sorted((each["batch_sizes"], each["cfg"]) for each in warm_ups(built)) == [
        ("1", 1.0),
        ("1", 7.0),
        ("2", 7.0),
    ]
    assert not any("vae" in each for each in warm_ups(built))


def test_a_decoding_with_other_sizes_has_its_own_node(build: Build) -> None:
    built = build(
        workflow(
            latent=empty(),
            first=sampler("latent"),
            bigger=node("LatentUpscaleBy", samples=["first", 0], scale_by=2.0),
            second=sampler("bigger"),
            picture=decoder("second"),
        )
    )
    sampling, decoding = sorted(warm_ups(built), key=lambda each: "vae" in each)
    assert (sampling["sizes"], "vae" in sampling) == ("1024x1024, 512x512", False)
    assert (decoding["sizes"], "model" in decoding) == ("1024x1024", False)


def test_tile_size_and_overlap_are_passed_on(build: Build) -> None:
    tiled = node("VAEDecodeTiled", samples=["latent", 0], vae=["vae", 0], tile_size=256, overlap=32)
    (inputs,) = warm_ups(build(workflow(latent=empty(1024, 1024), picture=tiled)))
    assert (inputs["tile_size"], inputs["overlap"]) == (256, 32)


def test_a_positive_alone_is_also_used_as_the_negative(build: Build) -> None:
    guider = node("BasicGuider", model=["model", 0], conditioning=["text", 0])
    (inputs,) = warm_ups(build(workflow(latent=empty(), guider=guider, sample=advanced())))
    assert (inputs["cfg"], inputs["positive"], inputs["negative"]) == (1.0, ["text", 0], ["text", 0])


def test_a_cfg_known_only_at_run_time_is_warmed_up_with_a_negative(build: Build) -> None:
    built = build(workflow(latent=empty(), dice=node("Dice"), sample=sampler("latent", cfg=["dice", 0])))
    assert [each["cfg"] for each in warm_ups(built)] == [7.0]
    assert "dice" not in kept(built)
    assert built.warnings == (
        "KSampler sample: its cfg is known only when the prompt runs. It is warmed up for every cfg except 1.",
    )


def test_added_nodes_get_ids_that_the_workflow_does_not_use(build: Build) -> None:
    prompt = {**workflow(latent=empty(), sample=sampler("latent")), "warm-up-1": node("SaveAnything")}
    assert "warm-up-2" in build(prompt).prompt
    assert "warm-up-1" not in build(prompt).prompt


def test_the_given_workflow_is_not_changed(build: Build) -> None:
    prompt = workflow(latent=empty(), sample=sampler("latent"))
    before = json.dumps(prompt)
    build(prompt).prompt["model"]["inputs"]["model"] = "changed"
    assert json.dumps(prompt) == before


class TestImagesThatTheWorkflowMakesFirst:
    @pytest.fixture
    def two_pass(self) -> Prompt:
        """The ControlNet of the second pass uses the edges of the first pass's image."""
        applied = node(
            "ControlNetApplyAdvanced",
            positive=["text", 0],
            negative=["text", 0],
            control_net=["net", 0],
            image=["edges", 0],
        )
        return workflow(
            latent=empty(512, 512),
            first=sampler("latent"),
            small=decoder("first"),
            edges=node("Canny", image=["small", 0]),
            net=node("ResoluteCompileControlNet", control_net=["file", 0]),
            file=node("ControlNetLoader"),
            applied=applied,
            big=empty(1024, 1024),
            second=sampler("big", positive=["applied", 0], negative=["applied", 1]),
        )

    def test_the_controlnet_is_kept_with_the_conditioning_before_it(self, build: Build, two_pass: Prompt) -> None:
        built = build(two_pass)
        (second,) = [each for each in warm_ups(built) if each["sizes"] == "1024x1024"]
        assert second["control_net"] == ["net", 0]
        assert (second["positive"], second["negative"]) == (["text", 0], ["text", 0])
        assert built.warnings == (
            "KSampler second: its ControlNet needs an image or latent that the workflow makes first. "
            "Warm Up uses noise for it.",
        )

    def test_an_earlier_controlnet_with_a_loaded_image_stays_in_the_conditioning(
        self, build: Build, two_pass: Prompt
    ) -> None:
        two_pass["photo"] = node("LoadImage", image="a.png")
        own = {"control_net": ["other net", 0], "image": ["photo", 0]}
        two_pass["depth"] = node("ControlNetApplyAdvanced", **{**two_pass["applied"]["inputs"], **own})
        two_pass["other net"] = node("ControlNetLoader")
        two_pass["applied"]["inputs"] |= {"positive": ["depth", 0], "negative": ["depth", 1]}
        (second,) = [each for each in warm_ups(build(two_pass)) if each["sizes"] == "1024x1024"]
        assert (second["positive"], second["negative"]) == (["depth", 0], ["depth", 1])
        assert second["control_net"] == ["net", 0]

    def test_two_controlnets_that_need_a_run_are_both_left_out(self, build: Build, two_pass: Prompt) -> None:
        two_pass["again"] = node(
            "ControlNetApply", conditioning=["applied", 0], control_net=["other net", 0], image=["edges", 0]
        )
        two_pass["other net"] = node("ControlNetLoader")
        two_pass["second"]["inputs"]["positive"] = ["again", 0]
        built = build(two_pass)
        (both,) = [
            each for each in warm_ups(built) if "model" in each
        ]  # both samplers now have the same inputs, so they share a node
        assert both["sizes"] == "1024x1024, 512x512"
        assert both["positive"] == ["text", 0]
        assert "control_net" not in both
        assert built.warnings[0].endswith("Warm Up leaves the ControlNet out.")

    def test_conditioning_that_needs_a_run_is_replaced_by_a_dummy(self, build: Build, two_pass: Prompt) -> None:
        two_pass["inpainting"] = node(
            "InpaintModelConditioning",
            positive=["applied", 0],
            negative=["applied", 1],
            pixels=["small", 0],
            vae=["vae", 0],
        )
        two_pass["second"]["inputs"] |= {"positive": ["inpainting", 0], "negative": ["inpainting", 1]}
        built = build(two_pass)
        (second,) = [each for each in warm_ups(built) if each["sizes"] == "1024x1024"]
        assert second["control_net"] == ["net", 0]
        assert not {"positive", "negative"} & second.keys()
        assert built.warnings == (
            "KSampler second: its conditioning needs an image or latent that the workflow makes first. "
            "Warm Up uses a dummy of the usual length, with the ControlNet.",
        )

    @pytest.mark.parametrize("positive", ["applied", "again"])
    def test_a_cycle_of_controlnets_ends(self, build: Build, two_pass: Prompt, positive: str) -> None:
        two_pass["again"] = node("ControlNetApply", conditioning=["applied", 0], image=["edges", 0])
        two_pass["applied"]["inputs"]["positive"] = ["again", 0]
        two_pass["second"]["inputs"]["positive"] = [positive, 0]
        assert [each["sizes"] for each in warm_ups(build(two_pass))][-1] == "512x512"

    def test_no_sampler_gets_in_through_the_hint(self, build: Build, two_pass: Prompt) -> None:
        assert kept(build(two_pass)) == {"model", "loader", "text", "vae", "net", "file"}

    def test_a_model_that_needs_a_run_is_left_out(self, build: Build) -> None:
        adapter = node("AdaptToPicture", model=["model", 0], image=["small", 0])
        built = build(
            workflow(
                latent=empty(),
                first=sampler("latent"),
                small=decoder("first"),
                adapter=adapter,
                big=empty(1024, 1024),
                second=sampler("big", model="adapter"),
            )
        )
        assert [each["sizes"] for each in warm_ups(built)] == ["512x512"]
        assert any("KSampler second: its model needs an image" in warning for warning in built.warnings)

    def test_a_node_that_saves_is_not_kept(self, build: Build) -> None:
        saved = node("SaveAndPass", image=["picture", 0])
        applied = node("ControlNetApply", conditioning=["text", 0], control_net=["net", 0], image=["saved", 0])
        built = build(
            workflow(
                latent=empty(),
                picture=node("LoadImage", image="a.png"),
                saved=saved,
                net=node("ControlNetLoader"),
                applied=applied,
                sample=sampler("latent", positive=["applied", 0]),
            )
        )
        assert "saved" not in kept(built)
        assert [each["control_net"] for each in warm_ups(built)] == [["net", 0]]


class TestWhatIsNotCompiled:
    def test_it_is_left_out_and_the_warning_names_the_node_to_add(self, build: Build) -> None:
        plain = {**sampler("latent", model="loader"), "_meta": {"title": "Plain"}}
        built = build(workflow(latent=empty(), one=sampler("latent"), other=plain))
        assert [each["model"] for each in warm_ups(built)] == [["model", 0]]
        assert built.warnings == ("Plain other: its model is not compiled. Put Compile Model before it.",)

    def test_nodes_after_compile_model_do_not_matter(self, build: Build) -> None:
        lora = node("LoraLoader", model=["model", 0], clip=["loader", 1])
        built = build(workflow(latent=empty(), lora=lora, sample=sampler("latent", model="lora")))
        assert [each["model"] for each in warm_ups(built)] == [["lora", 0]]

    def test_a_text_encoder_from_our_loader_does_not_make_a_model_compiled(self, build: Build) -> None:
        prompt = workflow(
            ours=node("ResoluteLoadCheckpoint", compile_vae=True),
            lora=node("LoraLoader", model=["loader", 0], clip=["ours", 1]),
            latent=empty(),
            one=sampler("latent", model="ours"),
            other=sampler("latent", model="lora"),
        )
        assert [each["model"] for each in warm_ups(build(prompt))] == [["ours", 0]]

    @pytest.mark.parametrize(("compile_vae", "nodes"), [(True, 1), (False, 0)])
    def test_the_vae_of_our_loader_counts_as_compiled_if_compile_vae_is_on(
        self, build: Build, user_error: type[Exception], compile_vae: bool, nodes: int
    ) -> None:
        ours = node("ResoluteLoadCheckpoint", compile_vae=compile_vae)
        picture = node("VAEDecode", samples=["latent", 0], vae=["ours", 2])
        prompt = workflow(ours=ours, latent=empty(), picture=picture)
        if nodes:
            assert [each["vae"] for each in warm_ups(build(prompt))] == [["ours", 2]]
        else:
            with pytest.raises(user_error, match="its VAE is not compiled"):
                build(prompt)

    @pytest.mark.parametrize(("vae_speedup", "vaes"), [("enable", [["ours", 2]]), ("disable", [])])
    def test_onediffs_loader_counts_as_compiled(self, build: Build, vae_speedup: str, vaes: list[Any]) -> None:
        ours = node("OneDiffCheckpointLoaderSimple", ckpt_name="a.safetensors", vae_speedup=vae_speedup)
        picture = node("VAEDecode", samples=["one", 0], vae=["ours", 2])
        built = build(workflow(ours=ours, latent=empty(), one=sampler("latent", model="ours"), picture=picture))
        assert [each["model"] for each in warm_ups(built) if "model" in each] == [["ours", 0]]
        assert [each["vae"] for each in warm_ups(built) if "vae" in each] == vaes


class TestNothingToWarmUp:
    def test_a_workflow_that_samples_nothing_is_refused(self, build: Build, user_error: type[Exception]) -> None:
        with pytest.raises(user_error, match="no sampler and no VAE Decode"):
            build({**BASE, "end": node("SaveAnything", any=["text", 0])})

    def test_the_error_has_the_first_reason(self, build: Build, user_error: type[Exception]) -> None:
        with pytest.raises(user_error, match="Resolute does not know what this node does"):
            build(workflow(latent=node("Mystery"), sample=sampler("latent")))

    @pytest.mark.parametrize("latent", [empty(32, 512), empty(16384, 512), empty(batch=65)])
    def test_sizes_and_batches_that_warm_up_refuses_are_left_out(
        self, build: Build, user_error: type[Exception], latent: dict[str, Any]
    ) -> None:
        with pytest.raises(user_error, match="is left out"):
            build(workflow(latent=latent, sample=sampler("latent")))


class TestImageFiles:
    """`image_size` with one folder in place of ComfyUI's."""

    @pytest.fixture
    def image_size(self, pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
        inputs = tmp_path / "input"
        inputs.mkdir()
        folders: Any = ModuleType("folder_paths")
        places = SimpleNamespace(
            get_annotated_filepath=lambda name: str(inputs / name),
            get_input_directory=lambda: str(inputs),
            get_output_directory=lambda: str(tmp_path / "output"),
            get_temp_directory=lambda: str(tmp_path / "temp"),
        )
        vars(folders).update(vars(places))
        monkeypatch.setitem(sys.modules, "folder_paths", folders)
        Image.new("RGB", (40, 30)).save(inputs / "plain.png")
        Image.new("RGB", (40, 30)).save(tmp_path / "outside.png")
        turned = Image.new("RGB", (40, 30)).getexif()
        turned[0x0112] = 6
        Image.new("RGB", (40, 30)).save(inputs / "turned.jpg", exif=turned)
        frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
        frames[0].save(inputs / "moving.gif", save_all=True, append_images=frames[1:])
        (inputs / "text.png").write_text("not an image")
        found: Callable[[str], Any] = pack("nodes.adapters.scan.image_files").image_size
        return found

    def test_a_still_image_has_its_width_and_height(self, image_size: Callable[[str], Any]) -> None:
        assert image_size("plain.png") == (40, 30)

    def test_a_truncated_file_raises_nothing(self, image_size: Callable[[str], Any], tmp_path: Path) -> None:
        pages = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
        file = tmp_path / "input" / "pages.tif"
        pages[0].save(file, save_all=True, append_images=pages[1:])
        whole = file.read_bytes()
        for length in range(0, len(whole), 25):  # Pillow raises a TypeError at some lengths
            file.write_bytes(whole[:length])
            assert image_size(file.name) in (None, (40, 30)), length

    @pytest.mark.parametrize("name", ["gone.png", "text.png", "turned.jpg", "moving.gif", "../outside.png", "", "\0"])
    def test_any_other_file_has_no_size(self, image_size: Callable[[str], Any], name: str) -> None:
        assert image_size(name) is None
