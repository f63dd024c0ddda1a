"""Proposition E. Which corrections are one algorithm under two names: exact identities of trajectories, any optimizer. Ours (proved here).

u_t is the optimizer's direction, x_s = x₀ for s < 0, U(θ): x_{t+1} = x_t − η[u_t + θ(u_t − u_{t−k})].
E1  For a fixed delay the virtual iterate of perturbed-iterate analysis (Stich & Karimireddy) is a future iterate: x_t − ηΣ_{i<τ}u_{t+i} =
x_{t+τ}.
E2  U(θ) ≡ weight prediction. z_t := x_t + θηΣ_{i=1}^k u_{t−i} obeys z_{t+1} = z_t − ηu_t, and x_t = z_t − θηΣ_{i=1}^k u_{t−i}; θ = k = 1:
x_t = 2z_t − z_{t−1}. The paper's error feedback is the plain delayed method on z, run at the extrapolated point.
E2′ Start. With u_{−1} := u_0 (first step uncorrected, as onelag.delay), z_0 = x₀ + θηu_0 and z_1 = x₀ − (1−θ)ηu_0: at θ = 1 the chain
z_1, z_2, … starts at x₀, so that start costs exactly one step.
E3  Nesterov inside the LMO, u((1−α)M_t + αg_t), is the gradient-level correction u(M_t + θ(M_t − M_{t−1})) with θ = 1−α.
E4  For linear optimizers gradient-level and update-level corrections agree, and Nesterov with delay 1 is EMA with delay 1 and U(β).
E5  Learning-rate schedule η_t and decoupled decay λ. Three readings, equal at λ = 0:
    (memory)    x_{t+1} = (1−η_tλ)x_t − η_tu_t − θ[η_tu_t − (1−η_tλ)η_{t−1}u_{t−1}],  z_t = x_t + θη_{t−1}u_{t−1}:
                z_{t+1} = (1−η_tλ)z_t − η_tu_t;
    (update)    the whole update is fed back, U_t = η_t(u_t + λx_t), x_{t+1} = x_t − U_t − θ(U_t − U_{t−1}), z_t = x_t + θU_{t−1}:
                z_{t+1} = z_t − η_tu_t − η_tλx_t;
    (lookahead) the optimizer works on z and the model runs on x_{t+1} = z_{t+1} − θ(z_t − z_{t+1}):
                z_{t+1} = (1−η_tλ)z_t − η_tu_t.
    memory and lookahead have the same z-recursion; their x differ by θη_tλz_t. update decays x instead of z: a difference of
    η_tλ·θU_{t−1} per step.
E6  x_{t+1} = z_t − (1+θ)ηu_t: with master weights z and a forward copy x, the correction needs no further parameter-sized memory.
Proof. E2: x_{t+1} + θηΣ_{i=0}^{k−1}u_{t−i} = x_t − ηu_t − θηu_t + θηu_{t−k} + θηΣ_{i=0}^{k−1}u_{t−i} = x_t + θηΣ_{i=1}^k u_{t−i} − ηu_t.
E3: M_t + θ(M_t − M_{t−1}) with M_t − M_{t−1} = α(g_t − M_{t−1}), and (1−α)M_t + αg_t = M_t + α(g_t − M_t) = M_t + α(1−α)(g_t − M_{t−1}). E4: an EMA is linear and
shift-invariant. E5, E6: substitution. ∎
"""

from dataclasses import replace

import numpy as np
import sympy
from numpy import ndarray

from theory.evidence import Identities, Rows
from theory.geometry import frobenius
from theory.recursion import Rule, run
from theory.sampling import Sample, instances

TOLERANCE = 1e-10  # of the distance travelled; observed differences are about 1e-14


