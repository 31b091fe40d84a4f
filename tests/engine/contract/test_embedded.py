"""Test: the embedded engine passes the engine contract."""

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from asterism.engine.contract import Capacity, Engine
from asterism.engine.inference.embedded import EmbeddedEngine
from tests.engine.contract import CASES, IN_LOW_PRECISION, Case, sentence
from tests.engine.contract.bench import Traits
from tests.engine.started_engines import started
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
LONGEST = 640
PAGE = 16
RUNNING = 8
TRAITS = Traits(logprob_error=1e-4, max_running=RUNNING, prefix_tokens=1, forgets=True, long_turn=240, look_s=0.001)


class EmbeddedBench:
    def __init__(self, model: Path, slots: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.publisher, self._dtype = model, WholePublisher(slots, dtype), dtype
        self.traits = TRAITS if dtype == torch.float32 else TRAITS._replace(logprob_error=0.3)

    @asynccontextmanager
    async def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AsyncGenerator[tuple[EmbeddedEngine, Capacity]]:
        before = set(threading.enumerate())
        engine = self._made(1024 if scarce else 2 * RUNNING * LONGEST, 16 if scarce else RUNNING, max_pending)
        async with started(engine) as running:
            yield running
        assert "embedded-engine" not in [thread.name for thread in set(threading.enumerate()) - before]

    def unstarted(self) -> EmbeddedEngine:
        return self._made(LONGEST, RUNNING, 100)

    async def end_abruptly(self, engine: Engine) -> None:
        def broken() -> None:
            raise RuntimeError("out of something")

        assert isinstance(engine, EmbeddedEngine)
        assert engine._thread is not None
        engine._thread.post(broken)

    def _made(self, kv_tokens: int, running: int, max_pending: int) -> EmbeddedEngine:
        capacity = Capacity(kv_tokens, PAGE, LONGEST)
        return EmbeddedEngine(self.model, capacity, dtype=self._dtype, max_running=running, max_pending=max_pending)


@pytest.mark.parametrize("case", CASES, ids=sentence)
async def test_the_embedded_engine_passes_in_float32(case: Case, model_folder: Path, tmp_path: Path) -> None:
    await case(EmbeddedBench(model_folder, tmp_path))


@pytest.mark.parametrize("case", IN_LOW_PRECISION, ids=sentence)
async def test_the_embedded_engine_passes_in_bfloat16(case: Case, model_folder: Path, tmp_path: Path) -> None:
    await case(EmbeddedBench(model_folder, tmp_path, torch.bfloat16))
