"""Maps that change shapes: one tensor of a framework as parts of tensors of another, for weights and states alike."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise, product
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ds_reshard.containers import folders
from ds_reshard.containers.digests import note_names
from ds_reshard.errors import ConfigError, Fault, ModelMismatch, ReshardError, raise_faults
from ds_reshard.model.content import WEIGHT, Content, TensorSource, with_groups
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, canonical, describe
from ds_reshard.model.index import ZEROS
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Shape
from ds_reshard.model.views import Part, evaluate, parse_view, part_of, show, tiles_of, whole_shape

_PLACE = re.compile(r"\{([^{}]+)\}")
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEYS = {"sides", "numbers", "indices", "entries", "for", "same", "about"}

_INTERLEAVED = "rows of queries and keys are in the order of interleaved rotary embeddings"
_MINUS_ONE = "weights of norms are stored minus one"
OTHER_ROWS = {
    "rotary_interleaved": _INTERLEAVED,
    "rope_interleaved": _INTERLEAVED,
    "attention_output_gate": "each group of heads has gates beside its queries",
    "moe_mlp_glu_interleave_size": "gate and up rows of experts take turns",
    "apply_layernorm_1p": _MINUS_ONE,
    "layernorm_zero_centered_gamma": _MINUS_ONE,
}
"""Arguments that change the meaning of rows or values without changing a shape: a map has to name them in "for"."""

_GEMMAS = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma")
_OTHER_MODELS = {
    **dict.fromkeys((*_GEMMAS, "qwen3_next", "qwen3_5", "qwen3_5_text"), _MINUS_ONE),
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5", "helium"), _INTERLEAVED),
}
"""Models of transformers, by `model_type`, whose tensors have Llama's names, and other values or rows."""

_OF_MEGATRON = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "kv_channels": "head_dim",
    "num_query_groups": "num_key_value_heads",
    "num_experts": "num_local_experts",
    "padded_vocab_size": "vocab_size",
}
"""Arguments of Megatron-LM, by the names that transformers' `config.json` has for them."""

_MOST = 1_000_000
"""More layers or experts than any model has."""


class Form(NamedTuple):
    """A tensor of an entry: its names, of which a framework has one, and its view; None is padding."""

    names: tuple[str, ...]
    view: str

    def indices(self, known: Container[str]) -> list[str]:
        """Return the indices in its name; if it has several names, in the first."""
        words = (word for place in _PLACE.findall(self.names[0]) for word in _WORD.findall(place))
        return list(dict.fromkeys(word for word in words if word in known))

    def fault(self, known: Container[str]) -> str:
        """Return what is wrong with its names; empty if nothing is."""
        all_indices = {frozenset(Form((name,), "").indices(known)) for name in self.names}
        return f"{' | '.join(self.names)}: the names of one tensor have other indices" if len(all_indices) > 1 else ""


class Entry(NamedTuple):
    """One tensor of side `side` of the map, and the tensors of the other side that are its parts."""

    side: int
    whole: Form
    parts: tuple[Form | None, ...]
    optional: bool


class Equation(NamedTuple):
    """An entry for one layer or expert: the names of its tensors, and the parts if the whole tensor has a view.

    A part without a name is padding.
    """

    side: int
    whole: str
    shape: Shape | None
    parts: tuple[tuple[str | None, Part | None], ...]
    optional: bool

    @property
    def rows(self) -> object:
        """The arrangement of the rows, as a value to compare; None if only the name changes."""
        return (self.side, self.shape, [part for _, part in self.parts]) if self.shape is not None else None

    def names(self, side: int) -> list[str]:
        return [self.whole] if side == self.side else [name for name, _ in self.parts if name is not None]

    def shapes(self, side: int) -> dict[str, Shape | None]:
        if side == self.side:
            return {self.whole: self.shape}
        return {name: part and part.shape for name, part in self.parts if name is not None}


class Mapped(NamedTuple):
    """A content with the names and shapes of the other side, and the layout of the tensors that it is read from.

    `padding` has the tensors of the layout that the map leaves out, by the note that says so.
    """

    content: Content
    layout: Layout
    faults: tuple[Fault, ...]
    padding: Mapping[str, Sequence[TensorKey]] = MappingProxyType({})


