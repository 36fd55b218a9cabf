"""One check of the matrix: a prompt in stock ComfyUI against the same prompt compiled, with the same seed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..rig import IMAGE_TOLERANCE, LATENT_TOLERANCE, Bench, PromptDict, Run, assert_same, compiled, latent_error

# On CUDA, inductor is checked in float32 without TF32: fp16 rounds in every kernel, other kernels round differently,
# and the steps of a random model amplify that without bound. Replays of eager's own kernels are equal in any dtype.
CUDA_TOLERANCE = {"inductor": (2e-3, 4), "cudagraph": (0.0, 0), "eager": (0.0, 0)}


@dataclass
class Recorder:
    """Every check of a session: its name, its errors, and the increase of each counter."""

    backend: str
    on_cuda: bool
    path: Path | None = None
    system: Mapping[str, Any] = field(default_factory=dict)  # ComfyUI's system stats
    cases: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tolerance(self) -> tuple[float, int]:
        """Allowed difference of latents (relative) and of images (levels of 255)."""
        return CUDA_TOLERANCE[self.backend] if self.on_cuda else (LATENT_TOLERANCE, IMAGE_TOLERANCE)

    def add(self, name: str, plain: Run, ours: Run) -> None:
        """Record one check, whether it passes or not."""
        latents = [latent_error(mine, theirs) for mine, theirs in zip(ours.latents, plain.latents, strict=True)]
        images = [int(abs(mine - theirs).max()) for mine, theirs in zip(ours.images, plain.images, strict=True)]
        self.cases.append({"case": name, "latent_errors": latents, "image_errors": images, "rise": ours.rise})
        if self.path is not None:  # after each check, because a session may be interrupted
            self.path.write_text(json.dumps(self.as_json(), indent=1) + "\n", "utf-8")

    def as_json(self) -> dict[str, Any]:
        """The records with the machine and the versions."""
        kept = ("os", "comfyui_version", "python_version", "pytorch_version", "argv")
        about = {name: value for name, value in self.system["system"].items() if name in kept}
        about["argv"] = [part for part in about.get("argv", []) if part.startswith("--") and "/" not in part]
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "backend": self.backend,
            "system": about,
            "devices": [device["name"] for device in self.system["devices"]],
            "tolerance": {"latent": self.tolerance[0], "image": self.tolerance[1]},
            "cases": self.cases,
        }


class Check:
    """Runs a prompt both ways and compares images and counters."""

    def __init__(self, bench: Bench, recorder: Recorder, name: str) -> None:
        self.bench = bench
        self._recorder = recorder
        self._name = name

    @property
    def backend(self) -> str:
        """The backend, for compile nodes that a test adds itself."""
        return self._recorder.backend

    @property
    def on_cuda(self) -> bool:
        """Whether forwards may be replayed; if so, `region_calls` counts only the first one."""
        return self._recorder.on_cuda

    def __call__(
        self,
        plain: PromptDict,
        ours: PromptDict | None = None,
        *,
        forwards: int,
        bypasses: Mapping[str, int] | None = None,
        eager_calls: int = 0,
        compiles: bool = False,
    ) -> Run:
        """Run `plain` and `ours` (default: `plain` with Compile Model, and Compile VAE Decode if it decodes).

        forwards: calls of compiled modules in `ours`, replayed or through regions.
        bypasses: code -> exact count; none by default. eager_calls: whole forwards that ran eagerly.
        compiles: whether this is the first prompt of an architecture; otherwise nothing may compile.
        """
        expected = self.bench.run(plain)
        actual = self.bench.run(compiled(plain, self.backend) if ours is None else ours)
        self._recorder.add(self._name, expected, actual)
        assert not expected.touched_the_cache, "the prompt without Resolute's nodes used the cache"
        self.compare(actual, expected)
        self._count(actual, forwards, dict(bypasses or {}), eager_calls, compiles)
        return actual

    def compare(self, actual: Run, expected: Run) -> None:
        """Within the backend's tolerance."""
        assert_same(actual, expected, *self._recorder.tolerance)

    def _count(self, run: Run, forwards: int, bypasses: dict[str, int], eager_calls: int, compiles: bool) -> None:
        rise = run.rise
        if self.backend != "inductor":  # no regions: what cannot be captured runs eagerly
            assert run.forwards + rise["eager_calls"] == forwards + eager_calls
            return
        assert run.forwards == forwards, rise
        assert rise["eager_calls"] == eager_calls, rise
        assert rise["compile_failures"] == 0, rise
        assert compiles == (rise["region_compiles"] > 0), rise
        assert rise["captures"] <= rise["signatures"], rise
        if self.on_cuda:  # replays count no bypass, and a GPU may add reasons against a capture
            assert set(bypasses) <= set(run.bypasses), rise
        else:
            assert run.bypasses == bypasses, rise
