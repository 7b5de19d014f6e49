"""What a session could do on a kernel that lacks one of the layers: tried out, as a table for docs/security.md."""

import os
from pathlib import Path
from typing import Any

from attacks import ATTACKS
from elsewhere import NOBODY, attacked

from trl_rollouts.sandbox.confinement import LAYERS

PATH = Path(__file__).parents[2] / "docs/security.md"
BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"

KERNEL_DEPENDENT = {
    "int80_abi",
    "io_uring_socket",
    "namespaces_of_its_own",
    "posix_shm",
    "proc_mem_victim",
    "ptrace_other",
    "raw_socket",
}
"""Which do harm on some kernels only: how they are built, Yama, user namespaces, /dev/shm."""
MIN_LANDLOCK_ABI = 6
"""From which on Landlock holds signals and abstract sockets by itself."""


def report_without(layer: str, python: Path) -> dict[str, Any]:
    """What the attacks did as a plain user without that layer."""
    return attacked(python, "--without", layer, uid=NOBODY if os.geteuid() == 0 else None, timeout_s=200.0)


def harmful(report: dict[str, Any]) -> set[str]:
    """Names of the attacks that did what they must not."""
    return {name for name, verdict in report["verdicts"].items() if verdict["harm"]}


def table(reports: dict[str, dict[str, Any]]) -> str:
    """The block for docs/security.md."""
    harm = {layer: harmful(report) for layer, report in reports.items()}
    num_run = len(next(iter(reports.values()))["verdicts"])
    lines = [
        f"All {len(ATTACKS)} attacks of `tests/sandbox/attacks.py` are held with all layers. {num_run} of them, "
        "which an unconfined machine survives, are also run with one layer taken away, as a plain user on Landlock "
        f"{MIN_LANDLOCK_ABI} or later. These then do harm:",
        "",
        f"| attack | must hold | {' | '.join(f'without {layer}' for layer in LAYERS)} |",
        f"|---|---|{'---|' * len(LAYERS)}",
    ]
    for attack in ATTACKS:
        if any(attack.name in names for names in harm.values()):
            marks = " | ".join("harm" if attack.name in harm[layer] else "" for layer in LAYERS)
            lines.append(f"| `{attack.name}` | {attack.must} | {marks} |")
    return "\n".join([*lines, f"| **all** | | {' | '.join(str(len(harm[layer])) for layer in LAYERS)} |"])


def documented() -> tuple[str, dict[str, set[str]]]:
    """The block as it stands, and the attacks it names for each layer."""
    block = PATH.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("| `")]
    return block, {layer: {row[0].strip("`") for row in rows if row[2 + at]} for at, layer in enumerate(LAYERS)}


def write(reports: dict[str, dict[str, Any]]) -> None:
    """Put the table between its marks."""
    text = PATH.read_text() if PATH.exists() else f"# Security\n\n{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    PATH.write_text(f"{head}{BEGIN}\n{table(reports)}\n{END}{rest.partition(END)[2]}")
