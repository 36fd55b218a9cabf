"""A user's open workflow: everything that can be changed in it, and the bypasses that its nodes may cause."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .patches import PATCHES

# ControlNets with their own network, which Compile ControlNet compiles; the value is how many are chained.
NETS = {"one": 1, "two": 2, "early": 1, "late": 1, "weak": 1}


@dataclass(frozen=True)
class Workflow:
    """Every field can be changed independently: a change never makes another field invalid.

    backend: "chosen" is the session's backend, "none" is without Compile Model. The same for VAE and ControlNet.
    kind: "sd" and "sdxl" are the tiny models, "inpaint" has five more channels, "fp8" is a smaller one whose weights
    ComfyUI casts in each forward.
    patches: names in `PATCHES` in the order of the chain. at: how many of them come before Compile Model.
    second: a second sampler after the first, at 1.25 times the size. Its model is the "same", the "unpatched" output of
    Compile Model, the "plain" one, or an "other" one with its own Compile Model.
    """

    kind: str = "sd"
    weights: int = 0
    patches: tuple[str, ...] = ()
    at: int = 0
    backend: str = "chosen"
    batching: str = "auto"
    width: int = 136
    height: int = 104
    batch: int = 1
    positive: int = 77
    negative: int = 77
    cfg: float = 5.0
    sampler: str = "euler"
    scheduler: str = "normal"
    steps: int = 3
    denoise: float = 1.0
    seed: int = 1
    source: str = "empty"
    mask: str = "none"
    conditioning: str = "whole"
    second: str = "none"
    decode: str = "none"
    vae_weights: int = 0
    vae_backend: str = "chosen"
    control: str = "none"
    control_backend: str = "chosen"

    @classmethod
    def opened(cls, fields: dict[str, Any]) -> Workflow:
        """A workflow with the defaults and these fields."""
        workflow = cls()
        for name, value in fields.items():
            workflow = workflow.changed(name, value)
        return workflow

    def changed(self, name: str, value: Any) -> Workflow:
        """A copy with one field set; converts lists from JSON to tuples."""
        values: dict[str, Any] = {name: tuple(value) if name == "patches" else value}
        return dataclasses.replace(self, **values)

    def with_backend(self, backend: str) -> Workflow:
        """A copy with this backend in every compile node."""
        workflow = self
        for name in ("backend", "vae_backend", "control_backend"):
            if getattr(self, name) != "none":
                workflow = workflow.changed(name, backend)
        return workflow

    @property
    def sampling_backend(self) -> str:
        """The backend of the sampler: the last Compile Model decides, even if it is one of the patches."""
        after = self.patches if self.backend == "none" else self.patches[self.at :]
        return "eager" if "ResoluteCompileModel" in after else self.backend

    @property
    def second_backend(self) -> str:
        """The backend of the second sampler, if there is one."""
        if self.second == "unpatched":
            return dataclasses.replace(self, patches=self.patches[: self.at]).sampling_backend
        return {"same": self.sampling_backend, "other": self.backend}.get(self.second, "none")

    @property
    def backends(self) -> set[str]:
        """The backends that run something in this workflow, with any schedule."""
        decoding = self.vae_backend if self.decode != "none" else "none"
        return {self.sampling_backend, self.second_backend, decoding} - {"none"}

    @property
    def fitting_control(self) -> str:
        """The ControlNet that this kind of model can have."""
        if self.kind == "fp8" or (self.kind != "sd" and self.control == "control lora"):
            return "none"
        return self.control

    @property
    def control_backends(self) -> set[str]:
        """The backends that run a ControlNet, at the steps where it is active, which may be none."""
        return {self.control_backend} - {"none"} if self.fitting_control in NETS else set()

    @property
    def architectures(self) -> set[tuple[str, bool]]:
        """The families that the chosen backend compiles, and whether ComfyUI casts their weights in each forward."""
        casts = self.kind, "ModelComputeDtype" in self.patches
        found = {casts} if "chosen" in (self.sampling_backend, self.second_backend) else set()
        found |= {(self.kind, False)} if self.second_backend == "chosen" and self.second != "same" else set()
        return found | ({(f"ControlNet for {self.kind}", False)} if "chosen" in self.control_backends else set())

    @property
    def certain_architectures(self) -> set[tuple[str, bool]]:
        """The architectures that certainly ran as a whole after the workflow; none if that depends on the schedule."""
        depends = self.second == "unpatched" or self.fitting_control in ("early", "late")
        return set() if depends else self.architectures

    @property
    def bypasses(self) -> set[str]:
        """The bypass codes that the patches may cause."""
        return {code for name in self.patches for code in PATCHES[name].bypasses}

    @property
    def decides(self) -> bool:
        """Whether a patch compares numbers."""
        return any(PATCHES[name].decides for name in self.patches)

    @property
    def free_batching(self) -> str:
        """The batching policy, unless a patch's result depends on batching in ComfyUI itself."""
        return "auto" if any(PATCHES[name].counts_calls for name in self.patches) else self.batching
