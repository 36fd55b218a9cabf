"""The sizes of the image files that a workflow loads, read from their headers. `workflow.scan` gets them from here."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths
from PIL import Image

logger = logging.getLogger(__name__)

_ORIENTATION = 0x0112  # EXIF tag; 1 is upright


def image_size(name: str) -> tuple[int, int] | None:
    """Width and height in pixels of a file as LoadImage names it ("a.png", "b.png [output]").

    None if the file is missing, outside of ComfyUI's folders or not an image, or if LoadImage may load another size or
    batch than the header says: it rotates by EXIF orientation, and an animation becomes a batch.
    """
    try:
        path = Path(folder_paths.get_annotated_filepath(name)).resolve()
        if not any(path.is_relative_to(Path(folder).resolve()) for folder in _folders()):
            return None
        with Image.open(path) as image:
            if getattr(image, "n_frames", 1) != 1 or image.getexif().get(_ORIENTATION, 1) != 1:
                return None
            width, height = image.size
            return width, height
    except Exception as error:  # Pillow raises many kinds (a truncated TIFF: TypeError); LoadImage will report the file
        logger.debug("Resolute: the size of %s cannot be read", name, exc_info=error)
        return None


def _folders() -> list[str]:
    return [
        folder_paths.get_input_directory(),
        folder_paths.get_output_directory(),
        folder_paths.get_temp_directory(),
    ]
