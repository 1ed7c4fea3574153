"""Log-probabilities of tokens against TRL's (`bench log_probs`)."""

from __future__ import annotations

from pathlib import Path

from bench.tables import RESULTS, Cell, load, machine_line, markdown, mib

FILE = RESULTS / "log_probs.json"


def table(file: Path = FILE) -> str:
    """Return the most bytes and the time of each size; of TRL's chunk sizes the best of each."""
    data, cells = load(file), list[list[Cell]]()
    for case, found in data["results"].items():
        ours = found["ours"]
        peers = {name: way for name, way in found.items() if name != "ours"}
        row: list[Cell] = [case]
        for key, show in (("peak", mib), ("seconds", lambda s: f"{s:.2f} s")):
            name = min(peers, key=lambda n: peers[n][key])
            best, columns = peers[name][key], name.split()[1]
            ratio = f"{ours[key] / best:.2f}×"
            row += [show(ours[key]), f"{show(best)} ({columns})", ratio]
        cells.append(row)
    head = [
        "case",
        "peak",
        "TRL's best (columns)",
        "ratio",
        "time",
        "TRL's best (columns)",
        "ratio",
    ]
    of_trl = f" TRL {data['machine']['trl']}."
    return machine_line(data["machine"]) + of_trl + "\n\n" + markdown(head, cells)
