"""Shape guards: which must hold, which only steered a heuristic, and the verdict for given sizes."""

from __future__ import annotations

import pytest
import sympy

from compile_cache.backends.inductor.compile.shape_guards import ConfirmedSizes, ShapeGuards, Verdict

B, N, H = (sympy.Symbol(name, integer=True) for name in ("s0", "s1", "s2"))
SYMBOLS = {"b": B, "n": N, "h": H}


def check(expression: sympy.Basic, **sizes: int) -> Verdict:
    return ShapeGuards([expression], SYMBOLS).check({"b": 2, "n": 5, "h": 7, **sizes})[0]


def test_without_guards_every_size_holds() -> None:
    assert ShapeGuards([], SYMBOLS).check({"b": 1, "n": 1, "h": 1}) == (Verdict.HOLDS, "")


@pytest.mark.parametrize("name", ["b", "n", "h"])
def test_a_size_of_nothing_is_broken(name: str) -> None:
    """Traces take sizes for positive numbers."""
    sizes = {"b": 2, "n": 5, "h": 7, name: 0}
    assert ShapeGuards([], SYMBOLS).check(sizes) == (Verdict.BROKEN, "sizes above 0")


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Eq(B, N, evaluate=False),
        sympy.Eq(sympy.Mod(H, 8, evaluate=False), 0, evaluate=False),
        sympy.Eq(B * N, 10, evaluate=False),
    ],
    ids=str,
)
def test_an_equality_that_fails_is_broken(expression: sympy.Basic) -> None:
    assert check(expression, b=4, n=5, h=9) is Verdict.BROKEN


@pytest.mark.parametrize("expression", [sympy.Eq(B, N, evaluate=False), sympy.Eq(N, B, evaluate=False)], ids=str)
def test_an_equality_that_is_met_holds(expression: sympy.Basic) -> None:
    assert check(expression, b=4, n=4) is Verdict.HOLDS


@pytest.mark.parametrize("expression", [B > 1, B >= 2, N < 16, N <= 15, sympy.Ne(B, 1)], ids=str)
def test_a_bound_that_is_passed_is_unproven(expression: sympy.Basic) -> None:
    assert check(expression) is Verdict.HOLDS
    assert check(expression, b=1, n=99) is Verdict.UNPROVEN


@pytest.mark.parametrize("expression", [B * N * H < 2**31, B * N <= 2**31 - 1, sympy.Gt(2**31, B * N * H)], ids=str)
def test_a_limit_of_32_bit_indexing_that_is_passed_is_broken(expression: sympy.Basic) -> None:
    assert check(expression) is Verdict.HOLDS
    assert check(expression, b=70_000, n=70_000) is Verdict.BROKEN


def test_what_cannot_be_decided_is_broken() -> None:
    assert check(sympy.Symbol("other", integer=True) > 1) is Verdict.BROKEN


def test_what_is_always_false_is_broken() -> None:
    assert check(sympy.false) is Verdict.BROKEN


def test_one_broken_guard_outweighs_every_unproven_one() -> None:
    expressions = [B > 1, sympy.Eq(B, N, evaluate=False), N < 4]
    assert ShapeGuards(expressions, SYMBOLS).check({"b": 1, "n": 5, "h": 7})[0] is Verdict.BROKEN


def test_the_text_names_the_guards_that_failed() -> None:
    guards = ShapeGuards([B > 1, N < 16, H < 99], SYMBOLS)
    assert guards.check({"b": 1, "n": 20, "h": 7}) == (Verdict.UNPROVEN, "s0 > 1, s1 < 16")
    assert guards.check({"b": 2, "n": 5, "h": 7}) == (Verdict.HOLDS, "")


def test_the_same_guard_twice_counts_once() -> None:
    assert ShapeGuards([B > 1, B > 1], SYMBOLS).check({"b": 1, "n": 5, "h": 7})[1] == "s0 > 1"


class TestConfirmedSizes:
    @pytest.fixture
    def confirmed(self) -> ConfirmedSizes:
        confirmed = ConfirmedSizes()
        confirmed.add("n <= 512", {"b": 2, "n": 600})
        return confirmed

    @pytest.mark.parametrize(
        ("sizes", "covered"),
        [
            ({"b": 2, "n": 600}, True),
            ({"b": 4, "n": 1200}, True),
            ({"b": 1, "n": 300}, True),
            ({"b": 2, "n": 1201}, False),
            ({"b": 2, "n": 299}, False),
            ({"b": 5, "n": 600}, False),
            ({"n": 600}, False),
        ],
        ids=repr,
    )
    def test_they_reach_to_half_and_to_twice(
        self, confirmed: ConfirmedSizes, sizes: dict[str, int], covered: bool
    ) -> None:
        assert confirmed.cover("n <= 512", sizes) is covered

    def test_another_comparison_widens_the_range_of_these_guards_alone(self, confirmed: ConfirmedSizes) -> None:
        confirmed.add("n <= 512", {"b": 2, "n": 5000})
        assert confirmed.cover("n <= 512", {"b": 2, "n": 10000})
        assert not confirmed.cover("b > 2, n <= 512", {"b": 2, "n": 600})

    def test_they_survive_as_plain_data(self, confirmed: ConfirmedSizes) -> None:
        kept = ConfirmedSizes.from_plain(confirmed.plain())
        assert kept.plain() == {"n <= 512": {"b": [2, 2], "n": [600, 600]}}
        assert kept.cover("n <= 512", {"b": 2, "n": 1200})

    @pytest.mark.parametrize("data", [["n <= 512"], {"n <= 512": ["n"]}, {"n <= 512": {"n": 600}}], ids=repr)
    def test_other_data_is_refused(self, data: object) -> None:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            ConfirmedSizes.from_plain(data)  # type: ignore[arg-type]
