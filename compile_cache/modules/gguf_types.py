"""The block formats of GGUF files, decoded in plain torch so that a trace can follow.

A tensor is a sequence of blocks of equal size in bytes; each contains numbers of a few bits, and scales. The formats
are ggml's (https://github.com/ggml-org/ggml, `ggml-common.h`). All arithmetic is on integers of single bytes, and then
in float32: inductor makes one kernel of it, which reads bytes and writes weights in the dtype of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Of IQ4_NL and IQ4_XS. Two constants of 64 bits contain it, so that no table has to be in the GPU's memory.
_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FIRST, _SECOND = (
    int.from_bytes(bytes(n & 255 for n in half), "little", signed=True) for half in (_CODEBOOK[:8], _CODEBOOK[8:])
)


class Numbers(NamedTuple):
    """The numbers of blocks are scale * quants - offset.

    quants: (blocks, groups, numbers of a group). scale, offset: of each group, (blocks, groups, 1).
    """

    quants: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """numbers: in one block. sizes: of the fields of a block, in bytes. decode: takes the fields, each (blocks, bytes)
    in int32.
    """

    numbers: int
    sizes: tuple[int, ...]
    decode: Callable[..., Numbers]

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def decoded(name: str, data: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the numbers of a tensor in the format `name` of `FORMATS`, in float32 and this shape. data: its bytes.

    The last operations have the shape of the result, so that inductor keeps their values in registers up to a cast.
    """
    block = FORMATS[name]
    fields = torch.split(data.reshape(-1, block.bytes).to(torch.int32), list(block.sizes), dim=1)
    found = block.decode(*fields)
    quants, scale, offset = (
        None if each is None else each.expand(found.quants.shape).reshape(tuple(shape)) for each in found
    )
    assert quants is not None
    numbers = quants.float() if scale is None else scale * quants
    return numbers if offset is None else numbers - offset


def _bits(x: Tensor, count: int, width: int) -> Tensor:
    """Cut each byte of (blocks, a, b) into `count` numbers of `width` bits, low bits first: (blocks, a, count, b)."""
    shifts = torch.arange(0, count * width, width, device=x.device, dtype=torch.int32)
    return (x[:, :, None, :] >> shifts[None, None, :, None]) & ((1 << width) - 1)


def _signed(x: Tensor) -> Tensor:
    return torch.where(x > 127, x - 256, x)


def _half(x: Tensor) -> Tensor:
    """Two bytes as a number in float16: (blocks, 2) to (blocks, 1, 1) in float32."""
    return (x[:, :1, None] | (x[:, 1:, None] << 8)).to(torch.int16).view(torch.float16).float()


