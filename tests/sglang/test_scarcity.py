"""The SGLang engine before a real server that has too little room: what it does not take yet, and what it never takes."""

from __future__ import annotations

import asyncio

import pytest

from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerRefused
from engine.sglang.protocol import GenerateRequest, SamplingParams
from tests.engine.contract.bench import as_sequence, request, until_generated
from tests.sglang.bench import SGLangBench, Shared, with_client

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_a_full_queue_is_waited_for(loop: asyncio.Runner, bench: SGLangBench) -> None:
    """64 wait at most, 16 run."""

    async def scene() -> None:
        async with bench.engine(scarce=True, max_pending=120) as (engine, _):
            answers = await asyncio.gather(*(engine.generate(request(number, 8)) for number in range(120)))
            assert [len(each.token_ids) for each in answers] == [8] * 120

    loop.run(scene())


def test_a_turn_that_is_aborted_while_it_waits_for_room_leaves_the_servers_queue(
    loop: asyncio.Runner, bench: SGLangBench, servers: tuple[Shared, Shared]
) -> None:
    async def scene(client: SGLangClient) -> None:
        async with bench.engine(scarce=True) as (engine, capacity):
            half = request(1, capacity.kv_tokens // 2, 20)
            running, waiting = (asyncio.ensure_future(engine.generate(as_sequence(n, half))) for n in (1, 2))
            await until_generated(bench, engine, 1, running)
            await _until_waiting(client, 1)
            engine.abort(2)
            assert (await waiting).finish == "abort"
            await _until_waiting(client, 0)
            assert not running.done()
            engine.abort(1)
            assert len((await running).token_ids) > 0

    with_client(loop, servers[1], scene)


def test_what_the_server_does_not_take_it_says(loop: asyncio.Runner, servers: tuple[Shared, Shared]) -> None:
    async def scene(client: SGLangClient) -> None:
        too_long = GenerateRequest("1;", [1] * 100_000, SamplingParams(max_new_tokens=1), stream=True)
        with pytest.raises(ServerRefused, match="longer than the model's context length") as refusal:
            await client.generate(too_long)
        assert refusal.value.status == 400

    with_client(loop, servers[1], scene)


async def _until_waiting(client: SGLangClient, count: int) -> None:
    while (await client.loads())[0].num_waiting_reqs != count:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.02)