class Coming(NamedTuple):
    """What is known of the coming run: the names of its parameters, and the configurations of its model.

    Each configuration comes with a name for messages. `order` has the names in the model's order, if that is known.
    """

    names: Container[str] = ()
    configurations: tuple[tuple[str, Mapping[str, object]], ...] = ()
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeMap:
    """A map of tensors between two frameworks, `sides`.

    `numbers` are those of the model, whole numbers or expressions, `indices` the ends of the indices in names,
    `written_for` the arguments of a run that it was written for. With `same`, tensors that it does not name stay.
    """

    path: str
    sides: tuple[str, str]
    numbers: Mapping[str, int | str]
    indices: Mapping[str, str]
    written_for: Mapping[str, object]
    about: str
    entries: tuple[Entry, ...]
    same: bool

    @property
    def digest(self) -> str:
        """A text that identifies what it says."""
        held = canonical([getattr(self, one.name) for one in fields(self) if one.name != "path"])
        return hashlib.sha256(held.encode("utf-8")).hexdigest()

    def with_numbers(self, numbers: Mapping[str, int]) -> ShapeMap:
        return replace(self, numbers={**self.numbers, **numbers})

    def apply(self, content: Content, layout: Layout, coming: Coming) -> Mapped:
        """Translate the content to the other side of the map; `layout` has the places of its tensors.

        If there are faults, the content is returned as it was.
        """
        side = self.side_of(content)
        if side is None:
            return Mapped(content, layout, (self._no_side(content),))
        configurations = [*_configurations(content), *coming.configurations]
        faults = [fault for _, one in configurations for fault in self._other_rows(one)]
        faults += self._contradictions(configurations)
        told = {name: value for _, one in reversed(configurations) for name, value in one.items()}
        numbers = self._numbers(told, faults)
        if faults:
            return Mapped(content, layout, tuple(faults))
        equations = self._equations(numbers, side, content, coming.names, faults)
        note_names(side, self.same, equations)
        ties = {name: one for one in equations for name in one.names(side) if name in content.tied}
        equations = [one for one in equations if ties.keys().isdisjoint(one.names(side))]
        faults += self._unlike(content, equations, side, not faults)
        if faults:
            return Mapped(content, layout, tuple(faults))
        return _Application(self, layout, content, equations, side).result(ties, coming.order)

    def _fault(self, where: str, what: str, expected: str = "", found: str = "", mend: str = "") -> Fault:
        return ModelMismatch.fault(where, what, expected, found, mend=mend or f"correct {self.path}")

    def _other_rows(self, told: Mapping[str, object]) -> Iterator[Fault]:
        for name, value in self.written_for.items():
            if name in told and told[name] != value:
                mend = "use a map that was written for this model"
                yield self._fault(name, "is not what the map was written for", str(value), str(told[name]), mend)
        for name, why in OTHER_ROWS.items():
            if told.get(name) and name not in self.written_for:
                mend = f'use a map that was written for it, with "for": {{"{name}": {json.dumps(told[name])}}}'
                yield self._fault(name, f"is set, and the map was not written for it: {why}", "", str(told[name]), mend)
        model = told.get("model_type")
        if isinstance(model, str) and model in _OTHER_MODELS and "model_type" not in self.written_for:
            mend = f'use a map that was written for it, with "for": {{"model_type": "{model}"}}'
            what = f"is not what the map was written for: {_OTHER_MODELS[model]}"
            yield self._fault("model_type", what, "", model, mend)

    def _contradictions(self, configurations: Sequence[tuple[str, Mapping[str, object]]]) -> Iterator[Fault]:
        """Yield a fault for each number that the map uses and to which two files give different values."""
        texts = [str(one) for one in (*self.numbers.values(), *self.indices.values())]
        for name in dict.fromkeys((*self.numbers, *(word for text in texts for word in _WORD.findall(text)))):
            values = {where: one[name] for where, one in configurations if type(one.get(name)) is int}
            if len(set(values.values())) > 1:
                found = ", ".join(f"{value} in {where}" for where, value in values.items())
                yield self._fault(
                    name, "is another number in one file than in another", "one", found, "correct the files"
                )

    def _numbers(self, told: Mapping[str, object], faults: list[Fault]) -> dict[str, int]:
        """Return the numbers that the files give, together with those of the map, whose expressions are evaluated.

        Adds to `faults` if a whole number of the map differs from the files, or if an expression has no value.
        """
        found = {name: value for name, value in told.items() if type(value) is int}
        for name, given in self.numbers.items():
            if type(given) is int and found.setdefault(name, given) != given:
                what = "is another number in the checkpoint or the run than in the map"
                faults.append(self._fault(name, what, str(given), str(found[name])))
        found = _completed(found)
        choices = {name: given.split(" | ") for name, given in self.numbers.items() if isinstance(given, str)}
        known = found.keys() | choices.keys()
        expressions = {
            name: next((one for one in texts if known.issuperset(_WORD.findall(one))), texts[0])
            for name, texts in choices.items()
        }
        words = (word for given in expressions.values() for word in _WORD.findall(given))
        if lacking := [word for word in dict.fromkeys(words) if word not in known]:
            form = json.dumps({"map": self.path, "numbers": dict.fromkeys(lacking, 0)}).replace(": 0", ": ...")
            what = f"needs numbers of the model that no file tells: {', '.join(lacking)}"
            faults.append(ConfigError.fault(self.path, what, mend=f"give them: names that are {form}"))
            return found
        for name, text in expressions.items():
            try:
                found[name] = evaluate(text, found)
            except ValueError as error:
                faults.append(
                    ConfigError.fault(self.path, f"its number {name!r}: {error}", mend=f"correct {self.path}")
                )
        return found

    def side_of(self, content: Content) -> int | None:
        """Return the number of the side whose names the content has, and the other has not; None if there is none."""
        alone = self._alone(content)
        return int(bool(alone[1])) if bool(alone[0]) != bool(alone[1]) else None

    def has_names(self, side: int, content: Content) -> bool:
        """Return True if each weight has a name of this side."""
        forms = self._names(side)
        return all(any(form.fullmatch(name) for form in forms) for name in content.weights)

    def _alone(self, content: Content) -> list[set[str]]:
        """Return the names of the content that are names of each side, and not of the other."""
        names = [self._names(side) for side in (0, 1)]
        matches = [{name for name in content.weights if any(form.fullmatch(name) for form in forms)} for forms in names]
        return [matches[0] - matches[1], matches[1] - matches[0]]

    def _no_side(self, content: Content) -> Fault:
        counts = [len(names) for names in self._alone(content)]
        found = f"{counts[0]} of {self.sides[0]}, {counts[1]} of {self.sides[1]}"
        what = f"has names of {'both sides' if any(counts) else 'neither side'} of the map"
        return self._fault(content.folder, what, f"names of {self.sides[0]} or of {self.sides[1]}", found)

    def _names(self, side: int) -> list[re.Pattern[str]]:
        """Return patterns of the names of a side; an index stands for any number."""
        forms = [form for entry in self.entries for form in ([entry.whole] if side == entry.side else entry.parts)]
        names = dict.fromkeys(name for form in forms if form is not None for name in form.names)
        return [re.compile("[0-9]+".join(map(re.escape, _PLACE.split(name)[::2]))) for name in names]

    def _equations(
        self, numbers: Mapping[str, int], side: int, content: Content, wanted: Container[str], faults: list[Fault]
    ) -> list[Equation]:
        known = content.weights.keys() | content.tied.keys()
        try:
            ranges = {name: evaluate(text, numbers) for name, text in self.indices.items()}
        except ValueError as error:
            faults.append(ConfigError.fault(self.path, f"an index has no end: {error}", mend=f"correct {self.path}"))
            return []
        for name, end in ranges.items():
            if end > _MOST:
                what = f"its index {name!r} goes up to {end}, and no model has so many"
                faults.append(ConfigError.fault(self.path, what, mend=f"correct {self.path}"))
        if faults:
            return []
        found, wrong = list[Equation](), set[Entry]()
        for entry in self.entries:
            for form in (entry.whole, *(part for part in entry.parts if part is not None)):
                if why := form.fault(ranges):
                    faults.append(ConfigError.fault(self.path, why, mend=f"correct {self.path}"))
                    wrong.add(entry)
        for loops, entries in groupby(self.entries, lambda entry: entry.whole.indices(ranges)):
            together = [*entries]  # one layer has all of its tensors before the next one
            for index in product(*(range(ranges[name]) for name in loops)):
                here = dict(zip(loops, index, strict=True))
                for entry in (entry for entry in together if entry not in wrong):
                    try:
                        found.append(_equation(entry, numbers, ranges, here, side, known, wanted))
                    except ValueError as error:
                        faults.append(ConfigError.fault(self.path, str(error), mend=f"correct {self.path}"))
                        wrong.add(entry)
        return [one for one in found if not (one.optional and known.isdisjoint(one.names(side)))]

    def _unlike(self, content: Content, equations: Sequence[Equation], side: int, all_entries: bool) -> Iterator[Fault]:
        """Yield a fault for each name that only one side has, that is given twice, or whose shape differs.

        If an entry was refused (`all_entries` is false), its tensors are not said to be in no entry.
        """
        saved = content.weights
        for at in (side, 1 - side):
            seen = set[str]()
            for name in (name for equation in equations for name in equation.names(at)):
                if name in seen:
                    yield self._fault(name, f"is given twice in the map, among the names of {self.sides[at]}", "once")
                seen.add(name)
        given = {name: shape for equation in equations for name, shape in equation.shapes(side).items()}
        for name, shape in given.items():
            if name not in saved:
                what = "is in the map, and not in the source"
                yield self._fault(name, what, f"a parameter of {self.sides[side]}", "none of this name")
            elif shape is not None and shape != tuple(saved[name].shape):
                what = "does not have the shape that the map's numbers give"
                yield self._fault(name, what, str([*shape]), str([*saved[name].shape]))
        forms = self._names(side)
        for name in sorted(saved.keys() - given):
            if not any(form.fullmatch(name) for form in forms):
                if not self.same:
                    yield self._fault(name, "is in the source and not in the map", "every parameter", "no entry")
            elif all_entries:
                what = f"is a name of {self.sides[side]}, and no entry takes it: numbers of the map are others"
                yield self._fault(name, f"{what}, or the tensor has two names", "an entry", "none")
        new = {name for equation in equations for name in equation.names(1 - side)}
        for name in sorted(new & (content.names - given.keys())):
            yield self._fault(name, "is a new name by the map, and that of a tensor that stays", "one tensor", "two")


