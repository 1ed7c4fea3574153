"""PyTorch's own checks of this layer: its `ModuleInfo`, with our class in it.

The samples are PyTorch's (`torch.testing._internal.common_modules`); the checks do what its
`test/test_modules.py` does with them. Each runs on the stock layer first: what that passes, ours
must pass.
"""

import copy
import io
import itertools
import pickle
import sys
import types
import unittest

import pytest
import torch
from accuracy import assert_bits
from tiers import exhaustive
from torch import nn

from fused_remat import FusedRematLayer

CHECKS = {}


def check(f):
    CHECKS[f.__name__] = f
    return f


@pytest.fixture(scope="module")
def infos():
    """PyTorch's `ModuleInfo` of the stock layer, and its clone for ours."""
    missing = "expecttest" not in sys.modules and "expecttest"
    try:
        import expecttest  # noqa: F401
    except ImportError:  # not in the wheel; only the base class of a class that we do not use
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    flag = "__allow_nonbracketed_mutation_flag"
    before = getattr(torch.backends, flag)
    try:
        from torch.testing._internal.common_modules import module_db
    finally:
        setattr(torch.backends, flag, before)  # the import forbids setting backend flags
        if missing:
            sys.modules.pop(missing)
    stock = next(m for m in module_db if m.module_cls is nn.TransformerEncoderLayer)
    fused = copy.copy(stock)
    fused.module_cls = FusedRematLayer
    return stock, fused


class Sample:
    """One of PyTorch's samples: a constructor call, a forward call, sometimes a reference."""

    def __init__(self, info, sample, dtype, training):
        self.cls, self.dtype, self.training = info.module_cls, dtype, training
        self.init, self.call, self.reference = (
            sample.constructor_input, sample.forward_input, sample.reference_fn
        )  # fmt: skip

    def module(self, **kwargs):
        torch.manual_seed(0)
        layer = self.cls(*self.init.args, **self.init.kwargs, **kwargs)
        return layer.to(self.dtype).train(self.training)

    def tensors(self):
        return [t for t in (*self.call.args, *self.call.kwargs.values()) if torch.is_tensor(t)]


def samples(info, dtype, training, requires_grad=False):
    torch.manual_seed(0)
    found = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training
    )
    assert len(found) >= 30
    return [Sample(info, sample, dtype, training) for sample in found]


def outputs_and_grads(layer, args, kwargs):
    leaves = [t for t in args if torch.is_tensor(t) and t.requires_grad]
    y = layer(*args, **kwargs)
    return [y, *torch.autograd.grad(y.square().sum(), [*leaves, *layer.parameters()])]


def assert_close(got, expected):
    # float32: two orders of summation, through squares
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@check
def forward(sample):
    layer = sample.module()
    with torch.random.fork_rng():
        out = layer(*sample.call.args, **sample.call.kwargs)
    if sample.reference is not None:
        assert_close(out, sample.reference(layer, *sample.call.args, **sample.call.kwargs))


@check
def factory_kwargs(sample):
    for dtype, device in itertools.product((torch.float64, torch.float32), ("cpu", "meta")):
        layer = sample.cls(*sample.init.args, **sample.init.kwargs, device=device, dtype=dtype)
        for p in layer.parameters():
            assert p.dtype == dtype and p.device.type == device


@check
def device_context(sample):
    with torch.device("meta"):
        layer = sample.cls(*sample.init.args, **sample.init.kwargs)
    assert all(p.is_meta for p in layer.parameters())


