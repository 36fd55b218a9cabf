"""A block is cut where it runs other code: what its shares and that code give is what the block gives."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

X = torch.linspace(-1, 2, 24).reshape(2, 3, 4)


class Experts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x > 0] *= 2
        return x


class Inner(torch.nn.Module):
    """Parts in the order in which `forward` calls them, unless `order` says otherwise."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4, elementwise_affine=False)
        self.attention = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.experts = Experts()
        self.last = torch.nn.Linear(4, 4)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.last(x) if self.order == "last first" else self.gate(x)
        if self.order == "result changed before the cut":
            gate *= 2
        x = x + gate * self.attention(self.norm(x))
        if self.order == "attention twice":
            x = self.attention(x)
        if self.order == "never":
            return x
        made = self.experts(self.norm(x))
        if self.order == "experts twice":
            made = self.experts(self.attention(made))
        if self.order == "gate again":
            gate = self.gate(made)
        if self.order == "result changed after the cut":
            gate *= 2
        return x + gate * self.last(made)


class Routed(torch.nn.Module):
    def __init__(self, order: str = "") -> None:
        super().__init__()
        self.block = Inner(order)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


class Patched(torch.nn.Module):
    """It calls patches as blocks of core do: with a copy of its options, in which it puts a size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: Any = None, transformer_options: Any = None) -> Any:
        patches, own = transformer_options.get("patches", {}), transformer_options.copy()
        q, k = self.first(x).chunk(2, dim=-1)
        own["img_slice"] = [1, x.shape[1]]
        if "attn1_patch" in patches:
            for patch in patches["attn1_patch"]:
                out = patch(q, k, mask=mask, extra_options=own)
                q, k = out.get("q", q), out.get("k", k)
        y = q * k
        for patch in patches.get("attn1_output_patch", []):
            y = patch(y, own)
        x += self.last(y)
        return x


class Remembers:
    """As FluxKVCache does, it does something else at each call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, mask: Any, extra_options: Any) -> dict[str, Any]:
        assert type(extra_options) is dict
        self.seen.append(extra_options)
        return {"q": q + len(self.seen)} if len(self.seen) != 2 else {}


class Changes:
    """As NAG does, it writes into what it returns."""

    def __call__(self, y: torch.Tensor, extra_options: Any) -> torch.Tensor:
        start, end = extra_options["img_slice"]
        y[:, start:end] *= 3
        return y


@pytest.fixture
def forward(
    comfy: None, adapter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """Replace the forward of a block. `forward(block)` returns the new one, which notes sites in `sites`, and raises
    `UnusableArgumentError` at the site with the number `fails`; with "missing", that its first share lacks code.
    """
    monkeypatch.setattr(adapter("blocks.transformers.shares"), "is_routed", lambda kind: kind is Experts)
    monkeypatch.setattr(
        adapter("blocks.transformers.options"), "is_patch_of_core", lambda each: type(each) in (Remembers, Changes)
    )
    module, unusable = adapter("blocks.transformers.block_forward"), adapter("blocks.common").UnusableArgumentError

    def stand_in(block: torch.nn.Module, sites: list[Any], fails: int | str = -1) -> Any:
        def run(site: Any, *inputs: torch.Tensor) -> Any:
            if fails == "missing" and site.begins_block:
                raise module.StillMissingError
            if len(sites) == fails:
                raise unusable("it fails")
            sites.append(site)
            return site.function(site.module, *inputs)

        module._learned.cache_clear()
        return module.RecognisedBlock("blocks.0", block, run, lambda reason: None, "of this test")

    return stand_in


@pytest.mark.parametrize(
    ("order", "kinds", "idle"),
    [
        ("", [".enter", ".exit"], [{"last"}, {"gate", "attention"}]),
        ("never", [""], []),
        ("attention twice", [".enter", ".exit"], [{"last"}, {"gate"}]),
        ("gate again", [".enter", ".exit"], [{"last"}, {"attention"}]),
        ("last first", [".enter", ".exit"], [{"gate"}, {"gate", "attention"}]),
        ("result changed before the cut", [".enter", ".exit"], [{"last"}, {"gate", "attention"}]),
        ("result changed after the cut", [".enter", ".exit"], [{"last"}, {"gate", "attention"}]),
        ("experts twice", [".enter", ".between", ".exit"], [{"last"}, {"gate", "last"}, {"gate"}]),
    ],
)
def test_a_routed_block_in_any_order_gives_what_it_gives_whole(
    forward: Any, order: str, kinds: list[str], idle: list[set[str]]
) -> None:
    block, sites = Routed(order), []
    runs, before = forward(block, sites), dict(block.named_modules())
    for x in (X, X * 2, X[:1]):
        sites.clear()
        assert torch.equal(runs(x), block(x))
        assert [site.kind for site in sites] == [f"Routed{kind}" for kind in kinds]
        for site, without in zip(sites, idle, strict=False):
            assert set(site.without) >= {f"block.{name}" for name in without}
    assert dict(block.named_modules()) == before


PATCHES: list[dict[str, list[type]]] = [
    {"attn1_patch": [Remembers]}, {"attn1_output_patch": [Changes]}, {"attn1_patch": [Remembers, Remembers]},
    {"attn1_patch": [Remembers], "attn1_output_patch": [Changes, Changes]}, {},
]  # fmt: skip


@pytest.mark.parametrize("kinds", PATCHES, ids=repr)
@pytest.mark.parametrize("fails", [-1, 0, 1, 2, "missing"])
def test_a_patched_block_gives_what_it_gives_whole_and_each_patch_runs_once(
    forward: Any, kinds: dict[str, list[type]], fails: int | str
) -> None:
    block, sites = Patched(), []
    ours, stocks = (
        {"patches": {kind: [each() for each in classes] for kind, classes in kinds.items()}, "uuids": ["a"]}
        for _ in range(2)
    )
    runs = forward(block, sites, fails)
    for x in (X, X * 2, X[:1], torch.cat([X, X], dim=1)):
        sites.clear()
        expected = block(x.clone(), transformer_options=stocks)
        assert torch.equal(runs(x.clone(), transformer_options=ours), expected)
        cuts = sum(map(len, kinds.values()))
        most = (0 if cuts else 1) if fails == "missing" else fails
        assert len(sites) == (min(most, cuts + 1) if most >= 0 else cuts + 1)
    for patch, other in zip(*(each["patches"].get("attn1_patch", []) for each in (ours, stocks)), strict=True):
        assert [{**seen, "patches": 0} for seen in patch.seen] == [{**seen, "patches": 0} for seen in other.seen]


def test_another_packs_patch_makes_the_block_run_eagerly(forward: Any) -> None:
    block, sites = Patched(), []
    options = {"patches": {"attn1_output_patch": [lambda y, extra_options: y * 2]}}
    assert torch.equal(
        forward(block, sites)(X.clone(), transformer_options=options), block(X.clone(), transformer_options=options)
    )
    assert sites == []
