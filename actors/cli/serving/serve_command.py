"""`asterism serve` starts an SGLang server of a run's model, or of an exported folder."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.doctor.configuration_checks import LOCAL_SGLANG_PYTHON
from asterism.actors.cli.serving.export_command import ExportOptions, export_step
from asterism.actors.engines.checkpoint_argument import RunStep, find_checkpoint_folder, find_run_folder, find_run_step
from asterism.configs.atomic_write import locking_folder
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_folder
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.export.chat_files import ServingFacts, read_serving_facts
from asterism.engine.sglang.server.chat_server import ChatServer, serve_chats
from asterism.engine.sglang.server.compatibility import ServerUnusable


class ServeOptions(NamedTuple):
    host: str
    port: int
    device: str
    python: str  # empty: the configuration's interpreter, or that of .venv-sglang
    overrides: Sequence[str]  # overrides of [sglang]
    arguments: Sequence[str]  # further arguments of SGLang


def serve_model(reference: str, options: ServeOptions, console: Console) -> int:
    """Serve the model and return the exit code. Raises UnusableInput: unusable model, interpreter or port."""
    run = _load_config(reference, options.overrides)
    folder, name = _find_model(reference, console)
    check_folder(folder)  # checks here, since SGLang itself reads the files
    facts = read_serving_facts(folder)
    with tempfile.TemporaryDirectory(prefix="asterism-serve-") as scratch:
        server = ChatServer(
            model=folder,
            name=name,
            host=options.host,
            port=options.port,
            device=options.device,
            tool_call_parser=facts.tool_call_parser if facts else "",
            reasoning_parser=facts.reasoning_parser if facts else "",
            sglang=_choose_interpreter(run.sglang, options.python),
            arguments=options.arguments,
            scratch=Path(scratch),
        )
        for line in describe_parsers(facts):
            console.print(line, highlight=False, soft_wrap=True)
        try:
            code = asyncio.run(serve_chats(server, lambda: _print_address(server, facts, console)))
        except ServerUnusable as error:
            text = str(error).replace("sglang.port: port", "--port: port").replace(", or set sglang.external_urls", "")
            raise UnusableInput(text) from None
    console.print("the server has ended" if code else "stopped", highlight=False)
    return code


def _load_config(reference: str, overrides: Sequence[str]) -> RunConfig:
    run = find_run_folder(reference)
    return load_run(run.config, overrides) if run else load_run(None, ["name=serve", *overrides])


def _find_model(reference: str, console: Console) -> tuple[Path, str]:
    """Return the folder and the name of the model. A run's step is exported to the run's folder, once."""
    path = Path(reference)
    if (path / "config.json").is_file() and find_checkpoint_folder(path) is None:
        return path, path.resolve().name
    if path.is_dir() and find_run_folder(reference) is None:
        raise UnusableInput(f"{path}: is neither a model's folder (config.json) nor a run's (config.toml)")
    chosen = find_run_step(reference)
    folder = chosen.run.get_export_path(chosen.step)
    if not _is_current(folder, chosen):
        console.print(f"exporting step {chosen.step} to {escape(str(folder))}", highlight=False, soft_wrap=True)
        with locking_folder(folder):
            if not _is_current(folder, chosen):  # another server may have exported the step
                export_step(chosen, folder, ExportOptions())
    return folder, f"{chosen.run.path.resolve().name}-{chosen.step}"


def _is_current(folder: Path, chosen: RunStep) -> bool:
    """Return whether the export is newer than the checkpoint, which a run can write again."""
    written, source = folder / "config.json", chosen.checkpoint / "config.json"
    return written.exists() and written.stat().st_mtime_ns >= source.stat().st_mtime_ns


def _choose_interpreter(sglang: SGLangConfig, python: str) -> SGLangConfig:
    local = str(LOCAL_SGLANG_PYTHON.absolute()) if LOCAL_SGLANG_PYTHON.exists() else ""
    return replace(sglang, python=python or sglang.python or local)


def describe_parsers(facts: ServingFacts | None) -> list[str]:
    if facts is None:
        return [
            "no asterism.json: `asterism export` has not written this folder, so that no parser is chosen; name one "
            "after --, such as -- --tool-call-parser qwen25"
        ]
    if not facts.tools:
        calls = "the model has no tools"
    elif facts.tool_call_parser:
        calls = f"parser of calls: {facts.tool_call_parser}"
    else:
        calls = "no parser of SGLang fits the calls of this model: they stay in the text"
    reasoning = facts.reasoning_parser or "none fits: the reasoning stays in the text"
    return [calls, f"parser of reasoning: {reasoning}"]


async def _print_address(server: ChatServer, facts: ServingFacts | None, console: Console) -> None:
    console.print(
        f"serving {escape(server.name)} at {server.url}/v1; stop with Ctrl-C", highlight=False, soft_wrap=True
    )
    console.print(f"try it:\n{build_curl(server, facts)}", markup=False, highlight=False, soft_wrap=True)


def build_curl(server: ChatServer, facts: ServingFacts | None) -> str:
    """Build a request as a shell command. Without `tools` in it, SGLang does not parse calls."""
    request: dict[str, Any] = {"model": server.name, "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
    if facts is not None and facts.tools:
        request["tools"] = facts.tools
    body = json.dumps(request).replace("'", "'\\''")
    return f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
