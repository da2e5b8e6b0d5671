"""Partial loads, modules that take part in loading, and optimizers that keep more than moments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import gathered, same_bits
from saves import Saves

from ds_reshard.operations import inspect

pytestmark = pytest.mark.distributed


def _weights_of(saved: Any, loaded: Any, names: Any) -> list[str]:
    return [n for n in names if not same_bits(saved[0]["weights"][n], loaded[0]["weights"][n])]


@pytest.mark.parametrize("target", (Run(2, 1), Run("bf16", 3), Run(0, 1), Run(3, 3)), ids=str)
@pytest.mark.parametrize("arguments", ({"load_optimizer_states": False}, {"load_module_only": True}), ids=str)
def test_a_new_parameter_keeps_its_start_and_all_others_load(
    worlds: Any, saves: Saves, target: Run, arguments: dict[str, Any]
) -> None:
    """Stage 3 holds weights only as masters: one name that it lacks must not cost the others theirs."""
    folder, saved = saves(Run(3, 2), Model())
    model = Model(extra=True)
    fresh = worlds[target.dp].run("fresh", run=target, model=model)
    loaded = worlds[target.dp].run(
        "load", run=target, model=model, folder=str(folder), arguments={"load_module_strict": False, **arguments}
    )
    assert _weights_of(saved, loaded, saved[0]["weights"]) == []
    assert _weights_of(fresh, loaded, ["new.weight", "new.bias"]) == []
    masters = {name: values for (name, kind), values in gathered(loaded).items() if kind == "fp32"}
    for name, values in masters.items():
        assert same_bits(values, loaded[0]["weights"][name].float().view(-1)), name


@pytest.mark.parametrize("target", (Run(1, 3), Run("bf16", 1)), ids=str)
def test_masters_from_weights_out_of_a_stage_3_checkpoint(worlds: Any, saves: Saves, target: Run) -> None:
    """`load_from_fp32_weights=false` where the weights themselves come from masters."""
    folder, saved = saves(Run(3, 2), Model())
    run = Run(target.stage, target.dp, options={"load_from_fp32_weights": False})
    loaded = worlds[target.dp].run("load", run=run, model=Model(), folder=str(folder))
    assert _weights_of(saved, loaded, saved[0]["weights"]) == []
    truth = gathered(saved)
    for (name, kind), values in gathered(loaded).items():
        expected = saved[0]["weights"][name].float().view(-1) if kind == "fp32" else truth[name, kind]
        assert same_bits(values, expected), (name, kind)


@pytest.mark.parametrize(("source", "target"), ((Run(1, 2), Run(2, 1)), (Run(2, 2), Run(3, 3)), (Run(3, 2), Run(1, 1))))
def test_a_checkpoint_that_python_3_11_2_saved(
    worlds: Any, saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Run, target: Run
) -> None:
    """Python 3.11.0 to 3.11.3 pickle the stage by its member's name; Debian 12 has 3.11.2."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    folder, saved = saves(source, Model())
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    files = sorted(tmp_path.rglob("*_optim_states.pt"))
    assert len(files) == source.dp
    for file in files:
        torch.save(torch.load(file, weights_only=False), file)
    loaded = worlds[target.dp].run("load", run=target, model=Model(), folder=str(tmp_path))
    truth, found = gathered(saved), gathered(loaded)
    assert [key for key in truth if not same_bits(truth[key], found[key])] == []
    assert inspect(tmp_path).stage == source.stage


def test_stage_3_without_optimizer_states_on_an_unchanged_layout(worlds: Any, tmp_path: Path) -> None:
    """DeepSpeed alone loads nothing (`load_module_only`), or the weights of `latest` whatever the tag."""
    run = Run(3, 2)
    early = worlds[2].run("save", run=run, model=Model(), folder=str(tmp_path), steps=1, tag="early")
    worlds[2].run("save", run=run, model=Model(), folder=str(tmp_path), steps=4, tag="late")
    for arguments in ({"load_optimizer_states": False}, {"load_module_only": True}):
        loaded = worlds[2].run("load", run=run, model=Model(), folder=str(tmp_path), tag="early", arguments=arguments)
        assert _weights_of(early, loaded, early[0]["weights"]) == [], arguments


@pytest.mark.parametrize(("source", "target"), ((Run(2, 2), Run(1, 1)), (Run(2, 2), Run(3, 3)), (Run(3, 2), Run(2, 3))))
def test_modules_that_take_part_in_loading_do(worlds: Any, tmp_path: Path, source: Run, target: Run) -> None:
    """Own loaders, load hooks, extra state, names that end like it: all as `load_state_dict` would leave them."""
    told = worlds[source.dp].run("loading_modules.save_curious", run=source, folder=str(tmp_path))
    loaded = worlds[target.dp].run("loading_modules.load_curious", run=target, folder=str(tmp_path))
    assert loaded == [told[0]] * target.dp


