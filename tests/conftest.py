"""What every test shares: threads, random seed, Hypothesis profile, little garbage."""

import gc
import importlib.util
import itertools
import os
import sys
import warnings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the core to others
# ATen's products and attention: the results of a test do not depend on the processor.
os.environ.setdefault("FUSED_REMAT_CPU_PRODUCTS", "aten")
os.environ.setdefault("FUSED_REMAT_CPU_ATTENTION", "aten")
# A block that raises is a failed test, and not a layer that runs its own forward.
os.environ.setdefault("FUSED_REMAT_STRICT", "1")
# Before CUDA starts: cuBLAS is deterministic only with workspaces of a fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import executed
import hypothesis
import pytest
import torch
from places import EXECUTED, INTERPRETED, ON_GPU, PLACE, ROUTES
from tiers import MORE

from fused_remat.execution import choose

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2").split(",")[0]))

# Another seed moves what the tests of this process draw: torch's seeds, and Hypothesis's examples.
SEED = int(os.environ.get("FUSED_REMAT_TEST_SEED", 0))
if SEED:
    seed_torch = torch.manual_seed
    torch.manual_seed = lambda seed: seed_torch(seed + SEED)
    hypothesis.core.global_force_seed = SEED  # as --hypothesis-seed does

has_triton = importlib.util.find_spec("triton") is not None
# Kernels are interpreted or compiled, as Triton decides when it is imported: a run of their own.
collect_ignore = [] if INTERPRETED and has_triton else ["interpreted"]
if not EXECUTED:
    collect_ignore += ["kernels/test_configurations.py"]
if not has_triton:
    collect_ignore += ["kernels", "backend", "gpu", "exact_launches.py", "ptx"]

hypothesis.settings.register_profile(
    "ci", derandomize=not SEED, database=None, deadline=None, max_examples=50 * MORE
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    if EXECUTED and has_triton:
        config.add_cleanup(executed.install().close)
    if INTERPRETED and has_triton:
        from quick_interpreter import quicken

        quicken()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests are made, and live on: looking for garbage among them takes minutes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_files = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _fresh_file():
    """Start a file with a seed and no compiled code; hide older objects from gc.

    Garbage is collected every eighth time, since that takes up to a second.
    """
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if next(_files) % 8 == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_test():
    """Start a test with a seed; hide objects of the file's earlier tests from gc until it ends.

    Where kernels run, nothing else of a test stays: choices by tables that it has replaced, memory.
    """
    torch.manual_seed(0)
    gc.freeze()
    if PLACE != "aten":
        choose.forget()
    yield
    if PLACE != "aten":
        choose.forget()
    if ON_GPU:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if executed.driver is not None and report.when == "call":
        executed.write(report.passed)
    return report


@pytest.fixture
def floats_are_tensors(monkeypatch):
    """Pass float32 scalars to kernels, as compiled ones get; the interpreter passes floats."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(arg):
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)


@pytest.fixture(params=ROUTES)
def routes(request, monkeypatch):
    """Set the tables of routes."""
    if request.param not in ("as on Hopper", "kernels alone"):
        return
    from fused_remat.triton import tables

    hopper = request.param == "as on Hopper"
    families = frozenset(() if hopper else tables.TILES["mlp_bwd"])
    monkeypatch.setattr(tables, "MLP_IN_KERNELS", families)
    if hopper:
        widest = {"interpreter": tables.MLP_UP_IN_KERNEL["hopper"]}
        monkeypatch.setattr(tables, "MLP_UP_IN_KERNEL", widest)
    monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset({"interpreter"} if hopper else ()))


@pytest.fixture
def poisoned():
    """Fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread():
    """Each thread has temporaries of its own; and on small sizes a second one only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def served():
    """Every call takes the fused path: a fallback, which warns, would pass most tests."""
    from fused_remat import FusedRematWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        warnings.filterwarnings("ignore", "Support for mismatched")  # of the stock layer
        yield


@pytest.fixture
def pieces():
    """Cut groups of one sequence, tiles of four tokens, attention in blocks of 16 query rows."""
    from block_inputs import in_pieces

    with in_pieces():
        yield


@pytest.fixture
def blocks_run(monkeypatch):
    """Return the graphs of blocks that ran and keep something for backward, by kind."""
    found = []
    observe = lambda invocation: found.append(invocation.call.graph.kind)  # noqa: E731
    monkeypatch.setattr("fused_remat.autograd.function.OBSERVERS", [observe])
    return found


@pytest.fixture
def one_machine():
    """Analytic costs are those of one machine, so that what a plan chooses is the same on all."""
    from fused_remat.planner import Calibration

    rates = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16, torch.float64), 5e10)
    made = Calibration(torch.device("cpu"), 1e10, 2e-6, rates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_remat.planner.build.calibrate", lambda *_: made)
        yield


@pytest.fixture(scope="session")
def two_processes():
    """Two other processes in one group, started when first used (`distributed.Processes`)."""
    yield from _processes(2)


@pytest.fixture(scope="module")
def four_processes():
    """Four of them; gone after the file, for the memory that they take."""
    yield from _processes(4)


def _processes(world: int):
    from processes import Processes

    these = Processes(world)
    yield these
    these.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLACE == "aten":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1"))
