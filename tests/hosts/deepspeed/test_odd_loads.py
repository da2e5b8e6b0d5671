"""What DeepSpeed's own load gives a module, an optimizer or its wrapper is given under another layout, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import gathered, same_bits, scalars
from loader_jobs import without_versions
from saves import Saves

pytestmark = pytest.mark.distributed

_CLIPPED = {"gradient_clipping": 0.5}
_FUSED = Model(optimizer="fused")


@pytest.mark.parametrize(
    ("source", "saved", "target", "loaded"),
    (
        (Run(0, 1), _FUSED, Run(1, 2, config=_CLIPPED), _FUSED),
        (Run(0, 1), _FUSED, Run(0, 1, config=_CLIPPED), Model()),
        (Run(2, 2), Model(), Run(0, 1, config=_CLIPPED), _FUSED),
    ),
    ids=str,
)
def test_clipping_is_the_saved_one_at_stage_0_too(
    worlds: Any, tmp_path: Path, source: Run, saved: Model, target: Run, loaded: Model
) -> None:
    """FP16_Optimizer saves what it clips to, and takes it back (runtime/fp16/fused_optimizer.py)."""
    worlds[source.dp].run("wrapper_jobs.save", run=source, model=saved, folder=str(tmp_path))
    given = {"run": target, "model": loaded, "folder": str(tmp_path)}
    assert worlds[target.dp].run("wrapper_jobs.clipped_to", **given) == [1.0] * target.dp


@pytest.mark.parametrize("target", (Run(0, 1, "fp32"), Run(2, 1, "fp32")), ids=str)
def test_a_wrapper_of_the_scripts_own_is_itself_given_its_state(worlds: Any, saves: Saves, target: Run) -> None:
    """It shares the groups of the optimizer inside, and a rate that is set through it holds."""
    folder, _ = saves(Run(1, 2, "fp32"), Model(scheduler=False))
    (told,) = worlds[1].run("wrapper_jobs.load_wrapped", run=target, folder=str(folder))
    states = ["exp_avg", "exp_avg_sq", "step"]
    assert told == {"loads": 1, "shared": True, "moved": 0.0, "states": states}


def test_a_wrapper_with_a_state_dict_of_its_own_form_is_given_none_of_another_layout(
    worlds: Any, saves: Saves, tmp_path: Path
) -> None:
    """It is refused on every rank before anything changes; what it has saved itself comes back."""
    folder, _ = saves(Run(1, 1, "fp32"), Model(scheduler=False))
    for target in (Run(0, 2, "fp32"), Run(2, 2, "fp32")):
        given = {"run": target, "folder": str(folder), "own_form": True}
        for told in worlds[2].run("wrapper_jobs.load_wrapped", **given):
            assert told["error"] == "UnsupportedLayout" and told["loads"] == 0
            assert "inside, loads" in told["text"] and "load_optimizer_states=False" in told["text"]
    own = {"run": Run(0, 1, "fp32"), "folder": str(tmp_path), "own_form": True, "layout_saved": str(tmp_path)}
    told = worlds[1].run("wrapper_jobs.load_wrapped", **own)[0]
    assert told["loads"] == 1, told


@pytest.mark.parametrize("version", (1, 2))
@pytest.mark.parametrize(
    ("source", "target"),
    (
        (Run(1, 2), Run(2, 1)),
        (Run(3, 2), Run(1, 1)),
        (Run(0, 1, "fp32"), Run(1, 2, "fp32")),
        (Run(2, 1), Run(0, 2)),
        (Run(2, 1), Run(3, 2)),
    ),
    ids=str,
)
def test_modules_load_what_is_no_tensor_and_by_the_saved_versions(
    worlds: Any, tmp_path: Path, source: Run, target: Run, version: int
) -> None:
    """What is computed in a `load_state_dict` is of the loaded weights, if the run does not partition them."""
    saved = worlds[source.dp].run("loader_jobs.save", run=source, folder=str(tmp_path), version=version)[0]
    for told in worlds[target.dp].run("loader_jobs.load", run=target, folder=str(tmp_path)):
        norm = 7 * told["weights"] if target.stage != 3 else 0.0
        assert told["weights"] == saved["weights"]
        assert told == {
            "count": 7,
            "cached": [7.0, 7.0],
            "mean": [0.0, 0.0, 0.0],
            "variance": [3.0, 3.0, 3.0],
            "scale": 7.0,
            "norm": norm,
            "weights": saved["weights"],
        }


def test_a_module_that_loads_by_versions_is_refused_without_them(worlds: Any, tmp_path: Path) -> None:
    """It would take what is there for the first version, and convert it a second time."""
    worlds[1].run("loader_jobs.save", run=Run(1, 1), folder=str(tmp_path))
    without_versions(next(tmp_path.rglob("mp_rank_00_model_states.pt")))
    for told in worlds[2].run("loader_jobs.load", run=Run(2, 2), folder=str(tmp_path)):
        assert told["error"] == "UnsupportedLayout" and told["unchanged"]
        assert "module versioned: loads by the version of what was saved" in told["text"]


def test_a_load_that_is_not_strict_gives_modules_what_the_run_has_no_name_for(worlds: Any, tmp_path: Path) -> None:
    """A module that had another name for its buffer finds it, as in DeepSpeed's own load."""
    worlds[1].run("loader_jobs.save_renamed", run=Run(1, 1), folder=str(tmp_path), name="old")
    given = {"run": Run(2, 2), "folder": str(tmp_path), "name": "new"}
    assert worlds[2].run("loader_jobs.load_renamed", **given) == [[2.0, 2.0]] * 2


