"""What a run is like that these tests start SGLang servers for."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from configs.run_folder import RunFolder
from configs.schema import Dialogue, Engine, Run, Tiny
from configs.sglang import SPARE_TOKENS, Sglang
from engine.sglang.fit import Wanted
from engine.tiny.prepare import prepare
from tests.sglang.environment import PYTHON

SHIMS = Path(__file__).parent / "shims"
SEQUENCE_TOKENS = 192
LONGEST = 1000 - SPARE_TOKENS  # of the servers that many tests share
SCARCE_TOKENS = 1024


def sglang(port: int = 31_000, arguments: tuple[str, ...] = (), **changes: object) -> Sglang:
    """With what a server needs on a machine without CUDA, and seeds that count."""
    return Sglang(
        python=str(PYTHON),
        port=port,
        environment={"PYTHONPATH": str(SHIMS)},
        arguments=("--enable-deterministic-inference", *arguments),
        start_s=1700.0,  # a minute on two idle cores
        **changes,  # pyright: ignore[reportArgumentType]
    )


def wanted(model: Path, port: int = 31_000) -> Wanted:
    engine = Engine(kind="sglang", kv_tokens=8192, max_running=16)
    return Wanted(engine, sglang(port), model, SEQUENCE_TOKENS)


def roomy(model: Path, port: int) -> Wanted:
    engine = Engine(kind="sglang", kv_tokens=8192, max_running=16)
    return Wanted(engine, sglang(port), model, LONGEST)


def scarce(model: Path, port: int) -> Wanted:
    """With too little room, of which it promises more than it has, and a queue that is soon full."""
    engine = Engine(kind="sglang", kv_tokens=SCARCE_TOKENS, page_tokens=1, max_running=16, dtype="bfloat16")
    promises = ("--incremental-streaming-output", "--schedule-conservativeness", "0.1", "--max-queued-requests", "64")
    return Wanted(engine, sglang(port, promises), model, LONGEST)


def doubled(model: Path, port: int) -> Wanted:
    """With two copies of the model, each of which runs one request at a time; both on the first core."""
    engine = Engine(kind="sglang", kv_tokens=8192, max_running=1)
    given = sglang(port, data_parallel=2)
    environment = {**given.environment, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    return Wanted(engine, replace(given, environment=environment), model, LONGEST)


def tiny_model(folder: Path, seed: int = 0, **shape: int) -> Path:
    """The demo's, of random weights, with its tokenizer."""
    tiny = Tiny(num_train_questions=1, num_test_questions=1, num_sft_dialogues=200, **shape)
    run = Run(name="tiny", seed=seed, tiny=tiny, dialogue=Dialogue(tools=("jupyter_code",)))
    prepare(run, RunFolder(folder))
    return folder / "checkpoints" / "init"
