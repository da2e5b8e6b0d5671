"""`config.yaml` of a checkpoint that is to be written: the sizes of the target, and the same global batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MICRO, ACCUMULATION = "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"
_YAML_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>.*?))? *$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The global batch of a run: micro batch * accumulation * dp, in samples (`global_batch_size` of trainer.py)."""

    micro: int
    accumulation: int
    dp: int

    @property
    def size(self) -> int:
        return self.micro * self.accumulation * self.dp

    def at(self, dp: int) -> Batch | None:
        """The same global batch on other ranks, of the largest micro batch up to this; None where it is no multiple."""
        if self.size % dp:
            return None
        share = self.size // dp
        micro = max(size for size in range(1, self.micro + 1) if share % size == 0)
        return Batch(micro=micro, accumulation=share // micro, dp=dp)

    def __str__(self) -> str:
        return f"micro_batch_size {self.micro}, batch_accumulation_per_replica {self.accumulation}"


def batch_of(config: Mapping[str, str], dp: int) -> Batch | None:
    """The batch of a run of data-parallel size `dp`; None where its config.yaml does not tell."""
    texts = [config.get(name, "") for name in (MICRO, ACCUMULATION)]
    sizes = [int(text) for text in texts if text.isdecimal() and int(text)]
    return Batch(micro=sizes[0], accumulation=sizes[1], dp=dp) if len(sizes) == 2 else None


def resized(saved: Batch | None, dp: int) -> tuple[dict[str, int], str | None]:
    """What config.yaml says of the batch at another data-parallel size, and what there is to tell of it."""
    if saved is None:
        return {}, "config.yaml tells no batch: give the coming run the saving run's global batch size"
    if saved.dp == dp:
        return {}, None
    found = saved.at(dp)
    if found is None:
        other = saved.micro * saved.accumulation * dp
        return {}, (
            f"a global batch of {saved.size} samples is no multiple of dp {dp}: config.yaml keeps {saved}, which is a "
            f"global batch of {other}, and with it the learning rate and the data of a step are others"
        )
    said = {MICRO: found.micro, ACCUMULATION: found.accumulation}
    return (
        said,
        f"for the same global batch of {saved.size} samples config.yaml has {found}; say so in the coming run's",
    )


def rewritten(text: str, changed: Mapping[str, int]) -> str:
    """config.yaml with other numbers, every other line as it was."""
    lines = text.splitlines()
    for number, name, _ in list(scalars(lines)):
        if name in changed:
            lines[number] = f"{lines[number].partition(':')[0]}: {changed[name]}"
    return "\n".join(lines) + "\n"


def scalars(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """The line, dotted name and text of each scalar in nested mappings of block-style YAML."""
    path: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        match = _YAML_LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, match["key"]))
        if match["value"]:
            yield number, ".".join(key for _, key in path), match["value"]
