"""Workflows with OneDiff's nodes, as its pack's definitions have them, run unchanged and give what stock ComfyUI gives.

Only names of models differ from what a user has. A DeepCache workflow gives what the same one with our nodes gives.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from safetensors.numpy import save_file

from scripts.errors import PromptError
from scripts.server.client import Client
from scripts.server.process import ComfyServer

from .matrix.test_lora import SD15, low_rank
from .rig import Bench, PromptDict, Run, assert_different, assert_same, node, with_model

STEPS = 2
# Each node as ComfyUI describes it to its front end, without texts for people and without files of this machine.
SAVED = json.loads(Path(__file__).with_name("onediff_nodes.json").read_text("utf-8"))
SAVED_ORDER = {name: {group: list(inputs) for group, inputs in node["input"].items()} for name, node in SAVED.items()}
CACHED_STEPS = 10  # fewer leave DeepCache nothing to skip


@pytest.fixture(scope="module")
def checkpoint(make_model: Callable[[str], str]) -> str:
    return make_model("sd15-mini")


@pytest.fixture(scope="module")
def loras(server: ComfyServer) -> list[str]:
    folder = server.folder / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    names = ["onediff-a.safetensors", "onediff-b.safetensors"]
    for number, name in enumerate(names):
        noise = numpy.random.default_rng(number)
        tensors: dict[str, Any] = {}
        for layer, shape in list(SD15.items())[: 4 - number]:
            tensors |= low_rank(layer, shape, lambda size, noise=noise: noise.standard_normal(size, numpy.float32))
        save_file(tensors, folder / name)
    return names


@pytest.fixture
def prompt(checkpoint_prompt: Callable[..., PromptDict], checkpoint: str, seed: int) -> PromptDict:
    return checkpoint_prompt(checkpoint, seed=seed, steps=STEPS, width=72, height=64)


def with_loader(prompt: PromptDict, class_type: str, **inputs: Any) -> PromptDict:
    """The prompt with another loader of the same checkpoint."""
    changed = copy.deepcopy(prompt)
    name = changed["loader"]["inputs"]["ckpt_name"]
    changed["loader"] = node(class_type, ckpt_name=name, **inputs)
    return changed


def with_loras(prompt: PromptDict, names: list[str]) -> PromptDict:
    """The prompt with LoRAs between the loader and all that uses its model or its text encoder."""
    changed = copy.deepcopy(prompt)
    links = {0: ["loader", 0], 1: ["loader", 1]}
    for name in names:
        strengths = {"strength_model": 0.8, "strength_clip": 0.8}
        changed[f"lora {name}"] = node("LoraLoader", lora_name=name, model=links[0], clip=links[1], **strengths)
        links = {0: [f"lora {name}", 0], 1: [f"lora {name}", 1]}
    changed["sample"]["inputs"]["model"] = links[0]
    for text in ("positive", "negative"):
        changed[text]["inputs"]["clip"] = links[1]
    return changed


def controlled(prompt: PromptDict, loader: dict[str, Any], picture: str) -> PromptDict:
    changed = copy.deepcopy(prompt)
    changed["hint"] = node("LoadImage", image=picture)
    changed["net"] = loader
    links = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["net", 0], "image": ["hint", 0]}
    changed["control"] = node("ControlNetApplyAdvanced", **links, strength=0.8, start_percent=0.0, end_percent=1.0)
    changed["sample"]["inputs"].update(positive=["control", 0], negative=["control", 1])
    return changed


def both(bench: Bench, ours: PromptDict, expected: PromptDict) -> tuple[Run, Run]:
    """Run both prompts and compare their results."""
    found, wanted = bench.run(ours), bench.run(expected)
    assert_same(found, wanted)
    return found, wanted


def described(found: dict[str, Any]) -> dict[str, Any]:
    """A node as in SAVED, from ComfyUI's description of it."""
    inputs: dict[str, Any] = {}
    for group, given in found["input"].items():
        inputs[group] = {}
        for name, (kind, *rest) in given.items():
            options = {key: value for each in rest for key, value in each.items() if key != "tooltip"}
            if name.endswith("_name") and kind == "COMBO":
                del options["options"]
            inputs[group][name] = [kind, options] if options else [kind]
    kept = ("display_name", "category", "deprecated", "output", "output_name", "output_node")
    return {**{key: found[key] for key in kept}, "input": inputs}


