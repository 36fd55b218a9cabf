"""Transformers with weights of a GGUF file, in layers of a declared pack: compiled once, and once for all LoRAs."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from compile_cache.modules.gguf_types import decoded

from ...contract.reachable import reachable
from ..in_process import ROOT
from . import kit
from .kit import Bench, forget_regions, norm, run_traces
from .models import FIRST, MODELS, SIZES, Model
from .test_declared_packs import Installed, declaration, trusted  # noqa: F401 (a fixture)

STD = 0.05
# The bytes of a block that hold scales.
SCALES = {"Q8_0": [slice(0, 2)], "Q4_0": [slice(0, 2)], "Q4_K": [slice(0, 2), slice(2, 4)]}


@pytest.fixture
def layers(
    core: SimpleNamespace,
    trusted: Callable[[str], None],  # noqa: F811
) -> Iterator[ModuleType]:
    """The pack, declared by a person."""
    pack = Installed(ROOT / "tests" / "pack" / "gguf_layers")
    module = pack.start()
    trusted("")
    trusted(declaration(core, pack))
    yield module
    pack.stop()


@dataclasses.dataclass(frozen=True)
class FileModel(Model):
    """The matrices of blocks in a format, as far as it fits their width, and in float16 else."""

    format: str = ""
    layers: Any = None
    dtype: torch.dtype = torch.float32
    patchers: list[Any] = dataclasses.field(default_factory=list)

    def make(self) -> Any:
        weights = {}
        for name, weight in self._by_hand().state_dict().items():
            matrix = "blocks." in name and weight.ndim == 2 and name.endswith("weight")
            weights[name] = self.packed(weight) if matrix else self._as_it_is(weight)
        self.patchers.append(self.layers.load(weights, {"dtype": self.dtype}))
        return self.patchers[-1].model.diffusion_model.eval().requires_grad_(False)

    def _as_it_is(self, weight: torch.Tensor) -> Any:
        return self.layers.FileTensor(weight.clone(), self.layers.Kind.F32, weight.shape)

    def packed(self, like: torch.Tensor) -> Any:
        """Random numbers in the shape of a weight."""
        kind = self.layers.Kind[self.format]
        numbers, size, _ = self.layers.FORMATS[kind]
        if like.shape[1] % numbers:
            return self.layers.FileTensor(like.half(), self.layers.Kind.F16, like.shape)
        blocks = torch.randint(0, 256, (like.numel() // numbers, size), dtype=torch.uint8)
        for scale in SCALES.get(self.format, ()):
            blocks[:, scale] = torch.full((len(blocks), 1), 0.01).half().view(torch.uint8)
        if self.format in SCALES:
            factor = STD / float(decoded(self.format, blocks, (blocks.shape[0] * numbers,)).std())
            for scale in SCALES[self.format]:
                blocks[:, scale] = torch.full((len(blocks), 1), 0.01 * factor).half().view(torch.uint8)
        data = blocks.reshape(like.shape[0], -1)
        return self.layers.FileTensor(data, kind, like.shape)


def bench_of(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType, family: str, name: str
) -> Bench:
    monkeypatch.setenv("RESOLUTE_WORKERS", "0")
    monkeypatch.setattr(kit, "TOLERANCE", 2e-3)  # float16 in the layers, float32 in regions
    forget_regions(core)
    return Bench(core, FileModel(**vars(MODELS[family]), format=name, layers=layers))


class Lora(NamedTuple):
    """Random changes of the matrices of blocks whose names have `where` in them. rank: 0 for a whole difference."""

    seed: int
    rank: int = 4
    strength: float = 1.0
    alpha: float | None = 2.0
    where: str = ""

    def of(self, shape: torch.Size) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        if not self.rank:
            return ("diff", (0.05 * torch.randn(shape, generator=generator),))
        up, down = (torch.randn(size, generator=generator) for size in ((shape[0], self.rank), (self.rank, shape[1])))
        adapter = importlib.import_module("comfy.weight_adapter").LoRAAdapter
        return adapter(set(), (0.1 * up, 0.1 * down, self.alpha, None, None, None))


class Loras:
    """Load the model as core does before sampling."""

    def __init__(self, bench: Bench) -> None:
        assert isinstance(bench.model, FileModel)
        self._patcher = bench.model.patchers[-1]
        self._load = importlib.import_module("comfy.model_management").load_models_gpu

    def on(self, *loras: Lora) -> None:
        """loras: all that the model gets."""
        clone = self._patcher.clone()
        for lora in loras:
            patches = {
                f"diffusion_model.{name}": lora.of(weight.shape)
                for name, weight in clone.model.diffusion_model.named_parameters()
                if "blocks." in name and len(weight.shape) == 2 and lora.where in name
            }
            clone.add_patches(patches, lora.strength)
        self._load([clone])

    def off(self) -> None:
        self._load([self._patcher.clone()])


def numbers_of(layers: ModuleType, module: torch.nn.Module) -> Any:
    """A network with the same numbers, exact and in float32."""
    calculate = importlib.import_module("comfy.lora").calculate_weight
    memo = {}
    for weight in module.parameters():
        plain = torch.Tensor(weight)
        kind = getattr(weight, "tensor_type", None)
        found = decoded(kind.name, plain, weight.tensor_shape) if kind in layers.FORMATS else plain.float()
        for patches, key in getattr(weight, "patches", ()):
            found = calculate(patches, found, key)
        memo[id(weight)] = torch.nn.Parameter(found, requires_grad=False)
    return copy.deepcopy(module, memo)


@pytest.mark.grid(2)
@pytest.mark.parametrize(("family", "name"), [("Flux", "Q4_K"), ("Flux", "Q8_0"), ("Wan 2.1", "Q4_0")])
def test_it_compiles_in_its_first_call_and_once_more_for_all_loras(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType, family: str, name: str
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, layers, family, name)
    loras = Loras(bench)
    loras.off()
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all(SIZES)
    given = bench.model.call(FIRST)
    results = [bench.call(given)]
    changes = (
        [Lora(1)],
        [Lora(1, strength=-0.5)],
        [Lora(2, rank=16, alpha=None)],
        [Lora(1), Lora(2, rank=19, strength=0.3)],
        [Lora(3, where="img_" if family == "Flux" else "attn")],
    )
    for number, change in enumerate(changes):
        loras.on(*change)
        results.append(bench.call(given))
        compiles = bench.model.compiles if number == 0 else 0
        assert bench.check(FIRST) == bench.counts(compiles), change
        assert bench.check(SIZES[0]) == bench.counts(), change
    loras.off()
    results.append(bench.call(given))
    assert torch.equal(results[0], results[-1])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results[:-1], 2))
    bench.check_all([FIRST, SIZES[1]])


@pytest.mark.parametrize("has_lora", [False, True])
def test_what_is_left_to_compile_behind_the_picture_traces_as_the_blocks_and_holds_nothing_of_the_model(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType, has_lora: bool
) -> None:
    bench = bench_of(core, monkeypatch, layers, "Flux", "Q8_0")
    Loras(bench).on(*[Lora(1)] * has_lora)
    bench._forward.runner.program("cpu")
    tasks, regions = (
        core.inside("backends.inductor.compiler.task_list"),
        core.inside("backends.inductor.regions.region"),
    )
    queue = core.inside("backends.registry").get("inductor")._background.queue
    monkeypatch.setattr(bench._forward.runner, "_background_compile", True)
    monkeypatch.setattr(queue, "on_left", lambda: None)  # no thread
    traces, without_model = [], tasks._without_model

    def noted(call: Any, *given: Any) -> Any:
        traces.append(regions.trace_of(call).graph.code)
        return without_model(call, *given)

    monkeypatch.setattr(tasks, "_without_model", noted)
    assert bench.check(FIRST) == {**bench.counts(calls=0), "eager_calls": 1}
    left = list(queue.waiting.values())
    queue.waiting.clear()
    assert len(left) == len(traces) == bench.model.compiles
    with torch.inference_mode():  # as in the call
        assert [regions.trace_of(each.call).graph.code for each in left] == traces
    kept = reachable(*[(each.call.site, each.call.tensors, each.call.weights) for each in left])
    of_model = {id(each) for each in [*bench.module.modules(), *bench.module.parameters(), *bench.module.buffers()]}
    assert not [type(each) for each in kept if id(each) in of_model]
    memory = {each.untyped_storage().data_ptr() for each in bench.module.parameters()} - {0}
    held = [each for each in kept if isinstance(each, torch.Tensor) and not each.is_meta]
    assert not [each.size() for each in held if each.untyped_storage().data_ptr() in memory]


def test_what_is_no_plain_lora_runs_eagerly(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, layers, "Flux", "Q8_0")
    loras = Loras(bench)
    reasons = noted_reasons(bench, monkeypatch)
    loras.on(Lora(1), Lora(2, rank=0))
    expected = {**bench.counts(calls=0), "eager_calls": 1}
    assert bench.check(FIRST, bypasses={"unreadable_weights": 1}) == expected
    assert "a difference is no plain LoRA" in reasons[-1]
    loras.on(Lora(1))
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)


@pytest.mark.parametrize("family", ["Flux", "Wan 2.1"])
def test_weights_that_core_takes_as_they_are_in_the_file_change_nothing(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType, family: str
) -> None:
    """With DynamicVRAM core does so, and what its own layers compute with them has the pack's class."""
    run_traces(core, monkeypatch)
    with pytest.MonkeyPatch.context() as loading:
        loading.setattr(core.comfy.model_patcher.ModelPatcher, "is_dynamic", lambda patcher: True)
        bench = bench_of(core, monkeypatch, layers, family, "Q8_0")
    if family == "Wan 2.1":
        assert type(bench.module.patch_embedding.weight) is layers.FileTensor
    assert bench.check(FIRST) == bench.counts(bench.model.compiles)
    bench.check_all(SIZES)


