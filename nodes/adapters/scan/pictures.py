"""The sizes of the pictures that a workflow loads, for `scan`: read from the headers of files in ComfyUI's folders."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths
from PIL import Image

logger = logging.getLogger(__name__)

_ORIENTATION = 0x0112  # EXIF; 1 is upright


def image_size(name: str) -> tuple[int, int] | None:
    """Width and height in pixels of what LoadImage was given ("a.png", "b.png [output]").

    None for a file that is missing, outside of ComfyUI's folders, no picture, or one that LoadImage may turn or read as
    several (EXIF, animations).
    """
    try:
        path = Path(folder_paths.get_annotated_filepath(name)).resolve()
        if not any(path.is_relative_to(Path(folder).resolve()) for folder in _folders()):
            return None
        with Image.open(path) as picture:
            if getattr(picture, "n_frames", 1) != 1 or picture.getexif().get(_ORIENTATION, 1) != 1:
                return None
            width, height = picture.size
            return width, height
    except Exception as error:  # a truncated TIFF raises a TypeError; LoadImage itself will say what is wrong with it
        logger.debug("Resolute: %s has no size that can be read", name, exc_info=error)
        return None


def _folders() -> list[str]:
    return [
        folder_paths.get_input_directory(),
        folder_paths.get_output_directory(),
        folder_paths.get_temp_directory(),
    ]
