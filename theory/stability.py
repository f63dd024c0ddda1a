"""Theorem 8. Exact stability limits of the quadratic model with momentum, delay and correction. Ours (proved here), item 7's first half
classical.

Setting. f = (λ/2)x²; m_{t+1} = βm_t + (1−β)g_t; direction m_{t+1} (EMA; heavy ball with step γ = (1−β)η) or βm_{t+1} + (1−β)g_t
(Nesterov); h := (1−β)ηλ = γλ; delay τ; correction U(θ), lag 1. Everything is linear, so G(θ) = U(θ) here. Characteristic polynomials
(`polynomial`):
  EMA            z^τ(z−1)(z−β) + hz                        ×C(z) on the second summand, C = (1+θ) − θ/z, for U(θ);
  Nesterov       z^τ(z−1)(z−β) + h((1+β)z − β)             the same.
Statement. Asymptotically stable iff 0 < h < h*, with                                                               (ηλ = h/(1−β))
 1. EMA, τ=0: h* = 2(1+β), ηλ < 2(1+β)/(1−β).      2. EMA, τ=1: h* = 1−β, i.e. ηλ < 1 for *every* β.
 3. EMA, τ=1, U(θ): h* = [−(1−βθ) + √((1−βθ)² + 4θ²(1−β))]/(2θ²); θ = 1: ηλ < (√(1 + 4/(1−β)) − 1)/2; at β = 0 the golden ratio 0.618 < 1.
    U(1) enlarges the range iff β > 1/2.
 4. Best θ: θ* = 2β/(2−β)², h* = (2−β)²/4, ηλ < (2−β)²/(4(1−β)); θ* = 1 at β = 3−√5.
 5. Nesterov, τ=0: h* = 2(1+β)/(1+2β). Nesterov, τ=1: item 3 with θ = β (the same polynomial).
 6. Nesterov, τ=1, U(1): h* = smallest positive root of D(h) = 1−β − h(1−3β²+β³) − h²(1+β+2β²−2β³) − h³(2β²+β³); → 1/3 as β → 1.
 7. β = 0, any τ: ηλ < 2 sin(π/(2(2τ+1))). EMA, τ ≥ 1: h* = |e^{iω}−1||e^{iω}−β| at the smallest ω > 0 with (τ−1)ω + π/2 + ω/2 +
    arg(e^{iω}−β) = π.
Proof. 1, 2, 5: Jury's conditions for quadratics. 3: z³+Az²+Bz+C with A = −(1+β), B = β+h(1+θ), C = −θh: p(1) = h > 0, p(−1) < 0, B−AC =
β+h(1−βθ), and 1−C²−(B−AC) = (1−β)−(1−βθ)h−θ²h² =: J(h). In y = θh, J is concave, > 0 at 0 and = −1/θ < 0 at 1, so J > 0 and h > 0 imply
|C| = y < 1; then B−AC ≥ β+h−βy > h > −(1−C²) as well. Stable iff J > 0 iff h < h*. β > 1/2: (√(1+4/(1−β))−1)/2 > 1 ⇔ 4/(1−β) > 8. 4:
∂J/∂θ = 0 ⇒ h = β/(2θ); substitute. 6: stable for small h; p(1) = h ≠ 0, p(−1) = 2(1+β)+3h(1+2β) ≠ 0, so the first exit is by a complex
pair, and Π_{i<j}(1−z_iz_j) = det(X−Y) = D (Jury's inner determinant). 7: the boundary crossing e^{iω} of smallest h. ∎
Certification: `exact_limit` bisects h with Jury's test in rational arithmetic, independent of every formula here and of floating-point
roots.
Reading. (i) One step of delay collapses the stable range of EMA momentum from 2(1+β)/(1−β) to 1: high momentum makes a linear optimizer
more fragile, not less. (ii) The correction or Nesterov alone recovers (1−β)^{−1/2}; both together (1/3)/(1−β). (iii) Without momentum the
correction hurts; the crossing is β = 1/2, the 60° rule of Theorem 3 with c = β.
"""

from fractions import Fraction

import numpy as np
import sympy
from mpmath import mp, mpf, polyroots

from theory.evidence import Identities, Rows

EMA, NESTEROV = "ema", "nesterov"


