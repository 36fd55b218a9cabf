"""The Markdown note of each bundled workflow.

No inline code: Nodes 2.0 draws it in blue on the note's brown, which is hard to read.
"""

from __future__ import annotations

# Which families a step-1 sentence names: those that docs/families.md calls catalogued.
_WITH_THIS_LOADER = "SD1.5, SD2, SDXL or SD3"
_UNETS = "SD1.5, SD2 or SDXL"

_TEXT_TO_IMAGE_NOTE = f"""## Text to image, compiled
1. Choose your checkpoint: {_WITH_THIS_LOADER}. With their own loaders: Flux, Qwen-Image, Z-Image, Wan, LTX and more.
2. Press **Run**. The first run compiles, and the node shows its progress.
3. Change **preset** in **Resolution** and run again: nothing compiles, at any size.

The cyan nodes are the only ones added to ComfyUI's own graph."""
NOTES = {
    "sd15_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "sdxl_text_to_image": _TEXT_TO_IMAGE_NOTE,
    "oneflow_text_to_image": """## Text to image with OneFlow
1. Choose your checkpoint: SD1.5 or SDXL. It needs Python 3.10, **requirements-oneflow.txt** and an RTX 20, 30 or 40.
2. Press **Run**. OneFlow builds a graph for this size after the first step and the first decode.
3. Each new size builds its own graph. It stays until ComfyUI restarts, so the same size builds nothing again.""",
    "resolution_tour": f"""## One model, five sizes
1. Choose your checkpoint in **Load Checkpoint (Compiled)**: {_WITH_THIS_LOADER}. Press **Run**.
2. The first size compiles. The other four compile **nothing**: they use the same compiled blocks.
3. **Graph Cache Report** on the right shows compiles, captures and stalls, and the replays of each size.""",
    "image_to_image": f"""## Image to image, compiled
1. Choose your checkpoint ({_WITH_THIS_LOADER}) and an image.
2. Press **Run**. The first run compiles, and the node shows its progress.
3. Change **preset** in **Resolution**, or **denoise**, and run again: nothing compiles.""",
    "deepcache": f"""## Run the deep blocks on every third step only
1. Choose your checkpoint, which must be a UNet: {_UNETS}. Press **Run**.
2. **DeepCache** shows what it does: "20 steps: 7 full, 13 fast, about 1.8x".
3. Change **interval** or **depth** and run again: it gets faster, or closer to the full model. Nothing compiles.
4. You can put it before or after **Compile Model**, or use it without.""",
    "deepcache_controlnet": f"""## DeepCache with a ControlNet
1. Choose your checkpoint ({_UNETS}), a ControlNet for edges of the same family, and an image.
2. Press **Run**. A fast step uses the ControlNet's residuals only for the blocks that it runs.
3. Change **start_percent** or **end_percent** of the ControlNet and run again: nothing compiles.""",
    "lcm_image_to_image": """## Image to image with LCM in three shapes, and why DeepCache skips nothing here
1. Choose an SDXL checkpoint, its LCM LoRA, and an image.
2. Press **Run**. The first shape compiles, the other two compile **nothing**.
3. **DeepCache** shows "6 steps, all full: 8 steps or fewer leave nothing to skip". From 9 **steps** on it skips.""",
    "compare_with_stock": f"""## The same seed, compiled and not
1. Choose your checkpoint: {_WITH_THIS_LOADER}.
2. Press **Run**. One frame samples and decodes compiled, the other one is stock ComfyUI.
3. **Compare Images** shows both times, how much the two images differ, and where. Half precision rounds differently.
4. Set **min_psnr**, for example to 30: the prompt then fails if the images differ more.""",
}
