"""Code of workers is compared with its original on inputs that are no larger than needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_cache.backends.inductor.backend import InductorBackend
from compile_cache.backends.inductor.parallel import comparison, parallel_compile
from compile_cache.backends.inductor.regions import numerics_check, region

from ....rig import TOKENS, TOLERANCE, Block, Model, Rig, inputs, seeded, tokens

LARGE = (17, 40, 36, 150)  # the convolution is traced for a batch of 16 or more


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_ENOUGH", 1 << 17)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of the largest input of each comparison."""
    seen: list[int] = []
    real = comparison.difference_from_original

    def note(compiled: Any, site: Any, weights: Any, tensors: Any, *rest: Any) -> str | None:
        seen.append(max(tensor.numel() for tensor in tensors))
        return real(compiled, site, weights, tensors, *rest)

    for module in (comparison, region):
        monkeypatch.setattr(module, "difference_from_original", note)
    return seen


@pytest.mark.long
def test_large_inputs_are_compared_at_small_sizes(compared: list[int], tmp_path: Path) -> None:
    rig = Rig(InductorBackend(), workers=2, store_folder=tmp_path, source="one")
    bound = rig.bind(seeded(Model))
    with rig.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs(*LARGE)) <= TOLERANCE
    assert len(compared) == 2
    assert max(compared) <= 1 << 17


@pytest.mark.long
def test_code_that_is_wrong_at_small_sizes_is_compared_at_those_of_the_call(
    compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_agrees", lambda call, compiled: False)
    rig = Rig(InductorBackend(), workers=2)
    bound = rig.bind(seeded(Model))
    with rig.expect(region_compiles=2, verifications=2, region_calls=4, graph_calls=1):
        assert bound.error(*inputs(*LARGE)) <= TOLERANCE
    assert min(compared) > 1 << 17


class Masked(Block):
    dims = (TOKENS, TOKENS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, self.linear(x).tanh(), x)


class Indexed(Block):
    dims = (TOKENS, ("b", "n"))

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table(index)


class Turned(Block):
    dims = (TOKENS, ("b", "n", None))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2))) * angles
        return torch.view_as_real(turned).flatten(-2)


def mask(x: torch.Tensor) -> torch.Tensor:
    return x > 0


def index(x: torch.Tensor) -> torch.Tensor:
    """Each row of the table: one more would be out of range."""
    return torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % 7


def angles(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


@pytest.mark.parametrize(
    ("block", "other", "value"),
    [(Masked, mask, True), (Masked, mask, False), (Indexed, index, 0), (Turned, angles, 0)],
    ids=["all true", "all false", "index 0", "angle 0"],
)
def test_code_that_ignores_the_values_of_an_input_is_never_used(
    monkeypatch: pytest.MonkeyPatch, block: type[Block], other: Callable[[torch.Tensor], torch.Tensor], value: float
) -> None:
    real = parallel_compile.unpack

    def spoiled(artifact: Any) -> Any:
        compiled = real(artifact)
        code = compiled.code
        compiled.code = lambda given: code(
            [each if each.dtype is torch.float32 else torch.full_like(each, value) for each in given]
        )
        return compiled

    monkeypatch.setattr(parallel_compile, "unpack", spoiled)
    monkeypatch.setattr(parallel_compile, "_FEWEST", 1)
    rig = Rig(InductorBackend(), workers=2)
    x = tokens()
    with rig.expect(region_compiles=1, verifications=2, region_calls=1, graph_calls=1):
        assert rig.bind(seeded(block)).error(x, other(x)) <= TOLERANCE


def test_a_difference_in_any_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_check, "_PART", 100)
    expected = torch.randn(3, 7, 60).transpose(1, 2)
    expected[0, 0, 0] = torch.inf
    assert numerics_check._error(expected.clone(), expected) == 0
    for place in [(0, 59, 6), (2, 0, 0), (1, 30, 3)]:
        actual = expected.clone()
        actual[place] += 5.0
        assert float(numerics_check._error(actual, expected)) == pytest.approx(5.0)
    finite = expected[torch.isfinite(expected)]
    assert float(numerics_check._norm(expected)) == pytest.approx(float(finite.norm()), rel=1e-5)
