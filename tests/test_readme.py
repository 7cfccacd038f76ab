"""The README's example is run as it stands there, and prints what the README says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(section: str) -> list[str]:
    """The indented blocks of one `## section` of the README, without their indentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^    .*\n|^\n(?=\n*    ))+", body + "\n", flags=re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip("\n") for block in found if block.strip()]


def without_prices(line: str) -> str:
    """A printed line without seconds, bytes and shares, which a better cost model changes, and without alignment."""
    return " ".join(re.sub(r"<?[\d.]+ (s|ms|us|ns|%|B|KiB|MiB|GiB)(?!\w)", "", line).split())


def output_of(code: str, folder: Path) -> str:
    """What `code` prints as a program of its own, over eight forced host devices."""
    path = folder / "example.py"
    path.write_text(code, encoding="utf-8")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_kernel_is_cut_as_the_readme_says(tmp_path: Path) -> None:
    (code,) = blocks("Kernels")
    printed = output_of(code, tmp_path).strip()
    assert printed.startswith("P") and f"prints `{printed}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    code, shown = blocks("Example")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    output = output_of(code, tmp_path)
    printed = [without_prices(line) for line in output.splitlines()]
    wanted = [without_prices(line) for line in shown.splitlines()]
    assert len(wanted) > 10
    # "..." stands for lines left out; the rest must come in this order, and all of it between two "..."
    position = 0
    skipped = False
    for line in wanted:
        if line == "...":
            skipped = True
            continue
        if skipped:
            assert line in printed[position:], f"the README shows {line!r}; printed was:\n{output}"
            position = printed.index(line, position)
        assert printed[position] == line, f"README: {line!r}; printed: {printed[position]!r}"
        position += 1
        skipped = False
