"""What a check returns: instances with a measured number and the bound on it, and identities that sympy decided."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import sympy

ROUNDING = 1e-9  # relative slack of `measured <= bound`: far above float64 noise of these runs, far below any constant's error


@dataclass(frozen=True)
class Bound:
    """A bound as the sum of its printed terms, each of shape (instances,); `total` is the bound."""

    terms: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        return sum(np.asarray(term, dtype=float) for term in self.terms.values())

    def weakened(self, term: str, factor: float = 0.8) -> "Bound":
        """The same bound with one term multiplied by `factor`: what a wrong constant would look like."""
        if term not in self.terms:
            raise KeyError(f"this bound has the terms {sorted(self.terms)}, not {term!r}")
        return Bound({**self.terms, term: factor * np.asarray(self.terms[term], dtype=float)})


@dataclass(frozen=True)
class Rows:
    """Many instances of one statement: measured[i] <= bound[i] must hold for each."""

    label: str
    measured: np.ndarray
    bound: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """bound / measured; how loose the statement is on each instance."""
        return self.bound / np.maximum(self.measured, 1e-300)

    @property
    def violations(self) -> int:
        scale = np.maximum(np.abs(self.bound), 1e-300)
        good = self.measured <= self.bound + ROUNDING * scale  # a NaN counts as a violation
        return int(np.sum(~good))

    def summary(self) -> dict:
        ratio = self.ratio[np.isfinite(self.ratio)]
        return {
            "label": self.label,
            "instances": int(self.measured.size),
            "violations": self.violations,
            "ratio_min": float(ratio.min()),
            "ratio_median": float(np.median(ratio)),
            "ratio_max": float(ratio.max()),
        }


@dataclass(frozen=True)
class Sharp:
    """One instance near the worst case: the bound holds on it, and fails once `term` is weakened by 20 %."""

    label: str
    term: str
    measured: float
    bound: float
    weakened: float

    @classmethod
    def of(cls, label: str, term: str, measured: float, bound: Bound) -> "Sharp":
        return cls(label, term, float(measured), float(bound.total), float(bound.weakened(term).total))

    @property
    def holds(self) -> bool:
        return self.measured <= self.bound * (1 + ROUNDING)

    @property
    def caught(self) -> bool:
        return self.measured > self.weakened * (1 + ROUNDING)


@dataclass
class Identities:
    """Algebraic steps of a proof, each decided by sympy; steps that rest on an assumption are listed beside them."""

    decided: dict[str, bool] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def zero(self, name: str, expression) -> None:
        """The expression is identically zero."""
        self.decided[name] = sympy.simplify(sympy.expand(expression)) == 0

    def equal(self, name: str, left, right) -> None:
        self.zero(name, sympy.sympify(left) - sympy.sympify(right))

    def true(self, name: str, condition) -> None:
        """A condition that sympy (or exact arithmetic) has decided; only a plain True counts."""
        self.decided[name] = condition is True or condition is sympy.true

    def nonnegative(self, name: str, expression, symbols: Iterable, region: str) -> None:
        """After the substitution that maps the region to the positive orthant, every coefficient is nonnegative: so is the expression.

        `region` says in words which substitution the caller made; a polynomial with nonnegative coefficients in nonnegative symbols is >=
          0.
        """
        numerator, denominator = sympy.fraction(sympy.together(sympy.expand(expression)))
        coefficients = [
            coefficient for part in (numerator, denominator) for coefficient in sympy.Poly(sympy.expand(part), *symbols).coeffs()
        ]
        self.decided[f"{name} ({region})"] = all(c.is_nonnegative for c in coefficients) or all(c.is_nonpositive for c in coefficients)

    def assume(self, step: str) -> None:
        self.assumed.append(step)

    @property
    def failed(self) -> list[str]:
        return [name for name, good in self.decided.items() if not good]
