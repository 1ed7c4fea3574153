"""TARGET, of `report` and `plan`: a built-in shape or a user's function, and its options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.cli.outputs import CommandError
from fused_remat.planner.options import device_memory
from fused_remat.report.report import human
from fused_remat.scale.models import build
from fused_remat.scale.shapes import MODELS, Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What a user's function may be given.
_NAMED = ("batch", "seq", "device", "dtype")
#: Where files lie that a user did not write.
_NOT_THE_USERS = (
    "<frozen ",
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)

HELP = f"""\
TARGET is the name of a shape: {", ".join(MODELS)}
  Built of this package's layers with random weights, from embedding to loss; nothing is downloaded.
  gpt2 is causal with learned positions; bert-base has post-norm layers, and a head that predicts a
  word for every token; vit-l takes patches, and predicts a class from the mean of its tokens.
  Language models compute their loss without whole logits (ops.linear_cross_entropy).
  On a CPU a whole model takes minutes: give --layers 2 --seq 256.

or module:function, of a module that can be imported from the current folder.
  The function is called by those of batch, seq (int), device (torch.device) and dtype (torch.dtype)
  that its parameters name; what no option gives is left to its defaults, if it has some. It returns
  (model, inputs) or (model, inputs, loss):
    model    an nn.Module in training mode, on its device;
    inputs   a tensor, a tuple or list of arguments, or a dict of keyword arguments of the model;
    loss     a function of the model's output, for backward (for models of transformers with labels:
             lambda output: output.loss); else the sum of the output's floats.
  For example, in mine.py, as mine:training_step:

    def training_step(batch, seq=128, device="cpu"):
        layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(device)
        return model, torch.randn(batch, seq, 256, device=device)

python -X dev -m fused_remat ... shows the traceback of an error.
"""


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """What raises within ends the command with a message: `what`, the error, and the last line of
    it that is the user's, if one is. Out of memory is left as it is."""
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


@dataclass(frozen=True)
class Target:
    """A model with a training step's inputs.

    Attributes:
        title: what it is, in a line.
        loss: of the model's output; None for its sum.
    """

    title: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


def add_target(parser: argparse.ArgumentParser) -> None:
    """TARGET and the options that say what it is to be."""
    parser.add_argument("target", metavar="TARGET", help="see below")
    group = parser.add_argument_group("what TARGET is to be")
    group.add_argument("--batch", type=int, help="sequences (default: 1)")
    group.add_argument("--seq", type=int, help="tokens of each (default: what the model is for)")
    group.add_argument("--layers", type=int, help="of a shape (default: the model's)")
    group.add_argument("--dropout", type=float, help="of a shape (default: 0)")
    group.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    group.add_argument(
        "--dtype", choices=DTYPES, help="of parameters (default: bfloat16 on cuda, else float32)"
    )


def load(args: argparse.Namespace, stock: bool = False) -> Target:
    """The target that the arguments describe; `stock`: a shape of ordinary layers.

    Raises: CommandError for options and functions that do not fit.
    """
    for name in ("batch", "seq", "layers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}")
    if args.target in MODELS:
        return _built_in(args, stock)
    if ":" not in args.target:
        shapes = ", ".join(MODELS)
        raise CommandError(f"TARGET is one of {shapes}, or module:function, got {args.target!r}")
    return _users(args)


