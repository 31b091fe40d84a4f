"""`asterism log diff`: where two runs part, both sides shown."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.log_commands import words_of
from analysis.event_logs.diff import Parting, differing, exact_parting, parting
from analysis.event_logs.moments import Moment
from analysis.event_logs.readable import readable
from analysis.event_logs.telling import excerpt
from configs.run_folder import RunFolder
from policies.record import bytes_to_ids

_ARRAYS = {"token_ids": 4, "prompt_ids": 4, "logprobs": 4, "versions": 4, "loss_mask": 1}  # bytes an element


def compare_runs(a: RunFolder, b: RunFolder, *, exact: bool, console: Console) -> int:
    """The exit code: 1 if they part."""
    found = exact_parting(a, b) if exact else parting(a, b)
    if found is None:
        same = "every event of every process" if exact else "every trajectory and every step"
        console.print(f"{same} is the same in both runs, times apart")
        return 0
    console.print(f"the runs part at {found.of}, {found.at:.4f} s after the beginning", highlight=False)
    console.print(_sides(found, a, b))
    return 1


def _sides(found: Parting, a: RunFolder, b: RunFolder) -> Table:
    table = Table("", *(escape(str(_shown_path(folder.path))) for folder in (a, b)), show_lines=True)
    table.add_row("event", *(moment.what if moment else "nothing" for moment in (found.a, found.b)))
    table.add_row("logged", *(f"{moment.logged}, {moment.at:.4f} s" if moment else "" for moment in (found.a, found.b)))
    for name in differing(found):
        first = _first_difference(name, found)
        label = f"{name} from place {first} on" if first is not None else name
        sides = ((found.a, a), (found.b, b))
        table.add_row(label, *(escape(_side(name, first, moment, folder)) for moment, folder in sides))
    return table


def _shown_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _first_difference(name: str, found: Parting) -> int | None:
    """Place of the first element of an array that is not the same."""
    values = [moment.contents.get(name) if moment is not None else None for moment in (found.a, found.b)]
    a, b = values
    if name not in _ARRAYS or not isinstance(a, bytes) or not isinstance(b, bytes):
        return None
    shorter = min(len(a), len(b))
    place = next((place for place in range(shorter) if a[place] != b[place]), shorter)
    return place // _ARRAYS[name]


def _side(name: str, first: int | None, moment: Moment | None, folder: RunFolder) -> str:
    if moment is None or name not in moment.contents:
        return ""
    value = moment.contents[name]
    if not isinstance(value, bytes) or name not in ("token_ids", "prompt_ids"):
        return readable(value, name).removeprefix(f"{name} ")
    ids = bytes_to_ids(value)[first or 0 :]
    return f"{len(ids)} tokens: {excerpt(words_of(folder).tokenizer.decode(ids))}"
