"""Another model under one topology, of which Megatron-LM leaves parts out or as they were made without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from format_jobs import ITERATION
from saved_worlds import DISTRIBUTED, EXPERTS_WHOLE, FLAGS, GATED, PP

import ds_reshard.operations as tools
from ds_reshard.errors import UnsupportedLayout

pytestmark = pytest.mark.slow
RELEASE = "0.19.2"


def _saved(releases: Any, folder: Path, arguments: str, form: str) -> str:
    saves = [{"save": str(folder), **FLAGS[form]}]
    releases[RELEASE].run("format_jobs:save", arguments=arguments, saves=saves)
    return f"{arguments} --load {folder} "


def _one(releases: Any, function: str, arguments: str, **more: Any) -> dict[str, Any]:
    (told,) = releases[RELEASE].run(f"load_jobs:{function}", arguments=arguments, **more)
    return dict(told)


@pytest.mark.parametrize(
    ("optimizer", "form", "more"),
    [(DISTRIBUTED, "model_space", ""), ("--bf16 ", "plain", ""), (DISTRIBUTED, "buckets", "--no-load-optim ")],
)
def test_another_vocabulary(releases: Any, optimizer: str, form: str, more: str, tmp_path: Path) -> None:
    """Of `torch_dist` rows are dropped, or are zeros, states too: refused; with `--finetune` the report tells it."""
    load = _saved(releases, tmp_path, optimizer + GATED, form) + more
    for words in (70, 120):
        asked = f"{load} --vocab-size {words} "
        assert _one(releases, "load", asked, hooks=False)["iteration"] == ITERATION
        told = _one(releases, "refused", asked)
        assert (told["refused"], told["changed"]) == ("ModelMismatch", [])
        assert "is of another vocabulary" in told["message"] and "expected 104 rows" in told["message"]
        kept = _one(releases, "load", f"{asked} --finetune")
        assert len([text for text in kept["report"]["warnings"] if "104 rows as saved" in text]) == 1


def test_a_bias_of_routers_that_format_torch_has_not(releases: Any, tmp_path: Path) -> None:
    """It is no parameter, and stays zero: refused; with `--finetune` the report tells it."""
    load = _saved(releases, tmp_path, DISTRIBUTED + GATED + EXPERTS_WHOLE, "torch")
    load += "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    assert _one(releases, "load", load, hooks=False)["iteration"] == ITERATION
    told = _one(releases, "refused", load)
    assert (told["refused"], told["changed"]) == ("ModelMismatch", [])
    assert told["where"] == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(4)]
    kept = _one(releases, "load", f"{load} --finetune")
    assert any("router.expert_bias: is missing from the checkpoint" in text for text in kept["report"]["warnings"])


def test_stages_of_a_pretrained_model_that_begin_at_other_layers(releases: Any, tmp_path: Path) -> None:
    """Of format `torch` Megatron gives layers the weights of others, and leaves some as made; `--load` takes it."""
    uneven = f"{DISTRIBUTED}{GATED}{PP}--decoder-first-pipeline-num-layers 1 "
    folder, even = tmp_path / "saved", f"{DISTRIBUTED}{GATED}{PP}--ckpt-format torch "
    saves = [{"save": str(folder), **FLAGS["torch"]}]
    releases[RELEASE].run("format_jobs:save", ranks=2, arguments=uneven, saves=saves)
    asked = f"{even}--load {tmp_path / 'new'} --pretrained-checkpoint {folder} "
    alone = releases[RELEASE].run("load_jobs:load", ranks=2, arguments=asked, hooks=False)
    assert any(text.startswith("weight decoder") for one in alone for text in one["wrong"])
    told = releases[RELEASE].run("load_jobs:refused", ranks=2, arguments=asked)
    assert [(one["refused"], one["changed"]) for one in told] == [("UnsupportedLayout", [])] * 2
    assert "(expected [0, 1], found [0, 2])" in told[0]["message"] and told[0]["message"] == told[1]["message"]
    taken = releases[RELEASE].run("load_jobs:load", ranks=2, arguments=f"{even}--load {folder} --finetune")
    assert not [text for one in taken for text in one["wrong"] if text.startswith("weight")]


STRICTNESS = ("assume_ok_unexpected", "log_unexpected", "log_all", "ignore_all", "raise_unexpected", "raise_all")
LACKING = "linear_qkv.bias: is missing from the checkpoint"


@pytest.fixture(scope="module")
def gated(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gated")
    saves = [{"save": str(made / form), **FLAGS[form]} for form in ("model_space", "buckets")]
    releases[RELEASE].run("format_jobs:save", arguments=DISTRIBUTED + GATED, saves=saves)
    return made


@pytest.mark.parametrize(
    ("form", "strictness"),
    [*(("model_space", one) for one in STRICTNESS), ("buckets", "log_all"), ("buckets", "assume_ok_unexpected")],
)
def test_weights_that_a_checkpoint_lacks(releases: Any, gated: Path, form: str, strictness: str) -> None:
    """Under each strictness: Megatron ends in torch's own error, or goes on with them as they were built."""
    load = f"{DISTRIBUTED}{GATED}--load {gated / form} --add-qkv-bias --dist-ckpt-strictness {strictness} "
    goes_on = strictness.startswith("log") or strictness == "ignore_all"
    if goes_on:
        alone = _one(releases, "load", f"{load}--no-load-optim", hooks=False)
        assert any(text.startswith("weight") for text in alone["wrong"])
    for more in ("", "--no-load-optim", "" if goes_on else "--finetune"):
        told = _one(releases, "refused", load + more)
        assert told["refused"] == "ModelMismatch" and LACKING in told["message"]
        assert told["changed"] == []
    if goes_on:
        kept = _one(releases, "load", f"{load}--finetune")
        assert any(LACKING in text for text in kept["report"]["warnings"])
    else:
        assert "add --dist-ckpt-strictness log_all to keep its initial value" in told["message"]
        mended = _one(releases, "load", f"{load}--finetune --dist-ckpt-strictness log_all")
        assert {text.split()[1].partition(":")[0] for text in mended["wrong"] if text.startswith("weight")} == {
            "decoder.layers.self_attention.linear_qkv.bias"
        }


