"""Joins the messages of a batch. The samples of its groups arrive in separate messages before BatchReady."""

from collections.abc import Iterable

import msgspec

from asterism.bus.messages import AnyMessage, BatchReady, GroupAccepted, TrainingSample


class CompleteBatch(msgspec.Struct, frozen=True):
    step: int
    samples: tuple[TrainingSample, ...]


class BatchAssembler:
    """Assembles batches. A later message about the same part of a group replaces the earlier one."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, int], tuple[TrainingSample, ...]] = {}  # by step, group and part

    def add(self, message: AnyMessage) -> list[CompleteBatch]:
        """Add a message. Return the batch that it completes, or an empty list. Raises KeyError for a missing part."""
        match message:
            case GroupAccepted():
                self._parts[message.step, message.group_id, message.part] = message.samples
                return []
            case BatchReady(step=step, groups=groups):
                parts = [self._parts[step, each.group_id, part] for each in groups for part in range(each.num_parts)]
                return [CompleteBatch(step, tuple(sample for part in parts for sample in part))]
            case _:
                return []

    def delete_up_to(self, step: int) -> None:
        self._parts = {place: part for place, part in self._parts.items() if place[0] > step}


def assemble_batches(messages: Iterable[AnyMessage]) -> list[CompleteBatch]:
    assembler = BatchAssembler()
    return [batch for message in messages for batch in assembler.add(message)]
