"""What a forward makes on the host and copies to the device is copied once. The device "meta" is in the GPU's place:
it has no values, so whatever reads one fails, as it would inside a capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache.backends.cuda_graphs import capture as capturing
from compile_cache.backends.cuda_graphs.host_constants import HostConstants, Run
from compile_cache.errors import CaptureError

Forward = Callable[[Sequence[torch.Tensor]], Any]
STORED = torch.arange(6.0)


class HostCopies(TorchDispatchMode):
    """Counts the operators that read a host tensor on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_flatten((args, kwargs or {}))[0]
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        if torch.device("cpu") in devices and len(devices) > 1:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def on_device(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def copies_in_capture(forward: Forward, tensors: Sequence[torch.Tensor], module: Any = None) -> tuple[list[str], Run]:
    """The host copies that are left after a rehearsal, in a run as inside a capture."""
    constants = HostConstants(module)
    with torch.inference_mode(), constants.observed(tensors, makes=True) as made:
        forward(tensors)
    with HostCopies() as copies, torch.inference_mode(), constants.observed(tensors, is_capturing=True) as run:
        forward(tensors)
    del made
    return copies.found, run


MADE_IN_THE_CALL: dict[str, Forward] = {
    "arange": lambda given: torch.arange(given[0].shape[0]).to(given[0]),
    "a calculation": lambda given: torch.exp(-torch.arange(0, 8) / 8).to(given[0].device) * given[0].sum(),
    "numbers": lambda given: given[0] * torch.tensor([1, 2.0, 3, 4], device=given[0].device),
    "one number": lambda given: given[0] * torch.tensor(3.0, device="meta"),
    "new_tensor": lambda given: given[0] * given[0].new_tensor([1, 2, 3, 4]),
    "as_tensor": lambda given: given[0] * torch.as_tensor([1, 2, 3, 4], device="meta"),
    "an index": lambda given: given[0][:, torch.arange(12).view(3, 4)[1:3, 1:3].flatten() % 4],
    "a copy in place": lambda given: torch.empty(4, device="meta").copy_(torch.arange(4)),
    "written parts": lambda given: _filled().to("meta", torch.bfloat16) + 1,
    "cuda(), non_blocking": lambda given: torch.arange(4).to("meta", non_blocking=True),
}


def _filled() -> torch.Tensor:
    grid = torch.zeros(4, 2)
    grid[:, 0] = torch.arange(4)
    grid[1:, 1].fill_(3)
    return grid


@pytest.mark.parametrize("forward", MADE_IN_THE_CALL.values(), ids=MADE_IN_THE_CALL)
def test_what_a_call_makes_is_not_copied_again(forward: Forward) -> None:
    found, run = copies_in_capture(forward, [on_device(5, 4)])
    assert found == []
    assert len(run.used) == 1
    assert (run.missing, run.has_foreign) == ([], False)


MADE_ELSEWHERE: dict[str, Forward] = {
    "stored": lambda given: STORED.to(given[0]),
    "made of stored ones": lambda given: (torch.arange(6) + STORED).to(given[0]),
    "written with stored ones": lambda given: _written_with(STORED).to(given[0]),
    "random": lambda given: torch.randn(4).to(given[0]),
    "random in place": lambda given: torch.zeros(4).uniform_().to(given[0]),
}


def _written_with(other: torch.Tensor) -> torch.Tensor:
    grid = torch.zeros(4, 6)
    grid[1] = other
    return grid[2]


@pytest.mark.parametrize("forward", MADE_ELSEWHERE.values(), ids=MADE_ELSEWHERE)
def test_what_a_call_did_not_make_is_no_constant(forward: Forward) -> None:
    _, run = copies_in_capture(forward, [on_device(5, 4)])
    assert run.has_foreign
    assert not run.used


def test_an_input_on_the_host_forbids_constants() -> None:
    # `tolist` reads it unseen.
    given = [on_device(4), torch.tensor([2.0, 3.0])]
    _, run = copies_in_capture(lambda tensors: torch.tensor(tensors[1].tolist()).to("meta"), given)
    assert run.has_foreign


def test_a_kept_result_is_made_anew() -> None:
    class Part(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + frequencies(4).to(x)

    part = Part()
    frequencies(4)
    found, run = copies_in_capture(lambda tensors: part(tensors[0]), [on_device(4)], part)
    assert (found, run.has_foreign, len(run.used)) == ([], False, 1)


@functools.lru_cache(maxsize=5)
def frequencies(count: int) -> torch.Tensor:
    return torch.linspace(0, 1, count)


def test_the_values_and_their_form_are_those_of_the_host() -> None:
    # A second device without values cannot show that, so look at the copies themselves.
    constants = HostConstants(None)
    value = torch.arange(6.0).view(2, 3).t()
    (copy,) = constants.add([(torch.device("cpu"), value)])
    assert constants.find(torch.device("cpu"), value.clone()) is copy
    assert torch.equal(copy, value)
    assert copy.stride() == value.stride()
    for other in (value + 1, value.contiguous(), value.double(), value[:1], -0.0 * value):
        assert constants.find(torch.device("cpu"), other) is None


def test_the_forward_writes_to_a_clone() -> None:
    results = []

    def forward(given: Sequence[torch.Tensor]) -> None:
        results.append(torch.arange(4).to(given[0]).mul_(2))

    _, run = copies_in_capture(forward, [on_device(4)])
    assert all(result is not kept for result in results for kept in run.used.values())


def test_a_copy_lives_as_long_as_something_has_it() -> None:
    constants = HostConstants(None)
    value = torch.arange(3)
    copies = constants.add([(torch.device("meta"), value)])
    assert constants.find(torch.device("meta"), value) is not None
    del copies
    assert constants.find(torch.device("meta"), value) is None


# --- the rehearsal and the capture ----------------------------------------------------------------------------------


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Forward], Any]:
    """Rehearse on "meta", where a wait for the GPU is a host copy that is left."""

    copies = HostCopies()

    def waits_of(run: Callable[[], object]) -> list[str]:
        copies.found.clear()
        run()
        return list(copies.found)

    monkeypatch.setattr(capturing, "waits_of", waits_of)

    def rehearsed(forward: Forward, module: torch.nn.Module | None = None) -> Any:
        with copies:
            return capturing._rehearse(forward, [on_device(5, 4)], module)

    return rehearsed