def _nibbles(x: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves: (blocks, n) to (blocks, 1, 2n)."""
    return _bits(x[:, None, :], 2, 4).flatten(2)


def _bf16(data: Tensor) -> Numbers:
    return Numbers((((data[:, :1] | (data[:, 1:] << 8)) << 16).view(torch.float32))[:, :, None])


def _q8_0(d: Tensor, qs: Tensor) -> Numbers:
    return Numbers(_signed(qs)[:, None, :], _half(d))


def _q4_0(d: Tensor, qs: Tensor) -> Numbers:
    return Numbers(_nibbles(qs) - 8, _half(d))


def _q4_1(d: Tensor, m: Tensor, qs: Tensor) -> Numbers:
    return Numbers(_nibbles(qs), _half(d), -_half(m))


def _fifth_bits(qh: Tensor) -> Tensor:
    return _bits(qh[:, :, None], 8, 1).flatten(1)[:, None, :] << 4


def _q5_0(d: Tensor, qh: Tensor, qs: Tensor) -> Numbers:
    return Numbers((_nibbles(qs) | _fifth_bits(qh)) - 16, _half(d))


def _q5_1(d: Tensor, m: Tensor, qh: Tensor, qs: Tensor) -> Numbers:
    return Numbers(_nibbles(qs) | _fifth_bits(qh), _half(d), -_half(m))


def _grouped(quants: Tensor, groups: int) -> Tensor:
    return quants.reshape(quants.shape[0], groups, -1)


def _q2_k(scales: Tensor, qs: Tensor, d: Tensor, dmin: Tensor) -> Numbers:
    quants = _grouped(_bits(qs.reshape(-1, 2, 32), 4, 2), 16)
    scales = scales[:, :, None]
    return Numbers(quants, _half(d) * (scales & 15), _half(dmin) * (scales >> 4))


def _q3_k(hmask: Tensor, qs: Tensor, scales: Tensor, d: Tensor) -> Numbers:
    low = _bits(scales[:, None, :8], 2, 4).flatten(1)
    high = _bits(scales[:, None, 8:], 4, 2).flatten(1)
    absent = 1 - _bits(hmask[:, None, :], 8, 1)
    quants = _grouped(_bits(qs.reshape(-1, 2, 32), 4, 2), 16) - (_grouped(absent, 16) << 2)
    return Numbers(quants, _half(d) * ((low | (high << 4)) - 32)[:, :, None])


def _k_with_minima(d: Tensor, dmin: Tensor, scales: Tensor, quants: Tensor) -> Numbers:
    """Twelve bytes contain the eight scales and eight minima, six bits each."""
    a, b, c = (part[:, None, :] for part in torch.split(scales, 4, dim=1))
    second = torch.arange(2, device=scales.device)[None, :, None] == 1
    scale = torch.where(second, (c & 15) | ((a >> 6) << 4), a & 63)
    least = torch.where(second, (c >> 4) | ((b >> 6) << 4), b & 63)
    return Numbers(quants, _half(d) * scale.flatten(1)[:, :, None], _half(dmin) * least.flatten(1)[:, :, None])


def _q4_k(d: Tensor, dmin: Tensor, scales: Tensor, qs: Tensor) -> Numbers:
    return _k_with_minima(d, dmin, scales, _grouped(_bits(qs.reshape(-1, 4, 32), 2, 4), 8))


def _q5_k(d: Tensor, dmin: Tensor, scales: Tensor, qh: Tensor, qs: Tensor) -> Numbers:
    low = _grouped(_bits(qs.reshape(-1, 4, 32), 2, 4), 8)
    return _k_with_minima(d, dmin, scales, low | (_grouped(_bits(qh[:, None, :], 8, 1), 8) << 4))


def _q6_k(ql: Tensor, qh: Tensor, scales: Tensor, d: Tensor) -> Numbers:
    low = _grouped(_bits(ql.reshape(-1, 2, 64), 2, 4), 16)
    high = _grouped(_bits(qh.reshape(-1, 2, 32), 4, 2), 16)
    return Numbers((low | (high << 4)) - 32, _half(d) * _signed(scales)[:, :, None])


def _from_codebook(index: Tensor) -> Tensor:
    packed = torch.where(index < 8, _FIRST, _SECOND)
    return _signed(((packed >> ((index & 7) << 3)) & 255).to(torch.int32))


def _iq4_nl(d: Tensor, qs: Tensor) -> Numbers:
    return Numbers(_from_codebook(_nibbles(qs)), _half(d))


def _iq4_xs(d: Tensor, scales_h: Tensor, scales_l: Tensor, qs: Tensor) -> Numbers:
    high = _bits(scales_h[:, :, None], 4, 2).flatten(1)
    low = _bits(scales_l[:, :, None], 2, 4).flatten(1)
    quants = _from_codebook(_grouped(_bits(qs.reshape(-1, 8, 16), 2, 4), 8))
    return Numbers(quants, _half(d) * ((low | (high << 4)) - 32)[:, :, None])


FORMATS = {
    "BF16": BlockFormat(1, (2,), _bf16),
    "Q4_0": BlockFormat(32, (2, 16), _q4_0),
    "Q4_1": BlockFormat(32, (2, 2, 16), _q4_1),
    "Q5_0": BlockFormat(32, (2, 4, 16), _q5_0),
    "Q5_1": BlockFormat(32, (2, 2, 4, 16), _q5_1),
    "Q8_0": BlockFormat(32, (2, 32), _q8_0),
    "Q2_K": BlockFormat(256, (16, 64, 2, 2), _q2_k),
    "Q3_K": BlockFormat(256, (32, 64, 12, 2), _q3_k),
    "Q4_K": BlockFormat(256, (2, 2, 12, 128), _q4_k),
    "Q5_K": BlockFormat(256, (2, 2, 12, 32, 128), _q5_k),
    "Q6_K": BlockFormat(256, (128, 64, 16, 2), _q6_k),
    "IQ4_NL": BlockFormat(32, (2, 16), _iq4_nl),
    "IQ4_XS": BlockFormat(256, (2, 2, 4, 128), _iq4_xs),
}
