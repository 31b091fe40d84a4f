"""Token files of the cold start: a file of dialogues is tokenized once, and every rank maps the result into its memory.

FOLDER/DIGEST/
  token_ids.bin    int32, all dialogues one after the other, each up to its last token in the loss
  loss_mask.bin    uint8, same length; 1 for tokens in the loss
  offsets.bin      int64 [dialogues + 1], start of each dialogue in tokens, and the end
  loss_tokens.bin  int32 [dialogues], number of tokens in the loss
  report.json      TokenFileReport

DIGEST is the digest of data, tokenizer, formats and options. A folder gets its name when it is complete.
"""

import hashlib
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.configs.atomic_write import raising_disk_errors, sync_tree
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import DamagedFile, find_damage, list_files, write_manifest
from asterism.configs.schema.algorithm import SftConfig, SftFileConfig
from asterism.engine.data.data_files import BadRows, DatasetError, list_data_files
from asterism.engine.data.family_dialogues import NO_FAMILIES, FamilyDialogues
from asterism.engine.data.sft_dialogues import TokenizedDialogue, describe_bad_rows, iter_sft_dialogues
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.policies.dialogue.chat_format import DialogueFormat

_LAYOUT = b"asterism token file 2"
_TYPES = {"token_ids": np.int32, "loss_mask": np.uint8, "offsets": np.int64, "loss_tokens": np.int32}


class TokenFileReport(msgspec.Struct, frozen=True):
    """The numbers of used, skipped and truncated rows of a data file."""

    dialogues: int
    tokens: int
    loss_tokens: int
    too_long: int  # number of dropped dialogues, longer than sft.max_tokens
    truncated: int  # number of dialogues truncated to sft.max_tokens
    unusable: str  # describes the skipped rows; empty without skipped rows


class DialogueSource(NamedTuple):
    """The inputs that determine the tokens of a data file."""

    path: Path
    tokenizer: FastTokenizer
    formats: Mapping[str, DialogueFormat]  # formats by the task's name
    file: SftFileConfig
    sft: SftConfig
    families: Mapping[str, FamilyDialogues] = NO_FAMILIES

    def compute_digest(self) -> str:
        """Compute the digest of all inputs; this reads the whole data file. Raises DatasetError."""
        file, sft = self.file, self.sft
        layout = (file.prompt, dict(file.tool_names), file.calls, file.program_tool, dict(file.where))
        options = (*layout, sft.max_tokens, sft.too_long, sft.max_bad_rows)
        digest = hashlib.blake2b(_LAYOUT, digest_size=16)
        identities = {name: family.identity for name, family in self.families.items()}
        digest.update(msgspec.json.encode((options, dict(self.formats), identities)))
        for path in (self.tokenizer.path, *list_data_files(self.path)):
            digest.update(path.name.encode())
            try:
                with path.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "blake2b").digest())
            except OSError as error:
                raise DatasetError(path, f"cannot be read: {error.strerror}") from None
        return digest.hexdigest()


class MappedTokens(NamedTuple):
    """The dialogues of a token file, in the order of their rows. Pages are read from the disk at first use."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    loss_tokens: NDArray[np.int32]
    report: TokenFileReport

    def get_length(self, index: int) -> int:
        return int(self.offsets[index + 1] - self.offsets[index])

    def read(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return copies of the token ids [T] and the loss mask [T]."""
        place = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return np.array(self.token_ids[place]), self.loss_mask[place].astype(np.bool_)


