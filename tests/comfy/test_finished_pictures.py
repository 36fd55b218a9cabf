"""Pictures and videos of Compile VAE are finished on the VAE's device, as stock finishes them on the CPU."""

from __future__ import annotations

import copy
import importlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.video_models import loaded_vae

from . import vaes

pytestmark = pytest.mark.usefixtures("inference")

GPU = torch.device("cpu", 0)  # stands in for one: another device to Python, the same to torch
CPU = torch.device("cpu")


@pytest.fixture
def stock() -> Any:
    return vaes.tiny()


@pytest.fixture
def ours(core: SimpleNamespace, stock: Any) -> Any:
    return finishing(core, stock)


def finishing(core: SimpleNamespace, stock: Any) -> Any:
    """A copy of `stock` as Compile VAE makes it for a GPU, which notes where each picture was finished."""
    vae = copy.copy(stock)
    vae.__class__ = core.ours("comfyui.finished_pictures").FinishingVAE
    vae.device, vae.finished_on = GPU, []
    finish = vae.process_output

    def process_output(image: torch.Tensor) -> torch.Tensor:
        vae.finished_on.append(vae.output_device)
        finished: torch.Tensor = finish(image)
        return finished

    vae.process_output = process_output
    return vae


def latent(batch: int = 1) -> torch.Tensor:
    return torch.randn((batch, 4, 8, 6), generator=torch.Generator().manual_seed(0))


def test_a_picture_is_finished_on_the_gpu_and_comes_to_the_cpu(stock: Any, ours: Any) -> None:
    expected, actual = stock.decode(latent(2)), ours.decode(latent(2))
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()
    assert set(ours.finished_on) == {GPU}
    assert ours.output_device == CPU


@pytest.mark.parametrize(
    ("name", "shape", "free", "where"),
    [
        ("wan", (1, 16, 3, 4, 6), 0, GPU),
        ("wan", (1, 16, 90, 1, 1), 0, CPU),  # a long one: its decode needed little memory
        ("wan", (1, 16, 90, 1, 1), 1 << 60, GPU),
        ("wan", (2, 16, 3, 4, 6), 0, CPU),
        ("ltx", (1, 128, 2, 3, 4), 0, CPU),  # its result is there while it decodes
        ("ltx", (1, 128, 2, 3, 4), 1 << 60, GPU),
    ],
)
def test_a_video_is_finished_on_the_gpu_where_it_has_room(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...], free: int, where: Any
) -> None:
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "get_free_memory", lambda device, *args, **kwargs: free)
    stock = loaded_vae(name, is_small=True)
    ours = finishing(core, stock)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)  # LTX adds random numbers
    expected = stock.decode(given)
    torch.manual_seed(1)
    actual = ours.decode(given)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()
    assert set(ours.finished_on) == {where}
    assert ours.output_device == CPU


@pytest.mark.parametrize(("name", "shape"), [("wan", (1, 16, 3, 4, 6)), ("ltx", (1, 128, 2, 3, 4))])
def test_where_memory_runs_out_tiles_of_a_video_are_put_together_on_the_cpu(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "get_free_memory", lambda device, *args, **kwargs: 1 << 40)
    stock = loaded_vae(name, is_small=True)
    ours = finishing(core, stock)
    original, failed = stock.first_stage_model.decode, []

    def decode(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(ours.output_device)
            raise torch.OutOfMemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(stock.first_stage_model, "decode", decode)
    given = torch.randn(shape)
    expected_shape = original(given).movedim(1, -1).shape
    assert ours.decode(given).shape == expected_shape
    assert failed == [GPU]
    assert ours.finished_on == [CPU]


@pytest.mark.parametrize(("free", "batch", "where"), [(0, 1, GPU), (0, 2, CPU), (1 << 60, 2, GPU)])
def test_pictures_that_core_decodes_in_parts_do_not_gather_on_the_gpu(
    stock: Any, ours: Any, monkeypatch: pytest.MonkeyPatch, free: int, batch: int, where: torch.device
) -> None:
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "get_free_memory", lambda device, *args, **kwargs: free)
    assert torch.equal(ours.decode(latent(batch)), stock.decode(latent(batch)))
    assert set(ours.finished_on) == {where}


