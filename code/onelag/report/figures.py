"""The figures of a study: loss curves, gaps, and the search for learning rates. Each states model size, tokens, corpus and n, and is a function of results."""

import math
from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from onelag.report.scale import describe, seeds, short
from onelag.report.statistics import mean_interval
from onelag.report.store import Result
from onelag.report.study import HEADLINE, SYNC, Study, TuningRow, label
from onelag.report.style import COLUMN, footnote, look, new_figure
from onelag.report.summary import Cell

PANEL = 1.75  # inches
_HALO = [withStroke(linewidth=1.6, foreground="white")]


def loss_curves(study: Study, protocol: str, width: float) -> Figure:
    """Validation loss against tokens, one panel per optimizer; mean over seeds and the band of its 95 % t interval. At column width: the headline optimizers.

    The last point of a curve is the final validation, on more tokens than those before it. A mean ends with a cross where a seed diverged.
    """
    optimizers = [o for o in study.optimizers if width > COLUMN or o in HEADLINE] or study.optimizers[:2]
    figure, panels = _panels(optimizers, width)
    counts = []
    for axes, optimizer in panels:
        drawn = []
        for mode in study.modes:
            rows = study.cell(protocol, optimizer, mode)
            if rows:
                counts.append(len(rows))
                drawn.append((look(mode, study.modes), *_common_curve([row.result for row in rows])))
        _draw_curves(axes, drawn)
        # the first points would squash the rest
        top = [losses.mean(axis=0)[len(tokens) // 6 :].max() for _, tokens, losses, _ in drawn if len(tokens)]
        low = [losses.mean(axis=0).min() for _, tokens, losses, _ in drawn if len(tokens)]
        if top:
            axes.set_ylim(top=max(top) + 0.05 * (max(top) - min(low)) + 1e-3)
            _zoom(axes, drawn)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(x) if x > 0 else "0"))
        axes.xaxis.set_major_locator(MaxNLocator(4))
    _label_outer(panels, "tokens", "validation loss (nats)")
    _legend(figure, [Line2D([], [], color=s["color"], linestyle=s["line"], label=m) for m in study.modes if (s := look(m, study.modes))])
    footnote(figure, _caption(study, protocol, counts, width, "band: 95 % t" if max(counts, default=0) > 1 else "no band"))
    return figure


def gap_bars(study: Study, protocol: str, cells: Sequence[Cell], width: float) -> Figure:
    """Loss minus that of sync: bars with 95 % intervals, each seed a dot. A cell with diverged runs reaches the top and says how many."""
    cells = [cell for cell in cells if cell.protocol == protocol and cell.gap is not None and cell.gap.n]
    optimizers = [o for o in study.optimizers if any(cell.optimizer == o for cell in cells)]
    modes = [mode for mode in study.modes if mode != SYNC]
    figure = new_figure(width, 2.2)
    axes = figure.subplots()
    ceiling = _ceiling(study, protocol, cells)
    for cell in cells:
        style = look(cell.mode, study.modes)
        bar = 0.8 / len(modes)
        x = optimizers.index(cell.optimizer) + (modes.index(cell.mode) - (len(modes) - 1) / 2) * bar
        gone = not math.isfinite(cell.gap.value)
        height = cell.gap.value if not gone else ceiling if cell.diverged else 0.0  # 0: sync diverged and this mode did not
        axes.bar(
            x,
            height,
            0.92 * bar,
            facecolor=(*style["color"][:3], style["fill"]),
            edgecolor=style["color"],
            hatch=style["hatch"],
            linewidth=0.8,
        )
        losses, base = study.paired(protocol, (cell.optimizer, cell.mode), (cell.optimizer, SYNC))
        dots = _seed_gaps(losses, base)
        beside = 0.27 * bar + np.linspace(-0.12, 0.12, len(dots)) * bar if len(dots) > 1 else np.zeros(len(dots))
        axes.plot(
            x + beside,
            dots,
            linestyle="",
            marker=style["marker"],
            color="white",
            markeredgecolor="0.1",
            markersize=2.6,
            markeredgewidth=0.5,
            zorder=4,
        )
        if gone:
            words = f"{cell.diverged}/{cell.n}\ndiverged" if cell.diverged else "sync\ndiverged"
            place = {"ha": "center", "va": "top" if cell.diverged else "bottom", "fontsize": 5}
            axes.annotate(words, (x, height), zorder=6, path_effects=_HALO, **place)
        elif math.isfinite(cell.gap.low):
            error = [[cell.gap.value - cell.gap.low], [cell.gap.high - cell.gap.value]]
            axes.errorbar(x, cell.gap.value, error, color="0.1", elinewidth=0.9, capsize=2.2, capthick=0.9, zorder=5)
    axes.axhline(0, color="0.1", linewidth=0.8)
    crowded = len(optimizers) > (5 if width <= COLUMN else 12)
    axes.set_xticks(range(len(optimizers)), [label(o) for o in optimizers], rotation=45 if crowded else 0)
    axes.set_xlim(-0.6, len(optimizers) - 0.4)
    axes.grid(False, axis="x")
    axes.set_ylabel("loss − sync loss (nats)")
    sns.despine(figure)
    _legend(
        figure,
        [
            Patch(facecolor=(*s["color"][:3], s["fill"]), edgecolor=s["color"], hatch=s["hatch"], label=m)
            for m in modes
            if (s := look(m, study.modes))
        ],
    )
    footnote(figure, _caption(study, protocol, [cell.gap.n for cell in cells], width, "bars: mean, 95 % t; dots: seeds"))
    return figure


