"""Blocks of a model that does not fit: each has its paged weights while it runs, and its own parameters after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_cache.modules.site import RegionSite

from .conftest import CoreOperations
from .fake_paging import HOST, LORAS, Checkpoint, compute, fill, uncaptured

X = torch.ones(1)


def site_of(checkpoint: Checkpoint) -> RegionSite:
    block = checkpoint.model.blocks[0]
    return RegionSite("blocks.0", "PagedLinear", block, lambda module, x: module(x), (("n",),))


def lent(run: Callable[[RegionSite, torch.Tensor], Any]) -> Callable[..., Any]:
    """A region's code, which runs with the weights that it is lent, if it needs any."""

    def run_lent(site: RegionSite, x: torch.Tensor, lend: Any = None) -> Any:
        with lend() if lend is not None else contextlib.nullcontext():
            return run(site, x)

    return run_lent


def test_a_block_has_its_weights_while_it_runs_and_its_parameters_after(
    streamed_blocks: ModuleType, checkpoint: Checkpoint, weights: Any
) -> None:
    seen: list[torch.Tensor] = []

    def run(site: RegionSite, x: torch.Tensor) -> torch.Tensor:
        seen.extend(site.module._parameters.values())  # type: ignore[arg-type]
        return x

    site, before = site_of(checkpoint), dict(checkpoint.model.blocks[0].named_parameters())
    streamed_blocks.streamed(lent(run), weights)(site, X)
    expected = [checkpoint.value("blocks.0", slot, "a") for slot in ("weight", "bias")]
    assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
    assert dict(checkpoint.model.blocks[0].named_parameters()) == before
    assert not any(checkpoint.reservation.pins)


def test_an_original_gets_its_weights_from_core_alone(
    streamed_blocks: ModuleType, core: CoreOperations, checkpoint: Checkpoint, weights: Any
) -> None:
    """Loading them twice took the host longer than ComfyUI takes for a step."""
    core.failure = AssertionError("nothing is to be loaded ahead")
    run = streamed_blocks.streamed(lambda site, x, lend: x, weights)
    assert run(site_of(checkpoint), X) is X


def test_without_a_page_they_come_through_a_buffer(
    streamed_blocks: ModuleType, checkpoint: Checkpoint, weights: Any
) -> None:
    checkpoint.reservation.limit(0)
    values: list[float] = []
    run = streamed_blocks.streamed(lent(lambda site, x: values.append(float(site.module.weight[0, 0]))), weights)
    run(site_of(checkpoint), X)
    assert values == [float(checkpoint.value("blocks.0", "weight", "a")[0, 0])]
    assert not any(checkpoint.reservation.pins)