@pytest.mark.parametrize("strictness", ["return_unexpected", "return_all"])
def test_a_strictness_that_returns_what_differs(releases: Any, gated: Path, strictness: str) -> None:
    """Megatron's own load_checkpoint takes no such answer, and stops when the weights are in."""
    load = f"{DISTRIBUTED}{GATED}--load {gated / 'model_space'} --dist-ckpt-strictness "
    assert _one(releases, "load", load + strictness)["wrong"] == []
    fp16 = load.replace("--bf16", "--fp16")
    told = _one(releases, "refused", fp16 + strictness)
    assert told["refused"] == "ConfigError" and "give log_all in its place" in told["message"]
    assert _one(releases, "refused", f"{fp16}log_all")["refused"] is None


@pytest.mark.parametrize("strictness", ["assume_ok_unexpected", "log_all"])
def test_states_of_parameters_that_one_run_alone_trains(
    releases: Any, gated: Path, strictness: str, tmp_path: Path
) -> None:
    """Of what is frozen now Megatron drops them; of what was frozen they begin anew, or torch's own error tells."""
    frozen = tmp_path / "frozen"
    job = {"saves": [{"save": str(frozen), **FLAGS["model_space"]}], "frozen": "linear_fc2"}
    releases[RELEASE].run("load_jobs:save", arguments=DISTRIBUTED + GATED, **job)
    flags = f"--dist-ckpt-strictness {strictness}"
    for folder, now, said in (
        (gated / "model_space", "linear_fc2", "was trained by the saved run but not by this one"),
        (frozen, "", "is trained by this run but not by the saved one"),
    ):
        load = f"{DISTRIBUTED}{GATED}--load {folder} {flags}"
        told = _one(releases, "refused", load, frozen=now)
        assert told["refused"] == "ModelMismatch" and said in told["message"]
        assert all("linear_fc2" in where for where in told["where"]) and told["changed"] == []
        mended = _one(releases, "load", f"{load} --no-load-optim", frozen=now)
        assert not [text for text in mended["wrong"] if text.startswith("weight")]
    assert _one(releases, "load", f"{DISTRIBUTED}{GATED}--load {frozen} {flags}", frozen="linear_fc2")["wrong"] == []


