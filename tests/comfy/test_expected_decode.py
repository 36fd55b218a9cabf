"""The regions of a decode are found before its weights are loaded: the same as when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .families.kit import forget_regions
from .families.videos import DECODERS, Decoder
from .in_process import PACK

pytestmark = pytest.mark.usefixtures("inference")

SAMPLED = (2, 4, 16, 24)
CPU = torch.device("cpu")


def part(name: str) -> Any:
    return importlib.import_module(f"{PACK}.compile_cache.{name}")


class Decode:
    """A VAE with a small decoder behind Compile VAE Decode, and what Resolute expects of its first decode."""

    def __init__(self, core: SimpleNamespace, dtype: torch.dtype, paged_file: torch.dtype | None = None) -> None:
        """paged_file: the dtype of the file from which DynamicVRAM loads the VAE; None: it is off."""
        forget_regions(core)  # other tests of this process may have compiled the same blocks
        self.core, self.dtype, self.is_paged = core, dtype, paged_file is not None
        module = importlib.import_module("comfy.ldm.modules.diffusionmodules.model")
        sizes: dict[str, Any] = {"ch": 32, "out_ch": 3, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4}
        with torch.inference_mode(False):
            self.model = torch.nn.Module()
            self.model.decoder = module.Decoder(**sizes, attn_resolutions=[], in_channels=3, resolution=32)
            self.model.to(dtype)
        archive = getattr(core.comfy.model_management, "archive_model_dtypes", None)  # absent in 0.8
        if archive is not None:
            archive(self.model)
        kind = core.comfy.model_patcher.ModelPatcher
        if paged_file is not None:
            file = {name: weight.to(paged_file) for name, weight in self.model.state_dict().items()}
            self.model.load_state_dict(file, assign=True)
            kind = paging(core)
        patcher = kind(self.model, load_device=CPU, offload_device=CPU)
        self._compile(patcher, 4)

    def _compile(self, patcher: Any, channels: int) -> None:
        vae = SimpleNamespace(
            first_stage_model=self.model, patcher=patcher, device="cpu", vae_dtype=self.dtype, upscale_ratio=2,
            latent_channels=channels,
        )  # fmt: skip
        self.vae = self.core.ours("compile.vae").compile_vae_decode(vae, "inductor")
        self.backend = part("backends.registry").get("inductor")
        *_, self.decode = self.backend.upcoming_calls.values()

    def ahead(self, sampled: tuple[int, ...] = SAMPLED) -> dict[str, Any]:
        """The regions that are found now, by key. sampled: the shape of a latent."""
        region = part("regions.site")
        progress, stats = region.SilentProgress(), part("stats").Stats()
        now = SimpleNamespace(tensors=[torch.empty(sampled)], torch_flags=part("torch_facts.flags").torch_flags("cpu"))
        now.progress = progress
        look_ahead = part("backends.inductor.regions.look_ahead").LookAhead
        config = self.core.ours("process.runtime").cache().config
        found = look_ahead(0, self.decode, now, self.backend.table, None, stats, config).missing()
        return {each.region.key: each for each in found}

    def called(self) -> dict[str, Any]:
        """The regions that a decode comes to, by key."""
        if self.is_paged:
            self.vae.patcher.load(CPU)
        else:
            self.core.comfy.model_management.load_models_gpu([self.vae.patcher])
        latent = torch.zeros((1, *SAMPLED[1:]), dtype=self.dtype)
        with part("regions.slots").swapped(self._filled_pages()):
            return self._missing(
                self.model.decoder, lambda: type(self.model.decoder).forward(self.model.decoder, latent)
            )

    def _missing(self, module: torch.nn.Module, run: Callable[[], object]) -> dict[str, Any]:
        """The regions that `run` comes to with Resolute's hooks in the module, by key; none is compiled."""
        runtime = self.core.ours("process.runtime")
        program = runtime.record_of(module).programs["inductor", (), self.core.roles.VAE_DECODE]
        program._survey(1)
        program._regions.begin(part("regions.site").SilentProgress(), part("torch_facts.flags").torch_flags("cpu"))
        with (
            part("regions.site").installed(program._hooks),
            program._regions.postponing_compiles(lambda: None) as missing,
        ):
            run()
        return dict(missing)

    def _filled_pages(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The weights that DynamicVRAM pages, as `PagedWeights` puts them in place: cast."""
        for module in self.model.modules():
            for name, weight in module._parameters.items() if "_v" in module.__dict__ else ():
                if weight is not None:
                    yield module._parameters, name, torch.nn.Parameter(weight.to(self.dtype), requires_grad=False)


class VideoDecode(Decode):
    """The same for a small decoder of videos."""

    def __init__(self, core: SimpleNamespace, decoder: Decoder) -> None:
        forget_regions(core)
        self.core, self.dtype, self.is_paged, self.decoder = core, torch.float32, False, decoder
        with torch.inference_mode(False):
            self.module = decoder.make()
            self.model = self.module
            if decoder.method == "forward":
                self.model = torch.nn.Module()
                self.model.decoder = self.module
        patcher = core.comfy.model_patcher.ModelPatcher(self.model, load_device=CPU, offload_device=CPU)
        self._compile(patcher, decoder.channels)

    def called(self, is_picture: bool = False) -> dict[str, Any]:
        """The regions that the rehearsal of a video comes to, or the decode of a picture, by key."""
        self.core.comfy.model_management.load_models_gpu([self.vae.patcher])
        method = getattr(type(self.module), self.decoder.method)
        coder = self.core.ours("blocks.vaes").coder_of(self.module, self.core.roles.VAE_DECODE)

        def rehearse() -> None:
            for shape in coder.small(self.decoder.channels, is_picture):
                method(self.module, torch.zeros(shape))

        return self._missing(self.module, rehearse)


def paging(core: SimpleNamespace) -> Any:
    """ComfyUI's own patcher of DynamicVRAM, on the CPU, where it never runs: its pages are only counted."""
    reservation = SimpleNamespace(alloc=lambda size: (None, 0, size), prioritize=lambda: None)

    class Paging(core.comfy.model_patcher.ModelPatcherDynamic):  # type: ignore[misc, name-defined]
        def __new__(cls, *args: Any, **settings: Any) -> Any:
            return object.__new__(cls)

        def register_load_device(self, device: torch.device) -> None:
            self.model.dynamic_pins[device] = {"hostbufs_initialized": True}

        def _vbar_get(self, create: bool = False) -> Any:
            return reservation

        def __del__(self) -> None: ...

    return Paging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_a_load_the_same_regions_and_sizes_are_found_as_in_the_call(core: Any, dtype: torch.dtype) -> None:
    decode = Decode(core, dtype)
    weights = {name: (id(weight), weight.dtype) for name, weight in decode.model.named_parameters()}
    ahead = decode.ahead()
    assert {name: (id(weight), weight.dtype) for name, weight in decode.model.named_parameters()} == weights
    called = decode.called()
    assert len(called) > 5
    assert {key: call.shapes for key, call in ahead.items()} == {key: call.shapes for key, call in called.items()}


@pytest.mark.parametrize("file", [torch.float16, torch.bfloat16, torch.float32])
def test_the_same_are_found_before_dynamic_vram_loads_a_file(core: Any, file: torch.dtype) -> None:
    """It casts large weights ahead, and leaves small ones, as all those of norms, in the dtype of the file."""
    if not hasattr(core.comfy.model_patcher, "ModelPatcherDynamic"):
        pytest.skip("this ComfyUI has no DynamicVRAM")
    decode = Decode(core, torch.bfloat16, file)
    weights = {name: (id(weight), weight.dtype) for name, weight in decode.model.named_parameters()}
    ahead = decode.ahead()
    assert {name: (id(weight), weight.dtype) for name, weight in decode.model.named_parameters()} == weights
    assert not any(part.comfy_cast_weights for part in decode.model.modules() if hasattr(part, "comfy_cast_weights"))
    called = decode.called()
    paged = [name for name, module in decode.model.named_modules() if "_v" in module.__dict__]
    assert "decoder.mid.block_1.conv1" in paged
    assert "decoder.mid.block_1.norm1" not in paged
    assert len(called) > 5
    assert {key: call.shapes for key, call in ahead.items()} == {key: call.shapes for key, call in called.items()}
    assert decode.ahead().keys() == called.keys()  # also once it is loaded


def test_weights_that_are_cast_in_each_call_are_not_looked_at(core: Any) -> None:
    """So they are after ComfyUI has loaded the model in parts."""
    decode = Decode(core, torch.float32)
    decode.model.decoder.conv_in.comfy_cast_weights = True
    with pytest.raises(ValueError, match="takes its weights from elsewhere"):
        decode.ahead()


def test_attention_that_is_no_region_is_not_computed(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's other implementations ask for free memory, which the device of tensors without contents does not have."""
    monkeypatch.setattr(core.ours("blocks.pictures").version, "vae_attention_is_traceable", lambda: False)
    decode = Decode(core, torch.float32)
    kinds = {call.site.kind for call in decode.ahead().values()}
    assert "ResnetBlock" in kinds
    assert "AttnBlock" not in kinds


@pytest.mark.parametrize("sampled", [(2, 8, 5, 6, 10), (1, 1, 4000), (1, 8, 1, 6, 10), (1, 8, 6, 10)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_of_a_video_all_states_are_found_that_its_rehearsal_has(core: Any, name: str, sampled: tuple[int, ...]) -> None:
    """sampled: a video, one packed with its sound, and two pictures."""
    decode = VideoDecode(core, DECODERS[name])
    is_picture = len(sampled) == 4 or sampled[2] == 1
    ahead, called = decode.ahead(sampled), decode.called(is_picture)
    assert ahead.keys() == called.keys()
    if name == "MiniMax H3":  # what its blocks write shows in values only
        assert not ahead
        return
    # A video's decode comes to all of them.
    assert is_picture or len(ahead) == DECODERS[name].compiles
    assert all(weight.device.type == "cpu" for weight in (*decode.model.parameters(), *decode.model.buffers()))


@pytest.mark.parametrize("put", ["a closure", "a hook", "a class"])
def test_another_packs_code_in_it_is_not_run(core: Any, put: str) -> None:
    """It may keep what it saw, and tensors without contents would be wrong in the decode."""
    decode = Decode(core, torch.float32)
    part, seen = decode.model.decoder.conv_in, list[str]()

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device.type)
        return torch.nn.functional.conv2d(x, part.weight, part.bias, padding=1)

    if put == "a closure":
        part.forward = note
    elif put == "a hook":
        part.register_forward_pre_hook(lambda module, args: seen.append(args[0].device.type))
    else:
        part.__class__ = type("Conv2d", (type(part),), {"__module__": "strange.ops", "forward": lambda _, x: note(x)})
    with pytest.raises(ValueError, match="another pack"):
        decode.ahead()
    assert seen == []
