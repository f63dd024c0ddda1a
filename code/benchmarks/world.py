"""n processes on one gloo group of this machine, one thread each, for a benchmark; all are ended, whatever happens."""

import multiprocessing
import os
import queue
import time
import traceback
from typing import Any


def in_processes(function, world: int, *arguments, limit: float = 600.0) -> list[Any]:
    """function(rank, world, *arguments) in `world` fresh processes; their results by rank.

    Raises:
        RuntimeError: a process failed or took longer than `limit` seconds; with its traceback.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    processes = [context.Process(target=_work, args=(told, function, r, world, store.port, arguments), daemon=True) for r in range(world)]
    results: dict[int, Any] = {}
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit
        while len(results) < world:
            try:
                rank, result, error = told.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{function.__name__} did not end within {limit:.0f} s") from None
                gone = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in results]
                if gone and told.empty():
                    raise RuntimeError(f"{function.__name__}: rank {gone[0]} ended with exit code {processes[gone[0]].exitcode}") from None
                continue
            if error:
                raise RuntimeError(f"{function.__name__}, rank {rank}:\n{error}")
            results[rank] = result
        for process in processes:
            process.join(10.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(world)]


def _work(told, function, rank: int, world: int, port: int, arguments: tuple) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)
    try:
        told.put((rank, function(rank, world, *arguments), None))
        dist.barrier()
    except BaseException:
        told.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
