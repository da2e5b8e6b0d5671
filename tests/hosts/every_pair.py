"""Which format is converted into which, and the table in docs/formats.md: the tests take their cases from here."""

from __future__ import annotations

READ = ("zero1", "zero2", "zero3", "bf16", "universal", "dcp", "accelerate", "pytorch", "nanotron")
"""Converted in tests/formats/test_every_pair.py."""
WRITTEN = (*READ, "safetensors", "torch")
FROM_FSDP = ("zero1", "zero2", "zero3", "universal", "dcp", "accelerate", "pytorch", "safetensors", "torch")
"""Converted from folders that verl has saved, in tests/hosts/fsdp/test_fsdp_flat.py."""

BF16, COUNTED, THEIRS = range(1, 4)
REASONS = {
    BF16: "refused: the weights there are fp32, and BF16_Optimizer trains bf16 weights",
    COUNTED: "refused: no file tells the samples that the run has seen, which nanotron's checkpoints must say",
    THEIRS: "refused: EasyR1's and verl's files are made of theirs alone",
}
REFUSED = {
    ("dcp", "bf16"): BF16,
    ("accelerate", "bf16"): BF16,
    ("pytorch", "bf16"): BF16,
    ("fsdp", "bf16"): BF16,
    ("pytorch", "nanotron"): COUNTED,
    ("fsdp", "nanotron"): COUNTED,
    **{(kind, "fsdp"): THEIRS for kind in READ},
}


def table() -> list[str]:
    """The rows of docs/formats.md: equal to the bit, or why not."""
    columns = (*WRITTEN, "fsdp")
    rows = [f"| from, to | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for kind in (*READ, "fsdp"):
        cells = [f"[{REFUSED[kind, to]}]" if (kind, to) in REFUSED else "yes" for to in columns]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    used = sorted(set(REFUSED.values()))
    return [*rows, "", *(f"[{number}] {REASONS[number]}  " for number in used)]
