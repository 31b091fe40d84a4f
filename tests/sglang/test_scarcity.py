"""The SGLang engine before a real server that has too little room: what it gives up, and what it does not take yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from engine.contract import Capacity
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from tests.sglang.scenes import on_engine, request, until_generated

pytestmark = pytest.mark.sglang

STOP = 444  # with a token to stop at, the server lends more room than it has


def test_sequences_that_are_stopped_for_lack_of_room_are_counted_and_come_to_their_end(
    small_server_url: str, model: Path
) -> None:
    async def scene(engine: SGLangEngine, capacity: Capacity) -> None:
        count = capacity.kv_tokens // 64  # with 200 tokens each, three times too many
        answers = await asyncio.gather(
            *(engine.generate(request(number, 180, stop_token_ids=(STOP,))) for number in range(count))
        )
        lengths = [len(each.token_ids) for each in answers]
        assert all(length == 180 or each.finish == "stop" for length, each in zip(lengths, answers, strict=True))
        load = engine.load()
        assert load.generated_tokens == sum(lengths)
        assert load.preempted > 0
        assert load.recomputed_tokens > 0

    with capture_logs() as lines:
        on_engine(small_server_url, model, scene)
    assert "engine.retracted" in [line["event"] for line in lines]


def test_a_prefix_that_others_have_displaced_is_noticed_when_its_sequence_comes_back(
    small_server_url: str, model: Path
) -> None:
    async def scene(engine: SGLangEngine, capacity: Capacity) -> None:
        first = await engine.generate(request(1, 20, 200))
        for number in range(2, 4 + capacity.kv_tokens // 200):
            await engine.generate(request(number, 20, 200))
        ids = np.concatenate((request(1, 20, 200).token_ids, first.token_ids))
        again = await engine.generate(msgspec.structs.replace(request(1, 4, 200), token_ids=ids))
        assert again.cached_tokens < 219
        assert engine.load().evicted_tokens == 219 - again.cached_tokens

    with capture_logs() as lines:
        on_engine(small_server_url, model, scene)
    [line] = [line for line in lines if line["event"] == "engine.evicted"]
    assert (line["trajectory_id"], line["had_tokens"]) == (1, 219)


def test_a_full_queue_is_waited_for(small_server_url: str, model: Path) -> None:
    """The server is started with --max-queued-requests 64."""

    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        answers = await asyncio.gather(*(engine.generate(request(number, 8)) for number in range(120)))
        assert [len(each.token_ids) for each in answers] == [8] * 120

    on_engine(small_server_url, model, scene)


def test_a_turn_that_is_aborted_while_it_waits_for_room_leaves_the_servers_queue(
    small_server_url: str, model: Path
) -> None:
    async def scene(engine: SGLangEngine, capacity: Capacity) -> None:
        client = SGLangClient(small_server_url)
        half = request(1, capacity.kv_tokens // 2, 20)
        running, waiting = (
            asyncio.ensure_future(engine.generate(msgspec.structs.replace(half, sequence_id=number)))
            for number in (1, 2)
        )
        try:
            await until_generated(engine, 1)
            await _until_waiting(client, 1)
            engine.abort(2)
            assert (await waiting).finish == "abort"
            await _until_waiting(client, 0)
            assert not running.done()
            engine.abort(1)
            assert len((await running).token_ids) > 0
        finally:
            await client.close()

    on_engine(small_server_url, model, scene)


async def _until_waiting(client: SGLangClient, count: int) -> None:
    while (await client.loads())[0].num_waiting_reqs != count:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.02)
