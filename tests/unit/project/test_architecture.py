"""The layers, read from the source: imports go down only, and what only one file may do is done nowhere else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from compile_cache import FOR_ADAPTERS

from ...programs import run_python

ROOT = Path(__file__).resolve().parents[3]
CORE, NODES, SCRIPTS = ROOT / "compile_cache", ROOT / "nodes", ROOT / "scripts"
ADAPTERS = NODES / "adapters"
INDUCTOR = CORE / "backends" / "inductor"
COMMANDS = [file for file in sorted(SCRIPTS.iterdir()) if file.is_file() and not file.suffix]
PACK = sorted([ROOT / "__init__.py", *CORE.rglob("*.py"), *NODES.rglob("*.py")])
FILES = [*PACK, *COMMANDS, *sorted(SCRIPTS.rglob("*.py"))]

# Top-level modules of ComfyUI's own; `nodes` is one of them and would shadow ours.
COMFYUI = {
    "app", "comfy", "comfy_api", "comfy_config", "comfy_execution", "comfy_extras", "execution", "folder_paths",
    "latent_preview", "node_helpers", "nodes", "server",
}  # fmt: skip
# Modules of ComfyUI that node classes may import: node interface, file names, core's nodes, server.
FOR_NODES = {"comfy_api", "folder_paths", "nodes", "server"}
WITHOUT_TORCH = [
    "keys", "call_policy", "config", "errors", "sizes", "warm_up_plan",
    "tuning.tuner", "telemetry.stats", "telemetry.host_load", "store.artifact_store", "store.bundle", "store.codec",
    "store.fingerprint", "store.private_files",
    "store.shape_history", "store.temporary_folders", "texts",
]  # fmt: skip
# Files that read variables of the process: our settings; which compiler is there; how torch looks for GPUs; and two
# that put back what an import of OneFlow or a load of inductor needs to change.
READS_THE_ENVIRONMENT = {
    CORE / "config.py",
    CORE / "backends" / "oneflow" / "packages.py",
    INDUCTOR / "toolchain.py",
    INDUCTOR / "lower" / "private_cache.py",
    INDUCTOR / "compiler" / "worker.py",
}
# Pickle loads compiled graphs that torch pickled, from a private store: they are code in any form. The workers also use
# it for messages over a pipe.
LOADS_COMPILED_CODE = {
    INDUCTOR / "lower" / "artifacts.py": {"pickle"},
    INDUCTOR / "compiler" / "worker.py": {"pickle"},
    INDUCTOR / "compiler" / "process.py": {"subprocess"},
}
INDUCTORS_TRITON_SETTINGS = {"autotune_pointwise", "descriptive_names", "proton_output_dir"}  # inductor's triton.NAME
BUNDLE = "compile_cache/store/bundle.py"
PRIVATE_TORCH = CORE / "torch_compat" / "private_names.py"
STARTED_BY_PATH = {INDUCTOR / "compiler" / "worker.py"}  # a separate program, so its package has no parent
# What a command imports before it has an environment.
BEFORE_THE_ENVIRONMENT = ("scripts/setup/", "scripts/server/", "scripts/errors.py", "scripts/places.py")
MAX_LINES = 300

# The order of imports, from the top down: a file may import its own place and places further down. Places on one line
# are neighbours that do not import each other. A file belongs to the longest place that its path begins with.
FLOORS = [
    ("__init__.py",),
    ("nodes/extension.py",),
    ("nodes",),
    ("nodes/onediff",),
    ("nodes/adapters/onediff",),
    ("nodes/adapters/warm_up", "nodes/adapters/formats"),
    ("nodes/adapters/deepcache",),
    ("nodes/adapters/patch",),
    ("nodes/adapters/report",),
    ("nodes/adapters/process",),
    ("nodes/adapters/module_state",),
    ("nodes/adapters/blocks/families.py",),
    ("nodes/adapters/blocks/vaes.py",),
    ("nodes/adapters/blocks/videos",),
    ("nodes/adapters/blocks/transformers",),
    ("nodes/adapters/blocks/unets",),
    ("nodes/adapters/blocks",),
    ("nodes/adapters/dynamic_vram",),
    ("nodes/adapters/comfyui",),
    ("nodes/adapters/trust",),
    ("nodes/adapters/comfyui/transformer_options.py",),
    ("compile_cache/cache",),
    ("compile_cache/backends/registry.py",),
    ("compile_cache/backends/inductor", "compile_cache/backends/cudagraph.py", "compile_cache/backends/oneflow"),
    ("compile_cache/backends/inductor/compiler",),
    ("compile_cache/backends/inductor/regions",),
    ("compile_cache/backends/inductor/lower",),
    ("compile_cache/backends/cuda_graphs",),
    ("compile_cache/backends/eager.py",),
    ("compile_cache/backends",),
    ("compile_cache/attention",),
    ("compile_cache/tuning",),
    ("compile_cache/telemetry",),
    ("compile_cache/store", "compile_cache/modules"),
    ("compile_cache/code_identity",),
    ("compile_cache/torch_compat",),
    ("compile_cache",),
]
SCRIPTS_FLOORS = [
    tuple(f"scripts/{file.name}" for file in COMMANDS),
    ("scripts/commands", "scripts/serving"),
    ("scripts/demonstration",),
    ("scripts/models", "scripts/server", "scripts/setup"),
    ("scripts",),  # errors, pack, places, ports, workflows
]
PLACES = {place: floor for floor, places in enumerate([*SCRIPTS_FLOORS, *FLOORS]) for place in places}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


class Source:
    """The text of a file and its syntax tree."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.text = file.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, str(file))
        self.nodes = list(ast.walk(self.tree))


