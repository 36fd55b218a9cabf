"""The rules of the layout, read from the source: who may import whom, who reads the environment, what never occurs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from compile_cache.torch_facts import private_names

ROOT = Path(__file__).resolve().parents[3]
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
    "store.artifact_store", "store.bundle", "store.compile_seconds", "store.fingerprint", "store.private_files",
    "store.shape_history", "store.temporary_folders", "texts",
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
    ("nodes/adapters/blocks/videos",),
    ("nodes/adapters/blocks/transformers",),
    ("nodes/adapters/blocks/unets",),
    ("nodes/adapters/blocks",),
    ("nodes/adapters/comfyui",),
    ("nodes/adapters/foreign",),
    ("nodes/adapters/comfyui/transformer_options.py",),
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
    ("compile_cache/attention",),
    ("compile_cache/choices",),
    ("compile_cache/store", "compile_cache/regions"),
    ("compile_cache/foreign",),
    ("compile_cache/torch_facts",),
    ("compile_cache",),
]
PLACES = {place: floor for floor, places in enumerate(FLOORS) for place in places}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


class Source:
    """The text of a file and its syntax tree; a made-up text shows that a rule can fail."""

    def __init__(self, file: Path, text: str | None = None) -> None:
        self.file = file
        self.text = file.read_text(encoding="utf-8") if text is None else text
        self.tree = ast.parse(self.text, str(file))
        self.nodes = list(ast.walk(self.tree))


SOURCES = [Source(file) for file in FILES]


def absolute_imports(source: Source) -> set[str]:
    """Full names of the modules that a file imports anywhere, without relative imports."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module)
    return found


def relative_imports(source: Source) -> Iterator[Path]:
    """The folder or file (without suffix) that each relative import names."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = source.file.parents[node.level - 1]
            if node.module is not None:
                yield base.joinpath(*node.module.split("."))
            else:
                for alias in node.names:
                    yield base / alias.name


def imported_files(source: Source) -> set[Path]:
    """Our own files that a file imports at its top, inside a function or only for type checks."""
    found: set[Path] = set()
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        base = source.file.parents[node.level - 1] if node.level else ROOT
        if node.module is not None:
            base = base.joinpath(*node.module.split("."))
        for alias in node.names:
            candidates = [(base / alias.name).with_suffix(".py"), base / alias.name / "__init__.py"]
            candidates += [base.with_suffix(".py"), base / "__init__.py"]
            found |= set([candidate for candidate in candidates if candidate in FILES][:1])
    return found


def place_of(name: str, places: Mapping[str, int]) -> str:
    """The longest of these places that a file's path begins with."""
    return max((place for place in places if f"{name}/".startswith(f"{place}/")), key=len)


def climbs(importer: str, imported: str, places: Mapping[str, int] = PLACES) -> bool:
    """An import climbs if it goes up, or across to a neighbour on the same floor. places: with the floor of each."""
    above, below = place_of(importer, places), place_of(imported, places)
    return above != below and places[above] >= places[below]


def circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """A circular chain of imports; empty if there is none."""
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def top_level(source: Source) -> set[str]:
    return {name.partition(".")[0] for name in absolute_imports(source)}


def calls(source: Source) -> set[str]:
    """The functions that a file calls, as written in the source."""
    return {ast.unparse(node.func) for node in source.nodes if isinstance(node, ast.Call)}


def test_the_rules_cover_the_whole_package() -> None:
    names = {name_of(file) for file in FILES}
    assert {"__init__.py", "compile_cache/calls/cache.py", "nodes/adapters/process/runtime.py"} <= names


class TestOrderOfImports:
    IMPORTS = {name_of(each.file): {name_of(imported) for imported in imported_files(each)} for each in SOURCES}

    def test_no_import_climbs(self) -> None:
        climbing = {(file, target) for file, found in self.IMPORTS.items() for target in found if climbs(file, target)}
        assert climbing == set()

    def test_no_files_import_each_other_in_a_circle(self) -> None:
        assert circle(self.IMPORTS) == []

    def test_every_room_has_its_place(self) -> None:
        rooms = {name_of(room) for room in ADAPTERS.rglob("*") if any(room.glob("*.py"))}
        assert rooms == {place for place in PLACES if place.startswith("nodes/adapters/") and (ROOT / place).is_dir()}
        assert [place for place in PLACES if not (ROOT / place).exists()] == []

    @pytest.mark.parametrize("top", [CORE, INDUCTOR, ADAPTERS], ids=name_of)
    def test_the_map_in_a_package_lists_its_rooms_from_the_top_down(self, top: Path) -> None:
        listed = re.findall(r"^    (\w+)/ +\S", ast.get_docstring(Source(top / "__init__.py").tree) or "", re.MULTILINE)
        rooms = {room.name for room in top.iterdir() if any(room.glob("*.py"))}
        assert sorted(listed) == sorted(rooms)
        floors = [PLACES[f"{name_of(top)}/{room}"] for room in listed]
        assert floors == sorted(floors)

    def test_tests_have_the_rooms_of_the_code(self) -> None:
        """tests/contract/weights is about nodes/adapters/weights; tests/unit/project about the project as a whole."""
        code = [folder for top in (CORE, ADAPTERS) for folder in top.rglob("*") if folder.is_dir()]
        rooms = {folder.relative_to(CORE if folder.is_relative_to(CORE) else ADAPTERS) for folder in code}
        rooms |= {Path(name) for name in ("project", "scripts", "benchmarks")}
        for tests in (ROOT / "tests" / "unit", ROOT / "tests" / "contract"):
            assert {file.parent.relative_to(tests) for file in tests.rglob("*.py")} - rooms <= {Path()}

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


