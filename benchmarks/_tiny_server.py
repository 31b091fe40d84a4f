"""An SGLang server of the tiny model with random weights, as configs/tiny_sglang.toml has it: on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from configs.load import load_run
from configs.run_folder import RunFolder
from configs.schema import Dialogue, Run, Tiny
from engine.sglang.fit import Wanted
from engine.tiny.prepare import prepare

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_sglang.toml"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", help="interpreter that has SGLang; .venv-sglang/bin/python")
    parser.add_argument("--port", type=int, help="of the server that is started")


def tiny_server(
    options: argparse.Namespace,
    folder: Path,
    arguments: Sequence[str],
    *,
    kv_tokens: int,
    max_running: int,
    sequence_tokens: int,
) -> Wanted:
    """The model is made in `folder`. `kv_tokens` are rounded down to whole pages; `arguments` are all that the server gets
    beside what it has from the configuration's other keys."""
    files, run = RunFolder(folder), load_run(CONFIG)
    tiny = Tiny(num_train_questions=1, num_test_questions=1, num_sft_dialogues=200)
    prepare(Run(name="tiny", tiny=tiny, dialogue=Dialogue(tools=("jupyter_code",))), files)
    sglang = replace(
        run.sglang,
        python=options.python or str(ROOT / run.sglang.python),
        port=options.port or run.sglang.port,
        arguments=tuple(arguments),
        environment={name: str(ROOT / path) for name, path in run.sglang.environment.items()},
    )
    page = run.engine.page_tokens
    engine = replace(run.engine, kv_tokens=kv_tokens // page * page, max_running=max_running)
    return Wanted(engine, sglang, files.checkpoints / "init", sequence_tokens)
