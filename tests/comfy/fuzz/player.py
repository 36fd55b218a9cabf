"""Plays a sequence of events on a real server and compares each prompt with ComfyUI's own result."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from scripts.errors import PromptError
from scripts.server.client import History

from ..rig import Bench, PromptDict, Run, latent_error, node, with_model
from .costs import Costs
from .events import Event
from .prompts import in_float32, ours, plain
from .tally import Tally
from .workflow import QUANTIZED, Workflow

# Steps of a prompt to be cancelled: so many that it cannot finish before.
_LONG = 40
# Number of cached results of plain prompts: while hypothesis shortens a sequence, the same prompts repeat.
_KEPT = 64
# How much ComfyUI's own result may differ from run to run: kernels depend on memory alignment.
_STEADY = (1e-5, 1)
# In half precision ours may be this many times as far from float32 as ComfyUI's own: kernels round in other places.
_LESS_EXACT = 1.5
# The root mean square of images, in levels of 255, below which nothing counts: what rounding to 8 bits makes.
_ROUNDED_IMAGE = 0.5
# A difference counts as rounding up to this multiple of the difference that weights disturbed by a millionth make.
_SENSITIVE = 5
# Nodes that raise in the middle of sampling, around the model or inside one of its blocks.
_FAILURES = (
    *(node("ResoluteTestFailingPatch", step=step) for step in (1, 0, 2, 3)),
    *(node("ResoluteTestFailingBlock", where=where) for where in ("output_block_patch", "attn1_patch")),
)

Difference = tuple[float, int]


class Unexpected(AssertionError):
    """A violated property. prompts: the API prompts that show it, by name."""

    def __init__(self, text: str, **prompts: PromptDict) -> None:
        super().__init__(text)
        self.prompts = prompts


@dataclass(frozen=True)
class Done:
    """A finished prompt with Resolute's nodes: its workflow, and its result or error."""

    event: str
    workflow: Workflow
    prompt: PromptDict
    result: Run | str


