"""Programs of passes (`execution.program`) give what their steps give, and run where they may."""

import contextlib
import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from processes import printed
from reference import EXACT_PRESETS
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import FusedRematCausalLayer, FusedRematLayer, explain, ops
from fused_remat.execution import executor, prepare, program
from fused_remat.execution.calls import Recorder
from fused_remat.execution.source import Source, source_of
from fused_remat.report.allocations import measure_allocations
from fused_remat.spec import AttentionSpec
from fused_remat.steps import attention_aten, operations
from fused_remat.steps.attention_call import AttentionArgs

BATCH, SEQ, WIDTH = 2, 16, 32


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(program, "FEW", 0)
    monkeypatch.setattr(program.Programs, "all_lines", 0)
    prepare._prepare.cache_clear()  # of which programs are a part


def encoder(width=WIDTH, dropout=0.0, **options):
    return FusedRematLayer(width, 4, 2 * width, dropout, batch_first=True, **options)


def causal(**options):
    return FusedRematCausalLayer(
        WIDTH, 4, 64, 0.0, "silu", kv_heads=2, qk_norm=True, softcap=30.0, placement="sandwich",
        **options,
    )  # fmt: skip


def large(**options):
    """Weights large enough to be delivered while backward runs."""
    return encoder(384, norm_first=True, **options)


def batch(seed, dtype=torch.float32, width=WIDTH):
    torch.manual_seed(seed)
    return torch.randn(BATCH, SEQ, width, dtype=dtype)


def step(layer, x, *given, dy=None):
    """The output and all gradients of a step."""
    inputs = [t.detach().requires_grad_() for t in (x, *given)]
    params = [p for p in layer.parameters() if p.requires_grad]
    y = layer(*inputs)
    dy = torch.ones_like(y).mul_(y.detach()) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, [*inputs, *params], dy)]


def execution_of(layer, x, *given):
    node = layer(x.detach().requires_grad_(), *given).grad_fn
    while not hasattr(getattr(node, "execution", None), "programs") or hasattr(node, "dims"):
        node = node.next_functions[0][0]
    return node.execution


def programs(layer, x, *given):
    """The programs of a call by name, which have been compared with the steps."""
    found = execution_of(layer, x, *given).programs
    assert not found.reason
    passes = [(kind[0], run) for kind, run in found.passes.items() if not isinstance(run, int)]
    return {name: run for name, run in passes if run.calls is None}


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)
        assert a.stride() == b.stride()


def check(layer, *calls, **options):
    """Each call runs its programs two times, which give what the steps gave."""
    expected = [step(layer, *call, **options) for call in calls]
    for _ in range(2):
        for call, first in zip(calls, expected, strict=True):
            same(step(layer, *call, **options), first)
    for call in calls:
        assert len(programs(layer, *call)) == 2


def dora(**options):
    targets, rest = ["q", "v", "o", "up", "down"], {"use_dora": True, "init_lora_weights": False}
    config = LoraConfig(r=2, target_modules=targets, **rest)
    return inject_adapter_in_model(config, causal(**options))


@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("make", [encoder, causal, dora], ids=["encoder", "causal", "dora"])
def test_every_policy(make, policy):
    layer = make(policy=policy)
    check(layer, (batch(1),), (batch(2),))


def test_dropout_draws_again():
    layer, x = encoder(dropout=0.5), batch(1)
    torch.manual_seed(3)
    expected = [step(layer, x) for _ in range(3)]
    torch.manual_seed(3)
    for first in expected:
        same(step(layer, x), first)
    assert not expected[0][0].equal(expected[1][0])
    assert len(programs(layer, x)) == 2


def test_a_mask_whose_values_decide():
    """A row that is far below zero everywhere needs another implementation than programs have."""
    layer, x = encoder(), batch(1)
    near = torch.randn(x.shape[0], x.shape[1])
    padding = {"src_key_padding_mask": near}
    far = {"src_key_padding_mask": near.clone().index_fill_(0, torch.tensor([1]), -1e4)}

    def grads(mask):
        x.grad = None
        y = layer(x.requires_grad_(), **mask)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    expected = [grads(mask) for mask in (padding, far)]
    for _ in range(program.FEW + 2):
        for mask, first in zip((padding, far), expected, strict=True):
            same(grads(mask), first)
    found = execution_of(layer, x, None, near).programs
    assert not found.reason
    assert any(not isinstance(run, int) and run.calls is None for run in found.passes.values())
    near[0] = -1e4  # in place
    same(grads(padding), grads({"src_key_padding_mask": near.clone()}))


def test_both_passes_run_no_step(monkeypatch):
    layer, x = encoder(), batch(1)
    check(layer, (x,))
    monkeypatch.setattr("fused_remat.steps.linear.Linear.forward", None)
    step(layer, x)


