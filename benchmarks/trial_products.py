"""Products that could be one: of one input with several weights, and of two inputs with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parity import relative
from .regions import microseconds

# Tokens, width of the input, width of each result, weights, dtype.
SHARED = {
    "SDXL q, k, v 1280": (2048, 1280, 1280, 3, "float16"),
    "SDXL q, k, v 640": (8192, 640, 640, 3, "float16"),
    "SDXL k, v of the text 1280": (154, 2048, 1280, 2, "float16"),
    "SDXL k, v of the text 640": (154, 2048, 640, 2, "float16"),
    "Wan q, k, v": (14040, 1536, 1536, 3, "bfloat16"),
    "Qwen-Image q, k, v": (4096, 3072, 3072, 3, "bfloat16"),
}


def products(device: str) -> dict[str, dict[str, Any]]:
    import torch

    found: dict[str, dict[str, Any]] = {}
    on, small = torch.device(device), 1 if device == "cuda" else 16
    for name, (tokens, width, results, count, dtype) in SHARED.items():
        tokens, width, results = tokens // small, width // small, results // small
        kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
        x = torch.randn(tokens, width, **kind)
        # In one allocation, with a gap between them: as pages of weights lie.
        whole = torch.randn(count, results * width + 4096, **kind) * width**-0.5
        weights = [each[: results * width].view(results, width).t() for each in whole]
        strided = whole.as_strided((count, width, results), (results * width + 4096, 1, width))
        beside = torch.cat([each.t() for each in weights]).t()
        ways: dict[str, Callable[[], Any]] = {
            "one after the other": lambda x=x, w=weights: [x @ each for each in w],  # type: ignore[misc]
            "strided": lambda x=x, s=strided: torch.bmm(x.expand(s.shape[0], *x.shape), s),  # type: ignore[misc]
            "copied beside": lambda x=x, b=beside: x @ b,  # type: ignore[misc]
        }
        right = torch.stack([x.double() @ each.double() for each in weights])
        row: dict[str, Any] = {way: microseconds(run, on) for way, run in ways.items()}
        both = torch.stack(ways["one after the other"]()), ways["strided"]()
        found[name] = {**row, "errors": [relative(each, right) for each in both]}
    found["Flux linear2"] = two_inputs(on)
    for name, row in found.items():
        print(f"{name:28}", {key: each if key == "errors" else round(each, 1) for key, each in row.items()}, flush=True)
    return found


def two_inputs(device: Any) -> dict[str, Any]:
    import torch

    tokens, width = (4608, 3072) if device.type == "cuda" else (32, 64)
    kind = {"device": device, "dtype": torch.bfloat16}
    a, b = torch.randn(tokens, width, **kind), torch.randn(tokens, 4 * width, **kind)
    weight = torch.randn(width, 5 * width, **kind) * width**-0.5
    bias = torch.randn(width, **kind)
    beside = torch.cat((a, b), 1)
    left, right = weight[:, :width].t(), weight[:, width:].t()
    return {
        "copied beside": microseconds(lambda: torch.addmm(bias, torch.cat((a, b), 1), weight.t()), device),
        "the product alone": microseconds(lambda: torch.addmm(bias, beside, weight.t()), device),
        "one after the other": microseconds(lambda: torch.addmm(torch.addmm(bias, a, left), b, right), device),
    }
