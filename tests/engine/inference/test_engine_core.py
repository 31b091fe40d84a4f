"""Tests of the embedded engine's core: generated tokens do not depend on batching, caching or preemption."""

from itertools import islice

import numpy as np
import pytest

from asterism.configs.schema.algorithm import GREEDY, Sampling
from asterism.engine.contract import Capacity, Generation, GenerationRequest, RequestRefused
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    PAGE,
    alone,
    assert_as_alone,
    assert_greedy,
    fail_with_infinite_weights,
    generate,
    new_core,
    step,
    submit,
)
from tests.engine.tiny_models import random_ids, small_config, small_model

LONGEST = 48


def core_with_rows(model: CausalLM, rows: int = 4) -> EngineCore:
    """Build a core that has rows for `rows` sequences, and pages for as many sequences of LONGEST tokens."""
    return new_core(model, rows * LONGEST // PAGE, max_running=rows)


@pytest.mark.slow
def test_greedy_decoding_equals_the_training_forward_while_sequences_join_and_leave(model: CausalLM) -> None:
    core = core_with_rows(model, rows=3)
    requests = [
        GenerationRequest(number, random_ids(3 + 5 * number, number), 4 + 3 * number, GREEDY) for number in range(6)
    ]
    found: dict[int, Generation] = {}
    coming = iter(requests)  # one request arrives per step; three fit
    while len(found) < len(requests):
        submit(core, islice(coming, 1))
        ended = step(core)
        for sequence_id in ended:
            core.release_cache(sequence_id)
        found |= ended
    for request in requests:
        generation = found[request.sequence_id]
        assert_greedy(model, request, generation)
        assert len(generation.token_ids) == request.max_new_tokens
        assert generation.finish == "length"


def test_a_seed_gives_the_same_tokens_in_any_batch(model: CausalLM) -> None:
    request = GenerationRequest(7, random_ids(9, 1), 24, seed=2**63 + 5)
    core = core_with_rows(model)
    for number in range(3):
        ids, count = random_ids(4 + 7 * number, number), 5 + 9 * number
        core.submit(GenerationRequest(number, ids, count, Sampling(temperature=0.7), seed=number))
    core.step()
    assert_as_alone(model, generate(core, request), request)


@pytest.mark.parametrize("changed", [0, 3, 9])
def test_a_cached_prefix_is_used_up_to_its_first_different_token(model: CausalLM, changed: int) -> None:
    core = core_with_rows(model)
    prompt = random_ids(6, 0)
    first = generate(core, GenerationRequest(1, prompt, 5, seed=1))[1]
    ids = np.concatenate((prompt, first.token_ids, random_ids(2, 9)))
    ids[changed] = (ids[changed] + 1) % 97
    again = GenerationRequest(1, ids, 8, seed=1)
    assert_as_alone(model, generate(core, again), again)


def test_a_second_turn_can_be_shorter(model: CausalLM) -> None:
    core = core_with_rows(model)
    generate(core, GenerationRequest(1, random_ids(12, 0), 5, seed=1))
    again = GenerationRequest(1, random_ids(12, 0)[:4], 8, seed=1)
    assert_as_alone(model, generate(core, again), again)


def test_a_sequence_can_grow_to_the_largest_length(model: CausalLM) -> None:
    request = GenerationRequest(1, random_ids(8, 0), LONGEST - 8, GREEDY)
    found = alone(model, request)
    assert_greedy(model, request, found)
    assert len(found.token_ids) == LONGEST - 8


def test_requests_without_a_free_row_are_served_first_come_first_served(model: CausalLM) -> None:
    core = core_with_rows(model, rows=1)
    for number in (1, 2, 3):
        core.submit(GenerationRequest(number, random_ids(4, number), 3))
    core.step()
    assert (core.get_load().running, core.get_load().waiting) == (1, 2)
    assert list(generate(core)) == [1, 2, 3]


def test_an_idle_sequence_is_served_before_new_sequences(model: CausalLM) -> None:
    core = core_with_rows(model, rows=1)
    generate(core, GenerationRequest(1, random_ids(4, 1), 3))
    core.submit(GenerationRequest(2, random_ids(4, 2), 3))
    assert list(generate(core, GenerationRequest(1, random_ids(4, 1), 3))) == [1, 2]


def test_used_tokens_count_whole_pages_of_running_and_idle_sequences(model: CausalLM) -> None:
    core = core_with_rows(model)
    assert core.capacity == Capacity(4 * LONGEST, PAGE, 2 * LONGEST)
    # 9 and 15 tokens are cached; the last token of a sequence has no entry in the cache.
    generate(core, *(GenerationRequest(number, random_ids(4, number), 6 * number) for number in (1, 2)))
    assert (core.get_load().used_tokens, core.get_load().cached_tokens) == (4 * PAGE, 4 * PAGE)
    core.release_cache(1)
    core.release_cache(1)
    assert (core.get_load().used_tokens, core.get_load().cached_tokens) == (2 * PAGE, 2 * PAGE)
    core.release_cache(2)
    assert (core.get_load().used_tokens, core.get_load().cached_tokens) == (0, 0)


def test_releasing_a_running_sequence_aborts_it_and_frees_its_row(model: CausalLM) -> None:
    core = core_with_rows(model, rows=1)
    core.submit(GenerationRequest(1, random_ids(4, 1), 20))
    core.step()
    [(_, outcome)] = core.release_cache(1)
    assert isinstance(outcome, Generation)
    assert outcome.finish == "abort"
    assert core.get_load().used_tokens == 0


def test_a_second_request_for_a_running_sequence_is_refused(model: CausalLM) -> None:
    core, request = core_with_rows(model, rows=1), GenerationRequest(1, random_ids(4, 1), 20)
    core.submit(request)
    for _ in range(2):  # before and after its first step
        with pytest.raises(RequestRefused, match="sequence 1 is being generated already"):
            core.submit(request)
        core.step()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("matrix", ["mlp.down_proj", "self_attn.v_proj"])
def test_logits_that_are_not_finite_fail_only_their_request(matrix: str, count: int) -> None:
    core, whole = core_with_rows(small_model()), small_model()
    fail_with_infinite_weights(core, f"model.layers.0.{matrix}.weight", whole)
    requests = {number: GenerationRequest(number, random_ids(3, number), 3, GREEDY) for number in range(2, 2 + count)}
    for number, found in generate(core, *requests.values()).items():
        assert_greedy(whole, requests[number], found)


@pytest.mark.parametrize("config", [small_config(tie_word_embeddings=False), small_config(num_kv_heads=4)])
def test_models_of_other_shapes_decode_like_the_training_forward(config: DecoderConfig) -> None:
    other, request = small_model(config=config), GenerationRequest(1, random_ids(8, 0), 12, GREEDY)
    assert_greedy(other, request, alone(other, request))


def test_a_capacity_without_room_for_a_sequence_is_refused(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="kv_tokens 47 in pages of 8 have no room for a sequence of 41"):
        EngineCore(model, Capacity(kv_tokens=47, page_tokens=8, sequence_tokens=41))
