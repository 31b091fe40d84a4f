"""The SGLang engine before a real server: the contract."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bus.messages import WeightsPublished
from engine.checkpoint import load_model
from engine.contract import Capacity, GenerationRequest, RequestRefused
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.errors import ServerRefused
from engine.sglang.protocol import GenerateRequest, SamplingParams
from tests.sglang.scenes import ORDINARY, on_engine, request, until_generated

pytestmark = pytest.mark.sglang


def continued(asked: GenerationRequest, token_ids: list[int], new_tokens: int) -> GenerationRequest:
    ids = np.concatenate((asked.token_ids, np.array(token_ids, np.int32)))
    return msgspec.structs.replace(asked, token_ids=ids, max_new_tokens=new_tokens)


def test_a_token_depends_on_its_seed_and_position_alone(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        together = await asyncio.gather(*(engine.generate(request(number)) for number in range(4)))
        alone = [await engine.generate(request(number)) for number in range(4)]
        assert [each.token_ids.tolist() for each in together] == [each.token_ids.tolist() for each in alone]
        whole = alone[1].token_ids.tolist()
        rest = await engine.generate(continued(request(1), whole[:10], 14))
        assert rest.token_ids.tolist() == whole[10:]
        assert rest.cached_tokens == 20 + 10 - 1
        np.testing.assert_allclose(rest.logprobs, alone[1].logprobs[10:], atol=1e-4)

    on_engine(server_url, model, scene)


def test_another_seed_gives_other_tokens_whichever_of_its_bits_differs(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        seeds = (5, 6, 5 + 2**32, 5 + 2**63)
        drawn = [await engine.generate(request(1, seed=seed)) for seed in seeds]
        assert len({tuple(each.token_ids.tolist()) for each in drawn}) == len(seeds)

    on_engine(server_url, model, scene)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6, "top_p": 0.7, "top_k": 5}, {"temperature": 0.0}],
    ids=["plain", "cut", "greedy"],
)
def test_logprobs_are_those_of_the_model_at_the_requests_temperature(
    server_url: str, model: Path, settings: dict[str, Any]
) -> None:
    """In float32; greedy: at temperature 1. Before top-p and top-k."""
    own = load_model(model, torch.float32)

    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        asked = request(3, 40, **settings)
        found = await engine.generate(asked)
        ids = torch.from_numpy(np.concatenate((asked.token_ids, found.token_ids))).long()
        with torch.no_grad():
            logits = own.logits(own(ids[None])[0, len(asked.token_ids) - 1 : -1])
        wanted = (logits / (asked.temperature or 1.0)).log_softmax(-1)
        sampled = wanted.gather(-1, torch.from_numpy(found.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, sampled.numpy(), atol=2e-4)
        if asked.temperature == 0:
            assert found.token_ids.tolist() == logits.argmax(-1).tolist()
        if asked.top_k:
            assert int((wanted > sampled[:, None]).sum(-1).max()) < asked.top_k

    on_engine(server_url, model, scene)


def test_a_turn_ends_at_its_stop_tokens_and_not_at_the_models_own(server_url: str, model: Path) -> None:
    end = msgspec.json.decode((model / "config.json").read_bytes())["eos_token_id"]

    def hot(seed: int, **settings: Any) -> GenerationRequest:
        return request(8, 150, temperature=100.0, seed=seed, **settings)

    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        for seed in range(50):
            ids = (await engine.generate(hot(seed))).token_ids.tolist()
            if end in ids[:100]:
                break
        behind = ids.index(end) + 20
        stop = next(token for token in ids[behind:] if token not in ids[:behind])
        stopped = await engine.generate(hot(seed, stop_token_ids=(stop,)))
        assert (stopped.token_ids.tolist(), stopped.finish) == (ids[: ids.index(stop) + 1], "stop")

    on_engine(server_url, model, scene)


def test_an_abort_gives_what_there_is_and_the_turn_can_be_gone_on_with(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        whole = (await engine.generate(request(5, 400))).token_ids.tolist()
        call = asyncio.ensure_future(engine.generate(request(5, 400)))
        await until_generated(engine, 400 + 32)
        engine.abort(5)
        part = await call
        count = len(part.token_ids)
        assert part.finish == "abort"
        assert 32 <= count < 400
        assert (part.token_ids.tolist(), len(part.logprobs), len(part.versions)) == (whole[:count], count, count)
        rest = await engine.generate(continued(request(5), whole[:count], 30))
        assert rest.token_ids.tolist() == whole[count : count + 30]

    on_engine(server_url, model, scene)


def test_a_pause_keeps_what_runs_and_an_abort_meanwhile_answers_at_once(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        whole = (await engine.generate(request(6, 300))).token_ids.tolist()
        kept, aborted = (
            asyncio.ensure_future(engine.generate(msgspec.structs.replace(request(6, 300), sequence_id=number)))
            for number in (6, 7)
        )
        await until_generated(engine, 300 + 64)
        await engine.pause()
        engine.abort(7)
        count = len((await aborted).token_ids)
        assert (await aborted).token_ids.tolist() == whole[:count]
        assert not kept.done()
        await engine.resume()
        assert (await kept).token_ids.tolist() == whole

    on_engine(server_url, model, scene)


def test_weights_in_the_middle_of_a_turn_give_its_later_tokens_their_version(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        parked = await engine.generate(request(2))
        assert (await engine.generate(continued(request(2), parked.token_ids.tolist(), 4))).cached_tokens > 0
        call = asyncio.ensure_future(engine.generate(request(9, 400)))
        await until_generated(engine, 24 + 4 + 32)
        await engine.load_weights(WeightsPublished(41, str(model), 0, "d" * 32))
        assert engine.version == 41
        versions = (await call).versions.tolist()
        assert set(versions) == {40, 41}
        assert versions == sorted(versions)
        later = await engine.generate(continued(request(2), parked.token_ids.tolist(), 4))
        assert (later.cached_tokens, set(later.versions.tolist())) == (0, {41})

    on_engine(server_url, model, scene, version=40)


def test_requests_at_the_limits_of_a_sequence_are_served_in_full(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, capacity: Capacity) -> None:
        longest = capacity.sequence_tokens
        for prompt_tokens in (longest - 1, longest - 40):
            asked = request(1, longest - prompt_tokens, prompt_tokens)
            assert len((await engine.generate(asked)).token_ids) == longest - prompt_tokens
        with pytest.raises(RequestRefused, match="are beyond the"):
            await engine.generate(request(1, 2, longest - 1))

    async def longest() -> int:
        client = SGLangClient(server_url)
        info = await client.server_info()
        await client.close()
        return info.max_req_input_len

    on_engine(server_url, model, scene, sequence_tokens=asyncio.run(longest()))


def test_what_the_server_does_not_take_it_says(server_url: str) -> None:
    async def play() -> None:
        client = SGLangClient(server_url)
        try:
            too_long = GenerateRequest("1;", [1] * 100_000, SamplingParams(max_new_tokens=1), stream=True)
            with pytest.raises(ServerRefused, match="longer than the model's context length") as refusal:
                await client.generate(too_long)
            assert refusal.value.status == 400
        finally:
            await client.close()

    asyncio.run(play())


def test_the_load_counts_every_token_once(server_url: str, model: Path) -> None:
    async def scene(engine: SGLangEngine, _: Capacity) -> None:
        calls = [asyncio.ensure_future(engine.generate(request(number + ORDINARY, 200, 50))) for number in range(8)]
        while not engine.load().running:
            assert not calls[0].done()
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*calls)
        load = engine.load()
        assert load.generated_tokens == 8 * 200
        assert load.prefilled_tokens == sum(50 - each.cached_tokens for each in answers)
        assert (load.running, load.waiting, load.recomputed_tokens, load.preempted) == (0, 0, 0, 0)
        assert 0 < load.decode_steps <= 8 * 200

    on_engine(server_url, model, scene)
