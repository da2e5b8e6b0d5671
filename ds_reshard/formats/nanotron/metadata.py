"""The small files of a nanotron checkpoint: `checkpoint_metadata.json`, `optimizer_config.json`, `config.yaml`.

`CheckpointMetadata` of serialize/metadata.py, `save_optimizer` of serialize/optimizer.py (commit 2411b02).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointNotFound, Fault, UnsupportedLayout, damaged
from ds_reshard.formats.nanotron.names import CONFIG, META, OPTIMIZER_CONFIG, NanotronListing, Topology, experts

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


VERSIONS = ("1.2", "1.3", "1.4", "1.5")
ZERO, PLAIN, ACCUMULATING = "ZeroDistributedOptimizer", "NamedOptimizer", "OptimizerFromGradientAccumulator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the small files say; `entries` and `optimizer` are the two JSON files as they are.

    `config` has the scalars of config.yaml by their dotted names, as text; empty where it was not saved.
    """

    version: str
    tp: int
    dp: int
    cp: int
    entries: Mapping[str, object]
    optimizer: Mapping[str, object] | None
    config: Mapping[str, str]

    @property
    def step(self) -> int | None:
        return self._meta("last_train_step")

    @property
    def samples(self) -> int | None:
        return self._meta("consumed_train_samples")

    def _meta(self, name: str) -> int | None:
        metas = self.entries.get("metas")
        value = metas.get(name) if isinstance(metas, dict) else None
        return value if type(value) is int else None

    @property
    def batch(self) -> Batch | None:
        """Of the saving run; None where its config.yaml does not tell."""
        texts = [self.config.get(name, "") for name in (MICRO, ACCUMULATION)]
        sizes = [int(text) for text in texts if text.isdecimal() and int(text)]
        return Batch(micro=sizes[0], accumulation=sizes[1], dp=self.dp) if len(sizes) == 2 else None

    @property
    def global_batch_size(self) -> int | None:
        """In samples, of the saving run; None where nothing tells."""
        return self.batch.size if self.batch is not None else None


def read_metadata(listing: NanotronListing) -> tuple[Metadata | None, list[Fault]]:
    """Read them, and compare what they say with the names of the files."""
    meta, faults = _json(listing, META)
    if meta is None:
        return None, faults
    sizes = {name: meta.get(name, 1 if name == "cp" else None) for name in ("tp", "dp", "cp")}
    path, version = listing.path(META), meta.get("version")
    if version not in VERSIONS:
        return None, [
            UnsupportedLayout.fault(
                path,
                "is of a checkpoint version that is not known here",
                " | ".join(VERSIONS),
                repr(version),
                mend="load it with the nanotron that wrote it, and save it with version 1.5",
            )
        ]
    numbers = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
    if len(numbers) < len(sizes):
        return None, [damaged(path, "has no parallel sizes", "tp, dp and cp, from 1 on", repr(sizes))]
    optimizer: dict[str, object] | None = None
    if listing.optimizer:
        optimizer, missing = _json(listing, OPTIMIZER_CONFIG)
        faults += missing
    metadata = Metadata(
        version=str(version),
        entries=meta,
        optimizer=optimizer,
        config=_config(listing),
        tp=numbers["tp"],
        dp=numbers["dp"],
        cp=numbers["cp"],
    )
    return metadata, [*faults, *_refused(listing, metadata), *_sizes(listing, metadata)]


def _json(listing: NanotronListing, name: str) -> tuple[dict[str, object] | None, list[Fault]]:
    path = listing.path(name)
    try:
        content = folders.read_json(path)
    except CheckpointNotFound:
        return None, [damaged(path, "is missing", "the file that nanotron's world rank 0 writes", "no file")]
    except ValueError as error:
        return None, [damaged(path, "is not JSON", "an object", str(error)[:80])]
    if not isinstance(content, dict):
        return None, [damaged(path, "is not what nanotron writes", "an object", type(content).__name__)]
    return content, []


def _refused(listing: NanotronListing, metadata: Metadata) -> Iterator[Fault]:
    if metadata.cp > 1:
        yield UnsupportedLayout.fault(
            listing.path(META),
            "was saved with context parallelism: no name of "
            "a file has the context rank in it, so the ranks of one group wrote one file at the same time",
            "cp 1",
            str(metadata.cp),
            mend="load it with nanotron alone, without ds_reshard's hooks, at the topology that saved it",
        )
    if metadata.optimizer is not None:
        size = _said_sizes(metadata.optimizer).get("exp")
        if size is not None and size != 1:
            yield experts(listing.path(OPTIMIZER_CONFIG), size)


def _said_sizes(optimizer: Mapping[str, object]) -> dict[str, int]:
    """The sizes of optimizer_config.json, which are text there."""
    said = optimizer.get("parallelism")
    keys = {"pp": "pp_size", "tp": "tp_size", "dp": "dp_size", "exp": "expert_parallel_size"}
    return _numbers(said, keys) if isinstance(said, dict) else {}


def _numbers(said: Mapping[str, object], keys: Mapping[str, str]) -> dict[str, int]:
    texts = {name: str(said.get(key)) for name, key in keys.items()}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def _sizes(listing: NanotronListing, metadata: Metadata) -> Iterator[Fault]:
    """Sizes that the metadata, the optimizer's configuration and the names of its files say differently."""
    topology = listing.topology
    if topology is None:
        return
    named = {"pp": topology.pp, "tp": topology.tp, "exp": topology.exp}
    if topology.dp is not None:
        named["dp"] = topology.dp
    said = {META: {"tp": metadata.tp, "dp": metadata.dp}}
    if metadata.optimizer is not None:
        said[OPTIMIZER_CONFIG] = _said_sizes(metadata.optimizer)
        if set(said[OPTIMIZER_CONFIG]) != {"pp", "tp", "dp", "exp"}:
            yield damaged(listing.path(OPTIMIZER_CONFIG), "has no parallel sizes", "pp, tp, dp and expert", "others")
        yield from _kind(listing, metadata.optimizer, topology)
    said[CONFIG] = _numbers(metadata.config, {axis: f"parallelism.{axis}" for axis in ("pp", "tp", "dp")})
    named.setdefault("dp", metadata.dp)
    for name, sizes in said.items():
        for axis in sorted(set(sizes) & set(named)):
            if sizes[axis] != named[axis]:
                other = META if axis == "dp" and topology.dp is None else "the names of the optimizer's files"
                yield damaged(
                    listing.path(name), f"says another {axis} size than {other}", str(named[axis]), str(sizes[axis])
                )


def _kind(listing: NanotronListing, optimizer: Mapping[str, object], topology: Topology) -> Iterator[Fault]:
    kind, cut = optimizer.get("type"), topology.dp is not None
    if kind not in (ZERO, PLAIN, ACCUMULATING) or (kind == ZERO) != cut:
        files = "cut over the data-parallel ranks" if cut else "whole for each data-parallel rank"
        yield damaged(
            listing.path(OPTIMIZER_CONFIG),
            f"names another optimizer than the one that wrote the optimizer files, which are {files}",
            ZERO if cut else f"{PLAIN} or {ACCUMULATING}",
            repr(kind),
        )


def _config(listing: NanotronListing) -> dict[str, str]:
    """The scalars of config.yaml, as nanotron's `save_as_yaml` writes them: block style, one a line."""
    if CONFIG not in listing.nbytes:
        return {}
    lines = folders.read_text(listing.path(CONFIG)).splitlines()
    return {name: value for _, name, value in scalars(lines)}
