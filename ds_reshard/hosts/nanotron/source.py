"""The checkpoint that is loaded, nanotron's own or of another format: what the seams ask of it, and its weights.

nanotron's trainer takes a folder without `latest.txt` and `model_config.json` for none and begins anew
(`parse_ckpt_path`, serialize/main.py, commit 2411b02). What the folder does not hold is never made up.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digest, note_names
from ds_reshard.containers.remote import is_url, natural
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    ReadFailed,
    UnsupportedLayout,
    faults_of,
    raise_faults,
)
from ds_reshard.execution.buffers import element_type
from ds_reshard.execution.checksums import SEEN_BY_ALL
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.content import METADATA
from ds_reshard.formats.nanotron.door import OpenedNanotron
from ds_reshard.formats.nanotron.metadata import Batch, read_metadata
from ds_reshard.formats.nanotron.names import LATEST, META, NanotronListing, is_nanotron, read_listing
from ds_reshard.formats.nanotron.parameters import read_parameters
from ds_reshard.hooks import Call
from ds_reshard.hosts.nanotron.live import LivePart, ParallelContext, experts_of, tiles_of_parameter
from ds_reshard.hosts.nanotron.load import Load, config_of, current, same_policy
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import BASE, LAST, MASTER, SCHEDULER, WEIGHT, Content, TensorSource
from ds_reshard.model.facts import GroupFacts, Scalar
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Shape
from ds_reshard.operations.filling import fill
from ds_reshard.operations.formats import format_of
from ds_reshard.operations.matching import choose_source, match_tensors
from ds_reshard.operations.name_map import NameMap, asked_names, read_name_map
from ds_reshard.operations.proof import unproved
from ds_reshard.operations.ranks import (
    agree,
    agree_files,
    attempt,
    broadcast,
    gather,
    raise_caused,
    run_on_all,
    same_files,
    unseen_faults,
)
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import Found, find_listing, open_checkpoint
from ds_reshard.operations.wrapper_names import patterns
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Plan, copies_of
from ds_reshard.resume.policy import ResumePolicy

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger("ds_reshard")
_NAMES = 'build the model that was saved, or name its parameters: DS_RESHARD_SETTINGS=\'{"names": "map.json"}\''
_MODEL = "build the model that was saved"
_OWN = "ds-reshard convert {folder} OUT --to nanotron --like STEP_OF_THE_COMING_RUN"


class Source:
    """A checkpoint to load, under the names of this run.

    nanotron's own is opened when its states are asked for: the small files tell the rest. If it is `foreign`, of
    another format, it has been opened. `batch` is the global batch of the saving run, in samples alone if another
    format tells it, `ranks` its data-parallel ranks, `step` the iteration after which it was saved.
    """

    def __init__(self, folder: str, opened: tuple[Checkpoint, Content, Layout] | None = None) -> None:
        self.folder, self.foreign = folder, opened is not None
        self.listing, self.metadata = NanotronListing(folder=folder, nbytes={}), None
        self.batch: Batch | int | None = None
        self.ranks: int | None = None
        self.step: int | None = None
        if opened is not None:
            self.checkpoint, self.content, self.layout = opened
            self.batch, self.ranks, self.step = self.content.batch_size, self.content.ranks, self.content.steps
            return
        self.listing = read_listing(folder)
        self.metadata = metadata = read_metadata(self.listing)[0]
        if metadata is not None:
            self.batch, self.ranks, self.step = metadata.batch, metadata.dp, metadata.step

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return OpenedNanotron(self.listing)

    @cached_property
    def content(self) -> Content:
        return self.checkpoint.content()

    @cached_property
    def layout(self) -> Layout:
        """The places of the tensors that the content is read from."""
        return self.checkpoint.layout

    @property
    def own(self) -> NanotronCheckpoint | None:
        """What nanotron's files say beside; None of another format."""
        opened = self.checkpoint
        return opened.checkpoint if isinstance(opened, OpenedNanotron) and not self.foreign else None

    @property
    def groups(self) -> Sequence[GroupFacts]:
        return self.content.facts.groups if self.content.facts is not None else ()

    @property
    def scalars(self) -> Mapping[str, Mapping[str, Scalar]]:
        return self.content.facts.scalars if self.content.facts is not None else {}

    @property
    def position(self) -> int | None:
        """The updates that its schedule had made; without one that nanotron could have saved, those of the run."""
        schedule = self.content.schedule
        found = schedule.counters.get("last_epoch") if schedule is not None else None
        return found if type(found) is int else self.content.steps

    def rates(self, names: Sequence[str]) -> set[tuple[float, float]]:
        """The base rate and the last one of each saved param group that one of these was in."""
        schedule, wanted = self.content.schedule, set(names)
        pairs = zip(self.groups, schedule.groups, strict=True) if schedule is not None else ()
        rows = [row for group, row in pairs if not wanted.isdisjoint(group.members)]
        return {(float(str(row[BASE])), float(str(row[LAST]))) for row in rows}