class TestWorkflows:
    @pytest.mark.parametrize(("vae_speedup", "decodes"), [("disable", 0), ("enable", 1)])
    def test_text_to_image(self, bench: Bench, prompt: PromptDict, vae_speedup: str, decodes: int) -> None:
        loaded = with_loader(prompt, "OneDiffCheckpointLoaderSimple", vae_speedup=vae_speedup)
        ours, stock = both(bench, loaded, prompt)
        assert (ours.forwards, stock.forwards) == (STEPS + decodes, 0)

    def test_two_loras(self, bench: Bench, prompt: PromptDict, loras: list[str]) -> None:
        plain = with_loader(prompt, "OneDiffCheckpointLoaderSimple", vae_speedup="disable")
        ours, _ = both(bench, with_loras(plain, loras), with_loras(prompt, loras))
        assert ours.forwards == STEPS
        assert_different(ours, bench.run(with_loras(plain, loras[:1])))

    @pytest.mark.parametrize(
        ("name", "inputs"),
        [("ModelSpeedup", {"static_mode": "enable"}), ("SVDSpeedup", {"inplace": False, "cache_name": "svd"})],
        ids=["the first version", "of videos"],
    )
    def test_a_lora_before_a_speedup(
        self, bench: Bench, prompt: PromptDict, loras: list[str], name: str, inputs: dict[str, Any]
    ) -> None:
        stock = with_loras(prompt, loras[:1])
        ours, _ = both(bench, with_model(stock, node(name, **inputs)), stock)
        assert ours.forwards == STEPS

    def test_controlnet_and_lora(
        self, bench: Bench, server: ComfyServer, prompt: PromptDict, loras: list[str], make_model: Callable[[str], str]
    ) -> None:
        name = make_model("sd15-mini-controlnet")
        colours = numpy.random.default_rng(1).integers(0, 255, (64, 72, 3), numpy.uint8)
        Image.fromarray(colours).save(server.input_folder / "onediff-hint.png")
        stock = controlled(
            with_loras(prompt, loras[:1]), node("ControlNetLoader", control_net_name=name), "onediff-hint.png"
        )
        ours = copy.deepcopy(stock)
        ours["net"] = node("OneDiffControlNetLoader", control_net_name=name)
        found, wanted = both(bench, with_model(ours, node("ModelSpeedup", inplace=True)), stock)
        assert found.forwards == 2 * STEPS  # UNet and ControlNet
        assert_different(wanted, bench.run(with_loras(prompt, loras[:1])))
        separate = copy.deepcopy(stock)
        separate["control"]["inputs"]["control_net"] = ["speedup", 0]
        separate["speedup"] = node("ControlnetSpeedup", control_net=["net", 0], inplace=True)
        again = bench.run(separate)
        assert_same(again, wanted)
        assert again.forwards == STEPS

    @pytest.mark.long
    def test_sd3_with_nexforts_booster(
        self, bench: Bench, checkpoint_prompt: Any, make_model: Callable[[str], str], seed: int
    ) -> None:
        stock = checkpoint_prompt(make_model("sd3-tiny"), seed=seed, steps=STEPS, width=64, height=80)
        text = {"tokens": 154, "width": 4096, "pooled_width": 2048, "batch": 1}
        for number, name in enumerate(("positive", "negative")):  # SD3's text encoders have gigabytes
            stock[name] = node("ResoluteTestConditioning", seed=number, **text)
        stock["latent"] = node("EmptySD3LatentImage", width=64, height=80, batch_size=1)
        mode = {"fullgraph": False, "dynamic": True, "mode": "max-autotune:benchmark:low-precision", "docs_link": ""}
        booster = {
            "nexfort": node("OneDiffNexfortBooster", **mode),
            "booster": node("OneDiffModelBooster", torchcompile_booster=["nexfort", 0]),
        }
        ours = with_model({**stock, **booster}, node("ModelSpeedup", custom_booster=["booster", 0], inplace=True))
        vae = {"vae": ["loader", 2], "custom_booster": ["booster", 0], "inplace": True}
        ours["fast vae"] = node("VaeSpeedup", **vae)
        ours["decode"]["inputs"]["vae"] = ["fast vae", 0]
        found, _ = both(bench, ours, stock)
        assert found.rise["graph_calls"] + found.rise["eager_calls"] + found.rise["replays"] == STEPS + 1


