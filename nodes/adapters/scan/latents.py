"""Rules for nodes that output latents. Sizes are in latent pixels here (1 latent pixel = 8 image pixels)."""

from __future__ import annotations

from ....compile_cache.errors import excerpt
from .node import Latent, Node, Outputs, Value
from .numbers import SCALE_FACTOR, images_from_batch, numbered_links, rotated_sides, slice_length


def empty(node: Node) -> Value:
    return Latent(
        node.integer("width") // SCALE_FACTOR, node.integer("height") // SCALE_FACTOR, node.integer("batch_size", 1)
    )


def sampled(node: Node) -> Outputs:
    """Samplers do not change the shape. The custom samplers have two outputs, both of this shape."""
    latent = node.latent("latent_image")
    return latent, latent


def encoded(node: Node) -> Value:
    """A VAE crops the image to whole latent pixels."""
    image = node.image("pixels")
    return Latent(image.width // SCALE_FACTOR, image.height // SCALE_FACTOR, image.batch)


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
    return Latent(max(64, width) // SCALE_FACTOR, max(64, height) // SCALE_FACTOR, latent.batch)


def upscaled_by(node: Node) -> Value:
    latent, factor = node.latent("samples"), node.number("scale_by")
    return Latent(round(latent.width * factor), round(latent.height * factor), latent.batch)


def cropped(node: Node) -> Value:
    latent = node.latent("samples")
    width, height = (
        slice_length(side, min(node.integer(at) // SCALE_FACTOR, side - 8), node.integer(name) // SCALE_FACTOR)
        for side, at, name in ((latent.width, "x", "width"), (latent.height, "y", "height"))
    )
    return Latent(width, height, latent.batch)


def cut(node: Node) -> Value:
    latent, side = node.latent("samples"), node.text("dim")
    index, amount = node.integer("index"), node.integer("amount")
    if side not in ("x", "y"):
        raise node.unknown(f"it cuts along '{excerpt(side)}', and Resolute knows only x and y")
    whole = latent.width if side == "x" else latent.height
    left = min(whole - min(index, whole - 1), amount) if index >= 0 else min(-max(index, -whole), amount)
    return Latent(left, latent.height, latent.batch) if side == "x" else Latent(latent.width, left, latent.batch)


def joined(node: Node) -> Value:
    first, second, side = node.latent("samples1"), node.latent("samples2"), node.text("dim").lstrip("-")
    if side not in ("x", "y"):
        raise node.unknown(f"it joins along '{excerpt(side)}', and Resolute knows only x and y")
    width = first.width + (second.width if side == "x" else 0)
    return Latent(width, first.height + (second.height if side == "y" else 0), first.batch)


def rotated(node: Node) -> Value:
    latent = node.latent("samples")
    return Latent(*rotated_sides(latent.width, latent.height, node.text("rotation")), latent.batch)


def from_batch(node: Node) -> Value:
    latent = node.latent("samples")
    return Latent(latent.width, latent.height, images_from_batch(node, latent.batch))


def repeated(node: Node) -> Value:
    latent = node.latent("samples")
    return Latent(latent.width, latent.height, latent.batch * node.integer("amount"))


def two_in_batch(node: Node) -> Value:
    first, second = node.latent("samples1"), node.latent("samples2")
    return Latent(first.width, first.height, first.batch + second.batch)


def all_in_batch(node: Node) -> Value:
    latents = [node.latent(name) for name in numbered_links(node)]
    return Latent(latents[0].width, latents[0].height, sum(latent.batch for latent in latents))


def blended(node: Node) -> Value:
    first, second = node.latent("samples1"), node.latent("samples2")
    return Latent(first.width, first.height, max(first.batch, second.batch))
