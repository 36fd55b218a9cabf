"""Row 4: LoRAs are added, removed and changed: merged into weights, next to them, or in the middle of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from scripts.server.process import ComfyServer

from ..rig import Array, Bench, PromptDict, assert_different, compile_model, compiled, node, with_model, with_sampling
from .kit import Check
from .placing import before_and_after, check_placed, placed

STEPS = 4

# Modules of the tiny UNet with the shapes of their weights, in every kind of region and outside all regions.
TINY = {
    "diffusion_model.time_embed.0": (128, 32),
    "diffusion_model.input_blocks.0.0": (32, 4, 3, 3),
    "diffusion_model.input_blocks.1.0.in_layers.2": (32, 32, 3, 3),
    "diffusion_model.input_blocks.1.0.emb_layers.1": (32, 128),
    "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q": (32, 32),
    "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k": (32, 768),
    "diffusion_model.middle_block.1.proj_in": (64, 64, 1, 1),
    "diffusion_model.middle_block.1.transformer_blocks.0.ff.net.2": (64, 256),
    "diffusion_model.out.2": (4, 32, 3, 3),
}
# Only modules of one transformer block.
ONE_BLOCK = {name: TINY[name] for name in TINY if "input_blocks.1.1.transformer_blocks" in name}
# SD1.5's UNet and text encoder, with the names that most published files have.
SD15 = {
    "lora_unet_input_blocks_1_1_transformer_blocks_0_attn2_to_k": (320, 768),
    "lora_unet_middle_block_0_in_layers_2": (320, 320, 3, 3),
    "lora_te_text_model_encoder_layers_0_mlp_fc1": (3072, 768),
    "lora_te_text_model_encoder_layers_1_self_attn_q_proj": (768, 768),
}


def lora(name: str, strength: float = 1.0) -> dict[str, Any]:
    """Core's LoRA loader for the model alone."""
    return node("LoraLoaderModelOnly", lora_name=f"{name}.safetensors", strength_model=strength)


def low_rank(name: str, shape: tuple[int, ...], noise: Any) -> dict[str, Array]:
    """A low-rank LoRA of rank 2, the usual kind; a convolution's second half is 1x1."""
    down, up = (2, *shape[1:]), (shape[0], 2, *[1] * (len(shape) - 2))
    fan_in = float(numpy.prod(shape[1:]))
    return {
        f"{name}.lora_down.weight": noise(down) / fan_in**0.5,
        f"{name}.lora_up.weight": noise(up) * 0.5,
        f"{name}.alpha": numpy.array(2.0, numpy.float32),
    }


def with_magnitudes(name: str, shape: tuple[int, ...], noise: Any) -> dict[str, Array]:
    """DoRA: after adding the low-rank part, the weight is scaled to given magnitudes."""
    scale = numpy.abs(noise((shape[0], *[1] * (len(shape) - 1)))) + 0.8
    return {**low_rank(name, shape, noise), f"{name}.dora_scale": scale}


def hadamard(name: str, shape: tuple[int, ...], noise: Any) -> dict[str, Array]:
    """LoHa: the elementwise product of two low-rank matrices."""
    inner = int(numpy.prod(shape[1:]))
    halves = {"w1_a": (shape[0], 2), "w1_b": (2, inner), "w2_a": (shape[0], 2), "w2_b": (2, inner)}
    return {f"{name}.hada_{half}": noise(size) * 0.3 for half, size in halves.items()}


def kronecker(name: str, shape: tuple[int, ...], noise: Any) -> dict[str, Array]:
    """LoKr: the Kronecker product of two matrices."""
    second = (shape[0] // 4, *shape[1:])
    return {f"{name}.lokr_w1": noise((4, 1)) * 0.3, f"{name}.lokr_w2": noise(second) * 0.3}


def whole_difference(name: str, shape: tuple[int, ...], noise: Any) -> dict[str, Array]:
    """The full difference of weight and bias."""
    fan_in = float(numpy.prod(shape[1:]))
    parts = {f"{name}.diff": noise(shape) * 0.3 / fan_in**0.5}
    if "attn" not in name:  # attention projections have no bias
        parts[f"{name}.diff_b"] = noise((shape[0],)) * 0.2
    return parts


FORMATS = {
    "low_rank": low_rank,
    "with_magnitudes": with_magnitudes,
    "hadamard": hadamard,
    "kronecker": kronecker,
    "whole_difference": whole_difference,
}


@pytest.fixture(scope="module", autouse=True)
def files(server: ComfyServer) -> Path:
    """Write the LoRA files to the server's folder."""
    folder = server.folder / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: (make, TINY) for name, make in FORMATS.items()}
    contents |= {"other": (low_rank, TINY), "one_block": (low_rank, ONE_BLOCK), "sd15": (low_rank, SD15)}
    for number, (name, (make, targets)) in enumerate(contents.items()):
        generator = numpy.random.default_rng(number)

        def noise(shape: tuple[int, ...], generator: Any = generator) -> Array:
            return generator.standard_normal(shape).astype(numpy.float32)

        tensors = {key: value for module, shape in targets.items() for key, value in make(module, shape, noise).items()}
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@before_and_after
def test_a_lora_added_changed_and_removed_compiles_nothing(check: Check, prompt: Any, seeds: Any, place: str) -> None:
    check(prompt, forwards=STEPS)
    for strength in (0.8, -1.3, 0.2):
        prompt["sample"]["inputs"]["seed"] = next(seeds)
        check_placed(check, prompt, [lora("low_rank", strength)], place, forwards=STEPS)
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    check(prompt, forwards=STEPS)


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "low_rank"])
def test_every_kind_of_lora_file_compiles_nothing(check: Check, prompt: Any, kind: str) -> None:
    check_placed(check, prompt, [lora(kind)], "before", forwards=STEPS)


