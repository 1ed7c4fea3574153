"""Layers that are read, beside what else one does with a model: it is as with the stock layers.

One architecture for each kind of block; loss and all gradients are those of the stock model.
Under DDP and FSDP2: `test_ranks.py`; on kernels: `tests/backend/test_models_on_kernels.py`.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import pickle
import threading
import warnings

import models
import pytest
import torch
from test_sweep import FLOAT32, WIDE, built
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fused_remat import (
    FusedRematWarning,
    Policy,
    check_replay,
    conversion,
    convert,
    explain,
    memory_report,
    plan,
    set_policy,
)
from fused_remat.execution import observe
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.tracing.call import Trace
from fused_remat.tracing.layer import KNOWN, TracedLayer

#: Norms of branches; parallel branches; layer scale; partial rotation; packed projections; experts
#: and a scan that are replayed; cross attention; position bias; packed tokens; a modulation; a
#: window.
NAMES = [
    "olmo2", "cohere2", "dinov2", "gpt_neox", "phi3", "mixtral", "jamba", "whisper", "t5",
    "qwen2_vl", "dit", "swin",
]  # fmt: skip
TEXT = ["olmo2", "cohere2", "gpt_neox", "phi3", "mixtral", "jamba"]
BF16, FP32 = torch.bfloat16, torch.float32
QUIET = "no gradients are required"
every = pytest.mark.parametrize("name", NAMES)


def prepared(name: str) -> tuple[nn.Module, dict]:
    stock, batch = built(name)
    if name == "swin":  # its first call changes the sizes of its windows
        stock(**batch)
    return stock, batch


def pair(name: str, **options) -> tuple[nn.Module, nn.Module, dict]:
    stock, batch = prepared(name)
    return stock, convert(copy.deepcopy(stock), **options), batch


def within_dtype(batch: dict, dtype: torch.dtype) -> dict:
    floats = {k for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {k: v.to(dtype) if k in floats else v for k, v in batch.items()}


def layers_of(model: nn.Module) -> list[TracedLayer]:
    return [m for m in model.modules() if isinstance(m, TracedLayer)]


def result(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def step(model: nn.Module, batch: dict, passes: int = 1) -> dict[str, Tensor]:
    """The loss and the gradients of a step of several passes."""
    model.zero_grad(set_to_none=True)
    for _ in range(passes):
        loss = models.loss_of(model(**batch))
        loss.backward()
    return result(model, loss)


def step_with_output(model: nn.Module, batch: dict) -> dict[str, Tensor]:
    """As `step`, with the output in place of the loss, a sum of it that cancels: in 16 bits the
    error of that is a matter of luck."""
    found = step(model, batch)
    return {**found, "loss": models.main_output(model(**batch)).detach()}


def errors(found: dict, expected: dict) -> dict[str, float]:
    """Relative distances; of what is tiny, beside the largest."""
    zeros = found.keys() - expected.keys()  # of what a piece has and does not use
    assert not expected.keys() - found.keys() and not any(found[n].any() for n in zeros)
    largest = max(float(g.double().norm()) for n, g in expected.items() if n != "loss")
    distances = {}
    for name, value in expected.items():
        theirs, mine = value.double(), found[name].double()
        whole = float(theirs.norm()) + (1e-3 * largest if name != "loss" else 1.0)
        distances[name] = float((mine - theirs).norm()) / whole
    return distances


def assert_same(name: str, found: dict, expected: dict, tolerance: float = 0.0) -> None:
    """As in the sweep: rounding, of float32 where the model has some."""
    tolerance = tolerance or (3e-5 if name in FLOAT32 else WIDE)
    wrong = {n: e for n, e in errors(found, expected).items() if not e <= tolerance}
    assert not wrong, wrong


def assert_within(mine: dict, theirs: dict) -> None:
    """Errors of 16 bits at most twice the stock model's own, and a few roundings."""
    assert {n: (e, theirs[n]) for n, e in mine.items() if not e <= 2 * theirs[n] + 0.02} == {}


@pytest.fixture
def served():
    """Every call that wants gradients is a block's."""
    found: list[str] = []

    def note(layer: nn.Module, reason: str) -> None:
        if reason != QUIET:
            found.append(reason)

    observe.DECISIONS.append(note)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield
    observe.DECISIONS.remove(note)
    assert not found, found


@pytest.fixture
def unread():
    KNOWN.clear()