def test_a_forward_that_does_not_wait_is_rehearsed_once(rehearse: Any) -> None:
    calls = []
    assert rehearse(lambda given: calls.append(1))[0] is None
    assert len(calls) == 1


def test_a_forward_that_only_copies_what_it_makes_can_be_captured(rehearse: Any) -> None:
    constants, made = rehearse(MADE_IN_THE_CALL["an index"])
    assert constants is not None
    assert len(made.used) == 1


def test_a_value_that_changes_from_run_to_run_forbids_the_capture(rehearse: Any) -> None:
    steps = iter(range(100))
    with pytest.raises(CaptureError, match=r"shape \(4,\).* differs between two runs"):
        rehearse(lambda given: torch.full((4,), next(steps)).to(given[0]))


def test_another_wait_forbids_the_capture(rehearse: Any) -> None:
    def forward(given: Sequence[torch.Tensor]) -> None:
        MADE_IN_THE_CALL["arange"](given)
        STORED.to(given[0])

    with pytest.raises(CaptureError, match=r"it did not make|waits for the GPU"):
        rehearse(forward)
    with pytest.raises(CaptureError, match="waits for the GPU"):
        rehearse(MADE_ELSEWHERE["stored"])


class Reused(torch.nn.Module):
    """Uses in each call what the call before made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = getattr(self, "before", x)
        self.before = x * 2
        return x + before


def test_a_forward_that_keeps_a_tensor_for_its_next_call_forbids_the_capture(rehearse: Any) -> None:
    module = Reused()
    with pytest.raises(CaptureError, match=r"it keeps a tensor as Reused\.before, which a later call may read"):
        rehearse(lambda given: module(given[0]), module)


def test_a_capture_of_another_shape_makes_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Graph] = []

    class Graph:
        was_reset = False

        def reset(self) -> None:
            self.was_reset = True

    def capture(invoke: Forward, inputs: list[torch.Tensor], outputs: Any, pool: Any) -> Graph:
        copies.found.clear()
        invoke(inputs)
        assert copies.found == []
        graphs.append(Graph())
        return graphs[-1]

    monkeypatch.setattr(capturing, "_capture_on_current_stream", capture)
    constants, copies = HostConstants(None), HostCopies()

    def make(forward: Forward) -> Any:
        graphs.clear()
        with copies:
            return capturing._capture_with_constants(forward, [on_device(7, 4)], [], None, constants)

    graph, run = make(MADE_IN_THE_CALL["arange"])
    assert [each.was_reset for each in graphs] == [True, False]
    assert graph is graphs[1]
    assert make(MADE_IN_THE_CALL["arange"])[0] is graphs[0]  # the run keeps the copies
    assert len(run.used) == 1
    steps = iter(range(100))
    with pytest.raises(CaptureError, match="differs between two runs"):
        make(lambda given: torch.full((4,), next(steps)).to(given[0]))
    with pytest.raises(CaptureError, match="did not make"):
        make(MADE_ELSEWHERE["stored"])
    assert [each.was_reset for each in graphs] == [True]
