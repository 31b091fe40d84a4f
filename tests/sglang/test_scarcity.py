"""The SGLang engine with a real server that has a small cache and a short queue."""

import asyncio

import pytest

from asterism.engine.contract import Generation
from asterism.engine.http.errors import ServerStatusError
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, SamplingParams
from tests.engine.contract.bench import as_sequence, request, until_generated
from tests.sglang.bench import SGLangBench, SharedServer

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


async def test_requests_wait_for_a_full_queue(bench: SGLangBench) -> None:
    """The server runs 16 requests and queues at most 64 more."""
    async with bench.engine(scarce=True, max_pending=120) as (engine, _):
        answers = await asyncio.gather(*(engine.generate(request(number, 8)) for number in range(120)))
        assert [len(each.token_ids) for each in answers] == [8] * 120


async def test_an_aborted_queued_turn_leaves_the_servers_queue(
    bench: SGLangBench, servers: tuple[SharedServer, SharedServer]
) -> None:
    async with SGLangClient(servers[1].server.url) as client, bench.engine(scarce=True) as (engine, capacity):
        half = request(1, capacity.kv_tokens // 2, 20)
        running, waiting = (asyncio.ensure_future(engine.generate(as_sequence(n, half))) for n in (1, 2))
        await until_generated(bench, engine, 1, running)
        await _wait_for_queue(client, 1, running)
        engine.abort(2)
        assert (await waiting).finish == "abort"
        await _wait_for_queue(client, 0, running)
        assert not running.done()
        engine.abort(1)
        assert len((await running).token_ids) > 0


async def test_a_rejection_has_the_servers_message(servers: tuple[SharedServer, SharedServer]) -> None:
    await servers[1].start()
    async with SGLangClient(servers[1].server.url) as client:
        too_long = GenerateRequest("1;", [1] * 100_000, SamplingParams(max_new_tokens=1), stream=True)
        with pytest.raises(ServerStatusError, match="longer than the model's context length") as refusal:
            await client.generate(too_long)
        assert refusal.value.status == 400


async def _wait_for_queue(client: SGLangClient, count: int, running: asyncio.Future[Generation]) -> None:
    """Wait until the server's queue has this length. Fails if the running turn ends earlier."""
    while (await client.get_loads())[0].num_waiting_reqs != count:
        assert not running.done()
        await asyncio.sleep(0.02)  # the server reports its queue only on request