@pytest.mark.parametrize(
    ("more", "frozen", "said"),
    [
        ("--add-qkv-bias", "", LACKING),
        ("--normalization LayerNorm", "", "layer_norm_bias: is missing from the checkpoint"),
        ("", "linear_fc2", "was trained by the saved run but not by this one"),
    ],
)
def test_another_model_that_megatron_itself_would_load(
    releases: Any, gated: Path, more: str, frozen: str, said: str
) -> None:
    """Of fp16, which is not filled here: the names are compared all the same, before the weights change."""
    load = f"--fp16 --use-distributed-optimizer {GATED}--load {gated / 'model_space'} {more}"
    told = _one(releases, "refused", load, frozen=frozen)
    assert told["refused"] == "ModelMismatch" and said in told["message"]
    assert not any(name.startswith("weight") for name in told["changed"])


@pytest.mark.parametrize("form", ["buckets", "torch"])
def test_flat_states_of_parameters_that_one_run_alone_trains(releases: Any, form: str, tmp_path: Path) -> None:
    """Megatron stops at the size of a buffer, when weights have changed: refused on every rank, if one differs.

    What was frozen is in no flat buffer, and so not read here: Megatron loads, if it is frozen now as well.
    """
    run, release = f"{DISTRIBUTED}{GATED}{PP}--ckpt-format {FLAGS[form]['ckpt_format']} ", releases[RELEASE]
    folders = {"": tmp_path / "whole", "linear_fc2": tmp_path / "frozen"}
    for name, folder in folders.items():
        job = {"saves": [{"save": str(folder), **FLAGS[form]}], "frozen": name}
        release.run("load_jobs:save", ranks=2, arguments=run, **job)
    for then, now in (("", "linear_fc2"), ("linear_fc2", ""), ("", "final_layernorm")):
        load = f"{run}--load {folders[then]} "
        told = release.run("load_jobs:refused", ranks=2, arguments=load, frozen=now)
        assert {one["refused"] for one in told} == {"ModelMismatch"}
        assert {name for one in told for name in one["changed"]} <= {"states 0"}  # made, of zeros, to read into
        assert told[0]["message"] == told[1]["message"]
        said = "is of other parameters than this run trains" if then else "was trained by the saved run but not by this"
        assert said in told[0]["message"]
        mended = release.run("load_jobs:load", ranks=2, arguments=f"{load}--no-load-optim", frozen=now)
        assert not [text for one in mended for text in one["wrong"] if text.startswith("weight")]
    again = release.run(
        "load_jobs:load", ranks=2, arguments=f"{run}--load {folders['linear_fc2']}", frozen="linear_fc2"
    )
    assert [one["wrong"] for one in again] == [[], []]
    assert {fault.error for fault in tools.verify(str(folders["linear_fc2"])).faults} <= {"UnsupportedLayout"}


FP16 = "--fp16 --initial-loss-scale 4096 "


@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        (DISTRIBUTED, "buckets"),
        (DISTRIBUTED, "torch"),
        ("--bf16 ", "torch"),
        (FP16, "torch"),
        (f"{FP16}--use-distributed-optimizer ", "buckets"),
    ],
)
def test_states_of_as_many_other_parameters(releases: Any, optimizer: str, form: str, tmp_path: Path) -> None:
    """One layer was frozen, and now another is: without names Megatron gives each parameter the states of another.

    An error on every rank, when weights have changed; with the layer that was frozen, and without states, it goes well.
    """
    run, release = f"{optimizer}{GATED}{PP}--ckpt-format {FLAGS[form]['ckpt_format']} ", releases[RELEASE]
    job = {"saves": [{"save": str(tmp_path), **FLAGS[form]}], "frozen": "layers.0."}
    release.run("load_jobs:save", ranks=2, arguments=run, **job)
    load = f"{run}--load {tmp_path} "
    told = release.run("load_jobs:refused", ranks=2, arguments=load, frozen="layers.1.")
    assert {one["refused"] for one in told} == {"ModelMismatch"} and told[0]["message"] == told[1]["message"]
    assert "end this process" in told[0]["message"] and "are not those of its weights" in told[0]["message"]
    assert "decoder.layers.0." in told[0]["message"]
    for frozen, more in (("layers.0.", ""), ("layers.1.", "--no-load-optim")):
        mended = release.run("load_jobs:load", ranks=2, arguments=f"{load}{more}", frozen=frozen)
        assert not [text for one in mended for text in one["wrong"] if not more or text.startswith("weight")]


