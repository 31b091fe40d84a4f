"""Cases of the engine contract: ids and logprobs, seeds, stops and limits."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
from numpy.typing import NDArray

from asterism.engine.contract import Engine, EngineFailure, Generation, GenerationRequest, RequestRefused
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.contract.bench import Bench, as_sequence, changed_model, continued, posted, publish, request, tokens
from tests.engine.tiny_models import compute_logprobs

_logger = structlog.get_logger()

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 0.0},
)


async def tokens_and_logprobs_match_the_learners_model(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        await _compare(bench, engine, load_model(bench.model, torch.float32), version=0)


async def tokens_and_logprobs_match_the_learners_model_after_new_weights(bench: Bench) -> None:
    model = changed_model(bench)
    async with bench.engine() as (engine, _):
        await engine.load_weights(publish(bench, 3, model))
        await _compare(bench, engine, model, version=3)


async def _compare(bench: Bench, engine: Engine, model: CausalLM, version: int) -> None:
    asked = [request(number, 40, **settings) for number, settings in enumerate(SETTINGS)]
    for each, generation in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        _check(bench, model, each, generation)
        assert (generation.finish, set(generation.versions.tolist())) == ("length", {version})


def _check(bench: Bench, model: CausalLM, asked: GenerationRequest, found: Generation) -> None:
    """Compare logprobs. A greedy token's logprob can be lower than the maximum by twice the logprob error."""
    counts = len(found.token_ids), len(found.logprobs), len(found.versions)
    assert counts == (asked.max_new_tokens,) * 3
    wanted = compute_logprobs(model, asked, found)
    sampled = wanted.gather(-1, torch.from_numpy(found.token_ids).long()[:, None])
    errors = np.abs(found.logprobs - sampled[:, 0].numpy())
    _logger.info("logprobs.compared", mean=float(errors.mean()), max=float(errors.max()), tokens=len(errors))
    assert errors.max() <= bench.traits.logprob_error
    better = wanted > sampled + 2 * bench.traits.logprob_error
    if asked.sampling.temperature == 0:
        assert not better.any()
    if asked.sampling.top_k:
        assert int(better.sum(-1).max()) < asked.sampling.top_k
    assert float((wanted.exp() * better).sum(-1).max()) < asked.sampling.top_p