def _equation(
    entry: Entry,
    numbers: Mapping[str, int],
    ranges: Mapping[str, int],
    here: Mapping[str, int],
    side: int,
    saved: Container[str],
    wanted: Container[str],
) -> Equation:
    """Return an entry for one value of each index of its whole. Raises ValueError with the reason if it has a fault."""

    def name_of(form: Form, at: Mapping[str, int], of_side: int) -> str:
        known = {**numbers, **at}
        names = [_PLACE.sub(lambda place: str(evaluate(place[1], known)), name) for name in form.names]
        return next((name for name in names if name in (saved if of_side == side else wanted)), names[0])

    whole = name_of(entry.whole, here, entry.side)
    if not entry.whole.view:
        (part,) = entry.parts
        assert part is not None
        if lacking := [name for name in part.indices(ranges) if name not in here]:
            raise ValueError(f"{part.names[0]}: {{{lacking[0]}}} is no index of {whole}, which has no view")
        return Equation(entry.side, whole, None, ((name_of(part, here, 1 - entry.side), None),), entry.optional)
    view, parts = parse_view(entry.whole.view), list[tuple[str | None, Part | None]]()
    for number, form in enumerate(entry.parts):
        if form is None:
            parts.append((None, part_of(view, number, numbers, own=None, stacked={})))
            continue
        own = parse_view(form.view) if form.view else None
        stacked = [name for name in form.indices(ranges) if name not in here]
        factors = {factor for dimension in view for factor in dimension}
        if lacking := [name for name in stacked if name not in factors or ranges[name] != evaluate(name, numbers)]:
            raise ValueError(f"{form.names[0]}: {{{lacking[0]}}} is no index of {whole}, and no factor of its view")
        for index in product(*(range(ranges[name]) for name in stacked)):
            at = dict(zip(stacked, index, strict=True))
            named = name_of(form, {**here, **at}, 1 - entry.side)
            found = part_of(view, number, numbers, own=own, stacked=at)
            if not prod(found.shape):
                raise ValueError(f"the view {show(view)!r} has a part without elements: {named}")
            parts.append((named, found))
    return Equation(entry.side, whole, whole_shape(view, numbers), tuple(parts), entry.optional)


