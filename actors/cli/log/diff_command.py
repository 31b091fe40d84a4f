"""`asterism log diff` prints both sides of the first divergence between two runs."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import escape_controls
from asterism.actors.cli.log.show_command import load_text_context
from asterism.analysis.event_logs.comparable_events import ComparableEvent
from asterism.analysis.event_logs.describe import make_excerpt
from asterism.analysis.event_logs.diff import RunDivergence, find_first_divergence, list_differing_fields
from asterism.analysis.event_logs.pretty import pretty_format
from asterism.bus.messages import bytes_to_ids
from asterism.configs.load import list_differences, load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.run_folder import RunFolder

_KEYS_WITHOUT_EFFECT = ("name:", "runs_folder:")  # keys without effect on a run's decisions
_ELEMENT_BYTES = {"token_ids": 4, "prompt_ids": 4, "logprobs": 4, "versions": 4, "loss_mask": 1}


def compare_runs(a: RunFolder, b: RunFolder, *, exact: bool, console: Console) -> int:
    """Return the exit code: 1 if the runs differ, apart from their configurations."""
    for line in _list_configuration_differences(a, b):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    found = find_first_divergence(a, b, exact=exact)
    if found is None:
        same = "every event of every process, " if exact else ""
        console.print(f"identical, apart from times: {same}every trajectory, step, metrics line and checkpoint file")
        return 0
    console.print(f"the runs diverge at {found.stream}, {found.at_s:.4f} s after the start", highlight=False)
    console.print(_build_sides_table(found, a, b))
    return 1


def _list_configuration_differences(a: RunFolder, b: RunFolder) -> list[str]:
    try:
        differences = list_differences(load_run(a.config), load_run(b.config))
    except ConfigError as error:
        return [f"the configurations cannot be compared: {error}"]
    differences = [each for each in differences if not each.startswith(_KEYS_WITHOUT_EFFECT)]
    return ["configuration:", *(f"  {each}" for each in differences)] if differences else ["equal configurations"]


def _build_sides_table(divergence: RunDivergence, a: RunFolder, b: RunFolder) -> Table:
    table = Table("", *(escape(str(_shorten_path(folder.path))) for folder in (a, b)), show_lines=True)
    table.add_row("event", *(event.label if event else "no event" for event in (divergence.a, divergence.b)))
    table.add_row(
        "logged", *(f"{event.source}, {event.at_s:.4f} s" if event else "" for event in (divergence.a, divergence.b))
    )
    for name in list_differing_fields(divergence):
        first = _find_first_difference(name, divergence)
        label = f"{name} from index {first}" if first is not None else name
        sides = ((divergence.a, a), (divergence.b, b))
        table.add_row(label, *(escape(_format_side(name, first, event, folder)) for event, folder in sides))
    return table


def _shorten_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _find_first_difference(name: str, divergence: RunDivergence) -> int | None:
    """Return the index of the first array element that differs, or None if the field is not an array."""
    a, b = (event.contents.get(name) if event is not None else None for event in (divergence.a, divergence.b))
    if name not in _ELEMENT_BYTES or not isinstance(a, bytes) or not isinstance(b, bytes):
        return None
    shorter = min(len(a), len(b))
    place = next((place for place in range(shorter) if a[place] != b[place]), shorter)
    return place // _ELEMENT_BYTES[name]


def _format_side(name: str, first: int | None, event: ComparableEvent | None, folder: RunFolder) -> str:
    if event is None or name not in event.contents:
        return ""
    value = event.contents[name]
    if not isinstance(value, bytes) or name not in ("token_ids", "prompt_ids"):
        return pretty_format(value, name).removeprefix(f"{name} ")
    ids = bytes_to_ids(value)[first or 0 :]
    return escape_controls(f"{len(ids)} tokens: {make_excerpt(load_text_context(folder).tokenizer.decode(ids))}")
