import threading
from pathlib import Path

import pytest
import torch

from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.weight_transfer import slot_file
from asterism.engine.weight_transfer.chunk_digests import (
    RunningDigests,
    count_device_threads,
    count_threads,
    find_damaged_chunk,
    write_digests,
)
from asterism.engine.weight_transfer.slot_file import (
    compute_file_bytes,
    count_digest_chunks,
    get_body_offset,
    get_chunk_table,
)
from tests.engine.whole_publisher import publish

CHUNK = slot_file.DIGEST_CHUNK_BYTES
NUM_BYTES = 3 * CHUNK + 64


def make_slot() -> memoryview:
    slot = memoryview(bytearray(compute_file_bytes(NUM_BYTES)))
    for number in range(count_digest_chunks(NUM_BYTES)):
        slot[get_body_offset(NUM_BYTES) + number * CHUNK] = number + 1
    return slot


@pytest.mark.slow
def test_the_digest_table_does_not_depend_on_the_number_of_threads() -> None:
    tables: list[bytes] = []
    for threads in (1, 4):
        slot = make_slot()
        write_digests(slot, NUM_BYTES, range(count_digest_chunks(NUM_BYTES)), threads)
        tables.append(bytes(get_chunk_table(slot, NUM_BYTES)))
        assert find_damaged_chunk(slot, NUM_BYTES, threads) is None
    assert tables[0] == tables[1]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_damaged_chunk_is_found(threads: int) -> None:
    slot = make_slot()
    write_digests(slot, NUM_BYTES, range(count_digest_chunks(NUM_BYTES)), threads)
    for number in (3, 1):
        slot[get_body_offset(NUM_BYTES) + number * CHUNK] = 77
    assert find_damaged_chunk(slot, NUM_BYTES, threads) == 1


def test_a_chunk_is_digested_only_after_its_copy_has_finished() -> None:
    slot, copied, waiting = make_slot(), threading.Event(), threading.Event()
    start = get_body_offset(NUM_BYTES)

    def wait() -> None:
        waiting.set()
        assert copied.wait(10)

    with RunningDigests(slot, NUM_BYTES, 2) as digests:
        digests.advance(CHUNK + 1, wait)  # only one chunk is complete
        assert waiting.wait(10)
        slot[start] = 99  # the copy of the first chunk finishes
        copied.set()
        digests.advance(NUM_BYTES)
    assert find_damaged_chunk(slot, NUM_BYTES, 1) is None
    slot[start] = 98
    assert find_damaged_chunk(slot, NUM_BYTES, 1) == 0


def test_an_error_of_a_copy_is_raised_at_the_end() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    for threads in (1, 2):
        digests = RunningDigests(make_slot(), NUM_BYTES, threads)
        with pytest.raises(RuntimeError, match="CUDA error"), digests:
            digests.advance(NUM_BYTES, fail)


def test_missing_chunks_raise_an_error_at_the_end() -> None:
    with (
        pytest.raises(AssertionError, match="1 of 4 chunks are complete"),
        RunningDigests(make_slot(), NUM_BYTES, 2) as digests,
    ):
        digests.advance(2 * CHUNK - 1)


def test_processes_share_the_processors() -> None:
    assert 1 == count_threads(10_000) <= count_threads(1) <= 8
    assert count_device_threads(torch.device("cuda", 0)) == count_threads(1)
    assert count_device_threads(torch.device("cpu")) == 1


@pytest.mark.slow
def test_a_single_rank_and_a_second_pass_write_the_same_digest(tmp_path: Path) -> None:
    """Some parameters end within a chunk, and the largest spans several chunks."""
    torch.manual_seed(0)
    parameters = {"c": torch.randn(3), "a": torch.randn(9 * 2**20), "b": torch.randn(5, 7), "d": torch.randn(2**20)}
    published = publish(WeightPublisher(tmp_path, parameters, torch.float32, 1), 3)
    content = memoryview(bytearray(Path(published.path).read_bytes()))
    table = bytes(get_chunk_table(content, published.num_bytes))
    write_digests(content, published.num_bytes, range(count_digest_chunks(published.num_bytes)), 1)
    assert bytes(get_chunk_table(content, published.num_bytes)) == table
    assert slot_file.digest_table(table, published.num_bytes) == published.digest
