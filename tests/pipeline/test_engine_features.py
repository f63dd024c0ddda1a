"""What real training needs: clipping, replicas, tied embeddings, recompute, bf16, dropout, several tensors at a boundary, evaluation in between.

Each worker function runs many cases in one start of the processes and returns plain values; the oracles run here.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelag import SimulatedDelay
from onelag.delay import WeightPrediction
from onelag.pipeline.randomness import ModuleRandomness
from onelag.pipeline.schedules import Schedule2BW
from tests.pipeline.toys import ROWS, VOCABULARY, Toy, batch, differing, loss_fn, make_optimizer, merged, one_thread, oracle
from tests.pipeline.worlds import run

M = 4


def build(rank, world, kind="adamw+lookahead", replicas=1, toy=None, wrap=lambda module: module, **options):
    stages, stage = world // replicas, rank // replicas
    module = wrap(Toy(stage, stages, **(toy or {})))
    pipe = Schedule2BW(module, loss_fn, make_optimizer(kind, module.named_parameters()), num_microbatches=M, num_replicas=replicas, timeout=30, **options)
    return module, pipe


def own_rows(t, pipe, rows=ROWS):
    """This replica's part of a batch whose micro-batches, over all replicas, are those of the oracle with M·replicas of them."""
    replicas = pipe.here.num_replicas
    return tuple(x.chunk(replicas)[pipe.here.replica] for x in batch(t, M * rows * replicas))


def feed(pipe, batches, start=0):
    return pipe.run((own_rows(t, pipe) for t in range(start, batches)), updates=batches - start)


def weights(module):
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def close(got, wanted, tolerance):
    assert set(got) == set(wanted)
    return max(float((got[n] - wanted[n]).abs().max()) for n in wanted) < tolerance


# -- clipping, norm, loss ----------------------------------------------------------------------------------------------------------------
CLIP = 4.5


def clipped(rank, world):
    result = {}
    for name, options in {"clip": {"clip_norm": CLIP}, "inline": {"clip_norm": CLIP, "update": "inline"}, "free": {}}.items():
        module, pipe = build(rank, world, "sgd+lookahead", **options)
        reports = feed(pipe, 6)
        result[name] = weights(module), [(r.loss, r.gradient_norm) for r in reports]
    return result


def test_the_norm_is_global_and_the_same_on_every_stage():
    norms = []

    def clip(t, model, optimizer):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))

    losses, wanted, _ = oracle("sgd+lookahead", M, 6, on_batch=clip)
    assert min(norms) < CLIP < max(norms)  # some are clipped, some are not
    results = run(clipped, 3)
    for name in ("clip", "inline"):
        assert close(merged([r[name][0] for r in results]), wanted, 1e-6)
        assert results[0][name][1] == results[1][name][1] == results[2][name][1]
        assert [n for _, n in results[0][name][1]] == pytest.approx(norms, rel=1e-6)
        assert [value for value, _ in results[0][name][1]] == pytest.approx(losses, rel=1e-6)
    assert differing(merged([r["clip"][0] for r in results]), merged([r["inline"][0] for r in results])) == []
    assert not close(merged([r["free"][0] for r in results]), wanted, 1e-4)


def weighted(rank, world):
    def uneven(t):
        inputs, targets = batch(t, M * ROWS)
        keep = torch.rand(targets.shape, generator=torch.Generator().manual_seed(t)) < torch.linspace(0.1, 1, len(targets))[:, None]
        return inputs, torch.where(keep, targets, -100)

    module, pipe = build(rank, world, "sgd", loss_weight=lambda targets: (targets != -100).sum())
    reports = pipe.run((uneven(t) for t in range(4)), updates=4)
    if world == 1:  # the same without cutting: the mean over all labels of the batch
        whole = Toy(0, 1)
        other = Schedule2BW(whole, loss_fn, make_optimizer("sgd", whole.named_parameters()), num_microbatches=1)
        expected = other.run((uneven(t) for t in range(4)), updates=4)
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], rel=1e-6)
        assert [r.gradient_norm for r in reports] == pytest.approx([r.gradient_norm for r in expected], rel=1e-5)
        assert close(weights(module), weights(whole), 1e-6)
    return [(r.loss, r.gradient_norm) for r in reports]


