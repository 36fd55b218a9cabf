"""What stands where a module's forward stood: whose code it calls, and what it keeps alive."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def _forward(self, x: torch.Tensor, timesteps: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return x * self.scale


class PatchedByAPack(Model):
    pass


def of_a_pack(self: Model, x: torch.Tensor, timesteps: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
    return x


PatchedByAPack._forward = types.FunctionType(  # type: ignore[method-assign]  # as written in another file
    of_a_pack.__code__, {**globals(), "__name__": "some_pack.speed"}, "_forward"
)

X, T = torch.ones(1, 4, 2, 2), torch.ones(1)


@pytest.fixture
def compiled(adapter: Callable[[str], ModuleType], comfy: None) -> Callable[..., Any]:
    forward = adapter("patch.compiled_forward").CompiledForward
    role = adapter("patch.compiled_forward").Role.UNET
    request = adapter("process.compile_request").CompileRequest.resolved("eager", "cpu", role)
    return lambda module, inner: forward(module, inner, request)


def blocker(forward: Any) -> Any:
    return forward.describe((X, T), {"transformer_options": {}})[0].policy.reason


def test_a_models_own_forward_may_be_captured(compiled: Callable[..., Any]) -> None:
    model = Model()
    forward = compiled(model, model._forward)
    assert blocker(forward) is None
    assert torch.equal(forward(X, T), X * 2)


def test_a_node_forgets_what_it_said_of_another_workflow_also_where_nothing_is_compiled(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of two workflows may have one id: a decoder's node said how long an encoder took in the one before."""
    model, shown = Model(), list[str]()
    progress = compiled(model, model._forward).runner.progress
    texts = sys.modules[type(progress).__module__]
    monkeypatch.setattr(texts, "show_on_node", lambda text, node_id, workflow: shown.append(text))
    progress.node_id, progress._doing = "8", "encoding"
    progress.show_result("64x64: ran uncompiled, 0.25 s")
    forward = compiled(model, model._forward)
    forward.runner.progress.node_id = "8"
    forward.count_regions()
    forward.runner.progress.show_result("72x64: ran uncompiled, 0.24 s")
    assert shown[-1] == "72x64: ran uncompiled, 0.24 s"


