"""Measure training, decoding and whole runs on one GPU. JSON last.

    python -m benchmarks.gpu [--only SECTION,SECTION] [--quick]

Each section runs in a process of its own, which may fail or run out of memory without a loss of other figures;
the exit code is then 1, and the JSON has its error as SECTION.error. Sections and figures:

    step_MODEL_TOKENS    a GRPO step with two micro batches of TOKENS packed tokens: share_of_gemm (model FLOP/s over
                         those of a square product in the same process), peak_gib, peak_over_plan (analysis/planning)
    passes_8B            forward and backward of a model with 8B parameters, in bfloat16
    head                 log probabilities and gradients of 16K tokens with a vocabulary of 151,936: head_gib
    weights_1.7B         weights_s: from the learner's weights to those of an embedded engine on the same GPU
    decode_1.7B          decoded_tokens_per_s, and share_of_bandwidth
    demo                 the demo with its learner on the CPU and on the GPU, with equal seeds
    run_1.7B             a run of three steps with learner and engine on the GPU

`--quick` uses small models; on a machine without a GPU it runs on the CPU.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.gpu.runs import QUICK, compare_demo, run_large
from benchmarks.gpu.serving import measure_decoding, measure_weights
from benchmarks.gpu.training import measure_head, measure_passes, measure_step
from benchmarks.support.qwen3_models import read_qwen3
from configs.schema import TinyConfig
from engine.model.model_config import build_tiny_config

SMALL_VOCABULARY = 512
GEMM_SIZE = 8192
COPIED_BYTES = 4 << 30
TIMEOUT_S = 300.0

Figures = dict[str, float | str]
Section = Callable[[], Figures]


def list_sections(device: torch.device) -> dict[str, Section]:
    sections: dict[str, Section] = {}
    for name in ("0.6B", "1.7B", "4B"):
        for tokens in (8192, 16_384):
            sections[f"step_{name}_{tokens}"] = partial(measure_step, read_qwen3(name), tokens, device, GEMM_SIZE)
    return sections | {
        "passes_8B": partial(measure_passes, read_qwen3("8B"), 8192, device, GEMM_SIZE),
        "head": partial(measure_head, 16_384, device),
        "weights_1.7B": partial(measure_weights, read_qwen3("1.7B"), device),
        "decode_1.7B": partial(
            measure_decoding, read_qwen3("1.7B"), device, batch=64, new_tokens=256, copied_bytes=COPIED_BYTES
        ),
        "demo": partial(compare_demo, device.type),
        "run_1.7B": partial(run_large, device.type),
    }


def list_quick_sections(device: torch.device) -> dict[str, Section]:
    """The same measurements with a model of 0.3M parameters."""
    small = build_tiny_config(TinyConfig(), SMALL_VOCABULARY)
    return {
        "step_small_256": partial(measure_step, small, 256, device, 256),
        "passes_small": partial(measure_passes, small, 256, device, 256),
        "head": partial(measure_head, 64, device, vocabulary=SMALL_VOCABULARY),
        "weights_small": partial(measure_weights, small, device),
        "decode_small": partial(measure_decoding, small, device, batch=4, new_tokens=16, copied_bytes=1 << 20),
        "demo": partial(compare_demo, device.type, QUICK),
        "run_small": partial(run_large, device.type, QUICK),
    }


def run_section(name: str, options: argparse.Namespace) -> Figures:
    """In another process. Its figures, or its error."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, *(["--quick"] if options.quick else [])]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {TIMEOUT_S:g} s"}
    if finished.returncode:
        return {"error": finished.stderr.strip()[-1000:]}
    return json.loads(finished.stdout.splitlines()[-1])


def print_figures(section: str, figures: Mapping[str, float | str]) -> None:
    for name, value in figures.items():
        text = value if isinstance(value, str) else f"{value:,.4g}"
        print(f"{section}.{name:24} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of sections, separated by commas")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small models, also without a GPU")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.quick:
        parser.error("no GPU is available; --quick runs small models on the CPU")
    sections = list_quick_sections(device) if options.quick else list_sections(device)
    if options.section:
        print(json.dumps(sections[options.section]()))
        return 0
    names = options.only.split(",") if options.only else list(sections)
    if unknown := set(names) - sections.keys():
        parser.error(f"--only: unknown section {sorted(unknown)[0]!r}; known: {', '.join(sections)}")
    found: Figures = {}
    for name in names:
        figures = run_section(name, options)
        print_figures(name, figures)
        found |= {f"{name}.{key}": value for key, value in figures.items()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    print(json.dumps(found))
    return 1 if any(key.endswith(".error") for key in found) else 0


if __name__ == "__main__":
    sys.exit(main())
