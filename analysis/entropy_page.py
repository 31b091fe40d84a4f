"""Shows entropies of tokens: a table, a figure, and a page with dialogues that are coloured by entropy."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from rich.table import Table

from asterism.analysis.plotting import Color, Panel, draw_figure
from asterism.analysis.token_kinds import KINDS, EntropyStatistics, Kind, ScoredDialogue, ScoredToken
from asterism.configs.atomic_write import write_atomically

_COLORS: dict[Kind, Color] = {
    "reasoning": Color.BLUE,
    "reflection": Color.PURPLE,
    "call": Color.ORANGE,
    "answer": Color.GREEN,
}
_STYLE = """body{font:15px/1.6 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2933}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 ui-monospace,monospace;border:1px solid #e6eaef;padding:1rem}
.given{color:#8a94a3}.forking{text-decoration:underline;text-decoration-thickness:2px}
.legend span{padding:0 .4rem;margin-right:.6rem;border-radius:3px}"""


def build_entropy_table(statistics: EntropyStatistics) -> Table:
    title = (
        f"{statistics.tokens:,} generated tokens of {statistics.dialogues:,} dialogues, {statistics.mean_nats:.3f} nats"
    )
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    table.caption = f"forking: at least {statistics.forking_nats:.3f} nats, the highest fifth"
    table.add_column("kind", min_width=len("reflection"))
    for name in ("tokens", "nats", "forking"):
        table.add_column(name, justify="right", min_width=len("1,000,000"))
    table.add_column("most frequent forking tokens", overflow="ellipsis", no_wrap=True)
    for kind, each in statistics.kinds.items():
        texts = " ".join(f"{text!r}" for text, _ in each.common_forking_texts)
        table.add_row(kind, f"{each.tokens:,}", f"{each.mean_nats:.3f}", f"{each.forking_share:.1%}", texts)
    return table


def draw_entropy(dialogues: Sequence[ScoredDialogue], statistics: EntropyStatistics, title: str, path: Path) -> Path:
    """Draw, by kind, the share of tokens above each entropy and the share of forking tokens. Raises OSError."""
    subtitle = f"{statistics.tokens:,} generated tokens  ·  {statistics.mean_nats:.3f} nats on average"

    def draw_tail(axes: Axes) -> None:
        for kind in statistics.kinds:
            values = np.sort([token.entropy for each in dialogues for token in each.tokens if token.kind == kind])
            axes.plot(values, 1 - np.arange(len(values)) / len(values), color=_COLORS[kind], label=kind, linewidth=2)
        axes.axvline(statistics.forking_nats, color=Color.GREY, linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", fontsize=10, frameon=False)

    def draw_shares(axes: Axes) -> None:
        names = list(statistics.kinds)
        heights = [statistics.kinds[kind].forking_share for kind in names]
        axes.bar(names, heights, color=[_COLORS[kind] for kind in names], width=0.6)
        axes.set_xticks(range(len(names)), names)

    unit = "share of the kind's tokens"
    panels = [
        Panel("Tokens above an entropy", unit, draw_tail, percent=True, x_label="nats", headroom=None),
        Panel("Forking tokens", unit, draw_shares, percent=True, x_label="kind", headroom=None),
    ]
    return draw_figure(path, title, subtitle, panels, columns=2)


def write_entropy_page(
    dialogues: Sequence[ScoredDialogue], statistics: EntropyStatistics, title: str, path: Path
) -> None:
    """Write a self-contained HTML page. Raises OSError and DiskError."""
    legend = "".join(f'<span style="background:{_shade(_COLORS[kind], 0.6)}">{kind}</span>' for kind in KINDS)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p class=legend>{legend}<span class=given>not generated</span></p>",
        f"<p>A darker background is a higher entropy. Underlined: at least {statistics.forking_nats:.3f} nats, the highest "
        "fifth of all tokens.</p>",
    ]
    highest = max(statistics.lower_nats[-1], 1e-9)
    for dialogue in dialogues:
        parts.append(f"<h2>Trajectory {dialogue.trajectory_id}, reward {dialogue.reward:g}</h2><pre>")
        parts += [_render_token(token, statistics.forking_nats, highest) for token in dialogue.tokens]
        parts.append("</pre>")
    write_atomically(path, "".join(parts).encode())


def _render_token(token: ScoredToken, forking_nats: float, highest: float) -> str:
    text = escape(token.text)
    if token.kind is None:
        return f"<span class=given>{text}</span>"
    forking = " class=forking" if token.entropy >= forking_nats else ""
    shade = _shade(_COLORS[token.kind], 0.08 + 0.82 * min(1.0, token.entropy / highest))
    return f'<span{forking} style="background:{shade}" title="{token.kind}, {token.entropy:.3f} nats">{text}</span>'


def _shade(color: str, opacity: float) -> str:
    return f"{color}{round(255 * opacity):02x}"
