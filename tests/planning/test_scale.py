"""A step on a mesh, on paper: parameters, memory, time, what fits, and the command."""

import pytest
import torch

from fused_remat.planner.chain import Choice, timeline
from fused_remat.policies import EXACT_PRESETS
from fused_remat.scale import HARDWARE, Layout, Mesh, Setup, estimate, models
from fused_remat.scale.costs import of_file
from fused_remat.scale.estimate import PLANNER, link_of, peak_of, way_of
from fused_remat.scale.layer import kept_by_eager
from fused_remat.scale.layout import parameters_of
from fused_remat.scale.memory import chain_of, weight_bytes
from fused_remat.scale.shapes import LARGE, MODELS

#: As published: model cards; Grattafiori et al. 2024 (Llama 3), Yang et al. 2025 (Qwen3), Brown et
#: al. 2020 (GPT-3, with its positions: 174.6 B). Of bert-base without token types, pooler and the
#: head's transform, of vit-l without the class token.
PARAMETERS = {
    "bert-base": 108_890_112,
    "gpt2": 124_439_808,
    "vit-l": 304_326_632 - 1024,
    "smollm-135m": 134_515_008,
    "qwen2-1.5b": 1_543_714_304,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
    "gpt3-175b": 174_604_259_328,
}
H100 = HARDWARE["h100"]
MEMORY = 80 * 2**30


def setup_of(name="llama3-70b", data=8, tensor=8, sequence=True, **kwargs):
    kwargs = {"batch": 1, "seq": 8192, **kwargs}
    return Setup({**MODELS, **LARGE}[name], Layout(Mesh(data, tensor), sequence), **kwargs)


@pytest.fixture(scope="module")
def found():
    return estimate(setup_of(), H100, MEMORY)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_parameters(name):
    """Those of a model that is built, and on paper those of a language model."""
    shape = {**MODELS, **LARGE}[name]
    if name in MODELS:
        model, _ = models.build(shape, 1, shape.seq_len, device="meta")
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    if name not in ("bert-base", "vit-l"):
        assert parameters_of(shape, shape.seq_len).count() == PARAMETERS[name]


@pytest.mark.parametrize(
    ("sequence", "policy", "counts"),
    [
        # An all-gather and a reduce-scatter a half; backward of each is the other. Backward of the
        # weights reads what was gathered: two all-gathers again, and for `mid`, unless it is
        # kept, a reduce-scatter.
        (True, "full", (4, 7, 3)),
        (True, "lean", (4, 7, 3)),
        (True, "balanced", (4, 6, 2)),
        (True, "none", (4, 6, 2)),
        # An all-reduce a half and direction; rebuilding `mid` is one more.
        (False, "full", (2, 3, 1)),
        (False, "balanced", (2, 2, 0)),
    ],
)
def test_collectives_are_counted_in_the_programs(sequence, policy, counts):
    found = way_of(setup_of(sequence=sequence), H100, policy).works
    of = [w for w in found if w.collective]
    forward = [w for w in of if w.which == "forward"]
    assert (len(forward), len(of) - len(forward), sum(w.rebuilt for w in of)) == counts
    stream = 2 * 8192 * 8192 * 7 / 8  # bytes of an entire matrix, without the rank's own part
    assert {w.sent for w in of} == {stream if sequence else 2 * stream}


def test_a_row_adds_up(found):
    setup = found.setup
    for name in ("eager", "full", "none"):
        row = found.rows[name]
        assert row.peak == peak_of(setup, H100, name) and min(row.memory.values()) > 0
        assert row.memory["weights"] == weight_bytes(setup)
    assert found.rows["full"].kept == 80 * way_of(setup, H100, "full").option.kept
    full, none, eager = (found.rows[name] for name in ("full", "none", "eager"))
    assert full.kept < none.kept < eager.kept and full.rebuilt > 0.2 > none.rebuilt
    assert eager.rebuilt == 0
    assert eager.step <= none.step * (1 + 1e-9) and none.step <= full.step * (1 + 1e-9)
    assert 0 < found.mfu("none") < 0.75


def test_the_planner_is_as_fast_as_any_that_fits(found):
    fits = [found.rows[name].step for name in EXACT_PRESETS if found.fits(name)]
    assert found.fits(PLANNER) and found.rows[PLANNER].step <= min(fits) * (1 + 1e-9)


@pytest.mark.parametrize(("batch", "policy", "calls"), [(1, "full", {0}), (4, "none", {-1, 79})])
def test_gradients_come_as_what_is_kept_goes(batch, policy, calls):
    """The peak is where backward begins while layers keep much, and where it ends when not."""
    setup = setup_of(batch=batch)
    chain = chain_of(setup, [way_of(setup, H100, policy).option])
    assert max(timeline(chain, Choice((0,) * 80)), key=lambda event: event.peak).call in calls


def test_hosted_bytes_leave_the_device():
    with_it = setup_of(offload=("attn", "mid"))
    here, there = (way_of(s, H100, "none") for s in (setup_of(), with_it))
    assert there.hosted == 4 * 8192 * 8192 // 8  # without statistics
    assert there.option.kept == here.option.kept - there.hosted
    assert there.works == here.works


def test_eager_keeps_32_bytes_of_a_plain_block_and_more_of_a_gated_one():
    def kept(name, *layout):
        return kept_by_eager(LARGE[name], Layout(*layout), 2048, torch.bfloat16)

    assert kept("gpt3-175b", Mesh(1, 1)) / 2048 / 12288 == pytest.approx(32, abs=0.1)
    assert kept("llama3-70b", Mesh(8, 8), True) < kept("llama3-70b", Mesh(8, 8), False)


def test_the_largest_batch_fits_and_one_more_does_not(found):
    most = found.batches["balanced"]
    fits, exceeds = (peak_of(setup_of(batch=most + i), H100, "balanced") for i in (0, 1))
    assert fits <= MEMORY < exceeds


def test_links_within_a_node_and_beyond():
    assert link_of(H100, Layout(Mesh(8, 1)), "data") == H100.link.value
    assert link_of(H100, Layout(Mesh(8, 8)), "data") == H100.network.value
    assert link_of(H100, Layout(Mesh(16, 4)), "data") == 2 * H100.network.value
    assert link_of(H100, Layout(Mesh(2, 16)), "tensor") == H100.network.value


def test_costs_of_files_say_where_they_are_from(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"source": "a run", "measured": true, "products_tflops": 700}')
    costs = of_file(path, H100)
    assert costs.attention_forward.value == costs.products.value == 700e12
    assert not costs.attention_forward.measured  # products were
    assert str(costs.products) == "measured: mine.json: a run"
    assert str(costs.link).startswith("assumed, not measured")
    path.write_text('{"products_tflops": -1}')
    with pytest.raises(ValueError, match="positive number, got -1"):
        of_file(path, H100)
