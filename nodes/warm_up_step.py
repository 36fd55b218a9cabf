"""The nodes that `POST /resolute/warm-up` adds to the prompt that it queues. They are not for workflows."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.messages import on_node
from .adapters.comfyui.version import hidden_from_search
from .adapters.warm_up.one_step import begin_step, report
from .adapters.warm_up.prompt import END, STEP
from .inputs import CATEGORY


class WarmUpStep(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=STEP,
            display_name="Warm Up (step)",
            category=CATEGORY,
            **hidden_from_search(),
            description="Part of the prompt of a warm-up over HTTP: its samplers run as few steps as they can.",
            inputs=_inputs("A model or a VAE, or what the workflow would save."),
            outputs=[io.AnyType.Output(display_name="any", tooltip="The input. A model samples few steps.")],
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # captures may have been freed since the last warm-up, so later nodes must rerun

    @classmethod
    def execute(cls, any: Any, before: Any = None) -> io.NodeOutput:
        return io.NodeOutput(begin_step(any))


class WarmUpEnd(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=END,
            display_name="Warm Up (end)",
            category=CATEGORY,
            **hidden_from_search(),
            description="Part of the prompt of a warm-up over HTTP: shows what ran, and what it compiled.",
            inputs=_inputs("What the workflow would save."),
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")

    @classmethod
    def execute(cls, any: Any, before: Any = None) -> io.NodeOutput:
        return io.NodeOutput(ui=on_node(report()))


def _inputs(tooltip: str) -> list[Any]:
    return [
        io.AnyType.Input("any", tooltip=tooltip),
        io.AnyType.Input("before", optional=True, tooltip="What has to be over first."),
    ]
