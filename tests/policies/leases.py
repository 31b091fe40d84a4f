"""Requests for leases, and what an arbiter answers, as several tests need them."""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import AdmissionContinued, AnyMessage, EngineJoined, EngineLoadReported, LeaseGranted, LeaseRequested
from policies.arbiter import Arbiter
from policies.decider import Send

PROMPT = 8  # tokens of every prompt here
RESPONSE = 56  # that a trajectory may get beyond it


def request(
    tid: int,
    group: int | None = None,
    *,
    tokens: int = PROMPT,
    turn: int = 0,
    lease: int = 1,
    prompt: int = PROMPT,
    response: int = RESPONSE,
) -> LeaseRequested:
    """Each trajectory is a group of its own unless one is named."""
    left = prompt + response - tokens
    return LeaseRequested(tid, 1000 + tid if group is None else group, turn, lease, tokens, prompt, left)


def joined(number: int = 0, tokens: int = 64, page: int = 1, life: int = 1) -> EngineJoined:
    return EngineJoined(f"generator-{number}", tokens, page, 0, life)


def load(
    engine: str = "generator-0",
    *,
    running: int = 1,
    steps: int = 0,
    busy_s: float = 0.0,
    used: int = 0,
    cached: int = 0,
    prefilled: int = 0,
    evicted: int = 0,
    preempted: int = 0,
    life: int = 1,
) -> EngineLoadReported:
    return EngineLoadReported(
        engine=engine,
        version=0,
        running=running,
        waiting=0,
        used_tokens=used,
        cached_tokens=cached,
        decode_steps=steps,
        generated_tokens=0,
        prefilled_tokens=prefilled,
        recomputed_tokens=0,
        evicted_tokens=evicted,
        preempted=preempted,
        busy_s=busy_s,
        life=life,
    )


def settled(arbiter: Arbiter, now: float, event: AnyMessage) -> list[Send]:
    """All that comes of it: what the arbiter sends to itself is delivered, until it sends nothing more."""
    effects = list(arbiter.decide(now, event))
    while effects and isinstance(effects[-1].message, AdmissionContinued):
        effects = effects[:-1] + list(arbiter.decide(now, AdmissionContinued()))
    return effects


def granted(effects: Sequence[Send]) -> list[LeaseGranted]:
    return [effect.message for effect in effects if isinstance(effect.message, LeaseGranted)]


def served(effects: Sequence[Send]) -> list[int]:
    return [grant.trajectory_id for grant in granted(effects)]
