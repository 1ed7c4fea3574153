"""Scripts in two processes of their own, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port"


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with socket.socket() as one:  # torchrun's `--standalone` would need the host's name to resolve
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    return os.environ | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def both_ranks(*arguments: str) -> None:
    """A script in two processes, as torchrun would start them, but without its own process."""
    env = environment()
    ranks = [env | {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2"} for r in "10"]
    _finish([_start(arguments, one) for one in ranks])


def torchrun(*arguments: str) -> str:
    """The same by torchrun: what it printed."""
    env = environment()
    (shown,) = _finish([_start([*TORCHRUN.split(), env["MASTER_PORT"], *arguments], env)])
    return shown


def _start(arguments, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def _finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; one that fails leaves the others waiting in a collective."""
    printed = []
    try:
        for process in processes:
            printed.append(process.communicate()[0])
            assert process.returncode == 0, printed[-1][-6000:]
    finally:
        for process in processes:
            process.kill()
    return printed
