"""What `measure.py` wrote, with what the yardstick reads off each kernel of the compiled programs, in one file.

    PYTHONPATH=. python experiments/gpu_truth/digest.py OUT [experiments/gpu_truth/measured.json]

Kernels of one kind, arithmetic and traffic are one row.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from jaxplan.lowering import compiled_kernels

_SMALL = 1e-4
"""Share of a step under which a row is left out."""


def case_row(folder: Path, name: str) -> dict[str, Any]:
    """A case: seconds, memory, and rows of kernels, the longest first."""
    measured = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    text = gzip.decompress((folder / f"{name}.hlo.gz").read_bytes()).decode()
    seconds: dict[str, float] = defaultdict(float)
    for row in measured["kernels"]:
        seconds[row["op"]] += row["seconds"]
    instructions: dict[str, list[Any]] = defaultdict(list)
    for kernel in compiled_kernels(text):
        instructions[kernel.name].append(kernel)
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for instruction, runs in instructions.items():
        kernel, trips = runs[0], sum(run.trips for run in runs)
        key = (
            re.sub(r"[.\d]+$", "", instruction), kernel.flops, kernel.vector_flops, kernel.bytes, kernel.dtype,
            kernel.added, kernel.odd, kernel.channels,
        )  # fmt: skip
        groups[key][0] += trips
        groups[key][1] += seconds.get(instruction, 0.0)
    fields = ("kind", "flops", "vector_flops", "bytes", "dtype", "added", "odd", "channels")
    kernels = [
        dict(zip(fields, key, strict=True)) | {"runs": trips, "seconds": float(f"{total:.4g}")}
        for key, (trips, total) in sorted(groups.items(), key=lambda item: -item[1][1])
        if total > _SMALL * measured["seconds"]
    ]
    compiled = measured["compiled_bytes"]
    return {
        key: measured[key] for key in ("case", "device", "jax", "date", "seconds", "compiled_bytes")
    } | {
        "waited_s": min(measured["calls_s"]),
        "kernels_s": sum(seconds.values()),
        "peak_bytes": compiled["argument"] + compiled["output"] - compiled["alias"] + compiled["temp"],
        "allocated_bytes": measured["memory"]["after"]["peak_bytes_in_use"],
        "limit_bytes": measured["memory"]["after"]["bytes_limit"],
        "kernels": kernels,
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("measured.json")
    rows = [case_row(folder, path.stem) for path in sorted(folder.glob("*.json"))]
    lines = ",\n".join(map(json.dumps, rows)).replace('"kernels": [', '"kernels": [\n  ').replace("}, {", "},\n  {")
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(rows)} cases, {sum(len(row['kernels']) for row in rows)} rows of kernels: {out}")


if __name__ == "__main__":
    main()
