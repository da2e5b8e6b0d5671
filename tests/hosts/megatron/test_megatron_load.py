"""`--load` under another topology, where Megatron-LM refuses: every element of every rank is the one that was saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from forks import Failed
from format_jobs import ITERATION, SAMPLES_SEEN, STEP
from releases import EVERY, OLDEST, TRAINED, WITH_TRAINING
from saved_worlds import FIRST, VP3

from ds_reshard.hosts.megatron.report import OTHER_GRID
from ds_reshard.operations import verify

pytestmark = pytest.mark.slow
MODELS = {
    "A": "",
    "B": "--swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
    " --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --no-rope-fusion ",
    "C": "--hidden-size 20 --ffn-hidden-size 28 ",
}
MODELS["BT"] = MODELS["B"].replace("--untie-embeddings-and-output-weights", "")
MODELS["M"] = MODELS["B"] + (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --moe-ffn-hidden-size 24 "
)
MODELS["MB"] = MODELS["M"] + "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
OPTIMIZERS = {
    "sharded": "--bf16 --use-distributed-optimizer ",
    "sharded-fp32": "--use-distributed-optimizer ",
    "bf16": "--bf16 ",
    "fp32": "",
}
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
EP = "--expert-model-parallel-size 2 "
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 1000 "
TOPOLOGIES = {
    "one": ("", 1),
    "dp2": ("", 2),
    "tp2": (TP, 2),
    "pp2": (PP, 2),
    "tp2dp2": (TP, 4),
    "tp2pp2": (TP + PP, 4),
    "pp2vp2": (PP + "--num-layers-per-virtual-pipeline-stage 1 ", 2),
    "buckets2": (BUCKETS, 2),
    "ep2": (EP, 2),
    "ep2dp2": (EP, 4),
    "ep2pp2": (EP + PP, 4),
    "first": (FIRST, 2),
    "vp3": (VP3, 2),
    "layout": (PP + "--pipeline-model-parallel-layout Et|(t|)*2tL ", 2),
    "moved": (PP + "--pipeline-model-parallel-layout Ett|t||tL ", 2),
    "uneven": (PP + "--pipeline-model-parallel-layout Et|t*3L ", 2),
    "tp2etp1": (TP + "--expert-tensor-parallel-size 1 ", 2),
}
FORMS: dict[str, dict[str, Any]] = {
    "torch": {"ckpt_format": "torch"},
    "buckets": {"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": False},
    "whole": {"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": True},
}
BOTH = ("torch", "buckets")


@dataclass(frozen=True)
class Cell:
    """What was saved, and what loads it; `forms` are those that Megatron refuses or gets wrong."""

    model: str
    saved: tuple[str, str]
    loaded: tuple[str, str]
    forms: tuple[str, ...] = BOTH

    def __str__(self) -> str:
        return f"{self.model} {' '.join(self.saved)} to {' '.join(self.loaded)}"


def _cell(model: str, saved: str, loaded: str, *others: str, forms: tuple[str, ...] = BOTH) -> Cell:
    optimizers = others or ("sharded",)
    return Cell(model, (saved, optimizers[0]), (loaded, optimizers[-1]), forms)


CELLS = [
    _cell("A", "tp2", "one"),
    _cell("A", "dp2", "tp2pp2"),
    _cell("A", "pp2", "tp2"),
    _cell("B", "one", "tp2"),
    _cell("B", "tp2pp2", "dp2"),
    _cell("B", "tp2pp2", "tp2dp2"),
    _cell("C", "tp2", "one"),
    _cell("C", "pp2", "one", forms=("torch",)),  # which Megatron itself cannot save in buckets
    _cell("C", "buckets2", "one"),
    _cell("C", "one", "buckets2"),
    _cell("BT", "pp2", "one"),
    _cell("BT", "one", "pp2"),
    _cell("B", "pp2vp2", "tp2"),
    _cell("B", "pp2", "pp2vp2"),
    _cell("B", "dp2", "one", "sharded", "bf16", forms=(*BOTH, "whole")),
    _cell("B", "dp2", "tp2", "sharded", "fp32", forms=(*BOTH, "whole")),
    _cell("B", "dp2", "tp2pp2", "bf16", "sharded"),
    _cell("B", "one", "dp2", "fp32", "sharded", forms=("buckets",)),
    _cell("B", "tp2", "one", "bf16", forms=("torch",)),
    _cell("A", "tp2", "one", "sharded-fp32", forms=("torch",)),
    _cell("M", "ep2", "one", forms=(*BOTH, "whole")),
    _cell("M", "one", "ep2", forms=(*BOTH, "whole")),
    _cell("M", "ep2pp2", "dp2", forms=(*BOTH, "whole")),
    _cell("M", "ep2", "one", "bf16", forms=("buckets",)),
    _cell("M", "one", "ep2", "bf16", forms=("buckets",)),
    _cell("M", "tp2etp1", "ep2dp2"),
    _cell("MB", "ep2", "pp2", forms=("buckets", "whole")),
    _cell("MB", "one", "ep2pp2", forms=("buckets",)),
    _cell("B", "tp2", "tp2", "sharded", "sharded-fp32"),
    _cell("B", "dp2", "dp2", "bf16", "fp32"),
    _cell("B", "dp2", "dp2", "fp32", "bf16", forms=("buckets",)),
    _cell("B", "layout", "moved", "bf16", forms=("torch",)),
    _cell("B", "moved", "layout"),
    _cell("BT", "uneven", "tp2"),
]
if EVERY:
    CELLS += [
        _cell("BT", "first", "tp2"),
        _cell("BT", "pp2", "first"),
        _cell("B", "vp3", "pp2vp2"),
        _cell("B", "tp2dp2", "vp3", forms=("buckets",)),
    ]
OLDER = CELLS if EVERY else [CELLS[number] for number in (1, 8, 12, 14, 16, 20)]
"""Cells on 0.18.2: `make test-versions` runs them all."""


def _runs(release: str, cells: list[Cell], turn: int) -> list[tuple[str, Cell, str]]:
    """Each cell in one of its forms by turns; by `make test-versions` in all of them."""
    numbers = {cell: CELLS.index(cell) + turn for cell in cells}
    one = {cell: cell.forms[number % len(cell.forms)] for cell, number in numbers.items()}
    return [(release, cell, form) for cell in cells for form in (cell.forms if EVERY else (one[cell],))]


ALL = _runs("0.19.2", CELLS, 0) + _runs("0.18.2", OLDER, 1)
ALL += [
    (release, CELLS[number], form) for release in OLDEST for number in (0, 4, 14, 20) for form in CELLS[number].forms
]
RIGHT = [(*sizes, form) for sizes, form in product((("tp2dp2", "tp2"), ("dp2", "one")), FORMS)]

Saved = Callable[[str, str, tuple[str, str], str], Path]


def _arguments(model: str, side: tuple[str, str]) -> tuple[str, int]:
    topology, ranks = TOPOLOGIES[side[0]]
    return OPTIMIZERS[side[1]] + MODELS[model] + topology, ranks


@pytest.fixture(scope="module")
def saved(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of `--save` of a model under a topology, by plain Megatron; each is saved once in every form."""
    folders: dict[tuple[str, str, tuple[str, str]], Path] = {}

    def folder(release: str, model: str, side: tuple[str, str], form: str) -> Path:
        at = (release, model, side)
        if at not in folders:
            made = folders[at] = tmp_path_factory.mktemp("saved")
            arguments, ranks = _arguments(model, side)
            forms = [one for one in FORMS if not (model == "C" and one == "buckets" and side[0] == "pp2")]
            if "sharded" not in side[1]:
                forms.remove("whole")
            elif "fp32" in side[1]:
                forms.remove("buckets")  # fails in Megatron itself
            saves = [{"save": str(made / one), **FORMS[one]} for one in forms]
            releases[release].run("format_jobs:save", ranks=ranks, arguments=arguments, saves=saves)
        return folders[at] / form

    return folder


