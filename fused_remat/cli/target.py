"""TARGET of `report` and `plan`, a built-in model or a user's function, with its options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.cli.options import DTYPES, CommandError, add_dtype, add_sizes, check_sizes
from fused_remat.report.step import batch_arguments
from fused_remat.report.units import device_memory, human
from fused_remat.scale.models import build
from fused_remat.scale.shapes import MODELS

#: Folders of files that the user did not write.
_OTHERS = (
    "<frozen ",
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)

HELP = f"""\
TARGET is a built-in model: {", ".join(MODELS)}
  Built of this package's layers with random weights, from embedding to loss; nothing is downloaded.
  gpt2 is causal with learned positions; bert-base has post-norm layers and predicts a token at
  every position; vit-l takes patches and predicts a class from the mean of its tokens.
  Language models compute their loss with ops.linear_cross_entropy, without storing all logits.
  On a CPU an entire model takes minutes; --layers 2 --seq 256 makes it small.

or module:function, with a module that can be imported from the current folder.
  The function may have the parameters batch, seq (int), device (torch.device) and dtype
  (torch.dtype), and gets those that it has. A parameter without an option on the command line
  keeps its default. It returns (model, inputs) or (model, inputs, loss):
    model    a torch.nn.Module in training mode, on its device
    inputs   a tensor, a tuple or list of arguments, or a dict of keyword arguments of the model
    loss     a function of the model's output that backward starts from (for a model of
             transformers with labels: lambda output: output.loss); by default the sum of the
             output's floating-point tensors
  For example, in mine.py, as mine:training_step:

    def training_step(batch, seq=128, device="cpu"):
        layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device)
        return model, torch.randn(batch, seq, 256, device=device)

python -X dev -m fused_remat ... shows the traceback of an error.
"""


@dataclass(frozen=True)
class Target:
    """A model with the inputs of a training step, and the loss; None for the sum of the output."""

    title: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add TARGET and its options."""
    parser.add_argument("target", metavar="TARGET", help="a model; see below")
    group = parser.add_argument_group("options of the model")
    add_sizes(group)
    add = group.add_argument
    add("--layers", type=int, help="layers of a built-in model (default: all of them)")
    add("--dropout", type=float, help="dropout of a built-in model (default: 0)")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    add_dtype(group, "--dtype", "the parameters", None, "bf16 on cuda, fp32 on cpu")


def load(args: argparse.Namespace, stock: bool = False) -> Target:
    """Return the target that the arguments describe; `stock`: built-in models have plain layers.

    Raises: CommandError for a wrong option or function.
    """
    check_sizes(args, "batch", "seq", "layers")
    if args.target in MODELS:
        return _built_in(args, stock)
    if ":" in args.target:
        return _own(args)
    raise CommandError(f"TARGET is {', '.join(MODELS)}, or module:function; got {args.target!r}")


@contextlib.contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn an error of the user's code into a CommandError with the user's own line of code.

    Out-of-memory errors pass through.
    """
    try:
        yield
    except (CommandError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_OTHERS)]
        at = f" ({os.path.relpath(own[-1].filename)}, line {own[-1].lineno})" if own else ""
        raise CommandError(f"{what}: {type(error).__name__}: {error}{at}") from error


def _device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return the requested device and dtype, or the defaults."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = args.device or ("cuda" if count else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise CommandError(f"--device is cpu, cuda, or cuda:1 and so on; got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise CommandError(f"--device {name!r}: this machine has {count} CUDA devices")
    return device, DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def _built_in(args: argparse.Namespace, stock: bool) -> Target:
    shape, dropout = MODELS[args.target], args.dropout or 0.0
    device, dtype = _device_and_dtype(args)
    if not 0.0 <= dropout < 1.0:
        raise CommandError(f"--dropout must be in [0, 1), got {dropout}")
    batch, seq, most = args.batch or 1, args.seq or shape.seq_len, shape.layers
    shape = dataclasses.replace(shape, layers=args.layers or most)
    small, _ = build(dataclasses.replace(shape, layers=1), 1, seq, device="meta")
    of_layer = sum(p.numel() for p in small.get_submodule("layers").parameters())
    total = sum(p.numel() for p in small.parameters()) + (shape.layers - 1) * of_layer
    needed, memory = 2 * total * dtype.itemsize, device_memory(device)
    if needed > memory:
        raise CommandError(
            f"{shape.name} with {shape.layers} layers has {total / 1e6:,.1f} M parameters, which "
            f"take {human(needed)} with their gradients; {device} has {human(memory)}. Use fewer "
            "layers with --layers"
        )
    torch.manual_seed(0)
    model, inputs = build(shape, batch, seq, dropout, stock, device, dtype)
    layers = f"{shape.layers} of {most}" if shape.layers != most else f"{most}"
    shown = f"{str(dtype).removeprefix('torch.')} on {device}, {_parameters(model)}"
    title = f"{args.target}: {layers} layers, batch {batch}, sequence {seq}, {shown}"
    return Target(title, model, inputs, {}, None)


def _parameters(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters"


def _own(args: argparse.Namespace) -> Target:
    """Return what the user's function returns."""
    for name in ("layers", "dropout"):
        if getattr(args, name) is not None:
            raise CommandError(f"--{name} is for built-in models, not for {args.target!r}")
    function = _find(args.target)
    arguments = _arguments(function, args)
    with user_errors(f"calling {args.target!r} failed"):
        value = function(**arguments)
    model, inputs, loss = _checked(args.target, value)
    title = f"{args.target}: {type(model).__name__}, {_parameters(model)}"
    return Target(title, model, *batch_arguments(inputs), loss)


def _find(target: str) -> Callable[..., Any]:
    """Return the function; its module may be in the current folder."""
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with user_errors(f"importing {module_name!r} failed"):
        module = pkgutil.resolve_name(f"{module_name}:")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise CommandError(
            f"module {module_name!r} has no function {name!r}; "
            f"its functions: {', '.join(known) or 'none'}"
        )
    return function


def _arguments(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for a user's function: those requested, or without a default."""
    with user_errors(f"cannot read the parameters of {args.target!r}"):
        parameters = inspect.signature(function).parameters
    device, dtype = _device_and_dtype(args)
    values = {"batch": args.batch or 1, "seq": args.seq, "device": device, "dtype": dtype}
    requested = {name for name in values if getattr(args, name) is not None}
    for name in requested - parameters.keys():
        raise CommandError(f"{args.target!r} has no parameter {name!r}, so --{name} has no effect")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty or parameter.kind in variadic:
            continue
        if values.get(name) is None:
            how = "give --seq" if name == "seq" else f"only {', '.join(values)} can be given"
            raise CommandError(f"{args.target!r} requires {name!r}; {how}")
        requested.add(name)
    return {name: values[name] for name in requested}


def _checked(target: str, value: Any) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    """Return (model, inputs, loss) if that is what a user's function returned."""
    parts = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    model, inputs, loss = (*parts, None, None)[:3]
    named = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not isinstance(model, nn.Module) or not (isinstance(inputs, Tensor | tuple | list) or named):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CommandError(
            f"{target!r} must return (model, inputs) or (model, inputs, loss): a torch.nn.Module, "
            "then a tensor, tuple, list or dict by names of arguments, then a function; got "
            f"({kinds})"
        )
    if loss is not None and not callable(loss):
        raise CommandError(f"the loss that {target!r} returns must be a function, got {loss!r}")
    return model, inputs, loss
