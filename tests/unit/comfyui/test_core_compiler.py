"""The switch of core's own compiler: off while a call of ours runs, in any thread, and put back afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FLAGS = {"disable_comfy_compiler": False, "disable_cuda_graphs": False}


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The command line of a ComfyUI that has the compiler: `comfy.cli_args.args`."""
    found = SimpleNamespace(**FLAGS, cpu=False)
    comfy, cli = ModuleType("comfy"), ModuleType("comfy.cli_args")
    cli.args = found  # type: ignore[attr-defined]
    comfy.cli_args = cli  # type: ignore[attr-defined]
    for module in (comfy, cli):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.fixture
def core_compiler(args: SimpleNamespace, pack: Callable[[str], Any]) -> Iterator[Any]:
    module = pack("nodes.adapters.comfyui.core_compiler")
    module.comfy = sys.modules["comfy"]
    yield module


def test_it_is_off_in_the_block_and_put_back(core_compiler: Any, args: SimpleNamespace) -> None:
    with core_compiler.switched_off():
        assert vars(args) == {**dict.fromkeys(FLAGS, True), "cpu": False}
        with core_compiler.switched_off():
            pass
        assert args.disable_comfy_compiler
    assert vars(args) == {**FLAGS, "cpu": False}


def test_what_the_user_switched_off_stays_off(core_compiler: Any, args: SimpleNamespace) -> None:
    args.disable_cuda_graphs = True
    with core_compiler.switched_off():
        pass
    assert args.disable_cuda_graphs and not args.disable_comfy_compiler


def test_a_comfyui_without_it_gets_no_switch(core_compiler: Any, args: SimpleNamespace) -> None:
    for name in FLAGS:
        delattr(args, name)
    with core_compiler.switched_off():
        assert vars(args) == {"cpu": False}
    assert vars(args) == {"cpu": False}


def test_calls_that_overlap_on_several_threads_put_it_back_at_the_end(
    core_compiler: Any, args: SimpleNamespace
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with core_compiler.switched_off():
            entered.set()
            assert leave.wait(30)

    other = threading.Thread(target=first)
    other.start()
    assert entered.wait(30)
    with core_compiler.switched_off():
        leave.set()
        other.join()
        assert args.disable_comfy_compiler, "put back while a call of ours was at work"
    assert not args.disable_comfy_compiler


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A recording of core's in this thread."""
    graph, prefetch = SimpleNamespace(_comfy_active=True), ModuleType("comfy.model_prefetch")
    prefetch.MALLOC_GRAPHS = {threading.get_ident(): graph}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    return graph


def test_a_recording_is_seen_in_its_own_thread_only(core_compiler: Any, recording: SimpleNamespace) -> None:
    seen: list[bool] = []
    other = threading.Thread(target=lambda: seen.append(core_compiler.is_recording()))
    other.start()
    other.join()
    assert core_compiler.is_recording()
    assert seen == [False]
    recording._comfy_active = False  # it is kept for the next step
    assert not core_compiler.is_recording()


@pytest.mark.usefixtures("recording")
def test_inside_a_recording_the_switch_stays(core_compiler: Any, args: SimpleNamespace) -> None:
    # Core ends a recording without asking for the switch: a begin left out in it would end the outer one.
    with core_compiler.switched_off():
        assert not args.disable_comfy_compiler


def test_nothing_records_where_core_has_no_compiler(core_compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "comfy.model_prefetch", raising=False)
    assert not core_compiler.is_recording()
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", ModuleType("comfy.model_prefetch"))  # 0.33
    assert not core_compiler.is_recording()
