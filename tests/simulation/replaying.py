"""Replay of the logs of a simulated run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actors.runtime.decider_loop import (
    REFUSED_FINGERPRINT,
    compute_fingerprint,
    compute_state_fingerprint,
    encode_effects,
)
from bus.codec import decode
from bus.messages import ProtocolError
from policies.decider import Decider
from tests.simulation.world import World


def replay(world: World, deciders: Mapping[str, Mapping[str, Decider]]) -> Iterator[Decider]:
    """Replay all events, compare each decision with the log, and yield the decider.

    The comparison covers effects, state and refusals. The last events before a kill may have no
    logged decision.
    """
    for process, log in world.logs.items():
        for event in log.events:
            decider, envelope, decision = (
                deciders[process][event.actor],
                decode(event.frame),
                log.decisions.get(event.seq),
            )
            where = f"event {event.seq} of {process}: {event.kind} to {event.actor}"
            try:
                effects = decider.decide(event.time, envelope.message)
            except ProtocolError:
                assert decision is None or decision.effects == REFUSED_FINGERPRINT, where
                yield decider
                continue
            if decision is not None:
                assert compute_fingerprint(encode_effects(envelope.to, effects)) == decision.effects, where
                assert compute_state_fingerprint(decider.get_state_after(envelope.message)) == decision.state, where
            yield decider
