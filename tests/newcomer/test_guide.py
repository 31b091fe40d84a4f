"""Runs all commands of docs/guide.md in order, in one folder. The demo's model and questions are the user's files.

A nightly walk has a real model, with its tokenizer and its weights.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asterism.configs.run_folder import RunFolder, StagesFolder
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.tasks.tiny.prepare import TinyDemo
from tests.actors.runs.running import ASTERISM, PATIENCE_S, metrics, read_conserved_summary
from tests.engine.export.smollm2 import copy_smollm2
from tests.newcomer.printed_commands import ROOT, find_need, list_printed_commands
from tests.sglang.environment import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]  # one walk for all tests

PAGE = ROOT / "docs" / "guide.md"
COMMANDS = list_printed_commands(PAGE)
RUN, RESUME = "asterism run math.toml", "asterism run math.toml --resume"
RENDER = "asterism data render math.toml --source train"
# Replacements in the printed configuration and commands: smaller sizes, and CPUs instead of GPUs.
SIZES = {
    "prompt_tokens = 1024": "prompt_tokens = 32\nmax_turns = 4\nresult_characters = 256",
    "\nresponse_tokens = 4096": "\nresponse_tokens = 128",
    "dialogue.response_tokens = 8192": "dialogue.response_tokens = 160",
    "epochs = 2": 'steps = 150\nbatch_size = 32\noptimizer = "muon"\nmuon_lr = 0.03\nlr = 3e-3',
    "[rl]\nsteps = 100": "[rl]\nsteps = 2",
    "prompts = 32": "prompts = 4",
    "rollouts = 16": "rollouts = 8",
    '[engine]\ndevice = "cuda"\ndtype = "bfloat16"\nkv_tokens = 65_536': "[engine]\nkv_tokens = 8192",
    '[learner]\ndevice = "cuda"\ndtype = "bfloat16"\n\n[learner.memory]\nmicro_batch_tokens = 9216': "[learner]\nthreads = 1",
    "questions = 200\nevery = 10": 'questions = 16\nevery = 1\n\n[sandbox]\nbackend = "process"\nspare_notebooks = 8',
}
# The same for a real model, which has more tokens in each text.
REAL_SIZES = {
    **SIZES,
    "prompt_tokens = 1024": """prompt_tokens = 96
system = 'Compute with "jupyter_code". Then answer in <answer>\\boxed{}</answer>.'
instruction = ""
max_turns = 2""",
    "\nresponse_tokens = 4096": "\nresponse_tokens = 160",
    "dialogue.response_tokens = 8192": "dialogue.response_tokens = 192",
    "epochs = 2": "steps = 8\nbatch_size = 4\nlr = 2e-4\nwarmup_steps = 2",
    "prompts = 32": "prompts = 2",
    "rollouts = 16": "rollouts = 4",
    "questions = 200\nevery = 10": 'questions = 2\nevery = 1\n\n[sandbox]\nbackend = "process"\nspare_notebooks = 4',
}


class Base(NamedTuple):
    """A user's initial model, and the sizes of a walk with it."""

    sizes: dict[str, str]
    num_sft_dialogues: int
    sft_steps: int
    final_loss: float  # divided by the first loss
    test_questions: int


DEMO = Base(SIZES, 4800, 150, 0.1, 16)
SMOLLM2 = Base(REAL_SIZES, 200, 8, 0.5, 2)
SMOLLM2_NIGHTLY = pytest.param(SMOLLM2, marks=pytest.mark.nightly)