def polynomial(direction: str, beta, h, theta=0, delay: int = 1) -> list:
    """Coefficients, highest power first; numbers of any kind (float, Fraction, mpf, sympy)."""
    loop = [h, 0] if direction == EMA else [h * (1 + beta), -h * beta]
    plant = [1, -(1 + beta), beta]
    if theta == 0:
        return _add(plant + [0] * delay, loop)
    return _add(plant + [0] * (delay + 1), _multiply(loop, [1 + theta, -theta]))


def _add(a: list, b: list) -> list:
    return [x + y for x, y in zip([0] * (len(b) - len(a)) + a, [0] * (len(a) - len(b)) + b)]


def _multiply(a: list, b: list) -> list:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] = out[i + j] + x * y
    return out


def schur_stable(coefficients: list[Fraction]) -> bool:
    """All roots strictly inside the unit circle: Schur–Cohn recursion, exact for rational coefficients."""
    p = [Fraction(c) for c in coefficients]
    while len(p) > 1:
        lead, last = p[0], p[-1]
        if abs(last) >= abs(lead):
            return False
        p = [lead * x - last * y for x, y in zip(p[:-1], reversed(p[1:]))]
    return True


def exact_limit(direction: str, beta: Fraction, theta: Fraction = Fraction(0), delay: int = 1, digits: int = 14) -> Fraction:
    """Largest h (to 10^−digits) up to which the method is stable, by bisection with the exact test; no formula, no roots.

    The bracket is found by scanning upwards in small steps, so that the first exit is not jumped over.
    """
    low, step = Fraction(0), Fraction(1, 64) * (1 - beta if delay else 1)
    stable = lambda h: schur_stable(polynomial(direction, beta, h, theta, delay))  # noqa: E731
    while stable(low + step):
        low += step
    high = low + step
    while high - low > Fraction(1, 10**digits):
        middle = (low + high) / 2
        middle = middle.limit_denominator(10 ** (digits + 3))
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def limit_plain(beta, delay: int = 1):
    """h* of EMA momentum: items 1, 2 and 7."""
    if delay == 0:
        return 2 * (1 + beta)
    if delay == 1:
        return 1 - beta
    if beta == 0:
        return 2 * mp.sin(mp.pi / (2 * (2 * delay + 1)))
    phase = lambda w: (delay - 1) * w + mp.pi / 2 + w / 2 + mp.arg(mp.expj(w) - beta) - mp.pi  # noqa: E731
    low, high = mpf(0) + mpf(10) ** -20, mp.pi  # phase(0+) = −π/2 + 0 < 0 < phase(π), and it increases
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if phase(middle) < 0 else (low, middle)
    return abs(mp.expj(low) - 1) * abs(mp.expj(low) - beta)


def limit_corrected(beta, theta, sqrt=np.sqrt):
    """h* of EMA momentum with delay 1 and U(θ), θ > 0: item 3."""
    a = 1 - beta * theta
    # 2(1−β)/(a + √…): the stable form of (−a + √…)/(2θ²)
    root = sqrt(a * a + 4 * theta * theta * (1 - beta))
    return 2 * (1 - beta) / (a + root)


def limit_nesterov(beta, delay: int = 1, sqrt=np.sqrt):
    """h* of Nesterov momentum, delay 0 or 1: item 5."""
    if delay == 0:
        return 2 * (1 + beta) / (1 + 2 * beta)
    return limit_corrected(beta, beta, sqrt) if beta else 1


def boundary_nesterov_corrected(beta, h):
    """D(h) of item 6."""
    return (1 - beta) - h * (1 - 3 * beta**2 + beta**3) - h**2 * (1 + beta + 2 * beta**2 - 2 * beta**3) - h**3 * (2 * beta**2 + beta**3)


def limit_nesterov_corrected(beta):
    """h* of item 6 by bisection of D between 0 and its first sign change (D(0) = 1−β > 0, D decreasing for h ≥ 0 once the linear term
    is).
    """
    roots = (
        polyroots(
            [-(2 * beta**2 + beta**3), -(1 + beta + 2 * beta**2 - 2 * beta**3), -(1 - 3 * beta**2 + beta**3), 1 - beta],
            maxsteps=200,
            extraprec=200,
        )
        if beta
        else polyroots([-1, -1, 1])
    )
    return min(mp.re(r) for r in roots if abs(mp.im(r)) < mpf(10) ** -20 and mp.re(r) > 0)


