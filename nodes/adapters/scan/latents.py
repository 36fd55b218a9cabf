"""Rules for nodes that output latents. Sizes are in cells here, see `latent_cells`."""

from __future__ import annotations

from dataclasses import replace

from ....compile_cache.errors import excerpt
from ..comfyui import latent_cells
from .node import Latent, Node, Outputs, Value
from .numbers import images_from_batch, numbered_links, rotated_sides, slice_length

_LEAST_CROP = 8  # cells


def empty(node: Node) -> Value:
    return _made(node, node.integer("batch_size", 1))


def empty_video(node: Node) -> Value:
    return replace(_made(node, node.integer("batch_size", 1)), is_video=True)


def video_from_image(node: Node) -> Outputs:
    return None, None, empty_video(node)


def wan22_video(node: Node) -> Value:
    """Without a picture to start from, core's node makes one video, whatever its batch size."""
    return replace(_made(node, node.integer("batch_size", 1) if "start_image" in node.links() else 1), is_video=True)


def minimax_video(node: Node) -> Value:
    """Core's MiniMax H3 nodes make one video, with its sound. They have no batch size."""
    return replace(_made(node, 1), is_video=True)


def minimax_video_from_image(node: Node) -> Outputs:
    return None, minimax_video(node)


def without_sound(node: Node) -> Outputs:
    """The video keeps its size. The sound has none."""
    return node.latent("av_latent"), None


def without_guides(node: Node) -> Outputs:
    """Core's node removes frames only."""
    return None, None, node.latent("latent")


def by_upscale_model(node: Node) -> Value:
    """The file of the upscale model decides: it may scale the sides by 0.75, 1.5, 2 or 4, or add frames only."""
    raise node.unknown("its scale is known only when the upscale model is loaded")


def _made(node: Node, batch: int) -> Latent:
    cell = latent_cells.of_node(node.class_type)
    return Latent(node.integer("width") // cell, node.integer("height") // cell, batch, cell)


def sampled(node: Node) -> Outputs:
    """Samplers do not change the shape. The custom samplers have two outputs, both of this shape."""
    latent = node.latent("latent_image")
    return latent, latent


def encoded(node: Node) -> Value:
    """A VAE crops the image to whole cells."""
    image, cell = node.image("pixels"), latent_cells.DEFAULT
    return Latent(image.width // cell, image.height // cell, image.batch)


def for_inpainting(node: Node) -> Outputs:
    return None, None, encoded(node)


def upscaled(node: Node) -> Value:
    latent, width, height = node.latent("samples"), node.integer("width"), node.integer("height")
    if width == 0 and height == 0:
        return latent
    if width == 0:
        height = max(64, height)
        width = round(latent.width * height / latent.height)
    elif height == 0:
        width = max(64, width)
        height = round(latent.height * width / latent.width)
    # Core counts with the default, whatever the model.
    return replace(latent, width=max(64, width) // latent_cells.DEFAULT, height=max(64, height) // latent_cells.DEFAULT)


def upscaled_by(node: Node) -> Value:
    latent, factor = node.latent("samples"), node.number("scale_by")
    return replace(latent, width=round(latent.width * factor), height=round(latent.height * factor))


def cropped(node: Node) -> Value:
    latent, cell = node.latent("samples"), latent_cells.DEFAULT
    width, height = (
        slice_length(side, min(node.integer(at) // cell, side - _LEAST_CROP), node.integer(name) // cell)
        for side, at, name in ((latent.width, "x", "width"), (latent.height, "y", "height"))
    )
    return replace(latent, width=width, height=height)


def cut(node: Node) -> Value:
    latent, side = node.latent("samples"), node.text("dim")
    index, amount = node.integer("index"), node.integer("amount")
    if side not in ("x", "y"):
        raise node.unknown(f"it cuts along '{excerpt(side)}', and Resolute knows only x and y")
    whole = latent.width if side == "x" else latent.height
    left = min(whole - min(index, whole - 1), amount) if index >= 0 else min(-max(index, -whole), amount)
    return replace(latent, width=left) if side == "x" else replace(latent, height=left)


def joined(node: Node) -> Value:
    first, second, side = node.latent("samples1"), node.latent("samples2"), node.text("dim").lstrip("-")
    if side not in ("x", "y"):
        raise node.unknown(f"it joins along '{excerpt(side)}', and Resolute knows only x and y")
    width = first.width + (second.width if side == "x" else 0)
    return replace(first, width=width, height=first.height + (second.height if side == "y" else 0))


def rotated(node: Node) -> Value:
    latent = node.latent("samples")
    width, height = rotated_sides(latent.width, latent.height, node.text("rotation"))
    return replace(latent, width=width, height=height)


def from_batch(node: Node) -> Value:
    latent = node.latent("samples")
    return replace(latent, batch=images_from_batch(node, latent.batch))


def repeated(node: Node) -> Value:
    latent = node.latent("samples")
    return replace(latent, batch=latent.batch * node.integer("amount"))


def two_in_batch(node: Node) -> Value:
    first, second = node.latent("samples1"), node.latent("samples2")
    return replace(first, batch=first.batch + second.batch)


def all_in_batch(node: Node) -> Value:
    latents = [node.latent(name) for name in numbered_links(node)]
    return replace(latents[0], batch=sum(latent.batch for latent in latents))


def blended(node: Node) -> Value:
    first, second = node.latent("samples1"), node.latent("samples2")
    return replace(first, batch=max(first.batch, second.batch))