def _load(
    releases: Any, release: str, model: str, side: tuple[str, str], folder: Path, more: str = "", **options: Any
) -> list[dict[str, Any]]:
    arguments, ranks = _arguments(model, side)
    function = options.pop("function", "load_jobs:load")
    told: list[dict[str, Any]] = releases[release].run(
        function, ranks=ranks, arguments=f"{arguments} --load {folder} {more}", **options
    )
    return told


def _row(told: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in told["report"]["rows"] if row["name"] == name), None)


def _is_right(told: list[dict[str, Any]]) -> bool:
    counters = (ITERATION, SAMPLES_SEEN, SAMPLES_SEEN, [STEP])
    return all(
        one["wrong"] == [] and (one["iteration"], one["samples"], one["position"], one["steps"]) == counters
        for one in told
    )


@pytest.mark.parametrize(("release", "cell", "form"), ALL, ids=[f"{a} {b} {c}" for a, b, c in ALL])
def test_another_topology(saved: Saved, releases: Any, release: str, cell: Cell, form: str) -> None:
    """Weights, masters, moments, steps, iteration, samples and the schedule's position, on every rank."""
    told = _load(releases, release, cell.model, cell.loaded, saved(release, cell.model, cell.saved, form))
    assert _is_right(told), [one["wrong"][:4] for one in told]
    row = _row(told[0], "tensors read by")
    assert row is not None and row["used"] == "ds_reshard"
    states = _row(told[0], "random states")
    assert states is not None
    if "ep2" in cell.saved[0] + cell.loaded[0]:  # experts draw by their own rank
        assert (states["used"], states["because"]) == ("of this run", OTHER_GRID)


