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
from fused_remat.report.units import device_memory, human
from fused_remat.scale.models import build
from fused_remat.scale.shapes import MODELS, Model

#: Parameters that a user's function may have.
_PARAMETERS = ("batch", "seq", "device", "dtype")
#: Where files lie that the user did not write.
_NOT_THE_USERS = (
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
  On a CPU a whole model takes minutes; --layers 2 --seq 256 makes it small.

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
    """A model with the inputs of a training step.

    Attributes:
        title: one line that describes it.
        loss: function of the model's output; None for the sum.
    """

    title: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET and its options."""
    parser.add_argument("target", metavar="TARGET", help="a model; see below")
    group = parser.add_argument_group("options of the model")
    add_sizes(group)
    add = group.add_argument
    add("--layers", type=int, help="layers of a built-in model (default: all of them)")
    add("--dropout", type=float, help="dropout of a built-in model (default: 0)")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    add_dtype(group, "--dtype", "the parameters", None, "bf16 on cuda, fp32 on cpu")


def load(args: argparse.Namespace, stock: bool = False) -> Target:
    """The target that the arguments describe; `stock`: a built-in model has plain PyTorch layers.

    Raises: CommandError for a wrong option or function.
    """
    check_sizes(args, "batch", "seq", "layers")
    if args.target in MODELS:
        return _built_in(args, stock)
    if ":" not in args.target:
        raise CommandError(
            f"TARGET is {', '.join(MODELS)}, or module:function; got {args.target!r}"
        )
    return _users(args)


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
        theirs = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
        where = (
            f" ({os.path.relpath(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""
        )
        message = f"{what}: {type(error).__name__}: {error}{where}"
        raise CommandError(message) from error


def _device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The requested device and dtype, or the defaults.

    Raises: CommandError for a device of another kind, or one that this machine does not have.
    """
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
    batch, seq, whole = args.batch or 1, args.seq or shape.seq_len, shape.layers
    shape = dataclasses.replace(shape, layers=args.layers or whole)
    _check_room(shape, seq, dtype, device)
    torch.manual_seed(0)
    model, inputs = build(shape, batch, seq, dropout, stock, device, dtype)
    layers = f"{shape.layers} of {whole}" if shape.layers != whole else f"{whole}"
    shown = f"{str(dtype).removeprefix('torch.')} on {device}, {_parameters(model)}"
    title = f"{args.target}: {layers} layers, batch {batch}, sequence {seq}, {shown}"
    return Target(title, model, inputs, {}, None)


def _check_room(shape: Model, seq: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises: CommandError if parameters and gradients do not fit; called before allocation."""

    def count(layers: int) -> int:
        small = dataclasses.replace(shape, layers=layers)
        model, _ = build(small, 1, seq, 0.0, False, "meta", dtype)
        return sum(p.numel() for p in model.parameters())

    total = count(1) + (count(2) - count(1)) * (shape.layers - 1)
    needs, has = 2 * total * dtype.itemsize, device_memory(device)
    if needs > has:
        raise CommandError(
            f"{shape.name} with {shape.layers} layers has {total / 1e6:,.1f} M parameters, which "
            f"take {human(needs)} with their gradients; {device} has {human(has)}. Use fewer "
            "layers with --layers"
        )


def _parameters(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters"


def _users(args: argparse.Namespace) -> Target:
    for name in ("layers", "dropout"):
        if getattr(args, name) is not None:
            raise CommandError(f"--{name} is for built-in models, not for {args.target!r}")
    function = _find(args.target)
    given_to_it = _arguments(function, args)
    with user_errors(f"calling {args.target!r} failed"):
        value = function(**given_to_it)
    model, inputs, loss = _returned(args.target, value)
    title = f"{args.target}: {type(model).__name__}, {_parameters(model)}"
    if isinstance(inputs, Mapping):
        return Target(title, model, (), dict(inputs), loss)
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return Target(title, model, given, {}, loss)


def _find(target: str) -> Callable[..., Any]:
    """The function; its module may be in the current folder."""
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with user_errors(f"importing {module_name!r} failed"):
        module = pkgutil.resolve_name(f"{module_name}:")
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise CommandError(
            f"module {module_name!r} has no function {name!r}; "
            f"its functions: {', '.join(known) or 'none'}"
        )
    found: Callable[..., Any] = function
    return found


def _arguments(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """The arguments for a user's function: those that are given, or that have no default."""
    with user_errors(f"cannot read the parameters of {args.target!r}"):
        signature = inspect.signature(function)
    parameters = {
        name: p
        for name, p in signature.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    required = [name for name, p in parameters.items() if p.default is p.empty]
    device, dtype = _device_and_dtype(args)
    values = {"batch": args.batch or 1, "seq": args.seq, "device": device, "dtype": dtype}
    found = {}
    for name in _PARAMETERS:
        given = getattr(args, name) is not None
        if given and name not in parameters:
            raise CommandError(
                f"{args.target!r} has no parameter {name!r}, so --{name} has no effect"
            )
        if name in required or given:
            found[name] = values[name]
    if "seq" in found and found["seq"] is None:
        raise CommandError(f"parameter 'seq' of {args.target!r} has no default; give --seq")
    unknown = [name for name in required if name not in _PARAMETERS]
    if unknown:
        raise CommandError(
            f"{args.target!r} requires {', '.join(map(repr, unknown))}; only batch, seq, device "
            "and dtype can be given"
        )
    return found


def _returned(target: str, value: Any) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    wanted = f"{target!r} must return (model, inputs) or (model, inputs, loss)"
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise CommandError(f"{wanted}, got {_shown(value)}")
    model, inputs, loss = (*value, None)[:3]
    if not isinstance(model, nn.Module):
        raise CommandError(f"{wanted} with a torch.nn.Module as model, got {_shown(model)}")
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise CommandError(
            f"{wanted} with a tensor, tuple, list or dict as inputs, got {_shown(inputs)}"
        )
    if isinstance(inputs, Mapping) and not all(isinstance(name, str) for name in inputs):
        names = ", ".join(map(repr, inputs))
        raise CommandError(f"{wanted}; the keys of a dict of inputs must be names, got {names}")
    if loss is not None and not callable(loss):
        raise CommandError(f"{wanted} with a function as loss, got {_shown(loss)}")
    return model, inputs, loss


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of type {module}{kind.__qualname__}: {str(value)[:80]}"
