"""The closed-form operation count against torch's FlopCounterMode: exactly."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from onelag.models import DenseConfig, MoEConfig, build_model
from onelag.models.flops import backward, model_forward
from onelag.models.loss import next_token_loss

DENSE = DenseConfig(vocab_size=64, num_layers=2, width=48, num_heads=6, num_kv_heads=6, ffn_width=80, max_length=32)
MOE = MoEConfig(
    **{**dataclasses.asdict(DENSE), "num_layers": 3},
    num_experts=8,
    experts_per_token=3,
    expert_width=24,
    num_shared_experts=2,
    num_dense_layers=2,
)


# What torch's counter does not know by itself: its own formulas for attention under the CPU kernel's name, and products of grouped rows, of which each meets
# one matrix: (rows, in) · (groups, in, out) forward and for the rows' gradient, (in, rows) · (rows, out) for the matrices'.
def attention(query, key, value, *rest, out_shape=None, **keywords):
    return sdpa_flop_count(query, query, query)


def attention_backward(gradient, query, key, value, *rest, out_shape=None, **keywords):
    return sdpa_backward_flop_count(gradient, query, query, query)


def grouped_product(x, weight, *rest, out_shape=None, **keywords):
    return 2 * x[0] * x[1] * weight[-1]


EXTRA = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    torch.ops.aten._grouped_mm: grouped_product,
}


@pytest.mark.torch_private
@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize("config", [DENSE, dataclasses.replace(DENSE, num_kv_heads=2, tie_embeddings=False), MOE])
def test_the_count_is_torchs(config, length):
    model = build_model(config, 0)
    tokens = torch.randint(0, 64, (3, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:
        loss = next_token_loss(model(tokens), tokens)
    forward = model_forward(config, length) * 3
    assert counter.get_total_flops() == forward.total
    with FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:
        loss.backward()
    assert counter.get_total_flops() == backward(forward).total
