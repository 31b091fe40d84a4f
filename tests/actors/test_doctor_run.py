"""asterism doctor on a configuration: what its run lacks on this machine is said with the keys to change."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
import structlog
import torch
from typer.testing import CliRunner

from actors import doctor
from actors.cli import app
from actors.doctor_run import MADE_HERE, find_for_run, find_sglang
from actors.finding import Finding
from configs.load import ConfigError, load_run
from configs.schema import Run
from engine.sglang.protocol import ServerInfo
from tests.engine.sglang.servers import info
from tests.engine.tiny_models import small_config

GIB = 2**30
SERVED = ("engine.kind=sglang", "dialogue.prompt_tokens=92", "dialogue.response_tokens=100")


def interpreter(path: Path, *free_gib: float, version: str = "0.5.23") -> Path:
    """A program that says this version of SGLang, and to have GPUs with so much free memory."""
    seen = ["2.13.0", [("A GPU", int(free * GIB), 80 * GIB) for free in free_gib]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *cuda*) echo {shlex.quote(json.dumps(seen))};; *) echo {version};; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(small_config().to_hf()))
    return tmp_path / "model"


@pytest.fixture
def port() -> int:
    """Free as it is asked for, as is the tenth after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            found = first.getsockname()[1]
            if found < 65_000 and second.connect_ex(("127.0.0.1", found + 10)):
                return found


def found(*settings: object) -> dict[str, Finding]:
    return {each.name: each for each in find_for_run(load_run(None, ["name=a", *map(str, settings)]))}


def statuses(findings: dict[str, Finding]) -> dict[str, str]:
    assert [bool(each.remedy) for each in findings.values()] == [each.status != "ok" for each in findings.values()]
    return {name: each.status for name, each in findings.items()}


