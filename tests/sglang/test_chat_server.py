"""`asterism serve` with a real server: with OpenAI's default arguments, answers end and calls are parsed."""

import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.task_inputs import load_task_renderers
from asterism.engine.export.chat_files import read_serving_facts
from asterism.engine.hf.tokenizer import load_tokenizer
from tests.actors.runs.running import ASTERISM, PATIENCE_S, ROOT
from tests.processes import processes_that_name
from tests.sglang.environment import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]


class Serving(NamedTuple):
    run: RunFolder
    process: subprocess.Popen[str]
    url: str
    output: list[str]  # printed lines up to the line with the address

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        body = json.dumps({"model": "demo-0", "messages": messages, **options}).encode()
        request = urllib.request.Request(f"{self.url}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    @property
    def tools(self) -> list[dict[str, Any]]:
        facts = read_serving_facts(self.run.get_export_path(0))
        assert facts is not None
        return facts.tools


@pytest.fixture(scope="module")
def serving(cold_start: RunFolder) -> Iterator[Serving]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--port", str(port), "--python", str(PYTHON))
    arguments = ("--", "--max-total-tokens", "4096", "--random-seed", "0")
    command = [*ASTERISM, "serve", str(cold_start.path), *options, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            output: list[str] = []
            for line in process.stdout:
                output.append(line)
                if line.startswith("serving "):
                    break
            assert process.poll() is None, output
            yield Serving(cold_start, process, f"http://127.0.0.1:{port}/v1", output)
        finally:
            process.kill()


def read_questions(run: RunFolder, count: int) -> list[str]:
    lines = (run.data / "test.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["question"] for line in lines]


def test_with_default_arguments_answers_end_and_calls_are_parsed(serving: Serving) -> None:
    assert "parser of calls: qwen25\n" in serving.output
    config = load_run(serving.run.config)
    tokenizer = load_tokenizer(serving.run.get_checkpoint_path(0))
    [renderer] = load_task_renderers(config, serving.run, tokenizer).values()
    num_calls = 0
    for question in read_questions(serving.run, 8):
        answer = serving.ask([{"role": "user", "content": question}], tools=serving.tools)
        [choice] = answer["choices"]
        assert choice["finish_reason"] in ("stop", "tool_calls")  # the answer did not reach its limit ("length")
        assert answer["usage"]["prompt_tokens"] == len(renderer.render_prompt(question))
        assert answer["usage"]["completion_tokens"] <= config.response_tokens
        assert "<|im_end|>" not in (choice["message"]["content"] or "")
        for call in choice["message"].get("tool_calls") or []:
            assert call["function"]["name"] == "jupyter_code"
            assert isinstance(json.loads(call["function"]["arguments"])["code"], str)
            num_calls += 1
    assert num_calls >= 4


def test_a_dialogue_continues_after_a_result(serving: Serving) -> None:
    """The prompt of the second turn has the same tokens as a rollout with this call."""
    question = read_questions(serving.run, 1)[0]
    call = {"name": "jupyter_code", "arguments": '{"code": "print(6 * 7)"}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "Let me compute this.</reason>",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "42"},
    ]
    answer = serving.ask(messages, tools=serving.tools)
    config = load_run(serving.run.config)
    tokenizer = load_tokenizer(serving.run.get_checkpoint_path(0))
    [renderer] = load_task_renderers(config, serving.run, tokenizer).values()
    text = 'Let me compute this.</reason>\n<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "print(6 * 7)"}}'
    generated = tokenizer.encode(f"{text}\n</tool_call><|im_end|>", trusted=True)
    results = tokenizer.encode("42", trusted=False)
    frame = renderer.render_tool_turn(None, [""])  # pyright: ignore[reportArgumentType] - unused by ChatML
    assert frame is not None
    wanted = len(renderer.render_prompt(question)) + len(generated) + len(frame) + len(results)
    assert answer["usage"]["prompt_tokens"] == wanted
    assert answer["choices"][0]["finish_reason"] in ("stop", "tool_calls")


def test_an_interrupt_stops_the_server(serving: Serving) -> None:
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(PATIENCE_S) == 0
    assert processes_that_name(str(serving.run.get_export_path(0))) == []
