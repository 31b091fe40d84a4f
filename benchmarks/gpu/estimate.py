"""Estimate the seconds of a GRPO step on an H100 from the operations of the step on fake CUDA. Prints JSON last.

    python -m benchmarks.gpu.estimate [--only MODEL_TOKENS,...] [--eager] [--quick]

Needs a CPU build of torch and g++, but no GPU. A step is that of a single rank with 80 GiB: two micro batches of four equal
sequences each; the mode of activation checkpointing is the first mode that fits. The estimate divides the
counts by assumed rates:

    products of matrices   650 TFLOP/s (a product 8192 x 8192 x 8192 reached 798)
    attention              330 TFLOP/s
    memory                 2.6 TB/s: each kernel reads its operands and writes its results once

Launches overlap with the work of the GPU and are not counted. Keys: MODEL_TOKENS.step_ms, .mfu (share of 989 TFLOP/s), .share_of_gemm
(of 798 TFLOP/s), .checkpointing, .kernels, .gib (bytes of all kernels besides products and attention), .product_tflop,
.attention_tflop and the milliseconds of each part; .head_gib: memory for the log probabilities of 16,384 tokens and their gradients,
besides hidden states and output matrix.
"""

import json
import subprocess
import sys
from pathlib import Path

from asterism.engine.hf.model_config import DecoderConfig
from benchmarks.support.benchmark_main import HIDDEN, Flag, Options, benchmark_main, choose_names

_ROOT = Path(__file__).parents[2]
CASES = (("1.7B", 8192), ("1.7B", 16_384), ("4B", 8192), ("4B", 16_384))
NAMES = [f"{model}_{tokens}" for model, tokens in CASES]
GEMM_FLOPS, ATTENTION_FLOPS, MEMORY_BYTES = 650e12, 330e12, 2.6e12  # FLOP/s and bytes/s
PEAK_FLOPS, MEASURED_GEMM_FLOPS = 989e12, 798e12
GPU_BYTES = 80 * 2**30
SEQUENCES, MICRO_BATCHES = 4, 2
HEAD_TOKENS = 16_384
Figures = dict[str, float | str]


def count(model: str, tokens: int, *, is_compiled: bool, layers: int) -> Figures:
    """Count the operations of a step on fake CUDA. With `layers` of 0, the model has all of its layers."""
    from msgspec.structs import replace

    from asterism.analysis.planning.model_size import measure_model
    from asterism.engine.model.training_flops import count_forward_flops
    from benchmarks.gpu.training import choose_mode, make_learner
    from benchmarks.support.fake_cuda.fake_steps import DEVICE, measure_rl_step
    from benchmarks.support.fake_cuda.operation_log import running_fake_cuda
    from benchmarks.support.qwen3_models import read_qwen3

    config = read_qwen3(model)
    config = replace(config, num_layers=layers or config.num_layers)
    learner = choose_mode(config, make_learner(DEVICE, tokens, compile=is_compiled), GPU_BYTES)
    with running_fake_cuda() as log:
        costs = measure_rl_step(log, config, tokens, learner, MICRO_BATCHES)
    seconds = {
        "layer_products": costs.parts["layers"].product_flops / GEMM_FLOPS,
        "head_products": costs.parts["head"].product_flops / GEMM_FLOPS,
        "attention": costs.total.attention_flops / ATTENTION_FLOPS,
        **{f"{part}_memory": each.pointwise_bytes / MEMORY_BYTES for part, each in costs.parts.items()},
        "check_memory": 4 * measure_model(config).total / MEMORY_BYTES,
    }
    step_s = sum(seconds.values())
    lengths = [tokens // SEQUENCES] * SEQUENCES * MICRO_BATCHES
    rate = count_forward_flops(config).count_training(lengths, sum(lengths)) / step_s
    return {
        "step_ms": 1e3 * step_s,
        "mfu": rate / PEAK_FLOPS,
        "share_of_gemm": rate / MEASURED_GEMM_FLOPS,
        "checkpointing": learner.memory.activation_checkpointing,
        "kernels": float(costs.total.kernels),
        "gib": costs.total.pointwise_bytes / 2**30,
        "product_tflop": costs.total.product_flops / 1e12,
        "attention_tflop": costs.total.attention_flops / 1e12,
        "head_gib": count_head_bytes(config, is_compiled=is_compiled) / 2**30,
        **{f"{part}_ms": 1e3 * each for part, each in seconds.items()},
    }


def count_head_bytes(config: DecoderConfig, *, is_compiled: bool) -> int:
    """Return the peak bytes of live tensors on fake CUDA, in bfloat16."""
    import torch

    from asterism.engine.model.compiled_parts import compile_head_kernels
    from asterism.policies.losses.token_scores import EAGER_KERNELS, compute_token_scores
    from benchmarks.support.fake_cuda.fake_steps import DEVICE
    from benchmarks.support.fake_cuda.operation_log import running_fake_cuda

    with running_fake_cuda() as log:
        hidden_NE, weight_VE = (
            torch.empty(rows, config.hidden_size, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
            for rows in (HEAD_TOKENS, config.vocab_size)
        )
        targets_N = torch.zeros(HEAD_TOKENS, dtype=torch.int64, device=DEVICE)
        before = log.memory.peak_bytes
        kernels = compile_head_kernels() if is_compiled else EAGER_KERNELS
        compute_token_scores(hidden_NE, weight_VE, targets_N, kernels=kernels).logprobs_N.sum().backward()
        return log.memory.peak_bytes - before


def count_in_child(name: str, switches: list[str], into: Path) -> Figures:
    """Count in another process, because fake CUDA changes torch for a whole process."""
    flags = ("--count", name, "--into", str(into), *switches)
    command = [sys.executable, "-m", "benchmarks.support.fake_cuda", "benchmarks.gpu.estimate", *flags]
    finished = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{name}: {finished.stderr[-2000:]}")
    return json.loads(into.read_text())


def measure(options: Options) -> Figures | None:
    if options.count:
        model, tokens = options.count.split("_")
        counted = count(model, int(tokens), is_compiled=not options.eager, layers=2 if options.quick else 0)
        options.into.write_text(json.dumps(counted))
        return None
    found: Figures = {}
    switches = [flag for flag, is_set in (("--eager", options.eager), ("--quick", options.quick)) if is_set]
    for name in choose_names(options.only, NAMES, "--only: "):
        figures = count_in_child(name, switches, options.scratch / "figures.json")
        parts = ", ".join(f"{key[:-3]} {each:.0f}" for key, each in figures.items() if key.endswith("_ms"))
        print(f"{name}: MFU {figures['mfu']:.3f}, checkpointing {figures['checkpointing']}; ms: {parts}", flush=True)
        found |= {f"{name}.{key}": each for key, each in figures.items()}
    return found


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--only", text=f"cases out of {', '.join(NAMES)}", quick=NAMES[0]),
        Flag("--eager", False, "without compiled layers and head"),
        *(Flag("--count", text=HIDDEN), Flag("--into", kind=Path, text=HIDDEN)),
        quick="the first case, with two layers: a test of the program",
    )
