"""Preflight: tell before a DeepSpeed run starts whether a checkpoint will load into it, and how.

The decisions are made by the functions of a load (`load.py`), for one rank of the planned run after the other. All
shards are opened here, as the ranks of the run together would open them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from math import gcd, prod
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.pickle_rules import PickleRules, in_force, rules_in_force, trusted
from ds_reshard.errors import (
    CheckpointNotFound,
    ConfigError,
    Fault,
    ReshardError,
    as_faults,
    faults_of,
    only_as_saved,
    raise_faults,
)
from ds_reshard.formats.zero.checkpoint import MODEL, AnyCheckpoint, Grid, ZeroCheckpoint, sequence_ranks
from ds_reshard.formats.zero.checkpoint import TpRank as TensorRow
from ds_reshard.formats.zero.flat import slice_numel
from ds_reshard.formats.zero.groups import merge_expert_groups, merge_stage_groups
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import compare_checksums, compare_signatures
from ds_reshard.hosts.deepspeed.coming import (
    Launch,
    PlannedModel,
    Training,
    fill_auto,
    model_from_factory,
    parse_config,
    placeholder_model,
    saved_model,
    weight_precision,
)
from ds_reshard.hosts.deepspeed.coming_grid import (
    assumptions,
    cannot_predict,
    position_of_rank,
    refuse_stage,
    refuse_unpredictable,
)
from ds_reshard.hosts.deepspeed.engine import autotp_in, model_numbers
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.find_checkpoint import Found, look
from ds_reshard.hosts.deepspeed.foreign import ForeignCheckpoint
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.load import Decision, DeepSpeedLoad
from ds_reshard.hosts.deepspeed.move import counters, group_values
from ds_reshard.hosts.deepspeed.prepare import Prepared, SavedGroups, prepare
from ds_reshard.hosts.deepspeed.resume import UNHOOKED, policy_of, report, restrict, scheduler_seam_off
from ds_reshard.hosts.deepspeed.settings import SECTION, Settings, parse_settings
from ds_reshard.model.index import Index
from ds_reshard.model.records import ElementType
from ds_reshard.operations.forecast import Forecast, RankCost, shown_files
from ds_reshard.operations.load import loader_fault
from ds_reshard.operations.load import prepare as agree_to_load
from ds_reshard.operations.ranks import Steps
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import find_listing
from ds_reshard.resume.lr_preview import HOOKS_NEEDED
from ds_reshard.resume.policy_sources import policy_beside
from ds_reshard.resume.report import ResumeReport, Row
from ds_reshard.resume.schedule import SOURCE
from ds_reshard.resume.scheduler_policy import SCHEDULED

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

_MAX_SHOWN_RANKS, _NOT_STRICT = 12, "load_module_strict=False"
_SET_BY_SCRIPT = "the script's"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The planned run: its JSON, its ranks and nodes, and a function that builds the model, if there is one.

    `load_module_strict` is the argument that its script gives `load_checkpoint`.
    """

    config: Mapping[str, object]
    world: int
    nodes: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: int = 1
    load_module_strict: bool = True
    model: Callable[[], object] | None = None


def forecast(path: str, coming: PlannedRun, *, tag: str | None = None) -> Forecast:
    """Return what a load of `path` will do in the planned run, who will do it, and every reason why it cannot.

    Needs DeepSpeed, which reads the JSON, but no GPU, no process group, and only the shapes of the model. Faults of the
    checkpoint or of the run are part of the answer; they are not raised.
    """
    forecasting = _Forecasting(path, coming, tag)
    try:
        forecasting.decide()
    except Exception as error:  # a load would raise any other error as well
        forecasting.faults += as_faults(error, where=path)
    curable = coming.load_module_strict and any(_NOT_STRICT in fault.mend for fault in forecasting.faults)
    if curable and forecast(path, replace(coming, load_module_strict=False), tag=tag).loads:
        forecasting.notes.append(
            f"with {_NOT_STRICT}, as transformers' Trainer loads a model of PEFT, it loads: "
            "--no-load-module-strict shows how"
        )
    return forecasting.answer()


