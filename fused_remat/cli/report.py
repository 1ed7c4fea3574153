"""`report`: what each layer of a model keeps for backward, by name, and its peaks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import nn

from fused_remat.cli import target
from fused_remat.cli.outputs import CommandError, add_outputs, check_outputs, write_outputs
from fused_remat.convert import convert, set_policy
from fused_remat.formats import FORMATS
from fused_remat.layers import FusedLayer
from fused_remat.policies import ALL_PRESETS, EXACT_PRESETS, LOSSY_PRESETS, Policy
from fused_remat.report import memory_report

_EXAMPLES = """
examples:
  python -m fused_remat report gpt2 --layers 2 --seq 256
  python -m fused_remat report gpt2 --layers 2 --seq 256 --stock
  python -m fused_remat report smollm-135m --layers 2 --seq 256 --policy names:attn,rotated
  python -m fused_remat report gpt2 --layers 2 --seq 256 --policy names:attn,qkv:int8
  python -m fused_remat report mine:training_step --batch 4 --policy lean --plot memory.png
"""


def policy_of(text: str) -> str | Policy:
    """A preset, or "names:" and names with commas between, each with a format or without.

    >>> policy_of("lean"), sorted(policy_of("names:attn,qkv:int8").save)
    ('lean', ['attn', 'qkv:int8'])
    """
    if text.startswith("names:"):
        names = text.removeprefix("names:").split(",")
        try:
            return Policy(save={name.strip() for name in names if name.strip()})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    if text not in ALL_PRESETS:
        raise argparse.ArgumentTypeError(
            f"unknown policy {text!r}; valid: {', '.join(ALL_PRESETS)}, or names:attn,qkv:int8"
        )
    return text


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_remat report",
        description="Runs a step of a model and prints what each layer keeps between forward and "
        "backward, by name, as measured and as predicted, and the peaks (fused_remat."
        "memory_report).",
        epilog=target.HELP + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_target(parser)
    group = parser.add_argument_group("what its layers keep")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--policy",
        type=policy_of,
        metavar="POLICY",
        help=f"{', '.join(EXACT_PRESETS)}; in 8 bits: {', '.join(LOSSY_PRESETS)}; or "
        f"names:attn,qkv:int8 (formats: {', '.join(FORMATS)}). Default: full; layers that are "
        "already fused keep theirs",
    )
    either.add_argument(
        "--stock", action="store_true", help="ordinary layers; a function's model as it is"
    )
    add_outputs(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the report.

    Raises: CommandError for a target, policy or path that cannot be, or a step that raises.
    """
    args = parse(arguments)
    check_outputs(args)
    found = target.load(args, args.stock)
    if not args.stock:
        fuse(found.model, args.policy)
    with target.told(f"a step of {args.target!r} cannot be run"):
        report = memory_report(found.model, *found.args, loss=found.loss, **found.kwargs)
    print(f"{found.title}\n\n{report}")
    write_outputs(args, report)
    return 0


def fuse(model: nn.Module, policy: str | Policy | None) -> None:
    """Convert a model that has no fused layer; set the policy, if there is one.

    Raises: CommandError if there is nothing to convert, or a layer has not the policy's names.
    """
    try:
        if not any(isinstance(m, FusedLayer) for m in model.modules()):
            convert(model, "full" if policy is None else policy)
        elif policy is not None:
            set_policy(model, "*", policy)
    except ValueError as error:
        raise CommandError(str(error)) from error
