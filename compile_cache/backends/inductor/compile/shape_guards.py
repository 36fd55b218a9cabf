"""The guards of a compiled region: conditions on its sizes. They are checked once for each new combination of sizes,
not in every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import sympy  # type: ignore[import-untyped]

_INT32_LIMIT = 2**31 - 1
_REACH = 2  # a comparison vouches for sizes from half to twice its own


class Verdict(Enum):
    HOLDS = "holds"
    UNPROVEN = "unproven"  # a guard fails that probably only chose between two correct ways: compare results
    BROKEN = "broken"  # the code would give wrong results or read out of bounds


class ShapeGuards:
    """Expressions over symbols, and the symbol of each named dimension.

    Every size is at least 1: symbols are positive numbers. If an equality fails (one size equals another, a size is a
    multiple of a number) or a limit of 32-bit indexing, the code must not run. Other bounds ("batch > 1", "fewer than
    16") come from heuristics: the choice of a memory layout or of a convolution's algorithm. The code is probably right
    for sizes beyond such a bound, and a comparison with the original shows whether it is.
    """

    def __init__(self, expressions: Iterable[sympy.Basic], symbols: Mapping[str, sympy.Symbol]) -> None:
        self.symbols = dict(symbols)
        self.expressions = list(dict.fromkeys(expressions))

    def check(self, sizes: Mapping[str, int]) -> tuple[Verdict, str]:
        """Check sizes, by dimension name. The text lists the guards that failed; for BROKEN, the first of them."""
        if any(size < 1 for size in sizes.values()):
            return Verdict.BROKEN, "sizes above 0"
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        failed: list[str] = []
        for expression in self.expressions:
            result = expression.xreplace(values)
            if result == sympy.true:
                continue
            if result != sympy.false or _is_essential(expression):
                return Verdict.BROKEN, str(expression)
            failed.append(str(expression))
        return (Verdict.UNPROVEN if failed else Verdict.HOLDS), ", ".join(failed)


class ConfirmedSizes:
    """Sizes at which code was compared and was right, although guards failed there.

    ranges: by the text of the guards that failed, for each dimension the least and the largest such size. Beyond such
    a guard lies code that was not traced, so one size does not vouch for all.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, dict[str, tuple[int, int]]] = {}

    def add(self, failed: str, sizes: Mapping[str, int]) -> None:
        """The code was right at `sizes`, by dimension name. failed: the guards, as `ShapeGuards.check` lists them."""
        known = self._ranges.setdefault(failed, {})
        for name, size in sizes.items():
            low, high = known.get(name, (size, size))
            known[name] = (min(low, size), max(high, size))

    def cover(self, failed: str, sizes: Mapping[str, int]) -> bool:
        """True if each size is at least half of the least and at most twice the largest that was compared."""
        known = self._ranges.get(failed, {})
        return known.keys() == sizes.keys() and all(
            low <= sizes[name] * _REACH and sizes[name] <= high * _REACH for name, (low, high) in known.items()
        )

    def plain(self) -> dict[str, Any]:
        """As JSON data, which `from_plain` reads."""
        return {failed: {name: list(pair) for name, pair in known.items()} for failed, known in self._ranges.items()}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> ConfirmedSizes:
        """Raises ValueError, TypeError or AttributeError for anything that `plain` did not make."""
        made = ConfirmedSizes()
        for failed, known in data.items():
            made._ranges[failed] = {name: (int(low), int(high)) for name, (low, high) in known.items()}
        return made


def _is_essential(expression: sympy.Basic) -> bool:
    if not isinstance(expression, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return not isinstance(expression, sympy.Unequality)
    return any(abs(int(number)) >= _INT32_LIMIT for number in expression.atoms(sympy.Integer))
