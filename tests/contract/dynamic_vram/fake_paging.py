"""DynamicVRAM in small, on the CPU: a reservation whose pages come and go, a model over it, and ComfyUI's load.

The host is torch's "meta" device here, because the CPU stands for the GPU. The values of weights are whole numbers, so
every sum is exact, and a page that holds something else makes a result wrong or NaN.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

HOST = "meta"
PAGE = 128
_LORA = {"": 0, "a": 1, "b": 2, "resizing": 3}  # what each LoRA adds to the weights; the last also lengthens `RESIZED`
RESIZED = "blocks.2"

LORAS = tuple(_LORA)


@dataclass
class Reservation:
    """A `ModelVBAR`. `room`: pages that memory has for it; `failures`: how many mappings fail in the driver.

    `counts_pins`: as comfy-aimdo 0.3.0 does. Before, a pin is a flag, which one `unpin` takes away.
    """

    pages: int
    room: int = 0
    failures: int = 0
    device: int = 0
    asked: int = 0
    counts_pins: bool = True
    offset: int = 0  # where the last allocation ends
    _count: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.room = self.room or self.pages
        self.watermark = self.pages
        self.memory = torch.full((self.pages * PAGE,), 0xFF, dtype=torch.uint8)
        self.base_addr = self.memory.data_ptr()
        self.serials = [0] * self.pages  # 0: not mapped
        self.pins = [0] * self.pages

    def alloc(self, size: int) -> tuple[Reservation, int, int]:
        start = -(-self.offset // 8) * 8
        assert start + size <= len(self.memory)
        self.offset = start + size
        return self, self.base_addr + start, size

    def view(self, address: int, shape: Sequence[int]) -> torch.Tensor:
        start, size = address - self.base_addr, 4 * torch.Size(shape).numel()
        return self.memory[start : start + size].view(torch.float32).view(*shape)

    def range(self, address: int, size: int) -> range:
        start = address - self.base_addr
        return range(start // PAGE, -(-(start + size) // PAGE))

    @property
    def mapped(self) -> int:
        return sum(map(bool, self.serials))

    def fault(self, address: int, size: int) -> tuple[int, ...] | None:
        pages = self.range(address, size)
        if pages.stop > self.watermark:
            return None
        for page in pages:
            if not self.serials[page]:
                if self.failures:
                    self.failures -= 1
                    raise RuntimeError("Fault failed: 2")
                if self.mapped >= self.room:
                    return None
                self.serials[page] = next(self._count)
                self._scribble(page, 0xFE)
        for page in pages:
            self.pins[page] = self.pins[page] + 1 if self.counts_pins else 1
        found = [self.serials[page] for page in pages]
        return tuple(found + [0] * (size // PAGE + 2 - len(found)))

    def unpin(self, address: int, size: int) -> None:
        for page in self.range(address, size):
            assert self.pins[page] > 0 or not self.counts_pins, f"page {page} is unpinned more often than pinned"
            self.pins[page] = max(self.pins[page] - 1, 0)

    def evict(self, count: int) -> None:
        for page in reversed(range(self.pages)):
            if count and self.serials[page] and not self.pins[page]:
                self.serials[page] = 0
                self._scribble(page, 0xFF)
                self.watermark = page
                count -= 1

    def free_memory(self, size: int) -> int:
        before = self.mapped
        self.evict(-(-size // PAGE))
        return (before - self.mapped) * PAGE

    def set_watermark(self, size: int) -> None:
        mark = min(-(-size // PAGE), self.pages)
        for page in range(mark, self.pages):
            if self.serials[page] and not self.pins[page]:
                self.serials[page] = 0
                self._scribble(page, 0xFF)
        self.watermark = mark

    def limit(self, room: int) -> None:
        """Another program takes memory, or gives it back."""
        self.room = room
        self.evict(max(0, self.mapped - room))

    def prioritize(self) -> None:
        self.watermark = self.pages
        self.asked += 1

    def get_residency(self) -> list[int]:
        return [int(bool(serial)) | 2 * bool(pins) for serial, pins in zip(self.serials, self.pins, strict=True)]

    def loaded_size(self) -> int:
        return self.mapped * PAGE

    def _scribble(self, page: int, value: int) -> None:
        self.memory[page * PAGE : (page + 1) * PAGE] = value  # four of either are a NaN


class PagedLinear(nn.Module):
    """An operation of core, whose weights are paged once `_v` is set. Their values are in `Checkpoint`."""

    comfy_cast_weights = True

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(torch.empty(width, width, device=HOST))
        self.register_parameter("bias", _parameter(torch.empty(width, device=HOST)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if weight.device.type == HOST:  # not put in place
            weight, bias = uncaptured(self)
        return compute(x, weight, bias)


def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    ramp = torch.arange(weight.numel(), dtype=torch.float32)
    x = x * 2 + (weight.flatten() * ramp).sum()
    return x if bias is None else x + bias.sum()


class PagedModel(nn.Module):
    """Blocks with weights that begin within a page and go over several, and small weights that are not paged."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 7, 2, 5, 4)
        self.blocks = nn.ModuleList(PagedLinear(width, bias=number % 2 == 0) for number, width in enumerate(widths))
        self.small = _parameter(torch.empty(3, device=HOST))
        self.register_buffer("table", torch.empty(4, device=HOST))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return compute(x, self.small, self.table)


