"""Add DeepCache to a MODEL."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers

from ....compile_cache.errors import UserError
from ....compile_cache.texts import Text
from ..comfyui import switch
from ..comfyui.messages import show_on_node
from ..comfyui.transformer_options import STEP_CACHE_RUN, STEP_PASS
from ..patch.forward_patch import ForwardPatch
from ..patch.patch_install import install_patch
from ..patch.step_pass import UncompiledForward
from ..trust.core_code import is_core_function
from .passes import core_unet
from .run import DeepCacheRun
from .schedule import Settings, plan, window_of

logger = logging.getLogger(__name__)

_KEY = "resolute-deepcache"
_FORWARD = "diffusion_model._forward"
# Steps of the example that the node shows before a sampler says how many there are.
_EXAMPLE_STEPS = 20


def add_deepcache(model: Any, settings: Settings, node_id: str | None = None) -> Any:
    """A clone of `model` (a ModelPatcher) that runs the deep blocks of its UNet on some steps only.

    Raises UserError for a model that is not core's UNet, and for a depth that it does not have. If another pack
    replaced the forward, every step runs in full, and the node says so: a fast pass would skip that pack's code.
    """
    if switch.is_off(node_id):
        return model
    unet = model.get_model_object("diffusion_model")
    _require_depth(unet, settings.depth)
    clone = model.clone()
    forward = clone.get_model_object(_FORWARD)
    patch = forward if isinstance(forward, ForwardPatch) else UncompiledForward(unet, forward)
    for kind in _WRAPPERS:  # of two DeepCache nodes in a row, the last decides
        clone.remove_wrappers_with_key(kind, _KEY)
    if not patch.is_known_code:
        _report(node_id, Text("another pack put a forward of its own into this model, so every step runs in full"))
        return clone
    if patch is not forward:
        install_patch(clone, _FORWARD, patch)
    sampling = Sampling(settings, share_of_fast_pass(unet, settings.depth), node_id)
    for kind, name in _WRAPPERS.items():
        clone.add_wrapper_with_key(kind, _KEY, getattr(sampling, name))
    inside = tuple(math.ceil(percent * _EXAMPLE_STEPS) for percent in (settings.start_percent, settings.end_percent))
    example = plan(settings, _EXAMPLE_STEPS, (inside[0], min(inside[1], _EXAMPLE_STEPS)))
    _report(node_id, Text("for example {plan}", plan=example.summary(sampling.fast_share)))
    return clone


class Sampling:
    """The wrappers of one DeepCache node. Each sampling run has its state in a separate `DeepCacheRun`."""

    def __init__(self, settings: Settings, fast_share: float, node_id: str | None) -> None:
        self.fast_share = fast_share
        self._settings = settings
        self._node_id = node_id

    def sample(self, executor: Any, guider: Any, sigmas: Any, extra_args: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Wraps one sampling run. Its DeepCacheRun is closed at the end, also if the sampling is cancelled or fails."""
        levels = torch.as_tensor(sigmas).flatten().tolist()
        if len(levels) < 2:
            return executor(guider, sigmas, extra_args, *args, **kw)
        to_sigma = guider.inner_model.model_sampling.percent_to_sigma
        window = window_of(
            levels, float(to_sigma(self._settings.start_percent)), float(to_sigma(self._settings.end_percent))
        )
        chosen = plan(self._settings, len(levels) - 1, window)
        _report(self._node_id, chosen.summary(self.fast_share))
        if not chosen.fast:
            return executor(guider, sigmas, extra_args, *args, **kw)
        options = extra_args["model_options"].setdefault("transformer_options", {})
        counts = _predicts_once_a_step(executor.class_obj, extra_args["model_options"])
        run = options[STEP_CACHE_RUN] = DeepCacheRun(chosen, self._settings.depth, levels, counts)
        try:
            return executor(guider, sigmas, extra_args, *args, **kw)
        finally:
            options.pop(STEP_CACHE_RUN, None)
            run.close()
            self._summarize(chosen.summary(self.fast_share), run)

    def predict_noise(self, executor: Any, x: Any, timestep: Any, model_options: Any = None, *args: Any) -> Any:
        """Wraps one prediction, which may take several calls of the model."""
        options = {} if model_options is None else model_options
        run = options.get("transformer_options", {}).get(STEP_CACHE_RUN)
        if isinstance(run, DeepCacheRun):
            run.begin_evaluation()
        return executor(x, timestep, options, *args)

    # Core's compile node drops guards on options, so its code would repeat the first pass that it traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call_model(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wraps one call of the UNet: decide its pass, which the installed forward runs."""
        options = _options(args, kwargs)
        run = None if options is None else options.get(STEP_CACHE_RUN)
        chosen = run.decide(x, options) if isinstance(run, DeepCacheRun) and options is not None else None
        if options is None or chosen is None:
            return executor(x, *args, **kwargs)
        options[STEP_PASS] = chosen  # core makes new options for each call
        try:
            return executor(x, *args, **kwargs)
        finally:
            options.pop(STEP_PASS, None)

    def _summarize(self, summary: Text, run: DeepCacheRun) -> None:
        passes = run.passes
        if passes["full"] + passes["fast"] == 0:
            text = Text("none of its passes ran: another pack replaced or skipped the model's forward")
            _report(self._node_id, text)
        else:
            full, fast = passes["full"], passes["fast"]
            text = Text("{plan}; {full} full and {fast} fast passes", plan=summary, full=full, fast=fast)
            _report(self._node_id, text)