TARGETS = {
    "dinov2": ["query", "value", "fc1", "dense"], "dit": ["qkv", "proj", "mlp.0", "mlp.2"],
    "swin": ["query", "value", "fc1", "dense"], "mixtral": ["q_proj", "v_proj", "o_proj"],
    "qwen2_vl": ["qkv", "proj", "q_proj", "v_proj", "fc1", "down_proj"],
    "jamba": ["q_proj", "v_proj", "in_proj", "out_proj", "down_proj", "x_proj"],
}  # fmt: skip


def adapted(model: nn.Module, name: str, **more) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = TARGETS.get(name, "all-linear")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, target_modules=targets, **more
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("is_first", ["convert", "adapt"])
@every
@pytest.mark.composes("PEFT", "layers that are read: every state of adapters")
def test_lora(name, is_first, served):
    stock, fused, batch = pair(name)
    dtype = next(stock.parameters()).dtype
    if is_first == "convert":
        step(fused, batch)
        fused = adapted(fused, name).to(dtype)
    else:
        fused = convert(adapted(copy.deepcopy(stock), name).to(dtype))
    stock = adapted(stock, name).to(dtype)

    def check():
        assert_same(name, step(fused, batch), step(stock, batch))

    check()
    for model in (stock, fused):
        model.requires_grad_(True)
    check()
    with stock.disable_adapter(), fused.disable_adapter():
        for model in (stock, fused):
            model.requires_grad_(True)
        check()
    for model in (stock, fused):
        model.base_model.merge_adapter()
    check()
    for model in (stock, fused):
        model.base_model.unmerge_adapter()
    stock, fused = (m.merge_and_unload().requires_grad_(True) for m in (stock, fused))
    check()


@pytest.mark.parametrize("name", ["olmo2", "jamba", "whisper", "dit"])
@pytest.mark.composes("PEFT", "layers that are read: DoRA")
def test_dora(name, unread, served):
    """Each adapted layer is one step, which keeps nothing; adapters without it are steps, too."""
    stock, batch = prepared(name)
    dtype = next(stock.parameters()).dtype
    stock = adapted(stock, name, use_dora=True).to(dtype)
    fused = convert(copy.deepcopy(stock))
    assert_same(name, step(fused, batch), step(stock, batch))
    nodes = [node for layer in layers_of(fused) for node in layer.last_trace.block.graph.nodes]
    updates = [update for node in nodes for update in getattr(node, "updates", ())]
    assert updates and all(update.magnitude for update in updates)
    count = sum(hasattr(m, "lora_magnitude_vector") for m in fused.modules())
    assert len(updates) == count or name == "jamba"  # whose scan is replayed with its layers
    with stock.disable_adapter(), fused.disable_adapter():
        for model in (stock, fused):
            model.requires_grad_(True)
        assert_same(name, step(fused, batch), step(stock, batch))


@pytest.mark.parametrize("name", ["cohere2", "mixtral", "jamba", "t5", "qwen2_vl", "dit"])
def test_float32_adapters_beside_bfloat16(name, unread, served):
    """The first batch is compared in the dtypes that the adapters have."""
    stock, batch = prepared(name)
    batch, stock = within_dtype(batch, BF16), stock.to(BF16)
    exact = adapted(copy.deepcopy(stock), name).float()
    fused = convert(adapted(copy.deepcopy(stock), name))
    stock = adapted(stock, name)
    assert {p.dtype for p in stock.parameters()} == {BF16, FP32}
    expected = step_with_output(exact, within_dtype(batch, FP32))
    mine, theirs = (step_with_output(model, batch) for model in (fused, stock))
    assert_within(errors(mine, expected), errors(theirs, expected))


def test_one_matrix_is_float32():
    """T5 keeps `wo` in float32 in a model of 16 bits, and converts what it reads."""
    stock, batch = prepared("t5")
    stock.to(BF16)
    for name, module in stock.named_modules():
        if name.endswith("DenseReluDense.wo"):
            module.float()
    fused = convert(copy.deepcopy(stock))
    with pytest.warns(FusedRematWarning, match="cannot run where the layer can"):
        step(fused, batch)  # whose arguments are copies: gradients are summed in another order
    assert_same("t5", step(fused, batch), step(stock, batch))


