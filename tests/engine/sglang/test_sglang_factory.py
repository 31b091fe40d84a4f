"""Tests: the configuration determines an engine's server, log, weight transport and stop timeout."""

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asterism.actors.runtime.wiring import get_stop_timeout_s
from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS, WeightTransfer
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.engine_code import EngineStart
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang import sglang_factory
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import TERM_GRACE_S
from asterism.engine.sglang.sglang_engine import LONG_STREAM_INTERVAL, SHORT_STREAM_INTERVAL
from asterism.engine.sglang.weights.adapters import AdapterTransport
from asterism.engine.sglang.weights.disk_transport import DiskTransport
from tests.engine.tiny_models import small_model

FOLDER = RunFolder(Path("/runs/demo"))
Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Build the engine of this process with these settings, and return the engine's arguments by name."""

    def build_engine(process: str, *settings: str, incarnation: int = 1) -> dict[str, Any]:
        run = load_run(None, ["name=demo", "engine.kind=sglang", "engine.num_engines=3", *settings])
        arguments: dict[str, Any] = {}

        def engine(server: object, weights: object, **options: object) -> None:
            arguments.update(options, server=server, weights=weights)

        def layout(model: Path, dtype: object) -> None:
            arguments.update(dtype=dtype)

        def started(wanted: object, **options: object) -> None:
            arguments.update(options, requirements=wanted)

        monkeypatch.setattr(sglang_factory, "SGLangEngine", engine)
        monkeypatch.setattr(sglang_factory, "load_layout", layout)
        if not run.sglang.external_urls:
            monkeypatch.setattr(sglang_factory, "SGLangServer", started)
        sglang_factory.build_engine(EngineStart(run, FOLDER, process, -1, print, incarnation))
        return arguments

    return build_engine


@pytest.mark.parametrize(("suffix", "index"), [("2", 2), ("0@1", 0)], ids=["first node", "joined node"])
def test_a_server_has_the_index_of_its_generator(build: Build, suffix: str, index: int) -> None:
    """The index determines the port, which is local to the machine. The log on each node is a different file."""
    arguments = build(f"generator-{suffix}")
    assert arguments["log"] == FOLDER.logs / f"sglang-{suffix}.log"
    assert arguments["scratch"] == FOLDER.sockets / f"sglang-{suffix}"
    assert (arguments["index"], arguments["version"]) == (index, -1)


def test_an_engine_attaches_to_the_server_at_its_index(build: Build) -> None:
    attach = 'sglang.external_urls=["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3/"]'
    server = build("generator-2", attach)["server"]
    assert isinstance(server, ExternalServer)
    assert server.url == "http://127.0.0.1:3"


def test_a_later_incarnation_waits_for_its_external_server(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    def attached(wanted: object, *, index: int, is_restart: bool) -> None:
        made.append(is_restart)

    monkeypatch.setattr(sglang_factory, "ExternalServer", attached)
    settings = ('sglang.external_urls=["http://127.0.0.1:1"]', "engine.num_engines=1")
    for incarnation in (1, 2):
        build("generator-0", *settings, incarnation=incarnation)
    assert made == [False, True]


@pytest.mark.parametrize(("transport", "transfer"), WEIGHT_TRANSFERS.items())
def test_the_configured_weight_transport_is_used(build: Build, transport: str, transfer: WeightTransfer) -> None:
    settings = (f"sglang.weights={transport}", "engine.dtype=bfloat16")
    arguments = build("generator-0", *settings)
    assert isinstance(arguments["weights"], pkgutil.resolve_name(transfer.transport))
    assert str(arguments["dtype"]) == "torch.bfloat16"


def test_published_adapters_require_a_server_with_lora(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_factory, "build_empty_model", lambda _: small_model())
    adapters = ("learner.lora.rank=4", 'learner.lora.targets=["o_proj"]', "learner.lora.publish=adapters")
    for settings, lora in ((adapters, LoraOptions(4, 32.0, ("o_proj",))), (adapters[:2], None)):
        arguments = build("generator-0", *settings)
        assert arguments["requirements"].lora == lora
        assert isinstance(arguments["weights"], AdapterTransport if lora else DiskTransport)


@pytest.mark.parametrize(
    ("setting", "interval"),
    [
        ("rl.max_staleness=0", LONG_STREAM_INTERVAL),
        ("rl.max_staleness=1", SHORT_STREAM_INTERVAL),
        ("rl.group_oversampling=1.5", SHORT_STREAM_INTERVAL),
    ],
)
def test_streams_are_fine_grained_only_if_turns_can_be_interrupted(build: Build, setting: str, interval: int) -> None:
    assert build("generator-0", "rl.prompts=8", setting)["stream_interval"] == interval


def test_the_stop_timeout_of_a_generator_exceeds_that_of_its_server() -> None:
    served, embedded = load_run(None, ["name=a", "engine.kind=sglang"]), RunConfig(name="a")
    assert get_stop_timeout_s(served, "generator-0@1") > 2 * TERM_GRACE_S
    assert get_stop_timeout_s(served, "learner") == get_stop_timeout_s(embedded, "generator-0") < 2 * TERM_GRACE_S


def test_the_start_of_a_server_does_not_reset_the_restart_count() -> None:
    served = load_run(None, ["name=a", "engine.kind=sglang", "sglang.startup_timeout_s=7.0"])
    assert served.servers.startup_timeout_s == 7.0
    assert RunConfig(name="a").servers.startup_timeout_s == 0.0


@pytest.mark.slow
def test_a_process_without_an_engine_imports_no_engine() -> None:
    """Head and rollout processes run the same program as generators, but need no engine."""
    code = "import asterism.actors.process, sys; sys.exit(bool({'torch', 'aiohttp', 'asterism.engine.sglang.sglang_engine'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
