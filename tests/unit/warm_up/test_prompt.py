"""The prompt that warms up a workflow: its step nodes, what it leaves out, its sizes and its warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.places import ROOT

Prompt = dict[str, dict[str, Any]]
Build = Callable[..., Any]

BUNDLED = sorted((ROOT / "workflows" / "api").glob("*.json"))
# Node class -> the types of its outputs, and whether it is an output node.
CLASSES = {
    name: SimpleNamespace(RETURN_TYPES=outputs, OUTPUT_NODE=is_output)
    for name, (outputs, is_output) in {
        "Loader": (("MODEL", "CLIP", "VAE"), False),
        "ResoluteLoadCheckpoint": (("MODEL", "CLIP", "VAE"), False),
        "OneDiffCheckpointLoaderSimple": (("MODEL", "CLIP", "VAE"), False),
        "ResoluteCompileModel": (("MODEL",), False),
        "ResoluteCompileVAEDecode": (("VAE",), False),
        "ResoluteResolution": (("INT", "INT"), False),
        "PrimitiveInt": (("INT",), False),
        "Lora": (("MODEL", "CLIP"), False),
        "Scheduler": (("SIGMAS",), False),
        "Text": (("CONDITIONING",), False),
        "Pipe": (("PIPE",), False),
        "FromPipe": (("MODEL", "VAE"), False),
        "Reroute": (("*",), False),
        "EmptyLatentImage": (("LATENT",), False),
        "KSampler": (("LATENT",), False),
        "EfficientSampler": (("MODEL", "LATENT"), False),
        "VAEDecode": (("IMAGE",), False),
        "SaveImage": ((), True),
        "SaveAndPass": (("IMAGE",), True),
        "Chart": (("IMAGE",), True),
        "ResoluteWarmUp": (("MODEL", "VAE", "CONTROL_NET", "STRING"), True),
    }.items()
}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def workflow(**more: dict[str, Any]) -> Prompt:
    """A compiled model and decoder, and one picture that is saved; `more` adds or replaces nodes."""
    return {
        "loader": node("Loader"),
        "model": node("ResoluteCompileModel", model=["loader", 0]),
        "vae": node("ResoluteCompileVAEDecode", vae=["loader", 2]),
        "text": node("Text", clip=["loader", 1]),
        "latent": node("EmptyLatentImage", width=512, height=768, batch_size=1),
        "sample": node("KSampler", model=["model", 0], positive=["text", 0], latent_image=["latent", 0]),
        "picture": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["picture", 0]),
        **more,
    }


@pytest.fixture(scope="module")
def build(pack: Any) -> Build:
    """`build(workflow, sizes)`: the WarmUpPrompt of a workflow."""
    make, plan = pack("nodes.adapters.warm_up.prompt").warm_up_prompt, pack("compile_cache.warm_up_plan").plan
    return lambda prompt, sizes="": make(prompt, CLASSES, plan(sizes, "1", None) if sizes else ())


def behind_a_step(built: Any, name: str, each: str) -> Any:
    """The link before the step node that this input comes from; None if no step node is there."""
    source = built.prompt[built.prompt[name]["inputs"][each][0]]
    return source["inputs"]["any"] if source["class_type"] == "ResoluteWarmUpStep" else None


class TestSteps:
    def test_they_stand_before_what_runs_a_model_or_a_vae(self, build: Build) -> None:
        built = build(workflow())
        assert behind_a_step(built, "sample", "model") == ["model", 0]
        assert behind_a_step(built, "picture", "vae") == ["vae", 0]
        assert built.prompt["model"] == workflow()["model"]
        assert built.prompt["text"] == workflow()["text"]

    def test_they_stand_behind_nodes_that_pass_a_model_on(self, build: Build) -> None:
        sample = {**workflow()["sample"]["inputs"], "model": ["lora", 0]}
        lora = node("Lora", model=["model", 0], clip=["loader", 1])
        built = build(workflow(lora=lora, sample=node("KSampler", **sample)))
        assert built.prompt["lora"] == lora
        assert behind_a_step(built, "sample", "model") == ["lora", 0]

    @pytest.mark.parametrize("class_type", ["Scheduler", "Pipe", "EfficientSampler", "Unknown"])
    def test_any_node_that_may_sample_gets_one(self, build: Build, class_type: str) -> None:
        built = build(workflow(use=node(class_type, model=["model", 0]), end=node("SaveImage", images=["use", 0])))
        assert behind_a_step(built, "use", "model") == ["model", 0]

    def test_a_model_out_of_a_pipe_or_a_switch_gets_one(self, build: Build) -> None:
        pipe, out = node("Pipe", model=["model", 0]), node("FromPipe", pipe=["pipe", 0])
        sample = node("KSampler", model=["way", 0])
        built = build(workflow(pipe=pipe, out=out, way=node("Reroute", any=["out", 0]), sample=sample))
        assert behind_a_step(built, "sample", "model") == ["way", 0]
        assert built.warnings == ()

    def test_nodes_that_share_a_model_share_its_step(self, build: Build) -> None:
        second = node("KSampler", model=["model", 0], latent_image=["sample", 0])
        built = build(workflow(second=second, picture=node("VAEDecode", samples=["second", 0], vae=["vae", 0])))
        assert built.prompt["second"]["inputs"]["model"] == built.prompt["sample"]["inputs"]["model"]

    def test_they_get_ids_that_the_workflow_does_not_use(self, build: Build) -> None:
        built = build({**workflow(), "warm-up-1": node("Text"), "save2": node("SaveImage", images=["warm-up-1", 0])})
        assert built.prompt["warm-up-1"] == node("Text")

    def test_the_workflow_is_not_changed(self, build: Build) -> None:
        prompt = workflow()
        build(prompt).prompt["text"]["inputs"]["clip"] = "changed"
        assert prompt == workflow()


class TestOutputNodes:
    def test_none_runs_and_the_last_step_is_the_only_one(self, build: Build) -> None:
        built = build(workflow(again=node("SaveImage", images=["picture", 0], more=["text", 0])))
        assert not {"save", "again"} & built.prompt.keys()
        (end,) = [each for each in built.prompt.values() if each["class_type"] == "ResoluteWarmUpEnd"]
        before = built.prompt[end["inputs"]["before"][0]]
        assert [before["inputs"]["any"], end["inputs"]["any"]] == [["picture", 0], ["text", 0]]

    def test_one_that_passes_on_is_bypassed(self, build: Build) -> None:
        saved = node("SaveAndPass", name="x", text=["text", 0], images=["picture", 0])
        sharp = node("Sharpen", image=["saved", 0])
        built = build(workflow(saved=saved, sharp=sharp, save=node("SaveImage", images=["sharp", 0])))
        assert "saved" not in built.prompt
        assert built.prompt["sharp"]["inputs"]["image"] == ["picture", 0]

    def test_what_only_an_output_node_makes_is_left_out_with_a_warning(self, build: Build) -> None:
        shown = node("Sharpen", image=["chart", 0])
        built = build(workflow(chart=node("Chart"), shown=shown, end=node("SaveImage", images=["shown", 0])))
        assert not {"chart", "shown", "end"} & built.prompt.keys()
        assert built.warnings == ("Chart chart: a warm-up runs no output node, so what needs its result is left out.",)

    def test_a_warm_up_node_of_the_workflow_is_bypassed(self, build: Build) -> None:
        sample = node("KSampler", model=["own", 0], latent_image=["latent", 0])
        built = build(workflow(own=node("ResoluteWarmUp", model=["model", 0], sizes="64x64"), sample=sample))
        assert "own" not in built.prompt
        assert behind_a_step(built, "sample", "model") == ["model", 0]

    def test_output_nodes_in_a_cycle_end(self, build: Build) -> None:
        one, two = node("SaveAndPass", images=["two", 0]), node("SaveAndPass", images=["one", 0])
        built = build(workflow(one=one, two=two, use=node("Sharpen", image=["one", 0])))
        assert not {"one", "two", "use"} & built.prompt.keys()

    def test_nodes_that_no_output_needs_are_left_out(self, build: Build) -> None:
        assert "idle" not in build(workflow(idle=node("KSampler", model=["model", 0]))).prompt


class TestSizes:
    def test_each_asked_size_has_its_own_samplers_the_larger_one_first(self, build: Build) -> None:
        built = build(workflow(), "64x64, 128x64")
        latents = {name: each for name, each in built.prompt.items() if each["class_type"] == "EmptyLatentImage"}
        assert [each["inputs"]["width"] for each in latents.values()] == [128, 64]
        samplers = [name for name, each in built.prompt.items() if each["class_type"] == "KSampler"]
        assert [built.prompt[name]["inputs"]["latent_image"][0] for name in samplers] == list(latents)
        assert [behind_a_step(built, name, "model") for name in samplers] == [["model", 0]] * 2
        first, second = (built.prompt[built.prompt[name]["inputs"]["model"][0]]["inputs"] for name in samplers)
        assert "before" not in first
        assert built.prompt[second["before"][0]]["inputs"]["any"] == ["picture", 0]
        assert sum(each["class_type"] == "Text" for each in built.prompt.values()) == 1

    def test_a_size_for_a_workflow_that_takes_none_is_refused(self, build: Build, user_error: type[Exception]) -> None:
        with pytest.raises(user_error, match="it runs at one size only"):
            build(workflow(latent=node("Encode")), "64x64")


class TestWhatIsNotCompiled:
    def test_the_warning_names_the_node_to_add(self, build: Build) -> None:
        plain = {**node("KSampler", model=["loader", 0]), "_meta": {"title": "Plain"}}
        built = build(
            workflow(plain=plain, end=node("SaveLatent", samples=["plain", 0]), out=node("SaveImage", a=["end", 0]))
        )
        assert built.warnings == ("Plain plain: its model is not compiled. Put Compile Model before it.",)

    def test_a_text_encoder_from_our_loader_does_not_make_a_model_compiled(self, build: Build) -> None:
        lora = node("Lora", model=["loader", 0], clip=["ours", 1])
        prompt = workflow(ours=node("ResoluteLoadCheckpoint"), lora=lora, sample=node("KSampler", model=["lora", 0]))
        assert build(prompt).warnings == ("KSampler sample: its model is not compiled. Put Compile Model before it.",)

    @pytest.mark.parametrize(
        ("loader", "inputs", "is_compiled"),
        [
            ("ResoluteLoadCheckpoint", {"compile_vae": True}, True),
            ("ResoluteLoadCheckpoint", {"compile_vae": False}, False),
            ("OneDiffCheckpointLoaderSimple", {"vae_speedup": "enable"}, True),
            ("OneDiffCheckpointLoaderSimple", {"vae_speedup": "disable"}, False),
        ],
    )
    def test_a_loader_compiles_its_vae_if_it_is_asked_to(
        self, build: Build, user_error: type[Exception], loader: str, inputs: dict[str, Any], is_compiled: bool
    ) -> None:
        prompt = workflow(
            ours=node(loader, **inputs), picture=node("VAEDecode", samples=["latent", 0], vae=["ours", 2])
        )
        if is_compiled:
            assert build(prompt).warnings == ()
        else:
            with pytest.raises(user_error, match=r"its VAE is not compiled\. Put Compile VAE Decode before it"):
                build(prompt)

    def test_a_workflow_without_a_sampler_is_refused(self, build: Build, user_error: type[Exception]) -> None:
        with pytest.raises(user_error, match=r"Nothing in this workflow can be warmed up\. It has no sampler"):
            build({"text": node("Text"), "save": node("SaveImage", images=["text", 0])})


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"nodes": []}, "in the form of ComfyUI's editor"),
        ([], "not a workflow in API form"),
        ({}, "not a workflow in API form"),
        ({"1": {}}, "has no 'class_type'"),
        ({"1": {"class_type": "X"}}, "has no 'inputs'"),
    ],
)
def test_what_is_no_workflow_is_refused(build: Build, user_error: type[Exception], prompt: Any, told: str) -> None:
    with pytest.raises(user_error, match=told):
        build(prompt)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_every_bundled_workflow_is_read(pack: Any, path: Any) -> None:
    nodes = pack("nodes.adapters.warm_up.workflow").parse_workflow(json.loads(path.read_text("utf-8")))
    assert any(each.class_type.startswith(("Resolute", "OneDiff")) for each in nodes.values())