def test_gradients_of_large_weights_are_delivered_by_a_program():
    layer, x = large(), batch(1, width=384)
    check(layer, (x,))
    found = programs(layer, x)["stages"]
    execution = execution_of(layer, x)
    assert found.source.text.count("yield") == len(execution.delivered) + 1 > 2
    tensors = [None if s is None else torch.randn(s) for s in execution.given]
    out, kept = executor.forward(execution, tensors)
    stages = found((*tensors, *kept, out, torch.ones_like(out)), None)
    given = [weakref.ref(grad) for grad in next(stages).values()]
    assert given and all(ref() is None for ref in given), "or autograd would copy it"


@pytest.mark.parametrize("make", [encoder, causal, large], ids=["encoder", "causal", "large"])
def test_peaks_are_those_of_the_steps(make, monkeypatch):
    """Autograd frees a gradient that a program has given, and a program its transients."""
    layer = make()
    x = batch(1, width=384 if make is large else WIDTH).requires_grad_()

    def train():
        layer(x).sum().backward()
        layer.zero_grad(set_to_none=True)

    monkeypatch.setattr(executor, "_is_observed", lambda: False)
    train()
    monkeypatch.setattr(program, "FEW", 1 << 30)
    peak = measure_allocations(train).peak
    monkeypatch.setattr(program, "FEW", 0)
    for _ in range(3):  # recorded, compared, neither
        assert measure_allocations(train).peak <= peak
    assert len(programs(layer, x)) == 2


def test_programs_of_an_encoder_are_short_and_explained():
    """Under 60 lines each, with a comment for each step; they are what `explain` prints."""
    layer, x = encoder(norm_first=True), batch(1)
    layer.activation = torch.nn.functional.gelu
    check(layer, (x,))
    texts = {name: run.source.text for name, run in programs(layer, x).items()}
    for text in texts.values():
        assert text.count("\n") < 60
    assert "# rebuild up\n    up = linear(norm2, fc1_weight, fc1_bias)" in texts["backward"]
    assert "# backward of up\n" in texts["backward"] and "# up\n" in texts["forward"]
    (block,) = explain(layer, x.requires_grad_(), code=True)
    assert block.code == f"{texts['forward']}\n{texts['backward']}"
    assert block.code in str(block)


