"""The interface between the contract's cases and an engine's tests: how to create the engine, and its traits."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, Engine, EngineLoad, Generation, GenerationRequest
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.whole_publisher import WholePublisher

ORDINARY = 250  # the ids below are in the vocabulary of every model in these tests


class Traits(NamedTuple):
    """Properties that differ between engines."""

    logprob_error: float  # largest difference from the learner's logprobs in float32
    max_running: int
    prefix_tokens: int  # the cached prefix of a sequence is a multiple of this number
    forgets: bool  # a released page is free immediately; otherwise the engine frees it on demand
    long_turn: int  # number of new tokens of a turn that a case interrupts
    look_s: float  # seconds between two reads of the engine's load


class Bench(Protocol):
    model: Path
    traits: Traits
    publisher: WholePublisher

    def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AbstractAsyncContextManager[tuple[Engine, Capacity]]:
        """Yield a started engine, which has the weights of `model` as version 0, and close it at the end.

        With `scarce`, the cache holds only two or three sequences, and the precision does not matter.
        """
        ...

    def unstarted(self) -> Engine: ...

    async def end_abruptly(self, engine: Engine) -> None:
        """Kill the thread or processes that compute. `bench.engine()` starts another engine."""
        ...


def request(
    number: int,
    new_tokens: int = 24,
    length: int = 20,
    *,
    stop_token_ids: tuple[int, ...] = (),
    seed: int | None = None,
    **sampling: float,
) -> GenerationRequest:
    ids = np.random.default_rng(number).integers(0, ORDINARY, length, dtype=np.int32)
    asked = Sampling(**sampling)  # pyright: ignore[reportArgumentType]
    return GenerationRequest(number, ids, new_tokens, asked, stop_token_ids, number if seed is None else seed)


def as_sequence(number: int, asked: GenerationRequest) -> GenerationRequest:
    return msgspec.structs.replace(asked, sequence_id=number)


def continued(asked: GenerationRequest, found: list[int], new_tokens: int) -> GenerationRequest:
    ids = np.concatenate((asked.token_ids, np.array(found, np.int32)))
    return msgspec.structs.replace(asked, token_ids=ids, max_new_tokens=new_tokens)


async def tokens(engine: Engine, asked: GenerationRequest) -> list[int]:
    return (await engine.generate(asked)).token_ids.tolist()


async def wait_until(
    bench: Bench, engine: Engine, condition: Callable[[EngineLoad], bool], *calls: asyncio.Future[Generation]
) -> None:
    """Wait for the condition. Fails if all of these calls end earlier."""
    while not condition(engine.get_load()):
        assert not all(call.done() for call in calls)
        await asyncio.sleep(bench.traits.look_s)


async def saturate(
    bench: Bench, engine: Engine, count: int, condition: Callable[[EngineLoad], bool]
) -> list[Generation]:
    """Keep `count` turns of 100 new tokens in flight until the condition is true. Return all answers."""
    calls: list[asyncio.Future[Generation]] = []
    while not condition(engine.get_load()):
        answered = [call.result() for call in calls if call.done()]  # raises the error of a failed turn
        for _ in range(count - (len(calls) - len(answered))):
            calls.append(asyncio.ensure_future(engine.generate(request(len(calls), 100))))
        await asyncio.sleep(bench.traits.look_s)
    return await asyncio.gather(*calls)


async def until_generated(bench: Bench, engine: Engine, count: int, *calls: asyncio.Future[Generation]) -> None:
    """Wait until the engine has generated `count` tokens in all."""
    await wait_until(bench, engine, lambda load: load.generated_tokens >= count, *calls)


async def posted(call: asyncio.Future[Any]) -> None:
    """Wait until the call is in the queue of the paused engine."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()


def changed_model(bench: Bench, seed: int = 1) -> CausalLM:
    """Return a model with the same shape and other weights."""
    model = load_model(bench.model, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def publish(bench: Bench, version: int, model: CausalLM) -> WeightsPublished:
    return bench.publisher.publish(version, dict(model.named_parameters()))
