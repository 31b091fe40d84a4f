"""A strict engine: a token's bits depend on its own sequence alone, or the engine refuses to start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batching import ContinuousBatch
from engine.checkpoint import save_model
from engine.contract import Capacity, Generation, GenerationRequest
from engine.embedded import EmbeddedEngine
from engine.kernels import ByLines, Fused
from engine.products import WHOLE, Products, tiled
from engine.qwen3 import Qwen3, Qwen3Config, initialize
from engine.row_trial import RowsDepend, attention_keeps_rows, check_attention, products_that_keep_rows
from tests.engine.closeness import assert_close
from tests.engine.tiny_models import small_config, small_model, write_tokenizer

LONGEST, PAGE = 96, 16
CONFIG = small_config()


def _swayed(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
    """A product with another last bit where there are many rows."""
    return (x_NK @ weights_KF) * (1.0 + 2.0**-23 * (len(x_NK) > 30))


SWAYED = Products(_swayed, lambda to_NF, x_NK, weights_KF: to_NF + _swayed(x_NK, weights_KF))


def test_products_whose_rows_depend_on_their_number_are_passed_over_for_those_in_tiles() -> None:
    chosen = products_that_keep_rows(CONFIG, 64, 16, [SWAYED, tiled(16)])
    assert chosen.tile_rows == 16
    assert products_that_keep_rows(CONFIG, 29, 16, [SWAYED, tiled(16)]) is SWAYED


def test_where_no_products_keep_their_rows_it_is_said() -> None:
    with pytest.raises(RowsDepend, match=r'"strict", and on this machine torch .* matrix products'):
        products_that_keep_rows(CONFIG, 64, 16, [SWAYED])


def test_this_machine_has_products_and_attention_that_keep_their_rows() -> None:
    check_attention(ByLines(), CONFIG, 300)
    chosen = products_that_keep_rows(CONFIG, 160, 64)
    assert chosen is WHOLE or chosen.tile_rows


def test_attention_in_one_kernel_is_found_to_depend_on_what_is_beside_a_row() -> None:
    assert not attention_keeps_rows(Fused(), CONFIG, 300)
    with pytest.raises(RowsDepend, match="attention"):
        check_attention(Fused(), CONFIG, 300)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_tiles_give_the_products_of_all_rows(count: int) -> None:
    x_NK, weights_KF, to_NF = torch.randn(count, 12), torch.randn(12, 20), torch.randn(count, 20)
    assert_close(tiled(8).plain(x_NK, weights_KF), x_NK @ weights_KF)
    assert_close(tiled(8).added(to_NF, x_NK, weights_KF), to_NF + x_NK @ weights_KF)


# ---------------------------------------------------------------- whatever the batch


def odd_model(seed: int) -> Qwen3:
    """Sizes that fill no register, three queries to a key."""
    config = Qwen3Config(
        vocab_size=301,
        hidden_size=100,
        intermediate_size=201,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
    )
    model = Qwen3(config)
    initialize(model, seed, std=0.2)
    return model.requires_grad_(False)


def turns(seed: int, vocabulary: int) -> list[list[GenerationRequest]]:
    """Of twelve sequences one or two turns each; their prompts begin alike, and differ in how they are sampled."""
    draw = random.Random(seed)
    shared = np.random.default_rng(seed).integers(0, vocabulary, 40, dtype=np.int32)
    return [_turns_of(number, shared, vocabulary, draw) for number in range(12)]


def _turns_of(number: int, shared: np.ndarray, vocabulary: int, draw: random.Random) -> list[GenerationRequest]:
    own = np.random.default_rng(number).integers(0, vocabulary, LONGEST, dtype=np.int32)
    ids = np.concatenate((shared[: draw.randrange(40)], own[: draw.randrange(1, 20)]))
    found: list[GenerationRequest] = []
    for turn in range(draw.choice([1, 2])):
        temperature, top_k = draw.choice([1.0, 0.7, 0.0]), draw.choice([0, 0, 5])
        new_tokens = draw.randrange(1, 15)
        found.append(GenerationRequest(number, ids, new_tokens, temperature=temperature, top_k=top_k, seed=turn))
        ids = np.concatenate((ids, own[20 : 20 + draw.randrange(1, 20)]))
    return found


Told = dict[tuple[int, int], bytes]


def generated(
    model: Qwen3,
    wanted: Sequence[Sequence[GenerationRequest]],
    products: Products,
    *,
    rows: int,
    pages: int,
    prefill: int,
    seed: int,
) -> Told:
    """Ids and logprobs of every turn. Who comes when, and whose cache is dropped between turns, is drawn."""
    core = ContinuousBatch(
        model, Capacity(pages * PAGE, PAGE, LONGEST), prefill_tokens=prefill, max_running=rows, products=products
    )
    draw, told = random.Random(seed), Told()
    coming = [(number, 0) for number in range(len(wanted))]
    draw.shuffle(coming)
    under_way: dict[int, int] = {}
    while coming or core.has_work:
        if coming and (draw.random() < 0.4 or not core.has_work):
            number, turn = coming.pop()
            under_way[number] = turn
            core.submit(wanted[number][turn])
        for number, outcome in core.step():
            assert isinstance(outcome, Generation)
            turn = under_way[number]
            told[number, turn] = outcome.token_ids.tobytes() + outcome.logprobs.tobytes()
            if draw.random() < 0.4:
                core.forget(number)
            if turn + 1 < len(wanted[number]):
                coming.insert(draw.randrange(len(coming) + 1), (number, turn + 1))
    return told


@pytest.mark.parametrize("products", [WHOLE, pytest.param(tiled(16), marks=pytest.mark.slow)], ids=["whole", "tiles"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_and_logprobs_are_the_same_bits_whatever_is_batched_cut_shared_or_evicted(
    products: Products, seed: int
) -> None:
    model = odd_model(seed)
    wanted = turns(seed, 301)
    alone = generated(model, wanted, products, rows=1, pages=LONGEST // PAGE, prefill=512, seed=0)
    assert len(alone) == sum(map(len, wanted))
    cramped = generated(model, wanted, products, rows=5, pages=2 * LONGEST // PAGE, prefill=7, seed=seed + 1)
    together = generated(model, wanted, products, rows=64, pages=40 * LONGEST // PAGE, prefill=512, seed=seed + 2)
    assert cramped == alone
    assert together == alone


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("strict")
    write_tokenizer(parent / "tokenizer")
    config = small_config(vocab_size=280)
    save_model(parent / "model", config, small_model(config=config).state_dict(), parent / "tokenizer")
    return parent / "model"


def test_a_strict_engine_generates_what_a_fast_one_does(folder: Path) -> None:
    request = GenerationRequest(0, np.arange(9, dtype=np.int32), 12, seed=4)

    async def told(strict: bool) -> list[int]:
        engine = EmbeddedEngine(
            folder, Capacity(LONGEST, PAGE, LONGEST), max_running=8, prefill_tokens=24, strict=strict
        )
        await engine.start()
        try:
            return (await engine.generate(request)).token_ids.tolist()
        finally:
            await engine.close()

    assert asyncio.run(told(True)) == asyncio.run(told(False))


def test_a_strict_engine_in_bfloat16_does_not_start(folder: Path) -> None:
    engine = EmbeddedEngine(folder, Capacity(LONGEST, PAGE, LONGEST), dtype=torch.bfloat16, strict=True)

    async def start() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(RowsDepend, match=r"torch\.bfloat16 cannot be strict"):
        asyncio.run(start())
