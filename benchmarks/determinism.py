"""Measure the cost of `determinism = "strict"` against "fast": engine tokens/s, step time. Prints a JSON line last.

    python -m benchmarks.determinism [--checkpoint runs/demo/checkpoints/step_000000] [--steps 8] [--rounds 3] [--quick]

Both modes alternate by round, and the best round of each counts; the engine is measured in CPU
seconds. A strict engine multiplies all rows at once if that gives each row the same bits on this
machine, and otherwise in tiles. The benchmark also reports the cost of tiles of 64, 16 and 4 rows.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tiny import TinyConfig
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.kernels.attention_kernels import select_kernels
from asterism.engine.inference.kernels.batch_invariance import TILE_ROWS, check_attention, find_batch_invariant_matmul
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul, build_tiled
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.model_config import DecoderConfig, build_tiny_config
from benchmarks.support.planned_lengths import VOCABULARY
from benchmarks.support.tiny_run import from_checkpoint, run_cold_start, run_over_processes

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
    config = build_tiny_config(TinyConfig(), VOCABULARY)
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
    best = dict.fromkeys(cores, 0.0)
    for number in range(rounds + 1):
        for name, core in cores.items():
            rate = measure_tokens_per_s(core, prompts.astype(np.int32), NEW_TOKENS)
            best[name] = max(best[name], rate) if number else 0.0  # the first round fills caches
    return best


def measure_steps(run: RunConfig, rounds: int) -> dict[str, float]:
    """Measure the mean over counted steps, each in its fastest round."""
    found: dict[str, list[Sequence[float]]] = {"fast": [], "strict": []}
    for _ in range(rounds):
        for kind, times in found.items():
            steps = run_over_processes(replace(run, determinism="strict" if kind == "strict" else "fast"))
            times.append([step["step_s"] for step in steps[1:-1]])
    fast_s, strict_s = (mean(min(same) for same in zip(*times, strict=True)) for times in found.values())
    print(f"a step takes {fast_s:.3f} s, strict {strict_s:.3f} s")
    return {
        "step_s_fast": round(fast_s, 4),
        "step_s_strict": round(strict_s, 4),
        "ratio_step": round(strict_s / fast_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.toml"))
    parser.add_argument("--checkpoint", type=Path, help="step_000000 of a run; its folder must still have the data")
    parser.add_argument("--steps", type=int, default=8, help="counted steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only the engine, 1 round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure_engine(1 if options.quick else 4 * options.rounds)
    if not options.quick:
        with tempfile.TemporaryDirectory() as runs:
            checkpoint = options.checkpoint or run_cold_start(options.config, ["sft.steps=120"], Path(runs))
            run = from_checkpoint(options.config, ["name=steps"], checkpoint, options.steps + UNCOUNTED)
            figures |= measure_steps(replace(run, runs_folder=runs), options.rounds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
