"""Programs on real processes over gloo."""

import os
import sys
import time
from multiprocessing import forkserver
from unittest.mock import patch

import processes_worker
import torch.multiprocessing as multiprocessing
from processes import search_path

# for the slowest of machines, with other work to do; a process that waits for ever is killed
SECONDS = 400


def run(world, folder, *jobs, compares=False):
    """Every rank runs the jobs, each a function and its arguments, one after the other: processes
    take longer to start than most jobs to run. If it ``compares``, gloo fails where ranks run other
    collectives.
    """
    spawn(processes_worker.start, world, world, str(folder / "rendezvous"), compares, *jobs)


def spawn(function, world, *args):
    multiprocessing.set_forkserver_preload(["preloaded"])
    # Before Python 3.13 the server leaves out what it does not find by the environment alone.
    with patch.dict(os.environ, PYTHONPATH=search_path(*filter(None, sys.path))):
        forkserver.ensure_running()
    context = multiprocessing.start_processes(
        function, args=args, nprocs=world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(
            timeout=max(deadline - time.monotonic(), 0)
        ):  # raises what a process raises
            assert time.monotonic() < deadline, f"still running after {SECONDS} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
