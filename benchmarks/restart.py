"""What a restart costs: the first prompts of a process that finds compiled code, and of one that does not.

    python -m benchmarks.restart --kind sdxl --out benchmarks/results/NAME.json [--contenders resolute ...]

For each contender two processes run the same tour, one prompt a size. The first starts with nothing on the disk; the
second finds what the first kept: Resolute its store, with inductor's cache emptied in between; Resolute without a
store, and core's TorchCompileModel, inductor's cache. It visits one size more, which the first did not. Seconds are
ComfyUI's own, from a prompt's start to its end message. Each size is asked for twice, with another seed: what the
first one takes longer is the stall. Before its first prompt a server is left alone for as long as it takes to open the
page in a browser (--pause): Resolute loads ahead then. That prompt loads the checkpoint too, so stock ComfyUI is there
to compare with. Resolute compiles the VAE's decoder as well, TorchCompileModel the diffusion model alone. Needs CUDA;
see `benchmarks.tour` for what else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.support import command, models
from scripts.support.client import execution_seconds
from scripts.support.server import ComfyServer

from .tour import ROOT, STOCK, TOURS, environment, prompt, without_paths

WITHOUT_STORE = "resolute without store"
CONTENDERS = {STOCK: STOCK, "resolute": "inductor", WITHOUT_STORE: "inductor", "TorchCompileModel": "TorchCompileModel"}


def visit(server: ComfyServer, checkpoint: str, backend: str, sizes: list[Any]) -> Iterator[dict[str, Any]]:
    """Each size twice: what it costs when it is new, and after that."""
    client = server.client
    for size in sizes:
        before = client.get("/resolute/cache")["counters"]
        seconds = [execution_seconds(client.run(prompt(checkpoint, backend, size, seed=seed))) for seed in (1, 2)]
        after = client.get("/resolute/cache")["counters"]
        moved = {name: after[name] - before[name] for name in after if name != "bypasses"}
        yield {"width": size[0], "height": size[1], "batch": size[2], "seconds": seconds, "counters": moved}


def table(processes: list[dict[str, Any]]) -> str:
    lines = []
    for each in processes:
        sizes = "  ".join(
            f"{row['width']}x{row['height']}: {row['seconds'][0]:6.2f} (then {row['seconds'][1]:5.2f})"
            for row in each["rows"]
        )
        compiles, loads = (sum(row["counters"][name] for row in each["rows"]) for name in _COUNTED)
        lines.append(f"{each['contender']:<24}{each['process']:<9}{sizes}  compiles {compiles} loads {loads}")
    return "\n".join(lines)


_COUNTED = ("region_compiles", "region_loads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(TOURS), default="sdxl")
    parser.add_argument("--contenders", nargs="*", choices=sorted(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--sizes", type=int, default=3, help="visit only the first sizes of the tour")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before a server's first prompt")
    parser.add_argument("--argument", action="append", default=[], help="an extra argument for ComfyUI")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    setup = command.prepare()
    path = models.ensure(options.kind, setup.python, setup.comfyui)
    packs = {"resolute": ROOT, "resolute-test-pack": ROOT / "tests" / "pack"}
    tour = TOURS[options.kind]
    sizes, new = tour[: options.sizes], tour[options.sizes : options.sizes + 1]
    settings = {"kind": options.kind, "arguments": without_paths(options.argument), "pause": options.pause}
    processes: list[dict[str, Any]] = []
    for contender in options.contenders:
        work = Path(tempfile.mkdtemp(prefix="resolute-restart-"))
        for process in ("cold", "restart"):
            if contender == "resolute":
                shutil.rmtree(work / "inductor", ignore_errors=True)
            server = ComfyServer(
                setup.python,
                setup.comfyui,
                work / process,
                packs=packs,
                models=models.folder(),
                cpu=False,
                arguments=options.argument,
                environment={
                    "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
                    "TRITON_CACHE_DIR": None,
                    "RESOLUTE_STORE": "0" if contender == WITHOUT_STORE else str(work / "store"),
                },
            )
            started = time.perf_counter()
            with server:
                ready = time.perf_counter() - started
                time.sleep(options.pause)
                about = environment(server)
                rows: list[dict[str, Any]] = []
                told = {"contender": contender, "process": process, "ready_seconds": ready, "rows": rows}
                processes.append(told)
                for row in visit(
                    server, path.name, CONTENDERS[contender], sizes if process == "cold" else [*sizes, *new]
                ):
                    rows.append(row)
                    told |= server.client.get("/resolute/events")
                    if options.out:  # after every size: a run that is cut off keeps what it has
                        result = {**about, **settings, "processes": processes}
                        options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(table([told]), flush=True)
        shutil.rmtree(work, ignore_errors=True)
    print(table(processes))


if __name__ == "__main__":
    main()
