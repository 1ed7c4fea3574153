"""Models divided among ranks: heads, Hugging Face's, a 2-D mesh with FSDP2, and what is refused."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from reference import randomize
from tensor_parallel_steps import (
    CLOSE,
    B,
    D,
    H,
    S,
    causal,
    check,
    divided,
    encoder,
    given,
    mesh_of,
    options_of,
    stack,
    step,
    whole,
)
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

from fused_remat import FusedRematLayer, FusedRematWarning, convert, explain, ops
from fused_remat.parallel import (
    LayerParallel,
    VocabularyParallel,
    pack_attention,
    tensor_parallel_plan,
    unpack_attention,
)
from fused_remat.steps.collective import is_dtensor


@pytest.mark.composes("Tensor parallel", "vocabulary-parallel loss, and the head's logits")
@pytest.mark.parametrize("bias", [False, True])
@in_two_processes
def test_vocabulary(bias):
    torch.manual_seed(0)
    head = nn.Linear(D, 20, bias=bias, dtype=torch.float64)
    other = parallelize_module(copy.deepcopy(head), mesh_of(), VocabularyParallel())
    labels = torch.randint(0, 20, (B, S))
    labels[0, 0], labels[1, 2] = 3, 13
    for ignored in (-100, 3, 13):  # a class of either rank, too
        every = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.7}
        for options in ({}, every, {**every, "grad_in_forward": True}):
            losses, grads = [], []
            for m in (head, other):
                x = given(1).requires_grad_()
                m.zero_grad()
                loss = ops.linear_cross_entropy(
                    x, m.weight, labels, m.bias, ignore_index=ignored, **options
                )
                loss.backward()
                losses.append(loss.detach())
                grads.append([x.grad, *(whole(p.grad) for p in m.parameters())])
            assert_close(*losses, **CLOSE)
            assert_close(*grads, **CLOSE)
    results = []
    for m in (head, other):
        x = given(1).requires_grad_()
        m.zero_grad()
        options = {"bias": m.bias, "temperature": 0.7, "softcap": 3.0, "entropy": True}
        log_probs, entropy = ops.token_log_probs(x, m.weight, labels, **options)
        (log_probs.sum() + 0.3 * entropy.square().sum()).backward()
        results.append([log_probs, entropy, x.grad, *(whole(p.grad) for p in m.parameters())])
    assert_close(*results, **CLOSE)
    x, y = given(1).requires_grad_(), given(1).requires_grad_()
    head.zero_grad(), other.zero_grad()
    (head(x).sigmoid().sum() + other(y).sigmoid().sum()).backward()
    found = other(y), y.grad, whole(other.weight.grad)
    assert_close(found, (head(x), x.grad, head.weight.grad), **CLOSE)
    with pytest.raises(IndexError, match="20 is out of bounds"):
        ops.linear_cross_entropy(x, other.weight, labels.fill_(20), other.bias)


@pytest.mark.composes("Tensor parallel", "Hugging Face models, with `convert(loss=True)`")
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
@in_two_processes
def test_hugging_face(name):
    from hf_models import VOCAB, build

    for sequence in (False, True):
        tied, masked = sequence and name == "llama", name == "bert"
        differences = {} if masked else {"tie_word_embeddings": tied}
        model = convert(build(name, **differences), policy="lean", loss=not masked)
        other = copy.deepcopy(model)
        plan = tensor_parallel_plan(other, sequence=sequence)
        assert ("lm_head" in plan) != masked and VOCAB % 2 == 0
        parallelize_module(other, mesh_of(), plan)
        ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            losses = [m(input_ids=ids, labels=ids).loss for m in (model, other)]
        assert_close(*losses, rtol=1e-6, atol=1e-7)
        for loss in losses:
            loss.backward()
        grads = [{n: whole(p.grad) for n, p in m.named_parameters()} for m in (model, other)]
        # transformers' RMSNorm after the last layer is float32.
        assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.composes(
    "Tensor parallel",
    "with FSDP2, as a 2-D mesh; DCP; clip_grad_norm_ and AdamW over all of a model",
)
def test_with_fsdp(four_processes, tmp_path):
    four_processes.run(with_fsdp, str(tmp_path))


def with_fsdp(path):
    mesh = mesh_of(("data", "tensor"), (2, 2))
    for kind, policy, sequence in (
        ("causal", "lean", True), ("encoder post-norm", "fast", False),
    ):  # fmt: skip
        model = stack(kind, policy)
        other = copy.deepcopy(model)
        parallelize_module(other, mesh["tensor"], tensor_parallel_plan(other, sequence=sequence))
        for layer in other.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(other, mesh=mesh["data"])
        kwargs, x = options_of(kind, False), given()
        _, _, expected = step(model, x, **kwargs)
        part = x.chunk(2)[mesh["data"].get_local_rank()]
        half = part.clone().requires_grad_()
        dy = given(2, x.shape).chunk(2)[mesh["data"].get_local_rank()]
        with warnings.catch_warnings():  # of outputs that are views, say
            warnings.filterwarnings("error", message=r"FSDP2-wrapped module \(FSDPFused")
            (other(half, **kwargs) * dy).sum().backward()
        grads = {name: 2 * whole(p.grad) for name, p in other.named_parameters()}  # FSDP's mean
        assert_close(pack_attention(grads), expected, **CLOSE)
        norm = whole(nn.utils.clip_grad_norm_(other.parameters(), 0.5, foreach=True))
        alone = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert_close(2 * norm, alone, rtol=1e-5, atol=0)
        before = whole(other.after.weight).clone()
        torch.optim.AdamW(other.parameters(), foreach=True).step()
        assert not torch.equal(whole(other.after.weight), before)
        _saved_and_loaded(other, model, f"{path}/{kind}")


def _saved_and_loaded(other, model, path):
    """Through a distributed checkpoint into the same, and as a whole into the stock names."""
    dcp.save(get_model_state_dict(other), checkpoint_id=path)
    before = {name: whole(p).clone() for name, p in other.named_parameters()}
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    for name, p in other.named_parameters():
        assert torch.equal(whole(p), before[name])
    full = pack_attention(
        get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    )
    model.load_state_dict(full)
    packed = unpack_attention(full)
    set_model_state_dict(other, packed, options=StateDictOptions(full_state_dict=True))
    for name, p in other.named_parameters():
        assert torch.equal(whole(p), before[name])


class Around(nn.Module):
    """What models have around layers: parameters of their own, arguments by name, attention."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(S, D))
        self.norm = nn.LayerNorm(D)
        self.mix = nn.MultiheadAttention(D, 2, batch_first=True)
        self.layers = nn.ModuleList([encoder(dropout=0.0), encoder(dropout=0.0)])
        self.act = nn.PReLU()

    def forward(self, x):
        x = self.norm(input=x + self.place)
        x = x + self.mix(x, x, x)[0]
        for layer in self.layers:
            x = layer(x)
        return self.act(x).mul_(2.0)