class Walk(NamedTuple):
    base: Base
    folder: Path
    printed: dict[str, str]  # output by printed command; commands that need a server are left out

    def render_prompt(self, question: str) -> list[int]:
        """Return the token ids of the exported template."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "models" / "mine")
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    @property
    def stages(self) -> list[RunFolder]:
        return StagesFolder(self.folder / "runs" / "math").list_begun()


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files_of_a_user(folder: Path, base: Base) -> None:
    """Write the files. The last raw questions are a duplicate, an exam question, and one without an integer answer."""
    made = RunFolder(folder / "made")
    tiny = TinyDemo(
        num_train_questions=160, num_test_questions=base.test_questions, num_sft_dialogues=base.num_sft_dialogues
    )
    tiny.prepare(RunConfig(name="made", dialogue=DialogueConfig(tools=("jupyter_code",))), made)
    (folder / "models").mkdir()
    if base is SMOLLM2:
        copy_smollm2(folder / "models" / "base")
    else:
        (made.checkpoints / "init").rename(folder / "models" / "base")
    (made.data / "sft.jsonl").rename(folder / "dialogues.jsonl")
    (made.data / "test.jsonl").rename(folder / "exam.jsonl")
    rows, [examined, *_] = read_rows(made.data / "train.jsonl"), read_rows(folder / "exam.jsonl")
    write_rows(folder / "raw.jsonl", [*rows, rows[0], examined, {"question": "Which city?", "answer": "Rome"}])


def write_printed_configuration(folder: Path, sizes: dict[str, str]) -> None:
    [printed] = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    text = re.sub(r" +#.*", "", printed)
    for size, small in sizes.items():
        assert text.count(size) == 1, size
        text = text.replace(size, small)
    (folder / "math.toml").write_text(text)


def start(folder: Path, command: str, *more: str) -> "subprocess.Popen[str]":
    name, *arguments = shlex.split(command)
    assert name == "asterism"
    return subprocess.Popen(
        [*ASTERISM, *arguments, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a command, which must succeed. Return its output."""
    with process:
        try:
            output, _ = process.communicate(timeout=3 * PATIENCE_S)  # training a real model takes minutes
        finally:
            process.kill()
    assert process.returncode == 0, f"{process.args}\n{output}"
    return output


@pytest.fixture(scope="module", params=[DEMO, SMOLLM2_NIGHTLY], ids=["demo", "smollm2"])
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    base: Base = request.param
    folder = tmp_path_factory.mktemp("guide")
    write_files_of_a_user(folder, base)
    write_printed_configuration(folder, base.sizes)
    printed: dict[str, str] = {}
    for command in COMMANDS:
        if not find_need(command):
            printed[command] = finish(start(folder, command.replace("--test 200", f"--test {base.test_questions}")))
    return Walk(base, folder, printed)


def test_the_data_are_cleaned_and_split(walk: Walk) -> None:
    reasons = [row["reason"] for row in read_rows(walk.folder / "clean.removed.jsonl")]
    assert sorted(reasons) == ["answer", "duplicate", "overlap"]
    train, test = (
        {row["question"] for row in read_rows(walk.folder / f"data/{name}.jsonl")} for name in ("train", "test")
    )
    assert len(test) == walk.base.test_questions
    assert len(train | test) == len(train) + len(test) == 160


def test_the_cold_start_learns_the_dialogues_and_later_stages_run(walk: Walk) -> None:
    short, long = walk.stages
    losses = [line["loss"] for line in metrics(short, "sft")]
    assert len(losses) == walk.base.sft_steps
    assert fmean(losses[-10:]) < losses[0] * walk.base.final_loss
    for stage in (short, long):
        assert [line["step"] for line in metrics(stage, "step")] == [1, 2]
        assert read_conserved_summary(stage)["pass1_end"] is not None
        assert any((stage.path / "tensorboard").iterdir())
    assert not metrics(long, "sft")
    assert "stage long: finished" in walk.printed[RESUME]


def test_the_report_shows_both_stages_and_the_parts_of_the_time(walk: Walk) -> None:
    assert walk.printed["asterism report runs/math"].count("correct answers, greedy") == 2
    assert (walk.folder / "runs/math/stages.png").read_bytes().startswith(b"\x89PNG")
    use = json.loads((walk.folder / "runs/math/2_long/utilization.json").read_text())
    assert sum(engine["generated_tokens"] for engine in use["engines"]) > 0
    assert "AnswerGraded" in walk.printed["asterism log story runs/math/2_long 6"]


