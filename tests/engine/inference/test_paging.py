"""Tests of the paged cache: shared prefixes, chunks, eviction and preemption change counters but no tokens."""

import numpy as np
import pytest

from asterism.engine.contract import EngineLoad, Generation, GenerationRequest
from asterism.engine.inference.cuda_graphs import GraphCapture
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import PAGE, alone, assert_as_alone, assert_same, generate, new_core, step, submit
from tests.engine.tiny_models import random_ids, small_config, small_model

# ---------------------------------------------------------------- shared prefixes


def test_the_prompt_of_a_group_is_prefilled_once_and_its_full_pages_are_shared(model: CausalLM) -> None:
    core = new_core(model)
    prompt = random_ids(3 * PAGE + 2, 1)
    requests = [GenerationRequest(number, prompt, 5, seed=number) for number in range(4)]
    submit(core, requests)
    core.step()
    assert core.get_load().running == 4
    assert (
        core.get_load().prefilled_tokens == len(prompt) + 3 * 2
    )  # each sibling prefills only the tokens after the last full page
    assert core.get_load().used_tokens == (3 + 4) * PAGE
    found = generate(core)
    assert_as_alone(model, found, *requests)
    assert core.get_load().recomputed_tokens == 0


def test_the_last_token_of_a_fully_cached_prompt_is_computed(model: CausalLM) -> None:
    core = new_core(model)
    requests = [GenerationRequest(number, random_ids(2 * PAGE, 1), 5, seed=number) for number in range(2)]
    found = generate(core, *requests)
    assert core.get_load().prefilled_tokens == 2 * PAGE + PAGE
    assert_as_alone(model, found, *requests)


def test_shared_pages_stay_until_their_last_sequence_is_released(model: CausalLM) -> None:
    core = new_core(model)
    generate(core, *(GenerationRequest(number, random_ids(2 * PAGE + 1, 1), 1, seed=number) for number in (1, 2)))
    assert core.get_load().used_tokens == (2 + 2) * PAGE  # each sequence has one page of its own after the shared pages
    core.release_cache(1)
    assert core.get_load().used_tokens == (2 + 1) * PAGE
    late = GenerationRequest(3, random_ids(2 * PAGE + 1, 1), 6, seed=3)
    assert_same(generate(core, late)[3], alone(model, late))
    assert core.get_load().prefilled_tokens == 2 * PAGE + 1 + 1 + 1
    core.release_cache(2)
    core.release_cache(3)
    assert core.get_load().used_tokens == 0


def test_the_next_turn_prefills_only_its_new_tokens(model: CausalLM) -> None:
    core = new_core(model)
    first = generate(core, GenerationRequest(1, random_ids(11, 1), 9, seed=1))[1]
    ids = np.concatenate((random_ids(11, 1), first.token_ids, random_ids(6, 2)))
    second = GenerationRequest(1, ids, 9, seed=1)
    assert_same(generate(core, second)[1], alone(model, second))
    assert core.get_load().prefilled_tokens == 11 + 1 + 6  # the last token of a turn is not cached
    assert core.get_load().recomputed_tokens == 0


def test_a_turn_over_several_leases_equals_a_turn_in_one_lease(model: CausalLM) -> None:
    whole = GenerationRequest(1, random_ids(13, 1), 40, seed=5)
    core = new_core(model)
    ids, logprobs = whole.token_ids, np.zeros(0, np.float32)
    for tokens in (7, 1, 20, 12):
        part = generate(core, GenerationRequest(1, ids, tokens, seed=5))[1]
        ids, logprobs = np.concatenate((ids, part.token_ids)), np.concatenate((logprobs, part.logprobs))
    wanted = alone(model, whole)
    assert ids[13:].tolist() == wanted.token_ids.tolist()
    assert logprobs.tolist() == wanted.logprobs.tolist()


def test_prefixes_of_old_weights_are_not_shared() -> None:
    core, other = new_core(small_model()), small_model(seed=5)
    prompt = random_ids(2 * PAGE + 1, 1)
    core.submit(GenerationRequest(1, prompt, 40, seed=1))
    core.submit(GenerationRequest(2, prompt, 2, seed=1))
    step(core, 3)
    core.install_weights(1, other.state_dict())
    assert core.get_load().used_tokens == 3 * PAGE  # the running sequence holds these pages
    late = GenerationRequest(3, prompt, 6, seed=3)
    assert_same(generate(core, late)[3], alone(other, late))


def test_new_weights_restart_a_prefill() -> None:
    core, other = new_core(small_model(), prefill_tokens=7), small_model(seed=5)
    request = GenerationRequest(1, random_ids(30, 1), 6, seed=1)
    core.submit(request)
    core.step()
    core.install_weights(3, other.state_dict())
    found = generate(core)[1]
    assert_same(found, alone(other, request))
    assert found.versions.tolist() == [3] * 6


# ---------------------------------------------------------------- chunks


def test_running_sequences_get_a_token_in_every_step_of_a_long_prefill(model: CausalLM) -> None:
    core = new_core(model, prefill_tokens=10)
    core.submit(GenerationRequest(1, random_ids(4, 1), 30, seed=1))
    core.step()
    long = GenerationRequest(2, random_ids(80, 2), 5, seed=2)
    core.submit(long)
    for number in range(1, 8):
        core.step()
        assert core.get_load().generated_tokens == 1 + number
        assert core.get_load().prefilled_tokens == 4 + 10 * number
    assert_same(generate(core)[2], alone(model, long))


@pytest.mark.parametrize("prefill_tokens", [1, 33, 40])
def test_the_prefill_chunk_size_does_not_change_bits(model: CausalLM, prefill_tokens: int) -> None:
    core = new_core(model, prefill_tokens=prefill_tokens)
    requests = [GenerationRequest(number, random_ids(70 + number, number), 4, seed=1) for number in range(2)]
    found = generate(core, *requests)
    assert_as_alone(model, found, *requests)