def test_the_layers_of_a_pipeline_are_loaded_one_by_one(worlds: Any, tmp_path: Path) -> None:
    """DeepSpeed calls `load_state_dict` of each layer, and not of the PipelineModule."""
    (saved,) = worlds[1].run("loader_jobs.piped", run=Run(1, 1), folder=str(tmp_path), save=True)
    assert worlds[2].run("loader_jobs.piped", run=Run(1, 2), folder=str(tmp_path), save=False) == [saved] * 2


_FULL, _ZERO = Run(0, 1, "fp32"), Run(1, 2, "fp32")


@pytest.mark.parametrize("target", (_ZERO, Run(0, 2, "bf16")), ids=str)
def test_parameters_that_are_trained_in_turns_do_not_take_each_others_moments(
    worlds: Any, tmp_path: Path, target: Run
) -> None:
    """A frozen one has states, and the trained one has none yet: whose they are is not told by who has some."""
    given = {"run": _FULL, "folder": str(tmp_path), "frozen": "b", "then": "a"}
    (saved,) = worlds[1].run("turns_jobs.save", **given)
    assert saved["a.weight"][0] is not None and saved["b.weight"][0] is None
    for told in worlds[2].run("turns_jobs.load", run=target, folder=str(tmp_path), frozen="a"):
        assert told["error"] == "ParamGroupMismatch" and told["unchanged"]
        assert "names no parameter (ZeRO stage 0), and lists frozen ones" in told["text"]


@pytest.mark.parametrize("frozen", ("a", "b"))
def test_frozen_parameters_that_an_optimizer_lists_are_counted(worlds: Any, tmp_path: Path, frozen: str) -> None:
    """Those that are trained take their moments, whichever comes first."""
    given = {"folder": str(tmp_path), "frozen": frozen}
    (saved,) = worlds[1].run("turns_jobs.save", run=_FULL, **given)
    name = "b.weight" if frozen == "a" else "a.weight"
    (told,) = worlds[1].run("turns_jobs.load", run=Run(1, 1, "fp32"), **given)
    assert torch.equal(told[name][0], saved[name][0]) and told[name][1] == 0.005