def test_uneven_labels_count_by_label_for_any_cut():
    alone, pair = run(weighted, 1), run(weighted, 2)
    assert pair[0] == pair[1]
    assert [x for report in pair[0] for x in report] == pytest.approx([x for report in alone[0] for x in report], rel=1e-6)


# -- replicas ------------------------------------------------------------------------------------------------------------------------------
# With one layer the first stage holds an embedding and no matrix; with three and five the stages hold different numbers of them.
REPLICATED = [("adamw+lookahead", 3), ("muon+lookahead", 1), ("muon+lookahead", 3), ("muon+update", 5)]


def replicated(rank, world):
    import onelag.optim.muon as muon

    result = {}
    for kind, layers in REPLICATED:
        calls = []
        original = muon.newton_schulz
        muon.newton_schulz = lambda x, *a, original=original, calls=calls: (calls.append(x.shape[0]), original(x, *a))[1]
        module, pipe = build(rank, world, kind, replicas=2, toy={"layers": layers})
        reports = feed(pipe, 5)
        muon.newton_schulz = original
        state = pipe.parts.master.optimizer.state_dict()["state"]
        result[kind, layers] = weights(module), [(r.loss, r.gradient_norm) for r in reports], sum(calls), len(state), len(pipe.parts.replicas.owned)
    return result


def test_two_replicas_of_two_stages_are_one_process_on_the_whole_batch():
    results = run(replicated, 4)
    for case in REPLICATED:
        losses, wanted, _ = oracle(case[0], 2 * M, 5, layers=case[1])
        for replica in (0, 1):
            got = merged([results[2 * stage + replica][case][0] for stage in (0, 1)])
            assert close(got, wanted, 2e-5), case
        assert differing(results[0][case][0], results[1][case][0]) == [] and differing(results[2][case][0], results[3][case][0]) == []
        assert all(r[case][1] == results[0][case][1] for r in results)
        assert [value for value, _ in results[0][case][1]] == pytest.approx(losses, rel=1e-5)
        for stage in (0, 1):  # ZeRO-1: state for the owned parameters only, and every parameter owned once
            pair = results[2 * stage][case], results[2 * stage + 1][case]
            assert all(one[3] == one[4] for one in pair)
            assert pair[0][4] + pair[1][4] == len(pair[0][0])
        if case[0].startswith("muon"):  # each of two matrices per layer once per step over all replicas, whole
            assert sum(r[case][2] for r in results) == 2 * case[1] * 5


# -- tied embeddings -----------------------------------------------------------------------------------------------------------------------
def tied(rank, world):
    result = {}
    for name, kind, replicas in (("adamw", "adamw+lookahead", 1), ("muon", "muon+lookahead", 1), ("replicas", "adamw", 2 if world == 4 else 1)):
        module, pipe = build(rank, world, kind, replicas, {"tied": True}, clip_norm=1.0)
        copies = []
        for t in range(20 if name == "adamw" else 5):
            feed(pipe, t + 1, t)
            if hasattr(module, "embed"):
                copies.append(module.embed.weight.detach().clone())
        result[name] = weights(module), copies, [r.gradient_norm for r in [pipe.last_report]]
    return result