# ---------------------------------------------------------------- eviction and preemption


def test_tokens_of_a_released_sequence_count_as_recomputed(model: CausalLM) -> None:
    core = new_core(model)
    first = generate(core, GenerationRequest(1, random_ids(20, 1), 9, seed=1))[1]
    ids = np.concatenate((random_ids(20, 1), first.token_ids, random_ids(5, 2)))
    core.release_cache(1)
    generate(core, GenerationRequest(1, ids, 4, seed=1))
    assert core.get_load().prefilled_tokens == 20 + 34
    assert core.get_load().recomputed_tokens == 28  # the cache lacked the last token of the turn
    core.release_cache(1)
    generate(core, GenerationRequest(1, random_ids(34, 5), 4, seed=1))  # another sequence reuses the id
    assert core.get_load().recomputed_tokens == 28


def test_eviction_starts_with_the_last_page_of_the_least_recently_used_sequence(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    for number in (1, 2):
        generate(core, GenerationRequest(number, random_ids(3 * PAGE, number), 1 + PAGE, seed=number))
    assert core.get_load().cached_tokens == 8 * PAGE
    generate(core, GenerationRequest(3, random_ids(5 * PAGE + 1, 3), 1, seed=3))
    assert (core.get_load().evicted_tokens, core.get_load().used_tokens) == (2 * PAGE, 12 * PAGE)
    before = core.get_load()
    again = GenerationRequest(1, random_ids(3 * PAGE, 1), 1 + PAGE, seed=1)
    assert_same(generate(core, again)[1], alone(model, again))
    assert core.get_load().prefilled_tokens - before.prefilled_tokens == PAGE
    assert core.get_load().recomputed_tokens == PAGE


@pytest.mark.slow
def test_the_newest_request_is_preempted_and_resumes_with_the_same_tokens(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    requests = [GenerationRequest(number, random_ids(3 * PAGE, number), 6 * PAGE, seed=number) for number in range(2)]
    submit(core, requests)
    found = generate(core)
    assert list(found) == [0, 1]
    assert_as_alone(model, found, *requests)
    load = core.get_load()
    assert load.preempted == 1
    # The preempted sequence had 6 of 12 pages when the other one needed a seventh. Its next token was not in the cache.
    assert load.recomputed_tokens == 6 * PAGE
    assert load.prefilled_tokens == 2 * 3 * PAGE + 6 * PAGE + 1


def test_aborting_a_preempted_request_returns_its_tokens(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    requests = [GenerationRequest(number, random_ids(3 * PAGE, number), 6 * PAGE, seed=number) for number in range(2)]
    submit(core, requests)
    while core.get_load().preempted == 0:
        core.step()
    [(_, found)] = core.abort(1)
    assert isinstance(found, Generation)
    assert found.finish == "abort"
    assert found.token_ids.tolist() == alone(model, requests[1]).token_ids.tolist()[: 3 * PAGE + 1]
    assert found.versions.tolist() == [0] * (3 * PAGE + 1)


def test_a_request_waits_while_running_sequences_hold_all_pages(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    core.submit(GenerationRequest(1, random_ids(8 * PAGE, 1), 2 * PAGE))
    core.submit(GenerationRequest(2, random_ids(5 * PAGE, 2), 2))
    core.step()
    assert (core.get_load().running, core.get_load().waiting) == (1, 1)
    assert list(generate(core)) == [1, 2]
    assert core.get_load().preempted == 0


# ---------------------------------------------------------------- rows kept between steps


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_bytes"), [(1, 1 << 28), (2, 1 << 28), (3, 1 << 28), (3, 100_000), (2, 0)])
def test_the_attention_block_size_does_not_change_bits(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, rows: int, num_bytes: int
) -> None:
    """Sequences of all lengths join and leave, so that blocks fill, shrink, refill and widen."""
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_BLOCK_ROWS", rows)
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_CACHE_BYTES", num_bytes)
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
        found |= step(core, int(draws.integers(0, 9)))
    found |= generate(core)
    assert_as_alone(model, found, *requests)


# ---------------------------------------------------------------- all together


def random_life(
    model: CausalLM,
    seed: int,
    *,
    pages: int,
    page_tokens: int,
    prefill_tokens: int,
    capture: GraphCapture | None = None,
    overlaps_steps: bool = False,
) -> EngineLoad:
    """Run groups of siblings with several turns each, in a cache that is too small.

    Every generation must equal that of its request in a batch of one. Counters are checked after every step.
    """
    draws = np.random.default_rng(seed)
    core = new_core(
        model,
        pages,
        page_tokens=page_tokens,
        prefill_tokens=prefill_tokens,
        capture=capture,
        overlaps_steps=overlaps_steps,
    )
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
        load = core.get_load()
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
                core.release_cache(number)
    assert not live
    for number in range(12):
        core.release_cache(number)
    assert core.get_load().used_tokens == 0
    return core.get_load()


@pytest.mark.slow
@pytest.mark.parametrize(("page_tokens", "num_kv_heads"), [(1, 4), (5, 1), (16, 1), (16, 2), (16, 4)])
def test_sharing_eviction_and_preemption_do_not_change_bits(page_tokens: int, num_kv_heads: int) -> None:
    model = small_model(config=small_config(num_kv_heads=num_kv_heads))
    loads = [
        random_life(model, seed, pages=-(-150 // page_tokens), page_tokens=page_tokens, prefill_tokens=23)
        for seed in range(2)
    ]
    assert sum(load.evicted_tokens for load in loads) > 0
    assert sum(load.preempted for load in loads) > 0
    assert sum(load.recomputed_tokens for load in loads) > 0
