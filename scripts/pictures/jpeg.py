"""JPEG files of the best quality that fits a size."""

from __future__ import annotations

import io

from PIL import Image


def smallest_loss(picture: Image.Image, most_bytes: int) -> bytes:
    """The picture with the best quality of which at most ``most_bytes`` result; with quality 32 if none does."""
    data = io.BytesIO()
    for quality in range(92, 30, -4):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality, optimize=True)
        if len(data.getvalue()) <= most_bytes:
            break
    return data.getvalue()