def source_of(load: Load, folder: str, world: ProcessGroup, model: object = None) -> Source:
    """What lies in a folder, as all ranks see it. Collective: a fault on any rank is one on every rank.

    `model` is the one that is loaded, which tells its configuration in a loop of the user's own.
    """
    if load.source is not None and load.source.folder == folder:
        return load.source
    subject, coming = f"loading {folder}", _coming(load, model)
    with same_files(world, subject=subject):
        found = run_on_all(lambda: _open(folder, load.policy, coming) or Source(folder), world, subject=subject)
        raise_faults(unseen_faults(folder, gather(found.foreign, world)), subject=subject)
    agree_files({os.path.join(folder, META): digest(found.metadata)}, world, subject=subject)
    load.source = found
    return found


def _coming(load: Load, model: object) -> Coming:
    """Return what the run tells of its model: the trainer's configuration, or that of a model without a trainer.

    nanotron's `LlamaConfig` and `Qwen2Config` have the names of transformers (config/models_config.py, commit 2411b02).
    """
    where, config = "the run's model.model_config", config_of(load, "model.model_config")
    if load.trainer is None:
        where, config = "the run's model.config", getattr(model, "config", None)
    told = getattr(config, "__dict__", {})
    return Coming(configurations=((where, told),) if told else ())


def foreign_of(load: Load, folder: str, world: ProcessGroup, model: object = None) -> Source | None:
    """The same, None of nanotron's own: its functions that ask are not collective. Collective where it is another's."""
    found = source_of(load, folder, world, model) if not _is_own(folder) else None
    return found if found is not None and found.foreign else None


def _is_own(folder: str) -> bool:
    """True for nanotron's own, and for what looks like no checkpoint."""
    return not is_url(folder) and (is_nanotron(folder) or not os.path.isdir(folder))


def _open(folder: str, policy: ResumePolicy, coming: Coming) -> Source | None:
    """A folder of another format, its weights alone if the policy leaves out an optimizer that cannot be opened."""
    try:
        found = find_listing(folder, None) if not _is_own(folder) else None
    except CheckpointNotFound:
        return None
    if found is None or (is_nanotron(found.folder) and not is_url(folder)):
        return None
    try:
        return _opened(folder, found, coming, masters=policy.loads_masters)
    except (CheckpointDamaged, CheckpointNotFound, ReadFailed, UnsupportedLayout):
        if policy.loads_masters or policy.keeps_position:  # the schedule is by the optimizer's groups
            raise
        return _opened(folder, found, coming, masters=False, optimizer=False)


def _opened(folder: str, found: Found, coming: Coming, *, masters: bool, optimizer: bool = True) -> Source:
    checkpoint, path = open_checkpoint(found, whole=False, optimizer=optimizer), asked_names()
    content, layout = checkpoint.content(), checkpoint.layout
    faults = list(checkpoint.index.faults)
    note_names()
    if path is not None:
        content, layout, found_faults, _ = read_name_map(path).apply(content, layout, coming)
        faults += found_faults
    raise_faults([*faults, *unproved(checkpoint, None if masters else ())], subject=f"loading {folder}")
    return Source(content.folder, (checkpoint, content, layout))


