"""OneDiff's nodes that have nothing to do any more: each passes its input on, and says why."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..adapters.compile.backend_choice import explain_passthrough
from .common import NO_EFFECT, ignored_text, schema

_EVERY_BATCH = "every batch size runs on the same compiled regions, so the model passes on as it is"
_EVERY_SIZE = "every size runs compiled, so the latent passes on as it is"
_NOTHING_QUANTIZED = "nothing is quantized, and no file is written"
_ONE_COPY = "a compiled model uses ComfyUI's own weights, so there are no two copies to compare"
_KEPT = "compiled regions are kept on disk by themselves, so there is no graph to {} here"


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


class BatchSizePatcher(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "BatchSizePatcher",
            "Batch Size Patcher",
            "",
            _sentence(_EVERY_BATCH),
            [
                io.Model.Input("model", tooltip="Passes on as it is."),
                io.Latent.Input("latent_image", optional=True, tooltip=NO_EFFECT),
            ],
            [io.Model.Output(tooltip="The input model.")],
        )

    @classmethod
    def execute(cls, model: Any, latent_image: Any = None) -> io.NodeOutput:
        explain_passthrough(_EVERY_BATCH, cls.hidden.unique_id)
        return io.NodeOutput(model)


class ResolutionSpeedupChecker(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "ResolutionSpeedupChecker",
            "Speedup Checker - Resolution",
            "",
            _sentence(_EVERY_SIZE),
            [io.Latent.Input("samples", tooltip="Passes on as it is.")],
            [io.Latent.Output(tooltip="The input latent.")],
        )

    @classmethod
    def execute(cls, samples: Any) -> io.NodeOutput:
        explain_passthrough(_EVERY_SIZE, cls.hidden.unique_id)
        return io.NodeOutput(samples)


def _graph_loader(node_id: str, title: str, kind: Any, name: str) -> type[io.ComfyNode]:
    class GraphLoader(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            about = f"The {name} passes on as it is: {_KEPT.format('load')}."
            inputs = [kind.Input(name, tooltip="Passes on as it is."), ignored_text("graph")]
            return schema(node_id, title, "", about, inputs, [kind.Output(tooltip=f"The input {name}.")])

        @classmethod
        def execute(cls, graph: str = "", **given: Any) -> io.NodeOutput:
            explain_passthrough(_KEPT.format("load"), cls.hidden.unique_id)
            return io.NodeOutput(given[name])

    return GraphLoader


def _graph_saver(node_id: str, title: str, waits_for: Any, kind: Any, name: str) -> type[io.ComfyNode]:
    class GraphSaver(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            about = f"It saves nothing: {_KEPT.format('save')}. docs/servers.md says how to carry them elsewhere."
            inputs = [waits_for, kind.Input(name, tooltip=NO_EFFECT), ignored_text("filename_prefix", name)]
            return schema(node_id, title, "", about, inputs, [], ends=True)

        @classmethod
        def execute(cls, **_: Any) -> io.NodeOutput:
            explain_passthrough(_KEPT.format("save"), cls.hidden.unique_id)
            return io.NodeOutput()

    return GraphSaver


class Quant8Model(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "Quant8Model",
            "Model Quantization(int8)",
            "",
            _sentence(_NOTHING_QUANTIZED),
            [
                io.Model.Input("model", tooltip=NO_EFFECT),
                ignored_text("output_dir", "int8"),
                ignored_text("conv", "enable"),
                ignored_text("linear", "enable"),
            ],
            [],
            ends=True,
        )

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        explain_passthrough(_NOTHING_QUANTIZED, cls.hidden.unique_id)
        return io.NodeOutput()


class CompareModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "CompareModel",
            "Model Weight Comparator",
            "",
            _sentence(_ONE_COPY),
            [
                io.Model.Input("torch_model", tooltip=NO_EFFECT),
                io.Model.Input("oneflow_model", tooltip=NO_EFFECT),
                ignored_text("check", "enable"),
            ],
            [],
            ends=True,
        )

    @classmethod
    def execute(cls, **_: Any) -> io.NodeOutput:
        explain_passthrough(_ONE_COPY, cls.hidden.unique_id)
        return io.NodeOutput()


def _latent() -> Any:
    return io.Latent.Input("samples", tooltip=NO_EFFECT)


NODES: list[type[io.ComfyNode]] = [
    BatchSizePatcher,
    ResolutionSpeedupChecker,
    _graph_loader("ModelGraphLoader", "Model Graph Loader", io.Model, "model"),
    _graph_loader("VaeGraphLoader", "VAE Graph Loader", io.Vae, "vae"),
    _graph_loader("ControlNetGraphLoader", "ControlNet Graph Loader", io.ControlNet, "control_net"),
    _graph_saver("ModelGraphSaver", "Model Graph Saver", _latent(), io.Model, "model"),
    _graph_saver("VaeGraphSaver", "VAE Graph Saver", io.Image.Input("images", tooltip=NO_EFFECT), io.Vae, "vae"),
    _graph_saver("ControlNetGraphSaver", "ControlNet Graph Saver", _latent(), io.ControlNet, "control_net"),
    Quant8Model,
    CompareModel,
]