class _Forecasting:
    """Collects one answer: the checkpoints, decisions, costs, notes and faults so far."""

    def __init__(self, path: str, coming: PlannedRun, tag: str | None) -> None:
        self.coming, self.tag = coming, tag
        self.request = Request(
            load_dir=path,
            tag=tag or "",
            strict=coming.load_module_strict,
            optimizer=True,
            scheduler=True,
            module_only=False,
            custom_load_fn=None,
        )
        self.notes: list[str] = []
        self.faults: list[Fault] = []
        self.costs: list[RankCost] = []
        self.config: dict[str, object] = dict(coming.config)
        self.ds: DeepSpeedConfig | None = None
        self.checkpoints: dict[int, AnyCheckpoint | None] = {}
        self.loader, self.buffer_nbytes = "", 0
        self.report: ResumeReport | None = None
        self._models: dict[tuple[int, int, int], PlannedModel] = {}

    @property
    def checkpoint(self) -> AnyCheckpoint | None:
        """The checkpoint that the first tensor-parallel rank finds."""
        return self.checkpoints.get(0)

    @property
    def sizes(self) -> Grid:
        coming = self.coming
        return Grid(dp=coming.world // (coming.tp * coming.pp), tp=coming.tp, pp=coming.pp, ep=coming.ep)

    def answer(self) -> Forecast:
        """Return the answer so far."""
        checkpoint, ds, coming = self.checkpoint, self.ds, self.coming
        saved, batch = "", dict[str, tuple[object, object]]()
        if checkpoint is not None:
            universal = "universal, of " if checkpoint.listing.universal else ""
            sizes = checkpoint.grid._replace(dp=checkpoint.dp).short
            saved = f"{universal}ZeRO {checkpoint.stage}, {sizes}"
            saved = "another format" if isinstance(checkpoint, ForeignCheckpoint) else saved
        if ds is not None:
            batch = _batch_sizes(ds, checkpoint)
        stage = f"ZeRO {int(ds.zero_optimization_stage)}, " if ds is not None else ""
        return Forecast(
            saved=saved,
            run=f"{stage}{self.sizes.short}",
            loader=self.loader,
            faults=tuple(dict.fromkeys(self.faults)),
            report=self.report,
            batch=batch,
            costs=tuple(self.costs),
            world=coming.world,
            nodes=coming.nodes,
            buffer_nbytes=self.buffer_nbytes if self.loader == "ds_reshard" else 0,
            notes=tuple(self.notes),
        )

    def decide(self) -> None:
        """Decide everything that a load decides before it moves a byte, for some of the ranks."""
        _check_sizes(self.coming)
        settings = parse_settings(self.coming.config)
        self.buffer_nbytes = settings.memory_nbytes
        with in_force(PickleRules(frozenset(settings.trust) | rules_in_force().trusted)):
            tp = self.coming.tp
            found, *_ = [self._resolve_checkpoint(row, settings) for row in range(tp)]
            refuse_unpredictable(found, self.sizes, self.coming.config, self.coming.sp)
            self._fill_config()
            by_autotp = self.coming.tp > 1 and bool(section(self.config, "tensor_parallel").get("autotp_size"))
            try:
                ranks = self.coming.world if by_autotp else self.sizes.dp
                self.ds = parse_config(self.config, ranks // self.coming.sp)  # as it counts batches
            except ConfigError:
                missing = not found.tag and not found.faults
                self.faults += faults_of(_no_checkpoint(self.request.load_dir)) if missing else found.faults
                if self.faults and self._only_batch_is_unknown():
                    return
                raise
            if not found.tag and not found.faults:
                raise _no_checkpoint(self.request.load_dir)
            first = self._plan_rank(0)
            refuse_stage(first.run.grid, first.run.stage)
            self.notes += assumptions(first.run.grid)
            decision, prepared = self._decide_rank(first, all_shards=True)
            firsts = (column // tp * self.sizes.dp * tp + column % tp for column in range(1, tp * self.coming.pp))
            others = [self._decide_rank(self._plan_rank(rank), all_shards=True)[0] for rank in firsts]
            self._compare_tp_ranks([decision, *others])
            self.loader, _, unread = decision.loader.partition(", ")
            if unread:
                self.notes.append("its files are not read here: DeepSpeed itself checks their structure")
            if prepared is None:
                return
            for rank in self._shown_ranks():
                own_prepared = prepared if rank == 0 else self._decide_rank(self._plan_rank(rank), all_shards=False)[1]
                if own_prepared is not None:
                    self.costs.append(_rank_cost(rank, self.config, decision, own_prepared))
            self.report = _report(first, decision, prepared)

    def _resolve_checkpoint(self, row: int, settings: Settings) -> Found:
        """Find the checkpoint of a tensor-parallel rank; the load's own code finds it again once the run is known."""
        universal = section(self.coming.config, "checkpoint").get("load_universal") is True
        tp_rank = TensorRow(self.coming.tp, row, rules=settings.tensor_parallel)
        folder, names = self.request.load_dir, settings.names
        with_optimizer = restrict(self.request, policy_beside(self.coming.config)).load_optimizer
        run = self._coming_run() if names is not None else Coming()
        found = look(folder, self.tag, optimizer=with_optimizer, universal=universal, names=names, run=run, row=tp_rank)
        self.checkpoints[row] = found.checkpoint
        if isinstance(found.checkpoint, ForeignCheckpoint) and names is not None and not run.names and not row:
            self.notes.append(
                'the map of "names" is taken to be needed: --model tells if the run has the names of the folder already'
            )
        return found

    def _coming_run(self) -> Coming:
        """Return what the model of --model tells; nothing if it fails, which is told when it is built."""
        import torch

        if self.coming.model is None:
            return Coming()
        try:
            with torch.device("meta"):
                built = self.coming.model()
            names = model_from_factory(built, None, autotp=autotp_in(self.config)).module.names
            return Coming(names, model_numbers(built))
        except (Exception, SystemExit):  # the factory is the user's code, and may raise anything
            return Coming()

    def _compare_tp_ranks(self, decisions: Sequence[Decision]) -> None:
        """Raise if the shards of the tensor-parallel ranks come from several saves; all must use the same loader."""
        checkpoint, shards = self.checkpoint, [one.shards for one in decisions if one.shards is not None]
        if checkpoint is None:
            return
        with_states = any(one.reshards_states for one in decisions)
        folder, signatures = checkpoint.listing.folder, {k: v for one in shards for k, v in one.signatures.items()}
        faults = compare_signatures(signatures, folder, states=with_states)
        faults += compare_checksums({k: v for one in shards for k, v in one.checksums.items()}, folder)
        differ = only_as_saved(faults) or len({one.loader for one in decisions}) > 1
        if differ and all(one.can_hand_over for one in decisions):
            for one in decisions:
                one.loader = "DeepSpeed"
            return
        faults += [loader_fault(folder, DeepSpeedLoad.built_alike)] if differ and not faults else []
        raise_faults(faults, subject=f"loading {folder}")

    def _fill_config(self) -> None:
        """Fill each "auto" of the JSON from the saved JSON, and note what is assumed or cannot be predicted."""
        saved = self.checkpoint.model.config if self.checkpoint is not None else {}
        self.config, auto = fill_auto(self.coming.config, saved)
        if auto:
            origin = "take the saving run's value, or else DeepSpeed's default"
            origin = origin if self.checkpoint is not None else "are not known, as the checkpoint cannot be read"
            self.notes.append(f'settings that are "auto" {origin}: {", ".join(auto)}')
        version = metadata.version("deepspeed")
        if version != SOURCE:
            self.notes.append(f"the rules of flat buffers are those of DeepSpeed {SOURCE}; {version} is installed here")
        if "data_efficiency" in self.config or "curriculum_learning" in self.config:
            self.notes.append("the position of a curriculum's data sampler cannot be predicted")
        own_section = section(self.config, SECTION)
        if section(own_section, "resume"):
            self.notes.append(HOOKS_NEEDED)
        if section(own_section, "reshard").get("device") == "cuda":  # the job's machine must have it, not this one
            self.config[SECTION] = {**own_section, "reshard": {**section(own_section, "reshard"), "device": "auto"}}
        if self.coming.model is None and self.checkpoint is not None:
            optimizer = "" if section(self.config, "optimizer") else " and the saved optimizer, as the JSON names none"
            self.notes.append(f"preflight assumes the saved model{optimizer}: --model compares another")
            self.notes += self._left_out(self.checkpoint)
        without = self.checkpoint is not None and self.checkpoint.model.entries.get("lr_scheduler") is None
        if without and not section(self.config, "scheduler"):
            self.notes.append(
                "no scheduler was saved: one that the script builds is refused without --no-load-lr-state"
            )

    def _left_out(self, checkpoint: AnyCheckpoint) -> Iterator[str]:
        """Yield a note if frozen weights may be missing: from stage 2 on DeepSpeed has an entry for those it saves."""
        entries = checkpoint.model.entries
        plain = isinstance(checkpoint, ZeroCheckpoint) and checkpoint.universal is None
        if plain and self.request.strict and checkpoint.stage > 1 and entries.get("frozen_param_shapes", 0) is None:
            yield (
                "frozen parameters, if there are any, are not in it (exclude_frozen_parameters): the load is then "
                f"refused without {_NOT_STRICT}"
            )

    def _only_batch_is_unknown(self) -> bool:
        """True if DeepSpeed refuses the JSON only because a batch size is "auto", and no checkpoint has filled it."""
        micro, *_ = names = ("train_micro_batch_size_per_gpu", "train_batch_size")
        if self.checkpoint is not None or not any(self.coming.config.get(name) == "auto" for name in names):
            return False
        try:
            parse_config({**self.config, micro: 1}, self.sizes.dp // self.coming.sp)
        except ConfigError:
            return False
        return True

    def _plan_rank(self, rank: int) -> Training:
        """Return global rank `rank` of the planned run; models are built once per part of the model."""
        assert self.ds is not None
        checkpoint = self.checkpoints.get(rank % self.coming.tp)  # tensor-parallel ranks are neighbours
        rules = parse_settings(self.config).tensor_parallel
        position = position_of_rank(rank, self.sizes, checkpoint, self.config, rules)
        if isinstance(checkpoint, ZeroCheckpoint):
            checkpoint = merge_expert_groups(merge_stage_groups(checkpoint))
        grid = position.grid
        model_key = grid.row.rank, grid.stage, min((one.first for one in grid.experts.values()), default=0)
        if model_key not in self._models:
            self._models[model_key] = self._build_model(checkpoint, grid)
        model = self._models[model_key]
        launch = Launch(ds=self.ds, config=self.config, checkpoint=checkpoint, model=model, position=position)
        return launch.training(sp=self.coming.sp)

    def _build_model(self, checkpoint: AnyCheckpoint | None, grid: LiveGrid) -> PlannedModel:
        """Return the model that --model builds without memory; if it fails, add a fault and return the saved model."""
        import torch

        assert self.ds is not None
        dtype = weight_precision(self.ds)
        if self.coming.model is not None:
            try:
                with torch.device("meta"):
                    built = self.coming.model()
                return model_from_factory(built, dtype, autotp=autotp_in(self.config))
            except ReshardError as error:
                self.faults += faults_of(error)
            except (Exception, SystemExit) as error:  # the factory is the user's code, and may raise anything
                message = " ".join(str(error).split())[:300] or "no message"
                mend = "correct the factory: it is called on torch.device('meta'), and must not ask for a GPU"
                if isinstance(error, ImportError):
                    mend = "run preflight in the folder of the module, and in the job's own environment"
                what = f"fails with {type(error).__name__}: {message}"
                self.faults.append(ConfigError.fault("--model", what, mend=mend))
        if checkpoint is None:
            return placeholder_model()
        saved_precision, new_precision = (
            [section(one, name).get("enabled") is True for name in ("bf16", "fp16")]
            for one in (checkpoint.model.config, self.config)
        )
        same_precision = dtype is None and saved_precision == new_precision
        return saved_model(checkpoint, grid, None if same_precision else dtype or ElementType.FLOAT32)

    def _decide_rank(self, coming: Training, *, all_shards: bool) -> tuple[Decision, Prepared | None]:
        """Return a rank's decision and its prepared load, which is also made for the answer if DeepSpeed loads.

        `all_shards`: also open the shards that other ranks would open.
        """
        run, settings = coming.run, parse_settings(self.config)
        settings = replace(settings, trust=trusted(settings.trust))
        policy = policy_of(run.kind, settings, module_only=False)
        direct = settings.enabled and not (run.features and run.universal)
        load = DeepSpeedLoad(coming, self.request, self.tag)
        load.settings, load.policy, load.universal, load.run = settings, policy, run.universal, run if direct else None
        with scheduler_seam_off(), in_force(PickleRules(settings.trust)):
            found, decision = agree_to_load(load, Steps())
            if all_shards and found.checkpoint is not None:
                raise_faults(_open_all_shards(found.checkpoint, decision), subject=f"loading {self.request.load_dir}")
        if decision.loader != "DeepSpeed" or found.checkpoint is None:
            return decision, decision.prepared
        assert decision.resume is not None
        groups = SavedGroups(run.optimizer, found.checkpoint, run.grid)
        try:
            return decision, prepare(run, found.checkpoint, groups, decision.resume.request, settings)
        except ReshardError as error:
            faults = faults_of(error)
            if not only_as_saved(faults) and any(fault.where.startswith("parameter ") for fault in faults):
                raise  # DeepSpeed refuses that as well
            why = "; ".join(fault.line() for fault in faults_of(error)[:3])
            self.notes.append(f"DeepSpeed loads this itself, and preflight cannot show what it loads: {why}")
            return decision, None

    def _shown_ranks(self) -> list[int]:
        """Return the ranks of the first node, at most _MAX_SHOWN_RANKS of them, and the last rank of all."""
        per_node = -(-self.coming.world // self.coming.nodes)
        return sorted({*range(0, per_node, -(-per_node // _MAX_SHOWN_RANKS)), self.coming.world - 1})


def _open_all_shards(checkpoint: AnyCheckpoint, decision: Decision) -> list[Fault]:
    """Open the shards of every rank, and return their faults."""
    prepared, shards = decision.prepared, decision.shards
    if prepared is None:
        assert shards is not None
        index, families = Index(checkpoint.layout, shards), set(checkpoint.layout.shards)
    else:
        index, layout = prepared.index, prepared.index.layout
        wants = (prepared.wants, *prepared.wants.shares.values())
        families = {layout[key].family for one in wants for key in one.sources.values()}
        families |= {MODEL} if checkpoint.listing.partitioned_model else set()
    for family in sorted(families):
        for shard in range(index.layout.shards[family]):
            index.open(family, shard)
    return index.faults


def _check_sizes(coming: PlannedRun) -> None:
    """Raise ConfigError if the ranks cannot be divided as asked."""
    product = coming.tp * coming.pp
    if coming.world % product or (coming.world // product) % coming.ep:
        what = f"{coming.world} ranks cannot be divided into tp={coming.tp}, pp={coming.pp}, ep={coming.ep}"
        raise ConfigError.of("--world", what, mend="give a multiple of tp x pp x ep")
    if (coming.world // product) % coming.sp:
        what = f"{coming.world // product} data-parallel ranks cannot be divided into sp={coming.sp}"
        raise ConfigError.of("--sp", what, mend="give a divisor of the data-parallel ranks")
    if coming.nodes > coming.world:
        what = f"{coming.nodes} nodes have {coming.world} ranks"
        raise ConfigError.of("--nodes", what, mend="give at most as many as ranks")
    if coming.model is not None and product * coming.ep > 1:  # a rank then has only a part of the model
        raise cannot_predict("--model beside --tp, --pp or --ep")


def _no_checkpoint(path: str) -> CheckpointNotFound:
    """Return the error of a folder without a checkpoint: that of the tools, which names what lies there, if any."""
    try:
        find_listing(path, None)
    except CheckpointNotFound as error:
        return error
    mend = "give the folder that was given to save_checkpoint, or --tag; the load would return None"
    return CheckpointNotFound.of(path, "holds no checkpoint that a load would find", mend=mend)


def _batch_sizes(ds: DeepSpeedConfig, checkpoint: AnyCheckpoint | None) -> dict[str, tuple[object, object]]:
    """Return the saved and the new value of each batch size; the new ones are those that DeepSpeed computes."""
    saved = dict(checkpoint.model.config) if checkpoint is not None else {}
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = [saved.get(name) for name in names[1:]]
    if checkpoint is not None and all(isinstance(part, int) for part in parts):
        ranks = checkpoint.dp // gcd(checkpoint.dp, sequence_ranks(checkpoint.model.entries))
        saved.setdefault(names[0], prod(cast(list[int], parts)) * ranks)
    return {name: (saved.get(name), getattr(ds, name)) for name in names}


def _rank_cost(rank: int, config: Mapping[str, object], decision: Decision, prepared: Prepared) -> RankCost:
    """Return the bytes and files that one rank reads, and the memory of its engine."""
    live, wants, grid, run = prepared.live, prepared.wants, prepared.grid, prepared.run
    masters = sum(buffer.held_numel * buffer.dtype.itemsize for buffer in live.buffers) if live is not None else 0
    types = {placement.buffer: placement.dtype for placement in wants.placements.values()}
    states = sum(numel * types[buffer].itemsize for buffer, numel in wants.sizes.items())
    weights = sum(
        (slice_numel(one.shape, run.data_ranks) if one.partitioned else prod(one.shape)) * one.dtype.itemsize
        for one in run.module.tensors
        if one.names and one.dtype is not None
    )
    if decision.loader == "DeepSpeed":  # reads its files whole
        listing, data_rank = prepared.checkpoint.listing, run.data_rank
        # every column reads the first one's model file, too (`check_ckpt_list`, runtime/state_dict_factory.py, 0.19.8)
        columns, optim = sorted({0, grid.column}), listing.column(grid.column).optim
        model_rank = data_rank if listing.partitioned_model else 0
        files = [listing.column(number).model[model_rank] for number in columns]
        files += _layer_and_expert_files(grid, listing)
        files += [optim[data_rank]] if data_rank in optim and prepared.checkpoint.optim is not None else []
        nbytes = sum(listing.nbytes[name] for name in files)
    else:
        files, nbytes = list(shown_files(prepared.plan.files)), prepared.plan.nbytes
    zero = section(config, "zero_optimization")
    movable = {"offload_optimizer": masters + states, "offload_param": weights}
    return RankCost(
        rank=rank,
        read_nbytes=nbytes,
        files=tuple(files),
        optimizer_nbytes=masters + states,
        weights_nbytes=weights,
        offloaded_nbytes=sum(
            size for key, size in movable.items() if section(zero, key).get("device", "none") != "none"
        ),
    )


def _layer_and_expert_files(grid: LiveGrid, listing: Listing) -> list[str]:
    """Return the files of a stage's layers and of all experts, which DeepSpeed reads with the model file."""
    own_layers = range(grid.parts[grid.stage], grid.parts[grid.stage + 1]) if grid.parts else range(0)
    layers = [name for (layer, row), name in listing.layers.items() if layer in own_layers and row == grid.row.rank]
    return [*layers, *listing.experts.values()]


def _report(coming: Training, decision: Decision, prepared: Prepared) -> ResumeReport | None:
    """Return the resume report that the load will make, by giving the planned engine the saved values."""
    resume, live, values = decision.resume, prepared.live, prepared.values
    if resume is None:
        return None
    if live is None or live.stage != 0:
        counters(coming, prepared, resume.request)
    if live is not None and values is not None:
        groups = coming.optimizer.param_groups
        for group, hyper in zip(groups, group_values(groups, live.buffers, values), strict=True):
            group.update({name: value for name, value in hyper.items() if name != "params"})
        if "clip_grad" in values.extras and hasattr(coming.optimizer, "clip_grad") and live.kind != "zero3":
            vars(coming.optimizer)["clip_grad"] = values.extras["clip_grad"]
    if live is not None and live.stage == 0:
        counters(coming, prepared, resume.request)
    resume.apply(Steps())
    if resume.proof is not None and decision.loader == "ds_reshard":
        resume.proof = "each tensor is proved by the load"
    table = report(coming)
    saved = values.groups if values is not None else {}
    rows = tuple(_hide_unknown_values(row, coming, decision, saved) for row in table.rows)
    unknown = coming.script_sets_optimizer or coming.script_builds_scheduler
    warnings = [one for one in table.warnings if one != UNHOOKED]
    warnings = [one for one in warnings if not (unknown and "learning rate" in one)]
    return replace(table, rows=rows, warnings=tuple(warnings))


def _hide_unknown_values(row: Row, coming: Training, decision: Decision, saved: Mapping[int, object]) -> Row:
    """Return a row of the report with initial values that only the script knows replaced by "the script's"."""
    group, _, name = row.name.removeprefix("group ").partition(": ") if row.name.startswith("group ") else ("", "", "")
    by_scheduler = coming.script_builds_scheduler and name in SCHEDULED - {"weight_decay"}
    if not name or not (coming.script_sets_optimizer or by_scheduler):
        return row
    assert decision.resume is not None
    policy = decision.resume.policy
    from_this_run = policy.takes(name) or (name in SCHEDULED and policy.schedule_is_this_runs)
    from_this_run = from_this_run or not policy.loads_masters or int(group) not in saved
    return replace(row, this_run=_SET_BY_SCRIPT, used=_SET_BY_SCRIPT if from_this_run else row.used)
