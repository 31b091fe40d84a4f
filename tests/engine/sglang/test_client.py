"""The wire to an SGLang server: what is tried again, what is not, and what each failure is called."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerRefused, ServerSlow, ServerUnreachable, UnknownAnswer, UpdateRefused
from engine.sglang.protocol import Finished, GenerateAnswer, GenerateRequest, SamplingParams
from tests.engine.sglang.stand_in import ABORTED, LENGTH, StandIn, answer, broken, refusing, streaming

REQUEST = GenerateRequest("1;", [1, 2, 3], SamplingParams(max_new_tokens=3), stream=True)
FULL = {"type": "abort", "message": "The request queue is full.", "status_code": 503}


def whole(body: dict[str, Any]) -> dict[str, Any]:
    return answer(body, [4, 5, 6], LENGTH)


def meet(server: StandIn, scene: Callable[[SGLangClient], Awaitable[None]], *, request_s: float = 600.0) -> None:
    async def play() -> None:
        async with server.serving() as url:
            client = SGLangClient(url, request_s=request_s, back_off_s=(0.0, 0.0))
            try:
                await scene(client)
            finally:
                await client.close()

    asyncio.run(play())


async def collected(client: SGLangClient) -> list[GenerateAnswer]:
    return [each async for each in client.generate_streamed(REQUEST)]


def test_a_stream_gives_its_answers_one_after_the_other_up_to_the_last() -> None:
    server = StandIn(streaming(lambda body: answer(body, [4]), whole))

    async def scene(client: SGLangClient) -> None:
        answers = await collected(client)
        assert [each.output_ids for each in answers] == [[4], [4, 5, 6]]
        assert [each.meta_info.finish_reason for each in answers] == [None, Finished()]

    meet(server, scene)
    [body] = server.bodies("/generate")
    assert (body["input_ids"], body["sampling_params"]["top_k"], body["stream"]) == ([1, 2, 3], -1, True)
    assert "priority" not in body


def test_a_stream_that_came_to_its_end_leaves_its_connection_to_the_next() -> None:
    server = StandIn(streaming(whole))

    async def scene(client: SGLangClient) -> None:
        for _ in range(3):
            await collected(client)

    meet(server, scene)
    assert len(server.connections) == 1


def test_an_answer_larger_than_a_read_is_put_together() -> None:
    ids = [7] * 20_000

    async def scene(client: SGLangClient) -> None:
        assert [each.output_ids for each in await collected(client)] == [ids]

    meet(StandIn(streaming(lambda body: answer(body, ids, LENGTH))), scene)


def test_a_full_queue_is_asked_again_whichever_way_it_says_so() -> None:
    refused = refusing(503, {"object": "error", "message": "full", "type": "503", "code": 503})
    server = StandIn(refused, streaming(lambda body: answer(body, [], FULL)), streaming(whole))

    async def scene(client: SGLangClient) -> None:
        assert (await collected(client))[-1].output_ids == [4, 5, 6]

    meet(server, scene)
    rids = [body["rid"] for body in server.bodies("/generate")]
    assert len(set(rids)) == len(rids) == 3


def test_a_queue_that_stays_full_is_a_refusal() -> None:
    server = StandIn(refusing(503, {"error": {"message": "The request queue is full."}}))

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(ServerRefused, match=r"refused /generate: 503 The request queue is full\."):
            await collected(client)

    meet(server, scene)
    assert len(server.bodies("/generate")) == 3


def test_a_bad_request_is_refused_once_with_what_the_server_says() -> None:
    server = StandIn(refusing(400, {"error": "unknown field `sampling_params.beams`"}))

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(ServerRefused, match=r"400 unknown field `sampling_params\.beams`") as refusal:
            await collected(client)
        assert refusal.value.status == 400

    meet(server, scene)
    assert len(server.bodies("/generate")) == 1


def test_an_error_within_a_stream_is_a_refusal_too() -> None:
    said = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(ServerRefused, match="400 too long"):
            await collected(client)

    meet(StandIn(streaming(lambda body: said)), scene)


def test_where_nobody_listens_nothing_was_sent() -> None:
    async def scene() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # bound, and nobody listens
            client = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}", back_off_s=(0.0,))
            with pytest.raises(ServerUnreachable) as failure:
                await collected(client)
            assert not failure.value.sent
            assert not await client.ready()
            assert not await client.answers()
            await client.close()

    asyncio.run(scene())


@pytest.mark.parametrize("then", ["broken", "cut"])
def test_a_stream_that_breaks_off_is_not_asked_for_again(then: str) -> None:
    server = StandIn(streaming(lambda body: answer(body, [4]), then=then))

    async def scene(client: SGLangClient) -> None:
        came: list[GenerateAnswer] = []
        with pytest.raises(ServerUnreachable) as failure:
            async for each in client.generate_streamed(REQUEST):
                came.append(each)
        assert ([each.output_ids for each in came], failure.value.sent) == ([[4]], True)

    meet(server, scene)
    assert len(server.bodies("/generate")) == 1


def test_a_connection_that_breaks_after_the_request_was_sent_is_not_tried_again_for_tokens() -> None:
    server = StandIn(broken)

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(ServerUnreachable) as failure:
            await collected(client)
        assert failure.value.sent

    meet(server, scene)
    assert len(server.bodies("/generate")) == 1


def test_what_is_merely_asked_is_asked_again_when_the_connection_breaks() -> None:
    server = StandIn()
    server.refused = 2

    async def scene(client: SGLangClient) -> None:
        assert (await client.server_info()).max_req_input_len == 250

    meet(server, scene)
    assert len(server.bodies("/server_info")) == 3


def test_a_silent_server_is_a_slow_one() -> None:
    async def scene(client: SGLangClient) -> None:
        with pytest.raises(ServerSlow, match=r"/generate: nothing came within 0\.05 s"):
            await collected(client)

    meet(StandIn(streaming(lambda body: answer(body, [4]), then="silent")), scene, request_s=0.05)


def test_a_version_that_is_not_known_is_refused_by_name() -> None:
    server = StandIn()
    server.info["version"] = "0.6.0"
    del server.info["page_size"]

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(UnknownAnswer, match=r"SGLang 0\.6\.0 is not known here; known: 0\.5\.23"):
            await client.server_info()

    meet(server, scene)


def test_a_missing_field_is_named_with_the_servers_version() -> None:
    server = StandIn(streaming(lambda body: answer(body, [4], without=["weight_version"])))
    del server.info["page_size"]

    async def scene(client: SGLangClient) -> None:
        with pytest.raises(UnknownAnswer, match=r"SGLang 0\.5\.23 gave no ServerInfo: .*`page_size`"):
            await client.server_info()
        with pytest.raises(
            UnknownAnswer, match=r"SGLang 0\.5\.23 gave no GenerateAnswer: .*`weight_version`.*meta_info"
        ):
            await collected(client)

    meet(server, scene)


def test_a_request_that_was_aborted_before_it_began_says_less_of_itself() -> None:
    unsaid = ("prompt_tokens", "cached_tokens", "num_retractions", "weight_versions", "dp_rank")

    async def scene(client: SGLangClient) -> None:
        [only] = await collected(client)
        assert only.output_ids == []

    meet(StandIn(streaming(lambda body: answer(body, [], ABORTED, without=unsaid))), scene)


def test_weights_that_a_server_does_not_take_are_an_update_refused() -> None:
    async def act(client: SGLangClient) -> None:
        with pytest.raises(UpdateRefused, match="/begin_weight_update: no such session"):
            await client.begin_update()

    class Refusing(StandIn):
        async def _take(self, request: Any) -> Any:
            return await refusing(400, {"success": False, "message": "no such session"})(request, {})

    meet(Refusing(), act)


def test_no_more_generations_are_under_way_than_connections() -> None:
    server = StandIn(streaming(then="silent"))

    async def play() -> None:
        async with server.serving() as url:
            client = SGLangClient(url, connections=1)
            calls = [asyncio.ensure_future(client.generate(REQUEST)) for _ in range(2)]
            await server.came.wait()
            assert len(await client.loads()) == 1  # a control call has a connection all the same
            assert len(server.bodies("/generate")) == 1
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await client.close()

    asyncio.run(play())
