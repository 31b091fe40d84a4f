"""Tests of the paged cache: shared prefixes, chunks, eviction and preemption change counters but no tokens."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Generation, GenerationRequest
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.kernels.matmul import build_tiled
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    PAGE,
    alone,
    assert_as_alone,
    assert_same,
    draw_request,
    generate,
    new_core,
    step,
    submit,
)
from tests.engine.inference.recorded_graph import Recorded
from tests.engine.tiny_models import random_ids, small_config, small_model

# ---------------------------------------------------------------- shared prefixes


def test_the_prompt_of_a_group_is_prefilled_once_and_its_full_pages_are_shared(model: CausalLM) -> None:
    core = new_core(model)
    prompt = random_ids(3 * PAGE + 2, 1)
    requests = [GenerationRequest(number, prompt, 5, seed=number) for number in range(4)]
    submit(core, requests)
    core.step()
    assert core.get_load().running == 4
    # Each sibling prefills only the tokens after the last full page.
    assert core.get_load().prefilled_tokens == len(prompt) + 3 * 2
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
    request = draw_request(1, 30, 6)
    core.submit(request)
    core.step()
    core.install_weights(3, other.state_dict())
    found = generate(core)[1]
    assert_same(found, alone(other, request))
    assert found.versions.tolist() == [3] * 6


# ---------------------------------------------------------------- chunks


def test_running_sequences_get_a_token_in_every_step_of_a_long_prefill(model: CausalLM) -> None:
    core = new_core(model, prefill_tokens=10)
    core.submit(draw_request(1, 4, 30))
    core.step()
    long = draw_request(2, 80, 5)
    core.submit(long)
    for number in range(1, 8):
        core.step()
        assert core.get_load().generated_tokens == 1 + number
        assert core.get_load().prefilled_tokens == 4 + 10 * number
    assert_same(generate(core)[2], alone(model, long))


@pytest.mark.parametrize("prefill_tokens", [1, 33, 40])
def test_the_prefill_chunk_size_does_not_change_bits(model: CausalLM, prefill_tokens: int) -> None:
    core = new_core(model, prefill_tokens=prefill_tokens)
    requests = [draw_request(number, 70 + number, 4) for number in range(2)]
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
        generate(core, draw_request(number, 3 * PAGE, 1 + PAGE))
    assert core.get_load().cached_tokens == 8 * PAGE
    generate(core, draw_request(3, 5 * PAGE + 1, 1))
    assert (core.get_load().evicted_tokens, core.get_load().used_tokens) == (2 * PAGE, 12 * PAGE)
    before = core.get_load()
    again = draw_request(1, 3 * PAGE, 1 + PAGE)
    assert_same(generate(core, again)[1], alone(model, again))
    assert core.get_load().prefilled_tokens - before.prefilled_tokens == PAGE
    assert core.get_load().recomputed_tokens == PAGE


@pytest.mark.slow
def test_the_newest_request_is_preempted_and_resumes_with_the_same_tokens(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    requests = [draw_request(number, 3 * PAGE, 6 * PAGE) for number in range(2)]
    found = generate(core, *requests)
    assert list(found) == [0, 1]
    assert_as_alone(model, found, *requests)
    load = core.get_load()
    assert load.preempted == 1
    # The preempted sequence had 6 of 12 pages when the other one needed a seventh. Its next token was not in the cache.
    assert load.recomputed_tokens == 6 * PAGE
    assert load.prefilled_tokens == 2 * 3 * PAGE + 6 * PAGE + 1


def test_aborting_a_preempted_request_returns_its_tokens(model: CausalLM) -> None:
    core = new_core(model, pages=12)
    requests = [draw_request(number, 3 * PAGE, 6 * PAGE) for number in range(2)]
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


@pytest.fixture(scope="module")
def wanted(model: CausalLM) -> list[tuple[GenerationRequest, Generation]]:
    """Return requests of all lengths, and their generations in batches of one."""
    draws = np.random.default_rng(3)
    requests = [draw_request(n, int(draws.integers(1, 60)), int(draws.integers(1, 36))) for n in range(14)]
    return [(request, alone(model, request)) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_bytes"), [(1, 1 << 28), (2, 1 << 28), (3, 1 << 28), (3, 100_000), (2, 0)])
def test_the_attention_block_size_does_not_change_bits(
    model: CausalLM,
    wanted: list[tuple[GenerationRequest, Generation]],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    num_bytes: int,
) -> None:
    """Sequences of all lengths join and leave, so that blocks fill, shrink, refill and widen."""
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_BLOCK_ROWS", rows)
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_CACHE_BYTES", num_bytes)
    core, draws = new_core(model, pages=128), np.random.default_rng(rows)
    found: dict[int, Generation] = {}
    for request, _ in wanted:
        core.submit(request)
        found |= step(core, int(draws.integers(0, 9)))
    found |= generate(core)
    for request, generation in wanted:
        assert_same(found[request.sequence_id], generation)


# ---------------------------------------------------------------- all together

ONE_HEAD = small_config(num_kv_heads=1)
# Three queries per key, and sizes that are not multiples of a register.
ODD = replace(small_config(vocab_size=301), hidden_size=100, intermediate_size=201, num_heads=6, head_dim=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "page_tokens", "options"),
    [
        (small_config(num_kv_heads=4), 1, {}),
        (ONE_HEAD, 5, {}),
        (small_config(), 16, {}),
        (small_config(num_kv_heads=4), 16, {"overlaps_steps": True}),
        (ONE_HEAD, 5, {"capture": Recorded(), "overlaps_steps": True}),
        (ODD, 16, {"prefill_tokens": 7, "max_running": 5}),
        (ODD, 16, {"matmul": build_tiled(16)}),
        pytest.param(ONE_HEAD, 16, {}, marks=pytest.mark.nightly),
        pytest.param(ONE_HEAD, 5, {"overlaps_steps": True}, marks=pytest.mark.nightly),
        pytest.param(ONE_HEAD, 5, {"capture": Recorded()}, marks=pytest.mark.nightly),
    ],
)
def test_sharing_eviction_and_preemption_do_not_change_bits(
    config: DecoderConfig, page_tokens: int, options: dict[str, Any]
) -> None:
    """Run groups of siblings with several turns each, which arrive at random times, in a cache that is too small.

    Every generation must equal that of its request in a batch of one. Counters are checked after every step.
    """
    model, draws = small_model(config=config), np.random.default_rng(5)
    settings: dict[str, Any] = {"prefill_tokens": 23, **options}
    core = new_core(model, -(-150 // page_tokens), page_tokens=page_tokens, **settings)
    longest = core.capacity.sequence_tokens
    live: dict[int, GenerationRequest] = {}
    for number in range(12):
        prompt = random_ids(5 + 11 * (number // 3), number // 3)
        sampling = Sampling(temperature=draws.choice([1.0, 0.7, 0.0]), top_k=int(draws.choice([0, 5])))
        live[number] = GenerationRequest(number, prompt, int(draws.integers(1, 20)), sampling, seed=number)
    arriving = draws.permutation(len(live)).tolist()
    while core.has_work or arriving:
        if arriving and (draws.random() < 0.6 or not core.has_work):
            core.submit(live[arriving.pop()])
        outcomes, load = core.step(), core.get_load()
        assert 0 <= load.cached_tokens <= load.used_tokens <= core.capacity.kv_tokens
        for number, found in outcomes:
            assert isinstance(found, Generation)
            request = live.pop(number)
            assert_same(found, alone(model, request, options.get("matmul")))
            ids = np.concatenate((request.token_ids, found.token_ids, random_ids(int(draws.integers(0, 9)), number)))
            if len(ids) + 12 <= longest and draws.random() < 0.8:
                live[number] = replace(request, token_ids=ids, max_new_tokens=12)
                core.submit(live[number])
            elif draws.random() < 0.5:
                core.release_cache(number)
    assert not live
    for number in range(12):
        core.release_cache(number)
    load = core.get_load()
    assert load.used_tokens == 0
    assert min(load.evicted_tokens, load.preempted, load.recomputed_tokens) > 0
    assert "capture" not in options or options["capture"].replays > 0