def test_numbers_of_an_fp32_optimizer_of_which_some_were_frozen(releases: Any, tmp_path: Path) -> None:
    """No master proves whose states are whose: the report says how they are dealt out."""
    job = {"saves": [{"save": str(tmp_path), **FLAGS["torch"]}], "frozen": "layers.0."}
    releases[RELEASE].run("load_jobs:save", arguments=GATED, **job)
    for frozen in ("layers.0.", "layers.1."):
        told = _one(releases, "load", f"{GATED}--ckpt-format torch --load {tmp_path}", frozen=frozen)
        assert [one for one in told["report"]["warnings"] if "no file tells which parameters were frozen" in one]
        assert bool(told["wrong"]) is (frozen == "layers.1.")


EXTRA = "decoder.layers.0.mlp.extra_scale"


def test_a_tensor_that_torch_dist_has_no_place_for(releases: Any, gated: Path, tmp_path: Path) -> None:
    """Its module's `sharded_state_dict` does not tell it: in each run it is as it was built, which the report says.

    Of one that is trained Megatron's own error would be a ValueError. Format `torch` has it, and Megatron loads it.
    """
    load = f"{DISTRIBUTED}{GATED}--load {gated / 'model_space'} "
    told = _one(releases, "refused", load, extra="trained")
    assert (told["refused"], told["where"], told["changed"]) == ("ModelMismatch", [EXTRA], [])
    assert "or freeze it (requires_grad), or add --no-load-optim" in told["message"]
    for more, extra in (("", "frozen"), ("", "buffer"), ("--finetune", "frozen")):
        told = _one(releases, "load", load + more, extra=extra)
        assert [one for one in told["report"]["warnings"] if one.startswith(EXTRA) and "keeps its initial value" in one]
        assert not [text for text in told["wrong"] if text.startswith("weight")]
    run = f"{DISTRIBUTED}{GATED}--ckpt-format torch "
    for name, extra in (("with", "frozen"), ("without", "")):
        job = {"saves": [{"save": str(tmp_path / name), **FLAGS["torch"]}], "extra": extra}
        releases[RELEASE].run("load_jobs:save", arguments=run, **job)
    for more in ("", "--no-load-optim"):
        told = _one(releases, "load", f"{run}--load {tmp_path / 'with'} {more}", extra="frozen")
        assert told["extra"] == [[2.0] * 4] and (more or told["wrong"] == [])
        told = _one(releases, "refused", f"{run}--load {tmp_path / 'without'} {more}", extra="frozen")
        assert (told["refused"], told["where"], told["changed"]) == ("ModelMismatch", [EXTRA], [])


def test_names_that_no_layer_has_lie_in_no_flat_buffer(releases: Any, tmp_path: Path) -> None:
    """Of a module around: no folder of format `torch` is made of them; the line makes one of `torch_dist`."""
    job = {"saves": [{"save": str(tmp_path / "saved"), **FLAGS["model_space"]}], "around": "language_model"}
    releases[RELEASE].run("load_jobs:save", arguments=DISTRIBUTED + GATED, **job)
    with pytest.raises(
        UnsupportedLayout, match=r"no layer of this kind is\n(.*\n)*.*--to megatron without --tp and --pp"
    ):
        tools.convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="megatron-torch")
    made = tools.convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="megatron").out
    assert tools.verify(made).faults == ()
