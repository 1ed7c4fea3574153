"""Advice on sequences from 8192 tokens on: where it appears, and where it would be wrong."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from fused_remat import FusedRematLayer, conversion, convert, memory_report, plan
from fused_remat.planner import Plan
from fused_remat.policies import ADVICE, LONG_SEQUENCE, Policy, advice
from fused_remat.report import MemoryReport

LONG = torch.zeros(1, LONG_SEQUENCE, 8)


def model(policy="full", layers=2, **options):
    options = {"norm_first": True, "batch_first": True, "dropout": 0.0} | options
    stack = [nn.TransformerEncoderLayer(8, 1, 8, **options) for _ in range(layers)]
    return convert(nn.Sequential(*stack), policy=policy)


def advised(net, x=LONG):
    net(x).sum().backward()
    return str(conversion(net))


def test_reports_of_long_sequences_recommend_lean(caplog):
    assert "8,192 tokens" in ADVICE and '"lean"' in ADVICE
    net = model(layers=1)
    with caplog.at_level(logging.INFO, "fused_remat"):
        assert ADVICE not in advised(net, LONG[:, 1:])
        assert advised(net).endswith(ADVICE)
        advised(net)
    assert [record.getMessage() for record in caplog.records] == [ADVICE], "once a model"
    report = memory_report(net, LONG)
    assert str(report).endswith(ADVICE) and MemoryReport.from_json(report.to_json()) == report
    for name in ("lean", Policy(save={"attn"})):
        for layer in net:
            layer.policy = name
        assert ADVICE not in advised(net) + str(memory_report(net, LONG))


def test_a_report_is_of_its_own_step():
    net = model()
    assert ADVICE in advised(net)
    assert ADVICE not in str(memory_report(net, LONG[:, 1:]))
    assert ADVICE in str(conversion(net)), "which the report does not change"


def test_sequences_first():
    net = model(layers=1, batch_first=False)
    assert ADVICE not in advised(net, LONG)  # 8192 sequences of one batch
    assert ADVICE in advised(net, LONG.transpose(0, 1))


def test_a_plan_recommends_what_its_budget_excludes():
    net = model()
    fastest = plan(net, LONG, costs="analytic", segments=False, options=["full", "lean"])
    tight = fastest.within(fastest.frontier[0].peak_bytes)
    assert {layer.label for layer in fastest.layers} == {"lean"}
    assert "full" in {layer.label for layer in tight.layers}
    assert ADVICE not in str(fastest) and str(tight).endswith(ADVICE)
    assert Plan.from_json(tight.to_json()).advice == ADVICE


def graph_of(norm_first=True, window=(-1, -1), cu_q=""):
    graph = FusedRematLayer(8, 1, 8, norm_first=norm_first)._example()
    nodes = [
        replace(node, cu_q=cu_q, spec=replace(node.spec, window=window))
        if node.role == "attention"
        else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("before, long", [(-1, True), (LONG_SEQUENCE, True), (4095, False)])
def test_a_short_window_is_no_long_sequence(before, long):
    graph = graph_of(window=(before, 0))
    assert advice("full", graph, LONG_SEQUENCE) == (ADVICE if long else "")


def test_where_lean_would_not_save_attention():
    assert not advice("full", graph_of(norm_first=False), LONG_SEQUENCE)
    assert not advice("full", graph_of(cu_q="cu_seqlens_q"), LONG_SEQUENCE)
