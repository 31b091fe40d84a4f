"""Tests of the embedded engine's event loop and thread. The tests for all engines are in tests/engine/contract."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from asterism.engine.contract import Capacity, EngineFailure, GenerationRequest
from asterism.engine.hf.tokenizer import UnusableTokenizer
from asterism.engine.inference.embedded import DeviceMissing, EmbeddedEngine, select_device
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.learner import distributed
from asterism.engine.model.hf_checkpoint import CheckpointError
from tests.engine.inference.cores import alone, draw_request
from tests.engine.started_engines import started
from tests.engine.tiny_models import save_small_model, small_config, small_model

pytestmark = pytest.mark.real_clock
LONGEST = 400
PAGE = 16
CONFIG = small_config(vocab_size=280)


@asynccontextmanager
async def running_engine(model_folder: Path, *, rows: int = 4) -> AsyncIterator[EmbeddedEngine]:
    """Start an engine, close it at the end, and check that its thread ends."""
    before = set(threading.enumerate())
    engine = EmbeddedEngine(model_folder, Capacity(rows * LONGEST + 5, PAGE, LONGEST), max_running=rows)
    async with started(engine) as (_, capacity):
        assert capacity == Capacity(rows * LONGEST, PAGE, LONGEST)
        yield engine
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in left if not name.startswith("asyncio_")] == []  # threads of the event loop can stay


def request(number: int) -> GenerationRequest:
    return draw_request(number, 4 + number, 12)


def expected(asked: GenerationRequest) -> list[int]:
    return alone(small_model(config=CONFIG), asked).token_ids.tolist()


@pytest.mark.slow
async def test_two_engines_in_one_process_do_not_affect_each_other(model_folder: Path) -> None:
    async with running_engine(model_folder) as engine:
        async with started(EmbeddedEngine(model_folder, Capacity(2 * LONGEST, 8, LONGEST))) as (other, _):
            calls = (one.generate(request(number)) for number in range(3) for one in (engine, other))
            found = [generation.token_ids.tolist() for generation in await asyncio.gather(*calls)]
        assert found == [expected(request(number)) for number in range(3) for _ in range(2)]


async def test_an_error_in_the_thread_fails_all_calls(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: EngineCore) -> None:
        raise RuntimeError("out of something")

    async with running_engine(model_folder) as engine:
        monkeypatch.setattr(EngineCore, "step", broken)
        found = await asyncio.gather(*(engine.generate(request(n)) for n in range(2)), return_exceptions=True)
        assert [str(each) for each in found] == ["the engine broke: RuntimeError: out of something"] * 2
        with pytest.raises(EngineFailure, match="the engine broke: RuntimeError: out of something"):
            await engine.generate(request(3))


async def test_a_folder_without_a_model_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        await EmbeddedEngine(tmp_path, Capacity(LONGEST, PAGE, LONGEST)).start()


async def test_a_tokenizer_of_another_model_fails_the_start(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path, small_model())
    with pytest.raises(
        UnusableTokenizer, match=r"tokenizer\.json has token ids up to .*config\.json has vocab_size 97"
    ):
        await EmbeddedEngine(folder, Capacity(LONGEST, PAGE, LONGEST)).start()


def see(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_engines_share_gpus_only_if_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2)
    assert [str(select_device("cuda", number)) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(select_device("cpu", 1)) == "cpu"


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_the_first_engine_and_the_only_rank_use_the_same_gpu(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    """The learner keeps weights on its GPU only if an engine uses the same GPU."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    see(monkeypatch, num_gpus)
    assert select_device("cuda", 0) == distributed._find_device("cuda")  # pyright: ignore[reportPrivateUsage]


def test_the_error_for_a_missing_gpu_names_the_configuration_key(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0)
    with pytest.raises(DeviceMissing, match=r"engine\.device is cuda, but torch .* finds no GPU"):
        select_device("cuda", 0)
