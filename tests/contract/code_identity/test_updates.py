"""An update of ComfyUI is another identity of those regions alone whose code it changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_cache.code_identity.content import class_digest
from compile_cache.code_identity.reach import ReachCache

PACKAGE = "updated_core"
FILES = {
    "__init__.py": "",
    "model.py": """
import torch
from . import memory, rope
from .layers import Gate

class Block(torch.nn.Module):
    def forward(self, x):
        x = memory.cast(rope.scale(x + 1))
        return Gate()(rope.turned(x))
""",
    "layers.py": """
from .bases import Base

class Gate(Base):
    def __call__(self, x):
        return self.gated(x)

class Unnamed(Base):
    def other(self, x):
        return x * 7
""",
    "bases.py": """
def slope(x):
    return x * 3

class Base:
    def gated(self, x):
        return slope(x) * 2
""",
    "rope.py": """
def turned(x):
    return -x

def unreached(x):
    return x

def factor(x):
    return x * 4

class Scale:
    def __call__(self, x):
        return factor(x)

scale = Scale()
""",
    "memory.py": """
def cast(x):
    return x.float()

def free(x):
    return 4
""",
}
COUNTS = {
    "the block": ("model.py", "x + 1", "x + 2"),
    "a function that it calls": ("rope.py", "return -x", "return 1 - x"),
    "a class that it names": ("layers.py", "self.gated(x)", "self.gated(x) + 1"),
    "a base of a class that it names": ("bases.py", "slope(x) * 2", "slope(x)"),
    "what that base calls": ("bases.py", "x * 3", "x * 5"),
    "the class of an object that it calls": ("rope.py", "return factor(x)", "return factor(-x)"),
    "what that class calls": ("rope.py", "x * 4", "x * 6"),
    "a function that it calls in a file that is left out": ("memory.py", "x.float()", "x.half()"),
}
COUNTS_NOT = {
    "a function that it does not call": ("rope.py", "    return x", "    return x + 1"),
    "a class that it does not name": ("layers.py", "x * 7", "x * 8"),
    "another function in a file that is left out": ("memory.py", "return 4", "return 5"),
    "a comment, and other line numbers": ("model.py", "import torch", "# a note\n\nimport torch"),
}


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], str]:
    """The identity of the block after a start with these files."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / PACKAGE).mkdir()

    def started(files: dict[str, str]) -> str:
        for name, text in files.items():
            (tmp_path / PACKAGE / name).write_text(text, "utf-8")
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        reaches = ReachCache({f"{PACKAGE}.memory"})
        return reaches.of([importlib.import_module(f"{PACKAGE}.model").Block]).digest

    return started


@pytest.mark.parametrize("change", [*COUNTS, *COUNTS_NOT])
def test_what_the_block_reaches_counts_and_nothing_else(digest: Callable[[dict[str, str]], str], change: str) -> None:
    before = digest(FILES)
    assert digest(FILES) == before
    file, old, new = {**COUNTS, **COUNTS_NOT}[change]
    assert old in FILES[file]
    assert (digest({**FILES, file: FILES[file].replace(old, new, 1)}) != before) == (change in COUNTS)


def test_the_code_of_a_layout_counts_with_its_bases() -> None:
    def layouts(factor: int) -> tuple[type, type]:
        class Base:
            @classmethod
            def dequantize(cls, x: int) -> int:
                return x * 2 if factor == 2 else x

        class Layout(Base):
            pass

        return Base, Layout

    def other(base: type) -> None:
        base.dequantize = classmethod(lambda cls, x: x * 3)  # type: ignore[attr-defined]

    (_, same), (_, again), (base, changed) = layouts(2), layouts(2), layouts(2)
    other(base)
    assert class_digest(same) == class_digest(again) != class_digest(changed)
