"""Tests: with stand-ins for variable-length kernels, tokens and logprobs equal those of the training forward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.inference.buffer_sizes import MAX_GATHER_BYTES
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.kernels.attention import PagedAttention
from asterism.engine.inference.kernels.block_table_attention import BlockTableAttention, build_attention
from asterism.engine.inference.kernels.flash_varlen import FlashKernel, select_flash
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    PAGE,
    assert_greedy,
    assert_logprobs,
    fail_with_infinite_weights,
    generate,
    new_core,
    submit,
)
from tests.engine.inference.recorded_graph import Recorded
from tests.engine.inference.varlen_stubs import varlen_2_11, varlen_2_13
from tests.engine.tiny_models import random_ids, small_config, small_model

Use = Callable[[Callable[..., Any], int], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def use_kernel(attention: Callable[..., Any], page_tokens: int) -> None:
        """Select this kernel on a CPU. The size of a page is a multiple of `page_tokens`."""
        place = "asterism.engine.inference.kernels.block_table_attention"
        monkeypatch.setattr(f"{place}.select_flash", lambda *_: FlashKernel(attention))
        monkeypatch.setattr(f"{place}.PAGE_TOKENS_STEP", page_tokens)

    return use_kernel


def assert_generates_as_trained(core: EngineCore, model: CausalLM) -> None:
    """Check prompts of several lengths with common prefixes, in chunks, while other sequences run. Check more turns."""
    prompts = [random_ids(length, 1 + length // 30) for length in (3, 50, 9, 61, 64, 17, 40)]
    requests = [GenerationRequest(number, ids, 12, GREEDY) for number, ids in enumerate(prompts)]
    submit(core, requests[:3])
    for _ in range(2):
        core.step()
    found = generate(core, *requests[3:])
    for request in requests[:3]:
        ids = np.concatenate((request.token_ids, found[request.sequence_id].token_ids, random_ids(5, 9)))
        requests.append(GenerationRequest(request.sequence_id + 20, ids, 12, GREEDY))
        requests.append(GenerationRequest(request.sequence_id, ids, 12, GREEDY))
    second = generate(core, *requests[7:])
    for asked, generations in ((requests[:7], found), (requests[7:], second)):
        for request in asked:
            generation = generations[request.sequence_id]
            assert_greedy(model, request, generation)
            assert_logprobs(model, request, generation)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "page_tokens"), [(varlen_2_11, 1), (varlen_2_13, PAGE + 1), (varlen_2_13, PAGE)])
@pytest.mark.parametrize("prefill_tokens", [20, 512])
def test_generations_equal_the_training_forward(
    model: CausalLM, use: Use, attention: Callable[..., Any], page_tokens: int, prefill_tokens: int
) -> None:
    use(attention, page_tokens)
    core = new_core(model, prefill_tokens=prefill_tokens)
    assert_generates_as_trained(core, model)
    assert core.get_load().prefilled_tokens < sum((3, 50, 9, 61, 64, 17, 40)) + 200  # prefixes were cached


@pytest.mark.slow
@pytest.mark.parametrize("attention", [varlen_2_11, varlen_2_13])
def test_graphs_with_overlapped_steps_give_the_same_generations(use: Use, attention: Callable[..., Any]) -> None:
    use(attention, PAGE)
    model, capture = small_model(config=small_config(num_kv_heads=1)), Recorded()
    core = new_core(model, prefill_tokens=20, capture=capture, overlaps_steps=True)
    assert_generates_as_trained(core, model)
    assert capture.replays > 10
    if attention is varlen_2_13:
        assert capture.graphs <= 2  # one graph each for 4 and for 8 rows


def test_pages_of_256_tokens_and_block_tables_select_the_paged_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config, where = small_config(), "asterism.engine.inference.kernels.block_table_attention.select_flash"

    def select(attention: Callable[..., Any] | None, page_tokens: int) -> type:
        monkeypatch.setattr(where, lambda *_: attention and FlashKernel(attention))
        capacity = Capacity(4 * page_tokens, page_tokens, 32)
        return type(build_attention(config, capacity, torch.float32, torch.device("cpu"))[1])

    assert select(varlen_2_13, 256) is BlockTableAttention
    assert select(varlen_2_13, 512) is BlockTableAttention
    assert select(varlen_2_13, 16) is PagedAttention
    assert select(varlen_2_11, 256) is PagedAttention
    assert select(None, 256) is PagedAttention


def test_only_16_bit_tensors_on_cuda_use_the_flash_kernel() -> None:
    assert select_flash(torch.device("cpu"), torch.bfloat16) is None
    assert select_flash(torch.device("cuda"), torch.float32) is None
    assert isinstance(select_flash(torch.device("cuda"), torch.bfloat16), FlashKernel)


def test_pages_with_non_finite_values_are_cleared_before_reuse(use: Use) -> None:
    use(varlen_2_13, PAGE)
    core, whole = new_core(small_model(), pages=12), small_model()
    fail_with_infinite_weights(core, "model.layers.0.self_attn.v_proj.weight", whole)
    request = GenerationRequest(2, random_ids(60, 2), 3, GREEDY)
    assert_greedy(whole, request, generate(core, request)[2])


@pytest.mark.parametrize(("cached_tokens", "num_keys"), [(0, [7 * 44]), (40, [2 * 44, 2 * 44, 2 * 44, 44])])
def test_cached_prompts_are_gathered_in_groups_that_fit_the_buffer(
    model: CausalLM, use: Use, monkeypatch: pytest.MonkeyPatch, cached_tokens: int, num_keys: list[int]
) -> None:
    """The buffer has room for 96 tokens. Prompts without cached tokens need one call and no gather."""
    seen: list[int] = []  # number of keys in each call; prompts need no call in the last layer

    def attend(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Any:
        seen.append(len(args[1]))
        return varlen_2_11(*args, scale=scale, window_size=window_size)

    use(attend, 1)
    monkeypatch.setitem(MAX_GATHER_BYTES, "cpu", 1)
    core = new_core(model, pages=128)
    generate(core, *(GenerationRequest(n, random_ids(cached_tokens, n), 2) for n in range(7) if cached_tokens))
    seen.clear()
    requests = [GenerationRequest(n, random_ids(45, n), 6, GREEDY) for n in range(7)]
    found = generate(core, *requests)
    assert seen == num_keys * (model.config.num_layers - 1)
    for asked in requests:
        assert found[asked.sequence_id].cached_tokens >= cached_tokens
        assert_greedy(model, asked, found[asked.sequence_id])
