"""The node that `POST /resolute/warm-up` puts into the prompt that it queues. Nobody puts it into a workflow."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .adapters.comfyui.messages import on_node
from .adapters.warm_up.one_step import report, with_few_steps
from .adapters.warm_up.prompt import STEP
from .inputs import CATEGORY


class WarmUpStep(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=STEP,
            display_name="Warm Up (step)",
            category=CATEGORY,
            is_dev_only=True,
            description="Part of the prompt of a warm-up over HTTP: lets samplers run as few steps as they can.",
            inputs=[
                io.AnyType.Input("any", tooltip="A model, a VAE, or what the workflow would save."),
                io.AnyType.Input("before", optional=True, tooltip="Runs first."),
                io.Boolean.Input("is_last", default=False, optional=True, tooltip="Shows what the warm-up did."),
            ],
            outputs=[io.AnyType.Output(display_name="any", tooltip="The input; a model samples few steps.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return float("nan")  # captures may have been freed since the last warm-up, so what follows runs again

    @classmethod
    def execute(cls, any: Any, before: Any = None, is_last: bool = False) -> io.NodeOutput:
        if is_last:
            return io.NodeOutput(any, ui=on_node(report()))
        return io.NodeOutput(with_few_steps(any))
