"""Cases of the engine contract: abort, pause and resume, weights, memory, ends and restarts."""

import asyncio

import msgspec
import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.contract.bench import (
    Bench,
    as_sequence,
    changed_model,
    continued,
    posted,
    publish,
    request,
    tokens,
    until_generated,
)

# ---------------------------------------------------------------- abort


async def an_abort_returns_the_generated_tokens_and_the_turn_can_be_continued(bench: Bench) -> None:
    long = bench.traits.long_turn
    async with bench.engine() as (engine, _):
        whole = await tokens(engine, request(5, long))
        aborted, other = (
            asyncio.ensure_future(engine.generate(as_sequence(number, request(5, long)))) for number in (5, 6)
        )
        await until_generated(bench, engine, long + 64, aborted, other)
        engine.abort(5)
        part = await aborted
        count = len(part.token_ids)
        assert part.finish == "abort"
        assert 0 < count < long
        assert (part.token_ids.tolist(), len(part.logprobs), len(part.versions)) == (whole[:count], count, count)
        rest = min(20, long - count)
        assert await tokens(engine, continued(request(5), whole[:count], rest)) == whole[count : count + rest]
        assert (await other).token_ids.tolist() == whole


async def an_abort_without_a_pending_request_has_no_effect(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        engine.abort(1)
        engine.release_cache(1)
        first = await engine.generate(request(1))
        engine.abort(1)
        assert first.finish == "length"
        assert await tokens(engine, request(1)) == first.token_ids.tolist()


async def a_cancelled_call_is_aborted_and_can_be_repeated(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        before = await tokens(engine, request(1, bench.traits.long_turn))
        call = asyncio.ensure_future(engine.generate(request(1, bench.traits.long_turn)))
        await until_generated(bench, engine, bench.traits.long_turn + 16, call)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await tokens(engine, request(1, bench.traits.long_turn)) == before


# ---------------------------------------------------------------- pause and resume


async def a_paused_engine_starts_no_request_and_answers_aborts_immediately(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        await engine.pause()
        await engine.pause()
        first, second = (asyncio.ensure_future(engine.generate(request(number))) for number in (1, 2))
        await posted(second)
        engine.abort(1)
        aborted = await first
        assert (aborted.finish, len(aborted.token_ids), engine.get_load().generated_tokens) == ("abort", 0, 0)
        await engine.resume()
        assert (await second).token_ids.tolist() == await tokens(engine, request(2))
        await engine.resume()
        assert len(await tokens(engine, request(3))) == 24


async def a_pause_keeps_running_requests_and_aborts_return_immediately(bench: Bench) -> None:
    long = bench.traits.long_turn
    async with bench.engine() as (engine, _):
        whole = await tokens(engine, request(6, long))
        kept, aborted = (
            asyncio.ensure_future(engine.generate(as_sequence(number, request(6, long)))) for number in (6, 7)
        )
        await until_generated(bench, engine, long + 64, kept, aborted)
        await engine.pause()
        engine.abort(7)
        part = await aborted
        assert part.finish == "abort"
        assert part.token_ids.tolist() == whole[: len(part.token_ids)]
        assert not kept.done()
        await engine.resume()
        assert (await kept).token_ids.tolist() == whole


# ---------------------------------------------------------------- weights


async def weights_loaded_during_a_turn_give_its_later_tokens_their_version(bench: Bench) -> None:
    long = bench.traits.long_turn
    published = publish(bench, 4, changed_model(bench))
    async with bench.engine() as (engine, _):
        assert engine.version == 0
        old = await tokens(engine, request(9, long))
        call = asyncio.ensure_future(engine.generate(request(9, long)))
        await until_generated(bench, engine, long + 64, call)
        await engine.load_weights(published)
        assert engine.version == 4
        found = await call
        versions = found.versions.tolist()
        assert set(versions) == {0, 4}
        assert versions == sorted(versions)
        changed = versions.index(4)
        assert found.token_ids.tolist()[:changed] == old[:changed]
        assert found.token_ids.tolist() != old


async def new_weights_invalidate_cached_prefixes(bench: Bench) -> None:
    asked = request(2, 10, 40)
    published = publish(bench, 5, changed_model(bench))
    async with bench.engine() as (engine, _):
        turn = continued(asked, await tokens(engine, asked), 4)
        assert (await engine.generate(turn)).cached_tokens > 0
        await engine.load_weights(published)
        later = await engine.generate(turn)
        assert (later.cached_tokens, set(later.versions.tolist())) == (0, {5})
        assert engine.get_load().recomputed_tokens == 0  # new weights invalidate the cached prefix
        assert (await engine.generate(turn)).cached_tokens > 0


async def loading_weights_leaves_a_paused_engine_paused(bench: Bench) -> None:
    published = publish(bench, 6, changed_model(bench))
    async with bench.engine() as (engine, _):
        await engine.pause()
        call = asyncio.ensure_future(engine.generate(request(1)))
        await posted(call)
        await engine.load_weights(published)
        await posted(call)
        assert engine.get_load().generated_tokens == 0
        await engine.resume()
        assert set((await call).versions.tolist()) == {6}


async def damaged_weights_are_refused_and_the_engine_keeps_its_weights(bench: Bench) -> None:
    published = publish(bench, 7, changed_model(bench))
    damaged = WeightsPublished(published.version, published.path, published.num_bytes, "0" * 32)
    missing = msgspec.structs.replace(published, path=published.path + "-none")
    async with bench.engine() as (engine, _):
        before = await engine.generate(request(1))
        for weights in (damaged, missing):
            with pytest.raises(WeightsRefused):
                await engine.load_weights(weights)
        assert engine.version == 0
        after = await engine.generate(request(1))
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert set(after.versions.tolist()) == {0}


# ---------------------------------------------------------------- memory


async def a_sleeping_engine_wakes_with_new_weights_and_requests_wait_for_them(bench: Bench) -> None:
    asked = request(1, temperature=0.0)
    same, other = publish(bench, 0, load_model(bench.model, torch.float32)), publish(bench, 9, changed_model(bench))
    damaged = msgspec.structs.replace(same, digest="0" * 32)
    async with bench.engine() as (engine, _):
        before = await tokens(engine, asked)
        pending = asyncio.ensure_future(engine.generate(request(2, bench.traits.long_turn)))
        await until_generated(bench, engine, 32, pending)
        with pytest.raises(EngineFailure, match="1 requests are pending"):
            await engine.sleep()
        engine.abort(2)
        await pending
        await engine.sleep()
        await engine.sleep()
        waiting, aborted = (asyncio.ensure_future(engine.generate(as_sequence(number, asked))) for number in (1, 3))
        await posted(waiting)
        engine.abort(3)
        assert (await aborted).finish == "abort"
        with pytest.raises(WeightsRefused):
            await engine.load_weights(damaged)
        await posted(waiting)
        await engine.load_weights(same)
        assert (await waiting).token_ids.tolist() == before
        await engine.sleep()
        await engine.load_weights(other)
        after = await engine.generate(asked)
        assert (after.cached_tokens, set(after.versions.tolist())) == (0, {9})
        assert after.token_ids.tolist() != before


# ---------------------------------------------------------------- ends and restarts


async def an_engine_that_has_not_been_started_fails_every_call(bench: Bench) -> None:
    engine = bench.unstarted()
    with pytest.raises(EngineFailure, match="the engine has not been started"):
        await engine.generate(request(1))
    await engine.close()


async def closing_fails_pending_and_later_calls(bench: Bench) -> None:
    async with bench.engine() as (engine, _):
        running = asyncio.ensure_future(engine.generate(request(1, bench.traits.long_turn)))
        await until_generated(bench, engine, 16, running)
        await engine.pause()
        waiting = asyncio.ensure_future(engine.generate(request(2)))
        await posted(waiting)
        await engine.close()
        for call in (running, waiting, engine.generate(request(3)), engine.pause()):
            with pytest.raises(EngineFailure, match="the engine is closed"):
                await call


async def an_engine_closed_while_paused_restarts_with_its_initial_state(bench: Bench) -> None:
    async with bench.engine() as (engine, capacity):
        before = await engine.generate(request(1))
    async with bench.engine() as (engine, _):
        await engine.load_weights(publish(bench, 8, changed_model(bench)))
        call = asyncio.ensure_future(engine.generate(request(1, bench.traits.long_turn)))
        await until_generated(bench, engine, 16, call)
        await engine.pause()
    with pytest.raises(EngineFailure):
        await call
    async with bench.engine() as (engine, again):
        after = await engine.generate(request(1))
        assert (again, after.token_ids.tolist()) == (capacity, before.token_ids.tolist())
        assert (engine.version, set(after.versions.tolist())) == (0, {0})
        assert engine.get_load().generated_tokens == 24


async def an_engine_that_dies_fails_all_calls_and_its_replacement_generates_the_same_tokens(bench: Bench) -> None:
    long = bench.traits.long_turn
    async with bench.engine() as (engine, _):
        whole = await tokens(engine, request(1, long))
        calls = [asyncio.ensure_future(engine.generate(as_sequence(n, request(1, long)))) for n in (1, 2)]
        await until_generated(bench, engine, long + 32, *calls)
        await bench.end_abruptly(engine)
        for call in calls:
            with pytest.raises(EngineFailure):
                await call
        with pytest.raises(EngineFailure):
            await engine.generate(request(3))
    async with bench.engine() as (engine, _):
        assert await tokens(engine, continued(request(1), whole[:10], 20)) == whole[10:30]