class TestDeepCache:
    INPUTS = {"cache_interval": 12, "cache_layer_id": 0, "cache_block_id": 2, "start_step": 100, "end_step": 900}
    SETTINGS = {"interval": 12, "depth": 3, "start_percent": 0.1, "end_percent": 0.9}

    @pytest.fixture
    def tiny(self, tiny_prompt: Any, seed: int) -> PromptDict:
        prompt: PromptDict = tiny_prompt(seed=seed, width=136, height=104, steps=CACHED_STEPS)
        return prompt

    @pytest.fixture
    def translated(self, tiny: PromptDict) -> PromptDict:
        return with_model(
            tiny, node("ResoluteCompileModel", backend="auto"), node("ResoluteDeepCache", **self.SETTINGS)
        )

    def test_a_deepcache_node(self, bench: Bench, tiny: PromptDict, translated: PromptDict) -> None:
        ours, _ = both(
            bench, with_model(tiny, node("ModuleDeepCacheSpeedup", static_mode="enable", **self.INPUTS)), translated
        )
        assert ours.forwards > 0
        assert_different(ours, bench.run(tiny))

    def test_a_deepcache_booster(self, bench: Bench, tiny: PromptDict, translated: PromptDict) -> None:
        tiny["cache"] = node("OneFlowDeepcacheBooster", **self.INPUTS)
        tiny["booster"] = node("OneDiffModelBooster", deepcache_booster=["cache", 0])
        both(bench, with_model(tiny, node("ModelSpeedup", custom_booster=["booster", 0])), translated)

    def test_a_deepcache_loader(
        self, bench: Bench, checkpoint_prompt: Callable[..., PromptDict], checkpoint: str, seed: int
    ) -> None:
        plain = checkpoint_prompt(checkpoint, seed=seed, steps=CACHED_STEPS, width=72, height=64)
        ours = with_loader(
            plain, "OneDiffDeepCacheCheckpointLoaderSimple", vae_speedup="disable", static_mode="enable", **self.INPUTS
        )
        settings = node("ResoluteDeepCache", **self.SETTINGS)
        both(bench, ours, with_model(plain, node("ResoluteCompileModel", backend="auto"), settings))

    def test_an_empty_window_compiles_without_deepcache(self, bench: Bench, tiny: PromptDict) -> None:
        inputs = {**self.INPUTS, "start_step": 900, "end_step": 100}
        ours, _ = both(bench, with_model(tiny, node("ModuleDeepCacheSpeedup", static_mode="enable", **inputs)), tiny)
        assert ours.forwards == CACHED_STEPS


