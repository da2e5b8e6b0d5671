"""The load of Megatron-LM's training as the steps of operations/load.py: who loads, and what all ranks agree on.

What can be read here is loaded straight from its files, whatever has changed of the layout or has not (`direct`).
Megatron's own code loads other formats, and what can be saved in a format that is read and is not filled here (fp16,
SGD, parameters whose place nothing tells, ...), if nothing hinders it (`topology.hindrances`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digest, digests
from ds_reshard.containers.remote import is_url
from ds_reshard.errors import (
    CheckpointNotFound,
    Fault,
    ModelMismatch,
    ReshardError,
    UnsupportedLayout,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.megatron.checkpoint import TRACKER, chain_of
from ds_reshard.hosts.megatron.direct import MODEL, STATES, Taken, named_alike, planned
from ds_reshard.hosts.megatron.groups import experts_differ, plain_groups
from ds_reshard.hosts.megatron.live import Load, in_force, leaves, live_groups
from ds_reshard.hosts.megatron.pickles import refuse_unsafe_iteration
from ds_reshard.hosts.megatron.pieces import has_frozen, is_mixed, is_torch_adam, untold_tensors
from ds_reshard.hosts.megatron.topology import Saved, find_saved, hindrances, may_be_shifted, unfillable
from ds_reshard.hosts.megatron.weights import other_buffers, warn_of
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import WEIGHT
from ds_reshard.operations.load import ReadinessReport
from ds_reshard.operations.matching import TENSORS, TRAINED, match_tensors
from ds_reshard.operations.proof import unproved
from ds_reshard.operations.ranks import Steps, agree, gather, rank, world_size
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.resume.report import unwritable

Result = tuple[int, object]
UNREAD, MEGATRON, DIRECT = "Megatron-LM, unread", "Megatron-LM", "ds_reshard"
_UNTOLD = "is not told by its module's sharded_state_dict, so that torch_dist neither saves nor loads it"
_TELL = "tell it there, or freeze it (requires_grad), or add --no-load-optim"
_NUMBERED = (
    "its fp32 optimizer numbers its states, and no file tells which parameters were frozen: they are taken for those"
    " of the parameters that this run trains, in their order"
)
_SAME = "load it under the topology that saved it"
_ASKED = ("ckpt_step", "pretrained_checkpoint")  # which files are loaded, beside their place and the policy


class Found(NamedTuple):
    """What one rank has found. Each looks for itself: its node may have the folder under a name of its own."""

    saved: Saved | None = None
    faults: tuple[Fault, ...] = ()
    files: Mapping[str, bytes] = {}
    complete: bool = False

    def for_broadcast(self) -> Found:
        return Found()

    def failed(self, faults: Sequence[Fault]) -> Found:
        return self._replace(faults=tuple(faults))


@dataclass(slots=True)
class Choice:
    """Who loads. `hindered` is why Megatron could not, `source` what was opened here, `wrong` what it proves wrong.

    `untold` are tensors of this rank's model that torch_dist has no place for.
    """

    loader: str = UNREAD
    hindered: list[str] = field(default_factory=list)
    can_hand_over: bool = False
    source: Checkpoint | None = None
    taken: Taken | None = None
    wrong: list[Fault] = field(default_factory=list)
    untold: Sequence[str] = ()


class MegatronLoad:
    """One `load_checkpoint`; `announced` is what is wrong before anything is read, `install` what comes after."""

    built_alike = "give every rank the same command line"

    def __init__(
        self, load: Load, arguments: Namespace, announced: Sequence[Fault], install: Callable[[], Result]
    ) -> None:
        self.load, self.arguments, self._announced, self._install = load, arguments, announced, install
        self.where = str(arguments.load or getattr(arguments, "pretrained_checkpoint", None))
        self.wanted = load.optimizer is not None and not arguments.finetune and not arguments.no_load_optim
        groups = (group for part in leaves(load.optimizer) for group in live_groups(part))
        self.apart = any(group.get("is_expert_parallel") for group in groups)

    def read_run(self) -> None:
        raise_faults(self._announced, subject="resume policy")

    def in_force(self) -> AbstractContextManager[object]:
        return in_force(self.load)

    def nothing(self) -> Found:
        return Found()

    find = nothing

    def open(self, found: Found) -> Found:
        """Every rank: the small files, of what is left to Megatron none."""
        with digests() as files:
            saved = find_saved(self.arguments)
            if saved is not None and rank() == 0:
                raise_faults(unwritable(self.load.policy.report), subject=f"loading {self.where}")
        return Found(saved=saved, files=files)

    def choose(self, found: Found, steps: Steps) -> Choice:
        """What this rank does; every fault that can be known before anything changes."""
        choice, saved, subject = Choice(), found.saved, f"loading {self.where}"
        steps.take(lambda: raise_faults(found.faults, subject=subject), subject=subject)
        if is_url(self.where) and (saved is None or getattr(self.arguments, "pretrained_checkpoint", None)):
            steps.take(lambda: refuse_left_over(self.arguments), subject="resuming by URL")
        if saved is not None:
            steps.take(lambda: self._choose_loader(choice, saved), subject=f"loading {saved.folder}")
        return choice

    def _choose_loader(self, choice: Choice, saved: Saved) -> None:
        subject = f"loading {saved.folder}"
        own_adam = self.wanted and any(map(is_torch_adam, leaves(self.load.optimizer)))
        how = {"optimizer": self.wanted, "apart": self.apart, "own_adam": own_adam}
        choice.hindered = hindrances(saved, vars(self.arguments), **how)
        choice.can_hand_over = not choice.hindered
        untold = untold_tensors(self.load.models)
        if saved.whole:
            choice.untold = tuple(untold)
            trained = [name for name, tensor in untold.items() if tensor.requires_grad and self.wanted]
            raise_faults([ModelMismatch.fault(name, _UNTOLD, mend=_TELL) for name in trained], subject=subject)
        try:
            raise_faults(
                [UnsupportedLayout.fault(name, _UNTOLD, mend=_SAME) for name in untold if not saved.whole],
                subject=subject,
            )
            self._read(choice, saved)
            choice.loader = DIRECT
        except ReshardError as error:
            unread = left_to_megatron(faults_of(error), saved, choice.hindered)
            self._leave(choice, saved, unread, [one for one in faults_of(error) if one.what == TENSORS[0]])

    def _read(self, choice: Choice, saved: Saved) -> None:
        """Open the files and plan this rank's reads; UnsupportedLayout for what is not read or not filled here."""
        load, run, subject = self.load, vars(self.arguments), f"loading {saved.folder}"
        choice.source = source = open_checkpoint(find_listing(saved.folder, None), whole=False, optimizer=self.wanted)
        raise_faults(unfillable(saved, run, choice.hindered, optimizer=self.wanted), subject=subject)
        taken = planned(saved, source, load, run, optimizer=self.wanted, models=load.models)
        self._prove(choice, source, subject)
        choice.taken = taken

    def _prove(self, choice: Choice, source: Checkpoint, subject: str) -> None:
        """Note weights that are not the casts of their masters, and copies that differ; each rank looks at a part."""
        names = None if self.wanted else frozenset[str]()
        choice.wrong = unproved(source, names, part=rank(), of=world_size())
        raise_faults([one for one in choice.wrong if one.error == UnsupportedLayout.__name__], subject=subject)

    def _leave(self, choice: Choice, saved: Saved, unread: str, lacking: Sequence[Fault] = ()) -> None:
        """Leave the load to Megatron, once what it saves wrong, or would load half-way, has been looked at here.

        `lacking` are weights that were not found: they come first if the flat buffers of the optimizer differ, too.
        """
        load = self.load
        choice.loader, choice.taken, load.unread = MEGATRON, None, unread
        if not self.wanted or saved.arguments.get("no_save_optim"):
            return
        load.groups = plain_groups(chain_of(None, saved.objects) or ())
        others = [*other_buffers(saved, load.optimizer)]
        raise_faults([*lacking, *others] if others else [], subject=f"loading {saved.folder}")
        if not saved.whole and not all(map(is_mixed, leaves(load.optimizer))) and has_frozen(load.models):
            load.warnings.append(_NUMBERED)
        if may_be_shifted(saved):
            try:
                looked_at = choice.source is not None
                if choice.source is not None:
                    self._prove(choice, choice.source, f"loading {saved.folder}")
            except UnsupportedLayout:
                looked_at, choice.wrong = False, []
            if not looked_at:
                load.warnings.append(f"whether Megatron-LM has saved its states shifted was not looked at: {unread}")

    def hand_over(self, found: Found, choice: Choice) -> None:
        """Let Megatron load instead, as another rank does not fill what it has."""
        choice.can_hand_over = False
        if choice.loader == DIRECT:
            assert found.saved is not None
            self._leave(choice, found.saved, "another rank does not fill what it has")

    def readiness(self, found: Found, choice: Choice, files: Mapping[str, bytes]) -> ReadinessReport:
        """Of `torch_dist` each rank opens files of its own; of format `torch` all ranks open all."""
        by_path = [sorted(self._below(one).items()) for one in (found.files, files) if one]
        sets = (zip(*pairs, strict=True) for pairs in by_path)
        return ReadinessReport(
            policy=self.load.policy,
            loader=choice.loader,
            can_hand_over=choice.can_hand_over,
            arguments={name: getattr(self.arguments, name, None) for name in _ASKED},
            seen=bool(found.files),
            file_sets=frozenset((digest(paths), digest(contents)) for paths, contents in sets),
            files=frozenset(self._below(files).items() if found.saved is not None and found.saved.whole else ()),
        )

    def folder(self, found: Found) -> str:
        return found.saved.folder if found.saved is not None else self.where

    def file_digests(self, found: Found, choice: Choice, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return self._below({**found.files, **files})

    def _below(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """By the paths below the folder, which may be of another name on each node."""
        prefix = f"{self.where.rstrip('/')}/"
        return {path.removeprefix(prefix): read for path, read in files.items()}

    def compare_shards(self, found: Found, choice: Choice, states: bool) -> list[Fault]:
        return []

    def agreed(self, found: Found, choice: Choice) -> None:
        """Compare the tensors of all ranks with those of the checkpoint, once they read the same files. Collective."""
        taken, load = choice.taken, self.load
        agree(choice.wrong, subject=f"loading {self.folder(found)}")
        untold = sorted({name for names in gather(tuple(choice.untold)) for name in names})
        load.warnings += [f"{name} {_UNTOLD}: it keeps its initial value" for name in untold]
        if taken is None:
            return
        if not is_url(self.where):  # what is not read here is unpickled by others
            refuse_unsafe_iteration(taken.saved.folder, alone=world_size() == 1, optimizer=self.wanted)
        trained_here = frozenset(one.piece.name for one in taken.shares or ())
        names = gather((frozenset(one.name for one in taken.pieces), trained_here))
        has, trains = (dict.fromkeys(frozenset().union(*one)) for one in zip(*names, strict=True))
        placed = taken.source.layout.placements
        kept, folder = {key.name: None for key in placed if key.kind == WEIGHT}, taken.saved.folder
        faults = match_tensors(has, kept, mend=MODEL)
        faults = named_alike(faults, has, kept, folder, by_name=taken.saved.states_by_name)
        if self.arguments.finetune:
            strictness = self.arguments.dist_ckpt_strictness if taken.saved.whole else "ignore_all"
            faults = warn_of(load, faults, strictness, has)
        if taken.shares is not None:
            trained = {key.name: None for key in placed if key.kind != WEIGHT}
            faults += match_tensors(trains, trained, words=TRAINED, mend=STATES)
            faults += [] if self.apart else experts_differ(taken.groups(), taken.saved.folder)
        raise_faults(faults, subject=f"loading {taken.saved.folder}")
        load.taken, load.read_in_place = taken, True

    def fill(self, found: Found, choice: Choice) -> Result:
        return self._install()


def left_to_megatron(faults: Sequence[Fault], saved: Saved, hindered: Sequence[str]) -> str:
    """Return why Megatron loads. Raises if it cannot, or if anything is wrong but that this load is not made here.

    In format `torch` a node may have only the files of its own ranks, and names of unknown layers belong to no tensor
    of the model: Megatron's load compares both again (`weights.other_weights`).
    """
    unread = [fault for fault in faults if fault.error == UnsupportedLayout.__name__]
    if not saved.whole:
        own = [fault for fault in faults if fault.error == CheckpointNotFound.__name__ or fault.what == TENSORS[0]]
        unread += own
    if hindered:
        text = f"; and Megatron-LM cannot load it: {'; '.join(hindered)}"
        faults = [replace(one, what=one.what + text) if one in unread else one for one in faults]
    if hindered or len(unread) < len(faults):
        raise_faults(faults, subject=f"loading {saved.folder}")
    return "; ".join(dict.fromkeys(fault.what for fault in unread))


def refuse_left_over(arguments: Namespace) -> None:
    """Of a URL what would be left to Megatron, which takes it for a folder that is not there, and begins anew."""
    apart = "--pretrained-checkpoint stands beside it" if getattr(arguments, "pretrained_checkpoint", None) else ""
    if apart or folders.is_file(f"{arguments.load}/{TRACKER}"):
        what = apart or "holds no checkpoint of the formats torch and torch_dist, or it is Megatron's own choice which"
        mend = "copy it to a local folder, and give that"
        raise UnsupportedLayout.of(arguments.load, f"cannot be read by URL: {what}", mend=mend)
