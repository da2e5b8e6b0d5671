"""What hinders Megatron-LM's own load, and what is not filled here, told by the arguments of two runs: no Megatron."""

from __future__ import annotations

import struct
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    ModelMismatch,
    ReshardError,
    UnsupportedLayout,
)
from ds_reshard.formats.megatron.flat_states import experts_apart
from ds_reshard.hooks import Seam
from ds_reshard.hosts.megatron import training
from ds_reshard.hosts.megatron.direct import Taken
from ds_reshard.hosts.megatron.live import Load, in_force
from ds_reshard.hosts.megatron.load import left_to_megatron
from ds_reshard.hosts.megatron.topology import Saved, hindrances, may_be_shifted, unfillable
from ds_reshard.model.facts import OptimizerFacts, ScalarTensor
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord
from ds_reshard.operations.matching import TENSORS
from ds_reshard.resume.megatron import read_run
from ds_reshard.resume.policy import ResumePolicy

RUN = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "data_parallel_size": 2,
    "transformer_impl": "local",
    "padded_vocab_size": 128,
    "use_distributed_optimizer": True,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
}
HERE = "saved/iter_0000005"
FORMS = ("torch", "dp_reshardable", "fully_reshardable")


def _saved(form: str, **changes: Any) -> Saved:
    arguments = {**RUN, **changes}
    kind = {"distrib_optim_sharding_type": form} if arguments["use_distributed_optimizer"] else {}
    common = {} if form == "torch" else {"content_metadata": kind}
    return Saved(folder=HERE, whole=form != "torch", common=common, objects={}, arguments=arguments)


@pytest.fixture(autouse=True)
def _tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker file names the iteration that is loaded."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def reasons(saved: Saved, run: dict[str, Any], *, optimizer: bool) -> list[str]:
    """With experts as the rule of 0.19 has them."""
    return hindrances(saved, run, optimizer=optimizer, apart=experts_apart(run))


MEGATRONS = [{}, {"data_parallel_size": 5}, {"context_parallel_size": 2}, {"ddp_bucket_size": 7}, {"world_size": 64}]
BUCKETS = {"overlap_grad_reduce": True}
TAKEN = {
    "tensor-parallel size 4 as saved, 2 now": {"tensor_model_parallel_size": 4},
    "pipeline-parallel size 1 as saved, 2 now": {"pipeline_model_parallel_size": 1},
    "number of virtual stages 2 as saved, 1 now": {"virtual_pipeline_model_parallel_size": 2},
    "transformer_impl transformer_engine as saved, local now": {"transformer_impl": "transformer_engine"},
    "weights and gradients fp32, fp32 as saved, bf16, bf16 now": {"bf16": False},
    "other buckets of gradients": BUCKETS,
    "padded_vocab_size 64 as saved, 128 now": {"padded_vocab_size": 64},
}
OF_STATES = ("other buckets", "weights and")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", MEGATRONS, ids=str)
def test_what_megatron_does_right(form: str, change: dict[str, Any]) -> None:
    assert reasons(_saved(form, **change), RUN, optimizer=True) == []


@pytest.mark.parametrize("why", TAKEN)
def test_what_it_refuses(why: str) -> None:
    """But for states in model space, and weights alone of `torch_dist`."""
    told = [reasons(_saved(form, **TAKEN[why]), RUN, optimizer=True) for form in FORMS]
    assert told == [[why], [why], []]
    alone = [reasons(_saved(form, **TAKEN[why]), RUN, optimizer=False) for form in FORMS]
    assert alone == [[] if why.startswith(OF_STATES) else [why], [], []]


@pytest.mark.parametrize("form", FORMS)
def test_fp32_weights_that_are_their_own_masters(form: str) -> None:
    """Megatron stops as it copies states into them, but those of model space; what is not filled here is left to it."""
    run = {**RUN, "bf16": False}
    whys = [
        reasons(_saved(form, bf16=False), {**run, **more}, optimizer=optimizer)
        for more, optimizer in (({}, True), ({}, False), ({"optimizer_cpu_offload": True}, True))
    ]
    assert [[why.split(",")[0] for why in one] for one in whys] == [
        ["fp32 weights are their own masters"] * (form != "fully_reshardable"),
        [],
        [],
    ]


