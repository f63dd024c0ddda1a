"""The memory model against real pipelines: every live tensor of every rank, at the worst moment of a steady state, within 5 %."""

import dataclasses

import pytest
import torch

from onelag import ErrorFeedback, build_optimizer
from onelag.models import DenseConfig, MoEConfig, build_model
from onelag.models.loss import next_token_loss
from onelag.models.moe import build_block, initialize
from onelag.models.stages import build_stage, split_by_flops
from onelag.pipeline.schedules import Schedule1F1B, Schedule2BW, ScheduleGPipe, SchedulePipeDream
from onelag.planner.activations import GPU, Kernels, block, head
from onelag.planner.memory import Layout, stage_memory
from tests.pipeline import worlds
from tests.planner.live_memory import LiveMemory

DENSE = DenseConfig(vocab_size=512, num_layers=5, width=96, num_heads=6, num_kv_heads=2, ffn_width=256, max_length=64)
MOE = MoEConfig(**{**dataclasses.asdict(DENSE), "tie_embeddings": False}, num_experts=8, experts_per_token=3, expert_width=48)
SCHEDULES = {"2bw": Schedule2BW, "pipedream": SchedulePipeDream, "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def on_cpu(low: bool) -> dict:
    """Slots and kernels of a CPU: norms that are not fused, Newton–Schulz in float32 and in chunks."""
    return {"slot_bytes": 2 if low else 4, "kernels": Kernels(2 if low else 4, fused_norm=False, products=4, batched_products=False)}


# Where activations decide, where the update decides (one short row), deep pipelines at the least m, replicas, recomputation, and the other schedules.
CASES_2 = [
    (DENSE, Layout(2, 1, 4, 8, 64, correction="lookahead", **on_cpu(True))),
    (DENSE, Layout(2, 1, 4, 8, 64, optimizer="adamw", **on_cpu(False))),
    (MOE, Layout(2, 1, 4, 8, 64, **on_cpu(True))),
    (MOE, Layout(2, 1, 4, 8, 64, correction="lookahead", **on_cpu(False))),
    (DENSE, Layout(2, 1, 2, 1, 8, correction="lookahead", **on_cpu(True))),
    (MOE, Layout(2, 1, 2, 1, 8, correction="lookahead", **on_cpu(True))),
    (DENSE, Layout(2, 1, 2, 1, 8, correction="update", **on_cpu(True))),
    (DENSE, Layout(2, 1, 4, 8, 64, "1f1b", **on_cpu(True))),
    (DENSE, Layout(2, 1, 4, 8, 64, "gpipe", **on_cpu(True))),
    (DENSE, Layout(1, 2, 2, 1, 8, correction="lookahead", **on_cpu(True))),
]
CASES_4 = [
    (DENSE, Layout(4, 1, 3, 4, 64, correction="lookahead", **on_cpu(True))),
    (MOE, Layout(4, 1, 8, 4, 64, optimizer="adamw", recompute=True, **on_cpu(False))),
    (DENSE, Layout(4, 1, 4, 4, 64, "pipedream", **on_cpu(True))),
    (DENSE, Layout(2, 2, 4, 4, 64, correction="lookahead", **on_cpu(True))),
    (DENSE, Layout(2, 2, 2, 1, 8, optimizer="adamw", **on_cpu(True))),
]


def measure(rank: int, world: int, cases: list) -> list[int]:
    """The worst moment of steps 3 to 5 of each case on this rank, in bytes."""
    found = []
    for config, layout in cases:
        memory = LiveMemory()
        with memory:
            stage = rank // layout.replicas
            module = build_stage(config, stage, layout.stages, 0, split_by_flops(config, layout.stages, layout.length))
            optimizer = build_optimizer(layout.optimizer, list(module.named_parameters()), lr=1e-3)
            if layout.correction != "none":
                optimizer = ErrorFeedback(optimizer, form=layout.correction)
            pipe = SCHEDULES[layout.schedule](
                module, next_token_loss, optimizer, num_microbatches=layout.microbatches, num_replicas=layout.replicas, clip_norm=1.0,
                recompute=layout.recompute, compute_dtype=torch.bfloat16 if layout.slot_bytes == 2 else None,
            )  # fmt: skip
            shape = (layout.microbatches * layout.rows, layout.length)
            tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(rank))
            for step in range(5):
                if step == 2:
                    memory.peak = 0
                pipe.step(tokens, tokens)
            found.append(memory.peak)
            pipe.flush()
    return found


@pytest.mark.parametrize("world, cases", [(2, CASES_2), (4, CASES_4)])
def test_the_worst_moment_is_predicted(world, cases):
    everywhere = worlds.run(measure, world, cases)
    for number, (config, layout) in enumerate(cases):
        split = split_by_flops(config, layout.stages, layout.length)
        for stage in range(layout.stages):
            replicas = [everywhere[stage * layout.replicas + replica][number] for replica in range(layout.replicas)]
            plan = stage_memory(config, layout, split, stage)
            assert plan.total == pytest.approx(max(replicas), rel=0.05), f"{layout}, stage {stage}: {plan.items}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config, index", [(DENSE, 0), (MOE, 0), (MOE, 2), (dataclasses.replace(MOE, num_shared_experts=2, experts_per_token=5), 2)])
def test_a_layer_keeps_exactly_what_autograd_saves(config, index, dtype):
    from onelag.models.dense import rotary_tables

    layer = build_block(config, index)
    initialize(layer, config, 0)
    layer = layer.to(dtype)
    tables = rotary_tables(32, config.width // config.num_heads, 1e5, dtype)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tables)}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(4, 32, config.width, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x, *tables)
    assert out.requires_grad
    assert sum(saved.values()) == block(config, index, 4 * 32, Kernels(dtype.itemsize, fused_norm=False))


def test_more_to_keep_takes_more():
    """Directions that must hold for any size: recomputation, fewer rows, more stages, more replicas and the lookahead form all save; gpipe costs."""
    config = dataclasses.replace(MOE, num_layers=12, width=192)
    base = Layout(4, 1, 16, 8, 64, correction="update")

    def worst(layout):
        split = split_by_flops(config, layout.stages, layout.length)
        return max(stage_memory(config, layout, split, stage).total for stage in range(layout.stages))

    for saving in ({"recompute": True}, {"rows": 4}, {"stages": 6}, {"replicas": 4}, {"correction": "lookahead"}, {"optimizer": "lion", "correction": "none"}):
        assert worst(dataclasses.replace(base, **saving)) < worst(base), saving
    assert worst(dataclasses.replace(base, schedule="gpipe")) > worst(base)
    assert worst(dataclasses.replace(base, depth="eager")) > worst(base)


def test_the_head_decides_the_last_stage_of_a_large_vocabulary():
    kept, moment = head(dataclasses.replace(DENSE, vocab_size=49152), 4096, GPU)
    assert kept > 4096 * 49152 * 4 and moment == 2 * 4096 * 49152 * 4


def test_one_stage_is_the_model():
    plan = stage_memory(MOE, Layout(1, 1, 4, 2, 16), ((0, 5),), 0)
    assert plan.parameters == sum(parameter.numel() for parameter in build_model(MOE, 0).parameters())
    assert plan.items["weight versions"] == 2 * 2 * plan.parameters and plan.items["boundaries"] == 0
