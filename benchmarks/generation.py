"""Measure tokens per second of the embedded engine and of transformers' `generate` on the same prompts.

    python -m benchmarks.generation [--threads 1] [--only alone|two_engines] [--quick]
                                    [--shape agent|reasoning] [--policies NAME,NAME]

Engine and `generate` have the same model, threads and lengths, and sample at temperature 1 with no
early stop. The benchmark drives the engine through its asyncio interface, as a run does. They
alternate, so that other load on the machine affects both; the fastest round counts.

A second part runs two engines with caches for a third of the demand, under several of the
arbiter's policies (benchmarks/support/two_engines.py). `--shape` selects the workload
(benchmarks/support/planned_lengths.py):

    agent      512 trajectories; a mean of 7.4 turns of 61 tokens; as many tokens of tool output
    reasoning  1,024 trajectories with more reasoning than tool calls

`kv_lookahead_over_least_requests` is the ratio of the two policies' tokens/s. For each policy, the
round with the median time counts.

The relative cost of a lost cache is about that of a GPU: the prefill of an agent's 640 tokens takes
as long as 1.6 decode steps of a batch of 80. On an H100 with 14B parameters, the prefill of eight
times as many tokens takes 12 steps of a full cache (the roofline of
analysis/simulation/cluster_model.py), and a turn has eight times as many steps.
"""

import asyncio
import logging
from pathlib import Path
from typing import get_args

import numpy as np
import structlog
import torch
from msgspec.structs import replace

from asterism.engine.contract import Capacity
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.policies.arbiter.arbiter import PolicyName
from asterism.tasks.tiny.prepare import TinyDemo
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main, make_policies_flag
from benchmarks.support.engine_rate import measure_engine_rate, write_model
from benchmarks.support.planned_lengths import AGENT, SHAPES, VOCABULARY
from benchmarks.support.transformers_generation import load_transformers, measure_transformers_rate
from benchmarks.support.two_engines import compare

BATCHES = (1, 16, 64, 256)
PROMPT_TOKENS = 20
POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv_lookahead")


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write a checkpoint of the tiny model with random weights, without a tokenizer."""
    model = CausalLM(TinyDemo().build_model_config(VOCABULARY))
    initialize_weights(model, seed)
    write_model(folder, model)


async def measure_alone(options: Options, rounds: int) -> dict[str, float]:
    capacity = Capacity(kv_tokens=256 * 128, page_tokens=16, sequence_tokens=128)
    engine = EmbeddedEngine(options.scratch, capacity, threads=options.threads)
    await engine.start()
    torch.set_num_threads(options.threads)
    reference = load_transformers(options.scratch)
    draws = np.random.default_rng(options.seed)
    ours: dict[int, float] = dict.fromkeys(BATCHES, 0.0)
    theirs: dict[int, float] = dict.fromkeys(BATCHES, 0.0)
    for batch in BATCHES:
        prompts = draws.integers(0, VOCABULARY, (batch, PROMPT_TOKENS), dtype=np.int32)
        await measure_engine_rate(engine, prompts, 4)
        measure_transformers_rate(reference, prompts, 4)
        for _ in range(rounds):
            ours[batch] = max(ours[batch], await measure_engine_rate(engine, prompts, options.new_tokens))
            theirs[batch] = max(theirs[batch], measure_transformers_rate(reference, prompts, options.new_tokens))
        print(f"batch {batch:3}: {ours[batch]:7.0f} tokens/s, transformers {theirs[batch]:7.0f}", flush=True)
    await engine.close()
    return {f"tokens_per_s_{batch}": round(ours[batch], 1) for batch in BATCHES} | {
        f"ratio_{batch}": round(ours[batch] / theirs[batch], 3) for batch in BATCHES
    }


def measure(options: Options) -> dict[str, object]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures: dict[str, object] = {}
    write_checkpoint(options.scratch, options.seed)
    if options.only != "two_engines":
        figures |= asyncio.run(measure_alone(options, rounds=4 if options.quick else 12))
    if options.only != "alone":
        shape, rounds = SHAPES[options.shape], 3
        if options.quick:
            shape, rounds = replace(shape, prompts=shape.prompts // 2), 1
        figures |= asyncio.run(compare(options.scratch, shape, options.seed, options.policies, rounds))
    return {**figures, "shape": options.shape, "threads": options.threads, "seed": options.seed}


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--threads", 1, "threads of the single engine"),
        Flag("--new-tokens", 100),
        Flag("--only", choices=("alone", "two_engines")),
        Flag("--shape", AGENT.name, "workload of the two engines", choices=list(SHAPES)),
        make_policies_flag(POLICIES, get_args(PolicyName)),
        SEED,
        quick="4 rounds instead of 12; two engines: 1 instead of 3, half of the groups",
    )