def test_explain_says_why_there_is_no_program(monkeypatch):
    layer, x = encoder(), batch(1).requires_grad_()
    layer.activation = lambda x: x * 2.0
    (block,) = explain(layer, x, code=True)
    assert block.code.startswith("# no program: ")
    first = next(iter(operations.OPERATIONS.values()))
    mine = operations.Faster(first.run, lambda key: "no", "none")
    monkeypatch.setitem(first.faster, "eager", mine)
    monkeypatch.setattr(first.run, "__module__", "mine")
    layer = encoder(48)
    x = batch(1, width=48).requires_grad_()
    (block,) = explain(layer, x, code=True)
    assert block.code.startswith("# no program: ") and "implements an operation" in block.code
    monkeypatch.undo()
    layer, x = encoder(40), batch(1, width=40).requires_grad_()
    for name, value in (("ON", False), ("_MOST_LINES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(program, name, value)
            (block,) = explain(layer, x, code=True)
        assert block.code.startswith("# no program of forward: ")


def test_tied_weights():
    """A program of tied weights is not taken when they differ, nor the other way around."""
    layer, x = encoder(), batch(1)
    own = layer.norm2.weight
    with torch.no_grad():
        layer.norm1.weight.uniform_()
    expected = {}
    for _ in range(program.FEW + 3):
        for weight in (layer.norm1.weight, own):
            layer.norm2.weight = weight
            found = step(layer, x)
            same(found, expected.setdefault(weight, found))
    passes = execution_of(layer, x).programs.passes.values()
    assert sum(not isinstance(run, int) and run.calls is None for run in passes) == 4


@pytest.mark.parametrize("wrong", ["add_", "sub_", "error", "late"])
@pytest.mark.parametrize("make", [encoder, large], ids=["encoder", "large"])
def test_a_program_that_differs_from_its_steps_is_dropped(make, wrong, monkeypatch):
    real = Source.function

    def function(self, *given):
        text = self.text
        if wrong == "error":
            text = text.replace("norm1", "nothing", 1)
        elif wrong == "late":  # after most gradients
            head, found, tail = text.rpartition("add_(")
            text = f"{head}sub_({tail}" if found else text
        else:
            text = text.replace("add_(" if wrong == "sub_" else "mm(", f"{wrong}(", 1)
        return real(dataclasses.replace(self, text=text), *given)

    layer, x = make(), batch(1, width=384 if make is large else WIDTH)
    expected = step(layer, x)
    monkeypatch.setattr(Source, "function", function)
    for _ in range(3):
        same(step(layer, x), expected)
    x = x[:, :7]  # whose programs are wrong from the beginning
    expected = step(copy.deepcopy(layer), x)
    for _ in range(3):
        same(step(layer, x), expected)
    assert execution_of(layer, x).programs.reason.startswith("its program fails")


@pytest.mark.parametrize(("name", "value"), [("ON", False), ("_MOST_LINES_IN_ALL", 0)])
def test_nothing_is_written_where_that_is_off_or_enough_is(name, value, monkeypatch):
    monkeypatch.setattr(program, name, value)
    layer, x = FusedRematLayer(24, 2, 40, 0.0, batch_first=True), torch.randn(3, 5, 24)
    for _ in range(3):
        step(layer, x)
    assert not programs(layer, x)


def test_the_environment_turns_programs_off():
    code = "from fused_remat.execution import program; print(program.ON)"
    assert printed("-c", code, FUSED_REMAT_PROGRAMS="0") == "False\n"
    assert printed("-c", code) == "True\n"


def test_a_long_pass_runs_its_steps(monkeypatch):
    monkeypatch.setattr(program, "_MOST_LINES", 10)
    layer, x = FusedRematLayer(24, 2, 44, 0.0, batch_first=True), torch.randn(3, 5, 24)
    expected = step(layer, x)
    same(step(layer, x), expected)
    assert execution_of(layer, x).programs.reason.endswith("lines, above 10")


def test_what_reads_values_has_no_program():
    """Of a float mask, and of bounds of packed sequences, which no operator reads."""
    heads = [torch.randn(1, 4, 12, 8, requires_grad=True) for _ in range(3)]
    for cut in (5, 5, 5, 2):
        bounds = torch.tensor([0, cut, 12])
        y = ops.attention(*heads, is_causal=True, cu_seqlens_q=bounds)
        y.sum().backward()
    alone = ops.attention(*[t[:, :, 2:] for t in heads], is_causal=True)
    torch.testing.assert_close(y[:, :, 2:], alone)


class Seen(TorchFunctionMode):
    names: list

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    names: list

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Calls])
def test_modes_see_the_steps(mode):
    heads = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    seen = [[], [], []]
    for names in seen:
        with mode() as active:
            active.names = names
            torch.autograd.grad(ops.attention(*heads, dropout_p=0.5).sum(), heads)
        for _ in range(3 if names is seen[1] else 0):
            torch.autograd.grad(ops.attention(*heads, dropout_p=0.5).sum(), heads)
    assert seen[1] == seen[2] and len(seen[1]) > 20


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_output_may_be_changed_in_place(norm_first):
    """It is no view, and of a last norm it is the norm's own result."""
    layer, x = encoder(norm_first=norm_first), batch(1)
    for _ in range(3):
        given = x.clone().requires_grad_()
        y = layer(given)
        assert not y._is_view()
        expected = torch.autograd.grad(y.sum() * 2.0, given, retain_graph=True)
        y.mul_(2.0)
        assert torch.autograd.grad(y.sum(), given)[0].equal(expected[0])
        with torch.no_grad():
            y = layer(x)
        y.add_(layer.linear2.bias)


def test_the_graph_may_be_kept_and_checked_for_anomalies():
    layer, x = encoder(), batch(1).requires_grad_()
    check(layer, (x.detach(),))
    y = layer(x)
    first = torch.autograd.grad(y.sum(), [x, *layer.parameters()], retain_graph=True)
    same(torch.autograd.grad(y.sum(), [x, *layer.parameters()]), first)
    with torch.autograd.set_detect_anomaly(True):
        same(torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]), first)
        with pytest.raises(RuntimeError, match="nan"), pytest.warns(UserWarning, match="Error"):
            torch.autograd.grad((layer(x) * torch.nan).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        same(torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]), first)


def test_autocast():
    layer, x = encoder(), batch(1)
    with torch.autocast("cpu", torch.bfloat16):
        check(layer, (x,))
    check(layer, (x,))


