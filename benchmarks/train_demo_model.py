"""Trains the demo's model: a VAE, then a UNet on its latents, with images that it draws itself.

    python -m benchmarks.train_demo_model --out FOLDER [--vae-minutes 1.4 --encode-minutes 0.4 --unet-minutes 3.2]
    python -m benchmarks.train_demo_model --out FOLDER --smoke   (a short run on the CPU that learns nothing)

Writes demo_unet.safetensors and demo_vae.safetensors (half precision), example.png (a drawn image for image-to-image),
training.json, and samples.png (images that ComfyUI samples with the two files, loaded as in the demo). Needs torch,
Pillow and ComfyUI's modules (COMFYUI_PATH or `.comfyui`); uses CUDA if available.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEED = 1
# In pixels. The VAE trains on many small images, the UNet on every size of the demo and sizes in between.
VAE_SIZES = [(128, 128), (192, 128), (128, 192), (256, 256)]
UNET_SIZES = [
    (128, 128), (192, 128), (128, 192), (192, 192), (256, 192), (192, 256), (256, 256), (264, 200), (200, 264),
    (240, 320), (320, 240), (240, 360), (360, 240), (384, 384), (512, 384), (384, 512), (512, 512),
]  # fmt: skip
SMALL_SIZES = [(128, 128), (192, 128), (128, 192)]
SAMPLE_SIZES = [(128, 128), (192, 128), (264, 200), (256, 256), (240, 360)]
CAPTIONS = [
    "large red circle left, white background",
    "small blue square right, grey background",
    "large green triangle top, black background",
    "large yellow diamond bottom, grey background",
    "large purple ring centre, white background",
    "small orange cross left, black background",
    "large blue circle left, small red square right, white background",
    "small yellow triangle top, large purple cross bottom, black background",
    "large ring",
    "",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--vae-minutes", type=float, default=1.4)
    parser.add_argument("--encode-minutes", type=float, default=0.4)
    parser.add_argument("--unet-minutes", type=float, default=3.2)
    parser.add_argument("--vae-rate", type=float, default=1e-3, help="the VAE's largest learning rate")
    parser.add_argument("--unet-rate", type=float, default=1.5e-3, help="the UNet's largest learning rate")
    parser.add_argument("--pixels", type=int, default=1_600_000, help="pixels in a batch of the VAE")
    parser.add_argument("--positions", type=int, default=500_000, help="latent positions in a batch of the UNet")
    parser.add_argument("--most", type=int, default=768, help="maximum number of images in a batch of the UNet")
    parser.add_argument("--small", action="store_true", help="train only on the three smallest sizes, for a CPU")
    parser.add_argument("--vae", type=Path, metavar="FILE", help="use this VAE and train only the UNet")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, on the CPU")
    options = parser.parse_args()
    if options.smoke:
        options.vae_minutes = options.encode_minutes = options.unet_minutes = 0.05
        options.pixels, options.positions, options.small = 40_000, 2_000, True
    return options


def say(text: str) -> None:
    print(text, flush=True)


def import_comfyui(cpu: bool) -> None:
    """Make ComfyUI's modules importable. ComfyUI reads its options from sys.argv, so remove ours."""
    sys.argv = sys.argv[:1]
    sys.path.insert(0, os.environ.get("COMFYUI_PATH") or str(ROOT / ".comfyui"))
    import comfy.cli_args

    comfy.cli_args.args.cpu = cpu
    comfy.cli_args.args.use_pytorch_cross_attention = True


def save(state: dict[str, Any], path: Path) -> None:
    import safetensors.torch
    import torch

    half = {name: weight.detach().to("cpu", torch.float16).contiguous() for name, weight in state.items()}
    safetensors.torch.save_file(half, path)
    say(f"Wrote {path.name}: {path.stat().st_size / 1e6:.2f} MB.")


def train_vae(options: argparse.Namespace, device: Any, generator: Any, scale: float) -> tuple[Any, dict[str, Any]]:
    """The trained VAE, in evaluation mode and with normalised latents, and its entry in training.json."""
    import torch

    from . import demo_training as training
    from . import pictures

    vae = training.new_vae(device, generator)
    if options.vae is not None:
        import comfy.utils

        vae.load_state_dict(comfy.utils.load_torch_file(str(options.vae)))
        return vae.eval(), {"taken from": options.vae.name}
    sizes = SMALL_SIZES if options.small else VAE_SIZES
    losses = training.vae_losses(vae, sizes, options.pixels, device)
    log = training.learn("VAE", list(vae.parameters()), options.vae_minutes, options.vae_rate, losses, say)
    vae.eval()
    count = 8 if options.smoke else 128
    x = torch.cat([pictures.draw(pictures.scenes(10_000_000 + n, count, n), 192, 128, device) for n in (1, 2)])
    about = training.normalise(vae, training.encode(vae, x), scale)
    with torch.no_grad():
        decoded = vae.decoder(vae.post_quant_conv(training.encode(vae, x))).add(1).div(2).clamp(0, 1)
    error = (decoded - x).square().mean((1, 2, 3))
    psnr = float((-10 * error.log10()).mean())
    say(f"VAE: PSNR of unseen images {psnr:.1f} dB.")
    return vae, {"log": log, "latents": about, "psnr": psnr}


