"""Every statement of the catalogue: its algebra decided by sympy, its bound on random instances, and a constant 20 % too small caught.

Which bug fails here: a wrong constant or sign in a bound, a drift counted once instead of twice, a step of a proof that is not an identity, a recursion
that is not the stated one, an instance called sharp that is not.
"""

import numpy as np
import pytest

from theory.catalogue import STATEMENTS
from theory.evidence import Bound, Identities, Rows, Sharp

FAST, FULL = 160, 1000
BY_NAME = {statement.name: statement for statement in STATEMENTS}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_algebraic_step_is_an_identity(name):
    done = BY_NAME[name].module.check_symbolic()
    assert done.failed == []
    assert done.decided or done.assumed


@pytest.mark.parametrize("name", [name for name, statement in BY_NAME.items() if statement.numeric])
def test_the_bound_holds_on_random_instances(name):
    for row in BY_NAME[name].module.check_numeric(FAST, seed=99):
        assert row.violations == 0, row.summary()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, statement in BY_NAME.items() if statement.numeric])
def test_the_bound_holds_on_a_thousand_other_instances(name):
    for row in BY_NAME[name].module.check_numeric(FULL, seed=12345):
        assert row.violations == 0, row.summary()


@pytest.mark.parametrize("name", [name for name, statement in BY_NAME.items() if statement.sharp])
def test_a_constant_twenty_percent_too_small_is_caught(name):
    for sharp in BY_NAME[name].module.check_sharp():
        assert sharp.holds, sharp
        assert sharp.caught, sharp


def test_rows_count_what_they_should():
    row = Rows("example", np.array([1.0, 2.0, np.nan, 3.0]), np.array([1.0, 1.9, 5.0, 4.0]))
    assert row.violations == 2  # 2.0 > 1.9, and the NaN
    assert Rows("exact", np.array([0.0, 1e-30]), np.array([0.0, 0.0])).violations == 1  # a bound of 0 has no slack


def test_sharp_needs_both_sides():
    bound = Bound({"a": np.array(1.0), "b": np.array(1.0)})
    assert Sharp.of("near", "a", 1.9, bound).caught and Sharp.of("near", "a", 1.9, bound).holds
    assert not Sharp.of("far", "a", 1.7, bound).caught
    assert not Sharp.of("over", "a", 2.1, bound).holds
    with pytest.raises(KeyError, match="'c'"):
        bound.weakened("c")


def test_identities_refuse_what_is_not_one():
    import sympy

    x = sympy.symbols("x", positive=True)
    done = Identities()
    done.equal("wrong", (x + 1) ** 2, x**2 + 1)
    done.true("undecided", sympy.Gt(sympy.symbols("y"), 0))
    done.nonnegative("wrong sign", x**2 - x, (x,), "x ≥ 0")
    done.equal("right", (x + 1) ** 2, x**2 + 2 * x + 1)
    assert done.failed == ["wrong", "undecided", "wrong sign (x ≥ 0)"]
