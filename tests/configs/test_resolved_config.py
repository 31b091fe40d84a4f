"""A run writes its resolved configuration to a file; the differences of two runs are lines of text."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.configs.load import list_differences, list_resume_conflicts, load_run, write_resolved
from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig, RocConfig, Sampling, SftConfig, SftFileConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import ClusterConfig, SandboxConfig
from asterism.configs.schema.run_config import PrepareConfig, RunConfig
from tests.engine.learner.learner_settings import make_learner

POSITIVE = st.integers(1, 2**40)
PREPARE = PrepareConfig(import_path="made.py:Made", parameters={"a": {"b": 1}})
BETAS = st.floats(0, 1, exclude_max=True)
SAMPLINGS = st.none() | st.builds(Sampling, top_k=st.integers(0, 9), top_p=st.floats(1e-9, 1))
RUNS = st.builds(
    RunConfig,
    name=st.text(st.characters(exclude_characters="/.", exclude_categories=["Cs"]), min_size=1),
    seed=st.integers(0, 2**40),
    runs_folder=st.text(),
    prepare=st.none()
    | st.builds(PrepareConfig, import_path=st.text(), parameters=st.fixed_dictionaries({"n": POSITIVE})),
    dialogue=st.builds(DialogueConfig, max_turns=POSITIVE),
    sampling=st.builds(Sampling, temperature=st.floats(1e-9, 1e9)),
    evaluation=st.builds(EvaluationConfig, sampling=SAMPLINGS),
    rl=st.builds(RlConfig, rollouts=st.integers(2, 8).map(lambda half: 2 * half), prompts=st.integers(1, 1000)),
    roc=st.builds(RocConfig, enabled=st.booleans(), penalty=st.sampled_from(["report", "release"])),
    sandbox=st.builds(SandboxConfig, time_limit_s=st.floats(1e-9, 1e9)),
    learner=st.builds(make_learner, lr=st.floats(1e-12, 10), betas=st.tuples(BETAS, BETAS)),
    cluster=st.builds(
        ClusterConfig, nodes=POSITIVE, key=st.just("/keys/cluster.key"), host=st.text(), port=st.integers(1024, 65_435)
    ),
)


class TestResolved:
    @pytest.mark.slow
    @given(run=RUNS)
    def test_loading_restores_a_written_configuration(self, tmp_path_factory: pytest.TempPathFactory, run: RunConfig):
        path = tmp_path_factory.getbasetemp() / "resolved.toml"
        write_resolved(run, path)
        assert load_run(path) == run

    @pytest.mark.parametrize(
        "texts",
        [
            {"tools": (), "system": ""},
            {"tools": (), "system": "Answer."},
            {"system": "A\n{tools}\nB"},
            {"tools": ("jupyter_code",), "system": 'Call {"name": "jupyter_code"}.', "instruction": "", "prefill": ""},
            {"answer_open": "[A]", "answer_close": "[/A]", "turn_separator": ""},
        ],
    )
    def test_loading_restores_the_texts_of_a_dialogue(self, tmp_path: Path, texts: dict[str, Any]):
        run = RunConfig(name="a", dialogue=DialogueConfig(**texts))
        assert not run.dialogue.has_default_texts
        write_resolved(run, tmp_path / "run.toml")
        assert load_run(tmp_path / "run.toml").dialogue == run.dialogue

    def test_the_resolved_file_contains_every_key_including_defaults(self, tmp_path: Path):
        path = tmp_path / "resolved.toml"
        run = RunConfig(name="a", prepare=PREPARE, evaluation=EvaluationConfig(sampling=Sampling()))
        write_resolved(run, path)
        everything = msgspec.json.decode(msgspec.json.encode(run))  # JSON turns tuples into lists, like TOML
        assert tomllib.loads(path.read_text()) == everything


class TestDifferences:
    def test_each_difference_is_a_line_with_both_values(self):
        a = RunConfig(name="a", learner=make_learner(lr=3e-3))
        b = RunConfig(name="b", learner=make_learner(lr=1e-4, betas=(0.5, 0.6)))
        assert list_differences(a, b) == [
            'name: "a" -> "b"',
            "learner.optimizer.lr: 0.003 -> 0.0001",
            "learner.optimizer.betas: [0.9, 0.95] -> [0.5, 0.6]",
        ]

    def test_a_table_of_only_one_run_is_one_line(self):
        assert list_differences(RunConfig(name="a"), RunConfig(name="a", prepare=PREPARE)) == [
            "prepare: nothing -> a table"
        ]

    def test_another_order_of_files_is_a_difference(self):
        files = (SftFileConfig(name="a", data="a.jsonl"), SftFileConfig(name="b", data="b.jsonl"))
        a, b = (RunConfig(name="r", sft=SftConfig(mixture=order)) for order in (files, files[::-1]))
        assert list_differences(a, b) == ["sft.mixture: order a, b -> b, a"]

    @pytest.mark.slow
    @given(a=RUNS, b=RUNS)
    def test_only_cluster_and_health_can_differ_in_a_resumed_run(self, a: RunConfig, b: RunConfig):
        moved = msgspec.structs.replace(a, cluster=b.cluster, health=b.health)
        assert list_resume_conflicts(a, moved) == []
        assert list_resume_conflicts(a, b) == [
            line for line in list_differences(a, b) if not line.startswith(("cluster.", "health."))
        ]

    @pytest.mark.slow
    @given(a=RUNS, b=RUNS)
    def test_differences_are_empty_exactly_if_configurations_are_equal(self, a: RunConfig, b: RunConfig):
        assert (list_differences(a, b) == []) == (a == b)
