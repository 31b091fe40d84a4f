"""`asterism eval URL/v1` reads odd and broken streams of a server: odd ones give answers, broken ones failures."""

import asyncio
import json
from pathlib import Path

import pytest

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import asterism
from tests.engine.openai.scripted_stream import ScriptedServer
from tests.engine.openai.stream_behaviours import ANSWERED, FAILED
from tests.engine.tiny_models import save_small_model

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

LIMIT = "length"  # the server ends this answer at the length limit
# Slow scripts are left out: `hold` waits for its time limit, and an overloaded server causes retries.
READ = {name: script for name, script in ANSWERED.items() if script.end != "hold" and name != LIMIT}
UNREAD = {name: script for name, (script, _) in FAILED.items() if script.end != "hold" and script.status == 200}


async def test_answers_of_odd_streams_are_right_and_answers_of_broken_streams_fail(tmp_path: Path) -> None:
    model = save_small_model(tmp_path)
    scripts = {**READ, **UNREAD, LIMIT: ANSWERED[LIMIT]}
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": f"Stream {name} gives 2 + 3 = ?", "answer": "5"}) for name in scripts]
    questions.write_text("\n".join(lines))
    settings = (
        *(f"held={questions}", f"runs_folder={tmp_path}", "sandbox.backend=process", "dialogue.tools=[]"),
        *("dialogue.prompt_tokens=1024", "dialogue.response_tokens=1024"),
    )
    flags = [flag for setting in settings for flag in ("--set", setting)]
    async with ScriptedServer(scripts_by_name=scripts).serving() as url:
        done = await asyncio.to_thread(
            asterism, "eval", url, "--tokenizer", str(model), "-k", "1", "--name", "streams", *flags
        )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = read_answers(RunFolder(tmp_path / "streams").answers)
    found = {list(scripts)[each.place]: each for each in answers}
    assert {name for name, each in found.items() if each.is_failed} == set(UNREAD)
    assert {name: found[name].reward for name in READ} == dict.fromkeys(READ, 1.0)
    assert (found[LIMIT].ending, found[LIMIT].answer) == ("length", "")
    assert all(found[name].cause for name in UNREAD)
