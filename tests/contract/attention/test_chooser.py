"""Attention that chooses its kernel for each shape: by measurement, exactly, and inside compiled regions."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from compile_cache.attention import chooser as attention
from compile_cache.attention import kernels
from compile_cache.attention.chooser import Chooser
from compile_cache.attention.kernels import AttentionArgs, bias
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import process
from compile_cache.backends.inductor.lower import operators
from compile_cache.backends.inductor.lower.tracing import trace

from ...programs import run_python
from ..rig import TOLERANCE, Attention, Rig, random, relative_error, seeded
from .net import Net, net_inputs

FLAT = torch.contiguous_format
SIZES = [(2, 64, 7), (1, 1, 1), (17, 63, 7), (3, 153, 154)]


def tensors(batch: int = 2, heads: int = 3, tokens: int = 9, context: int = 5, width: int = 8) -> list[torch.Tensor]:
    shapes = [(batch, heads, length, width) for length in (tokens, context, context)]
    return [random(*shape, seed=number) for number, shape in enumerate(shapes)]


def math(given: AttentionArgs) -> torch.Tensor:
    q, k, v, _, scale, enable_gqa = given
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if (added := bias(given)) is not None:
        scores = scores + added
    return scores.softmax(-1).nan_to_num() @ v  # as torch: nothing where all keys are masked


def flash(given: AttentionArgs) -> torch.Tensor:
    q, k, v, mask, scale, _ = given
    assert mask is None
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)[0]
    return result


class Timed:
    """A clock: each kernel's seconds, by its function. It counts the measurements."""

    def __init__(self, seconds: Mapping[Any, float]) -> None:
        self.by_kernel, self.count = dict(seconds), 0

    def __call__(self, run: Any, device: torch.device) -> float:
        self.count += 1
        assert run().shape[0] > 0
        return self.by_kernel[run.func]


def chooser(clock: Timed, **named: Any) -> Chooser:
    return Chooser(clock, lambda device: named or {"flash": flash, "math": math})


def chosen(chooser: Chooser) -> list[str]:
    return [each["kernel"] for each in chooser.report()]


def check(chooser: Chooser, given: list[torch.Tensor], scale: float | None = None, **more: Any) -> None:
    """Its result is (batch, tokens, heads, width). more: of `AttentionArgs`."""
    call = AttentionArgs(*given, scale=scale, **more)
    expected = nn.functional.scaled_dot_product_attention(
        *given, attn_mask=call.mask, scale=scale, enable_gqa=call.enable_gqa
    ).transpose(1, 2)
    actual = chooser(call)
    assert actual.is_contiguous()
    assert relative_error(actual, expected) <= TOLERANCE


@pytest.mark.parametrize(("seconds", "kernel"), [((3.0, 1.0), "math"), ((1.0, 3.0), "flash"), ((1.0, 0.95), "flash")])
def test_the_kernel_that_is_clearly_faster_runs(seconds: tuple[float, float], kernel: str) -> None:
    one = chooser(Timed(dict(zip((flash, math), seconds, strict=True))))
    check(one, tensors())
    assert chosen(one) == [kernel]
    assert one.report()[0]["milliseconds"] == {"flash": 1000 * seconds[0], "math": 1000 * seconds[1]}


def test_each_shape_is_measured_once_and_has_its_own_kernel() -> None:
    clock = Timed({flash: 1.0, math: 2.0})
    one = chooser(clock)
    for _ in range(3):
        check(one, tensors(), scale=0.3)
    assert clock.count == 2
    clock.by_kernel = {flash: 2.0, math: 1.0}
    check(one, tensors(tokens=40))
    check(one, [each.double() for each in tensors()])
    check(one, tensors())
    assert clock.count == 6
    assert chosen(one) == ["flash", "math", "math"]


