"""The rules of the layout, read from the source: who may import whom, who reads the environment, what never occurs."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from compile_cache.torch_facts import private_names

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "compile_cache"
NODES = ROOT / "nodes"
ADAPTERS = NODES / "adapters"
FILES = sorted([ROOT / "__init__.py", *CORE.rglob("*.py"), *NODES.rglob("*.py")])

# Top-level modules of ComfyUI's own; `nodes` is one of them and would shadow ours.
COMFYUI = {
    "app", "comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "execution", "folder_paths",
    "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip
# Modules of ComfyUI that node classes may import: node interface, file names, core's nodes, server.
FOR_NODES = {"comfy_api", "folder_paths", "nodes", "server"}
WITHOUT_TORCH = [
    "keys", "config", "errors", "stats", "calls.dispatcher", "captures.byte_lru", "sizes", "warm_up_plan",
    "store.artifact_store", "store.bundle", "store.fingerprint", "store.private_files", "store.shape_history",
    "store.temporary_folders",
]  # fmt: skip
READS_THE_ENVIRONMENT = {CORE / "config.py"}
INDUCTOR = CORE / "backends" / "inductor"
# Pickle loads compiled graphs that torch pickled, from a private store: they are code in any form. The workers also use
# it for messages over a pipe.
LOADS_COMPILED_CODE = {
    INDUCTOR / "compile" / "artifacts.py": {"pickle"},
    INDUCTOR / "parallel" / "worker.py": {"pickle"},
    INDUCTOR / "parallel" / "process.py": {"subprocess"},
}
INDUCTORS_TRITON_SETTINGS = {"autotune_pointwise", "proton_output_dir"}  # triton.NAME in inductor's settings
PRIVATE_TORCH = CORE / "torch_facts" / "private_names.py"
STARTED_BY_PATH = {INDUCTOR / "parallel" / "worker.py"}  # a separate program, so its package has no parent
# Variables of Triton, inductor and torch, not settings of ours: which compiler they find, how torch looks for GPUs, and
# what importing it starts.
PROBES = {
    INDUCTOR / "backend.py": {"CC", "CXX"},
    INDUCTOR / "parallel" / "worker.py": {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_WARM_POOL"},
}
# Importing OneFlow sets variables of the process; this function restores them. Inductor looks for its cache in a
# variable, which has to lead to a private folder while it loads code.
RESTORES_THE_ENVIRONMENT = {
    INDUCTOR / "compile" / "private_cache.py": "private_cache",
    CORE / "backends" / "oneflow" / "packages.py": "process_state_restored",
}
MAX_LINES = 300

# The order of imports, from the top down: a file may import its own place and places further down. Places on one line
# are neighbours that do not import each other. A file belongs to the longest place that its path begins with.
FLOORS = [
    ("__init__.py",),
    ("nodes/extension.py",),
    ("nodes",),
    ("nodes/onediff",),
    ("nodes/adapters/onediff",),
    ("nodes/adapters/compile",),
    ("nodes/adapters/warm_up",),
    ("nodes/adapters/deepcache",),
    ("nodes/adapters/forward",),
    ("nodes/adapters/report",),
    ("nodes/adapters/restart",),
    ("nodes/adapters/sampling",),
    ("nodes/adapters/process",),
    ("nodes/adapters/weights",),
    ("nodes/adapters/blocks/left_out.py",),
    ("nodes/adapters/blocks/families.py",),
    ("nodes/adapters/blocks/transformers",),
    ("nodes/adapters/blocks/unets",),
    ("nodes/adapters/blocks",),
    ("nodes/adapters/scan",),
    ("nodes/adapters/comfyui",),
    ("nodes/adapters/foreign",),
    ("compile_cache/calls",),
    ("compile_cache/captures",),
    ("compile_cache/backends/registry.py",),
    ("compile_cache/backends/inductor", "compile_cache/backends/cudagraph.py", "compile_cache/backends/oneflow"),
    ("compile_cache/backends/inductor/parallel",),
    ("compile_cache/backends/inductor/regions",),
    ("compile_cache/backends/inductor/compile",),
    ("compile_cache/backends/cuda_graphs",),
    ("compile_cache/backends/eager.py",),
    ("compile_cache/backends",),
    ("compile_cache/store", "compile_cache/regions"),
    ("compile_cache/foreign",),
    ("compile_cache/torch_facts",),
    ("compile_cache",),
]
PLACES = {place: floor for floor, places in enumerate(FLOORS) for place in places}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def absolute_imports(file: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, without relative imports."""
    found: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module)
    return found