def parse_ckpt_path(call: Call) -> object:
    """The folder to resume from: nanotron's own, else that of the checkpoint that `resume_checkpoint_path` holds.

    From a URL nanotron itself would copy all of it to its own disk (by s5cmd): it is read in place here, of any format.
    """
    path = getattr(getattr(call["config"], "checkpoints", None), "resume_checkpoint_path", None)
    world = cast(ParallelContext, call["parallel_context"]).world_pg
    if path is not None and is_url(url := folder_of(path)):
        return _by_url(url, world)
    subject = f"loading {path}"
    found, told = run_on_all(lambda: _told(path, _found(path, call)), world, subject=subject)
    raise_faults(_other_finds(str(path), gather(told, world)), subject=subject)
    return found


def _found(path: object, original: Callable[[], object]) -> object:
    """The folder that a rank resumes from; None only where there is no trace of a checkpoint, and it begins anew."""
    if path is None:
        return original()
    given = str(path)
    if not os.path.exists(given):
        raise_faults(_passed_over(given, None), subject=f"loading {given}")
        return original()
    try:
        if os.path.isfile(os.path.join(given, LATEST)):
            find_listing(given, None)  # raises for a step that is not there
        found = original()
        return found if found is not None else Path(find_listing(given, None).folder)
    except CheckpointNotFound as error:
        raise_faults(_passed_over(given, error), subject=f"loading {given}")
        return None


_POINTERS = (LATEST, "latest", "latest_universal")
_GIVE = "checkpoints.resume_checkpoint_path: {}; or leave it out, to begin anew"


def _passed_over(path: str, error: CheckpointNotFound | None) -> Iterator[Fault]:
    """A fault if a checkpoint lies above or below a path that is none: nanotron would begin anew.

    `error` tells why none was found in the path; None if that does not exist.
    """
    above, anew = os.path.dirname(os.path.abspath(path)), "nanotron would begin anew"
    if error is None:
        steps = _below(above, is_nanotron)
        if steps:
            what = f"does not exist beside other steps, and {anew}"
            yield CheckpointNotFound.fault(path, what, _names(steps), "none", mend=_GIVE.format(steps[-1]))
        return
    if is_nanotron(above) or not os.path.isdir(path):
        what = f"is a part of a checkpoint, and {anew}" if is_nanotron(above) else f"is a file, and {anew}"
        yield CheckpointNotFound.fault(path, what, "the folder of a checkpoint", mend=_GIVE.format(above))
        return
    found, what = _below(path, _is_training), f"has no {LATEST}, without which {anew}"
    if found and os.path.exists(os.path.join(path, LATEST)):
        what = f"has a {LATEST} that names no step that is there"
    elif any(os.path.exists(os.path.join(path, name)) for name in _POINTERS):
        yield from faults_of(error)
        return
    if not found:
        found, what = _below(path, _points), f"contains folders of checkpoints and is none itself, so {anew}"
        found = found or [run for folder in _below(path, os.path.isdir) for run in _below(folder, _points)]
    if found:
        yield CheckpointNotFound.fault(path, what, "one checkpoint", _names(found), mend=_GIVE.format(found[-1]))


def _below(folder: str, kind: Callable[[str], bool]) -> list[str]:
    """The folders of a kind in a folder, 10 behind 9; none where it cannot be listed."""
    try:
        names = sorted(os.listdir(folder), key=natural)
    except OSError:
        return []
    return [path for name in names if os.path.isdir(path := os.path.join(folder, name)) and kind(path)]


def _is_training(folder: str) -> bool:
    """Whether the folder is a checkpoint of a training run, and no weights alone, as of a base model."""
    found = format_of(folder)
    return found is not None and found[0].name != "plain PyTorch"


