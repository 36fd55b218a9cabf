"""The versions of a module's addresses, settings and code, and the weights epoch that they make.

A capture reads weights at fixed addresses. ComfyUI moves weights (load, offload, LoRA, hooks), often without a
callback, so their addresses are read before every call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ....compile_cache.code_identity.attributes import is_own
from ....compile_cache.code_identity.reach import CodeReach
from ....compile_cache.errors import BypassCode, BypassReason
from ....compile_cache.modules.gguf_weights import patches_of
from ....compile_cache.modules.region_weights import weight_forms
from ....compile_cache.modules.slots import Slot, all_parts
from ....compile_cache.modules.structure import unknown_setting
from ....compile_cache.modules.weight_parts import PLAIN, WeightForm, form_of, is_plain, read_anew
from ....compile_cache.telemetry.stats import Counters
from ....compile_cache.torch_compat.private_names import foreach_copy
from ..comfyui.module_attributes import ATTRIBUTES
from ..dynamic_vram import aimdo
from ..dynamic_vram.paged_weights import Fill, PagedWeights
from ..trust import model_code
from ..trust.trust import is_trusted
from .module_snapshot import ModuleSnapshot

_numbers = itertools.count(1)  # of epochs and versions
# For a weight outside compiled blocks, the GGUF pack copies its LoRAs from the host to the device in every call.
_PATCHED_INSIDE = BypassReason(
    BypassCode.UNREADABLE_WEIGHTS,
    "a LoRA is added to GGUF weights in each call, which a capture cannot follow",
)


class ModuleState:
    """The versions of one module, its weights epoch, and the reason if a capture of it is forbidden.

    addresses: of weights and pages, and how loading casts and patches weights. settings: the modules, their attributes
    and hooks, and the shapes of weights. code: all that the classes of the modules reach. A change of any of them makes
    captures wrong. Hooks and compiled regions contain no addresses.

    All clones of a model share one object, because their epochs must agree. Its reference to the module is weak: all
    state of a module is dropped when the module is garbage collected.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trusted: Collection[str] = (),
        fill: Fill | None = None,
        host: str = "cpu",
        unsupported: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """trusted: see `trust.why_foreign`. fill, unsupported, counters: see `PagedWeights`. host: see
        `StableAddresses`.
        """
        self._module = weakref.ref(module)
        self._slots: list[Slot] = []
        self._addresses: list[Any] | None = None
        self._plain: list[Slot] = []
        self._composite: list[tuple[Slot, weakref.ref[torch.Tensor], WeightForm | None]] = []
        self._snapshot: ModuleSnapshot | None = None  # of the walk that began the epoch
        self._reaches = model_code.reaches()
        self._trusted = trusted
        self._values: dict[str, object] = {}
        # A changed value gets a new number as its version. A version above `epoch` begins a new epoch. Values that are
        # again those at the epoch's begin get their versions back: an unloaded model looks different to `look`.
        self.versions = dict.fromkeys(("addresses", "settings", "code"), 0)
        self._at_epoch: dict[str, tuple[object, int]] = {}
        self.epoch = 0
        self.blocker: BypassReason | None = None
        self.paged = PagedWeights(fill, unsupported, counters)
        self.stable_addresses = StableAddresses(host)
        self._host = host

    def refresh(self, inspect_modules: bool = False) -> bool:
        """Bring `epoch` and `blocker` up to date. Returns True if it inspected every module.

        Reading the addresses takes a fraction of a millisecond. If one changed, or with `inspect_modules` (at the first
        call of a sampling run), it also checks for changes that move no weight: casts and patches of weights at
        loading, settings, foreign code, replaced modules.
        """
        if self.paged.pages:
            self.stable_addresses.keep(self._slots)
        if not inspect_modules and self._addresses is not None and not self._moved():
            return False
        root = self._module()
        if root is None:
            return False
        modules = list(all_parts(root))
        snapshot, kinds, reach = self._walk(modules)
        self._find_slots(modules)
        pages = self.paged.survey(modules)
        self.stable_addresses.keep(self._slots if self.paged.pages else ())
        self._addresses = self._read_addresses()
        tensors = [slots[name] for slots, name in self._slots]
        addresses = (
            self._addresses or [_address(tensor) for tensor in tensors],
            pages,
            [(type(tensor), tensor.dtype, tensor.device) for tensor in tensors],
            weight_forms(self._slots),
            snapshot.loading,
        )
        self._note(addresses=addresses)
        if max(self.versions.values()) > self.epoch or self.change():
            self.epoch, self._snapshot = next(_numbers), snapshot
            self._at_epoch = {name: (self._values[name], version) for name, version in self.versions.items()}
            # An undeclared pack's classes are in no region.
            snapshot.watch(modules, self._reaches.of(filter(is_trusted, kinds)))
            host = self._host if self.paged.pages else None
            self.blocker = (
                self._why_left_to_core()
                or _blocker(tensors, modules, snapshot.is_foreign, host)
                or model_code.blocker(kinds, reach, self._trusted)
            )
        return True

    def look(self) -> None:
        """Bring the versions of settings and code up to date. It reads no address, so no weight need be loaded."""
        root = self._module()
        if root is not None:
            self._walk(list(all_parts(root)))

    def _walk(self, modules: Sequence[torch.nn.Module]) -> tuple[ModuleSnapshot, frozenset[type], CodeReach]:
        _remove_own_forwards(modules)
        snapshot, kinds = ModuleSnapshot(modules), frozenset(map(type, modules))
        reach = self._reaches.of(kinds)
        self._note(settings=snapshot.settings, code=reach)
        return snapshot, kinds, reach

    def _note(self, **values: object) -> None:
        for name, value in values.items():
            if value != self._values.get(name):
                before, version = self._at_epoch.get(name, (None, 0))
                self.versions[name] = version if version and value == before else next(_numbers)
        self._values.update(values)

    def change(self) -> str:
        """Name a change of the model by another pack since the last inspection; empty if there is none."""
        return "" if self._snapshot is None else self._snapshot.change()

    def let_go(self) -> None:
        """The module was garbage collected: drop the references to its weights and pages."""
        self._find_slots(())
        self.stable_addresses.forget()
        self.paged.survey(())

    def _find_slots(self, modules: Sequence[torch.nn.Module]) -> None:
        """Find the slots of all unpaged weights, and the parts of weights that consist of several tensors."""
        self._slots = aimdo.slots_outside_pages(modules)
        self._plain, self._composite = [], []
        for own, name in self._slots:
            weight = own[name]
            if type(weight) in PLAIN:  # as `is_plain`, without a call for each weight
                self._plain.append((own, name))
            else:
                self._composite.append(((own, name), weakref.ref(weight), read_anew(weight)))

    def _why_left_to_core(self) -> BypassReason | None:
        why = self.paged.unsupported
        if why is None or not self.paged.pages:
            return None
        return BypassReason(BypassCode.STREAMED_WEIGHTS, f"{why}, so ComfyUI loads them itself")

    def _moved(self) -> bool:
        return self.paged.moved() or self._addresses != self._read_addresses()

    def _read_addresses(self) -> list[Any] | None:
        try:
            found = [slots[name].data_ptr() for slots, name in self._plain]
            for (own, name), weight, form in self._composite:
                now = weight()
                if now is None or own[name] is not now or form is None:  # another weight, or one that lists no parts
                    return None
                found += [part.data_ptr() for part in form.parts(now)]
                found.append(bool(patches_of(now)))
            return found
        except (KeyError, AttributeError, RuntimeError):  # a weight was removed, or has no storage (meta, quantized)
            return None


