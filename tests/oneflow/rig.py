"""Binds a module to the backend and runs it through a real GraphCache. Builds small versions of ComfyUI's modules."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from compile_cache.backends.base import Call, Method
from compile_cache.backends.oneflow.backend import OneFlowBackend
from compile_cache.backends.oneflow.forward import Structure
from compile_cache.backends.oneflow.lowering import LoweringCompiler
from compile_cache.backends.oneflow.packages import oneflow
from compile_cache.backends.oneflow.runtime import synchronize
from compile_cache.backends.oneflow.weights import SharedWeights, to_oneflow
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec

TOLERANCE = 1e-4
COUNTED = ("captures", "replays", "graph_calls", "eager_calls")
MIB = 1024 * 1024
_owners = itertools.count(1)
_open: list[Bound] = []


def close_all() -> None:
    """Close every bound module at the end of a test file, so that its weights are freed."""
    while _open:
        _open.pop().close()


Invoke = Callable[[Sequence[torch.Tensor]], Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layers(nn.Module):
    """With `rows`, a forward takes 76 ms, well above the 20 ms that a graph needs (400 rows take 19 ms)."""

    width = 1024

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)
        self.register_buffer("offset", torch.ones(self.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.silu(self.first(x))) + self.offset


class ManyOperators(nn.Module):
    """Hundreds of steps, like a UNet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(120):
            x = x * 1.0001 + 0.0001
        return x


def rows(number: int, seed: int = 0) -> torch.Tensor:
    """Input for `Layers`; each number of rows is another signature."""
    return random(1600 + number, Layers.width, seed=seed)


def with_weights(module: Any, seed: int = 0) -> Any:
    """Random weights that keep activations near one at any depth, so that errors are visible."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if weight.ndim > 1:
            weight.data = torch.randn(weight.shape, generator=generator) / weight[0].numel() ** 0.5
        else:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1 + float(name.endswith("weight"))
    return module.eval().requires_grad_(False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert float(expected.norm()) > 0, "nothing to compare with"
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Bound:
    """A module bound to the backend. `epoch` is its weights epoch: call `changed()` after replacing a weight."""

    def __init__(
        self,
        module: Any,
        invoke: Invoke | None = None,
        *,
        backend: OneFlowBackend | None = None,
        budget: int = 20_000 * MIB,
        method: str | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        kind = type(module)
        self.invoke: Invoke = invoke or (lambda tensors: kind.forward(self._module(), *tensors))
        self.backend = backend or OneFlowBackend()
        self.cache = GraphCache(CacheConfig(budget_bytes=budget))
        self.owner = next(_owners)
        _open.append(self)
        self.epoch = 1
        self._method = method
        capabilities = self.backend.probe("cpu")
        self.program = self.backend.bind(self.owner, capabilities, lambda *_: [], self.cache.stats, self.cache.config)

    def call(self, *tensors: torch.Tensor) -> Call:
        specs = tuple(
            (f"input {index}", TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "cpu"))
            for index, tensor in enumerate(tensors)
        )
        key = GraphKey(Signature(specs), Role.UNET, "model", "oneflow")
        method = Method(self._method, lambda given: (tuple(given), {})) if self._method else None
        return Call(key, list(tensors), self.invoke, "cpu", epoch=self.epoch, module=self._module(), method=method)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with torch.inference_mode():
            return self.cache.run(self.program, self.call(*tensors))

    def original(self, *tensors: torch.Tensor) -> Any:
        with torch.inference_mode():
            return self.invoke(list(tensors))

    def error(self, *tensors: torch.Tensor) -> float:
        """Relative error of one call against the original."""
        return relative_error(self(*tensors), self.original(*tensors))

    def close(self) -> None:
        """Drop its graphs."""
        self.cache.forget(self.owner)

    def changed(self) -> None:
        self.epoch += 1

    @property
    def bypasses(self) -> list[str]:
        """The sentences of all bypasses so far."""
        return [event.text for event in self.cache.stats.events if event.kind == "bypass"]

    @contextmanager
    def expect(self, **counts: int) -> Iterator[None]:
        """Assert that the block adds exactly these counts and bypasses nothing."""
        before = self.cache.stats.snapshot()
        yield
        after = self.cache.stats.snapshot()
        added = {name: after[name] - before[name] for name in COUNTED}
        assert added == {name: counts.get(name, 0) for name in COUNTED}, (added, self.bypasses)
        assert after["bypasses"] == before["bypasses"], self.bypasses


def on_oneflow(module: Any, traced_with: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    """The eager result of the lowered operators of a call with `traced_with`, for `tensors`."""
    key = GraphKey(Signature(()), Role.UNET, "model", "oneflow")
    call = Call(key, traced_with, lambda given: module(*given), "cpu", module=module)
    forward = LoweringCompiler().compile(call, module, SharedWeights())
    structure = Structure(module(*traced_with))
    with oneflow().no_grad():
        results = structure.tensors(forward.run([to_oneflow(tensors[n]) for n in forward.inputs], forward.values))
        synchronize()
    return structure.build([oneflow().utils.tensor.to_torch(result) for result in results])


def unet(**changes: Any) -> Any:
    """ComfyUI's own UNet with attention only at its deepest level, so that it fits into memory at real sizes."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    settings = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 32,
        "num_res_blocks": [1, 1, 1],
        "channel_mult": [1, 1, 2],
        "transformer_depth": [0, 0, 1],
        "transformer_depth_output": [0, 0, 0, 0, 1, 1],
        "transformer_depth_middle": 1,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": False,
        "use_checkpoint": False,
        "legacy": False,
        "context_dim": 64,
        "num_heads": 4,
        "adm_in_channels": None,
        **changes,
    }
    return with_weights(UNetModel(**settings, dtype=torch.float32, operations=comfy.ops.disable_weight_init))


def unet_inputs(width: int, height: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    """Latent, timesteps and context for an image of this size in pixels."""
    return random(batch, 4, height // 8, width // 8), torch.full((batch,), 500.0), random(batch, 77, 64, seed=1)


def bound_unet(module: Any, **options: Any) -> Bound:
    """A UNet's `_forward`, called as the pack calls it."""

    def invoke(tensors: Sequence[torch.Tensor]) -> Any:
        return module._forward(tensors[0], timesteps=tensors[1], context=tensors[2], transformer_options={})

    return Bound(module, invoke, **options)


def decoder(channels: int = 32) -> Any:
    """ComfyUI's own VAE decoder."""
    from comfy.ldm.modules.diffusionmodules.model import Decoder

    return with_weights(
        Decoder(
            ch=channels,
            out_ch=3,
            ch_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            attn_resolutions=[],
            in_channels=3,
            resolution=256,
            z_channels=4,
        )
    )
