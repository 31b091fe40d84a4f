"""`asterism eval` of running servers, which answer in parallel and keep their weights."""

import asyncio
import json
from pathlib import Path

import pytest

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.configs.run_folder import RunFolder
from asterism.engine.sglang.server.sglang_machine import ask_servers
from tests.actors.runs.running import asterism, read_log_entries
from tests.sglang.bench import SharedServer
from tests.sglang.runs import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

QUESTIONS, SAMPLES = 60, 3  # more answers than the cache of either server holds at once


def test_two_servers_answer_all_questions_and_keep_their_weights(
    tmp_path: Path, model: Path, loop: asyncio.Runner, servers: tuple[SharedServer, SharedServer]
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"question": "What is {n}+{n}?", "answer": "{2 * n}"}}\n' for n in range(QUESTIONS)))
    for each in servers:
        loop.run(each.start())
    urls = [each.server.url for each in servers]
    served = loop.run(ask_servers(urls))  # other tests can have loaded weights into these servers
    settings = (
        *(f"sums={file}", f"model.checkpoint={model}", f"runs_folder={tmp_path}", "sandbox.backend=process"),
        *('dialogue.tools=["jupyter_code"]', "dialogue.prompt_tokens=32", "dialogue.response_tokens=64"),
    )
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = asterism("eval", *urls, *flags, "-k", str(SAMPLES), "--name", "served")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "served")
    answers = read_answers(folder.answers)
    assert len(answers) == QUESTIONS * SAMPLES
    assert not any(each.is_failed for each in answers)
    assert loop.run(ask_servers(urls)) == served
    assert json.loads(folder.results.read_text())["weights"] == {"urls": urls, "servers": served}
    traces = [json.loads(line) for line in (folder.path / "traces.jsonl").read_text().splitlines()]
    assert {trace["agent"]["config"]["model"] for trace in traces} == {served[urls[0]]["model_path"]}
    for index in range(2):
        assert read_log_entries(folder, "weights.loaded", f"generator-{index}") == []
        loads = read_log_entries(folder, "engine.load", f"generator-{index}")
        assert max(load["generated_tokens"] for load in loads) > 0