def relative_imports(file: Path) -> Iterator[Path]:
    """The folder or file (without suffix) that each relative import names."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = file.parents[node.level - 1]
            if node.module is not None:
                yield base.joinpath(*node.module.split("."))
            else:
                for alias in node.names:
                    yield base / alias.name


def imported_files(file: Path) -> set[Path]:
    """Our own files that a file imports at its top, inside a function or only for type checks."""
    found: set[Path] = set()
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = file.parents[node.level - 1] if node.level else ROOT
        if node.module is not None:
            base = base.joinpath(*node.module.split("."))
        for alias in node.names:
            candidates = [(base / alias.name).with_suffix(".py"), base / alias.name / "__init__.py"]
            candidates += [base.with_suffix(".py"), base / "__init__.py"]
            found |= set([candidate for candidate in candidates if candidate in FILES][:1])
    return found


def place_of(name: str) -> str:
    """The longest place of FLOORS that a file's path begins with."""
    return max((place for place in PLACES if f"{name}/".startswith(f"{place}/")), key=len)


def climbs(importer: str, imported: str) -> bool:
    """Whether an import goes up, or across to a neighbour on the same floor."""
    above, below = place_of(importer), place_of(imported)
    return above != below and PLACES[above] >= PLACES[below]


def circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """A circular chain of imports; empty if there is none."""
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def top_level(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in absolute_imports(file)}


def test_the_rules_cover_the_whole_package() -> None:
    names = {name_of(file) for file in FILES}
    assert {"__init__.py", "compile_cache/calls/cache.py", "nodes/adapters/process/runtime.py"} <= names


