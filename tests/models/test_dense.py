"""The dense model against transformers' Llama with the same weights, its sizes, its initialization."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.models import DenseConfig, DenseModel, build_model
from onelag.models.dense import initialize, rotary_tables, rotate
from onelag.models.loss import next_token_loss
from onelag.models.presets import PRESETS


@pytest.mark.parametrize(
    "config",
    [
        DenseConfig(vocab_size=61, num_layers=3, width=48, num_heads=6, num_kv_heads=2, ffn_width=80, max_length=64),
        DenseConfig(vocab_size=61, num_layers=2, width=32, num_heads=4, num_kv_heads=4, ffn_width=48, max_length=64, tie_embeddings=False),
        DenseConfig(vocab_size=61, num_layers=2, width=36, num_heads=3, num_kv_heads=1, ffn_width=48, max_length=64, rope_theta=10000.0),
    ],
)
def test_logits_and_gradients_equal_transformers_llama(config):
    """Same weights, same tokens: logits to 1e-5 in fp32, and the gradient of the loss too."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_length,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=False,
            mlp_bias=False,
        )
    )
    ours = build_model(config, seed=1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    names = {name if name.startswith("lm_head") else f"model.{name}": value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(names, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    theirs.tie_weights()
    tokens = torch.randint(0, config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(0))
    logits, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    targets = tokens.roll(-1, 1)
    next_token_loss(logits, targets).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        other = gradients[name if name.startswith("lm_head") else f"model.{name}"]
        torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)


def test_parameter_counts_are_smollm2s():
    """134,515,008 and 361,821,120: the published sizes of SmolLM2, built on the meta device."""
    for name, count in {"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "byte-0.3m": 320_160}.items():
        with torch.device("meta"):
            model = DenseModel(PRESETS[name])
        assert sum(p.numel() for p in model.parameters()) == count
    for config in PRESETS.values():
        with torch.device("meta"):
            DenseModel(config)


def test_no_token_sees_the_future():
    model = build_model(PRESETS["byte-0.3m"], seed=0)
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.allclose(before[:, 12:], after[:, 12:])


@settings(max_examples=20, deadline=None)
@given(head=st.sampled_from([2, 4, 8, 16]), shift=st.integers(0, 20), seed=st.integers(0, 99))
def test_rotary_scores_depend_on_the_distance_alone(head, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, 1, head, generator=generator, dtype=torch.float64) for _ in range(2))
    cos, sin = rotary_tables(64, head, 10000.0, torch.float64)

    def score(i, j):
        return (rotate(q, cos[i], sin[i]) * rotate(k, cos[j], sin[j])).sum()

    torch.testing.assert_close(score(shift + 5, shift + 2), score(5, 2), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotate(q, cos[shift], sin[shift]).norm(), q.norm())


def test_initial_values_depend_on_seed_and_name_alone():
    """A part of the model initialised by itself equals the same part of the whole: what a pipeline stage relies on."""
    config = PRESETS["byte-0.3m"]
    whole = build_model(config, seed=5)
    part = torch.nn.Module()
    part.layers = torch.nn.ModuleDict({"2": DenseModel(config).layers[2]})
    initialize(part, config, 5)
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, dict(whole.named_parameters())[name])
    assert not torch.equal(build_model(config, seed=6).embed_tokens.weight, whole.embed_tokens.weight)
    names = [n for n, _ in whole.named_parameters()]
    blobs = {hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in whole.named_parameters() if p.ndim == 2}
    assert len(blobs) == sum("norm" not in n for n in names)  # no two matrices alike
    std = whole.layers[0].mlp.down_proj.weight.std().item()
    assert abs(std - 0.02 / 6**0.5) < 5e-4 and abs(whole.embed_tokens.weight.std().item() - 0.02) < 5e-4


def test_loss_ignores_masked_targets_and_is_float32():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    picked = torch.log_softmax(logits, -1)[[0, 0, 1], [0, 2, 2], [1, 2, 4]]
    torch.testing.assert_close(next_token_loss(logits, targets), -picked.mean())
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


def test_refusals_name_the_setting():
    with pytest.raises(ValueError, match="num_heads=5"):
        DenseConfig(width=96, num_heads=5)
    with pytest.raises(ValueError, match="num_kv_heads=2"):
        DenseConfig(num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="max_length=512"):
        build_model(PRESETS["byte-0.3m"], 0)(torch.zeros(1, 513, dtype=torch.int64))