def test_weights_alone_of_stages_that_are_laid_out_otherwise(saved: Saved, releases: Any) -> None:
    """Of format `torch` Megatron leaves those as they were made that it finds under no number, and says nothing."""
    folder = saved("0.19.2", "B", ("pp2", "bf16"), "torch")
    for hooks in (False, True):
        told = _load(releases, "0.19.2", "B", ("uneven", "bf16"), folder, "--no-load-optim", hooks=hooks)
        wrong = [text for one in told for text in one["wrong"] if text.startswith("weight")]
        assert bool(wrong) is not hooks


@pytest.mark.parametrize(("before", "now", "form"), [("B", "BT", "torch"), ("B", "BT", "whole"), ("BT", "B", "whole")])
def test_embeddings_that_were_tied_or_not(saved: Saved, releases: Any, before: str, now: str, form: str) -> None:
    """Of untied ones Megatron drops the output layer, or keeps it beside an embedding that it is no copy of."""
    folder = saved("0.19.2", before, ("pp2", "sharded"), form)
    if before == "B":
        alone = _load(releases, "0.19.2", now, ("pp2", "sharded"), folder, hooks=False)
        assert any("word_embeddings" in text for one in alone for text in one["wrong"]) is (form == "torch")
    told = _load(releases, "0.19.2", now, ("pp2", "sharded"), folder, function="load_jobs:refused")
    refused = ("ModelMismatch", [], {"output_layer.weight"})
    assert [(one["refused"], one["changed"], set(one["where"])) for one in told] == [refused] * 2


OTHERS = {
    "--add-qkv-bias --no-load-optim": "linear_qkv.bias",
    "--add-qkv-bias --finetune": "",
    "--add-qkv-bias": "linear_qkv.bias",
    "--ffn-hidden-size 32": "linear_fc1.weight",
    "--ffn-hidden-size 32 --finetune": "linear_fc1.weight",
}


@pytest.mark.parametrize("more", OTHERS)
def test_weights_of_format_torch_that_are_not_the_models(saved: Saved, releases: Any, more: str) -> None:
    """Under one topology Megatron leaves tensors as they were made that it finds under no name, and says nothing.

    Or it stops at another shape, when other weights are in.
    """
    folder = saved("0.19.2", "B", ("one", "sharded"), "torch")
    if "--no-load-optim" in more:
        (alone,) = _load(releases, "0.19.2", "B", ("one", "sharded"), folder, more, hooks=False)
        assert any(text.startswith("weight") and OTHERS[more] in text for text in alone["wrong"])
    if not OTHERS[more]:
        (told,) = _load(releases, "0.19.2", "B", ("one", "sharded"), folder, more)
        assert any("linear_qkv.bias: is missing from the checkpoint" in text for text in told["report"]["warnings"])
        return
    (told,) = _load(releases, "0.19.2", "B", ("one", "sharded"), folder, more, function="load_jobs:refused")
    assert (told["refused"], told["changed"]) == ("ModelMismatch", [])
    assert any(OTHERS[more] in where for where in told["where"])


