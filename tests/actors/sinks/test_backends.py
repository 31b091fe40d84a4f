"""Each backend receives the lines of metrics.jsonl, both recorded lines and those of a live run."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.actors.metrics_file import MetricsFile
from asterism.actors.sinks.delivery import count_undelivered
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import MetricsConfig
from asterism.configs.schema.run_config import RunConfig
from tests.actors.cli.invoking import read_output, read_refusal
from tests.actors.runs.running import ROOT, Start, metrics
from tests.actors.sinks.backends import Stored, expected_values, read_backend, write_lines

pytestmark = pytest.mark.slow
SINKS = tuple(SINK_KINDS)
KEEPS_REPLACED = {"wandb", "mlflow", "trackio"}  # TensorBoard drops the values of steps that a resumed run repeats
RECORDED = (
    {"kind": "sft", "step": 1, "loss": 3.5, "lr": 0.001, "tokens_per_s": None},
    {"kind": "sft", "step": 2, "loss": 3.25, "lr": 0.002, "tokens_per_s": 900.5},
    {"kind": "evaluation", "step": 0, "label": "start_greedy", "accuracy": 0.25, "reward: math": 0.25, "failed": 0},
    {"kind": "step", "step": 1, "reward": 0.5, "reward: math": 0.5, "task add: reward": 0.125},
    {"kind": "step", "step": 2, "reward": 0.75, "reward: math": 0.7, "task add: reward": 0.3},
    {"kind": "health", "step": 2, "check": "entropy", "action": "warn", "message": "the entropy is 0.01 nats"},
)
REPEATED = (
    {"kind": "step", "step": 2, "reward": 0.625, "reward: math": 0.6, "task add: reward": 0.2},
    {"kind": "lengths", "step": 2, "length_bias": 0.98},
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Make a finished run with the recorded lines."""
    folder = RunFolder(tmp_path)
    write_resolved(RunConfig(name="demo", metrics=MetricsConfig(wandb_mode="offline")), folder.config)
    write_lines(folder, *RECORDED)
    return folder


def sync(folder: RunFolder, *arguments: str) -> str:
    return read_output("metrics", "sync", folder.path, *arguments)


def check_last_values(stored: Stored, folder: RunFolder) -> None:
    expected = expected_values(folder)
    assert stored.values.keys() == expected.keys()
    last = {key: values[-1] for key, values in stored.values.items()}
    assert last == pytest.approx(expected, rel=1e-6, abs=1e-9)  # TensorBoard has float32


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "wandb" else pytest.mark.nightly) for each in SINKS]
)
def test_a_backend_continues_its_run_after_repeated_steps(name: str, folder: RunFolder) -> None:
    assert f"{name}: 6 of 6 records delivered now, 0 not delivered" in sync(folder, "--sink", name)
    first = read_backend(name, folder)
    check_last_values(first, folder)
    assert first.settings["rl.steps"] == "300"

    MetricsFile(folder.metrics).truncate_after(1)
    write_lines(folder, *map(json.loads, folder.metrics.read_text().splitlines()), *REPEATED)
    assert f"{name}: 2 of 6 records delivered now, 0 not delivered" in sync(folder, "--sink", name)
    second = read_backend(name, folder)
    assert second.runs == first.runs
    assert len(second.runs) == 1
    assert second.values["rl/reward", 2] == ([0.75, 0.625] if name in KEEPS_REPLACED else [0.625])
    health = second.values.pop(("health/entropy", 2), None)
    assert health == ([1.0] if name in KEEPS_REPLACED else None)
    check_last_values(second, folder)


def test_texts_of_health_reports_are_delivered(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sync(folder, "--sink", "tensorboard")
    events = EventAccumulator(str(folder.path / "tensorboard" / "rl")).Reload().Tensors("health/entropy_message")
    assert [(event.step, event.tensor_proto.string_val) for event in events] == [
        (2, [b"warn: the entropy is 0.01 nats"])
    ]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_every_backend_has_the_metrics_of_a_run_that_was_killed_and_resumed(
    start_trained: Start, silent_server: str
) -> None:
    """Before the kill, MLflow's server does not answer. This delays neither the run nor the other backends."""
    settings = (f"metrics.sinks={json.dumps(SINKS)}", "metrics.wandb_mode=offline", "sft.steps=4")
    first = start_trained(*settings, f"metrics.mlflow_uri={silent_server}")
    folder = first.folder
    first.wait_for("step", 2)
    first.wait_until(lambda: count_undelivered(folder, "tensorboard")[0] == 0)
    first.kill()
    assert count_undelivered(folder, "mlflow")[0] == count_undelivered(folder, "mlflow")[1] > 0

    output = start_trained(*settings, "--resume", "metrics.flush_s=240").succeed()
    assert "has an error" not in output
    assert "has not received" not in output
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    identities = {"tensorboard", (folder.sinks / "identity").read_text()}
    for name in SINKS:
        stored = read_backend(name, folder)
        check_last_values(stored, folder)
        assert stored.runs <= identities
        assert count_undelivered(folder, name)[0] == 0


def test_a_sink_without_its_package_is_refused_with_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = ("--set", f"runs_folder={tmp_path}", "--set", 'metrics.sinks=["wandb"]')
    assert read_refusal("run", ROOT / "configs/tiny.toml", *settings) == (
        'metrics.sinks: "wandb" needs the package wandb, which is not installed: pip install "asterism[wandb]"'
    )
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [(("--sink", "visdom"), '"visdom" is no sink; known: tensorboard'), ((), "the run has no metrics.sinks")],
)
def test_a_sync_without_a_known_sink_is_refused(arguments: tuple[str, ...], cause: str, folder: RunFolder) -> None:
    assert cause in read_refusal("metrics", "sync", folder.path, *arguments)
