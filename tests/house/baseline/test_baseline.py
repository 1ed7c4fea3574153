"""The layers compute, keep, call and compile what they did when `record.py` last ran."""

import drawn_layers
import pytest
from record import bits_file, interpreted, recorded, versions

LAYERS = recorded("layers.json")
DRAWN = {seed: row["drawn"] for seed, row in LAYERS.items()}
FRAMES = recorded("frames.json")
VERSIONS = FRAMES.pop("versions")
COMPILES = recorded("compiles.json")
MOST_FRAMES = {
    "forward": {"operation": 7, "launch": 9}, "backward": {"operation": 5, "launch": 6}
}  # fmt: skip


@pytest.fixture(scope="module")
def kept():
    return drawn_layers.kept(DRAWN)


@pytest.mark.parametrize("seed", LAYERS)
def test_a_drawn_layer_keeps_what_it_kept(seed, kept):
    assert kept[seed] == LAYERS[seed]["kept"], DRAWN[seed]


@pytest.fixture(scope="module")
def bits():
    if not (found := recorded(bits_file())):
        pytest.skip(
            f"no {bits_file()}: to compare the bits of a change on this CPU, check out the commit "
            "before it, run `python tests/house/baseline/record.py --bits`, and come back"
        )
    return found


@pytest.mark.parametrize("seed", LAYERS)
def test_a_drawn_layer_computes_the_same_bits(seed, bits):
    found = drawn_layers.bits(DRAWN[seed], int(seed))
    names = {**found, **bits[seed]}
    differ = [name for name in names if found.get(name) != bits[seed].get(name)]
    assert not differ, DRAWN[seed]


@pytest.fixture(scope="module")
def now():
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("transformers")
    return interpreted()


@pytest.mark.parametrize("name", FRAMES)
def test_few_frames_and_no_more_calls(name, now):
    """Frames between a layer and an operation or a launch; Python calls of a step."""
    for which, before in FRAMES[name].items():
        calls = {"calls": before["calls"]} if versions() == VERSIONS else {}
        found, most = now["frames"][name][which], MOST_FRAMES[which] | calls
        assert not {what: found[what] for what in most if found[what] > most[what]}, most


@pytest.mark.parametrize("name", COMPILES)
@pytest.mark.skipif(versions() != VERSIONS, reason="recorded with other versions")
def test_no_kernel_compiles_more_often(name, now):
    before, found = COMPILES[name], now["compiles"][name]
    assert not {k: found[k] for k in found if found[k] > before.get(k, 0)}, before