def test_a_checkpoint_with_none_of_the_models_weights(saved: Saved, releases: Any, tmp_path: Path) -> None:
    """As of a model that was saved in another wrapper: refused with `--finetune` too, which passes over names."""
    folder = shutil.copytree(saved("0.19.2", "B", ("one", "sharded"), "torch"), tmp_path / "saved")
    (file,) = Path(folder).rglob("model_optim_rng.pt")
    releases["0.19.2"].run("load_jobs:wrap_names", path=str(file))
    (told,) = _load(releases, "0.19.2", "B", ("one", "sharded"), folder, "--finetune", function="load_jobs:refused")
    assert (told["refused"], told["changed"]) == ("ModelMismatch", [])
    assert any("linear_qkv.weight" in where for where in told["where"])


@pytest.mark.parametrize(
    ("optimizer", "form"), [("sharded", "torch"), ("sharded", "buckets"), ("sharded", "whole"), ("bf16", "torch")]
)
def test_a_vocabulary_that_is_padded_otherwise(saved: Saved, releases: Any, optimizer: str, form: str) -> None:
    """Under one topology: 104 rows as saved, 128 now. Megatron itself does it right in model space alone."""
    folder, side = saved("0.19.2", "B", ("one", optimizer), form), ("one", optimizer)
    told = _load(releases, "0.19.2", "B", side, folder, "--make-vocab-size-divisible-by 64")
    assert _is_right(told), [one["wrong"][:4] for one in told]
    states = _row(told[0], "random states")
    assert states is not None and states["used"] == "from the checkpoint"


@pytest.mark.parametrize("form", FORMS)
def test_what_the_model_has_not(saved: Saved, releases: Any, form: str) -> None:
    """Biases, which Megatron drops, of `torch_dist` with their moments, too; with `--finetune` the report tells it."""
    folder, side = saved("0.19.2", "A", ("one", "sharded"), form), ("one", "sharded")
    for more in ("--disable-bias-linear --no-load-optim", "--disable-bias-linear")[: 2 if form == "whole" else 1]:
        assert _load(releases, "0.19.2", "A", side, folder, more, hooks=False)
        (told,) = _load(releases, "0.19.2", "A", side, folder, more, function="load_jobs:refused")
        assert (told["refused"], told["changed"]) == ("ModelMismatch", [])
        assert "linear_fc2.bias: is in the checkpoint but not in the model" in told["message"]
    (kept,) = _load(releases, "0.19.2", "A", side, folder, "--disable-bias-linear --finetune")
    assert any("linear_fc2.bias: is in the checkpoint" in text for text in kept["report"]["warnings"])


@pytest.mark.parametrize("now", ["pp2", "layout of the same"])
def test_stages_of_format_torch_in_a_run_that_saves_another(saved: Saved, releases: Any, now: str) -> None:
    """What a stage's file says of groups is no other stage's."""
    folder = saved("0.19.2", "B", ("pp2", "bf16"), "torch")
    more = "" if now == "pp2" else "--pipeline-model-parallel-layout Ett|ttL"
    told = _load(releases, "0.19.2", "B", ("pp2", "bf16"), folder, f"--ckpt-format torch_dist {more}")
    assert _is_right(told)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("before", "now"), [WITH_TRAINING, WITH_TRAINING[::-1]])
def test_experts_that_another_release_has_kept_among_the_dense_parameters(
    saved: Saved, releases: Any, before: str, now: str, form: str
) -> None:
    """Under one topology: since 0.19 a tensor-parallel size of their own gives them an optimizer of their own."""
    folder = saved(before, "M", ("tp2etp1", "sharded"), form)
    told = _load(releases, now, "M", ("tp2etp1", "sharded"), folder)
    assert _is_right(told), [one["wrong"][:4] for one in told]


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("release", TRAINED)
def test_that_is_what_megatron_refuses(saved: Saved, releases: Any, release: str, form: str) -> None:
    folder = saved(release, "A", ("tp2", "sharded"), form)
    with pytest.raises(Failed) as error:
        _load(releases, release, "A", ("one", "sharded"), folder, hooks=False)
    assert error.value.error in ("AssertionError", "RuntimeError")


@pytest.mark.parametrize(("before", "now", "form"), RIGHT)
def test_random_states_go_on_where_the_model_is_cut_as_before(
    saved: Saved, releases: Any, before: str, now: str, form: str
) -> None:
    folder = saved("0.19.2", "A", (before, "sharded"), form)
    told = _load(releases, "0.19.2", "A", (now, "sharded"), folder)
    assert _is_right(told)
    row, states = _row(told[0], "tensors read by"), _row(told[0], "random states")
    assert row is not None and row["used"] == "ds_reshard"
    assert states is not None and states["used"] == "from the checkpoint"


