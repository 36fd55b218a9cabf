"""The matrix: one thing changes between two prompts, and the image equals ComfyUI's own without a compile."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(f"{__package__}.kit")
from ..rig import Bench, Run  # noqa: E402
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
