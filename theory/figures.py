"""Figures of the theory: each a function of a result file, at column width, readable in grey (line styles and markers carry the meaning)."""

from pathlib import Path

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns

from theory.store import RESULTS, read

COLUMN = 3.35  # inches
STYLES = {
    "sync": ("-", "o", "0.0"),
    "delayed": ("--", "s", "#b2182b"),
    "error feedback": ("-.", "^", "#2166ac"),
    "other": (":", "D", "0.45"),
}


def _axes(height: float = 2.5, columns: int = 1, width: float = COLUMN):
    sns.set_theme(
        context="paper",
        style="ticks",
        font_scale=0.85,
        rc={"lines.linewidth": 1.3, "lines.markersize": 3.5, "legend.frameon": False, "legend.fontsize": 6.5},
    )
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def _save(figure, name: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    sns.despine(figure)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    figure.savefig(paths[0], dpi=300)
    figure.savefig(paths[1], metadata={"CreationDate": None})
    plt.close(figure)
    return paths


def stability(results: Path) -> plt.Figure:
    rows = read("curves", results)["stability"]
    figure, axis = _axes(3.0)
    age = [1 / (1 - row["beta"]) for row in rows]
    lines = (
        ("EMA, no delay", "-", "0.0"), ("Nesterov, no delay", "-", "0.6"), ("Nesterov, delayed + error feedback", "--", "#2166ac"),
        ("EMA, delayed, best coefficient", ":", "0.3"), ("EMA, delayed + error feedback", "-.", "#2166ac"), ("EMA, delayed", "--", "#b2182b"),
    )  # fmt: skip
    for name, style, colour in lines:
        axis.plot(age, [row[name] for row in rows], style, color=colour, label=name)
    axis.axvline(2, color="0.8", lw=0.7, zorder=0)
    axis.text(2.1, 200, "β = 1/2", fontsize=6, color="0.4")
    axis.set(xscale="log", yscale="log", xlabel="momentum memory 1/(1−β) (steps)", ylabel="largest stable ηλ", ylim=(0.5, 500))
    figure.legend(loc="outside upper center", ncols=2, fontsize=5.4, labelspacing=0.3, columnspacing=1.0)
    return figure


def variance(results: Path) -> plt.Figure:
    rows = [row for row in read("curves", results)["variance"] if row["beta"] == 0.9]
    figure, axis = _axes()
    for name, key in (("delayed", "delayed"), ("error feedback at x", "error feedback"), ("error feedback at z", "other")):
        style, _, colour = STYLES[key]
        kept = [row for row in rows if row[name] is not None]
        axis.plot([row["eta_lambda"] for row in kept], [row[name] for row in kept], style, color=colour, label=name)
    axis.axhline(1, color="0.8", lw=0.7, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="ηλ (EMA momentum, β = 0.9)", ylabel="variance / undelayed variance", ylim=(0.9, 30))
    axis.legend()
    return figure


def adam(results: Path) -> plt.Figure:
    data = read("curves", results)["adam"]
    figure, (left, right) = _axes(2.3, 2, 2 * COLUMN)
    x = [row["eta_lambda_over_sigma"] for row in data["prediction"]]
    for scheme in ("sync", "delayed", "error feedback"):
        style, marker, colour = STYLES[scheme]
        left.plot(x, [row[scheme] for row in data["prediction"]], style, color=colour, label=f"{scheme}: predicted")
        left.plot(
            data["simulated"]["eta_lambda_over_sigma"],
            data["simulated"][scheme],
            marker,
            color=colour,
            mfc="white",
            label=f"{scheme}: simulated",
        )
    left.set(xscale="log", yscale="log", xlabel=f"ηλ/σ (Adam, β₁ = {data['beta1']}, β₂ = 0.9995)", ylabel="λ · rms of the coordinate / σ")
    left.legend(ncols=1, fontsize=5.8)
    beta = [row["beta1"] for row in data["floor_ratio"]]
    for scheme in ("delayed", "error feedback"):
        style, _, colour = STYLES[scheme]
        right.plot(beta, [row[scheme] for row in data["floor_ratio"]], style, color=colour, label=scheme)
    right.set(yscale="log", xlabel="β₁", ylabel="noiseless floor of Adam / sync")
    right.legend()
    return figure


def momentum(results: Path) -> plt.Figure:
    data = read("curves", results)["momentum"]
    figure, (left, right) = _axes(2.2, 2, 2 * COLUMN)
    for axis, key, title in ((left, "linear", "SGD with momentum, exact"), (right, "muon", "polar-factor steps, 6 seeds")):
        for marker, sigma in zip("os^D", sorted({row["sigma"] for row in data[key]})):
            rows = [row for row in data[key] if row["sigma"] == sigma]
            for scheme, filled in (("delayed", True), ("error feedback", False)):
                style, _, colour = STYLES[scheme]
                face = colour if filled else "white"
                axis.plot(
                    [row["beta"] for row in rows],
                    [row[scheme] for row in rows],
                    style,
                    marker=marker,
                    color=colour,
                    mfc=face,
                    label=f"{scheme}, σ = {sigma:g}",
                )
        axis.axhline(1, color="0.8", lw=0.7, zorder=0)
        axis.set(yscale="log", xlabel="β", title=title, ylim=(0.85, None))
        axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.set_yticks([1, 2, 5, 10, 20])
    left.set_ylabel("tuned loss / tuned sync loss")
    for axis in (left, right):
        axis.legend(fontsize=5.3, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def constants(results: Path) -> plt.Figure:
    rows = read("constants", results)["rows"]
    figure, axes = _axes(2.5, 2, 2 * COLUMN)
    looks = {(0, 0.0): ("-", "o", "0.0", "no delay"), (1, 0.0): ("--", "s", "#b2182b", "delay 1"), (2, 0.0): (":", "D", "0.45", "delay 2"),
             (1, 0.5): ("-", "v", "#67a9cf", "delay 1, half correction"), (1, 1.0): ("-.", "^", "#2166ac", "delay 1, error feedback")}  # fmt: skip
    for axis, metric in zip(axes, ("minimum", "average")):
        for (delay, theta), (style, marker, colour, label) in looks.items():
            mine = [row for row in rows if row["delay"] == delay and row["theta"] == theta and row["metric"] == metric]
            axis.plot([row["steps"] for row in mine], [row["upper"] for row in mine], style, marker=marker, color=colour, label=label)
            low = [row for row in mine if row["lower"] is not None]
            axis.plot([row["steps"] for row in low], [row["lower"] for row in low], style, marker=marker, color=colour, mfc="white", lw=0.8)
        axis.set(
            xlabel="steps N",
            title=f"{metric} over t < N",
            ylabel="constant of Lγ",
            ylim=(0, None),
            xticks=sorted({row["steps"] for row in rows}),
        )
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=5,
        fontsize=5.8,
        title="filled: upper side (proved); open: explicit instance",
        title_fontsize=6,
    )
    return figure


def ratios(results: Path) -> plt.Figure:
    rows = [row for row in read("checks", results)["numeric"] if row["label"].endswith("(mean)") and row["ratio_median"] > 0]
    figure, axis = _axes(4.2)
    names = [row["label"].removesuffix(" (mean)") for row in rows]
    y = np.arange(len(rows))
    axis.hlines(y, [row["ratio_min"] for row in rows], [row["ratio_max"] for row in rows], color="0.75", lw=2)
    axis.plot([row["ratio_median"] for row in rows], y, "o", color="0.0", label="median")
    axis.plot([row["ratio_min"] for row in rows], y, "|", color="#b2182b", ms=6, label="tightest instance")
    axis.axvline(1, color="0.4", lw=0.7)
    axis.set_yticks(y, names, fontsize=4.8)
    axis.set(
        xscale="log", xlabel=f"bound / measured\n(n ≥ {min(row['instances'] for row in rows)} instances each)", ylim=(len(rows) - 0.5, -0.5)
    )
    axis.legend(loc="upper right", bbox_to_anchor=(1.0, 1.08), ncols=2)
    return figure


def tightness(results: Path) -> plt.Figure:
    rows = list(read("tightness", results)["rows"])
    if (results / "language_model.json").exists():  # measured apart, by `python -m onelag.experiments.theory_tightness`
        rows += read("language_model", results)["rows"]
    terms = ("start", "noise", "drift", "curvature")
    top = 2 * max(max(row["allowed"].values()) for row in rows)
    sns.set_theme(context="paper", style="ticks", font_scale=0.8, rc={"legend.frameon": False})
    across = 4
    down = -(-len(rows) // across)
    figure, axes = plt.subplots(down, across, figsize=(2 * COLUMN, 1.6 * down + 0.3), layout="constrained", sharey=True, squeeze=False)
    for axis, row in zip(axes.flat, rows):
        x = np.arange(len(terms))
        floor = 1e-4
        axis.bar(
            x - 0.2,
            [max(row["allowed"][t], floor) for t in terms],
            0.38,
            color="0.75",
            edgecolor="0.2",
            lw=0.5,
            label="allowed by the bound",
        )
        axis.bar(
            x + 0.2,
            [max(row["used"][t], floor) for t in terms],
            0.38,
            color="#2166ac",
            edgecolor="0.2",
            lw=0.5,
            hatch="///",
            label="used by the run",
        )
        axis.set_title(f"{row['case']}\nn = {row['n']}, bound / measured = {row['bound_over_measured']:.3g}", fontsize=6)
        axis.set_xticks(x, terms, fontsize=5.2)
        axis.set(yscale="log", ylim=(1e-3, top))
        axis.tick_params(axis="y", labelsize=6)
        axis.axhline(1, color="0.4", lw=0.6)
    for axis in list(axes.flat)[len(rows) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel(r"term / mean $\|\nabla f\|_*$", fontsize=7)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=6, loc="outside upper center", ncols=2)
    return figure


def cycles(results: Path) -> plt.Figure:
    data = read("curves", results)["cycles"]
    figure, (left, right) = _axes(2.3, 2, 2 * COLUMN)
    delay = [row["delay"] for row in data["residual"]]
    left.plot(delay, [row["bound"] for row in data["residual"]], "--s", color="#b2182b", label="Theorem 1(b), T → ∞")
    left.plot(delay, [row["exact"] for row in data["residual"]], "-o", color="0.0", label="exact limit cycle")
    left.set(xlabel="delay τ (steps)", ylabel="mean |f′| / (Lη), no momentum")
    left.legend()
    age = [1 / row["alpha"] for row in data["amplitudes"]]
    for key, predicted, colour, label in (("θ = 0", True, "#b2182b", "delayed"), ("θ = 1", True, "#2166ac", "error feedback")):
        if predicted:
            right.plot(
                age, [row[f"predicted, {key}"] for row in data["amplitudes"]], "--", color=colour, lw=0.9, label=f"{label}: heuristic"
            )
        right.plot(
            age, [row[f"simulated, {key}"] for row in data["amplitudes"]], "o", color=colour, mfc="white", label=f"{label}: simulated"
        )
    right.plot(
        age,
        [row["simulated, Nesterov, θ = 1"] for row in data["amplitudes"]],
        "-.^",
        color="0.45",
        label="error feedback + Nesterov: simulated",
    )
    right.plot(age, [row["simulated, no delay"] for row in data["amplitudes"]], "-D", color="0.0", label="no delay: simulated")
    right.set(xscale="log", yscale="log", xlabel="momentum memory 1/α (steps)", ylabel="cycle amplitude of z / η")
    right.set_yticks([2, 5, 10], ["2", "5", "10"])
    right.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    right.legend(fontsize=5.3, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


FIGURES = {
    "stability": stability,
    "variance": variance,
    "adam": adam,
    "momentum": momentum,
    "constants": constants,
    "ratios": ratios,
    "tightness": tightness,
    "cycles": cycles,
}


def draw_all(results: Path = RESULTS) -> list[Path]:
    """Every figure as PNG and PDF under <results>/figures."""
    paths = []
    for name, draw in FIGURES.items():
        paths += _save(draw(results), name, results / "figures")
    return paths
