"""Folders of EasyR1 and verl: `{model,optim}_world_size_W_rank_R.pt`, a state dict of DTensors on each rank.

EasyR1 saves what `get_state_dict` gives for FSDP1 and FSDP2, by names; verl `model.state_dict()` and
`optimizer.state_dict()`, whose states have numbers (verl/utils/checkpoint/fsdp_checkpoint_manager.py of each).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound, Fault, raise_faults
from ds_reshard.formats.fsdp.files import MODEL, OPTIM, files_of, missing, path_of
from ds_reshard.formats.fsdp.flat import FlatStates, read_flat
from ds_reshard.formats.fsdp.held import Held, Shape, damaged, held_of, other_groups
from ds_reshard.formats.fsdp.order import line_to_add, read_order
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked
from ds_reshard.model.region import Box

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
UNNAMED = "the optimizer's files name no parameter (verl saves optimizer.state_dict()): left out"
"""How the note of such files begins; the line that mends it follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCheckpoint:
    """A folder; a family is "model" or "optim", a shard one rank's file. `first` is what rank 0's files hold.

    `flat` are the states of flat parameters, where the order of these is there.
    """

    folder: str
    ranks: int
    layout: Layout
    facts: OptimizerFacts | None
    objects: Mapping[tuple[object, ...], object]
    beside: Mapping[str, tuple[object, ...]]
    first: Mapping[str, Mapping[TensorKey, Held]]
    notes: tuple[str, ...]
    flat: FlatStates | None = None

    @property
    def unnamed(self) -> bool:
        """Whether there are states of which no file tells the names."""
        return any(note.startswith(UNNAMED) for note in self.notes)

    @property
    def parameters(self) -> Mapping[str, Shape]:
        return _parameters(self.first[MODEL], self.ranks)

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The tensors of one rank's file, by the text of their keys, each checked against rank 0's."""
        if family == OPTIM and self.flat is not None:
            return self.flat.buffers(shard)
        path = path_of(self.folder, family, self.ranks, shard)
        expected = self.first[family]
        file = _read(path, family, self.parameters)
        held = file.tensors
        faults = [
            damaged(path, f"{key} is in one of its file and rank 0's alone", "the same tensors", "others")
            for key in sorted(held.keys() ^ expected.keys())
        ]
        if family == OPTIM and self.facts is not None and file.groups != self.facts.groups:
            faults.append(other_groups(path))
        for key in held.keys() & expected.keys():
            faults += _differs(path, key, held[key], expected[key], shard, self.ranks, same=family == OPTIM)
        raise_faults(faults, subject=f"checkpoint {self.folder}")
        raise_faults(list(self._unlike_replicas(path, family, shard, held)), subject=f"checkpoint {self.folder}")
        return {str(key): extent_of(one.local) for key, one in held.items()}

    def _unlike_replicas(self, path: str, family: str, shard: int, held: Mapping[TensorKey, Held]) -> Iterator[Fault]:
        """The shards of HSDP that are not those of the first group of ranks."""
        shards = min((self.ranks // one.replicas for one in held.values()), default=self.ranks)
        if shard < shards:
            return
        first = _read(path_of(self.folder, family, self.ranks, shard % shards), family, self.parameters).tensors
        for key, one in held.items():
            if one.replicas > 1 and (key not in first or _checksum(one) != _checksum(first[key])):
                yield damaged(
                    path,
                    f"{key} is another than rank {shard % shards}'s, which holds the same shard",
                    "the same",
                    "others",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One rank's file: its tensors, what is not among them, and its param groups."""

    tensors: dict[TensorKey, Held]
    notes: tuple[str, ...] = ()
    groups: tuple[GroupFacts, ...] = ()


