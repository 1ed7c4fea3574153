"""Processes that run functions of the tests together, over gloo: started once for a session."""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 800  # for what hangs: starting and a call are within a test's own limit
GRACE_S = 10  # what the other process gets to fail too, once one has: it may wait in a collective


def _serve(rank: int, world: int, rendezvous: str, pipe: Connection) -> None:
    """Run what comes down the pipe, and send back its result or its traceback."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    pipe.send_bytes(pickle.dumps((True, "started")))
    while True:
        request = pipe.recv_bytes()
        try:
            fn, args, kwargs = pickle.loads(request)
            torch.manual_seed(0)
            answer = pickle.dumps((True, fn(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


class Processes:
    """The ranks of one group, which wait for functions to run.

    They are started at the first `run`, and again at the first one after a failure: then they
    may not be at the same collective any more.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list:
        """What `fn`, a function of some test module, returns in each rank, all at the same time.

        Raises: AssertionError with the traceback of every rank that failed, died or took longer
            than `LIMIT_S` seconds.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((fn, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(request)
        return self._collect(fn.__name__)

    def close(self) -> None:
        if self._processes:
            self._kill()  # they are idle; leaving a gloo group in order takes seconds

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._directory.name) / "rendezvous")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect("starting")

    def _collect(self, what: str) -> list:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + LIMIT_S
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), f"no answer in time ({LIMIT_S} s)")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    fine, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(10)
                    fine, value = False, f"died, exit code {self._processes[rank].exitcode}"
                (results if fine else failures)[rank] = value
                if not fine:
                    end = min(end, time.monotonic() + GRACE_S)
        if failures:
            self._kill()
            shown = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise AssertionError(f"{what} failed in another process\n{shown}")
        return [results[rank] for rank in range(self.world)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._directory.cleanup()


def in_two_processes(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose body runs in both ranks of `two_processes`, at the same time."""

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
