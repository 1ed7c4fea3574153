"""`report`: shows what each layer of a model keeps for backward, by name, and peak memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import nn

from fused_remat.cli import target
from fused_remat.cli.options import (
    CommandError,
    add_outputs,
    check_outputs,
    new_parser,
    write_outputs,
)
from fused_remat.convert import convert, fused_layers, set_policy
from fused_remat.policies import EXACT_PRESETS, Policy
from fused_remat.report import memory_report

_DESCRIPTION = """\
Runs one training step of a model. Prints what each layer keeps between forward and backward,
by name, as measured and as predicted, and peak memory (fused_remat.memory_report).
"""
_EXAMPLES = """
examples:
  python -m fused_remat report gpt2 --layers 2 --seq 256
  python -m fused_remat report gpt2 --layers 2 --seq 256 --stock
  python -m fused_remat report smollm-135m --layers 2 --seq 256 --policy names:attn,rotated
  python -m fused_remat report mine:training_step --batch 4 --policy lean --plot memory.png
"""


def policy_of(text: str) -> str | Policy:
    """Read a policy: a preset, or "names:" and comma-separated names.

    >>> policy_of("lean"), policy_of("names:attn")
    ('lean', Policy(save={'attn'}))
    """
    if text.startswith("names:"):
        names = text.removeprefix("names:").split(",")
        try:
            return Policy(save={name.strip() for name in names if name.strip()})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    if text not in EXACT_PRESETS:
        raise argparse.ArgumentTypeError(
            f"unknown policy {text!r}; valid: {', '.join(EXACT_PRESETS)}, or names:attn,qkv"
        )
    return text


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser("report", _DESCRIPTION, target.HELP + _EXAMPLES)
    target.add_target(parser)
    group = parser.add_argument_group("what the layers keep")
    either = group.add_mutually_exclusive_group()
    policies = (
        f"{', '.join(EXACT_PRESETS)}, or names:attn,qkv. Default: full; layers that are fused "
        "already keep their policies"
    )
    either.add_argument("--policy", type=policy_of, metavar="POLICY", help=policies)
    stock = "use plain PyTorch layers; leave the model of a function as it is"
    either.add_argument("--stock", action="store_true", help=stock)
    add_outputs(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the report.

    Raises: CommandError for a wrong target, policy or path, or an error in the step.
    """
    args = parse(arguments)
    check_outputs(args)
    found = target.load(args, args.stock)
    if not args.stock:
        fuse(found.model, args.policy)
    with target.user_errors(f"running a step of {args.target!r} failed"):
        report = memory_report(found.model, *found.args, loss=found.loss, **found.kwargs)
    print(f"{found.title}\n\n{report}")
    write_outputs(args, report)
    return 0


def fuse(model: nn.Module, policy: str | Policy | None) -> None:
    """Convert a model that has no fused layers, and set the policy unless it is None.

    Raises: CommandError if no layer can be converted, or a layer lacks the policy's names.
    """
    try:
        if not fused_layers(model):
            convert(model, "full" if policy is None else policy)
        elif policy is not None:
            set_policy(model, "*", policy)
    except ValueError as error:
        raise CommandError(str(error)) from error