def nested_faults(content: Content, moved: Container[str], path: str) -> Iterator[Fault]:
    """Yield a fault for each value inside an optimizer state that is a dict or list, of a name that a map moves."""
    for keys in (*content.extra_tensors.values(), *content.objects):
        after = (one for key, one in pairwise(keys) if key == "state")
        if any(isinstance(one, str) and one in moved for one in after):
            what = "is an optimizer state inside a dict or a list, which no map can rename"
            where, expected = ".".join(map(str, keys)), "states that are tensors or numbers"
            yield ModelMismatch.fault(where, what, expected, mend=f"leave it out of {path}")


class _Application:
    """Applies a map to a content that has all tensors of the equations."""

    def __init__(
        self, names: ShapeMap, layout: Layout, content: Content, equations: Sequence[Equation], side: int
    ) -> None:
        self._side, self._same = side, names.same
        self._path, self._layout, self._content = names.path, layout, content
        self._tensors = dict[TensorKey, TensorSource]()
        self._placements = dict(layout.placements)
        self._faults, self._notes = list[Fault](), list[str]()
        self._padding = dict[str, dict[TensorKey, None]]()
        self._zeros_nbytes = 0
        self._kept = dict[str, str]()
        """The new name of each tensor that stays whole."""
        self._members = dict[str, tuple[str, ...]]()
        """The saved names that each new name is made of, in the order of the new names."""
        tensors = dict[str, dict[str, TensorSource]]()
        for key, tensor in content.tensors.items():
            tensors.setdefault(key.name, {})[key.kind] = tensor
        first = {name: equation for equation in equations for name in equation.names(side)[:1]}
        mapped = {name for equation in equations for name in equation.names(side)}
        self._named, self._equation_of = mapped, first
        ordered = [*tensors] if names.same else [*first, *(name for name in tensors if name not in first)]
        for name in ordered:
            equation = first.get(name)
            if equation is None:
                if name not in mapped:
                    self._keep(name, name, tensors[name])
            elif equation.shape is None:
                self._keep(name, equation.names(1 - side)[0], tensors[name])
            elif equation.side == side:
                self._split(equation, tensors[name])
            else:
                self._join(equation, {name: tensors[name] for name in equation.names(side)})

    def _origin(self, name: str, kind: str) -> TensorKey:
        """Return the key of a new tensor's place, which no tensor of the source has."""
        key = TensorKey(name, kind)
        while key in self._layout.placements:
            key = key._replace(name=f"{key.name} (mapped)")
        return key

    def _keep(self, old: str, new: str, tensors: Mapping[str, TensorSource]) -> None:
        self._members[new] = (old,)
        self._kept[old] = new
        self._tensors |= {TensorKey(new, kind): tensor for kind, tensor in tensors.items()}

    def _tied(self, ties: Mapping[str, Equation]) -> dict[str, str]:
        """Return the new names of tied parameters, by further name; `ties` are the equations of further names."""
        tied = dict[str, str]()
        for other, name in self._content.tied.items():
            made = [new for new, olds in self._members.items() if olds == (name,)]
            if len(made) != 1 or TensorKey(made[0], WEIGHT) not in self._tensors:
                what = f"is tied to {other}, and is no tensor of its own by the map"
                self._add(name, what, "an entry without a view")
                continue
            if other not in ties and not self._same:
                self._notes.append(
                    f"left out: {other}, which is tied to {name} in the source, because the map does not name {other}"
                )
                continue
            equation, first_equation = ties.get(other), self._equation_of.get(name)
            if (equation and equation.rows) != (first_equation and first_equation.rows):
                self._add(name, f"is tied to {other}, which has other rows by the map", "the same view of both")
            new = equation.names(1 - self._side)[0] if equation is not None else other
            if new in self._members or tied.setdefault(new, made[0]) != made[0]:
                self._add(new, f"is tied to {name}, and is the name of another tensor too", "a name of its own")
        return tied

    def result(self, ties: Mapping[str, Equation], order: Sequence[str]) -> Mapped:
        if order:  # DeepSpeed's own loads go by the order of parameters
            at = {name: number for number, name in enumerate(order)}
            self._members = dict(sorted(self._members.items(), key=lambda one: at.get(one[0], len(at))))
            self._tensors = dict(sorted(self._tensors.items(), key=lambda one: at.get(one[0].name, len(at))))
        content, members = self._content, self._members
        tied = self._tied(ties)
        facts = content.facts
        if facts is not None:
            numbers, groups = self._groups(facts)
            content = with_groups(content, groups, numbers, self._path)
            assert content.facts is not None
            scalars = {new: facts.scalars[olds[0]] for new, olds in members.items() if olds[0] in facts.scalars}
            named = {old for olds in members.values() for old in olds}
            scalars |= {name: values for name, values in facts.scalars.items() if name not in named}
            facts = OptimizerFacts(groups=content.facts.groups, scalars=scalars)
        moved = {name for name in self._named if self._kept.get(name) != name}
        self._faults += nested_faults(content, moved, self._path)
        buffers = frozenset(new for new, olds in members.items() if content.buffers.issuperset(olds))
        for new, olds in members.items():
            if new not in buffers and not content.buffers.isdisjoint(olds):
                self._add(new, "would be made of buffers and parameters", "one of them", ", ".join(olds))
        notes = [note for note in content.notes if note not in content.shape_notes]
        mapped = replace(
            content,
            notes=(*notes, *self._notes),
            tensors=self._tensors,
            tied=tied,
            facts=facts,
            buffers=buffers | (content.buffers - {old for olds in members.values() for old in olds}),
            records={
                self._kept.get(name, name): record
                for name, record in content.records.items()
                if name in self._kept or TensorKey(name, WEIGHT) not in content.tensors
            },
            native_source=None,
        )
        layout = self._layout
        if not self._faults and self._placements.keys() != layout.placements.keys():
            layout = Layout(self._placements, {**layout.shards, ZEROS: 1})
        return Mapped(mapped, layout, tuple(self._faults), {note: [*keys] for note, keys in self._padding.items()})

    def _add(self, where: str, what: str, expected: str = "", found: str = "") -> None:
        self._faults.append(ModelMismatch.fault(where, what, expected, found, mend=f"correct {self._path}"))

    def _split(self, equation: Equation, tensors: Mapping[str, TensorSource]) -> None:
        """Split a tensor of the source into its parts. A part without a name is padding: left out, with a note.

        `tensors` has the weight and the optimizer states of the tensor, by kind.
        """
        note = self._note_padding("left out", equation)
        for kind, tensor in tensors.items():
            placement = self._placement(equation.whole, kind, tensor, equation.shape)
            for number, (name, part) in enumerate(equation.parts):
                if part is None or placement is None:
                    continue
                origin = self._origin(name or f"{equation.whole} (padding {number})", tensor.origin.kind)
                tiles = [*tiles_of(placement, origin, part.shape, part)]
                if name is not None:
                    self._members[name] = (equation.whole,)
                    self._place(name, kind, tensor, part.shape, tiles)
                elif tiles:
                    self._placements[origin] = _together(tiles, part.shape)
                    self._padding.setdefault(note, {})[origin] = None

    def _note_padding(self, what: str, equation: Equation) -> str:
        """Add a note of what becomes of the padding of a tensor, if it has any, and return it."""
        numel = sum(prod(part.shape) for name, part in equation.parts if name is None and part is not None)
        note = f"{what}: {numel} elements of {equation.whole} that the map says are padding"
        self._notes += [note] if numel else []
        return note

    def _join(self, equation: Equation, parts: Mapping[str, Mapping[str, TensorSource]]) -> None:
        assert equation.shape is not None
        kinds = {
            name: {kind: f"{one.dtype.label} in {one.origin.kind}" for kind, one in of_part.items()}
            for name, of_part in parts.items()
        }
        if any(one != other for one, other in pairwise(kinds.values())):
            found = "; ".join(f"{name}: {', '.join(map(' '.join, one.items()))}" for name, one in kinds.items())
            self._add(equation.whole, "would be made of tensors with other states or types", "the same of all", found)
            return
        self._note_padding("made of zeros", equation)
        self._members[equation.whole] = tuple(parts)
        for kind in next(iter(kinds.values())):
            tiles = list[Placement]()
            for name, part in equation.parts:
                assert part is not None
                tensor = parts[name or next(iter(parts))][kind]
                origin = self._origin(equation.whole, tensor.origin.kind)
                if name is not None:
                    placement = self._placement(name, kind, tensor, part.shape)
                else:
                    placement = self._zeros(origin, tensor.dtype, part.shape)
                if placement is not None:
                    tiles += tiles_of(placement, origin, equation.shape, part, joins=True)
            self._place(equation.whole, kind, tensor, equation.shape, tiles)

    def _zeros(self, key: TensorKey, dtype: ElementType, shape: Shape) -> Placement:
        """Return the placement of a tensor of zeros."""
        buffer, numel = str(self._zeros_nbytes), prod(shape)
        self._zeros_nbytes += numel * dtype.itemsize
        return Placement(key, shape, dtype, ZEROS, buffer, Cut(chunk=max(1, numel)), Box.whole(shape))

    def _placement(self, name: str, kind: str, tensor: TensorSource, shape: Shape | None) -> Placement | None:
        if tuple(tensor.shape) != shape:
            what = f"has a state of another shape, {kind}: the map's rows are those of the parameter"
            self._add(name, what, str([*(shape or ())]), str([*tensor.shape]))
            return None
        self._placements.pop(tensor.origin, None)
        return self._layout[tensor.origin]

    def _place(self, name: str, kind: str, tensor: TensorSource, shape: Shape, tiles: Sequence[Placement]) -> None:
        """Add a new tensor that consists of these tiles of the source; do nothing if there are none."""
        if not tiles:
            return
        origin = self._origin(name, tensor.origin.kind)
        self._placements[origin] = _together(tiles, shape)
        self._tensors[TensorKey(name, kind)] = TensorSource(shape=shape, dtype=tensor.dtype, origin=origin)

    def _groups(self, facts: OptimizerFacts) -> tuple[list[int], list[GroupFacts]]:
        """Return the param groups with the new names, and the number of the saved group that each was."""
        group_of = {name: number for number, group in enumerate(facts.groups) for name in group.members}
        members = dict[int, list[str]]()
        for new, olds in self._members.items():
            numbers = {group_of.get(old) for old in olds}
            values = {canonical([facts.groups[one].hyperparameters] if one is not None else None) for one in numbers}
            if len(values) > 1:
                found = "; ".join(
                    f"{old}: " + (f"group {group_of[old]}" if old in group_of else "not trained") for old in olds
                )
                self._add(new, "would be made of parameters of groups that differ", "one group, or equal values", found)
                continue
            steps = {canonical(facts.scalars.get(old)) for old in olds}
            if len(steps) > 1:
                found = "; ".join(f"{old}: {describe(facts.scalars.get(old))}" for old in olds)
                self._add(new, "would be made of parameters whose optimizer values differ", "equal steps", found)
            if None not in numbers:
                members.setdefault(min(number for number in numbers if number is not None), []).append(new)
        named = {old for olds in self._members.values() for old in olds}
        for name in group_of.keys() - named:  # of which the content has no tensor
            members.setdefault(group_of[name], []).append(name)
        order = [*members, *(number for number in range(len(facts.groups)) if number not in members)]
        return order, [replace(facts.groups[number], members=tuple(members.get(number, ()))) for number in order]


