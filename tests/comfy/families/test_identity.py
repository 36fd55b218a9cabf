"""A region's key has all code of ComfyUI's that its trace ran through, so an update that changes it compiles anew."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch

from ..in_process import inputs, make_unet
from ..vaes import SMALL
from .kit import Bench, CompiledMethod, forget_regions, run_traces
from .models import FIRST, MODELS
from .quantized import FAMILIES, FORMATS, model_of

# They check and move memory. Those that a block names count by their files, and what these call does not.
OF_MANAGEMENT = "comfy.model_management"


class Traced:
    """The classes of each region that was traced, and all code that ran meanwhile."""

    def __init__(self, core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        region = core.inside("backends.inductor.regions.region")
        self._trace = region.trace
        self.regions: list[tuple[frozenset[type], set[CodeType]]] = []
        monkeypatch.setattr(region, "trace", self._traced)

    def _traced(self, function: Callable[..., Any], module: torch.nn.Module, *rest: Any, **more: Any) -> Any:
        codes, before = set[CodeType](), sys.getprofile()

        def seen(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                codes.add(frame.f_code)

        sys.setprofile(seen)
        try:
            return self._trace(function, module, *rest, **more)
        finally:
            sys.setprofile(before)
            self.regions.append((frozenset(map(type, module.modules())), codes))


def of_core(core: SimpleNamespace, codes: set[CodeType]) -> dict[CodeType, str]:
    """Those of the code objects that are in files of ComfyUI's modules, with the module."""
    authors = core.inside("code_identity.authors")
    modules = {module.__file__: module for name, module in list(sys.modules.items()) if name.startswith("comfy.")}
    files = {file: (module.__name__, authors.codes_of(module)) for file, module in modules.items()}
    names = {code: files.get(code.co_filename, ("", set[CodeType]())) for code in codes}
    return {code: name for code, (name, inside) in names.items() if code in inside and name != OF_MANAGEMENT}


def counted(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kinds: frozenset[type]) -> set[CodeType]:
    """All code that the digest of what these classes reach is made of."""
    content, reach = core.inside("code_identity.content"), core.inside("code_identity.reach")
    functions, found, own = core.inside("code_identity.functions"), set[CodeType](), content.code_digest

    def noted(code: CodeType) -> str:
        found.update(functions.codes_in(code))
        return str(own(code))

    with monkeypatch.context() as patch:
        patch.setattr(content, "code_digest", noted)
        reach.CodeReach(kinds, reach.Spaces(core.ours("trust.model_code").MANAGEMENT_MODULES))
    return found


def check(core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Trace all regions of a compiled call; each must count all code that ran meanwhile."""
    run_traces(core, monkeypatch)
    forget_regions(core)
    traced = Traced(core, monkeypatch)
    call()
    assert traced.regions
    for kinds, codes in traced.regions:
        ran = of_core(core, codes)
        assert ran
        core.inside("code_identity.content")._digests.clear()
        missing = ran.keys() - counted(core, monkeypatch, kinds)
        assert {f"{ran[code]}.{code.co_name}" for code in missing} == set(), sorted(kind.__name__ for kind in kinds)


CASES: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: MODELS[name] for name in MODELS},
    **{name: lambda name=name: model_of(next(iter(FAMILIES)), name) for name in FORMATS},
}


@pytest.mark.grid(8)
@pytest.mark.parametrize("name", CASES)
def test_all_code_that_a_trace_of_a_transformer_ran_through_counts(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bench = Bench(core, CASES[name]())
    with bench.compiled():
        check(core, monkeypatch, lambda: bench.call(bench.model.call(FIRST)))


def test_all_code_that_a_trace_of_a_unet_ran_through_counts(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = make_unet(core)
    with CompiledMethod(core, unet, "_forward", core.roles.UNET).compiled(), torch.inference_mode():
        check(core, monkeypatch, lambda: unet(**inputs(64, 64), transformer_options={}))


@pytest.mark.parametrize(("kind", "role"), [("Decoder", "VAE_DECODE"), ("Encoder", "VAE_ENCODE")])
def test_all_code_that_a_trace_of_a_picture_vae_ran_through_counts(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, role: str
) -> None:
    coder = getattr(importlib.import_module("comfy.ldm.modules.diffusionmodules.model"), kind)(**SMALL).eval()
    given = torch.ones(1, coder.conv_in.in_channels, 16, 16)
    with CompiledMethod(core, coder, "forward", core.roles[role]).compiled(), torch.inference_mode():
        check(core, monkeypatch, lambda: coder(given))