def test_threads_write_and_run_programs():
    layers = [encoder(policy=name) for name in EXACT_PRESETS]
    x, errors = batch(1), []
    expected = [step(copy.deepcopy(layer).double().float(), x) for layer in layers]

    def train(start):
        try:
            for i in range(8):
                k = (start + i) % len(layers)
                same(step(layers[k], x), expected[k])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_parameters_of_other_dtype_memory_and_requirement():
    layer, x = encoder(policy="none"), batch(1)
    check(layer, (x,))
    for change in (
        lambda: layer.linear1.weight.data.copy_(torch.ones(64, WIDTH)),
        lambda: setattr(layer.linear1.weight, "data", torch.ones(WIDTH, 64).t() * 0.1),
        lambda: setattr(layer, "linear2", nn.Linear(64, WIDTH)),
        lambda: layer.linear1.weight.requires_grad_(False),
        lambda: layer.double(),
    ):
        change()
        x = x.to(layer.linear1.weight.dtype)
        check(layer, (x,))
        stock = copy.deepcopy(layer)
        stock.__class__ = nn.TransformerEncoderLayer
        torch.testing.assert_close(layer(x), stock(x))


def test_copies_are_no_views_below_autograd():
    """There, composite operators arrive undivided, and their schemas describe a copy as a view."""
    x = torch.ones(3, dtype=torch.float64)

    def steps():
        a = x.to(torch.float32)
        a.mul_(2.0)
        return a + x.to(torch.float32).contiguous()

    for mode in (torch.no_grad, torch.inference_mode, torch._C._AutoDispatchBelowAutograd):
        with mode(), Recorder([x], ["x"], "forward") as recorder:
            y = steps()
        assert not any("::to" in call.target.name() for call in recorder.lines)
        source = source_of(recorder, recorder.encoded(y))
        assert source.function()(x).equal(y) and y.equal(steps())
    layer, x = FusedRematLayer(24, 2, 56, 0.0, batch_first=True), torch.randn(3, 5, 24)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            layer(x)
    check(layer, (x,))


def test_functions_that_are_no_methods():
    a, b = torch.randn(2, 4, 4, device="meta", dtype=torch.bfloat16).unbind()
    with Recorder([a, b], ["a", "b"], "forward") as recorder:
        y = torch.mm(a, b, out_dtype=torch.float32)
    source = source_of(recorder, recorder.encoded(y))
    assert source.text.endswith("return t\n") and " = mm(a, b, float32)" in source.text
    assert source.function()(a, b).dtype == torch.float32


def test_the_choice_of_attention_on_gpus_is_no_part_of_a_pass():
    q = torch.randn(1, 2, 8, 16)
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25)
    with torch.no_grad(), Recorder([q], ["q"], "forward") as recorder:
        attention_aten.kernel(q, q, q, None, AttentionArgs(spec, 1, 8, 8))
    assert not recorder.failed and not recorder.lines


def test_layouts_that_come_once_do_not_keep_out_others(monkeypatch):
    monkeypatch.setattr(program, "FEW", 2)
    layer = FusedRematLayer(24, 2, 60, 0.0, batch_first=True)
    for n in range(25, 45):
        step(layer, torch.randn(3, 5, n)[..., :24])
    x = torch.randn(3, 5, 24)
    for _ in range(3):
        step(layer, x)
    check(layer, (x,))


def test_one_tensor_for_two_inputs():
    """It is no reason to read one tensor instead of two, later."""
    heads = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        ops.attention(heads[0], heads[0], heads[0])
    y = [ops.attention(*heads) for _ in range(3)]
    stock = torch.nn.functional.scaled_dot_product_attention(*heads)
    torch.testing.assert_close(y[-1], stock)


def test_observers_see_every_step():
    layer, x = encoder(), batch(1)
    check(layer, (x,))
    with torch.profiler.profile() as profile:
        step(layer, x)
    assert "fused_remat::compute attn" in {event.name for event in profile.events()}


def test_a_program_holds_no_tensor():
    layer, x = encoder(), batch(1)
    check(layer, (x,))
    for found in programs(layer, x).values():
        held = [
            *gc.get_referents(*gc.get_referents(found.go)),
            *gc.get_referents(found, found.source),
        ]
        assert not any(isinstance(t, torch.Tensor) for t in held)
        assert not any(isinstance(t, torch.Tensor) for t in found.go.__globals__.values())


def test_switches_of_pytorch_are_noticed():
    layer, x = encoder(), batch(1)
    check(layer, (x,))
    before = len(execution_of(layer, x).programs.passes)
    with torch.backends.mkldnn.flags(enabled=False):
        check(layer, (x,))
    assert len(execution_of(layer, x).programs.passes) == before + 2
    check(layer, (x,))


def test_without_private_interfaces(monkeypatch):
    """Programs run through autograd's kernels, which find nothing to do."""
    monkeypatch.setattr(program, "_below", contextlib.nullcontext)
    layer, x = FusedRematLayer(24, 2, 52, 0.0, batch_first=True), torch.randn(3, 5, 24)
    check(layer, (x,))
    for name in ("_AutoDispatchBelowADInplaceOrView", "_get_mkldnn_enabled", "_nn"):
        assert hasattr(torch._C, name)