def _together(tiles: Sequence[Placement], shape: Shape) -> Placement:
    """Return the placement of a tensor that lies in these tiles."""
    return tiles[0]._replace(box=Box.whole(shape), tiles=tuple(tiles)) if len(tiles) > 1 else tiles[0]


_FORM = '{"sides": ["a", "b"], "entries": [{"a": "name : view", "b": ["name", ...]}, ...]}'


def read_shape_map(path: str, held: Mapping[str, object]) -> ShapeMap:
    """Return the map that a JSON object holds. Raises ConfigError with every reason why it is none."""
    faults = list[Fault]()

    def refuse(what: str) -> None:
        faults.append(ConfigError.fault(path, what, mend=f"give {_FORM}"))

    if unknown := sorted(held.keys() - _KEYS):
        refuse(f"has an unknown key: {', '.join(unknown)}")
    sides = held.get("sides")
    if not (isinstance(sides, list) and len(sides) == 2 and all(isinstance(one, str) for one in sides)):
        refuse('has no "sides", a list of two names')
        sides = ["", ""]
    elif sides[0] == sides[1] or "optional" in sides:
        refuse('has "sides" with one name twice, or with the name "optional"')
    if not isinstance(held.get("same", False), bool):
        refuse('has a "same" that is neither true nor false')
    numbers, indices, written_for = (_object(held, key, refuse) for key in ("numbers", "indices", "for"))
    for key, given in [*numbers.items(), *indices.items()]:
        if not isinstance(given, str) and not (type(given) is int and given >= 0):
            refuse(f"{key!r} is no number and no expression: {describe(given)}")
    entries, given = list[Entry](), held.get("entries")
    for one in given if isinstance(given, list) else [None]:
        entry = _entry(one, sides)
        if isinstance(entry, str):
            refuse(f"has an entry that {entry}: {json.dumps(one)[:120]}")
        else:
            entries.append(entry)
    raise_faults(faults, subject="--names")
    return ShapeMap(
        path=path,
        sides=(sides[0], sides[1]),
        numbers={key: one for key, one in numbers.items() if isinstance(one, int | str)},
        indices={key: str(one) for key, one in indices.items()},
        written_for=written_for,
        about=str(held.get("about", "")),
        entries=tuple(entries),
        same=held.get("same") is True,
    )


