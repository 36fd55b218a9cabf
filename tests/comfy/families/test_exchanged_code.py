"""Code of core's that another pack exchanges between two prompts, or between two steps of one, takes effect at once.

Each exchange makes stock's result another one. Ours must be that one too, and the old one again afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from .kit import Bench, relative_error, run_traces
from .models import MODELS, Size

SIZE = Size(1, 8, 12, 7)
MMDIT = "comfy.ldm.modules.diffusionmodules.mmdit"
FLUX = "comfy.ldm.flux.model"
GAIN = 8.0


def kind(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def exchanged(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def louder(function: Any) -> Any:
    def gained(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * GAIN

    return gained


def a_method() -> Any:
    attention = kind(MMDIT, "SelfAttention")
    return exchanged(attention, "post_attention", louder(attention.post_attention))


@contextlib.contextmanager
def changed_source() -> Iterator[None]:
    """As packs do that patch core by its own text: the function has core's file, module and globals."""
    module, attention = importlib.import_module(MMDIT), kind(MMDIT, "SelfAttention")
    source = textwrap.dedent(inspect.getsource(attention.post_attention))
    assert "return x" in source
    made: dict[str, Any] = {}
    exec(compile(source.replace("return x", f"return x * {GAIN}"), module.__file__, "exec"), vars(module), made)  # type: ignore[arg-type]  # noqa: S102
    with exchanged(attention, "post_attention", made["post_attention"]):
        yield


@contextlib.contextmanager
def assigned_code() -> Iterator[None]:
    function: FunctionType = kind(MMDIT, "SelfAttention").post_attention
    before = function.__code__

    def post_attention(self: Any, x: Any) -> Any:
        return self.proj_drop(self.proj(x)) * 8.0

    function.__code__ = post_attention.__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextlib.contextmanager
def a_global_hook() -> Iterator[None]:
    def hook(module: Any, args: Any, result: Any) -> Any:
        return result * GAIN if type(module).__name__ == "Linear" else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def every_call() -> Any:
    own = torch.nn.Module._call_impl

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        return result * GAIN if type(self).__name__ == "Linear" else result

    return exchanged(torch.nn.Module, "_call_impl", calling)


def a_method_of_the_model() -> Any:
    flux = kind(FLUX, "Flux")
    own = flux.process_img

    def process_img(self: Any, *args: Any, **kwargs: Any) -> Any:
        img, *rest = own(self, *args, **kwargs)
        return (img * GAIN, *rest)

    return exchanged(flux, "process_img", process_img)


def a_function() -> Any:
    module = importlib.import_module("comfy.ldm.flux.layers")
    return exchanged(module, "apply_mod", louder(vars(module)["apply_mod"]))


class Louder:
    """An object in the place of a method, as a descriptor."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return louder(self._function.__get__(instance, owner))


class Proxy(Louder):
    """As wrapt's: it says that it is the function."""

    __class__ = property(lambda self: FunctionType)  # type: ignore[assignment]

    @property
    def __code__(self) -> Any:
        return self._function.__code__


def a_descriptor() -> Any:
    attention = kind(MMDIT, "SelfAttention")
    return exchanged(attention, "post_attention", Louder(attention.post_attention))


def a_proxy() -> Any:
    attention = kind(MMDIT, "SelfAttention")
    return exchanged(attention, "post_attention", Proxy(attention.post_attention))


def a_script() -> Any:
    """What torch compiles has no Python code of its own."""
    return exchanged(importlib.import_module(MMDIT), "modulate", torch.jit.script(scripted_modulate))


def scripted_modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift.unsqueeze(1), x, 8.0 + scale.unsqueeze(1))


def a_mock() -> Any:
    module = importlib.import_module(MMDIT)
    return exchanged(module, "modulate", Mock(side_effect=louder(vars(module)["modulate"])))


def a_method_of_torchs_tensor() -> Any:
    own = torch.Tensor.chunk

    @contextlib.contextmanager
    def added() -> Iterator[None]:
        torch.Tensor.chunk = lambda x, *args, **kwargs: own(x * GAIN, *args, **kwargs)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del torch.Tensor.chunk

    return added()


def attention() -> Any:
    """A trace has attention of ours in its place, also where the block then runs as it is."""
    ops = importlib.import_module("comfy.ops")
    return exchanged(ops, "scaled_dot_product_attention", louder(ops.scaled_dot_product_attention))


BETWEEN_PROMPTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a method": ("SD3.5", a_method),
    "changed source": ("SD3.5", changed_source),
    "assigned code": ("SD3.5", assigned_code),
    "a global hook": ("SD3.5", a_global_hook),
    "torch's way to call": ("SD3.5", every_call),
    "a descriptor": ("SD3.5", a_descriptor),
    "a proxy": ("SD3.5", a_proxy),
    "a script": ("SD3.5", a_script),
    "a mock": ("SD3.5", a_mock),
    "attention": ("SD3.5", attention),
    "a method of a tensor": ("SD3.5", a_method_of_torchs_tensor),
    "a method of the model": ("Flux", a_method_of_the_model),
    "a function": ("Flux", a_function),
}


