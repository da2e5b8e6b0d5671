"""Whether a checkpoint will load into a run of Megatron-LM that is still to come: what a load decides, decided before.

Megatron's own parser reads the command line and its `validate_args` checks it, for that many ranks, as in the run. Who
loads and what is refused is decided by the functions of a load (`topology`, `load`, `direct`, `training`, `parts`),
given a scheduler that is Megatron's own and an optimizer without parameters: the model is the script's, and is not
built. So sizes are compared as the two command lines tell them, and param groups are taken to be those that were saved.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import (
    CheckpointNotFound,
    ConfigError,
    Fault,
    ModelMismatch,
    ParamGroupMismatch,
    ReshardError,
    UnsupportedLayout,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.megatron.checkpoint import Group, chain_of
from ds_reshard.formats.megatron.flat_states import experts_apart, size_of
from ds_reshard.hosts.megatron.direct import MODEL, Taken, kinds_read, same_grid, vocabulary_faults
from ds_reshard.hosts.megatron.group_values import policy_faults
from ds_reshard.hosts.megatron.groups import experts_differ
from ds_reshard.hosts.megatron.live import Load, Scheduler, in_force
from ds_reshard.hosts.megatron.load import DIRECT, MEGATRON, left_to_megatron
from ds_reshard.hosts.megatron.parts import load_scheduler, note_built
from ds_reshard.hosts.megatron.pickles import refuse_unsafe_iteration
from ds_reshard.hosts.megatron.report import foreseen, training_report
from ds_reshard.hosts.megatron.topology import Saved, find_saved, hindrances, unfillable
from ds_reshard.hosts.megatron.training import announced_faults, look, policy_of, tell_megatron
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import WEIGHT
from ds_reshard.operations.filling import MEMORY_NBYTES
from ds_reshard.operations.forecast import Forecast, RankCost, shown_files
from ds_reshard.operations.ranks import attempt
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.resume.megatron import UNDRAWN, FlagParser, read_run
from ds_reshard.resume.policy_sources import add_arguments
from ds_reshard.resume.report import ResumeReport

if TYPE_CHECKING:
    from ds_reshard.hosts.megatron.live import Optimizer

_FLAGS = "the flags after --"
_SHAPES = (
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "normalization",
    "position_embedding_type",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "untie_embeddings_and_output_weights",
    "multi_latent_attention",
)
"""What the model's tensors follow beside what `check_checkpoint_args` compares."""
_ELSEWHERE = (
    "use_checkpoint_args",
    "yaml_cfg",
    "pretrained_checkpoint",
    "non_persistent_ckpt_type",
    "ckpt_convert_format",
)


def forecast(path: str, words: Sequence[str], *, world: int, nodes: int = 1) -> Forecast:
    """What `--load path` will do in the run of this command line, who loads, and every reason why it cannot.

    Needs Megatron-LM, whose own code reads the command line; no GPU and no process group. What is wrong with checkpoint
    or run is the answer, and raises nothing.
    """
    made = _Forecasting(path, world)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where Megatron prints what it has set
            made.decide(words)
    except ReshardError as error:
        made.faults += faults_of(error)
    return made.answer(nodes)


