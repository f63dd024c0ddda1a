"""What every figure and table must say about its own size: parameters, tokens, corpus, seeds."""

from collections.abc import Iterable, Mapping
from typing import Any

from onelag.report.store import Result

CORPORA = {"sotu": "State of the Union addresses"}


def parameter_count(model: Mapping[str, Any], active: bool = False) -> int:
    """Parameters of a model (Llama shape, no biases; dense or with experts) from its stored configuration; nothing is built.

    Args:
        active: only those that one token meets.

    Raises:
        ValueError: the configuration is of another kind of model.
    """
    try:
        vocab, layers, width, ffn = (model[name] for name in ("vocab_size", "num_layers", "width", "ffn_width"))
        kv_width = width * model["num_kv_heads"] // model["num_heads"]
        tied = model["tie_embeddings"]
        common = 2 * width * width + 2 * width * kv_width + 2 * width  # q and o, k and v, two norms
        dense, sparse = 3 * width * ffn, 0
        layers_dense = layers
        if "num_experts" in model:
            layers_dense = model["num_dense_layers"]
            routed = model["experts_per_token"] if active else model["num_experts"]
            experts = 3 * width * model["expert_width"] * (routed + model["num_shared_experts"])
            sparse = experts + model["num_experts"] * (width + 1)  # the router and its biases
    except KeyError as error:
        raise ValueError(f"cannot count the parameters of a model without {error.args[0]!r} in its configuration") from error
    blocks = layers * common + layers_dense * dense + (layers - layers_dense) * sparse
    return vocab * width * (1 if tied else 2) + blocks + width


def describe(results: Iterable[Result]) -> str:
    """One line: "0.37M parameters, 2.46M tokens, State of the Union addresses (bytes)"; several sizes are joined by "to"."""
    configs = [result.config for result in results]
    if not configs:
        return "no results"
    sizes = sorted({parameter_count(config["model"]) for config in configs})
    tokens = sorted({config["schedule"]["steps"] * config["data"]["batch_size"] * config["data"]["sequence_length"] for config in configs})
    corpora = sorted(
        {f"{CORPORA.get(config['data']['corpus'], config['data']['corpus'])} ({config['data']['tokenizer']})" for config in configs}
    )
    active = sorted({parameter_count(config["model"], active=True) for config in configs})
    size = f"{_range(sizes)} parameters" + (f" ({_range(active)} active)" if active != sizes else "")
    return f"{size}, {_range(tokens)} tokens, {', '.join(corpora)}"


def seeds(counts: Iterable[int]) -> str:
    """ "n = 5 seeds" or "n = 3 to 5 seeds"."""
    counts = sorted(set(counts)) or [0]
    words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"n = {words} seed{'' if counts[-1] == 1 else 's'}"


def short(count: float) -> str:
    """Three significant digits with K, M, B or T: 368736 → "369K"."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"


def _range(values: list[int]) -> str:
    return short(values[0]) if len(values) == 1 else f"{short(values[0])} to {short(values[-1])}"