class Prompts:
    """A model with and without Resolute, and prompts of one call each."""

    def __init__(self, core: SimpleNamespace, name: str) -> None:
        self.bench = Bench(core, MODELS[name])
        torch.manual_seed(1)
        self._given = self.bench.model.call(SIZE)
        self.weights = self.bench._forward.runner.weights

    def stock(self) -> torch.Tensor:
        result: torch.Tensor = self.bench.call(self._given)
        return result

    def step(self) -> torch.Tensor:
        with self.bench.compiled():
            result: torch.Tensor = self.bench.call(self._given)
        return result

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A sampling run."""
        self.bench._forward.begin()
        try:
            yield
        finally:
            self.bench._forward.end()

    def prompt(self) -> torch.Tensor:
        with self.run():
            return self.step()


@pytest.fixture
def prompts(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Prompts]:
    run_traces(core, monkeypatch)
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    return lambda name: Prompts(core, name)


@pytest.mark.parametrize("name", BETWEEN_PROMPTS)
def test_an_exchange_between_two_prompts_takes_effect(prompts: Callable[[str], Prompts], name: str) -> None:
    model, exchange = BETWEEN_PROMPTS[name]
    ours = prompts(model)
    before = ours.stock()
    assert relative_error(ours.prompt(), before) < 1e-4
    epoch = ours.weights.epoch
    assert ours.weights.blocker is None
    with exchange():
        expected = ours.stock()
        assert relative_error(expected, before) > 1e-3, "the exchange changes nothing"
        assert relative_error(ours.prompt(), expected) < 1e-4
        if name not in ("a global hook", "torch's way to call"):  # those make each call run eagerly
            assert ours.weights.epoch != epoch
            assert ours.weights.blocker is not None, "and it is not captured"
    assert relative_error(ours.prompt(), before) < 1e-4
    assert ours.weights.blocker is None


@pytest.mark.parametrize("where", ["an attribute", "an object"])
def test_a_function_that_a_part_of_the_model_keeps_may_be_another_packs(
    prompts: Callable[[str], Prompts], where: str
) -> None:
    """A pack wraps what a block calls by an attribute. Its name is the old one's, so no name tells."""
    ours = prompts("HiDream" if where == "an attribute" else "LTX")
    module = ours.bench.module
    before = ours.stock()
    assert relative_error(ours.prompt(), before) < 1e-4
    if where == "an attribute":
        holder = next(part for part in module.modules() if "processor" in vars(part))
        own = holder.processor
        change = functools.wraps(own.__call__)(lambda *args, **kwargs: [each * GAIN for each in own(*args, **kwargs)])
        exchange = exchanged_on(holder, "processor", change)
    else:
        exchange = exchanged_on(module.patchifier, "unpatchify", louder(module.patchifier.unpatchify))
    with exchange:
        expected = ours.stock()
        assert relative_error(expected, before) > 1e-3, "the exchange changes nothing"
        assert relative_error(ours.prompt(), expected) < 1e-4
        assert ours.weights.blocker is not None
    assert relative_error(ours.prompt(), before) < 1e-4
    assert ours.weights.blocker is None


@contextlib.contextmanager
def exchanged_on(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name) if before is None else setattr(holder, name, before)


def test_a_field_of_the_parameters_is_a_setting(prompts: Callable[[str], Prompts]) -> None:
    ours = prompts("Flux")
    ours.prompt()
    epoch, structure = ours.weights.epoch, ours.bench._forward.runner.facts()["structure"]
    params = ours.bench.module.params
    params.theta += 1
    try:
        ours.prompt()
        assert ours.weights.epoch != epoch, "a capture of before is not replayed"
        assert ours.bench._forward.runner.facts()["structure"] != structure
    finally:
        params.theta -= 1


