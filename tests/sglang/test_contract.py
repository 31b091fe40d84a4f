"""The SGLang engine with a real server fulfils the engine contract."""

import asyncio

import pytest

from tests.engine.contract import CASES, IN_LOW_PRECISION, Case, sentence
from tests.sglang.bench import SGLangBench

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", CASES, ids=sentence)
def test_the_sglang_engine_in_float32(case: Case, loop: asyncio.Runner, bench: SGLangBench) -> None:
    loop.run(case(bench))


@pytest.mark.parametrize("case", IN_LOW_PRECISION, ids=sentence)
def test_the_sglang_engine_in_bfloat16(case: Case, loop: asyncio.Runner, bench_in_bfloat16: SGLangBench) -> None:
    loop.run(case(bench_in_bfloat16))