@pytest.mark.parametrize("which", ["norms", "matrices", "biases", "first", "last"])
@every
def test_frozen_parameters(name, which, served):
    stock, fused, batch = pair(name)
    layers = [n for n, m in fused.named_modules() if isinstance(m, FusedLayer)]
    wanted = {
        "norms": lambda n, p: p.dim() == 1 and "bias" not in n,
        "matrices": lambda n, p: p.dim() > 1,
        "biases": lambda n, p: "bias" in n,
        "first": lambda n, p: n.startswith(layers[0]),
        "last": lambda n, p: n.startswith(layers[-1]),
    }[which]
    for model in (stock, fused):
        for n, p in model.named_parameters():
            p.requires_grad_(wanted(n, p))
    if any(p.requires_grad for p in stock.parameters()):
        assert_same(name, step(fused, batch), step(stock, batch))


@pytest.fixture
def replicate(monkeypatch):
    """`nn.DataParallel`'s replicas, on CPUs: a copy in place of a broadcast."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    copies = "_broadcast_coalesced_reshape"
    monkeypatch.setattr(
        module, copies, lambda ts, to, *_, **__: [[t.clone() for t in ts] for _ in to]
    )
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    return lambda model: module.replicate(model, [0, 1])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "qwen2_vl"])  # it needs a Parameter
def test_replicas_have_plain_tensors_for_parameters(name, replicate, served, unread):
    """Frozen ones too; what was compared once is not compared again in each step."""
    KNOWN.clear()
    stock, fused, batch = pair(name)
    for model in (stock, fused):
        [p for p in model.parameters() if p.dim() > 1][-1].requires_grad_(False)
    expected, layers, traces = step(stock, batch), layers_of(fused), []
    for _ in range(2):
        fused.zero_grad(set_to_none=True)
        loss = models.loss_of(replicate(fused)[0](**batch))
        loss.backward()
        found = {n: p.grad for n, p in fused.named_parameters() if p.grad is not None}
        assert_same(name, {"loss": loss.detach(), **found}, expected)
        known = [trace for entries in KNOWN.values() for *_, trace in entries]
        assert all(len(trace.compared) == 2 for trace in known if isinstance(trace, Trace))
        traces.append([layer._notes_of().traces for layer in layers])
    assert any(traces[0]) and traces[0] == traces[1]


@pytest.mark.parametrize("name", TEXT)
def test_packed_and_padded(name, served):
    stock, fused, batch = pair(name)
    n = batch["input_ids"].shape[1]
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 9:] = 0
    calls = [{**batch, "attention_mask": mask}, batch]
    for ends in ([0, 5, n], [0, 3, 8, n]):
        places = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
        calls.append({**batch, "input_ids": batch["input_ids"][:1], "position_ids": places})
    for given in calls:
        assert_same(name, step(fused, given), step(stock, given))


@pytest.mark.parametrize("name", ["olmo2", "dit", "t5"])
@pytest.mark.composes("torch.compile", "layers that are read", limits="each is a graph break")
def test_compiled(name, unread):
    stock, fused, batch = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager")
    for _ in range(2):
        found = step(compiled, batch)
        found = {n.removeprefix("_orig_mod."): g for n, g in found.items()}
        assert_same(name, found, step(stock, batch))
    assert all(kind.state == "converted" for kind in conversion(fused))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(fused, backend="aot_eager", fullgraph=True)(**batch)


@pytest.mark.parametrize("name", ["olmo2", "dit", "whisper"])
@pytest.mark.composes("torch.export", "layers that are read: their own forward")
def test_export(name):
    stock, fused, batch = pair(name)
    expected = models.main_output(stock(**batch))
    for _ in range(2):
        program = torch.export.export(fused, (), batch, strict=False)
        found = models.main_output(program.module()(**batch))
        torch.testing.assert_close(found, expected)
        step(fused, batch)


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "dit"])
def test_transforms(name):
    stock, fused, batch = pair(name)
    expected = step(stock, batch)
    for _ in range(2):
        params = dict(fused.named_parameters())

        def loss(params):
            return models.loss_of(torch.func.functional_call(fused, params, (), batch))

        grads = torch.func.grad(loss)(params)
        found = {"loss": expected["loss"], **{n: grads[n] for n in expected if n != "loss"}}
        assert_same(name, found, expected)
        step(fused, batch)
    if name == "dit":
        x, c = (torch.stack([t, 2 * t]) for t in batch.values())
        torch.testing.assert_close(torch.vmap(fused)(x, c), torch.vmap(stock)(x, c))


def test_fake_tensors_leave_no_reading(unread):
    stock, batch = prepared("dit")
    stock, batch = stock.float(), within_dtype(batch, FP32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = convert(copy.deepcopy(stock))
        with pytest.warns(FusedRematWarning, match="FakeTensor"):
            model(**{k: mode.from_tensor(v) for k, v in batch.items()}).sum().backward()
    fused = convert(copy.deepcopy(stock))
    assert_same("dit", step(fused, batch), step(stock, batch))
    assert all(kind.state == "converted" for kind in conversion(fused))


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
@every
def test_16_bits(name, how, served):
    stock, batch = prepared(name)
    stock, batch = stock.to(BF16).float(), within_dtype(within_dtype(batch, BF16), FP32)
    expected, context = step(stock, batch), contextlib.nullcontext()
    if how == "autocast":
        context = torch.autocast("cpu", BF16)
    else:
        stock, batch = stock.to(BF16), within_dtype(batch, BF16)
    fused = convert(copy.deepcopy(stock))
    with context:
        theirs, mine = step(stock, batch), step(fused, batch)
        fused.zero_grad()
        loss = models.loss_of(fused(**batch))
    assert mine["loss"].dtype == theirs["loss"].dtype
    assert_within(errors(mine, expected), errors(theirs, expected))
    loss.backward()  # outside of autocast
    assert_within(errors(result(fused, loss), expected), errors(theirs, expected))


READ_BEFORE = {"jamba", "t5", "dit", "swin"}


@pytest.mark.parametrize("target", ["grad", "main_grad"])
@every
def test_accumulates(name, target, served):
    """Also what a block does not read itself: a modulation, a position bias, experts' matrices."""
    stock, fused, batch = pair(name, accumulate_into=target)
    expected = step(stock, batch, 2)
    for p in fused.parameters():
        p.main_grad = torch.zeros_like(p)
    if target == "main_grad" and name in READ_BEFORE:
        with pytest.raises(RuntimeError, match="is read before the block, under autograd"):
            step(fused, batch)
        return
    found = step(fused, batch, 2)
    for n, p in fused.named_parameters():
        if target == "main_grad" and n in expected:
            found[n] = found.get(n, 0) + p.main_grad
    assert_same(name, found, expected)


