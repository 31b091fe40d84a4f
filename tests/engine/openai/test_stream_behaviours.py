"""Tests of OpenAIEngine with odd, broken and hostile streams: the result is the right answer or a failure."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asterism.engine.contract import EngineFailure, GenerationRequest
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.engine.http import http_session
from asterism.engine.http.event_stream import EventReader
from asterism.engine.openai.openai_engine import OpenAIEngine
from tests.engine.openai.scripted_stream import Script, ScriptedServer
from tests.engine.openai.stream_behaviours import (
    ANSWERED,
    CHUNKS,
    DONE,
    FAILED,
    TEXT,
    in_bytes,
    make_chunk,
    make_stream,
)
from tests.engine.started_engines import started

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
OVERLOADED = Script([b'{"error": "slow down"}'], status=429, headers={"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> FastTokenizer:
    return load_tokenizer(model_folder)


@pytest.fixture(autouse=True)
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "STREAM_END_S", 0.2)


@asynccontextmanager
async def attached(
    server: ScriptedServer, tokenizer: FastTokenizer, request_timeout_s: float = 30.0
) -> AsyncGenerator[OpenAIEngine]:
    options: dict[str, Any] = {"sequence_tokens": 4096, "retry_delays_s": (0.0, 0.0)}
    async with (
        server.serving() as url,
        started(OpenAIEngine(url, tokenizer, request_timeout_s=request_timeout_s, **options)) as (engine, _),
    ):
        yield engine


async def ask(engine: OpenAIEngine, tokenizer: FastTokenizer) -> str:
    """Return the text of a complete answer. Raises EngineFailure for an incomplete one."""
    request = GenerationRequest(1, np.array(tokenizer.encode("a", trusted=False), np.int32), 2000)
    found = await engine.generate(request)
    assert found.finish in ("stop", "length")
    return tokenizer.decode(found.token_ids.tolist())


@pytest.mark.parametrize("name", ANSWERED)
async def test_a_complete_answer_is_read(name: str, tokenizer: FastTokenizer) -> None:
    async with attached(ScriptedServer(ANSWERED[name]), tokenizer) as engine:
        assert await ask(engine, tokenizer) == TEXT


@pytest.mark.parametrize("name", FAILED)
async def test_the_error_for_an_incomplete_or_unreadable_answer_names_the_cause(
    name: str, tokenizer: FastTokenizer
) -> None:
    script, cause = FAILED[name]
    timeout_s = 0.3 if script.end == "hold" else 30.0
    async with attached(ScriptedServer(script), tokenizer, timeout_s) as engine:
        with pytest.raises(EngineFailure) as failure:
            await ask(engine, tokenizer)
        assert cause in str(failure.value)


_LINES = Path(__file__).with_name("bug_reports.jsonl").read_text(encoding="utf-8").splitlines()
REPORTS = {report["id"]: report["input"] for report in map(json.loads, _LINES)}
# The behaviours for public bug reports that describe a behaviour only in words.
REPORTED = {
    "sse-05": ("event_before", "event_behind"),
    "sse-06": ("id_before", "id_behind"),
    "sse-11": ("several_data_lines",),
    "sse-12": ("text_null",),
    "sse-13": ("empty_data",),
}


def test_each_public_bug_report_has_a_behaviour() -> None:
    assert REPORTS.keys() == {"sse-01", *REPORTED}
    assert {name for names in REPORTED.values() for name in names} <= ANSWERED.keys()


async def test_the_stream_of_a_public_bug_report_with_comments_is_read(tokenizer: FastTokenizer) -> None:
    lines = "\n".join(REPORTS["sse-01"]) + "\n"
    async with attached(ScriptedServer(Script([lines.encode()])), tokenizer) as engine:
        assert await ask(engine, tokenizer) == TEXT


@pytest.mark.parametrize("escaped", [True, False], ids=["escaped", "UTF-8"])
async def test_multi_byte_characters_can_be_split_between_pieces(escaped: bool, tokenizer: FastTokenizer) -> None:
    text = "é∞😀 \\boxed{\u2028x\x85}"
    content = make_chunk(text) if escaped else make_chunk("?").replace(b"?", text.replace("\\", "\\\\").encode())
    server = ScriptedServer(in_bytes(make_stream(content, CHUNKS[-1], end=b"\r\n") + DONE))
    async with attached(server, tokenizer) as engine:
        assert await ask(engine, tokenizer) == text


async def test_requests_to_an_overloaded_server_are_retried_but_truncated_answers_are_not(
    tokenizer: FastTokenizer,
) -> None:
    in_the_stream = Script([b'data: {"error": {"message": "slow down", "code": 429}}\n\n'])
    server = ScriptedServer(OVERLOADED, in_the_stream, ANSWERED["line_feeds"])
    async with attached(server, tokenizer) as engine:
        assert await ask(engine, tokenizer) == TEXT
        assert server.num_requests == 3
        server.scripts = [FAILED["breaks"][0], ANSWERED["line_feeds"]]
        with pytest.raises(EngineFailure, match="the connection broke"):
            await ask(engine, tokenizer)
        assert server.num_requests == 4


async def test_an_event_over_the_limit_is_a_failure(tokenizer: FastTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "EventReader", partial(EventReader, 1000))
    server = ScriptedServer(Script([b"data: " + b" " * 2000], "hold"))
    async with attached(server, tokenizer) as engine:
        with pytest.raises(EngineFailure, match=r"/v1/completions: the server sent an event of more than 1,000 bytes"):
            await ask(engine, tokenizer)


@pytest.mark.parametrize("name", ["line_feeds", "no_done_after_the_finish", "usage_behind"])
async def test_the_next_request_reuses_the_connection_of_a_complete_answer(name: str, tokenizer: FastTokenizer) -> None:
    server = ScriptedServer(ANSWERED[name])
    async with attached(server, tokenizer) as engine:
        for _ in range(3):
            assert await ask(engine, tokenizer) == TEXT
    assert len(server.connections) == 1