class TestServersOfTheRun:
    @pytest.fixture
    def settings(self, tmp_path: Path, checkpoint: Path, port: int) -> tuple[str, ...]:
        python = interpreter(tmp_path / "python", 40, 80)
        return *SERVED, f"sglang.python={python}", f"model.checkpoint={checkpoint}", f"sglang.port={port}"

    def test_a_machine_that_has_all_of_it(self, settings: tuple[str, ...], port: int) -> None:
        findings = found(*settings, "engine.device=cuda", "engine.num_engines=2")
        names = ("model.checkpoint", "sglang.python", "sglang.port", "GPUs", "GPU memory")
        assert statuses(findings) == dict.fromkeys(names, "ok")
        assert findings["sglang.port"].detail == f"{port}, {port + 10}: free"
        assert findings["GPUs"].detail == "A GPU, 80 GiB; A GPU, 80 GiB"

    def test_without_a_gpu_a_run_on_the_cpu_lacks_nothing(self, tmp_path: Path, settings: tuple[str, ...]) -> None:
        interpreter(tmp_path / "python")
        findings = found(*settings)
        assert findings["GPUs"] == Finding("GPUs", "ok", 'engine.device = "cpu" needs none')
        assert "GPU memory" not in findings

    @pytest.mark.parametrize(
        ("gpus", "layout", "said"),
        [
            (0, "engine.num_engines=1", "take 1 GPUs in all, and torch 2.13.0 of the server's interpreter sees none"),
            (1, "engine.num_engines=2", "engine.num_engines = 2, "),
            (1, "sglang.tensor_parallel=2", "sglang.tensor_parallel = 2 and "),
            (3, "sglang.data_parallel=4", "sglang.data_parallel = 4 take 4 GPUs in all, and torch 2.13.0 of the "),
        ],
    )
    def test_too_few_gpus_are_missing_by_the_keys_that_take_them(
        self, tmp_path: Path, settings: tuple[str, ...], gpus: int, layout: str, said: str
    ) -> None:
        interpreter(tmp_path / "python", *[80] * gpus)
        findings = found(*settings, "engine.device=cuda", layout)
        assert findings["GPUs"].status == "missing"
        assert said in findings["GPUs"].detail
        assert "GPU memory" not in findings

    @pytest.mark.parametrize(
        ("kv_tokens", "key"), [(300_000_000, "engine.kv_tokens = 300000000"), (0, "sglang.memory_share = 0.85")]
    )
    def test_too_little_memory_on_any_of_them_is_missing_by_the_key(
        self, tmp_path: Path, settings: tuple[str, ...], kv_tokens: int, key: str
    ) -> None:
        cuda = (*settings, "engine.device=cuda", "engine.num_engines=2", f"engine.kv_tokens={kv_tokens}")
        interpreter(tmp_path / "python", 150, 150)
        assert statuses(found(*cuda))["GPU memory"] == "ok"
        interpreter(tmp_path / "python", 150, 0.0001)
        findings = found(*cuda)
        assert statuses(findings)["GPU memory"] == "missing"
        assert findings["GPU memory"].detail.startswith(f"{key}: each GPU needs 0.00 GiB for weights and ")

    def test_an_interpreter_without_sglang_is_missing_by_its_key(self, settings: tuple[str, ...]) -> None:
        finding = found(*settings, f"sglang.python={sys.executable}")["sglang.python"]
        assert finding.status == "missing"
        assert finding.detail.startswith(f"sglang.python = {sys.executable}: has no SGLang 0.5.23")

    def test_of_an_interpreter_that_is_none_neither_sglang_nor_gpus_are_known(
        self, tmp_path: Path, settings: tuple[str, ...]
    ) -> None:
        findings = found(*settings, f"sglang.python={tmp_path / 'none'}", "engine.device=cuda")
        assert (findings["sglang.python"].status, findings["GPUs"].status) == ("missing", "missing")
        assert findings["GPUs"].detail.endswith("cannot be run: No such file or directory")

    def test_another_version_is_missing_with_those_that_are_known(
        self, tmp_path: Path, settings: tuple[str, ...]
    ) -> None:
        interpreter(tmp_path / "python", version="0.4.1")
        finding = found(*settings)["sglang.python"]
        assert finding.status == "missing"
        assert finding.detail.endswith("has SGLang 0.4.1; known here: 0.5.23")

    def test_a_port_of_any_engine_that_is_taken_is_missing(self, settings: tuple[str, ...], port: int) -> None:
        with socket.create_server(("127.0.0.1", port + 10)):
            assert found(*settings)["sglang.port"].status == "ok"
            finding = found(*settings, "engine.num_engines=2")["sglang.port"]
        assert finding.status == "missing"
        assert finding.detail == (
            f"sglang.port: somebody listens at port {port + 10} already; take another, or sglang.attach"
        )

    @pytest.mark.parametrize(("seen", "status"), [(0, "missing"), (1, "ok")])
    def test_nccl_takes_a_gpu_of_the_generators_own(
        self, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], seen: int, status: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        group = ("engine.device=cuda", "sglang.weights=group", "sglang.group_backend=nccl")
        assert statuses(found(*settings, *group))["sglang.group_backend"] == status
        assert "sglang.group_backend" not in found(*settings)


class TestServersOfOthers:
    def test_one_that_fits(self, checkpoint: Path) -> None:
        with answering(info(model_path=str(checkpoint))) as url:
            findings = found(*SERVED, attach(url), f"model.checkpoint={checkpoint}", "engine.kv_tokens=8192")
            assert findings["sglang.attach[0]"].detail == f"SGLang 0.5.23 at {url}, with room for 8192 tokens"
        assert statuses(findings) == {"model.checkpoint": "ok", "sglang.attach[0]": "ok"}

    def test_all_that_does_not_fit_is_said_by_key(self, checkpoint: Path) -> None:
        with answering(info()) as url:
            settings = (*SERVED, "dialogue.response_tokens=200", "engine.kv_tokens=9000")
            finding = found(*settings, attach(url), f"model.checkpoint={checkpoint}")["sglang.attach[0]"]
        assert finding.status == "missing"
        assert [line.partition(":")[0] for line in finding.detail.splitlines()] == [
            "dialogue.prompt_tokens + response_tokens = 292",
            "engine.kv_tokens = 9000",
            f"model.checkpoint = {checkpoint}",
        ]

    def test_a_version_that_is_not_known_is_missing(self) -> None:
        with answering(info(version="0.9.9")) as url:
            finding = found(*SERVED, attach(url))["sglang.attach[0]"]
        assert finding.status == "missing"
        assert finding.detail == f"sglang.attach[0] = {url}: SGLang 0.9.9 is not known here; known: 0.5.23"

    def test_somebody_who_is_no_such_server_is_missing_at_its_place(self) -> None:
        with answering(info()) as url, answering(None) as other:
            findings = found(*SERVED, "engine.num_engines=2", attach(url, other))
        assert findings["sglang.attach[1]"].status == "missing"
        assert findings["sglang.attach[1]"].detail.startswith(f"sglang.attach[1] = {other}: the server refused /server")

    def test_a_model_that_the_run_has_yet_to_make_is_not_another_one(self, tmp_path: Path) -> None:
        tiny = ("tiny.num_layers=2", f"runs_folder={tmp_path}", "engine.kv_tokens=8192")
        with answering(info()) as url:
            findings = found(*SERVED, *tiny, attach(url))
            assert statuses(findings) == {"model.checkpoint": "ok", "sglang.attach[0]": "ok"}
            made = tmp_path / "a" / "checkpoints" / "init"
            made.mkdir(parents=True)
            (made / "config.json").write_text(json.dumps(small_config().to_hf()))
            assert found(*SERVED, *tiny, attach(url))["sglang.attach[0]"].status == "missing"


