"""OneFlow must not end the process, fill its memory or change its settings. Risky cases run in their own process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from compile_cache.backends.oneflow.runtime import Runtime, runtime
from compile_cache.errors import CaptureError
from scripts.places import ROOT

from .rig import TOLERANCE, Bound, Layers, close_all, random, rows, with_weights


def run_alone(code: str) -> str:
    """Run `code` in a new process, which must succeed, and return its output."""
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


def test_after_a_failed_plan_nothing_is_built_and_the_process_survives() -> None:
    printed = run_alone(
        """
        import torch
        from compile_cache.backends.oneflow import program
        from tests.oneflow.rig import Bound, Layers, rows, with_weights

        good = with_weights(Layers())
        first = Bound(good)
        first(rows(2))
        assert first.cache.stats.counters.captures == 1

        # Half precision on the CPU, with the two checks removed that would refuse it.
        program._require_float32_on_cpu = lambda *_: None
        program.OneFlowProgram._check = lambda self, call, forward, structure, result: [
            program.to_oneflow(call.tensors[index]) for index in forward.inputs
        ]
        half = with_weights(Layers()).half()
        failed = Bound(half, backend=first.backend)
        failed(rows(2).half())
        print(failed.bypasses[0])

        first(rows(3))
        print(first.bypasses[0])
        first(rows(2))
        assert first.cache.stats.counters.replays == 1, "a graph that was built before still works"
        first.close()
        assert torch.equal(first(rows(2)), first.original(rows(2)))
        print("alive")
        """
    )
    assert "could not compile its plan" in printed
    assert "failed once in this process" in printed
    assert "Restart ComfyUI" in printed
    assert printed.rstrip().endswith("alive")


def test_importing_and_using_oneflow_leaves_the_process_unchanged() -> None:
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
    assert printed.startswith("oneflow, as chosen (compiler lowering, oneflow 0.9.0, onediff 1.2.0;")


@pytest.fixture(autouse=True)
def _no_graph_is_left() -> Iterator[None]:
    yield
    close_all()


@pytest.mark.long
def test_building_and_closing_large_graphs_never_restarts_the_session() -> None:
    """OneFlow destroys a graph in its own thread. Restarting its session meanwhile, the only way to return memory, ends
    the process (`Check failed: id2actor_ptr_.empty()`, seen with SD1.5's UNet), so it must never happen."""
    printed = run_alone(
        """
        from oneflow.framework.multi_client_session import MultiClientSession
        from tests.oneflow.rig import Bound, ManyOperators, random

        def refuse(self):
            raise SystemExit("the session was restarted")

        MultiClientSession.Reset = MultiClientSession._TryClose = refuse
        for rows in (1024, 1025):
            bound = Bound(many := ManyOperators())
            bound(random(rows, 512))
            bound(random(rows, 512))
            assert bound.cache.stats.counters.replays == 1, bound.bypasses
            bound.cache.trim()
            bound.close()
        print("alive")
        """
    )
    assert printed.rstrip().endswith("alive")


class TestMemory:
    @pytest.fixture
    def bound(self) -> Iterator[Bound]:
        layers = with_weights(Layers())
        yield Bound(layers)

    def test_is_limited_by_bytes_and_the_next_size_runs_eagerly_with_the_reason(
        self, bound: Bound, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runtime(), "bytes", bound.cache.config.budget_bytes)
        assert torch.equal(bound(rows(2)), bound.original(rows(2)))
        (reason,) = bound.bypasses
        assert "RESOLUTE_BUDGET_MB" in reason
        assert "Restart ComfyUI" in reason

    def test_is_limited_by_the_number_of_graphs_and_existing_ones_still_replay(
        self, bound: Bound, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runtime(), "max_graphs", runtime().built + 2)
        for number in (1, 2, 3):
            bound(rows(number))
        assert bound.cache.stats.counters.captures == 2
        assert f"the limit is {runtime().max_graphs} graphs" in bound.bypasses[0]
        with bound.expect(replays=2):
            bound(rows(1))
            bound(rows(2))

    def test_of_a_closed_graph_still_counts(self, bound: Bound) -> None:
        built, used = runtime().built, runtime().bytes
        bound(rows(2))
        size = bound.cache.bytes
        bound.close()
        assert bound.cache.bytes == 0
        assert (runtime().built, runtime().bytes) == (built + 1, used + size)

    def test_is_not_trimmed_because_closing_a_graph_frees_nothing(self, bound: Bound) -> None:
        bound(rows(2))
        assert bound.cache.trim() == 0
        with bound.expect(replays=1):
            assert bound.error(rows(2)) <= TOLERANCE


def test_a_very_short_forward_gets_no_graph() -> None:
    """Such a graph finishes before OneFlow 0.9.0 has queued it, which corrupts memory and may crash the process."""
    linear = with_weights(nn.Linear(8, 8))
    bound = Bound(linear)
    for _ in range(2):
        assert torch.equal(bound(random(2, 8)), bound.original(random(2, 8)))
    (reason,) = bound.bypasses
    assert "may crash on a graph that finishes within" in reason
    assert bound.cache.stats.counters.captures == 0


def test_a_graph_with_a_wrong_result_is_refused() -> None:
    """The original counts as right. This one changes between two calls, so the graph's result must differ."""
    linear = with_weights(Layers())
    factors = iter([1.0, 2.0, 3.0, 4.0])
    bound = Bound(linear, lambda tensors: linear(tensors[0]) * next(factors))
    bound(rows(2))
    assert "differs from the original's result by" in bound.bypasses[0]
    assert bound.cache.stats.counters.captures == 0


def test_a_failed_runtime_refuses_first() -> None:
    failed = Runtime()
    failed.failure = "RuntimeError: no kernel"
    with pytest.raises(CaptureError, match="no kernel"):
        failed.require_room(10**12)