def _remove_own_forwards(modules: Iterable[torch.nn.Module]) -> None:
    """Remove the bound `forward` of the class, which ComfyUI leaves on a module when it undoes an object patch."""
    for module in modules:
        attributes = module.__dict__
        if "forward" in attributes and is_own(module, "forward", attributes["forward"]):
            del attributes["forward"]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _blocker(
    tensors: list[torch.Tensor], modules: list[torch.nn.Module], foreign: bool, host: str | None
) -> BypassReason | None:
    """host: the type of device on which no weight may remain, for a model with paged weights."""
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1 or "meta" in devices or host in devices:
        return BypassReason(
            BypassCode.STREAMED_WEIGHTS,
            f"weights are on {' and '.join(sorted(devices))} (low VRAM), so the forward cannot be captured",
        )
    unreadable = next((tensor for tensor in tensors if not is_plain(tensor) and form_of(tensor) is None), None)
    if unreadable is not None:
        return BypassReason(
            BypassCode.UNREADABLE_WEIGHTS,
            f"a weight is a {type(unreadable).__name__}, and its address does not show every change of it",
        )
    if any(map(patches_of, tensors)):
        return _PATCHED_INSIDE
    if foreign:
        return model_code.REPLACED_CODE
    if unknown := unknown_setting(modules, ATTRIBUTES):
        return model_code.unkeyed_input(unknown)
    for module in modules:
        if ATTRIBUTES.patches_weights(module):
            return BypassReason(BypassCode.STREAMED_WEIGHTS, "weights are patched on their way in (low VRAM)")
    return None


class StableAddresses:
    """Keeps the addresses of the small weights and buffers of a model with paged weights.

    Each load creates new tensors for them. Captures read the old tensors, so `keep` copies the new values into the old
    tensors and puts these back into the model: then nothing has moved, and no memory is used twice.
    """

    def __init__(self, host: str = "cpu") -> None:
        """host: the type of device where weights wait until they are loaded."""
        self._host = host
        self._kept: dict[tuple[int, str], torch.Tensor] = {}

    def keep(self, slots: Iterable[Slot]) -> None:
        """Keep the tensors of these slots, and only these, at their first addresses. Tensors on the host may move."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        before, self._kept = self._kept, {}
        for own, name in slots:
            new, key = own.get(name), (id(own), name)
            old = before.get(key)
            if old is not None:
                self._kept[key] = old
            if new is None or new is old or not is_plain(new) or new.device.type in (self._host, "meta"):
                continue
            if old is None or not _alike(old, new):
                self._kept[key] = new
                continue
            targets.append(old)
            sources.append(new)
            own[name] = old
        if targets:
            with torch.inference_mode():
                foreach_copy(targets, sources)

    def forget(self) -> None:
        """Drop the tensors: no capture reads them."""
        self._kept.clear()


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        type(old) is type(new)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
        and old.stride() == new.stride()
    )