def test_random_states_of_another_topology_are_said_to_be_this_runs(saved: Saved, releases: Any) -> None:
    folder = saved("0.19.2", "A", ("tp2", "sharded"), "buckets")
    row = _row(_load(releases, "0.19.2", "A", ("one", "sharded"), folder)[0], "random states")
    assert row is not None
    assert (row["used"], row["because"]) == ("of this run", OTHER_GRID)


@pytest.mark.parametrize("flag", ["--no-load-optim", "--finetune", "--load-masters-only"])
def test_flags_of_the_policy_hold_at_the_same_time(saved: Saved, releases: Any, flag: str) -> None:
    """Weights right, masters theirs, and no moment but zeros."""
    folder = saved("0.19.2", "A", ("tp2", "sharded"), "torch")
    (told,) = _load(releases, "0.19.2", "A", ("one", "sharded"), folder, flag)
    assert {text.split()[0] for text in told["wrong"]} <= {"exp_avg", "exp_avg_sq"} | (
        set() if flag == "--load-masters-only" else {"param"}
    )
    assert (
        told["fresh"]
        and told["cast"] is (flag != "--load-masters-only")
        and told["iteration"] == (0 if flag == "--finetune" else ITERATION)
    )


# -- non-persistent checkpoints ----------------------------------------------------------------------------------------


LATER = 12
BESIDE = "--non-persistent-ckpt-type global "


def _beside(releases: Any, arguments: str, ranks: int, folder: Path, form: str) -> None:
    """A persistent checkpoint of `ITERATION`, and a later one that is not."""
    at = {"save": str(folder), **FORMS[form]}
    saves = [{**at, "iteration": ITERATION}, {**at, "iteration": LATER, "non_persistent_ckpt_type": "global"}]
    releases["0.19.2"].run("format_jobs:save", ranks=ranks, arguments=arguments, saves=saves)


