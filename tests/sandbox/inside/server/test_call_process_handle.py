"""Output pipes of calls."""

import os

from hypothesis import given
from hypothesis import strategies as st

from sandbox.inside.server.call_process_handle import OutputPipe


@given(st.text(min_size=1), st.integers(0, 40))
def test_cut_output_ends_with_a_whole_character_and_counts_the_rest(text: str, limit: int) -> None:
    raw = text.encode("utf-8", "replace")[:4096]
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        os.write(write, raw)
        pipe = OutputPipe(read, limit)
        pipe.drain()
        head, num_cut = pipe.pop_text()
    finally:
        os.close(read)
        os.close(write)
    assert num_cut == max(0, len(raw) - limit)
    if num_cut:
        assert raw.startswith(head.encode())
        assert limit - len(head.encode()) < 4
