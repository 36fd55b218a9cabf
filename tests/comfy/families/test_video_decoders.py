"""Each decoder of videos gives eager's result, and compiles before the first video only."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import COUNTED, TOLERANCE, CompiledMethod, forget_regions, relative_error, run_traces
from .videos import DECODERS, Decoder

# Batch, frames, height and width of latents. The first has other numbers of frames than those after it, and odd sizes.
FIRST = (1, 3, 5, 7)
SIZES = [(1, 4, 5, 7), (1, 2, 9, 6), (1, 7, 6, 11), (1, 1, 3, 5)]


class Bench(CompiledMethod):
    """A small decoder, and its method with Resolute in it."""

    def __init__(self, core: SimpleNamespace, decoder: Decoder) -> None:
        self.decoder = decoder
        super().__init__(core, decoder.make(), decoder.method, core.roles.VAE_DECODE)
        self._forward.count_regions()

    @property
    def regions(self) -> tuple[int, int]:
        """Compiled, and all."""
        found: tuple[int, int] = self._forward.runner.program("cpu")[0].regions
        return found

    def behind(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Have calls wait for nothing from now on, with no code at first. Returns their queue; nothing works at it."""
        backend = self._core.inside("backends.registry").get("inductor")
        parallel = "backends.inductor.compiler"
        workers = SimpleNamespace(close=lambda: None)
        queue = self._core.inside(f"{parallel}.compile_queue").CompileQueue(backend.table, workers)
        program = self._forward.runner.program("cpu")[0]
        for holder in (program, program._regions.misses):
            monkeypatch.setattr(holder, "_queue", queue)
        self._forward.runner._background_compile = True
        forget_regions(self._core)
        return queue

    def call(self, latent: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = getattr(self.module, self.decoder.method)(latent.clone(), **self.decoder.arguments)
        return result

    def check(self, *size: int, bypasses: bool = False) -> dict[str, int]:
        """Compare one decode with eager. Returns what was counted; only with `bypasses` there may be some."""
        latent = self.decoder.latent(*size)
        return self.compare(lambda: self.call(latent), None if bypasses else {})


@pytest.fixture
def bench(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    run_traces(core, monkeypatch)
    return Bench(core, DECODERS[request.param])


@pytest.mark.grid(4)
@pytest.mark.parametrize("bench", list(DECODERS), indirect=True)
def test_each_state_of_its_blocks_compiles_with_the_first_video_that_has_it(
    core: SimpleNamespace, bench: Bench
) -> None:
    forget_regions(core)
    compiles = 0
    for size in (FIRST, *SIZES):
        counted = bench.check(*size)
        assert counted["compile_failures"] == counted["eager_calls"] == 0
        compiles += counted["region_compiles"]
    assert compiles == bench.decoder.compiles
    for size in (FIRST, *SIZES):
        counted = bench.check(*size)
        assert counted["region_calls"] > 0
        assert {**counted, "region_calls": 0} == dict.fromkeys(COUNTED, 0), size
    done, total = bench.regions
    assert total - done == bench.decoder.unused


@pytest.mark.parametrize("bench", ["Wan 2.1", "Wan 2.2"], indirect=True)
@pytest.mark.parametrize("first", [(1, 1, 3, 5), (2, 1, 5, 4), FIRST, (1, 2, 9, 6)], ids=str)
def test_what_other_lengths_need_is_left_with_the_first_decode(
    core: SimpleNamespace, bench: Bench, monkeypatch: pytest.MonkeyPatch, first: tuple[int, ...]
) -> None:
    # Without it a video that comes after a picture, or a picture after a video, leaves regions of its own.
    queue, needed = bench.behind(monkeypatch), 0
    for size in (first, *SIZES, FIRST):
        counted = bench.check(*size)
        assert counted["region_compiles"] == counted["region_calls"] == counted["compile_failures"] == 0
        foreseen = [wanted.is_foreseen for wanted in queue.waiting.values()]
        assert len(foreseen) == bench.decoder.compiles, size
        assert needed <= foreseen.count(False), "what a call came to is foreseen no more"
        assert foreseen.count(False) > 0
        needed = foreseen.count(False)
    order: list[bool] = []
    compile_here = queue.work._compile

    def make(task: Any, between: Any) -> None:
        order.append(task.is_foreseen)
        compile_here(task, between)

    monkeypatch.setattr(queue.work, "_compile", make)
    while queue.work.step(compile_local=True, compile_all=True):
        pass
    assert order == sorted(order), "what a call came to is made first"
    assert len(order) == bench.decoder.compiles
    compared = 0
    for size in (first, *SIZES, FIRST):
        calls = [bench.check(*size) for _ in range(1 + len(order) // 4)]  # each compares a few
        compared += sum(counted["region_compiles"] for counted in calls)
        assert calls[-1]["region_calls"] > 0
        assert (queue.left, calls[-1]["eager_calls"], calls[-1]["compile_failures"]) == (0, 0, 0), size
    assert compared == bench.decoder.compiles, "each code that was made is right, and was compared before its first use"


@pytest.mark.grid(2)
@pytest.mark.parametrize("bench", ["Wan 2.1", "Wan 2.2", "HunyuanVideo", "Mochi"], indirect=True)
def test_several_videos_at_once_compile_nothing_new(bench: Bench) -> None:
    for size in [(2, 3, 4, 5), (3, 2, 5, 3)]:
        bench.check(1, *size[1:])
        assert bench.check(*size)["region_compiles"] == 0, size


@pytest.mark.parametrize("bench", ["LTX", "LTX-2"], indirect=True)
@pytest.mark.parametrize("bytes_at_once", [3_000, 10_000, 60_000])
def test_ltx_decodes_in_parts_of_any_number_of_frames(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    # Core makes the parts by the memory of the card. The first part of a few frames leaves blocks without a result.
    where = importlib.import_module(type(bench.module).__module__)
    monkeypatch.setattr(where, "get_max_chunk_size", lambda device: bytes_at_once)
    for size in (FIRST, *SIZES):
        bench.check(*size)
    for size in (FIRST, *SIZES):
        assert bench.check(*size)["region_compiles"] == 0, size


@pytest.mark.parametrize("bench", ["LTX", "LTX-2"], indirect=True)
@pytest.mark.parametrize("bytes_at_once", [3_000, 60_000])
def test_ltx_joins_and_folds_frames_channels_last(
    core: SimpleNamespace, bench: Bench, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    where = importlib.import_module(type(bench.module).__module__)
    monkeypatch.setattr(where, "get_max_chunk_size", lambda device: bytes_at_once)
    check_as_maps(core, bench, monkeypatch)


@pytest.mark.parametrize("bench", ["Wan 2.1", "Wan 2.2"], indirect=True)
def test_wan_carries_frames_channels_last(core: SimpleNamespace, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_maps(core, bench, monkeypatch)


def check_as_maps(core: SimpleNamespace, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's code between regions makes channels-last maps with the right values, as on CUDA."""
    channels_last = core.ours("blocks.videos.channels_last")
    for module in ("ltx", "wan"):
        monkeypatch.setattr(
            core.ours(f"blocks.videos.{module}"), "channels_last", lambda x: channels_last.ChannelsLastMode()
        )
    made: list[torch.Tensor] = []
    for function, instead in channels_last._AS_CHANNELS_LAST.items():
        monkeypatch.setitem(channels_last._AS_CHANNELS_LAST, function, noting(instead, made))
    for size in (FIRST, *SIZES):
        bench.check(*size)
    assert made
    assert all(each.is_contiguous(memory_format=torch.channels_last_3d) for each in made)


@pytest.mark.parametrize("bench", ["LTX", "LTX-2"], indirect=True)
def test_a_decode_into_a_buffer_is_not_captured(
    core: SimpleNamespace, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core drops what the decoder returns: a replay would leave the caller's buffer as it was."""
    cache, calls = core.ours("process.runtime").cache(), list[Any]()
    inner = cache.run

    def run(program: Any, call: Any, recheck: Any) -> Any:
        calls.append(call)
        return inner(program, call, recheck)

    monkeypatch.setattr(cache, "run", run)
    one_frame = bench.decoder.latent(1, 1, 3, 5)
    with torch.inference_mode():
        expected = bench.call(one_frame)
        buffer = torch.full_like(expected, math.nan)
        with bench.compiled():
            bench.call(one_frame)
            bench.module.forward(one_frame.clone(), output_buffer=buffer, **bench.decoder.arguments)
    assert [call.policy.may_capture for call in calls] == [True, False]
    assert relative_error(buffer, expected) < TOLERANCE


def noting(function: Any, made: list[torch.Tensor]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        made.extend([] if result is None else [result])
        return result

    return noted


@pytest.mark.parametrize("bench", ["Wan 2.1", "HunyuanVideo", "LTX"], indirect=True)
def test_a_cancelled_decode_leaves_nothing(bench: Bench) -> None:
    # It ends within the first part; the next decode starts without anything that blocks carry over.
    latent = bench.decoder.latent(*FIRST)
    bench.check(*FIRST)
    calls: list[int] = []

    class CancelledError(Exception):
        pass

    def cancel(module: torch.nn.Module, given: Any, result: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise CancelledError

    last = [part for part in bench.module.modules() if isinstance(part, torch.nn.Conv3d)][-1]
    handle = last.register_forward_hook(cancel)
    with bench.compiled(), pytest.raises(CancelledError):
        for _ in range(2):
            bench.call(latent)
    handle.remove()
    bench.check(*FIRST)
    bench.check(*SIZES[1])


@pytest.mark.long
@pytest.mark.parametrize("name", list(DECODERS))
def test_the_lowered_code_gives_the_same(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    forget_regions(core)  # the other tests of this process run traces in place of lowered code
    try:
        bench = Bench(core, DECODERS[name])
        counted = [bench.check(*size, bypasses=True) for size in (FIRST, *SIZES)]
        assert sum(each["compile_failures"] for each in counted) == 0
        for size in (FIRST, *SIZES):
            assert bench.check(*size, bypasses=True)["region_compiles"] == 0, size
    finally:
        forget_regions(core)
