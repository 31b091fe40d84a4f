"""assert_close for tensors. Unlike torch.testing, it does not import sharded tensors, which takes a second."""

from typing import Any

import numpy as np
import torch


def assert_close(actual: Any, expected: Any, *, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """Compare tensors or numbers, also in tuples or dicts. The tolerances are those of torch.testing for float32."""
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
