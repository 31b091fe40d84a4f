"""Decides again on a logged event: recovery continues from the result, replay compares it with the log."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actors.runtime.decider_loop import compute_fingerprint, compute_state_fingerprint, encode_effects
from bus.event_log.records import REFUSED_FINGERPRINT, Decision
from bus.messages import AnyMessage, Envelope, ProtocolError
from policies.decider import Decider, Send


class Redecision(msgspec.Struct, frozen=True):
    """The result of deciding again on one event."""

    message: AnyMessage  # of the event
    effects: Sequence[Send] | str  # or the reason for which the decider refuses the event
    frames: Sequence[bytes]  # of the effects
    state: msgspec.Struct | None
    fingerprints: tuple[bytes, bytes | None]  # of effects and state, as in bus.event_log.records.Decision

    @property
    def sends(self) -> Sequence[Send]:
        return () if isinstance(self.effects, str) else self.effects

    def find_difference(self, decision: Decision | None) -> str:
        """Returns "effects", "state" or nothing. An event that a kill left undecided differs in nothing."""
        if decision is None:
            return ""
        logged = decision.effects, decision.state
        differing = (name for name, a, b in zip(("effects", "state"), self.fingerprints, logged, strict=True) if a != b)
        return next(differing, "")


def redecide(decider: Decider, envelope: Envelope, now: float) -> Redecision:
    try:
        effects = decider.decide(now, envelope.message)
    except ProtocolError as error:
        return Redecision(envelope.message, str(error), (), None, (REFUSED_FINGERPRINT, None))
    frames, state = encode_effects(envelope.to, effects), decider.get_state_after(envelope.message)
    return Redecision(
        envelope.message, effects, frames, state, (compute_fingerprint(frames), compute_state_fingerprint(state))
    )
