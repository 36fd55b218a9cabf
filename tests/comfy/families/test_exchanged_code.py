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


@contextlib.contextmanager
def a_hook(module: Any) -> Iterator[None]:
    handle = attention_of(module).proj.register_forward_hook(lambda module, args, result: result * GAIN)
    yield
    handle.remove()


def attention_of(module: Any) -> Any:
    return next(part for part in module.modules() if type(part).__name__ == "SelfAttention")


def a_part(module: Any) -> Any:
    part = attention_of(module)
    return exchanged_on(part, "proj", torch.nn.Sequential(part.proj, torch.nn.LeakyReLU(-8.0)))


def a_kept_function(module: Any) -> Any:
    """A pack wraps what a block calls by an attribute. Its name is the old one's, so no name tells."""
    holder = next(part for part in module.modules() if "processor" in vars(part))
    own = holder.processor
    change = functools.wraps(own.__call__)(lambda *args, **kwargs: [each * GAIN for each in own(*args, **kwargs)])
    return exchanged_on(holder, "processor", change)


def on_a_part(name: str, method: str) -> Callable[[Any], Any]:
    def exchange(module: Any) -> Any:
        part = attention_of(module).get_submodule(name)
        return exchanged_on(part, method, louder(getattr(part, method)))

    return exchange


def for_everybody(holder: Any, name: str) -> Any:
    return exchanged(holder, name, louder(vars(holder)[name]))


EAGER = ("a global hook", "torch's way to call")  # each call runs eagerly meanwhile
TORCHS = ("a part",)  # no foreign code: it may be captured
LATE = ("assigned code",)  # is seen when the next run begins
EXCHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a method": ("SD3.5", lambda _: for_everybody(kind(MMDIT, "SelfAttention"), "post_attention")),
    "a function of its file": ("SD3.5", lambda _: for_everybody(importlib.import_module(MMDIT), "modulate")),
    "a function of torch": ("SD3.5", lambda _: for_everybody(torch.nn.functional, "layer_norm")),
    "changed source": ("SD3.5", lambda _: changed_source()),
    "assigned code": ("SD3.5", lambda _: assigned_code()),
    "a global hook": ("SD3.5", lambda _: a_global_hook()),
    "torch's way to call": ("SD3.5", lambda _: every_call()),
    "a descriptor": ("SD3.5", lambda _: a_descriptor()),
    "a proxy": ("SD3.5", lambda _: a_proxy()),
    "a script": ("SD3.5", lambda _: a_script()),
    "a mock": ("SD3.5", lambda _: a_mock()),
    "attention": ("SD3.5", lambda _: attention()),
    "a method of a tensor": ("SD3.5", lambda _: a_method_of_torchs_tensor()),
    "a method of the model": ("Flux", lambda _: a_method_of_the_model()),
    "a function": ("Flux", lambda _: for_everybody(importlib.import_module("comfy.ldm.flux.layers"), "apply_mod")),
    "a function in an attribute": ("HiDream", a_kept_function),
    "a function of an object": (
        "LTX", lambda module: exchanged_on(module.patchifier, "unpatchify", louder(module.patchifier.unpatchify))
    ),
    "a part's forward": ("SD3.5", on_a_part("proj", "forward")),
    "a part's method": ("SD3.5", on_a_part("", "post_attention")),
    "a part's hook": ("SD3.5", a_hook),
    "a part": ("SD3.5", a_part),
}  # fmt: skip


@contextlib.contextmanager
def exchanged_on(holder: Any, name: str, value: Any) -> Iterator[None]:
    """On one object, which may have it from its class."""
    is_its_own, before = name in vars(holder), getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before) if is_its_own or name == "proj" else delattr(holder, name)


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


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_between_two_prompts_takes_effect(prompts: Callable[[str], Prompts], name: str) -> None:
    model, exchange = EXCHANGES[name]
    ours = prompts(model)
    before = ours.stock()
    assert relative_error(ours.prompt(), before) < 1e-4
    epoch = ours.weights.epoch
    assert ours.weights.blocker is None
    with exchange(ours.bench.module):
        expected = ours.stock()
        assert relative_error(expected, before) > 1e-3, "the exchange changes nothing"
        assert relative_error(ours.prompt(), expected) < 1e-4
        if name not in EAGER:
            assert ours.weights.epoch != epoch
            assert (ours.weights.blocker is None) == (name in TORCHS), "and it is not captured"
    assert relative_error(ours.prompt(), before) < 1e-4
    assert ours.weights.blocker is None


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name not in LATE])
def test_an_exchange_between_two_steps_takes_effect(prompts: Callable[[str], Prompts], name: str) -> None:
    """As a wrapper does that patches around some calls of a run."""
    model, exchange = EXCHANGES[name]
    ours = prompts(model)
    with ours.run():
        before = ours.step()
        for _ in range(2):
            with exchange(ours.bench.module):
                expected = ours.stock()
                assert relative_error(expected, before) > 1e-3, "the exchange changes nothing"
                for _ in range(2):
                    assert relative_error(ours.step(), expected) < 1e-4
            assert relative_error(ours.step(), before) < 1e-4


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
    reaches = importlib.import_module(f"{pack}.compile_cache.code_identity.reach")
    reach = reaches.ReachCache(core.ours("trust.model_code").MANAGEMENT_MODULES).of(kinds)
    assert not reach.change()
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