@every
def test_policies(name, served):
    """Set before the first call or after it; of names, with offload; in a segment."""
    stock, fused, batch = pair(name)
    expected = step(stock, batch)
    for policy in ("full", "lean", "balanced", "fast", "none"):
        fresh = convert(copy.deepcopy(stock), policy=policy)
        for model in (fresh, set_policy(fused, "*", policy)):
            assert_same(name, step(model, batch), expected)
    for layer in layers_of(fused):
        names = [n for n in layer.last_trace.graph.names if n != "output"]
        layer.policy = Policy(save=names, offload={names[0], "input"})
    assert_same(name, step(fused, batch), expected)
    for model in (fused, convert(copy.deepcopy(stock), policy=Policy(save={"nonsense"}))):
        with pytest.raises(ValueError, match="nonsense"):
            set_policy(model, "*", Policy(save={"nonsense"}))
            step(model, batch)


@pytest.mark.parametrize("name", ["olmo2", "mixtral", "jamba", "dit"])
def test_segments(name, served):
    """A block's result is known as such to the next one: no warning."""
    stock, fused, batch = pair(name)
    for place, layer in zip(("first", "inner"), layers_of(fused), strict=True):
        layer.policy = Policy(segment=place)
    for _ in range(2):
        assert_same(name, step(fused, batch), step(stock, batch))


@pytest.mark.parametrize("name", ["olmo2", "jamba", "whisper", "dit", "swin"])
def test_plan(name):
    stock, fused, batch = pair(name)
    expected = step(stock, batch)
    for model, budget in ((stock, 0.4), (fused, 0.9)):
        made = plan(model, costs="analytic", loss=models.loss_of, budget=budget, **batch)
        assert len(made.policies) == len(layers_of(fused))
        assert_same(name, step(made.apply(copy.deepcopy(model)), batch), expected)


@every
def test_passes(name, served):
    """Accumulated; a graph that is kept, twice; two graphs at a time; no double backward."""
    stock, fused, batch = pair(name)
    assert_same(name, step(fused, batch, 2), step(stock, batch, 2))
    found = []
    for model in (stock, fused):
        model.zero_grad()
        first, second = (models.loss_of(model(**batch)) for _ in range(2))
        (2 * second).backward(retain_graph=True)
        first.backward()
        second.backward()
        found.append(result(model, first))
    assert_same(name, found[1], found[0])
    params = [p for layer in layers_of(fused) for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        models.loss_of(fused(**batch)), params, create_graph=True, allow_unused=True
    )
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        sum(g.square().sum() for g in grads if g is not None).backward()


