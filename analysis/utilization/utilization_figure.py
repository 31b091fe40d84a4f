"""Draw the utilization report: engines, KV caches, tools and waiting trajectories over time."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from asterism.analysis.plotting import PALETTE, Color, Panel, draw_figure
from asterism.analysis.utilization.report import Utilization
from asterism.analysis.utilization.step_functions import Floats
from asterism.analysis.utilization.step_time import format_count

_MAX_ENGINE_LINES = len(PALETTE)  # limit of lines; a figure of more engines shows mean and range
_WAITING = (  # phase, awaited, color
    ("leasing", "a lease", Color.ORANGE),
    ("calling", "tools", Color.GREEN),
    ("grading", "grading", Color.PURPLE),
)
_KV_TOKENS = "share of the capacity: leased by the arbiter; used as measured by the engine"
_MAX_STEP_BORDERS = 60  # more lines would hide the curves


def draw_utilization(use: Utilization, title: str, path: Path) -> Path:
    """Draw the report and return the figure's path. Raises OSError."""
    span_s = len(use.timeline.trajectories["leasing"]) * use.timeline.bin_s
    counts = (len(use.engines), "engine"), (len(use.executors), "executor"), (use.trajectories.ended, "trajectory")
    pauses = f", without pauses of {use.paused_s:,.0f} s" if use.paused_s else ""
    subtitle = (
        f"{', '.join(format_count(*each) for each in counts)} in {span_s:,.1f} s{pauses}; dotted lines: starts of steps"
    )
    panels = [
        Panel("Decode slots", "running sequences of each engine", partial(_draw_over_time, use, _draw_running)),
        Panel("KV tokens", _KV_TOKENS, partial(_draw_over_time, use, _draw_cache), percent=True),
        Panel(
            "Tools", "calls in fork servers, and calls queued before them", partial(_draw_over_time, use, _draw_tools)
        ),
        Panel("Waiting trajectories", "by cause", partial(_draw_over_time, use, _draw_waiting)),
    ]
    panels = [panel._replace(x_label="", headroom=0.25) for panel in panels]
    panels[-1] = panels[-1]._replace(x_label="seconds since the logs' first line, without pauses")
    return draw_figure(path, title, subtitle, panels, columns=1, panel_inches=2.6)


def _draw_over_time(use: Utilization, draw: Callable[[Axes, Floats, Utilization], None], axes: Axes) -> None:
    """Draw curves over the report's time, with the starts of the steps."""
    begin_s, bin_s, count = use.timeline.begin_s, use.timeline.bin_s, len(use.timeline.trajectories["leasing"])
    draw(axes, begin_s + (np.arange(count) + 0.5) * np.float64(bin_s), use)
    axes.set_xlim(begin_s, begin_s + count * bin_s)
    for step in use.steps[:_MAX_STEP_BORDERS]:
        axes.axvline(step.begin_s, color=Color.GREY, linewidth=0.8, linestyle=":", zorder=1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", ncols=6, fontsize=9.5, frameon=False, columnspacing=1.2, handlelength=1.2)


def _draw_running(axes: Axes, times: Floats, use: Utilization) -> None:
    _draw_lines(axes, times, {engine: _get_bins(use, engine, "running") for engine in use.timeline.engines})


def _get_bins(use: Utilization, engine: str, what: str) -> Floats:
    bins = use.timeline.engines[engine]
    return np.array(bins.get(what, [0.0] * len(bins["running"])))


def _draw_lines(
    axes: Axes, times: Floats, curves: Mapping[str, Floats], style: str = "-", color: str = Color.BLUE, what: str = ""
) -> None:
    """Draw a line for each engine, or the mean and range of many engines; `what` is for the legend."""
    if not curves:
        axes.text(0.5, 0.5, "not in the logs", transform=axes.transAxes, ha="center", color=Color.GREY, fontsize=11)
    elif len(curves) <= _MAX_ENGINE_LINES:
        for (name, values), shade in zip(curves.items(), PALETTE, strict=False):
            axes.plot(times, values, color=shade, linewidth=1.4, linestyle=style, label=name)
    else:
        stacked = np.stack(list(curves.values()))
        axes.fill_between(times, stacked.min(axis=0), stacked.max(axis=0), color=color, alpha=0.2, linewidth=0)
        axes.plot(
            times, stacked.mean(axis=0), color=color, linewidth=1.6, linestyle=style, label=f"{what}mean of all engines"
        )


def _draw_cache(axes: Axes, times: Floats, use: Utilization) -> None:
    """Draw leased KV tokens as solid lines and used KV tokens as dashed lines."""
    capacity = {engine.engine: engine.kv_tokens for engine in use.engines if engine.kv_tokens}
    for what, style, color in (("leased", "-", Color.BLUE), ("used", "--", Color.ORANGE)):
        shares = {f"{engine} {what}": _get_bins(use, engine, what) / tokens for engine, tokens in capacity.items()}
        _draw_lines(axes, times, shares, style, color, f"{what}, ")


def _draw_tools(axes: Axes, times: Floats, use: Utilization) -> None:
    executors = use.timeline.executors.values()
    layers = [np.sum([each[what] for each in executors], axis=0) for what in ("running", "queued") if executors]
    if layers:
        names, colors = ("in fork servers", "queued"), (Color.GREEN, Color.GREY)
        axes.stackplot(times, layers, labels=names, colors=colors, alpha=0.8, linewidth=0)


def _draw_waiting(axes: Axes, times: Floats, use: Utilization) -> None:
    layers = [np.array(use.timeline.trajectories[phase]) for phase, _, _ in _WAITING]
    labels = [f"wait for {what}" for _, what, _ in _WAITING]
    axes.stackplot(times, layers, labels=labels, colors=[color for *_, color in _WAITING], alpha=0.8, linewidth=0)
