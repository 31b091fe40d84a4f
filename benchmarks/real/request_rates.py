"""Measures whole requests, prefill included: the embedded engine in this process, and vLLM and SGLang servers."""

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from asterism.configs.schema.machines import EngineConfig
from benchmarks.real.decode_rates import start_engine
from benchmarks.real.machine_limits import MachineLimits
from benchmarks.real.peer_servers import running_peer
from benchmarks.real.real_workload import RealWorkload, draw_prompts
from benchmarks.support.engine_rate import measure_engine_rate

Ask = Callable[[NDArray[np.int32]], Awaitable[object]]


async def measure_requests(
    work: RealWorkload, peers: Sequence[str], scratch: Path, limits: MachineLimits | None
) -> dict[str, float]:
    """Measure new tokens per second of the engine and of each server, one after the other, on the same prompts.

    A ratio compares medians with the faster server at this batch. Raises PeerFailed.
    """
    rates = {"engine": await _measure_engine(work)}
    for name in peers:
        async with running_peer(name, work, scratch) as client:
            rates[name] = await _measure_batches(name, work, client.ask)
    figures = {
        f"{'' if name == 'engine' else f'{name}_'}tokens_per_s_{batch}": rate
        for name, by_batch in rates.items()
        for batch, rate in by_batch.items()
    }
    for batch, ours in rates["engine"].items():
        if peers:
            figures[f"ratio_{batch}"] = ours / max(rates[name][batch] for name in peers)
        if limits is not None:
            limit = limits.compute_request_rate(batch, work.prompt_tokens, work.new_tokens)
            figures |= {f"limit_tokens_per_s_{batch}": limit, f"share_of_limit_{batch}": ours / limit}
    return figures


async def _measure_engine(work: RealWorkload) -> dict[int, float]:
    engine = await start_engine(work, max(work.batches), EngineConfig().prefill_tokens)
    try:
        return await _measure_batches(
            "engine", work, lambda prompts_BT: measure_engine_rate(engine, prompts_BT, work.new_tokens)
        )
    finally:
        await engine.close()


async def _measure_batches(name: str, work: RealWorkload, ask: Ask) -> dict[int, float]:
    """Return the median of the repeats for each batch. A first batch is not counted."""
    await ask(draw_prompts(work, min(work.batches), work.repeats))
    found: dict[int, float] = {}
    for batch in work.batches:
        rates: list[float] = []
        for number in range(work.repeats):
            prompts_BT = draw_prompts(work, batch, number)
            began = time.perf_counter()
            await ask(prompts_BT)
            rates.append(batch * work.new_tokens / (time.perf_counter() - began))
        found[batch] = median(rates)
        print(f"requests, batch {batch}: {name} {found[batch]:.1f} tokens/s", flush=True)
    return found
