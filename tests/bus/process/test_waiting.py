"""Tests of waiting for the first of several coroutines."""

import asyncio

import pytest

from asterism.bus.process.waiting import wait_for_first


async def finish_after(seconds: float, ended: list[float]) -> float:
    try:
        await asyncio.sleep(seconds)
        return seconds
    finally:
        await asyncio.sleep(0)  # the cancelled coroutine needs time to end
        ended.append(seconds)


async def test_the_first_result_is_returned_after_the_other_coroutines_have_ended() -> None:
    ended: list[float] = []
    assert await wait_for_first(*(finish_after(seconds, ended) for seconds in (30.0, 2.0, 10.0))) == 2.0
    assert sorted(ended) == [2.0, 10.0, 30.0]
    assert asyncio.get_running_loop().time() == 2.0


async def test_the_earliest_argument_wins_if_several_coroutines_end_together() -> None:
    async def fail() -> int:
        raise ValueError("broken")

    async def succeed() -> int:
        return 1

    assert await wait_for_first(succeed(), fail()) == 1
    with pytest.raises(ValueError, match="broken"):
        await wait_for_first(fail(), succeed())


async def test_a_cancelled_wait_cancels_all_coroutines() -> None:
    ended: list[float] = []
    waiting = asyncio.create_task(wait_for_first(finish_after(5.0, ended), finish_after(6.0, ended)))
    await asyncio.sleep(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [5.0, 6.0]
