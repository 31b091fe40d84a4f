"""The contract of asterism.engine.contract.Engine: its cases are the public coroutines of these modules."""

import inspect
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("bench", "generation", "control", "load")))

from tests.engine.contract import control, generation, load  # noqa: E402 - after the registration of their asserts
from tests.engine.contract.bench import Bench  # noqa: E402

Case = Callable[[Bench], Coroutine[Any, Any, None]]


def _list_cases(module: ModuleType) -> list[Case]:
    """List the public coroutines of the contract's modules in the order of their definitions."""
    found = (each for name, each in vars(module).items() if not name.startswith("_"))
    return [each for each in found if inspect.iscoroutinefunction(each) and each.__module__ == module.__name__]


CASES: tuple[Case, ...] = (*_list_cases(generation), *_list_cases(load), *_list_cases(control))
IN_LOW_PRECISION: tuple[Case, ...] = generation.LOGPROBS


def sentence(case: Case) -> str:
    return case.__name__
