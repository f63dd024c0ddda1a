"""All experiments by name."""

from onelag.experiments.table_1 import TABLE_1
from onelag.experiments.table_2 import TABLE_2

EXPERIMENTS = {experiment.name: experiment for experiment in (TABLE_1, TABLE_2)}
