"""Run a small model with and without Resolute, in this process, and count."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .models import Arguments, Model, Size

TOLERANCE = 1e-4
COUNTED = ("region_compiles", "region_calls", "compile_failures", "eager_calls")


def run_traces(core: SimpleNamespace, monkeypatch: Any) -> None:
    """Run the traced graph of a region where inductor's code for it would run: lowering takes most of a compile.

    Without worker processes. Symbols, guards and comparisons stay what they are. `scripts/test --long` lowers too.
    """
    lowering = core.inside("backends.inductor.lower.lowering")
    region = core.inside("backends.inductor.lower.compiled_region").CompiledRegion

    def without_lowering(trace: Any, keep: bool = False) -> Any:
        def code(flat: list[torch.Tensor]) -> Any:
            with torch.no_grad():
                return trace.graph(*flat)

        guards = lowering._guards(trace, from_disk=False)
        return region(code, guards, trace.static, trace.used_weights, trace.output_spec, quantized=trace.quantized)

    monkeypatch.setattr(core.inside("backends.inductor.compiler.work"), "compile_trace", without_lowering)
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")


def full_device() -> Any:
    """tests/pack/full_device.py, without the pack, which needs a server."""
    path = Path(__file__).parents[2] / "pack" / "full_device.py"
    spec = importlib.util.spec_from_file_location("resolute_test_full_device", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def forget_regions(core: SimpleNamespace) -> None:
    """Drop all compiled regions of this process."""
    core.inside("backends.registry").get("inductor").table._regions.clear()


class CompiledMethod:
    """A method of a small module with Resolute in it, and what its calls count."""

    def __init__(self, core: SimpleNamespace, module: Any, method: str, role: Any, **settings: Any) -> None:
        """settings: of the compile request, beside its backend."""
        self._core = core
        self.module = module
        self._method = method
        compiled = core.ours("patch.compiled_forward").CompiledForward
        resolved = core.ours("process.compile_request").CompileRequest.resolved
        self._forward = compiled(module, getattr(module, method), resolved("inductor", "cpu", role, **settings))
        self.stats = core.ours("process.runtime").cache().stats

    @contextmanager
    def compiled(self) -> Iterator[None]:
        vars(self.module)[self._method] = self._forward
        try:
            yield
        finally:
            del vars(self.module)[self._method]

    def compare(self, call: Callable[[], Any], bypasses: dict[str, int] | None = None) -> dict[str, int]:
        """Compare a call with eager. Returns what was counted; with `bypasses` those are the only ones there may be."""
        expected = call()
        before = self.stats.snapshot()
        with self.compiled():
            actual = call()
        after = self.stats.snapshot()
        for ours, eager in zip(_tensors(actual), _tensors(expected), strict=True):
            assert relative_error(ours, eager) < TOLERANCE
        reasons = {code: n - before["bypasses"].get(code, 0) for code, n in after["bypasses"].items()}
        assert bypasses is None or {code: n for code, n in reasons.items() if n} == bypasses
        return {name: after[name] - before[name] for name in COUNTED}


class Bench(CompiledMethod):
    """A small model, and its forward with Resolute in it."""

    def __init__(self, core: SimpleNamespace, model: Model, **settings: Any) -> None:
        """settings: of the compile request, beside its backend."""
        self.model = model
        module = model.make()
        method = "_forward" if hasattr(module, "_forward") else "forward"
        super().__init__(core, module, method, core.roles.UNET, **settings)

    def formats(self) -> list[list[str]]:
        """The report's names of what computes the quantized weights: a list for this module and for each later one.

        Modules are numbered in the order of their first use. A count of rows would not tell which are new: the row of
        an earlier test's module goes whenever Python collects that module.
        """
        owner = self._core.ours("process.runtime").record_of(self.module).owner
        rows = self._core.ours("report.cache_report").report()["modules"]
        return [row["formats"] for row in rows if row["module"] >= owner]

    def begin_run(self) -> None:
        """Look at the model and its code as the first call of a sampling run does."""
        self._forward.runner.weights.refresh(inspect_modules=True)

    def call(self, given: Arguments, options: dict[str, Any] | None = None) -> Any:
        return call(self.module, given, options)

    def check(
        self, size: Size, options: dict[str, Any] | None = None, bypasses: dict[str, int] | None = None, **changes: Any
    ) -> dict[str, int]:
        """Compare one call with eager. Returns what was counted; `bypasses` are the only ones there may be."""
        torch.manual_seed(1)
        given = {**self.model.call(size), **changes}
        return self.compare(lambda: self.call(given, options), bypasses or {})

    def check_all(self, sizes: Iterable[Size], options: dict[str, Any] | None = None) -> None:
        """Each size gives eager's result and compiles nothing."""
        for size in sizes:
            assert self.check(size, options) == self.counts(), size

    def errors(self, reference: Any, sizes: Iterable[Size]) -> tuple[list[float], list[float]]:
        """The errors of compiled calls and of eager ones, against a network in full precision with the same weights."""
        ours, cores = [], []
        for size in sizes:
            given = self.model.call(size)
            exact = call(reference, given)
            cores.append(relative_error(self.call(given), exact))
            with self.compiled():
                ours.append(relative_error(self.call(given), exact))
        return ours, cores

    def counts(self, compiles: int = 0, calls: int | None = None) -> dict[str, int]:
        calls = self.model.calls if calls is None else calls
        return {"region_compiles": compiles, "region_calls": calls, "compile_failures": 0, "eager_calls": 0}


def call(module: Any, given: Arguments, options: dict[str, Any] | None = None) -> Any:
    """What ComfyUI does: it gives positional arguments by name, and its options."""
    first = inspect.signature(type(module).forward).parameters
    names = {"timestep": next(name for name in ("timestep", "timesteps", "t") if name in first)}
    given = {names.get(name, name): copied(value) for name, value in given.items()}
    with torch.inference_mode():
        return module(**given, transformer_options=dict(options or {}))


def copied(value: Any) -> Any:
    """With tensors of its own: blocks write to their inputs."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [copied(item) for item in value] if isinstance(value, list) else value


def _tensors(result: Any) -> list[torch.Tensor]:
    """A model of video and sound gives two."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def norm(errors: list[float]) -> float:
    return float(torch.tensor(errors).norm())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
