"""Attention that a declared pack puts in the place of core's: part of compiled blocks, and only as it was declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import Bench, forget_regions, run_traces
from .models import MODELS, Size
from .test_declared_packs import Installed, declaration, trusted  # noqa: F401 (a fixture)

FIRST = Size(1, 8, 12, 7)
SIZES = [Size(2, 8, 12, 7), Size(1, 10, 6, 13, 3), Size(3, 14, 8, 7, 5)]
NAME = "Node.patch.<locals>.override"
PACK = """
import comfy.ldm.modules.attention as attention


def make(factor):
    def scaled(*args, **kwargs):
        CALLS.append(factor)
        args[0].data_ptr()  # nothing that a trace can follow
        return attention.attention_pytorch.__wrapped__(*args, **kwargs) * factor
    return scaled


CALLS = []


class Node:
    def patch(self, factor):
        new_attention = make(factor)
        def override(func, *args, **kwargs):
            return new_attention(*args, **kwargs)
        return {"optimized_attention_override": override}

    def cores(func, *args, **kwargs):
        return attention.attention_pytorch.__wrapped__(*args, **kwargs)

    def undeclared(self):
        def other(func, *args, **kwargs):
            return func(*args, **kwargs)
        return {"optimized_attention_override": other}
"""


@pytest.fixture
def pack(
    core: SimpleNamespace,
    tmp_path: Path,
    trusted: Callable[[str], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Installed]:
    """A pack with such a node, declared as KJNodes' is."""
    run_traces(core, monkeypatch)
    forget_regions(core)
    installed = Installed(tmp_path)
    installed.write()
    (tmp_path / "__init__.py").write_text(PACK, "utf-8")
    installed.start()
    trusted("")
    declared, digest = core.ours("trust.declared"), core.ours("trust.packs").piece_digest
    pieces = tuple(
        declared.SourcePiece("__init__.py", name, frozenset({digest(installed.name, "__init__.py", name)}))
        for name in ("Node.patch.override", "make")
    )
    assert all(len(each) == 16 for piece in pieces for each in piece.digests)
    known = {
        NAME: declared.Attention(pieces),
        "Node.cores": declared.Attention((), "pytorch"),
    }
    monkeypatch.setattr(core.ours("trust.trust"), "ATTENTION", {"strange-model": known})
    yield installed
    installed.stop()


def patched(module: ModuleType, factor: float) -> dict[str, Any]:
    options: dict[str, Any] = module.Node().patch(factor)
    return options


@pytest.mark.parametrize("family", ["Flux", "Wan 2.1", "Z-Image"])
def test_it_runs_inside_compiled_blocks(core: SimpleNamespace, pack: Installed, family: str) -> None:
    module = pack.start()
    bench = Bench(core, MODELS[family])
    options = patched(module, 0.5)
    assert bench.check(FIRST, options) == bench.counts(bench.model.compiles)
    for size in SIZES:
        module.CALLS.clear()
        assert bench.check(size, options) == bench.counts(), size
        assert len(module.CALLS) % 2 == 0, "eager's calls, and as many of compiled blocks"
        assert set(module.CALLS) == {0.5}
    assert bench.check(FIRST, patched(module, 0.5)) == bench.counts(), "of another prompt, and the same"


def test_two_settings_of_a_node_are_never_confused(core: SimpleNamespace, pack: Installed) -> None:
    module = pack.start()
    bench = Bench(core, MODELS["Flux"])
    half, double = patched(module, 0.5), patched(module, 2.0)
    for options in (half, double, None):
        assert bench.check(FIRST, options) == bench.counts(bench.model.compiles)
    for options in (half, None, double, half):
        assert bench.check(SIZES[0], options) == bench.counts()


def test_a_function_that_calls_cores_needs_no_other_code(core: SimpleNamespace, pack: Installed) -> None:
    bench = Bench(core, MODELS["Flux"])
    bench.check(FIRST)
    options = {"optimized_attention_override": pack.start().Node.cores}
    assert bench.check(SIZES[0], options) == bench.counts()


def test_a_changed_function_is_refused_by_name(
    core: SimpleNamespace,
    pack: Installed,
    trusted: Callable[[str], None],  # noqa: F811
) -> None:
    (pack.folder / "__init__.py").write_text(PACK.replace("* factor", "* factor * 2"), "utf-8")
    module = pack.start()
    trusted("")
    bench, options = Bench(core, MODELS["Flux"]), patched(module, 0.5)
    assert bench.check(FIRST, options, bypasses={"patched_block": 1})["region_calls"] == 0
    now = declaration(core, pack)
    why = core.ours("comfyui.chosen_attention").why_unknown(options)
    assert f"strange-model changed since it was declared; now it is RESOLUTE_TRUSTED_PACKS={now}" in why
    trusted(now)
    assert bench.check(FIRST, patched(module, 0.5)) == bench.counts(bench.model.compiles)


def test_the_rest_of_the_pack_may_change(
    core: SimpleNamespace,
    pack: Installed,
    trusted: Callable[[str], None],  # noqa: F811
) -> None:
    (pack.folder / "__init__.py").write_text(PACK + "\n\ndef new():\n    return 1\n", "utf-8")
    module = pack.start()
    trusted("")
    assert Bench(core, MODELS["Flux"]).check(FIRST, patched(module, 0.5))["region_calls"] > 0


def test_another_function_of_the_pack_stays_what_it_is(core: SimpleNamespace, pack: Installed) -> None:
    bench = Bench(core, MODELS["Flux"])
    options = pack.start().Node().undeclared()
    assert bench.check(FIRST, options, bypasses={"patched_block": 1})["region_calls"] == 0
    assert core.ours("comfyui.chosen_attention").why_unknown(options) == "another node overrides attention"


def test_a_definition_is_found_by_its_name_alone(core: SimpleNamespace, pack: Installed) -> None:
    digest = core.ours("trust.packs").piece_digest
    names = ["", "make", "make.scaled", "Node", "Node.patch", "Node.patch.override", "Node.cores"]
    found = [digest(pack.name, "__init__.py", name) for name in names]
    assert len(set(found)) == len(names)
    for absent in ("nothing", "Node.nothing", "make.scaled.more"):
        assert digest(pack.name, "__init__.py", absent) == ""
    assert digest(pack.name, "nothing.py", "") == ""


def test_a_result_is_the_functions_own(core: SimpleNamespace, pack: Installed) -> None:
    """The operator calls the very function, with what core gives it."""
    module = pack.start()
    chosen = core.ours("comfyui.chosen_attention")
    name = chosen.attention_of(patched(module, 3.0))
    q, k, v = torch.randn(3, 2, 5, 8).unbind()
    plain = module.attention.attention_pytorch(q, k, v, 2)
    assert torch.allclose(chosen.run(name, None, q, k, v, 2), 3 * plain)
