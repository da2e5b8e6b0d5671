"""What a folder of torch.distributed.checkpoint says beside its tensors: steps, param groups, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_reshard.containers.dcp_directory import Directory, Place
from ds_reshard.errors import Fault, UnsafePickle, raise_faults
from ds_reshard.formats.dcp.names import GroupKey, Path, group_key, is_state, tensor_key
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, canonical
from ds_reshard.model.records import TensorRecord


@dataclass(slots=True, kw_only=True)
class Values:
    """Everything that is no logical tensor: `objects` are the user's own, by their paths."""

    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    grouped: dict[GroupKey, object] = field(default_factory=dict)
    objects: dict[Path, object] = field(default_factory=dict)

    def facts(self, names: Sequence[str]) -> OptimizerFacts | None:
        """Of the optimizer that has states of the parameters `names`, in their order; None where there is none."""
        if not (names or self.grouped):
            return None
        return OptimizerFacts(groups=tuple(self._numbered() or self._flattened(names)), scalars=self.scalars)

    def _numbered(self) -> list[GroupFacts]:
        """The groups that were saved by their positions."""
        found: dict[int, dict[str, object]] = {}
        for key, value in self.grouped.items():
            if key.position is not None:
                found.setdefault(key.position, {})[key.name] = value
        groups = []
        for _, values in sorted(found.items()):
            members = values.pop("params", ())
            names = tuple(map(str, members)) if isinstance(members, list | tuple) else ()
            groups.append(GroupFacts(members=names, hyperparameters=values))
        return groups

    def _flattened(self, names: Sequence[str]) -> list[GroupFacts]:
        """The groups of values that were saved for each parameter: those that have the same are one."""
        found: dict[str, dict[str, object]] = {}
        for key, value in self.grouped.items():
            if key.member is not None:
                found.setdefault(key.member, {})[key.name] = value
        alike: dict[str, list[str]] = {}
        order = {name: number for number, name in enumerate(names)}
        for name in sorted(found, key=lambda name: order.get(name, len(order))):
            alike.setdefault(canonical(found[name]), []).append(name)
        return [GroupFacts(members=tuple(members), hyperparameters=found[members[0]]) for members in alike.values()]


def read_values(directory: Directory, single: Mapping[str, Place]) -> Values:
    """Read every object, and the tensors of one element in `single`; nothing is executed.

    Raises what reading a damaged file raises, and UnsafePickle for what would act on the machine.
    """
    values = Values()
    faults: list[Fault] = []
    for family, place in {**directory.objects, **single}.items():
        path = directory.paths.get(family, (family,))
        with place.open() as archive:
            try:
                value = archive.load()
            except UnsafePickle as error:
                faults += [replace(fault, what=f"{family}: {fault.what}") for fault in error.faults]
                continue
            if isinstance(value, TensorRecord) and value.numel == 1:
                value = ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
        group = group_key(path)
        if group is not None:
            values.grouped[group] = value
        elif is_state(path) and isinstance(value, ScalarTensor | int | float | str | None):
            key = tensor_key(path)
            values.scalars.setdefault(key.name, {})[key.kind] = value
        else:
            values.objects[path] = value
    raise_faults(faults, subject="reading a checkpoint")
    return values