def _keep_products(_context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products),
    },
}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, way: dict):
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, *args, **kwargs):
        return checkpoint(lambda *a: self.inner(*a, **kwargs), *args, **self.way)

    def __getattr__(self, name: str):
        own = super().__getattr__
        return own(name) if name in ("inner", "way") else getattr(own("inner"), name)


@pytest.mark.parametrize("way", WAYS)
@every
@pytest.mark.composes("Outer checkpointing", "layers that are read, inside it for the first time")
def test_checkpointed(name, way, unread, served):
    stock, fused, batch = pair(name)
    if name == "dit":  # as a reentrant checkpoint needs
        batch["x"].requires_grad_()
    for parent in [*fused.modules()]:
        for key, child in [*parent.named_children()]:
            if isinstance(child, FusedLayer):
                setattr(parent, key, Checkpointed(child, WAYS[way]))
    for _ in range(2):
        found = {n.replace(".inner.", "."): g for n, g in step(fused, batch).items()}
        assert_same(name, found, step(stock, batch))


@every
def test_without_gradients(name):
    stock, fused, batch = pair(name)
    for _ in range(2):
        for context, train in itertools.product((torch.no_grad, torch.inference_mode), (1, 0)):
            with context():
                a, b = (models.main_output(m.train(bool(train))(**batch)) for m in (stock, fused))
            assert torch.equal(a, b)
        step(fused.train(), batch)
    assert_same(name, step(fused.eval(), batch), step(stock.eval(), batch))


@pytest.mark.parametrize("name", ["olmo2", "jamba", "whisper", "t5", "dit"])
def test_reports(name, unread):
    """What runs while a layer is traced is no part of them."""
    _, fused, batch = pair(name)
    assert len(explain(fused, **batch)) == len(layers_of(fused))
    KNOWN.clear()
    reports = [memory_report(fused, loss=models.loss_of, **batch) for _ in range(2)]
    first, again = (
        [(row.kept_bytes, row.predicted_bytes) for row in report.layers if row.policy]
        for report in reports
    )
    assert first == again and len(first) == len(layers_of(fused))


@every
def test_replay_check(name, served):
    stock, fused, batch = pair(name, policy="balanced")
    expected = step(stock, batch)
    with check_replay():
        assert_same(name, step(fused, batch), expected)


@every
def test_copied_pickled_and_loaded(name, served, tmp_path):
    stock, fused, batch = pair(name)
    expected, found = step(stock, batch), []
    for is_read in (False, True):
        if is_read:
            step(fused, batch)
        state = fused.state_dict()
        assert [*state] == [*stock.state_dict()]
        other = prepared(name)[0]
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
        step(convert(other), batch)
        other.load_state_dict(state)
        torch.save(fused, tmp_path / "whole")
        whole = torch.load(tmp_path / "whole", weights_only=False)
        found += [other, whole, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    for model in found:
        assert_same(name, step(model, batch), expected)


@pytest.mark.parametrize("name", ["olmo2", "mixtral", "dit"])
def test_converted_on_the_meta_device(name, served):
    stock, batch = prepared(name)
    with torch.device("meta"):
        made = models.MODELS[name].make().to(next(stock.parameters()).dtype).train()
    fused = convert(made).to_empty(device="cpu")
    fused.load_state_dict(stock.state_dict())
    modules = dict(fused.named_modules())
    for path, module in stock.named_modules():  # tables that are in no state dict
        modules[path]._buffers.update({n: b.clone() for n, b in module._buffers.items()})
        own = {n: v for n, v in vars(module).items() if isinstance(v, Tensor)}
        modules[path].__dict__.update(own)
    assert_same(name, step(fused, batch), step(stock, batch))


@pytest.mark.parametrize("name", ["olmo2", "mixtral", "dinov2", "t5"])
@pytest.mark.composes("Concurrency and faults", "layers that are read, by two threads at a time")
def test_threads(name, served, one_thread):
    """Threads that train one model, which both read."""
    stock, fused, batch = pair(name)
    expected, found, wrong = step(stock, batch), [], []
    named = {n: p for n, p in fused.named_parameters() if p.requires_grad}

    def run():
        try:
            for _ in range(2):
                loss = models.loss_of(fused(**batch))
                grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
                grads = {n: g for n, g in zip(named, grads, strict=True) if g is not None}
                found.append({"loss": loss.detach(), **grads})
        except BaseException as error:
            wrong.append(error)

    KNOWN.clear()
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(found) == 4, wrong
    for mine in found:
        assert_same(name, mine, expected)
