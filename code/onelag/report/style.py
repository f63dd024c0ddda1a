"""How figures look and how they are saved: readable in grey and at column width, the same bytes from the same inputs, a sidecar that names those inputs."""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import matplotlib as mpl
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onelag.report.store import write_atomically
from onelag.report.study import CORRECTED, DELAYED, SYNC, StudyRow, TuningRow

COLUMN, FULL = 3.4, 7.0  # inches: one column and the full width of a two-column page
_PALETTE = sns.color_palette("colorblind")
# Colours differ in lightness too, and each mode has its own line, marker and hatch, so that a grey print tells them apart.
COLOURS = {SYNC: (0.13, 0.13, 0.13), DELAYED: _PALETTE[3], CORRECTED: sns.light_palette(_PALETTE[0], 10)[6]}
LINES = {SYNC: "-", DELAYED: "--", CORRECTED: (0, (1, 1.1))}
MARKERS = {SYNC: "o", DELAYED: "s", CORRECTED: "^"}
FILLS = {SYNC: 0.8, DELAYED: 0.7, CORRECTED: 0.3}
HATCHES = {SYNC: "", DELAYED: "////", CORRECTED: ".."}
_MORE = (("-.", "D", "xx"), ((0, (3, 1, 1, 1, 1, 1)), "v", "\\\\\\\\"), ((0, (5, 5)), "P", "++"), ((0, (1, 3)), "X", "oo"))


def look(mode: str, modes: Iterable[str]) -> dict:
    """{"color", "fill" (opacity of bars), "line", "marker", "hatch"} of a mode; modes beyond the three known ones get looks in the order in which they come."""
    if mode in COLOURS:
        return {"color": COLOURS[mode], "fill": FILLS[mode], "line": LINES[mode], "marker": MARKERS[mode], "hatch": HATCHES[mode]}
    place = [m for m in modes if m not in COLOURS].index(mode)
    line, marker, hatch = _MORE[place % len(_MORE)]
    return {"color": _PALETTE[(1, 2, 4, 5, 6, 7, 8, 9)[place % 8]], "fill": 0.45, "line": line, "marker": marker, "hatch": hatch}


@contextmanager
def styled() -> Iterator[None]:
    """The style of every figure, for the time of drawing; the user's own matplotlib settings are left alone."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(sns.axes_style("whitegrid"))
        mpl.rcParams.update(
            {
                "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
                "font.size": 7,
                "axes.titlesize": 8,
                "axes.labelsize": 7,
                "xtick.labelsize": 6.5,
                "ytick.labelsize": 6.5,
                "legend.fontsize": 6.5,
                "legend.frameon": False,
                "axes.linewidth": 0.6,
                "grid.linewidth": 0.4,
                "lines.linewidth": 1.2,
                "lines.markersize": 3.5,
                "hatch.linewidth": 0.5,
                "pdf.fonttype": 42,
                "savefig.dpi": 220,
                "svg.hashsalt": "onelag",
            }
        )
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches, apart from pyplot's global list."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def footnote(figure: Figure, text: str) -> None:
    """Size of the runs, below the axes."""
    figure.supxlabel(text, fontsize=5.5, color="0.35")


def watermark(figure: Figure, tier: str) -> None:
    """Marks the smoke tier, whose numbers mean nothing."""
    if tier == "smoke":
        figure.text(0.5, 0.5, "smoke", fontsize=42, color="0.5", alpha=0.25, rotation=25, ha="center", va="center", zorder=100)


def save_figure(
    stem: Path, draw: Callable[[], Figure], rows: Sequence[StudyRow] | Sequence[TuningRow], tier: str, draft: bool = False
) -> bool:
    """Draws stem.png and (unless `draft`) stem.pdf with the sidecar stem.json, unless they are there already from the same inputs, code and libraries.

    The sidecar names the runs, a hash over their content and places, and hashes of both files. Returns whether it drew.
    """
    places = [[*(getattr(row, f.name) for f in fields(row) if f.name != "result"), row.result.run_id, row.result.sha256] for row in rows]
    stem = Path(stem)
    identity = {
        "figure": stem.name,
        "tier": tier,
        "runs": sorted({row.result.run_id for row in rows}),
        "inputs_sha256": hashlib.sha256(json.dumps(places).encode()).hexdigest(),
        "code_sha256": _drawing_code(),
        "drawn_with": {"matplotlib": mpl.__version__, "seaborn": sns.__version__},
    }
    paths = {kind: stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")}
    sidecar = stem.with_name(f"{stem.name}.json")
    if _is_current(sidecar, identity, paths):
        return False
    if draft:
        del paths["pdf"]
    with styled():
        figure = draw()
        watermark(figure, tier)
        hashes = {}
        for kind, path in paths.items():
            data = io.BytesIO()
            nothing = {"Software": None} if kind == "png" else {"CreationDate": None, "Producer": None, "Creator": None}
            figure.savefig(data, format=kind, metadata=nothing)
            figure.set_layout_engine("none")  # the second file keeps the layout that the first computed
            write_atomically(path, data.getvalue())
            hashes[f"{kind}_sha256"] = hashlib.sha256(data.getvalue()).hexdigest()
    write_atomically(sidecar, json.dumps(identity | hashes, indent=1) + "\n")
    return True


def _is_current(sidecar: Path, identity: dict, paths: dict[str, Path]) -> bool:
    try:
        known = json.loads(sidecar.read_text(encoding="utf-8"))
        hashes = {f"{kind}_sha256": hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in paths.items()}
    except (OSError, ValueError):
        return False
    return known == identity | hashes


def _drawing_code() -> str:
    """Hash of the modules of this folder that decide how a figure looks."""
    names = ("figures.py", "style.py", "statistics.py", "study.py", "summary.py", "scale.py")
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in names)).hexdigest()
