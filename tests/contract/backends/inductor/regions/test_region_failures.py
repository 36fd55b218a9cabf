"""Regions that cannot be compiled, code that is wrong at other sizes, and calls that are cancelled."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.compiler import work
from compile_cache.backends.inductor.regions import region
from compile_cache.modules.site import Hook, RegionSite

from ....rig import TOKENS, TOLERANCE, Block, Rig, Stopper, original, random, seeded, tokens


class DataDependent(nn.Module):
    """Python that reads a value out of a tensor: no trace can follow both ways."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class PlainTensor(nn.Module):
    """Holds a tensor that is neither parameter nor buffer: a trace would bake its value in."""

    dims = (TOKENS,)

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class EqualTokens(nn.Module):
    """Runs other code where two dimensions with different names are equal."""

    dims = (TOKENS, ("b", "m", None))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if x.shape[1] == y.shape[1] else x * y.mean(1, keepdim=True)


class BranchOnTokens(nn.Module):
    """Runs other code for short inputs, with another result."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[1] > 8 else x.cos()


class BranchOnBatch(nn.Module):
    """Runs other code for small batches, with another result."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[0] > 4 else x.cos()


class UntraceableUnlessEqual(nn.Module):
    """Has a trace only where its two inputs have the same number of tokens."""

    dims = (TOKENS, ("b", "m", None))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if x.shape[1] == y.shape[1] else x * float(y.mean())


class InPlace(nn.Module):
    """Writes into its input and returns something else."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1


class BranchOnOneToken(nn.Module):
    """Runs other code for a single token, with another result."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.shape[1] == 1 else x.cos()


