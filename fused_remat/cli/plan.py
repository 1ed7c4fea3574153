"""`plan`: chooses what each layer keeps, so that a step is fastest within a memory budget."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fused_remat.cli import target
from fused_remat.cli.options import (
    NothingFits,
    add_outputs,
    add_training,
    check_outputs,
    memory_of,
    new_parser,
    write_outputs,
)
from fused_remat.cli.report import fuse
from fused_remat.planner import BudgetError, Plan, Point, plan
from fused_remat.planner.solve import METHODS
from fused_remat.report.step import device_of
from fused_remat.report.units import aligned, human, milliseconds

_DESCRIPTION = """\
Measures a training step and chooses what every layer keeps, so that the step is fastest within
a memory budget (fused_remat.plan). Run nothing else on the machine meanwhile.
"""
_EXAMPLES = """
examples:
  python -m fused_remat plan smollm-135m --layers 4 --seq 256
  python -m fused_remat plan vit-l --layers 2 --batch 2 --accumulate-gradients --budget 490MiB
  python -m fused_remat plan llama3-8b --device cuda --batch 4 --budget 70GiB --optimizer sgd
  python -m fused_remat plan mine:training_step --budget 80% --json plan.json --plot plan.png

To apply the plan in plan.json:
  fused_remat.Plan.from_json(open("plan.json").read()).apply(model)
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser("plan", _DESCRIPTION, target.HELP + _EXAMPLES)
    target.add_target(parser)
    group = parser.add_argument_group("what to choose")
    add, flag = group.add_argument, functools.partial(group.add_argument, action="store_true")
    limit = "limit on the peak memory of the step, including parameters and optimizer"
    add(
        "--budget", help=f"{limit}: 6GiB, 500MB, or 80%% of the device's memory (default: no limit)"
    )
    method = "how to choose: exactly, or by a simpler rule (default: optimal)"
    add("--method", choices=METHODS, default="optimal", help=method)
    costs = "cost of the layers' steps: timed, or from FLOPs and bytes (default: measured)"
    add("--costs", choices=("measured", "analytic"), default="measured", help=costs)
    add_training(group)
    flag("--no-segments", help="exclude segments, in which several layers keep a single input")
    flag("--offload", help="allow some activations to wait in the host's memory (CUDA only)")
    flag("--compare", help="also compare all methods at this budget")
    flag("--frontier", help="also print the fastest step for each peak (always without --budget)")
    add_outputs(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the plan.

    Raises: NothingFits if no plan is within the budget; CommandError for a wrong target, budget or
        path, or an error in the step.
    """
    args = parse(arguments)
    check_outputs(args)
    found = target.load(args)
    fuse(found.model, None)
    device = device_of(found.model, [found.args, found.kwargs])
    budget = None if args.budget is None else memory_of("--budget", args.budget, device)
    print(found.title, flush=True)
    with target.user_errors(f"planning a step of {args.target!r} failed"):
        fastest = plan(
            found.model,
            *found.args,
            costs=args.costs,
            optimizer=optimizer_of(args.optimizer, found.model),
            loss=found.loss,
            accumulates=args.accumulates,
            segments=not args.no_segments,
            offload=args.offload,
            **found.kwargs,
        )
    chosen, failure = None, ""
    try:
        chosen = fastest.within(budget, args.method)
        print(f"\n{chosen}")
    except BudgetError as error:
        failure = str(error)
    if args.compare:
        print(f"\n{comparison(fastest, budget)}")
    if args.frontier or budget is None:
        print(f"\n{frontier(fastest)}")
    if chosen is None:
        raise NothingFits(failure)
    write_outputs(args, chosen)
    return 0


def optimizer_of(name: str, model: nn.Module) -> Optimizer | None:
    """Return an optimizer of the model's parameters with PyTorch's defaults."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "none" or not parameters:
        return None
    return torch.optim.AdamW(parameters) if name == "adamw" else torch.optim.SGD(parameters)


def comparison(measured: Plan, budget: int | None) -> str:
    """Return a table of every method: its plan at a budget, or the least budget it needs."""
    table = [["method", "peak", "kept", "step", ""]]
    for method in METHODS:
        try:
            planned = measured.within(budget, method)
        except BudgetError as error:
            needs = f": needs {human(error.least)}" if error.least > error.budget else ""
            table.append([method, "–", "–", "–", f"no plan within the budget{needs}"])
        else:
            table.append([method, *_cells(planned), ""])
    return "\n".join(aligned(table))


def frontier(measured: Plan) -> str:
    """Return a table of the frontier: the fastest step within each peak."""
    table = [["frontier", "peak", "kept", "step"]]
    table += [["", *_cells(point)] for point in measured.frontier]
    return "\n".join(aligned(table))


def _cells(step: Plan | Point) -> list[str]:
    return [human(step.peak_bytes), human(step.kept_bytes), milliseconds(step.seconds)]
