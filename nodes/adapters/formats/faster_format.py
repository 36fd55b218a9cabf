"""Load a diffusion model in a faster format than its file's: core's loader builds and converts it, and each module
quantizes its weight while loading it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import torch

from ....compile_cache.errors import UserError
from ....compile_cache.texts import Text
from ....compile_cache.torch_compat.out_of_memory import is_out_of_memory
from . import kept_files
from .choice import TOKENS, UNET_TOKENS, fastest, preferred_format
from .quantized_weight import FORMATS, layout_of, quantized

logger = logging.getLogger(__name__)

AUTO, AS_IN_FILE = "auto", "as in the file"
CHOICES = (AUTO, AS_IN_FILE, *FORMATS)
# Layers with these words in their names keep their dtype: they are small, or depend on the noise level, so that one
# weight's error reaches every token. A router's choice is all or nothing.
_KEEP_DTYPE = re.compile(
    r"[._](mod|modulation|adaln|norm\d*|emb|embed\w*|time\w*|router|gate\.)(?=[._]|$)", re.IGNORECASE
)
_IN_BLOCK = re.compile(r"\.\d+\.")  # a number in the name: a layer of a repeated block
_IN_UNET = re.compile(r"(^|\.)(input|down)_blocks\.")  # keys of ComfyUI's and of diffusers' UNets
_MARKS = (".comfy_quant", ".scale_weight", ".weight_scale", "scaled_fp8")  # in the keys of a quantized file
_OTHER_PARTS = ("first_stage_model.", "cond_stage_model.", "conditioner.", "text_encoders.", "vae.")


@dataclass
class Quantizer:
    """Quantizes weights while modules load them. choose: returns a weight's format, or None to keep its dtype. counts:
    quantized weights by format. kept_dtype: matrices in blocks that kept their dtype. largest: the largest relative
    error.
    """

    device: torch.device
    choose: Callable[[torch.Tensor], str | None]
    counts: Counter[str] = field(default_factory=Counter)
    kept_dtype: int = 0
    largest: float = 0.0

    def __call__(self, entries: dict[str, Any], prefix: str) -> None:
        """Replace the entry `{prefix}weight` of a state dict by its quantized entries, if its layer is to be quantized.

        Raises UserError if there is not enough memory.
        """
        weight = entries.get(f"{prefix}weight")
        if weight is None or weight.ndim != 2 or not weight.is_floating_point() or weight.itemsize < 2:
            return
        if not _IN_BLOCK.search(f".{prefix}") or _KEEP_DTYPE.search(f".{prefix}"):
            return
        name = self.choose(weight)
        columns = 0 if name is None else FORMATS[name].columns
        if name is None or any(size % columns for size in weight.shape):
            self.kept_dtype += 1
            return
        try:
            found, error = quantized(name, weight, self.device)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            what = f"{prefix.rstrip('.')} ({weight.nbytes >> 20} MiB)"
            raise UserError(
                f"There is no memory to quantize {what}. Free some, or choose 'as in the file'."
            ) from failure
        if not error <= FORMATS[name].bound:
            self.kept_dtype += 1
            return
        self.counts[name] += 1
        self.largest = max(self.largest, error)
        entries.update({f"{prefix}{ending}": each for ending, each in found.items()})

    @property
    def text(self) -> Text:
        """A summary of the quantization, for the node."""
        if not self.counts:
            return Text("as in the file: no weight is faster in another format here")
        parts = [Text("{format} for {count} weights", format=name, count=count) for name, count in self.counts.items()]
        parts.append(Text("{count} left as in the file", count=self.kept_dtype))
        return Text(
            "{parts} (largest error {error} percent)", parts=Text.joined(", ", parts), error=f"{100 * self.largest:.1f}"
        )


def load(path: str, name: str, keep: bool = False) -> tuple[Any, Text]:
    """Load a file in a format of `CHOICES`. Returns its patcher and a text for the node. keep: also save the result.

    Raises UserError for a GGUF, a CLIP or VAE in the file, an unknown model or format, and lack of memory or disk.
    """
    if path.endswith(".gguf"):
        raise UserError(f"{path} is a GGUF. Load it with 'Unet Loader (GGUF)' of ComfyUI-GGUF.")
    if name == AS_IN_FILE:
        return comfy.sd.load_diffusion_model(path), Text("as in the file")
    state_dict, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    _require_diffusion_model(path, state_dict)
    if _is_quantized(state_dict, metadata):
        return comfy.sd.load_diffusion_model(path), Text("as in the file, which is quantized already")
    device = comfy.model_management.get_torch_device()
    best = preferred_format(device)
    preferred = best if name == AUTO else name
    if preferred is None:
        return comfy.sd.load_diffusion_model(path), Text("as in the file: no format is faster on this device")
    kept_as = name if name != AUTO else f"{AUTO}-{preferred}"  # it has weights of both formats
    if kept := kept_files.find(path, kept_as):
        return comfy.sd.load_diffusion_model(kept), Text("{format}, from the file that was kept", format=kept_as)
    if name != AUTO and layout_of(name) is None:
        raise UserError(f"This ComfyUI has no {name}. Update it, or choose 'as in the file'.")
    patcher, quantizer = _quantized(path, name, state_dict, metadata)
    if patcher is None:
        raise UserError(f"ComfyUI does not know the model in {path}. Choose another file.")
    logger.info("Resolute: %s", quantizer.text)
    if keep and quantizer.counts:
        kept_files.write(path, kept_as, patcher)
    if preferred == best or best is None:
        return patcher, quantizer.text
    return patcher, Text("{summary}; auto takes {format} on this GPU", summary=quantizer.text, format=best)


def _reload(path: str, name: str, disable_dynamic: bool = False) -> Any:
    """Core calls this to load a copy of the model from its file."""
    return _quantized(path, name, *comfy.utils.load_torch_file(path, return_metadata=True), disable_dynamic)[0]


def _quantized(
    path: str, name: str, state_dict: dict[str, Any], metadata: Any, disable_dynamic: bool = False
) -> tuple[Any, Quantizer]:
    """Returns the patcher (None if core does not recognise the model) and the quantizer with its counts."""
    device = comfy.model_management.get_torch_device()
    tokens = UNET_TOKENS if any(map(_IN_UNET.search, state_dict)) else TOKENS
    quantizer = Quantizer(device, fastest(device, tokens) if name == AUTO else lambda weight: name)
    patcher = _loaded(state_dict, metadata, quantizer, disable_dynamic)
    if patcher is not None:
        patcher.cached_patcher_init = (_reload, (path, name))
    return patcher, quantizer


def _require_diffusion_model(path: str, state_dict: dict[str, Any]) -> None:
    if any(key.startswith(_OTHER_PARTS) for key in state_dict):
        raise UserError(f"{path} has a CLIP or a VAE too. Load it with 'Load Checkpoint'.")


def _is_quantized(state_dict: dict[str, Any], metadata: dict[str, str] | None) -> bool:
    if "_quantization_metadata" in (metadata or {}) or any(key.endswith(_MARKS) for key in state_dict):
        return True
    return any(each.ndim == 2 and each.itemsize == 1 for each in state_dict.values())


def _loaded(state_dict: dict[str, Any], metadata: Any, quantizer: Quantizer, disable_dynamic: bool) -> Any:
    """Load with core's loader, which splits, fuses and renames weights before the modules load them."""
    asks = SimpleNamespace(quant_config={"mixed_ops": True})
    operations = comfy.ops.pick_operations(None, torch.bfloat16, load_device=quantizer.device, model_config=asks)
    options = {"custom_operations": operations}
    with _quantizing(operations.Linear, quantizer):
        return comfy.sd.load_diffusion_model_state_dict(
            state_dict, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
        )


@contextmanager
def _quantizing(kind: Any, quantizer: Quantizer) -> Iterator[None]:
    """Inside, modules of core's class `kind`, created for this model alone, quantize the weights that they load."""
    made, loaded = kind.__init__, kind._load_from_state_dict

    @functools.wraps(made)
    def init(module: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        made(module, *args, dtype=dtype, **kwargs)
        if dtype is not None:  # core's class has one compute dtype for all modules; use the file's
            module.factory_kwargs["dtype"] = dtype
            if module.bias is not None:
                module.bias = torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)

    @functools.wraps(loaded)
    def load(module: Any, entries: dict[str, Any], prefix: str, *rest: Any) -> None:
        quantizer(entries, prefix)
        loaded(module, entries, prefix, *rest)

    kind.__init__, kind._load_from_state_dict = init, load
    try:
        yield
    finally:
        kind.__init__, kind._load_from_state_dict = made, loaded
