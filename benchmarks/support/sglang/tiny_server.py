"""Configures an SGLang server of the tiny model with random weights, on a CPU (configs/tiny_sglang.toml)."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.tasks.tiny.prepare import TinyDemo
from benchmarks.support.benchmark_main import Flag, Options

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "tiny_sglang.toml"


SERVER_FLAGS = (
    Flag("--python", text="interpreter that has SGLang (default: .venv-sglang/bin/python)"),
    Flag("--port", kind=int, text="port of the server that is started"),
)


def configure_tiny_server(
    options: Options,
    folder: Path,
    arguments: Sequence[str],
    *,
    kv_tokens: int,
    max_running: int,
    sequence_tokens: int,
) -> ServerRequirements:
    """Configure a server, with the model in `folder` and `kv_tokens` rounded down to whole pages.

    `arguments` are the server's only arguments besides those of the configuration's other keys.
    """
    files, run = RunFolder(folder), load_run(CONFIG)
    tiny = TinyDemo(num_train_questions=1, num_test_questions=1, num_sft_dialogues=200)
    tiny.prepare(RunConfig(name="tiny", dialogue=DialogueConfig(tools=("jupyter_code",))), files)
    sglang = replace(
        run.sglang,
        python=options.python or str(ROOT / run.sglang.python),
        port=options.port or run.sglang.port,
        arguments=tuple(arguments),
        environment={name: str(ROOT / path) for name, path in run.sglang.environment.items()},
    )
    page = run.engine.page_tokens
    engine = replace(run.engine, kv_tokens=kv_tokens // page * page, max_running=max_running)
    return ServerRequirements(engine, sglang, files.checkpoints / "init", sequence_tokens)