class TestNodesWithoutMeaning:
    def test_they_pass_their_input_on(self, bench: Bench, tiny_prompt: Any, seed: int) -> None:
        stock = tiny_prompt(seed=seed, steps=1)
        prompt = with_model(
            stock,
            node("ModelGraphLoader", graph="sdxl-unet-cuda.graph"),
            node("BatchSizePatcher", latent_image=["latent", 0]),
            node("ModelSpeedup", static_mode="enable"),
        )
        prompt["checked"] = node("ResolutionSpeedupChecker", samples=["sample", 0])
        prompt["old vae"] = node("VaeGraphLoader", vae=["vae", 0], graph="vae.graph")
        prompt["decode"] = node("VAEDecode", samples=["checked", 0], vae=["old vae", 0])
        prompt["keep"] = node("ModelGraphSaver", samples=["sample", 0], model=["model", 0], filename_prefix="unet")
        prompt["keep vae"] = node("VaeGraphSaver", images=["decode", 0], vae=["vae", 0], filename_prefix="vae")
        prompt["quantize"] = node("Quant8Model", model=["model", 0], output_dir="int8", conv="enable", linear="enable")
        ours, _ = both(bench, prompt, stock)
        assert ours.forwards == 1

    def test_a_quantized_workflow_runs_in_its_own_precision(self, bench: Bench, prompt: PromptDict) -> None:
        percents = {"quantized_conv_percentage": 100, "quantized_linear_percentage": 100}
        limits = {"conv_compute_density_threshold": 100, "linear_compute_density_threshold": 300}
        ours = with_loader(
            prompt, "OneDiffCheckpointLoaderSimple", vae_speedup="disable", custom_booster=["booster", 0]
        )
        ours["quantizer"] = node("OneDiffOnlineQuantizationBooster", **percents, **limits)
        ours["booster"] = node("OneDiffModelBooster", quantization_booster=["quantizer", 0])
        found, _ = both(bench, ours, prompt)
        assert found.forwards == STEPS

    def test_a_booster_that_is_switched_off_compiles_nothing(self, bench: Bench, tiny_prompt: Any, seed: int) -> None:
        stock = tiny_prompt(seed=seed, steps=STEPS)
        off = {"fullgraph": False, "dynamic": None, "backend": "inductor", "mode": "default", "disable": True}
        stock["off"] = node("OneDiffTorchCompileBooster", **off, docs_link="")
        stock["booster"] = node("OneDiffModelBooster", torchcompile_booster=["off", 0])
        found = bench.run(with_model(stock, node("ModelSpeedup", custom_booster=["booster", 0])))
        assert (found.rise["eager_calls"], found.forwards) == (STEPS, 0)

    def test_int8_files_stop_the_prompt_with_what_to_use(self, bench: Bench, tiny_prompt: Any, seed: int) -> None:
        prompt = tiny_prompt(seed=seed)
        prompt["model"] = node("UNETLoaderInt8", model_path="unet_int8")
        with pytest.raises(PromptError, match="Load the original model with Load Diffusion Model"):
            bench.run(prompt)

    def test_images_are_compared(self, bench: Bench, tiny_prompt: Any, seed: int) -> None:
        prompt = tiny_prompt(seed=seed, steps=1)
        other = node("EmptyImage", width=256, height=256, batch_size=1, color=255)
        values = {"ssim_threshold": "0.9", "image_id": "ComfyUI"}
        links = {"images1": ["decode", 0], "images2": ["other", 0]}
        same = {"images1": ["decode", 0], "images2": ["decode", 0]}
        prompt |= {"other": other, "diff": node("ShowImageDiff", **same, **values, raise_if_diff="enable")}
        assert "identical" in bench.run(prompt).history["outputs"]["diff"]["text"][0]
        prompt["diff"] = node("ShowImageDiff", **links, **values, raise_if_diff="enable")
        with pytest.raises(PromptError, match=r"SSIM .* is not above the limit 0\.9"):
            bench.run(prompt)
        prompt["diff"]["inputs"]["raise_if_diff"] = "disable"
        assert "identical" not in bench.run(prompt).history["outputs"]["diff"]["text"][0]

    def test_images_are_compared_as_its_first_versions_saved_it(
        self, bench: Bench, tiny_prompt: Any, seed: int
    ) -> None:
        """By place in a workflow, where rtol and atol were the first two widgets; by name in a prompt."""
        prompt = tiny_prompt(seed=seed, steps=1)
        prompt["near"] = node("EmptyImage", width=64, height=64, batch_size=1, color=0x808080)
        prompt["nearer"] = node("EmptyImage", width=64, height=64, batch_size=1, color=0x818181)
        links = {"images1": ["near", 0], "images2": ["nearer", 0]}  # one level of 255 apart, so SSIM is above 0.99

        def shifted(rtol: str, atol: str, raise_if_diff: str) -> dict[str, Any]:
            names = ("ssim_threshold", "raise_if_diff", "image_id", "rtol")
            return dict(zip(names, (rtol, atol, raise_if_diff, "ComfyUI"), strict=True))

        for values in (
            shifted("1e-4", "1e-4", "enable"),
            {"rtol": "1e-4", "atol": "1e-4", "raise_if_diff": "enable", "image_id": "ComfyUI"},
        ):
            prompt["diff"] = node("ShowImageDiff", **links, **values)
            with pytest.raises(PromptError, match=r"not all values are within rtol 0\.0001 and atol 0\.0001"):
                bench.run(prompt)
        for values in (shifted("1e-4", "1e-4", "disable"), shifted("1e-4", "0.01", "enable")):
            prompt["diff"] = node("ShowImageDiff", **links, **values)
            assert "max error" in bench.run(prompt).history["outputs"]["diff"]["text"][0]


