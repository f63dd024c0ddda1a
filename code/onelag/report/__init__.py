"""Result files → statistics → verdicts, tables, figures, CLAIMS.md and the paper's macros. Nothing here trains.

What the paper reports lives apart, in results/reported/paper.json, and is never mixed with what we measured.
"""