SOURCES = [Source(file) for file in PACK]
EVERY_SOURCE = [*SOURCES, *(Source(file) for file in FILES if file not in PACK)]


def absolute_imports(source: Source) -> set[str]:
    """Full names of the modules that a file imports anywhere, without relative imports."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module)
    return found


def top_level(source: Source) -> set[str]:
    return {name.partition(".")[0] for name in absolute_imports(source)}


def imported_files(source: Source) -> Iterator[Path]:
    """Our own files that a file imports at its top, inside a function or only for type checks."""
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        base = source.file.parents[node.level - 1] if node.level else ROOT
        if node.module is not None:
            base = base.joinpath(*node.module.split("."))
        for alias in node.names:
            candidates = [(base / alias.name).with_suffix(".py"), base / alias.name / "__init__.py"]
            candidates += [base.with_suffix(".py"), base / "__init__.py"]
            yield from [candidate for candidate in candidates if candidate in FILES][:1]


IMPORTS = {name_of(source.file): set(map(name_of, imported_files(source))) for source in EVERY_SOURCE}


def reached(*files: str) -> set[str]:
    """These files, and all of ours that they import, directly or through others."""
    found, pending = set[str](), list(files)
    while pending:
        if (file := pending.pop()) not in found:
            found.add(file)
            pending += IMPORTS[file]
    return found


def place_of(name: str) -> str:
    """The longest of the places that a file's path begins with."""
    return max((place for place in PLACES if f"{name}/".startswith(f"{place}/")), key=len)


def climbs(importer: str, imported: str) -> bool:
    """An import climbs if it goes up, or across to a neighbour on the same floor."""
    above, below = place_of(importer), place_of(imported)
    return above != below and PLACES[above] >= PLACES[below]


def test_no_import_climbs() -> None:
    assert {(file, target) for file, found in IMPORTS.items() for target in found if climbs(file, target)} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which has the chain


def test_every_room_has_its_place() -> None:
    rooms = {name_of(room) for top in (ADAPTERS, SCRIPTS) for room in top.rglob("*") if any(room.glob("*.py"))}
    assert {room for room in rooms if place_of(room) in ("nodes", "scripts")} == set()
    assert [place for place in PLACES if not (ROOT / place).exists()] == []


def test_adapters_import_what_the_core_offers_them() -> None:
    allowed = tuple("compile_cache/" + name.replace(".", "/") for name in FOR_ADAPTERS)
    found = {target for file, targets in IMPORTS.items() if file.startswith("nodes/") for target in targets}
    inside = {name for name in found if name.startswith("compile_cache/") and name.count("/") > 1}
    assert {name for name in inside if not name.removesuffix(".py").startswith(allowed)} == set()
    assert [each for each in allowed if not any(name.startswith(each) for name in inside)] == []


UNTESTED = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "gpu").rglob("*.py")])


@pytest.mark.parametrize("file", UNTESTED, ids=name_of)
def test_an_import_that_no_test_here_runs_names_something(file: Path) -> None:
    """Benchmarks and the tests for a GPU would not notice a rename."""
    wrong = []
    for node in Source(file).nodes:
        if not isinstance(node, ast.ImportFrom) or not (name := (node.module or "").removeprefix("resolute_pack.")):
            continue
        base = (file.parents[node.level - 1] if node.level else ROOT).joinpath(*name.split("."))
        if base.is_dir():
            wrong += [each.name for each in node.names if not [*base.glob(f"{each.name}*")]]
        elif base.with_suffix(".py").is_file():
            text = base.with_suffix(".py").read_text("utf-8")
            wrong += [each.name for each in node.names if not re.search(rf"\b{each.name}\b", text)]
        elif node.level or name.split(".")[0] in ("compile_cache", "scripts", "benchmarks", "tests"):
            wrong.append(name)
    assert wrong == []


