"""The 10B configuration without a cluster (`make rehearse-10b`): one of its stages for real, and its depth and code path at a small width, killed and resumed.

About 7 minutes on 2 cores, 10 GB of memory.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onelag import ErrorFeedback, build_optimizer
from onelag.configs import get_config
from onelag.models.loss import next_token_loss
from onelag.models.stages import build_stage, split_by_flops
from onelag.pipeline.stage import Passage, VersionedStage
from onelag.pipeline.update import MasterUpdate

pytestmark = pytest.mark.slow
CODE = Path(__file__).parents[2] / "code"


def torchrun(run_dir, steps=20):
    flags = "--model moe-narrow --optimizer.name muon --delay.correction error-feedback --delay.form lookahead --data.batch-size 16"
    flags += f" --data.sequence-length 64 --schedule.steps {steps} --evaluation.every 10 --evaluation.tokens 2048 --evaluation.final-tokens 4096"
    flags += " --pipeline.microbatches 4 --pipeline.checkpoint-every 5"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "onelag", "train", *flags.split(), "--run-dir", run_dir],
        env={**os.environ, "PYTHONPATH": str(CODE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid):
    """Process ids below `pid`."""
    below = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        below += [int(child), *children(int(child))]
    return below


def test_the_depth_of_moe_10b_over_four_stages_killed_and_resumed(tmp_path):
    """30 layers of 64 experts at width 64, 2BW with Muon and error feedback: the loss falls; kill −9 and resume give the same curve, number by number."""
    straight = torchrun(str(tmp_path / "straight"))
    out = straight.communicate(timeout=600)[0]
    assert straight.returncode == 0, out
    outcome = json.loads((tmp_path / "straight" / "outcome.json").read_text())
    losses = outcome["curve"]["validation_loss"]
    assert losses[-1] < losses[0] - 0.3 and losses[0] < 5.0, losses

    killed = torchrun(str(tmp_path / "killed"))
    try:
        for line in killed.stdout:
            if line.startswith("step 12 "):
                break
        for pid in [killed.pid, *children(killed.pid)]:
            os.kill(pid, signal.SIGKILL)
    finally:
        killed.kill()
        killed.communicate(timeout=60)
    assert not (tmp_path / "killed" / "outcome.json").exists()
    resumed = torchrun(str(tmp_path / "killed"))
    out = resumed.communicate(timeout=600)[0]
    assert resumed.returncode == 0 and "going on after step 10 of 20" in out, out
    assert json.loads((tmp_path / "killed" / "outcome.json").read_text()) == outcome


def test_a_stage_of_moe_10b_takes_two_steps():
    """The last of 8 stages at full size (0.8B parameters, bfloat16): two 2BW batches of two micro-batches with Muon and error feedback; finite, moved, and
    with the weights that the delay prescribes."""
    config = get_config("moe-10b")
    model = config.train.model
    split = split_by_flops(model, 8, 2048)
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = build_stage(model, 7, 8, 0, split)
    finally:
        torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in module.parameters())
    assert 0.7e9 < count < 0.9e9 and all(p.dtype == torch.bfloat16 for p in module.parameters())
    named = list(module.named_parameters())
    # Newton–Schulz in bfloat16, as on a GPU; one parameter at a time, which needs less memory than all of one shape together.
    muon = build_optimizer("muon", named, lr=config.train.optimizer.learning_rate, dtype=torch.bfloat16, implementation="reference")
    optimizer = ErrorFeedback(muon, form="lookahead")
    stage = VersionedStage(module, 2)
    update = MasterUpdate(optimizer, stage, [name for name, _ in named])
    watched = "layers.29.mlp.experts.down_proj.weight"
    first = stage.slot(0)[watched][3, :4, :4].detach().clone()
    losses = []
    for batch in range(2):
        version = max(batch - 1, 0)
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * batch + microbatch)
            hidden = torch.randn(1, 16, model.width, generator=generator).bfloat16().requires_grad_()
            targets = torch.randint(0, model.vocab_size, (1, 16), generator=generator)
            loss = stage.forward(version, microbatch, hidden, lambda logits, targets=targets: next_token_loss(logits, targets) / 2)
            back = stage.backward(microbatch, Passage(version, [hidden], [loss]), None)
            assert back[0].shape == hidden.shape and back[0].isfinite().all() and back[0].any()
            losses.append(2 * loss.item())
        update.apply(batch + 1, stage.take_gradients(version), update.settings())
        stage.note(batch + 1)
    assert all(abs(loss - torch.log(torch.tensor(float(model.vocab_size)))) < 1.5 for loss in losses), losses
    assert stage.held == [2, 1]
    assert not torch.equal(stage.slot(1)[watched][3, :4, :4], first) and not torch.equal(stage.slot(2)[watched], stage.slot(1)[watched])
    assert all(p.isfinite().all() for p in stage.slot(2).values())


def test_the_plan_of_the_real_thing_covers_the_rehearsal():
    """What is rehearsed is what would run: same depth, experts per layer and per token, delay, correction and optimizer."""
    narrow = get_config("moe-10b")
    from onelag.models.presets import PRESETS

    real, small = narrow.train.model, PRESETS["moe-narrow"]
    same = ("num_layers", "num_experts", "experts_per_token", "num_shared_experts", "num_dense_layers", "route_scale", "tie_embeddings")
    assert all(getattr(real, name) == getattr(small, name) for name in same)
    assert replace(narrow.train.delay, steps=0) == replace(narrow.in_mode("2bw+ef").train.delay, steps=0)
    assert (narrow.train.delay.correction, narrow.train.delay.form, narrow.train.optimizer.name) == ("error-feedback", "lookahead", "muon")