def learning_rates(study: Study, tuning: Sequence[TuningRow], width: float) -> Figure:
    """Final loss against the peak learning rate, one panel per optimizer. A ring marks the chosen rate, "edge" one at the end of its grid, a cross a divergence."""
    optimizers = [o for o in dict.fromkeys(row.optimizer for row in tuning) if width > COLUMN or o in HEADLINE] or [tuning[0].optimizer]
    modes = [mode for mode in study.modes if any(row.mode == mode for row in tuning)]
    modes += [mode for mode in dict.fromkeys(row.mode for row in tuning) if mode not in modes]
    figure, panels = _panels(optimizers, width)
    for axes, optimizer in panels:
        of_panel = [row for row in tuning if row.optimizer == optimizer]
        finite = [row.result.metrics["final"]["validation_loss"] for row in of_panel if not row.result.diverged]
        top = max(finite, default=1.0)
        for mode in modes:
            style = look(mode, modes)
            rates = sorted({row.learning_rate for row in of_panel if row.mode == mode})
            mean = []
            for rate in rates:
                rows = [row for row in of_panel if row.mode == mode and row.learning_rate == rate]
                losses = [row.result.metrics["final"]["validation_loss"] for row in rows]
                mean.append(math.nan if any(row.result.diverged for row in rows) else float(np.mean(losses)))
                if any(row.result.diverged for row in rows):
                    axes.plot(rate, top, marker="x", color=style["color"], markersize=6, markeredgewidth=1.4)
                if any(row.chosen for row in rows) and math.isfinite(mean[-1]):
                    axes.plot(
                        rate,
                        mean[-1],
                        marker="o",
                        markersize=9,
                        markerfacecolor="none",
                        markeredgecolor=style["color"],
                        markeredgewidth=1.1,
                    )
                    if any(row.at_edge for row in rows):
                        offset = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 5.5}
                        axes.annotate("edge", (rate, mean[-1]), **offset, color=style["color"], path_effects=_HALO, zorder=6)
            axes.plot(rates, mean, color=style["color"], linestyle=style["line"], marker=style["marker"])
        axes.set_xscale("log", base=2)
        ticks = sorted({row.learning_rate for row in of_panel})
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], rotation=45 if len(ticks) > 4 else 0)
        axes.minorticks_off()
        axes.margins(x=0.12, y=0.15)
    _label_outer(panels, "peak learning rate", "final validation loss (nats)")
    handles = [Line2D([], [], color=s["color"], linestyle=s["line"], marker=s["marker"], label=m) for m in modes if (s := look(m, modes))]
    ring = Line2D([], [], linestyle="", marker="o", markersize=6, markerfacecolor="none", markeredgecolor="0.3", label="chosen")
    _legend(figure, [*handles, ring])
    count = [len({row.seed for row in tuning if row.optimizer == optimizer}) for optimizer in optimizers]
    text = f"{describe(row.result for row in tuning)}\n{seeds(count)} per point, on tuning seeds that no table uses; {study.experiment}, tier {study.tier}"
    footnote(figure, text)
    return figure