@pytest.mark.parametrize(("source", "target"), ((Run(2, 2), Run(1, 1)), (Run(1, 1), Run(2, 2)), (Run(3, 2), Run(3, 1))))
def test_entries_that_no_module_loads_are_judged_before_the_load(
    worlds: Any, tmp_path: Path, source: Run, target: Run
) -> None:
    """Left out of the save, they stay as built. Saved, a load that is not strict takes those of this run if equal."""

    def load(exclude: bool, scale: float, strict: bool) -> Any:
        given = {"run": target, "folder": str(tmp_path / str(exclude)), "scale": scale, "strict": strict}
        return worlds[target.dp].run("loading_modules.load_adapted", **given)

    for exclude in (True, False):
        given = {"run": source, "folder": str(tmp_path / str(exclude)), "exclude": exclude}
        saved = worlds[source.dp].run("loading_modules.save_adapted", **given)
        assert load(exclude, scale=2.0, strict=False) == [saved[0]] * target.dp
    first, *others = load(exclude=True, scale=3.0, strict=False)
    assert "base.weight.absmax has another value in this run" in first.pop("warned")[0]
    assert [first, *others] == [{**saved[0], "absmax": [3.0, 3.0]}] * target.dp
    for scale, strict, said in ((3.0, False, "has another value in this run"), (2.0, True, "load_module_strict=False")):
        refused = load(exclude=False, scale=scale, strict=strict)
        assert all(rank["error"] == "ModelMismatch" and rank["unchanged"] for rank in refused), refused
        assert all("base.weight.absmax and 1 more" in rank["text"] and said in rank["text"] for rank in refused)


@pytest.mark.parametrize(("source", "target"), ((Run(2, 2), Run(1, 1)), (Run(1, 1), Run(2, 2)), (Run(3, 2), Run(3, 1))))
def test_scales_that_a_loader_takes_are_judged_before_the_load(
    worlds: Any, tmp_path: Path, source: Run, target: Run
) -> None:
    """Those of 8 bits. Without their weight they must be this run's; what the loader then passes over is no error."""
    for exclude, scale, strict, refused in (
        (True, 2.0, False, ""),
        (True, 3.0, False, "base.absmax: has another value in this run, and is not loaded together with its weight"),
        (True, 2.0, True, "is missing from the checkpoint"),
        (False, 3.0, False, ""),
        (False, 3.0, True, ""),
    ):
        folder = str(tmp_path / str(exclude))
        saved = worlds[source.dp].run(
            "loading_modules.save_adapted", run=source, folder=folder, exclude=exclude, eight=True
        )
        given = {"run": target, "folder": folder, "scale": scale, "strict": strict, "eight": True}
        told = worlds[target.dp].run("loading_modules.load_adapted", **given)
        if not refused:
            assert told == [saved[0]] * target.dp
            continue
        assert all(rank["error"] == "ModelMismatch" and rank["unchanged"] for rank in told), told
        assert all(refused in rank["text"] for rank in told)


@pytest.mark.parametrize("run", (Run(1, 2), Run(3, 2)), ids=str)
def test_entries_that_no_module_loads_are_judged_before_deepspeed_loads(worlds: Any, tmp_path: Path, run: Run) -> None:
    """torch would refuse them once the weights have changed, or DeepSpeed pass over scales that are others."""
    worlds[2].run("loading_modules.save_adapted", run=run, folder=str(tmp_path), exclude=False)
    left = Run(run.stage, 2, config={"ds_reshard": {"reshard": {"unchanged": "deepspeed"}}})
    for scale, strict, refused in ((2.0, False, ""), (2.0, True, "does not load it"), (3.0, False, "another value")):
        given = {"run": left, "folder": str(tmp_path), "scale": scale, "strict": strict}
        told = worlds[2].run("loading_modules.load_adapted", **given)
        assert all(rank.get("unchanged", False) is bool(refused) for rank in told), told
        assert all(refused in rank.get("text", "") for rank in told), told


def test_a_stage_0_optimizer_is_never_matched_to_other_names(worlds: Any, saves: Saves) -> None:
    """It is matched by order alone, so a renamed parameter is an error also when the load is not strict."""
    folder, _ = saves(Run(0, 1, "fp32"), Model())
    refused = worlds[2].run(
        "load_refused", run=Run(1, 2, "fp32"), model=Model(extra=True), folder=str(folder), load_module_strict=False
    )
    assert {r["error"] for r in refused} == {"ModelMismatch"} and all(r["unchanged"] for r in refused)