@pytest.mark.long
def test_lowered_code_is_nearer_to_the_exact_numbers_than_the_layers(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    """With one LoRA after another, of other ranks, and without."""
    bench = bench_of(core, monkeypatch, layers, "Wan 2.1", "Q4_K")
    loras = Loras(bench)
    ours, theirs = list[float](), list[float]()
    for number, change in enumerate(([], [Lora(1)], [Lora(2, rank=19), Lora(3, rank=1, strength=0.5)])):
        loras.on(*change)
        reference = numbers_of(layers, bench.module)
        assert bench.check(FIRST) == bench.counts(bench.model.compiles if number < 2 else 0)
        bench.check_all(SIZES)
        compiled, eager = bench.errors(reference, (FIRST, *SIZES))
        ours += compiled
        theirs += eager
    assert norm(theirs) > 1e-5
    assert norm(ours) <= 0.1 * norm(theirs), (ours, theirs)
    forget_regions(core)


def test_the_report_says_where_the_numbers_are_decoded(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, layers, "Wan 2.1", "Q8_0")
    bench.check(FIRST)
    modules = core.ours("report.cache_report").report()["modules"]
    assert modules[-1]["formats"] == ["GGUF Q8_0, decoded inside the blocks"]


def test_a_format_that_nobody_can_trace_is_named(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    run_traces(core, monkeypatch)
    bench = bench_of(core, monkeypatch, layers, "Flux", "IQ1_S")
    reasons = noted_reasons(bench, monkeypatch)
    assert bench.check(FIRST, bypasses={"unreadable_weights": 1}) == {**bench.counts(calls=0), "eager_calls": 1}
    assert any("GGUF format IQ1_S" in reason for reason in reasons)


def noted_reasons(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the reason of each bypass."""
    reasons: list[str] = []
    original = type(bench.stats).bypass

    def bypass(self: Any, reason: Any, *rest: Any, **more: Any) -> Any:
        reasons.append(reason.detail)
        return original(self, reason, *rest, **more)

    monkeypatch.setattr(type(bench.stats), "bypass", bypass)
    return reasons


def test_a_capture_follows_unpatched_weights_and_no_lora(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    bench = bench_of(core, monkeypatch, layers, "Flux", "Q8_0")
    loras = Loras(bench)
    loras.off()
    trust = core.ours("trust.trust")._trusted()
    weights = core.ours("module_state.module_state").ModuleState(bench.module, trust)
    weights.refresh()
    before = weights.epoch
    assert weights.blocker is None
    assert not weights.refresh()  # nothing moved, so nothing is read
    loras.on(Lora(1))
    weights.refresh()
    assert "LoRA" in weights.blocker.detail
    assert weights.epoch > before
    loras.off()
    weights.refresh()
    assert weights.blocker is None


def test_patches_that_are_put_into_a_weight_in_place_are_seen(
    core: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layers: ModuleType
) -> None:
    bench = bench_of(core, monkeypatch, layers, "Flux", "Q8_0")
    weights = core.ours("module_state.module_state").ModuleState(bench.module, core.ours("trust.trust")._trusted())
    weights.refresh()
    packed = next(
        weight for weight in bench.module.parameters() if getattr(weight, "tensor_type", None) in layers.FORMATS
    )
    packed.patches = [([], "key")]
    assert weights.refresh()
    assert weights.blocker is not None
    packed.patches = []
    assert weights.refresh()
    assert weights.blocker is None


def test_a_changed_copy_of_a_declared_pack_is_refused_by_name(
    core: SimpleNamespace,
    tmp_path: Any,
    trusted: Callable[[str], None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = Installed(tmp_path)
    pack.write()
    file = tmp_path / "pyproject.toml"
    file.write_text(file.read_text().replace("strange-model", "comfyui-gguf").replace("1.2.0", "2.0.0"), "utf-8")
    kind = pack.start().Model
    trusted("")
    trust = core.ours("trust.trust")

    def declare(digest: str) -> None:
        piece = core.ours("trust.declared").SourcePiece("__init__.py", "", frozenset({digest}))
        monkeypatch.setattr(trust, "CLASSES", {"comfyui-gguf": (piece,)})

    declare("of another state")
    why = trust.why_foreign([kind], frozenset())
    assert "comfyui-gguf changed since it was declared; now it is RESOLUTE_TRUSTED_PACKS=comfyui-gguf@2.0.0:" in why
    declare(core.ours("trust.packs").piece_digest(pack.name, "__init__.py", ""))
    assert trust.why_foreign([kind], frozenset()) is None
    pack.stop()
