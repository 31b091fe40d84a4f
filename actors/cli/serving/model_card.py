"""The model card of an export, README.md, describes the run, its figures, and how to serve the model."""

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from asterism.actors.engines.checkpoint_argument import RunStep
from asterism.analysis.metric_lines import decode_metric_lines
from asterism.analysis.summary_table import read_summary
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.export.chat_files import ServingFacts
from asterism.engine.export.origin import read_origin
from asterism.engine.hf.weight_files import read_json_object
from asterism.engine.learner.checkpoints.checkpoint_folders import CHECKPOINT_NAME

_FRONT_MATTER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [asterism, reinforcement-learning, tool-use]
"""
_EVALUATIONS = {
    "start_sampled": "before RL, sampled",
    "start_greedy": "before RL, greedy",
    "end_sampled": "after RL, sampled",
    "end_greedy": "after RL, greedy",
}


def write_model_card(folder: Path, run: RunConfig, chosen: RunStep, facts: ServingFacts, dtype: str) -> None:
    """Write the card into the folder. Raises OSError."""
    (folder / "README.md").write_text(
        "\n".join(_build_card(folder, run, chosen, facts, dtype)) + "\n", encoding="utf-8"
    )


def _build_card(folder: Path, run: RunConfig, chosen: RunStep, facts: ServingFacts, dtype: str) -> Iterator[str]:
    origin = read_origin(chosen.checkpoint)
    licence = f"license: {origin.license}\n" if origin and origin.license else ""
    yield f"{_FRONT_MATTER}{licence}---\n"
    yield f"# {run.name}, step {chosen.step}\n"
    yield f"A model that Asterism {version('asterism')} has trained, exported in {dtype}, with:\n"
    yield from _list_lineage(run, chosen)
    yield ""
    yield "## Figures\n\n| Evaluation | Correct answers |\n|---|---|"
    yield from _list_accuracies(chosen)
    yield "\n## Training\n\n| | |\n|---|---|"
    for name, value in _list_facts(folder, run, chosen).items():
        yield f"| {name} | {value} |"
    yield "\n## Chat\n"
    yield "`chat_template.jinja` renders the dialogues of the run, token by token: without a system message and tools it has"
    yield "the system text and the tools of the training. `generation_config.json` has its stop tokens and its sampling."
    yield f"\n    {_build_server_command(facts)}\n"
    if not facts.tool_call_parser and facts.tools:
        yield "No parser of SGLang reads the calls of this model: they stay in the text of a response.\n"
    if facts.tools:
        yield "Tools of a request, as the model was trained with them (`asterism.json` has them, too):\n\n```json"
        yield f"{json.dumps(facts.tools, indent=2)}\n```"


def _list_lineage(run: RunConfig, chosen: RunStep) -> Iterator[str]:
    """List the trainings since the initial model, in order, with the stages and runs that this run continues."""
    earlier = _find_continued(run, chosen)
    if earlier is None:
        yield f"- initial model {_describe_path(run.model.checkpoint, chosen.run)}{_describe_origin(chosen.checkpoint)}"
        if run.sft.is_enabled:
            length = f"{run.sft.epochs:g} epochs" if run.sft.epochs else f"{run.sft.steps} steps"
            yield f"- cold start: {length}"
    elif earlier.run.config.exists():
        yield from _list_lineage(load_run(earlier.run.config), earlier)
    else:
        yield f"- step {earlier.step} of the run {earlier.run.path.name}, of which no more is known: its folder is gone"
    method = "GRPO with Resample-on-Correct" if run.roc.enabled else "GRPO"
    yield f"- {chosen.step} of {run.rl.steps} steps of {method} in {run.name}"


def _describe_origin(checkpoint: Path) -> str:
    origin = read_origin(checkpoint)
    if origin is None:
        return ""
    known = [origin.name, origin.organization, origin.license and f"licence {origin.license}", origin.source]
    facts = [f"sha256 {origin.sha256[:16]}", origin.format, *filter(None, known)]
    return f", imported from `{origin.file}` ({', '.join(facts)})"


def _find_continued(run: RunConfig, chosen: RunStep) -> RunStep | None:
    """Return the checkpoint of another run from which this run began, or None without one."""
    if not run.learner.resume_from:
        return None
    checkpoint = chosen.run.expand_path(run.learner.resume_from)
    found = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    return None if found is None else RunStep(RunFolder(checkpoint.parent.parent), int(found[1]))


def _describe_path(path: str, run: RunFolder) -> str:
    """Return the path within the run's folder, or its last two parts: earlier parts name folders of one machine."""
    full = run.expand_path(path)
    if full.resolve().is_relative_to(run.path.resolve()):
        return f"`{full.resolve().relative_to(run.path.resolve())}` of the run"
    return f"`{'/'.join(full.parts[-2:])}`" if full.is_absolute() else f"`{path}`"


def _list_accuracies(chosen: RunStep) -> Iterator[str]:
    """List the accuracy of the last evaluation of each label, and that of the exported step."""
    found: dict[str, float | None] = {}
    for line in decode_metric_lines(chosen.run.metrics) if chosen.run.metrics.exists() else []:
        if line["kind"] == "evaluation":
            is_of_step = line["label"].startswith("step_") and line.get("step") == chosen.step
            label = f"after step {chosen.step}" if is_of_step else _EVALUATIONS.get(line["label"], "")
            if line["label"].startswith("end_") and line["step"] != chosen.step:
                label += f": other weights, of step {line['step']}"
            found[label] = line.get("accuracy")
    found.pop("", None)
    yield from (f"| {label} | {'-' if value is None else f'{value:.1%}'} |" for label, value in found.items())
    if not found:
        yield "| none | - |"


def _list_facts(folder: Path, run: RunConfig, chosen: RunStep) -> dict[str, Any]:
    summary = read_summary(chosen.run.path) if chosen.run.summary.exists() else {}
    tasks = run.tasks or (None,)
    data = [run.data.train if task is None else task.data for task in tasks]
    return {
        "architecture": read_json_object(folder / "config.json")["model_type"],
        "parameters": f"{summary['params']:,}" if summary.get("params") else "-",
        "initial model": _describe_path(run.model.checkpoint, chosen.run),
        "dialogues of the cold start": _describe_dialogues(run, chosen.run),
        "questions": ", ".join(_describe_file(path, chosen.run) for path in data),
        "prompts and rollouts of a step": f"{run.rl.prompts} x {run.rl.rollouts}",
        "seed": run.seed,
        "configuration": f"`config.toml`, sha256 {_compute_digest(chosen.run.config)}",
    }


def _describe_dialogues(run: RunConfig, folder: RunFolder) -> str:
    if not run.sft.is_enabled:
        return "none in this run"
    return ", ".join(_describe_file(file.data, folder) for file in run.sft.files.values())


def _describe_file(path: str, folder: RunFolder) -> str:
    file = folder.expand_path(path)
    return _describe_path(path, folder) + (f" (sha256 {_compute_digest(file)})" if file.is_file() else "")


def _compute_digest(path: Path) -> str:
    """Return the first 16 digits of the file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _build_server_command(facts: ServingFacts) -> str:
    flags = [f"--tool-call-parser {facts.tool_call_parser}" if facts.tool_call_parser else ""]
    flags.append(f"--reasoning-parser {facts.reasoning_parser}" if facts.reasoning_parser else "")
    return " ".join(filter(None, ("python -m sglang.launch_server --model-path .", *flags)))
