"""Tests of the engine's thread with overlapped steps: a command that finishes a step reports the step's tokens."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asterism.engine.contract import EngineFailure, GenerationRequest
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.engine_thread import EngineThread, FutureResolution, NewTokens
from tests.engine.inference.cores import alone, new_core
from tests.engine.tiny_models import random_ids, small_model

pytestmark = pytest.mark.real_clock
MODEL = small_model()
REQUEST = GenerationRequest(1, random_ids(9, 1), 24, seed=1)
TOKENS = alone(MODEL, REQUEST).token_ids.tolist()


class PausedThread:
    """An engine's thread that steps only on command. `delivered`: lists of REQUEST's tokens or of results."""

    def __init__(self) -> None:
        self.delivered: list[list[object]] = []
        self.errors: list[Exception | None] = []
        self._thread = EngineThread(lambda: new_core(MODEL, overlaps_steps=True), 1, self._record, self.errors.append)

    def _record(self, resolutions: list[FutureResolution]) -> None:
        found = (result for _, result in resolutions)
        self.delivered.append([each.token_ids.tolist() if isinstance(each, NewTokens) else each for each in found])

    def run(self, *commands: Callable[[EngineThread, asyncio.Future[Any]], object]) -> None:
        """Pause the thread, launch three steps of REQUEST, and post these commands, each with a future."""
        make_future, thread = asyncio.get_running_loop().create_future, self._thread
        thread.post(partial(thread.set_paused, True, make_future()))
        thread.post(partial(thread.submit, REQUEST, make_future(), lambda _: None))
        for _ in range(3):
            thread.post(partial(call, lambda: thread.core.step()))
        for command in commands:
            thread.post(partial(call, command, thread, make_future()))
        thread.stop()
        thread.join()
        assert self.errors == [None]


def call(command: Callable[..., object], *arguments: object) -> None:
    command(*arguments)


@pytest.mark.parametrize("paused", [True, False])
async def test_a_pause_reports_the_tokens_of_the_finished_step(paused: bool) -> None:
    thread = PausedThread()
    thread.run(lambda thread, future: thread.set_paused(paused, future))
    assert thread.delivered == [[None, TOKENS[:3], None]]


async def test_tokens_are_delivered_before_new_weights_are_loaded() -> None:
    thread = PausedThread()
    before: list[list[object]] = []

    def write(_: EngineCore) -> int:
        before.extend(thread.delivered)
        return 7

    thread.run(lambda thread, future: thread.load_weights(write, future))
    assert before == [[None, TOKENS[:3]]]
    assert thread.delivered == [[None, TOKENS[:3]], [7]]


async def test_a_refused_load_reports_the_tokens_once() -> None:
    thread, failure = PausedThread(), EngineFailure("wrong bytes")

    def refuse(_: EngineCore) -> int:
        raise failure

    thread.run(
        lambda thread, future: thread.load_weights(refuse, future),
        lambda thread, future: thread.set_paused(True, future),
    )
    assert thread.delivered == [[None, TOKENS[:3]], [failure, None]]
