"""Tokens per second of the embedded engine beside transformers' `generate`: same model, threads, prompts and length.

    python -m benchmarks.generation [--threads 1] [--only alone|two_engines] [--quick]
                                    [--shape agent|reasoning] [--policies NAME,NAME]

Both sample at temperature 1 with no early stop; the engine is driven through its asyncio interface, as a run drives it.
The two take turns, so that whatever else the machine does meets both; the best of the rounds counts.

Then two engines whose caches hold a third of the demand, under several of the arbiter's policies (benchmarks/_two_engines.py):
512 trajectories of an agent in 7.4 turns of 61 tokens in the mean, whose tools say as much again, or 1,024 of a model that
thinks more than it calls (`--shape reasoning`; both in benchmarks/_planned.py). `kv_lookahead_over_least_requests` is the ratio
of their tokens/s; of each policy the round with the median time counts.

What a lost cache costs is as on a GPU: to read an agent's 640 tokens again takes as long as 1.6 decode steps of a batch of 80.
On an H100 with 14B parameters, eight times as many tokens take 12 steps of a full cache (the roofline of
analysis/simulation/model.py), and a turn has eight times as many steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import structlog
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import save_file

from benchmarks._planned import AGENT, SHAPES, VOCABULARY
from benchmarks._policies import some_of
from benchmarks._two_engines import compare
from configs.schema import Tiny
from engine.contract import Capacity, GenerationRequest
from engine.embedded import EmbeddedEngine
from engine.qwen3 import Qwen3, initialize
from engine.tiny.prepare import model_config
from policies.scheduling import PolicyName

BATCHES = (1, 16, 64, 256)
PROMPT_TOKENS = 20
POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv_lookahead")


def write_checkpoint(folder: Path, seed: int) -> None:
    """The tiny model with random weights; no tokenizer, for nothing here is text."""
    config = model_config(Tiny(), VOCABULARY)
    model = Qwen3(config)
    initialize(model, seed)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_hf()))


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def transformers_rate(model: Any, prompts_BT: NDArray[np.int32], new_tokens: int) -> float:
    ids = torch.from_numpy(prompts_BT.astype(np.int64))
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            min_new_tokens=None,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert output.shape[1] == prompts_BT.shape[1] + new_tokens
    return len(ids) * new_tokens / (time.perf_counter() - started)


async def engine_rate(engine: EmbeddedEngine, prompts_BT: NDArray[np.int32], new_tokens: int) -> float:
    started = time.perf_counter()
    requests = [GenerationRequest(row, prompt, new_tokens, seed=row) for row, prompt in enumerate(prompts_BT)]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    elapsed_s = time.perf_counter() - started
    assert all(len(generation.token_ids) == new_tokens for generation in generations)
    for request in requests:
        engine.forget(request.sequence_id)
    return len(requests) * new_tokens / elapsed_s


async def measure(folder: Path, threads: int, seed: int, new_tokens: int, rounds: int) -> dict[str, float]:
    capacity = Capacity(kv_tokens=256 * 128, page_tokens=16, sequence_tokens=128)
    engine = EmbeddedEngine(folder, capacity, threads=threads)
    await engine.start()
    torch.set_num_threads(threads)
    reference = load_transformers(folder)
    draws = np.random.default_rng(seed)
    ours: dict[int, float] = dict.fromkeys(BATCHES, 0.0)
    theirs: dict[int, float] = dict.fromkeys(BATCHES, 0.0)
    for batch in BATCHES:
        prompts = draws.integers(0, VOCABULARY, (batch, PROMPT_TOKENS), dtype=np.int32)
        await engine_rate(engine, prompts, 4)
        transformers_rate(reference, prompts, 4)
        for _ in range(rounds):
            ours[batch] = max(ours[batch], await engine_rate(engine, prompts, new_tokens))
            theirs[batch] = max(theirs[batch], transformers_rate(reference, prompts, new_tokens))
        print(f"batch {batch:3}: {ours[batch]:7.0f} tokens/s, transformers {theirs[batch]:7.0f}", flush=True)
    await engine.close()
    return {f"tokens_per_s_{batch}": round(ours[batch], 1) for batch in BATCHES} | {
        f"ratio_{batch}": round(ours[batch] / theirs[batch], 3) for batch in BATCHES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of the engine that is measured alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--only", choices=("alone", "two_engines"))
    parser.add_argument("--shape", choices=list(SHAPES), default=AGENT.name, help="of the two engines' workload")
    parser.add_argument(
        "--policies", type=some_of(get_args(PolicyName)), default=POLICIES, metavar="NAME,NAME", help=",".join(POLICIES)
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 rounds instead of 12; one instead of 3, with half of the groups"
    )
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, options.seed)
        if options.only != "two_engines":
            rounds = 4 if options.quick else 12
            figures |= asyncio.run(measure(folder, options.threads, options.seed, options.new_tokens, rounds))
        if options.only != "alone":
            shape, rounds = SHAPES[options.shape], 3
            if options.quick:
                shape, rounds = replace(shape, prompts=shape.prompts // 2), 1
            figures |= asyncio.run(compare(folder, shape, options.seed, options.policies, rounds))
    print(json.dumps({**figures, "shape": options.shape, "threads": options.threads, "seed": options.seed}))


if __name__ == "__main__":
    main()
