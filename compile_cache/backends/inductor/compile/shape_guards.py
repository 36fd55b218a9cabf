"""The guards of a compiled region: conditions on its sizes. They are checked once for each new combination of sizes,
not in every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import sympy  # type: ignore[import-untyped]

_INT32_LIMIT = 2**31 - 1
_MOST_CONFIRMED = 256  # combinations of sizes that are remembered for one code


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

    branches: whether the block's own code branched on a size. If not, only operators and inductor did.
    """

    def __init__(
        self, expressions: Iterable[sympy.Basic], symbols: Mapping[str, sympy.Symbol], branches: bool = True
    ) -> None:
        self.branches = branches
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

    def vouched(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """What a comparison at `sizes`, which are UNPROVEN, vouches for: all sizes that have these.

        Beyond a guard lies code that was not traced. In a block's own code it may do anything, so there a comparison
        vouches for its sizes alone. An operator computes the same at each size, and chooses a layout by those that the
        failed guards read.
        """
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        failed = [each for each in self.expressions if each.xreplace(values) != sympy.true]
        read = set().union(*[each.free_symbols for each in failed])
        return {name: sizes[name] for name, symbol in self.symbols.items() if self.branches or symbol in read}


class ConfirmedSizes:
    """Sizes at which code was compared and was right, although guards failed there (`ShapeGuards.vouched`); the
    latest ones.
    """

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[str, int]], None] = {}

    def add(self, sizes: Mapping[str, int]) -> None:
        """The code was right at `sizes`, by dimension name."""
        if len(self._known) >= _MOST_CONFIRMED:
            del self._known[next(iter(self._known))]
        self._known[frozenset(sizes.items())] = None

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return frozenset(sizes.items()) in self._known

    def plain(self) -> list[dict[str, int]]:
        """As JSON data, which `from_plain` reads."""
        return [dict(sorted(each)) for each in self._known]

    @staticmethod
    def from_plain(data: Iterable[Any]) -> ConfirmedSizes:
        """Raises ValueError, TypeError or AttributeError for anything that `plain` did not make."""
        made = ConfirmedSizes()
        for each in data:
            made.add({str(name): int(size) for name, size in each.items()})
        return made


def _is_essential(expression: sympy.Basic) -> bool:
    if not isinstance(expression, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return not isinstance(expression, sympy.Unequality)
    return any(abs(int(number)) >= _INT32_LIMIT for number in expression.atoms(sympy.Integer))