class Identity(nn.Module):
    """Computes nothing."""

    dims = (TOKENS,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class BlocksNotCalled(nn.Module):
    """Reads the weights of its block in place of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.block.weight


class TestNoArtifact:
    @pytest.mark.parametrize("kind", [DataDependent, PlainTensor])
    def test_what_cannot_be_traced_runs_eagerly_and_is_not_tried_again(self, cold: Rig, kind: Any) -> None:
        bound = cold.bind(seeded(kind))
        with cold.expect({"compile_failed": 4}, compile_failures=1, eager_calls=4):
            for x in (tokens(), -tokens(), tokens(), tokens(9)):
                assert bound.error(x) == 0

    def test_the_reason_names_the_region_once(self, cold: Rig) -> None:
        bound = cold.bind(seeded(DataDependent))
        for _ in range(3):
            bound(tokens())
        assert len(cold.details) == 1
        assert "DataDependent" in cold.details[0]

    def test_inputs_that_do_not_fit_the_names_run_eagerly(self, cold: Rig) -> None:
        bound = cold.bind(seeded(EqualTokens))
        x, y = random(2, 5, 4), random(1, 5, 4)  # one name, "b", and two sizes
        with cold.expect({"compile_failed": 1}, eager_calls=1):
            assert bound.error(x, y) == 0

    def test_a_module_without_blocks_says_so(self, cold: Rig) -> None:
        bound = cold.bind(nn.Linear(4, 4))
        with cold.expect({"no_regions": 1}, eager_calls=1):
            assert bound.error(tokens()) == 0

    def test_a_module_that_calls_none_of_its_blocks_says_so_in_each_call(self, cold: Rig) -> None:
        module = BlocksNotCalled()
        site = RegionSite("block", "Linear", module.block, original, (TOKENS,))
        bound = cold.bind(module, lambda run, bypass: [Hook(module.block, functools.partial(run, site), (site,))])
        with cold.expect({"no_regions": 2}, eager_calls=2):
            assert bound.error(tokens()) == 0
            assert bound.error(tokens()) == 0

    @pytest.mark.parametrize("background_compile", [False, True])
    def test_an_empty_input_first_runs_eagerly_and_other_sizes_compiled(self, background_compile: bool) -> None:
        rig = Rig(InductorBackend(), workers=0)
        bound = rig.bind(seeded(Block))
        with rig.expect({"compile_failed": 3}, eager_calls=3):
            for batch, count in ((2, 0), (0, 5), (2, 0)):
                assert bound(tokens(count, batch), background_compile=background_compile).shape == (batch, count, 4)
        with rig.expect(region_compiles=1, verifications=1, region_calls=2, graph_calls=2):
            assert bound.error(tokens(5)) <= TOLERANCE
            assert bound.error(tokens(9)) <= TOLERANCE

    def test_an_error_of_the_block_itself_is_the_callers(self, cold: Rig) -> None:
        bound = cold.bind(seeded(Block))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), cold.expect():
            bound(random(2, 5, 3))


class TestArtifactsThatDoNotCarryOver:
    def test_where_an_equality_fails_a_second_artifact_is_compiled(self, cold: Rig) -> None:
        bound = cold.bind(seeded(EqualTokens))
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            assert bound.error(random(2, 5, 4), random(2, 5, 4, seed=1)) <= TOLERANCE
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            assert bound.error(random(2, 5, 4), random(2, 7, 4, seed=1)) <= TOLERANCE
        with cold.expect(region_calls=1, graph_calls=1):
            assert bound.error(random(3, 9, 4), random(3, 9, 4, seed=1)) <= TOLERANCE

    def test_a_bound_that_matters_is_found_by_comparing(self, cold: Rig) -> None:
        bound = cold.bind(seeded(BranchOnTokens))
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            assert bound.error(tokens(16)) <= TOLERANCE
        with cold.expect(region_compiles=1, verifications=2, region_calls=1, graph_calls=1):  # the old once
            assert bound.error(tokens(4)) <= TOLERANCE
        with cold.expect(region_calls=2, graph_calls=2):
            assert bound.error(tokens(16)) <= TOLERANCE
            assert bound.error(tokens(4)) <= TOLERANCE

    @pytest.mark.parametrize(
        ("kind", "sizes"),
        [
            *((BranchOnBatch, [(5, batch) for batch in batches]) for batches in ((2, 8), (8, 2), (3, 20, 1))),
            *((BranchOnOneToken, [(count, 2) for count in counts]) for counts in ((1, 5), (5, 1))),
        ],
    )
    def test_code_that_branches_on_a_size_is_right_on_both_sides(
        self, cold: Rig, kind: type[nn.Module], sizes: list[tuple[int, int]]
    ) -> None:
        bound = cold.bind(seeded(kind))
        errors = {size: bound.error(tokens(*size)) for size in sizes}
        assert {size: error for size, error in errors.items() if error > TOLERANCE} == {}
        assert cold.cache.stats.counters.region_compiles > 0

    def test_a_size_that_cannot_be_compiled_leaves_the_artifact_to_the_others(self, cold: Rig) -> None:
        bound = cold.bind(seeded(UntraceableUnlessEqual))
        bound(random(2, 5, 4), random(2, 5, 4))
        with cold.expect({"compile_failed": 1}, compile_failures=1, eager_calls=1):
            assert bound.error(random(2, 5, 4), random(2, 7, 4)) == 0
        with cold.expect(region_calls=1, graph_calls=1):
            assert bound.error(random(3, 9, 4), random(3, 9, 4)) <= TOLERANCE


class TestInputs:
    def test_a_block_may_hand_its_input_through(self, cold: Rig) -> None:
        bound = cold.bind(seeded(Identity))
        with cold.expect(region_compiles=1, verifications=1, region_calls=2, graph_calls=2):
            assert bound.error(tokens()) == 0
            assert bound.error(tokens(9)) == 0

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_a_block_that_writes_into_its_input_does_so_to_the_callers(self, rig: Rig, layout: str) -> None:
        bound = rig.bind(seeded(InPlace))
        x = tokens() if layout == "contiguous" else random(2, 4, 5).transpose(1, 2)
        expected = x * 2
        assert torch.equal(bound(x), expected + 1)
        assert torch.equal(x, expected)

    def test_the_sizes_that_a_region_remembers_are_bounded(self, cold: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(region, "_MOST_SHAPES", 4)
        bound = cold.bind(seeded(Block))
        with cold.expect(region_compiles=1, verifications=ANY, region_calls=20, graph_calls=20):
            for count in (*range(2, 12), *range(2, 12)):
                assert bound.error(tokens(count)) <= TOLERANCE
        (known,) = [each for each in cold.backend.table._regions.values() if each.label == "Block"]  # type: ignore
        assert len(known.by_shapes) == 4


class TestWrongArtifacts:
    """Code that is wrong, by a bug of ours or of the compiler."""

    def compiled(self, rig: Rig) -> Any:
        (region,) = (region for region in rig.backend.table._regions.values() if region.label == "Block")
        return region.compiled[0]

    def test_with_verify_a_wrong_result_is_refused_and_compiled_again(self) -> None:
        rig = Rig(InductorBackend(), verify=True)
        bound = rig.bind(seeded(Block))
        bound(tokens())
        self.compiled(rig).code = lambda tensors: [torch.zeros_like(tensors[-1])]
        with rig.expect(region_compiles=1, verifications=3, region_calls=1, graph_calls=1):  # the old twice
            assert bound.error(tokens(7)) <= TOLERANCE

    def test_with_verify_every_new_size_is_compared_once(self) -> None:
        rig = Rig(InductorBackend(), verify=True)
        bound = rig.bind(seeded(Block))
        bound(tokens())
        with rig.expect(verifications=2, region_calls=4, graph_calls=4):
            for count in (7, 9, 7, 9):
                assert bound.error(tokens(count)) <= TOLERANCE

    @pytest.mark.parametrize(
        "error", [RuntimeError("bad pointer"), AssertionError("expected size 5"), AttributeError("launchers")], ids=repr
    )
    def test_an_artifact_that_fails_when_run_gives_way_to_the_original_for_that_size(self, error: Exception) -> None:
        rig = Rig(InductorBackend())
        bound = rig.bind(seeded(Block))
        bound(tokens())
        compiled = self.compiled(rig)
        right = compiled.code

        def code(tensors: list[torch.Tensor]) -> Any:
            if tensors[-1].shape[1] == 7:
                raise error
            return right(tensors)

        compiled.code = code
        with rig.expect({"compile_failed": 2}, region_calls=1, graph_calls=1, eager_calls=2):
            assert bound.error(tokens(7)) == 0
            assert bound.error(tokens(7)) == 0
            assert bound.error(tokens(9)) <= TOLERANCE


class Pressed(RuntimeError):
    """A Cancel that looks like an error of torch's."""


class TestComparing:
    """Errors during a comparison that do not mean that the code is wrong."""

    @pytest.fixture
    def raised(self, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
        """What the next runs of compiled code raise."""
        errors: list[Exception] = []
        compile_trace = work.compile_trace

        def compiled(*args: Any, **kwargs: Any) -> Any:
            made = compile_trace(*args, **kwargs)
            run = made.code

            def failing(tensors: list[torch.Tensor]) -> Any:
                if errors:
                    raise errors.pop()
                return run(tensors)

            made.code = failing
            return made

        monkeypatch.setattr(work, "compile_trace", compiled)
        return errors

    def test_where_memory_is_short_the_original_runs_and_the_next_call_compares(
        self, cold: Rig, raised: list[Exception]
    ) -> None:
        bound = cold.bind(seeded(Block))
        raised.append(torch.cuda.OutOfMemoryError("out of memory"))
        with cold.expect({"out_of_memory": 1}, verifications=1, eager_calls=1):
            assert bound.error(tokens()) == 0
        with cold.expect(region_compiles=1, verifications=1, region_calls=2, graph_calls=2):  # it counts when compared
            assert bound.error(tokens()) <= TOLERANCE
            assert bound.error(tokens(9)) <= TOLERANCE

    def test_one_call_tries_once(self, cold: Rig, raised: list[Exception]) -> None:
        bound = cold.bind(nn.Sequential(*(seeded(Block) for _ in range(3))))
        raised.append(torch.cuda.OutOfMemoryError("out of memory"))
        with cold.expect({"out_of_memory": 1}, verifications=1, eager_calls=1):
            assert bound.error(tokens()) == 0

    def test_a_new_size_neither_compiles_nor_loses_the_artifact(self, raised: list[Exception]) -> None:
        rig = Rig(InductorBackend(), verify=True)
        bound = rig.bind(seeded(Block))
        bound(tokens())
        raised.append(torch.cuda.OutOfMemoryError("out of memory"))
        with rig.expect({"out_of_memory": 1}, verifications=1, eager_calls=1):
            assert bound.error(tokens(7)) == 0
        with rig.expect(verifications=1, region_calls=1, graph_calls=1):
            assert bound.error(tokens(7)) <= TOLERANCE

    def test_what_was_never_compared_is_not_kept_before_it_is(self, tmp_path: Path, raised: list[Exception]) -> None:
        config: dict[str, Any] = {"store_folder": tmp_path, "source": "one", "workers": 0}
        rig = Rig(InductorBackend(), **config)
        bound = rig.bind(seeded(Block))
        raised.append(torch.cuda.OutOfMemoryError("out of memory"))
        bound(tokens())
        assert rig.backend.stored()["regions"] == 0
        bound(tokens())
        assert rig.backend.stored()["regions"] == 1

    def test_a_cancel_is_no_difference(self, cold: Rig, raised: list[Exception]) -> None:
        bound, progress = cold.bind(seeded(Block)), Stopper()
        progress.cancellations = (Pressed,)
        raised.append(Pressed("cancelled"))
        with pytest.raises(Pressed):
            bound(tokens(), progress=progress)
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            bound(tokens(), progress=progress)


class CancelledOnce(nn.Module):
    """The user presses Cancel while it runs; a copy of it is traced before that."""

    dims = (TOKENS,)

    def __init__(self) -> None:
        super().__init__()
        self._presses = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._presses:
            self._presses.pop()
            raise InterruptedError("cancelled")
        return x.tanh()


class TestCancel:
    def test_a_cancel_before_a_compile_propagates_and_the_next_call_works(self, cold: Rig) -> None:
        bound = cold.bind(seeded(Block))
        progress = Stopper(1)
        with cold.expect(), pytest.raises(InterruptedError):
            bound(tokens(), progress=progress)
        assert "forward" not in bound.module.__dict__
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            bound(tokens(), progress=progress)
        assert bound.error(tokens()) <= TOLERANCE

    def test_a_cancel_in_the_block_is_no_failure_of_its_code(self, cold: Rig) -> None:
        bound = cold.bind(seeded(CancelledOnce))
        progress = Stopper()
        with cold.expect(verifications=1), pytest.raises(InterruptedError):
            bound(tokens(), progress=progress)
        with cold.expect(region_compiles=1, verifications=1, region_calls=1, graph_calls=1):
            bound(tokens(), progress=progress)

    def test_progress_is_shown_when_a_compile_begins_and_when_it_ended(self, cold: Rig) -> None:
        bound = cold.bind(seeded(Block))
        progress = Stopper()
        bound(tokens(), progress=progress)
        bound(tokens(9), progress=progress)
        assert progress.shown == [(0, 1), (1, 1)]
