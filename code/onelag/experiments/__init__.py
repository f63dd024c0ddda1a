"""One file per table or figure of the study: what it claims, which runs it needs, at which tier, and how its report is drawn.

`onelag reproduce` runs them (registry.py); results are cached by run id, so whatever was computed once is reused.
"""
