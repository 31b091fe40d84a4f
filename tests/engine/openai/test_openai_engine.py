"""Tests of the engine for OpenAI's completions API: contract cases, dialects of servers, errors and the API key."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, Engine, EngineFailure, GenerationRequest, RequestRefused, WeightsRefused
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.openai.completions_api import CompletionChoice, CompletionChunk, CompletionOutput
from asterism.engine.openai.openai_engine import OpenAIEngine
from tests.engine.contract import Case, control, generation, load, sentence
from tests.engine.contract.bench import Traits, as_sequence, publish, request, tokens
from tests.engine.openai.completions_server import CompletionsServer, Dialect
from tests.engine.started_engines import started
from tests.engine.tiny_models import small_model
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
LONGEST = 640
TRAITS = Traits(logprob_error=9.0, max_running=8, prefix_tokens=1, forgets=True, long_turn=240, look_s=0.001)
CASES: tuple[Case, ...] = (
    *generation.STREAMING,
    generation.concurrent_calls_get_the_same_tokens_as_single_calls,
    generation.siblings_that_share_a_prompt_draw_different_tokens,
    generation.a_turn_ends_at_its_stop_token_and_not_at_the_models_end_token,
    generation.a_sequence_grows_to_the_capacity_and_no_further,
    generation.unservable_requests_are_refused_and_the_engine_keeps_running,
    generation.a_sequence_has_at_most_one_pending_request,
    generation.calls_beyond_max_pending_fail_and_the_others_are_answered,
    control.an_abort_returns_the_generated_tokens_and_the_turn_can_be_continued,
    control.an_abort_without_a_pending_request_has_no_effect,
    control.a_cancelled_call_is_aborted_and_can_be_repeated,
    control.a_paused_engine_starts_no_request_and_answers_aborts_immediately,
    control.an_engine_that_has_not_been_started_fails_every_call,
    control.closing_fails_pending_and_later_calls,
    load.the_capacity_is_whole_pages_with_room_for_the_longest_sequence,
)


class OpenAIBench:
    def __init__(self, model: Path, slots: Path, dialect: Dialect = "vllm") -> None:
        self.model, self.publisher, self.traits = model, WholePublisher(slots, torch.float32), TRAITS
        self.server = CompletionsServer(model, dialect, LONGEST)

    @asynccontextmanager
    async def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AsyncGenerator[tuple[OpenAIEngine, Capacity]]:
        async with self.server.serving() as url, started(self._make(url, max_pending)) as running:
            yield running

    def unstarted(self) -> OpenAIEngine:
        return self._make("http://127.0.0.1:9", 100)

    async def end_abruptly(self, engine: Engine) -> None:
        raise NotImplementedError

    def _make(self, url: str, max_pending: int) -> OpenAIEngine:
        tokenizer = load_tokenizer(self.model)
        return OpenAIEngine(
            url,
            tokenizer,
            sequence_tokens=LONGEST,
            max_pending=max_pending,
            retry_delays_s=(0.0,),
            request_timeout_s=60,
        )


@pytest.fixture
def dialect() -> Dialect:
    return "vllm"


@pytest.fixture
def bench(model_folder: Path, tmp_path: Path, dialect: Dialect) -> OpenAIBench:
    return OpenAIBench(model_folder, tmp_path, dialect)


@pytest.mark.parametrize("case", CASES, ids=sentence)
async def test_a_server_with_token_ids_passes_the_contract(case: Case, bench: OpenAIBench) -> None:
    await case(bench)


@pytest.mark.parametrize("dialect", ["llama.cpp"])
@pytest.mark.parametrize("case", generation.STREAMING, ids=sentence)
async def test_a_server_with_ids_in_logprobs_passes_the_contract(case: Case, bench: OpenAIBench) -> None:
    await case(bench)


# ---------------------------------------------------------------- dialects


@pytest.mark.parametrize(("dialect", "logprob"), [("vllm", -1.5), ("llama.cpp", -2.5)])
async def test_later_requests_have_the_first_accepted_form(bench: OpenAIBench, logprob: float) -> None:
    async with bench.engine() as (engine, _):
        assert len(bench.server.bodies) == 1
        found = await engine.generate(request(1))
        assert isinstance(bench.server.bodies[-1]["prompt"], list)
        assert found.logprobs.tolist() == [logprob] * 24
        assert found.versions.tolist() == [0] * 24


def ask(engine: OpenAIEngine, text: str, **settings: Any) -> GenerationRequest:
    ids = np.array(engine._tokenizer.encode(text, trusted=True), np.int32)
    return GenerationRequest(1, ids, **{"max_new_tokens": 400, **settings})


@pytest.mark.parametrize("dialect", ["openai"])
async def test_a_server_for_texts_gets_text_and_its_answer_is_tokenized(bench: OpenAIBench) -> None:
    tokenizer = load_tokenizer(bench.model)
    stop = tokenizer.end_of_turn_id
    async with bench.engine() as (engine, _):
        found = await engine.generate(
            ask(engine, "<|im_start|>user", stop_token_ids=(stop,), sampling=Sampling(temperature=100.0), seed=3)
        )
        *probes, asked = bench.server.bodies
        assert [isinstance(each["prompt"], str) for each in probes] == [False, True, False, True]
        assert (asked["prompt"], asked["stop"]) == ("<|im_start|>user", ["<|im_end|>"])
        assert (found.finish, int(found.token_ids[-1])) == ("stop", stop)
        assert stop not in found.token_ids[:-1]
        assert all(map(math.isnan, found.logprobs))
        with pytest.raises(RequestRefused, match="top_k is 5, which the server does not accept"):
            await engine.generate(ask(engine, "a", sampling=Sampling(top_k=5)))


@pytest.mark.parametrize("dialect", ["llama.cpp"])
async def test_a_server_that_ignores_stop_tokens_is_cancelled_at_the_next_token(bench: OpenAIBench) -> None:
    async with bench.engine() as (engine, _):
        whole = await tokens(engine, request(5, 300))
        stop = next(token for token in whole[10:] if token not in whole[:10])
        found = await engine.generate(request(5, 300, stop_token_ids=(stop,)))
        assert (found.token_ids.tolist(), found.finish) == (whole[: whole.index(stop) + 1], "stop")
        await asyncio.wait_for(bench.server.request_cancelled.wait(), 60)


def test_a_text_with_too_many_ids_is_cut_at_the_limit(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder)
    output = CompletionOutput(request(1, 5), tokenizer, tokenizer.vocab_size)
    chunk = CompletionChunk([CompletionChoice("hello world")])
    assert output.add_chunk(chunk) == tokenizer.encode("hello world", trusted=True)[:5]
    assert (output.finish, output.is_overrun, output.add_chunk(chunk)) == ("length", True, [])


# ---------------------------------------------------------------- errors


async def test_an_abort_stops_the_generation_on_the_server(bench: OpenAIBench) -> None:
    async with bench.engine() as (engine, _):
        pieces = asyncio.Queue[object]()
        call = asyncio.ensure_future(engine.generate(request(1, 600), pieces.put_nowait))
        await pieces.get()
        engine.abort(1)
        assert (await call).finish == "abort"
        await asyncio.wait_for(bench.server.request_cancelled.wait(), 60)
        assert bench.server.num_cancelled == 1


async def test_a_dead_server_is_lost_once_and_a_timeout_is_no_loss(model_folder: Path) -> None:
    server, lost = CompletionsServer(model_folder, "vllm", LONGEST), asyncio.get_running_loop().create_future()
    server.max_answered = 1  # this is the first request of `start`
    options: dict[str, Any] = {"sequence_tokens": LONGEST, "retry_delays_s": (), "on_engine_lost": lost.set_result}
    async with server.serving() as url:
        async with started(OpenAIEngine(url, load_tokenizer(model_folder), request_timeout_s=0.2, **options)) as (
            engine,
            _,
        ):
            with pytest.raises(EngineFailure, match=r"no response within 0\.2 s"):
                await engine.generate(request(1))
            assert not lost.done()
        server.request_stalled.clear()
        server.bodies.clear()
        engine = OpenAIEngine(url, load_tokenizer(model_folder), **options)
        await engine.start()
        calls = [asyncio.ensure_future(engine.generate(as_sequence(number, request(1)))) for number in (1, 2)]
        await server.request_stalled.wait()
    assert (await lost).startswith(f"{url}: the server no longer responds: /v1/models: ")
    for call in calls:
        with pytest.raises(EngineFailure, match=r"127\.0\.0\.1:\d+/v1: "):
            await call
    await engine.close()


async def test_a_server_down_behind_a_proxy_is_lost_and_an_overloaded_server_is_not(model_folder: Path) -> None:
    server, lost = CompletionsServer(model_folder, "vllm", LONGEST), asyncio.get_running_loop().create_future()
    async with server.serving() as url:
        options: dict[str, Any] = {"sequence_tokens": LONGEST, "retry_delays_s": (), "on_engine_lost": lost.set_result}
        async with started(OpenAIEngine(url, load_tokenizer(model_folder), **options)) as (engine, _):
            server.failures = [503]
            with pytest.raises(EngineFailure, match="503 overloaded"):
                await engine.generate(request(1))
            assert not lost.done()
            server.is_down = True
            with pytest.raises(EngineFailure, match="502 Bad Gateway"):
                await engine.generate(request(1))
        assert lost.result().startswith(f"{url}: the server no longer responds: ")


async def test_calls_above_max_running_wait(model_folder: Path) -> None:
    server = CompletionsServer(model_folder, "vllm", LONGEST)
    server.max_answered = 1
    async with server.serving() as url:
        engine = OpenAIEngine(url, load_tokenizer(model_folder), sequence_tokens=LONGEST, max_running=2)
        assert (await engine.start()).kv_tokens == 2 * LONGEST
        calls = [asyncio.ensure_future(engine.generate(as_sequence(number, request(1)))) for number in range(3)]
        await server.request_stalled.wait()
        assert (engine.get_load().running, engine.get_load().waiting) == (2, 1)
        assert len(server.bodies) <= 3
        server.max_answered = 1_000_000
        engine.abort(0)
        engine.abort(1)
        assert [(await call).finish for call in calls] == ["abort", "abort", "length"]
        await engine.close()


async def test_requests_are_retried_only_if_the_server_is_overloaded(bench: OpenAIBench) -> None:
    with capture_logs() as lines:
        async with bench.engine() as (engine, _):
            bench.server.failures, bench.server.retry_after = [429], "1"
            assert len(await tokens(engine, request(1))) == 24
    (repeated,) = (line for line in lines if line["event"] == "request.repeated")
    assert (repeated["sequence_id"], repeated["log_level"], repeated["wait_s"]) == (1, "warning", 1.0)
    assert "429 overloaded" in repeated["cause"]
    async with bench.engine() as (engine, _):
        bench.server.failures = [503, 503]
        with pytest.raises(EngineFailure, match=r"127.0.0.1.*the server refused /v1/completions: 503 overloaded"):
            await engine.generate(request(1))
        bench.server.failures = [400]
        with pytest.raises(RequestRefused, match=r"sequence 1: .* 400 overloaded"):
            await engine.generate(request(1))


async def test_a_start_error_names_problem_and_remedy(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(model_folder)
    server = CompletionsServer(model_folder, "vllm", LONGEST, key="secret")

    def make(url: str, **options: Any) -> OpenAIEngine:
        return OpenAIEngine(url, tokenizer, sequence_tokens=9999, retry_delays_s=(), **options)

    async with server.serving() as url:
        monkeypatch.setenv("MY_KEY", "wrong")
        with pytest.raises(EngineFailure, match="401 Incorrect API key; set the environment variable MY_KEY"):
            await make(url, api_key_variable="MY_KEY").start()
        monkeypatch.setenv("MY_KEY", "secret")
        with pytest.raises(EngineFailure, match="the server has no model 'big'; it serves small"):
            await make(url, api_key_variable="MY_KEY", model="big").start()
        async with started(make(url, api_key_variable="MY_KEY")) as (_, capacity):
            assert capacity.sequence_tokens == LONGEST
        server.failures = [500]
        with pytest.raises(EngineFailure, match="500 overloaded"):
            await make(url, api_key_variable="MY_KEY").start()
    with pytest.raises(EngineFailure, match=r"^http://127.0.0.1:\d+/v1: /v1/models: "):
        await make(url).start()


async def test_the_weights_and_memory_of_the_server_cannot_be_changed(bench: OpenAIBench) -> None:
    published = publish(bench, 3, small_model(vocab_size=280))
    async with bench.engine() as (engine, _):
        with pytest.raises(WeightsRefused, match="cannot load weights"):
            await engine.load_weights(published)
        with pytest.raises(EngineFailure, match="cannot free the server's memory"):
            await engine.sleep()
        before = await engine.generate(as_sequence(2, request(1)))
        assert (engine.version, engine.get_load().generated_tokens) == (0, len(before.token_ids))