def _points(folder: str) -> bool:
    """Whether a file in the folder names the last of its checkpoints."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in _POINTERS)


def _names(found: Sequence[str]) -> str:
    return ", ".join(map(os.path.basename, found[-8:]))


def _told(path: object, found: object) -> tuple[object, str | None]:
    """What a rank resumes from, and as what the others may see it under another folder's name."""
    if found is None:
        return None, None
    of = "of" if is_nanotron(str(found)) else "not of"
    return found, f"{os.path.relpath(str(found), str(path))} {of} nanotron's"


def _other_finds(path: str, told: list[str | None]) -> list[Fault]:
    """A fault where ranks would resume from other checkpoints, or some of them begin anew."""
    first = told[0]
    for number, one in enumerate(told):
        if one is not None and first is not None and one != first:
            what, found = "ranks find other checkpoints there", f"{one} on rank {number}"
            return [CheckpointDamaged.fault(path, what, f"{first}, as on rank 0", found, mend=SEEN_BY_ALL)]
    return unseen_faults(path, [one is not None for one in told])


def _by_url(url: str, world: ProcessGroup) -> Path | None:
    """The same, told to all ranks by the first; None where nothing is there, and nanotron begins anew."""

    def look() -> str | None:
        folders.renew(url)
        if folders.is_folder(url):
            return find_listing(url, None).folder
        logger.warning("%s: nothing is there: the run begins anew", url)
        return None

    found, faults, cause = attempt(lambda: look() if world.rank() == 0 else None)
    found, faults = broadcast((found, faults), world)
    raise_caused(faults, subject=f"loading {url}", cause=cause)
    return Path(found) if found is not None else None


_COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]+):/(?=[^/])", re.IGNORECASE)


def folder_of(path: object) -> str:
    """A folder as it is named; of a URL pathlib takes one of the two slashes away."""
    text = str(path)
    if is_url(text) or os.path.exists(text):
        return text
    return _COLLAPSED.sub(lambda found: f"{found[1]}://" + "/" * (found[1] == "file"), text, count=1)


class Module(Protocol):
    """nanotron's model; `get_parameter` raises AttributeError for a buffer."""

    def named_modules(self) -> Iterator[tuple[str, object]]: ...

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def get_parameter(self, target: str) -> torch.Tensor: ...


def load_weights(call: Call) -> object:
    """Fill a model from a folder of any format; nanotron's own way from its own. Collective where it is another's.

    Nothing has changed on any rank where it raises for what was opened and compared.
    """
    context, folder = cast(ParallelContext, call["parallel_context"]), folder_of(call["root_folder"])
    load = current()
    foreign = foreign_of(load, folder, context.world_pg, call["model"])
    if foreign is None:
        return call() if load.trainer is None else _own_weights(call, load, context, folder)
    subject, world = f"loading {folder}", context.world_pg
    same_policy(load.policy, world, subject=subject)
    given = cast("Mapping[str, torch.Tensor] | None", call.arguments.get("filtered_state_dict"))
    model = cast(Module, call["model"])
    weights = run_on_all(lambda: list(_weights(model, given, foreign.content.tied)), world, subject=subject)
    shapes = {
        name: shape
        for of_rank in gather({saved: one.shape for saved, one in weights}, world)
        for name, shape in of_rank.items()
    }
    content = foreign.content
    wanted = {
        name: one.shape
        for name, one in content.weights.items()
        if name in shapes or (given is None and name not in content.buffers)
    }
    faults = match_tensors(shapes, wanted, mend=_renamed(content, shapes) or _NAMES)
    fitting = [(saved, one) for saved, one in weights if wanted.get(saved) == one.shape]
    planned, found, cause = attempt(lambda: _plan(foreign, fitting, context))
    copies, others = planned or ([], [])
    later = _wanted_later(load, foreign) if given is None else []
    agree([*faults, *found, *others, *later], world, subject=subject, cause=cause)
    import torch.distributed as dist

    replica = dist.get_rank(context.dp_cp_pg)
    made = {str(one.number): one.tensor.detach() for _, one in weights}
    fill(Plan(copies=coalesce(copies)), made, world, replica=replica, subject=subject)
    return {one.name: {} for _, one in weights}


