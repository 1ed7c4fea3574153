"""Processes that run functions of the tests together, over gloo: started once for a session."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port"
LIMIT_S = 800  # for what hangs: starting and a call are within a test's own limit
GRACE_S = 10  # what the other process gets to fail too, once one has: it may wait in a collective


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(rank: int, world: int, rendezvous: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )  # fmt: skip


def _run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """Return the result as bytes: as itself, a tensor would be shared with this process."""
    torch.manual_seed(0)
    try:
        return pickle.dumps(fn(*args, **kwargs))
    except BaseException:  # those of pytest cannot be pickled
        raise AssertionError(traceback.format_exc()) from None


class Processes:
    """The ranks of one group, which wait for functions to run.

    They are started at the first `run`, and again at the first one after a failure: then they
    may not be at the same collective any more.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[ProcessPoolExecutor] = []  # of one process each
        self._pids: list[int] = []

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list:
        """Return what `fn`, a function of some test module, returns in each rank, run together.

        Raises: AssertionError with the traceback of every rank that failed, died or took longer
            than `LIMIT_S` seconds.
        """
        if not self._ranks:
            self._start()
        results = self._collect([rank.submit(_run, fn, *args, **kwargs) for rank in self._ranks])
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """Kill the ranks, if there are any: leaving a gloo group in order takes seconds."""
        if not self._ranks:
            return
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.shutdown()
        self._ranks, self._pids = [], []
        self._folder.cleanup()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        for rank in range(self.world):
            given = (rank, self.world, rendezvous)
            self._ranks.append(ProcessPoolExecutor(1, spawn, _join, given))
        self._pids = self._collect([rank.submit(os.getpid) for rank in self._ranks])

    def _collect(self, answers: list[Future]) -> list:
        done, waiting = wait(answers, LIMIT_S, FIRST_EXCEPTION)
        if waiting and done:
            wait(waiting, GRACE_S)
        if all(answer.done() and answer.exception() is None for answer in answers):
            return [answer.result() for answer in answers]
        self.close()
        shown = [f"rank {rank}: {_failure(answer)}" for rank, answer in enumerate(answers)]
        raise AssertionError("failed in other processes\n" + "\n".join(shown))


def _failure(answer: Future) -> str:
    if not answer.done():
        return f"no answer in time ({LIMIT_S} s)"
    return str(answer.exception() or "done")


def in_two_processes(test: Callable[..., None]) -> Callable[..., None]:
    """Return a test whose body runs in both ranks of `two_processes`, at the same time."""

    @functools.wraps(test)
    def run(two_processes: Processes, **parameters: Any) -> None:
        two_processes.run(_body, test.__module__, test.__name__, parameters)

    arguments = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("two_processes", *inspect.signature(test).parameters)
    ]
    run.__signature__ = inspect.Signature(arguments)  # what pytest gives it
    return run


def _body(module: str, test: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(**parameters)


# --- commands in processes of their own


def printed(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Return what Python prints; with the errors if it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def environment() -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    with socket.socket() as one:  # torchrun's `--standalone` would need the host's name to resolve
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    return {
        "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def torchrun(*arguments: str) -> str:
    """Return what a script prints in two processes."""
    env = environment()
    return printed(*TORCHRUN.split(), env["MASTER_PORT"], *arguments, **env)
