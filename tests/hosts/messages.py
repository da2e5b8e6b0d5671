"""The texts that the package's modules hold: what it says to people, and the names that these texts hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = (
    "--ckpt-format",
    "--ckpt-step",
    "--dataloader-type",
    "--ddp-num-buckets",
    "--decoupled-lr",
    "--dist-ckpt-optim-fully-reshardable",
    "--dist-ckpt-save-pre-mcore-014",
    "--dist-ckpt-strictness",
    "--end-weight-decay",
    "--exit-on-missing-checkpoint",
    "--exit-signal",
    "--global-batch-size",
    "--load",
    "--load-main-params-from-ckpt",
    "--lr",
    "--lr-decay-iters",
    "--lr-decay-style",
    "--lr-warmup-fraction",
    "--lr-warmup-init",
    "--lr-warmup-iters",
    "--lr-wsd-decay-iters",
    "--lr-wsd-decay-style",
    "--min-lr",
    "--no-save-optim",
    "--no-save-rng",
    "--non-persistent-ckpt-type",
    "--optimizer",
    "--optimizer-cpu-offload",
    "--override-ckpt-iteration",
    "--pretrained-checkpoint",
    "--rampup-batch-size",
    "--save",
    "--seed",
    "--start-weight-decay",
    "--tensor-model-parallel-size",
    "--train-iters",
    "--train-samples",
    "--transformer-impl",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--use-mup",
    "--use-precision-aware-optimizer",
    "--weight-decay",
    "--weight-decay-incr-style",
)
"""The arguments of Megatron-LM that messages name; its own parser has them (tests/hosts/megatron)."""


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """The texts of the package that are no docstrings, each with its module; what is filled in is `<>`."""
    found = []
    for path in sorted((ROOT / "ds_reshard").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places = (ast.Module, ast.FunctionDef, ast.ClassDef)
        bodies = [node.body[0] for node in ast.walk(tree) if isinstance(node, places) and node.body]
        passed = {id(body.value) for body in bodies if isinstance(body, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                passed |= {id(part) for part in node.values}
        for node in ast.walk(tree):
            text = None if id(node) in passed else _text(node)
            if text:
                found.append((path.relative_to(ROOT / "ds_reshard").as_posix(), text))
    return tuple(dict.fromkeys(found))


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "<>" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def named(pattern: str) -> Iterator[tuple[str, str, re.Match[str]]]:
    """Every place of a message where the pattern is: module, message, match."""
    for module, text in messages():
        for match in re.finditer(pattern, text):
            yield module, text, match


def amended(words: list[str], line: str, filled: dict[str, str]) -> list[str]:
    """A command changed as a mending line says; `filled` are the values of what it leaves to the reader, as DIR.

    The line is a whole command, or options with their values, or options after `leave out` or `without`.
    """
    told = " ".join(filled.get(word, word) for word in re.sub(r",(?!\S)", "", line).split()).split()
    if told[0] == "ds-reshard":
        return told[1:]
    made, without = list(words), False
    for at, word in enumerate(told):
        without |= word in ("leave", "without")
        if not word.startswith("--"):
            continue
        value = [one for one in told[at + 1 : at + 2] if not one.startswith("--") and one != "without"]
        begin = end = made.index(word) if word in made else len(made)
        if end < len(made):
            end += 1 + (end + 1 < len(made) and not made[end + 1].startswith("--"))
        made[begin:end] = [] if without else [word, *value]
    assert made != words, line
    return made
