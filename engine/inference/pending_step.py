"""The tokens of a launched step: sampled on the device, and copied to main memory while the host continues."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.engine.inference.batch_state import BatchState, RowTensors
from asterism.engine.inference.running_batch import LaunchedStep
from asterism.engine.inference.sampling import SamplingFlags, sample


class PendingTokens(Protocol):
    def read(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return token ids and logprobs of the first `count` rows. Waits for this step, and for no later launch."""
        ...


class PendingStep(NamedTuple):
    launched: LaunchedStep
    tokens: PendingTokens

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return token ids and logprobs, [B]. Waits until the device has computed them."""
        return self.tokens.read(len(self.launched.sequences))


def sample_step(
    logits_NV: Tensor, state: BatchState, active: RowTensors, flags: SamplingFlags
) -> tuple[Tensor, Tensor]:
    """Sample the next tokens of these rows and advance the rows; return tokens and logprobs, [N]."""
    tokens_N, logprobs_N = sample(logits_NV, active.positions + 1, active.sampling, flags)
    state.advance(active, tokens_N)
    return tokens_N, logprobs_N


def pack_tokens(token_ids_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Pack token ids and the bits of logprobs, int32 [2, N], for one copy to main memory."""
    return torch.stack((token_ids_N.to(torch.int32), logprobs_N.view(torch.int32)))


def start_copy(token_ids_N: Tensor, logprobs_N: Tensor) -> PendingTokens:
    """Start the copy to main memory of tensors that later steps do not overwrite."""
    if token_ids_N.device.type == "cpu":
        return _HostTokens(token_ids_N, logprobs_N)
    return PackedTokens(pack_tokens(token_ids_N, logprobs_N))


class _HostTokens(NamedTuple):
    token_ids: Tensor
    logprobs: Tensor

    def read(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return self.token_ids[:count].numpy(), self.logprobs[:count].numpy()


class PackedTokens:
    """An asynchronous copy of the result of `pack_tokens`, which later steps can overwrite."""

    def __init__(self, packed_2N: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._packed_2N = packed_2N.to("cpu", non_blocking=True, copy=True)  # copies from CUDA into page-locked memory
        if packed_2N.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed_2N.device))

    def read(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        if self._event is not None:
            self._event.synchronize()
        token_ids, bits = self._packed_2N[:, :count].numpy()
        return token_ids, bits.view(np.float32)
