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


def torchrun(*arguments: str) -> str:
    """A script by torchrun: what it printed."""
    env = environment()
    command = [sys.executable, *TORCHRUN.split(), env["MASTER_PORT"], *arguments]
    done = subprocess.run(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
