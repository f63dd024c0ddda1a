"""Experts against transformers' GLM-4-MoE with the same weights, against a loop over tokens, and their balance."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.models import MoEConfig, build_model
from onelag.models.moe import ExpertMatrices, MoE, Router, grouped_product_reference, initialize
from onelag.optim import build_optimizer
from onelag.optim.routing import route

CONFIG = MoEConfig(
    vocab_size=61, num_layers=3, width=48, num_heads=4, num_kv_heads=2, ffn_width=80, max_length=32, tie_embeddings=False,
    num_experts=8, experts_per_token=3, expert_width=24, route_scale=1.7,
)  # fmt: skip


def layer(seed=0, **changes):
    moe = MoE(dataclasses.replace(CONFIG, **changes))
    initialize(moe, CONFIG, seed)
    with torch.no_grad():
        moe.gate.weight.mul_(30)  # routes that differ from token to token
        moe.gate.bias.copy_(torch.linspace(-0.1, 0.1, moe.config.num_experts))
    return moe


def test_equals_transformers_glm4_moe():
    """Same weights: logits to 1e-5 and gradients in fp32. Attention is Llama's, experts and router are DeepSeek-V3's without groups."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            vocab_size=61, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1,
            n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.7, use_qk_norm=False, attention_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 1.0}, tie_word_embeddings=False,
            rms_norm_eps=1e-5, max_position_embeddings=32,
        )
    )  # fmt: skip
    ours = build_model(CONFIG, seed=1)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            scale = 0.05 if name.endswith("bias") else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name) + parameter.numel())))

    def renamed(values):
        result = {}
        for name, value in values.items():
            name = name if name == "lm_head.weight" else f"model.{name}"
            name = name.replace("gate.bias", "gate.e_score_correction_bias").replace("experts.down_proj.weight", "experts.down_proj")
            name = name.replace("shared_experts.down_proj", "shared_experts.down_proj.weight")
            result[name] = value
        for gate in [name for name in result if "experts.gate_proj" in name and "shared" not in name]:
            up = gate.replace("gate_proj", "up_proj")
            result[gate.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([result.pop(gate), result.pop(up)], 1)
        return result

    theirs.load_state_dict(renamed(ours.state_dict()))
    tokens = torch.randint(0, 61, (3, 32), generator=torch.Generator().manual_seed(0))
    logits, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.square().mean().backward()
    expected.square().mean().backward()
    wanted = dict(theirs.named_parameters())
    gradients = renamed({name: p.grad for name, p in ours.named_parameters()})
    compared = [name for name in gradients if name in wanted]
    assert len(compared) == len(wanted) and len(gradients) - len(compared) == 2, "all but the two balancing biases, which are buffers there"
    for name in compared:
        torch.testing.assert_close(gradients[name], wanted[name].grad, rtol=1e-3, atol=1e-7)


def test_no_token_is_dropped():
    """Against a loop over tokens and their experts, in float64; all tokens may want the same experts."""
    for bias in (0.0, 5.0):
        moe = layer().double()
        with torch.no_grad():
            moe.gate.bias[:3] += bias
        x = torch.randn(2, 7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        expected = moe.shared_experts(x).reshape(-1, 48).clone()
        for n, token in enumerate(x.reshape(-1, 48)):
            scores = torch.sigmoid(moe.gate.weight @ token)
            best = (scores + moe.gate.bias).topk(3).indices
            for e in best:
                hidden = torch.nn.functional.silu(moe.experts.gate_proj.weight[e] @ token) * (moe.experts.up_proj.weight[e] @ token)
                expected[n] += 1.7 * scores[e] / scores[best].sum() * (moe.experts.down_proj.weight[e] @ hidden)
        torch.testing.assert_close(moe(x).reshape(-1, 48), expected, rtol=1e-9, atol=1e-12)
        assert moe.gate.counts.sum() == 2 * 7 * 3
        if bias:
            assert moe.gate.counts.tolist() == [14, 14, 14, 0, 0, 0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_grouped_product_is_its_reference(counts, dtype):
    """Also experts without a token: no output, gradient zero."""
    generator = torch.Generator().manual_seed(sum(counts))
    matrices = ExpertMatrices(len(counts), 16, 24)
    with torch.no_grad():
        matrices.weight.normal_(generator=generator)
    matrices = matrices.to(dtype)
    x = torch.randn(sum(counts), 24, generator=generator).to(dtype).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    if not sum(counts):
        assert matrices(x, ends).shape == (0, 16)
        return
    out, expected = matrices(x, ends), grouped_product_reference(x, matrices.weight, ends)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-1)
    torch.testing.assert_close(out, expected, **close)
    weights = torch.randn(out.shape, generator=generator).to(dtype)
    got = torch.autograd.grad((out * weights).sum(), (x, matrices.weight))
    wanted = torch.autograd.grad((expected * weights).sum(), (x, matrices.weight))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, **close)
    for e, count in enumerate(counts):
        assert count or not got[1][e].any()


def test_the_excess_load_is_the_gradient_of_the_bias():
    moe = layer()
    x = torch.randn(5, 11, 48, generator=torch.Generator().manual_seed(3))
    (7.0 * moe(x)).sum().backward()
    expected = (moe.gate.counts / (55 * 3) - 1 / 8) * 1e-4
    torch.testing.assert_close(moe.gate.bias.grad, expected)
    assert moe.gate.bias.grad.abs().max() > 0 and abs(float(moe.gate.bias.grad.sum())) < 1e-9
    without = layer(balance_scale=0.0)
    without(x).sum().backward()
    assert without.gate.bias.grad is None
    torch.testing.assert_close(without(x), moe(x), rtol=0, atol=0)


def test_the_bias_chooses_but_does_not_weigh():
    router = layer().gate
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(4))
    experts, gates, _ = router(x)
    scores = torch.sigmoid(x @ router.weight.T).gather(1, experts)
    torch.testing.assert_close(gates, 1.7 * scores / scores.sum(1, keepdim=True))
    with torch.no_grad():
        router.bias += 1.0  # the same for all: nothing changes
    again = router(x)
    assert torch.equal(experts.sort().values, again[0].sort().values)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_balances_the_load(name):
    """From a router that prefers two experts to an even load, by the optimizer alone."""
    config = dataclasses.replace(CONFIG, num_layers=2, route_scale=1.0)
    model = build_model(config, seed=0)
    optimizer = build_optimizer(name, model, lr=5e-3)
    gate: Router = model.layers["1"].mlp.gate
    with torch.no_grad():
        gate.bias[:2] = 0.3
    tokens = torch.randint(0, 61, (8, 33), generator=torch.Generator().manual_seed(0))
    spread = []
    for _ in range(80):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spread.append(float(gate.counts.max() / gate.counts.float().mean()))
    assert spread[0] > 2.5 and sum(spread[-10:]) / 10 < 1.25, spread


