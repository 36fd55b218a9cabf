"""Fingerprints: each part counts, and a difference can be told to people."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from compile_cache.fingerprint import EnvironmentFingerprint, ModelFingerprint

HERE = EnvironmentFingerprint(
    torch="2.11.0",
    triton="3.6.0",
    python="3.11",
    platform="linux-x86_64",
    device="NVIDIA H200 sm_90",
    precision="tf32=off",
)
OTHER: dict[str, Any] = {
    "torch": "2.10.0",
    "triton": "none",
    "python": "3.12",
    "platform": "win32-AMD64",
    "device": "NVIDIA L4 sm_89",
    "precision": "tf32=on",
    "format": HERE.format + 1,
}


@pytest.mark.parametrize("name", [field.name for field in fields(EnvironmentFingerprint)])
def test_each_part_of_the_environment_changes_its_digest_and_is_named(name: str) -> None:
    there = replace(HERE, **{name: OTHER[name]})
    assert there.digest() != HERE.digest()
    assert HERE.difference(there) == [f"{name}: {getattr(HERE, name)} here, {OTHER[name]} there"]


def test_equal_environments_have_one_digest_and_no_difference() -> None:
    again = replace(HERE)
    assert again.digest() == HERE.digest()
    assert HERE.difference(again) == []


def test_every_difference_is_told() -> None:
    assert len(HERE.difference(EnvironmentFingerprint(**OTHER))) == len(OTHER)


LAYERS = [("blocks.0", "ResBlock", (320, 320), "float16"), ("blocks.1", "ResBlock", (640, 320), "float16")]


@pytest.mark.parametrize(
    "layers",
    [
        LAYERS[:1],
        [*reversed(LAYERS)],
        [*LAYERS, LAYERS[0]],
        [LAYERS[0], ("blocks.1", "ResBlock", (640, 320), "float32")],
        [LAYERS[0], ("blocks.1", "ResBlock", (320, 640), "float16")],
        [LAYERS[0], ("blocks.1", "Downsample", (640, 320), "float16")],
        [LAYERS[0], ("blocks.2", "ResBlock", (640, 320), "float16")],
    ],
)
def test_each_part_of_a_models_structure_changes_its_digest(layers: list[Any]) -> None:
    assert ModelFingerprint.of("UNetModel", layers).digest != ModelFingerprint.of("UNetModel", LAYERS).digest


def test_the_name_of_a_model_is_part_of_its_digest() -> None:
    assert ModelFingerprint.of("Flux", LAYERS).digest != ModelFingerprint.of("UNetModel", LAYERS).digest


def test_two_models_of_one_structure_have_one_fingerprint() -> None:
    assert ModelFingerprint.of("UNetModel", iter(LAYERS)) == ModelFingerprint.of("UNetModel", list(LAYERS))