@pytest.mark.parametrize("form", FORMS)
def test_another_kind_of_optimizer(form: str) -> None:
    for before in (True, False):
        run = {**RUN, "use_distributed_optimizer": not before}
        why = reasons(_saved(form, use_distributed_optimizer=before), run, optimizer=True)
        assert why == ["a distributed optimizer in one of the two runs alone"]


@pytest.mark.parametrize("form", ["torch", "plain"])
@pytest.mark.parametrize(("before", "now", "told"), [("bf16", "fp32", 1), ("fp32", "fp16", 1), ("fp16", "bf16", 0)])
def test_masters_of_an_optimizer_that_is_not_distributed(form: str, before: str, now: str, told: int) -> None:
    """Megatron has another class for each, and reads the state of the one as that of the other."""
    plain = {"use_distributed_optimizer": False, "bf16": False}
    saved, run = _saved(form, **{**plain, before: True}), {**RUN, **plain, now: True}
    assert reasons(saved, run, optimizer=True) == [f"weights {before} as saved, {now} now"] * told
    assert reasons(saved, run, optimizer=False) == []


def test_experts() -> None:
    """In model space only a change between one optimizer and two counts; a dense run's sizes of experts never do."""
    one, two = {"num_experts": 8}, {"num_experts": 8, "expert_model_parallel_size": 2}
    four = {"num_experts": 8, "expert_model_parallel_size": 4}
    alone = {"num_experts": 8, "expert_tensor_parallel_size": 1}
    model_space = [(one, two), (two, one), (one, alone), (two, four), (alone, two)]
    told = [
        bool(reasons(_saved("fully_reshardable", **before), {**RUN, **now}, optimizer=True))
        for before, now in model_space
    ]
    assert told == [True, True, True, False, False]
    assert len(reasons(_saved("dp_reshardable", **two), {**RUN, **four}, optimizer=True)) == 1
    assert reasons(_saved("dp_reshardable", expert_model_parallel_size=2), RUN, optimizer=True) == []


def test_experts_whose_matrices_lie_otherwise() -> None:
    """Names in `torch`, and the order in flat buckets, are others; sizes are not, so Megatron would say nothing."""
    te = {"num_experts": 4, "transformer_impl": "transformer_engine"}
    for layers, taken in (
        (te, True),
        ({**te, "transformer_impl": "local"}, False),
        ({**te, "num_experts": None}, False),
    ):
        told = []
        for before, now in ((True, False), (False, True)):
            run = {**RUN, **layers, "moe_grouped_gemm": now}
            told.append(
                [reasons(_saved(form, **layers, moe_grouped_gemm=before), run, optimizer=True) for form in FORMS]
            )
        assert [[bool(why) for why in forms] for forms in told] == [[taken, taken, False]] * 2


def test_whether_experts_have_an_optimizer_of_their_own_is_told_by_what_was_saved() -> None:
    """And by what is live, not by arguments alone: releases differ in it. Of the plain optimizer as of others."""
    alone = {"num_experts": 8, "expert_tensor_parallel_size": 1}
    dense, experts = ({"wd_mult": 1.0, "is_expert_parallel": one} for one in (False, True))
    states: list[Any] = [
        {"param_groups": [dense]},
        {number: {"param_groups": [one]} for number, one in enumerate((dense, experts))},
    ]
    forms: list[tuple[str, dict[str, Any]]] = [(form, {}) for form in FORMS]
    for form, more in [*forms, ("plain", {"use_distributed_optimizer": False})]:
        saved = _saved(form, **alone, **more)
        for state, was in zip(states, (False, True), strict=True):
            held = replace(saved, common={**saved.common, "optimizer": state})
            for apart in (False, True):
                found = hindrances(held, {**RUN, **alone, **more}, optimizer=True, apart=apart)
                assert bool(found) is (was is not apart) and all("of experts" in one for one in found)
    assert hindrances(_saved("torch"), RUN, optimizer=True, apart=False) == []