def check_symbolic() -> Identities:
    done = Identities()
    eta, th, lam, e0, e1 = sympy.symbols("eta theta lambda eta_0 eta_1")
    x, z = sympy.symbols("x z")
    u = sympy.symbols("u0:8")
    for k in (1, 2, 3):
        t = 4
        z_t = x + th * eta * sum(u[t - i] for i in range(1, k + 1))
        x_next = x - eta * (u[t] + th * (u[t] - u[t - k]))
        z_next = x_next + th * eta * sum(u[t - i] for i in range(k))
        done.equal(f"E2 lag {k}: z_{{t+1}} = z_t − ηu_t", z_next, z_t - eta * u[t])
        done.equal(f"E6 lag {k}: x_{{t+1}} from z_t", x_next, z_t - eta * u[t] - th * eta * sum(u[t - i] for i in range(k)))
    first = x - eta * u[0]
    done.equal("E2′: z_1 = x₀ − (1−θ)ηu₀", first + th * eta * u[0], x - (1 - th) * eta * u[0])
    a, M, g = sympy.symbols("alpha M g")
    new = (1 - a) * M + a * g
    done.equal("E3 Nesterov = gradient-level θ = 1−α", (1 - a) * new + a * g, new + (1 - a) * (new - M))
    m0, m1, m2 = a * u[0], (1 - a) * a * u[0] + a * u[1], (1 - a) * ((1 - a) * a * u[0] + a * u[1]) + a * u[2]
    fed = (1 - a) * ((1 - a) * a * (1 + th) * u[0] + a * (u[1] + th * (u[1] - u[0]))) + a * (u[2] + th * (u[2] - u[1]))
    done.equal("E4 EMA of corrected gradients = corrected EMA (three steps, zero start)", fed, m2 + th * (m2 - m1))
    done.true("E4 the recursion starts from m_0 = αg_0", m0 == a * u[0])
    x_next = (1 - e1 * lam) * x - e1 * u[1] - th * (e1 * u[1] - (1 - e1 * lam) * e0 * u[0])
    done.equal("E5 memory", x_next + th * e1 * u[1], (1 - e1 * lam) * (x + th * e0 * u[0]) - e1 * u[1])
    before, U = sympy.symbols("U_before U")
    done.equal("E5 update: z_{t+1} = z_t − U_t", (x - U - th * (U - before)) + th * U, (x + th * before) - U)
    z_next = (1 - e1 * lam) * z - e1 * u[1]
    done.equal(
        "E5 lookahead against memory: x differs by θη_tλz_t", (z_next - th * (z - z_next)) - (z_next - th * e1 * u[1]), -th * e1 * lam * z
    )
    return done


def predicted(sample: Sample, rule: Rule) -> ndarray:
    """U(θ) as weight prediction, written apart from theory.recursion: z is stored, gradients are taken at x = z − θηΣu. Returns x, (T+1,
    …).
    """
    problem, direction = sample.problem, _smooth(sample)
    column = lambda v: np.broadcast_to(np.asarray(v, float), problem.x0.shape[:1])[:, None, None]  # noqa: E731
    eta, alpha, theta = column(rule.eta), column(rule.alpha), column(rule.theta)
    spread = column(sample.sigma) / np.sqrt(problem.x0[0].size)
    rng = np.random.default_rng(sample.seed)
    z, looked, u, M = problem.x0, [problem.x0], [], None
    for t in range(sample.steps):
        g = problem.grad(looked[max(t - rule.delay, 0)]) + spread * rng.standard_normal(z.shape)
        M = g if M is None else (1 - alpha) * M + alpha * g
        u.append(direction(M))
        if t == 0 and rule.start == "first":
            z = z + theta * eta * rule.lag * u[0]  # z_0, known once u_0 is
        z = z - eta * u[t]
        ahead = sum(u[t - i] if t >= i else (u[0] if rule.start == "first" else 0 * u[0]) for i in range(rule.lag))
        looked.append(z - theta * eta * ahead)
    return np.stack(looked)


