"""Measures decoded tokens per second of the embedded engine and of transformers' `generate`, without the prefill."""

from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asterism.engine.contract import Capacity
from asterism.engine.inference.embedded import EmbeddedEngine
from benchmarks.real.real_workload import RealWorkload, draw_prompts
from benchmarks.support.benchmark_main import compute_median_ratio
from benchmarks.support.engine_rate import DecodeClock, measure_engine_rate
from benchmarks.support.transformers_generation import load_transformers, measure_transformers_rate

_WARM_UP_TOKENS = 2
_PAGE_TOKENS = 16
_reference: Any = None  # the model of transformers, in its process


class TokenStreamer:
    """A streamer of transformers that counts the tokens of each sequence."""

    def __init__(self, clock: DecodeClock) -> None:
        self._clock, self._has_prompts = clock, False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompts:
            for row in range(len(value)):
                self._clock.count(row, 1)
        self._has_prompts = True

    def end(self) -> None:
        """Do nothing."""


async def start_engine(work: RealWorkload, batch: int, prefill_tokens: int) -> EmbeddedEngine:
    """Start an engine with room for `batch` sequences."""
    tokens = -(-(work.prompt_tokens + work.new_tokens) // _PAGE_TOKENS) * _PAGE_TOKENS
    engine = EmbeddedEngine(
        work.model,
        Capacity(kv_tokens=batch * tokens, page_tokens=_PAGE_TOKENS, sequence_tokens=tokens),
        threads=work.threads,
        dtype=work.torch_dtype,
        max_running=batch,
        prefill_tokens=prefill_tokens,
    )
    await engine.start()
    return engine


async def measure_decoding(work: RealWorkload) -> dict[str, float]:
    """Measure both in turns, on the same prompts. A ratio is the median of the repeats' ratios.

    transformers has its own process: the idle OpenMP threads of one side would take time from the other side.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _load_reference, (work,)) as reference:
        return await _measure_in_turns(work, reference)


async def _measure_in_turns(work: RealWorkload, reference: Executor) -> dict[str, float]:
    figures = dict[str, float]()
    for batch in work.batches:
        engine = await start_engine(work, batch, batch * work.prompt_tokens)  # one prefill, as transformers does
        ours, theirs = list[float](), list[float]()
        for number in range(-1, work.repeats):
            prompts = draw_prompts(work, batch, number + 1)
            tokens = work.new_tokens if number >= 0 else _WARM_UP_TOKENS
            ours.append(await _measure_engine(engine, prompts, tokens))
            theirs.append(reference.submit(_measure_reference, prompts, tokens).result())
        await engine.close()
        ours, theirs = ours[1:], theirs[1:]
        figures |= {
            f"tokens_per_s_{batch}": median(ours),
            f"transformers_tokens_per_s_{batch}": median(theirs),
            f"ratio_{batch}": compute_median_ratio(ours, theirs),
        }
        print(f"decode, batch {batch}: {median(ours):.1f} tokens/s, transformers {median(theirs):.1f}", flush=True)
    return figures


async def _measure_engine(engine: EmbeddedEngine, prompts_BT: NDArray[np.int32], new_tokens: int) -> float:
    clock = DecodeClock(len(prompts_BT))
    await measure_engine_rate(engine, prompts_BT, new_tokens, clock)
    return clock.compute_rate()


def _load_reference(work: RealWorkload) -> None:
    """Load the model of this process."""
    global _reference
    torch.set_num_threads(work.threads)
    _reference = load_transformers(work.model, work.torch_dtype)


def _measure_reference(prompts_BT: NDArray[np.int32], new_tokens: int) -> float:
    clock = DecodeClock(len(prompts_BT))
    measure_transformers_rate(_reference, prompts_BT, new_tokens, TokenStreamer(clock))
    return clock.compute_rate()