@pytest.mark.parametrize("form", (*FORMS, "plain"))
@pytest.mark.parametrize("optimizer", [False, True])
def test_embeddings_that_are_tied_in_one_of_the_two_runs(form: str, optimizer: bool) -> None:
    """Megatron leaves the output layer out, or as it was made; of two stages each has its own, as if they were tied."""
    plain = {"use_distributed_optimizer": form != "plain"}
    for before, now in ((True, False), (False, True)):
        saved = _saved(form, untie_embeddings_and_output_weights=before, **plain)
        run = {**RUN, "untie_embeddings_and_output_weights": now, **plain}
        (why,) = reasons(saved, run, optimizer=optimizer)
        untold = {name: one for name, one in saved.arguments.items() if name != "untie_embeddings_and_output_weights"}
        assert reasons(replace(saved, arguments=untold), run, optimizer=optimizer) == []
        assert why == "tied embeddings in one of the two runs alone"


def test_sharding_types_that_are_not_read() -> None:
    """Those of which Megatron's own error does not tell the reason are refused here, by opening them."""
    told = {kind: reasons(_saved(kind), RUN, optimizer=True) for kind in ("fully_sharded_model_space", "of 0.30")}
    assert told == {kind: [f"its optimizer's state is of sharding type {kind}"] for kind in told}
    assert reasons(_saved("dp_zero_gather_scatter"), RUN, optimizer=True) == []
    assert reasons(_saved("of 0.30"), RUN, optimizer=False) == []


def test_states_that_may_be_shifted_are_looked_at() -> None:
    tied = {"untie_embeddings_and_output_weights": False}
    cases = [{}, BUCKETS, tied, {**tied, "pipeline_model_parallel_size": 1}]
    assert [may_be_shifted(_saved("fully_reshardable", **case)) for case in cases] == [False, True, True, False]
    assert not any(may_be_shifted(_saved(form, **BUCKETS)) for form in FORMS[:2])