def test_a_kernel_that_fails_or_is_wrong_is_left_out() -> None:
    def failing(given: AttentionArgs) -> torch.Tensor:
        raise RuntimeError("no such kernel here\nand more")

    def wrong(given: AttentionArgs) -> torch.Tensor:
        return math(given) * 1.01

    def transposed(given: AttentionArgs) -> torch.Tensor:
        return math(given).transpose(1, 2)

    one = chooser(Timed({math: 3.0}), failing=failing, wrong=wrong, transposed=transposed, math=math)
    check(one, tensors())
    assert chosen(one) == ["math"]
    assert one.report()[0]["failed"] == {
        "failing": "no such kernel here", "wrong": "its result differs from torch's",
        "transposed": "its result differs from torch's",
    }  # fmt: skip
    none = chooser(Timed({}), failing=failing, wrong=wrong)
    check(none, tensors())
    assert chosen(none) == ["torch"]


def test_a_kernel_that_fails_later_costs_no_picture() -> None:
    broken: list[bool] = []

    def later(given: AttentionArgs) -> torch.Tensor:
        if broken:
            raise RuntimeError("its workspace")
        return math(given)

    one = chooser(Timed({flash: 2.0, later: 1.0}), flash=flash, later=later)
    check(one, tensors())
    assert chosen(one) == ["later"]
    broken.append(True)
    check(one, tensors())
    assert chosen(one) == ["torch"]
    assert one.report()[0]["failed"] == {"later": "its workspace"}


def lacking(lacks: list[bool]) -> Callable[[AttentionArgs], torch.Tensor]:
    """A kernel named hungry that finds no memory while the list has an entry."""

    def hungry(given: AttentionArgs) -> torch.Tensor:
        if lacks:
            raise torch.OutOfMemoryError("its workspace")
        return math(given)

    return hungry


def test_a_lack_of_memory_while_measuring_is_not_kept() -> None:
    lacks = [True]
    hungry = lacking(lacks)
    one = chooser(Timed({flash: 2.0, hungry: 1.0}), flash=flash, hungry=hungry)
    check(one, tensors())
    assert chosen(one) == []
    lacks.clear()
    check(one, tensors())
    assert chosen(one) == ["hungry"]


def test_a_lack_of_memory_for_what_kernels_are_compared_with_costs_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionArgs] = []

    def second_one_fails(given: AttentionArgs) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("a second result")
        return math(given)

    monkeypatch.setattr(attention, "torch_attention", second_one_fails)
    one = chooser(Timed({flash: 2.0, math: 1.0}), flash=flash, math=math)
    check(one, tensors(), mask=MASKS["added"])
    assert (len(calls), chosen(one)) == (3, [])


def test_a_chosen_kernel_that_lacks_memory_once_stays_chosen() -> None:
    lacks: list[bool] = []
    hungry = lacking(lacks)
    one = chooser(Timed({flash: 2.0, hungry: 1.0}), flash=flash, hungry=hungry)
    check(one, tensors())
    lacks.append(True)
    check(one, tensors())
    assert chosen(one) == ["hungry"]
    assert one.report()[0]["failed"] == {}


def test_what_the_original_refuses_is_refused() -> None:
    one = chooser(Timed({flash: 1.0, math: 1.0}))
    q, k, v = tensors()
    with pytest.raises(RuntimeError):
        one(AttentionArgs(q, k[..., :4], v))


