"""What every figure and table must say about its own size: parameters, tokens, corpus, seeds."""

from collections.abc import Iterable, Mapping
from typing import Any

from onelag.report.store import Result

CORPORA = {"sotu": "State of the Union addresses"}


def parameter_count(model: Mapping[str, Any]) -> int:
    """Parameters of a dense model (Llama shape, no biases) from its stored configuration.

    Raises:
        ValueError: the configuration is of another kind of model.
    """
    try:
        vocab, layers, width, ffn = (model[name] for name in ("vocab_size", "num_layers", "width", "ffn_width"))
        kv_width = width * model["num_kv_heads"] // model["num_heads"]
        tied = model["tie_embeddings"]
    except KeyError as error:
        raise ValueError(f"cannot count the parameters of a model without {error.args[0]!r} in its configuration") from error
    attention = 2 * width * width + 2 * width * kv_width  # q and o, k and v
    return vocab * width * (1 if tied else 2) + layers * (attention + 3 * width * ffn + 2 * width) + width


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
    return f"{_range(sizes)} parameters, {_range(tokens)} tokens, {', '.join(corpora)}"


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
