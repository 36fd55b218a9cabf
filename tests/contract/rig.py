"""Small modules with regions, bound to a backend and run through a real GraphCache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_cache.attribute_policy import ModuleAttributePolicy
from compile_cache.backends.base import Backend, Call
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.modules.site import Dims, Hook, HookBuilder, RegionSite

TOKENS: Dims = ("b", "n", None)
CONTEXT: Dims = ("b", "m", None)
FEATURES: Dims = ("b", None, "h", "w")

# What fp32 on the CPU may differ from the original, relatively.
TOLERANCE = 1e-4

COUNTED = (
    "region_compiles",
    "region_loads",
    "compile_failures",
    "verifications",
    "region_calls",
    "graph_calls",
    "eager_calls",
    "captures",
    "replays",
)
# Of an application whose operations cast and patch their weights, as ComfyUI's do.
ATTRIBUTES = ModuleAttributePolicy(
    frozenset({"comfy_cast_weights", "weight_function", "bias_function", "weight_lowvram_function"}),
    casts="comfy_cast_weights",
    weight_patches=("weight_function", "bias_function"),
)
_owners = itertools.count(1)


class Attention(nn.Module):
    """A small transformer block: norm, attention over a context, residual."""

    dims = (TOKENS, CONTEXT)

    def __init__(self, width: int = 16, heads: int = 2, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(t.shape[0], -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2)

        q, k, v = split(self.q(self.norm(x))), split(self.k(context)), split(self.v(context))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


class Convolution(nn.Module):
    """A residual block in small: norm, activation, convolution."""

    dims = (FEATURES,)

    def __init__(self, channels: int = 8, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, stride=stride, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.nn.functional.silu(self.norm(x)))


class Block(nn.Module):
    """One region, quick to compile, over `tokens`."""

    dims = (TOKENS,)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() + x


class Model(nn.Module):
    """Convolutions, then attention over their pixels as tokens: what a UNet does, in small."""

    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Convolution(16) for _ in range(2))
        self.attentions = nn.ModuleList(Attention(16, **attention) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = x + convolution(x)
        tokens = x.flatten(2).transpose(1, 2)
        for attention in self.attentions:
            tokens = attention(tokens, context)
        return tokens.transpose(1, 2).reshape(x.shape)


def original(module: nn.Module, *tensors: torch.Tensor) -> Any:
    return type(module).forward(module, *tensors)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A module with its own weights, ready for inference."""
    torch.manual_seed(seed)
    return make().eval()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch: int = 2, height: int = 8, width: int = 8, tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """For `Model`: a feature map and a context."""
    return random(batch, 16, height, width), random(batch, tokens, 16, seed=1)


def tokens(count: int = 5, batch: int = 2) -> torch.Tensor:
    return random(batch, count, 4)


class Stopper:
    """A Progress whose user presses Cancel at these of its calls, counted from 1."""

    cancellations: tuple[type[BaseException], ...] = (InterruptedError,)

    def __init__(self, *presses: int) -> None:
        self.presses, self.calls, self.passed_on = presses, 0, 0
        self.shown: list[tuple[int, int]] = []

    def raise_if_cancelled(self) -> None:
        self.calls += 1
        if self.calls in self.presses:
            raise InterruptedError("cancelled")

    def begin_block(self) -> None: ...

    def prompt_runs(self) -> bool:
        return False

    def cancel_again(self) -> None:
        self.passed_on += 1

    def report(self, done: int, total: int) -> None:
        self.shown.append((done, total))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def hooks_of(module: nn.Module) -> HookBuilder:
    """Hooks for every block of `module` (or for itself) that says which of its dimensions vary."""

    def build(run: Any, bypass: Any) -> Sequence[Hook]:
        found = []
        for name, block in module.named_modules():
            if hasattr(type(block), "dims"):
                site = RegionSite(name, type(block).__name__, block, original, type(block).dims)
                found.append(Hook(block, lambda *tensors, site=site: run(site, *tensors), (site,)))
        return found

    return build


class Bound:
    """A module bound to a backend: calling it goes through the cache."""

    def __init__(self, module: nn.Module, backend: Backend, cache: GraphCache, hooks: HookBuilder | None) -> None:
        self.module = module
        self.cache = cache
        self.epoch = 1
        self.mode: Callable[[], Any] = torch.inference_mode  # how ComfyUI calls; older versions use no_grad
        capabilities = backend.probe("cpu")
        self.program = backend.bind(next(_owners), capabilities, hooks or hooks_of(module), cache.stats, cache.config)
        self._backend = backend.name

    def weights_moved(self) -> None:
        """What the adapter does when it finds other weights, or other patches of them: a new weights epoch."""
        self.epoch += 1

    def __call__(self, *tensors: torch.Tensor, **changes: Any) -> torch.Tensor:
        specs = tuple((f"input {i}", TensorSpec(tuple(t.shape), str(t.dtype), "cpu")) for i, t in enumerate(tensors))
        call = Call(
            key=GraphKey(Signature(specs), Role.UNET, "model", self._backend),
            tensors=list(tensors),
            invoke=lambda replaced: self.module(*replaced),
            device="cpu",
            epoch=self.epoch,
        )
        with self.mode():
            return self.cache.run(self.program, replace(call, **changes))

    def error(self, *tensors: torch.Tensor) -> float:
        """Relative error of a call against the module itself."""
        actual = self(*tensors)
        with self.mode():
            return relative_error(actual, self.module(*tensors))


class Rig:
    """A backend and a fresh cache with its own counters."""

    def __init__(self, backend: Backend, **config: Any) -> None:
        self.backend = backend
        self.cache = GraphCache(CacheConfig(**{"attribute_policy": ATTRIBUTES, **config}))

    def bind(self, module: nn.Module, hooks: HookBuilder | None = None) -> Bound:
        return Bound(module, self.backend, self.cache, hooks)

    @contextmanager
    def expect(self, bypasses: dict[str, int] | None = None, **counts: int) -> Iterator[None]:
        """Exactly these counts are added in the block; a counter or a bypass that is not named stays."""
        before = self.cache.stats.snapshot()
        yield
        after = self.cache.stats.snapshot()
        added = {name: after[name] - before[name] for name in COUNTED}
        assert added == {name: counts.get(name, 0) for name in COUNTED}, added
        reasons = {code: n - before["bypasses"].get(code, 0) for code, n in after["bypasses"].items()}
        assert {code: n for code, n in reasons.items() if n} == (bypasses or {})

    @property
    def details(self) -> list[str]:
        """The sentences of all bypasses so far."""
        return [event.text for event in self.cache.stats.events if event.kind == "bypass"]
