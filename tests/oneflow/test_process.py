"""What OneFlow could do to the process: end it, fill its memory, change its settings. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from compile_cache.backends.oneflow.runtime import Runtime, memory_in_use, runtime
from compile_cache.errors import CaptureError
from scripts.support.places import ROOT

from .rig import MIB, TOLERANCE, Bound, Layers, close_all, random, rows, with_weights


def run_alone(code: str) -> str:
    """What a process that runs `code` prints; it has to end by itself, without an error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    return done.stdout


def test_after_a_plan_that_failed_nothing_is_built_and_the_process_lives() -> None:
    printed = run_alone(
        """
        import torch
        from compile_cache.backends.oneflow import program
        from tests.oneflow.rig import Bound, Layers, rows, with_weights

        good = with_weights(Layers())
        first = Bound(good)
        first(rows(2))
        assert first.cache.stats.counters.captures == 1

        # Half precision on the CPU, without the two checks that keep it from becoming a plan.
        program._demand_dtypes = lambda *_: None
        program.OneFlowProgram._check = lambda self, call, forward, result: [
            program.to_oneflow(tensor) for tensor in forward.inputs(call.tensors)
        ]
        half = with_weights(Layers()).half()
        failed = Bound(half, backend=first.backend)
        failed(rows(2).half())
        print(failed.bypasses[0])

        first(rows(3))
        print(first.bypasses[0])
        first(rows(2))
        assert first.cache.stats.counters.replays == 1, "what was built before goes on"
        first.cache.trim()  # starts no session anew: that would end the process as well
        assert torch.equal(first(rows(2)), first.original(rows(2)))
        print("alive")
        """
    )
    assert "could not compile its plan" in printed
    assert "failed once in this process" in printed
    assert "Restart ComfyUI" in printed
    assert printed.rstrip().endswith("alive")


def test_importing_and_using_it_leaves_the_process_as_it_was() -> None:
    printed = run_alone(
        """
        import os, sys, torch
        from tests.oneflow.rig import Bound, Layers, rows, with_weights

        before = dict(os.environ), sys.exit, sys.excepthook
        bound = Bound(with_weights(layers := Layers()))
        assert "oneflow" not in sys.modules, "binding imports nothing"
        bound(rows(2))
        bound(rows(2))
        assert bound.cache.stats.counters.replays == 1, bound.bypasses
        assert (dict(os.environ), sys.exit, sys.excepthook) == before
        print("unchanged")
        """
    )
    assert "unchanged" in printed


def test_a_probe_imports_neither_package() -> None:
    printed = run_alone(
        """
        import sys
        from compile_cache.backends import registry

        _, capabilities, why = registry.resolve("oneflow", "cpu")
        assert capabilities.available, capabilities
        assert not [name for name in sys.modules if name.partition(".")[0] in ("oneflow", "onediff")]
        print(why)
        """
    )
    assert printed.strip() == "oneflow, as chosen (compiler lowering, oneflow 0.9.0, onediff 1.2.0)"


@pytest.fixture(autouse=True)
def _no_graph_is_left() -> Iterator[None]:
    yield
    close_all()


class TestMemory:
    def test_comes_back_when_the_last_graph_goes_and_graphs_can_be_built_again(self) -> None:
        class Wide(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(8):
                    x = torch.tanh(x) + 1
                return x

        wide = Wide()
        bound = Bound(wide)
        cpu = torch.device("cpu")
        levels = []
        for _ in range(3):
            bound(random(4096, 1024))
            assert bound.cache.bytes > 80 * MIB
            with bound.expect(replays=1):
                assert bound.error(random(4096, 1024)) <= TOLERANCE
            bound.cache.trim()
            levels.append(memory_in_use(cpu))
        assert levels[2] - levels[0] < 100 * MIB, levels

    def test_is_bounded_by_bytes_and_the_next_size_says_so_and_runs_eagerly(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linear = with_weights(Layers())
        bound = Bound(linear, budget=1)
        monkeypatch.setattr(runtime(), "bytes", 1)
        assert torch.equal(bound(rows(2)), bound.original(rows(2)))
        (told,) = bound.bypasses
        assert "RESOLUTE_BUDGET_MB" in told
        assert "Free Graphs" in told

    def test_is_bounded_by_the_number_of_graphs_built_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        linear = with_weights(Layers())
        bound = Bound(linear)
        monkeypatch.setattr(runtime(), "most", runtime().built + 2)
        for number in (1, 2, 3):
            bound(rows(number))
        assert bound.cache.stats.counters.captures == 2
        assert f"the limit is {runtime().most} graphs" in bound.bypasses[0]
        with bound.expect(replays=2):
            bound(rows(1))
            bound(rows(2))
        bound.cache.trim()
        assert runtime().built == 0, "no other graph is there, so everything begins again"
        bound(rows(3))
        assert bound.cache.stats.counters.captures == 3

    def test_does_not_come_back_under_a_graph_that_lives_and_the_process_goes_on(self) -> None:
        linear = with_weights(Layers())
        alive, other = Bound(linear), Bound(linear)
        alive(rows(2))
        other(rows(2))
        other.cache.trim()
        assert runtime().built >= 2
        with alive.expect(replays=1):
            assert alive.error(rows(2)) <= TOLERANCE
        alive.cache.trim()
        assert runtime().built == 0


def test_a_forward_that_is_over_at_once_gets_no_graph() -> None:
    """OneFlow 0.9.0 takes it off a queue before it put it there, and the process dies of that sooner or later."""
    linear = with_weights(nn.Linear(8, 8))
    bound = Bound(linear)
    for _ in range(2):
        assert torch.equal(bound(random(2, 8)), bound.original(random(2, 8)))
    (told,) = bound.bypasses
    assert "may crash on a graph that is done within" in told
    assert bound.cache.stats.counters.captures == 0


def test_a_graph_that_answers_wrongly_is_refused() -> None:
    """The original is right by definition: here it changes between two calls, so that the graph cannot agree."""
    linear = with_weights(Layers())
    factors = iter([1.0, 2.0, 3.0, 4.0])
    bound = Bound(linear, lambda tensors: linear(tensors[0]) * next(factors))
    bound(rows(2))
    assert "away from the original" in bound.bypasses[0]
    assert bound.cache.stats.counters.captures == 0


def test_a_runtime_that_failed_refuses_before_anything_else() -> None:
    failed = Runtime()
    failed.failure = "RuntimeError: no kernel"
    with pytest.raises(CaptureError, match="no kernel"):
        failed.demand_room(10**12)