_WRAPPERS = {
    WrappersMP.SAMPLER_SAMPLE: "sample",
    WrappersMP.PREDICT_NOISE: "predict_noise",
    WrappersMP.DIFFUSION_MODEL: "call_model",
}


# Core's samplers that make exactly one prediction at each noise level of their schedule, in its order.
_ONE_PREDICTION = frozenset(
    {
        "sample_ddpm", "sample_dpmpp_2m", "sample_dpmpp_2m_sde", "sample_dpmpp_2m_sde_gpu", "sample_dpmpp_3m_sde",
        "sample_dpmpp_3m_sde_gpu", "sample_euler", "sample_euler_ancestral", "sample_lcm",
    }
)  # fmt: skip


def _predicts_once_a_step(sampler: Any, model_options: dict[str, Any]) -> bool:
    """Each prediction belongs to the next step. False with another pack's wrapper, which may predict twice a step."""
    function = getattr(sampler, "sampler_function", None)
    known = is_core_function(function, "comfy.k_diffusion.sampling")
    wrappers = get_all_wrappers(WrappersMP.PREDICT_NOISE, model_options, is_model_options=True)
    return known and getattr(function, "__name__", "") in _ONE_PREDICTION and len(wrappers) == 1


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The transformer_options of a call of UNetModel, after the latent: timesteps, context, y, control, options."""
    options = kwargs["transformer_options"] if "transformer_options" in kwargs else args[4] if len(args) > 4 else None
    return options if isinstance(options, dict) else None


def _require_unet(module: Any) -> None:
    core = core_unet()
    kind = type(module)
    if isinstance(module, core.UNetModel) and kind._forward is core.UNetModel._forward:
        return
    raise UserError(
        f"DeepCache is for UNets (SD1.5, SD2, SDXL, SVD), and this model is a {kind.__name__}, which has no skip "
        "connections to use. Use ComfyUI's EasyCache node instead."
    )


def deepest(unet: Any) -> int:
    """The largest DeepCache depth of a UNet. Raises UserError for a model that is not core's UNet."""
    _require_unet(unet)
    return len(unet.output_blocks) - 1


def _require_depth(unet: Any, depth: int) -> None:
    highest = deepest(unet)
    if not 1 <= depth <= highest:
        raise UserError(f"depth {depth} is outside what this model has: choose 1 to {highest}; 2 suits most models.")


def _report(node_id: str | None, text: Text) -> None:
    logger.info("Resolute: DeepCache: %s", text)
    show_on_node(Text("DeepCache: {text}", text=text), node_id)


def share_of_fast_pass(unet: Any, depth: int) -> float:
    """The cost of a fast pass at `depth` as a share of a full pass, 0 to 1.

    A layer costs its weights times the area of its feature map, which each downsampling divides by four. The estimate
    ignores the part of attention that grows with the square of the area.
    """
    inputs, outputs = list(unet.input_blocks), list(unet.output_blocks)
    middle = [] if unet.middle_block is None else [unet.middle_block]
    costs = list(_costs([*inputs, *middle, *outputs]))
    shallow = costs[: depth + 1] + costs[-(depth + 1) :]
    return sum(shallow) / sum(costs)


def _costs(blocks: list[Any]) -> Iterator[float]:
    """The cost of each block, in the order in which they run."""
    area = 1.0
    for block in blocks:
        cost = 0.0
        for layer in block:
            change = _area_factor(layer)
            # A downsampling layer computes on the smaller map, an upsampling layer on the larger one.
            area *= change
            cost += area * _weights(layer)
        yield cost


def _area_factor(layer: torch.nn.Module) -> float:
    # A residual block may contain the resampling (`resblock_updown`).
    names = {type(part).__name__ for part in layer.modules()}
    return 0.25 if "Downsample" in names else 4.0 if "Upsample" in names else 1.0


def _weights(layer: Any) -> int:
    """The number of weights that multiply each pixel. If ComfyUI pages weights, a Linear may have none yet."""
    total = 0
    for part in layer.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim >= 2:
            total += weight.numel()
        elif weight is None and hasattr(part, "in_features"):
            total += int(part.in_features) * int(part.out_features)
    return total