def reads_environment(node: ast.AST) -> bool:
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


# A rule takes a source and says what breaks it, in words for the failure of its test.


def comfyui_in_the_core(source: Source) -> list[str]:
    if not source.file.is_relative_to(CORE):
        return []
    outside = [str(target) for target in relative_imports(source) if not target.is_relative_to(CORE)]
    return [*sorted(top_level(source) & COMFYUI), *outside]


def comfyui_outside_adapters(source: Source) -> list[str]:
    inside = source.file.is_relative_to(NODES) and not source.file.is_relative_to(ADAPTERS)
    return sorted((top_level(source) & COMFYUI) - FOR_NODES) if inside else []


def early_imports_of_the_root(source: Source) -> list[str]:
    """Modules that are not Python's own; "" stands for ours."""
    names = {
        (node.module or "" if not node.level else "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in source.tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    foreign = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    return sorted(foreign) if source.file.parent == ROOT else []


def imports_of_nodes(source: Source) -> list[str]:
    inside = [target for target in relative_imports(source) if target.is_relative_to(NODES)]
    if source.file.is_relative_to(ADAPTERS):
        return [str(target) for target in inside if not target.is_relative_to(ADAPTERS)]
    allowed = source.file.is_relative_to(NODES) or source.file.parent == ROOT
    return [] if allowed else [str(target) for target in inside]


def absolute_imports_of_ours(source: Source) -> list[str]:
    if source.file in STARTED_BY_PATH:
        return []
    names = absolute_imports(source)
    ours = {name for name in names if name.partition(".")[0] in ("compile_cache", "resolute", "scripts")}
    # ComfyUI's own `nodes` is one module without submodules: `nodes.adapters` would be meant for ours.
    return sorted(ours | {name for name in names if name.startswith("nodes.")})


def reads_of_the_environment(source: Source) -> list[str]:
    if source.file in READS_THE_ENVIRONMENT:
        return []
    allowed = PROBES.get(source.file, set())
    getters = [
        node for node in source.nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get"
    ]
    asked = [ast.unparse(node) for node in getters if ast.literal_eval(node.args[0]) not in allowed]
    restoring = {
        part
        for node in source.nodes
        if isinstance(node, ast.FunctionDef) and node.name == RESTORES_THE_ENVIRONMENT.get(source.file)
        for part in ast.walk(node)
    }
    reads = [node for node in source.nodes if reads_environment(node) and node not in restoring]
    count = [] if len(reads) == len(allowed) else [f"{len(reads)} reads in place of {len(allowed)}"]
    return asked + count


def private_torch(source: Source) -> list[str]:
    return [] if source.file == PRIVATE_TORCH else sorted(private_names_of_torch(source.tree))


def names_missing_in_the_table(source: Source) -> list[str]:
    imports = [node for node in source.nodes if isinstance(node, ast.ImportFrom)]
    from_there = [node for node in imports if (node.module or "").endswith("private_names")]
    names = {alias.name for node in from_there for alias in node.names}
    return sorted(names - private_names.NAMES.keys() - vars(private_names).keys())


def prints(source: Source) -> list[str]:
    return sorted(calls(source) & {"print", "sys.stdout.write", "sys.stderr.write"})


def executed_data(source: Source) -> list[str]:
    readers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess"}
    # Both ways: a file that no longer imports pickle leaves the table.
    reading = (top_level(source) & readers) ^ LOADS_COMPILED_CODE.get(source.file, set())
    running = calls(source) & {"eval", "exec", "compile", "__import__", "torch.load", "os.system"}
    return sorted(running | reading)


def bare_excepts(source: Source) -> list[str]:
    return [f"line {node.lineno}" for node in source.nodes if isinstance(node, ast.ExceptHandler) and node.type is None]


def missing_docstring(source: Source) -> list[str]:
    return [] if ast.get_docstring(source.tree) else ["no docstring"]


def docstrings_without_a_subject(source: Source) -> list[str]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [(ast.get_docstring(node) or "").split(maxsplit=1) for node in source.nodes if isinstance(node, holders)]
    return sorted({words[0] for words in texts if words} & {"What", "Whether"})


def too_many_lines(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{lines} lines"] if lines > MAX_LINES else []


def offenders(rule: Callable[[Source], list[str]]) -> list[str]:
    return [f"{name_of(source.file)}: {what}" for source in SOURCES for what in rule(source)]


class TestEveryFile:
    def test_the_core_knows_nothing_of_comfyui(self) -> None:
        assert offenders(comfyui_in_the_core) == []

    def test_only_adapters_reach_into_comfyui(self) -> None:
        assert offenders(comfyui_outside_adapters) == []

    def test_the_root_imports_only_pythons_own_modules_until_comfyui_loads_the_nodes(self) -> None:
        assert offenders(early_imports_of_the_root) == []

    def test_only_the_root_and_the_nodes_themselves_import_nodes(self) -> None:
        assert offenders(imports_of_nodes) == []

    def test_our_own_packages_are_imported_relatively(self) -> None:
        assert offenders(absolute_imports_of_ours) == []

    def test_the_environment_is_read_in_one_place(self) -> None:
        assert offenders(reads_of_the_environment) == []

    def test_private_names_of_torch_come_from_one_file(self) -> None:
        assert offenders(private_torch) == []

    def test_each_name_that_is_imported_from_there_is_in_its_table(self) -> None:
        assert offenders(names_missing_in_the_table) == []

    def test_nothing_is_printed(self) -> None:
        assert offenders(prints) == []

    def test_nothing_is_executed_from_data(self) -> None:
        assert offenders(executed_data) == []

    def test_there_is_no_bare_except(self) -> None:
        assert offenders(bare_excepts) == []

    def test_a_file_has_a_docstring(self) -> None:
        assert offenders(missing_docstring) == []

    def test_a_docstring_is_a_sentence_with_a_subject(self) -> None:
        assert offenders(docstrings_without_a_subject) == []

    def test_a_file_has_at_most_300_lines(self) -> None:
        assert offenders(too_many_lines) == []


@pytest.mark.parametrize(
    ("rule", "file", "text", "found"),
    [
        (comfyui_in_the_core, CORE / "keys.py", "import comfy.ops", ["comfy"]),
        (comfyui_in_the_core, CORE / "keys.py", "from ..nodes import inputs", [str(NODES)]),
        (comfyui_outside_adapters, NODES / "inputs.py", "import server, comfy.sd", ["comfy"]),
        (early_imports_of_the_root, ROOT / "__init__.py", "import sys\nimport torch.nn", ["torch.nn"]),
        (early_imports_of_the_root, ROOT / "__init__.py", "from .nodes import routes", [""]),
        (imports_of_nodes, CORE / "keys.py", "from ..nodes import inputs", [str(NODES)]),
        (imports_of_nodes, ADAPTERS / "scan" / "x.py", "from ...inputs import y", [str(NODES / "inputs")]),
        (absolute_imports_of_ours, CORE / "keys.py", "import compile_cache.errors", ["compile_cache.errors"]),
        (absolute_imports_of_ours, NODES / "inputs.py", "from nodes.adapters import scan", ["nodes.adapters"]),
        (reads_of_the_environment, CORE / "keys.py", "os.getenv('A')", ["1 reads in place of 0"]),
        (reads_of_the_environment, CORE / "keys.py", "from os import environ", ["1 reads in place of 0"]),
        (reads_of_the_environment, INDUCTOR / "backend.py", "os.environ.get('CC')", ["1 reads in place of 2"]),
        (
            reads_of_the_environment,
            INDUCTOR / "backend.py",
            "os.environ.get('CC'), os.environ.get('CXY')",
            ["os.environ.get('CXY')"],
        ),
        (private_torch, CORE / "keys.py", "import torch._dynamo", ["torch._dynamo"]),
        (names_missing_in_the_table, CORE / "keys.py", "from .private_names import nothing", ["nothing"]),
        (prints, CORE / "keys.py", "print(1)\nsys.stderr.write('')", ["print", "sys.stderr.write"]),
        (executed_data, CORE / "keys.py", "import pickle\neval('1')", ["eval", "pickle"]),
        (executed_data, INDUCTOR / "parallel" / "process.py", "import os", ["subprocess"]),
        (bare_excepts, CORE / "keys.py", "try:\n    pass\nexcept:\n    pass", ["line 3"]),
        (missing_docstring, CORE / "keys.py", "import os", ["no docstring"]),
        (docstrings_without_a_subject, CORE / "keys.py", 'def f():\n    """Whether it is."""', ["Whether"]),
        (too_many_lines, CORE / "keys.py", "\n" * 301, ["301 lines"]),
    ],
)
def test_a_rule_names_what_breaks_it(
    rule: Callable[[Source], list[str]], file: Path, text: str, found: list[str]
) -> None:
    assert rule(Source(file, text)) == found


def test_they_do_not_import_torch_themselves() -> None:
    files = [CORE.joinpath(*module.split(".")).with_suffix(".py") for module in WITHOUT_TORCH]
    assert [name_of(file) for file in files if "torch" in top_level(Source(file))] == []


def test_they_do_not_import_torch_through_other_modules() -> None:
    imports = "".join(f"import compile_cache.{module}\n" for module in WITHOUT_TORCH)
    code = imports + "import sys\nprint(sorted(sys.modules.keys() & {'torch', 'numpy', 'sympy', 'comfy', 'nodes'}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