def _object(held: Mapping[str, object], key: str, refuse: Callable[[str], None]) -> dict[str, object]:
    found = held.get(key, {})
    if isinstance(found, dict):
        return found
    refuse(f"{key!r} is no object")
    return {}


def _entry(held: object, sides: Sequence[str]) -> Entry | str:
    """Return an entry, or why it is none."""
    is_optional = held.get("optional", False) if isinstance(held, dict) else False
    if not isinstance(is_optional, bool):
        return 'has an "optional" that is neither true nor false'
    if not isinstance(held, dict) or not held.keys() <= {*sides, "optional"} or len(held.keys() & {*sides}) < 2:
        return f'does not have the keys {sides[0]!r} and {sides[1]!r}, and perhaps "optional"'
    forms = [[_form(one) for one in (given if isinstance(given, list) else [given])] for given in map(held.get, sides)]
    if any(form is None for of_side in forms for form in of_side) or not all(forms):
        return "has something that is no name: a name, a list of names, or null for padding in a list"
    known = [[form for form in of_side if form is not None] for of_side in forms]
    wholes = [number for number, side in enumerate(sides) if isinstance(held[side], str)]
    if not wholes:
        return "has a list of names on both sides"
    side = next((number for number in wholes if known[number][0].view), wholes[0])
    (whole,), parts = known[side], known[1 - side]
    terms = max(factor.count("+") + 1 for factor in whole.view.split()) if whole.view else 1
    if len(parts) != terms:
        return f"has {len(parts)} names beside a view of {terms} parts"
    if whole is _PADDING or all(part is _PADDING for part in parts):
        return "has padding alone on a side"
    if not whole.view and parts[0].view:
        return "has a view of a part, and none of the tensor that it is a part of"
    return Entry(side, whole, tuple(None if one is _PADDING else one for one in parts), is_optional)


