"""The schedules: how one process per stage trains on a stream of batches.

    pipe = Schedule2BW(stage_module, loss_fn, optimizer, num_microbatches=8)     # in every process, stage = rank
    for inputs, targets in loader:
        loss = pipe.step(inputs, targets)
    pipe.flush()

Every update is made where it costs nothing: its sums start at the last backward of its batch and are waited for where W(t+1) is first needed,
m − p + s + 1 micro-batch slots later (updates.py). engine.py runs the actions, order.py says which.

Tried with gloo on CPUs, up to 4 processes. On GPUs the same calls go through NCCL (or through gloo and host memory); that was not tried yet.
"""

from onelag.pipeline.engine import PipelineSchedule


class Schedule2BW(PipelineSchedule):
    """PipeDream-2BW: every gradient one version late, two weight versions per stage, no bubble.

        pipe = Schedule2BW(stage_module, loss_fn, optimizer, num_microbatches=8)
        loss = pipe.step(inputs, targets)
        pipe.flush(); pipe.state_dict()

    Batch t runs on W(max(t − 1, 0)) on every stage, and its mean gradient makes W(t + 1) from W(t) (arXiv 2006.09503; order.py). With
    `ErrorFeedback(optimizer, form="lookahead")` the slots hold x and the master holds y.

    Args:
        stage_module: this process's stage, on the device where it is to run, not wrapped in DDP or FSDP. It is called with the tensor, tuple or dict that
            the stage before returned. Its own parameters become the master and belong to the pipeline between `step` and `flush`.
        loss_fn: (output, targets) → scalar, the mean over a micro-batch; used on the last stage.
        optimizer: any torch optimizer on `stage_module`'s own parameters, or a correction of `onelag.delay` around one. None on a
            stage that has no trainable parameter.
        num_microbatches: m ≥ micro-batches in flight on the first stage − 1; with depth "paper", m ≥ num_stages − 1.
        depth: micro-batches in flight, see order.py; "eager" hides a slow link for more activations.
        group: a process group of all processes, whose order says who is which stage; None is the default one. One process needs none.
        num_stages: p, to be checked against the number of processes; None takes it from there.
        num_replicas: data-parallel copies of every stage; rank = stage · num_replicas + replica. Optimizer state and master are split over them by
            whole parameters (ZeRO-1).
        clip_norm: clips the global gradient norm over all stages, exactly, without a stall; None does not clip.
        compute_dtype: of the weight slots, e.g. torch.bfloat16 with an fp32 master; None is the parameters' own.
        loss_weight: targets → how much a micro-batch counts, e.g. its number of labels that are not ignored; None counts all alike.
        recompute: keep only the inputs of a stage between forward and backward.
        dropout_seed: the same dropout masks for any number of stages (see randomness.py); None leaves the generators alone.
        update: "slack" makes W(t+1) where it is first needed, "inline" at once, with every stage waiting for the slowest.
        tied: names of parameters that also live on other stages and stay equal; None asks `stage_module.tied_names`, if there is one.
        timeout: seconds to wait for another rank before this one fails.
        config: the user's own settings, nested; compared over the ranks at the start.
        recorder: a `trace.Recorder`.

    Raises:
        ValueError: num_microbatches too small for num_stages and depth, or processes ≠ num_stages · num_replicas, before any communication; or ranks with
            different settings, naming the first one that differs.
        TypeError: a module or an optimizer that cannot work here.
        PipelineError: a connection that does not come up within `timeout`.
    """

    schedule = "2bw"


class SchedulePipeDream(PipelineSchedule):
    """PipeDream with weight stashing: stage s is p − 1 − s updates late and keeps p − s versions. Arguments as `Schedule2BW`.

    With `clip_norm` every update waits for all stages, which is a flush: its last stage needs W(t+1) at once. Without it nobody waits, and a gradient
    that is not finite is reported, but not skipped.
    """

    schedule = "pipedream"


class Schedule1F1B(PipelineSchedule):
    """One forward, one backward, a flush after every batch: no delay. The synchronous control on the same engine. Arguments as `Schedule2BW`."""

    schedule = "1f1b"


class ScheduleGPipe(PipelineSchedule):
    """All forwards, all backwards, a flush: no delay, m micro-batches in flight. Arguments as `Schedule2BW`."""

    schedule = "gpipe"