@contextlib.contextmanager
def _gpu(notes: list[str]) -> Iterator[None]:
    """What Megatron's checks ask of a GPU (`get_device_arch_version`, training/utils), where there is none."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    notes.append("there is no GPU here: checks that ask for its kind are those of a Hopper")
    answers = {"get_device_properties": SimpleNamespace(major=9, minor=0), "get_device_capability": (9, 0)}
    kept = {name: getattr(torch.cuda, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(torch.cuda, name, functools.partial(lambda said, *_: said, answer))
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.cuda, name, function)


class _ComingOptimizer:
    """An optimizer before it has parameters: what the policy, the scheduler and the report ask of one."""

    def __init__(self, config: Namespace, groups: Sequence[Group] = ()) -> None:
        self.optimizer, self.config, self.param_groups = self, config, list(groups)
        self.grad_scaler = SimpleNamespace(scale=None) if config.fp16 else None
        if config.optimizer_cpu_offload:
            self.sub_optimizers = ()


class _Forecasting:
    def __init__(self, path: str, world: int) -> None:
        self.path, self.world = path, world
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self.run: Mapping[str, object] = {}
        self.saved: Saved | None = None
        self.source: Checkpoint | None = None
        self.unread = ""
        self.wanted = True
        self.report: ResumeReport | None = None

    def answer(self, nodes: int) -> Forecast:
        names = ("global_batch_size", "micro_batch_size", "data_parallel_size")
        held = self.saved.arguments if self.saved is not None else {}
        return Forecast(
            saved=f"{_form(self.saved)}, {_sizes(held)}" if self.saved is not None else "",
            run=_sizes(self.run),
            loader=MEGATRON if self.unread else DIRECT,
            faults=tuple(dict.fromkeys(self.faults)),
            report=self.report,
            batch={name: (held.get(name), self.run[name]) for name in names if name in self.run and held},
            costs=self._costs(),
            world=self.world,
            nodes=nodes,
            buffer_nbytes=0 if self.unread else MEMORY_NBYTES,
            tag=str(self.run["ckpt_step"]) if self.run.get("ckpt_step") else None,
            notes=tuple(self.notes),
        )

    def decide(self, words: Sequence[str]) -> None:
        """Everything that a load decides before it moves a byte, as far as the model's code is not asked."""
        arguments = self._arguments(words)
        self.run = vars(arguments)
        policy = policy_of(arguments)
        raise_faults(announced_faults(policy, arguments), subject="resume policy")
        tell_megatron(policy, arguments)
        self.wanted = not arguments.finetune and not arguments.no_load_optim
        saved = self.saved = self._found(arguments)
        load = Load(policy=policy, optimizer=None, scheduler=None, where=saved.folder)
        refuse_unsafe_iteration(saved.folder, alone=True, optimizer=self.wanted)
        chain, unread, _ = attempt(lambda: chain_of(saved.common.get("optimizer"), saved.objects))
        raise_faults(unread if self.wanted else [], subject=f"loading {saved.folder}")
        groups = _ComingOptimizer(arguments, [group for groups in chain or () for group in groups])
        raise_faults(policy_faults(groups, policy), subject="resume policy")
        tokens = self._tokens(arguments)
        own_adam = self.wanted and _own_adam(arguments)
        if own_adam:
            self.notes.append("neither Apex nor Transformer Engine is here: the run's Adam is taken to be torch's own")
        self._open(saved, arguments, load, own_adam=own_adam)
        self.faults += _other_model(saved, arguments, taken=not self.unread, optimizer=self.wanted)
        if not self.unread:  # ds_reshard fills the rows of embeddings
            runs = saved.arguments, self.run
            self.faults += vocabulary_faults(load, runs, saved.folder, tokens=tokens)
        load.scheduler = _scheduler(words, arguments)
        odd = [(name, why) for name, why in UNDRAWN.items() if getattr(arguments, name, None)]
        self.notes += [f"--{name.replace('_', '-')}: {why}: rates are not foreseen" for name, why in odd]
        self._resume(load, saved, arguments)

    def _arguments(self, words: Sequence[str]) -> Namespace:
        """Megatron's arguments of the run, validated by it for these ranks; ConfigError with its own words."""
        from megatron.training.argument_utils import core_transformer_config_from_args
        from megatron.training.arguments import add_megatron_arguments, validate_args

        parser = add_arguments(add_megatron_arguments(FlagParser(add_help=False, allow_abbrev=False)))
        arguments, rest = parser.parse_known_args([*words, "--load", self.path])
        unread = ", ".join(word.partition("=")[0] for word in rest if word.startswith("--"))
        if unread:
            self.notes.append(f"not Megatron-LM's own, whose parser refuses what the script does not define: {unread}")
        elsewhere = [name for name in _ELSEWHERE if getattr(arguments, name, None)]
        if elsewhere:
            flags = ", ".join("--" + name.replace("_", "-") for name in elsewhere)
            mend = "start the run to know, or give what it says as flags"
            what = "what the run is, or which files it reads, is said elsewhere: that is not foreseen"
            raise_faults([UnsupportedLayout.fault(flags, what, mend=mend)], subject="preflight")
        arguments.rank, arguments.world_size = 0, self.world
        arguments._is_global_batch_size_explicitly_specified = arguments.global_batch_size is not None
        try:
            with _gpu(self.notes):
                validate_args(arguments)
                core_transformer_config_from_args(arguments)
        except Exception as error:  # Megatron asserts, and calls what asks for a GPU
            said = " ".join(str(error).split())[:400] or "no message"
            what = f"Megatron-LM refuses them on {self.world} ranks: {type(error).__name__}: {said}"
            raise_faults([ConfigError.fault(_FLAGS, what, mend="correct the flags, or --world")], subject="preflight")
        return arguments

    def _found(self, arguments: Namespace) -> Saved:
        saved = find_saved(arguments)
        if saved is not None:
            return saved
        listing = find_listing(self.path, None)  # raises where nothing is there
        what = "is no checkpoint that this load is foreseen of: Megatron-LM reads it itself, or begins from the start"
        mend = f"give the folder of --save of a run with --ckpt-format torch_dist or torch, not {listing.folder}"
        raise CheckpointNotFound.of(self.path, what, mend=mend)

    def _open(self, saved: Saved, arguments: Namespace, load: Load, *, own_adam: bool) -> None:
        """The files of every rank; where Megatron reads them, what is not read here is Megatron's to check."""
        apart = _apart(self.run)
        hindered = hindrances(saved, self.run, optimizer=self.wanted, apart=apart, own_adam=own_adam)
        try:
            source = self.source = open_checkpoint(find_listing(saved.folder, None), whole=True, optimizer=self.wanted)
            faults = [*unfillable(saved, self.run, hindered, optimizer=self.wanted), *source.index.faults]
            if self.wanted:
                kinds_read(source, load.policy, _ComingOptimizer(arguments), faults)
            raise_faults(faults, subject=f"loading {saved.folder}")
            self.notes += source.notes if self.wanted else ()
        except ReshardError as error:
            self.unread = left_to_megatron(faults_of(error), saved, hindered)
            self.notes.append(f"Megatron-LM loads it: {self.unread}")
            strictness = getattr(arguments, "dist_ckpt_strictness", "assume_ok_unexpected")
            if strictness != "assume_ok_unexpected":
                self.notes.append(f"what --dist-ckpt-strictness {strictness} refuses, Megatron-LM alone says")
        if not self.unread and self.wanted:
            self.notes.append("that each weight is the cast of its master, the load proves: --deep proves it here")

    def _tokens(self, arguments: Namespace) -> int | None:
        """The vocabulary of the tokenizer, which Megatron builds, and with it how many rows embeddings have."""
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        try:
            tokens = getattr(build_tokenizer(arguments), "vocab_size", None)
        except Exception as error:  # of a tokenizer, which is anybody's
            said = " ".join(str(error).split())[:200]
            self.notes.append(
                f"the vocabulary is not compared: its tokenizer fails with {type(error).__name__}: {said}"
            )
            return None
        return tokens if isinstance(tokens, int) else None

    def _resume(self, load: Load, saved: Saved, arguments: Namespace) -> None:
        """What the look at a checkpoint refuses, then the schedule as the load leaves it, and the report."""
        state = {str(name): value for name, value in saved.common.items()} | {
            "args": SimpleNamespace(**saved.arguments)
        }
        load.read_in_place, load.unread = saved.whole or not self.unread, self.unread
        if not self.unread and self.source is not None:
            same = same_grid(saved, self.run)
            random = () if same and not saved.arguments.get("no_save_rng") else None
            load.taken = Taken(saved=saved, source=self.source, same_grid=same, random=random)
            state |= {"rng_state": random} if random is not None else {}
            if self.wanted and not _apart(self.run):
                self.faults += experts_differ(load.taken.groups(), saved.folder)
        self.faults += look(load, state, False, "GLOBAL" if saved.whole and self.unread else "LEGACY", arguments)
        if self.faults or load.found is None:
            return
        policy = load.policy
        with in_force(load):
            alone = policy.optimizer == "skip" and policy.keeps_position
            if (self.wanted or alone) and load.found.scheduler_state is not None:
                schedule = cast("Mapping[str, object]", load.found.scheduler_state)
                load_scheduler(cast(Scheduler, load.scheduler), _original(load.scheduler), schedule)
        starts = policy.finetune or policy.iteration == "reset"
        kept = 0 if starts or policy.dataloader == "reset" else saved.arguments.get("consumed_train_samples", 0)
        arguments.consumed_train_samples = kept
        load.optimizer = _ComingOptimizer(arguments)
        made = training_report(load, arguments, 0 if starts else load.found.iteration or 0, foreseen(policy))
        rows = tuple(row for row in made.rows if row.name not in ("optimizer", "loss scale"))
        self.report = ResumeReport(host=made.host, checkpoint=made.checkpoint, rows=rows, warnings=made.warnings)
        self.notes.append("the model is taken to be the one that was saved, but for the sizes that the flags tell")
        if self.wanted:
            self.notes.append("param groups are taken to be those that were saved: rates of each are told below")

    def _costs(self) -> tuple[RankCost, ...]:
        """What a rank reads and holds in the mean: which rows and layers are each rank's, its model says."""
        if self.source is None or not self.run:
            return ()
        placements = self.source.layout.placements.items()
        weights, states = (
            sum(one.numel * one.dtype.itemsize for key, one in placements if (key.kind == WEIGHT) is of_weight)
            for of_weight in (True, False)
        )
        parts = size_of(self.run, "tensor_model_parallel_size") * size_of(self.run, "pipeline_model_parallel_size")
        held = -(-states // (self.world if self.run.get("use_distributed_optimizer") else parts)) if self.wanted else 0
        self.notes.append(
            "the cost is that of a rank in the mean; which rows, layers and files are its own, its model says"
        )
        files = shown_files(list(self.source.files))
        each = -(-weights // parts)
        cost = RankCost(rank=0, read_nbytes=each + held, files=files, optimizer_nbytes=held, weights_nbytes=each)
        return (cost,)


def _apart(run: Mapping[str, object]) -> bool:
    """Whether experts of the run have an optimizer of their own, by the rule of the Megatron-LM that is here."""
    import megatron.core
    from packaging.version import Version

    divided = size_of(run, "expert_model_parallel_size") > 1
    return experts_apart(run) and (divided or Version(megatron.core.__version__) >= Version("0.19"))


def _own_adam(arguments: Namespace) -> bool:
    """Whether the distributed optimizer would step by torch's own Adam, as Megatron-LM falls back to it here."""
    import torch
    from megatron.core import optimizer

    adam = getattr(optimizer, "Adam", None)
    own = isinstance(adam, type) and issubclass(adam, torch.optim.Adam | torch.optim.AdamW)
    on_gpu = arguments.optimizer == "adam" and not arguments.optimizer_cpu_offload
    return own and on_gpu and bool(arguments.use_distributed_optimizer)


def _form(saved: Saved) -> str:
    return f"torch_dist ({saved.sharding or 'plain'})" if saved.whole else "torch"


def _sizes(arguments: Mapping[str, object]) -> str:
    names = {"tensor": "tp", "pipeline": "pp", "expert": "ep", "context": "cp"}
    told = [f"{short}={size_of(arguments, f'{name}_model_parallel_size')}" for name, short in names.items()]
    return ", ".join([*told, f"dp={size_of(arguments, 'data_parallel_size')}"])


def _other_model(saved: Saved, arguments: Namespace, *, taken: bool, optimizer: bool) -> Iterator[Fault]:
    """What Megatron's own comparison of both runs refuses, and other sizes of tensors."""
    said = _compared(saved, arguments, taken=taken) if not arguments.finetune else ""
    if said:
        yield ModelMismatch.fault(saved.folder, f"Megatron-LM refuses it: {said}", mend=MODEL)
    for name in _SHAPES:
        sides = saved.arguments.get(name), getattr(arguments, name, None)
        if name in saved.arguments and hasattr(arguments, name) and sides[0] != sides[1]:
            what = "is another than in the saving run: so are the model's tensors"
            yield ModelMismatch.fault("--" + name.replace("_", "-"), what, *map(str, sides), mend=MODEL)
    if arguments.use_distributed_optimizer and arguments.optimizer == "sgd":  # distrib_optimizer.py, `__init__`, 0.19.2
        what = "Megatron-LM refuses it: its distributed optimizer takes Adam, and what has an init_state_fn"
        yield ConfigError.fault("--optimizer", what, mend="leave out --use-distributed-optimizer")
    apart = [held.get("decoupled_lr") is not None for held in (saved.arguments, vars(arguments))]
    if optimizer and apart[0] is not apart[1]:
        what = "makes another number of param groups than was saved"
        yield ParamGroupMismatch.fault("--decoupled-lr", what, mend="give it as the saving run did, or --no-load-optim")


def _compared(saved: Saved, arguments: Namespace, *, taken: bool) -> str:
    """What `check_checkpoint_args` says of the two runs, whose arguments it finds where Megatron keeps them."""
    from megatron.training import checkpointing, global_vars

    kept = global_vars._GLOBAL_ARGS, checkpointing._CHECKPOINT_VERSION
    dist = arguments.use_dist_ckpt
    global_vars._GLOBAL_ARGS, checkpointing._CHECKPOINT_VERSION = arguments, saved.common.get("checkpoint_version")
    arguments.use_dist_ckpt = dist or saved.whole or taken
    try:
        checkpointing.check_checkpoint_args(SimpleNamespace(**saved.arguments))
    except (AssertionError, AttributeError) as error:
        return " ".join(str(error).split())[:300]
    finally:
        arguments.use_dist_ckpt = dist
        global_vars._GLOBAL_ARGS, checkpointing._CHECKPOINT_VERSION = kept
    return ""


def _scheduler(words: Sequence[str], arguments: Namespace) -> object:
    """Build Megatron's scheduler with the arguments that `get_optimizer_param_scheduler` would pass."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    asked = {
        "use_checkpoint_opt_param_scheduler": bool(arguments.use_checkpoint_opt_param_scheduler),
        "override_opt_param_scheduler": bool(arguments.override_opt_param_scheduler),
    }
    values: dict[str, object] = {**read_run(words, batch=arguments.global_batch_size).schedule.values, **asked}
    optimizer = cast("Optimizer", _ComingOptimizer(arguments))
    made = OptimizerParamScheduler(optimizer, **values)
    note_built(made, {"optimizer": optimizer, **values})
    return made


def _original(scheduler: object) -> Callable[[Mapping[str, object]], object]:
    """Megatron's own `load_state_dict`, below a hook where one is installed."""
    plain = type(scheduler).load_state_dict  # type: ignore[attr-defined]
    return functools.partial(getattr(plain, "__wrapped__", plain), scheduler)
