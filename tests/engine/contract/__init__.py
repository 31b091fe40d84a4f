"""Cases that every implementation of asterism.engine.contract.Engine must pass; each is a coroutine that takes a Bench."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("bench", "generation", "control", "load")))

from tests.engine.contract.bench import Bench  # noqa: E402 - after the registration of its asserts
from tests.engine.contract.control import CONTROL  # noqa: E402
from tests.engine.contract.generation import GENERATION, LOGPROBS  # noqa: E402
from tests.engine.contract.load import LOAD  # noqa: E402

Case = Callable[[Bench], Coroutine[Any, Any, None]]

CASES: tuple[Case, ...] = (*GENERATION, *LOAD, *CONTROL)
IN_LOW_PRECISION: tuple[Case, ...] = LOGPROBS


def sentence(case: Case) -> str:
    return case.__name__
