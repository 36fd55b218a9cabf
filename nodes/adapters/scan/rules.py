"""What each class of node makes of sizes, batches and texts: the tables that a new node is added to.

A rule gets its node and gives what comes out: one value, or a tuple with one for each output. It computes as the node
does, with the same roundings, and raises NotKnownError (or ValueError, with a sentence) where the graph does not tell.
A class that is in no table is never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import images, latents, numbers, texts
from .node import Guidance, Node, Outputs, Value

Rule = Callable[[Node], "Value | Outputs"]


def same(name: str) -> Rule:
    """A rule that hands an input on: neither size nor batch changes."""
    return lambda node: node.value(name)


NUMBERS: Mapping[str, Rule] = {
    "ComfyNumberConvert": numbers.converted,
    "ComfySwitchNode": numbers.switched,
    "GetImageSize": numbers.image_numbers,
    "PrimitiveBoolean": same("value"),
    "PrimitiveFloat": numbers.number,
    "PrimitiveInt": numbers.integer,
    "PrimitiveString": same("value"),
    "PrimitiveStringMultiline": same("value"),
    "ResoluteResolution": numbers.resolution,
    "ResolutionSelector": numbers.resolution_selector,
}

LATENTS: Mapping[str, Rule] = {
    "AddNoise": same("latent_image"),
    "BatchLatentsNode": latents.all_in_batch,
    "EmptyLatentImage": latents.empty,
    "EmptySD3LatentImage": latents.empty,
    "InpaintModelConditioning": latents.for_inpainting,
    "LatentAdd": same("samples1"),
    "LatentApplyOperation": same("samples"),
    "LatentBatch": latents.two_in_batch,
    "LatentBatchSeedBehavior": same("samples"),
    "LatentBlend": latents.blended,
    "LatentComposite": same("samples_to"),
    "LatentCompositeMasked": same("destination"),
    "LatentConcat": latents.joined,
    "LatentCrop": latents.cropped,
    "LatentCut": latents.cut,
    "LatentFlip": same("samples"),
    "LatentFromBatch": latents.from_batch,
    "LatentInterpolate": same("samples1"),
    "LatentMultiply": same("samples"),
    "LatentRotate": latents.rotated,
    "LatentSubtract": same("samples1"),
    "LatentUpscale": latents.upscaled,
    "LatentUpscaleBy": latents.upscaled_by,
    "RepeatLatentBatch": latents.repeated,
    "SetLatentNoiseMask": same("samples"),
    "VAEEncode": latents.encoded,
    "VAEEncodeForInpaint": latents.encoded,
    "VAEEncodeTiled": latents.encoded,
}

IMAGES: Mapping[str, Rule] = {
    "BatchImagesNode": images.all_in_batch,
    "Canny": same("image"),
    "EmptyImage": images.empty,
    "ImageAddNoise": same("image"),
    "ImageBatch": images.two_in_batch,
    "ImageBlur": same("image"),
    "ImageCompositeMasked": same("destination"),
    "ImageCrop": images.cropped,
    "ImageFlip": same("image"),
    "ImageFromBatch": images.from_batch,
    "ImageInvert": same("image"),
    "ImagePadForOutpaint": images.padded,
    "ImageQuantize": same("image"),
    "ImageRotate": images.rotated,
    "ImageScale": images.scaled,
    "ImageScaleBy": images.scaled_by,
    "ImageScaleToMaxDimension": images.scaled_to_longer_side,
    "ImageScaleToTotalPixels": images.scaled_to_pixels,
    "ImageSharpen": same("image"),
    "ImageUpscaleWithModel": images.by_upscale_model,
    "LoadImage": images.loaded,
    "LoadImageOutput": images.loaded,
    "RepeatImageBatch": images.repeated,
    "ResizeAndPadImage": images.padded_to_size,
    "ResizeImageMaskNode": images.resized,
}

TEXTS: Mapping[str, Rule] = dict.fromkeys(
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
    ),
    texts.unsized,
)

GUIDERS: Mapping[str, Callable[[Node], Guidance]] = {
    "BasicGuider": texts.one_text,
    "CFGGuider": texts.two_texts,
    "DualCFGGuider": texts.three_texts,
}

# What each sampler calls; all of them take `latent_image` and give its shape back.
SAMPLERS: Mapping[str, Callable[[Node], Guidance]] = {
    "KSampler": texts.two_texts,
    "KSamplerAdvanced": texts.two_texts,
    "SamplerCustom": texts.two_texts,
    "SamplerCustomAdvanced": texts.from_guider,
}

# All of them take `samples` and `vae`.
DECODERS: Mapping[str, Rule] = {"VAEDecode": images.decoded, "VAEDecodeTiled": images.decoded}

# None of these is an output node: at the end of a workflow, none of them runs.
RULES: Mapping[str, Rule] = {
    **NUMBERS,
    **LATENTS,
    **IMAGES,
    **TEXTS,
    **GUIDERS,
    **dict.fromkeys(SAMPLERS, latents.sampled),
    **DECODERS,
}

# Class -> the input that it hands on; what is connected to its others is not run for it.
SWITCHES: Mapping[str, Callable[[Node], str]] = {"ComfySwitchNode": numbers.taken}
