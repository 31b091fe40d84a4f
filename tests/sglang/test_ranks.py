"""A real server with two copies of the model: which of them takes what, what is counted, and who is served first."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.contract import Engine, EngineFailure, Generation, GenerationRequest
from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.fit import ServerUnusable
from engine.sglang.protocol import GenerateAnswer, GenerateRequest
from tests.engine.contract.bench import (
    as_sequence,
    changed_model,
    continued,
    learners_logprobs,
    publish,
    request,
    tokens,
    until,
)
from tests.sglang.bench import PAGE, TRAITS, SGLangBench, Shared
from tests.sglang.serving import doubled

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT = 31_320
Ranks = dict[int, list[int | None]]  # by sequence, those that answered its turns


class Listening(SGLangClient):
    """Notes who answers."""

    def __init__(self, url: str, heard: Ranks) -> None:
        super().__init__(url)
        self._heard = heard

    async def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateAnswer, None]:
        sequence_id = int(request.rid.split(":")[1].split("-")[0])
        rank = None
        async with aclosing(super().generate_streamed(request)) as answers:
            async for answer in answers:
                if rank is None:
                    self._heard[sequence_id].append(rank := answer.meta_info.dp_rank)
                yield answer


@pytest.fixture(scope="module")
def shared(loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(doubled(model, PORT), tmp_path_factory.mktemp("doubled"), "doubled")
    loop.run(shared.start())
    yield shared
    loop.run(shared.close())


@pytest.fixture
def heard() -> Ranks:
    return defaultdict(list)


@pytest.fixture
def bench(shared: Shared, heard: Ranks, tmp_path: Path) -> SGLangBench:
    return SGLangBench(shared, shared, tmp_path, TRAITS, lambda url: Listening(url, heard))


def begun(engine: Engine, numbers: Sequence[int], asked: GenerationRequest) -> list[asyncio.Future[Generation]]:
    return [asyncio.ensure_future(engine.generate(as_sequence(number, asked))) for number in numbers]


def test_the_sequences_of_a_prompt_go_to_one_rank_and_load_and_capacity_are_of_both(
    loop: asyncio.Runner, bench: SGLangBench, shared: Shared, heard: Ranks
) -> None:
    async def scene() -> None:
        async with bench.engine() as (engine, capacity):
            assert capacity.kv_tokens == 2 * shared.server.info.max_total_num_tokens == 8192
            one, other = begun(engine, range(3), request(1, 200)), begun(engine, range(3, 6), request(2, 200))
            await until(bench, engine, lambda load: (load.running, load.waiting) == (2, 4), *one, *other)
            answers = await asyncio.gather(*one, *other)
            assert [len(answer.token_ids) for answer in answers] == [200] * 6
            assert engine.load().generated_tokens == 6 * 200
            assert engine.load().running == 0
        assert heard == {number: [0 if number < 3 else 1] for number in range(6)}

    loop.run(scene())


def test_a_sequence_finds_its_prefix_at_the_rank_of_its_first_turn(
    loop: asyncio.Runner, bench: SGLangBench, heard: Ranks
) -> None:
    async def scene() -> None:
        async with bench.engine() as (engine, _):
            asked = [request(number, 30, 40) for number in (11, 12)]
            first = await asyncio.gather(*map(engine.generate, asked))
            for turn, found in reversed([*zip(asked, first, strict=True)]):  # one at a time: both ranks are idle
                again = await engine.generate(continued(turn, found.token_ids.tolist(), 4))
                assert again.cached_tokens == (40 + 29) // PAGE * PAGE
            assert engine.load().recomputed_tokens == 0
        assert heard == {11: [0, 0], 12: [1, 1]}

    loop.run(scene())


def test_new_weights_reach_both_ranks_in_the_middle_of_their_turns(
    loop: asyncio.Runner, bench: SGLangBench, shared: Shared, heard: Ranks
) -> None:
    async def checksums() -> list[str]:
        client = SGLangClient(shared.server.url)
        try:
            return [rank.per_gpu_checksum for rank in await client.checksums()]
        finally:
            await client.close()

    async def scene() -> None:
        async with bench.engine() as (engine, _):
            model, old = changed_model(bench), await checksums()
            calls = [*begun(engine, [21], request(21, 500)), *begun(engine, [22], request(22, 500))]
            await until(bench, engine, lambda _: {*heard} == {21, 22}, *calls)
            await engine.load_weights(publish(bench, 4, model))
            new = await checksums()
            assert (len(new), len({*new}), len({*old}), new == old) == (2, 1, 1, False)
            for found in await asyncio.gather(*calls):
                assert set(found.versions.tolist()) == {0, 4}
            asked = [request(number, 40) for number in (23, 24)]
            for turn, found in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
                assert set(found.versions.tolist()) == {4}
                expected = learners_logprobs(model, turn, found)
                sampled = expected.gather(1, torch.from_numpy(found.token_ids).long()[:, None])[:, 0]
                assert (sampled - torch.from_numpy(found.logprobs)).abs().max() < TRAITS.logprob_error
        assert heard == {21: [0], 22: [1], 23: [0], 24: [1]}

    loop.run(scene())


def test_of_those_that_wait_at_a_rank_the_one_that_is_further_goes_first(
    loop: asyncio.Runner, bench: SGLangBench, heard: Ranks
) -> None:
    async def scene() -> None:
        async with bench.engine() as (engine, _):
            asked = request(31, 200)
            further = continued(as_sequence(32, asked), await tokens(engine, as_sequence(32, asked)), 8)
            [blocker] = begun(engine, [31], request(31, 900))
            await until(bench, engine, lambda load: load.running == 1, blocker)
            [near] = begun(engine, [33], request(31, 8))
            await until(bench, engine, lambda load: load.waiting == 1, blocker)
            far = asyncio.ensure_future(engine.generate(further))
            await until(bench, engine, lambda load: load.waiting == 2, blocker)
            engine.abort(31)
            done, _ = await asyncio.wait((near, far), return_when=asyncio.FIRST_COMPLETED)
            assert done == {far}
            assert [len((await call).token_ids) for call in (near, far)] == [8, 8]
        assert heard == {31: [0], 32: [0, 0], 33: [0]}

    loop.run(scene())


@pytest.mark.parametrize("way", ["tensor", "group"])
def test_weights_any_other_way_are_refused_by_the_key(loop: asyncio.Runner, shared: Shared, way: str) -> None:
    given = shared.wanted
    sglang = replace(given.sglang, data_parallel=1, weights=way, attach=(shared.server.url,))
    with pytest.raises(ServerUnusable) as caught:
        loop.run(AttachedServer(given._replace(sglang=sglang)).start())
    assert str(caught.value) == (
        f'sglang.weights = "{way}": sglang.attach[0] = {shared.server.url} has 2 copies of the model and takes weights'
        ' by "disk" alone'
    )


def test_where_one_rank_dies_all_turns_fail(loop: asyncio.Runner, bench: SGLangBench, shared: Shared) -> None:
    async def scene() -> None:
        async with bench.engine() as (engine, _):
            calls = [*begun(engine, [41], request(41, 900)), *begun(engine, [42], request(42, 900))]
            await until(bench, engine, lambda load: load.running == 2, *calls)
            [victim] = [pid for pid, name in shared.server.processes().items() if name == "sglang::scheduler_DP1"]
            os.kill(victim, signal.SIGKILL)
            for call in calls:
                with pytest.raises(EngineFailure, match="lost its process sglang::scheduler_DP1"):
                    await call

    loop.run(scene())
