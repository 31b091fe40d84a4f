"""`asterism eval` makes its configuration from a run's checkpoint, a model's folder or URLs, and from its options; it
refuses unusable folders."""

from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asterism.actors.cli import eval_command
from asterism.actors.cli.eval_command import run_evaluation
from asterism.actors.evaluation.evaluation_run import EvalOptions, ServerOptions, build_evaluation_setup, split_settings
from asterism.actors.evaluation.provenance import Provenance, compute_provenance, describe_weights, keep_provenance
from asterism.actors.evaluation.result_files import find_over_limit
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import OpenAIConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.engine_code import find_evaluated_models
from tests.actors.cli.invoking import check_golden_refusals
from tests.engine.data.cold_start_rows import write_rows

MESSAGES = Path(__file__).with_name("eval_messages.txt")
TRAINED = (
    *("name=trained", "seed=5", "prepare.import=a.py:A", "rl.max_staleness=1", "rl.prompts=2", "dialogue.max_turns=7"),
    *("evaluation.every=2", "evaluation.sampling.temperature=0.5", "evaluation.response_tokens=9000"),
    *("learner.lora.rank=4", "learner.lora.publish=adapters"),
)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def write_questions(path: Path, count: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_rows(path, *({"question": f"{number}?", "answer": "1"} for number in range(count)))


@pytest.fixture
def trained(tmp_path: Path) -> RunFolder:
    """Make a run with a checkpoint after 40 steps."""
    folder = RunFolder(tmp_path / "runs" / "trained")
    write_model(folder.get_checkpoint_path(40))
    write_questions(folder.data / "test.jsonl")
    write_resolved(load_run(None, TRAINED), folder.config)
    return folder


def build(target: Path | str, *settings: str, **options: Any) -> RunConfig:
    return build_evaluation_setup(EvalOptions([str(target)], settings, **options)).run


def test_an_evaluation_has_the_settings_of_the_run_and_no_training(trained: RunFolder, tmp_path: Path) -> None:
    file = write_questions(tmp_path / "aime.jsonl", 30)
    run = build(trained.path, f"aime24={file}", samples=32)
    assert (run.name, run.runs_folder) == ("eval-trained-40", str(tmp_path / "runs"))
    assert (run.seed, run.dialogue.max_turns, run.prepare) == (5, 7, None)
    assert run.model.checkpoint == str(trained.get_checkpoint_path(40))
    assert (run.rl.steps, run.sft.steps, run.rl.max_staleness, run.learner.lora.rank) == (0, 0, 0, 0)
    assert run.evaluation.only
    assert (run.dialogue.response_tokens, run.sequence_tokens) == (8192, 1024 + 9000)
    assert (run.evaluation_sampling.temperature, run.evaluation.intervals) == (0.5, (0,))
    (found,) = run.resolved_evaluation_sets
    assert (found.name, found.data, found.questions, found.samples) == ("aime24", str(file), 30, 32)


def test_an_evaluation_without_sets_has_the_questions_of_the_run(trained: RunFolder) -> None:
    (unnamed,) = build(trained.path).resolved_evaluation_sets
    assert (unnamed.name, unnamed.data, unnamed.samples) == ("", str(trained.data / "test.jsonl"), 1)
    (named,) = build(trained.path, samples=4, questions=2).resolved_evaluation_sets
    assert (named.name, named.data) == ("test", str(trained.data / "test.jsonl"))
    assert (named.samples, named.questions) == (4, 2)


def test_a_run_that_carries_groups_can_be_evaluated(trained: RunFolder) -> None:
    config = Path("configs/single_node.toml")
    assert load_run(config).rl.surplus_groups == "carry"
    assert build(trained.path, config=config).rl.surplus_groups == "abort"


def test_an_evaluation_without_a_question_is_refused(trained: RunFolder) -> None:
    write_resolved(load_run(None, (*TRAINED[:-1], "evaluation.every=0", "evaluation.questions=0")), trained.config)
    with pytest.raises(UnusableInput, match="give --questions N or --set NAME=FILE"):
        build(trained.path, samples=4)
    assert build(trained.path, questions=2).evaluation.questions == 2


def test_sets_of_the_run_keep_their_tasks_and_samples_unless_others_are_given(
    trained: RunFolder, tmp_path: Path
) -> None:
    rows = write_questions(tmp_path / "rows.jsonl", 4)
    tasks = f'tasks=[{{name="a", data="{rows}"}}, {{name="b", data="{rows}"}}]'
    sets = f'evaluation.sets=[{{name="x", data="{rows}", task="b", samples=3, every=5}}]'
    write_resolved(load_run(None, (*TRAINED, tasks, sets)), trained.config)
    (known,) = build(trained.path).resolved_evaluation_sets
    assert (known.task, known.samples, known.every, known.questions) == ("b", 3, 0, 512)
    (other,) = build(trained.path, f"x={write_questions(tmp_path / 'other.jsonl', 2)}", samples=2).evaluation.sets
    assert (other.task, other.samples, other.questions) == ("b", 2, 2)


@pytest.mark.parametrize(("temperature", "during"), [(0.0, "greedy"), (0.7, "sampled"), (None, "sampled")])
def test_a_temperature_of_0_asks_for_greedy_answers(trained: RunFolder, temperature: float | None, during: str) -> None:
    assert build(trained.path, temperature=temperature).evaluation.during == during


def test_queues_have_room_for_all_answers(trained: RunFolder, tmp_path: Path) -> None:
    file = write_questions(tmp_path / "many.jsonl", 2000)
    assert build(trained.path, f"many={file}", samples=32).bus.queue_messages == 4 * 32 * 2000


def test_keys_of_the_configuration_and_names_of_sets_are_distinguished() -> None:
    settings = ["aime24=a.jsonl", "seed=3", "stages.a.seed=2", "amc=~/b.jsonl", " gpqa.diamond=c.jsonl"]
    files, overrides = split_settings(settings)
    paths = Path.cwd() / "a.jsonl", Path("~/b.jsonl").expanduser(), Path.cwd() / "c.jsonl"
    assert files == dict(zip(("aime24", "amc", "gpqa.diamond"), paths, strict=True))
    assert overrides == ["seed=3", "stages.a.seed=2"]


def test_a_limit_that_the_run_would_override_is_refused_with_the_effective_key(
    trained: RunFolder, tmp_path: Path
) -> None:
    rows = f"rows={write_questions(tmp_path / 'rows.jsonl')}"
    with pytest.raises(
        UnusableInput, match=r"--set dialogue\.response_tokens .* has evaluation\.response_tokens = 9000"
    ):
        build(trained.path, rows, "dialogue.response_tokens=99")
    run = build(trained.path, rows, "dialogue.response_tokens=99", "evaluation.response_tokens=98")
    assert run.limit_evaluated_response(run.resolved_tasks[0]) == 98


def test_a_stage_of_the_configuration_can_be_chosen(tmp_path: Path) -> None:
    config = tmp_path / "staged.toml"
    config.write_text(
        'name = "staged"\n[[stages]]\nname = "short"\n[[stages]]\nname = "long"\ndialogue.response_tokens = 8192\n'
    )
    model, file = write_model(tmp_path / "qwen"), write_questions(tmp_path / "rows.jsonl")
    assert build(model, f"rows={file}", "stage=long", config=config).dialogue.response_tokens == 8192


def test_a_model_without_a_run_has_the_defaults_and_the_given_keys(tmp_path: Path) -> None:
    model, file = write_model(tmp_path / "qwen"), write_questions(tmp_path / "rows.jsonl")
    run = build(model, f"rows={file}", "dialogue.max_turns=3", f"runs_folder={tmp_path}")
    assert (run.name, run.runs_folder, run.dialogue.max_turns) == ("eval-qwen", str(tmp_path), 3)


def test_each_url_is_a_separate_server(tmp_path: Path) -> None:
    file = write_questions(tmp_path / "rows.jsonl")
    urls = ["http://10.0.0.1:30000/", "http://10.0.0.2:30000"]
    run = build_evaluation_setup(EvalOptions(urls, [f"rows={file}", "model.checkpoint=/model"])).run
    assert (run.engine.kind, run.engine.num_engines, run.engine.kv_tokens) == ("sglang", 2, 0)
    assert run.sglang.external_urls == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    assert (run.name, run.model.checkpoint) == ("eval-10.0.0.1-30000", "/model")


def test_urls_with_a_path_belong_to_servers_with_openai_s_api(trained: RunFolder, tmp_path: Path) -> None:
    urls = ["http://10.0.0.1:8000/v1/", "https://models.example/api/v1"]
    server = ServerOptions(tmp_path / "tokenizer", "qwen", "MY_KEY")
    setup = build_evaluation_setup(EvalOptions(urls, ["engine.max_running=8"], trained.config, server=server))
    run = setup.run
    engine = run.engine
    assert (engine.kind, engine.num_engines, engine.kv_tokens, engine.max_running) == ("openai", 2, 0, 8)
    assert run.openai == OpenAIConfig(("http://10.0.0.1:8000/v1", urls[1]), "qwen", "MY_KEY")
    assert (run.servers.urls, run.sglang.external_urls) == (run.openai.urls, ())
    assert (run.name, run.model.checkpoint) == ("eval-10.0.0.1-8000-v1", str(tmp_path / "tokenizer"))
    assert describe_weights(setup.weights, {"model": "qwen"}) == {"urls": urls, "model": "qwen"}


def test_a_server_that_does_not_respond_is_named() -> None:
    url = "http://127.0.0.1:1"
    run = load_run(None, ["name=a", "engine.kind=sglang", f'sglang.external_urls=["{url}"]'])
    with pytest.raises(UnusableInput, match=f"^{url}: "):
        find_evaluated_models(run)


def test_unusable_arguments_are_refused_before_an_evaluation_has_a_folder(trained: RunFolder) -> None:
    RunFolder(trained.path.parent / "eval-trained-40").path.mkdir()
    runs = sorted(trained.path.parent.rglob("*"))
    check_golden_refusals(MESSAGES, {str(trained.path): "TRAINED", str(trained.path.parent): "RUNS"})
    assert sorted(trained.path.parent.rglob("*")) == runs


def test_weights_and_questions_are_fixed_at_the_first_start(trained: RunFolder, tmp_path: Path) -> None:
    file, folder = write_questions(tmp_path / "rows.jsonl"), RunFolder(tmp_path)
    setup = build_evaluation_setup(EvalOptions([str(trained.path)], [f"rows={file}"]))
    first = compute_provenance(*setup)
    keep_provenance(folder, first)
    keep_provenance(folder, compute_provenance(*setup))
    assert first.weights["step"] == 40
    (trained.get_checkpoint_path(40) / "model.safetensors").write_text("[]")
    write_questions(file, 4)
    with pytest.raises(UnusableInput, match=r"model\.checkpoint and evaluation\.sets\.rows\.data has changed"):
        keep_provenance(folder, compute_provenance(*setup))


# ---------------------------------------------------------------- the folder


def run_command(target: Path, *, resume: bool = False, overwrite: bool = False, **options: Any) -> int:
    return run_evaluation(EvalOptions([str(target)], **options), resume=resume, overwrite=overwrite, console=Console())


def test_another_run_that_trains_is_not_overwritten(trained: RunFolder) -> None:
    other = RunFolder(trained.path.parent / "other")
    other.path.mkdir()
    write_resolved(load_run(None, (*TRAINED, "name=other")), other.config)
    with pytest.raises(UnusableInput, match=r"runs/other: is no evaluation, .* with --name"):
        run_command(trained.path, name="other", overwrite=True)
    assert other.config.exists()


def test_resume_does_not_start_an_evaluation_of_a_later_step(trained: RunFolder) -> None:
    RunFolder(trained.path.parent / "eval-trained-40").path.mkdir()
    write_model(trained.get_checkpoint_path(50))
    with pytest.raises(UnusableInput, match=r"runs/eval-trained-50: no evaluation to --resume; .* as in RUN:40"):
        run_command(trained.path, resume=True)


def test_a_full_disk_at_the_write_of_results_ends_the_command_with_a_hint(
    trained: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise DiskError("traces.jsonl.new", ENOSPC)

    monkeypatch.setattr(eval_command, "write_results", write)
    monkeypatch.setattr(eval_command, "compute_provenance", lambda *_: Provenance({}, {}))
    monkeypatch.setattr(eval_command, "_answer_questions", lambda *_: "finished")
    for name in ("check_inputs", "configure_logging"):
        monkeypatch.setattr(eval_command, name, lambda *_: [])
    assert run_command(trained.path) == 1
    assert "No space left on device\n(--resume continues" in capsys.readouterr().out


# ---------------------------------------------------------------- weights and questions


def test_skipped_questions_precede_the_last_question_of_a_limited_set() -> None:
    names = ["a", "b", "c", "d"]
    assert find_over_limit(names, {"a", "c"}, 2) == ["b"]
    assert find_over_limit(names, {"a", "c"}, 3) == ["b", "d"]
    assert find_over_limit(names, set(), 3) == names