def best_theta(beta):
    """θ* of item 4."""
    return 2 * beta / (2 - beta) ** 2


def radius(coefficients: list) -> mpf:
    """Largest modulus of the roots, 30 digits. Trailing zeros (roots at 0) are taken out first: they are exact."""
    while coefficients[-1] == 0:
        coefficients = coefficients[:-1]
    return max(abs(r) for r in polyroots(coefficients, maxsteps=400, extraprec=400))


def asymptotic_rate(direction: str, beta: float, h: float, theta: float = 0.0, delay: int = 1) -> float:
    """Largest |root|: error shrinks by it per step, in the long run."""
    return float(np.abs(np.roots(polynomial(direction, beta, h, theta, delay))).max())


def check_symbolic() -> Identities:
    done = Identities()
    b, h, th, z = sympy.symbols("beta h theta z", positive=True)
    as_poly = lambda *args, **kw: sum(c * z**i for i, c in enumerate(reversed(polynomial(*args, **kw))))  # noqa: E731
    p1, pth = as_poly(EMA, b, h), as_poly(EMA, b, h, th)
    done.equal("EMA, τ=0", as_poly(EMA, b, h, 0, 0), z**2 - (1 + b - h) * z + b)
    done.equal("EMA, τ=1 has a root at 0 and z² − (1+β)z + β + h", p1, z * (z**2 - (1 + b) * z + b + h))
    done.equal("U(θ): cubic", pth, z * (z * (z - 1) * (z - b) + h * ((1 + th) * z - th)))
    done.equal("Nesterov τ=1 is U(β): same polynomial", as_poly(NESTEROV, b, h) * z, pth.subs(th, b))
    _, A, B, C = sympy.Poly(pth / z, z).all_coeffs()
    done.equal("p(1) = h", 1 + A + B + C, h)
    J = (1 - b) - (1 - b * th) * h - th**2 * h**2
    done.equal("1 − C² − (B − AC) = J", 1 - C**2 - (B - A * C), J)
    y = sympy.symbols("y")
    done.equal("J at θh = 1 is −1/θ", J.subs(h, 1 / th), -1 / th)
    done.equal("J″ in y is −2", sympy.diff(sympy.expand(J.subs(h, y / th)), y, 2), -2)
    hs = (-(1 - b * th) + sympy.sqrt((1 - b * th) ** 2 + 4 * th**2 * (1 - b))) / (2 * th**2)
    done.equal("h* is a root of J", J.subs(h, hs), 0)
    done.equal(
        "the stable form of h* is the same number",
        sympy.simplify(hs * ((1 - b * th) + sympy.sqrt((1 - b * th) ** 2 + 4 * th**2 * (1 - b)))),
        2 * (1 - b),
    )
    done.equal("θ → 0: h* → 1−β", sympy.limit(hs, th, 0), 1 - b)
    limit_one = (sympy.sqrt(1 + 4 / (1 - b)) - 1) / 2
    done.equal("θ = 1: ηλ limit solves x² + x = 1/(1−β)", limit_one**2 + limit_one, 1 / (1 - b))
    done.equal(
        "θ = 1: so does h*/(1−β), as J((1−β)x) = (1−β)(1 − (1−β)(x² + x))",
        J.subs(th, 1).subs(h, (1 - b) * y),
        (1 - b) * (1 - (1 - b) * (y**2 + y)),
    )
    done.equal("golden ratio at β = 0", limit_one.subs(b, 0), (sympy.sqrt(5) - 1) / 2)
    done.equal("crossing at β = 1/2", limit_one.subs(b, sympy.Rational(1, 2)), 1)
    star, hstar = 2 * b / (2 - b) ** 2, (2 - b) ** 2 / 4
    done.equal("item 4: J(h*, θ*) = 0", J.subs({th: star, h: hstar}), 0)
    done.equal("item 4: ∂J/∂θ = 0", sympy.diff(J, th).subs({th: star, h: hstar}), 0)
    done.equal("item 4: θ* = 1 at β = 3−√5", star.subs(b, 3 - sympy.sqrt(5)), 1)
    done.equal("item 5: Nesterov τ=0 exits at z = −1", as_poly(NESTEROV, b, h, 0, 0).subs({z: -1, h: 2 * (1 + b) / (1 + 2 * b)}), 0)
    quartic = sympy.Poly(as_poly(NESTEROV, b, h, 1), z)
    _, a3, a2, a1, a0 = quartic.all_coeffs()
    X, Y = sympy.Matrix([[1, a3, a2], [0, 1, a3], [0, 0, 1]]), sympy.Matrix([[0, 0, a0], [0, a0, a1], [a0, a1, a2]])
    D = boundary_nesterov_corrected(b, h)
    done.equal("item 6: det(X − Y) = D", (X - Y).det(), D)
    done.equal("item 6: D at β = 1", D.subs(b, 1), -h * (3 * h - 1) * (h + 1))
    done.equal("item 6: p(−1)", quartic.as_expr().subs(z, -1), 2 * (1 + b) + 3 * h * (1 + 2 * b))
    return done