@pytest.mark.parametrize("place", ["before", "after", "around"])
def test_two_stacked_loras_both_take_effect(check: Check, prompt: Any, place: str) -> None:
    first, second = lora("low_rank", 0.7), lora("other", -0.6)
    plain = with_model(prompt, first, second)
    if place == "around":
        ours = with_model(prompt, first, compile_model(check.backend), second)
    else:
        ours = placed(prompt, [first, second], place, check.backend)
    run = check(plain, ours, forwards=STEPS)
    for fewer in ([], [first], [second]):
        assert_different(run, check.bench.run(with_model(prompt, *fewer)))


@before_and_after
def test_a_lora_next_to_the_weights_bypasses_its_blocks_while_it_is_active(
    check: Check, prompt: Any, seeds: Any, place: str
) -> None:
    # Core's "bypass" loader replaces the forward of each layer in the file, here in one transformer block. Each forward
    # counts two reasons: the layer and its block.
    whole = check(prompt, forwards=STEPS)
    beside = node("LoraLoaderBypassModelOnly", lora_name="one_block.safetensors", strength_model=1.0)
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    check_placed(check, prompt, [beside], place, forwards=STEPS, bypasses={"replaced_forward": 2 * STEPS})
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    again = check(prompt, forwards=STEPS)
    assert check.on_cuda or again.rise["region_calls"] == whole.rise["region_calls"]


@pytest.fixture
def hooked(prompt: PromptDict) -> PromptDict:
    """Only the positive prompt has a LoRA, with a negative strength from the second step on."""
    prompt["hook"] = node("CreateHookLoraModelOnly", lora_name="low_rank.safetensors", strength_model=1.0)
    prompt["start"] = node("CreateHookKeyframe", strength_mult=1.0, start_percent=0.0)
    prompt["later"] = node("CreateHookKeyframe", strength_mult=-1.0, start_percent=0.3, prev_hook_kf=["start", 0])
    prompt["timed"] = node("SetHookKeyframes", hooks=["hook", 0], hook_kf=["later", 0])
    prompt["with-hook"] = node(
        "ConditioningSetProperties",
        cond_NEW=["positive", 0],
        strength=1.0,
        set_cond_area="default",
        hooks=["timed", 0],
    )
    prompt["sample"]["inputs"]["positive"] = ["with-hook", 0]
    return prompt


def test_a_lora_hook_changes_weights_in_the_middle_of_a_step(check: Check, hooked: Any) -> None:
    # Each step runs the two prompts separately, with different weights.
    run = check(hooked, forwards=2 * STEPS)
    hooked["with-hook"]["inputs"]["hooks"] = ["hook", 0]
    assert_different(run, check.bench.run(hooked))  # the keyframe must have an effect
    hooked["sample"]["inputs"]["positive"] = ["positive", 0]
    assert_different(run, check.bench.run(hooked))


@pytest.fixture(scope="module")
def checkpoint(make_model: Any, checkpoint_prompt: Any, bench: Bench, seeds: Any) -> PromptDict:
    """Two steps of a checkpoint with a text encoder, without a decoder; its UNet is already compiled."""
    whole = checkpoint_prompt(make_model("sd15-mini"), seed=next(seeds))
    prompt = {name: part for name, part in whole.items() if name not in ("decode", "image")}
    bench.run(compiled(prompt))
    return prompt


def with_clip(prompt: PromptDict, clip: list[Any]) -> PromptDict:
    """The prompt with its positive text encoded by another CLIP."""
    positive = {**prompt["positive"], "inputs": {**prompt["positive"]["inputs"], "clip": clip}}
    return {**prompt, "positive": positive}


def models_built(server: ComfyServer) -> int:
    """Number of diffusion models that the server has built so far; each one logs its type."""
    return server.log().count("model_type ")


@before_and_after
def test_a_lora_for_model_and_text_encoder_loads_nothing_again(
    check: Check, checkpoint: PromptDict, server: ComfyServer, seeds: Any, place: str
) -> None:
    built = models_built(server)
    for strength in (0.8, -0.5):
        prompt = with_sampling(checkpoint, seed=next(seeds))
        both = node("LoraLoader", lora_name="sd15.safetensors", strength_model=strength, strength_clip=1.5 * strength)
        both["inputs"]["clip"] = ["loader", 1]
        plain = with_clip(with_model(prompt, both), ["sample-model-0", 1])
        name = "sample-model-0" if place == "before" else "sample-model-1"
        ours = with_clip(placed(prompt, [both], place, check.backend), [name, 1])
        run = check(plain, ours, forwards=2)
        assert_different(run, check.bench.run(prompt))
        assert_different(run, check.bench.run(with_model(prompt, both)))  # the LoRA must affect the text encoder too
    assert models_built(server) == built > 0


def test_a_lora_hook_on_the_text_encoder_reaches_the_model_too(
    check: Check, checkpoint: PromptDict, seeds: Any
) -> None:
    prompt = with_sampling(checkpoint, seed=next(seeds))
    hooks = node("CreateHookLora", lora_name="sd15.safetensors", strength_model=1.0, strength_clip=1.0)
    clip = node("SetClipHooks", clip=["loader", 1], hooks=["hooks", 0], apply_to_conds=True, schedule_clip=False)
    hooked = with_clip({**prompt, "hooks": hooks, "hooked-clip": clip}, ["hooked-clip", 0])
    run = check(hooked, forwards=2 * 2)
    assert_different(run, check.bench.run(prompt))
