"""A trajectory's tokens in message encoding: ids, loss mask, logprobs and policy versions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.messages import TurnGenerated


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def bytes_to_ids(token_ids: bytes) -> list[int]:
    return array("i", token_ids).tolist()


def build_blank_record(prompt_ids: bytes) -> TokenRecord:
    count = len(prompt_ids) // 4
    return TokenRecord(
        prompt_tokens=count,
        token_ids=prompt_ids,
        loss_mask=bytes(count),
        logprobs=bytes(4 * count),
        versions=b"\xff\xff\xff\xff" * count,
    )


class TokenRecord(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a trajectory, prompt included; encoded as in bus.messages.TrainingSample."""

    prompt_tokens: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def response_tokens(self) -> int:
        return self.num_tokens - self.prompt_tokens

    def append_generated(self, turn: TurnGenerated) -> TokenRecord:
        return replace(
            self,
            token_ids=self.token_ids + turn.token_ids,
            loss_mask=self.loss_mask + b"\x01" * (len(turn.token_ids) // 4),
            logprobs=self.logprobs + turn.logprobs,
            versions=self.versions + turn.versions,
        )

    def append_observation(self, token_ids: Sequence[int]) -> TokenRecord:
        """Append tokens of the environment: tool responses and the next turn's header."""
        observation = build_blank_record(ids_to_bytes(token_ids))
        return replace(
            self,
            token_ids=self.token_ids + observation.token_ids,
            loss_mask=self.loss_mask + observation.loss_mask,
            logprobs=self.logprobs + observation.logprobs,
            versions=self.versions + observation.versions,
        )
