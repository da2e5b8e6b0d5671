"""A checkpoint of another framework as one of Megatron-LM: its arguments, schedule and param groups.

They are those that came along from a checkpoint of Megatron-LM, or those of one that a coming run has saved (--like).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, error_of, raise_faults
from ds_reshard.formats.megatron.checkpoint import Group, arguments_of
from ds_reshard.formats.megatron.optimizer import Trained, members_of
from ds_reshard.formats.megatron.target import Shown, stacks
from ds_reshard.model.content import MASTER, Content
from ds_reshard.model.records import GlobalName, ObjectRecord

_LIKE = "name a checkpoint that the coming run has saved: --like DIR"
_OPTIMIZERS = ("lr", "betas", "eps", "weight_decay")
"""What an optimizer of any framework has, and a group of Megatron-LM too."""
_NAMES = "give the parameters the names that Megatron-LM has: --names map.json"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = "decoder.layers."
_LINEAR = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_OF_EXPERTS = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


def adopt(content: Content, like: Shown | None, shapes: Mapping[str, tuple[int, ...]] | None) -> Shown:
    """What the content has beside its tensors, as Megatron-LM would have saved it; `shapes` are the weights of `like`.

    Raises UnsupportedLayout and ModelMismatch, with every reason, for what no file tells.
    """
    subject = f"converting {content.folder} to megatron"
    told = content.entries.get("args")
    common: dict[object, object] = dict(like.common) if like is not None else {}
    arguments = arguments_of(common["args"]) if like is not None else dict(told) if isinstance(told, dict) else {}
    faults = list(_lacking(content, arguments))
    faults += unlike(content, shapes or {}, arguments) if like is not None else _contradictions(content, arguments)
    raise_faults(faults, subject=subject)
    saved: dict[object, object] = {name: content.entries[name] for name in _COUNTED if name in content.entries}
    scheduler = saved.get("opt_param_scheduler", common.get("opt_param_scheduler"))
    if not isinstance(scheduler, dict):
        raise error_of([_fault(content, "has no schedule of Megatron-LM", _LIKE)], subject=subject)
    rows = content.weights[_VOCABULARY[0]].shape[0]
    counted = {"consumed_train_samples": content.samples, "padded_vocab_size": rows, "no_save_rng": True}
    namespace = ObjectRecord(
        callable=GlobalName(module="argparse", name="Namespace"),
        by_new=True,
        state={**arguments, **counted},
        has_state=True,
    )
    common |= {"checkpoint_version": 3.0, **saved, "args": namespace, "iteration": content.steps}
    common |= {"opt_param_scheduler": {**scheduler, "num_steps": content.samples}}
    common.pop("rerun_state_machine", None)
    groups, faults = _groups(content, like, arguments)
    raise_faults(faults, subject=subject)
    dense = tuple(group for group in groups if not group.get("is_expert_parallel"))
    apart = tuple(group for group in groups if group.get("is_expert_parallel"))
    return Shown(
        common=common,
        objects={key: [None] for key in _extra_states(content)},
        chain=(dense, apart) if apart else (dense,),
        stacked=like.stacked if like is not None else stacks(arguments),
    )


_COUNTED = ("checkpoint_version", "opt_param_scheduler", "num_floating_point_operations_so_far")


def _fault(content: Content, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(content.folder, what, mend=mend)


def _lacking(content: Content, arguments: Mapping[str, object]) -> Iterator[Fault]:
    if not arguments:
        yield _fault(content, "does not tell the arguments of a run of Megatron-LM", _LIKE)
    elif arguments.get("transformer_impl") != "local":
        what = f"of layers of {arguments.get('transformer_impl')} states (_extra_state) are saved that it has not"
        yield _fault(content, what, "none: only --transformer-impl local has none")
    if content.steps is None or content.samples is None:
        what = (
            "does not tell its iteration and the samples that it has seen, which a checkpoint of Megatron-LM must say"
        )
        yield _fault(content, what, "a checkpoint that tells both")
    if content.facts is None:
        yield _fault(content, "holds no optimizer", "a checkpoint with an optimizer")


def unlike(content: Content, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object]) -> Iterator[Fault]:
    """In what its weights are others than those of the run that --like shows; padding of the vocabulary may differ."""
    held = {name: one.shape for name, one in content.weights.items()}
    least, mend = _count(arguments, "vocab_size"), f"{_NAMES}; or correct --like"
    for name in sorted(held.keys() | shapes.keys()):
        own, other = held.get(name), shapes.get(name)
        padded = name in _VOCABULARY and own and other and own[1:] == other[1:] and own[0] >= least
        if own != other and not padded:
            yield ModelMismatch.fault(name, "is another", str(other), str(own), mend=mend)


def _contradictions(content: Content, arguments: Mapping[str, object]) -> Iterator[Fault]:
    """What the arguments that came along say otherwise than the weights."""
    layers = {name.split(".")[2] for name in content.weights if name.startswith(_LAYER)}
    if arguments and layers != set(map(str, range(_count(arguments, "num_layers")))):
        what, expected = f"has other layers than args.num_layers, named {_LAYER}N", str(arguments.get("num_layers"))
        yield ModelMismatch.fault(content.folder, what, expected, str(sorted(layers)), mend=_NAMES)
    words = content.weights.get(_VOCABULARY[0])
    if arguments and (words is None or words.shape[:1] != (arguments.get("padded_vocab_size"),)):
        what, rows = "has not args.padded_vocab_size rows", str(arguments.get("padded_vocab_size"))
        yield ModelMismatch.fault(
            _VOCABULARY[0], what, rows, "none" if words is None else str(words.shape), mend=_NAMES
        )


def _count(arguments: Mapping[str, object], name: str) -> int:
    value = arguments.get(name)
    return value if isinstance(value, int) else 0


def _groups(content: Content, like: Shown | None, arguments: Mapping[str, object]) -> tuple[list[Group], list[Fault]]:
    """The groups as Megatron-LM has them: those that came along, or those of --like with values of the content's."""
    saved = content.facts.groups if content.facts is not None else ()
    own = [dict(group.hyperparameters or {}) for group in saved]
    if own and all("wd_mult" in group for group in own):
        return own, []
    shown = [group for groups in (like.chain or () if like is not None else ()) for group in groups]
    trained = [Trained(name=name, shape=kinds[MASTER].shape) for name, kinds in content.trained.items()]
    members = members_of(shown, trained, arguments) if shown else None
    homes = {name: number for number, group in enumerate(saved) for name in group.members}
    made, faults = [], []
    for group, names in zip(shown, members or (), strict=False):
        numbers = {homes.get(name) for name in names}
        if len(numbers) != 1 or None in numbers:
            what = (
                f"its param groups are others than those of Megatron-LM, which has {', '.join(names[:3])}, ... in one"
            )
            faults.append(_fault(content, what, "group parameters by weight decay as Megatron-LM does"))
            continue
        values = own[numbers.pop() or 0]
        kept = {name: value for name, value in group.items() if name != "step"}
        made.append({**kept, **{name: values[name] for name in _OPTIMIZERS if name in values}})
    if members is None:
        faults.append(_fault(content, "has no param groups as Megatron-LM has them (wd_mult, max_lr, ...)", _LIKE))
    return made, faults


def _extra_states(content: Content) -> Iterator[str]:
    """The keys of the states of local layers, which are None (`sharded_state_dict` of their linear layers, 0.19.2)."""
    layers = len({name.split(".")[2] for name in content.weights if name.startswith(_LAYER)})
    for name, held in content.weights.items():
        if name.startswith(_LAYER) and name.endswith(".weight"):
            _, _, layer, leaf = name.removesuffix(".weight").split(".", 3)
            if leaf in _LINEAR:
                yield f"{_LAYER}{leaf}._extra_state/shard_{layer}_{layers}"
            elif leaf in _OF_EXPERTS:
                for expert in range(held.shape[0]):
                    yield f"{_LAYER}{leaf}._extra_state/shard_{layer}.{expert}_{layers}.{held.shape[0]}"
