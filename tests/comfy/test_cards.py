"""The regions of the bundled models compile for cards that are not here, and what is known not to is all that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cards import CARDS, faults
from scripts.places import ROOT
from scripts.setup import comfyui

# One region of each kind; `scripts/test --long` compiles all, for each card.
FEW = "|".join((
    "SDXL (ResBlock 640 .*to 320|Spatial.* 640|Basic.* 640)", "Flux", "wan", "z-image", "qwen-image", "ltx",
    "Z-Image-int8", "VAE-bf16 (Resnet.* 256 .*to 128|Attn|Upsample.* 512)", "VAE-encode Downsample 128",
    "SDXL-ControlNet .*hint", "Wan-VAE ResidualBlock.next of 2 96", "HunyuanVideo-1.5-VAE ResnetBlock.next 256",
))  # fmt: skip
ALSO = ("sm_75", "sm_80", "sm_120", "gfx1100")


def compiled(tmp_path: Path, card: str, also: tuple[str, ...], wanted: str) -> dict[str, Any]:
    out = tmp_path / "cards.json"
    command = [sys.executable, "-m", "benchmarks.cards", "--out", str(out), "--card", card, "--region", wanted]
    command += [part for each in also for part in ("--also", each)]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui.ensure(ROOT, comfyui.TARGET)), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def check(found: dict[str, Any], cards: tuple[str, ...]) -> None:
    unknown = {place: fault for place, fault in found["faults"].items() if not is_known(place, fault)}
    assert not unknown
    assert not [row for row in found["regions"] if "error" in row and not is_known(found["card"], row["error"])]
    assert {row["target"] for row in found["kernels"]} == set(cards)


def is_known(place: str, fault: str) -> bool:
    """Code in float8 needs an RTX 40; core turns such products off on older cards."""
    is_older = any(card in place for card in ("sm_75", "sm_80", "sm_86"))
    return is_older and "fp8e4nv" in fault


def test_regions_compile_for_every_kind_of_card(tmp_path: Path) -> None:
    found = compiled(tmp_path, "sm_89", ALSO, FEW)
    check(found, ("sm_89", *ALSO))
    kinds = {row["region"].split()[1] for row in found["regions"]}
    assert kinds >= {"ResBlock", "BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock", "ResnetBlock"}
    assert kinds >= {"WanAttentionBlock", "JointTransformerBlock", "QwenImageTransformerBlock", "ResidualBlock.next"}
    # GELU by tanh is a part of the product before it. SDXL's is the exact one.
    own = {row["region"] for row in found["kernels"] if row["kernel"].startswith("triton_poi_fused_gelu")}
    assert own == {"SDXL BasicTransformerBlock 640"}


@pytest.mark.long
@pytest.mark.parametrize("card", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_all_regions_compile_for_a_card(tmp_path: Path, card: str) -> None:
    check(compiled(tmp_path, card, (), ""), (card,))


def kernel(**changes: Any) -> dict[str, Any]:
    return {"region": "a", "target": "sm_75", "kernel": "k", "registers": 40, "stack": 0, "shared": 1024, **changes}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([kernel()], ""),
        ([kernel(stack=64), kernel()], ""),
        ([kernel(stack=64), kernel(stack=32)], "k takes 32 bytes of stack"),
        ([kernel(shared=CARDS["sm_75"].shared + 1)], "k takes 65537 bytes of shared memory"),
        ([kernel(shared=CARDS["sm_75"].shared + 1), kernel(stack=8)], "k takes 8 bytes of stack"),
        ([kernel(error="no such type"), kernel()], ""),
        ([kernel(error="no such type")], "k: no such type"),
        ([kernel(), kernel(kernel="other", stack=8)], "other takes 8 bytes of stack"),
    ],
)  # fmt: skip
def test_a_kernel_that_no_configuration_of_fits_a_card_is_a_fault(rows: list[dict[str, Any]], fault: str) -> None:
    assert faults(rows) == ({("a", "sm_75"): fault} if fault else {})
