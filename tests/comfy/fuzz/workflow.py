"""A user's open workflow: everything that can be changed in it, and the bypasses that its nodes may cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .patches import CHANGE_WEIGHTS, CHOSEN_ATTENTION, FLAGS, PATCHES

# ControlNets with their own network, which Compile ControlNet compiles; the value is how many are chained.
NETS = {"one": 1, "two": 2, "early": 1, "late": 1, "weak": 1}
# Kinds of one level, which no ControlNet here fits, and whose weights are of 8 bits.
QUANTIZED = ("quantized", "quantized fp8")
SMALL = ("fp8", *QUANTIZED)
# Patches of a transformer's and a residual block's code that together leave a model, or a ControlNet, no region.
_OF_ALL_BLOCKS = frozenset({"assigned code", "exchanged activation"})
_OF_ALL_OF_A_NET = frozenset({"assigned code", "exchanged method"})
# Bypasses that a kind of model may cause.
_BYPASSES = {"counting": {"foreign_model"}}

# Kind of model, whether ComfyUI casts its weights in each forward, and torch's flags.
Architecture = tuple[str, bool, tuple[str, ...]]


@dataclass(frozen=True)
class Workflow:
    """Every field can be changed independently: a change never makes another field invalid.

    backend: "chosen" is the session's backend, "none" is without Compile Model. The same for VAE and ControlNet.
    kind: "sd" and "sdxl" are the tiny models, "inpaint" has five more channels. "fp8" is a smaller one whose weights
    ComfyUI casts in each forward, "quantized" the same with core's QuantizedTensor in int8, "quantized fp8" in fp8,
    which the CPU emulates. "counting" is of another pack's class, which counts its calls.
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
    def fitting_second(self) -> str:
        """The second sampler's model. It has the same weights if patched ones are rounded to 8 bits.

        ComfyUI's first call after such weights were loaded computes with them before that rounding. So it has two
        results, and here each sampler would load them: only the first of the two could be seen.
        """
        is_rounded = self.kind in SMALL and not CHANGE_WEIGHTS.isdisjoint(self.patches)
        return "same" if is_rounded and self.second in ("unpatched", "plain") else self.second

    @property
    def second_backend(self) -> str:
        """The backend of the second sampler, if there is one."""
        if self.fitting_second == "unpatched":
            return dataclasses.replace(self, patches=self.patches[: self.at]).sampling_backend
        return {"same": self.sampling_backend, "other": self.backend}.get(self.fitting_second, "none")

    @property
    def backends(self) -> set[str]:
        """The backends that run something in this workflow, with any schedule."""
        decoding = self.vae_backend if self.decode != "none" else "none"
        return {self.sampling_backend, self.second_backend, decoding} - {"none"}

    @property
    def fitting_control(self) -> str:
        """The ControlNet that this kind of model can have."""
        if self.kind in SMALL or (self.kind != "sd" and self.control == "control lora"):
            return "none"
        return self.control

    @property
    def control_backends(self) -> set[str]:
        """The backends that run a ControlNet, at the steps where it is active, which may be none."""
        return {self.control_backend} - {"none"} if self.fitting_control in NETS else set()

    def _flags(self, patches: Sequence[str]) -> tuple[str, ...]:
        """Of these patches, what a region's key has in it."""
        return tuple(flag for flag in (*FLAGS, CHOSEN_ATTENTION) if flag in patches)

    @property
    def architectures(self) -> set[Architecture]:
        """The families that the chosen backend compiles, whether ComfyUI casts their weights, and torch's flags."""
        flags = self._flags(self.patches)
        found = set[Architecture]()
        if "chosen" in (self.sampling_backend, self.second_backend):
            found.add((self.kind, "ModelComputeDtype" in self.patches, flags))
        second = self.fitting_second
        second_flags = self._flags(self.patches[: self.at]) if second == "unpatched" else ()
        if self.second_backend == "chosen" and second != "same":
            found.add((self.kind, False, second_flags))
        if "chosen" in self.control_backends:
            found.add((f"ControlNet for {self.kind}", False, flags))
            if second not in ("none", "same"):
                found.add((f"ControlNet for {self.kind}", False, second_flags))
        return found

    @property
    def certain_architectures(self) -> set[Architecture]:
        """The architectures that certainly ran as a whole after the workflow; none if that depends on the schedule."""
        depends = self.fitting_second == "unpatched" or self.fitting_control in ("early", "late")
        return set() if depends else self.architectures

    @property
    def bypasses(self) -> set[str]:
        """The bypass codes that the patches and the kind of model may cause."""
        return _BYPASSES.get(self.kind, set()).union(*(PATCHES[name].bypasses for name in self.patches))

    @property
    def runs_as_is(self) -> bool:
        """Patches make calls of the model or of a ControlNet run without any region."""
        patches = set(self.patches)
        leave_none = patches >= _OF_ALL_BLOCKS or (self.fitting_control in NETS and patches >= _OF_ALL_OF_A_NET)
        return leave_none or any(PATCHES[name].runs_as_is for name in self.patches)

    @property
    def decides(self) -> bool:
        """Whether a patch compares numbers."""
        return any(PATCHES[name].decides for name in self.patches)

    @property
    def free_batching(self) -> str:
        """The batching policy, unless the result depends on batching in ComfyUI itself."""
        counts = self.kind == "counting" or any(PATCHES[name].counts_calls for name in self.patches)
        return "auto" if counts else self.batching