def test_weights_alone_come_out_of_stage_0_where_a_parameter_is_new(worlds: Any, saves: Saves) -> None:
    """With the schedule, too: its one param group needs no order, which no file tells."""
    folder, saved = saves(Run(0, 1), Model())
    alone = {"load_module_strict": False, "load_optimizer_states": False}
    given = {"run": Run(2, 2), "model": Model(extra=True), "folder": str(folder), "arguments": alone}
    loaded = worlds[2].run("load", **given)
    assert _weights_of(saved, loaded, saved[0]["weights"]) == []
    assert loaded[0]["scheduler"] == saved[0]["scheduler"]


ODD = {
    "blocks": "does not follow the parameter",
    "weight": "a name that is used for something else",
    "per_rank": "rms of partition",
    "group": "d_numerator of param group 0",
    "own": "optimizer state 'horizon'",
    "counted": "optimizer state 'k'",
}


@pytest.mark.parametrize("odd", ODD)
def test_states_that_cannot_be_cut_are_refused_and_left_to_deepspeed_at_home(
    worlds: Any, tmp_path: Path, odd: str
) -> None:
    """A per-block scale, a name that clashes, a value of a rank or the optimizer: refused elsewhere, loaded at home."""
    model = Model(optimizer=f"odd_{odd}")
    worlds[2].run("save", run=Run(1, 2), model=model, folder=str(tmp_path))
    for target in (Run(1, 3), Run(3, 2)):
        refused = worlds[target.dp].run("load_refused", run=target, model=model, folder=str(tmp_path))
        assert refused[0]["error"] == "UnsupportedLayout", refused[0]["text"]
        assert ODD[odd] in refused[0]["text"] and all(r["unchanged"] for r in refused)
    assert worlds[2].run("load_counting", run=Run(1, 2), model=model, folder=str(tmp_path)) == [(1, 0), (1, 0)]


@pytest.mark.parametrize(("odd", "named"), (("own", "horizon"), ("counted", "k"), ("listed", "listed of embed.weight")))
def test_states_of_stage_0_that_follow_no_parameter_are_refused(
    worlds: Any, tmp_path: Path, odd: str, named: str
) -> None:
    """What the refusal says mends it: the weights load alone, with the schedule."""
    model = Model(optimizer=f"odd_{odd}")
    saved = worlds[1].run("save", run=Run(0, 1), model=model, folder=str(tmp_path))
    refused = worlds[2].run("load_refused", run=Run(2, 2), model=model, folder=str(tmp_path))
    assert refused[0]["error"] == "UnsupportedLayout" and f"optimizer state {named}:" in refused[0]["text"]
    alone = {"load_optimizer_states": False}
    loaded = worlds[2].run("load", run=Run(2, 2), model=model, folder=str(tmp_path), arguments=alone)
    assert not _weights_of(saved, loaded, loaded[0]["weights"]) and loaded[0]["scheduler"] == saved[0]["scheduler"]


@pytest.mark.parametrize("odd", ("blocks", "weight", "own", "counted", "listed"))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_states_of_stage_0_that_follow_no_parameter_are_left_to_deepspeed_at_home(
    worlds: Any, tmp_path: Path, odd: str, dtype: str
) -> None:
    """As Adafactor's rows and columns, and the blocks of 8-bit optimizers, are."""
    model = Model(optimizer=f"odd_{odd}")
    run = Run(0, 2, dtype)
    worlds[2].run("save", run=run, model=model, folder=str(tmp_path))
    assert worlds[2].run("load_counting", run=run, model=model, folder=str(tmp_path)) == [(1, 0), (1, 0)]


@pytest.mark.parametrize("run", (Run(0, 2), Run(1, 2), Run(3, 2), Run("bf16", 2)), ids=str)
def test_codes_that_torch_would_cast_are_refused_at_home(worlds: Any, tmp_path: Path, run: Run) -> None:
    """Each line that mends it does: an optimizer that loads its states itself, and weights alone."""
    given = {"run": run, "folder": str(tmp_path)}
    saved = worlds[2].run("save", model=Model(optimizer="cast"), **given)
    refused = worlds[2].run("load_refused", model=Model(optimizer="cast"), **given)
    assert {rank["error"] for rank in refused} == {"UnsupportedLayout"} and all(rank["unchanged"] for rank in refused)
    assert "once Cast has a load_state_dict of its own" in refused[0]["text"]
    loaded = worlds[2].run("load", model=Model(optimizer="coded"), **given)
    truth, found = gathered(saved), gathered(loaded)
    assert any(key[1] == "state1" for key in truth) or run.stage == 0
    assert [key for key in truth if not same_bits(truth[key], found[key])] == []
    alone = worlds[2].run("load", model=Model(optimizer="cast"), arguments={"load_optimizer_states": False}, **given)
    assert _weights_of(saved, alone, saved[0]["weights"]) == []


