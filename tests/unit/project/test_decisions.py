"""One decision, one home: no second file defines, reads or calls what a decision is made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]


class Home(NamedTuple):
    """pattern: a regular expression for a line of code. file: the only one that may have it, of those in `within`."""

    pattern: str
    file: str
    within: tuple[str, ...] = ("compile_cache", "nodes")


HOMES = {
    "torch flags that change results": Home(
        r"\b(allow_tf32|fp32_precision|get_float32_matmul_precision|allow_(fp16|bf16)_reduced_precision_reduction|"
        r"allow_fp16_accumulation|get_deterministic_debug_mode|use_deterministic_algorithms|get_default_dtype|"
        r"is_autocast_enabled|get_autocast_dtype|set_num_threads)\b",
        "compile_cache/torch_facts/flags.py",
    ),
    "why a call is not captured: failures and the budget": Home(
        r"BypassCode\.(CAPTURE_FAILED|OVER_BUDGET)\b", "compile_cache/captures/refusals.py"
    ),
    "why a call is not captured: all reasons of the cache": Home(
        r"\bBypass(Reason\(|Code\b)",
        "compile_cache/captures/refusals.py",
        ("compile_cache/calls", "compile_cache/captures"),
    ),
    "why a call is not captured: how busy the GPU has to be": Home(
        r"\bLEAST_HOST_SHARE =",
        "compile_cache/choices/gpu_bound.py",
    ),
    "which backend": Home(
        r"\bregistry\.resolve\(|\.probe\(",
        "nodes/adapters/process/compile_request.py",
        ("nodes/adapters/blocks", "nodes/adapters/compile", "nodes/adapters/forward", "nodes/adapters/process"),
    ),
    # test_homes_of_adapters.py looks for every name of that table, for whose code runs, and for the number of pixels.
    "what transformer_options mean": Home(
        r"'(cond_or_uncond|optimized_attention_override|patches_replace|prefetch_dynamic_vbars|sample_sigmas)'",
        "nodes/adapters/comfyui/transformer_options.py",
    ),
    "pixels in a latent cell": Home(
        r"\b(spacial_downscale_ratio|upscale_ratio)\b", "nodes/adapters/comfyui/latent_cells.py"
    ),
    "operators of ours in torch's registry": Home(r"\btorch\.library\.", "compile_cache/torch_facts/operators.py"),
    "a call without its weights epoch": Home(r"\bCallWithoutEpoch\(", "compile_cache/keys.py"),
}


def code_of(source: str) -> str:
    """The statements of a file, without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def offences(home: Home, files: Mapping[str, str]) -> list[str]:
    """Lines of other files that make the decision, and a complaint if the home makes it no more."""
    found = [
        (name, line.strip())
        for name, code in files.items()
        if any(name.startswith(f"{place}/") for place in home.within)
        for line in code.splitlines()
        if re.search(home.pattern, line)
    ]
    elsewhere = [f"{name}: {line}" for name, line in found if name != home.file]
    return elsewhere if len(elsewhere) < len(found) else [*elsewhere, f"{home.file} has nothing of it"]


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    files = [file for place in ("compile_cache", "nodes") for file in sorted((ROOT / place).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): code_of(file.read_text("utf-8")) for file in files}


@pytest.mark.parametrize("decision", HOMES)
def test_a_decision_has_one_home(decision: str, package: dict[str, str]) -> None:
    assert offences(HOMES[decision], package) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nfast = torch.backends.cudnn.allow_tf32", True),
        ("setattr(torch.backends.cuda.matmul, 'allow_fp16_accumulation', True)", True),
        ("def read():\n    return torch.is_autocast_enabled('cpu')", True),
        ('"""What allow_tf32 does."""\n\n\ndef read():\n    """As allow_tf32."""', False),
        ("x = 1  # not allow_tf32", False),
        ("from .flags import uses_tf32", False),
    ],
)
def test_another_file_that_decides_it_is_found(source: str, found: bool) -> None:
    home = HOMES["torch flags that change results"]
    files = {home.file: "switch.allow_tf32 = True", "nodes/adapters/other.py": code_of(source)}
    assert bool(offences(home, files)) == found


def test_a_home_that_lost_its_decision_is_found() -> None:
    home = HOMES["a call without its weights epoch"]
    assert offences(home, {home.file: "x = 1"}) == ["compile_cache/keys.py has nothing of it"]
    assert offences(home, {home.file: "CallWithoutEpoch(1)", "tests/unit/other.py": "CallWithoutEpoch(2)"}) == []