def device_of(args: argparse.Namespace) -> torch.device:
    """The device that is asked for, or the best there is.

    Raises: CommandError for another kind, or one that is not there.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(args.device or ("cuda" if there else "cpu"))
    except RuntimeError as error:
        raise CommandError(f"--device {args.device!r} is no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device is cpu or cuda, got {args.device!r}")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise CommandError(f"--device {args.device!r}: this machine has {there} CUDA devices")
    return device


def dtype_of(args: argparse.Namespace, device: torch.device) -> torch.dtype:
    """The dtype that is asked for: by default float32 on a CPU, bfloat16 on a GPU."""
    return DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def _built_in(args: argparse.Namespace, stock: bool) -> Target:
    shape, device = MODELS[args.target], device_of(args)
    dtype, dropout = dtype_of(args, device), args.dropout or 0.0
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
    """Before anything is allocated: parameters and gradients have to fit."""

    def count(layers: int) -> int:
        small = dataclasses.replace(shape, layers=layers)
        model, _ = build(small, 1, seq, 0.0, False, "meta", dtype)
        return sum(p.numel() for p in model.parameters())

    total = count(1) + (count(2) - count(1)) * (shape.layers - 1)
    needs, has = 2 * total * dtype.itemsize, device_memory(device)
    if needs > has:
        raise CommandError(
            f"{shape.name} of {shape.layers} layers has {total / 1e6:,.1f} M parameters: with "
            f"their gradients {human(needs)}, and {device} has {human(has)}; give --layers"
        )


def _parameters(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters"


def _users(args: argparse.Namespace) -> Target:
    for name in ("layers", "dropout"):
        if getattr(args, name) is not None:
            raise CommandError(f"--{name} is for shapes, not for {args.target!r}")
    function = _find(args.target)
    given_to_it = _arguments(function, args)
    with told(f"{args.target!r} raises"):
        value = function(**given_to_it)
    model, inputs, loss = _returned(args.target, value)
    if isinstance(inputs, Mapping):
        given: tuple[tuple[Any, ...], dict[str, Any]] = (), dict(inputs)
    else:
        given = (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}
    title = f"{args.target}: {type(model).__name__}, {_parameters(model)}"
    return Target(title, model, *given, loss)


def _find(target: str) -> Callable[..., Any]:
    """The function; its module may lie in the current folder."""
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with told(f"cannot import {module_name!r} of {target!r}"):
        module = pkgutil.resolve_name(f"{module_name}:")
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise CommandError(
            f"{module_name!r} has no function {name!r}; its functions: {', '.join(known) or 'none'}"
        )
    found: Callable[..., Any] = function
    return found


def _arguments(function: Callable[..., Any], args: argparse.Namespace) -> dict[str, Any]:
    """Those that the function names, and that are given or have no default."""
    with told(f"{args.target!r} does not say its parameters"):
        signature = inspect.signature(function)
    parameters = {
        name: p
        for name, p in signature.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    device = device_of(args)
    defaults = {"batch": 1, "seq": None, "device": device, "dtype": dtype_of(args, device)}
    found = {}
    for name in _NAMED:
        given = getattr(args, name)
        if given is not None and name not in parameters:
            raise CommandError(f"--{name} is given, and {args.target!r} has no parameter {name!r}")
        if name in parameters and (given is not None or _is_required(parameters[name])):
            found[name] = given if name in ("batch", "seq") and given else defaults[name]
    if "seq" in found and found["seq"] is None:
        raise CommandError(f"{args.target!r} has a parameter 'seq' without a default: give --seq")
    unknown = [n for n, p in parameters.items() if n not in _NAMED and _is_required(p)]
    if unknown:
        raise CommandError(
            f"{args.target!r} is called by batch, seq, device and dtype, and requires "
            f"{', '.join(map(repr, unknown))}"
        )
    return found


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _returned(target: str, value: Any) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
    wanted = f"{target!r} has to return (model, inputs) or (model, inputs, loss)"
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise CommandError(f"{wanted}, got {_shown(value)}")
    model, inputs = value[:2]
    loss = value[2] if len(value) == 3 else None
    if not isinstance(model, nn.Module):
        raise CommandError(f"{wanted}, its model an nn.Module, got {_shown(model)}")
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise CommandError(f"{wanted}, its inputs a tensor, tuple or dict, got {_shown(inputs)}")
    if isinstance(inputs, Mapping) and not all(isinstance(name, str) for name in inputs):
        names = ", ".join(map(repr, inputs))
        raise CommandError(f"{wanted}, a dict of inputs by the names of arguments, got {names}")
    if loss is not None and not callable(loss):
        raise CommandError(f"{wanted}, its loss a function, got {_shown(loss)}")
    return model, inputs, loss


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"a {type(value).__name__}: {str(value)[:80]}"
