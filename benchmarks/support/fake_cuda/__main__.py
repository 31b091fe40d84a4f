"""Runs a module on fake CUDA: `python -m benchmarks.support.fake_cuda MODULE ARGUMENTS`."""

import runpy
import sys

from benchmarks.support.fake_cuda.native_stub import load_stub

if __name__ == "__main__":
    load_stub()
    from benchmarks.support.fake_cuda.torch_patches import patch_torch

    patch_torch()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