LAYER_WISE = {"use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}


def test_the_adam_beside_a_layer_wise_optimizer_is_a_distributed_one() -> None:
    """Its arguments deny it, and the sharding type tells it; of a release that tells none all is Megatron's own."""
    told = {form: replace(_saved(form), arguments={**RUN, **LAYER_WISE, **BUCKETS}) for form in FORMS[1:]}
    assert [may_be_shifted(saved) for saved in told.values()] == [False, True]
    for change, whose in (({}, "one"), (BUCKETS, "none"), ({**BUCKETS, "tensor_model_parallel_size": 1}, "size")):
        why = [reasons(saved, {**RUN, **LAYER_WISE, **change}, optimizer=True) for saved in told.values()]
        said = {"one": ["other buckets of gradients"], "none": [], "size": ["tensor-parallel size 2 as saved, 1 now"]}
        assert why == [said[whose], []]
    other = ["a layer-wise optimizer in one of the two runs alone"]
    for saved in (*told.values(), _saved("plain", **LAYER_WISE)):
        run = {**RUN, "use_distributed_optimizer": False, "tensor_model_parallel_size": 4}
        assert reasons(saved, run, optimizer=True)[:1] == other and reasons(saved, run, optimizer=False) == []
        layer_wise = reasons(saved, {**run, **LAYER_WISE, **BUCKETS}, optimizer=True)
        assert bool(layer_wise) is (saved.sharding == "dp_reshardable")


@pytest.mark.parametrize("form", FORMS)
def test_moments_of_the_iteration_that_the_tracker_names(form: str, tmp_path: Path) -> None:
    """Of format `torch`; without the optimizer, or its states, Megatron takes the iteration that was asked for."""
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("9", encoding="utf-8")
    told = [reasons(_saved(form), RUN, optimizer=optimizer) for optimizer in (True, False)]
    assert [len(one) for one in told] == [form == "torch", 0]


@pytest.mark.parametrize("hindered", [[], ["another size"]])
@pytest.mark.parametrize("form", ["torch", "fully_reshardable"])
def test_what_is_not_read_here_is_left_to_megatron(form: str, hindered: list[str]) -> None:
    """If it can load it; what is damaged is not, but of format `torch` a node may have its own ranks' files alone."""
    saved, mend = _saved(form), "none"
    unread = UnsupportedLayout.fault("here", "is of fp16", mend=mend)
    missing = CheckpointNotFound.fault("mp_rank_01", "is missing", mend=mend)
    named = ModelMismatch.fault("a", TENSORS[0], mend=mend)
    if hindered:
        with pytest.raises(UnsupportedLayout, match="is of fp16; and Megatron-LM cannot load it: another size"):
            left_to_megatron([unread], saved, hindered)
        return
    assert left_to_megatron([unread], saved, hindered) == "is of fp16"
    for fault in (missing, named):
        if form == "torch":
            assert fault.what in left_to_megatron([unread, fault], saved, hindered)
        else:
            with pytest.raises(ReshardError, match=fault.where):
                left_to_megatron([unread, fault], saved, hindered)
    with pytest.raises(ReshardError, match="cut short"):
        left_to_megatron([unread, CheckpointDamaged.fault("here", "cut short", mend=mend)], saved, hindered)


@pytest.mark.parametrize("state", [0, 3])
@pytest.mark.parametrize("world", [4, 8])
def test_a_step_that_was_to_be_run_again_is_megatrons(state: int, world: int) -> None:
    """Where the ranks are those that saved it; else, as in Megatron, that state is not taken up."""
    told = ObjectRecord(
        callable=GlobalName(module="megatron.core.rerun_state_machine", name="RerunState"), args=(state,)
    )
    saved = _saved("fully_reshardable", world_size=4)
    saved = replace(saved, common={**saved.common, "rerun_state_machine": {"state": told}})
    faults = list(unfillable(saved, {**RUN, "world_size": world}, [], optimizer=True))
    assert bool(faults) is (state == 3 and world == 4)


def test_what_only_a_curve_needs_is_no_fault_where_megatron_was_asked() -> None:
    """The batch is what it has made; what hinders a curve is a fault without it, and all else always."""
    words = ["--lr", "1e-3", "--train-iters", "10", "--use-mup", "--step-batch-size-schedule", "x"]
    assert read_run(words, batch=4).schedule.values["lr_decay_steps"] == 40
    with pytest.raises(ConfigError, match=r"(?s)--use-mup.*--global-batch-size"):
        read_run(words)
    with pytest.raises(ConfigError, match="--lr"):
        read_run(words[2:], batch=4)


MODELS_NOT_FILLED = ("fp8", "fp4", "use_layer_wise_distributed_optimizer")
STATES_NOT_FILLED = (
    "fp16",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "overlap_param_gather_with_optimizer_step",
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", (*MODELS_NOT_FILLED, *STATES_NOT_FILLED))
def test_what_is_not_filled_is_refused_by_name(name: str, form: str) -> None:
    """On either side, and what was saved so is not mended by this run's flags; only some of it is of the weights."""
    for before, now, whose in (({name: True}, {}, "saved"), ({}, {name: True}, "this run's")):
        saved, run = _saved(form, **before), {**RUN, **now}
        (fault,) = unfillable(saved, run, [], optimizer=True)
        assert (fault.error, fault.where) == ("UnsupportedLayout", HERE)
        assert f"{name} ({whose})" in fault.what
        assert fault.mend.startswith("load it as it was saved" if before else f"load it without {name}")
        assert ("--no-load-optim" in fault.mend) is (name in STATES_NOT_FILLED)
        assert bool(list(unfillable(saved, run, [], optimizer=False))) is (name in MODELS_NOT_FILLED)
    assert list(unfillable(_saved(form), RUN, [], optimizer=True)) == []


def test_masters_from_weights_that_megatron_does_not_get_are_refused_by_name() -> None:
    flag = {"load_main_params_from_ckpt": True}
    (fault,) = unfillable(_saved("torch", **flag), {**RUN, **flag}, [], optimizer=False)
    assert fault.mend == "leave out --load-main-params-from-ckpt"
    assert list(unfillable(_saved("torch", **flag), RUN, [], optimizer=False)) == []
    assert list(unfillable(_saved("torch"), {**RUN, **flag}, [], optimizer=True)) == []


@pytest.mark.parametrize("own", [{}, {"step": 5}])
def test_a_step_beside_the_groups_is_that_of_all(own: dict[str, int]) -> None:
    """torch's Adam keeps it as a tensor, and a fused one that goes on counts in whole numbers."""
    step = ScalarTensor(dtype=ElementType.FLOAT32, shape=(), data=struct.pack("<f", 5))
    source = SimpleNamespace(facts=OptimizerFacts(groups=(), scalars={"a": {"step": step}}))
    saved = _saved("torch")
    state = {"optimizer": {"param_groups": [{"wd_mult": 1.0, "params": [0], **own}, {"wd_mult": 0.0}]}}
    groups = Taken.groups(
        cast(Taken, SimpleNamespace(saved=replace(saved, common={"optimizer": state}), source=source))
    )
    assert groups == [{"wd_mult": 1.0, "step": 5}, {"wd_mult": 0.0, "step": 5}]
    assert {type(group["step"]) for group in groups} == {int}


@pytest.mark.parametrize("layer_wise", [False, True])
def test_states_of_a_layer_wise_optimizer_are_each_ranks_own(layer_wise: bool) -> None:
    """Of format `torch` they lie in files of their own: the first data-parallel rank's are not another's."""
    live = {"params": [torch.zeros(3)], "wd_mult": 1.0}
    inner = {"param_groups": [{**live, "params": [0]}], "state": {0: {"momentum_buffer": torch.zeros(2)}}}
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[live], state={}), config=None)
    load = Load(policy=ResumePolicy(scheduler="override"), optimizer=optimizer, scheduler=None)
    arguments = Namespace(use_layer_wise_distributed_optimizer=layer_wise)
    state = {"iteration": 5, "optimizer": {"optimizer": inner}, "rng_state": []}
    told = training.look(load, state, False, "LEGACY", arguments)
    assert [fault.error for fault in told] == ["ParamGroupMismatch"] * (not layer_wise)


