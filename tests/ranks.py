"""Several processes on this machine, in one gloo group."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 240
"""Seconds after which ranks that still run are taken to wait for each other."""


def on_ranks(tmp_path, scenario, *args, size=2, fails=False):
    """What ``scenario(rank, *args)`` returns on each of so many ranks.

    Args:
        tmp_path: a folder where the ranks find each other.
        scenario: a function of a module, run in processes of its own, inside a group.
        args: for it; they and what it returns are pickled.
        size: how many ranks.
        fails: of a rank that raises, have the text of what it raised; else it is raised here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "peft", "transformers", "accelerate", "daf_hf"])
    meeting = tmp_path / f"{scenario.__name__}-{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, rank, size, meeting, scenario, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_result(pipe, fails) for pipe in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def _result(pipe, fails):
    assert pipe.poll(TIMEOUT), "the ranks wait for each other"
    try:
        failure, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "ended without a word"
    if failure is not None and not fails:
        raise RuntimeError(failure)
    return value if failure is None else failure


def _rank(pipe, rank, size, meeting, scenario, args):
    # As torchrun has it, for those that ask.
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # nobody has to meet there
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(meeting)), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    try:
        # Plain pickles: tensors do not stay in a process that ends.
        pipe.send_bytes(pickle.dumps((None, scenario(rank, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        os._exit(1)  # as a process does that nobody waits for
    dist.barrier()  # nobody leaves while another one talks to him
    dist.destroy_process_group()
