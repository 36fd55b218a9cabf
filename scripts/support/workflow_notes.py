"""What the note in each bundled workflow says, in Markdown."""

from __future__ import annotations

_TEXT_TO_IMAGE_NOTE = """## Text to image, compiled
1. Choose your checkpoint.
2. Queue. The first run compiles; the node shows how far it is.
3. Change `preset` in **Resolution** and queue again: nothing compiles, whatever the size.

The cyan nodes are all that was added to ComfyUI's own graph."""
NOTES = {
    "sd15_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "sdxl_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "oneflow_text_to_image": """## Text to image through OneFlow
1. This needs Python 3.10 with `requirements-oneflow.txt` installed, and an RTX 20, 30 or 40. Otherwise choose `auto`.
2. Choose your checkpoint and queue. OneFlow builds a graph for this size, after the first step and the first decode.
3. Another size builds its own; a size that was there before builds nothing, until ComfyUI restarts.""",
    "resolution_tour": """## One model, five sizes
1. Choose your checkpoint in **Load Checkpoint (Compiled)** and queue.
2. The first size compiles. The other four compile **nothing**: they share its blocks.
3. **Graph Cache Report** at the bottom right lists each size with its compiles, replays and stalls.""",
    "image_to_image": """## Image to image, compiled
1. Choose your checkpoint and a picture.
2. Queue. The first run compiles; the node shows how far it is.
3. Change `preset` in **Resolution**, or `denoise`, and queue again: nothing compiles.""",
    "deepcache": """## Deep blocks on every third step
1. Choose your checkpoint and queue.
2. **DeepCache** says what it does: "20 steps: 7 full, 13 fast, about 1.8x".
3. Change `interval` or `depth` and queue again: faster, or closer to the picture without it. Nothing compiles.
4. It goes before or after **Compile Model**, and works without it.""",
    "deepcache_controlnet": """## DeepCache with a ControlNet
1. Choose your checkpoint, a ControlNet for edges, and a picture.
2. Queue. The fast steps take the residuals of just those blocks that they run.
3. Change `start_percent` or `end_percent` of the ControlNet: nothing compiles.""",
    "lcm_image_to_image": """## Image to image with LCM, three shapes, and why DeepCache stands aside
1. Choose an SDXL checkpoint, its LCM LoRA, and a picture.
2. Queue. The first shape compiles, the other two compile **nothing**.
3. **DeepCache** says "6 steps, all full: 8 steps or fewer leave nothing to skip". With 9 `steps` or more it starts.""",
    "compare_with_stock": """## The same seed, compiled and not
1. Choose your checkpoint.
2. Queue. The upper row samples and decodes compiled, the lower one is stock ComfyUI.
3. **Compare Images** tells how far the two are apart, and where. On a GPU half precision rounds.
4. Set `min_psnr`, for example to 30: then the prompt fails if the pictures are further apart.""",
}
