"""The subcommands of `asterism data` run with a hub on loopback."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess, run
from typing import Any

import pytest
from typer.testing import Result

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.tasks.checking.task_check import write_byte_tokenizer
from tests.actors.cli.invoking import check_golden_refusals, read_refusal
from tests.actors.cli.invoking import invoke as invoke_command
from tests.actors.runs.running import ROOT
from tests.engine.data.cold_start_rows import write_rows
from tests.http_responses import Response, serving

MESSAGES = Path(__file__).with_name("data_messages.txt")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PUBLISHED = {"data/train.jsonl": b'{"question": "1+1?", "answer": 2}\n', "README.md": b"# Sums\n"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> Result:
    """Run the command, and raise its exception."""
    result = invoke_command("data", *arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write_jsonl(name: str, rows: list[Any]) -> None:
    write_rows(Path(name), *rows)


def write_run(*lines: str) -> None:
    """Write run.toml with these lines, a tokenizer of bytes, and train.jsonl with two questions."""
    write_byte_tokenizer(Path("model"), DialogueConfig())
    write_jsonl("train.jsonl", [{"question": f"What is {n}+{n}?", "answer": 2 * n} for n in (1, 2)])
    data = ('name = "shown"', 'model.checkpoint = "model"', 'data.train = "train.jsonl"', 'data.test = "train.jsonl"')
    Path("run.toml").write_text("\n".join([*data, *lines]))


@pytest.mark.slow
def test_a_file_is_inspected_cleaned_and_split() -> None:
    rows = [{"question": f"What is {number} plus 1?", "answer": number + 1} for number in range(20)]
    rows += [
        rows[0],
        {"question": "What is half of 1?", "answer": "1/2"},
        {"question": "What is (x+1)^2?", "answer": "$$"},
    ]
    write_jsonl("raw.jsonl", rows)
    shown = invoke("inspect", "raw.jsonl", "--json", "inspection.json")
    assert shown.exit_code == 0
    assert "answers: 21 integer, 1 number, 1 expression" in shown.output
    assert "the verifier cannot parse the answer '$$'" in shown.output
    assert json.loads(Path("inspection.json").read_text())["num_rows"] == 23
    write_jsonl("held_out.jsonl", rows[4:6])
    cleaned = invoke("clean", "raw.jsonl", "--output", "clean.jsonl", "--against", "held_out.jsonl", "--answers", "any")
    assert "clean.jsonl: 19 of 23 rows" in cleaned.output
    removed = [json.loads(line) for line in Path("clean.removed.jsonl").read_text().splitlines()]
    assert [(each["row"], each["reason"], each.get("of")) for each in removed] == [
        ("raw.jsonl:5", "overlap", "held_out.jsonl:1"),
        ("raw.jsonl:6", "overlap", "held_out.jsonl:2"),
        ("raw.jsonl:21", "duplicate", "raw.jsonl:1"),
        ("raw.jsonl:23", "unverifiable", None),
    ]
    divided = invoke("split", "clean.jsonl", "--test", "5", "--output", "data", "--json", "split.json")
    assert f"{Path('data/train.jsonl')}: 14 rows" in divided.output
    assert json.loads(Path("split.json").read_text()) == {"num_train": 14, "num_test": 5, "num_questions": 19}


def test_an_inspection_fails_if_a_run_would_refuse_the_file() -> None:
    write_jsonl("rows.jsonl", [{"question": "What is 1+1?", "answer": 2}, {"question": "And?"}])
    shown = invoke("inspect", "rows.jsonl")
    assert shown.exit_code == 1
    assert "unusable: rows.jsonl: row 2, field `answer`: missing" in shown.output


def test_an_unusable_input_or_output_is_refused_before_a_file_is_written(folder: Path) -> None:
    write_jsonl("rows.jsonl", [{"question": f"What is {row} plus 1?", "answer": row + 1} for row in range(4)])
    write_traces([2, 1, 0])
    write_jsonl("old.jsonl", ["kept"])
    Path("parts").mkdir()
    Path("file").touch()
    write_jsonl("parts/train.jsonl", [{"question": "What is 1+1?", "answer": 2}])
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    check_golden_refusals(MESSAGES, {"x" * 240: "LONG_NAME"})
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_rows_are_rendered_as_the_run_tokenizes_them() -> None:
    write_run('sft.data = "sft.jsonl"')
    messages = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "<reason>\n2"}]
    write_jsonl("sft.jsonl", [{"messages": messages}])
    questions = invoke("render", "run.toml", "--rows", "1").output
    assert questions.startswith("train.jsonl:1\n-- context, ")
    assert "What is 1+1?" in questions
    assert "What is 2+2?" not in questions
    assert "<|im_start|>assistant\n<reason>" in questions
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3+3?"}]
    write_jsonl("train.jsonl", [{"prompt": prompt, "answer": 6}])
    assert "train.jsonl:1 without its system text or earlier turns" in invoke("render", "run.toml").output
    _, context, trained = invoke("render", "run.toml", "--source", "sft").output.split("-- ")
    assert context.startswith("context, ")
    assert trained.startswith("trained, 3 tokens: ")  # a line feed, the digit 2, and the end of turn
    assert trained.endswith("\n\n2<|im_end|>\n")
    with pytest.raises(UnusableInput, match="--task chess: there is no such task"):
        invoke("render", "run.toml", "--task", "chess")


def test_dialogues_of_each_file_are_rendered_within_the_length_limit() -> None:
    files = (f'[[sft.mixture]]\nname = "{name}"\ndata = "{name}.jsonl"' for name in ("short", "long"))
    write_run("sft.max_tokens = 1500", *files)
    for name in ("short", "long"):
        question = {"role": "user", "content": f"A {name} question: " + "1+" * (200 if name == "long" else 0) + "1"}
        messages = [question, {"role": "assistant", "content": "<reason>\n2"}]
        write_jsonl(f"{name}.jsonl", [{"messages": []}, *[{"messages": messages}] * 3])
    shown = invoke("render", "run.toml", "--source", "sft", "--rows", "2").output
    names = [line for line in shown.splitlines() if ".jsonl:" in line]
    dropped = "dropped: 1,593 tokens, sft.max_tokens is 1,500"
    assert names == ["short.jsonl:2", "short.jsonl:3", f"long.jsonl:2 {dropped}", f"long.jsonl:3 {dropped}"]


def test_a_truncated_dialogue_is_rendered_to_its_last_trained_token() -> None:
    write_run('sft.data = "sft.jsonl"', 'sft.too_long = "truncate"')
    question, answer = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<reason>\n2"})
    write_jsonl("sft.jsonl", [{"messages": [question, answer, question, answer]}])
    whole = invoke("render", "run.toml", "--source", "sft").output
    first, later = whole.split("-- ")[1:3], whole.split("-- ")[3:]
    assert len(later) == 2
    length = sum(int(part.split(" tokens")[0].rsplit(" ", 1)[1]) for part in (*first, *later))
    limit = length - int(later[1].split(" tokens")[0].rsplit(" ", 1)[1])  # the second answer does not fit
    shown = invoke("render", "run.toml", "--source", "sft", "--set", f"sft.max_tokens={limit}").output
    assert shown.splitlines()[0] == f"sft.jsonl:1 truncated: {length:,} tokens, sft.max_tokens is {limit:,}"
    assert shown.split("-- ")[1:] == first


# ---------------------------------------------------------------- a hub


def respond(path: str) -> Response | None:
    path = path.partition("?")[0]
    if "/closed/" in path:
        return None
    name = path.partition(f"/resolve/{COMMIT}/")[2]
    if path.startswith("/api/datasets/some/sums/revision/"):
        content = json.dumps({"id": "some/sums", "sha": COMMIT}).encode()
    elif path == f"/api/datasets/some/sums/tree/{COMMIT}":
        files = [{"type": "file", "path": name, "size": len(PUBLISHED[name]), "oid": name} for name in PUBLISHED]
        content = json.dumps(files).encode()
    elif name in PUBLISHED:
        content = PUBLISHED[name]
    else:
        return Response(404, headers={"X-Error-Code": "RepoNotFound"})
    return Response(200, content, {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT})


@pytest.fixture
def hub() -> Iterator[str]:
    with serving(respond) as url:
        yield url


def fetch(endpoint: str, *arguments: str) -> CompletedProcess[str]:
    """Fetch in a separate process, because huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(Path("hub").absolute()), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "asterism.actors.cli.main", "data", "fetch", *arguments]
    environment = os.environ | settings | {"PYTHONPATH": str(ROOT)}
    return run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_files_of_a_data_set_are_fetched_from_a_hub(hub: str) -> None:
    done = fetch(hub, "some/sums", "--output", "sums", "--include", "*.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "sums/data/train.jsonl"
    assert Path("sums/data/train.jsonl").read_bytes() == PUBLISHED["data/train.jsonl"]
    assert not Path("sums/README.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("some/absent", "--output", "a"), "some/absent: RepositoryNotFoundError"),
        (("some/sums", "--output", "b", "--include", "*.parquet"), "some/sums: no file matches *.parquet"),
        (("closed/sums", "--output", "a"), "closed/sums: RemoteProtocolError: "),
        (("some/two/three", "--output", "c"), "some/two/three: "),
    ],
)
def test_a_failed_fetch_names_its_cause(
    hub: str, arguments: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    for folder in "abc":
        Path(folder).mkdir()
        Path(folder, "other.parquet").touch()  # the data set has no such file
    assert read_refusal("data", "fetch", *arguments).startswith(problem)


# ---------------------------------------------------------------- filter


def write_traces(solved: list[int], rollouts: int = 2) -> None:
    """Write traces. `solved` has the number of solved rollouts for each row of rows.jsonl."""
    lines: list[dict[str, Any]] = []
    for row, count in enumerate(solved):
        data = {"name": f"rows.jsonl:{row + 1}", "prompt": f"What is {row} plus 1?", "answer": str(row + 1)}
        for score in (float(sample < count) for sample in range(rollouts)):
            figures = {"rewards": {"reward": {"score": score}}, "metrics": {"correct": score}}
            lines.append({"task": {"data": data}, **figures, "ok": True})
    write_jsonl("traces.jsonl", lines)


def test_rows_are_filtered_by_the_rollouts_of_an_evaluation() -> None:
    write_jsonl("rows.jsonl", [{"question": f"What is {row} plus 1?", "answer": row + 1} for row in range(4)])
    write_traces([2, 1, 0])
    arguments = ["filter", "rows.jsonl", "--by", "traces.jsonl", "--keep", "solved < rollouts", "--unvisited", "drop"]
    counted = invoke(*arguments)
    assert "2 rows meet the condition, 1 do not; 1 are unvisited, dropped by --unvisited" in counted.output
    assert "2 of 4 rows; --out FILE writes them" in counted.output
    written = invoke(*arguments, "--out", "hard.jsonl", "--json", "counts.json")
    assert "hard.jsonl: 2 of 4 rows" in written.output
    assert [json.loads(line)["answer"] for line in Path("hard.jsonl").read_text().splitlines()] == [2, 3]
    assert json.loads(Path("counts.json").read_text())["rows_by_solved"] == {"0": 1, "1": 1, "2": 1}
