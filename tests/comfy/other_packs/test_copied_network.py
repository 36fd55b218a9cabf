"""A node that copies the network (model merges, trainers) gets the network, also after ours has sampled with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .conftest import Bench


def pickled(network: torch.nn.Module) -> torch.nn.Module:
    copied: torch.nn.Module = pickle.loads(pickle.dumps(network))
    return copied


def saved(network: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    copied: torch.nn.Module = torch.load(file, weights_only=False)
    return copied


def answer(network: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    latent, context = (torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (1, 77, 768)))
    result: torch.Tensor = network(latent, torch.full((1,), 500.0), context=context)
    return result


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("with_ours", [True, False], ids=["with our node", "without our node"])
def test_a_copy_computes_by_itself_and_without_ours(
    bench: Bench, make: Callable[[torch.nn.Module], torch.nn.Module], with_ours: bool
) -> None:
    model = bench.model()
    ours = bench.compiled(model)
    bench.sample(ours)  # in an earlier prompt: the patch stays on the network
    network = (ours if with_ours else model).model.diffusion_model
    patch = vars(network)["_forward"]
    expected, calls = answer(network), patch.watch.calls
    copied = make(network)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(1.0)  # a copy that still used the original would answer otherwise
    assert torch.equal(answer(copied), expected)
    assert (patch.watch.calls, vars(network)["_forward"]) == (calls, patch)
    assert copied._forward.__self__ is copied
    assert type(patch) not in map(type, vars(copied).values())


def test_a_copied_network_can_be_compiled_itself(bench: Bench) -> None:
    model = bench.model()
    expected = bench.sample(model)
    earlier = bench.compiled(model)
    bench.sample(earlier)
    copied = bench.model()
    copied.model.diffusion_model = copy.deepcopy(model.model.diffusion_model)
    bench.unload()
    ours = bench.compiled(copied)
    assert torch.equal(bench.sample(ours), expected)
    assert ours.object_patches["diffusion_model._forward"].is_known_code
    bench.unload()
    assert "_forward" not in vars(copied.model.diffusion_model)


def test_a_copy_has_the_forward_that_another_pack_put_before_ours(bench: Bench) -> None:
    model = bench.model()
    changed = model.clone()
    inner = changed.get_model_object("diffusion_model._forward")

    def halved(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = inner(*args, **kwargs) * 0.5
        return result

    changed.add_object_patch("diffusion_model._forward", halved)
    ours = bench.compiled(changed)
    bench.sample(ours)
    copied = copy.deepcopy(model.model.diffusion_model)
    assert copied._forward is halved