_PADDING = Form(("",), "")


def _form(held: object) -> Form | None:
    if held is None:
        return _PADDING
    if not isinstance(held, str) or not held.strip():
        return None
    names, _, view = held.partition(" : ")
    return Form(tuple(name.strip() for name in names.split(" | ")), view.strip())


def coming_run(like: Content | None) -> Coming:
    """Return what a checkpoint that the coming run has saved, `like`, tells of it."""
    return Coming(like.weights, tuple(_configurations(like)), tuple(like.weights)) if like is not None else Coming()


def _configurations(content: Content) -> list[tuple[str, Mapping[str, object]]]:
    """Return the configurations of the checkpoint's model, by path: Megatron-LM's arguments, and JSON files beside it.

    Names are those of transformers' `config.json` and those that the framework itself uses.
    """
    found = list[tuple[str, Mapping[str, object]]]()
    arguments = content.entries.get("args")
    if isinstance(arguments, Mapping):
        held = {str(name): value for name, value in arguments.items()}
        if not held.get("group_query_attention", True):
            held["num_query_groups"] = held.get("num_attention_heads")
        held |= {other: held[name] for name, other in _OF_MEGATRON.items() if held.get(name) is not None}
        held |= _dense_layers(held.get("moe_layer_freq"))
        found.append((content.folder, held))
    for folder in (content.folder, os.path.dirname(os.path.abspath(content.folder))):
        for path in (f"{folder}/config.json", f"{folder}/model_config.json"):
            found.append((path, _config(path)))
    return [(where, held) for where, held in found if held]


