"""Configuration: what is read, what is merged, and how every mistake is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, differences, load_resolved, load_run, obstacles, write_resolved
from configs.schema import Cluster, Dialogue, Learner, Rl, Roc, Run, Sampling, Sandbox, Tiny


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "my.toml"


def complaint(config: Path, text: str, *overrides: str) -> str:
    """What the loader says about `text`, without the folder of the test."""
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run(config, overrides)
    return str(caught.value).replace(f"{config.parent}/", "")


def loaded(config: Path, text: str, *overrides: str) -> Run:
    config.write_text(text)
    return load_run(config, overrides)


class TestLayers:
    def test_a_key_that_the_file_leaves_out_has_the_schemas_default(self, config: Path):
        assert loaded(config, 'name = "a"\n[rl]\nsteps = 7') == Run(name="a", rl=Rl(steps=7))

    def test_an_override_wins_over_the_file_and_a_later_one_over_an_earlier(self, config: Path):
        run = loaded(config, 'name = "a"\n[rl]\nsteps = 7\nprompts = 3', "rl.steps=8", "rl.steps=9")
        assert run.rl == Rl(steps=9, prompts=3)

    def test_an_override_may_give_what_the_file_lacks(self, config: Path):
        assert loaded(config, "", "name=from-the-flag").name == "from-the-flag"

    @pytest.mark.parametrize(
        ("override", "read"),
        [
            ("learner.lr=1e-4", lambda run: run.learner.lr == 1e-4),
            ("learner.lr=1", lambda run: run.learner.lr == 1.0),
            ("roc.enabled=false", lambda run: run.roc.enabled is False),
            ("roc.positives=lowest", lambda run: run.roc.positives == "lowest"),
            ('roc.positives="lowest"', lambda run: run.roc.positives == "lowest"),
            ("learner.betas=[0.8, 0.9]", lambda run: run.learner.betas == (0.8, 0.9)),
            ('dialogue.tools=["jupyter_code"]', lambda run: run.dialogue.tools == ("jupyter_code",)),
            ("rl={steps = 3}", lambda run: run.rl.steps == 3),
            ("name=ablation/roc", lambda run: run.name == "ablation/roc"),
            ("name=2024", lambda run: run.name == "2024"),
            ("model.checkpoint=a=b\nseed = 3", lambda run: run.model.checkpoint == "a=b\nseed = 3" and run.seed == 0),
            (" rl.steps = 4 ", lambda run: run.rl.steps == 4),
            ("tiny.num_layers=3", lambda run: run.tiny == Tiny(num_layers=3)),
        ],
    )
    def test_an_overrides_value_is_toml_or_else_the_bare_string(self, config: Path, override: str, read: Any):
        assert read(loaded(config, 'name = "a"', override))

    def test_a_preset_lies_beneath_the_files_own_values(self, config: Path):
        run = loaded(config, 'preset = "rstar2_release"\nname = "a"\n[roc]\nmin_per_class = 1\n', "rl.prompts=4")
        assert run.roc == Roc(penalty="release", positives="lowest", negatives="first", min_per_class=1)
        assert (run.rl.prompts, run.rl.rollouts, run.rl.refills) == (4, 32, 0)
        assert (run.dialogue.max_turns, run.dialogue.max_calls_per_turn, run.dialogue.result_characters) == (5, 1, 256)
        assert run.dialogue.result_format == "rstar2_release"

    def test_a_preset_can_be_chosen_on_the_command_line(self, config: Path):
        chosen = loaded(config, 'name = "a"', "preset=rstar2_release")
        assert chosen == loaded(config, 'name = "a"\npreset = "rstar2_release"')

    def test_every_preset_is_a_valid_configuration(self, config: Path):
        from configs.load import PRESETS

        names = [path.stem for path in PRESETS.glob("*.toml")]
        assert "rstar2_release" in names
        for name in names:
            assert loaded(config, 'name = "a"', f"preset={name}") != Run(name="a")

    def test_every_configuration_that_is_shipped_loads(self):
        for path in Path("configs").glob("*.toml"):
            assert load_run(path).name


class TestMistakes:
    def test_an_unknown_key_is_named_with_its_path_and_the_nearest_valid_one(self, config: Path):
        text = 'name = "a"\n[sandbox]\ntimelimit_s = 2'
        expected = "my.toml: unknown key `sandbox.timelimit_s`; did you mean `sandbox.time_limit_s`?"
        assert complaint(config, text) == expected

    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            ('nme = "a"', "`name`"),
            ("[sandbx]", "`sandbox`"),
            ("presett = 1", "`preset`"),
            ("max_turns = 3", "`dialogue.max_turns`"),  # the right key in the wrong table
            ("lr = 1", "`sft.lr` or `learner.lr`"),
            ("[learner]\ntimelimit_s = 1", "`sandbox.time_limit_s`"),
            ("[learner.muon]\nlr = 1", "`sft.muon_lr`"),
        ],
    )
    def test_the_nearest_key_is_sought_in_the_table_first_and_then_everywhere(
        self, config: Path, text: str, meant: str
    ):
        assert complaint(config, text).endswith(f"; did you mean {meant}?")

    def test_a_key_that_resembles_nothing_gets_no_suggestion(self, config: Path):
        assert complaint(config, "zzzzzz = 1") == "my.toml: unknown key `zzzzzz`"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("name = 3", "`name` must be a string, got 3"),
            ('[rl]\nsteps = "many"', '`rl.steps` must be an integer, got "many"'),
            ("[rl]\nsteps = 1.5", "`rl.steps` must be an integer, got 1.5"),
            ("[roc]\nenabled = 1", "`roc.enabled` must be true or false, got 1"),
            ("[learner]\nlr = 2026-01-01", "`learner.lr` must be a number, got 2026-01-01"),
            ("[learner]\nbetas = [1]", "`learner.betas` must be an array of length 2, got [1]"),
            ('[learner]\nbetas = [1, "x"]', '`learner.betas[1]` must be a number, got "x"'),
            ("[data]\ntrain = {}", "`data.train` must be a string, got a table"),
            ('[roc]\npenalty = "x"', '`roc.penalty` must be one of "report", "release", got "x"'),
            (
                '[dialogue]\ntools = ["jupyter_code", "x"]',
                '`dialogue.tools[1]` must be one of "jupyter_code", "python_code_with_standard_io", got "x"',
            ),
            ("rl = 3", "`rl` must be a table, got 3"),
            ("tiny = []", "`tiny` must be a table, got []"),
        ],
    )
    def test_an_ill_typed_value_is_told_what_is_expected_and_what_it_is(self, config: Path, text: str, said: str):
        assert complaint(config, text if text.startswith("name") else f'name = "a"\n{text}') == f"my.toml: {said}"

    def test_an_ill_typed_override_is_blamed_on_the_flag(self, config: Path):
        said = complaint(config, 'name = "a"\n[rl]\nsteps = 3', "rl.prompts=2", "rl.steps=x")
        assert said == '--set rl.steps=x: `rl.steps` must be an integer, got "x"'

    def test_a_failing_check_names_the_table_and_all_who_had_a_part_in_it(self, config: Path):
        said = complaint(config, 'name = "a"\n[rl]\nprompts = 3', "rl.rollouts=15", "seed=1")
        why = "rollouts must be even, Resample-on-Correct keeps half of them: 15"
        assert said == f"my.toml with --set rl.rollouts=15: `rl`: {why}"

    @pytest.mark.parametrize("key", ["executors", "max_queued_calls"])
    def test_an_executor_needs_to_exist_and_to_take_a_call(self, config: Path, key: str):
        said = complaint(config, f'name = "a"\n[sandbox]\n{key} = 0')
        assert said == f"my.toml: `sandbox`: {key} must be positive"

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("nodes = 0", "nodes must be positive"),
            ("learner_nodes = 0", "learner_nodes must lie between 1 and nodes = 1"),
            ("learner_nodes = 2", "learner_nodes must lie between 1 and nodes = 1"),
            ("nodes = 2", "nodes beyond the first need a key; `asterism keys FOLDER` makes its file"),
            ("port = 1023", "port must lie between 1024 and 65435, since 99 further ones are used"),
            ("port = 65436", "port must lie between 1024 and 65435, since 99 further ones are used"),
        ],
    )
    def test_a_cluster_that_cannot_be_is_refused(self, config: Path, text: str, why: str):
        assert complaint(config, f'name = "a"\n[cluster]\n{text}') == f"my.toml: `cluster`: {why}"

    def test_a_cluster_takes_the_first_and_the_last_port_that_leave_room_for_its_others(self, config: Path):
        for port in (1024, 65_435):
            assert loaded(config, 'name = "a"', f"cluster.port={port}").cluster.port == port

    def test_a_failing_check_of_the_whole_run_names_the_file(self, config: Path):
        assert complaint(config, 'name = ""') == "my.toml: name must not be empty"

    def test_a_missing_name_is_missed(self, config: Path):
        assert complaint(config, "seed = 1") == "my.toml: the key `name` is missing"

    def test_malformed_toml_is_refused_with_its_line(self, config: Path):
        said = complaint(config, 'name = "a"\n[rl\nsteps = 3')
        assert said.startswith("my.toml: is not valid TOML: ")
        assert "line 2" in said

    def test_a_file_that_is_not_text_is_refused(self, config: Path):
        config.write_bytes(b'name = "\xff"')
        with pytest.raises(ConfigError, match=r"my\.toml: is not UTF-8 text \(byte 8\)"):
            load_run(config)

    def test_a_missing_file_is_named(self, config: Path):
        with pytest.raises(ConfigError, match=r"my\.toml: cannot be read: No such file or directory"):
            load_run(config)

    def test_a_folder_is_no_configuration(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            load_run(tmp_path)

    @pytest.mark.parametrize("override", ["rl", "rl.steps", "=3", "rl.=3", ".steps=3", ""])
    def test_an_override_without_key_or_value_is_refused_with_an_example(self, config: Path, override: str):
        said = complaint(config, 'name = "a"', override)
        assert said == f"--set {override}: expected key.path=value, such as --set learner.lr=1e-4"

    def test_an_override_that_names_no_key_is_refused_with_the_nearest(self, config: Path):
        said = complaint(config, 'name = "a"', "learner.lrr=1")
        assert said == "--set learner.lrr=1: unknown key `learner.lrr`; did you mean `learner.lr`?"

    def test_an_override_does_not_hide_that_the_file_is_wrong(self, config: Path):
        assert complaint(config, 'name = "a"\nrl = 3', "rl.steps=4") == "my.toml: `rl` must be a table, got 3"

    def test_an_override_below_a_value_is_refused(self, config: Path):
        said = complaint(config, 'name = "a"', "rl.steps.x=1")
        assert said == "--set rl.steps.x=1: `rl.steps` must be an integer, got a table"

    @pytest.mark.parametrize("value", ['"rstar3"', "3", "[]"])
    def test_an_unknown_preset_is_answered_with_those_that_exist(self, config: Path, value: str):
        said = complaint(config, f'name = "a"\npreset = {value}')
        assert said == f"my.toml: unknown preset {value}; known are: rstar2_release"


class TestChecksAcrossTables:
    def test_a_cache_that_holds_no_trajectory_is_refused_with_the_number_it_needs(self, config: Path):
        said = complaint(config, 'name = "a"', "engine.kv_tokens=9000")
        assert "dialogue.prompt_tokens + response_tokens = 9216" in said

    def test_queues_in_which_two_processes_could_wait_for_each_other_are_refused(self, config: Path):
        said = complaint(config, 'name = "a"', "bus.queue_messages=1000")
        assert "bus.queue_messages must be at least 65536" in said

    def test_what_is_left_over_cannot_be_carried_into_a_step_of_one_version(self, config: Path):
        said = complaint(config, 'name = "a"', 'rl.leftovers="carry"')
        assert "needs a max_staleness of at least 1" in said
        ahead = ('rl.leftovers="carry"', "rl.max_staleness=1", "rl.prompts=8")
        assert loaded(config, 'name = "a"', *ahead).rl.leftovers == "carry"

    def test_strict_determinism_refuses_all_keys_that_let_a_run_depend_on_who_was_faster(self, config: Path):
        strict = ("determinism=strict", "rl.prompts=8")
        assert loaded(config, 'name = "a"', *strict).determinism == "strict"
        racing = {
            "rl.max_staleness=1": "rl.max_staleness = 0",
            "rl.oversubscribe=1.5": "rl.oversubscribe = 1.0",
            "engine.device=cuda": 'engine.device = "cpu"',
            "engine.dtype=bfloat16": 'engine.dtype = "float32"',
            "engine.threads=2": "engine.threads = 1",
        }
        for wrong, wanted in racing.items():
            said = complaint(config, 'name = "a"', *strict, wrong)
            assert f'determinism = "strict" needs {wanted} (' in said
            assert loaded(config, 'name = "a"', wrong, "rl.prompts=8").determinism == "fast"
        said = complaint(config, 'name = "a"', *strict, *racing)
        assert all(wanted in said for wanted in racing.values())

    def test_a_step_never_starts_fewer_groups_than_it_needs(self, config: Path):
        assert "oversubscribe must be at least 1" in complaint(config, 'name = "a"', "rl.oversubscribe=0.9")

    def test_queues_have_room_for_all_groups_that_may_be_under_way(self, config: Path):
        ahead = ("rl.max_staleness=1", "rl.oversubscribe=1.5", "rl.prompts=512", "bus.queue_messages=1000")
        assert "at least 196608" in complaint(config, 'name = "a"', *ahead)
        assert "at least 163840" in complaint(config, 'name = "a"', *ahead, 'rl.leftovers="carry"')


POSITIVE = st.integers(1, 2**40)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NOT_NEGATIVE = st.floats(0, 1e300)
RUNS = st.builds(
    Run,
    name=st.text(min_size=1),
    seed=st.integers(-(2**63), 2**63 - 1),
    runs_folder=st.text(),
    tiny=st.none() | st.builds(Tiny, num_layers=POSITIVE),
    dialogue=st.builds(
        Dialogue, tools=st.sampled_from([("jupyter_code",), ("python_code_with_standard_io",)]), max_turns=POSITIVE
    ),
    sampling=st.builds(Sampling, temperature=NOT_NEGATIVE, top_k=st.integers(0, 9)),
    rl=st.builds(Rl, rollouts=st.integers(1, 8).map(lambda half: 2 * half), prompts=st.integers(1, 1000)),
    roc=st.builds(Roc, enabled=st.booleans(), penalty=st.sampled_from(["report", "release"])),
    sandbox=st.builds(Sandbox, time_limit_s=st.floats(1e-9, 1e9)),
    learner=st.builds(Learner, lr=NUMBERS, betas=st.tuples(NUMBERS, NUMBERS)),
    cluster=st.builds(Cluster, nodes=POSITIVE, key=st.text(min_size=1), host=st.text(), port=st.integers(1024, 65_435)),
)


class TestResolved:
    @given(run=RUNS)
    def test_what_is_written_is_read_back_equal(self, tmp_path_factory: pytest.TempPathFactory, run: Run):
        path = tmp_path_factory.getbasetemp() / "resolved.toml"
        write_resolved(run, path)
        assert load_resolved(path) == run

    def test_the_resolved_file_holds_every_key_also_those_that_nobody_set(self, config: Path):
        import tomllib

        run = Run(name="a", tiny=Tiny())
        write_resolved(run, config)
        everything = msgspec.json.decode(msgspec.json.encode(run))  # tuples as lists, as TOML has them
        assert tomllib.loads(config.read_text()) == everything


class TestDifferences:
    def test_runs_that_are_configured_alike_do_not_differ(self):
        assert differences(Run(name="a"), Run(name="a")) == []

    def test_each_key_that_differs_is_a_line_with_both_values(self):
        a = Run(name="a", learner=Learner(lr=3e-3))
        b = Run(name="b", learner=Learner(lr=1e-4, betas=(0.5, 0.6)))
        assert differences(a, b) == [
            'name: "a" -> "b"',
            "learner.lr: 0.003 -> 0.0001",
            "learner.betas: [0.9, 0.95] -> [0.5, 0.6]",
        ]

    def test_a_table_that_only_one_run_has_is_one_line(self):
        assert differences(Run(name="a"), Run(name="a", tiny=Tiny())) == ["tiny: nothing -> a table"]

    @given(a=RUNS, b=RUNS)
    def test_a_run_can_go_on_with_another_cluster_and_with_no_other_difference(self, a: Run, b: Run):
        elsewhere = msgspec.structs.replace(a, cluster=b.cluster)
        assert obstacles(a, elsewhere) == []
        assert obstacles(a, b) == [line for line in differences(a, b) if not line.startswith("cluster.")]

    @given(a=RUNS, b=RUNS)
    def test_there_is_a_difference_exactly_where_the_runs_are_unequal(self, a: Run, b: Run):
        assert (differences(a, b) == []) == (a == b)
