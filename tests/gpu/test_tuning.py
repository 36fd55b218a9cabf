"""Triton's autotuning choices are stored with a region. Each case runs two processes, because kernels live in one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.places import ROOT

CODE = """
    import sys
    from pathlib import Path

    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from compile_cache.backends.inductor.backend import InductorBackend
    from tests.contract.rig import Model, Rig, inputs, seeded

    measured = []
    real = CachingAutotuner.benchmark_all_configs

    def benchmark(self, *args, **kwargs):
        measured.append(1)
        return real(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark
    torch.set_grad_enabled(False)
    rig = Rig(InductorBackend(), store_folder=Path(sys.argv[1]), workers=int(sys.argv[2]), source="one")
    rig.bind(seeded(Model).cuda())(*(tensor.cuda() for tensor in inputs()))
    counters = rig.cache.stats.counters
    print("RESULT", counters.region_compiles, counters.region_loads, len(measured))
"""


def play(folder: Path, inductor: Path, workers: int) -> list[int]:
    """(regions compiled, regions loaded, kernels measured) of a process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(inductor), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), str(folder), str(workers)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return [int(word) for word in result.split()[1:]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_process_measures_nothing(tmp_path: Path, workers: int) -> None:
    compiled, loaded, measured = play(tmp_path / "store", tmp_path / "one", workers)
    assert (compiled, loaded) == (2, 0)
    assert measured > 0
    assert play(tmp_path / "store", tmp_path / "two", workers) == [0, 2, 0]
