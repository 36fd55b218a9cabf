"""The two API prompts of a workflow: with Resolute's nodes and without."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..rig import PromptDict, node
from .patches import NEVER_TOGETHER, OTHER_MODEL, OURS, PATCHES
from .workflow import NETS, QUANTIZED, Workflow

Link = list[Any]

# Nodes that make a model, with the widths of its conditioning and pooled output.
_MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "sd": (node("ResoluteTestTinyModel", kind="sd"), 768, 0),
    "sdxl": (node("ResoluteTestTinyModel", kind="sdxl"), 2048, 1280),
    "inpaint": (node("ResoluteTestOtherModel", kind="inpaint", channels=0), 768, 0),
    "fp8": (node("ResoluteTestFormatModel", weights="fp8_e4m3fn"), 768, 0),
    "quantized": (node("ResoluteTestFormatModel", weights="int8_tensorwise"), 768, 0),
    "quantized fp8": (node("ResoluteTestFormatModel", weights="float8_e4m3fn"), 768, 0),
    "counting": (node("ResoluteTestCountingModel"), 768, 0),
}
# Strength, start and end of a ControlNet.
_SPANS = {"early": (1.0, 0.0, 0.5), "late": (1.0, 0.4, 1.0), "weak": (0.3, 0.0, 1.0)}
_TILES = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}


def plain(workflow: Workflow, nonce: int = 0, disturbed: bool = False) -> PromptDict:
    """The prompt without Resolute's nodes. nonce: see `ours`; disturbed: change weights by about a millionth."""
    return _Builder(workflow, None, nonce, disturbed).prompt


def ours(workflow: Workflow, backend: str, nonce: int = 0) -> PromptDict:
    """The prompt with Resolute's nodes; `backend` is the "chosen" one.

    nonce: ComfyUI does not sample a repeated prompt again, so another nonce makes another prompt with equal results. It
    changes the denoise of each sampler by less than the schedule's resolution.
    """
    return _Builder(workflow, backend, nonce).prompt


def in_float32(workflow: Workflow, nonce: int = 0) -> PromptDict:
    """The prompt without Resolute's nodes, with all models computing in float32. Their weights stay as they are, and
    quantized ones are dequantized.

    It always loads whole models: core loses LoRAs of a model that was cast and is then loaded in part.
    """
    patches = tuple(name for name in workflow.patches if name not in NEVER_TOGETHER)
    return _Builder(dataclasses.replace(workflow, patches=patches), None, nonce, in_float32=True).prompt


