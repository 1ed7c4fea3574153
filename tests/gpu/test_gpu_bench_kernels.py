"""The ops of `python -m bench kernels` on a GPU: everybody is right, or absent with a reason."""

import pytest
import torch
from places import BF16, DEVICE, target

from bench.kernels.attention_problem import FORMS, Attention
from bench.kernels.problem import contests
from bench.kernels.rope import NORMED, Rope
from bench.kernels.shapes import MODELS, Size, tiny
from bench.kernels.table import OPS
from bench.measure.contest import Rig, admit

pytestmark = pytest.mark.gpu
#: Compiled for every shape: left to the benchmark itself.
COMPILED = ("compile", "flex")


def rig():
    return Rig(DEVICE, BF16, True, target(), ends=0.0)


def check(op, problem):
    for direction, contest in contests(op, problem, [n for n in op if n not in COMPILED]):
        rows = admit(contest)
        wrong = {name: row["error"] for name, row in rows.items() if "error" in row}
        assert not wrong, (direction, problem.name, wrong)
        ours = [name for name in rows if name.startswith("fused_remat triton")]
        assert all("check" in rows[n] or "our backwards take" in rows[n]["absent"] for n in ours), (
            direction,
            rows,
        )


@pytest.mark.parametrize("model", ["gpt2", "qwen2-1.5b"])
@pytest.mark.parametrize("name", OPS)
def test_every_provider_of_a_models_ops_is_right_or_absent(name, model):
    torch.manual_seed(0)
    for problem in OPS[name].of_model(rig(), Size(tiny(MODELS[model]), 2, 64)):
        check(OPS[name], problem)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_is_right_or_absent(form):
    torch.manual_seed(0)
    check(OPS["attention"], Attention(rig(), form, 1, 8, 8, 512, 64))


def test_rotated_heads_with_their_norms():
    torch.manual_seed(0)
    check(OPS["rope"], Rope(rig(), NORMED, 2, 4, 2, 33, 64))