@pytest.mark.composes("Tensor parallel", "what is around the layers: the same on every rank")
@in_two_processes
def test_around_the_layers():
    torch.manual_seed(dist.get_rank())  # the first rank's values are everybody's
    other = Around().double()
    torch.manual_seed(0)
    model = Around().double()
    parallelize_module(other, mesh_of(), tensor_parallel_plan(other, sequence=True))
    assert all(is_dtensor(p) for p in other.parameters())
    check(model, other, given())
    assert other(given()[:0]).shape == (0, S, D)


@pytest.mark.composes("Tensor parallel", "nn.TransformerEncoder, trained and evaluated, padded")
@in_two_processes
def test_transformer_encoder():
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(D, H, 12, 0.0, batch_first=True)
    model = convert(nn.TransformerEncoder(stock, 2, norm=nn.LayerNorm(D))).double()
    randomize(model)
    other = divided(model, sequence=True)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -2:] = True
    check(model, other, given(), src_key_padding_mask=padding)
    with torch.no_grad():
        outs = [m.eval()(given(), src_key_padding_mask=padding) for m in (model, other)]
    assert_close(outs[1][~padding], outs[0][~padding], **CLOSE)
    layer, x = causal(), given().float()  # by itself: whole in, whole out
    assert_close(divided(layer, sequence=True)(x), layer(x))


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)


