"""A Triton kernel of another package never breaks a capture: it gets addresses, or its call is refused, whatever the
package catches.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_cache.attention import chosen
from compile_cache.backends.cuda_graphs import capture, foreign_launches
from compile_cache.backends.cuda_graphs.foreign_launches import UnsafeLaunchError, launches_by_address
from compile_cache.errors import CaptureError
from compile_cache.torch_compat import private_names


class Launcher:
    """Triton's, as far as a launch goes."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.launched.append(args)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    class Own(Launcher):
        """Each test guards one."""

    monkeypatch.setattr(private_names, "CudaLauncher", Own, raising=False)
    triton = importlib.import_module("triton") if find_spec("triton") else sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(foreign_launches, "is_trimmable", lambda: True)
    return Own()


@pytest.fixture
def attention(launcher: Launcher) -> Any:
    """The operator of an attention that does as ComfyUI's with SageAttention: after an error it takes another one."""

    def sage(q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        try:
            launcher(1, 1, 1, q, 0.5)
        except Exception:  # noqa: BLE001 (as ComfyUI's attention does)
            return q + 1
        return q + 2

    chosen.use("test", {"sage": sage}.get)
    yield lambda q: chosen.operator()(q, q, q, "sage", 1, None, False, False, None, False, True)
    chosen._finds.pop("test")


def test_a_launch_without_addresses_is_refused_past_what_catches_errors(attention: Any, launcher: Launcher) -> None:
    q = torch.zeros(1, 2, 4)
    with pytest.raises(UnsafeLaunchError, match=f"^{__name__} launches a Triton kernel"), launches_by_address():
        attention(q)
    assert launcher.launched == []
    assert torch.equal(attention(q), q + 2), "later calls launch it"


def test_a_rehearsal_says_what_cannot_be_captured(attention: Any) -> None:
    with pytest.raises(CaptureError, match=f"cannot be captured: {__name__} launches a Triton kernel"):
        capture._run(lambda tensors: attention(tensors[0]), [torch.zeros(1, 2, 4)])


def test_a_refusal_stands_where_a_package_catches_everything(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    left: list[Any] = []

    def catches_everything(tensors: Any) -> torch.Tensor:
        result = tensors[0] + 1
        made.append(weakref.ref(result))
        try:
            launcher(1, 1, 1, result)
        except:  # noqa: E722 (as some packages do)
            result += 1
        return result

    graph = SimpleNamespace(
        capture_begin=lambda **_: None, capture_end=lambda: left.extend(each() for each in made if each() is not None)
    )
    x = torch.zeros(1)
    with pytest.raises(CaptureError, match="launches a Triton kernel"):
        capture._run(catches_everything, [x])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    with pytest.raises(CaptureError, match="launches a Triton kernel"):
        capture._capture_on_current_stream(catches_everything, [x], [x.clone()], None)
    assert len(made) == 2
    assert left == [], "its tensors go while the capture runs"
    assert launcher.launched == []
    capture._run(lambda tensors: tensors[0] + 1, [x])  # a later call is not refused for it


def test_a_launch_with_a_descriptor_of_a_tensor_is_refused(launcher: Launcher) -> None:
    triton = pytest.importorskip("triton.tools.tensor_descriptor", reason="Triton is not installed")
    descriptor = triton.TensorDescriptor
    with pytest.raises(UnsafeLaunchError), launches_by_address():
        launcher(1, 1, 1, descriptor(torch.zeros(16, 16), [16, 16], [16, 1], [16, 16]))


def test_a_launch_with_a_tuple_of_tensors_or_an_array_of_another_library_is_refused(launcher: Launcher) -> None:
    for argument in ((0.5, (torch.zeros(1),)), SimpleNamespace(data_ptr=lambda: 4096)):
        with pytest.raises(UnsafeLaunchError), launches_by_address():
            launcher(1, 1, 1, argument)
    assert launcher.launched == []


def test_a_launch_that_allocates_is_refused(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(launcher), "global_scratch_size", 128, raising=False)
    with pytest.raises(UnsafeLaunchError), launches_by_address():
        launcher(1, 1, 1, 0.5)
    assert launcher.launched == []


def test_the_launcher_gets_addresses(launcher: Launcher) -> None:
    on_gpu = SimpleNamespace(data_ptr=lambda: 4096, device=torch.device("cuda", 0))
    for _ in range(2):
        with launches_by_address():
            launcher(1, 1, 1, on_gpu, 0.5, 512, None)
    launcher(1, 1, 1, on_gpu)
    assert launcher.launched == [(1, 1, 1, 4096, 0.5, 512, None)] * 2 + [(1, 1, 1, on_gpu)]


def test_with_torchs_own_allocator_and_in_other_threads_nothing_is_refused(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launches_by_address():
        thread = threading.Thread(target=launcher, args=(1, torch.zeros(1)))
        thread.start()
        thread.join()
    assert len(launcher.launched) == 1
    monkeypatch.setattr(foreign_launches, "is_trimmable", lambda: False)
    with launches_by_address():
        launcher(1, torch.zeros(1))
    assert len(launcher.launched) == 2


def test_where_triton_was_not_used_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_launches, "is_trimmable", lambda: True)
    monkeypatch.setattr(private_names, "CudaLauncher", None, raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(foreign_launches, "_guard", lambda launcher: pytest.fail("guarded"))
    with launches_by_address():
        pass
