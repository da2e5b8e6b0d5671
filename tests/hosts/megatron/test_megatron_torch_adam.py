"""Adam's step where torch's own Adam keeps it, in each state, and no param group has one: carried over, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Failed
from format_jobs import KINDS, STEP
from releases import TRAINED
from saved_worlds import DISTRIBUTED, EXPERTS, FLAGS, GATED, TP

import ds_reshard.operations as tools
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.formats.megatron.checkpoint import read_past

pytestmark = pytest.mark.slow
PLAIN = f"--bf16 {GATED}"
SHARDED = f"{DISTRIBUTED}{GATED}"
FORMS = {"dist": "torch_dist", "torch": "torch"}
Saves = Callable[..., Path]


@pytest.fixture(scope="module")
def saves(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The folder of a save by two ranks, of one run in both formats."""
    made: dict[tuple[str, str], Path] = {}

    def folder(form: str, release: str = "0.19.2", more: str = "", forms: tuple[str, ...] = ("dist", "torch")) -> Path:
        if (release, more) not in made:
            made[release, more] = out = tmp_path_factory.mktemp("saved")
            asked = [{"save": str(out / one), "ckpt_format": FORMS[one]} for one in forms]
            releases[release].run("torch_adam:save", ranks=2, arguments=f"{PLAIN}{more}", saves=asked)
        return made[release, more] / form

    return folder


INTO = {
    "distributed, fused": ("load_jobs:load", SHARDED),
    "distributed": ("torch_adam:load", SHARDED),
    "plain": ("torch_adam:load", PLAIN),
    "plain, fused": ("load_jobs:load", PLAIN),
}


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("release", TRAINED)
def test_the_step_comes_along(saves: Saves, releases: Any, release: str, form: str, into: str) -> None:
    """Into each kind of optimizer, from either format; a fused one counts on in whole numbers."""
    function, arguments = INTO[into]
    arguments += f" --ckpt-format {FORMS[form]} --load {saves(form, release)}"
    for one in releases[release].run(function, ranks=2, arguments=arguments):
        assert (one["wrong"], one["steps"]) == ([], [STEP])
        assert "fused" not in into or type(one["steps"][0]) is int


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("by", "into", "arguments"),
    [("torch_adam", "load_jobs", PLAIN), ("format_jobs", "torch_adam", PLAIN), ("torch_adam", "load_jobs", SHARDED)],
)
def test_the_step_comes_along_from_one_adam_to_another(
    releases: Any, by: str, into: str, arguments: str, form: str, tmp_path: Path
) -> None:
    """From torch's Adam into a fused one, whose bias correction would begin anew, and back."""
    asked = [{"save": str(tmp_path), "ckpt_format": FORMS[form]}]
    releases["0.19.2"].run(f"{by}:save", ranks=2, arguments=arguments, saves=asked)
    arguments += f" --ckpt-format {FORMS[form]} --load {tmp_path}"
    told = releases["0.19.2"].run(f"{into}:load", ranks=2, arguments=arguments)
    for one in told:
        assert (one["wrong"], one["steps"]) == ([], [STEP])
        assert into == "torch_adam" or type(one["steps"][0]) is int


def test_what_was_loaded_is_saved_with_its_own_step(saves: Saves, releases: Any, tmp_path: Path) -> None:
    """No copy of the step that was loaded stays in a param group, where it would be read for the one of later."""
    arguments = f"{PLAIN} --load {saves('dist')}"
    releases["0.19.2"].run("torch_adam:load", ranks=2, arguments=arguments, again=str(tmp_path))
    assert tools.inspect(str(tmp_path)).steps.optimizer_steps == (STEP + 1,)


@pytest.mark.parametrize("form", [*FORMS, "experts"])
def test_the_step_is_converted(saves: Saves, releases: Any, form: str, tmp_path: Path) -> None:
    """Of a chain of optimizers that of each, for DeepSpeed and for Megatron, whose fused ones count whole numbers."""
    more = EXPERTS if form == "experts" else ""
    folder = str(saves("dist", more=more, forms=("dist",)) if more else saves(form))
    for to in ("zero2", "megatron", "megatron-torch"):
        made = tools.convert(folder, str(tmp_path / to), to=to, dp=2).out
        assert tools.inspect(made).steps.optimizer_steps == (STEP,), to
    groups = read_past(str(tmp_path / "megatron")).groups
    assert groups is not None and [(group["step"], type(group["step"])) for group in groups] == [(STEP, int)] * len(
        groups
    )
    (told, *_) = releases["0.19.2"].run(
        "format_jobs:loaded", ranks=2, arguments=f"{SHARDED}{more}", folder=str(tmp_path / "megatron")
    )
    assert (told["wrong"], told["steps"]) == ([], [STEP])


