"""Detect whether a block's own code branches on a size, not only the operators that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from ....torch_compat.private_names import ShapeEnv


class AskedShapeEnv(ShapeEnv):  # type: ignore[misc]
    """Records whether the block's own code branched on a size. Operators branch too, to choose a memory layout.

    torch calls `evaluate_expr` for each branch, even if an earlier guard already decides it.
    """

    in_operator = True
    asked = False

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        self.asked |= not self.in_operator
        return super().evaluate_expr(*args, **kwargs)


class InOperators(TorchFunctionMode):
    """Tells the ShapeEnv whether an operator or the block's own code runs. Calls `yield_point` before each operator."""

    def __init__(self, shape_env: AskedShapeEnv, yield_point: Callable[[], None] | None) -> None:
        super().__init__()
        self._shape_env, self._yield_point = shape_env, yield_point

    def __enter__(self) -> Any:
        self._shape_env.in_operator = False
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._shape_env.in_operator = True
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._yield_point is not None:
            self._yield_point()
        self._shape_env.in_operator = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._shape_env.in_operator = False