def check_numeric(count: int = 1000, seed: int = 12) -> list[Rows]:
    """Closed forms against roots in 30 digits (|radius − 1| ≤ 1e-12 at h*, stable just below, unstable just above) and against Jury's
    test.
    """
    with mp.workdps(30):
        return _against_roots(count, seed)


def _against_roots(count: int, seed: int) -> list[Rows]:
    rng = np.random.default_rng(seed)
    at, below, above = [], [], []
    for i in range(count):
        beta = mpf(float(rng.choice([0.0, rng.uniform(0, 1), 1 - 10 ** rng.uniform(-3, -0.5)])))
        direction, theta, delay, h = _case(i, beta, rng)
        r = lambda factor, d=direction, b=beta, v=h, t=theta, k=delay: radius(polynomial(d, b, v * factor, t, k))  # noqa: E731
        at.append(float(abs(r(1) - 1)))
        below.append(float(r(1 - mpf(10) ** -6)))
        above.append(2.0 - float(r(1 + mpf(10) ** -6)))
    one = np.full(count, 1.0)
    return [
        Rows("Theorem 8: |radius(h*) − 1|", np.array(at), np.full(count, 1e-12)),
        Rows("Theorem 8: radius below h* < 1", np.array(below) + 1e-10, one),
        Rows("Theorem 8: radius above h* > 1", np.array(above) + 1e-10, one),
        _against_jury(max(count // 20, 12), rng),
    ]


def _case(i: int, beta, rng) -> tuple:
    kind = i % 7
    if kind == 0:
        return EMA, 0, 0, limit_plain(beta, 0)
    if kind == 1:
        return EMA, 0, 1, limit_plain(beta, 1)
    if kind == 2:
        delay = int(rng.integers(2, 7))
        return EMA, 0, delay, limit_plain(beta, delay)
    if kind == 3:
        theta = mpf(float(rng.uniform(0.01, 3)))
        return EMA, theta, 1, limit_corrected(beta, theta, mp.sqrt)
    if kind == 4:
        return NESTEROV, 0, 0, limit_nesterov(beta, 0, mp.sqrt)
    if kind == 5:
        return NESTEROV, 0, 1, limit_nesterov(beta, 1, mp.sqrt)
    return NESTEROV, 1, 1, limit_nesterov_corrected(beta)


def _against_jury(count: int, rng) -> Rows:
    """Closed forms against the rational bisection: absolute difference in h."""
    difference = []
    for i in range(count):
        beta = Fraction(int(rng.integers(0, 100)), 100)
        direction, theta, delay, h = _case(i, mpf(beta.numerator) / beta.denominator, rng)
        theta = Fraction(float(theta)).limit_denominator(1000) if theta else Fraction(0)
        if theta and direction == EMA:
            h = limit_corrected(mpf(beta.numerator) / beta.denominator, mpf(theta.numerator) / theta.denominator, mp.sqrt)
        found = exact_limit(direction, beta, theta, delay)
        difference.append(float(abs(mpf(found.numerator) / found.denominator - h)))
    return Rows("Theorem 8: closed form against exact Jury bisection", np.array(difference), np.full(count, 2e-14))