class TestOrderOfImports:
    IMPORTS = {name_of(file): {name_of(imported) for imported in imported_files(file)} for file in FILES}

    def test_no_import_climbs(self) -> None:
        climbing = {(file, target) for file, found in self.IMPORTS.items() for target in found if climbs(file, target)}
        assert climbing == set()

    def test_no_files_import_each_other_in_a_circle(self) -> None:
        assert circle(self.IMPORTS) == []

    def test_every_room_has_its_place(self) -> None:
        rooms = {name_of(room) for room in ADAPTERS.rglob("*") if any(room.glob("*.py"))}
        assert rooms == {place for place in PLACES if place.startswith("nodes/adapters/") and (ROOT / place).is_dir()}
        assert [place for place in PLACES if not (ROOT / place).exists()] == []

    def test_imports_are_found_however_they_are_written(self) -> None:
        assert "nodes/extension.py" in self.IMPORTS["__init__.py"]  # inside a function
        assert "nodes/routes.py" in self.IMPORTS["nodes/extension.py"]  # `from . import routes`
        assert "compile_cache/sizes.py" in self.IMPORTS["nodes/resolution.py"]  # `from ..compile_cache import sizes`
        assert "compile_cache/config.py" in self.IMPORTS["compile_cache/backends/base.py"]  # only for type checks

    @pytest.mark.parametrize(
        ("importer", "imported", "climbing"),
        [
            ("nodes/deepcache.py", "nodes/adapters/deepcache/node.py", False),
            ("nodes/adapters/forward/compiled_forward.py", "nodes/adapters/weights/plain.py", False),
            ("nodes/adapters/weights/plain.py", "nodes/adapters/forward/compiled_forward.py", True),
            ("nodes/adapters/comfyui/version.py", "nodes/inputs.py", True),
            ("compile_cache/keys.py", "compile_cache/calls/cache.py", True),
            ("compile_cache/keys.py", "compile_cache/errors.py", False),
            ("compile_cache/store/bundle.py", "compile_cache/regions/site.py", True),
            ("compile_cache/backends/base.py", "compile_cache/backends/eager.py", True),
        ],
    )
    def test_imports_upward_and_across_are_climbs(self, importer: str, imported: str, climbing: bool) -> None:
        assert climbs(importer, imported) == climbing

    def test_a_circle_is_found_through_other_files(self) -> None:
        assert circle({"a": ["b"], "b": ["c"], "c": []}) == []
        assert set(circle({"a": ["b"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
class TestEveryFile:
    def test_the_core_knows_nothing_of_comfyui(self, file: Path) -> None:
        if file.is_relative_to(CORE):
            assert top_level(file) & COMFYUI == set()
            assert [target for target in relative_imports(file) if not target.is_relative_to(CORE)] == []

    def test_only_adapters_reach_into_comfyui(self, file: Path) -> None:
        if file.is_relative_to(NODES) and not file.is_relative_to(ADAPTERS):
            assert top_level(file) & COMFYUI <= FOR_NODES

    def test_the_root_imports_nothing_until_comfyui_loads_the_nodes(self, file: Path) -> None:
        if file.parent == ROOT:
            imported = {
                alias.name
                for node in tree_of(file).body
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in node.names
            }
            assert imported <= {"annotations", "Any"}

    def test_only_the_root_and_the_nodes_themselves_import_nodes(self, file: Path) -> None:
        inside = [target for target in relative_imports(file) if target.is_relative_to(NODES)]
        if not file.is_relative_to(NODES) and file.parent != ROOT:
            assert inside == []
        if file.is_relative_to(ADAPTERS):
            assert [target for target in inside if not target.is_relative_to(ADAPTERS)] == []

    def test_our_own_packages_are_imported_relatively(self, file: Path) -> None:
        if file in STARTED_BY_PATH:
            return
        names = absolute_imports(file)
        assert {name for name in names if name.partition(".")[0] in ("compile_cache", "resolute", "scripts")} == set()
        # ComfyUI's own `nodes` is one module without submodules: `nodes.adapters` would be meant for ours.
        assert {name for name in names if name.startswith("nodes.")} == set()

    def test_the_environment_is_read_in_one_place(self, file: Path) -> None:
        if file in READS_THE_ENVIRONMENT:
            return
        allowed = PROBES.get(file, set())
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
                assert ast.literal_eval(node.args[0]) in allowed
        restoring = {
            part
            for node in ast.walk(tree_of(file))
            if isinstance(node, ast.FunctionDef) and node.name == RESTORES_THE_ENVIRONMENT.get(file)
            for part in ast.walk(node)
        }
        reads = [node for node in ast.walk(tree_of(file)) if _reads_environment(node)]
        assert len(reads) - len([node for node in restoring if _reads_environment(node)]) == len(allowed)

    def test_private_names_of_torch_come_from_one_file(self, file: Path) -> None:
        if file == PRIVATE_TORCH:
            return
        assert private_names_of_torch(tree_of(file)) == set()

    def test_each_name_that_is_imported_from_there_is_in_its_table(self, file: Path) -> None:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("private_names"):
                assert {alias.name for alias in node.names} <= private_names.NAMES.keys() | vars(private_names).keys()

    def test_nothing_is_printed(self, file: Path) -> None:
        assert calls(file) & {"print", "sys.stdout.write", "sys.stderr.write"} == set()

    def test_nothing_is_executed_from_data(self, file: Path) -> None:
        assert calls(file) & {"eval", "exec", "compile", "__import__", "torch.load", "os.system"} == set()
        readers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess"}
        assert top_level(file) & readers == LOADS_COMPILED_CODE.get(file, set())

    def test_there_is_no_bare_except(self, file: Path) -> None:
        handlers = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ExceptHandler)]
        assert [handler.lineno for handler in handlers if handler.type is None] == []

    def test_a_file_has_a_docstring(self, file: Path) -> None:
        assert ast.get_docstring(tree_of(file))

    def test_a_file_has_at_most_300_lines(self, file: Path) -> None:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    return isinstance(node, ast.ImportFrom) and node.module == "os" and node.level == 0


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """Names below `torch` that begin with one underscore, and all below `triton`: imports, attributes, texts."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)
    return {name for name in found if _is_private_of_torch(*name.split("."))}


def _is_private_of_torch(package: str, *below: str) -> bool:
    if package == "torch":
        return any(part.startswith("_") and not part.startswith("__") for part in below)
    return package == "triton" and below != () and below[0] not in INDUCTORS_TRITON_SETTINGS


def test_a_private_name_of_torch_is_found_however_it_is_written() -> None:
    code = """
import torch, torch._dynamo
import torch.utils._pytree as pytree
from torch.overrides import _get_current_function_mode_stack
torch._foreach_copy_([], [])
importlib.import_module("triton.compiler.compiler")
torch.__version__, torch.nn.Module, module._parameters, "triton.autotune_pointwise"
"""
    assert private_names_of_torch(ast.parse(code)) == {
        "torch._dynamo", "torch.utils._pytree", "torch.overrides._get_current_function_mode_stack",
        "torch._foreach_copy_", "triton.compiler.compiler",
    }  # fmt: skip


def calls(file: Path) -> set[str]:
    """The functions that a file calls, as written in the source."""
    return {ast.unparse(node.func) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_does_not_import_torch_itself(module: str) -> None:
    assert "torch" not in top_level(CORE.joinpath(*module.split(".")).with_suffix(".py"))


def test_they_do_not_import_torch_through_other_modules() -> None:
    imports = "".join(f"import compile_cache.{module}\n" for module in WITHOUT_TORCH)
    code = imports + "import sys\nprint(sorted(sys.modules.keys() & {'torch', 'numpy', 'sympy', 'comfy', 'nodes'}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
