"""Worker processes that end soon after a test."""

from __future__ import annotations

import pytest

from compile_cache.backends.inductor.compiler import process


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_SECONDS", 2.0)
