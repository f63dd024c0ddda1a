"""Plans: sizes, times and money of the configurations, their headers, advice, and errors in one line."""

import dataclasses
import io
import math
import re

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from onelag.configs import CONFIGS, MODES, get_config
from onelag.models.build import build_meta
from onelag.models.counts import count_parameters
from onelag.models.presets import PRESETS
from onelag.models.stages import StageModule, split_by_flops
from onelag.optim.newton_schulz import newton_schulz
from onelag.optim.routing import FALLBACK_PATTERNS, check_patterns, route
from onelag.planner.command import PlanCommand
from onelag.planner.hardware import GIB, GPUS, Reached
from onelag.planner.memory import Layout, stage_memory
from onelag.planner.plan import layout_of, make_plan
from onelag.planner.show import draw_plan, print_plan
from onelag.planner.time import StageTime, message_time, orthogonalization_flops, step_timeline

COUNTS = {
    "smollm2-135m": (134_515_008, 134_515_008),
    "smollm2-360m": (361_821_120, 361_821_120),
    "dense-1b": (1_092_708_352, 1_092_708_352),
    "dense-10b": (9_914_675_200, 9_914_675_200),
    "moe-2b": (2_020_659_712, 378_589_696),
    "moe-10b": (10_205_916_992, 1_607_855_936),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    """Exact, on the meta device; active ones also by summing names."""
    config = PRESETS[name]
    assert count_parameters(config) == COUNTS[name]
    total = active = 0
    for parameter_name, parameter in build_meta(config).named_parameters():
        total += parameter.numel()
        share = config.experts_per_token / config.num_experts if ".experts." in parameter_name else 1
        active += parameter.numel() * share
    assert (total, round(active)) == COUNTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_stages_of_a_configuration_are_the_model(name):
    """Cut on the meta device: every parameter on one stage (a tied embedding on two), routed by the same names as in the whole."""
    config = get_config(name)
    model, plan = config.train.model, make_plan(config)
    whole = {n: p.shape for n, p in build_meta(model).named_parameters()}
    seen = []
    with torch.device("meta"):
        for stage in range(config.stages):
            part = StageModule(model, stage, config.stages, plan.split)
            seen += [n for n, _ in part.named_parameters()]
            assert all(p.shape == whole[n] for n, p in part.named_parameters())
            assert plan.memory[stage].parameters == sum(p.numel() for p in part.parameters())
            routing = route(part.named_parameters())
            assert all(routing[n] == route([(n, p)])[n] for n, p in part.named_parameters())
    assert set(seen) == set(whole) and len(seen) == len(whole) + model.tie_embeddings
    check_patterns(whole, [pattern for pattern in FALLBACK_PATTERNS if pattern in ("*embed*", "*norm*")])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_header_says_what_the_planner_says(name):
    config = get_config(name)
    plan, header = make_plan(config), CONFIGS[name].__doc__
    assert f"onelag launch {name}\n" in header
    assert f"{config.gpus} H100: {config.stages} stages × {config.pipeline.replicas} replicas" in header
    assert f"{config.tokens / 1e9:.3g}B in {config.train.schedule.steps:,} steps of {config.train.tokens_per_step:,}" in header
    amount, unit = re.search(r"Time +([\d.]+) (hours|days)", header).groups()
    assert float(amount) / (24 if unit == "hours" else 1) == pytest.approx(plan.days, rel=0.05)
    assert float(re.search(r"Memory +([\d.]+) GB", header)[1]) == pytest.approx(max(s.total for s in plan.memory) / 1e9, rel=0.02)
    total = count_parameters(config.train.model)[0]
    paper = {"smollm2-135m": 2.7e9, "smollm2-360m": 7.2e9, "moe-2b": 40e9, "moe-10b": 200e9}
    assert config.tokens == pytest.approx(paper.get(name, 20 * total), rel=0.02), "20 tokens per parameter"
    config.train.check()
    assert plan.fits and plan.mfu < 0.65


def test_modes_differ_in_schedule_and_correction_alone():
    base = get_config("moe-10b")
    modes = [base.in_mode(mode) for mode in MODES]
    assert [m.pipeline.schedule for m in modes] == ["1f1b", "2bw", "2bw"]
    assert [m.train.delay.correction for m in modes] == ["none", "none", "error-feedback"]
    assert [m.train.delay.steps for m in modes] == [0, 1, 1]
    same = [dataclasses.replace(m, train=dataclasses.replace(m.train, delay=base.train.delay), pipeline=base.pipeline) for m in modes]
    assert same[0] == same[1] == same[2]


def test_the_10b_mixture_fits_80_gb_with_margin():
    plan = make_plan(get_config("moe-10b"), GPUS["h100"])
    assert max(stage.total for stage in plan.memory) < 0.75 * 80e9
    single = make_plan(PlanCommand("moe-10b", gpus=8, batch_size=128).resolved(), GPUS["h100"])
    assert single.layout.replicas == 1 and single.fits


def test_orthogonalization_flops_are_torchs():
    for shape in ((48, 80), (96, 32), (3, 24, 40)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        assert counter.get_total_flops() == orthogonalization_flops(shape)


def test_equal_stages_give_the_closed_forms():
    times = [StageTime(1.0, 2.0, 0.0, 0.0)] * 4
    layout = Layout(4, 1, 8, 1, 1)
    assert step_timeline(times, layout).step_time == pytest.approx(8 * 3)
    assert step_timeline(times, dataclasses.replace(layout, schedule="1f1b")).step_time == pytest.approx((8 + 3) * 3)
    slow = [*times[:3], StageTime(1.5, 3.0, 0.0, 0.0)]
    assert step_timeline(slow, layout).step_time == pytest.approx(8 * 4.5), "the slowest stage sets the pace"


def test_measured_times_replace_the_estimate():
    config = get_config("dense-1b")
    plan = make_plan(config, forward_seconds=0.1, backward_seconds=0.3)
    assert max(t.forward for t in plan.times) == pytest.approx(0.1) and max(t.backward for t in plan.times) == pytest.approx(0.3)
    assert plan.chosen.step >= 32 * 0.4 and plan.chosen.step < 32 * 0.4 * 1.05
    assert plan.days == pytest.approx(config.train.schedule.steps * plan.chosen.step / 86400)
    faster = make_plan(config, reached=Reached(products=0.8))
    assert faster.chosen.step < make_plan(config).chosen.step


def test_messages_know_where_nodes_end():
    model, gpu = PRESETS["10m"], GPUS["h100"]
    inside = message_time(model, Layout(2, 4, 8, 4, 512), 0, gpu, Reached(), 8)
    across = message_time(model, Layout(2, 8, 8, 4, 512), 0, gpu, Reached(), 8)
    assert across - Reached().latency == pytest.approx((inside - Reached().latency) * gpu.node_link / gpu.network)
    assert message_time(model, Layout(2, 8, 8, 4, 512), 1, gpu, Reached(), 8) == 0


@pytest.mark.parametrize("gib, expected", [(90, {"recompute", "microbatches", "stages"}), (46, {"recompute"})])
def test_what_does_not_fit_gets_advice_that_does(gib, expected):
    config = PlanCommand("dense-10b", gpus=8, batch_size=128).resolved()
    small = dataclasses.replace(GPUS["h100"], memory=gib * GIB)
    plan = make_plan(config, small)
    assert not plan.fits
    advised = set()
    for line in plan.advice:
        changed, amount = config, line.rsplit(": ", 1)[1]
        for name, value in re.findall(r"([a-z.]+)=(\w+)", line):
            advised.add(name.removeprefix("pipeline."))
            if name == "stages":
                changed = dataclasses.replace(changed, stages=int(value))
            else:
                pipeline = dataclasses.replace(changed.pipeline, **{name.removeprefix("pipeline."): True if value == "True" else int(value)})
                changed = dataclasses.replace(changed, pipeline=pipeline)
        split = split_by_flops(changed.train.model, changed.stages, 2048)
        worst = max(stage_memory(changed.train.model, layout_of(changed), split, stage).total for stage in range(changed.stages))
        assert worst <= small.usable and amount == f"{worst / 1e9:.1f} GB"
    assert expected <= advised
    hopeless = make_plan(config, dataclasses.replace(GPUS["h100"], memory=8 * GIB))
    assert len(hopeless.advice) == 1 and "no single change" in hopeless.advice[0]


@pytest.mark.parametrize(
    "command, message",
    [
        (PlanCommand("moe-11b"), "unknown configuration 'moe-11b': choose one of smollm2-135m"),
        (PlanCommand("moe-10b", gpu="b100"), "unknown GPU 'b100': choose one of h100"),
        (PlanCommand("moe-10b", mode="async"), "unknown mode 'async'"),
        (PlanCommand("moe-10b", gpus=60), "gpus=60 is no multiple of stages=8"),
        (PlanCommand("moe-10b", stages=31), "stages=31 is more than the model's 30 layers"),
        (PlanCommand("moe-10b", microbatches=3), "data.batch_size=1024 cannot be cut"),
        (PlanCommand("moe-10b", microbatches=2), "num_microbatches=2 is too small for num_stages=8"),
        (PlanCommand("moe-10b", stages=0), "stages=0: use 1 or more"),
    ],
)
def test_bad_input_is_one_clear_line(command, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        command.run()
    assert "\n" not in str(error.value)


def test_table_and_figure(tmp_path):
    plan = make_plan(PlanCommand("moe-10b").resolved())
    console = Console(width=160, record=True, file=io.StringIO())
    print_plan(plan, console)
    text = console.export_text()
    assert "10,205,916,992 parameters, 1.61B of them active" in text and "fits" in text
    for stage in plan.memory:
        assert f"{stage.total / 1e9:.1f} │" in text
    for one in plan.schedules:
        assert f"{one.step:.3f}" in text
    figure = draw_plan(plan)
    left, right = figure.axes
    tops = [0.0] * 8
    for container in left.containers:
        for index, bar in enumerate(container):
            tops[index] += bar.get_height()
    assert tops == pytest.approx([stage.total / 1e9 for stage in plan.memory])
    widths = [a.get_width() + b.get_width() for a, b in zip(*right.containers)]
    assert widths == pytest.approx([one.step for one in plan.schedules])
    PlanCommand("smollm2-135m", figure=tmp_path / "deep" / "plan.png").run()
    assert (tmp_path / "deep" / "plan.png").stat().st_size > 10_000


def test_delay_is_what_makes_the_difference():
    """2BW has no flush: faster than 1F1B, never faster than the busiest stage; error feedback costs under 3 % of a step."""
    for name in CONFIGS:
        plan = make_plan(get_config(name))
        steps = {one.name: one.step for one in plan.schedules}
        assert steps["2bw"] < steps["1f1b"]
        assert 1 <= steps["2bw+ef"] / steps["2bw"] < 1.03
        busiest = max(t.forward + t.backward for t in plan.times) * plan.layout.microbatches
        assert steps["2bw"] >= busiest * (1 - 1e-9) and math.isfinite(plan.dollars)