class Player:
    """Plays sequences of a whole session, because it remembers what the server has compiled.

    tolerance: allowed difference of latents (relative) and of images (levels of 255).
    """

    def __init__(self, bench: Bench, backend: str, on_cuda: bool, tolerance: Difference) -> None:
        self.bench = bench
        self.tally = Tally()
        self._backend = backend
        self._tolerance = tolerance
        self._half_precision = on_cuda  # also where kernels are ComfyUI's own: a merged call takes others
        self._steady = tolerance if on_cuda else _STEADY
        self._costs = Costs(backend, on_cuda, os.environ.get("RESOLUTE_COMPILE") == "behind")
        self._nonces = itertools.count(1)
        self._plain: OrderedDict[str, Run | str] = OrderedDict()

    def play(self, sequence: Sequence[Event]) -> None:
        """Play a sequence. Raises Unexpected at the first prompt with wrong counters, or at the end for a wrong image.

        Images are compared at the end, so that prompts with Resolute's nodes run one after the other, as for a user.
        """
        self.tally.sequences += 1
        workflow, done = Workflow(), list[Done]()
        for number, (kind, *rest) in enumerate(sequence):
            place = f"event {number} ({kind})"
            if kind == "open":
                workflow = Workflow.opened(rest[0])
            elif kind == "set":
                workflow = workflow.changed(*rest)
            elif kind in ("queue", "again"):
                workflow = workflow.changed("seed", workflow.seed + (kind == "again"))
                done += self._run(place, workflow)
            elif kind == "both":
                done += self._run(place, workflow, workflow.changed(*rest))
            elif kind == "count":
                done += self._count(place, workflow)
            elif kind == "plain":
                self._run_plain(workflow, afresh=True)
            elif kind == "cancel":
                self._cancel(place, workflow, *rest)
            elif kind == "fail":
                self._fail(place, workflow, *rest)
            elif kind == "free":
                self.bench.free()
            else:
                raise ValueError(f"{kind!r} is not an event")
        for one in done:
            self._compare(one)

    # --- prompts with our nodes --------------------------------------------------------------------------------

    def _nonce(self) -> int:
        return next(self._nonces) % 50_000

    def _ours(self, workflow: Workflow) -> PromptDict:
        return ours(workflow, self._backend, self._nonce())

    def _run(self, place: str, *workflows: Workflow) -> list[Done]:
        """Queue all workflows at once, wait for them, and check their counters together."""
        client, before = self.bench.client, self.bench.counters()
        prompts = [self._ours(workflow) for workflow in workflows]
        queued = [client.queue(prompt) for prompt in prompts]
        ended: list[History | str] = []
        for prompt_id in queued:
            try:
                ended.append(client.wait(prompt_id))
            except PromptError as error:
                ended.append(str(error))
        self.tally.prompts += len(ended)
        done = [
            Done(place, workflow, prompt, end if isinstance(end, str) else self.bench.finished(end, before))
            for workflow, prompt, end in zip(workflows, prompts, ended, strict=True)
        ]
        runs = [one.result for one in done if isinstance(one.result, Run)]
        if runs:
            self.tally.add(runs[-1].rise)
        if len(runs) == len(done):
            wrong = self._costs.wrong(workflows, runs[-1].rise)
            if wrong:
                named = {f"ours_{number}": prompt for number, prompt in enumerate(prompts)}
                raise Unexpected(f"{place}: {'; '.join(wrong)}: {runs[-1].rise}", **named)
        return done

    def _count(self, place: str, workflow: Workflow) -> list[Done]:
        """Check that the chosen backend runs as many forwards as the backend that only counts them."""
        done = [*self._run(place, workflow.with_backend("chosen")), *self._run(place, workflow.with_backend("eager"))]
        runs = [one.result for one in done if isinstance(one.result, Run)]
        counts = {sum(run.rise[name] for name in ("graph_calls", "replays", "eager_calls")) for run in runs}
        if len(counts) > 1 and not workflow.decides:
            raise Unexpected(f"{place}: chosen and eager made {counts} forwards", ours=done[0].prompt)
        return done

    def _cancel(self, place: str, workflow: Workflow, forwards: int) -> None:
        """Cancel the prompt after that many forwards went through the cache."""
        client, before = self.bench.client, self.bench.counters()
        long = dataclasses.replace(workflow, steps=_LONG)
        prompt = self._ours(long)
        prompt_id = client.queue(prompt)
        while prompt_id not in client.get(f"/history/{prompt_id}"):
            after = self.bench.counters()
            calls = sum(after[name] - before[name] for name in ("graph_calls", "replays", "eager_calls"))
            if calls >= forwards or workflow.sampling_backend == "none":
                break
            time.sleep(0.01)
        client.interrupt()
        try:
            client.wait(prompt_id)
        except PromptError as error:
            self.tally.cancelled += self._stopped(Done(place, long, prompt, str(error)), "interrupted")

    def _fail(self, place: str, workflow: Workflow, number: int) -> None:
        """Run a prompt whose node raises in the middle of sampling, unless a step cache skips that step."""
        prompt = with_model(self._ours(workflow), _FAILURES[number % len(_FAILURES)])
        try:
            self.bench.client.run(prompt)
        except PromptError as error:
            self.tally.failed += self._stopped(Done(place, workflow, prompt, str(error)), "asked to fail")

    def _stopped(self, one: Done, how: str) -> bool:
        """Whether a prompt ended as intended. Any other error must be ComfyUI's own."""
        if how in str(one.result):
            return True
        self._compare(one)
        return False

    # --- ComfyUI's own -----------------------------------------------------------------------------------------

    def _run_plain(self, workflow: Workflow, afresh: bool = False) -> Run | str:
        """ComfyUI's own result or error. afresh: run it even if a result is cached, and compare the two."""
        prompt = plain(workflow)
        key = json.dumps(prompt, sort_keys=True)
        kept = self._plain.get(key)
        if kept is not None and not afresh:
            self._plain.move_to_end(key)
            return kept
        self.tally.plain_prompts += 1
        result: Run | str
        try:
            result = self.bench.run(plain(workflow, self._nonce()))
        except PromptError as error:
            result = str(error)
        if isinstance(result, Run) and result.touched_the_cache:
            raise Unexpected(f"a prompt without our nodes went through the cache: {result.rise}", plain=prompt)
        if isinstance(result, Run) and isinstance(kept, Run) and _meaningful(kept):
            again = _difference(result, kept)
            if not _within(again, self._steady) and not self._is_one_of_comfyuis_own(workflow, kept):
                raise Unexpected(f"ComfyUI's own results differ by {again}", plain=prompt)
        self._plain[key] = result
        if len(self._plain) > _KEPT:
            self._plain.popitem(last=False)
        return result

    def _compare(self, one: Done) -> None:
        expected = self._run_plain(one.workflow)
        prompts = {"plain": plain(one.workflow), "ours": one.prompt}
        if isinstance(expected, str) or isinstance(one.result, str):
            if expected != one.result:
                mine, theirs = (end if isinstance(end, str) else "a result" for end in (one.result, expected))
                raise Unexpected(f"{one.event}: {mine}, and without our nodes: {theirs}", **prompts)
            self.tally.refused += 1
            return
        if not _meaningful(expected):
            self.tally.meaningless += 1
            return
        self.tally.compared += 1
        latent, image = difference = _difference(one.result, expected)
        self.tally.worst = max(self.tally.worst, min(latent, self._tolerance[0]))
        if _within(difference, self._tolerance):
            return
        # Rounding in front of a quantizer is amplified, so two right results differ as in half precision.
        rounds = self._half_precision or one.workflow.kind in QUANTIZED
        exact = self._run_exact(one.workflow) if rounds else None
        if exact is not None and self._is_as_exact(one.result, expected, exact):
            self.tally.rounded += 1
            return
        if self._is_one_of_comfyuis_own(one.workflow, one.result):
            self.tally.unsteady += 1
            return
        if self._is_sensitive(one.workflow, expected, difference):
            self.tally.sensitive += 1
            return
        if one.workflow.decides and not self._differs_again(one.workflow):
            self.tally.knife_edges += 1
            return
        text = f"{one.event}: the results differ by {latent:.3g}, images by {image} of 255"
        if exact is not None and _alike(one.result, exact):
            text += f"; to float32 by {_norms(one.result, exact)}, ComfyUI's own by {_norms(expected, exact)}"
        raise Unexpected(text, **prompts)

    def _run_exact(self, workflow: Workflow) -> Run:
        """ComfyUI's own result in float32."""
        return self.bench.run(in_float32(workflow, self._nonce()))

    def _is_as_exact(self, result: Run, expected: Run, exact: Run) -> bool:
        """Whether the result is about as close to float32 as ComfyUI's own in half precision.

        Two results that round in other places differ from each other by more than each does from float32
        (benchmarks/results/README.md, half precision), so the tolerance, which was measured in float32, does not
        apply. Images are compared by the root of their mean square: the largest of 10,000 rounding errors varies more
        than twofold.
        """
        if not _alike(result, exact):
            return False
        latent, image = _norms(expected, exact)
        mine = _norms(result, exact)
        return mine[0] <= _LESS_EXACT * latent and mine[1] <= max(_ROUNDED_IMAGE, _LESS_EXACT * image)

    def _is_one_of_comfyuis_own(self, workflow: Workflow, result: Run) -> bool:
        """Return True if ComfyUI itself gives this result too, in the first run after loading models or in a later one.

        Core computes sigmas on the model's current device. With an even number of sgm_uniform's steps, one sigma lies
        between two timesteps, and its last bit, which CPU and GPU round differently, selects one of them.
        """
        own = self._after_loads(workflow, lambda each: self.bench.run(plain(each, self._nonce())))
        if any(_within(_difference(result, each), self._tolerance) for each in own):
            return True
        if not self._half_precision:
            return False
        exact = self._after_loads(workflow, self._run_exact)
        return any(self._is_as_exact(result, *pair) for pair in zip(own, exact, strict=True))

    def _after_loads(self, workflow: Workflow, run: Callable[[Workflow], Run]) -> list[Run]:
        """The results of a first run, of the next one, and of one before which only the first sampler's model ran."""
        self.bench.free()
        found = [run(workflow), run(workflow)]
        self.bench.free()
        run(dataclasses.replace(workflow, second="none", decode="none"))
        return [*found, run(workflow)]

    def _is_sensitive(self, workflow: Workflow, expected: Run, difference: Difference) -> bool:
        """Whether ComfyUI's own result differs as much with weights disturbed by a millionth; then it is rounding."""
        if workflow.kind in ("fp8", "quantized fp8"):  # its weights cannot be disturbed by a millionth
            return False
        disturbed = self.bench.run(plain(workflow, self._nonce(), disturbed=True))
        latent, image = _difference(disturbed, expected)
        return _within(difference, (_SENSITIVE * latent, max(self._tolerance[1], _SENSITIVE * image)))

    def _differs_again(self, workflow: Workflow) -> bool:
        """Whether two more seeds differ too: a comparison of almost equal numbers fails once, a defect every time."""
        for other in (1001, 1002):
            again = dataclasses.replace(workflow, seed=workflow.seed + other)
            expected, (one,) = self._run_plain(again), self._run("another seed", again)
            if isinstance(expected, str) or isinstance(one.result, str):
                return True
            if _within(_difference(one.result, expected), self._tolerance):
                return False
        return True


