"""The guards of a compiled region: conditions on its sizes. We check them once for each new combination of sizes, not
in every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import sympy  # type: ignore[import-untyped]

_INT32_LIMIT = 2**31 - 1
_MOST_CONFIRMED = 256  # combinations of sizes remembered for one piece of compiled code


class Verdict(Enum):
    HOLDS = "holds"
    UNPROVEN = "unproven"  # a guard fails, but probably only chose between two correct implementations: compare results
    BROKEN = "broken"  # the code would give wrong results or read out of bounds


class ShapeGuards:
    """Expressions over symbols, and the symbol of each named dimension.

    Every size is at least 1: symbols are positive. If an equality fails (one size equals another, a size is a multiple
    of a number), or a limit of 32-bit indexing, the code must not run. Other bounds ("batch > 1", "fewer than 16") come
    from heuristics: the choice of a memory layout or of a convolution's algorithm. Beyond such a bound the code is
    probably correct, and a comparison with the original decides.

    branches: True if the block's own code branched on a size, False if only operators and inductor did.
    """

    def __init__(
        self, expressions: Iterable[sympy.Basic], symbols: Mapping[str, sympy.Symbol], branches: bool = True
    ) -> None:
        self.branches = branches
        self.symbols = dict(symbols)
        self.expressions = list(dict.fromkeys(expressions))

    def check(self, sizes: Mapping[str, int]) -> tuple[Verdict, str]:
        """Check sizes, by dimension name. Returns the verdict and the failed guards; if BROKEN, only the first."""
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

    def covered_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The part of the UNPROVEN `sizes` for which a comparison vouches: it holds for all sizes that include these.

        A failed guard means a branch that was not traced. In a block's own code the branch may do anything, so there a
        comparison vouches for its exact sizes alone. An operator computes the same result at each size, and chooses
        only a layout, by the sizes that the failed guards read.
        """
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        failed = [each for each in self.expressions if each.xreplace(values) != sympy.true]
        read = set().union(*[each.free_symbols for each in failed])
        return {name: sizes[name] for name, symbol in self.symbols.items() if self.branches or symbol in read}


class ConfirmedSizes:
    """The latest sizes at which guards failed, but a comparison showed the code to be correct
    (`ShapeGuards.covered_sizes`).
    """

    def __init__(self) -> None:
        self._known: dict[frozenset[tuple[str, int]], None] = {}
        self._is_trusted = True

    def distrust(self) -> None:
        """The code was wrong at sizes beyond its guards: from now on no comparison vouches for other shapes."""
        self._known.clear()
        self._is_trusted = False

    def add(self, sizes: Mapping[str, int]) -> None:
        """Record that the code was correct at `sizes`, by dimension name."""
        if not self._is_trusted:
            return
        if len(self._known) >= _MOST_CONFIRMED:
            del self._known[next(iter(self._known))]
        self._known[frozenset(sizes.items())] = None

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return frozenset(sizes.items()) in self._known

    def plain(self) -> list[dict[str, int]]:
        """The sizes as JSON data for `from_plain`."""
        return [dict(sorted(each)) for each in self._known]

    @staticmethod
    def from_plain(data: Iterable[Any]) -> ConfirmedSizes:
        """The reverse of `plain`. Raises ValueError, TypeError or AttributeError for malformed data."""
        made = ConfirmedSizes()
        for each in data:
            made.add({str(name): int(size) for name, size in each.items()})
        return made


def _is_essential(expression: sympy.Basic) -> bool:
    if not isinstance(expression, (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)):
        return not isinstance(expression, sympy.Unequality)
    return any(abs(int(number)) >= _INT32_LIMIT for number in expression.atoms(sympy.Integer))
