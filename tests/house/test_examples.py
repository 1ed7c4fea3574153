"""Scripts of examples/, run as a user runs them, at their smallest sizes."""

import json
import math
import re
from itertools import pairwise

import pytest
from processes import ROOT, printed

from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.units import bytes_of

EXAMPLES = ROOT / "examples"
FEWEST_BYTES_FIRST = ("full", "lean", "balanced", "fast", "none", "eager")


def found_by(folder, script, options):
    """What a script writes in a folder, and what it prints."""
    text = printed(EXAMPLES / script, *options.split(), cwd=folder)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), text


def test_the_demo(tmp_path):
    options = "--quick --out demo.png --json demo.json"
    results, text = found_by(tmp_path, "train_byte_lm.py", options)
    ways, steps = results["ways"], results["sizes"]["steps"]
    assert list(ways) == ["eager", "checkpoint", *EXACT_PRESETS]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for way, row in ways.items():
        assert f"\n{way} " in text
        assert len(row["losses"]) == steps
        assert all(map(math.isfinite, (*row["losses"], row["final_loss"], row["validation_loss"])))
    full, eager = ways["full"], ways["eager"]
    for preset in EXACT_PRESETS:
        assert all(ways[preset][what] == full[what] for what in ("losses", "validation_loss"))
    assert results["presets_bit_identical"]
    # Other dropout bits, same weights and data: 0.02 nats is ten times what is seen.
    for loss in ("final_loss", "validation_loss"):
        assert abs(full[loss] - eager[loss]) < 0.02
    kept = [ways[way]["kept_bytes_per_token_per_layer"] for way in FEWEST_BYTES_FIRST]
    assert all(fewer < more for fewer, more in pairwise(kept)), kept


_WAY = re.compile(r"^(\w+): layers keep (\S+ \S+), .*; peak (\S+ \S+); losses (.+)$", re.MULTILINE)


@pytest.mark.composes("Hugging Face", "`Trainer` with `FusedRematCallback`: LoRA and QLoRA")
@pytest.mark.parametrize(
    "script", ["trainer.py --lora --loss", "finetune_qlora.py", "finetune_mixture.py --loss"]
)
def test_fine_tuning_has_the_losses_of_checkpointing_and_no_higher_peak(script, tmp_path):
    name, *options = script.split()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    more = ["--steps", "3", "--batch", "2", "--seq-len", "64", "--text", "text.txt"]
    text = printed(EXAMPLES / name, *options, *more, cwd=tmp_path)
    ways = {way: found for way, *found in _WAY.findall(text)}
    (kept, peak, losses), (own_kept, own_peak, own_losses) = (
        ways["FusedRemat"],
        ways["checkpointing"],
    )
    # What the optimizer makes of other roundings in float32, in four decimals.
    own = [float(loss) for loss in own_losses.split()]
    assert [float(loss) for loss in losses.split()] == pytest.approx(own, abs=3e-4)
    assert len(own) == 3
    assert bytes_of(peak) <= bytes_of(own_peak)
    # Statistics of norms and of attention are kept as well.
    assert bytes_of(kept) <= 1.2 * bytes_of(own_kept)


@pytest.mark.composes("Hugging Face", "TRL: GRPO, with `integrations.trl` and converted layers")
def test_grpo_logs_what_it_logs_without_fused_remat(tmp_path):
    pytest.importorskip("trl")
    found, text = found_by(tmp_path, "grpo.py", "--compare --steps 2 --length 6 --json found.json")
    assert "2 × LlamaDecoderLayer: 4 fused training calls" in text
    for ours, theirs in zip(found["fused"], found["stock"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward", "completions/mean_length"):
            # Of float32, after a step of Adam.
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
