"""Which transformers can be captured: their forwards run on the device "meta", in the GPU's place.

A tensor there has no values, so a forward that reads one fails, as it would inside a capture. What it makes on the host
and copies to the device must come from `HostConstants`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .kit import call, copied
from .models import MODELS, Model, Size

SIZES = [Size(1, 8, 12, 7), Size(2, 10, 6, 13, 3)]

# Forwards that read values of their inputs, or choose sizes by them.
READING = {
    "MiniMax H3": "reads the time of a step, to tell the times of video and sound apart",
    "HiDream": "its experts pick tokens by their values",
    "Hunyuan3D 2.1": "its experts pick tokens by their values",
}
# Frequencies, positions or sizes that would wait for the GPU without `HostConstants`.
MAKING_ON_THE_HOST = ("Wan", "AuraFlow", "LTX")


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [on_meta(item) for item in value] if isinstance(value, list) else value


def capture(core: SimpleNamespace, model: Model) -> list[Any]:
    """Run as in a rehearsal and then as in a capture, at each size. Returns the runs as in a capture."""
    module = model.make().to("meta")
    constants = core.inside("backends.cuda_graphs.host_constants").HostConstants(module)
    runs = []
    for size in SIZES:
        given = {name: on_meta(copied(value)) for name, value in model.call(size).items()}
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        with constants.observed(tensors, makes=True) as made:
            call(module, given)
        with constants.observed(tensors, is_capturing=True) as run:
            call(module, given)
        runs.append(run)
        del made
    return runs


@pytest.mark.parametrize("name", [name for name in MODELS if name not in READING])
def test_its_forward_can_be_captured(core: SimpleNamespace, name: str) -> None:
    for run in capture(core, MODELS[name]):
        assert not run.missing
        assert not run.has_foreign
        assert bool(run.used) == name.startswith(MAKING_ON_THE_HOST)


@pytest.mark.parametrize("name", READING)
def test_its_forward_reads_its_inputs(core: SimpleNamespace, name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        capture(core, MODELS[name])
