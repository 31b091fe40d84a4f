"""A real server with two model replicas: routing, load counts and priorities."""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from asterism.engine.contract import Engine, EngineFailure, Generation, GenerationRequest
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, GenerateResponse
from tests.engine.contract.bench import as_sequence, changed_model, continued, publish, request, tokens, wait_until
from tests.engine.tiny_models import measure_errors
from tests.sglang.bench import PAGE, TRAITS, SGLangBench, SharedServer
from tests.sglang.serving import make_replicated

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT = 31_320
Ranks = dict[int, list[int | None]]  # the ranks of a sequence's turns, by sequence


class RecordingClient(SGLangClient):
    """A client that records which rank sent each response."""

    def __init__(self, url: str, ranks: Ranks) -> None:
        super().__init__(url)
        self._ranks = ranks

    async def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        sequence_id = int(request.rid.split(":")[1].split("-")[0])
        rank = None
        async with aclosing(super().generate_streamed(request)) as answers:
            async for answer in answers:
                if rank is None:
                    self._ranks[sequence_id].append(rank := answer.meta_info.dp_rank)
                yield answer


@pytest.fixture(scope="module")
def shared(loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    shared = SharedServer(make_replicated(model, PORT), tmp_path_factory.mktemp("doubled"), "doubled")
    loop.run(shared.start())
    yield shared
    loop.run(shared.close())


@pytest.fixture
def ranks() -> Ranks:
    return defaultdict(list)


@pytest.fixture
def bench(shared: SharedServer, ranks: Ranks, tmp_path: Path) -> SGLangBench:
    return SGLangBench(shared, shared, tmp_path, TRAITS, lambda url: RecordingClient(url, ranks))


def start_turns(
    engine: Engine, numbers: Sequence[int], template: GenerationRequest
) -> list[asyncio.Future[Generation]]:
    return [asyncio.ensure_future(engine.generate(as_sequence(number, template))) for number in numbers]


async def test_sequences_of_a_prompt_share_a_rank_and_the_load_covers_both_ranks(
    bench: SGLangBench, shared: SharedServer, ranks: Ranks
) -> None:
    async with bench.engine() as (engine, capacity):
        assert capacity.kv_tokens == 2 * shared.server.info.max_total_num_tokens == 8192
        one, other = (
            start_turns(engine, range(3), request(1, 400)),
            start_turns(engine, range(3, 6), request(2, 400)),
        )
        await wait_until(bench, engine, lambda load: (load.running, load.waiting) == (2, 4), *one, *other)
        answers = await asyncio.gather(*one, *other)
        assert [len(answer.token_ids) for answer in answers] == [400] * 6
        assert engine.get_load().generated_tokens == 6 * 400
        assert engine.get_load().running == 0
    assert ranks == {number: [0 if number < 3 else 1] for number in range(6)}


async def test_a_sequence_reuses_the_cached_prefix_of_its_rank(bench: SGLangBench, ranks: Ranks) -> None:
    async with bench.engine() as (engine, _):
        requests = [request(number, 30, 40) for number in (11, 12)]
        first = await asyncio.gather(*map(engine.generate, requests))
        # The turns run one after another, so that both ranks are idle before each turn.
        for turn, generation in reversed([*zip(requests, first, strict=True)]):
            again = await engine.generate(continued(turn, generation.token_ids.tolist(), 4))
            assert again.cached_tokens == (40 + 29) // PAGE * PAGE
        assert engine.get_load().recomputed_tokens == 0
    assert ranks == {11: [0, 0], 12: [1, 1]}


async def test_new_weights_reach_both_ranks_during_turns(
    bench: SGLangBench, shared: SharedServer, ranks: Ranks
) -> None:
    async def checksums() -> list[str]:
        async with SGLangClient(shared.server.url) as client:
            return [rank.per_gpu_checksum for rank in await client.compute_checksums()]

    async with bench.engine() as (engine, _):
        model, old = changed_model(bench), await checksums()
        calls = [*start_turns(engine, [21], request(21, 500)), *start_turns(engine, [22], request(22, 500))]
        await wait_until(bench, engine, lambda _: {*ranks} == {21, 22}, *calls)
        await engine.load_weights(publish(bench, 4, model))
        new = await checksums()
        assert (len(new), len({*new}), len({*old}), new == old) == (2, 1, 1, False)
        for generation in await asyncio.gather(*calls):
            assert set(generation.versions.tolist()) == {0, 4}
        requests = [request(number, 40) for number in (23, 24)]
        for turn, generation in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            assert set(generation.versions.tolist()) == {4}
            assert measure_errors(model, turn, generation).max() < TRAITS.logprob_error
    assert ranks == {21: [0], 22: [1], 23: [0], 24: [1]}


async def test_the_longest_queued_request_of_a_rank_runs_first(bench: SGLangBench, ranks: Ranks) -> None:
    async with bench.engine() as (engine, _):
        template = as_sequence(32, request(31, 200))
        further = continued(template, await tokens(engine, template), 8)
        [blocker] = start_turns(engine, [31], request(31, 900))
        await wait_until(bench, engine, lambda load: load.running == 1, blocker)
        ended: list[str] = []
        [near] = start_turns(engine, [33], request(31, 8))
        near.add_done_callback(lambda _: ended.append("near"))
        await asyncio.sleep(0)  # the request of this turn arrives first
        far = asyncio.ensure_future(engine.generate(further))
        far.add_done_callback(lambda _: ended.append("far"))
        await wait_until(bench, engine, lambda load: load.waiting == 2, blocker)
        engine.abort(31)
        assert [len((await call).token_ids) for call in (near, far)] == [8, 8]
        assert ended == ["far", "near"]
    assert ranks == {31: [0], 32: [0, 0], 33: [0]}


async def test_the_death_of_one_rank_fails_all_turns(bench: SGLangBench, shared: SharedServer) -> None:
    async with bench.engine() as (engine, _):
        calls = [*start_turns(engine, [41], request(41, 900)), *start_turns(engine, [42], request(42, 900))]
        await wait_until(bench, engine, lambda load: load.running == 2, *calls)
        [victim] = [pid for pid, name in shared.server.list_processes().items() if name == "sglang::scheduler_DP1"]
        os.kill(victim, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EngineFailure, match="lost its process sglang::scheduler_DP1"):
                await call
