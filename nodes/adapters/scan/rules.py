"""The scanner's tables: node class -> rule. Add a line here to teach the scanner a node.

A rule is a function of a `Node`. It reads the node's inputs (`node.integer("width")`, `node.latent("samples")`) and
returns one value, or a tuple with one value for each output. It must compute exactly what the real node computes, with
the same rounding: `tests/comfy/test_scanner.py` runs the real nodes and compares. If the workflow alone does not decide
the value, the rule raises `node.unknown(reason)` (or a ValueError whose text is the reason). `images.empty` is a simple
example.

Classes that are in no table have no rule, and the scanner does not guess what they output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import conditioning, images, latents, numbers
from .node import Guidance, Node, Outputs, Value

Rule = Callable[[Node], "Value | Outputs"]


def passes(name: str) -> Rule:
    """A rule for nodes that keep the size and batch of the input `name`."""
    return lambda node: node.value(name)


NUMBERS: Mapping[str, Rule] = {
    "ComfyNumberConvert": numbers.converted,
    "ComfySwitchNode": numbers.switched,
    "GetImageSize": numbers.image_numbers,
    "PrimitiveBoolean": passes("value"),
    "PrimitiveFloat": numbers.number,
    "PrimitiveInt": numbers.integer,
    "PrimitiveString": passes("value"),
    "PrimitiveStringMultiline": passes("value"),
    "ResoluteResolution": numbers.resolution,
    "ResolutionSelector": numbers.resolution_selector,
}

LATENTS: Mapping[str, Rule] = {
    "AddNoise": passes("latent_image"),
    "BatchLatentsNode": latents.all_in_batch,
    "EmptyFlux2LatentImage": latents.empty,
    "EmptyHunyuanImageLatent": latents.empty,
    "EmptyHunyuanLatentVideo": latents.empty_video,
    "EmptyHunyuanVideo15Latent": latents.empty_video,
    "EmptyLTXVLatentVideo": latents.empty_video,
    "EmptyLatentImage": latents.empty,
    "EmptyMiniMaxH3LatentAV": latents.minimax_video,
    "EmptySD3LatentImage": latents.empty,
    "InpaintModelConditioning": latents.for_inpainting,
    "LatentAdd": passes("samples1"),
    "LatentApplyOperation": passes("samples"),
    "LatentBatch": latents.two_in_batch,
    "LatentBatchSeedBehavior": passes("samples"),
    "LatentBlend": latents.blended,
    "LatentComposite": passes("samples_to"),
    "LatentCompositeMasked": passes("destination"),
    "LatentConcat": latents.joined,
    "LatentCrop": latents.cropped,
    "LatentCut": latents.cut,
    "LatentFlip": passes("samples"),
    "LatentFromBatch": latents.from_batch,
    "LatentInterpolate": passes("samples1"),
    "LatentMultiply": passes("samples"),
    "LatentRotate": latents.rotated,
    "LatentSubtract": passes("samples1"),
    "LTXVConcatAVLatent": passes("video_latent"),
    "LTXVCropGuides": latents.without_guides,
    "LTXVImgToVideo": latents.video_from_image,
    "LTXVLatentUpsampler": latents.by_upscale_model,
    "LTXVSeparateAVLatent": latents.without_sound,
    "LatentUpscale": latents.upscaled,
    "LatentUpscaleBy": latents.upscaled_by,
    "MiniMaxH3ImageToVideo": latents.minimax_video_from_image,
    "RepeatLatentBatch": latents.repeated,
    "SetLatentNoiseMask": passes("samples"),
    "VAEEncode": latents.encoded,
    "VAEEncodeForInpaint": latents.encoded,
    "VAEEncodeTiled": latents.encoded,
    "Wan22ImageToVideoLatent": latents.wan22_video,
    "WanImageToVideo": latents.video_from_image,
}

IMAGES: Mapping[str, Rule] = {
    "BatchImagesNode": images.all_in_batch,
    "Canny": passes("image"),
    "EmptyImage": images.empty,
    "FluxKontextImageScale": images.scaled_for_kontext,
    "ImageAddNoise": passes("image"),
    "ImageBatch": images.two_in_batch,
    "ImageBlur": passes("image"),
    "ImageCompositeMasked": passes("destination"),
    "ImageCrop": images.cropped,
    "ImageFlip": passes("image"),
    "ImageFromBatch": images.from_batch,
    "ImageInvert": passes("image"),
    "ImagePadForOutpaint": images.padded,
    "ImageQuantize": passes("image"),
    "ImageRotate": images.rotated,
    "ImageScale": images.scaled,
    "ImageScaleBy": images.scaled_by,
    "ImageScaleToMaxDimension": images.scaled_to_longer_side,
    "ImageScaleToTotalPixels": images.scaled_to_pixels,
    "ImageSharpen": passes("image"),
    "ImageUpscaleWithModel": images.by_upscale_model,
    "LoadImage": images.loaded,
    "LoadImageOutput": images.loaded,
    "RepeatImageBatch": images.repeated,
    "ResizeAndPadImage": images.padded_to_size,
    "ResizeImageMaskNode": images.resized,
}

CONDITIONING: Mapping[str, Rule] = dict.fromkeys(
    (
        "CLIPTextEncode",
        "ConditioningConcat",
        "ConditioningSetArea",
        "ConditioningSetAreaPercentage",
        "ConditioningSetAreaStrength",
        "ConditioningSetMask",
        "ConditioningSetTimestepRange",
        "ConditioningZeroOut",
        "ControlNetApply",
        "ControlNetApplyAdvanced",
        "ControlNetApplySD3",
        "FluxGuidance",
        "VAEDecodeAudio",
    ),
    conditioning.no_size,
)

GUIDERS: Mapping[str, Callable[[Node], Guidance]] = {
    "BasicGuider": conditioning.positive_only,
    "CFGGuider": conditioning.positive_and_negative,
    "DualCFGGuider": conditioning.dual,
}

# Sampler class -> the model and conditioning that it uses. `workflow.scan` reads the size from the input
# `latent_image`, which all of them have, and `latents.sampled` is the rule for their outputs.
SAMPLERS: Mapping[str, Callable[[Node], Guidance]] = {
    "KSampler": conditioning.positive_and_negative,
    "KSamplerAdvanced": conditioning.positive_and_negative,
    "SamplerCustom": conditioning.positive_and_negative,
    "SamplerCustomAdvanced": conditioning.from_guider,
}

# All decoders have the inputs `samples` and `vae`.
DECODERS: Mapping[str, Rule] = {"VAEDecode": images.decoded, "VAEDecodeTiled": images.decoded}

# Do not add an output node here: `graph.nodes_that_run` relies on every class with a rule not being one.
RULES: Mapping[str, Rule] = {
    **NUMBERS,
    **LATENTS,
    **IMAGES,
    **CONDITIONING,
    **GUIDERS,
    **dict.fromkeys(SAMPLERS, latents.sampled),
    **DECODERS,
}

# Switch class -> the name of the input that it outputs. ComfyUI does not run what feeds its other input.
SWITCHES: Mapping[str, Callable[[Node], str]] = {"ComfySwitchNode": numbers.selected_input}
