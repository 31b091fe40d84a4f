"""The paged cache under the engine's core: shared prefixes, chunks, eviction and preemption change counters, never tokens."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batching import ContinuousBatch
from engine.contract import Capacity, EngineLoad, Generation, GenerationRequest
from engine.graphs import Capture
from engine.qwen3 import Qwen3
from tests.engine.tiny_models import random_ids, small_config, small_model

LONGEST = 96
PAGE = 8


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return small_model()


def new_core(
    model: Qwen3,
    pages: int = 64,
    *,
    page_tokens: int = PAGE,
    prefill_tokens: int = 512,
    max_running: int = 256,
    capture: Capture | None = None,
) -> ContinuousBatch:
    capacity = Capacity(pages * page_tokens, page_tokens, min(LONGEST, pages * page_tokens))
    return ContinuousBatch(model, capacity, prefill_tokens=prefill_tokens, max_running=max_running, capture=capture)


def drain(core: ContinuousBatch) -> dict[int, Generation]:
    found: dict[int, Generation] = {}
    while core.has_work:
        for sequence_id, outcome in core.step():
            assert isinstance(outcome, Generation)
            found[sequence_id] = outcome
    return found


def alone(model: Qwen3, request: GenerationRequest) -> Generation:
    core = new_core(model, page_tokens=32)
    core.submit(request)
    return drain(core)[request.sequence_id]


def assert_same(found: Generation, wanted: Generation) -> None:
    """Bit for bit."""
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.logprobs.tolist() == wanted.logprobs.tolist()


# ---------------------------------------------------------------- shared prefixes


def test_a_groups_prompt_is_read_once_and_its_whole_pages_lie_in_the_cache_once(model: Qwen3) -> None:
    core = new_core(model)
    prompt = random_ids(3 * PAGE + 2, 1)
    requests = [GenerationRequest(number, prompt, 5, seed=number) for number in range(4)]
    for request in requests:
        core.submit(request)
    core.step()
    assert core.load().running == 4
    assert core.load().prefilled_tokens == len(prompt) + 3 * 2  # siblings read what follows the last whole page
    assert core.load().used_tokens == (3 + 4) * PAGE
    found = drain(core)
    for request in requests:
        assert_same(found[request.sequence_id], alone(model, request))
    assert core.load().recomputed_tokens == 0


def test_a_prompt_of_whole_pages_still_has_its_last_token_read(model: Qwen3) -> None:
    core = new_core(model)
    requests = [GenerationRequest(number, random_ids(2 * PAGE, 1), 5, seed=number) for number in range(2)]
    for request in requests:
        core.submit(request)
    found = drain(core)
    assert core.load().prefilled_tokens == 2 * PAGE + PAGE
    for request in requests:
        assert_same(found[request.sequence_id], alone(model, request))


def test_shared_pages_stay_until_the_last_of_their_sequences_is_forgotten(model: Qwen3) -> None:
    core = new_core(model)
    for number in (1, 2):
        core.submit(GenerationRequest(number, random_ids(2 * PAGE + 1, 1), 1, seed=number))
    drain(core)
    assert core.load().used_tokens == (2 + 2) * PAGE  # each has the token behind the shared pages to itself
    core.forget(1)
    assert core.load().used_tokens == (2 + 1) * PAGE
    late = GenerationRequest(3, random_ids(2 * PAGE + 1, 1), 6, seed=3)
    core.submit(late)
    assert_same(drain(core)[3], alone(model, late))
    assert core.load().prefilled_tokens == 2 * PAGE + 1 + 1 + 1
    core.forget(2)
    core.forget(3)
    assert core.load().used_tokens == 0


def test_the_next_turn_reads_only_what_is_new(model: Qwen3) -> None:
    core = new_core(model)
    core.submit(GenerationRequest(1, random_ids(11, 1), 9, seed=1))
    first = drain(core)[1]
    ids = np.concatenate((random_ids(11, 1), first.token_ids, random_ids(6, 2)))
    second = GenerationRequest(1, ids, 9, seed=1)
    core.submit(second)
    assert_same(drain(core)[1], alone(model, second))
    assert core.load().prefilled_tokens == 11 + 1 + 6  # the last token of a turn is computed with the next
    assert core.load().recomputed_tokens == 0


def test_a_turn_in_several_leases_equals_one_in_one(model: Qwen3) -> None:
    whole = GenerationRequest(1, random_ids(13, 1), 40, seed=5)
    core = new_core(model)
    ids, logprobs = whole.token_ids, np.zeros(0, np.float32)
    for tokens in (7, 1, 20, 12):
        core.submit(GenerationRequest(1, ids, tokens, seed=5))
        part = drain(core)[1]
        ids, logprobs = np.concatenate((ids, part.token_ids)), np.concatenate((logprobs, part.logprobs))
    wanted = alone(model, whole)
    assert ids[13:].tolist() == wanted.token_ids.tolist()
    assert logprobs.tolist() == wanted.logprobs.tolist()


def test_after_new_weights_no_prefix_of_the_old_ones_is_shared() -> None:
    core, other = new_core(small_model()), small_model(seed=5)
    prompt = random_ids(2 * PAGE + 1, 1)
    core.submit(GenerationRequest(1, prompt, 40, seed=1))
    core.submit(GenerationRequest(2, prompt, 2, seed=1))
    for _ in range(3):
        core.step()
    core.install(1, other.state_dict())
    assert core.load().used_tokens == 3 * PAGE  # the one that runs
    late = GenerationRequest(3, prompt, 6, seed=3)
    core.submit(late)
    assert_same(drain(core)[3], alone(other, late))


def test_new_weights_while_a_prompt_is_read_read_it_again() -> None:
    core, other = new_core(small_model(), prefill_tokens=7), small_model(seed=5)
    request = GenerationRequest(1, random_ids(30, 1), 6, seed=1)
    core.submit(request)
    core.step()
    core.install(3, other.state_dict())
    found = drain(core)[1]
    assert_same(found, alone(other, request))
    assert found.versions.tolist() == [3] * 6


# ---------------------------------------------------------------- chunks


def test_those_that_run_get_a_token_in_every_step_while_a_long_prompt_is_read(model: Qwen3) -> None:
    core = new_core(model, prefill_tokens=10)
    core.submit(GenerationRequest(1, random_ids(4, 1), 30, seed=1))
    core.step()
    long = GenerationRequest(2, random_ids(80, 2), 5, seed=2)
    core.submit(long)
    for step in range(1, 8):
        core.step()
        assert core.load().generated_tokens == 1 + step
        assert core.load().prefilled_tokens == 4 + 10 * step
    assert_same(drain(core)[2], alone(model, long))


@pytest.mark.parametrize("prefill_tokens", [1, 33, 40])
def test_a_prompt_in_chunks_of_any_size_gives_the_same_bits(model: Qwen3, prefill_tokens: int) -> None:
    core = new_core(model, prefill_tokens=prefill_tokens)
    requests = [GenerationRequest(number, random_ids(70 + number, number), 4, seed=1) for number in range(2)]
    for request in requests:
        core.submit(request)
    found = drain(core)
    for request in requests:
        assert_same(found[request.sequence_id], alone(model, request))


# ---------------------------------------------------------------- too little room


def test_what_is_computed_again_after_it_was_forgotten_counts_as_computed_again(model: Qwen3) -> None:
    core = new_core(model)
    core.submit(GenerationRequest(1, random_ids(20, 1), 9, seed=1))
    ids = np.concatenate((random_ids(20, 1), drain(core)[1].token_ids, random_ids(5, 2)))
    core.forget(1)
    core.submit(GenerationRequest(1, ids, 4, seed=1))
    drain(core)
    assert core.load().prefilled_tokens == 20 + 34
    assert core.load().recomputed_tokens == 28  # the last token of the turn had not been taken in
    core.forget(1)
    core.submit(GenerationRequest(1, random_ids(34, 5), 4, seed=1))  # another sequence under its number
    drain(core)
    assert core.load().recomputed_tokens == 28


def test_what_new_weights_have_made_worthless_is_not_computed_again(model: Qwen3) -> None:
    core = new_core(small_model())
    core.submit(GenerationRequest(1, random_ids(20, 1), 1, seed=1))
    drain(core)
    core.forget(1)
    core.install(1, model.state_dict())
    core.submit(GenerationRequest(1, random_ids(20, 1), 1, seed=1))
    drain(core)
    assert core.load().recomputed_tokens == 0


def test_a_generation_tells_how_much_of_its_request_was_found_in_the_cache(model: Qwen3) -> None:
    core = new_core(model)
    prompt = random_ids(2 * PAGE + 3, 1)
    core.submit(GenerationRequest(1, prompt, 5, seed=1))
    first = drain(core)[1]
    assert first.cached_tokens == 0
    core.submit(GenerationRequest(2, prompt, 5, seed=2))
    assert drain(core)[2].cached_tokens == 2 * PAGE
    core.submit(GenerationRequest(1, np.concatenate((prompt, first.token_ids, random_ids(4, 3))), 5, seed=1))
    assert drain(core)[1].cached_tokens == len(prompt) + 4


def test_for_lack_of_room_the_cache_that_was_used_longest_ago_goes_first_from_its_end(model: Qwen3) -> None:
    core = new_core(model, pages=12)
    for number in (1, 2):
        core.submit(GenerationRequest(number, random_ids(3 * PAGE, number), 1 + PAGE, seed=number))
        drain(core)
    assert core.load().cached_tokens == 8 * PAGE
    core.submit(GenerationRequest(3, random_ids(5 * PAGE + 1, 3), 1, seed=3))
    drain(core)
    assert (core.load().evicted_tokens, core.load().used_tokens) == (2 * PAGE, 12 * PAGE)
    before = core.load()
    again = GenerationRequest(1, random_ids(3 * PAGE, 1), 1 + PAGE, seed=1)
    core.submit(again)
    assert_same(drain(core)[1], alone(model, again))
    assert core.load().prefilled_tokens - before.prefilled_tokens == PAGE
    assert core.load().recomputed_tokens == PAGE


def test_who_came_last_is_preempted_and_goes_on_later_with_the_same_tokens(model: Qwen3) -> None:
    core = new_core(model, pages=12)
    requests = [GenerationRequest(number, random_ids(3 * PAGE, number), 6 * PAGE, seed=number) for number in range(2)]
    for request in requests:
        core.submit(request)
    order = list(drain(core).items())
    assert [sequence_id for sequence_id, _ in order] == [0, 1]
    for request, (_, found) in zip(requests, order, strict=True):
        assert_same(found, alone(model, request))
    load = core.load()
    assert load.preempted == 1
    # It had 6 of 12 pages, and the other needed a seventh; the token that began its own seventh was not taken in.
    assert load.recomputed_tokens == 6 * PAGE
    assert load.prefilled_tokens == 2 * 3 * PAGE + 6 * PAGE + 1


def test_an_abort_of_a_preempted_request_returns_the_tokens_that_it_has(model: Qwen3) -> None:
    core = new_core(model, pages=12)
    requests = [GenerationRequest(number, random_ids(3 * PAGE, number), 6 * PAGE, seed=number) for number in range(2)]
    for request in requests:
        core.submit(request)
    while core.load().preempted == 0:
        core.step()
    [(_, found)] = core.abort(1)
    assert isinstance(found, Generation)
    assert found.finish == "abort"
    assert found.token_ids.tolist() == alone(model, requests[1]).token_ids.tolist()[: 3 * PAGE + 1]
    assert found.versions.tolist() == [0] * (3 * PAGE + 1)


def test_a_request_waits_while_those_that_run_have_the_pages(model: Qwen3) -> None:
    core = new_core(model, pages=12)
    core.submit(GenerationRequest(1, random_ids(8 * PAGE, 1), 2 * PAGE))
    core.submit(GenerationRequest(2, random_ids(5 * PAGE, 2), 2))
    core.step()
    assert (core.load().running, core.load().waiting) == (1, 1)
    assert list(drain(core)) == [1, 2]
    assert core.load().preempted == 0


# ---------------------------------------------------------------- what is kept between steps


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_bytes"), [(1, 1 << 28), (2, 1 << 28), (3, 1 << 28), (3, 100_000), (2, 0)])
def test_in_blocks_of_any_size_every_request_has_the_bits_that_it_has_alone(
    model: Qwen3, monkeypatch: pytest.MonkeyPatch, rows: int, num_bytes: int
) -> None:
    """Sequences of all lengths come and go, so that blocks are filled, left, refilled and widened."""
    monkeypatch.setattr("engine.kept.KEPT_ROWS", rows)
    monkeypatch.setattr("engine.kept.KEPT_BYTES", num_bytes)
    draws = np.random.default_rng(rows)
    core = new_core(model, pages=128)
    requests = [
        GenerationRequest(
            number, random_ids(int(draws.integers(1, 60)), number), int(draws.integers(1, 36)), seed=number
        )
        for number in range(14)
    ]
    found: dict[int, Generation] = {}
    for request in requests:
        core.submit(request)
        for _ in range(int(draws.integers(0, 9))):
            found |= {number: outcome for number, outcome in core.step() if isinstance(outcome, Generation)}
    found |= drain(core)
    for request in requests:
        assert_same(found[request.sequence_id], alone(model, request))


# ---------------------------------------------------------------- everything at once


def random_life(
    model: Qwen3, seed: int, *, pages: int, page_tokens: int, prefill_tokens: int, capture: Capture | None = None
) -> EngineLoad:
    """Groups of siblings with several turns each, parked in between, in a cache that is too small; every generation is
    compared with the same request alone, and the books are in order after every step."""
    draws = np.random.default_rng(seed)
    core = new_core(model, pages, page_tokens=page_tokens, prefill_tokens=prefill_tokens, capture=capture)
    longest = core.capacity.sequence_tokens
    live: dict[int, GenerationRequest] = {}
    for group in range(4):
        prompt = random_ids(int(draws.integers(1, longest // 2)), seed * 100 + group)
        for sibling in range(3):
            number = 3 * group + sibling
            live[number] = GenerationRequest(number, prompt, int(draws.integers(1, 20)), seed=number)
    for number in draws.permutation(len(live)).tolist():
        core.submit(live[number])
    while core.has_work:
        outcomes = core.step()
        load = core.load()
        assert 0 <= load.cached_tokens <= load.used_tokens <= core.capacity.kv_tokens
        for number, found in outcomes:
            assert isinstance(found, Generation)
            request = live.pop(number)
            assert_same(found, alone(model, request))
            ids = np.concatenate((request.token_ids, found.token_ids, random_ids(int(draws.integers(0, 9)), number)))
            if len(ids) + 12 <= longest and draws.random() < 0.8:
                live[number] = GenerationRequest(number, ids, 12, seed=number)
                core.submit(live[number])
            elif draws.random() < 0.5:
                core.forget(number)
    assert not live
    for number in range(12):
        core.forget(number)
    assert core.load().used_tokens == 0
    return core.load()


@pytest.mark.slow
@pytest.mark.parametrize(("page_tokens", "num_kv_heads"), [(1, 4), (5, 1), (16, 1), (16, 2), (16, 4)])
def test_whatever_is_shared_evicted_or_preempted_every_request_has_the_bits_that_it_has_alone(
    page_tokens: int, num_kv_heads: int
) -> None:
    model = small_model(config=small_config(num_kv_heads=num_kv_heads))
    loads = [
        random_life(model, seed, pages=-(-150 // page_tokens), page_tokens=page_tokens, prefill_tokens=23)
        for seed in range(2)
    ]
    assert sum(load.evicted_tokens for load in loads) > 0
    assert sum(load.preempted for load in loads) > 0
    assert sum(load.recomputed_tokens for load in loads) > 0
