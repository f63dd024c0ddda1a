"""The paper's numbers, as transcribed, and the size that every figure states."""

import json

import pytest

from onelag.models import MoEConfig, build_meta
from onelag.models.presets import PRESETS
from onelag.report.reported import PAPER_JSON, load_reported
from onelag.report.scale import describe, parameter_count, seeds, short


def test_the_transcription():
    reported = load_reported()
    expected = {  # sync, delayed, delayed+EF at 360M
        "muon": (2.578, 2.590, 2.583),
        "adamw": (2.612, 2.890, 2.640),
        "soap": (2.581, 2.608, 2.590),
    }
    for optimizer, losses in expected.items():
        assert tuple(reported.loss(optimizer, mode).value for mode in ("sync", "delayed", "delayed+EF")) == losses
    assert [reported.loss("muon", mode, "10b").value for mode in ("sync", "delayed", "delayed+EF")] == [1.906, 1.911, 1.906]
    assert reported.loss("adan", "delayed+EF") is None and reported.loss("mars", "delayed").value is None
    assert reported.gap("adamw", "delayed") == 0.278 and reported.gap("adamw", "sync") is None and reported.gap("mars", "delayed") is None
    assert reported.share("muon") == pytest.approx(7 / 12) and reported.share("muon", "10b") == 1.0 and reported.share("adan") is None
    assert {loss.confidence for loss in reported.losses.values()} == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda c: c["losses"].append(c["losses"][0]), "reported twice"),
        (lambda c: c["losses"][0].pop("confidence"), "confidence of A, B or C, but one has None"),
        (lambda c: c["losses"][0].update(confidence="D"), "but one has 'D'"),
        (lambda c: c["losses"][0].update(scale="7b"), "unknown scale"),
        (lambda c: c["losses"][0].pop("value"), "neither a value nor words"),
    ],
)
def test_a_damaged_transcription_is_refused(tmp_path, change, cause):
    content = json.loads(PAPER_JSON.read_text(encoding="utf-8"))
    change(content)
    (tmp_path / "paper.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=cause):
        load_reported(tmp_path / "paper.json")


@pytest.mark.parametrize("name", ["byte-0.3m", "10m", "smollm2-135m", "smollm2-360m"])
def test_parameters_are_counted_as_the_model_has_them(name):
    config = PRESETS[name]
    assert parameter_count(vars(config)) == sum(p.numel() for p in build_meta(config).parameters())


@pytest.mark.parametrize(
    "options", [{}, {"num_shared_experts": 2, "num_dense_layers": 2}, {"num_shared_experts": 0, "tie_embeddings": False}]
)
def test_parameters_with_experts(options):
    config = MoEConfig(vocab_size=64, num_layers=4, width=48, num_heads=6, num_kv_heads=2, ffn_width=80, **options)
    model = build_meta(config)
    assert parameter_count(vars(config)) == sum(p.numel() for p in model.parameters())
    idle = sum(p.numel() * (1 - config.experts_per_token / config.num_experts) for n, p in model.named_parameters() if ".experts." in n)
    assert parameter_count(vars(config), active=True) == parameter_count(vars(config)) - idle


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="'num_layers'"):
        parameter_count({"vocab_size": 3})


def test_sizes_in_words(make_result):
    assert [short(x) for x in (7, 999, 999.6, 134_515_008, 2_457_600, 2e11, 3e12)] == ["7", "999", "1K", "135M", "2.46M", "200B", "3T"]
    assert describe([make_result()]) == "320K parameters, 2.46M tokens, State of the Union addresses (bytes)"
    assert describe([make_result(), make_result(steps=600)]).split(", ")[1] == "1.23M to 2.46M tokens"
    assert [seeds(c) for c in ([5, 5], [1], [3, 5], [])] == ["n = 5 seeds", "n = 1 seed", "n = 3 to 5 seeds", "n = 0 seeds"]
