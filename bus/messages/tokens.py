"""The tokens of a trajectory, from its generation to its training step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from asterism.bus.messages.turns import TurnGenerated


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def bytes_to_ids(token_ids: bytes) -> list[int]:
    return array("i", token_ids).tolist()


class TokenRecord(msgspec.Struct, frozen=True, array_like=True):
    """The record of a trajectory of T tokens, prompt included."""

    prompt_tokens: int
    token_ids: bytes  # int32 [T]
    loss_mask: bytes  # uint8 [T]; 1 for generated tokens that are not too stale
    logprobs: bytes  # float32 [T], by the version that generated the token; 0 for other tokens
    versions: bytes  # int32 [T]; -1 for tokens that were not generated

    @property
    def num_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def response_tokens(self) -> int:
        return self.num_tokens - self.prompt_tokens

    def append_generated(self, turn: TurnGenerated) -> TokenRecord:
        return self._append(turn.token_ids, b"\x01" * (len(turn.token_ids) // 4), turn.logprobs, turn.versions)

    def append_observation(self, token_ids: Sequence[int]) -> TokenRecord:
        """Append tokens of the environment: tool responses and the next turn's header."""
        blank = build_blank_record(ids_to_bytes(token_ids))
        return self._append(blank.token_ids, blank.loss_mask, blank.logprobs, blank.versions)

    def _append(self, token_ids: bytes, loss_mask: bytes, logprobs: bytes, versions: bytes) -> TokenRecord:
        return replace(
            self,
            token_ids=self.token_ids + token_ids,
            loss_mask=self.loss_mask + loss_mask,
            logprobs=self.logprobs + logprobs,
            versions=self.versions + versions,
        )


def build_blank_record(prompt_ids: bytes) -> TokenRecord:
    """Return a record of tokens that were not generated."""
    count = len(prompt_ids) // 4
    return TokenRecord(count, prompt_ids, bytes(count), bytes(4 * count), b"\xff\xff\xff\xff" * count)
