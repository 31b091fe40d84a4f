"""`asterism eval` of OpenAI's API: servers in parallel, with the checkpoint's figures, and when a server dies."""

import asyncio
import json
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asterism.analysis.evaluation.answer_records import AnswerRecord, read_answers
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import asterism, read_log_entries
from tests.engine.openai.completions_server import MODEL, CompletionsServer

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

SAMPLES, QUESTIONS, KEY = 2, 16, "secret"


@pytest.fixture(scope="module")
def trained(finished_run: tuple[RunFolder, str]) -> RunFolder:
    return finished_run[0]


def evaluate(
    trained: RunFolder, *targets: str, name: str, flags: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    own = ("-k", str(SAMPLES), "--temperature", "0", "--name", name, "--set", f"sums={trained.data / 'test.jsonl'}")
    return asterism("eval", *targets, *own, *flags)


@pytest.fixture(scope="module")
def expected(trained: RunFolder) -> list[AnswerRecord]:
    """Return the answers of the embedded engine."""
    done = evaluate(trained, str(trained.path), name="embedded")
    assert done.returncode == 0, done.stdout + done.stderr
    return read_answers(RunFolder(trained.path.parent / "embedded").answers)


def find_checkpoint(trained: RunFolder) -> Path:
    return max(trained.checkpoints.glob("step_*"))


def list_flags(trained: RunFolder) -> tuple[str, ...]:
    own = (
        "--config",
        str(trained.config),
        "--tokenizer",
        str(find_checkpoint(trained)),
        "--api-key-variable",
        "EVAL_KEY",
    )
    return (*own, "--set", f"runs_folder={trained.path.parent}", "--set", "supervision.restarts=0")


def make_server(trained: RunFolder, dialect: Any = "vllm") -> CompletionsServer:
    return CompletionsServer(find_checkpoint(trained), dialect, 512, KEY)


async def start_evaluation(trained: RunFolder, *urls: str, name: str, flags: tuple[str, ...] = ()) -> Any:
    flags = (*list_flags(trained), *flags)
    return asyncio.ensure_future(asyncio.to_thread(evaluate, trained, *urls, name=name, flags=flags))


def texts(answers: list[AnswerRecord]) -> dict[Any, Any]:
    return {each.key: (each.digest, each.reward) for each in answers}


async def test_two_servers_give_the_answers_of_the_checkpoint(
    trained: RunFolder, expected: list[AnswerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_KEY", KEY)
    servers = [make_server(trained, dialect) for dialect in ("vllm", "llama.cpp")]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(each.serving()) for each in servers]
        done = await (await start_evaluation(trained, *urls, name="served", flags=("--set", "engine.max_running=8")))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(trained.path.parent / "served")
    assert texts(read_answers(folder.answers)) == texts(expected)
    results = json.loads(folder.results.read_text())
    assert (results["weights"], results["engine"]["kind"]) == ({"urls": urls, "model": MODEL}, "openai")
    assert all(len(each.bodies) > 1 for each in servers)


async def test_if_one_of_two_servers_dies_the_other_answers_its_questions(
    trained: RunFolder, expected: list[AnswerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_KEY", KEY)
    servers = [make_server(trained) for _ in range(2)]
    servers[0].max_answered = 1  # answers only the request of the start, so that it has turns when it dies
    flags = ("--set", "supervision.restarts=9", "--set", "engine.max_running=8")
    async with servers[1].serving() as other:
        async with servers[0].serving() as url:
            evaluating = await start_evaluation(trained, url, other, name="halved", flags=flags)
            await asyncio.wait(
                {evaluating, asyncio.ensure_future(servers[0].request_stalled.wait())}, return_when="FIRST_COMPLETED"
            )
        done = await evaluating
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(trained.path.parent / "halved")
    lost = read_log_entries(folder, "engine.lost", "generator-0")
    assert "the server no longer responds" in lost[0]["cause"]
    assert texts(read_answers(folder.answers)) == texts(expected)


async def test_without_a_server_the_evaluation_ends_and_resumes_when_it_is_back(
    trained: RunFolder, expected: list[AnswerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_KEY", KEY)
    server, folder = make_server(trained), RunFolder(trained.path.parent / "lost")
    server.max_answered = 8
    async with server.serving() as url:
        evaluating = await start_evaluation(trained, url, name="lost")
        await asyncio.wait(
            {evaluating, asyncio.ensure_future(server.request_stalled.wait())}, return_when="FIRST_COMPLETED"
        )
    failed = await evaluating
    assert failed.returncode == 1
    assert f"{url}: the server no longer responds" in failed.stdout
    assert len(read_answers(folder.answers)) < SAMPLES * QUESTIONS
    assert not any(each.is_failed for each in read_answers(folder.answers))
    unreachable = await (await start_evaluation(trained, url, name="lost", flags=("--resume",)))
    assert unreachable.returncode == 2
    assert f"openai.urls: {url}: /v1/models: " in unreachable.stdout + unreachable.stderr
    async with make_server(trained).serving(urlsplit(url).port or 0):
        resumed = await (await start_evaluation(trained, url, name="lost", flags=("--resume",)))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert texts(read_answers(folder.answers)) == texts(expected)
