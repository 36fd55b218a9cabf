"""The node types of the bundled workflows: sockets, widgets and titles, in the front end's order.

Stock types are as in ComfyUI 0.33.0, Resolute's as in ``nodes/``; a browser test compares both with a running server.
Uses only nodes that ComfyUI 0.8.0 has too, but for MiniMax H3. Optional inputs may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Slot = tuple[str, str]  # name, type
WidgetValue = str | int | float | bool

# The front end adds these widgets; they are saved in UI form and never queued.
FRONT_END_ONLY = frozenset({"control_after_generate", "upload"})
NOTE = "MarkdownNote"

# Id | title | inputs | widgets | outputs | rows that the front end draws for what no bundled workflow names.
# An input is its name and type, a widget also has its default, and an output without a name is called as its type.
# A type with "?" is that of an input which some workflow leaves out. FLOAT+INT takes both.
_STOCK = """
CheckpointLoaderSimple | Load Checkpoint | | ckpt_name COMBO | MODEL, CLIP, VAE
CLIPTextEncode | CLIP Text Encode (Prompt) | clip CLIP | text STRING | CONDITIONING
EmptyLatentImage | Empty Latent Image | | width INT 512, height INT 512, batch_size INT 1 | LATENT
KSampler | KSampler | model MODEL, positive CONDITIONING, negative CONDITIONING, latent_image LATENT | seed INT 0,
    control_after_generate COMBO fixed, steps INT 20, cfg FLOAT 8.0, sampler_name COMBO euler, scheduler COMBO normal,
    denoise FLOAT 1.0 | LATENT
VAEDecode | VAE Decode | samples LATENT, vae VAE | | IMAGE
VAEEncode | VAE Encode | pixels IMAGE, vae VAE | | LATENT
LoadImage | Load Image | | image COMBO example.png, upload IMAGEUPLOAD image | IMAGE, MASK
ImageScale | Upscale Image | image IMAGE | upscale_method COMBO nearest-exact, width INT 512, height INT 512,
    crop COMBO disabled | IMAGE
ImageStitch | Stitch Images | image1 IMAGE, image2 IMAGE | direction COMBO right, match_image_size BOOLEAN True,
    spacing_width INT 0, spacing_color COMBO white | IMAGE
Canny | Detect Edges (Canny) | image IMAGE | low_threshold FLOAT 0.4, high_threshold FLOAT 0.8 | IMAGE
ControlNetLoader | Load ControlNet Model | | control_net_name COMBO | CONTROL_NET
ControlNetApplyAdvanced | Apply ControlNet | positive CONDITIONING, negative CONDITIONING, control_net CONTROL_NET,
    image IMAGE | strength FLOAT 1.0, start_percent FLOAT 0.0, end_percent FLOAT 1.0 | positive CONDITIONING,
    negative CONDITIONING | 1
LoraLoaderModelOnly | Load LoRA | model MODEL | lora_name COMBO, strength_model FLOAT 1.0 | MODEL
ModelSamplingDiscrete | Model Sampling | model MODEL | sampling COMBO eps, zsnr BOOLEAN False | MODEL
SaveImage | Save Image | images IMAGE | filename_prefix STRING ComfyUI
PreviewImage | Preview Image | images IMAGE
PrimitiveInt | Int | | value INT 0, control_after_generate COMBO fixed | INT
PreviewAny | Preview as Text | source * | | | 4
MarkdownNote | Note | | text STRING
"""
_FAMILIES = """
UNETLoader | Load Diffusion Model | | unet_name COMBO, weight_dtype COMBO default | MODEL
CLIPLoader | Load CLIP | | clip_name COMBO, type COMBO stable_diffusion, device COMBO default | CLIP
DualCLIPLoader | Load CLIP (Dual) | | clip_name1 COMBO, clip_name2 COMBO, type COMBO flux, device COMBO default | CLIP
VAELoader | Load VAE | | vae_name COMBO | VAE
ConditioningZeroOut | Conditioning Zero Out | conditioning CONDITIONING | | CONDITIONING
ModelSamplingAuraFlow | Shift of the Noise | model MODEL | shift FLOAT 3.0 | MODEL
ModelSamplingSD3 | Shift of the Noise | model MODEL | shift FLOAT 3.0 | MODEL
EmptySD3LatentImage | Empty Latent Image | | width INT 1024, height INT 1024, batch_size INT 1 | LATENT
Wan22ImageToVideoLatent | Empty Latent Video | vae VAE | width INT 1280, height INT 704, length INT 49,
    batch_size INT 1 | LATENT