def train_unet(options: argparse.Namespace, vae: Any, device: Any, generator: Any, scale: float) -> tuple[Any, Any]:
    """The trained Denoiser and its entry in training.json."""
    from . import demo_training as training

    sizes = SMALL_SIZES if options.small else UNET_SIZES
    datasets = training.encode_many(vae, sizes, options.encode_minutes, options.pixels, scale, device)
    pictures = sum(len(dataset.latents) for dataset in datasets)
    say(f"Encoded {pictures} images of {len(sizes)} sizes.")
    model = training.Denoiser(generator).to(device)
    losses = training.denoiser_losses(model, datasets, options.positions, options.most)
    log = training.learn("UNet", list(model.parameters()), options.unet_minutes, options.unet_rate, losses, say)
    return model.eval(), {"log": log, "pictures": pictures, "sizes": sizes}


def sample(folder: Path, captions: list[str], size: tuple[int, int], steps: int, cfg: float) -> Any:
    """Images (captions, height, width, 3), sampled and decoded by ComfyUI with the files in ``folder``."""
    import comfy.sample
    import torch

    from scripts.models.demo_model import networks

    model = networks.load_model(str(folder / networks.UNET_FILE))
    clip = networks.load_clip(str(folder / networks.UNET_FILE))
    vae = networks.load_vae(str(folder / networks.VAE_FILE))
    latent = torch.zeros(1, 4, size[1] // 8, size[0] // 8)
    images = []
    for number, caption in enumerate(captions):
        positive, negative = (clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (caption, ""))
        noise = comfy.sample.prepare_noise(latent, SEED + number)
        latents = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "normal", positive, negative, latent, disable_pbar=True
        )
        images.append(vae.decode(latents))
    return torch.cat(images).cpu()


def write_grid(folder: Path, sizes: list[tuple[int, int]], steps: int, cfg: float) -> None:
    """Write samples.png: one row per caption, one column per size."""
    import torch
    from PIL import Image, ImageDraw

    with torch.inference_mode():
        columns = [sample(folder, CAPTIONS, size, steps, cfg) for size in sizes]
    high, title = max(height for _, height in sizes), 14
    grid = Image.new("RGB", (sum(width + 4 for width, _ in sizes), len(CAPTIONS) * (high + title)), "#202020")
    writer = ImageDraw.Draw(grid)
    for row, caption in enumerate(CAPTIONS):
        left = 0
        writer.text((4, row * (high + title) + 1), caption or "(empty caption)", fill="#ffffff")
        for (width, _), images in zip(sizes, columns, strict=True):
            pixels = (images[row].clamp(0, 1) * 255).round().to(torch.uint8).numpy()
            grid.paste(Image.fromarray(pixels), (left, row * (high + title) + title))
            left += width + 4
    grid.save(folder / "samples.png")
    say(f"Wrote samples.png: {len(CAPTIONS)} captions at {', '.join(f'{w}x{h}' for w, h in sizes)}.")


def write_example(folder: Path) -> None:
    """Write example.png, a drawn image for image-to-image."""
    import torch
    from PIL import Image

    from . import pictures

    picture = pictures.draw(pictures.scenes(SEED, 1, 2), 256, 256)[0].permute(1, 2, 0)
    Image.fromarray((picture * 255).round().to(torch.uint8).numpy()).save(folder / "example.png", optimize=True)


def main() -> int:
    options = parse()
    start = time.monotonic()
    import torch

    cuda = torch.cuda.is_available() and not options.smoke
    import_comfyui(not cuda)
    from comfy.latent_formats import SD15

    from scripts.models.demo_model import networks

    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    generator, scale = torch.Generator().manual_seed(SEED), SD15().scale_factor
    vae, about_vae = train_vae(options, device, generator, scale)
    save(vae.state_dict(), options.out / networks.VAE_FILE)
    model, about_unet = train_unet(options, vae, device, generator, scale)
    save(networks.merged_state_dict(model.unet, model.text), options.out / networks.UNET_FILE)
    parts = {"vae": vae, "unet": model}
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()},
        "vae": about_vae,
        "unet": about_unet,
        "seconds": round(time.monotonic() - start, 1),
    }
    (options.out / "training.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    del vae, model, parts
    write_example(options.out)
    small = options.smoke or options.small
    write_grid(options.out, SAMPLE_SIZES[:3] if small else SAMPLE_SIZES, 2 if options.smoke else 20, 4.0)
    say(f"Done in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
