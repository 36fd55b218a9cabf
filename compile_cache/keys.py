"""The keys of graphs.

Every key is a small frozen dataclass with a *named* list of components, so that a miss can name the ones that differ,
and a canonical digest that is the same in every process. Hashes are computed once, because keys are looked up in every
call. Nothing here imports torch: dtypes and devices are strings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Union

Literal = Union[None, bool, int, float, str, tuple["Literal", ...]]  # noqa: UP007 (a recursive alias cannot use |)
Component = tuple[str, Literal]


class Role(str, Enum):
    """The part of a compiled module in the workflow. The values are part of saved files and of the HTTP interface.

    The passes of a step cache are roles too. They are listed here, not by the step cache, because the commands that
    read saved files run without ComfyUI.
    """

    UNET = "unet"  # the diffusion model, of any family
    VAE_DECODE = "vae_decode"
    VAE_ENCODE = "vae_encode"
    CONTROLNET = "controlnet"
    DEEPCACHE_FULL = "deepcache_full"  # a UNet that also returns the feature that DeepCache keeps
    DEEPCACHE_FAST = "deepcache_fast"  # its shallow blocks alone, from that feature


# Roles that run all of a diffusion model: a size is ready to sample when one of them is.
WHOLE_DIFFUSION_MODEL = (Role.UNET, Role.DEEPCACHE_FULL)
# The two roles of a VAE. Their calls belong to no sampling run.
VAE_ROLES = (Role.VAE_DECODE, Role.VAE_ENCODE)


def digest(value: Literal) -> str:
    """A canonical SHA-256 of plain data: the same in every process, on every platform."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


def repr_digest(plain: object) -> str:
    """SHA-256 of plain data by its `repr`, for data that `digest` does not take: lists, bytes, classes.

    `repr` differs for all plain values that differ (1, 1.0, True, "1", 0.0, -0.0). `plain` must contain nothing else:
    the `repr` of an object contains its address, and the `repr` of a set has no fixed order.
    """
    return hashlib.sha256(repr(plain).encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    # With its type: 1, 1.0, True and "1" are four different constants to a traced graph.
    if isinstance(value, tuple):
        return ["tuple", [_plain(item) for item in value]]
    if value is None or isinstance(value, (bool, int, str)):
        return [type(value).__name__, value]
    if isinstance(value, float):
        return ["float", value.hex()]
    raise TypeError(f"{type(value).__name__} cannot be part of a key; use plain values and tuples of them")


# Names of dimensions by rank, for users: feature maps, tokens, vectors.
_DIMENSIONS = {4: ("batch", "channels", "height", "width"), 3: ("batch", "tokens", "width"), 2: ("batch", "width")}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that a graph depends on: all but its values and its address."""

    shape: tuple[int, ...]
    dtype: str
    device: str  # type only ("cuda"), the index belongs to CaptureKey
    memory_format: str = "contiguous"

    def components(self, name: str) -> list[Component]:
        """One component per dimension ("context tokens"), and one for each other property."""
        rank = len(self.shape)
        names = _DIMENSIONS.get(rank) or ("batch", *(f"size {index}" for index in range(1, rank)))
        parts: list[Component] = [(f"{name} {part}", size) for part, size in zip(names[:rank], self.shape, strict=True)]
        return [
            *parts,
            (f"{name} rank", rank),
            (f"{name} dtype", self.dtype),
            (f"{name} device", self.device),
            (f"{name} memory format", self.memory_format),
        ]

    def __str__(self) -> str:
        layout = "" if self.memory_format == "contiguous" else f" {self.memory_format}"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.device}{layout}"


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One call's inputs: the specs of its tensors by name, and the plain values that change the computation."""

    tensors: tuple[tuple[str, TensorSpec], ...]
    values: tuple[Component, ...] = ()
    _exact: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # In Python 1, 1.0 and True are equal, but not in a traced graph; their reprs differ.
        object.__setattr__(self, "_exact", (self.tensors, repr(self.values)))
        object.__setattr__(self, "_hash", hash(self._exact))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self._exact == other._exact)

    def __hash__(self) -> int:
        return self._hash

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of the first tensor, which is the latent in every role."""
        return self.tensors[0][1].shape if self.tensors else ()

    def components(self) -> list[Component]:
        return [part for name, spec in self.tensors for part in spec.components(name)] + list(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class GraphKey:
    """Identifies a graph, also across processes. The latent's shape comes first because users see it."""

    signature: Signature
    role: Role
    model: str  # a digest of the model's structure
    backend: str
    options: tuple[Component, ...] = ()
    _exact: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        exact = (self.signature, self.role, self.model, self.backend, repr(self.options))
        object.__setattr__(self, "_exact", exact)
        object.__setattr__(self, "_hash", hash(exact))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, GraphKey) and self._exact == other._exact)

    def __hash__(self) -> int:
        return self._hash

    def components(self) -> list[Component]:
        return [
            *self.signature.components(),
            ("role", self.role.value),
            ("model", self.model),
            ("backend", self.backend),
            *self.options,
        ]

    def digest(self) -> str:
        return digest(tuple(self.components()))

    def plain(self) -> dict[str, Any]:
        """Return plain data for reports."""
        return {
            "model": self.model[:12],
            "role": self.role.value,
            "latent_shape": list(self.signature.latent_shape),
            "signature": {name: str(spec) for name, spec in self.signature.tensors},
            "backend": self.backend,
        }


class Tier(IntEnum):
    """The code that a capture replays, as in a JIT compiler: a cheap tier at once, the optimizing one after it."""

    ORIGINAL = 1  # the application's own, in place of regions whose code is being compiled
    COMPILED = 2  # all compiled code that the call's regions can have


COMPILED_NOW = "its blocks are compiled now"  # why a call is captured for the second tier


ANY_EPOCH = -1  # in the key of a graph that serves every weights epoch, see `Capabilities.keeps_graphs`


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """One capture of a graph in this process. It reads fixed addresses, so it depends on where the weights are.

    owner: the module's number in this process, which distinguishes two modules of equal structure.
    """

    graph: GraphKey
    device: str
    owner: int
    epoch: int
    torch_flags: tuple[Component, ...] = ()  # that it computes under, see flags.py
    tier: Tier = Tier.COMPILED

    @property
    def of_any_epoch(self) -> CaptureKey:
        """The key of the call with any weights of its module: each of them needs as much memory and time."""
        return CaptureKey(self.graph, self.device, self.owner, ANY_EPOCH, self.torch_flags, self.tier)

    @property
    def shape(self) -> str:
        """The latent's shape, for users: "2x4x128x128"."""
        return "x".join(map(str, self.graph.signature.latent_shape))

    def components(self) -> list[Component]:
        return [
            *self.graph.components(),
            ("device", self.device),
            ("module", self.owner),
            ("weights epoch", self.epoch),
            *self.torch_flags,
        ]


def differing(left: Iterable[Component], right: Iterable[Component]) -> list[tuple[str, Literal, Literal]]:
    """Return the components that differ, as (name, left value, right value); a missing one has the value None."""
    a, b = dict(left), dict(right)
    names = list(a) + [name for name in b if name not in a]
    return [
        (name, a.get(name), b.get(name))
        for name in names
        if (name in a) != (name in b) or repr(a.get(name)) != repr(b.get(name))
    ]