@pytest.fixture(scope="module")
def beside(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("beside")
    _beside(releases, *_arguments("A", ("tp2", "sharded")), made, "buckets")
    return made


def test_a_non_persistent_checkpoint_under_another_topology(beside: Path, releases: Any, tmp_path: Path) -> None:
    """The later one wins, as in Megatron, wherever it lies; without one the persistent one is loaded."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(beside / "non_persistent", moved)
    places = {"": LATER, f"--non-persistent-global-ckpt-dir {moved}": LATER}
    places |= {f"--non-persistent-global-ckpt-dir {tmp_path}": ITERATION}
    for more, iteration in places.items():
        (told,) = _load(releases, "0.19.2", "A", ("one", "sharded"), beside, BESIDE + more)
        row = _row(told, "tensors read by")
        assert told["wrong"] == [] and told["iteration"] == iteration and row is not None


def test_a_step_beside_a_later_checkpoint_that_is_not_persistent(beside: Path, releases: Any) -> None:
    """Megatron loads the later one; whoever would load, it is refused."""
    asked = f"{BESIDE}--ckpt-step {ITERATION}"
    alone = _load(releases, "0.19.2", "A", ("tp2", "sharded"), beside, asked, hooks=False)
    assert {one["iteration"] for one in alone} == {LATER}
    for now in ("tp2", "dp2"):
        told = _load(releases, "0.19.2", "A", (now, "sharded"), beside, asked, function="load_jobs:refused")
        _refuses(told, "ConfigError", f"is non-persistent and no older than --ckpt-step {ITERATION}")
    told = _load(releases, "0.19.2", "A", ("tp2", "sharded"), beside, f"{BESIDE}--ckpt-step {LATER}")
    assert {one["iteration"] for one in told} == {LATER}


def test_states_that_were_saved_shifted_beside_a_non_persistent_checkpoint(releases: Any, tmp_path: Path) -> None:
    """They are looked at in the one that is loaded, whichever that is."""
    model, ranks = SHIFTED["tied pp2"]
    arguments = OPTIMIZERS["sharded"] + model
    _beside(releases, arguments, ranks, tmp_path, "whole")
    for more in (BESIDE, f"{BESIDE}--non-persistent-global-ckpt-dir {tmp_path / 'none'}"):
        job = {"ranks": ranks, "arguments": f"{arguments} --load {tmp_path} {more}"}
        told = releases["0.19.2"].run("load_jobs:refused", **job)
        _refuses(told, "CheckpointDamaged", "are not the cast of their fp32 masters")


# -- what was not saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "form", "mend"),
    [
        ("no_save_optim", "torch", "--no-load-optim"),
        ("no_save_optim", "buckets", "--no-load-optim"),
        ("no_save_rng", "torch", "--no-load-rng"),
    ],
)
def test_what_was_not_saved(releases: Any, tmp_path: Path, left_out: str, form: str, mend: str) -> None:
    """Megatron stops when weights have changed, or ends the process as if all were well; the line mends it."""
    arguments, ranks = _arguments("B", ("one", "sharded"))
    saves = [{"save": str(tmp_path), left_out: True, **FORMS[form]}]
    releases["0.19.2"].run("format_jobs:save", ranks=ranks, arguments=arguments, saves=saves)
    told = _load(releases, "0.19.2", "B", ("one", "sharded"), tmp_path, function="load_jobs:refused")
    _refuses(told, "UnsupportedLayout", f"add {mend}")
    (mended,) = _load(releases, "0.19.2", "B", ("one", "sharded"), tmp_path, mend)
    assert not [text for text in mended["wrong"] if text.startswith("weight")] and mended["iteration"] == ITERATION


def test_random_states_that_were_not_saved_are_said_to_be_this_runs(releases: Any, tmp_path: Path) -> None:
    arguments, ranks = _arguments("B", ("one", "sharded"))
    saves = [{"save": str(tmp_path), "no_save_rng": True, **FORMS["buckets"]}]
    releases["0.19.2"].run("format_jobs:save", ranks=ranks, arguments=arguments, saves=saves)
    row = _row(_load(releases, "0.19.2", "B", ("one", "sharded"), tmp_path)[0], "random states")
    assert row is not None and (row["used"], row["because"]) == ("of this run", "none were saved")


def test_another_optimizer(saved: Saved, releases: Any) -> None:
    """Megatron gives the moments to one that knows no such states, and it begins anew without a word."""
    folder = saved("0.19.2", "B", ("one", "bf16"), "torch")
    told = _load(releases, "0.19.2", "B", ("one", "bf16"), folder, "--optimizer sgd", function="load_jobs:refused")
    _refuses(told, "ModelMismatch", "is another than in the saving run (expected adam, found sgd)")
    (told_mended,) = _load(releases, "0.19.2", "B", ("one", "bf16"), folder, "--optimizer sgd --no-load-optim")
    assert told_mended["cast"] and told_mended["iteration"] == ITERATION


def test_sgd_of_torch_dist_is_refused_by_name(releases: Any, tmp_path: Path) -> None:
    """Megatron itself ends in a TypeError, whatever has changed; each line that mends it ends in a load."""
    arguments = f"--bf16 --optimizer sgd {MODELS['B']}"
    saves = [{"save": str(tmp_path / form), "ckpt_format": form} for form in ("torch_dist", "torch")]
    releases["0.19.2"].run("load_jobs:save_stepped", arguments=arguments, saves=saves)
    load, mended = f"{arguments} --load {tmp_path / 'torch_dist'} ", f"{arguments} --load {tmp_path / 'torch'} "
    with pytest.raises(Failed, match="'NoneType' object is not callable"):
        releases["0.19.2"].run("load_jobs:load", arguments=load, hooks=False)
    told = releases["0.19.2"].run("load_jobs:refused", arguments=load)
    _refuses(told, "UnsupportedLayout", "save it with --ckpt-format torch, or add --no-load-optim")
    (said,) = releases["0.19.2"].run(
        "foresee_jobs:foresee", arguments=arguments, folder=str(tmp_path / "torch_dist"), world=1
    )
    assert not said["loads"] and "does not create the states of SGD" in said["verdict"]
    for line in (f"{load}--no-load-optim", f"{mended}--ckpt-format torch"):
        (one,) = releases["0.19.2"].run("load_jobs:refused", arguments=line)
        assert one["refused"] is None


def test_parameters_of_unknown_places_are_not_said_to_be_damage(releases: Any, tmp_path: Path) -> None:
    """Their states are refused by name; the weights load without them."""
    shared = f"{MODELS['M']}--moe-shared-expert-intermediate-size 24 "
    job = {"ranks": 1, "arguments": OPTIMIZERS["sharded"] + shared}
    releases["0.19.2"].run("format_jobs:save", saves=[{"save": str(tmp_path), **FORMS["buckets"]}], **job)
    job["arguments"] = f"{job['arguments']} --overlap-grad-reduce --load {tmp_path}"
    _refuses(
        releases["0.19.2"].run("load_jobs:refused", **job), "UnsupportedLayout", "shared_experts.linear_fc1.weight"
    )
    job["arguments"] += " --no-load-optim"
    (told,) = releases["0.19.2"].run("load_jobs:load", **job)
    assert not [text for text in told["wrong"] if text.startswith("weight")] and told["cast"] and told["fresh"]
    assert _row(told, "tensors read by") is not None


# -- bad input ---------------------------------------------------------------------------------------------------------


REFUSED = {
    "--hidden-size 32": ("ModelMismatch", "has another shape"),
    "--vocab-size 120": ("ModelMismatch", "another vocabulary"),
    "--num-layers 2": ("ModelMismatch", "is in the checkpoint but not in the model"),
    "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4": ("ParamGroupMismatch", "another number of param groups"),
    "--lr 1e-3 --strict-opt-param-scheduler": ("ScheduleMismatch", "max_lr"),
}


@pytest.mark.parametrize(("more", "form"), [(more, BOTH[number % 2]) for number, more in enumerate(REFUSED)])
@pytest.mark.parametrize("release", TRAINED)
def test_another_model_or_optimizer(saved: Saved, releases: Any, release: str, more: str, form: str) -> None:
    """Refused by name, alike on both ranks, and nothing has changed."""
    folder = saved(release, "A", ("tp2", "sharded"), form)
    _refuses(
        _load(releases, release, "A", ("dp2", "sharded"), folder, more, function="load_jobs:refused"), *REFUSED[more]
    )


def _refuses(told: list[dict[str, Any]], error: str, text: str) -> None:
    assert len({one["message"] for one in told}) == 1
    assert all(one["refused"] == error and one["changed"] == [] for one in told), told[0]
    assert text in told[0]["message"]


def _copied(saved: Saved, form: str, to: Path) -> tuple[Path, Path]:
    """A copy of a folder of `--save`, and the iteration in it."""
    copy = Path(shutil.copytree(saved("0.19.2", "A", ("tp2", "sharded"), form), to / "copy"))
    return copy, next(copy.glob("iter_*"))


def test_states_of_another_rank(saved: Saved, releases: Any, tmp_path: Path) -> None:
    """The files of two tensor-parallel ranks exchanged: no weight is the cast of such a master."""
    folder, step = _copied(saved, "torch", tmp_path)
    files = [step / f"mp_rank_0{rank}" / "distrib_optim.pt" for rank in range(2)]
    files[0].rename(tmp_path / "kept")
    files[1].rename(files[0])
    (tmp_path / "kept").rename(files[1])
    told = _load(releases, "0.19.2", "A", ("dp2", "sharded"), folder, function="load_jobs:refused")
    _refuses(told, "CheckpointDamaged", "are not the cast of their fp32 masters")


def test_a_rank_that_is_missing(saved: Saved, releases: Any, tmp_path: Path) -> None:
    folder, step = _copied(saved, "torch", tmp_path)
    shutil.rmtree(step / "mp_rank_01")
    told = _load(releases, "0.19.2", "A", ("dp2", "sharded"), folder, function="load_jobs:refused")
    _refuses(told, "CheckpointNotFound", "mp_rank_01")


def test_bytes_that_are_not_what_was_written(saved: Saved, releases: Any, tmp_path: Path) -> None:
    """A moment, which nothing proves: found by its checksum on every rank, and said to be late."""
    folder, step = _copied(saved, "torch", tmp_path)
    file = step / "mp_rank_01" / "distrib_optim.pt"
    data = bytearray(file.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    file.write_bytes(data)
    told = _load(releases, "0.19.2", "A", ("dp2", "sharded"), folder, function="load_jobs:refused")
    assert {one["refused"] for one in told} == {"ChecksumMismatch"} and len({one["message"] for one in told}) == 1
    assert "end this process" in told[0]["message"] and str(file) in told[0]["message"]


# -- what Megatron saves wrong -----------------------------------------------------------------------------------------


WIDE = "--hidden-size 128 --ffn-hidden-size 176 " + MODELS["B"] + "--overlap-grad-reduce --ddp-bucket-size 100000 "
SHIFTED = {
    "tied pp2": (MODELS["C"] + PP, 2),
    "small buckets": (MODELS["C"] + BUCKETS, 2),
    "dp3": (WIDE + "--global-batch-size 6 ", 3),
    "busbw": (WIDE + "--ddp-pad-buckets-for-high-nccl-busbw ", 2),
    "ahead": (
        f"{MODELS['B']}--hidden-size 20 --num-layers 2 --mtp-num-layers 1 {PP}",
        2,
    ),  # copies of untied embeddings
}


# all cells by `make test-versions`, of each release
@pytest.mark.parametrize("world", SHIFTED if TRAINED == WITH_TRAINING else ("tied pp2", "dp3", "ahead"))
@pytest.mark.parametrize("release", TRAINED)
def test_what_megatron_saves_shifted(releases: Any, release: str, world: str, tmp_path: Path) -> None:
    """Refused at the load, by whomever; with the hooks on it is saved right, and Megatron alone loads it."""
    model, ranks = SHIFTED[world]
    arguments = OPTIMIZERS["sharded"] + model
    for hooks in (False, True):
        saves = [{"save": str(tmp_path / str(hooks)), **FORMS["whole"]}]
        releases[release].run("format_jobs:save", ranks=ranks, arguments=arguments, saves=saves, hooks=hooks)
    told = {}
    for saved, function in ((False, "load_jobs:refused"), (True, "load_jobs:load")):
        more = f"{arguments} --load {tmp_path / str(saved)}"
        told[saved] = releases[release].run(function, ranks=ranks, arguments=more)
    _refuses(told[False], "CheckpointDamaged", "are not the cast of their fp32 masters")
    assert _is_right(told[True])
    stock = {"arguments": f"{arguments} --load {tmp_path / 'False'}", "hooks": False}
    assert any(one["wrong"] for one in releases[release].run("load_jobs:load", ranks=ranks, **stock))


@pytest.mark.parametrize("release", TRAINED)
def test_what_cannot_be_looked_at_is_left_to_megatron(releases: Any, release: str, tmp_path: Path) -> None:
    """Weights in fp8 are no casts, so nothing shows shifted states: a load as without hooks, and a warning."""
    arguments = OPTIMIZERS["sharded"] + MODELS["B"] + "--overlap-grad-reduce "
    saves = [{"save": str(tmp_path), "fp8_param_gather": True, **FORMS["whole"]}]
    releases[release].run("format_jobs:save", ranks=2, arguments=arguments, saves=saves)
    job = {"ranks": 2, "arguments": f"{arguments} --load {tmp_path}"}
    told = releases[release].run("load_jobs:load", **job)
    row = _row(told[0], "tensors read by")
    assert _is_right(told) and row is not None and row["used"] == "Megatron-LM" and "fp8" in row["because"]
    (said,) = told[0]["report"]["warnings"]
    assert said.startswith("whether Megatron-LM has saved its states shifted was not looked at") and "fp8" in said
    job["arguments"] = job["arguments"].replace("--use-distributed-optimizer", "")
    _refuses(releases[release].run("load_jobs:refused", **job), "UnsupportedLayout", "with fp8_param_gather")


@pytest.mark.parametrize("release", TRAINED)
def test_what_megatron_cannot_save(saved: Saved, releases: Any, release: str, tmp_path: Path) -> None:
    """Padding before the shared embedding goes beyond the bucket's end; with the hooks it is saved, and loaded."""
    arguments, ranks = _arguments("C", ("pp2", "sharded"))
    job = {"ranks": ranks, "arguments": arguments, "saves": [{"save": str(tmp_path / "made"), **FORMS["buckets"]}]}
    with pytest.raises(Failed, match="out of bounds chunk"):
        releases[release].run("format_jobs:save", **job)
    shutil.rmtree(tmp_path / "made")
    releases[release].run("format_jobs:save", hooks=True, **job)
    assert verify(str(tmp_path / "made")).faults == ()
    for topology in ("pp2", "one", "tp2"):
        assert _is_right(_load(releases, release, "C", (topology, "sharded"), tmp_path / "made"))