class _Builder:
    def __init__(
        self, workflow: Workflow, backend: str | None, nonce: int, disturbed: bool = False, in_float32: bool = False
    ) -> None:
        self.prompt: PromptDict = {}
        self._w = workflow
        self._backend = backend
        self._nonce = nonce
        self._disturbed = disturbed
        self._in_float32 = in_float32
        plain = self._model("model", workflow.weights)
        model = self._chain(plain)
        conditions = self._controlled(self._positive(), self._text("negative", workflow.negative, seed=12))
        latent = self._sampler("sample", model, conditions, self._latent(), workflow.denoise)
        if workflow.second != "none":
            larger = {"upscale_method": "nearest-exact", "scale_by": 1.25}
            latent = self._add("larger", "LatentUpscaleBy", samples=latent, **larger)
            latent = self._sampler("sample-2", self._second(plain, model), conditions, latent, 0.6)
        self._add("samples", "ResoluteTestSaveLatent", samples=latent, filename_prefix="fuzz")
        if workflow.decode != "none":
            self._decoder(latent)

    def _add(self, name: str, class_type: str, **inputs: Any) -> Link:
        self.prompt[name] = node(class_type, **inputs)
        return [name, 0]

    def _add_node(self, name: str, made: dict[str, Any], **inputs: Any) -> Link:
        return self._add(name, made["class_type"], **made["inputs"], **inputs)

    def _compile(self, name: str, what: str, backend: str, link: Link, **inputs: Any) -> Link:
        """Add a compile node and return its output; without a backend, return `link`."""
        if self._backend is None or backend == "none":
            return link
        kind, socket = {
            "model": ("ResoluteCompileModel", "model"),
            "vae": ("ResoluteCompileVAEDecode", "vae"),
            "control": ("ResoluteCompileControlNet", "control_net"),
        }[what]
        backend = self._backend if backend == "chosen" else backend
        return self._add(name, kind, backend=backend, **{socket: link}, **inputs)

    # --- models ------------------------------------------------------------------------------------------------

    def _model(self, name: str, seed: int) -> Link:
        model = self._add_node(name, _MODELS[self._w.kind][0], seed=seed)
        if not self._disturbed:
            return model
        lora = {"lora_name": "fuzz-a.safetensors", "strength_model": 1e-6}
        return self._add(f"disturbed-{name}", "LoraLoaderModelOnly", model=model, **lora)

    def _chain(self, model: Link) -> Link:
        w = self._w
        if OTHER_MODEL in (value for name in w.patches for value in PATCHES[name].node["inputs"].values()):
            self._model(str(OTHER_MODEL[0]), w.weights + 3)
        for place, name in enumerate((*w.patches, None)):
            if place == min(w.at, len(w.patches)):
                model = self._compile("compile", "model", w.backend, model, batching=w.free_batching)
                self._unpatched = model
            if name is None or (self._backend is None and name in OURS):
                continue
            patch = PATCHES[name]
            model = self._add_node(f"patch-{name}", patch.node, **{patch.input: model})
        return model

    def _second(self, plain: Link, model: Link) -> Link:
        w = self._w
        known = {"same": model, "unpatched": self._unpatched, "plain": plain}
        if w.fitting_second in known:
            return known[w.fitting_second]
        return self._compile("compile-2", "model", w.backend, self._model("model-2", w.weights + 7))

    def _sampler(self, name: str, model: Link, conditions: tuple[Link, Link], latent: Link, denoise: float) -> Link:
        w = self._w
        if self._in_float32 and w.kind in QUANTIZED:
            model = self._add(f"{name}-float32", "ResoluteTestReferenceModel", model=model)
        elif self._in_float32:
            model = self._add(f"{name}-float32", "ModelComputeDtype", model=model, dtype="fp32")
        return self._add(
            name,
            "KSampler",
            model=model,
            positive=conditions[0],
            negative=conditions[1],
            latent_image=latent,
            seed=w.seed,
            steps=w.steps,
            cfg=w.cfg,
            sampler_name=w.sampler,
            scheduler=w.scheduler,
            denoise=denoise - self._nonce * 1e-9,
        )

    # --- conditions --------------------------------------------------------------------------------------------

    def _text(self, name: str, tokens: int, seed: int) -> Link:
        _, width, pooled = _MODELS[self._w.kind]
        sizes = {"tokens": tokens, "width": width, "pooled_width": pooled, "batch": 1}
        return self._add(name, "ResoluteTestConditioning", seed=seed, **sizes)

    def _half(self, name: str) -> Link:
        """A mask of the image's left half."""
        size = {"width": self._w.width, "height": self._w.height}
        nothing = self._add(f"{name}-nothing", "SolidMask", value=0.0, **size)
        left = {**size, "width": self._w.width // 2}
        half = self._add(f"{name}-half", "SolidMask", value=1.0, **left)
        return self._add(name, "MaskComposite", destination=nothing, source=half, x=0, y=0, operation="add")

    def _positive(self) -> Link:
        w = self._w
        whole = self._text("positive", w.positive, seed=11)
        if w.conditioning == "whole":
            return whole
        if w.conditioning == "lora hook":
            hook = self._add("hook", "CreateHookLoraModelOnly", lora_name="fuzz-a.safetensors", strength_model=0.7)
            properties = {"strength": 1.0, "set_cond_area": "default", "hooks": hook}
            return self._add("hooked", "ConditioningSetProperties", cond_NEW=whole, **properties)
        text = self._text("positive-2", 77, seed=13)
        if w.conditioning == "in turn":
            whole = self._add("early", "ConditioningSetTimestepRange", conditioning=whole, start=0.0, end=0.6)
            text = self._add("late", "ConditioningSetTimestepRange", conditioning=text, start=0.5, end=1.0)
        elif w.conditioning == "area":
            place = {"width": max(64, w.width // 16 * 8), "height": 64, "x": 0, "y": 0, "strength": 1.0}
            text = self._add("area", "ConditioningSetArea", conditioning=text, **place)
        elif w.conditioning in ("mask", "mask bounds"):
            how = {"strength": 1.0, "set_cond_area": "default" if w.conditioning == "mask" else w.conditioning}
            mask = self._half("conditioning-mask")
            text = self._add("masked", "ConditioningSetMask", conditioning=text, mask=mask, **how)
        elif w.conditioning == "concat":
            return self._add("concat", "ConditioningConcat", conditioning_to=whole, conditioning_from=text)
        return self._add("both", "ConditioningCombine", conditioning_1=whole, conditioning_2=text)

    def _controlled(self, positive: Link, negative: Link) -> tuple[Link, Link]:
        w, links = self._w, (positive, negative)
        control = w.fitting_control
        if control == "none":
            return links
        size = {"width": w.width, "height": w.height, "batch": 1, "channels": 3}
        hint = self._add("hint", "ResoluteTestHint", seed=5, **size)
        strength, start, end = _SPANS.get(control, (1.0, 0.0, 1.0))
        span = {"strength": strength, "start_percent": start, "end_percent": end}
        for number in range(NETS.get(control, 1)):
            kind = control if control not in NETS else "sdxl" if w.kind == "sdxl" else "sd"
            net = self._add(f"net-{number}", "ResoluteTestControlNet", kind=kind, seed=21 + number)
            net = self._compile(f"compile-net-{number}", "control", w.control_backend, net)
            inputs = {"positive": links[0], "negative": links[1], "control_net": net, "image": hint}
            name, _ = self._add(f"control-{number}", "ControlNetApplyAdvanced", **inputs, **span)
            links = [name, 0], [name, 1]
        return links

    # --- latents -----------------------------------------------------------------------------------------------

    def _latent(self) -> Link:
        w = self._w
        size = {"width": w.width, "height": w.height}
        if w.source == "empty":
            latent = self._add("latent", "EmptyLatentImage", **size, batch_size=w.batch)
        else:
            pixels = self._add("pixels", "ResoluteTestHint", seed=6, **size, batch=w.batch, channels=3)
            latent = self._add("latent", "VAEEncode", pixels=pixels, vae=self._vae())
        if w.mask == "none":
            return latent
        mask = self._half("mask") if w.mask == "half" else self._add("mask", "SolidMask", value=0.6, **size)
        return self._add("noise-mask", "SetLatentNoiseMask", samples=latent, mask=mask)

    def _vae(self, name: str = "vae", kind: str = "ResoluteTestTinyVAE") -> Link:
        vae = self._add(name, kind, seed=self._w.vae_weights)
        if self._w.decode == "one by one":  # as on a machine with little memory
            vae = self._add(f"{name}-memory", "ResoluteTestVAEMemory", vae=vae, at_once=1)
        return self._compile("compile-vae", "vae", self._w.vae_backend, vae)

    def _decoder(self, latent: Link) -> None:
        tiles = _TILES if self._w.decode == "tiled" else {}
        kind = "VAEDecodeTiled" if tiles else "VAEDecode"
        # The source is encoded alike in both: its rounding is no error of the sampling.
        vae = self._vae("vae-float32", "ResoluteTestFloat32VAE") if self._in_float32 else self._vae()
        decoded = self._add("decode", kind, samples=latent, vae=vae, **tiles)
        self._add("image", "SaveImage", images=decoded, filename_prefix="fuzz")
