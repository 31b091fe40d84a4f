"""`asterism doctor --config` names the keys to change for each problem of the configured run."""

import json
import shlex
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
import torch

from asterism.actors.cli.doctor import machine_checks
from asterism.actors.cli.doctor.configuration_checks import LOCAL_SGLANG_PYTHON, check_run, check_sglang
from asterism.actors.cli.doctor.finding import DoctorFinding, run_check
from asterism.actors.launch.checks.input_checks import list_input_checks
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.sglang.http_api import ServerInfo
from tests.actors.cli.invoking import invoke
from tests.actors.runs.running import ROOT
from tests.engine.learner.training_examples import write_initial_checkpoint
from tests.engine.sglang.server.requirements import make_info
from tests.engine.tiny_models import small_config
from tests.http_responses import Response, serving

GIB = 2**30
INPUTS = ("data.train", "data.test", "model.checkpoint", "dialogue.stop_tokens", "main memory", "space", "plan")
SERVED = ("engine.kind=sglang", "dialogue.prompt_tokens=92", "dialogue.response_tokens=100")


def interpreter(path: Path, *free_gib: float, version: str = "0.5.23") -> Path:
    """Write a program that reports this SGLang version and GPUs with this free memory."""
    seen = ["2.13.0", [("A GPU", int(free * GIB), 80 * GIB) for free in free_gib]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *cuda*) echo {shlex.quote(json.dumps(seen))};; *) echo {version};; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_initial_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def port() -> int:
    """Return a free port; the port 10 higher is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            found = first.getsockname()[1]
            if found < 65_000 and second.connect_ex(("127.0.0.1", found + 10)):
                return found


@pytest.fixture(autouse=True)
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
    Path("test.jsonl").write_text('{"question": "1 + 2?", "answer": "3"}')


def found(*settings: object) -> dict[str, DoctorFinding]:
    data = ("data.train=questions.jsonl", "data.test=test.jsonl")
    return check_run(load_run(None, ["name=a", *data, *map(str, settings)]))


def statuses(findings: dict[str, DoctorFinding]) -> dict[str, str]:
    assert [bool(each.remedy) for each in findings.values()] == [each.status != "ok" for each in findings.values()]
    return {name: each.status for name, each in findings.items()}


def find_unusable(name: str, *settings: object) -> str:
    """Return the detail of a finding that must have the status "unusable"."""
    findings = found(*settings)
    assert statuses(findings)[name] == "unusable"
    return findings[name].detail


class TestManagedServers:
    @pytest.fixture
    def settings(self, tmp_path: Path, checkpoint: Path, port: int) -> tuple[str, ...]:
        python = interpreter(tmp_path / "python", 40, 80)
        return *SERVED, f"sglang.python={python}", f"model.checkpoint={checkpoint}", f"sglang.port={port}"

    def test_a_complete_machine_is_ok(self, settings: tuple[str, ...], port: int) -> None:
        findings = found(*settings, "engine.device=cuda", "engine.num_engines=2")
        names = (*INPUTS, "engine.kind", "sglang.python", "sglang.port", "GPUs", "GPU memory")
        assert statuses(findings) == dict.fromkeys(names, "ok")
        assert findings["sglang.port"].detail == f"{port}, {port + 10}: free"
        assert findings["GPUs"].detail == "A GPU, 80 GiB; A GPU, 80 GiB"

    def test_a_cpu_run_needs_no_gpu(self, tmp_path: Path, settings: tuple[str, ...]) -> None:
        interpreter(tmp_path / "python")
        findings = found(*settings)
        assert findings["GPUs"] == DoctorFinding("ok", 'engine.device = "cpu" needs none')
        assert "GPU memory" not in findings

    @pytest.mark.parametrize(
        ("gpus", "changes", "name", "expected"),
        [
            (0, (), "GPUs", "need 1 GPUs, but torch 2.13.0 of the server's interpreter sees none"),
            (1, ("engine.num_engines=2",), "GPUs", "engine.num_engines = 2, "),
            (1, ("sglang.tensor_parallel=2",), "GPUs", "sglang.tensor_parallel = 2 and "),
            (3, ("sglang.data_parallel=4",), "GPUs", "sglang.data_parallel = 4 need 4 GPUs, but torch 2.13.0 of the "),
            (
                1,
                (f"sglang.python={sys.executable}", "engine.device=cpu"),
                "sglang.python",
                f"{sys.executable}: has no SGLang 0.5.23",
            ),
            (1, ("sglang.python=/none",), "sglang.python", "sglang.python = /none: "),
            (1, ("sglang.python=/none",), "GPUs", "cannot be run: No such file or directory"),
        ],
    )
    def test_a_missing_requirement_is_reported_with_the_keys_that_need_it(
        self, tmp_path: Path, settings: tuple[str, ...], gpus: int, changes: tuple[str, ...], name: str, expected: str
    ) -> None:
        interpreter(tmp_path / "python", *[80] * gpus)
        assert expected in find_unusable(name, *settings, "engine.device=cuda", *changes)

    @pytest.mark.parametrize(
        ("kv_tokens", "key"), [(300_000_000, "engine.kv_tokens = 300000000"), (0, "sglang.memory_share = 0.85")]
    )
    def test_too_little_memory_on_any_gpu_is_reported_by_key(
        self, tmp_path: Path, settings: tuple[str, ...], kv_tokens: int, key: str
    ) -> None:
        cuda = (*settings, "engine.device=cuda", "engine.num_engines=2", f"engine.kv_tokens={kv_tokens}")
        interpreter(tmp_path / "python", 150, 150)
        assert statuses(found(*cuda))["GPU memory"] == "ok"
        interpreter(tmp_path / "python", 150, 0.0001)
        detail = find_unusable("GPU memory", *cuda)
        assert detail.startswith(f"{key}: each GPU needs 0.12 MiB for weights and ")

    def test_an_occupied_port_of_any_engine_is_reported(self, settings: tuple[str, ...], port: int) -> None:
        with socket.create_server(("127.0.0.1", port + 10)):
            assert found(*settings)["sglang.port"].status == "ok"
            detail = find_unusable("sglang.port", *settings, "engine.num_engines=2")
        assert detail == f"sglang.port: port {port + 10} is in use; choose another, or set sglang.external_urls"

    @pytest.mark.parametrize(("seen", "status"), [(0, "unusable"), (1, "ok")])
    def test_nccl_needs_a_gpu_for_the_generator(
        self, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], seen: int, status: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        group = ("engine.device=cuda", "sglang.weights=group", "sglang.group_backend=nccl")
        assert statuses(found(*settings, *group))["sglang.group_backend"] == status
        ipc = ("engine.device=cuda", "sglang.weights=ipc")
        assert statuses(found(*settings, *ipc))["sglang.weights"] == status
        assert "sglang.group_backend" not in found(*settings)


class TestExternalServers:
    def test_a_compatible_server_is_ok(self, checkpoint: Path) -> None:
        with answering(make_info(model_path=str(checkpoint))) as url:
            findings = found(*SERVED, attach(url), f"model.checkpoint={checkpoint}", "engine.kv_tokens=8192")
            assert (
                findings["sglang.external_urls[0]"].detail == f"SGLang 0.5.23 at {url}, with a KV cache of 8192 tokens"
            )
        assert statuses(findings) == dict.fromkeys((*INPUTS, "engine.kind", "sglang.external_urls[0]"), "ok")

    def test_every_incompatibility_is_reported_by_key(self, checkpoint: Path) -> None:
        with answering(make_info()) as url:
            settings = (*SERVED, "dialogue.response_tokens=200", "engine.kv_tokens=9000")
            detail = find_unusable("sglang.external_urls[0]", *settings, attach(url), f"model.checkpoint={checkpoint}")
        assert [line.partition(":")[0] for line in detail.splitlines()] == [
            "dialogue.prompt_tokens + response_tokens = 292",
            "engine.kv_tokens = 9000",
            f"model.checkpoint = {checkpoint}",
        ]

    def test_an_unknown_kind_of_server_is_reported_by_its_index(self) -> None:
        with answering(make_info()) as url, answering(None) as other:
            detail = find_unusable("sglang.external_urls[1]", *SERVED, "engine.num_engines=2", attach(url, other))
        assert detail.startswith(f"sglang.external_urls[1] = {other}: the server refused /server")

    def test_a_server_is_compatible_with_a_model_that_the_run_will_create(self, tmp_path: Path) -> None:
        tiny = (f"runs_folder={tmp_path}", "engine.kv_tokens=8192", 'dialogue.tools=["jupyter_code"]')
        tiny += ("prepare.import=asterism.tasks.tiny.prepare:TinyDemo",)
        with answering(make_info()) as url:
            findings = found(*SERVED, *tiny, attach(url))
            assert statuses(findings) == dict.fromkeys(
                (*INPUTS[:3], "plan", "prepare.import", "sglang.external_urls[0]"), "ok"
            )
            made = tmp_path / "a" / "checkpoints" / "init"
            made.mkdir(parents=True)
            (made / "config.json").write_text(json.dumps(small_config().to_hf()))
            assert found(*SERVED, *tiny, attach(url))["sglang.external_urls[0]"].status == "unusable"


class TestEmbedded:
    def test_a_configured_gpu_that_does_not_exist_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        settings = (f"model.checkpoint={checkpoint}", "engine.num_engines=2")
        assert statuses(found(*settings)) == dict.fromkeys((*INPUTS, "engine.device"), "ok")
        detail = find_unusable("engine.device", *settings, "engine.device=cuda")
        assert detail.startswith("engine.device is cuda, but torch ")

    def test_an_invalid_checkpoint_is_reported_by_key(self, tmp_path: Path) -> None:
        findings = found(f"model.checkpoint={tmp_path}")
        assert findings["model.checkpoint"].detail == f"{tmp_path / 'config.json'}: no such file"
        for key in ("main memory", "space", "dialogue.stop_tokens"):
            assert findings[key].remedy == "Repair model.checkpoint first."

    def test_too_little_memory_for_the_plan_is_a_warning_with_a_value_that_fits(self, checkpoint: Path) -> None:
        settings = (f"model.checkpoint={checkpoint}", "learner.memory.micro_batch_tokens=1000000000")
        finding = found(*settings)["plan"]
        assert (finding.status, finding.detail) == ("warning", "host memory may not suffice")
        assert "host memory: set learner.memory.micro_batch_tokens = " in finding.remedy


class TestWithoutARun:
    def test_the_makefiles_sglang_environment_is_found(self, tmp_path: Path) -> None:
        python = interpreter(tmp_path / LOCAL_SGLANG_PYTHON)
        assert check_sglang(tmp_path) == f"0.5.23 in {python}"

    def test_missing_sglang_is_only_a_warning(self, tmp_path: Path) -> None:
        finding = run_check(lambda: check_sglang(tmp_path))
        assert finding.status == "warning"
        assert "make sglang-environment" in finding.remedy


class TestCommand:
    def test_the_configured_run_is_examined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        examined: list[RunConfig | None] = []

        def examine(run: RunConfig | None) -> dict[str, DoctorFinding]:
            examined.append(run)
            return {"sglang.external_urls[0]": DoctorFinding("missing", "unreachable", "Start it.")}

        monkeypatch.setattr(machine_checks, "examine", examine)
        config = ("--config", str(ROOT / "configs/tiny_sglang.toml"), "--set", "sglang.port=31500")
        result = invoke("doctor", *config)
        assert result.exit_code == 1
        assert result.output.splitlines()[1].split() == ["missing", "sglang.external_urls[0]", "unreachable"]
        invoke("doctor", "--set", "engine.kind=sglang")
        invoke("doctor")
        assert [run and (run.sglang.port, run.engine.kind) for run in examined] == [
            (31_500, "sglang"),
            (31_000, "sglang"),
            None,
        ]

    def test_an_invalid_configuration_is_refused(self) -> None:
        assert isinstance(invoke("doctor", "--set", "sglang.prot=1").exception, ConfigError)


def attach(*urls: str) -> str:
    return f"sglang.external_urls={json.dumps(urls)}"


def answering(info: ServerInfo | None) -> AbstractContextManager[str]:
    """Serve this response at /server_info; None stands for a 404."""
    response = Response(200, msgspec.json.encode(info)) if info else Response(404, b"not here")
    return serving(lambda _: response)


def test_an_unexpected_error_in_a_check_of_the_run_is_unusable() -> None:
    """A run would end with this error. In a check that only doctor makes, an unexpected error is a warning."""

    def breaks() -> str:
        raise PermissionError("not yours")

    assert run_check(breaks, "Change it.", ends_run=True).status == "unusable"
    assert run_check(breaks, "Change it.").status == "warning"


@pytest.mark.parametrize("content", ["{", '{"model_type": "odd"}', ""])
def test_an_invalid_checkpoint_is_reported_with_the_message_of_the_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content)
    run = load_run(None, ["name=a", "sft.steps=0", "evaluation.questions=0", f"model.checkpoint={tmp_path / 'model'}"])
    finding = check_run(run)["model.checkpoint"]
    with pytest.raises(UnusableInput) as refused:
        list_input_checks(run)["model.checkpoint"]()
    assert (finding.status, finding.detail) == ("unusable", str(refused.value))