def test_before_the_first_block_of_a_run_what_captures_work_in_goes(
    streamed_blocks: ModuleType,
    checkpoint: Checkpoint,
    weights: Any,
    adapter: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decoder's capture keeps a GiB, which would push out as many weights in each step."""
    released: list[int] = []
    room = lambda: released.append(sum(map(bool, checkpoint.reservation.serials)))  # noqa: E731
    monkeypatch.setattr(adapter("dynamic_vram.paged_weights"), "release_graph_memory", room)
    run, asked = streamed_blocks.streamed(lent(lambda site, x: x), weights), checkpoint.reservation.asked
    for _ in range(3):
        run(site_of(checkpoint), X)
    assert released == [0]  # before its weights came
    assert checkpoint.reservation.asked == asked + 1  # so that pages come that went
    weights.run_ends()
    run(site_of(checkpoint), X)
    assert len(released) == 2


class TestResident:
    """Core is asked for a module's weights only if its pages do not hold what they held before."""

    @pytest.fixture
    def run(self, streamed_blocks: ModuleType, checkpoint: Checkpoint, weights: Any) -> Callable[[], None]:
        streamed = streamed_blocks.streamed(lent(lambda site, x: site.module(x)), weights)

        def run() -> None:
            block = checkpoint.model.blocks[0]
            bias = None if block.bias is None else checkpoint.value("blocks.0", "bias", str(checkpoint.lora))
            expected = compute(X, checkpoint.value("blocks.0", "weight", str(checkpoint.lora)), bias)
            assert torch.equal(streamed(site_of(checkpoint), X), expected)
            assert not any(checkpoint.reservation.pins)

        return run

    def test_core_is_asked_once(self, run: Callable[[], None], core: CoreOperations, weights: Any) -> None:
        for _ in range(3):
            run()
        assert len(core.asked) == 1
        assert weights.counters.streamed_bytes == 48

    @pytest.mark.parametrize("what", ["lora", "evicted", "no page", "function", "other pages", "moved"])
    def test_core_is_asked_again_after(
        self, run: Callable[[], None], core: CoreOperations, checkpoint: Checkpoint, what: str
    ) -> None:
        run()
        block: Any = checkpoint.model.blocks[0]
        if what == "lora":
            checkpoint.load("b")
        elif what == "evicted":
            checkpoint.reservation.evict(checkpoint.reservation.pages)
            checkpoint.reservation.prioritize()
        elif what == "no page":
            checkpoint.reservation.limit(0)
        elif what == "function":  # a hook of another pack on the weight
            block.weight_function = [lambda weight: weight]
        elif what == "moved":
            block._v, block._v_signature = checkpoint.reservation.alloc(block._v[2]), None
        else:
            checkpoint.reservation.evict(checkpoint.reservation.pages)
            checkpoint.reservation.prioritize()
            uncaptured(block)  # another forward fills them
        run()
        assert len(core.asked) == 2

    def test_what_core_makes_anew_is_not_kept(
        self, run: Callable[[], None], core: CoreOperations, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A weight in another dtype than its pages have, or with a function of another pack."""
        monkeypatch.setattr(core, "resolve_cast_module_with_vbar", lambda module, *_: uncaptured(module))
        run()
        run()
        assert len(core.asked) == 2


@pytest.mark.parametrize("where", ["in the block", "in the load"])
def test_an_error_puts_everything_back(
    streamed_blocks: ModuleType, core: CoreOperations, checkpoint: Checkpoint, weights: Any, where: str
) -> None:
    def run(site: RegionSite, x: torch.Tensor) -> torch.Tensor:
        raise InterruptedError("cancelled")

    core.failure = InterruptedError("cancelled") if where == "in the load" else None
    with pytest.raises(InterruptedError):
        streamed_blocks.streamed(lent(run), weights)(site_of(checkpoint), X)
    block = checkpoint.model.blocks[0]
    assert all(each.device.type == HOST for each in block.parameters())
    assert "_prefetch" not in block.__dict__
    assert not any(checkpoint.reservation.pins)


def test_what_core_has_prefetched_is_left_to_core(
    streamed_blocks: ModuleType, core: CoreOperations, checkpoint: Checkpoint, weights: Any
) -> None:
    block: Any = checkpoint.model.blocks[0]
    core.cast_modules_with_vbar([block], None, None, None, True)
    prefetched = block._prefetch
    streamed_blocks.streamed(lent(lambda site, x: x), weights)(site_of(checkpoint), X)
    assert block._prefetch is prefetched
    assert any(checkpoint.reservation.pins)


def test_what_cannot_be_pinned_is_left_to_core(
    streamed_blocks: ModuleType, core: CoreOperations, checkpoint: Checkpoint, weights: Any
) -> None:
    weights.unsupported = "comfy-aimdo is too old"
    core.failure = AssertionError("nothing is to be loaded")
    seen: list[Any] = []
    run = streamed_blocks.streamed(lent(lambda site, x: seen.append(site.module.weight)), weights)
    run(site_of(checkpoint), X)
    assert seen == [checkpoint.model.blocks[0].weight]
    assert seen[0].device.type == HOST


class TestWhyUnsupported:
    @pytest.fixture
    def probe(
        self, streamed_blocks: ModuleType, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[str], str | None]:
        loading = adapter("dynamic_vram.page_loading")

        def probe(version: str) -> str | None:
            monkeypatch.setattr(loading, "version_of", lambda package: version)
            loading.why_unsupported.cache_clear()
            found: str | None = loading.why_unsupported()
            loading.why_unsupported.cache_clear()
            return found

        return probe

    @pytest.mark.parametrize("version", ["0.3.0", "0.4.13", "0.10.0", "1.0.0.dev3"])
    def test_a_comfy_aimdo_that_counts_pins_is_supported(
        self, probe: Callable[[str], str | None], version: str
    ) -> None:
        assert probe(version) is None

    @pytest.mark.parametrize("version", ["0.2.14", "0.0.213", "", "unknown"])
    def test_an_older_or_unknown_one_is_not(self, probe: Callable[[str], str | None], version: str) -> None:
        why = probe(version)
        assert why is not None
        assert "0.3.0 is needed" in why

    def test_a_comfyui_without_the_functions_is_not(
        self, probe: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(CoreOperations, "cast_modules_with_vbar")
        assert probe("0.4.13") == (
            "this ComfyUI pages weights without comfy.ops.cast_modules_with_vbar; ComfyUI 0.21.0 has it"
        )


def test_with_all_weights_in_place_nothing_is_loaded(
    streamed_blocks: ModuleType, core: CoreOperations, checkpoint: Checkpoint, weights: Any
) -> None:
    core.failure = AssertionError("nothing is to be loaded")
    assert weights.pin()
    with weights.in_place():
        assert streamed_blocks.streamed(lent(lambda site, x: x), weights)(site_of(checkpoint), X) is X
    weights.unpin()


_EVENTS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 4)),
    st.tuples(st.just("core runs"), st.integers(0, 4)),
    st.tuples(st.just("load"), st.sampled_from(LORAS)),
    st.tuples(st.just("evict"), st.integers(1, 16)),
    st.tuples(st.just("room"), st.integers(0, 16)),
    st.tuples(st.just("spare"), st.integers(0, 4)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.lists(_EVENTS, max_size=30))
def test_whatever_happens_between_two_runs_a_block_has_its_weights(
    streamed_blocks: ModuleType, adapter: Callable[[str], ModuleType], events: list[tuple[str, Any]]
) -> None:
    """LoRAs come, pages go and move, memory is short, and core runs blocks by itself."""
    checkpoint = Checkpoint()
    checkpoint.load("a")
    weights = adapter("dynamic_vram.paged_weights").PagedWeights(fill)
    weights.survey(checkpoint.model.modules())
    blocks: list[Any] = list(checkpoint.model.blocks)
    sites = [
        RegionSite(f"blocks.{number}", "PagedLinear", block, lambda module, x: module(x), (("n",),))
        for number, block in enumerate(blocks)
    ]
    streamed = streamed_blocks.streamed(lent(lambda site, x: site.module(x)), weights)
    for what, value in events:
        if what == "load":
            checkpoint.load(value)
            weights.survey(checkpoint.model.modules())
        elif what == "evict":
            checkpoint.reservation.evict(value)
            checkpoint.reservation.prioritize()
        elif what == "room":
            checkpoint.reservation.limit(value)
        elif what == "spare":
            weights.mark_unneeded([blocks[value]])
            weights.reorder_pages()
            weights.survey(checkpoint.model.modules())
        else:
            name, lora = f"blocks.{value}", str(checkpoint.lora)
            bias = None if blocks[value].bias is None else checkpoint.value(name, "bias", lora)
            expected = compute(X, checkpoint.value(name, "weight", lora), bias)
            with torch.inference_mode():
                found = streamed(sites[value], X) if what == "run" else blocks[value](X)
            assert torch.equal(found, expected)
        assert not any(checkpoint.reservation.pins)