MASKS = {
    "keys": torch.tensor([True, False, True, True, False]).view(1, 1, 1, 5),
    "pairs": random(2, 1, 9, 5, seed=7) > 0,
    "added": random(2, 3, 9, 5, seed=8),
    "a row of nothing": torch.arange(9).view(1, 1, 9, 1).expand(1, 1, 9, 5) > 0,
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_measured_and_kernels_without_masks_are_left_out(mask: str) -> None:
    def without(given: AttentionArgs) -> torch.Tensor:
        return kernels._flash(given)

    clock = Timed({math: 1.0})
    one = chooser(clock, flash=without, math=math)
    for _ in range(2):
        check(one, tensors(), mask=MASKS[mask])
    (entry,) = one.report()
    assert (entry["kernel"], entry["mask"], clock.count) == ("math", list(MASKS[mask].shape), 1)
    assert entry["failed"] == {"flash": "it takes no mask"}
    clock.by_kernel[without] = 0.5
    check(one, tensors())  # another kind of call
    assert len(one.report()) == 2


def test_a_kernel_without_numbers_for_a_masked_row_is_left_out_before_such_a_mask_comes() -> None:
    def plain(given: AttentionArgs) -> torch.Tensor:
        q, k, v, *_ = given
        added = bias(given)
        assert added is not None
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + added).softmax(-1) @ v

    one = chooser(Timed({math: 2.0, plain: 1.0}), plain=plain, math=math)
    rows = MASKS["a row of nothing"]
    check(one, tensors(), mask=torch.ones_like(rows))
    assert chosen(one) == ["math"]
    check(one, tensors(), mask=rows)
    check(one, tensors(), mask=MASKS["added"])  # its lowest number masks nothing
    assert chosen(one) == ["math", "plain"]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_fewer_heads_of_keys_and_values_are_groups(scale: float | None) -> None:
    def otherwise(given: AttentionArgs) -> torch.Tensor:
        return flash(given._replace(k=given.k.repeat(1, 3, 1, 1), v=given.v.repeat(1, 3, 1, 1)))

    q, (_, k, v) = tensors(heads=6)[0], tensors(heads=2)
    one = chooser(Timed({math: 2.0}), otherwise=otherwise, math=math)
    check(one, [q, k, v], scale, enable_gqa=True)
    assert chosen(one) == ["math"]
    assert set(one.report()[0]["failed"]) == {"otherwise"}


def test_masks_for_kernels() -> None:
    """Numbers of q's dtype, in rows that begin at multiples of 16 numbers."""
    q, k, v = (each.bfloat16() for each in tensors())
    given = AttentionArgs(q, k, v)
    for mask in (MASKS["keys"], MASKS["pairs"]):
        added = bias(given._replace(mask=mask))
        assert added is not None and added.dtype == torch.bfloat16
        assert torch.equal(added == 0, mask) and torch.equal(added.isinf(), ~mask)
    assert bias(given) is None
    own = MASKS["added"].bfloat16()
    assert bias(given._replace(mask=own)) is own
    with pytest.raises(kernels.RefusedError, match="float32"):
        bias(given._replace(mask=MASKS["added"]))
    even = kernels.aligned(MASKS["added"])
    assert torch.equal(even, MASKS["added"]) and even.stride()[-2:] == (16, 1)
    assert kernels.aligned(torch.zeros(2, 32)).stride() == (32, 1)