@pytest.mark.parametrize("target", (Run(1, 2), Run(3, 1), Run(0, 1)), ids=str)
def test_states_that_are_no_fractions_stay_what_they_are(worlds: Any, tmp_path: Path, target: Run) -> None:
    """torch, and so DeepSpeed at an unchanged layout, casts the states that it loads to the type of the masters."""
    model = Model(optimizer="odd_mask")
    saved = worlds[2].run("save", run=Run(1, 2), model=model, folder=str(tmp_path))
    truth = gathered(saved)
    assert truth["first.weight", "mask"].dtype is torch.bool
    loaded = gathered(worlds[target.dp].run("load", run=target, model=model, folder=str(tmp_path)))
    assert truth.keys() == loaded.keys() and all(same_bits(truth[key], loaded[key]) for key in truth)


def test_weights_alone_load_where_each_rank_kept_a_state_for_itself(worlds: Any, tmp_path: Path) -> None:
    """At stage 3 the weights lie beside the states, and the refusal of those names this as what mends it."""
    model = Model(optimizer="odd_per_rank")
    saved = worlds[2].run("save", run=Run(3, 2), model=model, folder=str(tmp_path))
    alone = {"load_optimizer_states": False}
    loaded = worlds[1].run("load", run=Run(2, 1), model=model, folder=str(tmp_path), arguments=alone)
    assert loaded[0]["weights"] and not _weights_of(saved, loaded, loaded[0]["weights"])


def test_a_config_that_names_the_rank_is_no_fault(worlds: Any, tmp_path: Path) -> None:
    """Only the sections that all ranks share are compared."""
    worlds[2].run("save_named", run=Run(1, 2), folder=str(tmp_path))
    for target in (Run(1, 2), Run(3, 3)):
        assert worlds[target.dp].run("load", run=target, model=Model(), folder=str(tmp_path))[0]["path"]


@pytest.mark.parametrize("place", ("settings", "live", "check", "adopt", "client"))
def test_a_crash_anywhere_on_one_rank_ends_on_every_rank(worlds: Any, saves: Saves, place: str) -> None:
    """Before, between and after the collectives: the others raise too, within the time of one collective."""
    folder, _ = saves(Run(3, 2), Model())
    by_deepspeed = {"ds_reshard": {"reshard": {"unchanged": "deepspeed"}}}
    target = Run(3, 2, config=by_deepspeed) if place == "check" else Run(2, 2)
    refused = worlds[2].run("load_refused", run=target, model=Model(), folder=str(folder), fault=f"crash in {place}")
    assert {r["error"] for r in refused} == {"InternalError"} and len({r["text"] for r in refused}) == 1
    assert "rank 1" in refused[0]["text"]


def test_stage_0_fp32_and_bf16_change_into_each_other(worlds: Any, saves: Saves) -> None:
    """Both are stage 0, and DeepSpeed loads neither into the other."""
    for one, other in (("fp32", "bf16"), ("bf16", "fp32")):
        folder, saved = saves(Run(0, 1, one), Model())
        loaded = worlds[2].run("load", run=Run(0, 2, other), model=Model(), folder=str(folder))
        truth, got = gathered(saved), gathered(loaded)
        assert set(truth) == set(got) and all(same_bits(truth[key], got[key]) for key in truth)


def test_files_of_another_kind_are_deepspeeds_at_the_sizes_that_were_saved(
    worlds: Any, saves: Saves, tmp_path: Path
) -> None:
    """An expert file of an old release at the saved sizes, in an engine with experts (synthetic): left to DeepSpeed."""
    import shutil

    folder, _ = saves(Run(2, 2), Model())
    shutil.copytree(folder, tmp_path / "copy")
    torch.save({}, tmp_path / "copy" / "global_step3" / "expert_0_mp_rank_00_model_states.pt")
    for target, expected in ((Run(2, 2), "original"), (Run(2, 3), "UnsupportedLayout")):
        told = worlds[target.dp].run(
            "refused_jobs.load_with_feature",
            run=target,
            model=Model(),
            folder=str(tmp_path / "copy"),
            switch="has_moe_layers",
        )
        assert {error for error, _ in told} == {expected}