def test_a_group_without_states_beside_one_with_them_is_refused(worlds: Any, tmp_path: Path) -> None:
    """Whether it has made no step, or its states were lost, no file tells."""
    given = {"folder": str(tmp_path), "apart": True}
    (saved,) = worlds[1].run("turns_jobs.save", run=_FULL, frozen="b", then="", **given)
    assert saved["a.weight"][0] is not None and saved["b.weight"][0] is None
    (told,) = worlds[1].run("turns_jobs.load", run=Run(1, 1, "fp32"), frozen="", **given)
    assert told["error"] == "ModelMismatch" and told["unchanged"]


@pytest.mark.parametrize(("source", "target"), ((_FULL, _ZERO), (Run(1, 1, "fp32"), Run(0, 2, "fp32"))), ids=str)
def test_weights_in_another_memory_format_are_refused_as_such(
    worlds: Any, tmp_path: Path, source: Run, target: Run
) -> None:
    """Not as a wrong order of parameters, and not once the engine is being filled."""
    turned = source.stage == 0
    given = {"folder": str(tmp_path), "frozen": ""}
    worlds[source.dp].run("turns_jobs.save", run=source, turned=turned, **given)
    for told in worlds[2].run("turns_jobs.load", run=target, turned=not turned, **given):
        assert told["error"] == "UnsupportedLayout" and told["unchanged"]
        assert ("row-major" if turned else "not contiguous in this run") in told["text"]


@pytest.mark.parametrize("ranks", (1, 2))
def test_masters_of_a_parameter_that_is_frozen_now_are_not_another_ones(
    worlds: Any, tmp_path: Path, ranks: int
) -> None:
    """DeepSpeed matches masters of ZeRO stage 0 by their places, and the first step writes them into the weights."""
    given = {"run": Run(0, ranks, "bf16"), "folder": str(tmp_path), "trained_alone": True}
    worlds[ranks].run("turns_jobs.save", frozen="b", **given)
    for told in worlds[ranks].run("turns_jobs.load", frozen="a", **given):
        assert told["error"] == "CheckpointDamaged", told
        assert "do not belong together" in told["text"] and "trains other parameters" in told["text"]
    for told in worlds[ranks].run("turns_jobs.load", frozen="b", **given):
        assert "error" not in told


@pytest.mark.parametrize("turned", (False, True))
def test_masters_in_another_memory_format_are_compared_with_their_weights(
    worlds: Any, tmp_path: Path, turned: bool
) -> None:
    """DeepSpeed loads them at ZeRO stage 0; what is compared afterwards need not lie row-major."""
    given = {"run": Run(0, 1, "bf16"), "folder": str(tmp_path), "frozen": "", "turned": turned}
    worlds[1].run("turns_jobs.save", **given)
    assert worlds[1].run("turns_jobs.load", **given) == [{}]


def test_a_group_of_which_nothing_is_trained_has_the_saved_rate(worlds: Any, tmp_path: Path) -> None:
    """It is the saved group of its number, if nothing of that is trained either."""
    worlds[1].run("turns_jobs.save", run=Run(0, 1, "bf16"), folder=str(tmp_path), frozen="b", apart=True)
    assert worlds[1].run("turns_jobs.rates", run=Run(0, 1, "fp32"), folder=str(tmp_path)) == [[0.005, 0.005]]
    assert worlds[1].run("turns_jobs.rates", run=Run(0, 1, "bf16"), folder=str(tmp_path)) == [[0.005, 0.005]]


def test_an_empty_parameter_without_states_is_none_that_lost_them(worlds: Any, saves: Saves) -> None:
    """DeepSpeed gives it no gradient at ZeRO stage 0 on one rank, so that a torch optimizer keeps nothing of it."""
    model = Model(empty=True)
    folder, saved = saves(_FULL, model)
    loaded = worlds[2].run("load", run=_ZERO, model=model, folder=str(folder))
    truth, got = gathered(saved), gathered(loaded)
    assert set(truth) == set(got) and all(same_bits(truth[key], got[key]) for key in truth)
    assert scalars(loaded) == scalars(saved)
