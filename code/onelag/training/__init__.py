"""One training run: its configuration, its loop, its validation, its checkpoint.

The same loop drives the simulation (one process, SimulatedDelay) and, through pipeline/, the real thing.
"""
