"""A probe generates one greedy token per prompt; it has no result if the engine fails or has other weights."""

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from asterism.actors.engines.weight_probing import PROBE_TIMEOUT_S, EngineProber
from asterism.bus.messages import WeightProbe, WeightsPublished, ids_to_bytes
from asterism.configs.schema.algorithm import GREEDY
from tests.actors.generators import ScriptedEngine

PROBE = WeightProbe(1, (ids_to_bytes([3, 4]), ids_to_bytes([5])), (-0.5, -0.25))
WEIGHTS = WeightsPublished(7, "/dev/shm/w", 8, "d", 1, PROBE)


def build_prober(engine: ScriptedEngine) -> EngineProber:
    return EngineProber(engine.generate, engine.release_cache)


async def test_each_prompt_is_a_new_sequence_with_one_greedy_token() -> None:
    engine = ScriptedEngine(7)
    prober = build_prober(engine)
    assert [await prober.score(WEIGHTS) for _ in range(2)] == [(-0.5, -1.0)] * 2
    assert [(each.max_new_tokens, each.sampling) for each in engine.requests] == [(1, GREEDY)] * 4
    assert [each.token_ids.tolist() for each in engine.requests[:2]] == [[3, 4], [5]]
    assert engine.released_caches == [each.sequence_id for each in engine.requests] == [-1, -2, -3, -4]


async def test_weights_without_a_probe_are_not_probed() -> None:
    engine = ScriptedEngine(7)
    assert await build_prober(engine).score(replace(WEIGHTS, probe=None)) == ()
    assert engine.requests == []


@pytest.mark.parametrize(
    ("first_token", "version", "cause"),
    [
        (666, 7, "out of memory"),
        (999, 7, f"no answer after {PROBE_TIMEOUT_S:g} s"),
        (3, 6, "the engine generated with another version"),
    ],
)
async def test_a_failed_probe_is_logged_and_has_no_result(first_token: int, version: int, cause: str) -> None:
    engine = ScriptedEngine(version)
    probe = replace(PROBE, prompts=(ids_to_bytes([first_token]), ids_to_bytes([5])))
    with capture_logs() as logged:
        assert await build_prober(engine).score(replace(WEIGHTS, probe=probe)) == ()
    assert [(line["event"], line["version"], line["cause"]) for line in logged] == [("weights.not_probed", 7, cause)]
    assert len(engine.released_caches) == 2
