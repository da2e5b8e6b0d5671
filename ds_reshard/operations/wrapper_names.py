"""Names of parameters that differ by what wrappers put into them: torch.compile, DDP, FSDP, adapters of PEFT.

Also by a module that the one model is inside of the other, as Lightning's modules call what they train `model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher

from ds_reshard.errors import ModelMismatch
from ds_reshard.operations.name_map import NameMap

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
_ADAPTER = re.compile(r"(?:lora|ia3|vera|hada|lokr|oft|boft|adalora)_\w+|modules_to_save|trainable_tokens_\w+")
"""A module or parameter list whose entries PEFT calls by the adapter's name (peft/tuners/lora/layer.py, 0.17)."""
_MOST = 16
_JOIN = r"\."

Tokens = tuple[str, ...]


def patterns(saved: Collection[str], run: Collection[str]) -> dict[str, str] | None:
    """A map of names, as `NameMap` reads it, that gives saved parameters the names that the run has for them.

    None where neither wrappers nor one module around all explain the names that the run has and the checkpoint lacks,
    or only some of them. Every rank gets the same text, whatever order its sets have.
    """
    lacking, left = sorted(set(run) - set(saved)), sorted(set(saved) - set(run))
    ours, theirs = _by_plain(lacking), _by_plain(left)
    pairs = {theirs[plain]: name for plain, name in ours.items() if plain in theirs}
    if not pairs:
        pairs = _under_one_module(ours, theirs)
        pairs = pairs or {old: new for new, old in _under_one_module(theirs, ours).items()}
    if not pairs:
        return None
    edits = [(old, new, *_edit(old.split("."), new.split("."))) for old, new in pairs.items()]
    ways = [made for made in (_anchored(edits), _anywhere(edits), _by_place(edits), pairs) if made is not None]
    for made in sorted(ways, key=len):
        if len(made) <= _MOST and _gives(made, saved, pairs):
            return dict(made)
    return None


def convert_line(saved: Collection[str], lacking: Collection[str], *, folder: str) -> str | None:
    """What mends a load of a DCP folder of which wrappers have changed all names; None where they explain none."""
    names = patterns(saved, lacking)
    line = f"ds-reshard convert {folder} OUT --to dcp --names map.json"
    return None if names is None else f"write {json.dumps(names)} to map.json and load what this makes:\n{line}"


def _by_plain(names: Iterable[str]) -> dict[str, str]:
    """The names by what is left of them without wrappers; without those that this does not tell apart."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_plain(name), []).append(name)
    return {plain: one for plain, (one, *more) in found.items() if not more}


def _under_one_module(inner: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str]:
    """The outer names of the inner ones, if these all lie below one module of the outer: `model` of Lightning's."""
    first = next(iter(inner), None)
    tops = [name.removesuffix(first) for name in outer if first and name.endswith(f".{first}")]
    tops = [top for top in tops if all(f"{top}{plain}" in outer for plain in inner)]
    return {outer[f"{top}{plain}"]: name for top in tops if len(tops) == 1 for plain, name in inner.items()}


def _plain(name: str) -> str:
    tokens = [token for token in name.split(".") if token not in _WRAPPERS]
    tokens = tokens[2:] if tokens[:2] == ["base_model", "model"] else tokens
    kept = [
        token
        for before, token in zip(["", *tokens], tokens, strict=False)
        if token in ("weight", "bias") or not _ADAPTER.fullmatch(before)
    ]
    return ".".join(kept)


def _edit(old: list[str], new: list[str]) -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """What both begin with, what the old and the new one have in the middle, and what both end with."""
    shortest, end = min(len(old), len(new)), 0
    while end < shortest and old[-1 - end] == new[-1 - end]:
        end += 1
    begin = 0
    while begin < shortest - end and old[begin] == new[begin]:
        begin += 1
    stop = len(old) - end
    return tuple(old[:begin]), tuple(old[begin:stop]), tuple(new[begin : len(new) - end]), tuple(old[stop:])


Edit = tuple[str, str, Tokens, Tokens, Tokens, Tokens]


def _dotted(tokens: Tokens) -> str:
    return "".join(f"{token}." for token in tokens)


def _anchored(edits: list[Edit]) -> dict[str, str] | None:
    """Where all differ at their beginnings alone."""
    if any(begin or not end for _, _, begin, _, _, end in edits):
        return None
    return {f"{re.escape(_dotted(old))}(.+)": f"{_dotted(new)}{{1}}" for _, _, _, old, new, _ in edits}


def _anywhere(edits: list[Edit]) -> dict[str, str] | None:
    if any(not old or not end for _, _, _, old, _, end in edits):
        return None
    return {f"(|.+\\.){re.escape(_dotted(old))}(.+)": f"{{1}}{_dotted(new)}{{2}}" for _, _, _, old, new, _ in edits}


def _by_place(edits: list[Edit]) -> dict[str, str] | None:
    """By all that both have, whatever its numbers: a group for each run of it."""
    made: dict[str, str] = {}
    for one, other, *_ in edits:
        old, new = one.split("."), other.split(".")
        pattern, form, groups = list[str](), list[str](), 0
        for what, begin, stop, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            tokens = ["[0-9]+" if token.isdecimal() else re.escape(token) for token in old[begin:stop]]
            if what == "equal":
                groups += 1
                pattern.append(f"({_JOIN.join(tokens)})")
                form.append(f"{{{groups}}}")
            else:
                pattern += [re.escape(token) for token in old[begin:stop]]
                form += new[first:last]
        made[_JOIN.join(pattern)] = ".".join(form)
    return made


def _gives(made: Mapping[str, str], saved: Collection[str], pairs: Mapping[str, str]) -> bool:
    """True if the map gives parameters the names of `pairs`, and each saved one a name of its own."""
    names = NameMap(path="", names={old: (new,) for old, new in made.items()}, digest="")
    try:
        renaming = names.renaming([*saved], {})
    except ModelMismatch:
        return False
    return all(renaming.get(old, old) == new for old, new in pairs.items())