def _meaningful(run: Run) -> bool:
    latents = all(numpy.isfinite(latent).all() and latent.std() > 0.01 for latent in run.latents)
    return latents and all(image.std() > 5 for image in run.images)


def _alike(one: Run, other: Run) -> bool:
    """Whether two runs have the same numbers and shapes of latents and images."""
    shapes = [[part.shape for part in (*run.latents, *run.images)] for run in (one, other)]
    return shapes[0] == shapes[1]


def _difference(one: Run, other: Run) -> Difference:
    """Difference of latents (relative) and of images (the largest, in levels of 255)."""
    if not _alike(one, other):
        return float("inf"), 255
    images = [int(abs(mine - theirs).max()) for mine, theirs in zip(one.images, other.images, strict=True)]
    return _latent_norm(one, other), max(images, default=0)


def _norms(one: Run, other: Run) -> tuple[float, float]:
    """Difference of latents (relative) and of images (root of the mean square, in levels of 255); both are alike."""
    images = [
        float(numpy.sqrt(numpy.square(mine - theirs, dtype=numpy.float64).mean()))
        for mine, theirs in zip(one.images, other.images, strict=True)
    ]
    return _latent_norm(one, other), max(images, default=0.0)


def _latent_norm(one: Run, other: Run) -> float:
    errors = [latent_error(mine, theirs) for mine, theirs in zip(one.latents, other.latents, strict=True)]
    return max((error if numpy.isfinite(error) else float("inf") for error in errors), default=0.0)


def _within(difference: Difference, tolerance: Difference) -> bool:
    return difference[0] <= tolerance[0] and difference[1] <= tolerance[1]
