"""`asterism eval` over OpenAI's API uses servers in parallel, and continues after the death of a server."""

import asyncio
import json
import subprocess
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


def evaluate(
    finished: RunFolder, *targets: str, name: str, flags: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    own = ("-k", str(SAMPLES), "--temperature", "0", "--name", name, "--set", f"sums={finished.data / 'test.jsonl'}")
    return asterism("eval", *targets, *own, *flags)


@pytest.fixture(scope="module")
def expected(finished: RunFolder) -> list[AnswerRecord]:
    """Return the answers of the embedded engine."""
    done = evaluate(finished, str(finished.path), name="embedded")
    assert done.returncode == 0, done.stdout + done.stderr
    return read_answers(RunFolder(finished.path.parent / "embedded").answers)


def find_checkpoint(finished: RunFolder) -> Path:
    return max(finished.checkpoints.glob("step_*"))


def list_flags(finished: RunFolder) -> tuple[str, ...]:
    own = (
        "--config",
        str(finished.config),
        "--tokenizer",
        str(find_checkpoint(finished)),
        "--api-key-variable",
        "EVAL_KEY",
    )
    return (*own, "--set", f"runs_folder={finished.path.parent}", "--set", "supervision.restarts=0")


def make_server(finished: RunFolder, dialect: Any = "vllm") -> CompletionsServer:
    return CompletionsServer(find_checkpoint(finished), dialect, 512, KEY)


async def start_evaluation(finished: RunFolder, *urls: str, name: str, flags: tuple[str, ...] = ()) -> Any:
    flags = (*list_flags(finished), *flags)
    return asyncio.ensure_future(asyncio.to_thread(evaluate, finished, *urls, name=name, flags=flags))


def texts(answers: list[AnswerRecord]) -> dict[Any, Any]:
    return {each.key: (each.digest, each.reward) for each in answers}


async def test_if_one_of_two_servers_dies_the_other_gives_the_answers_of_the_checkpoint(
    finished: RunFolder, expected: list[AnswerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_KEY", KEY)
    servers = [make_server(finished, dialect) for dialect in ("vllm", "llama.cpp")]
    servers[0].max_answered = 1  # answers one request, the check at the start; its later requests wait
    flags = ("--set", "supervision.restarts=9", "--set", "engine.max_running=8")
    async with servers[1].serving() as other:
        async with servers[0].serving() as url:
            evaluating = await start_evaluation(finished, url, other, name="halved", flags=flags)
            await asyncio.wait(
                {evaluating, asyncio.ensure_future(servers[0].request_stalled.wait())}, return_when="FIRST_COMPLETED"
            )
        done = await evaluating
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(finished.path.parent / "halved")
    lost = read_log_entries(folder, "engine.lost", "generator-0")
    assert "the server no longer responds" in lost[0]["cause"]
    assert texts(read_answers(folder.answers)) == texts(expected)
    results = json.loads(folder.results.read_text())
    assert (results["weights"], results["engine"]["kind"]) == ({"urls": [url, other], "model": MODEL}, "openai")
    assert all(len(each.bodies) > 1 for each in servers)


async def test_without_a_server_the_evaluation_ends_and_resumes_when_it_is_back(
    finished: RunFolder, expected: list[AnswerRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_KEY", KEY)
    server, folder = make_server(finished), RunFolder(finished.path.parent / "lost")
    server.max_answered = 8
    async with server.serving() as url:
        evaluating = await start_evaluation(finished, url, name="lost")
        await asyncio.wait(
            {evaluating, asyncio.ensure_future(server.request_stalled.wait())}, return_when="FIRST_COMPLETED"
        )
    failed = await evaluating
    assert failed.returncode == 1
    assert f"{url}: the server no longer responds" in failed.stdout
    assert len(read_answers(folder.answers)) < SAMPLES * QUESTIONS
    assert not any(each.is_failed for each in read_answers(folder.answers))
    unreachable = await (await start_evaluation(finished, url, name="lost", flags=("--resume",)))
    assert unreachable.returncode == 2
    assert f"openai.urls: {url}: /v1/models: " in unreachable.stdout + unreachable.stderr
    async with make_server(finished).serving(urlsplit(url).port or 0):
        resumed = await (await start_evaluation(finished, url, name="lost", flags=("--resume",)))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert texts(read_answers(folder.answers)) == texts(expected)
