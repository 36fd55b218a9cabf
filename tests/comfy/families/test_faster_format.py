"""Files that are loaded in a faster format: core's loader, its modules and its file format, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ..in_process import load as load_comfyui
from . import kit
from .kit import Bench, forget_regions, run_traces
from .models import FIRST, MODELS, SIZES
from .quantized import QuantizedModel
from .test_quantized import Weights

FORMATS = ("int8", "fp8", "nvfp4")
TENSORS = {"int8": "TensorWiseINT8Layout", "fp8": "TensorCoreFP8E4M3Layout", "nvfp4": "TensorCoreNVFP4Layout"}
WIDTH = 256
# What is quantized of each block; modulations, norms and everything outside of blocks stay.
OF_DOUBLE = [f"{part}_{name}" for part in ("img", "txt") for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")]
MEANT = {f"double_blocks.{n}.{name}" for n in range(2) for name in OF_DOUBLE}
MEANT |= {f"single_blocks.{n}.linear{m}" for n in range(2) for m in (1, 2)}


@pytest.fixture(scope="module")
def core() -> Any:
    return load_comfyui()


@pytest.fixture(scope="module")
def formats(core: Any) -> Any:
    return core.ours("formats.faster_format")


@pytest.fixture(scope="module")
def weights(core: Any) -> dict[str, torch.Tensor]:
    """A Flux of two double and two single blocks, in bf16."""
    flux = importlib.import_module("comfy.ldm.flux.model").Flux
    made = flux(
        in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=128, hidden_size=WIDTH, mlp_ratio=4.0,
        txt_ids_dims=[], num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
        qkv_bias=True, guidance_embed=True, dtype=torch.bfloat16, device="meta",
        operations=core.comfy.ops.disable_weight_init,
    )  # fmt: skip
    chance, found = torch.Generator().manual_seed(0), {}
    for name, like in made.state_dict().items():
        ones = like.ndim < 2 and name.endswith(("weight", "scale"))
        value = torch.ones(like.shape) if ones else torch.randn(like.shape, generator=chance) * like[0].numel() ** -0.5
        found[name] = (value if like.ndim > 1 or ones else 0 * value).to(torch.bfloat16)
    return found


@pytest.fixture
def file(weights: dict[str, torch.Tensor], tmp_path: Path) -> str:
    path = tmp_path / "flux.safetensors"
    safetensors.torch.save_file(weights, path)
    return str(path)


def modules_of(patcher: Any) -> Iterator[tuple[str, Any]]:
    return ((name, each) for name, each in patcher.model.diffusion_model.named_modules() if hasattr(each, "weight"))


def quantized_in(patcher: Any) -> dict[str, Any]:
    """The quantized weights, by the names of their modules."""
    return {name: each.weight for name, each in modules_of(patcher) if getattr(each, "quant_format", None)}


def output_of(patcher: Any) -> torch.Tensor:
    """The model's output, with copies of its weights: in a mapped file they lie at any address, and on some processors
    the last bit of a product depends on that.
    """
    for module in patcher.model.diffusion_model.modules():
        for weight in module._parameters.values():
            if type(weight) is torch.nn.Parameter:
                weight.data = weight.data.clone()
    chance = torch.Generator().manual_seed(1)
    given = {"x": (1, 16, 16, 16), "context": (1, 7, 128), "y": (1, 768)}
    tensors = {name: torch.randn(shape, generator=chance) for name, shape in given.items()}
    with torch.inference_mode():
        found: torch.Tensor = patcher.model.diffusion_model(
            timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]), **tensors
        )
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_of_blocks_are_those_that_comfyuis_own_layout_makes(
    formats: Any, file: str, weights: dict[str, torch.Tensor], name: str
) -> None:
    patcher, text = formats.load(file, name)
    found = quantized_in(patcher)
    assert set(found) == MEANT
    layout = importlib.import_module("comfy.quant_ops").get_layout_class(TENSORS[name])
    how: dict[str, Any] = {"fp8": {"scale": "recalculate"}, "nvfp4": {}}.get(
        name, {"per_channel": True, "convrot": True}
    )
    for module, weight in found.items():
        data, params = layout.quantize(weights[f"{module}.weight"], **how)
        assert weight._layout_cls == TENSORS[name]
        for actual, expected in zip(
            layout.state_dict_tensors(weight._qdata, weight._params).items(),
            layout.state_dict_tensors(data, params).items(),
            strict=True,
        ):
            assert actual[0] == expected[0]
            assert torch.equal(*(each[1].reshape(-1).view(torch.uint8) for each in (actual, expected)))
    assert text.startswith(f"{name} for {len(MEANT)} weights, 0 left as in the file (largest error ")


@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("fp8", 0.1), ("nvfp4", 0.3)])
def test_its_results_are_near_those_of_the_file(core: Any, formats: Any, file: str, name: str, most: float) -> None:
    stock = core.comfy.sd.load_diffusion_model(file)
    patcher, _ = formats.load(file, name)
    assert patcher.model.get_dtype() is stock.model.get_dtype()
    assert patcher.model.manual_cast_dtype is stock.model.manual_cast_dtype
    assert 0 < error(output_of(patcher), output_of(stock)) < most


def test_as_in_the_file_is_stock(core: Any, formats: Any, file: str) -> None:
    stock = output_of(core.comfy.sd.load_diffusion_model(file))
    for name in ("as in the file", "auto"):  # no format is faster on a CPU
        patcher, text = formats.load(file, name)
        assert text.startswith("as in the file")
        assert torch.equal(output_of(patcher), stock)


def test_auto_quantizes_the_sizes_that_gain_and_measures_each_once(
    core: Any, formats: Any, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choice, trial, measured = core.ours("formats.choice"), core.inside("tuning.tuner").Trial, list[tuple[int, ...]]()

    def measure(name: str, weight: torch.Tensor, device: torch.device, tokens: int) -> Any:
        assert tokens == choice.TOKENS
        measured.append(tuple(weight.shape))
        return trial().with_run("as in the file", 1.0).with_run(name, 0.97 if weight.shape == (WIDTH, WIDTH) else 0.5)

    monkeypatch.setattr(formats, "preferred_format", lambda device: "int8")
    monkeypatch.setattr(choice, "preferred_format", lambda device: "int8")
    monkeypatch.setattr(choice, "_measured", measure)
    patcher, text = formats.load(file, "auto", keep=True)
    square = {name for name in MEANT if name.endswith("attn.proj")}
    assert set(quantized_in(patcher)) == MEANT - square
    assert f"int8 for {len(MEANT - square)} weights, {len(square)} left as in the file" in text
    assert len(measured) == len(set(measured)) == len({each.shape for each in quantized_in(patcher).values()}) + 1
    again, text = formats.load(file, "auto", keep=True)
    assert text == "auto-int8, from the file that was kept"
    assert torch.equal(output_of(again), output_of(patcher))
    assert set(quantized_in(formats.load(file, "int8")[0])) == MEANT, "the kept file has other weights than int8's"


def test_a_format_that_auto_would_not_take_is_named(formats: Any, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "preferred_format", lambda device: "fp8")
    assert formats.load(file, "int8")[1].endswith(" percent); auto takes fp8 on this GPU")
    assert formats.load(file, "fp8")[1].endswith(" percent)")


@pytest.mark.parametrize("key", ["input_blocks.4.1.proj_in.weight", "model.diffusion_model.down_blocks.1.conv.weight"])
def test_auto_measures_a_unet_at_the_tokens_of_its_inner_levels(
    core: Any, formats: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(formats, "fastest", lambda device, tokens: asked.append(tokens))
    monkeypatch.setattr(formats, "_loaded", lambda *_: None)
    for keys in ([key], ["double_blocks.0.img_attn.qkv.weight"]):
        formats._quantized("a file", "auto", dict.fromkeys(keys), None)
    assert asked == [core.ours("formats.choice").UNET_TOKENS, core.ours("formats.choice").TOKENS]


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_that_a_format_spoils_stays_as_it_is(
    formats: Any, weights: dict[str, torch.Tensor], tmp_path: Path, name: str
) -> None:
    spoiled, path = "single_blocks.1.linear1", str(tmp_path / "flux.safetensors")
    bad = weights[f"{spoiled}.weight"].clone()
    bad[:, 0] = 1e6 * bad.abs().amax()
    safetensors.torch.save_file({**weights, f"{spoiled}.weight": bad}, path)
    patcher, text = formats.load(path, name)
    kept = dict(modules_of(patcher))[spoiled].weight
    assert set(quantized_in(patcher)) == MEANT - {spoiled}
    assert torch.equal(kept, bad)
    assert f"{name} for {len(MEANT) - 1} weights, 1 left as in the file" in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_kept_file_is_found_until_the_model_is_another_one(
    formats: Any, file: str, weights: dict[str, torch.Tensor], name: str
) -> None:
    patcher, _ = formats.load(file, name, keep=True)
    expected = output_of(patcher)
    again, text = formats.load(file, name)
    assert text == f"{name}, from the file that was kept"
    assert torch.equal(output_of(again), expected)
    safetensors.torch.save_file({**weights, "img_in.bias": weights["img_in.bias"] + 1}, file)
    other, text = formats.load(file, name)
    assert text.startswith(f"{name} for ")
    assert not torch.equal(output_of(other), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_lora_that_is_put_on_changed_and_taken_off_compiles_nothing(
    core: Any, formats: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    class Loaded(QuantizedModel):
        def patcher(self) -> Any:
            path = tmp_path / "model.safetensors"
            safetensors.torch.save_file(self._by_hand().state_dict(), path)
            patcher, text = formats.load(str(path), name)
            assert text.startswith(f"{name} for ")
            return patcher

    run_traces(core, monkeypatch)
    monkeypatch.setattr(kit, "TOLERANCE", 1e-12 if name == "int8" else 1e-4)
    forget_regions(core)
    bench = Bench(core, Loaded(**vars(MODELS["Flux"])))
    weights = Weights(bench)
    weights.without()
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    given = bench.model.call(FIRST)
    results = [bench.call(given)]
    for change in (lambda: weights.with_lora(1), lambda: weights.with_lora(2, 0.5), weights.without):
        change()
        results.append(bench.call(given))
        bench.check_all([FIRST, SIZES[1]])
    assert torch.equal(results[0], results[-1])
    assert not torch.equal(results[0], results[1])


def test_core_makes_a_copy_of_it_in_the_same_format(formats: Any, file: str) -> None:
    patcher, _ = formats.load(file, "int8")
    make, arguments = patcher.cached_patcher_init
    copy = make(*arguments, disable_dynamic=True)
    assert copy.cached_patcher_init == patcher.cached_patcher_init
    assert torch.equal(output_of(copy), output_of(patcher))


def test_a_file_that_is_quantized_already_is_loaded_as_it_is(formats: Any, file: str) -> None:
    formats.load(file, "fp8", keep=True)
    patcher, text = formats.load(file.replace(".safetensors", ".fp8.safetensors"), "int8")
    assert text == "as in the file, which is quantized already"
    assert {each._layout_cls for each in quantized_in(patcher).values()} == {TENSORS["fp8"]}


def test_a_checkpoint_and_a_gguf_name_the_loader_to_take(
    core: Any, formats: Any, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint.safetensors")
    safetensors.torch.save_file({**weights, "first_stage_model.decoder.conv_in.weight": torch.zeros(4)}, path)
    for each, loader in ((path, "Load Checkpoint"), ("flux-Q4_K.gguf", "Unet Loader")):
        with pytest.raises(core.inside("errors").UserError, match=loader):
            formats.load(each, "int8")


def test_a_lack_of_memory_or_disk_names_what_to_do(
    core: Any, formats: Any, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_error, layout = (
        core.inside("errors").UserError,
        importlib.import_module("comfy.quant_ops").TensorWiseINT8Layout,
    )
    with monkeypatch.context() as short:
        short.setattr(layout, "quantize", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        with pytest.raises(user_error, match=r"no memory to quantize double_blocks\.0\.\S+ \(0 MiB\)"):
            formats.load(file, "int8")
    with monkeypatch.context() as full:
        full.setattr(
            core.comfy.utils, "save_torch_file", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space"))
        )
        with pytest.raises(user_error, match="No space"):
            formats.load(file, "int8", keep=True)
    assert [each.name for each in Path(file).parent.iterdir()] == [Path(file).name]
