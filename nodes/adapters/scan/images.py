"""Rules for nodes that output images. Sizes are in image pixels here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ....compile_cache.errors import excerpt
from .node import Image, Node, Outputs, UnsizedImage, Value
from .numbers import images_from_batch, numbered_links, rotated_sides, scaled_sides, slice_length

# The sizes that core's FluxKontextImageScale knows, the narrowest first.
_KONTEXT_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip


def decoded(node: Node) -> Value:
    latent = node.latent("samples")
    if latent.is_video:
        raise node.unknown("how many frames a video has is known only when it is decoded")
    return Image(latent.pixels.width, latent.pixels.height, latent.batch)


def loaded(node: Node) -> Outputs:
    size = node.image_size(node.text("image")) if node.image_size is not None else None
    if size is None:
        raise node.unknown("the size of its image is known only when the file is loaded")
    return Image(*size), None


def empty(node: Node) -> Value:
    return Image(node.integer("width"), node.integer("height"), node.integer("batch_size", 1))


def scaled(node: Node) -> Value:
    return _scaled(node, "image", node.integer("width"), node.integer("height"))


def scaled_by(node: Node) -> Value:
    return _times(node.image("image"), node.number("scale_by"))


def scaled_to_pixels(node: Node) -> Value:
    image, steps = node.image("image"), node.integer("resolution_steps", 1)
    factor = math.sqrt(node.number("megapixels") * 1024 * 1024 / (image.width * image.height))
    width, height = (round(side * factor / steps) * steps for side in (image.width, image.height))
    return Image(width, height, image.batch)


def scaled_for_kontext(node: Node) -> Value:
    """The size of FLUX.1 Kontext whose aspect ratio is nearest to the image's."""
    image = node.image("image")
    aspect = image.width / image.height
    width, height = min(_KONTEXT_SIZES, key=lambda size: (abs(aspect - size[0] / size[1]), size))
    return Image(width, height, image.batch)


def scaled_to_longer_side(node: Node) -> Value:
    return _with_longer_side(node.image("image"), node.integer("largest_size"))


def resized(node: Node) -> Value:
    """Core's Resize Image/Mask for images, with one rule for each `resize_type`."""
    resize_type = node.text("resize_type")
    if resize_type not in _RESIZE_TYPES:
        raise node.unknown(f"Resolute does not know the resize type '{excerpt(resize_type)}'")
    return _RESIZE_TYPES[resize_type](node)


def cropped(node: Node) -> Value:
    image = node.image("image")
    width = slice_length(image.width, min(node.integer("x"), image.width - 1), node.integer("width"))
    height = slice_length(image.height, min(node.integer("y"), image.height - 1), node.integer("height"))
    return Image(width, height, image.batch)


def padded(node: Node) -> Outputs:
    image = node.image("image")
    width = image.width + node.integer("left") + node.integer("right")
    return Image(width, image.height + node.integer("top") + node.integer("bottom"), image.batch), None


def padded_to_size(node: Node) -> Value:
    return Image(node.integer("target_width"), node.integer("target_height"), node.image_batch("image"))


def rotated(node: Node) -> Value:
    image = node.image("image")
    return Image(*rotated_sides(image.width, image.height, node.text("rotation")), image.batch)


def two_in_batch(node: Node) -> Value:
    first, second = node.image("image1"), node.image("image2")
    return Image(first.width, first.height, first.batch + second.batch)


def all_in_batch(node: Node) -> Value:
    images = [node.image(name) for name in numbered_links(node)]
    return Image(images[0].width, images[0].height, sum(image.batch for image in images))


def repeated(node: Node) -> Value:
    image = node.image("image")
    return Image(image.width, image.height, image.batch * node.integer("amount"))


def from_batch(node: Node) -> Value:
    image = node.image("image")
    return Image(image.width, image.height, images_from_batch(node, image.batch))


def by_upscale_model(node: Node) -> Value:
    why = str(node.unknown("its scale is known only when the upscale model is loaded"))
    return UnsizedImage(node.image_batch("image"), why)


def _scaled(node: Node, name: str, width: int, height: int) -> Image:
    """If both sides are given, the size of the input does not matter and need not be known."""
    if width and height:
        return Image(width, height, node.image_batch(name))
    image = node.image(name)
    return Image(*scaled_sides(image, width, height), image.batch)


def _times(image: Image, factor: float) -> Image:
    return Image(round(image.width * factor), round(image.height * factor), image.batch)


def _with_longer_side(image: Image, side: int) -> Image:
    if image.height > image.width:
        return Image(round((image.width / image.height) * side), side, image.batch)
    return Image(side, round((image.height / image.width) * side), image.batch)


def _with_shorter_side(image: Image, side: int) -> Image:
    if image.height < image.width:
        return Image(round((image.width / image.height) * side), side, image.batch)
    return Image(side, round((image.height / image.width) * side), image.batch)


def _with_pixels(image: Image, megapixels: float) -> Image:
    return _times(image, math.sqrt(int(megapixels * 1024 * 1024) / (image.width * image.height)))


def _with_multiple(image: Image, multiple: int) -> Image:
    width, height = (side // max(1, multiple) * max(1, multiple) for side in (image.width, image.height))
    return image if 0 in (width, height) else Image(width, height, image.batch)


# ComfyUI names the inputs of a chosen resize_type "resize_type.NAME".
_RESIZE_TYPES: Mapping[str, Callable[[Node], Image]] = {
    "match size": lambda node: _scaled(
        node, "input", node.image("resize_type.match").width, node.image("resize_type.match").height
    ),
    "scale by multiplier": lambda node: _times(node.image("input"), node.number("resize_type.multiplier")),
    "scale dimensions": lambda node: _scaled(
        node, "input", node.integer("resize_type.width"), node.integer("resize_type.height")
    ),
    "scale height": lambda node: _scaled(node, "input", 0, node.integer("resize_type.height")),
    "scale longer dimension": lambda node: _with_longer_side(
        node.image("input"), node.integer("resize_type.longer_size")
    ),
    "scale shorter dimension": lambda node: _with_shorter_side(
        node.image("input"), node.integer("resize_type.shorter_size")
    ),
    "scale to multiple": lambda node: _with_multiple(node.image("input"), node.integer("resize_type.multiple")),
    "scale total pixels": lambda node: _with_pixels(node.image("input"), node.number("resize_type.megapixels")),
    "scale width": lambda node: _scaled(node, "input", node.integer("resize_type.width"), 0),
}
