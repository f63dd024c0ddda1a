"""Memory, time and cost of a configuration without a GPU: does it fit, how long does a step take under each schedule, and when is it done.

memory.py and time.py are the models (pure arithmetic on shapes), hardware.py the GPUs, plan.py puts them together, command.py is `onelag plan`.
"""
