"""Tests of the memory budget for a model and its KV cache on each GPU."""

from pathlib import Path

import pytest

from asterism.configs.schema.machines import EngineConfig
from asterism.engine.sglang.server.compatibility import ServerUnusable
from asterism.engine.sglang.server.gpu_check import VisibleGpu, check_memory_budget
from tests.engine.sglang.scenes import VOCABULARY
from tests.engine.sglang.server.requirements import make_requirements
from tests.engine.tiny_models import small_model

PARAMETERS = sum(parameter.numel() for parameter in small_model(vocab_size=VOCABULARY).parameters())
GPU = VisibleGpu("A GPU", 2**20, 2**30)


def engine(kv_tokens: int, dtype: str = "bfloat16") -> EngineConfig:
    return EngineConfig(kind="sglang", device="cuda", kv_tokens=kv_tokens, dtype=dtype)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_the_model_and_its_dtype_determine_the_budget(model: Path, dtype: str, size: int) -> None:
    budget = check_memory_budget([GPU], make_requirements(model, engine=engine(1024, dtype)))
    assert budget.weights_bytes == PARAMETERS * size
    # bytes of the keys and values of 2 layers, with 2 heads of width 16
    assert budget.kv_bytes_per_token == 2 * 2 * 2 * 16 * size
    assert budget.min_cache_tokens == 1024


@pytest.mark.parametrize(("gpus", "heads"), [(2, 1), (4, 1)])
def test_each_tensor_parallel_gpu_has_a_share_of_the_heads_and_at_least_one(model: Path, gpus: int, heads: int) -> None:
    budget = check_memory_budget([GPU] * gpus, make_requirements(model, engine=engine(1024), tensor_parallel=gpus))
    assert budget.weights_bytes == PARAMETERS * 2 // gpus
    assert budget.kv_bytes_per_token == 2 * 2 * heads * 16 * 2


def test_the_requested_cache_is_divided_among_replicas(model: Path) -> None:
    requirements = make_requirements(model, engine=engine(1024), data_parallel=2)
    assert check_memory_budget([GPU] * 2, requirements).min_cache_tokens == 512


def test_the_gpu_with_the_least_memory_determines_the_exact_limit(model: Path) -> None:
    requirements = make_requirements(model, engine=engine(1024))
    need = PARAMETERS * 2 + 1024 * 256
    assert check_memory_budget([GPU, VisibleGpu("A GPU", need, 2**30)], requirements).max_cache_tokens == 1024
    with pytest.raises(ServerUnusable, match=r"^engine\.kv_tokens = 1024: "):
        check_memory_budget([GPU, VisibleGpu("A GPU", need - 1, 2**30)], requirements)


def test_the_memory_share_must_hold_one_trajectory_if_kv_tokens_is_0(model: Path) -> None:
    requirements = make_requirements(model, engine=engine(0), memory_share=0.5)
    assert check_memory_budget([GPU], requirements).max_cache_tokens == (2**19 - PARAMETERS * 2) // 256
    assert check_memory_budget([GPU], requirements).min_cache_tokens == 192 + 8
    with pytest.raises(ServerUnusable, match=r"^sglang\.memory_share = 0\.5: "):
        check_memory_budget([VisibleGpu("A GPU", PARAMETERS * 2 + 200 * 256, 2**30)], requirements)
