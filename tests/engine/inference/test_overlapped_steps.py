"""Tests of overlapped steps, which start before the previous step's tokens are known and change no generation."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from asterism.engine.contract import EngineFailure, EngineLoad, Generation, GenerationRequest
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.pending_step import PendingStep
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    PAGE,
    alone,
    assert_as_alone,
    assert_same,
    draw_request,
    fail_with_infinite_weights,
    generate,
    new_core,
    submit,
)
from tests.engine.tiny_models import small_model

MODEL, NEW_MODEL = small_model(), small_model(seed=5)
STOPS = (3, 11, 19, 40, 57, 80)


def request(
    number: int, new_tokens: int = 24, stops: tuple[int, ...] = STOPS, prompt_tokens: int = 9
) -> GenerationRequest:
    return draw_request(number, prompt_tokens, new_tokens, *stops)


def assert_equal(found: Generation, wanted: Generation) -> None:
    assert_same(found, wanted)
    assert found.finish == wanted.finish
    assert found.versions.tolist() == wanted.versions.tolist()
    assert found.cached_tokens == wanted.cached_tokens


# ---------------------------------------------------------------- scripts of commands


class Command(NamedTuple):
    before_step: int
    kind: str  # "submit", "abort", "release" or "weights"
    number: int  # id of the sequence


class Life(NamedTuple):
    outcomes: dict[int, Generation]
    load: EngineLoad
    streams: dict[int, list[int]]


def run_script(core: EngineCore, commands: list[Command], requests: dict[int, GenerationRequest]) -> Life:
    """Run steps until all commands are executed and no work is left. Every request has a listener."""
    outcomes: dict[int, Generation] = {}
    streams: dict[int, list[int]] = {}
    number = 0
    while core.has_work or any(command.before_step >= number for command in commands):
        for command in commands:
            if command.before_step == number:
                record(give(core, command, requests), outcomes, streams)
                if command.kind == "submit":
                    streams.setdefault(command.number, [])
        record(core.step(), outcomes, streams)
        for sequence_id, tokens in streams.items():
            if sequence_id not in outcomes:
                tokens += core.read_generated(sequence_id, len(tokens)).tolist()
        number += 1
    return Life(outcomes, core.get_load(), streams)


def give(
    core: EngineCore, command: Command, requests: dict[int, GenerationRequest]
) -> list[tuple[int, Generation | EngineFailure]]:
    match command.kind:
        case "submit":
            core.submit(requests[command.number])
        case "abort":
            return core.abort(command.number)
        case "release":
            return core.release_cache(command.number)
        case _:
            core.install_weights(core.version + 1, (NEW_MODEL if core.version % 2 == 0 else MODEL).state_dict())
    return []


def record(
    ended: list[tuple[int, Generation | EngineFailure]], outcomes: dict[int, Generation], streams: dict[int, list[int]]
) -> None:
    for sequence_id, found in ended:
        assert isinstance(found, Generation)
        assert sequence_id not in outcomes
        tokens = found.token_ids.tolist()
        assert streams[sequence_id] == tokens[: len(streams[sequence_id])]
        streams[sequence_id], outcomes[sequence_id] = tokens, found


def assert_equal_lives(commands: list[Command], requests: dict[int, GenerationRequest], pages: int) -> None:
    lives = [
        run_script(new_core(MODEL, pages, overlaps_steps=overlaps), commands, requests) for overlaps in (False, True)
    ]
    wanted, found = lives
    assert found.outcomes.keys() == wanted.outcomes.keys()
    for number, generation in wanted.outcomes.items():
        assert_equal(found.outcomes[number], generation)
    assert found.streams == wanted.streams
    for counter in ("used_tokens", "cached_tokens", "generated_tokens", "decode_steps", "prefilled_tokens", "waiting"):
        assert getattr(found.load, counter) == getattr(wanted.load, counter), counter


def draw_script(draws: np.random.Generator) -> tuple[list[Command], dict[int, GenerationRequest]]:
    """Draw requests, aborts, releases and new weights at random steps. All sequences fit at the same time."""
    requests = {
        number: request(
            number, int(draws.integers(1, 30)), STOPS[: int(draws.integers(0, 7))], int(draws.integers(1, 40))
        )
        for number in range(8)
    }
    commands = [Command(int(draws.integers(0, 20)), "submit", number) for number in requests]
    for command in list(commands):
        if kind := draws.choice(["", "abort", "release"], p=[0.5, 0.3, 0.2]):
            commands.append(Command(command.before_step + int(draws.integers(0, 16)), str(kind), command.number))
    commands += [Command(int(draws.integers(1, 30)), "weights", 0) for _ in range(int(draws.integers(0, 3)))]
    return commands, requests


def test_a_script_with_all_commands_gives_equal_generations_and_counters() -> None:
    assert_equal_lives(*draw_script(np.random.default_rng(1)), pages=128)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 10_000))
def test_random_scripts_give_equal_generations_and_counters(seed: int) -> None:
    assert_equal_lives(*draw_script(np.random.default_rng(seed)), pages=128)


# ---------------------------------------------------------------- capacity


@pytest.mark.slow
def test_the_row_of_an_ended_sequence_is_reused() -> None:
    core = new_core(MODEL, max_running=2, overlaps_steps=True)
    requests = [request(number) for number in range(7)]
    found = generate(core, *requests)
    assert_as_alone(MODEL, found, *requests)
    assert {generation.finish for generation in found.values()} == {"stop", "length"}


def test_a_surplus_token_is_not_counted_and_its_page_is_freed() -> None:
    wanted = alone(MODEL, request(1, 40, ()))
    stop = int(wanted.token_ids[PAGE - 1])  # the surplus token needs a new page
    first = wanted.token_ids.tolist().index(stop)
    core = new_core(MODEL, overlaps_steps=True)
    found = generate(core, request(1, 40, (stop,)))[1]
    assert (found.finish, found.token_ids.tolist()) == ("stop", wanted.token_ids.tolist()[: first + 1])
    load = core.get_load()
    assert (load.generated_tokens, load.decode_steps) == (first + 1, first + 1)
    assert load.used_tokens == -(-(9 + first) // PAGE) * PAGE
    core.release_cache(1)
    assert core.get_load().used_tokens == 0


@pytest.mark.slow
def test_preemption_waits_until_launched_tokens_are_known() -> None:
    requests = [request(number, 6 * PAGE, (), 3 * PAGE) for number in range(2)]
    core = new_core(MODEL, pages=12, overlaps_steps=True)
    assert_as_alone(MODEL, generate(core, *requests), *requests)
    load = core.get_load()
    assert (load.preempted, load.recomputed_tokens, load.generated_tokens) == (1, 6 * PAGE, 2 * 6 * PAGE)


# ---------------------------------------------------------------- busy time


class SlowSteps:
    """A clock that advances by a second when the engine waits for a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited_s = 0
        self._read = PendingStep.read
        monkeypatch.setattr("time.perf_counter", lambda: float(self.waited_s))

        def read(step: PendingStep) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
            self.waited_s += 1
            return self._read(step)

        monkeypatch.setattr(PendingStep, "read", read)


