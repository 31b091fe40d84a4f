"""`asterism analyze entropy` computes the entropies of the tokens that a checkpoint of a run has generated."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from asterism.actors.cli.console import check_json_path, write_json
from asterism.actors.engines.checkpoint_argument import parse_checkpoint_argument
from asterism.analysis.entropy_page import build_entropy_table, draw_entropy, write_entropy_page
from asterism.analysis.token_kinds import ScoredDialogue, ScoredToken, TurnTags, classify_turn, compute_statistics
from asterism.bus.addresses import HEAD
from asterism.bus.event_log.reader import read_messages
from asterism.bus.messages import TrajectoryFinished
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.dialogue.chat_format import get_call_format
from asterism.policies.dialogue.token_text import split_text


class EntropyOptions(NamedTuple):
    checkpoint: str  # RUN[:STEP]
    trajectories: int
    shown: int  # number of dialogues on the page
    seed: int
    temperature: float | None  # None: sampling.temperature of the run
    json_file: Path | None


def analyze_entropy(options: EntropyOptions, console: Console) -> None:
    """Write entropy_STEP.html and .png into the run's folder. Raises UnusableInput, OSError and DiskError."""
    check_json_path(options.json_file)
    chosen = parse_checkpoint_argument(options.checkpoint)
    if chosen.run is None or chosen.step is None or chosen.folder is None:
        raise UnusableInput(f"{options.checkpoint}: expected a run or RUN:STEP, since only a run logs the tokens")
    run = load_run(chosen.run.config)
    generated = choose_trajectories(chosen.run, chosen.step, options.trajectories, options.seed)
    tokenizer = load_tokenizer(chosen.folder)
    temperature = run.sampling.temperature if options.temperature is None else options.temperature
    if temperature <= 0:
        raise UnusableInput("--temperature: must be above 0: the entropy of greedy sampling is 0")
    entropies = _score(chosen.folder, generated, temperature, run.learner.threads)
    dialogues = [
        build_dialogue(each, values, tokenizer, get_tags(run))
        for each, values in zip(generated, entropies, strict=True)
    ]
    statistics = compute_statistics(dialogues)
    title = f"Entropy of {chosen.run.path.resolve().name} after {chosen.step} steps"
    page, picture = (chosen.run.path / f"entropy_{chosen.step:06d}.{kind}" for kind in ("html", "png"))
    write_entropy_page(dialogues[: options.shown], statistics, title, page)
    draw_entropy(dialogues, statistics, title, picture)
    console.print(build_entropy_table(statistics))
    console.print(f"page: {page}\npicture: {picture}", markup=False, soft_wrap=True)
    write_json(options.json_file, statistics)


def choose_trajectories(folder: RunFolder, version: int, number: int, seed: int) -> list[TrajectoryFinished]:
    """Draw up to `number` trajectories whose tokens are all of this version. Return them sorted by their number.

    Trajectories of evaluations count too. Raises UnusableInput if the log has none.
    """
    random = np.random.default_rng(seed)
    chosen: list[TrajectoryFinished] = []
    num_found, versions = 0, set[int]()
    for finished in _read_finished(folder):
        found = _list_versions(finished)
        versions |= found
        if found != {version}:
            continue
        num_found += 1
        if len(chosen) < number:
            chosen.append(finished)
        elif (place := int(random.integers(num_found))) < number:  # reservoir sampling
            chosen[place] = finished
    if not chosen:
        known = ", ".join(map(str, sorted(versions))) or "none"
        raise UnusableInput(f"{folder.events}: no trajectory of step {version} is logged; logged steps: {known}")
    return sorted(chosen, key=lambda each: each.trajectory_id)


def _read_finished(folder: RunFolder) -> Iterator[TrajectoryFinished]:
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        raise UnusableInput(f"{log}: missing; the generated tokens are read from it (log.events)")
    yield from (message for _, message in read_messages(log, TrajectoryFinished))


def _list_versions(finished: TrajectoryFinished) -> set[int]:
    versions = np.frombuffer(finished.record.versions, np.int32)
    return set(versions[versions >= 0].tolist())


def build_dialogue(
    finished: TrajectoryFinished, entropies: Sequence[float], tokenizer: FastTokenizer, tags: TurnTags
) -> ScoredDialogue:
    """Build the dialogue with one entropy for each generated token, in order."""
    ids = np.frombuffer(finished.record.token_ids, np.int32).tolist()
    is_generated = np.frombuffer(finished.record.versions, np.int32) >= 0
    texts = split_text(tokenizer, ids)
    tokens = [ScoredToken(text) for text in texts]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_generated.astype(np.int8), [0]))))
    remaining = iter(entropies)
    for turn, (first, end) in enumerate(edges.reshape(-1, 2).tolist()):
        kinds = classify_turn(texts[first:end], tags, follows_result=turn > 0)
        tokens[first:end] = [
            ScoredToken(text, kind, next(remaining)) for text, kind in zip(texts[first:end], kinds, strict=True)
        ]
    return ScoredDialogue(finished.trajectory_id, finished.reward, tuple(tokens))


def get_tags(run: RunConfig) -> TurnTags:
    """Return the tags of all tasks: a logged trajectory does not have the name of its task."""
    dialogues = [task.get_dialogue() for task in run.resolved_tasks]
    calls = dict.fromkeys(get_call_format(each) for each in dialogues)
    return TurnTags(
        tuple((each.answer_open, each.answer_close) for each in dialogues),
        tuple((each.opening, each.closing) for each in calls),
    )


def _score(
    checkpoint: Path, trajectories: Sequence[TrajectoryFinished], temperature: float, threads: int
) -> list[list[float]]:
    """Return the entropies in nats of the generated tokens of each trajectory."""
    import torch  # slow to import

    from asterism.engine.model.hf_checkpoint import load_model
    from asterism.policies.losses.token_scores import ScoredTokens, TokenScores

    torch.set_num_threads(threads)
    model = load_model(checkpoint)
    scored: list[list[float]] = []
    with torch.inference_mode():
        for each in trajectories:
            ids_T = torch.frombuffer(bytearray(each.record.token_ids), dtype=torch.int32).long()
            generated_N = torch.frombuffer(bytearray(each.record.versions), dtype=torch.int32).ge(0).nonzero()[:, 0]
            scores = model(ids_T[None], tokens=ScoredTokens(generated_N - 1, ids_T[generated_N], temperature))
            assert isinstance(scores, TokenScores)
            scored.append(scores.entropies_N.tolist())
    return scored
