"""Row 10: prompts that wait, are cancelled or fail, and must not affect the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ..rig import (
    Bench,
    PromptDict,
    Run,
    compile_model,
    compiled,
    failure_of,
    node,
    with_model,
    with_sampling,
    without_decoder,
)
from .kit import Check, Recorder
from .placing import before_and_after, placed

STEPS = 4
ENDLESS = 10000
INTERRUPTED = "The prompt was interrupted in node sample."

# A width that no other model of the server has, so that all of its regions must be compiled.
WIDTH = 96


class QueuedCheck(Check):
    """Checks prompts that are queued at once: each by its image, all together by their counters."""

    def together(
        self, plain: Sequence[PromptDict], ours: Sequence[PromptDict], *, forwards: int, bypasses: dict[str, int]
    ) -> None:
        expected = [self.bench.run(prompt) for prompt in plain]
        before = self.bench.counters()
        waiting = [self.bench.client.queue(prompt) for prompt in ours]
        histories = [self.bench.client.wait(prompt_id) for prompt_id in waiting]
        actual = [self.bench.finished(history, before) for history in histories]
        for theirs, mine in zip(expected, actual, strict=True):
            self._recorder.add(self._name, theirs, mine)
            self.compare(mine, theirs)
        self._count(actual[-1], forwards, bypasses, eager_calls=0, compiles=False)


@pytest.fixture
def queued(bench: Bench, warm: Run, recorder: Recorder, request: pytest.FixtureRequest) -> QueuedCheck:
    """``check`` for several prompts."""
    return QueuedCheck(bench, recorder, request.node.name)


def endless(prompt: PromptDict) -> PromptDict:
    """The prompt with so many steps that it cannot finish."""
    return with_sampling(prompt, steps=ENDLESS)


def calls(bench: Bench) -> int:
    """Number of forwards of compiled modules so far."""
    counters = bench.counters()
    return int(counters["graph_calls"] + counters["replays"])


def test_prompts_queued_at_once_do_not_affect_each_other(queued: QueuedCheck, tiny_prompt: Any, seeds: Any) -> None:
    def small(**settings: Any) -> PromptDict:
        whole = tiny_prompt(seed=next(seeds), steps=STEPS, **settings)
        return without_decoder(whole)

    free_u, pag = node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3), node("PerturbedAttentionGuidance", scale=3.0)
    wanted = [
        (small(width=136, height=104), []),
        (small(width=72, height=200, batch=2), [free_u]),
        (small(width=136, height=104, cfg=1.0, tokens=154), []),
        (small(width=96, height=120), [pag]),
    ]
    plain = [with_model(prompt, *others) for prompt, others in wanted]
    ours = [placed(prompt, others, "before", queued.backend) for prompt, others in wanted]
    queued.together(plain, ours, forwards=5 * STEPS, bypasses={"patched_block": STEPS})


@before_and_after
def test_a_cancelled_prompt_does_not_affect_the_next_one(check: Check, prompt: Any, seeds: Any, place: str) -> None:
    other = [node("FreeU_V2", b1=1.5, b2=1.6, s1=0.7, s2=0.3)]
    check(prompt, forwards=STEPS)
    before = calls(check.bench)
    message = check.bench.cancel_once(
        endless(placed(prompt, other, place, check.backend)), lambda: calls(check.bench) >= before + 3
    )
    assert message == INTERRUPTED
    assert calls(check.bench) < before + ENDLESS
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    check(prompt, forwards=STEPS)


def test_the_prompt_that_waits_behind_a_cancelled_one_is_right(
    queued: QueuedCheck, tiny_prompt: Any, prompt: Any, seeds: Any
) -> None:
    behind = {**prompt, "latent": node("EmptyLatentImage", width=88, height=120, batch_size=2)}
    behind["sample"] = node("KSampler", **{**prompt["sample"]["inputs"], "seed": next(seeds)})
    expected = queued.bench.run(behind)
    before, counters = calls(queued.bench), queued.bench.counters()
    client, waiting = queued.bench.client, ""

    def reached() -> bool:
        nonlocal waiting
        waiting = waiting or client.queue(compiled(behind, queued.backend))
        return calls(queued.bench) >= before + 3

    assert queued.bench.cancel_once(endless(compiled(prompt, queued.backend)), reached) == INTERRUPTED
    actual = queued.bench.finished(client.wait(waiting), counters)
    queued.compare(actual, expected)
    assert (actual.rise["region_compiles"], actual.rise["compile_failures"], actual.bypasses) == (0, 0, {})


@pytest.mark.grid(2)
@before_and_after
@pytest.mark.parametrize("step", [0, 2])
def test_a_failure_around_a_forward_does_not_affect_the_next_prompt(
    check: Check, prompt: Any, place: str, step: int
) -> None:
    failing = [node("ResoluteTestFailingPatch", step=step)]
    client = check.bench.client
    message = failure_of(client, with_model(prompt, *failing))
    assert f"asked to fail at step {step}" in message
    assert failure_of(client, placed(prompt, failing, place, check.backend)) == message
    check(prompt, forwards=STEPS)


@pytest.mark.grid(3)
@before_and_after
@pytest.mark.parametrize("where", ["input_block_patch", "output_block_patch", "attn1_patch"])
def test_a_failure_inside_a_forward_does_not_affect_the_next_prompt(
    check: Check, prompt: Any, seeds: Any, place: str, where: str
) -> None:
    whole = check(prompt, forwards=STEPS)
    failing = [node("ResoluteTestFailingBlock", where=where)]
    client = check.bench.client
    message = failure_of(client, with_model(prompt, *failing))
    assert "ValueError: ResoluteTestFailingBlock: asked to fail" in message
    assert failure_of(client, placed(prompt, failing, place, check.backend)) == message
    prompt["sample"]["inputs"]["seed"] = next(seeds)
    again = check(prompt, forwards=STEPS)
    assert check.on_cuda or again.rise["region_calls"] == whole.rise["region_calls"]


def test_a_prompt_cancelled_while_it_compiles_and_one_that_fails_after_it_leave_a_usable_cache(
    check: Check, prompt: Any, seeds: Any
) -> None:
    prompt["model"] = node("ResoluteTestOtherModel", seed=1, kind="short", channels=WIDTH)

    def compiles() -> int:
        return int(check.bench.counters()["region_compiles"])

    before = compiles()
    message = check.bench.cancel_once(endless(compiled(prompt, check.backend)), lambda: compiles() > before)
    assert message == INTERRUPTED
    cancelled = compiles()
    # Its first forward compiles the remaining regions, and the second fails.
    failing = node("ResoluteTestFailingPatch", step=1)
    failure_of(check.bench.client, with_model(prompt, failing, compile_model(check.backend)))
    if check.backend == "inductor":
        assert compiles() > cancelled > before, "the prompt was not cancelled while it compiled"
    for _ in range(2):
        check(prompt, forwards=STEPS)
        prompt["sample"]["inputs"]["seed"] = next(seeds)
