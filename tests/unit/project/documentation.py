"""What the documentation names and the project does not have: links, paths, commands, options, settings, code names.

`complaints(page)` checks every link, every span in backticks, and each path, command and code name in a fenced block.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("compile_cache", "nodes", "scripts", "benchmarks", "tests")
# Python files of scripts/ without a suffix.
COMMANDS = ("bundle", "compatibility", "demo", "fleet", "fuzz", "test", "warm-up")
THESE = {Path(__file__), Path(__file__).with_name("test_docs.py")}  # they hold made-up names
ROUTES = (ROOT / "nodes" / "routes.py", ROOT / "scripts" / "serving" / "ingress.py")

# Names that pages may use although our source does not define them, by the reason.
FOREIGN = {
    "ComfyUI's types of sockets": {"CLIP", "CONDITIONING", "CONTROL_NET", "IMAGE", "LATENT", "MODEL", "VAE"},
    "ComfyUI itself": {"ComfyUI", "models/checkpoints", "custom_nodes/resolute", "user/__resolute/regions"},
    "ComfyUI's options": {"--disable-dynamic-vram", "--force-fp32", "--cpu"},
    "other projects' tools": {
        "comfy node install resolute",
        "comfy node validate",
        "comfy node pack",
        "comfy node publish",
        "pip install comfy-cli",
    },
    "what the registry reads": {".comfyignore", "PublisherId", "[project.urls]", "Repository"},
    "ComfyUI's API": {"GET /object_info", "/ws", "front", "preview", "channel"},
    "what starts a fleet elsewhere": {"fleet/bin/python", "ray start", "CUDA_VISIBLE_DEVICES", "Dockerfile"},
    "paths in the fleet's container": {"/opt/ComfyUI", "python: /opt/comfyui-env/bin/python", "/fleet"},
    "ComfyUI's samplers": {"ddim", "uni_pc"},
    "OneDiff's parameters": {"cache_layer_id", "cache_block_id"},
    "made by set-up, so git does not track it": {
        ".venv",
        ".comfyui/",
        ".comfyui-0.8.0/",
        "~/.cache/resolute",
        "output/tests/",
    },
    "made by the store": {"shapes/"},
    "a prefix of every route, added by ComfyUI": {"/api"},
}
OF_BENCHMARKS = ROOT / "benchmarks" / "cells.py"  # its function `add_options` gives many benchmarks the same options
TOOLS = {"bandit", "ruff", "mypy", "pytest"}  # that `python -m` starts; requirements-dev.txt has them

_SUFFIX = re.compile(r"\.(py|md|json|txt|toml|yml|yaml|png|svg|jpg|sh)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CODE_LIKE = re.compile(r"[a-zA-Z0-9]*_\w+|[A-Z][a-z]+([A-Z][a-z]*)+\w*|[A-Z]\w+\.\w+")  # snake_case, CamelCase, A.b
_VALUE = re.compile(r"[\d.,x \-]+")
_PLACEHOLDER = re.compile(r"\b(FILE|FOLDER|NAME|URL|WORKFLOW)\b")
_SETTING = re.compile(r"((?:RESOLUTE|COMFYUI)_[A-Z_]+)(=\w+)?")


def foreign() -> set[str]:
    return {name for names in FOREIGN.values() for name in names}


@dataclass
class Source:
    """What the Python files of the project define.

    names: functions, classes, arguments, attributes, variables, modules and imports. texts: string constants.
    members: of each class, with those of its bases.
    """

    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.names or name in self.texts

    def has_member(self, kind: str, name: str) -> bool:
        kinds = [kind]
        for each in kinds:
            kinds += [base for base in self.bases.get(each, ()) if base not in kinds]
        return any(name in self.members.get(each, ()) for each in kinds)


@functools.cache
def source() -> Source:
    """The project's own, tests without their texts."""
    found = Source()
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]
    for file in (*files, *(ROOT / "scripts" / name for name in COMMANDS), ROOT / "__init__.py"):
        if file in THESE:
            continue
        found.names |= {file.stem, file.parent.name}
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            found.names |= _defined(node)
            if isinstance(node, ast.ClassDef):
                found.members.setdefault(node.name, set()).update(_members(node))
                found.bases.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and not file.is_relative_to(ROOT / "tests")
            ):
                found.texts.add(node.value)
    return found


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    if isinstance(node, ast.alias):
        return {part for name in (node.name, node.asname or "") for part in name.split(".") if part}
    return set()


