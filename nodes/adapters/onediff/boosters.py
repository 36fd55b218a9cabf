"""OneDiff's boosters, as nodes pass them on, and their effect on a model.

OneDiff wires a booster into a speed-up node. Ours carry only the settings that still have an effect: DeepCache's inputs
and the Torch Compile Booster's switch. Every other one becomes a sentence on the node that applies the booster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile_cache.backends.registry import AUTO
from ....compile_cache.texts import Text
from ..comfyui.messages import show_on_node
from ..deepcache.node import add_deepcache, deepest
from ..patch.diffusion_model import compile_diffusion_model
from .deepcache_settings import translate

logger = logging.getLogger(__name__)

_SWITCHED_OFF = "eager"  # the backend that compiles nothing


@dataclass(frozen=True, slots=True)
class Booster:
    """CUSTOM_BOOSTER: the settings of a speed-up node besides compiling.

    deepcache: None without a DeepCache booster. compiles: False if a Torch Compile Booster has `disable` on.
    notes: one sentence for each request of the boosters that is no longer supported.
    """

    deepcache: Mapping[str, int] | None = None
    compiles: bool = True
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        return AUTO if self.compiles else _SWITCHED_OFF


# OneDiff also quantized convolutions, and chose layers by density; here only a file's matrices are faster in int8.
NOT_QUANTIZED = Booster(notes=(Text("nothing is quantized: Load Diffusion Model (Faster Format) does that"),))


def merged(given: Sequence[Booster]) -> Booster:
    """Several boosters as one."""
    return Booster(
        next((each.deepcache for each in given if each.deepcache is not None), None),
        all(each.compiles for each in given),
        tuple(note for each in given for note in each.notes),
    )


def speed_up_model(model: Any, booster: Booster, node_id: str | None) -> Any:
    """A compiled copy of `model` (a ModelPatcher), with DeepCache if the booster has it.

    Raises UserError as Compile Model and DeepCache do.
    """
    compiled = compile_diffusion_model(model, booster.backend, node_id)
    if booster.deepcache is not None:
        unet = compiled.get_model_object("diffusion_model")
        settings, notes = translate(booster.deepcache, unet.num_res_blocks, deepest(unet))
        if settings is not None:
            compiled = add_deepcache(compiled, settings, node_id)
        _say(notes, node_id)
    _say(booster.notes, node_id)
    return compiled


def _say(notes: tuple[str, ...], node_id: str | None) -> None:
    for note in notes:
        logger.info("Resolute: %s", note)
    if notes:
        show_on_node(Text.joined(". ", notes), node_id)