@dataclass(eq=False)
class Checkpoint:
    """A patcher of ComfyUI: a model, its file, and `load`. It stands for all clones of the patcher, by their LoRA."""

    model: PagedModel = field(default_factory=PagedModel)
    reservation: Reservation = field(default_factory=lambda: Reservation(16))
    lora: str | None = None  # of the last load
    is_loaded: bool = False
    layout: int = 0  # how often a weight changed its place
    fills: int = 0
    moved: Counter[str] = field(default_factory=Counter)  # bytes over the bus, by module

    def value(self, name: str, slot: str, lora: str) -> torch.Tensor:
        """A weight with a LoRA applied."""
        shape = list(self._shape(name, slot))
        if lora == "resizing" and name == RESIZED:
            shape[0] += 1
        seed = sum(map(ord, name + slot)) % 5 + 1
        return torch.full(shape, float(seed + (0 if slot == "table" else _LORA[lora])))

    def _shape(self, name: str, slot: str) -> torch.Size:
        if name:
            width = (3, 7, 2, 5, 4)[int(name.rpartition(".")[2])]
            return torch.Size((width, width) if slot == "weight" else (width,))
        return torch.Size((3,) if slot == "small" else (4,))

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """What a plain model gives, with all weights in memory of their own."""
        assert self.lora is not None
        for name, block in self.model.blocks.named_children():
            name = f"blocks.{name}"
            bias = None if block.bias is None else self.value(name, "bias", self.lora)
            x = compute(x, self.value(name, "weight", self.lora), bias)
        return compute(x, self.value("", "small", self.lora), self.value("", "table", self.lora))

    def load(self, lora: str) -> None:
        """`ModelPatcherDynamic.load`."""
        dirty = self.lora is not None and lora != self.lora
        self.reservation.prioritize()
        for name, block in self.model.named_modules():
            if not isinstance(block, PagedLinear):
                continue
            own: dict[str, Any] = block.__dict__
            if dirty or "_v_signature" not in own:
                block._v_signature = None
            block.weight_lowvram_function = _Patch(self, name, lora)
            resized = lora == "resizing" and name == RESIZED
            if resized:
                # core unpins the pages here; nothing has pinned them
                self.layout += own.pop("_v", None) is not None
            self._restore(block, name, ("weight", "bias"))
            if resized:
                for slot in ("weight", "bias"):
                    if getattr(block, slot) is not None:
                        setattr(block, slot, _parameter(self.value(name, slot, lora)))
            elif "_v" not in own:
                slots = [slot for slot in ("weight", "bias") if getattr(block, slot) is not None]
                block._v = self.reservation.alloc(4 * sum(self._shape(name, slot).numel() for slot in slots))
                self.layout += 1
        self.model.small = _parameter(self.value("", "small", lora))
        self.model.table = self.value("", "table", lora)
        self.lora, self.is_loaded = lora, True

    def unload(self) -> None:
        """All pages go, and the small weights go back to the host."""
        self.reservation.evict(self.reservation.pages)
        self.model.small = _parameter(torch.empty(3, device=HOST))
        self.model.table = torch.empty(4, device=HOST)
        self.is_loaded = False

    def _restore(self, block: PagedLinear, name: str, slots: Sequence[str]) -> None:
        for slot in slots:
            held = getattr(block, slot)
            if held is not None and held.device.type != HOST:
                setattr(block, slot, _parameter(torch.empty(self._shape(name, slot), device=HOST)))


@dataclass(frozen=True, eq=False)
class _Patch:
    """A `LowVramPatch`: what a module's weights are with the LoRA of the last load."""

    checkpoint: Checkpoint
    name: str
    lora: str

    def clear_prepared(self) -> None: ...


def fill(module: Any, dtype: torch.dtype) -> None:
    """`comfy.ops.cast_bias_weight` and `uncast_bias_weight` of a paged module whose pages are mapped."""
    assert dtype == torch.float32
    uncaptured(module)


def uncaptured(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Core's way to a module's weights: pages that have them, else pages that are filled, else a buffer."""
    reservation, address, size = module._v
    patch: _Patch = module.weight_lowvram_function
    values = [patch.checkpoint.value(patch.name, slot, patch.lora) for slot, _ in _named(module)]
    try:
        serials = reservation.fault(address, size)
    except RuntimeError:  # stock would fail here
        serials = None
    if serials is None or serials != module._v_signature:
        patch.checkpoint.moved[patch.name] += sum(value.nbytes for value in values)
    if serials is None:
        module._v_signature = None
        return values[0], values[1] if len(values) > 1 else None
    if serials != module._v_signature:
        patch.checkpoint.fills += 1
        module._v_bias = None
        for (slot, _), value in zip(_named(module), values, strict=True):
            view = reservation.view(address, value.shape)
            view.copy_(value)
            setattr(module, f"_v_{slot}", view)
            address += 4 * value.numel()
        module._v_signature = serials
    reservation.unpin(*module._v[1:])
    return module._v_weight.clone(), None if module._v_bias is None else module._v_bias.clone()


def _named(module: Any) -> list[tuple[str, Any]]:
    return [(slot, weight) for slot in ("weight", "bias") if (weight := module._parameters[slot]) is not None]


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
