"""What the scanner finds in a workflow without running it: sizes, batches, conditioning, and what it cannot know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = sorted((ROOT / "workflows" / "api").glob("*.json"))

Prompt = dict[str, dict[str, Any]]
Sizes = list[tuple[int, int, int]]

# Width, height and batch of every sampler, in the order of the file, and of every decoder unless DECODED has others.
# Written by hand.
EXPECTED: dict[str, Sizes] = {
    "compare_with_stock": [(512, 512, 1)] * 2,
    "deepcache": [(512, 512, 1)],
    "deepcache_controlnet": [(512, 512, 1)],
    "flux_dev_text_to_image": [(1024, 1024, 1)],
    "hunyuan_video15_text_to_video": [(1280, 720, 1)],
    "image_to_image": [(512, 512, 1)],
    "lcm_image_to_image": [(1024, 1024, 1), (512, 2048, 1), (2048, 512, 1)],
    "ltx2_text_to_video": [(640, 352, 1)],  # the second sampler's size depends on the upscale model
    "ltx_text_to_video": [(768, 512, 1)],
    "minimax_h3_text_to_video": [(864, 480, 1)],
    "oneflow_text_to_image": [(512, 512, 1)],
    "qwen_image_edit": [(1248, 832, 1)],  # of 768x512, the size of Kontext with the aspect ratio 3:2
    "qwen_image_text_to_image": [(1328, 1328, 1)],
    "wan22_image_to_video": [(640, 640, 1)] * 2,  # the high noise and the low noise model
    "wan22_text_to_video": [(1280, 704, 1)],
    "z_image_turbo_int8_text_to_image": [(1024, 1024, 1)],
    "z_image_turbo_text_to_image": [(1024, 1024, 1)],
    "resolution_tour": [(960, 720, 1), (896, 768, 1), (720, 720, 1), (640, 960, 1), (584, 456, 1)],
    "sd15_text_to_image": [(512, 512, 1)],
    "sdxl_text_to_image": [(1024, 1024, 1)],
}
DECODED: dict[str, Sizes] = {"ltx2_text_to_video": [], "wan22_image_to_video": [(640, 640, 1)]}
UNKNOWN = {
    "ltx2_text_to_video": [
        "its scale is known only when the upscale model is loaded. So Resolute does not know the size"
    ]
}


@pytest.fixture(scope="module")
def scan(pack: Any) -> Any:
    return pack("nodes.adapters.scan.workflow").scan


def node(class_type: str, title: str = "", **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs, "_meta": {"title": title}}


def sampler(latent: str, model: str = "model", **inputs: Any) -> dict[str, Any]:
    links = {"model": [model, 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": [latent, 0]}
    return node("KSampler", **{**links, "cfg": 7.0, "seed": 1, **inputs})


def decoder(latent: str) -> dict[str, Any]:
    return node("VAEDecode", samples=[latent, 0], vae=["vae", 0])


BASE: Prompt = {
    "model": node("ResoluteCompileModel", model=["loader", 0]),
    "vae": node("ResoluteCompileVAEDecode", vae=["loader", 2]),
    "loader": node("CheckpointLoaderSimple"),
    "text": node("CLIPTextEncode", text="a house", clip=["loader", 1]),
}


def workflow(**nodes: dict[str, Any]) -> Prompt:
    """A workflow that saves every result that no other node uses."""
    used = {
        value[0] for each in nodes.values() for value in each["inputs"].values() if value and isinstance(value, list)
    }
    ends = {f"save-{name}": node("SaveAnything", anything=[name, 0]) for name in nodes if name not in used}
    return {**BASE, **nodes, **ends}


def latents(found: Any) -> Sizes:
    return [(each.size.width, each.size.height, each.batch) for each in found.samplings]


def pictures(found: Any) -> Sizes:
    return [(each.size.width, each.size.height, each.batch) for each in found.decodings]


def latent_of(scan: Any, **nodes: dict[str, Any]) -> tuple[int, int, int]:
    """The size and batch that a sampler gets from the node named `last`. Fails if anything is not known."""
    found = scan(workflow(**nodes, sample=sampler("last")), image_size={"a.png": (1001, 607)}.get)
    assert found.unknown == ()
    (one,) = latents(found)
    return one


class TestBundledWorkflows:
    def test_the_expected_sizes_cover_every_bundled_workflow(self) -> None:
        assert [path.stem for path in BUNDLED] == sorted(EXPECTED)

    @pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
    def test_their_sizes_are_found(self, scan: Any, path: Path) -> None:
        found = scan(json.loads(path.read_text("utf-8")), image_size=lambda name: (768, 512))
        assert latents(found) == EXPECTED[path.stem]
        assert pictures(found) == DECODED.get(path.stem, EXPECTED[path.stem])
        reasons = UNKNOWN.get(path.stem, [])
        assert len(found.unknown) == len(reasons)
        assert all(reason in sentence for reason, sentence in zip(reasons, found.unknown, strict=True))
        assert {each.is_video for each in (*found.samplings, *found.decodings)} == {path.stem.endswith("_to_video")}

    def test_without_the_image_file_image_to_image_names_what_is_missing(self, scan: Any) -> None:
        found = scan(json.loads((ROOT / "workflows" / "api" / "image_to_image.json").read_text("utf-8")))
        (sentence,) = found.unknown
        assert latents(found) == pictures(found) == []
        assert sentence.startswith("Load Image 6: the size of its image")
        assert "KSampler 10, VAE Decode 11" in sentence


class TestSamplers:
    @pytest.mark.parametrize("class_type", ["KSampler", "KSamplerAdvanced", "SamplerCustom"])
    def test_links_and_cfg_are_those_of_the_sampler(self, scan: Any, class_type: str) -> None:
        one = {**sampler("latent", cfg=4.5), "class_type": class_type}
        (found,) = scan(workflow(latent=empty(), sample=one)).samplings
        assert (found.node, found.model, found.positive, found.negative, found.cfg) == (
            "sample", ("model", 0), ("text", 0), ("text", 0), 4.5,
        )  # fmt: skip

    def test_a_basic_guider_has_no_negative(self, scan: Any) -> None:
        guider = node("BasicGuider", model=["model", 0], conditioning=["text", 0])
        (found,) = scan(workflow(latent=empty(), guider=guider, sample=advanced())).samplings
        assert (found.model, found.positive, found.negative, found.cfg) == (("model", 0), ("text", 0), None, 1.0)

    def test_a_cfg_guider_has_positive_and_negative(self, scan: Any) -> None:
        guider = {**sampler("latent", cfg=3.0), "class_type": "CFGGuider"}
        (found,) = scan(workflow(latent=empty(), guider=guider, sample=advanced())).samplings
        assert (found.negative, found.cfg) == (("text", 0), 3.0)

    def test_a_dual_guider_gets_a_warning_for_its_third_conditioning(self, scan: Any) -> None:
        found = scan(workflow(latent=empty(), guider=dual(5.0, 3.0), sample=advanced()))
        assert [each.cfg for each in found.samplings] == [3.0]
        assert "three conditionings" in found.unknown[0]

    def test_a_dual_guider_with_a_scale_of_1_has_no_negative(self, scan: Any) -> None:
        found = scan(workflow(latent=empty(), guider=dual(5.0, 1.0), sample=advanced()))
        assert [(each.negative, each.cfg) for each in found.samplings] == [(("other", 0), 5.0)]
        assert found.unknown == ()

    def test_a_guider_without_a_rule_is_named(self, scan: Any) -> None:
        found = scan(workflow(latent=empty(), guider=node("NewGuider", "My guider"), sample=advanced()))
        assert found.samplings == ()
        assert found.unknown[0].startswith("My guider guider: Resolute does not know")

    def test_a_cfg_computed_at_run_time_is_none(self, scan: Any) -> None:
        found = scan(workflow(latent=empty(), number=node("Dice"), sample=sampler("latent", cfg=["number", 0])))
        assert [each.cfg for each in found.samplings] == [None]
        assert found.unknown == ()

    def test_a_cfg_from_a_constant_is_known(self, scan: Any) -> None:
        number = node("PrimitiveFloat", value=2.5)
        found = scan(workflow(latent=empty(), number=number, sample=sampler("latent", cfg=["number", 0])))
        assert [each.cfg for each in found.samplings] == [2.5]

    def test_a_latent_hires_fix_has_two_sizes(self, scan: Any) -> None:
        found = scan(
            workflow(
                latent=empty(512, 768),
                first=sampler("latent"),
                bigger=node("LatentUpscaleBy", samples=["first", 0], scale_by=1.5),
                second=sampler("bigger"),
                picture=decoder("second"),
            )
        )
        assert latents(found) == [(512, 768, 1), (768, 1152, 1)]
        assert pictures(found) == [(768, 1152, 1)]

    def test_an_image_hires_fix_has_two_sizes_and_two_decodings(self, scan: Any) -> None:
        found = scan(
            workflow(
                latent=empty(512, 512, 2),
                first=sampler("latent"),
                small=decoder("first"),
                bigger=node("ImageScaleBy", image=["small", 0], scale_by=1.7),
                again=node("VAEEncode", pixels=["bigger", 0], vae=["loader", 2]),
                second=sampler("again"),
                picture=decoder("second"),
            )
        )
        # 512 * 1.7 = 870.4 -> 870 pixels = 108 latent pixels and 6 image pixels that the VAE crops
        assert latents(found) == pictures(found) == [(512, 512, 2), (864, 864, 2)]

    def test_an_upscale_model_before_a_fixed_size_does_not_matter(self, scan: Any) -> None:
        nodes = {
            "latent": empty(batch=3),
            "small": decoder("latent"),
            "huge": node("ImageUpscaleWithModel", image=["small", 0], upscale_model=["loader", 0]),
            "fixed": node("ImageScale", image=["huge", 0], width=1000, height=600),
            "last": node("VAEEncode", pixels=["fixed", 0], vae=["loader", 2]),
        }
        assert latent_of(scan, **nodes) == (1000, 600, 3)

    def test_the_scale_of_an_upscale_model_is_not_guessed(self, scan: Any) -> None:
        found = scan(
            workflow(
                latent=empty(),
                small=decoder("latent"),
                huge=node("ImageUpscaleWithModel", "4x", image=["small", 0], upscale_model=["loader", 0]),
                again=node("VAEEncode", pixels=["huge", 0], vae=["loader", 2]),
                sample=sampler("again"),
            )
        )
        assert latents(found) == []
        assert found.unknown[0].startswith("4x huge: its scale is known only when the upscale model is loaded")


class TestDecoders:
    def test_vae_decode_has_no_tiles(self, scan: Any) -> None:
        (found,) = scan(workflow(latent=empty(), picture=decoder("latent"))).decodings
        assert (found.vae, found.tile_size, found.overlap) == (("vae", 0), None, None)

    def test_tiled_vae_decode_has_tile_size_and_overlap(self, scan: Any) -> None:
        tiled = node("VAEDecodeTiled", samples=["latent", 0], vae=["vae", 0], tile_size=256, overlap=32)
        (found,) = scan(workflow(latent=empty(1024, 512, 2), picture=tiled)).decodings
        assert (found.size.width, found.size.height, found.batch) == (1024, 512, 2)
        assert (found.tile_size, found.overlap) == (256, 32)


class TestSizes:
    def test_an_empty_latent_is_cropped_to_whole_latent_pixels(self, scan: Any) -> None:
        assert latent_of(scan, last=empty(519, 456)) == (512, 456, 1)

    @pytest.mark.parametrize(
        ("class_type", "given", "size"),
        [
            ("EmptyLatentImage", (728, 968), (728, 968)),
            ("EmptySD3LatentImage", (728, 968), (728, 968)),
            ("EmptyHunyuanLatentVideo", (728, 968), (728, 968)),
            ("EmptyFlux2LatentImage", (728, 968), (720, 960)),
            ("EmptyHunyuanVideo15Latent", (728, 968), (720, 960)),
            ("EmptyHunyuanImageLatent", (728, 968), (704, 960)),
            ("EmptyLTXVLatentVideo", (728, 968), (704, 960)),
        ],
    )
    def test_an_empty_latent_has_the_cells_of_its_model(
        self, scan: Any, class_type: str, given: tuple[int, int], size: tuple[int, int]
    ) -> None:
        """As people typed it, where the model can make it: Flux 2 has 16 pixels to a side of a cell, LTX 32."""
        assert latent_of(scan, last={**empty(*given, 4), "class_type": class_type}) == (*size, 4)

    def test_a_video_from_a_picture_has_the_size_that_people_typed(self, scan: Any) -> None:
        typed = {"width": 768, "height": 512, "length": 97, "batch_size": 2}
        ltx = node("LTXVImgToVideo", image=["picture", 0], vae=["vae", 0], **typed)
        found = scan(workflow(last=ltx, sample=sampler("last", latent_image=["last", 2]), decode=decoder("sample")))
        assert latents(found) == pictures(found) == [(768, 512, 2)]
        assert found.samplings[0].is_video

    @pytest.mark.parametrize(("more", "batch"), [({}, 1), ({"start_image": ["picture", 0]}, 3)])
    def test_wan22_makes_one_video_unless_it_starts_from_a_picture(self, scan: Any, more: Any, batch: int) -> None:
        last = node("Wan22ImageToVideoLatent", vae=["vae", 0], width=1280, height=704, length=49, batch_size=3, **more)
        assert latent_of(scan, last=last) == (1280, 704, batch)

    def test_wan_makes_as_many_videos_from_a_picture_as_its_batch_size(self, scan: Any) -> None:
        typed = {"width": 832, "height": 484, "length": 81, "batch_size": 2}
        wan = node("WanImageToVideo", vae=["vae", 0], start_image=["picture", 0], **typed)
        found = scan(workflow(last=wan, sample=sampler("last", latent_image=["last", 2])))
        assert latents(found) == [(832, 480, 2)]
        assert found.samplings[0].is_video

    @pytest.mark.parametrize(("class_type", "output"), [("EmptyMiniMaxH3LatentAV", 0), ("MiniMaxH3ImageToVideo", 1)])
    def test_minimax_makes_one_video_of_cells_of_16_pixels(self, scan: Any, class_type: str, output: int) -> None:
        made = node(class_type, vae=["vae", 0], width=728, height=968, length=124)
        found = scan(workflow(last=made, sample=sampler("last", latent_image=["last", output])))
        assert latents(found) == [(720, 960, 1)]
        assert found.samplings[0].is_video

    def test_a_video_keeps_its_size_with_sound_and_without_it_and_without_guides(self, scan: Any) -> None:
        sound = node("VAEDecodeAudio", samples=["joint", 0], vae=["vae", 0])
        nodes = {
            "video": {**empty(640, 352, 2), "class_type": "EmptyLTXVLatentVideo"},
            "joint": node("LTXVConcatAVLatent", video_latent=["video", 0], audio_latent=["unknown", 0]),
            "split": node("LTXVSeparateAVLatent", av_latent=["joint", 0]),
            "crop": node("LTXVCropGuides", latent=["split", 0], positive=["text", 0], negative=["text", 0]),
        }
        found = scan(workflow(**nodes, sound=sound, sample=sampler("crop", latent_image=["crop", 2])))
        assert (latents(found), found.unknown) == ([(640, 352, 2)], ())
        assert found.samplings[0].is_video

    def test_pixels_stay_right_behind_nodes_that_change_latents(self, scan: Any) -> None:
        first = {**empty(1024, 512, 1), "class_type": "EmptyFlux2LatentImage"}
        by = node("LatentUpscaleBy", samples=["first", 0], upscale_method="area", scale_by=1.5)
        assert latent_of(scan, first=first, last=by) == (1536, 768, 1)
        # Core's node counts 8 pixels to a cell whatever the model, so 1024 pixels become 128 cells of 16.
        to = node("LatentUpscale", samples=["first", 0], upscale_method="area", crop="disabled", width=1024, height=512)
        assert latent_of(scan, first=first, last=to) == (2048, 1024, 1)

    def test_pictures_made_from_a_video_are_not_counted(self, scan: Any) -> None:
        video = {**empty(768, 512), "class_type": "EmptyLTXVLatentVideo"}
        encoded = node("VAEEncode", pixels=["decode", 0], vae=["vae", 0])
        nodes = {"first": sampler("video"), "decode": decoder("first"), "encode": encoded, "last": sampler("encode")}
        found = scan(workflow(video=video, **nodes, end=decoder("last")))
        assert latents(found) == pictures(found) == [(768, 512, 1)]
        (sentence,) = found.unknown
        assert "how many frames a video has is known only when it is decoded" in sentence

    def test_resolution_gives_its_preset_or_its_numbers(self, scan: Any) -> None:
        linked = {"width": ["size", 0], "height": ["size", 1], "batch_size": 1}
        latent = node("EmptyLatentImage", **linked)
        preset = node("ResoluteResolution", preset="SDXL 1216x832", width=64, height=64, multiple="8")
        custom = node("ResoluteResolution", preset="custom", width=584, height=456, multiple="8")
        assert latent_of(scan, size=preset, last=latent) == (1216, 832, 1)
        assert latent_of(scan, size=custom, last=latent) == (584, 456, 1)

    def test_the_error_of_an_invalid_resolution_is_quoted(self, scan: Any) -> None:
        size = node("ResoluteResolution", preset="custom", width=500, height=456, multiple="8")
        latent = node("EmptyLatentImage", width=["size", 0], height=["size", 1], batch_size=1)
        (sentence,) = scan(workflow(size=size, latent=latent, sample=sampler("latent"))).unknown
        assert "Size 500x456: width and height must be multiples of 8" in sentence

    def test_numbers_come_from_constants_and_images(self, scan: Any) -> None:
        nodes = {
            "picture": node("LoadImage", image="a.png"),
            "size": node("GetImageSize", image=["picture", 0]),
            "number": node("PrimitiveInt", value="640"),
            "last": node("EmptyLatentImage", width=["number", 0], height=["size", 1], batch_size=["size", 2]),
        }
        assert latent_of(scan, **nodes) == (640, 600, 1)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"width": 1000, "height": 500}, (1000, 496, 2)),
            ({"width": 0, "height": 0}, (584, 456, 2)),
            ({"width": 0, "height": 900}, (1152, 896, 2)),  # round(73 * 900 / 57) = 1153
            ({"width": 1000, "height": 0}, (1000, 776, 2)),  # round(57 * 1000 / 73) = 781
            ({"width": 0, "height": 8}, (80, 64, 2)),
        ],
    )
    def test_latent_upscale_rounds_as_core_does(
        self, scan: Any, changes: dict[str, int], expected: tuple[int, int, int]
    ) -> None:
        upscale = node("LatentUpscale", samples=["first", 0], **changes)
        assert latent_of(scan, first=empty(584, 456, 2), last=upscale) == expected

    def test_half_a_latent_pixel_rounds_to_the_even_number(self, scan: Any) -> None:
        upscale = node("LatentUpscaleBy", samples=["first", 0], scale_by=1.5)
        # 73 * 1.5 = 109.5 -> 110, 57 * 1.5 = 85.5 -> 86; 75 * 1.5 = 112.5 -> 112
        assert latent_of(scan, first=empty(584, 456), last=upscale) == (880, 688, 1)
        assert latent_of(scan, first=empty(600, 600), last=upscale) == (896, 896, 1)

    def test_batches_add_up_and_are_cut(self, scan: Any) -> None:
        nodes = {
            "one": empty(512, 512, 3),
            "two": empty(256, 256, 2),
            "both": node("LatentBatch", samples1=["one", 0], samples2=["two", 0]),
            "many": node("RepeatLatentBatch", samples=["both", 0], amount=2),
            "last": node("LatentFromBatch", samples=["many", 0], batch_index=-3, length=64),
        }
        assert latent_of(scan, **nodes) == (512, 512, 3)
        assert latent_of(scan, last=nodes.pop("many"), both=nodes["both"], one=nodes["one"], two=nodes["two"])[2] == 10

    def test_batch_latents_has_the_size_of_its_first_input(self, scan: Any) -> None:
        links = {f"latents.latent{number}": [name, 0] for number, name in [(10, "two"), (2, "one")]}
        nodes = {"one": empty(512, 256), "two": empty(64, 64, 5), "last": node("BatchLatentsNode", **links)}
        assert latent_of(scan, **nodes) == (512, 256, 6)

    def test_a_crop_ends_at_the_edge(self, scan: Any) -> None:
        crop = node("LatentCrop", samples=["first", 0], width=512, height=64, x=400, y=0)
        assert latent_of(scan, first=empty(512, 512), last=crop) == (112, 64, 1)

    def test_rotation_swaps_width_and_height(self, scan: Any) -> None:
        turned = node("LatentRotate", samples=["first", 0], rotation="270 degrees")
        assert latent_of(scan, first=empty(512, 768), last=turned) == (768, 512, 1)

    @pytest.mark.parametrize(
        ("scale", "expected"),
        [
            (node("ImageScale", width=800, height=0), (800, 480, 1)),  # round(607 * 800 / 1001) = 485
            (node("ImageScale", width=0, height=0), (1000, 600, 1)),
            (node("ImageScaleBy", scale_by=0.5), (496, 304, 1)),  # round(500.5) = 500, round(303.5) = 304
            (node("ImageScaleToTotalPixels", megapixels=1.0), (1312, 792, 1)),  # 1315 x 797
            (node("ImageScaleToTotalPixels", megapixels=1.0, resolution_steps=64), (1344, 768, 1)),
            (node("ImageScaleToMaxDimension", largest_size=512), (512, 304, 1)),
            (node("FluxKontextImageScale"), (1328, 800, 1)),  # 1.66, and 1001 / 607 is 1.649
            (node("ImageCrop", width=512, height=512, x=600, y=0), (400, 512, 1)),
            (node("ImagePadForOutpaint", left=8, top=0, right=16, bottom=100), (1024, 704, 1)),
            (
                node("ResizeImageMaskNode", resize_type="scale to multiple", **{"resize_type.multiple": 64}),
                (960, 576, 1),
            ),
        ],
        ids=lambda value: value["class_type"] if isinstance(value, dict) else "",
    )
    def test_image_sizes_reach_the_encoder(
        self, scan: Any, scale: dict[str, Any], expected: tuple[int, int, int]
    ) -> None:
        name = "input" if scale["class_type"] == "ResizeImageMaskNode" else "image"
        scaled = {**scale, "inputs": {**scale["inputs"], name: ["picture", 0]}}
        encode = node("VAEEncode", pixels=["scaled", 0], vae=["loader", 2])
        assert latent_of(scan, picture=node("LoadImage", image="a.png"), scaled=scaled, last=encode) == expected

    def test_a_switch_outputs_the_selected_side(self, scan: Any) -> None:
        switch = node("ComfySwitchNode", switch=True, on_true=["small", 0], on_false=["big", 0])
        assert latent_of(scan, small=empty(256, 256), big=empty(1024, 1024), last=switch) == (256, 256, 1)


class TestNodesThatRun:
    def test_a_sampler_that_no_output_needs_is_left_out(self, scan: Any) -> None:
        prompt = workflow(latent=empty(), used=sampler("latent"))
        prompt["unused"] = sampler("latent")
        prompt["unused picture"] = decoder("unused")
        found = scan(prompt)
        assert [each.node for each in found.samplings] == ["used"]
        assert found.decodings == ()

    def test_the_unselected_side_of_a_switch_does_not_run(self, scan: Any) -> None:
        switch = node("ComfySwitchNode", switch=["flag", 0], on_true=["one", 0], on_false=["two", 0])
        flag = node("PrimitiveBoolean", value=False)
        found = scan(workflow(latent=empty(), flag=flag, one=sampler("latent"), two=sampler("latent"), chosen=switch))
        assert [each.node for each in found.samplings] == ["two"]


class TestUnknownNodes:
    def test_a_node_without_a_rule_is_named_and_nothing_is_guessed(self, scan: Any) -> None:
        other = node("SomeonesUpscaler", "Make it big", samples=["first", 0], scale_by=2.0)
        found = scan(workflow(latent=empty(), first=sampler("latent"), other=other, second=sampler("other")))
        assert latents(found) == [(512, 512, 1)]
        assert found.unknown == (
            "Make it big other: Resolute does not know what this node does to sizes and batches. "
            "So Resolute does not know the size of: KSampler second.",
        )

    @pytest.mark.parametrize("links", [("model", "positive", "latent_image"), ("vae", "samples")])
    def test_a_node_that_may_sample_or_decode_is_named(self, scan: Any, links: tuple[str, ...]) -> None:
        sources = {"model": "model", "positive": "text", "latent_image": "latent", "samples": "latent", "vae": "vae"}
        other = node("SomeonesSampler", "Fancy", **{name: [sources[name], 0] for name in links})
        found = scan(workflow(latent=empty(), other=other))
        assert found.samplings == found.decodings == ()
        assert found.unknown[0].startswith("Fancy other: this node (SomeonesSampler) may sample or decode")

    def test_a_node_that_samples_from_a_pipe_is_named_but_not_one_that_packs_or_unpacks_it(self, scan: Any) -> None:
        made = node("ToBasicPipe", model=["model", 0], clip=["loader", 1], vae=["vae", 0], positive=["text", 0])
        opened = node("FromBasicPipe", basic_pipe=["made", 0])
        own = sampler("latent", model="opened", positive=["opened", 3], negative=["opened", 4])
        detailer = node("FaceDetailerPipe", image=["picture", 0], detailer_pipe=["made", 0])
        found = scan(workflow(latent=empty(), made=made, opened=opened, own=own, picture=decoder("own"), last=detailer))
        assert latents(found) == [(512, 512, 1)]
        (unknown,) = found.unknown
        assert unknown.startswith("FaceDetailerPipe last: this node (FaceDetailerPipe) may sample or decode")

    def test_a_node_that_only_outputs_models_and_conditioning_is_not_named(self, scan: Any) -> None:
        adapter = node("ApplyIdentity", model=["model", 0], positive=["text", 0], negative=["text", 0])
        one = sampler("latent", model="adapter", positive=["adapter", 1], negative=["adapter", 2])
        found = scan(workflow(latent=empty(), adapter=adapter, sample=one))
        assert (latents(found), found.unknown) == ([(512, 512, 1)], ())


class TestMalformedInput:
    @pytest.mark.parametrize("prompt", [None, [], {}, "text", 7])
    def test_anything_but_a_workflow_is_refused(self, scan: Any, user_error: type[Exception], prompt: Any) -> None:
        with pytest.raises(user_error, match=r"not a workflow in API form.*Export \(API\)"):
            scan(prompt)

    def test_the_editors_form_is_refused_with_the_way_to_export(self, scan: Any, user_error: type[Exception]) -> None:
        editor = json.loads((ROOT / "workflows" / "resolute_faster_compiled_deepcache.json").read_text("utf-8"))
        with pytest.raises(user_error, match=r"form of ComfyUI's editor, not in API form.*Export \(API\)"):
            scan(editor)

    @pytest.mark.parametrize("content", [None, 3, {}, {"class_type": 3}, {"class_type": "KSampler"}])
    def test_an_entry_that_is_not_a_node_is_named(self, scan: Any, user_error: type[Exception], content: Any) -> None:
        with pytest.raises(user_error, match="seventeen"):
            scan({**BASE, "seventeen": content})

    def test_a_cycle_is_reported(self, scan: Any) -> None:
        prompt = workflow(first=sampler("second"), second=sampler("first"), picture=decoder("second"))
        found = scan(prompt)
        assert found.samplings == found.decodings == ()
        assert any("cycle" in sentence for sentence in found.unknown)

    def test_a_chain_of_thousands_of_nodes_does_not_overflow_the_stack(self, scan: Any) -> None:
        chain = {f"{number}": node("LatentFlip", samples=[f"{number - 1}", 0]) for number in range(1, 5000)}
        found = scan({**BASE, **chain, "0": empty(), "s": sampler("4999"), "end": node("Save", any=["s", 0])})
        assert latents(found) == [(512, 512, 1)]

    @pytest.mark.parametrize(
        ("inputs", "sentence"),
        [
            ({"width": None, "height": 512}, "'width' is not a usable number"),
            ({"height": 512}, "'width' is missing"),
            ({"width": ["gone", 0], "height": 512}, "node gone, which is not in the workflow"),
            ({"width": ["text", 7], "height": 512}, "output 7 of node text, which does not exist"),
            ({"width": ["text", 0], "height": 512}, "'width' is not a usable number"),
            ({"width": 0, "height": 512}, "is empty"),
            ({"width": -64, "height": 512}, "is empty"),
            ({"width": 10**4000, "height": 512}, "larger than 1048576 pixels a side or images"),
            ({"width": float("inf"), "height": 512}, "'width' is not a usable number"),
        ],
    )
    def test_an_unusable_number_is_reported(self, scan: Any, inputs: dict[str, Any], sentence: str) -> None:
        found = scan(workflow(latent=node("EmptyLatentImage", batch_size=1, **inputs), sample=sampler("latent")))
        assert found.samplings == ()
        assert sentence in found.unknown[0]

    @pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e308, "wide", [], {}, True])
    def test_no_scale_factor_raises(self, scan: Any, factor: Any) -> None:
        upscale = node("LatentUpscaleBy", samples=["latent", 0], scale_by=factor)
        found = scan(workflow(latent=empty(), bigger=upscale, sample=sampler("bigger")))
        assert len(found.samplings) + len(found.unknown) == 1

    def test_a_sampler_without_a_model_is_reported(self, scan: Any) -> None:
        broken = sampler("latent")
        del broken["inputs"]["model"]
        assert "nothing is connected to 'model'" in scan(workflow(latent=empty(), sample=broken)).unknown[0]


def empty(width: int = 512, height: int = 512, batch: int = 1) -> dict[str, Any]:
    return node("EmptyLatentImage", width=width, height=height, batch_size=batch)


def advanced() -> dict[str, Any]:
    return node("SamplerCustomAdvanced", guider=["guider", 0], latent_image=["latent", 0])


def dual(conds: float, negative: float) -> dict[str, Any]:
    links = {"model": ["model", 0], "cond1": ["text", 0], "cond2": ["other", 0], "negative": ["text", 0]}
    return node("DualCFGGuider", **links, cfg_conds=conds, cfg_cond2_negative=negative, style="regular")


def test_the_scanner_imports_neither_torch_nor_comfyui() -> None:
    """Runs in a new process, where no other test has imported them."""
    lines = ["import sys", "from scripts import pack", "pack.module('nodes.adapters.warm_up.prompt')"]
    lines.append("print(sorted(sys.modules.keys() & {'torch', 'numpy', 'PIL', 'comfy', 'nodes', 'folder_paths'}))")
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
