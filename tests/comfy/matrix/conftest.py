"""The matrix: one thing changes between two prompts, and the image equals ComfyUI's own without a compile."""

from __future__ import annotations

from typing import Any

import pytest

pytest.register_assert_rewrite(f"{__package__}.kit")
from ..rig import Bench, Run, compiled  # noqa: E402
from .controlling import all_compiled, controlled  # noqa: E402
from .kit import Check, Recorder  # noqa: E402 (after register_assert_rewrite)


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config, bench: Bench) -> Recorder:
    """Records every check, and writes the records to the file of ``--record``."""
    return Recorder(
        backend=pytestconfig.getoption("--backend"),
        on_cuda=pytestconfig.getoption("--on-cuda"),
        path=pytestconfig.getoption("--record"),
        system=bench.client.get("/system_stats"),
    )


@pytest.fixture
def check(bench: Bench, warm: Run, recorder: Recorder, request: pytest.FixtureRequest) -> Check:
    """``check(prompt, forwards=5)``: see ``kit.Check``. The tiny model and VAE are already compiled."""
    return Check(bench, recorder, request.node.name)


@pytest.fixture(scope="session")
def warm_control(bench: Bench, warm: Run, tiny_prompt: Any, seeds: Any, recorder: Recorder) -> Run:
    """The first prompt with a compiled ControlNet, at 256x256, after the tiny model's own first one."""
    return bench.run(all_compiled(controlled(tiny_prompt(seed=next(seeds)), "net"), recorder.backend))


@pytest.fixture
def checked(check: Check, warm_control: Run) -> Check:
    """``check``, once an ordinary ControlNet is compiled too."""
    return check


@pytest.fixture(scope="session")
def warm_sdxl(bench: Bench, warm: Run, tiny_prompt: Any, seeds: Any, recorder: Recorder) -> Run:
    """The first prompt of the tiny SDXL model, which compiles it."""
    return bench.run(compiled(tiny_prompt(kind="sdxl", seed=next(seeds)), recorder.backend))
