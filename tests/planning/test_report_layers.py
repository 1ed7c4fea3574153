"""`memory_report`: which models and inputs it takes, which layers it lists, how it shows them."""

import dataclasses
import json

import pytest
import torch
from report_models import TOKENS, D, H, LanguageModel, Model, data, encoder, ids, saved_bytes
from torch import nn

from fused_remat import MemoryReport, Policy, convert, memory_report

# Models, inputs and outputs


@dataclasses.dataclass
class Plain:
    last: torch.Tensor
    count: int = 3


OUTPUTS = {
    "tuple": lambda y: (y, None, "text"),
    "nested": lambda y: [{"a": (y, 3)}],
    "model output": lambda y: pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(
        y, (y, y)
    ),
    "dataclass": Plain,
    "named tuple": lambda y: torch.return_types.max((y, y.long())),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind):
    def forward(self, x, *, flag):
        assert flag
        return OUTPUTS[kind](self.layers[0](x))

    layer, *_ = memory_report(Model(forward, layers=encoder(1).layers), data(), flag=True).layers
    assert layer.backward_peak > 0 and layer.kept_bytes > 0
    assert "saved" not in {a.name for a in layer.activations}


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (Model(lambda self, x: {"class": x.argmax(-1)}), TypeError,
         "returned dict without a floating-point tensor"),
        (lambda x: x, TypeError, r"takes a torch\.nn\.Module, got function"),
        (nn.LazyLinear(3), ValueError, "lazy parameters"),
    ],
)  # fmt: skip
def test_what_has_no_report(model, error, match):
    with pytest.raises(error, match=match):
        memory_report(model, data())


def test_keyword_inputs():
    model, x = LanguageModel(1), ids()
    scale = torch.full((D,), 2.0, requires_grad=True)
    report = memory_report(model, ids=x, scale=scale)
    other = report.layers[-1]
    assert scale.grad is None
    assert [a.is_input for a in other.activations if a.bytes == scale.nbytes] == [True]


def test_intermediate_results_as_inputs():
    leaf = data(requires_grad=True)
    x = leaf.exp()
    calls = []
    x.register_hook(calls.append)
    assert memory_report(encoder(1), x).kept_bytes > 0 and not calls
    x.sum().backward()  # its graph is still there
    assert leaf.grad is not None and len(calls) == 1


# Which layers


def names(model, *args, **options):
    return [layer.name for layer in memory_report(model, *args, **options).layers]


def test_default_layers():
    decoder = nn.TransformerDecoderLayer(D, H, 4 * D, batch_first=True)
    stack = nn.TransformerDecoder(decoder, 2)
    transformer = nn.Transformer(D, H, 1, 0, 4 * D, custom_decoder=stack, batch_first=True)
    decoders = ["decoder.layers.0", "decoder.layers.1"]
    assert names(transformer, data(), data()) == ["encoder.layers.0", *decoders, "(other)"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, 1))
    assert names(nested, data()) == ["0", "1"]
    assert names(nn.Bilinear(D, D, 2), data(), data()) == ["(model)"]
    attention = nn.MultiheadAttention(D, H, batch_first=True)
    assert names(attention, data(), data(), data())[0] == "out_proj"  # its only child, not called


class Mlp(nn.Sequential):
    def forward(self, x):  # its own: that of torch.nn is not compiled in place
        return self[1](self[0](x))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["wrapped", "inner", "in place"])
def test_what_is_compiled_is_one_layer(how):
    mlp = Mlp(nn.Linear(D, D), nn.Tanh())
    if how == "in place":
        mlp.compile(backend="aot_eager")
    compiled = mlp if how == "in place" else torch.compile(mlp, backend="aot_eager")
    model = compiled if how == "wrapped" else nn.Sequential(compiled, nn.ReLU())
    name = "(model)" if how == "wrapped" else "0"
    call = mlp._compiled_call_impl
    for _ in range(2):  # compiling, and compiled
        report = memory_report(model, data())
        assert report.kept_bytes == saved_bytes(model, data())
        first = report.layers[0]
        assert (first.name, first.calls) == (name, 1)
        assert first.kept_bytes >= 2 * TOKENS * D * 4 and first.backward_peak > 0
    assert mlp._compiled_call_impl is call
    with pytest.raises(ValueError, match="a compiled module, which does not call its submodules"):
        memory_report(model, data(), layers=["0.1" if how == "in place" else "*_orig_mod.1"])


def test_jagged_tensors():
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh()), data()
    jagged = torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)
    report = memory_report(model, jagged)
    assert MemoryReport.from_json(report.to_json()) == report
    assert report.kept_bytes > memory_report(model, x).kept_bytes  # its offsets, too


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (["layers.[02]"], ["layers.0", "layers.2", "(other)"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        ("layers.1", ["layers.1", "(other)"]),
        (["layers.0.linear1", "layers.0.norm2"],
         ["layers.0.linear1", "layers.0.norm2", "(other)"]),
        ([""], ["(model)"]),
        ([], ["(other)"]),
    ],
)  # fmt: skip
def test_patterns(layers, found):
    assert names(encoder(3), data(), layers=layers) == found


def test_patterns_that_match_nothing_to_report():
    model = encoder(3)
    with pytest.raises(ValueError, match=r"no module matches 'blocks\.\*'; modules: 'layers', "):
        names(model, data(), layers=["blocks.*"])
    with pytest.raises(ValueError, match=r"inside 'layers\.0', a fused layer"):
        names(convert(model), data(), layers=["layers.0.linear1"])


# As a table and as JSON


def test_table():
    text = str(memory_report(convert(encoder(12), "lean"), data()))
    lines = text.splitlines()
    assert lines[0] == "TransformerEncoder" and lines[1].split("  ")[-1] == "backward peak"
    assert "layers.1 … layers.11 (11×) FusedRematLayer lean" in text
    assert any(line.startswith("  attn 120×32 float32 ") for line in lines)
    assert "* passed to the model" in text
    assert max(map(len, lines)) <= 120
    assert len({line.rindex("B") for line in lines[2:5] if "input" in line}) == 1
    brief = memory_report(encoder(12), data()).table(activations=False)
    assert len(brief.splitlines()) <= 6 and "Backward0" not in brief


def test_json_round_trip(tmp_path):
    report = memory_report(convert(LanguageModel(), Policy(save={"attn", "qkv"})), ids())
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text + "\n"
    assert MemoryReport.from_json(text) == report
    given = json.loads(text)
    assert given["kept_bytes"] == report.kept_bytes
    assert given["layers"][0]["policy"] == "{attn, qkv}"
    assert given["layers"][0]["activations"][0]["name"] == "input"
