"""Draw the utilization report: engines, KV caches, tools and waiting trajectories over time."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from asterism.analysis.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    leave_headroom,
    make_figure,
    save_figure,
    style_axes,
)
from asterism.analysis.utilization.report import Utilization
from asterism.analysis.utilization.step_functions import Floats
from asterism.analysis.utilization.step_time import format_count

_MAX_ENGINE_LINES = len(PALETTE)  # limit of lines; a figure of more engines shows mean and range
_WAITING = (("leasing", "a lease", ORANGE), ("calling", "tools", GREEN), ("grading", "grading", PURPLE))
_MAX_STEP_BORDERS = 60  # more lines would hide the curves


def draw_utilization(use: Utilization, title: str, path: Path) -> Path:
    """Draw the report and return the figure's path. Raises OSError."""
    begin_s, bin_s = use.timeline.begin_s, use.timeline.bin_s
    count = len(use.timeline.trajectories["leasing"])
    counts = (len(use.engines), "engine"), (len(use.executors), "executor"), (use.trajectories.ended, "trajectory")
    pauses = f", without pauses of {use.paused_s:,.0f} s" if use.paused_s else ""
    subtitle = (
        f"{', '.join(format_count(*each) for each in counts)} in {count * bin_s:,.1f} s{pauses}; "
        "dotted lines: starts of steps"
    )
    figure, panels = make_figure(4, 1, title, subtitle, panel_inches=2.6)
    times: Floats = begin_s + (np.arange(count) + 0.5) * np.float64(bin_s)
    running, cache, tools, waiting = panels
    _draw_lines(running, times, {engine: _get_bins(use, engine, "running") for engine in use.timeline.engines})
    _draw_cache(cache, times, use)
    _draw_tools(tools, times, use)
    _draw_waiting(waiting, times, use)
    style_axes(running, "Decode slots", "running sequences of each engine", x_label="")
    shares = "share of the capacity: leased by the arbiter; used as measured by the engine"
    style_axes(cache, "KV tokens", shares, percent=True, x_label="")
    style_axes(tools, "Tools", "calls in fork servers, and calls queued before them", x_label="")
    style_axes(
        waiting, "Waiting trajectories", "by cause", x_label="seconds since the logs' first line, without pauses"
    )
    for panel in panels:
        leave_headroom(panel, 0.25)
        panel.set_xlim(begin_s, begin_s + count * bin_s)
        for step in use.steps[:_MAX_STEP_BORDERS]:
            panel.axvline(step.begin_s, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper right", ncols=6, fontsize=9.5, frameon=False, columnspacing=1.2, handlelength=1.2)
    return save_figure(figure, path)


def _get_bins(use: Utilization, engine: str, what: str) -> Floats:
    bins = use.timeline.engines[engine]
    return np.array(bins.get(what, [0.0] * len(bins["running"])))


def _draw_lines(
    axes: Axes, times: Floats, curves: Mapping[str, Floats], style: str = "-", color: str = BLUE, what: str = ""
) -> None:
    """Draw a line for each engine, or the mean and range of many engines; `what` is for the legend."""
    if not curves:
        axes.text(0.5, 0.5, "not in the logs", transform=axes.transAxes, ha="center", color=GREY, fontsize=11)
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
    for what, style, color in (("leased", "-", BLUE), ("used", "--", ORANGE)):
        shares = {f"{engine} {what}": _get_bins(use, engine, what) / tokens for engine, tokens in capacity.items()}
        _draw_lines(axes, times, shares, style, color, f"{what}, ")


def _draw_tools(axes: Axes, times: Floats, use: Utilization) -> None:
    executors = use.timeline.executors.values()
    layers = [np.sum([each[what] for each in executors], axis=0) for what in ("running", "queued") if executors]
    if layers:
        axes.stackplot(
            times, layers, labels=("in fork servers", "queued"), colors=(GREEN, GREY), alpha=0.8, linewidth=0
        )


def _draw_waiting(axes: Axes, times: Floats, use: Utilization) -> None:
    layers = [np.array(use.timeline.trajectories[phase]) for phase, _, _ in _WAITING]
    labels = [f"wait for {what}" for _, what, _ in _WAITING]
    axes.stackplot(times, layers, labels=labels, colors=[color for *_, color in _WAITING], alpha=0.8, linewidth=0)