FINISHING: dict[str, Callable[[EngineCore], object]] = {
    "finish_step": EngineCore.finish_step,
    "abort": lambda core: core.abort(1),
    "release": lambda core: core.release_cache(1),
    "weights": lambda core: core.install_weights(1, NEW_MODEL.state_dict()),
}


@pytest.mark.parametrize("command", FINISHING)
def test_a_wait_between_steps_counts_as_busy_time(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, slow = new_core(MODEL, overlaps_steps=True), SlowSteps(monkeypatch)
    submit(core, [request(1, stops=()), request(2, stops=())])
    core.step()
    core.step()
    assert slow.waited_s == core.get_load().busy_s == 1  # the tokens of the second step are not known yet
    FINISHING[command](core)
    assert slow.waited_s == core.get_load().busy_s == 2
    FINISHING[command](core)  # no step is launched now
    assert slow.waited_s == core.get_load().busy_s == 2


def test_waits_within_steps_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, core = SlowSteps(monkeypatch), new_core(MODEL, pages=12, overlaps_steps=True)
    generate(core, *(request(number, 6 * PAGE, (), 3 * PAGE) for number in range(2)))
    assert core.get_load().preempted == 1  # preemption causes a wait while pages are allocated
    assert slow.waited_s == core.get_load().busy_s


# ---------------------------------------------------------------- commands between launch and reading


def test_an_abort_also_returns_the_launched_token() -> None:
    core = new_core(MODEL, overlaps_steps=True)
    core.submit(request(1, stops=()))
    for _ in range(3):
        core.step()
    assert len(core.read_generated(1, 0)) == 2  # the third token is not known yet
    [(_, found)] = core.abort(1)
    assert isinstance(found, Generation)
    assert found.token_ids.tolist() == alone(MODEL, request(1, stops=())).token_ids.tolist()[:3]
    assert not core.has_work


def test_an_abort_also_returns_requests_that_the_launched_token_ends() -> None:
    core = new_core(MODEL, overlaps_steps=True)
    core.submit(request(1, 2, ()))
    core.submit(request(2, 20, ()))
    assert core.step() + core.step() == []
    ended = dict(core.abort(2))
    assert [(number, found.finish) for number, found in ended.items() if isinstance(found, Generation)] == [
        (1, "length"),
        (2, "abort"),
    ]


def test_logits_that_are_not_finite_fail_only_their_request() -> None:
    core = new_core(small_model(), overlaps_steps=True)
    fail_with_infinite_weights(core, "model.layers.0.mlp.down_proj.weight", MODEL)
    assert_same(generate(core, request(2))[2], alone(MODEL, request(2)))


def test_the_last_step_leaves_no_work(model: CausalLM) -> None:
    core = new_core(model, overlaps_steps=True)
    core.submit(request(1, 1, ()))
    assert core.step() == []
    assert [number for number, _ in core.step()] == [1]
    assert not core.has_work
