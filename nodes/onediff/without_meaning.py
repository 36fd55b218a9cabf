"""OneDiff's nodes that have nothing to do any more: each passes its input on, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

from ...compile_cache.texts import Text
from ..adapters.compile.backend_choice import explain_passthrough
from .common import NO_EFFECT, ignored_text, node

_EVERY_BATCH = Text("every batch size runs on the same compiled regions, so the model passes on as it is")
_EVERY_SIZE = Text("every size runs compiled, so the latent passes on as it is")
_NOTHING_QUANTIZED = Text("nothing is quantized, and no file is written")
_ONE_COPY = Text("a compiled model uses ComfyUI's own weights, so there are no two copies to compare")
_NO_LOAD = Text("compiled regions are kept on disk by themselves, so there is no graph to load here")
_NO_SAVE = Text("compiled regions are kept on disk by themselves, so there is no graph to save here")


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


def _passing_on(reason: str, *names: str) -> Callable[..., io.NodeOutput]:
    """The inputs `names` are the outputs, and the node says why."""

    def run(node_id: str | None, **given: Any) -> io.NodeOutput:
        explain_passthrough(reason, node_id)
        return io.NodeOutput(*(given[name] for name in names))

    return run


def _graph_loader(node_id: str, title: str, kind: Any, name: str) -> type[io.ComfyNode]:
    return node(
        node_id,
        title,
        "",
        f"The {name} passes on as it is: {_NO_LOAD}.",
        lambda: [kind.Input(name, tooltip="Passes on as it is."), ignored_text("graph")],
        lambda: [kind.Output(tooltip=f"The input {name}.")],
        _passing_on(_NO_LOAD, name),
    )


def _graph_saver(node_id: str, title: str, waits_for: Any, kind: Any, name: str) -> type[io.ComfyNode]:
    return node(
        node_id,
        title,
        "",
        f"It saves nothing: {_NO_SAVE}. docs/servers.md says how to carry them elsewhere.",
        lambda: [waits_for, kind.Input(name, tooltip=NO_EFFECT), ignored_text("filename_prefix", name)],
        list,
        _passing_on(_NO_SAVE),
    )


def _latent() -> Any:
    return io.Latent.Input("samples", tooltip=NO_EFFECT)


NODES = [
    node(
        "BatchSizePatcher",
        "Batch Size Patcher",
        "",
        _sentence(_EVERY_BATCH),
        lambda: [
            io.Model.Input("model", tooltip="Passes on as it is."),
            io.Latent.Input("latent_image", optional=True, tooltip=NO_EFFECT),
        ],
        lambda: [io.Model.Output(tooltip="The input model.")],
        _passing_on(_EVERY_BATCH, "model"),
    ),
    node(
        "ResolutionSpeedupChecker",
        "Speedup Checker - Resolution",
        "",
        _sentence(_EVERY_SIZE),
        lambda: [io.Latent.Input("samples", tooltip="Passes on as it is.")],
        lambda: [io.Latent.Output(tooltip="The input latent.")],
        _passing_on(_EVERY_SIZE, "samples"),
    ),
    _graph_loader("ModelGraphLoader", "Model Graph Loader", io.Model, "model"),
    _graph_loader("VaeGraphLoader", "VAE Graph Loader", io.Vae, "vae"),
    _graph_loader("ControlNetGraphLoader", "ControlNet Graph Loader", io.ControlNet, "control_net"),
    _graph_saver("ModelGraphSaver", "Model Graph Saver", _latent(), io.Model, "model"),
    _graph_saver("VaeGraphSaver", "VAE Graph Saver", io.Image.Input("images", tooltip=NO_EFFECT), io.Vae, "vae"),
    _graph_saver("ControlNetGraphSaver", "ControlNet Graph Saver", _latent(), io.ControlNet, "control_net"),
    node(
        "Quant8Model",
        "Model Quantization(int8)",
        "",
        _sentence(_NOTHING_QUANTIZED),
        lambda: [
            io.Model.Input("model", tooltip=NO_EFFECT),
            ignored_text("output_dir", "int8"),
            ignored_text("conv", "enable"),
            ignored_text("linear", "enable"),
        ],
        list,
        _passing_on(_NOTHING_QUANTIZED),
    ),
    node(
        "CompareModel",
        "Model Weight Comparator",
        "",
        _sentence(_ONE_COPY),
        lambda: [
            io.Model.Input("torch_model", tooltip=NO_EFFECT),
            io.Model.Input("oneflow_model", tooltip=NO_EFFECT),
            ignored_text("check", "enable"),
        ],
        list,
        _passing_on(_ONE_COPY),
    ),
]