@pytest.mark.parametrize("step", [None, 4, 3])
def test_a_local_checkpoint_is_named_by_its_iteration(step: int | None, tmp_path: Path) -> None:
    """Its manager, of nvidia_resiliency_ext, names it by a tuple, and no folder of all ranks holds it."""
    state = {"iteration": 4, "args": SimpleNamespace(optimizer="adam")}
    base: Any = (state, (4, 0, ""), False, SimpleNamespace(name="LOCAL"))
    arguments = Namespace(ckpt_step=step, non_persistent_ckpt_type="local", optimizer="adam")
    load = Load(policy=ResumePolicy(), optimizer=None, scheduler=None)

    @Seam("ds_reshard.hosts.megatron.training:load_base_checkpoint")
    def load_base_checkpoint(load_dir: str, args: Namespace, rank0: bool) -> object:
        return base

    with in_force(load):
        if step == 3:
            with pytest.raises(ConfigError, match="local checkpoint of iteration 4: is non-persistent and no older"):
                load_base_checkpoint(str(tmp_path), arguments, rank0=True)
        else:
            assert load_base_checkpoint(str(tmp_path), arguments, rank0=True) == base
    assert load.where == "the local checkpoint of iteration 4"


def test_a_refused_load_leaves_the_arguments_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that goes on after it would else load without an optimizer for which nobody asked any more."""
    policy = ResumePolicy(optimizer="skip", rng=False, dataloader="reset")
    monkeypatch.setattr(training, "policy_of", lambda arguments: policy)
    flags = {"no_load_optim": None, "finetune": False, "no_load_rng": None}
    arguments = Namespace(load=None, dataloader_type="external", **flags)
    monkeypatch.setattr(training, "_arguments", lambda: arguments)

    @Seam("ds_reshard.hosts.megatron.training:load_checkpoint")
    def load_checkpoint(ddp_model: object, optimizer: object, opt_param_scheduler: object, load_arg: str) -> object:
        return 0, 0

    with pytest.raises(ConfigError, match="keeps its own place"):
        load_checkpoint([], object(), None, "load")
    assert vars(arguments) == {"load": None, "dataloader_type": "external", **flags}
