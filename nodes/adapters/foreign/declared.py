"""Packs whose code we have read and tried: their classes are compiled and captured as ComfyUI's own are.

Each entry is one state of a pack's source, as RESOLUTE_TRUSTED_PACKS takes it. Any other state, also a later version,
is refused by name until a person declares it there.
"""

from __future__ import annotations

# ComfyUI-GGUF of city96, main from 2025-09-14 (be2a083) to 2025-12-18 (795e451). The layers (`ops.py`) are the same in
# all; they decode the weights of a GGUF file in each call, and keep nothing from call to call.
_GGUF = (
    "8a0fd4e5ae0792f3", "09b9dfd80cd0a7df", "b11cc7ca1825f979", "1bc3dc52b44748fb", "2f1f18e8316e1d3b",
    "4e62129cc848d657", "42ca2fb9d7aa2f1f", "7bc0e8ac921dedda", "3379efc7c60b1e94", "d4278a1f901a4ec5",
    "c9335f93995ff937", "1e0c0fa54a39a11f", "5816ba4915b02108",
)  # fmt: skip

DECLARED = frozenset(f"comfyui-gguf@2.0.0:{digest}" for digest in _GGUF)
