"""Lease requests, load reports, and readers of the arbiter's effects, for several tests."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from asterism.bus import messages as msg
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.arbiter.decode_cost import CostCoefficients
from asterism.policies.arbiter.kv_ledger import Ledger
from asterism.policies.decider import Send

PROMPT = 8  # prompt tokens
RESPONSE = 56  # limit of response tokens


def request(
    tid: int,
    group: int | None = None,
    *,
    tokens: int = PROMPT,
    turn: int = 0,
    lease: int = 1,
    prompt: int = PROMPT,
    response: int = RESPONSE,
) -> msg.LeaseRequested:
    """Request a lease. By default, each trajectory has a separate group."""
    left = prompt + response - tokens
    return msg.LeaseRequested(tid, 1000 + tid if group is None else group, turn, lease, tokens, prompt, left)


def joined(number: int = 0, tokens: int = 64, page: int = 1, incarnation: int = 1) -> msg.EngineJoined:
    return msg.EngineJoined(f"generator-{number}", tokens, page, 0, incarnation)


def load(engine: str = "generator-0", **fields: float) -> msg.EngineLoadReported:
    """Report the load of an engine with one running sequence and these fields. All other counts are 0."""
    values: dict[str, Any] = dict.fromkeys(msg.EngineLoadReported.__struct_fields__, 0)
    values |= {"engine": engine, "running": 1, "incarnation": 1, **fields}
    return msg.EngineLoadReported(**values)


def reports(
    costs: CostCoefficients, number: int, *, engine: str = "a", seed: int = 0, noise: float = 0.0
) -> Iterator[msg.EngineLoadReported]:
    """Yield load reports of an engine with these costs; `noise` is the relative error of each interval's time."""
    rng = np.random.default_rng(seed)
    busy_s, steps, prefilled = 0.0, 0, 0
    used = [0, *rng.integers(0, 1_000_000, number).tolist()]
    yield load(engine)
    for before, now in pairwise(used):
        new_steps, new_prefilled = int(rng.integers(5, 60)), int(rng.integers(0, 20_000))
        steps, prefilled = steps + new_steps, prefilled + new_prefilled
        seconds = costs.step * new_steps + costs.read * new_steps * (before + now) / 2 + costs.prefill * new_prefilled
        busy_s += seconds * (1 + noise * rng.standard_normal())
        cache = {"used_tokens": now + 500, "cached_tokens": 500 if now else 0}
        yield load(engine, decode_steps=steps, busy_s=busy_s, prefilled_tokens=prefilled, **cache)


def settled(arbiter: Arbiter, now: float, event: msg.AnyMessage) -> list[Send]:
    """Return the effects of the event and of the arbiter's messages to itself."""
    effects = list(arbiter.decide(now, event))
    while effects and isinstance(effects[-1].message, msg.AdmissionContinued):
        effects = effects[:-1] + list(arbiter.decide(now, msg.AdmissionContinued()))
    return effects


def granted(effects: Sequence[Send]) -> list[msg.LeaseGranted]:
    return [effect.message for effect in effects if isinstance(effect.message, msg.LeaseGranted)]


def snapshot(ledger: Ledger) -> object:
    """Return copies of all accounts, engines and groups."""
    accounts = [dict(vars(account)) for account in ledger.accounts.values()]
    engines = [
        {name: list(value.items()) if isinstance(value, dict) else value for name, value in vars(engine).items()}
        for engine in ledger.engines.values()
    ]
    return accounts, engines, dict(ledger.groups)


def served(effects: Sequence[Send]) -> list[int]:
    return [grant.trajectory_id for grant in granted(effects)]