def _members(kind: ast.ClassDef) -> set[str]:
    own = {name for node in kind.body for part in ast.walk(node) for name in _defined(part)}
    return own | {node.name for node in kind.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@functools.cache
def options(file: Path) -> frozenset[str]:
    """The options that a command defines: --quick. A shell script has none."""
    if file.parent.name == ".ci":
        return frozenset()
    calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
    defining = (call for call in calls if getattr(call.func, "attr", "") in ("add_argument", "addoption"))
    named = (each.value for call in defining for each in call.args if isinstance(each, ast.Constant))
    shares = any(getattr(call.func, "id", "") == "add_options" for call in calls) and file != OF_BENCHMARKS
    own = frozenset(str(name) for name in named if str(name).startswith("-")) | {"--help"}
    return own | options(OF_BENCHMARKS) if shares else own


@functools.cache
def all_options() -> frozenset[str]:
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts" / name for name in COMMANDS)]
    return frozenset().union(*map(options, (*files, ROOT / "tests" / "conftest.py")))


def complaints(page: Path, text: str | None = None) -> list[str]:
    """What is wrong on a page, one sentence each. `text`: in place of the page's own."""
    text = page.read_text("utf-8") if text is None else text
    prose = _FENCE.sub("", text)
    found = [f"link to {link}" for link in links(prose) if not _link_resolves(page, link)]
    found += [f"`{span}`: {wrong}" for span in spans(prose) if (wrong := wrong_with(span, page))]
    for block in _FENCE.findall(text):
        for line in block.splitlines()[1:-1]:
            found += [f"`{part}`: {wrong}" for part in _of_block(line) if (wrong := wrong_with(part, page))]
    return found


def links(text: str) -> list[str]:
    return [link for link in _LINK.findall(text) if not re.match(r"\w+:", link)]


def spans(text: str) -> list[str]:
    return [span.strip() for span in _SPAN.findall(text)]


def _of_block(line: str) -> Iterator[str]:
    """The parts of a line in a fenced block that a page vouches for."""
    if line.startswith(("scripts/", "python", ".venv/", ".ci/")):
        yield line.strip()
        return
    for word in re.split(r"[\s,;:()|]+", line):
        word = word.strip(".`'\"")
        if ("/" in word and "//" not in word and len(word) > 1) or _CODE_LIKE.fullmatch(word):
            yield word


def _link_resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not anchor or anchor in _anchors(target)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def wrong_with(span: str, page: Path) -> str | None:
    """Why a span in backticks is wrong; None where it is right."""
    if span in foreign() or span in ("--", "...") or _VALUE.fullmatch(span):
        return None
    if setting := _SETTING.fullmatch(span):
        return None if setting[1] in source().texts else "no such setting"
    if span.startswith(("GET ", "POST ")):
        return _wrong_route(span)
    words = span.split()
    if words[0] in ("python", ".venv/bin/python") or words[0].startswith("-") or words[0].startswith(".ci/"):
        return _wrong_command(span)
    if words[0].startswith("scripts/") and not words[0].endswith(("/", ".py")):
        return _wrong_command(span)
    if len(words) > 1 and "/" in words[0] and words[1].startswith("--"):
        return _wrong_path(words[0], page) or _wrong_options(words[1:], options(ROOT / "tests" / "conftest.py"))
    if len(words) == 1 and ("/" in span or _SUFFIX.search(span)):
        return _wrong_path(span, page)
    return _wrong_code(span)


def _wrong_route(span: str) -> str | None:
    method, path = span.split()
    served = rf'(?:routes|app)\.{method.lower()}\("{re.escape(path)}"\)'
    return None if any(re.search(served, file.read_text("utf-8")) for file in ROUTES) else "no such route"


def _wrong_command(span: str) -> str | None:
    own, _, passed = span.partition(" -- ") if not span.startswith("-- ") else ("", "", span[3:])
    words = shlex.split(own)
    if words and words[0].endswith("python"):
        words = words[1:]
    if words and words[0] == "-m":
        name, words = words[1], words[2:]
        file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if file.with_suffix("").is_dir():
            file = file.with_suffix("") / "__main__.py"
        if name in TOOLS:
            return None
        if not file.is_file() and not _PLACEHOLDER.search(name):
            return f"no module {name}"
    elif words and not words[0].startswith("-"):
        file, words = ROOT / words[0], words[1:]
        if not file.is_file():
            return f"no command {file.relative_to(ROOT)}"
        file = ROOT / "scripts" / "test" if file.name == "run" else file  # .ci/run passes its arguments on
    else:
        return _wrong_options(words, all_options()) or _wrong_arguments(passed)
    known = all_options() if _PLACEHOLDER.search(file.stem) else options(file)
    return _wrong_options(words, known, file) or _wrong_arguments(passed)


def _wrong_options(words: list[str], known: frozenset[str], file: Path | None = None) -> str | None:
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") and word not in known and word not in foreign():
            return f"no option {word}"
        plain = not word.startswith("-") and not before.startswith("-") and word != "..."
        if plain and file is not None and not _PLACEHOLDER.search(word) and f'"{word}"' not in _text_of(file):
            return f"{file.name} knows no {word}"
    return None


@functools.cache
def _text_of(file: Path) -> str:
    """Of a benchmark all: they share models and sizes."""
    files = sorted(file.parent.glob("*.py")) if file.parent.name == "benchmarks" else [file]
    return "".join(each.read_text("utf-8") for each in files)


def _wrong_arguments(passed: str) -> str | None:
    """What goes on to pytest, or to ComfyUI: paths exist, options are known."""
    for word in passed.split():
        if "/" in word and not (ROOT / word).exists():
            return f"no path {word}"
        option = word.partition("=")[0]
        if word.startswith("--") and option not in all_options() and option not in foreign():
            return f"no option {option}"
    return None


def _wrong_path(path: str, page: Path) -> str | None:
    if path.startswith("...") and path.endswith(".json"):
        return None if any(RESULTS.glob(f"*{path[3:]}")) else "no such result"
    if _PLACEHOLDER.search(path):
        path = path.rpartition("/")[0]
    path = path.partition("::")[0]  # of a test; tests/unit/project/test_security_document.py looks for the rest
    if any((folder / path).is_file() for folder in (ROOT, page.parent, RESULTS)):
        return None
    ending = f"/{path.rstrip('/')}"
    return None if any(each.endswith(ending) for each in _paths()) else "no such path"


@functools.cache
def _paths() -> frozenset[str]:
    """Files of the source and their folders: a page may shorten `nodes/adapters/blocks/unets/unet.py` to `unet.py`."""
    found: set[Path] = set()
    for folder in (*CODE, "workflows", "web", "docs", "typings"):
        files = [each for each in (ROOT / folder).rglob("*") if each.is_file() and "__pycache__" not in each.parts]
        found.update(files, *(file.relative_to(ROOT).parents for file in files))
    return frozenset(f"/{(ROOT / each).relative_to(ROOT).as_posix()}" for each in found)


def _wrong_code(span: str) -> str | None:
    known = source()
    if _DOTTED.fullmatch(span):
        return _wrong_name(span)
    if call := re.fullmatch(r"([\w.]+)\((.*)\)", span):
        names = [call[1], *(name.split("=")[0].strip() for name in call[2].split(",") if name.strip())]
        return next((wrong for name in names if (wrong := _wrong_name(name))), None)
    if span.startswith("{"):
        missing = [key for key in re.findall(r'"(\w+)":', span) if key not in known.texts]
        return f"no key {missing[0]}" if missing else None
    if span in foreign() or any(span in text for text in known.texts):
        return None
    return "no text of the project's has this"


def _wrong_name(name: str) -> str | None:
    known = source()
    first, _, rest = name.partition(".")
    if known.has(name) or name in foreign():
        return None
    if rest and first in known.members:
        return None if known.has_member(first, rest) else f"{first} has no {rest}"
    missing = [part for part in name.split(".") if not known.has(part) and part not in foreign()]
    return f"nothing is called {missing[0]}" if missing or not rest else None
