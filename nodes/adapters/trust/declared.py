"""Packs whose code we have read and tried, so that their users set nothing.

A pack is trusted if the source that computes is in a state that we know: a file, or a function in it. The rest of the
pack may change. Any other state is refused with the pack's name, until the user declares it in RESOLUTE_TRUSTED_PACKS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """file: a path below the folder of a pack. name: a definition in it, "Class.method.function"; empty for the whole
    file. digests: one for each known state of the source, see `packs.piece_digest`.
    """

    file: str
    name: str
    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class Attention:
    """A function by which a node replaces core's attention.

    pieces: its source. calls: the name of core's function that it calls; empty if it calls another package.
    """

    pieces: tuple[SourcePiece, ...]
    calls: str = ""


# By the lower-case name of a pack, the source that determines how its classes compute. The classes in these files are
# compiled and captured like ComfyUI's own; other classes of the pack are not.
CLASSES: Mapping[str, tuple[SourcePiece, ...]] = {
    # By city96, main from 2025-05-07 to 2025-12-18; "ComfyUI-GGUF" in the registry. Its layers decode the weights of a
    # GGUF file in each call.
    "comfyui-gguf": (
        SourcePiece("ops.py", "", frozenset({"3ea93104de6df400", "fdce7b60adfd2200", "e8d8e964305edb03"})),
        SourcePiece(
            "dequant.py",
            "",
            frozenset({"d08fafb90f11cb5d", "454bc3e487358f7d", "dc177fe608c4b78c", "bb2c7afa93add855"}),
        ),
    ),
}

_KJ = "nodes/model_optimization_nodes.py"  # of kijai's KJNodes, main from 2025-12-30 to 2026-08-14
_SAGE = SourcePiece(
    _KJ,
    "get_sage_func",
    frozenset({"b0c34ff82b79099f", "38a3b217308c0ac5", "a06e51965bf7ec86", "7d3cb64f5eac62e9"}),
)
_FLASH = SourcePiece(_KJ, "get_flash_func", frozenset({"a79e6859cda1912f"}))
_USES_SAGE, _USES_FLASH = "5697b437c9fd95d3", "057aec520c276e12"  # of callers of these functions' results


def _override(name: str, digest: str, *made_by: SourcePiece, calls: str = "") -> tuple[str, Attention]:
    own = SourcePiece(_KJ, name.replace("<locals>.", ""), frozenset({digest}))
    return name, Attention((own, *made_by), calls)


# By the lower-case name of a pack, and by the qualified name of the function.
ATTENTION: Mapping[str, Mapping[str, Attention]] = {
    "comfyui-kjnodes": dict(
        [
            _override("PathchSageAttentionKJ.patch.<locals>.attention_override_sage", _USES_SAGE, _SAGE),
            _override("CheckpointLoaderKJ.load.<locals>.attention_override_sage", _USES_SAGE, _SAGE),
            _override("DiffusionModelLoaderKJ.patch_and_load.<locals>.attention_override_sage", _USES_SAGE, _SAGE),
            _override("PatchFlashAttentionKJ.patch.<locals>.attention_override_flash", _USES_FLASH, _FLASH),
            _override("GGUFLoaderKJ.attention_override_pytorch", "c8bd541187753b68", calls="pytorch"),
            _override("GGUFLoaderKJ.attention_override_sage", "31f2093060814af8", calls="sage"),
            _override("GGUFLoaderKJ.attention_override_xformers", "e0112665f2669ea3", calls="xformers"),
            _override("GGUFLoaderKJ.attention_override_flash", "e698032e6ce0958d", calls="flash"),
        ]
    )
}
