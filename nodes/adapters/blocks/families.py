"""The hooks of a model: the blocks that become regions, without those that the user leaves out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ....compile_cache.errors import BypassCode, BypassReason, UserError, excerpt
from ....compile_cache.keys import VAE_ROLES, Role
from ....compile_cache.modules.site import Bypass, Hook, RegionRunner
from ..comfyui import chosen_attention
from ..trust.trust import trusted_hooks
from . import vaes
from .transformers import recognise
from .unets import unet

logger = logging.getLogger(__name__)


def hooks_of(module: torch.nn.Module, role: Role, run: RegionRunner, bypass: Bypass) -> list[Hook]:
    """The hooks of a module in a role. A block gets a bypass instead if another pack wrote a part of it, or if its
    attention is unknown to core or chosen by the model's file.
    """
    if role in VAE_ROLES:
        coder = vaes.coder_of(module, role)
        found = [] if coder is None else coder.hooks(module, run, bypass)
    else:
        if chosen_attention.default() is None:
            text = f"{chosen_attention.why_unknown({})}; transformer blocks run eagerly"
            bypass(BypassReason(BypassCode.REPLACED_FORWARD, text))
        found = [*unet.hooks(module, run, bypass), *recognise.hooks(module, run, bypass)]
    return [hook for hook in trusted_hooks(found, bypass) if not _has_own_attention(hook, bypass)]


def _has_own_attention(hook: Hook, bypass: Bypass) -> bool:
    name = chosen_attention.of_file(hook.module)
    if name:
        kind = hook.labels[0][0].partition(".")[0]
        text = f"the model's file chooses the attention of {kind} blocks ({name}); they run eagerly"
        bypass(BypassReason(BypassCode.PATCHED_BLOCK, text))
    return bool(name)


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text, separated by commas or line ends; sorted, so that their order does not matter."""
    return tuple(sorted({name.strip() for name in text.replace("\n", ",").split(",")} - {""}))


def require_known(names: Sequence[str], hooks: Sequence[Hook], reasons: Sequence[BypassReason] = ()) -> None:
    """Raise UserError, which lists the known names, if one of `names` is neither a kind nor a place of `hooks`.

    reasons: why blocks have no hook. If there is one besides `leave_out`, an unknown name may belong to such a block,
    which runs eagerly anyway, so the name is only logged.
    """
    labels = [label for hook in hooks for label in hook.labels]
    unknown = [name for name in names if not any(_is_named(label, name) for label in labels)]
    if not unknown:
        return
    given = ", ".join(f"'{excerpt(name)}'" for name in unknown[:3])
    hidden = next((reason.detail for reason in reasons if reason.code is not BypassCode.LEFT_OUT), None)
    if hidden is not None:
        logger.info("Resolute: leave_out has %s, which no block has that is compiled now: %s", given, hidden)
        return
    if not labels:
        raise UserError(f"leave_out has {given}, but this model has no block that Resolute compiles: empty leave_out.")
    kinds = sorted({kind.partition(".")[0] for kind, _ in labels})
    places = sorted({place.partition(".")[0] for _, place in labels})
    raise UserError(
        f"leave_out has {given}, which this model does not have. It has the kinds {', '.join(kinds)} and the places "
        f"{', '.join(places)}; a longer place names one block, as {max((place for _, place in labels), key=len)}."
    )


def without(names: Sequence[str], hooks: Sequence[Hook], bypass: Bypass) -> list[Hook]:
    """The hooks except those of the named blocks, which get a bypass."""
    kept = [hook for hook in hooks if not any(_is_named(label, name) for label in hook.labels for name in names)]
    if len(kept) < len(hooks):
        blocks = f"{len(hooks) - len(kept)} of {len(hooks)} blocks"
        bypass(BypassReason(BypassCode.LEFT_OUT, f"you left out {', '.join(names)}: {blocks} run eagerly"))
    return kept


def _is_named(label: tuple[str, str], name: str) -> bool:
    return any(known == name or known.startswith(f"{name}.") for known in label)
