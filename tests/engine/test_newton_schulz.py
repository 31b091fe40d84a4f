import pytest
import torch

from engine.newton_schulz import orthogonalized
from tests.engine.closeness import assert_close


@pytest.mark.parametrize("shape", [(8, 8), (16, 6), (6, 16)])
def test_orthogonalization_moves_every_singular_value_to_about_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices_KRC = torch.randn(3, *shape, generator=generator)
    singular_values = torch.linalg.svdvals(orthogonalized(matrices_KRC))
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.3


def test_orthogonalization_keeps_the_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix_RC = torch.randn(12, 8, generator=generator)
    u, _, vt = torch.linalg.svd(matrix_RC, full_matrices=False)
    inner = u.T @ orthogonalized(matrix_RC[None])[0] @ vt.T
    assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)
