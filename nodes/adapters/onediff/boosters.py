"""OneDiff's boosters as they pass from node to node, and what they mean for a model.

OneDiff wires a booster into a speed-up node. Ours carry only what still has a meaning: DeepCache's inputs, and whether
the Torch Compile Booster was switched off. Everything else becomes a sentence on the node that applies the booster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....compile_cache.backends.registry import AUTO
from ....compile_cache.texts import Text
from ..comfyui.messages import show_on_node
from ..compile.diffusion_model import compile_diffusion_model
from ..deepcache.node import add_deepcache, deepest
from .deepcache_settings import translate

logger = logging.getLogger(__name__)

_SWITCHED_OFF = "eager"  # the backend that compiles nothing


@dataclass(frozen=True, slots=True)
class Booster:
    """CUSTOM_BOOSTER: what a speed-up node does beside compiling.

    deepcache: None without a DeepCache booster. compiles: False if a Torch Compile Booster has `disable` on.
    notes: what the boosters asked for and no longer get, one sentence each.
    """

    deepcache: Mapping[str, int] | None = None
    compiles: bool = True
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        return AUTO if self.compiles else _SWITCHED_OFF


# OneDiff quantized convolutions too, and by densities; what is faster in int8 here is a file's matrices.
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
