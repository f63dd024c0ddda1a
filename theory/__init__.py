"""Theory of the one-step delay that a machine checks: one file per theorem or model, pure (numpy, scipy, sympy, cvxpy, PEPit), nothing of
code/.

`python -m theory` runs every check, writes results/theory/ and draws its figures; theory/README.md maps theorem → proof → checks → test →
figure.
"""
