"""A pack that puts a wrapper around a module before, between and after ours finds its own work as it left it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from . import packs
from .conftest import Bench


def assert_untouched(wrapper: packs.Compiled) -> None:
    assert vars(wrapper)["forward"] == wrapper._run


def test_a_decoder_that_is_wrapped_while_ours_is_loaded_stays_wrapped(bench: Bench) -> None:
    vae = bench.vae()
    expected = bench.decode(vae)
    ours = bench.compiled_vae(vae)
    assert torch.equal(bench.decode(ours), expected)
    wrapper = packs.compile_decoder_in_place(vae)
    assert torch.equal(bench.decode(vae), expected)
    assert_untouched(wrapper)
    assert wrapper.runs == 1, "the wrapper did not run"
    bench.unload()
    assert_untouched(wrapper)
    assert torch.equal(bench.decode(vae), expected)
    assert wrapper.runs == 2


def test_a_clone_of_a_model_whose_network_another_pack_exchanged_has_our_patch_as_it_was(bench: Bench) -> None:
    """Such a clone is no copy for another GPU, though another network is at the path of ours."""
    exchanged = packs.with_compiled_network(bench.compiled(bench.model()))
    ours = exchanged.object_patches["diffusion_model._forward"]
    assert exchanged.clone().object_patches["diffusion_model._forward"] is ours


def test_a_decoder_that_is_wrapped_between_two_decodes_of_ours_stays_wrapped(bench: Bench) -> None:
    vae = bench.vae()
    expected = bench.decode(vae)
    ours = bench.compiled_vae(vae)
    bench.decode(ours)
    wrapper = packs.compile_decoder_in_place(vae)
    assert torch.equal(bench.decode(ours), expected)
    assert_untouched(wrapper)
    bench.unload()
    assert_untouched(wrapper)
    assert "forward" not in vars(wrapper.module)


def test_a_decoder_that_was_wrapped_before_ours_runs_as_that_pack_left_it_and_the_text_says_so(bench: Bench) -> None:
    vae = bench.vae()
    expected = bench.decode(vae)
    wrapper = packs.compile_decoder_in_place(vae)
    before = bench.bypasses()
    assert bench.compiled_vae(vae) is vae
    assert "another node put Compiled (tests) around the decoder" in bench.caplog.text
    assert "no image decoder" not in bench.caplog.text
    assert bench.bypasses() == before + 1
    assert torch.equal(bench.decode(vae), expected)
    assert_untouched(wrapper)
    assert wrapper.runs == 1


def test_a_network_that_is_wrapped_on_the_model_itself_stays_wrapped(bench: Bench) -> None:
    model = bench.model()
    expected = bench.sample(model)
    ours = bench.compiled(model)
    bench.sample(ours)
    network = model.model.diffusion_model
    wrapper = model.model.diffusion_model = packs.Compiled(network)
    assert torch.equal(bench.sample(model), expected)
    assert torch.equal(bench.sample(ours), expected)
    bench.unload()
    assert_untouched(wrapper)
    assert not {"forward", "_forward"} & set(vars(network))
    assert "_forward" not in vars(wrapper)


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_object_patch_of_another_pack_composes_with_ours_and_is_taken_back(bench: Bench, place: str) -> None:
    vae = bench.vae()
    expected = bench.decode(vae)

    def brighten(patched: object) -> None:
        patcher = patched.patcher  # type: ignore[attr-defined]
        inner = patcher.get_model_object("decoder.forward")
        patcher.add_object_patch("decoder.forward", lambda z, **kwargs: inner(z, **kwargs) * 0.5)

    if place == "before":
        changed = __import__("copy").copy(vae)
        changed.patcher = vae.patcher.clone()
        brighten(changed)
        ours = bench.compiled_vae(changed)
    else:
        ours = bench.compiled_vae(vae)
        brighten(ours)
    assert not torch.equal(bench.decode(ours), expected)
    assert torch.equal(bench.decode(vae), expected)
    bench.unload()
    assert torch.equal(bench.decode(vae), expected)


def test_our_patch_keeps_no_module_alive(bench: Bench) -> None:
    vae = bench.vae()
    ours = bench.compiled_vae(vae)
    bench.decode(ours)
    bench.unload()
    decoder = weakref.ref(vae.first_stage_model.decoder)
    gc.collect()
    gc.disable()
    try:
        del vae, ours
        assert decoder() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wrapped", [False, True])
def test_core_may_eject_and_inject_in_the_middle_of_a_run(bench: Bench, wrapped: bool) -> None:
    """As it does for LoRA hooks and for a partial unload; a patch that got lost there left the run uncompiled."""
    model = bench.model()
    expected = bench.sample(model)
    ours = bench.compiled(model)
    bench.sample(ours)
    network = model.model.diffusion_model
    patch = vars(network)["_forward"]
    if wrapped:
        model.model.diffusion_model = packs.Compiled(network)
    management = bench.core.comfy.model_management
    (loaded,) = [each.model for each in management.current_loaded_models if each.model.model is model.model]
    assert loaded.is_injected
    with loaded.use_ejected():
        pass
    assert vars(network)["_forward"] is patch
    model.model.diffusion_model = network
    assert torch.equal(bench.sample(ours), expected)
    bench.unload()
    assert "_forward" not in vars(network)


def test_the_forward_that_a_pack_set_on_the_network_itself_comes_back(bench: Bench) -> None:
    """Also where the network was wrapped while ours was off: then core's backup is of the wrapper."""
    model = bench.model()
    network = model.model.diffusion_model
    own = network._forward

    def halved(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = own(*args, **kwargs) * 0.5
        return result

    network._forward = halved
    expected = bench.sample(model)
    ours = bench.compiled(model)
    wrapper = model.model.diffusion_model = packs.Compiled(network)
    for _ in range(2):
        assert torch.equal(bench.sample(ours), expected)
        bench.unload()
        assert vars(network)["_forward"] is halved
        assert_untouched(wrapper)
    model.model.diffusion_model = network
    assert torch.equal(bench.sample(model), expected)
