"""Blocks of GGUF's Q4_K: the package gguf cannot quantize to it."""

from __future__ import annotations

import torch


def q4_k(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of Q4_K, (blocks, 144 bytes): 256 numbers in eight groups, each with a scale and a minimum.

    From the smallest to the largest number of a group, without the search for a better fit that llama.cpp does.
    """
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
