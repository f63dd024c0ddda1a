"""Table 1: what a one-step gradient delay costs, optimizer by optimizer.

The paper's claim: AdamW degrades badly (2.612 → 2.890 at 360M parameters), Muon hardly (2.578 → 2.590). Ours: final validation loss of sync and
delayed training from paired seeds, at learning rates tuned for sync and kept, and retuned per mode.
"""

from onelag.experiments.study import Experiment

TABLE_1 = Experiment(name="table-1", title="optimizer × synchronous / delayed by one step", modes=("sync", "delayed"))