def test_recomputed_activations_choose_the_same_experts():
    """What a bias outside the weights would break: forward on one version, an update, recomputation in the backward of the first version."""
    from onelag.pipeline.stage import Passage, VersionedStage

    gradients = []
    for recompute in (False, True):
        moe = layer()
        stage = VersionedStage(moe, 2)
        x = torch.randn(4, 6, 48, generator=torch.Generator().manual_seed(5)).requires_grad_()
        loss = stage.forward(0, 0, x, lambda out: out.square().sum(), recompute=recompute)
        with torch.no_grad():  # an update in between: the other slot and the master move
            for parameter in [*stage.slot(1).values(), *moe.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)))
        stage.note(1)
        stage.backward(0, Passage(0, [x], [loss]), None)
        gradients.append(stage.take_gradients(0))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_experts_are_matrices_and_the_bias_is_not():
    model = build_model(CONFIG, seed=0)
    routing = route(model.named_parameters())
    assert routing["layers.1.mlp.experts.up_proj.weight"] == "matrix" and routing["layers.1.mlp.gate.bias"] == "fallback"
    assert model.layers["1"].mlp.experts.up_proj.weight.shape == (8, 24, 48)
    assert not model.layers["2"].mlp.gate.bias.any()
    assert isinstance(model.layers["0"].mlp, torch.nn.Module) and not hasattr(model.layers["0"].mlp, "experts")


def test_autocast_computes_experts_in_bfloat16_and_scores_in_float32():
    moe = layer()
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16):
        experts, gates, _ = moe.gate(x.reshape(-1, 48))
        out = moe(x)
    assert gates.dtype == torch.float32 and torch.equal(experts, moe.gate(x.reshape(-1, 48))[0])
    assert (out - moe(x)).abs().max() < 0.03 * moe(x).abs().max()


@pytest.mark.parametrize("changes", [{"experts_per_token": 9}, {"experts_per_token": 0}, {"num_dense_layers": 4}])
def test_impossible_experts_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(CONFIG, **changes)
