"""Code of ours that changes a model in the ways in which other packs do, and core's own compiler by its interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

GAIN = 1.2


def with_forward_for_each_call(model: Any, gain: float = GAIN) -> Any:
    """Exchanges `_forward` for the length of a call, as WaveSpeed's first block cache does."""
    clone = model.clone()
    network = clone.get_model_object("diffusion_model")
    own = type(network)._forward

    def cached_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) * gain

    def around(apply_model: Callable[..., Any], given: dict[str, Any]) -> Any:
        with mock.patch.object(network, "_forward", cached_forward.__get__(network)):
            return apply_model(given["input"], given["timestep"], **given["c"])

    clone.set_model_unet_function_wrapper(around)
    return clone


def with_answers_of_its_own(model: Any) -> Any:
    """Never calls the network: a step cache that is set too high."""

    def answer_for_model(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x * 0.5

    clone = model.clone()
    clone.add_wrapper("diffusion_model", answer_for_model)
    return clone


def with_some_steps_skipped(model: Any) -> Any:
    """Answers every second call itself, as step caches do."""
    calls = iter(range(1000))

    def answer_sometimes(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return x * 0.5 if next(calls) % 2 else executor(x, *args, **kwargs)

    clone = model.clone()
    clone.add_wrapper("diffusion_model", answer_sometimes)
    return clone


def with_compiled_network(model: Any) -> Any:
    """Puts what torch.compile makes of the network in its place, as WaveSpeed's and others' compile nodes do."""
    clone = model.clone()
    clone.add_object_patch("diffusion_model", Compiled(clone.get_model_object("diffusion_model")))
    return clone


def with_network_for_each_call(model: Any) -> Any:
    """Puts a compiled network in place for the length of a call, as KJNodes' TorchCompileModelAdvanced does."""
    clone = model.clone()
    network = clone.get_model_object("diffusion_model")
    compiled = Compiled(network)
    compiled.forward = lambda *args, **kwargs: type(network)._forward(network, *args, **kwargs)

    def swap_and_call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        base.diffusion_model = compiled
        try:
            return executor(*args, **kwargs)
        finally:
            base.diffusion_model = network

    clone.add_wrapper("apply_model", swap_and_call)
    return clone


def with_network_in_its_own_place(model: Any) -> Any:
    """Patches the network by itself, as WaveSpeed's compile node does while its compiler is disabled."""
    clone = model.clone()
    clone.add_object_patch("diffusion_model", clone.get_model_object("diffusion_model"))
    return clone


class Compiled(torch.nn.Module):
    """torch's OptimizedModule without the compiler: it runs code of its own, which no forward on the module changes.

    As there, `forward` is an attribute of the wrapper, and other attributes are the module's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.runs = 0
        self.forward = self._run

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["runs"] += 1
        return type(self.module).forward(self.module, *args, **kwargs)


def compile_decoder_in_place(vae: Any) -> Compiled:
    """Puts a wrapper around the decoder on the model itself, as KJNodes' TorchCompileVAE does."""
    vae.first_stage_model.decoder = Compiled(vae.first_stage_model.decoder)
    return vae.first_stage_model.decoder


class CoreCompiler:
    """Stands for `comfy.model_prefetch` and `comfy_aimdo.malloc_graph` of ComfyUI 0.39: begin, pause, end, per thread.

    It refuses what makes the real one crash: our capture or region while it records.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.events: list[str] = []
        self.module = ModuleType("comfy.model_prefetch")
        self.module.MALLOC_GRAPHS = {}  # type: ignore[attr-defined]

    def begin(self) -> None:
        """`malloc_graph_begin`: asks for the switch, then records."""
        if self.args.disable_comfy_compiler:
            self.events.append("off")
            return
        graph = self.module.MALLOC_GRAPHS.setdefault(threading.get_ident(), mock.Mock())
        graph._comfy_active = True
        self.events.append("begin")

    def end(self) -> None:
        """`malloc_graph_end`: does not ask for the switch."""
        graph = self.module.MALLOC_GRAPHS.get(threading.get_ident())
        if graph is not None and graph._comfy_active:
            graph._comfy_active = False
            self.events.append("end")

    @property
    def is_recording(self) -> bool:
        graph = self.module.MALLOC_GRAPHS.get(threading.get_ident())
        return graph is not None and bool(graph._comfy_active)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """`malloc_graph_scope`."""
        self.begin()
        try:
            yield
        finally:
            self.end()
