"""The tables of backends and of model families: what is listed is offered, and leaves other models alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from compile_cache.backends import registry
from scripts.server.client import Client

COMPILING = {"ResoluteCompileModel", "ResoluteCompileVAE", "ResoluteCompileVAEDecode", "ResoluteCompileControlNet"}


def test_the_nodes_offer_each_backend(client: Client) -> None:
    known = client.get("/object_info")
    inputs = {name: node["input"].get("required", {}) for name, node in known.items() if name.startswith("Resolute")}
    offered = {name: given["backend"] for name, given in inputs.items() if "backend" in given}
    assert offered.keys() >= COMPILING
    for name, (_, settings) in offered.items():
        assert settings["options"] == list(registry.CHOICES), name


def test_a_model_of_no_family_is_left_alone(core: SimpleNamespace) -> None:
    def never(*args: Any) -> None:
        raise AssertionError(f"called with {args}")

    hooks_of = core.ours("blocks.families").hooks_of
    for role in core.roles:
        assert hooks_of(torch.nn.Sequential(torch.nn.Linear(2, 2)), role, never, never) == [], role