async def concurrent_calls_get_the_same_tokens_as_single_calls(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        together = await asyncio.gather(*(tokens(engine, request(number)) for number in range(4)))
        assert together == [await tokens(engine, request(number)) for number in range(4)]


async def a_turn_continues_from_its_cached_prefix_with_the_same_tokens(bench: Bench) -> None:
    asked = request(1, 30, 40)
    async with bench.engine() as (engine, _):
        whole = await engine.generate(as_sequence(2, asked))
        first = await tokens(engine, msgspec.structs.replace(asked, max_new_tokens=10))
        rest = await engine.generate(continued(asked, first, 20))
        assert first + rest.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(rest.logprobs, whole.logprobs[10:], rtol=0, atol=bench.traits.logprob_error)
        had = 40 + 10 - 1  # the cache lacks the last token, which the next turn computes
        assert rest.cached_tokens == had // bench.traits.prefix_tokens * bench.traits.prefix_tokens


async def a_seed_repeats_its_tokens_and_seeds_that_differ_in_any_bit_give_others(bench: Bench) -> None:
    seeds = (5, 6, 5 + 2**32, 5 + 2**63)
    async with bench.engine() as (engine, _):
        drawn = [await tokens(engine, request(1, seed=seed)) for seed in seeds]
        assert len({tuple(each) for each in drawn}) == len(seeds)
        assert await tokens(engine, request(1, seed=5)) == drawn[0]


async def siblings_that_share_a_prompt_draw_different_tokens(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        siblings = [as_sequence(number, request(1, seed=number)) for number in range(4)]
        drawn = await asyncio.gather(*(tokens(engine, sibling) for sibling in siblings))
        assert len({tuple(each) for each in drawn}) == 4


async def a_turn_ends_at_its_stop_token_and_not_at_the_models_end_token(bench: Bench) -> None:
    end = msgspec.json.decode((bench.model / "config.json").read_bytes())["eos_token_id"]

    def hot(seed: int, **settings: Any) -> GenerationRequest:
        return as_sequence(seed, request(8, 80, temperature=100.0, seed=seed, **settings))

    async with bench.engine() as (engine, _):
        drawn = await asyncio.gather(*(tokens(engine, hot(seed)) for seed in range(40)))
        seed, ids = next((seed, ids) for seed, ids in enumerate(drawn) if end in ids[:60])
        behind = ids.index(end) + 10
        stop = next(token for token in ids[behind:] if token not in ids[:behind])
        stopped = await engine.generate(hot(seed, stop_token_ids=(stop, ids[-1])))
        assert (stopped.token_ids.tolist(), stopped.finish) == (ids[: ids.index(stop) + 1], "stop")
        assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.token_ids)
        ended = await engine.generate(hot(seed, stop_token_ids=(end,)))
        assert (ended.token_ids.tolist(), ended.finish) == (ids[: ids.index(end) + 1], "stop")


async def a_sequence_grows_to_the_capacity_and_no_further(bench: Bench) -> None:
    async with bench.engine() as (engine, capacity):
        longest = capacity.sequence_tokens
        for prompt_tokens in (longest - 1, longest - 40):
            found = await engine.generate(request(1, longest - prompt_tokens, prompt_tokens))
            assert (len(found.token_ids), found.finish) == (longest - prompt_tokens, "length")
        with pytest.raises(RequestRefused, match=f"exceed the limit of {longest} tokens per sequence"):
            await engine.generate(request(1, 2, longest - 1))


async def unservable_requests_are_refused_and_the_engine_keeps_running(bench: Bench) -> None:
    vocabulary = msgspec.json.decode((bench.model / "config.json").read_bytes())["vocab_size"]
    outside = f"at position 1 is outside the vocabulary of {vocabulary}"
    refused = [
        (GenerationRequest(9, np.array([3, vocabulary], np.int32), 4), f"token id {vocabulary} {outside}"),
        (GenerationRequest(9, np.array([3, -1], np.int32), 4), f"token id -1 {outside}"),
        (request(9, length=0), "the prompt is empty"),
        (request(9, 0), "max_new_tokens is 0"),
        (request(9, temperature=-0.5), "sampling: Expected `float` >= 0.0 "),
        (request(9, top_k=-1), "sampling: Expected `int` >= 0 "),
        (request(9, stop_token_ids=tuple(range(17))), "17 stop tokens"),
    ]
    async with bench.engine() as (engine, _):
        for asked, why in refused:
            with pytest.raises(RequestRefused, match=f"^sequence 9: {why}"):
                await engine.generate(asked)
        assert len(await tokens(engine, request(9))) == 24


async def a_sequence_has_at_most_one_pending_request(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        await engine.pause()
        pending = asyncio.ensure_future(engine.generate(request(1)))
        await posted(pending)
        with pytest.raises(RequestRefused, match="sequence 1 is being generated already"):
            await engine.generate(request(1))
        await engine.resume()
        assert len((await pending).token_ids) == 24


async def calls_beyond_max_pending_fail_and_the_others_are_answered(bench: Bench) -> None:
    async with bench.engine(max_pending=2) as (engine, _):
        calls = (engine.generate(request(number)) for number in range(3))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [Generation, Generation, EngineFailure]
        assert str(found[2]) == "2 calls are pending; the engine accepts no more"


async def new_tokens_are_reported_in_pieces_while_they_are_generated(bench: Bench) -> None:
    long = bench.traits.long_turn
    async with bench.engine() as (engine, _):
        pieces = asyncio.Queue[NDArray[np.int32]]()
        call = asyncio.ensure_future(engine.generate(request(3, long), pieces.put_nowait))
        other = asyncio.ensure_future(engine.generate(request(4, long)))
        first = await pieces.get()
        assert not call.done()
        found = await call
        reported = [first, *(pieces.get_nowait() for _ in range(pieces.qsize()))]
        assert all(len(piece) for piece in reported)
        assert np.concatenate(reported).tolist() == found.token_ids.tolist() == await tokens(engine, request(3, long))
        assert (await other).token_ids.tolist() != found.token_ids.tolist()


async def an_aborted_turn_has_reported_all_tokens_of_its_answer(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        pieces = asyncio.Queue[NDArray[np.int32]]()
        call = asyncio.ensure_future(engine.generate(request(3, bench.traits.long_turn), pieces.put_nowait))
        reported = [await pieces.get()]
        engine.abort(3)
        found = await call
        reported += [pieces.get_nowait() for _ in range(pieces.qsize())]
        assert (found.finish, np.concatenate(reported).tolist()) == ("abort", found.token_ids.tolist())


STREAMING = (
    new_tokens_are_reported_in_pieces_while_they_are_generated,
    an_aborted_turn_has_reported_all_tokens_of_its_answer,
)
LOGPROBS = (
    tokens_and_logprobs_match_the_learners_model,
    tokens_and_logprobs_match_the_learners_model_after_new_weights,
)