def test_the_evaluation_counts_its_answers(walk: Walk) -> None:
    [path] = (walk.folder / "runs" / "math").glob("eval-2_long-*/results.json")
    sets = json.loads(path.read_text())["sets"]
    assert list(sets) == ["test", "exam"]
    answers = read_rows(path.parent / "questions.jsonl")
    for name, figures in sets.items():
        rewards = [[answer["reward"] > 0 for answer in row["answers"]] for row in answers if row["set"] == name]
        assert [len(each) for each in rewards] == [4] * walk.base.test_questions
        assert figures["avg"] == pytest.approx(fmean(map(fmean, rewards)))


def test_the_chat_answers_with_the_result_of_a_call(walk: Walk) -> None:
    printed = walk.printed["asterism chat runs/math/2_long:best --temperature 0 --prompt 'What is 12*3+4?'"]
    assert "<answer>\\boxed{" in printed


def test_the_exported_template_has_the_token_ids_of_training(walk: Walk) -> None:
    exported = walk.folder / "models" / "mine"
    assert {"model.safetensors", "README.md", "asterism.json"} <= {path.name for path in exported.iterdir()}
    name, count, ids, more = re.findall(
        r"^(train.jsonl:\d+)\n-- context, (\d+) tokens: ([\d ]+)( \.\.\.)?$", walk.printed[RENDER], re.MULTILINE
    )[0]
    row = read_rows(walk.folder / "data" / "train.jsonl")[int(name.partition(":")[2]) - 1]
    prompt = walk.render_prompt(row["question"])
    assert len(prompt) == int(count)
    assert " ".join(map(str, prompt[:16] if more else prompt)) == ids


class Serving(NamedTuple):
    walk: Walk
    port: int

    def adapt(self, command: str) -> str:
        assert command.count("30000") == 1
        return command.replace("30000", str(self.port))

    def ask(self, question: str, **options: object) -> dict[str, Any]:
        """Send a request with the run's tools. Return the first choice of the response."""
        tools = json.loads((self.walk.folder / "models" / "mine" / "asterism.json").read_text())["tools"]
        body = {"model": "mine", "messages": [{"role": "user", "content": question}], "tools": tools, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]


@pytest.fixture(scope="module")
def serving(walk: Walk) -> Iterator[Serving]:
    """Run the printed command on a free port, with options for a machine without a GPU. Yield the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        serving = Serving(walk, probe.getsockname()[1])
    [command] = [command for command in COMMANDS if command.startswith("asterism serve")]
    options = ("--python", str(PYTHON))
    arguments = ("--", "--max-total-tokens", "4096", "--random-seed", "0", "--dtype", "float32")
    with start(walk.folder, serving.adapt(command), *options, *arguments) as process:
        try:
            assert process.stdout is not None
            output: list[str] = []
            while not (output and output[-1].startswith("serving ")):
                line = process.stdout.readline()
                assert line, output
                output.append(line)
            yield serving
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()


def test_the_server_answers_the_chat_and_returns_parsed_calls(serving: Serving) -> None:
    [command] = [command for command in COMMANDS if command.startswith("asterism chat http")]
    assert "<answer>\\boxed{" in finish(start(serving.walk.folder, serving.adapt(command)))
    choices = [serving.ask(row["question"]) for row in read_rows(serving.walk.folder / "exam.jsonl")[:8]]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "tool_calls"}
    calls = [call["function"] for choice in choices for call in choice["message"].get("tool_calls") or []]
    assert len(calls) >= len(choices) / 2
    for call in calls:
        assert call["name"] == "jupyter_code"
        assert isinstance(json.loads(call["arguments"])["code"], str)


def test_the_server_generates_the_greedy_tokens_of_transformers(serving: Serving) -> None:
    """The prompt of a request has the token ids of training."""
    walk = serving.walk
    model: Any = AutoModelForCausalLM.from_pretrained(walk.folder / "models" / "mine", dtype=torch.float32)
    for row in read_rows(walk.folder / "exam.jsonl")[:8]:
        choice = serving.ask(row["question"], temperature=0, max_tokens=16, return_token_ids=True)
        prompt = walk.render_prompt(row["question"])
        assert choice["prompt_token_ids"] == prompt
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
        assert choice["response_token_ids"] == found[0, len(prompt) :].tolist()