@pytest.mark.composes("Tensor parallel", "what is not divided, and DTensors elsewhere: an error")
@in_two_processes
def test_errors():
    mesh, x, one = mesh_of(), torch.randn(B, S, D), functools.partial(encoder, dropout=0.0)
    whole = distribute_tensor(x, mesh, [Replicate()])

    def split(layer, **kwargs):
        return parallelize_module(layer, mesh, LayerParallel(**kwargs))

    def vocabulary(size):
        return parallelize_module(nn.Linear(D, size), mesh, VocabularyParallel())

    def plan_of(*layers):
        return tensor_parallel_plan(nn.Sequential(*layers), sequence=True)

    plain, head, a = split(one()), vocabulary(20), causal()
    unknown = split(one(activation=lambda t: t.relu() ** 2))
    alone = causal()
    for p in ("weight", "bias"):
        t = getattr(alone.up, p)
        setattr(alone.up, p, nn.Parameter(distribute_tensor(t.detach(), mesh, [Shard(0)])))
    three = nn.Sequential(causal(), causal(), causal())
    parallelize_module(three, mesh, tensor_parallel_plan(three, sequence=True))
    three(x)
    labels = torch.zeros(B, S).long()
    for error, message, call in (
        (TypeError, "takes a fused layer, got a Linear", lambda: split(nn.Linear(2, 2))),
        (ValueError, "Traced is traced; only layers with a table entry",
         lambda: split(convert(Traced()))),
        (ValueError, "3 heads cannot be divided evenly among 2",
         lambda: split(FusedRematLayer(6, 3, 12))),
        (ValueError, "accumulate_into='grad'",
         lambda: split(FusedRematLayer(D, H, 12, accumulate_into="grad"))),
        (ValueError, "divided among ranks already", lambda: split(plain)),
        (ValueError, "5 tokens of a sequence cannot be divided evenly",
         lambda: split(one(), sequence=True, split=True)(x[:, :5])),
        (RuntimeError, "takes this rank's local tensor, got a DTensor", lambda: plain(whole)),
        (RuntimeError, "is a DTensor of shape .* is not divided over ranks", lambda: one()(whole)),
        (AttributeError, "head='nohead'",
         lambda: tensor_parallel_plan(nn.Sequential(one()), head="nohead")),
        (RuntimeError, "may mix hidden units of different ranks", lambda: unknown(x)),
        (RuntimeError, "fc1.weight is a DTensor.*LayerParallel", lambda: alone(x)),
        (ValueError, "DTensor already", lambda: split(alone)),
        (ValueError, "weight and bias as DTensors",
         lambda: ops.linear_cross_entropy(x, head.weight, labels, torch.zeros(20))),
        (ValueError, "vocabulary of 21", lambda: vocabulary(21)),
        (ValueError, "the model has a repeated layer", lambda: plan_of(a, causal(), a)),
        (ValueError, "is a GRU, which cannot take DTensors",
         lambda: tensor_parallel_plan(nn.ModuleList([a, nn.GRU(D, D)]))),
        (RuntimeError, "got 6 tokens of a sequence, but the first layer of",
         lambda: three[2](three[1](x))),
        (ValueError, "1, a LayerNorm between fused layers",
         lambda: plan_of(causal(), nn.LayerNorm(D), causal())),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.composes(
    "Tensor parallel",
    "torch's context_parallel (ring attention)",
    limits="not in a block: layers run PyTorch's own forward inside it, with a warning; ops raise",
)
@in_two_processes
def test_context_parallel():
    from torch.distributed.tensor.experimental import context_parallel

    layer, x = encoder(dropout=0.0), torch.randn(B, S + 2, D)
    assert layer.why_not_fused(x) is None
    with context_parallel(mesh_of(), buffers=[x], buffer_seq_dims=[1]):
        assert "context_parallel" in layer.why_not_fused(x)
        heads = torch.randn(1, 2, 4, 8)
        with pytest.raises(RuntimeError, match="inside context_parallel"):
            ops.attention(heads, heads, heads)
    assert layer.why_not_fused(x) is None


@in_two_processes
def test_explain_names_the_collectives():
    layer = parallelize_module(
        encoder("lean", dropout=0.0), mesh_of(), LayerParallel(sequence=True)
    )
    shown = str(explain(layer, torch.randn(B, S // 2, D, requires_grad=True)))
    assert "all-gather" in shown and "reduce-scatter" in shown, shown
