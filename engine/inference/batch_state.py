"""The state of the running sequences, one row each, so that a step does no Python work per row.

Token ids and logprobs are in main memory. The device has the inputs of the next step: each row's newest token and block
table. The active rows are the rows of the current batch, in the order of DenseKvCache.order_by_length
(engine/inference/kv/contiguous_kv.py).
"""

from collections.abc import Sequence as Ordered
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import MAX_STOP_TOKENS
from asterism.engine.inference.buffer_sizes import MIN_ROWS, pad_to_bucket
from asterism.engine.inference.sampling import SamplingFlags, SamplingTensors, mix_seed, pack_sampling
from asterism.engine.inference.sequence import MissingPages, Sequence

_ALIGNMENT_BYTES = 8
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class RowTensors(NamedTuple):
    """The device tensors of N active rows, including padding. Each is int64 [N] and keeps its address."""

    rows: Tensor
    positions: Tensor  # positions of the tokens that the next step reads
    advances: Tensor  # new tokens per step: 1, or 0 in padding rows
    table_offsets: Tensor  # offset of each row's block table in all tables
    sampling: SamplingTensors


class BatchState:
    """The state of R rows of up to T tokens, and of row R for padding; B rows are active."""

    def __init__(
        self, num_rows: int, max_tokens: int, table_pages: int, padding_page: int, device: torch.device
    ) -> None:
        """`table_pages`: the length of a block table; its unused entries are `padding_page`."""
        self._device, self._padding_page = device, padding_page
        self.revision = 0  # number of changes of the active rows or their pages
        self._token_ids = np.zeros((num_rows, max_tokens), np.int32)  # prompt and generated tokens
        self._logprobs = np.zeros((num_rows, max_tokens), np.float32)  # logprobs of generated tokens
        self._last_position = np.zeros(num_rows, np.int64)  # position of the last token that the request allows
        self._stop_ids = np.full((num_rows, MAX_STOP_TOKENS), -1, np.int32)  # -1 in unused entries
        self._sampling = np.stack([pack_sampling(Sampling())] * (num_rows + 1), 1)  # [field of Sampling, row]
        self._mixed_seeds = np.zeros(num_rows + 1, np.int64)
        self._newest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._tables = torch.full((num_rows + 1, table_pages), padding_page, device=device)
        self.max_active_rows = pad_to_bucket(num_rows, MIN_ROWS)  # limit of active rows, including padding
        self._active_ints = torch.zeros((5, self.max_active_rows), dtype=torch.int64, device=device)
        self._active_floats = torch.ones((len(self._sampling), self.max_active_rows), device=device)
        self.activate(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def assign(self, joining: list[Sequence]) -> None:
        """Write the state of these sequences into their new rows."""
        rows = np.array([sequence.row for sequence in joining])
        tables = np.full((len(joining), self._tables.shape[1]), self._padding_page)
        for table, sequence in zip(tables, joining, strict=True):
            table[: len(sequence.pages)] = sequence.pages
            self._assign_row(sequence)
        newest = np.array([sequence.token_ids[-1] for sequence in joining], np.int64)
        on_device = upload((rows, tables, newest), self._device)
        self._tables.index_copy_(0, on_device[0], on_device[1])
        self._newest.index_copy_(0, on_device[0], on_device[2])

    def _assign_row(self, sequence: Sequence) -> None:
        request, row, num_tokens = sequence.request, sequence.row, len(sequence.token_ids)
        assert request is not None
        first = len(request.token_ids)
        self._token_ids[row, :num_tokens] = sequence.token_ids
        self._logprobs[row, first:num_tokens] = sequence.logprobs
        self._last_position[row] = first + request.max_new_tokens - 1
        self._stop_ids[row] = [*request.stop_token_ids, *[-1] * MAX_STOP_TOKENS][:MAX_STOP_TOKENS]
        self._sampling[:, row], self._mixed_seeds[row] = pack_sampling(request.sampling), mix_seed(request.seed)

    def append_pages(self, appended: list[MissingPages]) -> None:
        """Append the new pages of these sequences to their block tables."""
        width = self._tables.shape[1]
        addresses = [
            sequence.row * width + number
            for sequence, count in appended
            for number in range(len(sequence.pages) - count, len(sequence.pages))
        ]
        pages = [page for sequence, count in appended for page in sequence.pages[len(sequence.pages) - count :]]
        on_device = upload((np.array(addresses), np.array(pages)), self._device)
        self._tables.view(-1).index_copy_(0, *on_device)
        self.revision += 1

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return copies of the token ids [0, end) and the logprobs [first, end) of a row."""
        return self._token_ids[row, :end].copy(), self._logprobs[row, first:end].copy()

    # ------------------------------------------------------------ the batch

    def activate(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Make these rows the batch, in this order; the next step reads the tokens at `positions`."""
        self.revision += 1
        count = self.max_active_rows
        padded = np.full(count, len(self._token_ids))
        padded[: len(rows)] = rows
        ints = np.zeros((5, count), np.int64)
        ints[0], ints[3], ints[4] = padded, padded * self._tables.shape[1], self._mixed_seeds[padded]
        ints[1, : len(rows)], ints[2, : len(rows)] = positions, 1
        floats = self._sampling[:, padded]
        self.sampling_flags = SamplingFlags.from_values(floats)
        for static, new in zip(
            (self._active_ints, self._active_floats), upload((ints, floats), self._device), strict=True
        ):
            static.copy_(new)
        self.active = self.get_padded_rows(len(rows))

    def get_padded_rows(self, count: int) -> RowTensors:
        """The active rows, padded to `count`."""
        rows, positions, advances, offsets, mixed_seed = self._active_ints[:, :count].unbind(0)
        sampling = SamplingTensors(mixed_seed, *self._active_floats[:, :count].unbind(0))
        return RowTensors(rows, positions, advances, offsets, sampling)

    def gather_block_tables(self, active: RowTensors, pages: int | None = None) -> Tensor:
        """Return the block tables, int64 [N, pages]."""
        return self._tables[:, :pages].index_select(0, active.rows)

    def gather_input_ids(self, active: RowTensors) -> Tensor:
        """Return the token ids that the next step reads, [N]."""
        return self._newest.index_select(0, active.rows)

    def compute_slots(self, active: RowTensors, page_tokens: int) -> Tensor:
        """Return the cache slots for the keys and values of the active rows' tokens, [N]."""
        pages_N = self._tables.view(-1)[active.table_offsets + torch.floor_divide(active.positions, page_tokens)]
        return pages_N * page_tokens + active.positions.remainder(page_tokens)

    def advance(self, active: RowTensors, token_ids_N: Tensor) -> None:
        """Make these new tokens the input of the next step."""
        self._newest.index_copy_(0, active.rows, token_ids_N)
        active.positions.add_(active.advances)

    def copy_progress(self) -> tuple[Tensor, Tensor]:
        """Return copies of the tensors that `advance` changes."""
        return self._newest.clone(), self._active_ints.clone()

    def restore_progress(self, progress: tuple[Tensor, Tensor]) -> None:
        self._newest.copy_(progress[0])
        self._active_ints.copy_(progress[1])

    def record_tokens(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> list[int]:
        """Record the tokens at these positions, all [N]; return the indices of the rows that end here."""
        self._token_ids[rows, positions], self._logprobs[rows, positions] = token_ids, logprobs
        stopped = (token_ids[:, None] == self._stop_ids[rows]).any(-1)
        return (stopped | (positions >= self._last_position[rows])).nonzero()[0].tolist()


def upload(arrays: Ordered[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays with dtypes of _TORCH_DTYPES to the device, in one transfer that does not wait for CUDA.

    On a CPU the tensors share the arrays' memory. CUDA copies from page-locked memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    host = torch.from_numpy(pack_arrays(arrays))
    return unpack_arrays((host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True), arrays)


def pack_arrays(arrays: Ordered[NDArray[Any]]) -> NDArray[np.uint8]:
    starts = _list_starts(arrays)
    packed = np.zeros(starts[-1], np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack_arrays(packed: Tensor, arrays: Ordered[NDArray[Any]]) -> list[Tensor]:
    """Return views of the packed bytes, with the dtypes and shapes of the arrays."""
    return [
        packed[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for start, array in zip(_list_starts(arrays), arrays, strict=False)
    ]


def _list_starts(arrays: Ordered[NDArray[Any]]) -> list[int]:
    """Return the start of each array in packed memory, and the end of the last array."""
    return [0, *accumulate(-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays)]
