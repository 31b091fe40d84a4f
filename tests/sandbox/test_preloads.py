"""The imports of the code select the preload of the fork server."""

import pytest

from asterism.sandbox.preloads import select_preload


@pytest.mark.parametrize(
    ("code", "preload"),
    [
        *(("print(1)", "bare"), ("import numpy as np", "numpy"), ("import numpy, sympy", "scientific")),
        ("import scipy.stats\nprint('sympy')", "numpy"),
        ("if True:\n    from sympy.solvers import solve", "scientific"),
        *(("print('numpy')", "bare"), ("import numpy as (", "bare"), ("from .numpy import x", "bare")),
        ("import mynumpy", "bare"),
    ],
)
def test_the_preload_is_selected_by_the_imports(code: str, preload: str) -> None:
    assert select_preload(code) == preload
