"""Table 2: how much of the cost of the delay the error-feedback correction gives back.

The paper's claim: nearly all at 10B (1.911 → 1.906), 58 % of Muon's gap and most of AdamW's at 360M. Ours: as table 1, with delayed+EF beside it.
"""

from onelag.experiments.study import Experiment

TABLE_2 = Experiment(
    name="table-2", title="optimizer × synchronous / delayed / delayed with error feedback", modes=("sync", "delayed", "delayed+EF")
)
