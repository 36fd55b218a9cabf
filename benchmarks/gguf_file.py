"""GGUF files of random models: the package gguf writes them, and what it cannot quantize is quantized here, on a GPU.

ComfyUI-GGUF (https://github.com/city96/ComfyUI-GGUF) loads them. Needs torch, and the package gguf to write a file.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.errors import SetupError

if TYPE_CHECKING:
    from torch import Tensor

LOADER = "UnetLoaderGGUF"
# Names of families in such files.
ARCHITECTURES = {"flux": "flux", "z-image": "lumina2", "qwen-image": "qwen_image", "wan": "wan"}


def require(python: Path, pack: Path | None, packages: Path | None) -> None:
    """Raises SetupError with what is missing to load GGUF files.

    python: the server's. pack: the folder of ComfyUI-GGUF. packages: a folder on the server's PYTHONPATH.
    """
    if pack is None or not all((pack / name).is_file() for name in ("__init__.py", "ops.py", "loader.py")):
        raise SetupError(
            "rows in GGUF need the nodes of ComfyUI-GGUF: --gguf-pack FOLDER, where FOLDER is a clone of "
            f"https://github.com/city96/ComfyUI-GGUF{'' if pack is None else f'; {pack} is none'}."
        )
    environment = {**os.environ, **python_path(packages)}
    found = subprocess.run([str(python), "-c", "import gguf"], env=environment, capture_output=True, check=False)
    if found.returncode:
        raise SetupError(
            f"rows in GGUF need the package gguf, which {python} cannot import: run `pip install --target FOLDER "
            "gguf`, and give --packages FOLDER."
        )


def python_path(packages: Path | None) -> dict[str, str]:
    """The environment variable with which Python finds the packages in a folder."""
    return {} if packages is None else {"PYTHONPATH": str(packages.resolve())}


def write(
    weights: Mapping[str, Tensor], form: str, name: str, is_packed: Callable[[str, Any], bool], out: Path
) -> None:
    """Write weights as a file; those that `is_packed` names in the format, where their width allows it, else
    matrices in F16 and vectors in F32.

    form: of `QUANTIZERS`. name: of the family.
    """
    import torch

    gguf: Any = importlib.import_module("gguf")
    numbers, quantize = QUANTIZERS[form]
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[name])
    for key, weight in weights.items():
        if is_packed(key, weight) and weight.shape[1] % numbers == 0:
            data = quantize(weight).reshape(weight.shape[0], -1)
            writer.add_tensor(key, data.cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType[form])
            continue
        if weight.ndim > 4:  # the format has four dimensions at most
            writer.add_array(f"comfy.gguf.orig_shape.{key}", [int(size) for size in weight.shape])
            weight = weight.flatten(2)
        dtype = torch.float16 if weight.ndim > 1 else torch.float32
        writer.add_tensor(key, weight.to(dtype).cpu().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q8_0(weight: Tensor) -> Tensor:
    """Blocks of Q8_0, (blocks, 34 bytes): a scale in float16 and 32 whole numbers."""
    import torch

    numbers = weight.reshape(-1, 32).float()
    scale = (numbers.abs().amax(1, keepdim=True) / 127).half()
    quants = (numbers / scale.float().clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), quants.view(torch.uint8)], dim=1)


def q4_k(weight: Tensor) -> Tensor:
    """Blocks of Q4_K, (blocks, 144 bytes): 256 numbers in eight groups, each with a scale and a minimum.

    From the smallest to the largest number of a group, without the search for a better fit that llama.cpp does.
    """
    import torch

    groups = weight.reshape(-1, 8, 32).float()
    least = (-groups.amin(2)).clamp(min=0)
    step = (groups.amax(2) + least).clamp(min=1e-8) / 15
    d, dmin = ((each.amax(1, keepdim=True) / 63).half() for each in (step, least))
    scales, minima = (
        (each / of.float().clamp(min=1e-8)).round().clamp(0, 63).to(torch.uint8)
        for each, of in ((step, d), (least, dmin))
    )
    unit = (d.float() * scales).clamp(min=1e-8)[:, :, None]
    quants = ((groups + (dmin.float() * minima)[:, :, None]) / unit).round().clamp(0, 15).to(torch.uint8)
    first, second = (each[:, :4] | ((each[:, 4:] >> 4) << 6) for each in (scales, minima))
    both = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    low, high = quants.reshape(-1, 4, 2, 32).unbind(2)
    packed = (low | (high << 4)).reshape(-1, 128)
    return torch.cat([d.view(torch.uint8), dmin.view(torch.uint8), first, second, both, packed], dim=1)


# By format, the numbers of a block, and what makes blocks of a matrix.
QUANTIZERS: dict[str, tuple[int, Callable[[Any], Any]]] = {"Q8_0": (32, q8_0), "Q4_K": (256, q4_k)}
