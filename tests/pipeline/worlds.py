"""Runs a function in n fresh processes on one gloo group; every process is ended, also after a failure."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any, NamedTuple

# Forked from one process that has everything imported: a process starts in a tenth of a second instead of in eight.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch._dynamo", "onelag.optim.registry", "onelag.pipeline.checkpoint", "tests.pipeline.toys"])


@contextlib.contextmanager
def _same_path():
    """The server takes its import path from the environment."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Ended(NamedTuple):
    """How a process ended: its result, or the text of its exception; and its exit code (negative: the signal)."""

    result: Any
    error: str | None
    exitcode: int | None


class WorldError(AssertionError):
    """A process failed that should not have."""


def run(function, world: int, *arguments, limit: float = 240.0) -> list[Any]:
    """function(rank, world, *arguments) in `world` processes; their results by rank. Raises WorldError with every rank's error."""
    ended = run_to_the_end(function, world, *arguments, limit=limit)
    if any(one.error or one.exitcode for one in ended):
        raise WorldError("\n".join(f"--- rank {rank}, exit code {one.exitcode}\n{one.error}" for rank, one in enumerate(ended)))
    return [one.result for one in ended]


def run_to_the_end(function, world: int, *arguments, limit: float = 240.0, during=None) -> list[Ended]:
    """The same, but tells how each process ended. `during(processes)` runs in the parent once all have started."""
    from torch.distributed import TCPStore

    with _same_path():
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [_context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        _context.Process(target=_work, args=(pipes[rank][1], function, rank, world, store.port, arguments), daemon=True) for rank in range(world)
    ]
    told: list[tuple[Any, str | None]] = [(None, "ended without a word")] * world
    try:
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        if during is not None:
            during(processes)
        deadline = time.monotonic() + limit
        open_pipes = {receiving: rank for rank, (receiving, _) in enumerate(pipes)}
        while open_pipes and time.monotonic() < deadline:
            for receiving in wait(list(open_pipes), timeout=deadline - time.monotonic()):
                rank = open_pipes.pop(receiving)
                with contextlib.suppress(EOFError, OSError):  # killed: it told nothing
                    told[rank] = pickle.loads(receiving.recv_bytes())
        for rank in open_pipes.values():
            told[rank] = (None, f"no end within {limit} s")
        for process in processes:
            process.join(max(0.1, min(10.0, deadline - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [Ended(result, error, process.exitcode) for (result, error), process in zip(told, processes)]


def _work(pipe, function, rank: int, world: int, port: int, arguments: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)
    try:
        result = function(rank, world, *arguments)
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
        pipe.close()
        os._exit(1)  # as an uncaught exception under torchrun: the peers see the connection close
    pipe.send_bytes(pickle.dumps((result, None)))
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()