def _draw_curves(axes: Axes, drawn: Sequence[tuple]) -> None:
    for style, tokens, losses, cut in drawn:
        estimates = [mean_interval(values) for values in losses.T]
        mean = np.array([e.value for e in estimates])
        axes.plot(tokens, mean, color=style["color"], linestyle=style["line"])
        if len(losses) > 1 and len(tokens):
            low, high = (np.array([getattr(e, end) for e in estimates]) for end in ("low", "high"))
            axes.fill_between(tokens, low, high, color=style["color"], alpha=0.2, linewidth=0)
        if cut and len(tokens):
            axes.plot(tokens[-1], mean[-1], marker="x", color=style["color"], markersize=6, markeredgewidth=1.5, path_effects=_HALO)


def _zoom(axes: Axes, drawn: Sequence[tuple]) -> None:
    """The last quarter of training again, larger, in the corner that falling curves leave empty."""
    end = max(tokens[-1] for _, tokens, _, _ in drawn if len(tokens))
    late = [losses.mean(axis=0)[tokens >= 0.75 * end] for _, tokens, losses, _ in drawn]
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    corner = [losses.mean(axis=0)[tokens >= (left + right) / 2] for _, tokens, losses, _ in drawn]
    if len(np.concatenate(late)) < 2 * len(drawn) or np.concatenate(corner).max() > bottom + 0.42 * (top - bottom):
        return
    inset = axes.inset_axes((0.52, 0.44, 0.48, 0.5))
    _draw_curves(inset, drawn)
    late = np.concatenate(late)
    margin = 0.15 * (late.max() - late.min()) + 1e-4
    inset.set(xlim=(0.75 * end, 1.01 * end), ylim=(late.min() - margin, late.max() + margin), xticks=[])
    inset.yaxis.set_major_locator(MaxNLocator(3))
    inset.tick_params(labelsize=5, pad=1, length=0)
    inset.set_title("last quarter", fontsize=5, pad=1.5)


def _common_curve(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, bool]:
    """Tokens (k,), validation losses (seeds, k) over the points that every seed has with a finite loss, and whether a divergence cut them short."""
    points = []
    for result in results:
        curve = result.metrics["curve"]
        points.append({tokens: loss for tokens, loss in zip(curve["tokens"], curve["validation_loss"]) if loss is not None})
    tokens = sorted(set.intersection(*(set(p) for p in points)))
    losses = np.array([[p[t] for t in tokens] for p in points], dtype=np.float64).reshape(len(points), len(tokens))
    return np.array(tokens, dtype=np.float64), losses, any(result.diverged for result in results)


def _seed_gaps(losses: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Differences of the seeds that finished in both, (≤ n,)."""
    finite = np.isfinite(losses) & np.isfinite(base)
    return losses[finite] - base[finite]


def _ceiling(study: Study, protocol: str, cells: Sequence[Cell]) -> float:
    """How high a bar stands whose mean is infinite: above everything finite."""
    finite = [end for cell in cells for end in (cell.gap.value, cell.gap.high) if math.isfinite(end)]
    for cell in cells:
        losses, base = study.paired(protocol, (cell.optimizer, cell.mode), (cell.optimizer, SYNC))
        finite += _seed_gaps(losses, base).tolist()
    return 1.25 * max([*finite, 0.01])


def _panels(optimizers: Sequence[str], width: float) -> tuple[Figure, list[tuple[Axes, str]]]:
    columns = min(len(optimizers), 2 if width <= COLUMN else 3)
    rows = math.ceil(len(optimizers) / columns)
    figure = new_figure(width, rows * PANEL + 0.55)
    grid = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axes in grid[len(optimizers) :]:
        axes.set_visible(False)
    panels = list(zip(grid, optimizers))
    for axes, optimizer in panels:
        axes.set_title(label(optimizer))
    sns.despine(figure)
    return figure, panels


def _label_outer(panels: list[tuple[Axes, str]], x: str, y: str) -> None:
    for axes, _ in panels:
        place = axes.get_subplotspec()
        axes.set_xlabel(x)
        if place.is_first_col():
            axes.set_ylabel(y)


def _legend(figure: Figure, handles: list) -> None:
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=2.8, handleheight=1.1, columnspacing=1.4)


def _caption(study: Study, protocol: str, counts: Sequence[int], width: float, drawn: str) -> str:
    results = [row.result for row in study.rows if row.protocol == protocol]
    rate = {"kept": "learning rate tuned for sync", "retuned": "learning rate tuned per mode"}.get(protocol, protocol)
    parts = [describe(results), f"{seeds(counts)}; {drawn}; {rate}", f"{study.experiment}, tier {study.tier}"]
    return f"{parts[0]}\n{parts[1]}\n{parts[2]}" if width <= COLUMN else f"{parts[0]}; {parts[1]}\n{parts[2]}"