def math_2(given: AttentionArgs) -> torch.Tensor:
    return math(given)


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("more", [{}, {"mask": MASKS["pairs"]}])
def test_an_unknown_shape_refuses_a_capture_and_nothing_is_measured_in_it(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    clock = Timed({math_2: 2.0, math: 1.0})
    one = chooser(clock, first=math_2, math=math)
    capturing = iter([True, False, True])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    given = [each.as_subclass(OnCuda) for each in tensors()]
    with pytest.raises(torch.OutOfMemoryError, match="could not be measured"):  # it has run before, without a choice
        one(AttentionArgs(*given))
    assert (clock.count, chosen(one)) == (0, [])
    for _ in range(2):
        one(AttentionArgs(*given, **more))
        assert (clock.count, chosen(one)) == (2, ["math"])


def test_a_neighbour_within_a_factor_of_two_runs_its_kernel_unmeasured() -> None:
    clock = Timed({flash: 2.0, math: 1.0})
    one = chooser(clock)
    check(one, tensors(tokens=64, context=64))
    for tokens, context, measured in ((128, 64, 2), (32, 128, 2), (130, 64, 4), (65, 32, 4)):
        check(one, tensors(tokens=tokens, context=context))
        assert clock.count == measured, (tokens, context)
    near = {tuple(each["q"])[2]: each["like"] for each in one.report()}
    assert near == {64: None, 128: [64, 64], 32: [64, 64], 130: None, 65: [64, 64]}
    check(one, tensors(tokens=64, context=64, batch=1))
    assert clock.count == 4
    check(one, tensors(tokens=64, context=64, batch=5))
    check(one, tensors(tokens=64, context=64, heads=4))  # another kind of call
    assert clock.count == 8


def test_a_neighbours_kernel_that_is_wrong_here_is_measured_again() -> None:
    def sometimes(given: AttentionArgs) -> torch.Tensor:
        return math(given) * (1.0 if given.q.shape[2] == 64 else 1.01)

    one = chooser(Timed({flash: 2.0, sometimes: 1.0}), flash=flash, sometimes=sometimes)
    check(one, tensors(tokens=64))
    check(one, tensors(tokens=65))
    assert chosen(one) == ["sometimes", "flash"]


def test_without_a_mask_kernels_are_compared_with_flash_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionArgs] = []
    monkeypatch.setattr(attention, "torch_attention", lambda given: asked.append(given) or math(given))
    check(chooser(Timed({flash: 2.0, math: 1.0})), tensors())
    assert not asked, "it may be cuDNN, which prepares each shape"

    def not_here(given: AttentionArgs) -> torch.Tensor:
        raise RuntimeError("no such width")

    one = chooser(Timed({math: 1.0}), flash=not_here, math=math)
    check(one, tensors())
    check(one, tensors(heads=4), mask=MASKS["keys"])
    assert (len(asked), chosen(one)) == (3, ["math", "math"])  # the second call twice: once with a masked row


def test_where_cudnn_is_chosen_a_thread_compiles_its_other_kernels_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    widths: list[int] = []

    def compile_cudnn(device: torch.device, dtype: torch.dtype, layouts: Any) -> None:
        widths.append(layouts[0][0])
        raise RuntimeError("no cuDNN for this width")  # which costs nothing

    monkeypatch.setattr(attention, "compile_cudnn", compile_cudnn)
    clock = Timed({flash: 2.0, math: 1.0})
    one = chooser(clock, flash=flash, cudnn=math)
    with caplog.at_level(logging.DEBUG, attention.__name__):
        for tokens, width in ((9, 8), (12, 8), (9, 16)):
            check(one, tensors(tokens=tokens, width=width))
        check(one, tensors(width=32), mask=MASKS["keys"])
        assert chosen(one) == ["cudnn"] * 4
        clock.by_kernel = {flash: 1.0, math: 2.0}
        check(one, tensors(width=64))
        assert chosen(one)[-1] == "flash"
        for each in threading.enumerate():
            if each.name == "resolute-cudnn":
                each.join(60)
    assert sorted(widths) == [8, 16]
    assert caplog.text.count("no cuDNN for this width") == 2


