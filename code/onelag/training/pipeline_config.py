"""How the processes of a torchrun share the work; apart from TrainConfig, because it changes no number of a run (but for the schedule)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PipelineConfig:
    """How the processes of a torchrun share the work. stages × replicas = number of processes."""

    schedule: Literal["2bw", "pipedream", "1f1b", "gpipe"] = "2bw"
    """2bw: no bubble, every gradient one step old; pipedream: stage-dependent delay; 1f1b and gpipe: synchronous, with a flush"""
    replicas: int = 1
    """data-parallel copies of every stage"""
    microbatches: int = 8
    """that a batch is cut into, per replica"""
    depth: str = "paper"
    """micro-batches in flight: paper, eager, or a number of extra ones"""
    recompute: bool = False
    """keep only the stages' inputs between forward and backward"""
    checkpoint_every: int = 200
    """steps between checkpoints; one more is written at SIGTERM or Ctrl-C"""
    timeout: float = 600.0
    """seconds that one rank waits for another before all end with an error"""
    trace: Path | None = None
    """write a Chrome/Perfetto trace of the run's newest steps here: every F, B, U, send, receive and reduction of every stage"""