def test_only_the_command_can_import_a_bundle() -> None:
    """No node, route or workflow reaches the code that does."""
    assert [file for file, found in IMPORTS.items() if BUNDLE in found] == ["scripts/commands/bundle.py"]


# A rule takes a source and says what breaks it, in words for the failure of its test.


def comfyui_imported(source: Source) -> list[str]:
    """By the core, or by a node class without an adapter."""
    if source.file.is_relative_to(CORE):
        return sorted(top_level(source) & COMFYUI)
    inside = source.file.is_relative_to(NODES) and not source.file.is_relative_to(ADAPTERS)
    return sorted((top_level(source) & COMFYUI) - FOR_NODES) if inside else []


def absolute_imports_of_ours(source: Source) -> list[str]:
    if source.file in STARTED_BY_PATH:
        return []
    names = absolute_imports(source)
    ours = {name for name in names if name.partition(".")[0] in ("compile_cache", "resolute", "scripts")}
    # ComfyUI's own `nodes` is one module without submodules: `nodes.adapters` would be meant for ours.
    return sorted(ours | {name for name in names if name.startswith("nodes.")})


def reads_of_the_environment(source: Source) -> list[str]:
    reads = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    found = [ast.unparse(node) for node in source.nodes if isinstance(node, ast.Attribute)]
    found += ["from os" for node in source.nodes if isinstance(node, ast.ImportFrom) and node.module == "os"]
    return [] if source.file in READS_THE_ENVIRONMENT else [each for each in found if each in (*reads, "from os")]


def private_torch(source: Source) -> list[str]:
    """Names below `torch` that begin with one underscore, and all below `triton`: imports, attributes, texts."""
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)
    return [] if source.file == PRIVATE_TORCH else sorted(name for name in found if _is_private(*name.split(".")))


def _is_private(package: str, *below: str) -> bool:
    if package == "torch":
        return any(part.startswith("_") and not part.startswith("__") for part in below)
    return package == "triton" and below != () and below[0] not in INDUCTORS_TRITON_SETTINGS


def executed_data(source: Source) -> list[str]:
    readers = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess"}
    # Both ways: a file that no longer imports pickle leaves the table.
    reading = (top_level(source) & readers) ^ LOADS_COMPILED_CODE.get(source.file, set())
    calls = {ast.unparse(node.func) for node in source.nodes if isinstance(node, ast.Call)}
    return sorted(reading | calls & {"eval", "exec", "compile", "__import__", "torch.load", "os.system"})


def offenders(rule: Callable[[Source], list[str]]) -> list[str]:
    return [f"{name_of(each.file)}: {what}" for each in SOURCES for what in rule(each)]


@pytest.mark.parametrize("rule", [comfyui_imported, absolute_imports_of_ours, reads_of_the_environment, private_torch])
def test_no_file_of_the_pack_breaks_a_rule(rule: Callable[[Source], list[str]]) -> None:
    assert offenders(rule) == []


def test_nothing_is_executed_from_data() -> None:
    assert offenders(executed_data) == []


def test_the_core_without_torch_imports_none() -> None:
    imports = "".join(f"import compile_cache.{module}\n" for module in WITHOUT_TORCH)
    heavy = {"torch", "numpy", "sympy", "filelock", "comfy", "nodes"}
    assert run_python(f"{imports}import sys\nprint(sorted(sys.modules.keys() & {heavy}))") == "[]\n"


def test_what_runs_before_the_environment_needs_the_standard_library_alone() -> None:
    files = [each for each in EVERY_SOURCE if name_of(each.file).startswith(BEFORE_THE_ENVIRONMENT)]
    tops = [node for each in files for node in each.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        for node in tops
        if not getattr(node, "level", 0)
    ]
    assert {name.partition(".")[0] for each in names for name in each if name} - sys.stdlib_module_names == set()


def test_a_file_has_a_docstring_and_at_most_300_lines() -> None:
    sources = [*EVERY_SOURCE, *map(Source, (ROOT / "benchmarks").rglob("*.py"))]
    assert [name_of(each.file) for each in sources if not ast.get_docstring(each.tree)] == []
    assert [name_of(each.file) for each in sources if len(each.text.splitlines()) > MAX_LINES] == []