def _renamed(content: Content, run: Collection[str]) -> str | None:
    """The line that gives all weights the names of the run, if wrappers alone make them differ."""
    found = patterns(list(content.weights), run)
    names = {old: (new,) for old, new in (found or {}).items()}
    if not names or any(NameMap(path="", names=names, digest="").faults(content)):
        return None
    return f'write {json.dumps(found)} to map.json, and set DS_RESHARD_SETTINGS=\'{{"names": "map.json"}}\''


def _own_weights(call: Call, load: Load, context: ParallelContext, folder: str) -> object:
    """What nanotron's own loading answers, once ranks that hold the same weights have read the same. Collective.

    Each has read files of its own node, which tell no checksum: so what was read is compared, after it is in place.
    """
    import torch.distributed as dist

    model, given = cast(Module, call["model"]), call.arguments.get("filtered_state_dict")
    _match_own(model, cast("Mapping[str, torch.Tensor] | None", given), load, context, folder)
    made = run_on_all(call, context.world_pg, subject=f"loading {folder}")
    alike = ", ".join(map(str, dist.get_process_group_ranks(context.dp_cp_pg)))
    held = cast("Mapping[str, torch.Tensor]", given or model.state_dict())
    read = {
        f"{folder}/model: {name}, on ranks {alike}": str(fingerprint_of(one.detach().contiguous())).encode()
        for name, one in held.items()
        if one.numel()
    }
    same = len(set(gather(digest(sorted(read.items())), context.dp_cp_pg))) == 1
    agree_files({} if same else read, context.world_pg, subject=f"loading {folder}, whose weights the model has now")
    return made


def _match_own(
    model: Module, given: Mapping[str, torch.Tensor] | None, load: Load, context: ParallelContext, folder: str
) -> None:
    """Refuse weights that nanotron's own checkpoint lacks or has in another shape; warn of those that only it has.

    nanotron raises on the ranks that train them alone, copies one element to all of a parameter, and passes over the
    rest. Collective; the first rank reads the headers of the weights. Experts are left out, as ranks have theirs under
    one name, and so is what a damaged folder lists.
    """
    world, subject = context.world_pg, f"loading {folder}"
    shapes = run_on_all(lambda: _shapes(model, given), world, subject=subject)
    run = {name: shape for of_rank in gather(shapes, world) for name, shape in of_rank.items()}

    def look() -> list[str]:
        listing = read_listing(folder)
        metadata = read_metadata(listing)[0]
        if (
            metadata is None
            or context.expert_parallel_size > 1
            or any("/model/" in one.where for one in listing.faults)
        ):
            return []
        parameters, faults = read_parameters(listing, metadata.tp)
        saved = {name: one.shape for name, one in parameters.items()}
        wanted = {name: shape for name, shape in saved.items() if name in run}
        raise_faults(faults or match_tensors(run, wanted, mend=_MODEL), subject=subject)
        return sorted(saved.keys() - run.keys()) if given is None else []

    left, faults, cause = attempt(lambda: look() if world.rank() == 0 else [])
    left, faults = broadcast((left, faults), world)
    raise_caused(faults, subject=subject, cause=cause)
    if left:
        names = f"{', '.join(left[:8])}{f' and {len(left) - 8} more' if len(left) > 8 else ''}"
        load.warn(f"{folder} has {len(left)} weights that this run's model has not, and they are left out: {names}")


def _shapes(model: Module, given: Mapping[str, torch.Tensor] | None) -> dict[str, Shape]:
    """The whole shapes of this rank's parameters, by the names under which nanotron saves them."""
    found: dict[str, Shape] = {}
    for name, parameter, _ in _parameters(model, given):
        sharded = getattr(parameter, "is_sharded", False)
        shape = parameter.get_sharded_info().unsharded_shape if sharded else parameter.shape  # type: ignore[attr-defined]
        found[name] = tuple(map(int, shape))
    return found