def test_a_trace_of_attention_has_a_thread_load_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(attention, "compile_cudnn", lambda device, dtype, layouts: found.append(layouts))
    monkeypatch.setattr(attention, "chooser", chooser(Timed({}), flash=flash, cudnn=math))

    def block(module: Any, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        result: torch.Tensor = attention.operator()(q, q, q)
        return result

    for _ in range(2):
        with torch.no_grad():
            traced = trace(block, nn.Module(), [torch.zeros(2, 9, 16)], (("b", "n", None),), {"b": 17, "n": 9})
        operators.prepare(traced.graph.graph)
    for each in threading.enumerate():
        if each.name == "resolute-cudnn":
            each.join(60)
    assert found == [[(8, (8, 16, 1))] * 3]


def test_other_kernels_are_not_tried_where_the_first_takes_no_time() -> None:
    def untried(given: AttentionArgs) -> torch.Tensor:
        raise AssertionError("cuDNN prepares a shape for 60 ms")

    one = chooser(Timed({flash: 20e-6}), flash=flash, cudnn=untried)
    check(one, tensors())
    assert chosen(one) == ["flash"]
    assert one.report()[0]["failed"] == {}


@pytest.mark.parametrize(("runs", "tried"), [(True, False), (False, True)])
def test_the_stand_in_is_tried_only_where_flash_fails(runs: bool, tried: bool) -> None:
    def first(given: AttentionArgs) -> torch.Tensor:
        if runs:
            return math(given)
        raise RuntimeError("not in float32")

    one = chooser(Timed({first: 3.0, flash: 2.0, math: 1.0}), flash=first, efficient=flash, cudnn=math)
    check(one, tensors())
    assert ("efficient" in one.report()[0]["milliseconds"]) is tried


def test_the_next_process_runs_the_same_kernels_and_measures_nothing(tmp_path: Path) -> None:
    waits: list[str] = []

    @contextlib.contextmanager
    def waiting(text: str) -> Iterator[None]:
        waits.append(text)
        yield

    first = chooser(Timed({flash: 2.0, math: 1.0}))
    first.use(tmp_path / "attention", waiting)
    for tokens in (9, 12, 40):
        for _ in range(2):
            check(first, tensors(tokens=tokens))
    assert waits == ["attention of 2x3x9x8", "attention of 2x3x12x8", "attention of 2x3x40x8"]
    again = chooser(clock := Timed({flash: 1.0, math: 2.0}))
    again.use(tmp_path / "attention", waiting)
    for tokens in (40, 12, 9):
        check(again, tensors(tokens=tokens))
    assert clock.count == 0
    assert again.report() == first.report()
    assert len(waits) == 6  # a kernel's first run prepares it
    without = chooser(clock, flash=flash, other=flash)  # "math" is not there any more
    without.use(tmp_path / "attention", waiting)
    check(without, tensors())
    assert chosen(without)[-1] == "flash"


def test_on_the_cpu_torch_chooses() -> None:
    one = Chooser()
    check(one, tensors())
    assert chosen(one) == []


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chooser]:
    """The process's operator chooses between two kernels, and the one that torch would not take is faster."""
    attention.operator()
    one = chooser(Timed({flash: 2.0, math: 1.0}))
    # Another copy of the pack may have defined the operator: what they share becomes this one, with all that it keeps.
    monkeypatch.setattr(attention.chooser, "__dict__", vars(one))
    yield one
    assert set(chosen(one)) == {"math"}


@pytest.mark.long
def test_a_region_with_it_serves_every_size_from_a_worker_and_in_another_process(
    both: Chooser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 2.0)
    rig = Rig(InductorBackend(), store_folder=tmp_path, source="one", workers=2)
    bound = rig.bind(seeded(Net))
    with rig.expect(region_compiles=1, verifications=1, region_calls=2, graph_calls=1):
        bound(*net_inputs())
    plain = seeded(lambda: Net(Attention))
    plain.load_state_dict(bound.module.state_dict())
    with rig.expect(region_calls=2 * len(SIZES), graph_calls=len(SIZES), verifications=ANY):
        for size in SIZES:
            given = net_inputs(*size)
            with torch.inference_mode():
                assert relative_error(bound(*given), plain(*given)) <= TOLERANCE
    assert set(SIZES) <= {(each["q"][0], each["q"][2], each["k"][2]) for each in both.report()}
    code = """
import sys
from pathlib import Path
import torch
from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.lower import operators
from compile_cache.backends.inductor.lower.tracing import trace
from tests.contract.attention.net import Net, net_inputs
from tests.contract.rig import TOLERANCE, Rig, relative_error, seeded
rig = Rig(InductorBackend(), store_folder=Path(sys.argv[1]), source="one", workers=0)
bound = rig.bind(seeded(Net))
with rig.expect(region_loads=1, region_calls=2, graph_calls=1):
    result = bound(*net_inputs())
with torch.inference_mode():
    print(relative_error(result, bound.module(*net_inputs())) <= TOLERANCE)
"""
    assert run_python(code, tmp_path).strip() == "True"