EmptyLTXVLatentVideo | Empty Latent Video | | width INT 768, height INT 512, length INT 97, batch_size INT 1 | LATENT
LTXVConditioning | Frame Rate | positive CONDITIONING, negative CONDITIONING | frame_rate FLOAT 25.0
    | positive CONDITIONING, negative CONDITIONING
LTXVScheduler | Noise Levels | latent LATENT | steps INT 20, max_shift FLOAT 2.05, base_shift FLOAT 0.95,
    stretch BOOLEAN True, terminal FLOAT 0.1 | SIGMAS
KSamplerSelect | Choose a Sampler | | sampler_name COMBO euler | SAMPLER
SamplerCustom | Custom Sampler | model MODEL, positive CONDITIONING, negative CONDITIONING, sampler SAMPLER,
    sigmas SIGMAS, latent_image LATENT | add_noise BOOLEAN True, noise_seed INT 0, control_after_generate COMBO fixed,
    cfg FLOAT 8.0 | output LATENT, denoised_output LATENT
CreateVideo | Create Video | images IMAGE, audio AUDIO? | fps FLOAT 30.0 | VIDEO | 1
SaveVideo | Save Video | video VIDEO | filename_prefix STRING video/ComfyUI, format COMBO auto,
    codec COMFY_DYNAMICCOMBO_V3 auto
"""
_VIDEOS_AND_EDITS = """
FluxKontextImageScale | Scale the Picture | image IMAGE | | IMAGE
TextEncodeQwenImageEditPlus | Prompt with the Picture | clip CLIP, vae VAE, image1 IMAGE | prompt STRING
    | CONDITIONING | 2
CFGNorm | Norm of the Guidance | model MODEL | strength FLOAT 1.0 | MODEL | 2
WanImageToVideo | Image to Video | positive CONDITIONING, negative CONDITIONING, vae VAE, start_image IMAGE
    | width INT 832, height INT 480, length INT 81, batch_size INT 1
    | positive CONDITIONING, negative CONDITIONING, latent LATENT | 1
KSamplerAdvanced | KSampler (Advanced) | model MODEL, positive CONDITIONING, negative CONDITIONING, latent_image LATENT
    | add_noise COMBO enable, noise_seed INT 0, control_after_generate COMBO fixed, steps INT 20, cfg FLOAT 8.0,
    sampler_name COMBO euler, scheduler COMBO normal, start_at_step INT 0, end_at_step INT 10000,
    return_with_leftover_noise COMBO disable | LATENT
RandomNoise | Noise | | noise_seed INT 0, control_after_generate COMBO fixed | NOISE
BasicScheduler | Noise Levels | model MODEL | scheduler COMBO simple, steps INT 20, denoise FLOAT 1.0 | SIGMAS
ManualSigmas | Noise Levels | | sigmas STRING | SIGMAS
CFGGuider | Guider | model MODEL, positive CONDITIONING, negative CONDITIONING | cfg FLOAT 8.0 | GUIDER
BasicGuider | Guider | model MODEL, conditioning CONDITIONING | | GUIDER
SamplerCustomAdvanced | Custom Sampler | noise NOISE, guider GUIDER, sampler SAMPLER, sigmas SIGMAS,
    latent_image LATENT | | output LATENT, denoised_output LATENT
EmptyHunyuanVideo15Latent | Empty Latent Video | | width INT 848, height INT 480, length INT 25, batch_size INT 1
    | LATENT
MiniMaxH3ImageToVideo | Prompt and Empty Video | clip CLIP, vae VAE | prompt STRING, width INT 1344, height INT 768,
    length INT 124 | positive CONDITIONING, LATENT | 2
VAEDecodeAudio | Decode the Sound | samples LATENT, vae VAE | | AUDIO
VAEDecodeTiled | VAE Decode (Tiled) | samples LATENT, vae VAE | tile_size INT 512, overlap INT 64,
    temporal_size INT 64, temporal_overlap INT 8 | IMAGE
LTXAVTextEncoderLoader | Load Text Encoder | | text_encoder COMBO, ckpt_name COMBO, device COMBO default | CLIP
LTXVAudioVAELoader | Load VAE of the Sound | | ckpt_name COMBO | VAE
LTXVEmptyLatentAudio | Empty Sound | audio_vae VAE | frames_number INT 97, frame_rate FLOAT+INT 25.0, batch_size INT 1
    | LATENT
