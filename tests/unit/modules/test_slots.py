"""Exchanging entries of modules' dictionaries: inside they are as given, afterwards exactly as before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from compile_cache.modules.region_weights import weight_inputs, weight_slots, weights_from_inputs
from compile_cache.modules.site import Hook, installed
from compile_cache.modules.slots import all_parts, swapped, tensor_slots


def test_inside_the_values_are_there_and_afterwards_what_was_before() -> None:
    own: dict[str, Any] = {"a": 1, "b": 2}
    with swapped([(own, "a", 3), (own, "new", 4)]):
        assert own == {"a": 3, "b": 2, "new": 4}
    assert list(own.items()) == [("a", 1), ("b", 2)]


def test_none_is_a_value_and_not_an_absent_one() -> None:
    own: dict[str, Any] = {"bias": None}
    with swapped([(own, "bias", 1)]):
        pass
    assert own == {"bias": None}


def test_of_a_slot_that_is_named_twice_the_later_value_counts() -> None:
    own: dict[str, Any] = {"a": 1}
    with swapped([(own, "a", 2), (own, "new", 3), (own, "a", 4), (own, "new", 5)]):
        assert own == {"a": 4, "new": 5}
    assert own == {"a": 1}


def test_swaps_nest() -> None:
    own: dict[str, Any] = {"a": 1}
    with swapped([(own, "a", 2)]):
        with swapped([(own, "a", 3), (own, "new", 3)]):
            assert own == {"a": 3, "new": 3}
        assert own == {"a": 2}
    assert own == {"a": 1}


def test_it_restores_after_an_error_in_the_body() -> None:
    own: dict[str, Any] = {"a": 1}
    with pytest.raises(KeyboardInterrupt), swapped([(own, "a", 2), (own, "new", 3)]):
        raise KeyboardInterrupt
    assert own == {"a": 1}


def test_what_the_body_puts_into_a_slot_is_dropped_and_what_it_puts_elsewhere_stays() -> None:
    own: dict[str, Any] = {"a": 1, "b": 1}
    with swapped([(own, "a", 2), (own, "b", 2), (own, "new", 2)]):
        own["a"] = own["other"] = 3
        del own["b"], own["new"]
    assert own == {"a": 1, "b": 1, "other": 3}


def test_values_that_cannot_be_made_change_nothing() -> None:
    own: dict[str, Any] = {"a": 1}

    def values() -> Any:
        yield own, "a", 2
        raise ValueError("no second value")

    with pytest.raises(ValueError, match="no second value"), swapped(values()):
        raise AssertionError("the body ran")
    assert own == {"a": 1}


def test_a_value_that_a_dictionary_refuses_leaves_none_exchanged() -> None:
    class Refusing(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            if value == "refused":
                raise TypeError("refused")
            super().__setitem__(name, value)

    own, refusing = {"a": 1}, Refusing(b=1)
    with pytest.raises(TypeError, match="refused"), swapped([(own, "a", 2), (refusing, "b", "refused")]):
        raise AssertionError("the body ran")
    assert (own, refusing) == ({"a": 1}, {"b": 1})


def test_of_two_hooks_for_one_module_the_first_counts_and_another_packs_forward_stays() -> None:
    mine, others = torch.nn.Identity(), torch.nn.Identity()
    others.forward = lambda x: "theirs"  # type: ignore[method-assign,assignment]
    hooks = [Hook(module, functools.partial(lambda name, x: name, name)) for name in "ab" for module in (mine, others)]
    with installed(hooks):
        assert (mine(0), others(0)) == ("a", "theirs")
    assert "forward" not in vars(mine)
    assert others(0) == "theirs"


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.left_out = (torch.nn.Linear(2, 2) for _ in range(3))
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def test_each_weight_is_one_input_parameters_first_and_a_tied_one_is_given_everywhere() -> None:
    module = Tied()
    slots = weight_slots(module, ("left_out",))
    assert [name for _, name in slots] == ["weight", "bias", "bias", "scale"]
    before = {name: id(own[name]) for part in module.modules() for own, name in tensor_slots(part)}
    given = [torch.full_like(weight, 2.0) for weight in weight_inputs(slots)]
    with weights_from_inputs(module, ("left_out",), given):
        assert module.second.weight is module.first.weight is given[0]
        assert torch.equal(module(torch.ones(2)), torch.tensor([52.0, 52.0]))
    assert {name: id(own[name]) for part in module.modules() for own, name in tensor_slots(part)} == before


def test_every_weight_needs_an_input() -> None:
    module = Tied()
    with pytest.raises(ValueError, match="shorter"), weights_from_inputs(module, (), [torch.ones(2, 2)]):
        raise AssertionError("the body ran")
    assert module.first.weight is module.second.weight


def test_all_parts_are_those_of_torch_in_its_order_and_by_its_names() -> None:
    shared = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    model = torch.nn.Sequential(shared, torch.nn.ModuleDict({"a": shared[0], "b": torch.nn.Sequential(shared)}), shared)
    model.register_module("none", None)
    model[1]["b"].register_module("back", model)  # a circle
    model.add_module("scripted", torch.jit.script(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    assert [(name, part) for part, name in all_parts(model).items()] == list(model.named_modules())
