"""What autograd keeps of one micro-batch between forward and backward, in bytes, tensor by tensor.

Counted from the operations in models/dense.py and models/moe.py and held against the tensors that autograd really saves (tests/planner). N is the
number of tokens in the micro-batch, e the bytes of one activation.
"""

from dataclasses import dataclass

from onelag.models.dense import DenseConfig
from onelag.models.moe import MoEConfig


@dataclass(frozen=True)
class Kernels:
    """What differs between devices.

    Attributes:
        activation: bytes of an activation: 2 in bfloat16, 4 in float32.
        fused_norm: the norm keeps its input and one number per token (CUDA); otherwise two float32 copies of the input (CPU).
        products: bytes of the Newton–Schulz iterates: 2 on CUDA, 4 on CPU.
        batched_products: all matrices of one shape go through Newton–Schulz at once (CUDA); otherwise in chunks that fit a cache.
    """

    activation: int = 2
    fused_norm: bool = True
    products: int = 2
    batched_products: bool = True


GPU = Kernels()


def _norm(tokens: int, width: int, kernels: Kernels) -> float:
    """The input (which the residual stream does not keep otherwise) and 1/rms; the output is counted where it is used."""
    if kernels.fused_norm:
        return tokens * (width * kernels.activation + 4)
    # x in float32, x/rms in float32, and 1/rms
    return tokens * (2 * width * 4 + 4)


def _swiglu(tokens: float, hidden: int, kernels: Kernels) -> float:
    """gate, silu(gate), up and their product."""
    return tokens * 4 * hidden * kernels.activation


def block(config: DenseConfig, index: int, tokens: int, kernels: Kernels = GPU) -> float:
    """Layer `index`."""
    e, width = kernels.activation, config.width
    head = width // config.num_heads
    kept = 2 * _norm(tokens, width, kernels)
    kept += tokens * 2 * width * e  # both norms' outputs: inputs of q, k, v and of the MLP
    kept += tokens * (2 * width + 2 * config.num_kv_heads * head) * e  # q and k (turned), v, the mixed values: flash attention keeps no scores
    kept += tokens * config.num_heads * 4  # log-sum-exp
    if isinstance(config, MoEConfig) and index >= config.num_dense_layers:
        return kept + _experts(config, tokens, kernels)
    return kept + _swiglu(tokens, config.ffn_width, kernels)


def _experts(config: MoEConfig, tokens: int, kernels: Kernels) -> float:
    e, k = kernels.activation, config.experts_per_token
    kept = tokens * k * config.width * e  # rows sorted by expert
    kept += _swiglu(tokens * k, config.expert_width, kernels) + tokens * k * config.expert_width * e  # and the product weighed by the gates
    kept += _swiglu(tokens, config.num_shared_experts * config.expert_width, kernels)
    if e != 4:
        kept += tokens * config.width * 4  # the router's input in float32
        kept += config.num_experts * config.width * 4  # and its weight
    kept += tokens * config.num_experts * 4  # scores
    kept += tokens * k * (4 * 8 + 4 + e)  # choices, three orders of them (int64), gates
    return kept + tokens * 4 + config.num_experts * (4 + e)  # the gates' sum; where each expert's rows end, and its excess load


def head(config: DenseConfig, tokens: int, kernels: Kernels = GPU) -> tuple[float, float]:
    """(kept between forward and backward, beyond that at the worst moment): last norm, logits, loss."""
    kept = _norm(tokens, config.width, kernels) + tokens * config.width * kernels.activation
    kept += tokens * config.vocab_size * 4  # log-probabilities, always float32
    return kept, tokens * config.vocab_size * 8  # in the backward of the softmax: the gradients of its output and of its input, float32


def block_backward(config: DenseConfig, index: int, tokens: int, kernels: Kernels = GPU) -> float:
    """Beyond what layer `index` keeps, at the worst moment of its backward."""
    if isinstance(config, MoEConfig) and index >= config.num_dense_layers:
        # Putting the gradient back into the experts' order takes three copies of the rows; the shared experts are done by then.
        rows = 3 * config.experts_per_token * config.width - 4 * config.num_shared_experts * config.expert_width
        return tokens * max(rows, 2 * config.experts_per_token * config.expert_width) * kernels.activation
    return tokens * 2 * config.ffn_width * kernels.activation  # gradients of up and of silu(gate), when that of their product takes the product's place
