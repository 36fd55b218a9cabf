"""A small diffusion transformer, as the large ones are built, and its training (flow matching)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .pictures import FIELDS, SIDE, captions, draw

WIDTH, HEAD, DEPTH, PATCH = 384, 64, 16, 4
TOKENS = (SIDE // PATCH) ** 2
FEATURES = PATCH * PATCH * 3


class Block(nn.Module):
    """Attention and a feed-forward, both modulated by the time and the caption (adaLN-Zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """h: (batch, tokens, width); vector: (batch, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(vector))[:, None].chunk(6, dim=-1)
        x = F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        x = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        h = h + gate * self.out(x.transpose(1, 2).flatten(2))
        x = F.layer_norm(h, h.shape[-1:]) * (1 + scale2) + shift2
        return h + gate2 * self.narrow(F.gelu(self.wide(x), approximate="tanh"))


class Transformer(nn.Module):
    """Predicts the velocity (noise minus picture). The caption comes as tokens, and pooled with the time."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(size + 1, width) for size in FIELDS)  # the last one: no caption
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.inward, self.outward = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.place = nn.Parameter(torch.randn(TOKENS + len(FIELDS), width) * 0.02)
        self.final = nn.Linear(width, 2 * width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        for layer in (self.outward, self.final):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def begin(self, x: torch.Tensor, t: torch.Tensor, caption: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state and the modulation vector. x: (batch, 3, SIDE, SIDE); t: (batch,) from 0 (clean) to 1."""
        words = torch.stack([table(caption[:, at]) for at, table in enumerate(self.words)], dim=1)
        frequencies = torch.exp(torch.linspace(0, -9.2, 128, device=t.device))
        angles = t[:, None] * 1000 * frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=1).to(words.dtype))
        patches = F.pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)
        return torch.cat([words, self.inward(patches.to(words.dtype))], dim=1) + self.place, time + words.mean(1)

    def end(self, h: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """The velocity (batch, 3, SIDE, SIDE)."""
        shift, scale = self.final(F.silu(vector))[:, None].chunk(2, dim=-1)
        patches = self.outward(F.layer_norm(h[:, len(FIELDS) :], h.shape[-1:]) * (1 + scale) + shift)
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (SIDE // PATCH, -1)), PATCH)

    def forward(self, x: torch.Tensor, t: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
        h, vector = self.begin(x, t, caption)
        for block in self.blocks:
            h = block(h, vector)
        return self.end(h, vector)


def no_caption(like: torch.Tensor) -> torch.Tensor:
    """Captions that say nothing, as classifier-free guidance needs them."""
    return torch.tensor(FIELDS, device=like.device).expand_as(like)


def train(
    model: Transformer, seconds: float, batch: int, say: Callable[[str], None], steps: int = 10**9
) -> tuple[Transformer, dict[str, float]]:
    """Train for so long, or so many steps. Returns the averaged weights, in evaluation mode, and facts about it."""
    device = model.place.device.type
    generator = torch.Generator(device).manual_seed(1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    forward = torch.compile(model) if device == "cuda" else model
    start, done, loss = time.monotonic(), 0, torch.zeros((), device=device)
    while (gone := time.monotonic() - start) < seconds and done < steps:
        share = max(gone / seconds, done / steps)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (done + 1) / 500, (1 - share) / 0.5 + 0.01)
        caption = captions(batch, generator)
        clean = draw(caption, generator)
        dropped = torch.rand(batch, 1, generator=generator, device=device) < 0.1
        caption = torch.where(dropped, no_caption(caption), caption)
        t = torch.randn(batch, generator=generator, device=device).sigmoid()
        noise = torch.randn(clean.shape, generator=generator, device=device)
        noisy = torch.lerp(clean, noise, t.view(-1, 1, 1, 1))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.mse_loss(forward(noisy, t, caption).float(), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        done += 1
        if done % 250 == 0:
            say(f"step {done}, {gone:.0f} s, loss {loss.item():.4f}")
    trained = average.module.eval().requires_grad_(False)
    return trained, {"steps": done, "batch": batch, "seconds": time.monotonic() - start, "loss": loss.item()}
