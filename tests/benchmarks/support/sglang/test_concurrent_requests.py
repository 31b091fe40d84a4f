"""The SGLang benchmark counts the answers that a fake engine loses or mixes up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.sglang.concurrent_requests import measure_crowd
from engine.contract import EngineFailure, Generation, GenerationRequest

NEW = 6
REQUESTS = [GenerationRequest(n, np.array([n, 2 * n + 1], np.int32), NEW) for n in range(40)]


class Model:
    """A token's logprob follows from it and its prompt."""

    async def compute_logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
        return -np.array([(7 * prompt[0] + 13 * token) % 19 for token in answer]) / 5.0


class Pretender:
    def __init__(self, answers_of: Mapping[int, int], finishes_at: Mapping[int, int], fails: Sequence[int]) -> None:
        """Sequence n gets the answer of `answers_of[n]`, or `finishes_at[n]` tokens, or none."""
        self._answers_of, self._finishes_at, self._fails = answers_of, finishes_at, fails

    def get_load(self) -> SimpleNamespace:
        return SimpleNamespace(running=16, waiting=24)

    async def generate(self, request: GenerationRequest) -> Generation:
        number = request.sequence_id
        if number in self._fails:
            raise EngineFailure("the connection broke")
        prompt = REQUESTS[self._answers_of.get(number, number)].token_ids
        token_ids = np.arange(number, number + self._finishes_at.get(number, NEW), dtype=np.int32)
        logprobs = (await Model().compute_logprobs(prompt.tolist(), token_ids.tolist())).astype(np.float32)
        return Generation(token_ids, logprobs, np.zeros_like(token_ids), "length")


def figures(
    answers_of: Mapping[int, int] | None = None, finishes_at: Mapping[int, int] | None = None, fails: Sequence[int] = ()
) -> Mapping[str, float]:
    engine: Any = Pretender(answers_of or {}, finishes_at or {}, fails)
    model: Any = Model()
    return asyncio.run(measure_crowd(engine, model, REQUESTS))


def test_correct_answers_are_neither_lost_nor_mixed_up():
    seen = figures()
    assert (seen["lost"], seen["mixed_up"], seen["told_apart"]) == (0, 0, 1.0)
    assert seen["own_difference"] < 1e-6 < seen["neighbours_difference"]
    assert (seen["in_flight"], seen["in_flight_at_server"]) == (40, 40)


def test_swapped_answers_are_mixed_up():
    seen = figures(answers_of={3: 9, 9: 3})
    assert (seen["lost"], seen["mixed_up"]) == (0, 2)


def test_failed_and_short_answers_are_lost(capsys: Any):
    seen = figures(finishes_at={5: NEW - 1}, fails=(1, 2))
    assert (seen["lost"], seen["mixed_up"]) == (3, 0)
    assert "lost 2 times: the connection broke" in capsys.readouterr().out


def test_without_answers_all_requests_are_lost():
    seen = figures(fails=range(len(REQUESTS)))
    assert (seen["lost"], seen["mixed_up"], seen["told_apart"]) == (40, 0, 0)
