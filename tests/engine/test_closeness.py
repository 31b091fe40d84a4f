"""Tests: assert_close accepts the same tensors as torch.testing."""

from typing import Any

import pytest
import torch

from tests.engine.closeness import assert_close

ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (ONE, ONE + 1e-5),
        (ONE.clone().requires_grad_(), ONE),
        ({"a": ONE, "b": 2.0}, {"b": 2.0, "a": ONE}),
        ((ONE, (ONE, 1.0)), (ONE, (ONE, 1.0))),
        (torch.tensor(torch.inf), torch.tensor(torch.inf)),
    ],
)
def test_nearly_equal_values_are_close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ((ONE, ONE), (ONE,)),
        (ONE, ONE + 2e-5),
        (ONE, ONE[:1]),
        (ONE, ONE.double()),
        (ONE, torch.tensor([1.0, 1.0, torch.nan])),
        (torch.tensor(torch.nan), torch.tensor(torch.nan)),
        ({"a": ONE}, {"a": ONE, "b": ONE}),
        ({"a": ONE, "b": ONE}, {"a": ONE, "b": -ONE}),
    ],
)
def test_different_values_are_not_close(actual: Any, expected: Any) -> None:
    with pytest.raises((AssertionError, ValueError)):
        assert_close(actual, expected)