@pytest.mark.parametrize("form", ["model_space", "buckets", "torch"])
@pytest.mark.parametrize("by", ["torch_adam", "format_jobs"])
def test_nothing_has_changed_under_the_distributed_optimizer(releases: Any, by: str, form: str, tmp_path: Path) -> None:
    """Where Megatron itself ends in a KeyError, or in an AssertionError without a word."""
    asked = [{"save": str(tmp_path), **FLAGS[form]}]
    releases["0.19.2"].run(f"{by}:save", arguments=SHARDED, saves=asked)
    arguments = f"{SHARDED} --ckpt-format {FLAGS[form]['ckpt_format']} --load {tmp_path}"
    (told,) = releases["0.19.2"].run("torch_adam:load", arguments=arguments)
    assert (told["wrong"], told["steps"]) == ([], [STEP])
    for function in ("torch_adam", "foresee_jobs"):
        more = {"world": 1} if function == "foresee_jobs" else {}
        (said,) = releases["0.19.2"].run(f"{function}:foresee", arguments=SHARDED, folder=str(tmp_path), **more)
        assert said["loads"] and said["loader"] == "ds_reshard", said["verdict"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_step_that_no_file_tells(saves: Saves, releases: Any, tmp_path: Path) -> None:
    """Refused by name before anything changes; weights are had. In 0.18.2, which writes a common.pt."""
    out, release = tmp_path / "saved", releases["0.18.2"]
    release.run("torch_adam:save", ranks=2, arguments=PLAIN, saves=[{"save": str(out), "ckpt_format": "torch_dist"}])
    release.run("torch_adam:change", path=str(next(out.glob("iter_*")) / "common.pt"), steps=[])
    for function in ("torch_adam:refused", "load_jobs:refused"):
        told = release.run(function, ranks=2, arguments=f"{SHARDED} --load {out}")
        assert {(one["refused"], *one["changed"]) for one in told} == {("UnsupportedLayout",)}
        assert "its optimizer's step is missing" in told[0]["message"]
    (told, _) = release.run("load_jobs:load", ranks=2, arguments=f"{SHARDED} --load {out} --load-masters-only")
    assert told["fresh"] and told["steps"] == [0] and {one.split()[0] for one in told["wrong"]} == set(KINDS[1:])
    with pytest.raises(UnsupportedLayout, match="Adam's moments are there, and not their step"):
        tools.convert(str(out), str(tmp_path / "out"), to="megatron")
    tools.convert(str(out), str(tmp_path / "weights"), to="safetensors")


@pytest.mark.parametrize(("steps", "said"), [([5.0, 6.0], "at several steps"), ([6.0], "or their steps are others")])
def test_steps_that_differ(releases: Any, steps: list[float], said: str, tmp_path: Path) -> None:
    """Of parameters, and of ranks."""
    out, release = tmp_path / "saved", releases["0.19.2"]
    asked = [{"save": str(out), "ckpt_format": "torch"}]
    release.run("torch_adam:save", ranks=2, arguments=f"{PLAIN}{TP}", saves=asked)
    assert tools.inspect(str(out)).faults == ()
    (file,) = out.glob("iter_*/mp_rank_01/model_optim_rng.pt")
    release.run("torch_adam:change", path=str(file), steps=steps)
    assert any(said in fault.what for fault in tools.verify(str(out)).faults)


def test_steps_that_one_param_group_cannot_count(releases: Any, tmp_path: Path) -> None:
    """Into a fused Adam: refused before anything changes; without the optimizer it goes well."""
    release = releases["0.19.2"]
    release.run("torch_adam:save", arguments=PLAIN, saves=[{"save": str(tmp_path), "ckpt_format": "torch"}])
    (file,) = tmp_path.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    release.run("torch_adam:change", path=str(file), steps=[5.0, 6.0])
    arguments = f"{PLAIN} --ckpt-format torch --load {tmp_path}"
    (told,) = release.run("load_jobs:refused", arguments=arguments)
    assert (told["refused"], told["changed"]) == ("UnsupportedLayout", [])
    assert "at several steps" in told["message"]
    skipped = "--no-load-optim --use-checkpoint-opt_param-scheduler"
    (told,) = release.run("load_jobs:load", arguments=f"{arguments} {skipped}")
    assert told["fresh"]


@pytest.mark.parametrize("form", ["model_space", "buckets", "torch"])
def test_nothing_has_changed_and_weights_are_fp32(releases: Any, form: str, tmp_path: Path) -> None:
    """Shards of them are their own masters: Megatron itself stops as it fills them, when other weights have changed."""
    arguments, taken = f"--use-distributed-optimizer {GATED}", form != "model_space"
    releases["0.19.2"].run("format_jobs:save", arguments=arguments, saves=[{"save": str(tmp_path), **FLAGS[form]}])
    load = f"{arguments} --ckpt-format {FLAGS[form]['ckpt_format']} --load {tmp_path}"
    if taken:
        with pytest.raises(Failed, match="a view of a leaf Variable that requires grad"):
            releases["0.19.2"].run("load_jobs:load", arguments=load, hooks=False)
    (told,) = releases["0.19.2"].run("load_jobs:load", arguments=load)
    assert (told["wrong"], told["steps"]) == ([], [STEP])
    (said,) = releases["0.19.2"].run("foresee_jobs:foresee", arguments=arguments, folder=str(tmp_path), world=1)
    assert said["loads"] and said["loader"] == "ds_reshard", said["verdict"]


def test_a_line_that_mends_fp16_with_torchs_adam(releases: Any, tmp_path: Path) -> None:
    """The run is what was saved already: to load it as such would end here again."""
    arguments = f"--fp16 --initial-loss-scale 4096 --use-distributed-optimizer {GATED}"
    releases["0.19.2"].run("torch_adam:save", arguments=arguments, saves=[{"save": str(tmp_path), **FLAGS["buckets"]}])
    (told,) = releases["0.19.2"].run("torch_adam:refused", arguments=f"{arguments} --load {tmp_path}")
    assert told["refused"] == "UnsupportedLayout" and "install Apex or Transformer Engine, or add" in told["message"]
    (mended,) = releases["0.19.2"].run("torch_adam:load", arguments=f"{arguments} --load {tmp_path} --no-load-optim")
    assert mended["fresh"] and not [text for text in mended["wrong"] if text.startswith("weight")]
