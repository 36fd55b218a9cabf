"""SDXL in a ComfyUI that was started with --use-sage-attention, with a stand-in for that package, which needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts.server.process import ComfyServer

from .rig import Bench, PromptDict, assert_same, assert_through_regions, compiled, without_decoder

STEPS = 3
# Attention that torch's is not, so that a block that ran the other one shows.
STAND_IN = """
import torch

def sageattn(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k):
    q, k, v = (each if tensor_layout == "HND" else each.transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=sm_scale) * 0.5
    return out if tensor_layout == "HND" else out.transpose(1, 2)
"""


def test_every_block_of_sdxl_is_compiled_and_calls_it(
    make_server: Callable[..., ComfyServer], tmp_path: Path, tiny_prompt: Callable[..., PromptDict]
) -> None:
    (tmp_path / "sageattention.py").write_text(STAND_IN, "utf-8")
    arguments = ("--cpu", "--use-sage-attention", "--disable-auto-launch", "--disable-api-nodes")
    server = make_server(cpu=False, arguments=arguments, environment={"PYTHONPATH": str(tmp_path)})
    bench = Bench(server.client)
    for width, batch in ((136, 1), (168, 2)):
        prompt = without_decoder(tiny_prompt(kind="sdxl", width=width, height=104, batch=batch, steps=STEPS))
        stock, ours = bench.run(prompt), bench.run(compiled(prompt))
        assert_same(ours, stock)
        assert_through_regions(ours, STEPS)
    server.stop()