class TestTracedAttention:
    """The families' attention, as a trace sees it."""

    @pytest.fixture
    def common(self, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
        module = adapter("blocks.common")
        module._is_measured.cache_clear()
        assert module.is_nvidia("cuda") and not module.is_nvidia("cpu")
        monkeypatch.setattr(module, "is_nvidia", lambda device: True)
        yield module
        module._is_measured.cache_clear()

    def operators(self, common: ModuleType, *given: torch.Tensor) -> set[str]:
        """The operators of attention in the graph."""

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = common.traced_attention(None, *tensors[:3], 3, *tensors[3:], skip_reshape=True)
            return result

        graph = torch.fx.experimental.proxy_tensor.make_fx(run, tracing_mode="symbolic")(*given).graph
        return {name for name in map(str, (node.target for node in graph.nodes)) if "attention" in name}

    def test_the_operator_is_in_a_trace_unless_a_person_asks_for_flash(
        self, common: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.operators(common, *tensors()) == {"resolute.attention.default"}
        assert self.operators(common, *tensors(), torch.zeros(9, 5)) == {"resolute.attention.default"}
        monkeypatch.setenv("RESOLUTE_ATTENTION", "flash")
        common._is_measured.cache_clear()
        assert self.operators(common, *tensors()) == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}

    def test_a_block_without_compiled_code_computes_attention_by_its_own_function(self, common: ModuleType) -> None:
        """Another pack may have exchanged what that calls, and no operator of ours would call it."""

        def own(*given: Any, **named: Any) -> Any:
            return given, named

        form = {"skip_reshape": True, "skip_output_reshape": False, "scale": 0.4}
        with common.attention.eager_attention():
            given, named = common.traced_attention(own, *"qkv", 3, None, **form)
        assert (given, named) == ((*"qkv", 3), {"mask": None, "attn_precision": None, **form})
        assert self.operators(common, *tensors()) == {"resolute.attention.default"}

    @pytest.mark.parametrize("skip_output_reshape", [False, True])
    def test_both_forms_give_the_same(
        self, common: ModuleType, monkeypatch: pytest.MonkeyPatch, skip_output_reshape: bool
    ) -> None:
        def run() -> torch.Tensor:
            common._is_measured.cache_clear()
            given = {"skip_reshape": True, "skip_output_reshape": skip_output_reshape, "scale": 0.4}
            result: torch.Tensor = common.traced_attention(None, *tensors(), 3, **given)
            return result

        expected = run()
        monkeypatch.setenv("RESOLUTE_ATTENTION", "flash")
        assert relative_error(run(), expected) <= TOLERANCE

    def test_queries_reach_the_kernel_by_token_and_only_those_by_head_are_copied(self, common: ModuleType) -> None:
        """Kernels lay out their result as q, so that the result needs no copy."""

        def copies(split: Callable[[torch.Tensor], torch.Tensor], width: int = 24) -> int:
            def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
                q = split(torch.nn.functional.linear(x, weight.reshape(width, 5)))  # static, as a weight is
                return common.traced_attention(None, q, q, q, 3, skip_reshape=True)

            make = torch.fx.experimental.proxy_tensor.make_fx(run, tracing_mode="symbolic")
            graph = make(random(2, 9, 5), random(width, 5)).graph
            (call,) = (node for node in graph.nodes if "attention" in str(node.target))
            assert call.args[0].meta["val"].stride()[1:] == (8, width, 1)
            return sum("clone" in str(node.target) for node in graph.nodes)

        by_token = copies(lambda x: x.reshape(x.shape[0], -1, 3, 8).transpose(1, 2))
        by_head = copies(lambda x: x.reshape(x.shape[0], -1, 3, 8).transpose(1, 2).clone(memory_format=FLAT))
        joined = copies(lambda x: x.reshape(x.shape[0], -1, 3, 3, 8)[:, :, 0].transpose(1, 2), 72)
        assert (by_token, by_head, joined) == (0, 2, 0)  # by head: the test's own and ours
