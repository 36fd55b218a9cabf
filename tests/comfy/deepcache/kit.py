"""One check of DeepCache on a server: the plain loop, DeepCache alone, and DeepCache on both sides of Compile Model."""

from __future__ import annotations

import copy
import re
from typing import Any

from scripts.server.process import ComfyServer

from ..rig import (
    AGAINST_CAPTURES,
    LATENT_TOLERANCE,
    Bench,
    PromptDict,
    Run,
    assert_different,
    assert_ran_compiled,
    compile_model,
    latent_error,
    node,
    with_model,
)

REFERENCE_TOLERANCE = 1e-5
DEEPCACHE = node("ResoluteDeepCache", interval=3, depth=2)
REFERENCE = node("ResoluteTestDeepCacheReference", interval=3, depth=2)
COMPILE = compile_model("inductor")
Passes = tuple[int, int]  # full and fast


def changed(prompt: PromptDict, *nodes: dict[str, Any]) -> PromptDict:
    """The prompt with `nodes` before its sampler; a sampler "again" has the same model."""
    result = with_model(copy.deepcopy(prompt), *nodes)
    if "again" in result:
        result["again"]["inputs"]["model"] = result["sample"]["inputs"]["model"]
    return result


def assert_equal_latents(actual: Run, expected: Run, tolerance: float) -> None:
    assert len(actual.latents) == len(expected.latents) > 0
    for mine, theirs in zip(actual.latents, expected.latents, strict=True):
        assert mine.shape == theirs.shape
        assert theirs.std() > 0
        assert latent_error(mine, theirs) <= tolerance, latent_error(mine, theirs)


class Check:
    """Runs prompts and reads what each run of the sampler says about its passes."""

    def __init__(self, bench: Bench, server: ComfyServer, on_cuda: bool) -> None:
        self.bench = bench
        self.server = server
        self._beside = AGAINST_CAPTURES if on_cuda else frozenset[str]()

    def run(self, prompt: PromptDict) -> tuple[Run, list[Passes]]:
        """The prompt's Run, and the passes of each of its sampling runs."""
        before = len(self.server.log())
        run = self.bench.run(prompt)
        told = re.findall(r"DeepCache: .*; (\d+) full and (\d+) fast passes", self.server.log()[before:])
        return run, [(int(full), int(fast)) for full, fast in told]

    def __call__(
        self,
        prompt: PromptDict,
        *,
        passes: Passes | list[Passes],
        others: tuple[dict[str, Any], ...] = (),
        reference: bool = True,
        bypasses: tuple[str, ...] = (),
        forwards_beside: int = 0,
        compiled_prompt: PromptDict | None = None,
    ) -> Run:
        """`passes`: of each sampling run. `others`: nodes after ours. `reference`: whether the plain loop can do it.
        `bypasses`: codes, where compiled. `forwards_beside`: compiled forwards of others, in `compiled_prompt`."""
        expected = passes if isinstance(passes, list) else [passes]
        alone, told = self.run(changed(prompt, DEEPCACHE, *others))
        assert told == expected
        assert_different(alone, self.bench.run(changed(prompt, *others)))
        if reference:
            assert_equal_latents(alone, self.bench.run(changed(prompt, REFERENCE, *others)), REFERENCE_TOLERANCE)
        forwards = sum(map(sum, expected)) + forwards_beside
        for ours in ((DEEPCACHE, COMPILE), (COMPILE, DEEPCACHE)):
            compiled, told = self.run(changed(compiled_prompt or prompt, *ours, *others))
            assert told == expected
            assert_equal_latents(compiled, alone, LATENT_TOLERANCE)
            assert_ran_compiled(compiled, forwards, bypasses, self._beside)
        return alone
