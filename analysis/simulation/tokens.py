"""Tokens without a text: zeros, and a last one that tells the stand-in tokenizer what the turn says."""

from __future__ import annotations

from collections import abc

from analysis.simulation.cache import Sequence
from bus.messages import TurnGenerated
from policies.dialogue import tool_call_text

CALLS, ANSWERS = 1, 2

_SAYINGS = {
    CALLS: tool_call_text("jupyter_code", {"code": "1"}),
    ANSWERS: "<answer>\\boxed{1}</answer>",
}
_ZEROS = bytes(4 * 65_536)


class LengthTokenizer:
    """Implements policies.dialogue.TextTokenizer. A tool's result is the number of tokens that it and its header take."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return [] if trusted else [0] * int(text.rsplit("\n", 1)[-1])

    def decode(self, token_ids: abc.Sequence[int]) -> str:
        return _SAYINGS[token_ids[-1]]


def spoken_turn(sequence: Sequence, *, stops: bool, last: bool) -> TurnGenerated:
    """What a request has generated; `last`: the trajectory's last turn, which answers."""
    tokens = sequence.tokens - sequence.began_at
    return TurnGenerated(
        trajectory_id=sequence.trajectory_id,
        turn=sequence.turn,
        lease=sequence.lease,
        token_ids=_ZEROS[: 4 * tokens - 4] + (ANSWERS if last else CALLS).to_bytes(4, "little"),
        logprobs=b"",  # nobody reads them here, and a step's would be a gigabyte to copy about
        versions=b"",
        finish="stop" if stops else "length",
    )