def _dense_layers(frequency: object) -> dict[str, int]:
    """Return how many layers come before those with experts, if `moe_layer_freq` is a list of zeros, then ones."""
    if not isinstance(frequency, list) or 1 not in frequency:
        return {}
    dense = frequency.index(1)
    told = frequency == [0] * dense + [1] * (len(frequency) - dense)
    return {"first_k_dense_replace": dense} if told else {}


def _completed(told: Mapping[str, int]) -> dict[str, int]:
    """Return numbers with those that follow from others, as transformers has them."""
    found = dict(told)
    heads, width = found.get("num_attention_heads"), found.get("hidden_size")
    if heads:
        found.setdefault("num_key_value_heads", heads)
    if heads and width is not None and width % heads == 0:
        found.setdefault("head_dim", width // heads)
    return found


def _config(path: str) -> dict[str, object]:
    """Return a JSON file of the model, empty if there is none. Raises ConfigError for one that cannot be read."""
    try:
        read = folders.read_json(path) if folders.is_file(path) else {}
    except (ReshardError, ValueError) as error:
        what = f"cannot be read, and may hold the order of rows: {str(error)[:80]}"
        raise ConfigError.of(path, what, mend="correct it, or move it away") from error
    return {str(name): value for name, value in read.items()} if isinstance(read, dict) else {}
