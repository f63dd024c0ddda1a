"""Saved at one number of stages, resumed at another: bitwise the run that was never interrupted."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from onelag.pipeline.checkpoint import CheckpointError, committed, resume, save
from onelag.pipeline.schedules import Schedule2BW, SchedulePipeDream
from tests.pipeline.toys import ROWS, Toy, batch, differing, loss_fn, make_optimizer, merged, oracle
from tests.pipeline.worlds import run

KINDS = ["sgd", "adamw+lookahead", "muon+lookahead", "muon+update"]
M = 4


def build(rank, world, kind, cls=Schedule2BW, layers=4, **options):
    module = Toy(rank, world, layers=layers)
    return module, cls(module, loss_fn, make_optimizer(kind, module.named_parameters()), num_microbatches=M, timeout=30, **options)


def feed(pipe, until):
    return pipe.run((batch(t, M * ROWS) for t in range(pipe.batches, until)), updates=until - pipe.batches)


def save_at(rank, world, directory, kinds, first, second, options):
    for kind in kinds:
        _, pipe = build(rank, world, kind, **options)
        for until in (first, second):
            feed(pipe, until)
            save(f"{directory}/{kind}", pipe, config={"model": {"layers": 4}}, extra={"position": until})


def resume_and_finish(rank, world, directory, kinds, until, options):
    results = {}
    for kind in kinds:
        module, pipe = build(rank, world, kind, **options)
        extra = resume(f"{directory}/{kind}", pipe, config={"model": {"layers": 4}})
        assert extra == {"position": pipe.batches}
        first_loss = feed(pipe, until)[0].loss
        results[kind] = {n: p.detach().clone() for n, p in module.named_parameters()}, pipe.batches, first_loss
    return results


@pytest.mark.parametrize(("saved_at", "resumed_at"), [(4, (2, 1, 4)), (1, (3,))])
def test_a_run_goes_on_bitwise_at_another_number_of_stages(tmp_path, saved_at, resumed_at):
    run(save_at, saved_at, str(tmp_path), KINDS, 3, 7, {})
    wanted = {kind: oracle(kind, M, 11) for kind in KINDS}
    for world in resumed_at:
        results = run(resume_and_finish, world, str(tmp_path), KINDS, 11, {})
        for kind in KINDS:
            assert differing(merged([r[kind][0] for r in results]), wanted[kind][1]) == [], (kind, world)
            assert all(r[kind][2] == wanted[kind][0][7] for r in results)
    keys = {kind: dcp.FileSystemReader(tmp_path / kind / "step-00000007").read_metadata().state_dict_metadata for kind in KINDS}
    for kind in KINDS:
        names = set(wanted[kind][1])
        assert {key.removeprefix("master/") for key in keys[kind] if key.startswith("master/")} == names
        assert {key.removeprefix("version-1/") for key in keys[kind] if key.startswith("version-1/")} == names
    assert {key.split("/")[1] for key in keys["sgd"] if key.startswith("optimizer/")} == set(wanted["sgd"][1])  # every one has its momentum


def on_any_layout(rank, world, directory, replicas, until, kind):
    """Goes on (if there is something to go on from) to `until`; the weights before and after, and the validation losses at x and y in between."""
    stages = world // replicas
    module = Toy(rank // replicas, stages)
    optimizer = make_optimizer(kind, module.named_parameters())
    pipe = Schedule2BW(module, loss_fn, optimizer, num_microbatches=2 * M // replicas, num_replicas=replicas, timeout=30)
    resume(directory, pipe)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    losses = [pipe.evaluate([batch(70, 4)], base=base) for base in (False, True)]
    data = (tuple(part.chunk(replicas)[pipe.here.replica] for part in batch(t, 2 * M * ROWS)) for t in range(pipe.batches, until))
    pipe.run(data, updates=until - pipe.batches)
    save(directory, pipe)
    return before, losses, {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("kind", ["adamw+lookahead", "muon+update"])
def test_replicas_come_and_go_between_two_runs(tmp_path, kind):
    after = {}
    for (world, replicas), until in zip(((4, 2), (2, 1), (2, 2), (3, 1), (4, 2)), (3, 5, 7, 9, 11)):
        results = run(on_any_layout, world, str(tmp_path), replicas, until, kind)
        found = merged([before for before, _, _ in results])
        assert not after or differing(found, after) == []  # nothing is lost or rounded on the way, whoever owned it
        assert len({tuple(losses) for _, losses, _ in results}) == 1 and (until == 3 or results[0][1][0] != results[0][1][1])
        after = merged([weights for _, _, weights in results])
    _, wanted, _ = oracle(kind, 2 * M, 11)
    assert max(float((after[n] - wanted[n]).abs().max()) for n in wanted) < 1e-4


def test_the_newest_weights_alone_do_not_continue_the_run(tmp_path):
    """The reason for the second version: without it the resumed run is another one."""
    _, pipe = build(0, 1, "muon+lookahead")
    feed(pipe, 4)
    state = pipe.state_dict()
    for saved in state["parameters"].values():
        saved["versions"][1] = saved["versions"].get(0, saved["master"]).clone()
    module, other = build(0, 1, "muon+lookahead")
    other.load_state_dict(state)
    feed(other, 8)
    feed(pipe, 8)
    assert max((a - b).abs().max() for a, b in zip(module.parameters(), pipe.parts.stage.module.parameters())) > 1e-4


def test_pipedream_resumes_at_its_own_number_of_stages_and_refuses_another(tmp_path):
    options = {"cls": SchedulePipeDream}
    run(save_at, 3, str(tmp_path), ["adamw"], 3, 5, options)
    results = run(resume_and_finish, 3, str(tmp_path), ["adamw"], 9, options)
    assert differing(merged([r["adamw"][0] for r in results]), oracle("adamw", M, 9, pipedream=3)[1]) == []
    errors = [told for (told,) in run(refused, 4, [(str(tmp_path / "adamw"), options, None)])]
    assert len(set(errors)) == 1 and "resume with the num_stages=3 that saved it" in errors[0], errors


def refused(rank, world, cases):
    """For each (directory, options, config): what a resume says."""
    errors = []
    for directory, options, config in cases:
        _, pipe = build(rank, world, "adamw", **options)
        with pytest.raises(CheckpointError) as raised:
            resume(directory, pipe, config=config)
        errors.append(str(raised.value))
    return errors


def test_a_checkpoint_of_another_run_is_refused_on_every_rank_with_one_line(tmp_path):
    run(save_at, 2, str(tmp_path), ["adamw"], 1, 2, {})
    for name in ("damaged", "headless"):
        shutil.copytree(tmp_path / "adamw", tmp_path / name)
    victim = tmp_path / "damaged" / "step-00000002" / "__1_0.distcp"  # what the second rank wrote
    victim.write_bytes(victim.read_bytes()[:100])
    (tmp_path / "headless" / "step-00000002" / ".metadata").unlink()
    cases = [
        ("adamw", {"layers": 6}, None, "holds no parameter 'layers.4."),
        ("adamw", {"layers": 3}, None, "holds 6 parameters that this model has not"),
        ("adamw", {}, {"model": {"layers": 5}}, "model.layers=4, this run has model.layers=5"),
        ("adamw", {"compute_dtype": torch.bfloat16}, None, "compute_dtype='None', this run has compute_dtype='torch.bfloat16'"),
        ("adamw", {"cls": SchedulePipeDream}, None, "schedule='2bw', this run has schedule='pipedream'"),
        ("damaged", {}, None, "cannot be read"),
        ("headless", {}, None, "delete it to go on from an earlier one"),
    ]
    by_rank = run(refused, 2, [(str(tmp_path / directory), options, config) for directory, options, config, _ in cases])
    for (*_, told), *errors in zip(cases, *by_rank):
        assert told in errors[0] and len(set(errors)) == 1 and "\n" not in errors[0], errors


def test_only_complete_checkpoints_count_and_the_last_ones_are_kept(tmp_path, monkeypatch):
    _, pipe = build(0, 1, "sgd")
    assert resume(tmp_path / "nothing", pipe) is None and pipe.batches == 0
    for until in (1, 2, 3):
        feed(pipe, until)
        save(tmp_path, pipe)
    assert [path.name for path in committed(tmp_path)] == ["step-00000002", "step-00000003"]
    feed(pipe, 4)

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("onelag.pipeline.checkpoint._sync", killed)  # everything is written, nothing is committed
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, pipe)
    monkeypatch.undo()
    assert (tmp_path / ".step-00000004.writing").exists()
    _, other = build(0, 1, "sgd")
    resume(tmp_path, other)
    assert other.batches == 3
    save(tmp_path, pipe)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onelag.pipeline.checkpoint._sync", full)
    feed(pipe, 5)
    with pytest.raises(OSError, match=r"could not be written.*No space left.*earlier ones are untouched"):
        save(tmp_path, pipe)
    assert [path.name for path in committed(tmp_path)] == ["step-00000003", "step-00000004"]
    shutil.rmtree(tmp_path / "step-00000004")
    _, other = build(0, 1, "sgd")
    resume(tmp_path, other)
    assert other.batches == 3
