"""Quantized products on a GPU: in captures of several sizes, and with a quantizer that is fused into a norm.

A process of its own, because a graph that works in freed memory ends it.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

from ..programs import run_python

pytest.importorskip("comfy_kitchen")

PRELUDE = """
    import sys

    import torch
    import comfy_kitchen
    from comfy_kitchen.tensor import QuantizedTensor
    from torch import nn

    torch.set_grad_enabled(False)
    WIDTH = 3072
    like = {"device": "cuda", "dtype": torch.bfloat16}

    class Linear(nn.Module):
        def __init__(self, layout):
            super().__init__()
            weight = torch.randn(4 * WIDTH, WIDTH, **like) * WIDTH**-0.5
            self.weight = nn.Parameter(QuantizedTensor.from_float(weight, layout), requires_grad=False)
            self.bias = nn.Parameter(torch.randn(4 * WIDTH, **like), requires_grad=False)

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    def distance(found, exact):
        return float((found.double() - exact.double()).norm() / exact.double().norm())
"""


def run(body: str) -> str:
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(body) + "\nprint('survived')\n"
    printed = run_python(code, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert printed.rstrip().endswith("survived")
    return printed


def test_int8_products_of_growing_sizes_stay_right_in_their_captures() -> None:
    """A product that needs a larger buffer must neither break its capture nor free the buffer of another one."""
    run(
        """
        from compile_cache.backends.cuda_graphs import capture, kernel_memory

        module = Linear("TensorWiseINT8Layout")
        assert kernel_memory.has_quantized(module)
        graphs = {}
        for rows in (64, 128, 333, 1024, 4608, 9000):
            x = torch.randn(rows, WIDTH, **like)
            invoke = lambda tensors: module(tensors[0])
            graphs[rows] = capture.capture(invoke, [x], invoke([x]), capture.CaptureFacts(), True, module)
            for size, graph in graphs.items():
                y = torch.randn(size, WIDTH, **like)
                assert torch.equal(graph.replay([y]), module(y)), (rows, size)
        """
    )


def test_a_fused_fp8_quantizer_is_as_near_to_float32_as_comfy_kitchens_kernel() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products in fp8 (Ada or later)")
    run(
        """
        from compile_cache.backends.cuda_graphs.capture import capture
        from compile_cache.backends.inductor.lower.lowering import compile_trace
        from compile_cache.backends.inductor.lower.tracing import trace
        from compile_cache.modules.region_weights import weight_inputs, weight_slots

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = Linear("TensorCoreFP8Layout")

            def forward(self, x):
                y = nn.functional.layer_norm(x, (WIDTH,)) * 2.0
                flat = y.reshape(-1, WIDTH)
                made = QuantizedTensor.from_float(flat, "TensorCoreFP8Layout", scale=torch.ones((), device="cuda"))
                return nn.functional.gelu(self.up(made).reshape(*y.shape[:-1], 4 * WIDTH))

        module = Block()
        x = torch.randn(1, 4608, WIDTH, **like)
        made = trace(lambda each, x: each.forward(x), module, [x], [("b", "n", None)], {"b": 2, "n": 4608})
        assert made.quantized == (("TensorCoreFP8Layout", "_scaled_mm_v2"),), made.quantized
        region = compile_trace(made)
        assert "ops.comfy_kitchen" not in region.graph.source_code, "the quantizer is no operator"
        weights = weight_inputs(weight_slots(module))
        exact_weight, bias = module.up.weight.dequantize().float(), module.up.bias.float()
        for batch, rows in ((1, 4608), (2, 1000), (1, 17)):
            x = torch.randn(batch, rows, WIDTH, **like)
            normal = nn.functional.layer_norm(x.float(), (WIDTH,)) * 2.0
            exact = nn.functional.gelu(nn.functional.linear(normal, exact_weight, bias))
            ours, cores = distance(region(weights, [x]), exact), distance(module(x), exact)
            print(batch, rows, ours, cores)
            assert ours <= 1.1 * cores, (ours, cores)
        graph = capture(lambda tensors: region(weights, tensors), [x], region(weights, [x]))
        for _ in range(3):
            y = torch.randn_like(x)
            assert torch.equal(graph.replay([y]), region(weights, [y]))
        """
    )


def test_a_gguf_weight_is_decoded_in_a_region_and_takes_loras_of_any_rank() -> None:
    run(
        """
        from tests.gpu.q4_k import q4_k
        from compile_cache.backends.inductor.lower.lowering import compile_trace
        from compile_cache.backends.inductor.lower.tracing import general_hints, bind_dims, trace
        from compile_cache.modules.gguf_loras import LoraInputs
        from compile_cache.modules.gguf_types import decoded
        from compile_cache.modules.region_weights import weight_inputs, weight_slots
        from compile_cache.modules.site import RegionSite
        from enum import Enum
        from types import SimpleNamespace

        class Bytes(torch.Tensor):
            @property
            def shape(self):
                return self.tensor_shape

            def detach(self):
                return self

        class Decoding(nn.Module):
            def __init__(self):
                super().__init__()
                data = q4_k(torch.randn(2 * WIDTH, WIDTH, device="cuda") * WIDTH**-0.5).reshape(2 * WIDTH, -1)
                weight = data.as_subclass(Bytes)
                weight.tensor_type, weight.tensor_shape = Enum("Kind", ["Q4_K"]).Q4_K, torch.Size((2 * WIDTH, WIDTH))
                weight.patches = []
                self.weight = nn.Parameter(weight, requires_grad=False)
                self.numbers = decoded("Q4_K", data, weight.tensor_shape)

            def forward(self, x):
                return nn.functional.linear(x, self.weight.to(x.dtype))

        class LoRAAdapter:
            def __init__(self, rank):
                self.weights = (torch.randn(2 * WIDTH, rank), torch.randn(rank, WIDTH) * 0.01, 1.0, None, None, None)

        sys.modules["comfy.weight_adapter.lora"] = SimpleNamespace(LoRAAdapter=LoRAAdapter)
        module = Decoding()
        site = RegionSite("0", "Decoding", module, lambda each, x: each.forward(x), (("b", "n", None),))
        slots = [slot for slot in weight_slots(module) if isinstance(slot[0][slot[1]], Bytes)]
        loras, code = LoraInputs(site, slots), {}
        for rank, rows in ((0, 4608), (0, 77), (16, 4608), (40, 100), (3, 4608)):
            x = torch.randn(1, rows, WIDTH, **like)
            exact, added = module.numbers, [LoRAAdapter(rank)] if rank else []
            module.weight.patches = [([(0.7, each, 1.0, None, None) for each in added], "key")] if rank else []
            for each in added:
                up, down, alpha = (part.cuda() if isinstance(part, torch.Tensor) else part for part in each.weights[:3])
                exact = exact + 0.7 * alpha / rank * up @ down
            now, tensors, refused = loras.added_to([x])
            assert refused is None
            if now not in code:
                hints = general_hints(bind_dims(now.dims, [each.shape for each in tensors]), x.device)
                made = trace(now.function, module, tensors, now.dims, hints)
                assert made.quantized == (("GGUF Q4_K", ""),), made.quantized
                code[now] = compile_trace(made)
            found = code[now](weight_inputs(weight_slots(module)), tensors)
            error = distance(found, nn.functional.linear(x.float(), exact))
            print(rank, rows, error)
            assert error < 5e-3
        assert len(code) == 2
        """
    )
