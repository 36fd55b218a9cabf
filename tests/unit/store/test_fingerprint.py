"""Fingerprints: every component counts, and a difference is reported by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from compile_cache.store.fingerprint import EnvironmentFingerprint

from .test_artifact_store import HERE

OTHER: dict[str, Any] = {
    "torch": "2.10.0",
    "triton": "none",
    "python": "3.12",
    "platform": "win32-AMD64",
    "device": "NVIDIA L4 sm_89",
    "settings": "another",
    "source": "def",
    "format": HERE.format + 1,
}


@pytest.mark.parametrize("name", [field.name for field in fields(EnvironmentFingerprint)])
def test_each_part_of_the_environment_changes_its_digest_and_is_named(name: str) -> None:
    there = replace(HERE, **{name: OTHER[name]})
    assert there.digest() != HERE.digest()
    assert HERE.difference(there) == [f"{name}: {getattr(HERE, name)} here, {OTHER[name]} there"]


def test_equal_environments_have_one_digest_and_no_difference() -> None:
    again = replace(HERE)
    assert again.digest() == HERE.digest()
    assert HERE.difference(again) == []


def test_every_difference_is_reported() -> None:
    assert len(HERE.difference(EnvironmentFingerprint(**OTHER))) == len(OTHER)
