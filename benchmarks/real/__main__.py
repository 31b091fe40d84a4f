"""Measure speed on a real pretrained model, beside its peers and the limits of the machine. Prints a JSON line last.

    make vllm-environment sglang-environment
    python -m benchmarks.real --model FOLDER [--parts limits,decode,requests,training] [--dtype float32|bfloat16]
                              [--threads 2] [--repeats 3] [--without vllm] [--without sglang] [--compile] [--quick]

FOLDER is a model's folder as of `asterism model import` (docs/models.md). All parts run one after the other, in one
session, with the same threads and dtype; other work on the machine makes the figures unreliable. The prompts are 160
random token ids, the sequences have 48 new tokens, and none ends early. Figures are medians of the repeats:

    limits     products of the model's matrices, with 1, 16, 64 and 2,048 rows (`gflops_INPUTSxOUTPUTS_ROWS`, and
               `gflops_model_ROWS` for all of them), of a large square, and the memory's bandwidth; also for bfloat16
               where the processor has instructions for it. Limits in tokens per second (machine_limits.py)
    decode     decoded tokens per second at batch 1, 16 and 64, without the prefill: the embedded engine and
               transformers' `generate` with its cache, in turns; `ratio` is the median of the repeats' ratios
    requests   new tokens per second of whole requests, prefill included, that start together: the embedded engine in
               this process, then a vLLM and an SGLang server on the CPU, which this program starts and kills;
               `ratio` is that to the faster server. Only the engine computes log probabilities
    training   trained tokens per second of one update over 32 rollouts of 4 prompts: the learner, and transformers with
               micro batches of the same number of tokens, sorted by length; in turns. --compile sets learner.compile

`share_of_limit` is the measured rate over the limit. It needs the part `limits`.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import structlog

from asterism.configs.errors import UnusableInput
from asterism.engine.model.hf_checkpoint import load_model_config
from benchmarks.real.decode_rates import measure_decoding
from benchmarks.real.machine_limits import ROWS, SQUARE, MachineLimits, measure_limits
from benchmarks.real.peer_servers import PEERS, PeerFailed, check_peer
from benchmarks.real.real_workload import DTYPES, RealWorkload
from benchmarks.real.request_rates import measure_requests
from benchmarks.real.training_rates import measure_training
from benchmarks.support.benchmark_main import Flag, FlagError, Options, benchmark_main, choose_names

PARTS = ("limits", "decode", "requests", "training")
QUICK = {
    "batches": (1, 4),
    "prompt_tokens": 32,
    "new_tokens": 8,
    "groups": 1,
    "rollouts": 4,
    "most_response_tokens": 16,
}
QUICK_PRODUCTS = (1, 4), 256  # rows and size of the square


def add_decode_limits(work: RealWorkload, limits: MachineLimits, figures: Mapping[str, float]) -> dict[str, float]:
    """Return the limit of each batch in the middle of a response, and the measured share of it."""
    cached = work.prompt_tokens + work.new_tokens // 2
    found: dict[str, float] = {}
    for batch in work.batches:
        limit = limits.compute_decode_rate(batch, cached)
        found |= {
            f"limit_tokens_per_s_{batch}": limit,
            f"share_of_limit_{batch}": figures[f"tokens_per_s_{batch}"] / limit,
        }
    return found


async def measure(options: Options) -> dict[str, Any]:
    """Measure the parts. Raises FlagError for the flags, UnusableInput for the model, and PeerFailed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if options.model is None:
        raise FlagError("--model: name the folder of a model; `asterism model import` makes one of a GGUF file")
    parts, peers = options.parts, [name for name in PEERS if name not in options.without]
    if "requests" in parts:
        for name in peers:
            check_peer(name)
    shortened: dict[str, Any] = QUICK if options.quick else {}
    config = load_model_config(options.model)
    work = RealWorkload(
        options.model.resolve(), config, options.dtype, options.threads, options.repeats, options.compile, **shortened
    )
    figures: dict[str, Any] = {}
    limits: MachineLimits | None = None
    if "limits" in parts:
        # A process of its own: its idle OpenMP threads would take time from the engine.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            sizes = QUICK_PRODUCTS if options.quick else (ROWS, SQUARE)
            limits, figures["limits"] = process.submit(measure_limits, work, *sizes).result()
    if "decode" in parts:
        decoded = await measure_decoding(work)
        figures["decode"] = decoded | ({} if limits is None else add_decode_limits(work, limits, decoded))
    if "requests" in parts:
        figures["requests"] = await measure_requests(work, peers, options.scratch, limits)
    if "training" in parts:
        figures["training"] = measure_training(work, limits)
    settings = {name: getattr(options, name) for name in ("dtype", "threads", "repeats", "compile", "without")}
    return _round(figures) | settings


def _round(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Round to four significant digits."""
    return {part: {name: float(f"{value:.4g}") for name, value in found.items()} for part, found in figures.items()}


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--model", kind=Path, text="folder of a model", metavar="FOLDER"),
        Flag("--parts", PARTS, "parts to measure", kind=partial(choose_names, known=PARTS), metavar="NAME,NAME"),
        Flag("--dtype", "float32", "dtype of weights and products", choices=tuple(DTYPES)),
        Flag("--threads", 2, "threads of each engine and of training"),
        Flag("--repeats", 3, "repeats of each measurement", quick=1, least=1),
        Flag("--compile", False, "train with compiled layers"),
        Flag("--without", [], "server to leave out; may be repeated", choices=tuple(PEERS)),
        quick="one repeat with few and short sequences",
        expected=(UnusableInput, PeerFailed),
    )
