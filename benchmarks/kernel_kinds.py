"""Kernels of a step by what they do, told by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# The first kind that has a word of the name. Order matters: cuDNN's attention is a "fprop" too, and transposes of cuDNN
# belong to convolutions but cost bandwidth, not arithmetic.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("layout", ("nchwtonhwc", "nhwctonchw", "tensortransform", "transpose")),
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("convolution", ("convolution", "conv2d", "conv3d", "implicit_gemm", "fprop", "winograd", "im2col", "_conv")),
    ("product", ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitk", "triton_mm", "triton_tem", "_scaled_mm")),
    ("norm", ("layer_norm", "group_norm", "groupnorm", "layernorm", "rms_norm", "rmsnorm", "rowwisemoments")),
    ("copy", ("memcpy", "memset", "copy", "catarray")),
    ("pointwise", ("elementwise",)),
)  # fmt: skip
OTHER = "other"


def kind_of(kernel: str) -> str:
    """Inductor names a kernel after every operator that it fuses: it is a norm if one of them is."""
    name = kernel.lower()
    if name.startswith(("triton_poi", "triton_red", "triton_per")):
        return "norm" if "norm" in name else "pointwise"
    return next((kind for kind, words in KINDS if any(word in name for word in words)), OTHER)


def by_kind(kernels: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """kernels: {name: (count, microseconds)}. The largest kind first."""
    found: dict[str, dict[str, float]] = {}
    for name, (count, microseconds) in kernels.items():
        entry = found.setdefault(kind_of(name), {"count": 0, "ms": 0.0})
        entry["count"] += count
        entry["ms"] += microseconds / 1000
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))
