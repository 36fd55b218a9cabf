"""Calls that may be faster as they are: timed both ways by a fake clock, as they come, and then run the faster way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.base import Code
from compile_cache.cache.capture_policy import NOT_RESIDENT
from compile_cache.cache.graph_cache import GraphCache
from compile_cache.call_policy import ANYTHING
from compile_cache.config import CacheConfig
from compile_cache.errors import BypassCode, BypassReason
from compile_cache.keys import GraphKey, Role, Signature, TensorSpec
from compile_cache.tuning.stopwatch import stopwatch_on
from compile_cache.weights import Weights

from ..fakes import GRADIENT, FakeGraph, FakeProgram, Module, expect, oom

# Compiled, as it is, compiled, as it is: then it is known.
TURNS = ["compiled", "original"] * 2


class Device:
    """A device whose clock advances with what runs on it. compiled, original: seconds for each element of a latent.

    is_behind: it has not done yet what the host asked for. fixed: elements that each call takes beside those of its
    latent.
    """

    def __init__(self, compiled: float, original: float) -> None:
        self.takes = {"compiled": compiled, "original": original}
        self.now, self.is_behind, self.fixed = 0.0, False, 0
        self.ran: list[str] = []

    def run(self, way: str, elements: int = 1) -> None:
        self.ran.append(way)
        self.now += self.takes[way] * (elements + self.fixed)

    def stopwatch(self, device: torch.device) -> Any:
        return Watch(self)


class Watch:
    def __init__(self, device: Device) -> None:
        self.device, self.began, self.ended = device, device.now, -1.0

    def stop(self) -> None:
        self.ended = self.device.now

    def seconds(self, wait: bool) -> float | None:
        assert self.ended >= 0, "it was never stopped"
        return None if self.device.is_behind and not wait else self.ended - self.began


class Program(FakeProgram):
    """Runs compiled code on the device. lacks: that code, so that originals run."""

    def __init__(self, device: Device, **settings: Any) -> None:
        super().__init__(**settings)
        self.device, self.lacks = device, False
        self.before: Callable[[], object] = lambda: None

    def code_of(self, key: GraphKey) -> Code:
        return Code.MISSING if self.lacks else Code.READY

    def run(self, call: Any) -> Any:
        self.before()
        if self.run_failures:
            raise self.run_failures.pop(0)
        self.ran_compiled, self.ran_originals = not self.lacks, self.lacks
        if self.lacks:
            return call.invoke(call.tensors)
        self.device.run("compiled", call.tensors[0].numel())
        return call.tensors[0] * 2


class FakeWeights(Weights):
    """Counts how often it was pinned."""

    def __init__(self) -> None:
        self.pins = 0

    def pin(self) -> bool:
        self.pins += 1
        return True


class Rig:
    """A cache that compares the calls of one module on a device."""

    def __init__(self, compiled: float, original: float, folder: Path | None = None, **settings: str) -> None:
        self.device = Device(compiled, original)
        self.cache = GraphCache(CacheConfig(store_folder=folder, **settings))
        self.cache.compiled_vs_eager._stopwatch = self.device.stopwatch
        self.program = Program(self.device)

    def run(self, shape: tuple[int, ...] = (1, 4, 3, 8, 8), **changes: Any) -> str:
        """Answer a call. Returns which way it ran."""
        x = torch.ones(shape)

        def invoke(tensors: Any) -> Any:
            self.device.run("original", tensors[0].numel())
            return tensors[0] * 2

        changes = {"invoke": invoke, **changes}
        signature = Signature((("latent", TensorSpec(shape, "float32", "cpu")),))
        call = replace(
            Module().call(), tensors=[x], benchmark_eager=True, policy=ANYTHING.uncaptured(),
            key=GraphKey(signature, Role.VAE_DECODE, "model" * 8, "fake"),
        )  # fmt: skip
        before = len(self.device.ran)
        result = self.cache.run(self.program, replace(call, **changes))
        assert torch.equal(result, x * 2)
        (way,) = self.device.ran[before:]  # nothing runs twice
        return way

    def settle(self) -> None:
        assert [self.run() for _ in TURNS] == TURNS
        self.cache.run(FakeProgram(owner=9), Module().call())  # any later call takes over the last time


def test_calls_run_both_ways_in_turn_until_the_faster_is_known() -> None:
    rig = Rig(compiled=1.0, original=2.0)
    rig.settle()
    assert [rig.run() for _ in range(3)] == ["compiled"] * 3
    (found,) = rig.cache.compiled_vs_eager.report()
    numbers = 4 * 3 * 8 * 8
    assert (found["seconds"], found["original_seconds"]) == (numbers, 2 * numbers)
    assert (found["is_settled"], found["is_left_alone"]) == (True, False)


@pytest.mark.parametrize("compiled", [1.2, 1.0])
def test_a_call_that_is_not_faster_is_left_alone_and_says_why(compiled: float) -> None:
    rig = Rig(compiled / 768, 1.0 / 768)
    rig.settle()
    with expect(rig.cache, {"not_faster": 3}, eager_calls=3):
        assert [rig.run() for _ in range(3)] == ["original"] * 3
    text = [event.text for event in rig.cache.stats.events if event.kind == "bypass"][-1]
    said = f"vae_decode of 1x4x3x8x8 takes {compiled:.3g} s compiled and 1 s as it is on this device: it is left alone"
    assert text == f"not_faster: {said}"


def test_a_run_eagerly_for_the_comparison_is_counted_and_says_so() -> None:
    rig = Rig(1.0, 2.0)
    rig.run()
    with expect(rig.cache, {"not_faster": 1}, eager_calls=1):
        rig.run()
    assert "to measure whether compiled code is faster" in rig.cache.stats.events[-1].text


SMALL, LARGE = (1, 4, 2, 8, 8), (1, 4, 3, 9, 9)  # 512 and 972 elements: one class


def test_the_first_size_that_is_settled_answers_for_its_class() -> None:
    rig = Rig(2.0, 1.0)
    rig.settle()
    assert [rig.run(shape) for shape in (SMALL, LARGE)] == ["original"] * 2
    (found,) = rig.cache.compiled_vs_eager.report()
    assert (found["shape"], found["is_left_alone"]) == ([1, 4, 3, 8, 8], True)


def test_two_starts_choose_alike(tmp_path: Path) -> None:
    Rig(2.0, 1.0, tmp_path).settle()
    assert Rig(0.1, 1.0, tmp_path).run() == "original"  # what was measured stays, and so does the picture
    assert Rig(2.0, 1.0, tmp_path, source="other code").run() == "compiled"
    assert Rig(2.0, 1.0, tmp_path, application="ComfyUI 2").run() == "compiled", "its own code may be faster now"


def test_a_comparison_goes_on_in_the_next_start(tmp_path: Path) -> None:
    first = Rig(1.0, 2.0, tmp_path)
    first.run()
    first.cache.run(FakeProgram(owner=9), Module().call())
    assert [Rig(1.0, 2.0, tmp_path).run()] == ["original"]


def test_a_call_that_fails_or_is_answered_by_the_original_is_no_time_of_compiled_code() -> None:
    rig = Rig(1.0, 2.0)
    rig.program.run_failures = [ValueError("broken")]
    with pytest.raises(ValueError, match="broken"):
        rig.run()
    rig.program.before = lambda: rig.cache.stats.forward_ran(compiled=False)  # as where no block ran compiled
    assert [rig.run() for _ in range(2)] == ["compiled"] * 2
    rig.program.before = lambda: None
    rig.settle()


def test_a_call_without_memory_goes_on_as_before_and_is_not_timed() -> None:
    rig = Rig(1.0, 2.0)
    rig.program.run_failures = [oom()]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        rig.run()  # core continues in tiles
    assert rig.cache.compiled_vs_eager.report() == []
    rig.settle()


def test_a_call_that_has_to_run_eagerly_says_its_own_reason() -> None:
    rig = Rig(1.0, 2.0)
    with expect(rig.cache, {"gradient": 2}, eager_calls=2):
        assert [rig.run(policy=ANYTHING.eager(GRADIENT)) for _ in range(2)] == ["original"] * 2
    rig.settle()


@pytest.mark.parametrize("is_settled", [False, True])
def test_an_original_without_memory_is_not_tried_again(is_settled: bool) -> None:
    """Compiled code may need less. Otherwise each such call would run out of memory and go on in tiles."""
    rig = Rig(2.0, 1.0)
    if is_settled:
        rig.settle()
    else:
        rig.run()

    def no_memory(tensors: Any) -> Any:
        raise oom()

    with pytest.raises(torch.cuda.OutOfMemoryError):
        rig.run(invoke=no_memory)
    assert [rig.run() for _ in range(3)] == ["compiled"] * 3
    assert rig.run((1, 4, 12, 8, 8)) == "compiled"
    assert rig.run((1, 4, 12, 8, 8)) == "original", "another size class is compared"
    rig.cache.compiled_vs_eager.measure_again()
    rig.settle()


def test_a_person_can_have_all_compared_again(tmp_path: Path) -> None:
    rig = Rig(2.0, 1.0, tmp_path)  # another program kept the GPU busy
    rig.settle()
    rig.device.takes["compiled"] = 0.5
    rig.cache.trim()  # as the node Free Graphs does in each prompt
    assert rig.run() == "original"
    rig.cache.compiled_vs_eager.measure_again()
    assert Rig(0.5, 1.0, tmp_path).run() == "compiled"
    rig.settle()
    assert rig.run() == "compiled"


def test_a_captured_call_is_compared_by_its_replays() -> None:
    rig = Rig(1.0, 2.0)

    def replayed(x: torch.Tensor) -> torch.Tensor:
        rig.device.run("compiled", x.numel())
        return x * 2

    rig.program.capture = lambda call, result, facts: FakeGraph(replayed, 1024)  # type: ignore[method-assign]
    ran = list[str]()
    for _ in range(5):
        before = rig.cache.stats.snapshot()
        rig.run(policy=ANYTHING)
        after = rig.cache.stats.snapshot()
        ran += [name for name in ("captures", "replays", "eager_calls") if after[name] > before[name]]
    assert ran == ["captures", "eager_calls", "replays", "eager_calls", "replays"]


AS_IT_COMES = {"benchmark_eager": False, "background_compile": True}
ORIGINALS, STEPS = 4, 12  # of originals, and then of compiled code, before it is known


def steps_of(rig: Rig, way: str, count: int, **changes: Any) -> list[str]:
    """So many steps. way: "original" while the code is coming."""
    rig.program.lacks = way == "original"
    return [rig.run(**AS_IT_COMES, **changes) for _ in range(count)]


def prompts_behind(rig: Rig, **changes: Any) -> None:
    """Steps run originals while their code is compiled, and then as many run it as are timed."""
    assert set(steps_of(rig, "original", ORIGINALS, **changes)) == {"original"}
    assert set(steps_of(rig, "compiled", STEPS, **changes)) == {"compiled"}
    rig.cache.run(FakeProgram(owner=9), Module().call())


Step = str | tuple[str, dict[str, Any]] | Callable[[Rig], object]


def takes(**seconds: float) -> Step:
    return lambda rig: rig.device.takes.update(seconds)


def device(**values: Any) -> Step:
    return lambda rig: vars(rig.device).update(values)


def in_each_run(change: Callable[[Rig], object]) -> Step:
    return lambda rig: setattr(rig.program, "before", lambda: change(rig))


def timed_by(stopwatch: Any) -> Step:
    return lambda rig: setattr(rig.cache.compiled_vs_eager, "_stopwatch", stopwatch)


def nothing(rig: Rig) -> None: ...


def compiles(rig: Rig) -> None:
    rig.device.now += 5000.0
    rig.cache.stats.counters.stall_seconds += 5000.0


def streams(rig: Rig) -> None:
    rig.cache.stats.bypass(NOT_RESIDENT)
    rig.cache.stats.counters.streamed_bytes += 1


def runs_a_region(rig: Rig) -> None:
    rig.cache.stats.counters.region_calls += 1


def another_call(rig: Rig) -> None:
    rig.cache.run(FakeProgram(owner=9), Module().call())


def nothing_is_known(rig: Rig) -> None:
    assert rig.cache.compiled_vs_eager.report() == []


def only_originals_are_known(rig: Rig) -> None:
    (found,) = rig.cache.compiled_vs_eager.report()
    assert (found["is_settled"], found["seconds"]) == (False, 0.0)


def settled(stays_eager: bool) -> Step:
    def check(rig: Rig) -> None:
        (found,) = rig.cache.compiled_vs_eager.report()
        assert (found["is_settled"], found["is_left_alone"]) == (True, stays_eager)

    return check


def in_turn(rig: Rig) -> None:
    for shape in (LARGE, SMALL) * 4:
        rig.run(shape)


def later(rig: Rig) -> None:
    """By times that were read later."""
    assert steps_of(rig, "compiled", STEPS + 1)[-1] == "original"


def blocked(code: BypassCode) -> dict[str, Any]:
    return {"policy": ANYTHING.run_once(BypassReason(code, "why"))}


OFF_THE_DEVICE, ONE_CAPTURES = blocked(BypassCode.STREAMED_WEIGHTS), blocked(BypassCode.CAPTURE_FAILED)
PATCHED = blocked(BypassCode.OBSERVED_INPUT)  # another node patches some blocks, which cost more then
CONTROLLED = {"key": GraphKey(Signature((("latent", TensorSpec((1, 4, 3, 8, 8), "float32", "cpu")),
                                         ("control", TensorSpec((4,), "float32", "cpu")))),
                              Role.VAE_DECODE, "model" * 8, "fake")}  # fmt: skip
OTHERS = {"larger": (1, 4, 6, 8, 8), "a picture": (1, 4, 1, 32, 24), "a map": (1, 4, 32, 24)}
ALL = "C" * STEPS
# Seconds compiled and of the original; what happens. A letter is a call: c and o run compiled and the original. As they
# come: O runs the original because the code is coming, C runs compiled, L is left alone.
SCENARIOS: dict[str, tuple[float, float, list[Step]]] = {
    "a run that compiles": (1.0, 1.5, [in_each_run(compiles), "ccc", in_each_run(nothing), Rig.settle, "c"]),
    # Another program keeps the GPU busy in the first compiled run.
    "the fastest run of each way counts": (1.0, 1.5, [takes(compiled=9.0), "c", takes(compiled=1.0), "ococ"]),
    # A large latent takes less for each element, so times of two sizes say nothing about the two ways.
    "two sizes in turn: original": (1.3, 1.0, [device(fixed=1000), in_turn, ("o", {"shape": LARGE}),
                                               ("o", {"shape": SMALL})]),
    "two sizes in turn: compiled": (0.8, 1.0, [device(fixed=1000), in_turn, ("c", {"shape": LARGE}),
                                               ("c", {"shape": SMALL})]),
    **{f"another class is compared for itself: {name}": (2.0, 1.0, [Rig.settle, "o", ("coco", {"shape": shape})])
       for name, shape in OTHERS.items()},
    # Most blocks lack their weights and run as they are.
    "calls whose weights are not on the device": (1.0, 2.0, ["cococ", takes(compiled=3.0), ("cocoo", OFF_THE_DEVICE),
                                                             "c", ("c", ONE_CAPTURES)]),
    "torch's settings": (2.0, 1.0, [Rig.settle, ("c", {"torch_flags": (("tf32", True),)}), "o"]),
    # Perhaps for code that watches each of its operations.
    "a call that has to run eagerly is no time": (2.0, 1.0, ["c", takes(original=9.0), ("oo", {
        "policy": ANYTHING.eager(GRADIENT)}), takes(original=1.0), "ocoo"]),
    "nothing waits for the device but the next call that is compared": (1.0, 2.0, [
        device(is_behind=True), "c", another_call, another_call, another_call, nothing_is_known, "o"]),
    "a latent without numbers is no time": (1.0, 2.0, [in_each_run(lambda rig: device(now=rig.device.now + 1)(rig)),
                                                       ("ccc", {"shape": (1, 4, 3, 0, 8)})]),
    "calls that are not compared": (2.0, 1.0, [("ccccc", {"benchmark_eager": False}), nothing_is_known]),
    "a CPU": (2.0, 1.0, [timed_by(stopwatch_on), "cccccc", nothing_is_known]),
    "steps stay compiled": (0.5, 1.0, [prompts_behind, "CCC", settled(False)]),
    "steps stay compiled unless they lose": (1.02, 1.0, [prompts_behind, "CCC", settled(False)]),
    "steps that lose": (1.03, 1.0, [prompts_behind, "LLL", settled(True)]),
    "a step stays left alone while weights stream": (2.0, 1.0, [prompts_behind, ("LLL", OFF_THE_DEVICE)]),
    "no original runs only to be measured": (2.0, 1.0, ["OOO", 3 * ALL, only_originals_are_known]),
    "nothing to compare with": (2.0, 1.0, [timed_by(lambda device: pytest.fail("it is timed")), 2 * ALL]),
    # The first ones come while the model and its kernels are loaded.
    "the fastest original, also a late one": (1.2, 9.0, ["OOOO", takes(original=1.0), "OO", ALL, "L"]),
    # Another program uses the GPU.
    "a noisy step does not decide": (9.0, 1.0, ["OOOO", ALL[1:], takes(compiled=0.9), "CCC"]),
    "a step that runs both": (9.0, 1.0, [in_each_run(runs_a_region), 2 * "OOOO", another_call, nothing_is_known]),
    "no step waits for the device": (2.0, 1.0, [device(is_behind=True), prompts_behind, nothing_is_known,
                                                device(is_behind=False), "OOOO", later]),
    # The residuals of a ControlNet take time in both ways.
    "a step with other inputs": (1.0, 2.0, ["OOOO", device(fixed=5000), (2 * ALL, CONTROLLED)]),
    "a step that does more than its key says": (0.5, 1.0, ["OOOO", takes(compiled=1.3), (2 * ALL, PATCHED),
                                                           takes(compiled=0.5), 2 * ALL]),
    # How many weights come differs from step to step, so the fastest step of each way counts.
    "steps whose weights stream": (1.5, 1.0, [in_each_run(streams), prompts_behind, "LL"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_which_way_calls_run(name: str) -> None:
    compiled, original, steps = SCENARIOS[name]
    rig = Rig(compiled, original)
    for number, step in enumerate(steps):
        if callable(step):
            step(rig)
            continue
        calls, changes = step if isinstance(step, tuple) else (step, {})
        ran = ""
        for call in calls:
            rig.program.lacks = call == "O"
            way = rig.run(**{**(AS_IT_COMES if call.isupper() else {}), **changes})
            ran += {"compiled": "c", "original": "o"}[way]
        assert ran == calls.replace("L", "o").lower(), (number, calls)


@pytest.mark.parametrize("behind", [1, 3])
def test_calls_of_which_the_device_is_some_behind_are_compared(behind: int) -> None:
    """A ControlNet and a UNet, and the host one step ahead."""
    rig = Rig(2.0, 1.0)
    watches: list[Watch] = []

    class Late(Watch):
        def seconds(self, wait: bool) -> float | None:
            return super().seconds(wait) if len(watches) - watches.index(self) > behind else None

    def stopwatch(device: torch.device) -> Any:
        watches.append(Late(rig.device))
        return watches[-1]

    rig.cache.compiled_vs_eager._stopwatch = stopwatch
    steps_of(rig, "original", ORIGINALS + behind)
    assert steps_of(rig, "compiled", 2 * STEPS)[-1] == "original"


def test_what_was_measured_behind_the_picture_holds_for_every_start(tmp_path: Path) -> None:
    prompts_behind(Rig(2.0, 1.0, tmp_path))
    assert Rig(2.0, 1.0, tmp_path).run(benchmark_eager=False) == "original", "compiled before the picture"
    assert Rig(2.0, 1.0, tmp_path, source="other code").run(benchmark_eager=False) == "compiled"


def test_originals_that_came_are_kept_for_the_next_start_and_for_a_new_comparison(tmp_path: Path) -> None:
    """Once the code is there, no step runs its original any more."""
    steps_of(first := Rig(2.0, 1.0, tmp_path), "original", ORIGINALS + 1)
    assert len(first.cache.compiled_vs_eager.report()) == 1
    again = Rig(2.0, 1.0, tmp_path)
    assert steps_of(again, "compiled", STEPS + 1)[-1] == "original"
    again.cache.compiled_vs_eager.measure_again()
    assert steps_of(again, "compiled", STEPS + 1) == ["compiled"] * STEPS + ["original"]
    again.cache.compiled_vs_eager.measure_again()
    again.device.takes["compiled"] = 0.5
    assert steps_of(again, "compiled", 2 * STEPS) == ["compiled"] * 2 * STEPS


def test_a_step_that_is_left_alone_has_its_weights_as_it_had_them_when_it_was_timed() -> None:
    rig, weights = Rig(2.0, 1.0), FakeWeights()
    prompts_behind(rig, weights=weights)
    pins = weights.pins
    assert steps_of(rig, "compiled", 2, weights=weights) == ["original"] * 2
    assert weights.pins == pins + 2


def test_the_seconds_of_the_latest_call_are_known_once_both_ways_were_timed() -> None:
    rig = Rig(0.5, 1.0)
    times_of, owner, numbers = rig.cache.compiled_vs_eager.times_of, rig.program.owner, 4 * 3 * 8 * 8
    steps_of(rig, "original", ORIGINALS)
    assert times_of(owner) is times_of(9) is None
    steps_of(rig, "compiled", 2)
    assert times_of(owner) == (0.5 * numbers, numbers)
    rig.run((1, 4, 3, 9, 8))
    assert times_of(owner) is None, "of another size"
    steps_of(rig, "compiled", 1)
    rig.cache.forget(owner)
    assert times_of(owner) is None, "its module was garbage collected"
