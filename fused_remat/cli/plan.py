"""`plan`: what each layer should keep, so that a step is fastest within a memory budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fused_remat.cli import target
from fused_remat.cli.outputs import CommandError, add_outputs, check_outputs, write_outputs
from fused_remat.cli.report import fuse
from fused_remat.planner import BudgetError, Plan, plan
from fused_remat.planner.measure import device_of
from fused_remat.planner.options import bytes_of
from fused_remat.planner.solve import METHODS
from fused_remat.report.report import aligned, human

_EXAMPLES = """
examples:
  python -m fused_remat plan smollm-135m --layers 4 --seq 256
  python -m fused_remat plan vit-l --layers 2 --batch 2 --accumulates --budget 490MiB --compare
  python -m fused_remat plan llama3-8b --device cuda --batch 4 --budget 70GiB --optimizer sgd
  python -m fused_remat plan smollm-135m --layers 4 --seq 256 --lossy
  python -m fused_remat plan mine:training_step --budget 80% --json plan.json --plot plan.png

A plan in plan.json is applied by
  fused_remat.Plan.from_json(open("plan.json").read()).apply(model)
"""
_OPTIMIZERS = ("adamw", "sgd", "none")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_remat plan",
        description="Measures a training step and chooses what every layer keeps, so that it is "
        "fastest within a memory budget (fused_remat.plan). Run it with nothing beside it.",
        epilog=target.HELP + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_target(parser)
    group = parser.add_argument_group("what to choose")
    group.add_argument(
        "--budget",
        help="what the step may take at its peak, parameters and optimizer included: 6GiB, 500MB, "
        "80%% of the device's memory (default: any, with the frontier)",
    )
    group.add_argument("--method", choices=METHODS, default="optimal", help="(default: optimal)")
    group.add_argument(
        "--costs",
        choices=("measured", "analytic"),
        default="measured",
        help="steps of the layers are timed, or follow from FLOPs and bytes (default: measured)",
    )
    group.add_argument(
        "--optimizer",
        choices=_OPTIMIZERS,
        default="adamw",
        help="counts with its state (default: adamw)",
    )
    group.add_argument("--accumulates", action="store_true", help="gradients are there all along")
    group.add_argument(
        "--no-segments", action="store_true", help="no runs of layers that keep one input"
    )
    group.add_argument(
        "--lossy",
        action="store_true",
        help="some of what is kept may be in 8 bits, which rounds gradients (default: nothing is)",
    )
    group.add_argument(
        "--offload",
        action="store_true",
        help="some of what is kept may wait in the host's memory; CUDA devices only",
    )
    group.add_argument("--compare", action="store_true", help="all methods at this budget")
    group.add_argument(
        "--frontier", action="store_true", help="from the least possible peak to the fastest step"
    )
    add_outputs(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the plan; 1 if there is none within the budget.

    Raises: CommandError for a target, budget or path that cannot be, or a step that raises.
    """
    args = parse(arguments)
    check_outputs(args)
    found = target.load(args)
    fuse(found.model, None)
    budget = _budget(args.budget, device_of(found.model, [found.args, found.kwargs]))
    print(found.title, flush=True)
    with target.told(f"a step of {args.target!r} cannot be planned"):
        fastest = plan(
            found.model,
            *found.args,
            costs=args.costs,
            optimizer=optimizer_of(args.optimizer, found.model),
            loss=found.loss,
            accumulates=args.accumulates,
            segments=not args.no_segments,
            lossy=args.lossy,
            offload=args.offload,
            **found.kwargs,
        )
    chosen, failure = _chosen(fastest, budget, args.method)
    if chosen is not None:
        print(f"\n{chosen}")
    if args.compare:
        print(f"\n{comparison(fastest, budget)}")
    if args.frontier or budget is None:
        print(f"\n{frontier(fastest)}")
    if chosen is None:
        print(f"python -m fused_remat plan: {failure}", file=sys.stderr)
        return 1
    write_outputs(args, chosen)
    return 0


def _budget(text: str | None, device: torch.device) -> int | None:
    try:
        return None if text is None else bytes_of(text, device)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(f"--budget: {error}") from error


def _chosen(fastest: Plan, budget: int | None, method: str) -> tuple[Plan | None, str]:
    """A method's plan, or why it has none."""
    try:
        return fastest.within(budget, method), ""
    except BudgetError as error:
        return None, str(error)


def optimizer_of(name: str, model: nn.Module) -> Optimizer | None:
    """One over the model's parameters, as PyTorch's defaults have it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "none" or not parameters:
        return None
    return torch.optim.AdamW(parameters) if name == "adamw" else torch.optim.SGD(parameters)


def comparison(measured: Plan, budget: int | None) -> str:
    """A row for every method: what it comes to at a budget, or what it needs, where known."""
    rows = [["method", "peak", "kept", "step", ""]]
    for method in METHODS:
        try:
            made = measured.within(budget, method)
        except BudgetError as error:
            needs = f": needs {human(error.least)}" if error.least > error.budget else ""
            rows.append([method, "–", "–", "–", f"none within it{needs}"])
        else:
            rows.append([method, *_cells(made.peak_bytes, made.kept_bytes, made.seconds), ""])
    return "\n".join(aligned(rows))


def frontier(measured: Plan) -> str:
    """A row for every point: the fastest step within a peak."""
    rows = [["frontier", "peak", "kept", "step"]]
    rows += [["", *_cells(p.peak_bytes, p.kept_bytes, p.seconds)] for p in measured.frontier]
    return "\n".join(aligned(rows))


def _cells(peak: int, kept: int, seconds: float) -> list[str]:
    return [human(peak), human(kept), f"{1e3 * seconds:.1f} ms"]
