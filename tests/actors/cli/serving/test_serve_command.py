"""`asterism serve` builds the command line of SGLang, exports a run, and refuses unusable arguments."""

import json
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from asterism.actors.cli.serving.export_command import ExportOptions, export_step
from asterism.actors.cli.serving.serve_command import ServeOptions, build_curl, describe_parsers, serve_model
from asterism.actors.engines.checkpoint_argument import find_run_step
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.engine.export.chat_files import ServingFacts, read_serving_facts
from asterism.engine.sglang.http_api import SUPPORTED_VERSIONS
from asterism.engine.sglang.server.chat_server import ChatServer, build_chat_argv
from asterism.tasks import MATH_PYTHON
from tests.actors.cli.invoking import invoke
from tests.engine.export.family_folders import FAMILY_KINDS, write_family_model

FACTS = ServingFacts("qwen25", "", 100, [{"type": "function", "function": {"name": "it's"}}])
# This program replaces the interpreter: it prints a version of SGLang, or runs these commands as the server.
INTERPRETER = """#!/bin/sh
case "$*" in
    *importlib.metadata*) echo {version} ;;
    *) {commands} ;;
esac
"""
WRITES_ARGUMENTS = """printf '%s\\n' "$@" > {arguments}"""
FAILS = """printf 'Traceback (most recent call last):\\n  File "torchvision/_meta.py", line 1\\nRuntimeError: operator ' >&2
       sleep 0.1
       printf 'torchvision::nms does not exist\\n[W] leaked objects\\n' >&2
       exit 1"""
RUNS_ENDLESSLY = """trap 'echo Traceback >&2; exit 1' TERM
       echo loading >&2
       touch {started}
       while true; do sleep 0.05; done"""


def make_server(folder: Path, **changes: Any) -> ChatServer:
    given = ChatServer(folder, "demo-3", "127.0.0.1", 31_999, "cpu", "qwen25", "", SGLangConfig(), (), folder)
    return given._replace(**changes)


def get_flags(argv: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in pairwise(argv) if flag.startswith("--")}


def test_the_command_line_has_the_parsers_and_the_template_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").touch()
    sglang = SGLangConfig(arguments=("--schedule-policy", "lpm"), tensor_parallel=2)
    argv = build_chat_argv(make_server(tmp_path, sglang=sglang, arguments=("--api-key", "k")), "cuda")
    flags = get_flags(argv)
    assert (flags["--tool-call-parser"], flags["--chat-template"]) == ("qwen25", f"{tmp_path}/chat_template.jinja")
    assert (flags["--host"], flags["--port"], flags["--served-model-name"]) == ("127.0.0.1", "31999", "demo-3")
    assert (flags["--tp-size"], flags["--device"], "--reasoning-parser" in flags) == ("2", "cuda", False)
    assert argv[-4:] == ["--schedule-policy", "lpm", "--api-key", "k"]


def test_a_server_without_a_gpu_gets_the_implementations_for_a_cpu(tmp_path: Path) -> None:
    flags = get_flags(build_chat_argv(make_server(tmp_path, reasoning_parser="deepseek-r1"), "cpu"))
    assert flags["--attention-backend"] == "torch_native"
    assert (flags["--reasoning-parser"], "--chat-template" in flags) == ("deepseek-r1", False)


def test_the_example_is_a_shell_command_with_the_tools(tmp_path: Path) -> None:
    words = shlex.split(build_curl(make_server(tmp_path, host="0.0.0.0"), FACTS))
    assert words[:2] == ["curl", "http://127.0.0.1:31999/v1/chat/completions"]
    request = json.loads(words[-1])
    assert (request["model"], request["tools"]) == ("demo-3", FACTS.tools)
    assert "tools" not in build_curl(make_server(tmp_path), None)


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:31999"), ("::", "http://127.0.0.1:31999")])
def test_the_address_of_a_server_may_be_an_ipv6_address(tmp_path: Path, host: str, url: str) -> None:
    assert make_server(tmp_path, host=host).url == url


