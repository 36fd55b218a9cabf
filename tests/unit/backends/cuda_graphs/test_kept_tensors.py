"""Tensors that a forward keeps on its modules: put back if nobody reads them, refused if the model's code may."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_cache.backends.cuda_graphs.kept_tensors import forbid_retained_reads, restore_attributes
from compile_cache.errors import CaptureError

from ....programs import python_calls


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


# In a variable, because no code of this file may read the attribute.
EMBEDDING = "logged_embedding"


class Logging(torch.nn.Module):
    """Writes attributes and reads none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last_size: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.logged_embedding = x * 2
        self.logged_numbers = {"doubled": [self_made := x * 3]}
        self.last_size = tuple(x.shape)
        return self_made


class ByName(Logging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        earlier = getattr(self, "kept_by_name", x)
        self.kept_by_name = x * 2
        return x + earlier


class InAList(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.kept_list: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept_list.append(x * 2)
        return x


class Decorated(Logging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept_decorated = x * 2
        return x

    @passed_on
    def later(self) -> torch.Tensor:
        return self.kept_decorated + 1


class InAHelper(Logging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept_for_helper = x * 2
        return x


def helper(module: InAHelper) -> torch.Tensor:
    return module.kept_for_helper


def around(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Identity(), module)


class Caching(torch.nn.Module):
    """A method of it keeps its last results, as that of Chroma Radiance's positions does."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def positions(self, count: int) -> torch.Tensor:
        return torch.arange(count) * 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions(len(x))


X = torch.ones(3)


class TestPutBack:
    def test_a_module_has_what_it_had_and_no_tensor_of_the_call_lives(self) -> None:
        module = Logging()
        model = around(module)
        model(X)
        before = dict(vars(module))
        made: list[weakref.ref[torch.Tensor]] = []
        with restore_attributes(model):
            model(X + 1)
            made.append(weakref.ref(vars(module)[EMBEDDING]))
        after = vars(module)
        assert {name for name in before if after[name] is not before[name]} <= {"calls", "last_size"}
        assert made[0]() is None

    def test_an_attribute_that_was_not_there_is_gone_and_numbers_stay_as_the_call_left_them(self) -> None:
        module = Logging()
        with restore_attributes(module):
            module(X)
        assert EMBEDDING not in vars(module)
        assert (module.calls, module.last_size) == (1, (3,))

    @pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
    def test_an_error_holds_the_tensors_and_a_cancel_does_not(self, error: BaseException) -> None:
        module = Logging()
        made: list[weakref.ref[torch.Tensor]] = []

        def call() -> None:
            with restore_attributes(module):
                module(X)
                made.append(weakref.ref(vars(module)[EMBEDDING]))
                raise error

        with pytest.raises(type(error)):
            call()
        assert EMBEDDING not in vars(module)
        assert (made[0]() is not None) is isinstance(error, Exception)

    @pytest.mark.parametrize("error", [None, RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
    def test_a_cache_of_a_method_is_made_anew_and_keeps_nothing_of_the_call(self, error: BaseException | None) -> None:
        module = Caching()
        module(X)
        earlier, made = module.positions(3), list[weakref.ref[torch.Tensor]]()

        def call() -> None:
            with restore_attributes(module):
                module(X)
                made.append(weakref.ref(module.positions(3)))
                assert made[0]() is not earlier
                if error is not None:
                    raise error

        with contextlib.nullcontext() if error is None else pytest.raises(type(error)) as caught:
            call()
        assert Caching.positions.cache_info().currsize == 0
        assert (made[0]() is not None) is isinstance(error, Exception)
        del caught

    def test_without_a_module_nothing_happens(self) -> None:
        with restore_attributes(None), forbid_retained_reads(None):
            pass


class TestRefusedIfRead:
    def test_what_nobody_reads_is_no_reason(self) -> None:
        model = around(Logging())
        with forbid_retained_reads(model):
            model(X)

    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (ByName, "kept_by_name"),
            (InAList, "kept_list"),
            (Decorated, "kept_decorated"),
            (InAHelper, "kept_for_helper"),
        ],
    )
    def test_what_the_code_may_read_is(self, kind: type[Logging], name: str) -> None:
        model = around(kind())

        def call() -> None:
            with forbid_retained_reads(model):
                model(X)

        with pytest.raises(CaptureError, match=rf"{kind.__name__}\.{name}, which a later call may read"):
            call()

    def test_what_an_earlier_call_made_once_is_no_reason(self) -> None:
        module = InAList()
        module(X)
        with forbid_retained_reads(module):
            _ = [each + 1 for each in module.kept_list]


class Pinned(Logging):
    """A module with what DynamicVRAM gives all modules: one dictionary with an entry for each of them."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__()
        self._pins = {"pin": torch.empty(0), "entry": [0, len(shared["stack"]), self]}
        self._pin_state = shared
        shared["stack"].append((self, 0))
        shared["buckets"].setdefault(64, []).append(self._pins["entry"])


class TestWhatAllModulesShare:
    @pytest.mark.parametrize("around_call", [restore_attributes, forbid_retained_reads])
    def test_is_looked_at_once(self, around_call: Any) -> None:
        def calls(modules: int) -> int:
            shared: dict[str, Any] = {"stack": [], "buckets": {}, "failed": False}
            model = torch.nn.Sequential(*(Pinned(shared) for _ in range(modules)))

            def look() -> None:
                with around_call(model):
                    pass

            return python_calls(look)

        few, many = calls(25), calls(100)
        assert few < many < 5 * few

    def test_counts_as_kept_if_the_call_adds_a_tensor_to_it(self) -> None:
        shared: dict[str, Any] = {"stack": [], "buckets": {}, "itself": []}
        shared["itself"].append(shared)
        model = torch.nn.Sequential(*(Pinned(shared) for _ in range(3)))
        kept = pytest.raises(CaptureError, match=r"Pinned\._pin_state, which a later call may read")
        with kept, forbid_retained_reads(model):
            shared["buckets"][64].append(X * 2)
        _ = model[0]._pin_state  # so that this file reads it