def test_a_call_does_not_wait_for_a_backend_that_starts_where_it_compiles_behind_the_picture(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    forward = compiled(model, model._forward)
    runner = forward.runner
    runner._background_compile = True
    with monkeypatch.context() as starting:
        starting.setattr(type(runner._request.backend), "is_starting", True)
        assert torch.equal(forward(X, T), X * 2)
        assert runner._programs == {}
        starting.setattr(sys.modules[type(runner).__module__].runs, "is_warm_up_prompt", lambda: True)
        assert torch.equal(forward(X, T), X * 2)
    assert runner._programs, "a warm-up waits"


def test_a_module_with_torchs_own_forward_may_be_captured(compiled: Callable[..., Any]) -> None:
    class Decoder(nn.Sequential):
        pass

    decoder = Decoder(nn.ReLU())
    assert compiled(decoder, decoder.forward).describe((X,), {})[0].policy.reason is None


def test_the_forward_of_another_pack_runs_and_is_not_captured(compiled: Callable[..., Any]) -> None:
    # TeaCache and its like decide anew in each step; a capture would repeat the first decision for ever.
    model = Model()
    forward = compiled(model, lambda *args, **kwargs: args[0] * 3)
    assert "another pack" in str(blocker(forward))
    assert torch.equal(forward(X, T), X * 3)


def test_the_forward_of_another_pack_gets_its_arguments_by_place_as_they_came(compiled: Callable[..., Any]) -> None:
    model = Model()
    forward = compiled(model, lambda *args, **kwargs: (args[0] * args[1], sorted(kwargs)))
    answer, by_name = forward(X, T * 3, transformer_options={})
    assert torch.equal(answer, X * 3)
    assert by_name == ["transformer_options"]
    in_place, by_name = compiled(model, lambda *args, **kwargs: (len(args), list(kwargs)))(X, T, {})
    assert (in_place, by_name) == (3, [])


def test_a_model_whose_forward_names_no_argument_runs(compiled: Callable[..., Any]) -> None:
    class Unnamed(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] * args[1] + kwargs["more"]

    model = Unnamed()
    assert torch.equal(compiled(model, model.forward)(X, T * 3, more=T), X * 4)


def test_a_sampling_run_looks_closely_at_the_model_once(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    forward = compiled(model, model._forward)
    looks: list[bool] = []
    refresh = forward.runner.weights.refresh

    def watched(inspect_modules: bool = False) -> bool:
        looks.append(refresh(inspect_modules))
        return looks[-1]

    monkeypatch.setattr(forward.runner.weights, "refresh", watched)

    def run() -> int:
        looks.clear()
        forward.weights_detached(unpatched=False)  # core does both, though the weights stay where they are
        forward.weights_loaded()
        forward.begin()
        for _ in range(3):
            forward(X, T, transformer_options={})
        forward.end()
        return sum(looks)

    assert [run(), run()] == [1, 1]
    looks.clear()
    forward.weights_detached(unpatched=True)  # unloaded, though it may stay where it is: stale captures go at once
    assert looks == [True]
    forward.weights_detached(unpatched=False)  # the only event for a model without sampling runs, such as a ControlNet
    looks.clear()
    for _ in range(3):
        forward(X, T, transformer_options={})
    assert sum(looks) == 1
    forward.begin()
    forward.weights_loaded()  # more of it, in the middle of a run
    looks.clear()
    forward(X, T, transformer_options={})
    assert sum(looks) == 1
    forward.end()


def test_what_another_node_does_before_the_first_call_of_a_run_is_seen(compiled: Callable[..., Any]) -> None:
    model = Model()
    model.child = nn.Identity()
    forward = compiled(model, model._forward)
    forward.begin()
    model.child.register_forward_hook(lambda *_: None)
    forward(X, T, transformer_options={})
    assert "another pack" in str(forward.runner.weights.blocker)
    forward.end()


@pytest.fixture
def captured(
    compiled: Callable[..., Any], adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Model, list[str]]]:
    """A forward whose calls are captured and replayed, its model, and what happens: runs, replays and close looks."""
    happened: list[str] = []
    base = adapter("patch.module_runner").Program

    class Graph:
        bytes = 1

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def replay(self, tensors: Any) -> torch.Tensor:
            happened.append("replay")
            return tensors[0] * self.factor

        def close(self) -> None: ...

    class Captures(base):  # type: ignore[misc, valid-type]
        def run(self, call: Any) -> Any:
            happened.append("run")
            return call.invoke(call.tensors)

        def capture(self, call: Any, result: Any, memory: Any) -> Graph:
            return Graph(float(result.flatten()[0] / X.flatten()[0]))

    model = Model()
    model.child = nn.Identity()
    forward = compiled(model, model._forward)
    can = type(forward.runner.program("cpu")[0].capabilities)(available=True, compiles=True, captures=True)
    forward.runner._programs["cpu"] = (Captures(forward.runner.owner, can), "captures")
    refresh = forward.runner.weights.refresh

    def watched(inspect_modules: bool = False) -> bool:
        looked: bool = refresh(inspect_modules)
        happened.extend(["look"] if looked else [])
        return looked

    monkeypatch.setattr(forward.runner.weights, "refresh", watched)
    with torch.inference_mode():
        forward.begin()
        assert torch.equal(forward(X, T), X * 2)
        forward.end()
        assert happened == ["look", "run"]
        happened.clear()
        yield forward, model, happened


def test_a_replay_starts_before_the_model_is_looked_at(captured: tuple[Any, Model, list[str]]) -> None:
    forward, _, happened = captured
    forward.begin()
    for _ in range(2):
        assert torch.equal(forward(X, T), X * 2)
    forward.end()
    assert happened == ["replay", "look", "replay"]


def test_what_was_replayed_of_a_model_that_has_changed_is_dropped(captured: tuple[Any, Model, list[str]]) -> None:
    forward, model, happened = captured
    forward.begin()
    model.child.register_forward_hook(lambda *_: None)
    model.scale.fill_(3.0)  # in place, which the replay of this graph cannot know
    assert torch.equal(forward(X, T), X * 3)
    forward.end()
    assert happened == ["replay", "look", "run"]


def test_a_replay_for_which_memory_is_short_does_not_spare_the_look(
    captured: tuple[Any, Model, list[str]], adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, model, happened = captured
    ((_, entry),) = adapter("process.runtime").cache().captured()
    graph = entry.value
    monkeypatch.setattr(graph, "replay", mock.Mock(side_effect=torch.cuda.OutOfMemoryError("the GPU")))
    forward.begin()
    model.child.register_forward_hook(lambda *_: None)
    model.scale.fill_(3.0)
    assert torch.equal(forward(X, T), X * 3)
    assert happened == ["look", "run"]  # and not the model's own forward, once, with no look to come
    forward.end()


def test_the_call_after_one_that_failed_looks_at_the_model(
    captured: tuple[Any, Model, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, model, happened = captured
    forward.begin()
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="the GPU"):
        broken.setattr(forward.runner, "run", mock.Mock(side_effect=RuntimeError("the GPU")))
        forward(X, T)
    model.child.register_forward_hook(lambda *_: None)
    assert torch.equal(forward(X, T), X * 2)
    assert happened == ["replay", "look", "run"]
    forward.end()


def test_a_class_whose_forward_a_pack_replaced_is_not_captured(compiled: Callable[..., Any]) -> None:
    model = PatchedByAPack()
    assert "another pack" in str(blocker(compiled(model, model._forward)))


@pytest.mark.parametrize("name", ["forward", "_forward"])
def test_when_comfyui_takes_the_model_down_a_packs_own_method_stays(compiled: Callable[..., Any], name: str) -> None:
    model = Model()
    forward = compiled(model, model._forward)
    theirs = types.MethodType(of_a_pack, model)
    vars(model).update({"_forward": model._forward, name: theirs})  # what restoring an object patch leaves, and theirs
    forward.weights_detached(unpatched=True)
    assert {"_forward", "forward"} & set(vars(model)) == {name}
    assert vars(model)[name] is theirs


def test_loras_of_gguf_weights_go_when_the_model_is_unloaded(
    adapter: Callable[[str], ModuleType], compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI keeps the weights on the host, and knows nothing of these copies on the GPU."""
    gone: list[torch.Tensor] = []
    monkeypatch.setattr(adapter("patch.compiled_forward").gguf_loras, "forget", gone.extend)
    model = Model()
    forward = compiled(model, model._forward)
    forward.weights_detached(unpatched=False)  # to load them again
    assert not gone
    forward.weights_detached(unpatched=True)
    assert list(map(id, gone)) == [id(model.scale)]


def test_it_does_not_keep_the_module_alive_that_it_is_put_into(compiled: Callable[..., Any]) -> None:
    model = Model()
    forward = compiled(model, model._forward)
    model.__dict__["_forward"] = forward  # as ComfyUI applies an object patch
    forward(X, T)
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
