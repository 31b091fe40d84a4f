"""A test that Triton compiles the kernels of layers and head for a Hopper GPU, on a machine without one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRITON = "3.6.0"  # this package contains CUDA's assembler


def install_triton() -> Path:
    """Download triton once, and return the folder that contains it."""
    folder = ROOT / "build/triton" / TRITON
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        package = ("--no-deps", "--target", str(partial), f"triton=={TRITON}")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *package], check=True, timeout=600)
        partial.rename(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_all_kernels_of_a_step_compile_for_sm_90(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(install_triton())))
    command = [sys.executable, "-m", "benchmarks.support.fake_cuda", "tests.engine.cuda.compile_for_sm_90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert min(sizes.values()) > 1000
    parts = {
        "norm": "rsqrt",
        "rotation": "roll",
        "SwiGLU": "silu",
        "head": "per_fused_amax",
    }  # the prefix "per" means that a block of logits stays in registers
    assert [part for part, word in parts.items() if not any(word in name for name in sizes)] == []
