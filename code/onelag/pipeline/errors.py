"""The one exception of a running pipeline: it says which stage failed where."""


class PipelineError(RuntimeError):
    """A stage could not go on: the message names the stage, the micro-batch, and the setting to change where there is one.

    Every rank of the pipeline ends with one of these, at the latest when the configured `timeout` is over; the pipeline cannot be used afterwards.
    """