class TestEmbedded:
    def test_a_gpu_that_is_not_there_is_missing(self, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        settings = (f"model.checkpoint={checkpoint}", "engine.num_engines=2")
        assert statuses(found(*settings)) == {"model.checkpoint": "ok", "engine.device": "ok"}
        finding = found(*settings, "engine.device=cuda")["engine.device"]
        assert finding.status == "missing"
        assert finding.detail.startswith("engine.device is cuda, and torch ")

    def test_a_checkpoint_that_is_none_is_missing_by_its_key(self, tmp_path: Path) -> None:
        finding = found(f"model.checkpoint={tmp_path}")["model.checkpoint"]
        assert (finding.status, finding.detail) == ("missing", f"{tmp_path / 'config.json'}: no such file")


class TestWithoutARun:
    def test_the_sglang_that_the_makefile_installs_is_found(self, tmp_path: Path) -> None:
        python = interpreter(tmp_path / MADE_HERE)
        assert find_sglang(tmp_path) == Finding("SGLang", "ok", f"0.5.23 of {python}")

    def test_none_is_no_lack_of_a_run_on_the_embedded_engine(self, tmp_path: Path) -> None:
        finding = find_sglang(tmp_path)
        assert finding.status == "warning"
        assert "make sglang-environment" in finding.remedy


class TestCommand:
    @pytest.fixture(autouse=True)
    def structlog_as_before(self) -> Iterator[None]:
        yield
        structlog.reset_defaults()

    def test_the_run_of_the_configuration_is_examined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        examined: list[Run | None] = []

        def examine(run: Run | None) -> list[Finding]:
            examined.append(run)
            return [Finding("sglang.attach[0]", "missing", "nobody", "Start it.")]

        monkeypatch.setattr(doctor, "examine", examine)
        config = ("--config", "configs/tiny_sglang.toml", "--set", "sglang.port=31500")
        said = CliRunner().invoke(app, ["doctor", *config])
        assert said.exit_code == 1
        assert said.output.splitlines()[1].split() == ["missing", "sglang.attach[0]", "nobody"]
        CliRunner().invoke(app, ["doctor", "--set", "engine.kind=sglang"])
        CliRunner().invoke(app, ["doctor"])
        assert [run and (run.sglang.port, run.engine.kind) for run in examined] == [
            (31_500, "sglang"),
            (31_000, "sglang"),
            None,
        ]

    def test_a_configuration_that_cannot_be_used_is_refused(self) -> None:
        refused = CliRunner().invoke(app, ["doctor", "--set", "sglang.prot=1"])
        assert isinstance(refused.exception, ConfigError)


def attach(*urls: str) -> str:
    return f"sglang.attach={json.dumps(urls)}"


@contextmanager
def answering(said: ServerInfo | None) -> Iterator[str]:
    """Somebody who says this at /server_info, or knows no such thing."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = msgspec.json.encode(said) if said else b"not here"
            self.send_response(200 if said else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
