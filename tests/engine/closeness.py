"""Whether tensors are nearly equal: torch.testing without its second of imports, which is what a sharded tensor needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_close(actual: Any, expected: Any, *, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """Two tensors, two numbers, or as many of them in tuples or by name. The bounds are torch.testing's for float32."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        actual, expected = tuple(actual.values()), tuple(expected[name] for name in actual)
    if isinstance(actual, tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, rtol=rtol, atol=atol)
        return
    one, other = torch.as_tensor(actual), torch.as_tensor(expected)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy(), rtol=rtol, atol=atol, equal_nan=False)