def open_fsdp(folder: str) -> FsdpCheckpoint:
    """Read rank 0's files and the list of the others.

    Raises CheckpointNotFound, CheckpointDamaged for files of several world sizes or missing ones, UnsupportedLayout for
    tensors that are sharded over several dimensions of a mesh, and what reading a damaged file raises.
    """
    files = [match for match in files_of(folder) if match["family"] in (MODEL, OPTIM)]
    sizes = sorted({int(match["size"]) for match in files})
    if not sizes:
        mend = "give the folder that holds them"
        fault = CheckpointNotFound.fault(folder, "holds no model_world_size_*.pt", mend=mend)
        raise CheckpointNotFound(f"{fault.line()}; {mend}", [fault])
    if len(sizes) > 1:
        raise_faults(
            [damaged(folder, "holds files of several world sizes", "one", ", ".join(map(str, sizes)))],
            subject=f"checkpoint {folder}",
        )
    size = sizes[0]
    faults = list(missing(folder, files, size))
    raise_faults(faults, subject=f"checkpoint {folder}")
    families = sorted({match["family"] for match in files})
    read = {MODEL: _read(path_of(folder, MODEL, size, 0), MODEL, {})}
    if OPTIM in families:
        read[OPTIM] = _read(path_of(folder, OPTIM, size, 0), OPTIM, _parameters(read[MODEL].tensors, size))
    shapes = {key.name: held.shape for key, held in read[MODEL].tensors.items()}
    flat = _flat(folder, size, read[MODEL], shapes) if OPTIM in read and UNNAMED in read[OPTIM].notes else None
    states = read[OPTIM].tensors if OPTIM in read else {}
    raise_faults(
        list(_of_another_model(path_of(folder, OPTIM, size, 0), states, shapes)), subject=f"checkpoint {folder}"
    )
    single = {key: held for key, held in states.items() if _is_single(key, held, shapes)}
    placements = {
        key: _placement(key, held, family, size)
        for family, file in read.items()
        for key, held in file.tensors.items()
        if key not in single
    }
    facts = None
    if states:
        scalars = _scalars(path_of(folder, OPTIM, size, 0), single)
        facts = OptimizerFacts(groups=read[OPTIM].groups, scalars=scalars)
    notes = [note for file in read.values() for note in file.notes]
    if flat is not None:
        placements |= {placement.key: placement for placement in flat.placements(flat.shards)}
        facts, notes = flat.facts, []
    return FsdpCheckpoint(
        folder=folder,
        ranks=size,
        layout=Layout(placements, dict.fromkeys(families, size)),
        facts=facts,
        objects={},
        beside={},
        first={family: file.tensors for family, file in read.items()},
        flat=flat,
        notes=tuple(f"{note}; {line_to_add(folder)}" for note in notes),
    )


