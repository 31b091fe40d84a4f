"""The log of a simulated run, fed to deciders again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actors.decider_loop import REFUSED, encode_effects, fingerprint, state_fingerprint
from bus.codec import decode
from bus.messages import ProtocolError
from policies.decider import Decider
from tests.simulation.world import World


def replay(world: World, deciders: Mapping[str, Mapping[str, Decider]]) -> Iterator[Decider]:
    """Each event's decider, once it has decided as it did in the run: effects, state, or that it refused the event. On the
    last events before all died, nobody may have decided."""
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
                assert decision is None or decision.effects == REFUSED, where
                yield decider
                continue
            if decision is not None:
                assert fingerprint(encode_effects(envelope.to, effects)) == decision.effects, where
                assert state_fingerprint(decider.state_after(envelope.message)) == decision.state, where
            yield decider