def _weights(
    model: Module, given: Mapping[str, torch.Tensor] | None, tied: Mapping[str, str]
) -> Iterator[tuple[str, LivePart]]:
    """The parameters of this rank, each with the name under which the checkpoint has it."""
    for number, (name, parameter, tensor) in enumerate(_parameters(model, given)):
        shape, tiles = tiles_of_parameter(name, parameter)
        stop = tensor.numel()
        part = LivePart(name=name, number=number, shape=shape, tiles=tiles, start=0, stop=stop, tensor=tensor)
        yield tied.get(name, name), part


def _parameters(
    model: Module, given: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each parameter of this rank, and what is filled of it, by the name that nanotron saves it by (`load_weights`).

    Of a tied parameter that is the name in the first module that has it.
    """
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    prefixes[id(model)] = ""
    for name, tensor in (given if given is not None else model.state_dict()).items():
        parameter = model.get_parameter(name)
        own = name
        if getattr(parameter, "is_tied", False):
            own = parameter.get_tied_info().get_full_name_from_module_id_to_prefix(prefixes)  # type: ignore[attr-defined]
        yield own, parameter, tensor


def _plan(
    foreign: Source, weights: list[tuple[str, LivePart]], context: ParallelContext
) -> tuple[list[Copy], list[Fault]]:
    """The copies that fill this rank's weights, and everything that is wrong with them."""
    copies: list[Copy] = []
    faults, content = experts_of(context.expert_parallel_size), foreign.content
    shards, masters = foreign.checkpoint.shards(), set[str]()
    index = shards.index.with_layout(foreign.layout)
    for name, one in weights:
        dtype = element_type(one.tensor.dtype)
        keys = [TensorKey(name=name, kind=kind) for kind in (WEIGHT, MASTER)]
        saved = {key.kind: content.tensors[key] for key in keys if key in content.tensors}
        mend = f"model.dtype: {saved[WEIGHT].dtype.label}, or {_OWN.format(folder=foreign.folder)}"
        types = {kind: tensor.dtype for kind, tensor in saved.items()}
        kind = choose_source(one.name, dtype, types, faults, casts=False, mend=mend)
        if kind is None:
            continue
        key = saved[kind].origin
        masters |= {key.name} if key.kind == MASTER else set()
        for region, first in one.regions():
            copies += copies_of(index, key, region, buffer=str(one.number), element_offset=first, dtype=dtype)
    as_saved = foreign.layout is foreign.checkpoint.layout  # otherwise the masters have names of the run
    faults += unproved(foreign.checkpoint, masters if as_saved else None) if masters else ()
    return copies, [*faults, *shards.index.faults, *shards.compare()]


def _wanted_later(load: Load, foreign: Source) -> list[Fault]:
    """What the trainer asks for after the weights, and is not there."""
    policy = load.policy
    resumes = getattr(load.trainer, "init_checkpoint_path", None) is not None
    if not resumes or config_of(load, "checkpoints.load_lr_scheduler") is not True:
        return []
    _, faults, _ = attempt(lambda: metas_of(load, foreign))
    if lacks_schedule(foreign, policy):
        faults.append(no_schedule(foreign))
    return faults


def lacks_schedule(foreign: Source, policy: ResumePolicy) -> bool:
    """Whether the policy takes of the schedule what is not there."""
    if policy.schedule_is_this_runs:
        return policy.keeps_position and foreign.position is None
    return foreign.position is None or foreign.content.schedule is None


def states_of(source: Source, *, masters: bool) -> dict[str, dict[str, TensorSource]]:
    """The trained parameters with their states; masters only where they are wanted, or are no copy of the weight.

    Raises CheckpointDamaged where no optimizer was saved, and, of another format, why no run can go on from it.
    """
    content = source.content
    faults = [*content.faults] if source.foreign else []
    if content.facts is None or not content.facts.groups:
        what, mend = "holds no states of an optimizer", "--no-load-optim, to begin the optimizer anew from the weights"
        faults.append(CheckpointDamaged.fault(source.folder, what, "param groups and states", "none", mend=mend))
    raise_faults(faults, subject=f"loading {source.folder}")
    masters = any(stage.has_masters for stage in source.own.stages) if source.own is not None else masters
    return {
        name: {kind: held for kind, held in kinds.items() if kind != MASTER or masters or not _is_weight(content, name)}
        for name, kinds in content.trained.items()
    }


def _is_weight(content: Content, name: str) -> bool:
    """True if a parameter is its own master."""
    return name in content.weights and content.weights[name].dtype is ElementType.FLOAT32


def no_schedule(foreign: Source) -> Fault:
    """A load that wants the rates of a schedule that this folder does not hold, or not as nanotron keeps one."""
    kept = SCHEDULER in foreign.content.entries
    return UnsupportedLayout.fault(
        foreign.folder,
        "its scheduler is none that nanotron could go on with" if kept else "holds no scheduler: it is not there",
        "the state of torch's LambdaLR, with a rate for each param group",
        "another" if kept else "none",
        mend="--override-opt-param-scheduler, for this run's schedule at the checkpoint's step, or --no-load-lr-state",
    )


def meta_of(load: Load, foreign: Source, context: ParallelContext) -> object:
    """nanotron's metadata of such a folder: its own where it came from nanotron, else steps and samples.

    Raises UnsupportedLayout for counters that are not there, and for samples of several data stages or folders.
    """
    from nanotron.serialize import metadata as nanotrons

    own = metas_of(load, foreign)
    told = cast("list[dict[str, object]] | None", own.get("data_stages"))
    stages = None if told is None else [nanotrons.DataStageMetadata(**stage) for stage in told]
    metas = nanotrons.TrainingMetadata(**{**own, "data_stages": stages})
    return nanotrons.CheckpointMetadata(version=None, tp=context.tp_pg.size(), dp=context.dp_pg.size(), metas=metas)


def metas_of(load: Load, foreign: Source) -> dict[str, object]:
    """Return the fields of nanotron's `TrainingMetadata`, as nanotron saved them, or made from the checkpoint.

    Raises if the steps or the samples of the one data stage are unknown, and the policy does not reset them.
    """
    content, policy = foreign.content, load.policy
    own = content.entries.get(METADATA)
    if isinstance(own, dict) and own.get("last_train_step") == content.steps:
        return own
    stages, reset = config_of(load, "data_stages"), policy.dataloader == "reset" or not policy.keeps_iteration
    listed = list(stages) if isinstance(stages, list | tuple) else []
    faults = []
    if content.steps is None and policy.keeps_iteration:
        what, mend = "does not say how many steps were made: they are not there", "--reset-iteration, to begin at 0"
        faults.append(UnsupportedLayout.fault(foreign.folder, what, "global_steps", "none", mend=mend))
    if not reset and (content.samples is None or len(listed) != 1):
        what = "does not say what was consumed of which data: that is not there"
        found = f"{content.samples} samples, {len(listed)} data stages in this run"
        mend = "--reset-dataloader"
        if content.samples is not None and not listed:  # as a step of several stages cannot show what was consumed
            mend = f"{mend}, or {_OWN.format(folder=foreign.folder)}"
        faults.append(UnsupportedLayout.fault(foreign.folder, what, "samples, and one data stage", found, mend=mend))
    raise_faults(faults, subject=f"loading {foreign.folder}")
    samples = 0 if reset else content.samples
    told: list[dict[str, object]] = []
    for stage in listed:
        names = ("name", "start_training_step", "sequence_length")
        told.append({**{name: getattr(stage, name, None) for name in names}, "consumed_train_samples": samples})
    return {
        "consumed_train_samples": samples,
        "last_train_step": content.steps or 0,
        "consumed_tokens_total": None if told else 0,
        "last_stage_idx": 0,
        "data_stages": told,
    }
