"""`python -m benchmarks.support.fake_cuda tests.engine.cuda.compile_for_sm_90`: compiles kernels for a Hopper GPU.

Inductor generates Triton code for the compiled parts of a layer and of the head, and Triton compiles each kernel to a
binary for sm_90. This needs the package triton on PYTHONPATH, but no GPU. The last line is JSON: bytes by kernel.
"""

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
import triton  # pyright: ignore[reportMissingImports]
from msgspec.structs import replace
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

from asterism.configs.schema.learner_config import Checkpointing
from benchmarks.support.fake_cuda.fake_steps import DEVICE, measure_rl_step
from benchmarks.support.fake_cuda.inductor_counts import generate_code, listening
from benchmarks.support.fake_cuda.operation_log import running_fake_cuda
from benchmarks.support.qwen3_models import read_qwen3
from tests.engine.learner.learner_settings import make_learner

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


class HopperDriver:
    """A driver for Inductor and Triton that describes a Hopper GPU, which the machine does not have."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


def list_kernels() -> dict[str, str]:
    """Return the source of each kernel by name, from steps with every mode of activation checkpointing."""
    codes: list[str] = []
    config = replace(read_qwen3("1.7B"), num_layers=1, vocab_size=4096)
    with listening(lambda graph, inputs: codes.append(generate_code(graph, inputs))):
        for mode in get_args(Checkpointing):
            settings = {"activation_checkpointing": mode, "old_logprobs": "engine", "correction": "none"}
            learner = make_learner(device="cuda", dtype="bfloat16", entropy_coef=0.01, **settings)
            with running_fake_cuda() as log:
                measure_rl_step(log, config, 2048, learner)
    found = [match for code in codes for match in _KERNEL.findall(code)]
    return {f"{name} {number}": source for number, (name, source) in enumerate(dict.fromkeys(found))}


def compile_kernel(name: str, source: str, folder: Path) -> int:
    """Compile a kernel in all configurations; return the size of the smallest binary in bytes."""
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name.split()[0])
    kernel.precompile(warm_cache_only=True)
    return min(Path(result.kernel.cubin_path).stat().st_size for result in kernel.compile_results)


def main() -> None:
    triton.runtime.driver.set_active(HopperDriver())
    triton_helpers.set_driver_to_gpu = lambda: None
    with tempfile.TemporaryDirectory() as folder:
        sizes = {name: compile_kernel(name, source, Path(folder)) for name, source in list_kernels().items()}
    sys.stdout.write(json.dumps(sizes) + "\n")


if __name__ == "__main__":
    main()
