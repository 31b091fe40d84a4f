"""The dialogues of the cold start, by step and for validation. The leading rank tokenizes them; all ranks map them."""

import itertools
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftConfig, SftFileConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import build_family_dialogues, build_task_formats, read_task_descriptions
from asterism.engine.data.token_files import DialogueSource, MappedTokens, map_token_file, write_token_file
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.learner.batches.training_sequence import Prompt, TrainingSequence
from asterism.engine.learner.cold_start.dialogue_sampler import SftSampler, StepSize
from asterism.engine.learner.distributed import RankGroup, broadcast_object
from asterism.policies.seeded_random import mix

_HELD_OUT = 2**40  # stands for the epoch in the key of the held-out draw


class StoredDialogue(NamedTuple):
    """A dialogue of a token file, as a SequenceSource."""

    tokens: MappedTokens
    place: int  # position in the file, from 0
    group_id: int  # number of the file

    @property
    def trajectory_id(self) -> int:
        return self.place

    @property
    def num_tokens(self) -> int:
        return self.tokens.get_length(self.place)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.tokens.loss_tokens[self.place])

    @property
    def token_id_range(self) -> tuple[int, int]:
        return self.load().token_id_range

    @property
    def prompt(self) -> Prompt:
        """The empty prompt: dialogues of the cold start are not compared."""
        return Prompt()

    def load(self) -> TrainingSequence:
        token_ids, loss_mask = self.tokens.read(self.place)
        return TrainingSequence(
            token_ids, loss_mask, np.zeros(len(token_ids), np.float32), 1.0, self.group_id, self.place
        )


class DialogueSet:
    """The dialogues, equal on every rank. Raises UnusableInput for a file without dialogues to train on."""

    def __init__(
        self, sft: SftConfig, seed: int, files: Sequence[MappedTokens], validation: Sequence[MappedTokens] = ()
    ) -> None:
        """`files`: tokens of sft.files. `validation`: tokens of sft.validation_files."""
        self._files = files
        self._trained: list[NDArray[np.int64]] = []  # positions of the trained dialogues in each file
        self.validation = [
            StoredDialogue(each, index, 0) for each in validation for index in range(each.report.dialogues)
        ]
        for number, (key, file) in enumerate(zip(sft.files, files, strict=True)):
            held_out = _choose_held_out(file.report.dialogues, sft.validation_share, seed, number)
            self.validation += [StoredDialogue(file, index, number) for index in held_out]
            self._trained.append(np.delete(np.arange(file.report.dialogues), held_out))
            if not len(self._trained[-1]):
                raise UnusableInput(f"{key}: no dialogue is left to train on; lower sft.validation_share")
        counts = [len(each) for each in self._trained]
        self._starts = [0, *itertools.accumulate(counts)]
        weights = [file.weight for file in sft.files.values()]
        size = StepSize(sft.batch_size, sft.tokens_per_step)
        lengths = [np.diff(file.offsets)[places] for file, places in zip(files, self._trained, strict=True)]
        self._sampler = SftSampler(counts, weights, size, seed, np.concatenate(lengths))
        self.sft = replace(sft, steps=sft.steps or self._sampler.count_steps(sft.epochs), epochs=0.0)

    def get_batch(self, step: int) -> list[StoredDialogue]:
        """Return the dialogues of `step`, counted from 0."""
        return [self._get_dialogue(index) for index in self._sampler.get_batch(step)]

    def _get_dialogue(self, index: int) -> StoredDialogue:
        """Return the dialogue at `index` among the dialogues of all files that are not held out."""
        number = bisect_right(self._starts, index) - 1
        return StoredDialogue(self._files[number], int(self._trained[number][index - self._starts[number]]), number)


def _choose_held_out(count: int, share: float, seed: int, number: int) -> list[int]:
    """Choose the held-out dialogues: at least one if the share is positive and the file has several dialogues."""
    if not share or count < 2:
        return []
    wanted, draws, chosen = max(1, round(share * count)), itertools.count(), set[int]()
    while len(chosen) < wanted:
        chosen.add(mix(seed, _HELD_OUT, number, next(draws)) % count)
    return sorted(chosen)


def open_dialogues(run: RunConfig, folder: RunFolder, ranks: RankGroup, tokenizer_folder: Path) -> DialogueSet:
    """Open the dialogues. The leading rank tokenizes files without a token file; other ranks wait, then map the files.

    Every rank calls it, and raises the UnusableInput of the leading rank.
    """
    problem: UnusableInput | None = None
    folders: list[Path] = []
    if ranks.is_leader:
        try:
            with ranks.operation("tokenization of the dialogues", is_limited=False):
                folders = _write_token_files(run, folder, tokenizer_folder)
        except UnusableInput as error:
            problem = error
    folders, message = broadcast_object(ranks, (folders, str(problem or "")))
    if problem is not None:
        raise problem
    if message:
        raise UnusableInput(message)
    mapped = [map_token_file(each) for each in folders]
    count = len(run.sft.files)
    return DialogueSet(run.sft, run.seed, mapped[:count], mapped[count:])


def _write_token_files(run: RunConfig, folder: RunFolder, tokenizer_folder: Path) -> list[Path]:
    tokenizer, descriptions = load_tokenizer(tokenizer_folder), read_task_descriptions(folder)
    formats, families = build_task_formats(run, descriptions), build_family_dialogues(run, descriptions, tokenizer)
    files: Mapping[str, SftFileConfig] = run.sft.files | run.sft.validation_files
    folders: list[Path] = []
    for key, file in files.items():
        began = time.monotonic()
        source = DialogueSource(folder.expand_path(file.data), tokenizer, formats, file, run.sft, families)
        folders.append(write_token_file(folder.dialogue_tokens, source))
        report = map_token_file(folders[-1]).report
        counts = {"dialogues": report.dialogues, "tokens": report.tokens, "loss_tokens": report.loss_tokens}
        counts |= {"too_long": report.too_long, "truncated": report.truncated}
        log = structlog.get_logger()
        log.info("dialogues.tokenized", key=key, **counts, tokenize_s=time.monotonic() - began)
        if report.unusable:
            log.warning("dialogues.unusable", key=key, description=report.unusable)
    return folders
