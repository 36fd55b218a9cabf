"""What a compiled region takes for granted about sizes, and whether it holds for others.

There are no guards at run time: the assumptions are evaluated once for each new combination of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import sympy  # type: ignore[import-untyped]

_INT32_LIMIT = 2**31 - 1


class Verdict(Enum):
    HOLDS = "holds"
    UNPROVEN = "unproven"  # a bound was passed that only steered a heuristic, as far as one can tell: compare results
    BROKEN = "broken"  # the code would be wrong, or would read out of bounds


class ShapeGuards:
    """Expressions over named dimensions.

    Equalities (one size equals another, a size is a multiple) and limits of 32-bit indexing are the code's own: where
    one fails the code must not run. Other bounds, "batch > 1" or "fewer than 16", come from heuristics of layout
    and of the choice of a convolution; the code is general, but that is shown by comparing, not assumed.
    """

    def __init__(self, expressions: Iterable[sympy.Basic], symbols: Mapping[str, sympy.Symbol]) -> None:
        self.symbols = dict(symbols)
        self.expressions = list(dict.fromkeys(expressions))

    def check(self, sizes: Mapping[str, int]) -> tuple[Verdict, str]:
        """Evaluate for sizes by dimension name. The text names the assumptions that decided."""
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        passed: list[str] = []
        for expression in self.expressions:
            result = expression.xreplace(values)
            if result == sympy.true:
                continue
            if result != sympy.false or _is_essential(expression):
                return Verdict.BROKEN, str(expression)
            passed.append(str(expression))
        return (Verdict.UNPROVEN if passed else Verdict.HOLDS), ", ".join(passed)


def _is_essential(expression: sympy.Basic) -> bool:
    if not isinstance(expression, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return not isinstance(expression, sympy.Unequality)
    return any(abs(int(number)) >= _INT32_LIMIT for number in expression.atoms(sympy.Integer))