def test_tied_copies_stay_equal_and_are_the_one_process_embedding():
    for world in (2, 3, 4):
        results = run(tied, world)
        first, last = results[0], results[-1]
        for name in first:
            for left, right in zip(first[name][1], last[name][1]):
                assert torch.equal(left, right), (world, name)
        norms = []

        def clip(t, model, optimizer, norms=norms):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))

        for name, kind, batches in (("adamw", "adamw+lookahead", 20), ("muon", "muon+lookahead", 5)):
            norms.clear()
            _, wanted, _ = oracle(kind, M, batches, tied=True, on_batch=clip)
            assert close(merged([r[name][0] for r in results]), wanted, 1e-4 if name == "adamw" else 1e-3), (world, name)
            assert first[name][2] == pytest.approx(norms[-1:], rel=1e-3)
        if world == 4:
            norms.clear()
            _, wanted, _ = oracle("adamw", 2 * M, 5, tied=True, on_batch=clip)
            assert close(merged([results[0]["replicas"][0], results[2]["replicas"][0]]), wanted, 1e-4)


# -- recompute, dropout --------------------------------------------------------------------------------------------------------------------
class SelfRecomputing(nn.Module):
    """A stage whose blocks recompute themselves with torch's checkpoint, as many users' models do."""

    def __init__(self, toy):
        super().__init__()
        for name, child in toy.named_children():
            self.add_module(name, child)
        self.is_first, self.is_last, self.tied = toy.is_first, toy.is_last, toy.tied

    def forward(self, x):
        if self.is_first:
            x = self.embed(x)
        for block in self.layers.values():
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x) if self.is_last else x


def recomputed(rank, world):
    result = {}
    for dropout in (0.0, 0.2):
        for name, wrap, options in (("kept", lambda m: m, {}), ("stage", lambda m: m, {"recompute": True}), ("blocks", SelfRecomputing, {})):
            module, pipe = build(rank, world, toy={"dropout": dropout}, wrap=wrap, dropout_seed=7, **options)
            feed(pipe, 5)
            result[dropout, name] = weights(module)
    return result


def test_recompute_and_dropout_are_the_same_for_every_split():
    results = {world: run(recomputed, world) for world in (1, 3)}
    for dropout in (0.0, 0.2):
        randomness = []

        def wanted(dropout=dropout, randomness=randomness):
            model = Toy(0, 1, dropout=dropout)
            optimizer = make_optimizer("adamw+lookahead", model.named_parameters())
            optimizer = SimulatedDelay(optimizer)
            randomness.append(ModuleRandomness(model, seed=7))
            for t in range(5):
                for j, (x, y) in enumerate(zip(*(whole.chunk(M) for whole in batch(t, M * ROWS)))):
                    with randomness[-1].of(t * M + j):
                        (loss_fn(model(x), y) / M).backward()
                optimizer.step()
                optimizer.zero_grad()
            with optimizer.latest_weights():
                return weights(model)

        with one_thread():
            expected = wanted()
        for world, ranks in results.items():
            for name in ("kept", "stage", "blocks"):
                assert differing(merged([r[dropout, name] for r in ranks]), expected) == [], (dropout, world, name)
    assert differing(results[1][0][0.0, "kept"], results[1][0][0.2, "kept"])


def compiled(rank, world):
    result = {}
    for name, wrap in (("plain", lambda m: m), ("compiled", lambda m: torch.compile(m, backend="aot_eager"))):
        module, pipe = build(rank, world, "sgd+lookahead", toy={"tied": True}, wrap=wrap)
        feed(pipe, 4)
        result[name] = {pipe.parts.names.global_name[n]: p.detach().clone() for n, p in module.named_parameters()}
    return result


def test_a_compiled_stage_keeps_its_names_and_trains_the_same():
    for result in run(compiled, 2):
        assert close(result["compiled"], result["plain"], 1e-6)


# -- bf16 ------------------------------------------------------------------------------------------------------------------------------------
def low_precision(rank, world):
    result = {}
    for kind in ("adamw", "adamw+lookahead", "muon+lookahead"):
        module, pipe = build(rank, world, kind, compute_dtype=torch.bfloat16)
        assert all(p.dtype == torch.bfloat16 for slot in pipe.parts.stage.slots for p in slot.values())
        losses = [r.loss for r in feed(pipe, 6)]
        state = pipe.parts.master.optimizer.state_dict()["state"]
        assert all(t.dtype == torch.float32 for entry in state.values() for t in entry.values())
        result[kind] = weights(module), losses, pipe.evaluate([batch(99, 4)], base=True)
    return result