def _flat(folder: str, size: int, model: _File, shapes: Mapping[str, Shape]) -> FlatStates | None:
    """The states of flat parameters, None where nothing tells their order."""
    order = read_order(folder, shapes)
    if order is None:
        return None
    paths = [path_of(folder, OPTIM, size, rank) for rank in range(size)]
    replicas = max((held.replicas for held in model.tensors.values()), default=1)
    return read_flat(paths, [_top(path) for path in paths], order, family=OPTIM, shards=size // replicas)


def _of_another_model(path: str, states: Mapping[TensorKey, Held], shapes: Mapping[str, Shape]) -> Iterator[Fault]:
    for key, held in states.items():
        if key.name not in shapes:
            yield damaged(
                path, f"{key} is of no parameter of the model's files: of another model", "its names", "others"
            )
        elif key.kind in _MOMENTS and held.shape != shapes[key.name]:
            what = f"{key} is of another shape than its parameter: of another model"
            yield damaged(path, what, str(list(shapes[key.name])), str(list(held.shape)))


def _is_single(key: TensorKey, held: Held, shapes: Mapping[str, Shape]) -> bool:
    """Whether a state is one value of its parameter."""
    return held.shape == () and (key.kind == "step" or shapes.get(key.name, ()) != ())


def _scalars(path: str, single: Mapping[TensorKey, Held]) -> dict[str, dict[str, Scalar]]:
    found: dict[str, dict[str, Scalar]] = {}
    with open_archive(path) as archive:
        for key, held in single.items():
            data = archive.tensor_bytes(held.local)
            found.setdefault(key.name, {})[key.kind] = ScalarTensor(dtype=held.local.dtype, shape=(), data=data)
    return found


def _checksum(held: Held) -> tuple[object, ...]:
    return held.local.storage.crc32, held.local.element_offset, held.local.shape


def _placement(key: TensorKey, held: Held, family: str, size: int) -> Placement:
    if held.dim is not None:
        boxes = [held.box(rank, size) for rank in range(size // held.replicas)]
        return chunked(key, held.shape, held.local.dtype, boxes, family=family, buffer=str(key))
    return Placement(
        key=key,
        shape=held.shape,
        dtype=held.local.dtype,
        family=family,
        buffer=str(key),
        cut=Cut(chunk=max(1, prod(held.shape))),
        box=Box.whole(held.shape),
        replicated=True,
    )


def _parameters(tensors: Mapping[TensorKey, Held], size: int) -> Mapping[str, Shape]:
    """The shapes of a model's parameters by names, in the order of its modules: what several ranks have sharded."""
    return {key.name: held.shape for key, held in tensors.items() if size == 1 or held.rank is not None}


def _top(path: str) -> dict[object, object]:
    """What torch.save was given, as records."""
    with open_archive(path) as archive:
        top = archive.load()
    if not isinstance(top, dict):
        raise_faults([_no_state_dict(path, top)], subject="reading a checkpoint")
        raise AssertionError
    return top


def _no_state_dict(path: str, found: object) -> Fault:
    return damaged(path, "is no state dict", "names and tensors", type(found).__name__)


def _read(path: str, family: str, parameters: Mapping[str, Shape]) -> _File:
    top = _top(path)
    tree = top.get("state") if family == OPTIM else top
    if not isinstance(tree, dict):
        raise_faults([_no_state_dict(path, tree)], subject="reading a checkpoint")
        raise AssertionError
    if family == MODEL:
        entries = [(str(name), "weight", value) for name, value in tree.items()]
        return _File(tensors=_tensors(path, entries))
    groups = groups_of(top)
    names = state_names(groups, parameters)
    states = [
        (names.get(name, str(name)), str(kind), value)
        for name, kinds in tree.items()
        if isinstance(kinds, dict)
        for kind, value in kinds.items()
    ]
    found = _tensors(path, states)
    numbered = any(isinstance(name, int) for name in tree)
    if numbered and (not names or any(held.shape not in ((), parameters[key.name]) for key, held in found.items())):
        return _File(tensors={}, notes=(UNNAMED,))
    return _File(tensors=found, groups=tuple(_groups(groups, names)))


def groups_of(optimizer: Mapping[object, object]) -> list[Mapping[object, object]]:
    groups = optimizer.get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def state_names(groups: Sequence[Mapping[object, object]], parameters: Iterable[str]) -> Mapping[object, str]:
    """The name of each parameter by its number in an optimizer's state dict; none where they are not told.

    Of one group, numbers count the parameters as `model.parameters()` gives them, and so as `model.state_dict()` does:
    both go through the modules in one order (torch/optim/optimizer.py, torch/nn/modules/module.py, 2.13).
    """
    named = list(parameters)
    if len(groups) != 1 or groups[0].get("params") != list(range(len(named))):
        return {}
    return dict(enumerate(named))


def _tensors(path: str, entries: Iterable[tuple[str, str, object]]) -> dict[TensorKey, Held]:
    found = {}
    for name, kind, value in entries:
        held = held_of(path, name, value)
        if held is not None:
            found[TensorKey(name=name, kind=kind)] = held
    return found


def _groups(groups: Iterable[Mapping[object, object]], names: Mapping[object, str]) -> Iterator[GroupFacts]:
    for group in groups:
        members = group.get("params")
        yield GroupFacts(
            members=tuple(names.get(one, str(one)) for one in members) if isinstance(members, list | tuple) else (),
            hyperparameters={str(name): value for name, value in group.items() if name != "params"},
        )


def _differs(
    path: str, key: TensorKey, held: Held, first: Held, rank: int, size: int, *, same: bool
) -> Iterator[Fault]:
    """What is wrong with a tensor of a rank's file beside rank 0's; replicas hold the `same` values."""
    expected = f"{first.local.dtype.label} {list(first.shape)}, axis {first.dim}, {first.replicas} times"
    found = f"{held.local.dtype.label} {list(held.shape)}, axis {held.dim}, {held.replicas} times"
    if held.ranks not in (None, size):
        yield damaged(
            path,
            f"{key} lies on a mesh of another size than the file's name says",
            f"{size} ranks",
            f"{held.ranks} ranks",
        )
    elif expected != found:
        yield damaged(path, f"{key} is of another shape, type or placement than rank 0's", expected, found)
    elif held.local.shape != held.box(rank, size).size and (held.local.numel or held.box(rank, size).numel):
        yield damaged(
            path,
            f"{key}: its part is not rank {rank}'s of {size}",
            str(list(held.box(rank, size).size)),
            str(list(held.local.shape)),
        )
    elif held.rank not in (None, rank):
        yield damaged(path, f"{key} was saved by another rank than the file's name says", f"{rank}", f"{held.rank}")
    elif same and held.dim is None and held.local.storage.crc32 != first.local.storage.crc32:
        yield damaged(path, f"{key} has another value than rank 0's: of another step or run", "the same", "others")
