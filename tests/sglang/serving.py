"""Requirements of the SGLang servers that these tests start."""

from pathlib import Path

from msgspec.structs import replace

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SPARE_TOKENS, SGLangConfig
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.tasks.tiny.prepare import TinyDemo
from tests.sglang.environment import PYTHON

SEQUENCE_TOKENS = 192
LONGEST = 1000 - SPARE_TOKENS  # tokens of the longest sequence on the shared servers
SCARCE_TOKENS = 1024


def sglang(port: int = 31_000, arguments: tuple[str, ...] = (), **changes: object) -> SGLangConfig:
    """Return SGLang options for a machine without CUDA, with deterministic sampling."""
    return SGLangConfig(
        python=str(PYTHON),
        port=port,
        arguments=("--enable-deterministic-inference", *arguments),
        startup_timeout_s=1700.0,  # a start takes a minute on two idle cores
        **changes,  # pyright: ignore[reportArgumentType]
    )


def make_requirements(model: Path, port: int, sequence_tokens: int = SEQUENCE_TOKENS) -> ServerRequirements:
    engine = EngineConfig(kind="sglang", kv_tokens=8192, max_running=16)
    return ServerRequirements(engine, sglang(port), model, sequence_tokens)


def make_scarce(model: Path, port: int) -> ServerRequirements:
    """Return requirements with a small cache, which the server overcommits, and a short queue."""
    engine = EngineConfig(kind="sglang", kv_tokens=SCARCE_TOKENS, page_tokens=1, max_running=16, dtype="bfloat16")
    overcommit = ("--incremental-streaming-output", "--schedule-conservativeness", "0.1", "--max-queued-requests", "64")
    return ServerRequirements(engine, sglang(port, overcommit), model, LONGEST)


def make_replicated(model: Path, port: int) -> ServerRequirements:
    """Return requirements with two model replicas on the first core; a replica runs one request at a time."""
    engine = EngineConfig(kind="sglang", kv_tokens=8192, max_running=1)
    given = sglang(port, data_parallel=2)
    environment = {**given.environment, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    return ServerRequirements(engine, replace(given, environment=environment), model, LONGEST)


def save_tiny_model(folder: Path, seed: int = 0, **shape: int) -> Path:
    """Save a model of the demo's architecture with random weights, and the demo's tokenizer."""
    tiny = TinyDemo(num_train_questions=1, num_test_questions=1, num_sft_dialogues=200, **shape)
    run = RunConfig(name="tiny", seed=seed, dialogue=DialogueConfig(tools=("jupyter_code",)))
    tiny.prepare(run, RunFolder(folder))
    return folder / "checkpoints" / "init"