def check_numeric(count: int = 1000, seed: int = 3) -> list[Rows]:
    """max over the path of the difference of two forms, against 1e-10 of the distance that the path covers.

    The identities hold for any optimizer; here it is a smooth one, u = M/(s + ‖M‖_F). With a discontinuous lmo (a sign, a polar factor)
    two exact forms part after a tie that rounding decides, which says nothing about either.
    """
    rows = []
    for sample in instances(count, seed, delays=(1, 2, 3)):
        eta, smooth = sample.rule.eta, _smooth(sample)
        for start in ("zero", "first"):
            for lag in {1, sample.rule.delay}:
                theta = np.linspace(0.0, 2.0, len(eta))
                rule = replace(sample.rule, theta=theta, lag=lag, start=start)
                path = sample.run(rule, smooth)
                rows.append(_close("E2 correction = prediction", path.x, predicted(sample, rule)))
                rows.append(_close("E2 z_{t+1} = z_t − ηu_t", path.z[1:], path.z[:-1] - eta[:, None, None] * path.u))
        plain = sample.run(sample.rule)
        tau, T = sample.rule.delay, sample.steps
        pending = sum(plain.u[i : T - tau + i] for i in range(tau))
        rows.append(_close("E1 virtual iterate = x_{t+τ}", plain.x[: T - tau] - eta[:, None, None] * pending, plain.x[tau:T]))
        nesterov = replace(sample.rule, inner=1 - sample.alpha, momentum="zero")
        rows.append(_close("E3 Nesterov Muon = gradient-level 1−α", sample.run(nesterov, smooth).x, _nesterov(sample)))
        rows.append(_close("E4 linear: update-level = gradient-level", _linear(sample, theta=0.7), _linear(sample, inner=0.7)))
    return Sample.merge(rows)


def _smooth(sample: Sample):
    """A smooth direction map: u = M/(s + ‖M‖_F), s the size of the first gradient. `mass` undoes the zero start's normalisation."""
    size = frobenius(sample.problem.grad(sample.problem.x0))[:, None, None] + sample.sigma[:, None, None]

    def direction(M: ndarray, mass=1.0) -> ndarray:
        M = M / mass
        return M / (size + frobenius(M)[:, None, None])

    return direction


def _nesterov(sample: Sample) -> ndarray:
    """Muon's own form, m ← (1−α)m + αg, u = lmo((1−α)m + αg), written apart."""
    problem, rule, direction = sample.problem, sample.rule, _smooth(sample)
    eta, alpha = rule.eta[:, None, None], rule.alpha[:, None, None]
    spread = (sample.sigma / np.sqrt(problem.x0[0].size))[:, None, None]
    rng = np.random.default_rng(sample.seed)
    x, m = [problem.x0], np.zeros_like(problem.x0)
    for t in range(sample.steps):
        g = problem.grad(x[max(t - rule.delay, 0)]) + spread * rng.standard_normal(m.shape)
        m = (1 - alpha) * m + alpha * g
        x.append(x[-1] - eta * direction((1 - alpha) * m + alpha * g, 1 - (1 - alpha) ** (t + 1)))
    return np.stack(x)


def _linear(sample: Sample, theta: float = 0.0, inner: float = 0.0) -> ndarray:
    """SGD with EMA momentum (zero start) as the recursion with u = M, at the step ηL = 0.1 of each problem."""
    alpha, step = sample.alpha[:, None, None], iter(range(sample.steps))

    def undo(M: ndarray) -> ndarray:  # theory.recursion divides the zero start's M by its mass, which a linear rule would see
        return M * (1 - (1 - alpha) ** (next(step) + 1))

    rule = replace(sample.rule, eta=0.1 / sample.problem.L, theta=theta, inner=inner, momentum="zero")
    return run(sample.problem, sample.geometry, rule, sample.steps, sample.sigma, np.random.default_rng(sample.seed), undo).x


def _close(label: str, A: ndarray, B: ndarray) -> Rows:
    difference = np.abs(A - B).max(axis=(0, 2, 3))
    return Rows(label, difference, TOLERANCE * np.maximum(np.abs(A).max(axis=(0, 2, 3)), 1e-12))
