"""What a model and its cache take of each GPU, and when that is too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import Engine
from engine.sglang.fit import ServerUnusable
from engine.sglang.gpus import Gpu, check_room
from tests.engine.sglang.servers import wanted
from tests.engine.tiny_models import small_config, small_model

PARAMETERS = sum(parameter.numel() for parameter in small_model().parameters())
GPU = Gpu("A GPU", 2**20, 2**30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_hf()))
    return tmp_path


def engine(kv_tokens: int, dtype: str = "bfloat16") -> Engine:
    return Engine(kind="sglang", device="cuda", kv_tokens=kv_tokens, dtype=dtype)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_weights_and_cache_are_as_large_as_their_numbers(model: Path, dtype: str, size: int) -> None:
    room = check_room([GPU], wanted(model, engine=engine(1024, dtype)))
    assert room.weights_bytes == PARAMETERS * size
    assert room.token_bytes == 2 * 2 * 2 * 16 * size  # keys and values, of 2 layers and 2 heads of width 16
    assert room.cache_tokens == 1024


@pytest.mark.parametrize(("gpus", "heads"), [(2, 1), (4, 1)])
def test_gpus_that_share_a_copy_share_its_heads_and_each_has_one_at_least(model: Path, gpus: int, heads: int) -> None:
    room = check_room([GPU] * gpus, wanted(model, engine=engine(1024), tensor_parallel=gpus))
    assert room.weights_bytes == PARAMETERS * 2 // gpus
    assert room.token_bytes == 2 * 2 * heads * 16 * 2


def test_copies_of_the_model_share_the_cache_that_is_wanted(model: Path) -> None:
    assert check_room([GPU] * 2, wanted(model, engine=engine(1024), data_parallel=2)).cache_tokens == 512


def test_what_just_fits_the_gpu_with_least_fits_and_a_byte_less_does_not(model: Path) -> None:
    given = wanted(model, engine=engine(1024))
    need = PARAMETERS * 2 + 1024 * 256
    assert check_room([GPU, Gpu("A GPU", need, 2**30)], given).tokens == 1024
    with pytest.raises(ServerUnusable, match=r"^engine\.kv_tokens = 1024: "):
        check_room([GPU, Gpu("A GPU", need - 1, 2**30)], given)


def test_what_a_server_takes_by_itself_is_its_share_with_room_for_one_trajectory_at_least(model: Path) -> None:
    given = wanted(model, engine=engine(0), memory_share=0.5)
    assert check_room([GPU], given).tokens == (2**19 - PARAMETERS * 2) // 256
    assert check_room([GPU], given).cache_tokens == 192 + 8
    with pytest.raises(ServerUnusable, match=r"^sglang\.memory_share = 0\.5: "):
        check_room([Gpu("A GPU", PARAMETERS * 2 + 200 * 256, 2**30)], given)