@pytest.mark.parametrize(
    ("facts", "texts"),
    [
        (FACTS, ["parser of calls: qwen25", "none fits: the reasoning stays in the text"]),
        (replace(FACTS, tool_call_parser=""), ["no parser of SGLang fits the calls"]),
        (replace(FACTS, tools=[], reasoning_parser="qwen3"), ["the model has no tools", "parser of reasoning: qwen3"]),
        (None, ["`asterism export` has not written this folder"]),
    ],
)
def test_the_chosen_parsers_are_printed(facts: ServingFacts | None, texts: list[str]) -> None:
    printed = "\n".join(describe_parsers(facts))
    assert [text for text in texts if text not in printed] == []


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Make an interpreter whose server writes its arguments to the file `arguments` and exits at once."""
    return write_interpreter(tmp_path / "python", WRITES_ARGUMENTS, arguments=tmp_path / "arguments")


def write_interpreter(path: Path, commands: str, **names: Path) -> Path:
    path.write_text(INTERPRETER.format(version=SUPPORTED_VERSIONS[-1], commands=commands.format(**names)))
    path.chmod(0o755)
    return path


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(model: Path | str, python: Path, *arguments: str, port: int = 0) -> tuple[int, list[str]]:
    """Serve a model, and return exit code and output."""
    lines: list[str] = []
    console: Any = SimpleNamespace(print=lambda line, **_: lines.append(line))
    options = ServeOptions("127.0.0.1", port or find_free_port(), "cpu", str(python), (), arguments)
    return serve_model(str(model), options, console), lines


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    write_family_model(folder.get_checkpoint_path(4), FAMILY_KINDS["qwen3"])
    write_resolved(RunConfig(name="served", dialogue=DialogueConfig(prefill="<think>\n")), folder.config)
    write_task_descriptions(folder, {"": MATH_PYTHON})
    return folder


@pytest.mark.slow
@pytest.mark.real_clock
def test_a_run_is_exported_once_and_again_after_a_new_checkpoint(run: RunFolder, interpreter: Path) -> None:
    code, lines = serve(run.path, interpreter, "--api-key", "k")
    export = run.get_export_path(4)
    assert (code, lines[0]) == (0, f"exporting step 4 to {export}")
    flags = get_flags((interpreter.parent / "arguments").read_text().splitlines())
    assert (flags["--model-path"], flags["--served-model-name"]) == (str(export), "run-4")
    assert (flags["--tool-call-parser"], flags["--reasoning-parser"]) == ("qwen25", "deepseek-r1")
    assert flags["--api-key"] == "k"
    assert "exporting" not in serve(f"{run.path}:4", interpreter)[1][0]
    assert "exporting" not in serve(run.get_checkpoint_path(4), interpreter)[1][0]
    flags = get_flags((interpreter.parent / "arguments").read_text().splitlines())
    assert flags["--model-path"] == str(export)
    os.utime(run.get_checkpoint_path(4) / "config.json")
    assert "exporting" in serve(run.path, interpreter)[1][0]
    assert "exporting" not in serve(export, interpreter)[1][0]
    facts = read_serving_facts(export)
    assert facts is not None
    assert facts.context_tokens == load_run(run.config).dialogue.sequence_tokens


@pytest.mark.slow
@pytest.mark.real_clock
def test_a_server_uses_the_export_of_another_server_that_starts_at_the_same_time(
    run: RunFolder, interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[int] = []

    @contextmanager
    def wait_for_another(folder: Path) -> Iterator[None]:
        export_step(find_run_step(str(run.path)), folder, ExportOptions())
        others.append(folder.stat().st_ino)
        yield

    monkeypatch.setattr("asterism.actors.cli.serving.serve_command.locking_folder", wait_for_another)
    assert serve(run.path, interpreter)[0] == 0
    assert others == [run.get_export_path(4).stat().st_ino]


@pytest.mark.slow
@pytest.mark.real_clock
def test_a_server_that_fails_before_it_is_ready_is_reported_with_its_error(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = write_interpreter(tmp_path / "failing", FAILS)
    expected = (
        "the SGLang server ended with exit code 1 before it was ready: RuntimeError: operator torchvision::nms does not exist; "
        "`make sglang-environment` creates an environment for a machine without a GPU"
    )
    with pytest.raises(UnusableInput) as raised:
        serve(run.path, python)
    assert str(raised.value) == expected
    assert "Traceback (most recent call last):" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.real_clock
def test_an_interrupted_server_prints_no_traceback(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    python = write_interpreter(tmp_path / "endless", RUNS_ENDLESSLY, started=started)

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, lines = serve(run.path, python)
    thread.join()
    assert (code, lines[-1]) == (0, "stopped")
    errors = capfd.readouterr().err
    assert "loading" in errors and "Traceback" not in errors


@pytest.mark.real_clock
def test_an_unusable_interpreter_port_or_folder_is_refused(tmp_path: Path, interpreter: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UnusableInput, match=r"model: is neither a model's folder \(config\.json\) nor a run's"):
        serve(tmp_path / "model", interpreter)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UnusableInput, match="nowhere: no such run"):
        serve("nowhere", interpreter)
    with pytest.raises(UnusableInput, match=r"sglang\.python = .*missing: cannot be run"):
        serve(tmp_path / "model", tmp_path / "missing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UnusableInput, match=rf"--port: port {port} is in use; choose another$"):
            serve(tmp_path / "model", interpreter, port=port)
    refused = invoke("serve", "demo", "--device", "tpu")
    assert refused.exit_code == 2 and "--device" in refused.output and "'tpu'" in refused.output
