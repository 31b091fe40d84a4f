"""The format of sizes shows only the size 0 as 0."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.configs.errors import GIB, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((0, "0.00 MiB"), (100, "0.10 KiB"), (4096, "4.00 KiB"), (262_144, "0.25 MiB"), (45 * 2**20, "45.00 MiB")),
        *((GIB // 25, "40.96 MiB"), (GIB - 1, "1,024.00 MiB"), (GIB, "1.00 GiB"), (1.5 * GIB, "1.50 GiB")),
        (3000 * GIB, "3,000.00 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_a_size_is_shown_in_a_unit_that_fits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(16, 2**50))
def test_the_formatted_size_is_within_five_percent(num_bytes: int) -> None:
    number, unit = format_bytes(num_bytes).replace(",", "").split()
    size = float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[unit]
    assert abs(size - num_bytes) <= max(0.05 * num_bytes, 8)
