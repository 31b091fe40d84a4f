"""Cases of the engine contract: capacity, counters, eviction and preemption."""

import asyncio

from asterism.engine.contract import EngineLoad
from tests.engine.contract.bench import Bench, continued, request, saturate, tokens


async def the_capacity_is_whole_pages_with_room_for_the_longest_sequence(bench: Bench) -> None:
    async with bench.engine() as (_, capacity):
        assert capacity.kv_tokens % capacity.page_tokens == 0
        assert capacity.sequence_tokens <= capacity.kv_tokens


async def the_load_counts_every_token_once(bench: Bench) -> None:
    count = bench.traits.max_running
    async with bench.engine() as (engine, capacity):
        began = engine.get_load()
        assert (began.generated_tokens, began.prefilled_tokens, began.decode_steps) == (0, 0, 0)
        answers = await saturate(bench, engine, count, lambda load: load.running > 0)
        load = engine.get_load()
        assert load.generated_tokens == len(answers) * 100
        assert load.prefilled_tokens == sum(20 - each.cached_tokens for each in answers)
        assert (load.running, load.waiting, load.recomputed_tokens, load.evicted_tokens, load.preempted) == (0,) * 5
        assert 0 < load.decode_steps <= len(answers) * 100
        assert 0 < load.cached_tokens == load.used_tokens <= capacity.kv_tokens
        assert load.busy_s > began.busy_s


async def calls_beyond_max_running_wait_and_all_are_answered(bench: Bench) -> None:
    count = bench.traits.max_running

    def is_full(load: EngineLoad) -> bool:
        assert load.running <= count
        return load.running > 0 and load.waiting > 0

    async with bench.engine() as (engine, _):
        answers = await saturate(bench, engine, count + 4, is_full)
        assert {len(each.token_ids) for each in answers} == {100}
        assert engine.get_load().waiting == 0


async def tokens_of_a_released_sequence_count_as_recomputed_and_not_as_evicted(bench: Bench) -> None:
    asked = request(1, 10, 40)
    async with bench.engine() as (engine, _):
        first = await tokens(engine, asked)
        prefilled = engine.get_load().prefilled_tokens
        engine.release_cache(1)
        again = await engine.generate(continued(asked, first, 10))
        unit = bench.traits.prefix_tokens
        had = 49 // unit * unit
        assert again.cached_tokens == (0 if bench.traits.forgets else had)
        load = engine.get_load()
        assert load.prefilled_tokens - prefilled == 50 - again.cached_tokens
        assert (load.recomputed_tokens, load.evicted_tokens) == (had - again.cached_tokens, 0)


async def preempted_sequences_are_counted_and_finish(bench: Bench) -> None:
    async with bench.engine(scarce=True) as (engine, capacity):
        count = capacity.kv_tokens // 64  # each sequence has 200 tokens, so all sequences need three times the capacity
        stop = (1,)  # with a stop token, an inference server overcommits its memory
        answers = await asyncio.gather(
            *(engine.generate(request(number, 180, stop_token_ids=stop)) for number in range(count))
        )
        lengths = [len(each.token_ids) for each in answers]
        assert all(length == 180 or each.finish == "stop" for length, each in zip(lengths, answers, strict=True))
        load = engine.get_load()
        assert load.generated_tokens == sum(lengths)
        assert load.preempted > 0
        assert load.recomputed_tokens > 0


async def an_evicted_prefix_is_recomputed_and_counted(bench: Bench) -> None:
    async with bench.engine(scarce=True) as (engine, capacity):
        first = await tokens(engine, request(1, 20, 200))
        for number in range(2, 4 + capacity.kv_tokens // 200):
            await engine.generate(request(number, 20, 200))
        again = await engine.generate(continued(request(1, 20, 200), first, 4))
        assert again.cached_tokens < 219
        load = engine.get_load()
        assert load.recomputed_tokens == 219 - again.cached_tokens
        assert load.evicted_tokens >= load.recomputed_tokens
