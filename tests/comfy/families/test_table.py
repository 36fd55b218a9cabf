"""docs/models.md says what Compile Model does with each model class of ComfyUI, and is current."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.commands import family_table
from scripts.setup import comfyui

from .models import MODELS


def test_the_page_is_current(core: SimpleNamespace) -> None:
    if comfyui.head(Path(core.comfy.__path__[0]).parent) not in (comfyui.VERSIONS[comfyui.TARGET], None):
        pytest.skip(f"the page is that of ComfyUI {comfyui.TARGET}, and this is another one")
    assert family_table.PAGE.read_text("utf-8") == family_table.page(), "run python -m scripts.commands.family_table"


def test_what_is_catalogued_is_tested(core: SimpleNamespace) -> None:
    families = core.ours("blocks.transformers.catalogue").FAMILIES
    catalogued = {network for family in families for network in family.networks} | {family_table.UNET}
    assert catalogued == {model.kind for model in MODELS.values()}


def test_what_is_left_alone_exists(core: SimpleNamespace) -> None:
    folder = Path(core.comfy.__path__[0]) / "ldm"
    for network in family_table.LEFT_ALONE:
        assert folder.joinpath(*network.split(".")[:-1]).with_suffix(".py").is_file(), network


def test_compile_model_leaves_seedvr2_alone_and_says_so(
    core: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    network = importlib.import_module("comfy.ldm.seedvr.model").NaDiT
    operations = core.comfy.ops.disable_weight_init
    made = network(
        1e-5, 2, "swiglu", vid_dim=64, heads=2, head_dim=32, rope_dim=32, device="meta", operations=operations
    )
    model = SimpleNamespace(object_patches={}, object_patches_backup={}, model=SimpleNamespace(diffusion_model=made))
    with caplog.at_level("INFO"):
        assert core.ours("patch.diffusion_model").compile_diffusion_model(model, "auto") is model
    assert "the blocks of SeedVR2 pass on what they computed in a cache: it runs eagerly" in caplog.text


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.granted])
def test_no_loader_makes_what_the_tests_make_by_hand(core: SimpleNamespace, name: str) -> None:
    model = MODELS[name]
    weights = model.make().state_dict()
    detect = importlib.import_module("comfy.model_detection").model_config_from_unet
    try:
        found = model.network(detect(dict(weights), "").unet_config, "meta").state_dict()
    except (AttributeError, AssertionError, ValueError, ZeroDivisionError):  # no class, or one of other sizes
        return
    assert {key: each.shape for key, each in found.items()} != {key: each.shape for key, each in weights.items()}