class TestRegistration:
    def test_each_is_deprecated_and_its_title_says_what_it_became(self, client: Client) -> None:
        known = client.get("/object_info")
        ours = {name: found for name, found in known.items() if found["category"] == "Resolute/OneDiff"}
        for name, found in ours.items():
            assert found["deprecated"], name
            assert " → " in found["display_name"] or found["display_name"].endswith("(no longer needed)"), name

    def test_ids_inputs_and_outputs_stay_as_saved_workflows_have_them(self, client: Client) -> None:
        known = client.get("/object_info")
        ours = {name: described(found) for name, found in known.items() if found["category"] == "Resolute/OneDiff"}
        assert len(SAVED) == 29
        assert ours == SAVED
        for name in ours:  # widgets are stored by place
            assert known[name]["input_order"] == SAVED_ORDER[name], name

    def test_where_onediff_is_loaded_its_own_nodes_win(
        self, make_server: Callable[..., ComfyServer], tmp_path: Path
    ) -> None:
        from ..conftest import linked_packs

        pack = tmp_path / "onediff_comfy_nodes"
        pack.mkdir()
        (pack / "__init__.py").write_text(
            "class Theirs:\n"
            "    RETURN_TYPES = ('MODEL',)\n"
            "    FUNCTION = 'run'\n"
            "    CATEGORY = 'OneDiff'\n"
            "    @classmethod\n"
            "    def INPUT_TYPES(cls):\n"
            "        return {'required': {'model': ('MODEL',)}}\n"
            "NODE_CLASS_MAPPINGS = {'ModelSpeedup': Theirs}\n",
            encoding="utf-8",
        )
        server = make_server(packs={**linked_packs(), "onediff_comfy_nodes": pack})
        known = server.client.get("/object_info")
        assert known["ModelSpeedup"]["category"] == "OneDiff"
        assert [name for name, found in known.items() if found["category"] == "Resolute/OneDiff"] == []
        assert "OneDiff's own nodes are loaded" in server.log()
        server.stop()


@pytest.mark.long
@pytest.mark.old
def test_on_the_oldest_comfyui(old_server: ComfyServer, tiny_prompt: Any, seed: int) -> None:
    bench = Bench(old_server.client)
    stock = tiny_prompt(seed=seed, steps=STEPS, width=136, height=104)
    ours, _ = both(bench, with_model(stock, node("ModelSpeedup", inplace=True)), stock)
    assert ours.forwards == STEPS