def test_data_of_a_module_and_of_a_class_count(
    prompts: Callable[[str], Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = prompts("MiniMax H3")
    epochs = []
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr("comfy.ldm.minimax.model.FRAME_RESCALE", 2.5),
        lambda: monkeypatch.setattr(type(ours.bench.module), "some_setting", 3, raising=False),
    ):
        change()
        ours.weights.refresh(inspect_modules=True)
        epochs.append(ours.weights.epoch)
    assert len(set(epochs)) == len(epochs)
    assert ours.weights.blocker is None, "other data is no foreign code"


def test_of_comfys_utilities_only_those_that_compute_nothing_may_be_exchanged(
    prompts: Callable[[str], Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = importlib.import_module("comfy.utils")
    ours = prompts("Krea 2")
    ours.weights.refresh(inspect_modules=True)
    epoch = ours.weights.epoch
    for name in ("load_torch_file", "ProgressBar"):
        monkeypatch.setattr(utils, name, louder(vars(utils)[name]))
    ours.weights.refresh(inspect_modules=True)
    assert (ours.weights.epoch, ours.weights.blocker) == (epoch, None)
    monkeypatch.setattr(utils, "repeat_to_batch_size", louder(utils.repeat_to_batch_size))
    ours.weights.refresh(inspect_modules=True)
    assert ours.weights.epoch != epoch
    assert "repeat_to_batch_size" in ours.weights.blocker.detail


@pytest.mark.parametrize("name", MODELS)
def test_no_family_has_foreign_code_by_itself(core: SimpleNamespace, name: str) -> None:
    module = MODELS[name].network(MODELS[name].settings, "meta")
    assert foreign_code(core, {*map(type, module.modules())}) == []


def test_no_class_of_a_model_of_cores_has_foreign_code_by_itself(core: SimpleNamespace) -> None:
    """Every class of a Module in comfy.ldm that was imported: decoders, encoders and ControlNets among them."""
    names = [
        name
        for name in sys.modules
        if name.startswith(("comfy.ldm.", "comfy.cldm.", "comfy.t2i_adapter.", "comfy.ops"))
    ]
    kinds = {
        each
        for name in names
        for each in list(vars(sys.modules[name]).values())
        if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == name
    }
    assert len(kinds) > 300
    assert foreign_code(core, kinds) == []


def foreign_code(core: SimpleNamespace, kinds: set[type]) -> list[str]:
    pack = core.ours("blocks.families").__name__.partition(".nodes.")[0]
    reaches = importlib.import_module(f"{pack}.compile_cache.foreign.reach")
    reach = reaches.ReachCache(core.ours("foreign.model_code").MANAGEMENT_MODULES).of(kinds)
    assert not reach.has_changed()
    return list(reach.foreign)


class TestWithinARun:
    def test_a_setting_of_a_block_that_changes_between_two_steps_takes_effect(
        self, prompts: Callable[[str], Prompts]
    ) -> None:
        ours = prompts("SD3.5")
        norm = next(part for part in ours.bench.module.modules() if type(part).__name__ == "LayerNorm")
        with ours.run():
            before = ours.step()
            norm.eps, kept = 0.5, norm.eps
            expected = ours.stock()
            assert relative_error(expected, before) > 1e-3
            counted = self.bypasses(ours)
            for _ in range(2):
                assert relative_error(ours.step(), expected) < 1e-4
            assert self.bypasses(ours) == counted + 2
            norm.eps = kept
            assert relative_error(ours.step(), before) < 1e-4
            assert self.bypasses(ours) == counted + 2, "it runs compiled again"

    @pytest.mark.parametrize("how", ["forward", "another method", "hook", "part"])
    def test_a_part_that_is_patched_between_two_steps_takes_effect(
        self, prompts: Callable[[str], Prompts], how: str
    ) -> None:
        ours = prompts("SD3.5")
        part = next(each for each in ours.bench.module.modules() if type(each).__name__ == "SelfAttention")
        with ours.run():
            before = ours.step()
            with patched(part, how):
                expected = ours.stock()
                assert relative_error(expected, before) > 1e-3
                for _ in range(2):
                    assert relative_error(ours.step(), expected) < 1e-4
            assert relative_error(ours.step(), before) < 1e-4

    @pytest.mark.parametrize("how", ["function", "class", "torch"])
    def test_what_is_exchanged_for_everybody_between_two_steps_takes_effect(
        self, prompts: Callable[[str], Prompts], how: str
    ) -> None:
        """As a wrapper does that patches around some calls of a run."""
        ours = prompts("SD3.5")
        holder, name = {
            "function": (importlib.import_module(MMDIT), "modulate"),
            "class": (kind(MMDIT, "SelfAttention"), "post_attention"),
            "torch": (torch.nn.functional, "layer_norm"),
        }[how]
        with ours.run():
            before = ours.step()
            for _ in range(2):
                with exchanged(holder, name, louder(vars(holder)[name])):
                    expected = ours.stock()
                    assert relative_error(expected, before) > 1e-3
                    assert relative_error(ours.step(), expected) < 1e-4
                assert relative_error(ours.step(), before) < 1e-4

    def test_what_paging_adds_and_takes_away_is_no_change(self, prompts: Callable[[str], Prompts]) -> None:
        ours = prompts("SD3.5")
        linears = [part for part in ours.bench.module.modules() if type(part).__name__ == "Linear"]
        with ours.run():
            ours.step()
            counted = self.bypasses(ours)
            for step in range(3):
                for linear in linears:
                    linear._prefetch = {"step": step}
                    linear._v_weight = object()
                ours.step()
                for linear in linears:
                    del linear._prefetch, linear._v_weight
                ours.step()
            assert self.bypasses(ours) == counted

    @staticmethod
    def bypasses(ours: Prompts) -> int:
        return sum(ours.bench.stats.snapshot()["bypasses"].values())


@contextlib.contextmanager
def patched(part: Any, how: str) -> Iterator[None]:
    if how == "hook":
        handle = part.proj.register_forward_hook(lambda module, args, result: result * GAIN)
        yield
        handle.remove()
    elif how == "part":
        own = part.proj
        part.proj = torch.nn.Sequential(own, torch.nn.LeakyReLU(-8.0))
        yield
        part.proj = own
    else:
        holder, name = (part.proj, "forward") if how == "forward" else (part, "post_attention")
        setattr(holder, name, louder(getattr(holder, name)))
        yield
        delattr(holder, name)
