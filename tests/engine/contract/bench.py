"""An engine under the contract's cases: how one is made, and in what engines may differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from bus.messages import WeightsPublished
from engine.checkpoint import load_model
from engine.contract import Capacity, Engine, EngineLoad, Generation, GenerationRequest
from engine.qwen3 import Qwen3
from engine.weights import WeightsPublisher

ORDINARY = 250  # ids below are in the vocabulary of every model here


class Traits(NamedTuple):
    """What the contract leaves to an engine."""

    logprob_error: float  # of its logprobs from those of the learner's model, which computes in float32
    max_running: int
    prefix_tokens: int  # a sequence's own prefix is found in units of so many
    forgets: bool  # what a forgotten sequence held is free at once; else as soon as somebody needs the room
    long_turn: int  # new tokens of a turn in whose middle something happens
    look_s: float  # from one look at its load to the next


class Bench(Protocol):
    model: Path
    traits: Traits
    publisher: WeightsPublisher

    def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AbstractAsyncContextManager[tuple[Engine, Capacity]]:
        """A started one with the weights of `model` as version 0, closed at the end. `scarce`: with room for two or three
        sequences alone, and in any precision."""
        ...

    def unstarted(self) -> Engine: ...

    async def end_abruptly(self, engine: Engine) -> None:
        """What computes for the engine dies. `bench.engine()` makes another in its place."""
        ...


def request(number: int, new_tokens: int = 24, length: int = 20, **settings: Any) -> GenerationRequest:
    ids = np.random.default_rng(number).integers(0, ORDINARY, length, dtype=np.int32)
    return GenerationRequest(number, ids, new_tokens, **{"seed": number, **settings})


def as_sequence(number: int, asked: GenerationRequest) -> GenerationRequest:
    return msgspec.structs.replace(asked, sequence_id=number)


def continued(asked: GenerationRequest, found: list[int], new_tokens: int) -> GenerationRequest:
    ids = np.concatenate((asked.token_ids, np.array(found, np.int32)))
    return msgspec.structs.replace(asked, token_ids=ids, max_new_tokens=new_tokens)


async def tokens(engine: Engine, asked: GenerationRequest) -> list[int]:
    return (await engine.generate(asked)).token_ids.tolist()


async def until(
    bench: Bench, engine: Engine, condition: Callable[[EngineLoad], bool], *calls: asyncio.Future[Generation]
) -> None:
    """While one of these calls at least is under way."""
    while not condition(engine.load()):
        assert not all(call.done() for call in calls)
        await asyncio.sleep(bench.traits.look_s)


async def until_generated(bench: Bench, engine: Engine, count: int, *calls: asyncio.Future[Generation]) -> None:
    """So many tokens since the engine's start."""
    await until(bench, engine, lambda load: load.generated_tokens >= count, *calls)


async def posted(call: asyncio.Future[Any]) -> None:
    """The call has come as far as it can while the engine is paused."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()


def changed_model(bench: Bench, seed: int = 1) -> Qwen3:
    """Other weights, of the same shape."""
    model = load_model(bench.model, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def publish(bench: Bench, version: int, model: Qwen3) -> WeightsPublished:
    return bench.publisher.publish(version, dict(model.named_parameters()))


def learners_logprobs(model: Qwen3, asked: GenerationRequest, found: Generation) -> torch.Tensor:
    """Of every token of the vocabulary at the place of each new one, [N, V]; greedy: at temperature 1."""
    ids = torch.from_numpy(np.concatenate((asked.token_ids, found.token_ids))).long()
    with torch.no_grad():
        logits = model.logits(model(ids[None])[0, len(asked.token_ids) - 1 : -1])
    return (logits / (asked.temperature or 1.0)).log_softmax(-1)