@one_thread()
def low_precision_oracle(kind, batches):
    """bf16 weights from an fp32 master, bf16 gradients summed in fp32, in one process and without the engine."""
    model, master = Toy(0, 1).bfloat16(), Toy(0, 1)
    correction = make_optimizer(kind, master.named_parameters())
    optimizer, c = (correction.optimizer, correction.coefficient) if "+" in kind else (correction, 0.0)
    versions = [[p.detach().bfloat16() for p in master.parameters()]]
    losses = []
    for t in range(batches):
        with torch.no_grad():
            for p, w in zip(model.parameters(), versions[max(t - 1, 0)]):
                p.copy_(w)
        sums, total = [torch.zeros_like(p) for p in master.parameters()], 0.0
        for x, y in zip(*(whole.chunk(M) for whole in batch(t, M * ROWS))):
            loss = loss_fn(model(x), y) / M
            loss.backward()
            total = total + loss.detach()
            for s, p in zip(sums, model.parameters()):
                s += p.grad
                p.grad = None
        losses.append(float(total))
        before = [p.detach().clone() for p in master.parameters()]
        for p, s in zip(master.parameters(), sums):
            p.grad = s
        optimizer.step()
        with torch.no_grad():
            versions.append([])
            for p, y in zip(master.parameters(), before):
                versions[-1].append((p if not (c and t) else y.lerp(p, 1 + c)).detach().bfloat16())
                if c and not t:
                    p.copy_(torch.lerp(p, y, c))
    return losses, {n: w.float() for (n, _), w in zip(model.named_parameters(), versions[-1])}


def test_bf16_slots_with_a_float_master_follow_their_definition_for_every_split():
    for world in (1, 3):
        results = run(low_precision, world)
        for kind in results[0]:
            losses, wanted = low_precision_oracle(kind, 6)
            got = merged([r[kind][0] for r in results])
            assert differing({n: w.bfloat16().float() for n, w in got.items()}, wanted) == [], (world, kind)
            assert all(r[kind][1] == losses for r in results)
            exact, _, _ = oracle(kind, M, 6)
            assert losses == pytest.approx(exact, rel=0.03)
            assert len({r[kind][2] for r in results}) == 1 and results[0][kind][2] < 10


# -- boundaries and inputs -------------------------------------------------------------------------------------------------------------------
class Masked(nn.Module):
    """Relays an integer tensor and a float one without gradient; the first takes a dict, the last reads all three."""

    def __init__(self, stage, stages):
        super().__init__()
        self.body, self.stage, self.stages = Toy(stage, stages), stage, stages

    def forward(self, x=None, positions=None, scale=None, hidden=None):
        hidden = self.body(x if self.stage == 0 else hidden)
        if self.stage < self.stages - 1:
            return {"hidden": hidden * scale, "positions": positions, "scale": scale}
        return hidden * scale, positions


def several(rank, world):
    def loss_of(output, targets):
        logits, positions = output
        assert positions.dtype == torch.int64 and not positions.requires_grad
        return nn.functional.cross_entropy((logits + positions[..., None]).reshape(-1, VOCABULARY), targets["labels"].reshape(-1)) * targets["weight"].mean()

    def data(t):
        inputs, targets = batch(t, M * ROWS)
        generator = torch.Generator().manual_seed(t)
        scale = torch.rand(M * ROWS, 1, 1, generator=generator)
        positions = torch.randint(0, 3, inputs.shape, generator=generator)
        return {"x": inputs, "positions": positions, "scale": scale}, {"labels": targets, "weight": torch.rand(M * ROWS, generator=generator)}

    module = Masked(rank, world)
    pipe = Schedule2BW(module, loss_of, make_optimizer("sgd+lookahead", module.named_parameters()), num_microbatches=M, timeout=30)
    reports = pipe.run((data(t) for t in range(5)), updates=5)
    return weights(module), [r.loss for r in reports], pipe.evaluate([data(9), data(10)])


