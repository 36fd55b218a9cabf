"""Shape guards: which must hold, which only steered a heuristic, and the verdict for given sizes."""

from __future__ import annotations

import pytest
import sympy

from compile_cache.backends.inductor.lower.shape_guards import ConfirmedSizes, ShapeGuards, Verdict

B, N, H = (sympy.Symbol(name, integer=True) for name in ("s0", "s1", "s2"))
SYMBOLS = {"b": B, "n": N, "h": H}


BOUNDS = (B > 1, B >= 2, N < 16, N <= 15, sympy.Ne(B, 1))
LIMITS = (B * N * H < 2**31, B * N <= 2**31 - 1, sympy.Gt(2**31, B * N * H))
HOLDS, UNPROVEN, BROKEN = Verdict
EQUAL = sympy.Eq(B, N, evaluate=False)
OTHER = sympy.Symbol("other", integer=True)

# Guards, sizes that differ from (2, 5, 7), the verdict, and the guards that it names; None for whichever.
VERDICTS: list[tuple[list[sympy.Basic], dict[str, int], Verdict, str | None]] = [
    ([], {}, HOLDS, ""),
    *(([], {name: 0}, BROKEN, "sizes above 0") for name in SYMBOLS),  # traces take sizes for positive numbers
    *(([each], {"b": 4, "h": 9}, BROKEN, None) for each in (
        EQUAL, sympy.Eq(sympy.Mod(H, 8, evaluate=False), 0, evaluate=False), sympy.Eq(B * N, 10, evaluate=False),
    )),
    *(([each], {"b": 4, "n": 4}, HOLDS, "") for each in (EQUAL, sympy.Eq(N, B, evaluate=False))),
    *(([each], {}, HOLDS, "") for each in BOUNDS),
    *(([each], {"b": 1, "n": 99}, UNPROVEN, str(each)) for each in BOUNDS),
    # A limit of 32-bit indexing.
    *(([each], {}, HOLDS, "") for each in LIMITS),
    *(([each], {"b": 70_000, "n": 70_000}, BROKEN, None) for each in LIMITS),
    ([OTHER > 1], {}, BROKEN, "other > 1"),
    ([sympy.false], {}, BROKEN, "False"),
    ([B > 1, EQUAL, N < 4], {"b": 1}, BROKEN, None),
    ([B > 1, N < 16, H < 99], {"b": 1, "n": 20}, UNPROVEN, "s0 > 1, s1 < 16"),
    ([B > 1, N < 16, H < 99], {}, HOLDS, ""),
    ([B > 1, B > 1], {"b": 1}, UNPROVEN, "s0 > 1"),
]  # fmt: skip


@pytest.mark.parametrize(("guards", "sizes", "verdict", "named"), VERDICTS, ids=str)
def test_the_verdict_on_sizes(
    guards: list[sympy.Basic], sizes: dict[str, int], verdict: Verdict, named: str | None
) -> None:
    found, text = ShapeGuards(guards, SYMBOLS).check({"b": 2, "n": 5, "h": 7, **sizes})
    assert found is verdict
    assert named in (None, text)


@pytest.mark.parametrize(
    ("guards", "sizes", "covered_sizes"),
    [
        ([B > 1, N > 1], {"b": 1}, {"b": 1}),
        ([B > 1, N < 16], {"b": 1, "n": 20}, {"b": 1, "n": 20}),
        ([B > 1, B * H < 9], {}, {"b": 2, "h": 7}),
    ],
    ids=str,
)
def test_a_comparison_vouches_for_all_sizes_with_those_that_the_failed_guards_read(
    guards: list[sympy.Basic], sizes: dict[str, int], covered_sizes: dict[str, int]
) -> None:
    given = {"b": 2, "n": 5, "h": 7, **sizes}
    assert ShapeGuards(guards, SYMBOLS, branches=False).covered_sizes(given) == covered_sizes
    assert ShapeGuards(guards, SYMBOLS).covered_sizes(given) == given, "the block's own code branches"


class TestConfirmedSizes:
    @pytest.fixture
    def confirmed(self) -> ConfirmedSizes:
        confirmed = ConfirmedSizes()
        confirmed.add({"b": 2, "n": 600})
        return confirmed

    @pytest.mark.parametrize(
        "sizes", [{"b": 2, "n": 601}, {"b": 1, "n": 600}, {"n": 600}, {"b": 600, "n": 2}], ids=repr
    )
    def test_a_size_says_nothing_of_another(self, confirmed: ConfirmedSizes, sizes: dict[str, int]) -> None:
        assert {"n": 600, "b": 2} in confirmed
        assert sizes not in confirmed

    def test_code_that_was_wrong_vouches_for_nothing(self, confirmed: ConfirmedSizes) -> None:
        confirmed.distrust()
        confirmed.add({"b": 3})
        assert {"n": 600, "b": 2} not in confirmed and {"b": 3} not in confirmed
        assert confirmed.plain() == []

    def test_the_latest_are_remembered(self, confirmed: ConfirmedSizes) -> None:
        for count in range(1000, 1256):
            confirmed.add({"b": 2, "n": count})
        assert [{"b": 2, "n": count} in confirmed for count in (600, 1000, 1255)] == [False, True, True]

    def test_they_survive_as_plain_data(self, confirmed: ConfirmedSizes) -> None:
        kept = ConfirmedSizes.from_plain(confirmed.plain())
        assert kept.plain() == [{"b": 2, "n": 600}]
        assert {"b": 2, "n": 600} in kept

    @pytest.mark.parametrize("data", [["n <= 512"], {"n <= 512": {"n": [6, 6]}}, [{"n": [600, 600]}], 5], ids=repr)
    def test_other_data_is_refused(self, data: object) -> None:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            ConfirmedSizes.from_plain(data)  # type: ignore[arg-type]
