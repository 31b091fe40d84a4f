"""The SGLang engine with a real server fulfils the engine contract."""

import pytest

from tests.engine.contract import CASES, IN_LOW_PRECISION, Case, sentence
from tests.sglang.bench import SGLangBench

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", CASES, ids=sentence)
async def test_the_sglang_engine_in_float32(case: Case, bench: SGLangBench) -> None:
    await case(bench)


@pytest.mark.parametrize("case", IN_LOW_PRECISION, ids=sentence)
async def test_the_sglang_engine_in_bfloat16(case: Case, bench_in_bfloat16: SGLangBench) -> None:
    await case(bench_in_bfloat16)