def test_several_tensors_of_several_kinds_cross_a_boundary():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Toy(0, 1)

    results = run(several, 3)
    model = Whole()  # the same arithmetic in one process, stage by stage
    optimizer = SimulatedDelay(make_optimizer("sgd+lookahead", model.named_parameters()))
    body = model.body
    losses = []
    bounds = [4 * s // 3 for s in range(4)]
    with one_thread():
        for t in range(5):
            inputs, targets = batch(t, M * ROWS)
            generator = torch.Generator().manual_seed(t)
            scale = torch.rand(M * ROWS, 1, 1, generator=generator)
            positions = torch.randint(0, 3, inputs.shape, generator=generator)
            weight = torch.rand(M * ROWS, generator=generator)
            total = 0.0
            for x, p, s, y, w in zip(*(whole.chunk(M) for whole in (inputs, positions, scale, targets, weight))):
                h = body.embed(x)
                for stage in range(3):
                    for i in range(bounds[stage], bounds[stage + 1]):
                        h = body.layers[str(i)](h)
                    h = (body.head(h) if stage == 2 else h) * s
                loss = nn.functional.cross_entropy((h + p[..., None]).reshape(-1, VOCABULARY), y.reshape(-1)) * w.mean() / M
                loss.backward()
                total = total + loss.detach()
            losses.append(float(total))
            optimizer.step()
            optimizer.zero_grad()
    with optimizer.latest_weights():
        assert differing(merged([r[0] for r in results]), weights(model)) == []
    assert results[0][1] == results[2][1] == losses
    assert results[0][2] == results[1][2] == results[2][2] and math.isfinite(results[0][2])


# -- in between ------------------------------------------------------------------------------------------------------------------------------
def interrupted(rank, world):
    result = {}
    for kind in ("muon+lookahead", "adamw+update", "adamw"):
        module, pipe = build(rank, world, kind)
        seen, evaluations = [], []
        for t in range(7):
            value = pipe.step(*batch(t, M * ROWS))
            seen.append(value)
            assert isinstance(value, float) and f"{value:.3f}"  # every rank can log it
            if t % 3 == 2:
                evaluations.append((pipe.evaluate([batch(50, 6), batch(51, 6)]), pipe.evaluate([batch(50, 6)], base=True)))
                assert module.training
        pipe.flush()
        pipe.flush()
        result[kind] = weights(module), seen, evaluations, [r.batch for r in pipe.reports()]
    return result


def test_evaluating_and_draining_in_between_changes_nothing_and_every_rank_knows_the_loss():
    results = run(interrupted, 3)
    for kind in results[0]:
        evaluations = []

        def evaluate(t, model, optimizer, evaluations=evaluations):
            if t in (3, 6):  # before update t: the newest weights are W(t)
                with torch.no_grad(), optimizer.latest_weights():
                    at_x = (float(loss_fn(model(batch(50, 6)[0]), batch(50, 6)[1])) + float(loss_fn(model(batch(51, 6)[0]), batch(51, 6)[1]))) / 2
                with torch.no_grad(), optimizer.base_weights():
                    evaluations.append((at_x, float(loss_fn(model(batch(50, 6)[0]), batch(50, 6)[1]))))

        losses, wanted, _ = oracle(kind, M, 7, on_batch=evaluate)
        assert differing(merged([r[kind][0] for r in results]), wanted) == [], kind
        for rank in range(3):
            _, seen, found, reported = results[rank][kind]
            assert found == [pytest.approx(pair, rel=1e-6) for pair in evaluations] or pytest.fail(f"{found} {evaluations}")
            assert math.isnan(seen[0]) and math.isnan(seen[1]) and reported == list(range(7))
            assert seen[2] == losses[0] and seen[6] in losses[4:6]
        if kind != "adamw":
            assert all(x != y for (_, y), x in zip(evaluations, [e[0] for e in evaluations]))


def unusual(rank, world):
    result = {}
    # a gradient that is not finite, on one stage only: everybody skips the batch
    for kind in ("adamw+lookahead", "muon+update"):
        module, pipe = build(rank, world, kind, clip_norm=10.0)
        if rank == 1:
            for slot in pipe.parts.stage.slots:
                slot["layers.2.up.weight"].register_hook(lambda g, pipe=pipe: g * float("nan") if pipe._backwards // M == 3 else g)
        reports = feed(pipe, 7)
        result[kind] = weights(module), [r.skipped for r in reports], [r.loss for r in reports]
    # a learning-rate schedule: each update uses the value that its own step saw
    module, pipe = build(rank, world, "adamw+lookahead")
    for t in range(6):
        for group in pipe.parts.master.optimizer.param_groups:
            group["lr"] = 0.01 / (t + 1)
        pipe.step(*batch(t, M * ROWS))
    pipe.flush()
    result["lr"] = weights(module), [g["lr"] for g in pipe.parts.master.optimizer.param_groups]
    # a parameter without gradient, from time to time
    module, pipe = build(rank, world, "sgd+lookahead")
    if rank == 0:
        # torch gives no gradient where the hook on the module removes its part of the graph
        module.layers["0"].up.register_forward_hook(lambda m, i, o: o.detach() if pipe._forwards // M in (2, 3) else o)
    feed(pipe, 7)
    result["unused"] = weights(module)
    module = Toy(rank, world)
    pipe = Schedule2BW(module, loss_fn, WeightPrediction(torch.optim.AdamW(module.parameters(), lr=0.01)), num_microbatches=M, timeout=30)
    feed(pipe, 5)
    result["prediction"] = weights(module)
    return result


def test_skipped_batches_schedules_unused_parameters_and_prediction_follow_the_simulation():
    results = run(unusual, 2)

    def simulate(optimizer_of, batches, before_step=lambda t, model, optimizer: None, before_forward=lambda t, model: None):
        with one_thread():
            model = Toy(0, 1)
            optimizer = SimulatedDelay(optimizer_of(model))
            losses = []
            for t in range(batches):
                before_forward(t, model)
                total = 0.0
                for x, y in zip(*(whole.chunk(M) for whole in batch(t, M * ROWS))):
                    loss = loss_fn(model(x), y) / M
                    loss.backward()
                    total = total + loss.detach()
                losses.append(float(total))
                before_step(t, model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            with optimizer.latest_weights():
                return weights(model), losses

    for kind in ("adamw+lookahead", "muon+update"):

        def skip(t, model, optimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            if t == 3:
                optimizer.zero_grad()

        wanted, losses = simulate(lambda model, kind=kind: make_optimizer(kind, model.named_parameters()), 7, skip)
        assert close(merged([r[kind][0] for r in results]), wanted, 1e-5), kind
        for result in results:
            assert result[kind][1] == [False, False, False, True, False, False, False]
            assert result[kind][2] == pytest.approx(losses, rel=1e-5)

    def rate(t, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (t + 1)

    wanted, _ = simulate(lambda model: make_optimizer("adamw+lookahead", model.named_parameters()), 6, rate)
    assert differing(merged([r["lr"][0] for r in results]), wanted) == []
    assert results[0]["lr"][1][0] == 0.01 / 6

    hooks = []

    def cut(t, model):
        for hook in hooks:
            hook.remove()
        hooks[:] = [model.layers["0"].up.register_forward_hook(lambda m, i, o: o.detach())] if t in (2, 3) else []

    wanted, _ = simulate(lambda model: make_optimizer("sgd+lookahead", model.named_parameters()), 7, before_forward=cut)
    assert differing(merged([r["unused"] for r in results]), wanted) == []
    wanted, _ = simulate(lambda model: WeightPrediction(torch.optim.AdamW(model.parameters(), lr=0.01)), 5)
    assert differing(merged([r["prediction"] for r in results]), wanted) == []
