"""Builds the tables of `asterism plan`."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from asterism.analysis.planning.resources import PlannedCount, PlannedResource
from asterism.analysis.planning.run_plan import RunPlan
from asterism.configs.errors import format_bytes

_STATUS = {True: "[green]fits[/]", False: "[bold red]does not fit[/]"}


def build_plan_tables(plan: RunPlan) -> RenderableType:
    """Return tables of the resources, and lines with the time, the shortfalls and the assumptions."""
    title = f"{plan.name}: {plan.model_type}, {plan.parameters:,} parameters, {plan.layers} layers"
    return Group(escape(title), _build_resource_table(plan), *_list_lines(plan))


def _build_resource_table(plan: RunPlan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for resource in plan.resources:
        for item in resource.items:
            table.add_row(f"  {escape(item.purpose)}", format_bytes(item.bytes), escape(item.note))
        needed = f"[bold]{format_bytes(resource.needed_bytes)}[/]"
        table.add_row(f"[bold]{escape(resource.name)}[/]", needed, _describe(resource))
        table.add_section()
    return table


def _describe(resource: PlannedResource) -> str:
    if resource.available_bytes is None:
        return "unknown machine"
    return f"{_STATUS[resource.fits]}: {format_bytes(resource.available_bytes)} available"


def _list_lines(plan: RunPlan) -> Iterator[str]:
    for count in plan.counts:
        yield _describe_count(count)
    if plan.generated_tokens:
        yield f"batch of a step: {plan.trained_tokens:,.0f} tokens, {format_bytes(plan.batch_bytes)} on disk"
    elif plan.trained_tokens:
        yield f"step of the cold start: at most {plan.trained_tokens:,.0f} tokens"
    if plan.trained_tokens:
        yield from _describe_seconds(plan)
    for short in plan.shortfalls:
        yield f"[bold red]{escape(short.name)}[/]: {escape(describe_remedy(plan, short))}"
    assumed = ", ".join(f"{name} {value:g}" for name, value in plan.assumptions.items())
    yield from (f"[dim]{escape(line)}[/]" for line in (f"assumed: {assumed}", *plan.notes))


def _describe_count(count: PlannedCount) -> str:
    if count.unit == "bytes":
        limit = "" if count.limit is None else f" of {format_bytes(count.limit)}"
        return f"{count.name}: {format_bytes(count.needed)}{limit}, {_STATUS[count.fits]}"
    limit = "" if count.limit is None else f" of {count.limit:,.0f}"
    return f"{escape(count.name)}: {count.needed:,.0f}{limit}, {_STATUS[count.fits]}"


def _describe_seconds(plan: RunPlan) -> Iterator[str]:
    seconds = plan.seconds
    if seconds.tokens_per_s is not None and seconds.generation_s is not None:
        yield (
            f"generation: {seconds.generation_s:,.1f} s for {plan.generated_tokens:,.0f} tokens, "
            f"{seconds.tokens_per_s:,.0f} tokens/s, {seconds.running} concurrent sequences per copy of the model"
        )
    if seconds.training_s is not None:
        yield f"training: {seconds.training_s:,.1f} s for {seconds.training_flops:.2e} FLOP"
    if seconds.step_s is None:
        yield "step: unknown; name a GPU (--gpu), or measure this machine (--measure)"
    elif plan.generated_tokens:
        overlap = ", generation and training at the same time" if seconds.overlaps else ""
        yield f"step: {seconds.step_s:,.1f} s{overlap}, without tool calls and transfers of weights"


def describe_remedy(plan: RunPlan, short: PlannedResource | PlannedCount) -> str:
    """Describe values that suffice, or else the keys and a change of the machine."""
    found = [change.format() for change in plan.changes if change.resource == short.name]
    if found:
        return f"set {', or '.join(found)}"
    if not short.keys:
        return short.remedy
    keys = f"no value of one or two of these keys suffices: {', '.join(short.keys)}"
    return f"{short.remedy}; {keys}" if short.remedy else keys