def test_where_memory_runs_out_tiles_are_put_together_on_the_cpu(
    core: SimpleNamespace, stock: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = stock.first_stage_model.decode, []

    def decode(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(stock.first_stage_model, "decode", decode)
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(core.ours("comfyui.finished_pictures"), "copied_to_cpu", copied.append)
    actual = ours.decode(latent())
    assert failed
    assert ours.finished_on == [CPU]
    assert not copied, "it is there"
    assert torch.equal(actual, stock.decode_tiled(latent()))
    assert ours.output_device == CPU


def test_memory_that_runs_out_with_the_last_copy_costs_no_picture(
    stock: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, decodes = type(stock), []
    original = kind.decode

    class Late:
        def element_size(self) -> int:
            raise torch.OutOfMemoryError

    late: list[Any] = []

    def decode(vae: Any, *args: Any, **kwargs: Any) -> Any:
        decodes.append(vae.output_device)
        if len(decodes) == 1:
            found = Late()
            late.append(weakref.ref(found))
            return found
        assert late[0]() is None, "what is on the GPU would take the room of the second decode"
        return original(vae, *args, **kwargs)

    monkeypatch.setattr(kind, "decode", decode)
    actual = ours.decode(latent())
    assert decodes == [GPU, CPU]
    assert torch.equal(actual, original(stock, latent()))


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_large_result_comes_by_parts_with_its_strides(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pins: bool, dtype: torch.dtype
) -> None:
    finished = core.ours("comfyui.finished_pictures")
    monkeypatch.setattr(finished, "_STAGE", 1000)
    filled: list[torch.Tensor] = []

    def pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
        if not pins:
            raise RuntimeError
        filled.append(torch.empty(size, dtype=dtype))
        return filled[-1]

    class Event:
        def synchronize(self) -> None:
            waited.append(True)

    waited: list[bool] = []
    monkeypatch.setattr(finished, "_pinned", pinned)
    monkeypatch.setattr(finished, "_recorded", lambda device: Event())
    video = torch.randn((2, 3, 7, 9, 11)).to(dtype)
    for given in (video, video.movedim(1, -1), video[1:], video[:, :, 1:], video[1:].movedim(1, -1), video[:0]):
        waited.clear()
        actual = finished.copied_to_cpu(given)
        assert torch.equal(actual, given)
        assert actual.stride() == given.stride() or not pins
        is_dense = given.numel() * given.element_size() > 2000 and given.storage_offset() in (0, video[0].numel())
        assert len(waited) == (-(-given.numel() * given.element_size() // 1000) if pins and is_dense else 0)


def test_a_large_result_with_gradients_keeps_them(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inference mode core's decode gives them: another pack may turn that off for a whole prompt."""
    finished = core.ours("comfyui.finished_pictures")
    monkeypatch.setattr(finished, "_STAGE", 100)
    monkeypatch.setattr(finished, "_pinned", lambda size, dtype: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(finished, "_recorded", lambda device: SimpleNamespace(synchronize=lambda: None))
    with torch.inference_mode(False), torch.enable_grad():
        stock = vaes.tiny()
        given = torch.randn((1, 4, 8, 6))
        expected, actual = stock.decode(given), finishing(core, stock).decode(given)
        assert expected.requires_grad
        assert actual.requires_grad
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("name", "device"), [("device", CPU), ("output_device", GPU)])
def test_a_vae_that_a_node_moved_later_decodes_as_core_does(
    core: SimpleNamespace, ours: Any, monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device
) -> None:
    finished, copied = core.ours("comfyui.finished_pictures"), []
    monkeypatch.setattr(finished, "copied_to_cpu", lambda picture: copied.append(picture) or picture)
    ours.decode(latent())
    assert len(copied) == 1
    setattr(ours, name, device)
    ours.decode(latent())
    assert len(copied) == 1, "the GPU has nothing that belongs on the CPU"
    assert getattr(ours, name) == device


def test_room_is_asked_for_what_core_decodes(
    core: SimpleNamespace, stock: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a video that a decoder of pictures gets, core decodes the first frame of each."""
    management = importlib.import_module("comfy.model_management")
    needed = 2 * ours.memory_used_decode((2, 4, 8, 6), ours.vae_dtype) + 1000
    needed += 2 * 4 * 2 * 3 * 64 * 48  # the result in float32, twice
    monkeypatch.setattr(ours.patcher, "model_size", lambda: 3000)
    monkeypatch.setattr(ours.patcher, "loaded_size", lambda: 2000)
    video = torch.randn((2, 4, 3, 8, 6), generator=torch.Generator().manual_seed(0))
    for free, where in [(needed, GPU), (needed - 1, CPU)]:
        ours.finished_on.clear()
        monkeypatch.setattr(management, "get_free_memory", lambda device, *args, free=free, **kwargs: free)
        assert torch.equal(ours.decode(video), stock.decode(video))
        assert set(ours.finished_on) == {where}


def test_room_is_asked_for_all_channels_that_a_decoder_gives(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(management, "get_free_memory", lambda device, *args, **kwargs: 0)
    ours = finishing(core, loaded_vae("wan", is_small=True))
    for channels, where in [(3, GPU), (12, CPU)]:
        ours.finished_on.clear()
        ours.conv_out_channels = channels
        ours.decode(torch.randn(1, 16, 25, 1, 1))
        assert set(ours.finished_on) == {where}


def test_a_decode_that_fails_leaves_the_device_as_it_was(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: Any, **kwargs: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(ours.first_stage_model, "decode", decode)
    with pytest.raises(ValueError):
        ours.decode(latent())
    assert ours.output_device == CPU


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({}, True),
        ({"latent_dim": 3}, True),
        ({"latent_dim": 1}, False),
        ({"extra_1d_channel": 16}, False),  # sound
        ({"output_device": torch.device("cuda")}, False),  # --gpu-only
        ({"device": CPU}, False),
        ({"handles_tiling": True}, False),
        ({"decode": lambda *args: None}, False),  # another pack's
    ],
    ids=str,
)
def test_only_pixels_of_core_on_a_gpu_are(
    core: SimpleNamespace, stock: Any, changes: dict[str, Any], is_ours: bool
) -> None:
    vae = copy.copy(stock)
    vars(vae).update({"device": torch.device("cuda"), "output_device": CPU, **changes})
    finished = core.ours("comfyui.finished_pictures")
    finished.finish_on_gpu(vae)
    assert (type(vae) is finished.FinishingVAE) is is_ours
    finished.finish_on_gpu(vae)  # behind a second node
    assert (type(copy.copy(vae)) is finished.FinishingVAE) is is_ours
