"""Former names of keys are refused with the present names, rewritten in files, and accepted in run folders."""

import tomllib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.config_command import migrate_file
from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.loading.renamed_keys import RENAMED_KEYS, find_renamings, migrate, migrate_text
from asterism.configs.schema.run_config import PrepareConfig, RunConfig
from asterism.configs.schema.schema_tree import find_annotation

OLD = """# a run
name = "r"
rl = { rollouts = 4, prompts = 2 }

[learner]
ranks = 2
# a slow rate
lr = 1e-5  # 3e-5 diverges
loss = "gspo"
loss_mean = "sequence"
lora_rank = 4
betas = [
  0.9,
  0.99,
]

[evaluation]
temperature = 0.6
top_p = 1.0  # as in training

[[tasks]]
name = "t"
import = "tasks.bridges.mcp_tools:McpTools"
data = "rows.jsonl"
reward.functions = { tests = "tasks.rewards.unit_tests:score", own = "tasks.mine:score" }

[[stages]]
name = "a"
learner.warmup_steps = 0
"""
NEW = """# a run
name = "r"
rl = { rollouts = 4, prompts = 2 }

[learner]
ranks = 2
# a slow rate
optimizer.lr = 1e-5  # 3e-5 diverges
loss.function = "gspo"
loss.mean = "sequence"
lora.rank = 4
optimizer.betas = [
  0.9,
  0.99,
]

[evaluation]
sampling.temperature = 0.6
# as in training

[[tasks]]
name = "t"
import = "asterism.tasks.bridges.mcp_tools:McpTools"
data = "rows.jsonl"
reward.functions = { tests = "asterism.tasks.rewards.unit_tests:score", own = "tasks.mine:score" }

[[stages]]
name = "a"
learner.optimizer.warmup_steps = 0
"""


def test_only_present_names_are_keys() -> None:
    assert [new for new in RENAMED_KEYS.values() if find_annotation(RunConfig, new.split(".")) is None] == []
    former = [old for old in RENAMED_KEYS if find_annotation(RunConfig, old.split(".")) is not None]
    assert former == ["learner.loss"]  # this former key is now a table


def test_a_file_is_rewritten_with_its_comments(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(OLD)
    output = StringIO()
    migrate_file(tmp_path / "run.toml", Console(file=output, width=200))
    assert (tmp_path / "run.toml").read_text() == NEW
    assert "learner.lr -> learner.optimizer.lr\n" in output.getvalue()
    migrate_file(tmp_path / "run.toml", Console(file=output, width=200))
    assert (tmp_path / "run.toml").read_text() == NEW
    assert output.getvalue().endswith(": 0 names replaced\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("learner = { lr = 1, ranks = 2 }\n", "learner = { optimizer.lr = 1, ranks = 2 }\n"),
        ("evaluation = { temperature = 0, questions = 3 }", "evaluation = { questions = 3 }"),
        ("evaluation = { questions = 3, temperature = 0.0, top_k = 0 } # a", "evaluation = { questions = 3 } # a"),
        ("evaluation = { top_p = 1, every = 3, top_k = 2 }", "evaluation = { every = 3, sampling.top_k = 2 }"),
        ("evaluation = {top_p = 1,top_k = 0}", "evaluation = {}"),
    ],
)
def test_tables_on_one_line_are_rewritten(old: str, new: str) -> None:
    assert migrate_text(old) == new


def test_a_file_of_windows_keeps_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode())
    migrate_file(tmp_path / "run.toml", Console(file=StringIO()))
    assert (tmp_path / "run.toml").read_bytes() == NEW.replace("\n", "\r\n").encode()


PROGRAM = 'import = "asterism.tasks.tiny.prepare:TinyDemo"'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tiny = {}  # a\n", f"prepare.{PROGRAM}\nprepare.parameters = {{}}  # a\n"),
        ("tiny.num_layers = 1\n", f"prepare.{PROGRAM}\nprepare.parameters.num_layers = 1\n"),
        (
            "[rl]\n[tiny]  # a\nnum_layers = 1  # b\n[tiny.behaviors]\nclean = 1\n",
            f"[rl]\n[prepare]\n{PROGRAM}\n\n[prepare.parameters]  # a\nnum_layers = 1  # b\n"
            "[prepare.parameters.behaviors]\nclean = 1\n",
        ),
        ("[ tiny ]\r\nseed = 1\r\n", f"[prepare]\r\n{PROGRAM}\r\n\r\n[ prepare.parameters ]\r\nseed = 1\r\n"),
    ],
)
def test_the_table_of_the_demo_becomes_parameters_of_its_program(old: str, new: str) -> None:
    assert [each.new for each in find_renamings(tomllib.loads(old))] == ["prepare.parameters"]
    assert migrate_text(old) == new


def test_a_file_that_cannot_be_rewritten_line_by_line_is_refused_and_stays_unchanged(tmp_path: Path) -> None:
    text = '"learner" = { "lr" = 1 }\n'
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"rename by hand: learner.lr -> learner.optimizer.lr"):
        migrate_file(tmp_path / "run.toml", Console(file=StringIO()))
    assert (tmp_path / "run.toml").read_text() == text


def test_the_configuration_of_an_earlier_run_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    text = 'name = "r"\n[learner]\nlr = 0.5\nclip_low = 0.1\nloss = "grpo"\n[evaluation]\ntemperature = 0.0\ntop_k = 3\n[sampling]\ntemperature = 0.7\n[tiny]\nnum_layers = 3\n'
    (tmp_path / "config.toml").write_text(text)
    run = load_run(tmp_path / "config.toml")
    assert run.learner.optimizer.lr == 0.5
    assert (run.learner.loss.function, run.learner.loss.clip_low) == ("grpo", 0.1)
    assert run.prepare == PrepareConfig(
        import_path="asterism.tasks.tiny.prepare:TinyDemo", parameters={"num_layers": 3}
    )
    assert run.evaluation.sampling is not None
    assert (run.evaluation.sampling.temperature, run.evaluation.sampling.top_k) == (0.7, 3)


def test_a_parsed_configuration_is_migrated_like_its_text() -> None:
    table = tomllib.loads(OLD)
    migrate(table)
    assert table == tomllib.loads(NEW)


def test_import_paths_without_a_present_one_stay() -> None:
    text = (
        'rl.group_filter = "policies.groups.advantages:load_group_filter"\nreward.functions.a = "tasks.rewards:score"\n'
    )
    assert migrate_text(text) == text