LTXVConcatAVLatent | Join Video and Sound | video_latent LATENT, audio_latent LATENT | | latent LATENT
LTXVSeparateAVLatent | Split Off the Sound | av_latent LATENT | | video_latent LATENT, audio_latent LATENT
LTXVCropGuides | Crop Guides | positive CONDITIONING, negative CONDITIONING, latent LATENT
    | | positive CONDITIONING, negative CONDITIONING, latent LATENT
LatentUpscaleModelLoader | Load Upscale Model | | model_name COMBO | LATENT_UPSCALE_MODEL
LTXVLatentUpsampler | Upscale the Latent | samples LATENT, upscale_model LATENT_UPSCALE_MODEL, vae VAE | | LATENT
LTXVAudioVAEDecode | Decode the Sound | samples LATENT, audio_vae VAE | | AUDIO
"""
_OURS = """
ResoluteCompileModel | Compile Model | model MODEL | backend COMBO auto, batching COMBO auto, leave_out STRING | MODEL
ResoluteCompileVAEDecode | Compile VAE Decode | vae VAE | backend COMBO auto | VAE
ResoluteCompileVAE | Compile VAE | vae VAE | backend COMBO auto | VAE
ResoluteCompileControlNet | Compile ControlNet | control_net CONTROL_NET | backend COMBO auto | CONTROL_NET
ResoluteDeepCache | DeepCache | model MODEL | interval INT 3, depth INT 2, start_percent FLOAT 0.0,
    end_percent FLOAT 1.0, schedule COMBO uniform, power FLOAT 1.4, centre INT 15 | MODEL
ResoluteLoadCheckpoint | Load Checkpoint (Compiled) | | ckpt_name COMBO, backend COMBO auto, compile_vae BOOLEAN True
    | MODEL, CLIP, VAE
ResoluteResolution | Resolution | | preset COMBO custom, width INT 1024, height INT 1024, multiple COMBO 8,
    use COMBO exact | width INT, height INT
ResoluteReport | Graph Cache Report | any * | | text STRING, image IMAGE
ResoluteCompareImages | Compare Images | image_a IMAGE, image_b IMAGE | max_error FLOAT 255.0, min_psnr FLOAT 0.0
    | text STRING, heat_map IMAGE, max_error FLOAT, mean_error FLOAT, psnr FLOAT, ssim FLOAT
ResoluteFree | Free Graphs | any * | | any *
"""


@dataclass(frozen=True, slots=True)
class Widget:
    """A value that the user edits on the node, with the server's type and default."""

    name: str
    type: str
    default: WidgetValue


@dataclass(frozen=True, slots=True)
class NodeType:
    """A node type. unused: optional inputs and widgets that no bundled workflow names, but that have a row."""

    id: str
    title: str
    inputs: tuple[Slot, ...] = ()
    widgets: tuple[Widget, ...] = ()
    outputs: tuple[Slot, ...] = ()
    unused: int = 0
    optional: frozenset[str] = frozenset()  # names of inputs that some workflow leaves out

    @property
    def is_ours(self) -> bool:
        """This pack provides the type."""
        return self.id.startswith("Resolute")

    @property
    def is_front_end_only(self) -> bool:
        """The type exists only in the browser and never in a prompt."""
        return self.id == NOTE

    def widget(self, name: str) -> Widget | None:
        """The widget of that name, or None."""
        return next((widget for widget in self.widgets if widget.name == name), None)


def _parsed(table: str) -> Iterator[NodeType]:
    for row in table.strip().replace("\n    ", " ").splitlines():
        name, title, inputs, widgets, outputs, unused = [*map(str.strip, row.split("|")), "", "", "", ""][:6]
        slots = tuple(_widget(part) for part in _parts(widgets))
        optional = frozenset(words[0] for words in _parts(inputs) if words[-1].endswith("?"))
        yield NodeType(
            name,
            title,
            tuple(map(_slot, _parts(inputs))),
            slots,
            tuple(map(_slot, _parts(outputs))),
            int(unused or 0),
            optional,
        )


def _parts(field: str) -> list[list[str]]:
    return [part.split() for part in field.split(",") if part.strip()]


def _slot(words: list[str]) -> Slot:
    return words[0], words[-1].removesuffix("?")


def _widget(words: list[str]) -> Widget:
    name, kind, text = [*words, ""][:3]
    value: WidgetValue = text == "True" if kind == "BOOLEAN" else text
    return Widget(
        name, kind.replace("+", ","), int(text) if kind == "INT" else float(text) if "FLOAT" in kind else value
    )


OURS = tuple(_parsed(_OURS))
NODE_TYPES = {each.id: each for each in (*_parsed(_STOCK), *_parsed(_FAMILIES), *_parsed(_VIDEOS_AND_EDITS), *OURS)}