@check
def shown_and_pickled(sample):
    layer = sample.module()
    assert "linear1" in repr(layer) and "linear2" in str(layer)
    out = layer(*sample.call.args, **sample.call.kwargs)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for again in (loaded, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert again.training == layer.training and repr(again) == repr(layer)
        assert torch.equal(again(*sample.call.args, **sample.call.kwargs), out)


@check
def moved(sample):
    """`to` in place, by new tensors, and with `torch.__future__` flags."""
    layer = sample.module()
    other = torch.float32 if sample.dtype == torch.float64 else torch.float64
    for swap, overwrite in itertools.product((False, True), repeat=2):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        try:
            for dtype in (other, sample.dtype):
                assert layer.to(dtype) is layer
                assert all(p.dtype == dtype for p in layer.parameters())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        layer(*sample.call.args, **sample.call.kwargs)
    for convert, dtype in ((layer.double, torch.float64), (layer.bfloat16, torch.bfloat16)):
        assert all(p.dtype == dtype for p in convert().parameters())


@check
def emptied(sample):
    """meta -> to_empty -> load_state_dict gives the same layer."""
    layer = sample.module()
    empty = sample.cls(*sample.init.args, **sample.init.kwargs, device="meta")
    empty = empty.to(sample.dtype).to_empty(device="cpu").train(sample.training)
    empty.load_state_dict(layer.state_dict())
    args, kwargs = sample.call.args, sample.call.kwargs
    assert torch.equal(empty(*args, **kwargs), layer(*args, **kwargs))


@check
def shared(sample):
    layer = sample.module().share_memory()
    assert all(p.is_shared() for p in layer.parameters())
    layer(*sample.call.args, **sample.call.kwargs)


@check
def inputs_are_not_changed(sample):
    before = [t.detach().clone() for t in sample.tensors()]
    sample.module()(*sample.call.args, **sample.call.kwargs)
    assert_bits(sample.tensors(), before)


@check
def grads_fill_and_stay_none(sample):
    layer = sample.module()
    layer.linear1.requires_grad_(False)
    layer(*sample.call.args, **sample.call.kwargs).sum().backward()
    assert all((p.grad is None) == n.startswith("linear1") for n, p in layer.named_parameters())
    layer.zero_grad()
    assert all(p.grad is None for p in layer.parameters())


def strided(t):
    """The same values with a gap after every element."""
    if not torch.is_tensor(t) or t.dim() == 0:
        return t
    wide = torch.empty((*t.shape, 2), dtype=t.dtype)
    wide[..., 0] = t.detach()
    return wide[..., 0].requires_grad_(t.requires_grad)


@check
def non_contiguous(sample):
    """Inputs, parameters and output gradients in any strides give the same values."""
    layer = sample.module()
    x, *rest = (t.detach().requires_grad_() for t in sample.call.args)
    kwargs = sample.call.kwargs
    expected = outputs_and_grads(layer, (x, *rest), kwargs)
    odd = {name: strided(t) for name, t in kwargs.items()}
    given = strided(x)
    assert not given.is_contiguous()
    assert_close(outputs_and_grads(layer, (given, *rest), odd), expected)
    for p in layer.parameters():
        p.data = strided(p)
    assert_close(outputs_and_grads(layer, (x, *rest), kwargs), expected)
    assert_close(outputs_and_grads(layer, (given, *rest), odd), expected)
    y = layer(x, **kwargs)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, x, strided(dy), retain_graph=True)
    assert_close(got, torch.autograd.grad(y, x, dy))


@check
def deterministic_in_both_modes(sample):
    """No dropout in the samples: train and eval agree, and repeat themselves."""
    layer = sample.module()
    args, kwargs = sample.call.args, sample.call.kwargs
    out = layer(*args, **kwargs)
    assert torch.equal(layer(*args, **kwargs), out)
    assert_close(layer.train(not sample.training)(*args, **kwargs), out)


#: In both dtypes of the info and both modes; `make test` has the rest of the checks in one.
EVERY = list(itertools.product((torch.float32, torch.float64), (True, False)))
ONCE = {name: [(torch.float32, True)] for name in CHECKS} | {
    "forward": EVERY,
    "non_contiguous": [(torch.float32, True), (torch.float64, False)],
    "moved": [(torch.float32, True), (torch.float64, False)],
    "inputs_are_not_changed": [(torch.float32, True), (torch.float32, False)],
    "shown_and_pickled": [(torch.float32, False)],  # not the mode of a new module
}
CASES = [
    (name, *case) if case in ONCE[name] else exhaustive(name, *case)
    for name in CHECKS
    for case in EVERY
]


@pytest.mark.parametrize(("name", "dtype", "training"), CASES, ids=str)
def test_pytorchs_samples(infos, name, dtype, training):
    for info in infos:
        for sample in samples(info, dtype, training):
            CHECKS[name](sample)


@pytest.mark.parametrize("training", [True, exhaustive(False)], ids=["train", "eval"])
def test_gradients_of_pytorchs_samples(infos, training):
    for sample in samples(infos[1], torch.float64, training):
        layer = sample.module()
        names = [name for name, _ in layer.named_parameters()]
        x = sample.call.args[0].detach().requires_grad_()

        def f(x, *params, layer=layer, names=names, kwargs=sample.call.kwargs):
            params = dict(zip(names, params, strict=True))
            return torch.func.functional_call(layer, params, (x,), kwargs)

        params = [p.detach().requires_grad_() for p in layer.parameters()]
        assert torch.autograd.gradcheck(f, (x, *params), fast_mode=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_same_numbers_on_every_sample(infos, training):
    for stock, fused in zip(*(samples(i, torch.float64, training) for i in infos), strict=True):
        a, b = stock.module(), fused.module()
        x = stock.call.args[0].clone().requires_grad_()
        expected = outputs_and_grads(a, (x,), stock.call.kwargs)
        torch.testing.assert_close(outputs_and_grads(b, (x,), stock.call.kwargs), expected)
        with torch.no_grad():
            torch.testing.assert_close(b(x, **stock.call.kwargs), expected[0].detach())


def test_what_the_info_says_of_the_layer(infos):
    """Double backward is skipped for the stock layer on CPU, as it is for ours."""
    for info in infos:
        skips = [d for d in info.decorators if getattr(d, "test_name", "") == "test_gradgrad"]
        assert skips and info.train_and_eval_differ
        assert set(info.dtypes) >= {torch.float32, torch.float64}
