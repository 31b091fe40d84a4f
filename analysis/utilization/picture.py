"""The report in one picture: what the engines, their caches, the tools and the trajectories did, over the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from analysis.plotting import BLUE, GREEN, GREY, ORANGE, PALETTE, PURPLE, dress, leave_headroom, new_figure, save
from analysis.utilization.curves import Floats
from analysis.utilization.report import Utilization

_EACH = len(PALETTE)  # so many engines have a line each; more are drawn as their mean, least and most
_WAITING = (("leasing", "a lease", ORANGE), ("calling", "tools", GREEN), ("grading", "their grade", PURPLE))
_STEPS = 60  # more borders would hide what they divide


def draw_utilization(use: Utilization, title: str, path: Path) -> Path:
    """Raises OSError."""
    subtitle = (
        f"{len(use.engines)} engines, {len(use.executors)} executors, {use.trajectories.ended:,} trajectories in "
        f"{use.span_s:,.1f} s; dotted lines are where steps begin"
    )
    figure, panels = new_figure(4, 1, title, subtitle, panel_inches=2.6)
    begin_s, bin_s = use.timeline.begin_s, use.timeline.bin_s
    count = len(use.timeline.trajectories["leasing"])
    times: Floats = begin_s + (np.arange(count) + 0.5) * np.float64(bin_s)
    engines = list(use.timeline.engines)
    running, cache, tools, waiting = panels
    _lines(running, times, engines, [_of(use, engine, "running") for engine in engines])
    _draw_cache(cache, times, use)
    _draw_tools(tools, times, use)
    _draw_waiting(waiting, times, use)
    dress(running, "Decode slots", "sequences that run on each engine", below="")
    dress(
        cache,
        "KV tokens",
        "of the capacity: leased by the arbiter; used, as the engine measures",
        percent=True,
        below="",
    )
    dress(tools, "Tools", "calls that run, and that wait for a slot", below="")
    dress(waiting, "Waiting trajectories", "by what they wait for", below="seconds since the logs' first line")
    for panel in panels:
        leave_headroom(panel, 0.25)
        panel.set_xlim(begin_s, begin_s + count * bin_s)
        for step in use.steps[:_STEPS]:
            panel.axvline(step.begin_s, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="upper right", ncols=6, fontsize=9.5, frameon=False, columnspacing=1.2, handlelength=1.2)
    return save(figure, path)


def _of(use: Utilization, engine: str, what: str) -> Floats:
    bins = use.timeline.engines[engine]
    return np.array(bins.get(what, [0.0] * len(bins["running"])))


def _lines(
    axes: Axes,
    times: Floats,
    names: Sequence[str],
    values: Sequence[Floats],
    style: str = "-",
    color: str = BLUE,
    what: str = "",
) -> None:
    """A line each, or of many the mean between the least and the most; `what` is told of it in the legend."""
    if not values:
        axes.text(0.5, 0.5, "not in the logs", transform=axes.transAxes, ha="center", color=GREY, fontsize=11)
    elif len(values) <= _EACH:
        for name, each, shade in zip(names, values, PALETTE, strict=False):
            axes.plot(times, each, color=shade, linewidth=1.4, linestyle=style, label=name)
    else:
        stacked = np.stack(values)
        axes.fill_between(times, stacked.min(axis=0), stacked.max(axis=0), color=color, alpha=0.2, linewidth=0)
        axes.plot(
            times, stacked.mean(axis=0), color=color, linewidth=1.6, linestyle=style, label=f"{what}mean of all engines"
        )


def _draw_cache(axes: Axes, times: Floats, use: Utilization) -> None:
    """Solid: leased. Dashed: used."""
    capacity = {engine.engine: engine.kv_tokens for engine in use.engines if engine.kv_tokens}
    for what, style, color in (("leased", "-", BLUE), ("used", "--", ORANGE)):
        shares = [_of(use, engine, what) / tokens for engine, tokens in capacity.items()]
        _lines(axes, times, [f"{engine} {what}" for engine in capacity], shares, style, color, f"{what}, ")


def _draw_tools(axes: Axes, times: Floats, use: Utilization) -> None:
    executors = use.timeline.executors.values()
    layers = [np.sum([each[what] for each in executors], axis=0) for what in ("running", "queued") if executors]
    if layers:
        axes.stackplot(times, layers, labels=("running", "queued"), colors=(GREEN, GREY), alpha=0.8, linewidth=0)


def _draw_waiting(axes: Axes, times: Floats, use: Utilization) -> None:
    layers = [np.array(use.timeline.trajectories[phase]) for phase, _, _ in _WAITING]
    labels = [f"wait for {what}" for _, what, _ in _WAITING]
    axes.stackplot(times, layers, labels=labels, colors=[color for *_, color in _WAITING], alpha=0.8, linewidth=0)
