"""Cases of engine.contract.Engine: its capacity, what it counts, and what it gives up where there is too little room."""

from __future__ import annotations

import asyncio

from tests.engine.contract.bench import Bench, continued, request, tokens, until


async def the_capacity_is_whole_pages_with_room_for_the_longest_sequence(bench: Bench) -> None:
    async with bench.engine() as (_, capacity):
        assert capacity.kv_tokens % capacity.page_tokens == 0
        assert capacity.sequence_tokens <= capacity.kv_tokens


async def the_load_counts_every_token_once(bench: Bench) -> None:
    count = bench.traits.max_running
    async with bench.engine() as (engine, capacity):
        began = engine.load()
        assert (began.generated_tokens, began.prefilled_tokens, began.decode_steps) == (0, 0, 0)
        calls = [asyncio.ensure_future(engine.generate(request(number, 100, 50))) for number in range(count)]
        await until(bench, engine, lambda load: load.running > 0, *calls)
        answers = await asyncio.gather(*calls)
        load = engine.load()
        assert load.generated_tokens == count * 100
        assert load.prefilled_tokens == sum(50 - each.cached_tokens for each in answers)
        assert (load.running, load.waiting, load.recomputed_tokens, load.evicted_tokens, load.preempted) == (0,) * 5
        assert 0 < load.decode_steps <= count * 100
        assert 0 < load.cached_tokens == load.used_tokens <= capacity.kv_tokens
        assert load.busy_s > began.busy_s


async def more_calls_than_may_run_wait_and_all_are_answered(bench: Bench) -> None:
    count = bench.traits.max_running
    async with bench.engine() as (engine, _):
        calls = [asyncio.ensure_future(engine.generate(request(number, 100))) for number in range(count + 4)]
        await until(bench, engine, lambda load: load.waiting > 0 and load.running > 0, *calls)
        assert engine.load().running <= count
        assert [len(each.token_ids) for each in await asyncio.gather(*calls)] == [100] * (count + 4)
        assert engine.load().waiting == 0


async def what_a_forgotten_sequence_computes_again_is_counted_and_not_called_evicted(bench: Bench) -> None:
    asked = request(1, 10, 40)
    async with bench.engine() as (engine, _):
        first = await tokens(engine, asked)
        prefilled = engine.load().prefilled_tokens
        engine.forget(1)
        again = await engine.generate(continued(asked, first, 10))
        unit = bench.traits.prefix_tokens
        had = 49 // unit * unit
        assert again.cached_tokens == (0 if bench.traits.forgets else had)
        load = engine.load()
        assert load.prefilled_tokens - prefilled == 50 - again.cached_tokens
        assert (load.recomputed_tokens, load.evicted_tokens) == (had - again.cached_tokens, 0)


# ---------------------------------------------------------------- too little room


async def sequences_that_are_stopped_for_lack_of_room_are_counted_and_come_to_their_end(bench: Bench) -> None:
    async with bench.engine(scarce=True) as (engine, capacity):
        count = capacity.kv_tokens // 64  # with 200 tokens each, three times too many
        stop = (1,)  # with a token to stop at, a server lends more room than it has
        answers = await asyncio.gather(
            *(engine.generate(request(number, 180, stop_token_ids=stop)) for number in range(count))
        )
        lengths = [len(each.token_ids) for each in answers]
        assert all(length == 180 or each.finish == "stop" for length, each in zip(lengths, answers, strict=True))
        load = engine.load()
        assert load.generated_tokens == sum(lengths)
        assert load.preempted > 0
        assert load.recomputed_tokens > 0


async def a_prefix_that_others_have_displaced_is_computed_again_and_counted(bench: Bench) -> None:
    async with bench.engine(scarce=True) as (engine, capacity):
        first = await tokens(engine, request(1, 20, 200))
        for number in range(2, 4 + capacity.kv_tokens // 200):
            await engine.generate(request(number, 20, 200))
        again = await engine.generate(continued(request(1, 20, 200), first, 4))
        assert again.cached_tokens < 219
        load = engine.load()
        assert load.recomputed_tokens == 219 - again.cached_tokens
        assert load.evicted_tokens >= load.recomputed_tokens


LOAD = (
    the_capacity_is_whole_pages_with_room_for_the_longest_sequence,
    the_load_counts_every_token_once,
    more_calls_than_may_run_wait_and_all_are_answered,
    what_a_forgotten_sequence_computes_again_is_counted_and_not_called_evicted,
    sequences_that_are_stopped_for_lack_of_room_are_counted_and_come_to_their_end,
    a_prefix_that_others_have_displaced_is_computed_again_and_counted,
)
