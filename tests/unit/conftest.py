"""Fixtures: a cache, a module and a fake program."""

from __future__ import annotations

from typing import Any

import pytest

from compile_cache.cache.graph_cache import GraphCache
from compile_cache.config import CacheConfig

from .fakes import BUDGET, FakeProgram, Module, Rig


@pytest.fixture
def cache() -> GraphCache:
    return GraphCache(CacheConfig(budget_bytes=BUDGET))


@pytest.fixture
def module() -> Module:
    return Module()


@pytest.fixture(scope="module")
def user_error(pack: Any) -> type[Exception]:
    """The class of the pack that `pack` imports: another one than that of `compile_cache` itself."""
    found: type[Exception] = pack("compile_cache.errors").UserError
    return found


@pytest.fixture
def program() -> FakeProgram:
    return FakeProgram()


@pytest.fixture
def rig() -> Rig:
    return Rig()
