"""A plan as tables and as a figure."""

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from onelag.models.counts import count_parameters
from onelag.planner.plan import Plan, mode_of
from onelag.report.style import FULL, new_figure, styled

_SHORT = {
    "master weights": "master", "weight versions": "versions", "gradients": "gradients", "optimizer": "optimizer", "correction": "correction",
    "activations": "activations", "boundaries": "boundary", "temporary": "moment",
}  # fmt: skip


def print_plan(plan: Plan, console: Console) -> None:
    """Model, memory per stage, time per schedule, the whole run, and what to change."""
    layout, train = plan.layout, plan.config.train
    total, active = count_parameters(train.model)
    mixture = f", {active / 1e9:.3g}B of them active" if active != total else ""
    console.print(f"[bold]{plan.config.name}[/bold]: {total:,} parameters{mixture}; {plan.flops_per_token / 1e9:.3g} GFLOP per token")
    console.print(
        f"{layout.stages} stages × {layout.replicas} replicas = {layout.stages * layout.replicas} {plan.gpu.name}; "
        f"{layout.microbatches} micro-batches of {layout.rows} × {layout.length} tokens: {layout.tokens_per_step:,} tokens per step"
    )
    table = Table(title="Memory per GPU at the worst moment, GB (10⁹ bytes)")
    for name in ("stage", "layers", "parameters", *_SHORT.values(), "all"):
        table.add_column(name, justify="right")
    for stage, (first, end) in zip(plan.memory, plan.split):
        items = [f"{stage.items[name] / 1e9:.2f}" for name in _SHORT]
        style = "" if stage.total <= plan.gpu.usable else "red"
        table.add_row(str(stage.stage), f"{first}…{end - 1}" if end > first else "–", f"{stage.parameters / 1e6:,.0f}M", *items, f"{stage.total / 1e9:.1f}", style=style)
    console.print(table)
    table = Table(title="Time of a step")
    for name in ("schedule", "seconds", "bubble", "update, s", "tokens/s", "against 1f1b"):
        table.add_column(name, justify="right")
    reference = next(one for one in plan.schedules if one.name == "1f1b").step
    for one in plan.schedules:
        style = "bold" if one.name == mode_of(plan.config) else ""
        rate = layout.tokens_per_step / one.step
        table.add_row(one.name, f"{one.step:.3f}", f"{one.bubble:.3f}", f"{one.update:.3f}", f"{rate:,.0f}", f"{reference / one.step:.2f}×", style=style)
    console.print(table)
    sent = ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in plan.bytes_per_step.items())
    console.print(f"The busiest GPU sends per step: {sent}")
    console.print(
        f"{plan.config.tokens / 1e9:.3g}B tokens in {train.schedule.steps:,} steps: {_duration(plan.days)} at {100 * plan.mfu:.0f} % of the GPUs' peak, "
        f"about ${plan.dollars:,.0f} at ${plan.gpu.price:.2f} per GPU hour"
    )
    room = plan.gpu.usable - max(stage.total for stage in plan.memory)
    if plan.fits:
        console.print(f"[green]fits[/green]: {room / 1e9:.1f} GB to spare of the {plan.gpu.usable / 1e9:.1f} GB that are usable")
    else:
        console.print(f"[red]does not fit[/red]: {-room / 1e9:.1f} GB too much for the {plan.gpu.usable / 1e9:.1f} GB that are usable. What would:")
        for line in plan.advice:
            console.print(f"  {line}")


def _duration(days: float) -> str:
    return f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours"


def draw_plan(plan: Plan) -> Figure:
    """Left: memory of each stage, item on item, below the GPU's limit. Right: time of a step under each schedule."""
    import seaborn as sns

    with styled():
        figure = new_figure(FULL, 2.6)
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        colours = sns.color_palette("colorblind", len(_SHORT))
        bottom = [0.0] * len(plan.memory)
        for colour, (item, name) in zip(colours, _SHORT.items()):
            heights = [stage.items[item] / 1e9 for stage in plan.memory]
            if max(heights) > 0:
                left.bar([str(stage.stage) for stage in plan.memory], heights, bottom=bottom, color=colour, label=name, width=0.75, linewidth=0)
                bottom = [a + b for a, b in zip(bottom, heights)]
        left.axhline(plan.gpu.usable / 1e9, color="0.2", linestyle="--")
        left.text(len(plan.memory) - 0.6, plan.gpu.usable / 1e9, f"usable on {plan.gpu.name}", ha="right", va="bottom", fontsize=6)
        left.set(xlabel="stage", ylabel="GB", title=f"{plan.config.name}: memory per GPU", ylim=(0, 1.14 * max(*bottom, plan.gpu.usable / 1e9)))
        left.grid(axis="x", visible=False)
        left.legend(ncols=1, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        names = [one.name for one in plan.schedules]
        busy = [one.step * (1 - one.bubble) for one in plan.schedules]
        right.barh(names, busy, color=colours[0], label="computing", height=0.65, linewidth=0)
        right.barh(names, [one.step * one.bubble for one in plan.schedules], left=busy, color="0.75", label="waiting", height=0.65, linewidth=0)
        for index, one in enumerate(plan.schedules):
            right.text(one.step, index, f" {one.step:.3g} s", va="center", fontsize=6)
        right.invert_yaxis()
        right.grid(axis="y", visible=False)
        right.set(xlabel="seconds per step", title=f"{layout_words(plan)}", xlim=(0, 1.2 * max(one.step for one in plan.schedules)))
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    return figure


def layout_words(plan: Plan) -> str:
    """p, replicas and m."""
    return f"{plan.layout.stages} stages × {plan.layout.replicas} replicas, m = {plan.layout.microbatches}"
