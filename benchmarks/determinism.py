"""Compare `determinism = "strict"` with "fast": engine tokens/s, and step time. Prints a JSON line last.

    python -m benchmarks.determinism [--checkpoint runs/demo/checkpoints/step_000000] [--steps 8] [--rounds 3] [--quick]

The modes alternate by round, and the fastest round of each mode counts. Seconds of the engine are CPU
seconds. A strict engine multiplies all rows at once if a row's bits do not depend on the other rows on
this machine, and otherwise in tiles. The benchmark also reports the cost of tiles of 64, 16 and 4 rows.
"""

import time
from collections.abc import Mapping
from functools import partial
from statistics import mean

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.kernels.attention_kernels import select_kernels
from asterism.engine.inference.kernels.batch_invariance import TILE_ROWS, check_attention, find_batch_invariant_matmul
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul, build_tiled
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.tasks.tiny.prepare import TinyDemo
from benchmarks.support.benchmark_main import Flag, Options, alternate, benchmark_main
from benchmarks.support.planned_lengths import VOCABULARY
from benchmarks.support.tiny_run import CHECKPOINT, CONFIG, from_checkpoint, run_cold_start, run_over_processes

BATCHES = (1, 16, 64, 256)
PROMPT_TOKENS, NEW_TOKENS, LONGEST, PAGE = 20, 100, 128, 16
PREFILL_TOKENS = 512
UNCOUNTED = 2  # uncounted steps: the first, and the last, which saves a checkpoint


def measure_tokens_per_s(core: EngineCore, prompts_BT: NDArray[np.int32], new_tokens: int) -> float:
    """Measure the tokens per CPU second."""
    started = time.process_time()
    for row, prompt in enumerate(prompts_BT):
        core.submit(GenerationRequest(row, prompt, new_tokens, seed=row))
    while core.has_work:
        core.step()
    elapsed_s = time.process_time() - started
    for row in range(len(prompts_BT)):
        core.release_cache(row)
    return len(prompts_BT) * new_tokens / elapsed_s


def select_strict_matmul(config: DecoderConfig) -> tuple[Matmul, float]:
    """Return the kernels that a strict engine selects, and the seconds of the selection."""
    started = time.perf_counter()
    check_attention(select_kernels(torch.device("cpu")), config, LONGEST)
    return find_batch_invariant_matmul(config, PREFILL_TOKENS + BATCHES[-1], BATCHES[-1]), time.perf_counter() - started


def measure_engine(rounds: int) -> dict[str, float]:
    config = TinyDemo().build_model_config(VOCABULARY)
    model = CausalLM(config)
    initialize_weights(model, 0)
    model.requires_grad_(False)
    strict, trial_s = select_strict_matmul(config)
    kinds = {"fast": PLAIN, "strict": strict, **{f"tiles_{rows}": build_tiled(rows) for rows in TILE_ROWS}}
    capacity = Capacity(BATCHES[-1] * LONGEST, PAGE, LONGEST)
    cores = {name: EngineCore(model, capacity, matmul=products) for name, products in kinds.items()}
    figures = {"trial_s": round(trial_s, 3), "tile_rows": float(strict.tile_rows)}
    for batch in BATCHES:
        best = _measure_best_rates(
            cores, np.random.default_rng(0).integers(0, VOCABULARY, (batch, PROMPT_TOKENS)), rounds
        )
        print(
            f"batch {batch:3}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in best.items()) + " tokens/s",
            flush=True,
        )
        figures |= {f"{name}_over_fast_{batch}": round(best[name] / best["fast"], 3) for name in best if name != "fast"}
    return figures


def _measure_best_rates(cores: Mapping[str, EngineCore], prompts: NDArray[np.int64], rounds: int) -> dict[str, float]:
    ways = {
        name: partial(measure_tokens_per_s, core, prompts.astype(np.int32), NEW_TOKENS) for name, core in cores.items()
    }
    rates = alternate(ways, rounds + 1)
    return {name: max(each[1:]) for name, each in rates.items()}  # the first round fills caches


def measure_steps(run: RunConfig, rounds: int) -> dict[str, float]:
    """Measure the mean seconds of the counted steps. The fastest round of each step counts."""
    runs = {"fast": replace(run, determinism="fast"), "strict": replace(run, determinism="strict")}
    found = alternate({kind: partial(run_over_processes, each) for kind, each in runs.items()}, rounds)
    fast_s, strict_s = (
        mean(min(step["step_s"] for step in same) for same in list(zip(*times, strict=True))[1:-1])
        for times in found.values()
    )
    print(f"a step takes {fast_s:.3f} s, strict {strict_s:.3f} s")
    return {
        "step_s_fast": round(fast_s, 4),
        "step_s_strict": round(strict_s, 4),
        "ratio_step": round(strict_s / fast_s, 3),
    }


def measure(options: Options) -> dict[str, float]:
    torch.set_num_threads(1)
    figures = measure_engine(1 if options.quick else 4 * options.rounds)
    if not options.quick:
        runs = options.scratch
        checkpoint = options.checkpoint or run_cold_start(options.config, ["sft.steps=120"], runs)
        run = from_checkpoint(options.config, ["name=steps"], checkpoint, options.steps + UNCOUNTED)
        figures |= measure_steps(replace(run, runs_folder=str(runs)), options.rounds)
    return figures


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        *(CONFIG, CHECKPOINT, Flag("--steps", 8, "counted steps"), Flag("--rounds", 3)),
        quick="only the engine, 1 round",
    )
