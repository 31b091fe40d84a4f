"""Configurations are loaded and merged, and every mistake has an error message."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asterism.configs.load import list_differences, list_preset_changes, load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.algorithm import RlConfig, RocConfig, Sampling
from asterism.configs.schema.run_config import DataConfig, PrepareConfig, RunConfig

COPIES = ("learner.ranks=3", "learner.dp_replicate=2", "cluster.nodes=2", "cluster.learner_nodes=2", "cluster.key=key")
DEPENDS_ON_TIMING = (
    *("rl.max_staleness=1", "rl.group_oversampling=1.5", "engine.device=cuda", "learner.device=cuda"),
    *("engine.dtype=bfloat16", "engine.threads=2"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "my.toml"


def load_error(config: Path, text: str, *overrides: str) -> str:
    """Return the error message for a file with `text`; the path of the test's folder is removed."""
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run(config, overrides)
    return str(caught.value).replace(f"{config.parent}/", "")


def load(config: Path, text: str, *overrides: str) -> RunConfig:
    config.write_text(text)
    return load_run(config, overrides)


class TestLayers:
    def test_a_missing_key_has_the_default_of_the_schema(self, config: Path):
        assert load(config, 'name = "a"\n[rl]\nsteps = 7') == RunConfig(name="a", rl=RlConfig(steps=7))

    def test_overrides_take_precedence_over_the_file_and_later_overrides_over_earlier_ones(self, config: Path):
        run = load(config, 'name = "a"\n[rl]\nsteps = 7\nprompts = 3', "rl.steps=8", "rl.steps=9")
        assert run.rl == RlConfig(steps=9, prompts=3)

    def test_an_override_can_set_a_key_that_the_file_lacks(self, config: Path):
        assert load(config, "", "name=from-the-flag").name == "from-the-flag"

    @pytest.mark.parametrize(
        ("override", "read"),
        [
            ("learner.optimizer.lr=1e-4", lambda run: run.learner.optimizer.lr == 1e-4),
            ("learner.optimizer.lr=1", lambda run: run.learner.optimizer.lr == 1.0),
            ("roc.enabled=false", lambda run: run.roc.enabled is False),
            ("roc.positives=lowest", lambda run: run.roc.positives == "lowest"),
            ('roc.positives="lowest"', lambda run: run.roc.positives == "lowest"),
            ("learner.optimizer.betas=[0.8, 0.9]", lambda run: run.learner.optimizer.betas == (0.8, 0.9)),
            ('dialogue.tools=["jupyter_code"]', lambda run: run.dialogue.tools == ("jupyter_code",)),
            ("rl={steps = 3}", lambda run: run.rl.steps == 3),
            ("name=ablation/roc", lambda run: run.name == "ablation/roc"),
            ("name=2024", lambda run: run.name == "2024"),
            ("cluster.host=a=b\nseed = 3", lambda run: run.cluster.host == "a=b\nseed = 3" and run.seed == 0),
            (" rl.steps = 4 ", lambda run: run.rl.steps == 4),
            (
                "prepare.import=asterism.tasks.tiny.prepare:TinyDemo",
                lambda run: run.prepare == PrepareConfig(import_path="asterism.tasks.tiny.prepare:TinyDemo"),
            ),
        ],
    )
    def test_an_override_value_is_toml_or_a_bare_string(self, config: Path, override: str, read: Any):
        assert read(load(config, 'name = "a"', override))

    def test_values_of_the_file_take_precedence_over_the_preset(self, config: Path):
        run = load(config, 'preset = "rstar2_release"\nname = "a"\n[roc]\nmin_positives = 1\n', "rl.prompts=4")
        chosen = RocConfig(penalty="release", positives="lowest", negatives="first", min_positives=1, min_negatives=2)
        assert run.roc == msgspec.structs.replace(chosen, keep=16)
        assert (run.rl.prompts, run.rl.rollouts, run.rl.max_refill_groups) == (4, 32, 0)
        assert (run.dialogue.max_turns, run.dialogue.max_calls_per_turn, run.dialogue.result_characters) == (5, 1, 256)
        assert run.dialogue.result_format == "rstar2_release"
        learner = run.learner
        assert (learner.loss.mean, learner.loss.clip_dual, learner.minibatches) == ("tokens", 3.0, 1)
        assert (learner.loss.old_logprobs, learner.loss.correction) == ("recomputed", "none")
        calls = (run.dialogue.surplus_calls, run.dialogue.unclosed_call, run.dialogue.graded_text)
        assert calls == ("ignore", "ignore", "response")
        assert (run.dialogue.prompt_tokens, run.learner.optimizer.warmup_steps, run.acceptance) == (2048, 20, "any")
        assert (learner.optimizer.betas, learner.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
        assert load(config, 'name = "a"', "preset=rstar2_release").rl.prompts == 128

    def test_a_preset_can_be_set_on_the_command_line(self, config: Path):
        chosen = load(config, 'name = "a"', "preset=rstar2_release")
        assert chosen == load(config, 'name = "a"\npreset = "rstar2_release"')

    def test_the_keys_with_other_values_than_the_presets_are_listed(self, config: Path):
        run = load(
            config, 'name = "a"\n[roc]\nenabled = true\n[learner.optimizer]\nbetas = [0.9, 0.95]\n', "preset=cispo"
        )
        assert list_preset_changes(config, ["preset=cispo"], run) == ["roc.enabled: false -> true"]
        assert list_preset_changes(config, [], run) == []

    def test_every_preset_is_a_valid_configuration(self, config: Path):
        from asterism.configs.load import PRESETS_FOLDER

        names = {path.stem for path in PRESETS_FOLDER.glob("*.toml")}
        unchanged = {name for name in names if load(config, 'name = "a"', f"preset={name}") == RunConfig(name="a")}
        assert unchanged == {"grpo_roc"}  # the values of this preset are the defaults

    def test_every_shipped_configuration_loads(self):
        for path in Path("configs").glob("*.toml"):
            assert load_run(path).name

    def test_the_mixture_has_the_reports_number_of_dialogues_of_each_kind(self):
        weights = {each.name: each.weight for each in load_run(Path("configs/rstar2_cold_start.toml")).sft.mixture}
        calls = [weights[name] for name in ("toolace", "apigen_mt", "glaive", "code")]
        assert (sum(calls), weights["instructions"], weights["chat"]) == (165, 30, 27)
        assert len(weights) == 6


class TestErrors:
    @pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "5")])
    def test_truncated_sampling_is_accepted_for_evaluations(self, config: Path, key: str, value: str):
        run = load(config, 'name = "a"', f"evaluation.sampling.{key}={value}", "sampling.temperature=0.5")
        assert run.sampling == Sampling(temperature=0.5)
        assert run.evaluation_sampling == replace(run.sampling, **{key: json.loads(value)})
        assert load(config, 'name = "a"', f"sampling.{key}={value}", "rl.steps=0").rl.steps == 0

    def test_an_evaluation_set_inherits_the_number_of_questions_and_the_first_task(self, config: Path):
        text = 'name = "a"\n[[evaluation.sets]]\nname = "t"\ndata = "rows.jsonl"'
        (found,) = load(config, text, "evaluation.questions=7").resolved_evaluation_sets
        assert (found.name, found.data, found.task, found.questions) == ("t", str(config.parent / "rows.jsonl"), "", 7)

    def test_queues_have_room_for_an_evaluation_and_a_set_has_its_own_interval(self, config: Path):
        text = 'name = "a"\n[[evaluation.sets]]\nname = "t"\ndata = "rows.jsonl"\nsamples = 64\nevery = 5'
        run = load(config, text, "bus.queue_messages=196608")
        assert (run.evaluation.intervals, run.num_weight_versions) == ((5,), 2)
        assert [step for step in range(12) if run.evaluation.is_saved(step)] == [0, 5, 10]

    def test_the_first_and_the_last_valid_port_are_accepted(self, config: Path):
        for port in (1024, 65_435):
            assert load(config, 'name = "a"', f"cluster.port={port}").cluster.port == port

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'name = "a"\n[rl\nsteps = 3', "is not valid TOML: .*line 2"),
            (b'name = "\xff"', r"is not UTF-8 text \(byte 8\)"),
            ('name = "a"'.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
            (None, "cannot be read: No such file or directory"),
        ],
    )
    def test_an_unreadable_file_is_refused_by_name(self, config: Path, content: bytes | None, message: str):
        if content is not None:
            config.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"my\.toml: {message}"):
            load_run(config)

    def test_a_byte_order_mark_is_ignored(self, config: Path):
        config.write_text('name = "a"', encoding="utf-8-sig")
        assert load_run(config).name == "a"

    def test_paths_in_files_are_relative_to_the_file_and_paths_in_flags_to_the_current_folder(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        text = 'name = "a"\n[data]\ntrain = "train.jsonl"\ntest = "../test.jsonl"\n[sft]\ndata = "$RUN/sft.jsonl"'
        run = load(config, text, "model.checkpoint=models/mine")
        assert run.data == DataConfig(train=f"{tmp_path}/train.jsonl", test=f"{tmp_path.parent}/test.jsonl")
        assert run.sft.data == "$RUN/sft.jsonl"
        assert run.model.checkpoint == f"{tmp_path}/elsewhere/models/mine"

    def test_a_folder_in_place_of_a_file_is_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            load_run(tmp_path)


class TestChecksAcrossTables:
    @pytest.mark.parametrize(
        "settings",
        [
            ("sampling.temperature=0", "rl.steps=0"),
            ('rl.surplus_groups="carry"', "rl.max_staleness=1", "rl.prompts=8"),
            *((settings, "roc.enabled=false") for settings in ("rl.rollouts=2", "roc.keep=1")),
            *(("rl.rollouts=8", settings, "roc.enabled=false") for settings in ("roc.keep=9", "roc.min_positives=4")),
            ("roc.keep=8", "roc.min_negatives=8", "roc.enabled=false"),
            *(COPIES, ("determinism=strict", "rl.prompts=8")),
            *((setting, "rl.prompts=8") for setting in DEPENDS_ON_TIMING),
        ],
    )
    def test_compatible_settings_are_accepted(self, config: Path, settings: tuple[str, ...]):
        assert load(config, 'name = "a"', *settings) != load(config, 'name = "a"')

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("old_logprobs", ["auto", "engine", "recomputed"])
    @pytest.mark.parametrize("correction", ["auto", "none", "tis", "icepop", "decoupled"])
    def test_stale_tokens_without_a_correction_are_refused(
        self, config: Path, dtype: str, old_logprobs: str, correction: str
    ):
        settings = (
            f'engine.dtype="{dtype}"',
            f'learner.loss.old_logprobs="{old_logprobs}"',
            f'learner.loss.correction="{correction}"',
            "rl.prompts=8",
        )
        if old_logprobs == "engine" and correction not in ("auto", "none"):
            assert "recomputed" in load_error(config, 'name = "a"', *settings)
            return
        assert load(config, 'name = "a"', *settings).rl.max_staleness == 0
        # In float32, "auto" means the engine's log probabilities, unless a correction needs recomputed ones.
        is_engine = old_logprobs == "engine" or (
            old_logprobs == "auto" and dtype == "float32" and correction in ("auto", "none")
        )
        is_exact = dtype == "float32" and correction == "auto"
        if is_engine or (correction != "none" and not is_exact):
            assert load(config, 'name = "a"', *settings, "rl.max_staleness=1").rl.max_staleness == 1
            return
        message = load_error(config, 'name = "a"', *settings, "rl.max_staleness=1")
        assert "rl.max_staleness = 1 needs an importance correction" in message
        assert 'learner.loss.correction is "none"' in message


def test_the_lora_demo_differs_from_the_demo_only_in_adapters_and_learning_rate() -> None:
    differences = list_differences(load_run(Path("configs/tiny.toml")), load_run(Path("configs/tiny_lora.toml")))
    changed = {difference.partition(":")[0] for difference in differences}
    assert changed == {"name", "learner.lora.rank", "learner.optimizer.lr"}