def write_token_file(parent: Path, source: DialogueSource) -> Path:
    """Return the token file of the source; write it unless it exists.

    Two processes must not call it for one `parent` at the same time. Raises DatasetError and DiskError.
    """
    folder = parent / source.compute_digest()
    if folder.is_dir():
        return folder
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with raising_disk_errors(new):
            new.mkdir(parents=True)
            _write_dialogues(new, source)
            write_manifest(new, list_files(new))
            sync_tree(new)
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def map_token_file(folder: Path) -> MappedTokens:
    """Map a token file after a check of all its files. Raises UnusableInput for a missing or damaged file."""
    try:
        damage = find_damage(folder)
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=TokenFileReport)
        arrays = {name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _TYPES.items()}
    except (OSError, ValueError, msgspec.MsgspecError, DamagedFile) as error:
        raise UnusableInput(f"{folder}: {error}; remove this folder, and it is written again") from None
    if damage is not None:
        raise UnusableInput(f"{damage}; remove this folder, and it is written again")
    lengths = {name: len(array) for name, array in arrays.items()}
    expected = (report.tokens, report.tokens, report.dialogues + 1, report.dialogues)
    if tuple(lengths[name] for name in _TYPES) != expected:
        raise UnusableInput(f"{folder}: incomplete; remove this folder, and it is written again")
    return MappedTokens(*(arrays[name] for name in _TYPES), report=report)  # pyright: ignore[reportArgumentType]


def is_too_long(dialogue: TokenizedDialogue, sft: SftConfig) -> bool:
    return 0 < sft.max_tokens < len(dialogue.token_ids)


def fit_length(dialogue: TokenizedDialogue, sft: SftConfig) -> TokenizedDialogue | None:
    """Return the tokens that training reads: at most `sft.max_tokens`, up to the last token in the loss.

    Returns None for a dialogue that is too long, if `sft.too_long` is "drop" or no loss token is within the limit.
    """
    loss_mask = np.array(dialogue.loss_mask[: sft.max_tokens or None], np.uint8)
    loss_mask[:1] = 0  # the first token has no prediction
    in_loss = np.flatnonzero(loss_mask)
    if is_too_long(dialogue, sft) and (sft.too_long == "drop" or not len(in_loss)):
        return None
    end = int(in_loss[-1]) + 1 if len(in_loss) else 0
    return dialogue._replace(token_ids=dialogue.token_ids[:end], loss_mask=loss_mask[:end].tolist())


class _TokenFileWriter:
    """A writer that appends dialogues to the open files of a new folder."""

    def __init__(self, folder: Path, files: ExitStack, sft: SftConfig) -> None:
        self._files = {name: files.enter_context((folder / f"{name}.bin").open("wb")) for name in _TYPES}
        self._sft = sft
        self.dialogues = self.tokens = self.loss_tokens = self.too_long = self.truncated = 0
        self._append("offsets", 0)

    def add(self, dialogue: TokenizedDialogue) -> None:
        fitted = fit_length(dialogue, self._sft)
        if fitted is None:
            self.too_long += 1
            return
        loss_tokens = sum(fitted.loss_mask)
        self.truncated += is_too_long(dialogue, self._sft)
        self.dialogues, self.tokens = self.dialogues + 1, self.tokens + len(fitted.token_ids)
        self.loss_tokens += loss_tokens
        self._append("token_ids", fitted.token_ids)
        self._append("loss_mask", fitted.loss_mask)
        self._append("offsets", self.tokens)
        self._append("loss_tokens", loss_tokens)

    def _append(self, name: str, values: int | list[int]) -> None:
        self._files[name].write(np.array(values, _TYPES[name]).tobytes())


def _write_dialogues(folder: Path, source: DialogueSource) -> None:
    bad_rows = BadRows(source.sft.max_bad_rows, "sft.max_bad_rows")
    with ExitStack() as files:
        writer = _TokenFileWriter(folder, files, source.sft)
        for dialogue in iter_sft_dialogues(
            source.path, source.tokenizer, source.formats, source.file, bad_rows, source.families
        ):
            writer.add(dialogue)
    if not writer.tokens:
        too_long = f"{writer.too_long:,} dialogues are longer than sft.max_tokens"
        raise DatasetError(source.path, f"no dialogue is left: {describe_bad_rows(bad_rows.errors) or too_long}")
    counts = (writer.dialogues, writer.tokens, writer.loss_tokens, writer.too_long, writer.truncated)
    report = TokenFileReport(*counts, unusable=describe_bad_rows(bad_rows.errors))
    (folder / "report.json").write_bytes(msgspec.json.encode(report))
