"""Curves for figures and notebooks, as plain numbers: stability regions, variance, Adam's floor, momentum's two regimes."""

import numpy as np

from theory import adam, momentum
from theory.limit_cycle import amplitude, corrected_cycles, mean_residual, simulated_amplitude
from theory.stability import EMA, best_theta, limit_corrected, limit_nesterov, limit_nesterov_corrected, limit_plain
from theory.variance import lyapunov


def stability() -> list[dict]:
    """Largest stable ηλ per β and scheme (Theorem 8)."""
    rows = []
    for beta in np.concatenate([np.linspace(0, 0.9, 19), 1 - np.geomspace(0.09, 0.01, 12)]):
        scale = 1 / (1 - beta)
        rows.append(
            {
                "beta": float(beta),
                "EMA, no delay": scale * limit_plain(beta, 0),
                "EMA, delayed": scale * limit_plain(beta, 1),
                "EMA, delayed + error feedback": scale * limit_corrected(beta, 1.0),
                "EMA, delayed, best coefficient": scale * (2 - beta) ** 2 / 4,
                "best coefficient": best_theta(beta),
                "Nesterov, no delay": scale * limit_nesterov(beta, 0),
                "Nesterov, delayed": scale * limit_nesterov(beta, 1),
                "Nesterov, delayed + error feedback": scale * float(limit_nesterov_corrected(beta)),
            }
        )
    return rows


def variance(betas=(0.5, 0.9, 0.95)) -> list[dict]:
    """Stationary variance relative to the undelayed method, per ηλ (Theorem 9); None beyond the stability limit."""
    rows = []
    for beta in betas:
        for gain in np.geomspace(0.02, 2.6, 120):
            h = (1 - beta) * gain
            base = lyapunov(EMA, beta, h, 0.0, 0)
            inside = lambda theta, top, at, h=h, base=base, beta=beta: lyapunov(EMA, beta, h, theta, 1, at) / base if h < top else None  # noqa: E731
            corrected = limit_corrected(beta, 1.0)
            rows.append(
                {
                    "beta": beta,
                    "eta_lambda": float(gain),
                    "delayed": inside(0.0, limit_plain(beta, 1), "x"),
                    "error feedback at x": inside(1.0, corrected, "x"),
                    "error feedback at z": inside(1.0, corrected, "z"),
                }
            )
    return rows


def adam_floor(beta1: float = 0.9) -> dict:
    """rms of one coordinate (times λ, in units of σ) per ηλ/σ: prediction and simulation (A2), and the noiseless floor's ratio per β₁
    (A1).
    """
    gains = np.geomspace(0.1, 100, 40)
    prediction = [
        {"eta_lambda_over_sigma": float(g), **{s: float(np.sqrt(adam.predicted_variance(g, beta1, 1.0, s))) for s in adam.SCHEMES}}
        for g in gains
    ]
    points = gains[::4]
    one = np.ones(len(points))
    simulated = {}
    for scheme, (delay, theta) in adam.SCHEMES.items():
        moments, _ = adam.simulate(np.ones((1, 1)), adam.Adam(points, beta1 * one, one, 0.9995, delay, delay, theta), 16000, 0)
        simulated[scheme] = np.sqrt(moments[:, 0, 0]).tolist()
    ratios = [
        {"beta1": float(b), **{s: adam.floor_ratio(b, s) for s in ("delayed", "error feedback")}}
        for b in np.concatenate([np.linspace(0, 0.9, 19), 1 - np.geomspace(0.08, 0.02, 12)])
    ]
    return {
        "beta1": beta1,
        "prediction": prediction,
        "simulated": {"eta_lambda_over_sigma": points.tolist(), **simulated},
        "floor_ratio": ratios,
        "ablation": {str(b): adam.ablation(beta1=b) for b in (0.0, 0.9)},
        "ablation_predicted": {
            str(b): {s: adam.flat_slowdown(0.02, b, 0.005, s, 16) for s in ("delayed", "error feedback")} for b in (0.0, 0.9)
        },
    }


def momentum_regimes() -> dict:
    """Tuned relative loss per β: exact for linear momentum at three noise levels, simulated for a Muon-like method at two; and the
    predictions.
    """
    linear = [
        momentum.tuned_gaps(momentum.Spectrum(sigma), beta, np.geomspace(1e-3, 40, 48))
        for sigma in (1e-3, 1e-2, 1e-1)
        for beta in momentum.BETAS
    ]
    return {
        "linear": linear,
        "muon": [row for sigma in (1e-3, 0.3) for row in momentum.lmo_gaps(sigma)],
        "predictions": momentum.predictions(),
    }


def cycles() -> dict:
    """Proposition 7's residual per delay, error feedback's cycles, and the describing function against simulation."""
    amplitudes = [
        {
            "alpha": a,
            **{f"predicted, θ = {t:g}": amplitude(a, t) for t in (0.0, 1.0)},
            **{f"simulated, θ = {t:g}": simulated_amplitude(a, t) for t in (0.0, 1.0)},
            "simulated, Nesterov, θ = 1": simulated_amplitude(a, 1.0, True),
            "simulated, no delay": simulated_amplitude(a, 0.0, delay=0),
        }
        for a in (0.2, 0.1, 0.05, 0.02, 0.01)
    ]
    residual = [{"delay": d, "exact": mean_residual(d), "bound": d + 0.5} for d in range(9)]
    return {"residual": residual, "corrected": corrected_cycles(), "amplitudes": amplitudes}
