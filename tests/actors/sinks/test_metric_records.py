"""Records for sinks have these names, values and axes."""

import re
from pathlib import Path

import msgspec
import pytest

from asterism.actors.sinks.contract import HIDDEN, BackendRun
from asterism.actors.sinks.metric_records import MetricRecord, build_record, clean_name
from asterism.configs.choices.engine_kinds import ENGINE_KINDS
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import EngineConfig, MetricsConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.configs.schema.tasks import TaskConfig


def build(**line: object) -> MetricRecord:
    return build_record(0, msgspec.json.encode(line))


@pytest.mark.parametrize(
    ("line", "axis", "values"),
    [
        ({"kind": "step", "step": 3, "reward": 0.5, "updates": 2}, "rl", {"rl/reward": 0.5, "rl/updates": 2}),
        ({"kind": "sft", "step": 9, "loss": 1.5}, "cold_start", {"cold_start/loss": 1.5}),
        ({"kind": "evaluation", "step": 3, "label": "step_greedy", "accuracy": 1}, "rl", {"evaluation/step_greedy/accuracy": 1}),
        ({"kind": "lengths", "step": 3, "length_bias": 0.9}, "rl", {"lengths/length_bias": 0.9}),
        ({"kind": "step", "step": 3, "task add: reward": 1.0}, "rl", {"rl/task_add-reward": 1.0}),
        ({"kind": "step", "step": 3, "tokens_per_s": None}, "rl", {}),
    ],
)  # fmt: skip
def test_a_record_has_the_prefix_and_the_axis_of_its_kind(
    line: dict[str, object], axis: str, values: dict[str, float]
) -> None:
    record = build(**line)
    assert (record.axis, record.step, record.values, record.texts) == (axis, line["step"], values, {})


def test_a_health_report_is_a_value_and_a_text() -> None:
    record = build(kind="health", step=4, check="entropy", action="warn", message="low")
    assert (record.axis, record.step) == ("rl", 4)
    assert record.values == {"health/entropy": 1.0}
    assert record.texts == {"health/entropy_message": "warn: low"}


@pytest.mark.parametrize("key", ["reward", "reward: format", "minibatch 1: mismatch_mean", "set a(b): pass@8", "tâche"])
def test_a_name_has_only_characters_that_every_backend_accepts(key: str) -> None:
    assert re.fullmatch(r"[\w.-]+", clean_name(key), re.ASCII)


def test_no_name_is_a_folder_in_the_path_of_another_name() -> None:
    """MLflow's file store keeps each metric in a file; the path is the name of the metric."""
    assert clean_name("reward: format") == "reward-format"


def test_names_outside_ascii_remain_different() -> None:
    assert build(kind="step", step=1, **{"reward: 格式": 1.0, "reward: 长度": 2.0}).values == {
        "rl/reward-_u683c_u5f0f": 1.0,
        "rl/reward-_u957f_u5ea6": 2.0,
    }


def test_the_settings_for_a_backend_hide_tables_that_may_have_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINE_KINDS, "own", ENGINE_KINDS["embedded"]._replace(has_options=True))
    task = TaskConfig(name="web", data="q.jsonl", parameters={"key": "secret"}, variables={"TOKEN": "secret"})
    engine, sglang = EngineConfig(kind="own", options={"key": "secret"}), SGLangConfig(environment={"TOKEN": "secret"})
    run = RunConfig(name="demo", tasks=(task,), engine=engine, sglang=sglang)
    backend_run = BackendRun("1", run, RunFolder(tmp_path))
    settings = backend_run.flatten_settings()
    assert "secret" not in str(settings) + str(backend_run.settings)
    assert settings["tasks.0.variables.TOKEN"] == HIDDEN
    assert settings["rl.steps"] == str(run.rl.steps)


def test_a_tracking_uri_with_a_password_is_refused() -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD"):
        MetricsConfig(mlflow_uri="https://me:secret@example.org")
