"""What `convert --to megatron` writes is loaded by stock Megatron-LM: every element is the one that was saved."""

from __future__ import annotations

import functools
import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from format_jobs import ITERATION, SAMPLES_SEEN, STEP
from releases import ROOT, TRAINED, WITH_TRAINING
from saved_worlds import BY_CORE, DISTRIBUTED, ETP, EXPERTS_WHOLE, GATED, PP, TIED, TP, WIDTH_20, WORLDS, Saved

import ds_reshard.operations as tools
from ds_reshard.errors import ConfigError, ModelMismatch, UnsupportedLayout
from ds_reshard.formats.megatron.adoption import unlike
from ds_reshard.operations.source import find_listing, open_checkpoint

sys.path.insert(0, str(ROOT / "tests" / "formats"))
from nanotron_builder import Param, Run, write

EP, VP = "--expert-model-parallel-size 2 ", "--num-layers-per-virtual-pipeline-stage 1 "
PLAIN = "tied tp2, bf16 without the distributed optimizer"
MODELS = {
    "biases tp2 dp2": DISTRIBUTED,
    "gated tp2 pp2": DISTRIBUTED + GATED,
    "gated pp2 vp2": DISTRIBUTED + GATED,
    "tied pp2": DISTRIBUTED + TIED,
    "many buckets dp2": DISTRIBUTED + WIDTH_20,
    **dict.fromkeys((name for name in WORLDS if name.startswith("experts")), DISTRIBUTED + GATED + EXPERTS_WHOLE),
    **dict.fromkeys(BY_CORE, DISTRIBUTED + GATED),
    PLAIN: DISTRIBUTED,
    "gated fp32": "--use-distributed-optimizer " + GATED,
}
"""Of each world its model, and nothing of its topology."""
ANY = [(1, ""), (2, ""), (2, TP), (2, PP), (2, PP + VP), (4, TP + PP), (4, TP), (4, PP)]
BY = (("buckets", "0.19.2"), ("torch", "0.18.2"))
LOADS = [
    ("gated tp2 pp2", form, None, release, *under)
    for turn, under in enumerate(ANY)
    for form, release in (BY if TRAINED == WITH_TRAINING else BY[turn % 2 :][:1])  # both by `make test-versions`
]
LOADS += [
    ("biases tp2 dp2", "model_space", None, "0.18.2", 1, ""),
    ("biases tp2 dp2", "buckets", None, "0.18.2", 2, PP),
    ("biases tp2 dp2", "torch", None, "0.19.2", 4, TP + PP),
    ("gated tp2 pp2", "model_space", None, "0.18.2", 2, TP),
    ("gated pp2 vp2", "buckets", None, "0.18.2", 2, TP),
    ("gated pp2 vp2", "torch", None, "0.19.2", 1, ""),
    ("tied pp2", "buckets", None, "0.18.2", 2, PP),
    ("tied pp2", "torch", None, "0.19.2", 2, TP),
    ("experts ep2", "buckets", None, "0.18.2", 2, EP),
    ("experts ep2", "buckets", None, "0.19.2", 4, EP + PP),
    ("experts ep2", "buckets", 1, "0.19.2", 1, ""),
    ("experts ep2", "model_space", 1, "0.18.2", 2, TP),
    ("experts ep2", "torch", None, "0.19.2", 4, EP + PP),
    ("experts ep2", "torch", 1, "0.18.2", 2, TP),
    ("experts tp2 ep2", "torch", None, "0.18.2", 2, EP),
    ("experts tp2 etp1", "torch", None, "0.18.2", 2, TP + ETP),
    ("experts ep2 pp2", "torch", 1, "0.19.2", 2, PP),
    ("experts tp2 pp2", "torch", None, "0.18.2", 1, ""),
    ("experts tp2 pp2", "torch", 2, "0.19.2", 2, EP),
    ("many buckets dp2", "buckets", None, "0.19.2", 2, ""),
    ("many buckets dp2", "torch", None, "0.18.2", 2, TP),
    (PLAIN, "plain", None, "0.19.2", 2, ""),
    (PLAIN, "plain", None, "0.18.2", 2, TP),
    (PLAIN, "torch", None, "0.19.2", 1, ""),
    ("gated fp32", "plain", None, "0.19.2", 2, ""),
]
WHOLE = {"gated tp2 pp2": None, "biases tp2 dp2": None, "tied pp2": None, "many buckets dp2": None, "experts ep2": 1}
"""One world of each kind of model, and the expert-parallel size it is written for."""
if TRAINED == WITH_TRAINING:  # `make test-versions`: each of them on each release under all eight targets
    LOADS += [("gated tp2 by 0.14.0", "fragments", None, release, 2, PP) for release in WITH_TRAINING]
    LOADS += [
        (world, ("buckets", "torch")[at % 2], ep, release, *under)
        for world, ep in WHOLE.items()
        for release in WITH_TRAINING
        for at, under in enumerate(ANY)
        if (world, ("buckets", "torch")[at % 2], ep, release, *under) not in LOADS
    ]


@pytest.fixture(scope="module")
def converted(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(world: str, form: str, ep: int | None) -> str:
        out = str(tmp_path_factory.mktemp("converted") / "out")
        return tools.convert(str(saved(world, form)), out, to="megatron", ep=ep).out

    return folder


def _loads(releases: Any, release: str, ranks: int, arguments: str, folder: str, form: str = "torch_dist") -> None:
    arguments = f"{arguments} --ckpt-format {form}"
    told = releases[release].run("format_jobs:loaded", ranks=ranks, arguments=arguments, folder=folder)
    for rank in told:
        assert rank["wrong"] == [] and rank["compared"] > 1000
        assert (rank["steps"], rank["counters"]) == ([STEP], [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN])
        assert {rate for rate, _ in rank["rates"]} == {3e-4} and len(rank["rates"]) in (1, 2, 3)


@pytest.mark.parametrize(("world", "form", "ep", "release", "ranks", "under"), LOADS)
def test_stock_megatron_loads_it(
    converted: Any, releases: Any, world: str, form: str, ep: int | None, release: str, ranks: int, under: str
) -> None:
    _loads(releases, release, ranks, MODELS[world] + under, converted(world, form, ep))


OLD = [(world, form) for world, one in BY_CORE.items() for form in one.formats]


@pytest.mark.parametrize(("world", "form"), OLD if TRAINED == WITH_TRAINING else OLD[1:2])
def test_a_run_loads_what_an_older_release_has_saved(saved: Saved, releases: Any, world: str, form: str) -> None:
    """Straight from the files, under two stages: of 0.14 also the type that no later release loads."""
    arguments = f"{MODELS[world]}{PP}--load {saved(world, form)}"
    for told in releases["0.19.2"].run("load_jobs:load", ranks=2, arguments=arguments):
        assert (told["wrong"], told["steps"]) == ([], [STEP])
        assert (told["iteration"], told["samples"], told["position"]) == (ITERATION, SAMPLES_SEEN, SAMPLES_SEEN)


def test_experts_there_and_back(converted: Any, releases: Any, tmp_path: Path) -> None:
    """From an expert-parallel run to one that is not, and again to one that is."""
    out = tools.convert(converted("experts ep2", "model_space", 1), str(tmp_path / "out"), to="megatron", ep=2).out
    _loads(releases, "0.19.2", 2, MODELS["experts ep2"] + EP, out)


@pytest.mark.parametrize("form", ["buckets", "torch"])
def test_what_is_written_is_read(saved: Saved, converted: Any, form: str) -> None:
    """It has no fault, is cut over as many files as were asked for, and differs in nothing from its source."""
    folder, out = str(saved("gated tp2 pp2", form)), converted("gated tp2 pp2", form, None)
    assert tools.verify(out, deep=True).faults == ()
    found = tools.diff(folder, out)
    assert {one.state for one in found.tensors} == {"equal"} and found.values == () == found.faults
    assert tools.convert(out, out + "3", to="megatron", dp=3).files == 6
    assert {one.state for one in tools.diff(folder, out + "3").tensors} == {"equal"}


# -- format torch ------------------------------------------------------------------------------------------------------


BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 1000 "
TORCH = [
    ("gated tp2 pp2", "buckets", (2, 2, 1), "", "0.19.2"),
    ("gated tp2 pp2", "model_space", (2, 1, 2), "", "0.18.2"),
    ("gated tp2 pp2", "torch", (1, 2, 1), "", "0.18.2"),
    ("gated tp2 pp2", "torch", (1, 1, 2), "", "0.19.2"),
    ("gated pp2 vp2", "torch", (2, 1, 1), "", "0.19.2"),
    ("tied pp2", "torch", (1, 2, 2), "", "0.19.2"),
    ("tied pp2", "buckets", (1, 1, 1), "", "0.18.2"),
    ("many buckets dp2", "buckets", (1, 2, 1), BUCKETS, "0.18.2"),
    ("many buckets dp2", "torch", (2, 1, 2), BUCKETS, "0.19.2"),
    (PLAIN, "plain", (2, 2, 1), "", "0.18.2"),
    ("experts tp2 pp2", "torch", (2, 1, 2, 2), "", "0.18.2"),
    ("experts ep2 pp2", "torch", (1, 2, 1, 1), "", "0.19.2"),
]
"""What is saved, and tp, pp, dp and ep of the folder that is made of it."""
if TRAINED == WITH_TRAINING:
    TORCH += [("experts ep2", "buckets", (1, 1, 2, 2), "", release) for release in WITH_TRAINING]
OF_TP = {1: "gated pp2 vp2", 2: "gated tp2 pp2"}
"""A world of that tensor-parallel size, whose vocabulary is padded as it pads."""


@pytest.mark.parametrize(("world", "form", "sizes", "more", "release"), TORCH)
def test_stock_megatron_loads_format_torch(
    saved: Saved, releases: Any, tmp_path: Path, world: str, form: str, sizes: Any, more: str, release: str
) -> None:
    """At the sizes that were asked for; and it is the same state to every tool."""
    tp, pp, dp, *ep = sizes
    of_experts = {"ep": ep[0]} if ep else {}
    like = {"like": str(saved(OF_TP[tp], "torch"))} if world.startswith("gated") else {}
    source, out = str(saved(world, form)), str(tmp_path / "out")
    done = tools.convert(source, out, to="megatron-torch", tp=tp, pp=pp, dp=dp, **of_experts, **like)
    assert done.files == 2 * tp * pp * prod(ep) and tools.verify(out, deep=True).faults == ()
    others = {one.name for one in tools.diff(source, out).tensors if one.state != "equal"}
    assert others <= {"embedding.word_embeddings.weight", "output_layer.weight"}
    under = TP * (tp > 1) + PP * (pp > 1) + EP * (ep == [2]) + more + ("--no-load-rng " if done.notes else "")
    _loads(releases, release, tp * pp * dp, MODELS[world] + under, out, form="torch")
    back = tools.convert(out, str(tmp_path / "back"), to="megatron")
    assert {one.state for one in tools.diff(out, back.out).tensors} == {"equal"}


@pytest.mark.parametrize(
    ("world", "given", "said"),
    [
        ("gated tp2 pp2", {"tp": 1}, "rows its vocabulary has at tp 1"),
        ("gated tp2 pp2", {"tp": 4}, "groups of them, do not divide by tp 4"),
        ("gated tp2 pp2", {"pp": 3}, "num_layers 4 over 3 stages"),
        ("experts ep2", {"dp": 1}, "do not divide the 1 data-parallel ranks"),
        ("gated tp2 pp2", {"ep": 2}, "no experts"),
    ],
)
def test_what_format_torch_cannot_be_written_of(
    saved: Saved, tmp_path: Path, world: str, given: dict[str, int], said: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=said):
        tools.convert(str(saved(world, "buckets")), str(tmp_path / "out"), to="megatron-torch", **given)
    assert not (tmp_path / "out").exists()


# -- other frameworks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "given", "release", "ranks", "under"),
    [
        ("zero2", {"dp": 4}, "0.19.2", 2, TP),
        ("zero3", {"dp": 2}, "0.18.2", 2, PP),
        ("universal", {}, "0.19.2", 1, ""),
        ("dcp", {"dp": 2}, "0.18.2", 2, ""),
    ],
)
def test_to_another_format_and_back(
    saved: Saved, releases: Any, tmp_path: Path, to: str, given: dict[str, int], release: str, ranks: int, under: str
) -> None:
    """The arguments of the run come along, and the schedule."""
    tools.convert(str(saved("gated tp2 pp2", "buckets")), str(tmp_path / "other"), to=to, **given)
    done = tools.convert(str(tmp_path / "other"), str(tmp_path / "back"), to="megatron", dp=1)
    assert any("random states" in note for note in done.notes)
    _loads(releases, release, ranks, MODELS["gated tp2 pp2"] + under, done.out)


def test_to_the_names_of_megatron_deepspeed_and_back(saved: Saved, tmp_path: Path) -> None:
    """By the maps that are shipped; query_key_value has its rows in the same order (transformer.py, split_tensor)."""
    source, there, back = str(saved("biases tp2 dp2", "buckets")), str(tmp_path / "there"), str(tmp_path / "back")
    maps = [str(ROOT / "examples" / f"megatron_deepspeed{way}.json") for way in ("", "_back")]
    done = tools.convert(source, there, to="zero2", dp=2, names=maps[0])
    assert any("of each query group" in note for note in done.notes)
    names = {one.name.removeprefix("language_model.") for one in tools.inspect(there).parameters}
    layer = {f"{module}.{leaf}" for module in OF_LAYER for leaf in ("weight", "bias")}
    told = {f"encoder.layers.{number}.{name}" for number in range(4) for name in layer}
    told |= {f"embedding.{one}_embeddings.weight" for one in ("word", "position")}
    assert names == told | {"encoder.final_layernorm.weight", "encoder.final_layernorm.bias"}
    tools.convert(there, back, to="megatron", names=maps[1])
    assert {one.state for one in tools.diff(source, back).tensors} == {"equal"}


OF_LAYER = (
    "input_layernorm",
    "self_attention.query_key_value",
    "self_attention.dense",
    "post_attention_layernorm",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)


def test_to_nanotron_and_back(saved: Saved, tmp_path: Path) -> None:
    """Under names of its own, of the shapes that a step of the coming run has; each moment is where it was."""
    source = str(saved("gated tp2 pp2", "buckets"))
    told = {f"model.{one.name}": one for one in tools.inspect(source).parameters}
    for number, names in enumerate(({one.name: name for name, one in told.items()}, {n: n[6:] for n in told})):
        (tmp_path / f"map{number}.json").write_text(json.dumps(names), encoding="utf-8")
    model = tuple(Param(name, one.shape, (0,)) for name, one in told.items())
    like = str(write(Run(model=model, dp=2), tmp_path / "like"))
    tools.convert(source, str(tmp_path / "there"), to="nanotron", like=like, names=str(tmp_path / "map0.json"))
    given = {"like": source, "names": str(tmp_path / "map1.json")}
    done = tools.convert(str(tmp_path / "there"), str(tmp_path / "back"), to="megatron", **given)
    assert any("they were taken to be so" in note for note in done.notes)
    assert {one.state for one in tools.diff(source, done.out).tensors} == {"equal"}


@pytest.mark.parametrize("shown", [False, True])
def test_deepspeed_goes_on_and_back(saved: Saved, releases: Any, worlds: Any, tmp_path: Path, shown: bool) -> None:
    """A GPT of tp 2 and pp 2 goes through the engine of DeepSpeed at ZeRO-2 on four ranks, under names of its own."""
    source = saved("gated tp2 pp2", "buckets")
    told = {one.name: one for one in sorted(tools.inspect(str(source)).parameters, key=lambda one: one.group or 0)}
    names = {name: name.replace("decoder.layers", "transformer.h").replace("mlp.linear_", "mlp.") for name in told}
    maps = [names, {new: name for name, new in names.items()}]
    for number, one in enumerate(maps):
        (tmp_path / f"map{number}.json").write_text(json.dumps(one), encoding="utf-8")
    there, zero2, trained, back = (tmp_path / name for name in ("map0.json", "zero2", "trained", "back"))
    tools.convert(str(source), str(zero2), to="zero2", dp=4, names=str(there))
    shapes = {names[name]: one.shape for name, one in told.items()}
    decayed = [names[name] for name, one in told.items() if one.group == 0]
    job = {"shapes": shapes, "decayed": decayed, "batch": 4, "source": str(zero2), "out": str(trained)}
    assert all(worlds[4].run("deepspeed_trip.through", **job))
    like = {"like": str(saved("gated tp2 pp2", "torch"))} if shown else {}
    tools.convert(str(trained), str(back), to="megatron", names=str(tmp_path / "map1.json"), **like)
    _loads(releases, "0.19.2", 2, MODELS["gated tp2 pp2"] + TP, str(back))


def test_what_another_format_does_not_tell_is_named(saved: Saved, tmp_path: Path) -> None:
    source, out = str(saved("gated tp2 pp2", "buckets")), str(tmp_path / "out")
    tools.convert(source, str(tmp_path / "plain"), to="pytorch")
    with pytest.raises(UnsupportedLayout, match="the arguments of a run of Megatron-LM") as error:
        tools.convert(str(tmp_path / "plain"), out, to="megatron")
    assert any("--like" in fault.mend for fault in error.value.faults)
    tools.convert(source, str(tmp_path / "zero2"), to="zero2", dp=1)
    with pytest.raises(ModelMismatch, match=r"linear_qkv\.bias"):  # of another model
        tools.convert(str(tmp_path / "zero2"), out, to="megatron", like=str(saved(PLAIN, "torch")))
    with pytest.raises(ConfigError, match="no checkpoint of Megatron-LM"):
        tools.convert(str(tmp_path / "zero2"), out, to="megatron", like=str(tmp_path / "zero2"))
    (tmp_path / "map.json").write_text(
        json.dumps({name.name: f"x.{name.name}" for name in tools.inspect(source).parameters})
    )
    with pytest.raises(ModelMismatch, match=r"padded_vocab_size|num_layers"):
        tools.convert(str(tmp_path / "zero2"), out, to="megatron", names=str(tmp_path / "map.json"))
    assert not Path(out).exists()


def test_a_vocabulary_smaller_than_the_runs(saved: Saved, tmp_path: Path) -> None:
    """Padding may differ from that of --like; rows that its vocabulary has may not be missing."""
    source, zero2 = str(saved("gated tp2 pp2", "buckets")), str(tmp_path / "zero2")
    tools.convert(source, zero2, to="zero2", dp=1)
    like = {"like": str(saved("gated pp2 vp2", "torch"))}  # 104 rows, where the source has 112
    assert tools.convert(zero2, str(tmp_path / "out"), to="megatron", **like).complete
    shown, shapes = {"vocab_size": 113}, {"output_layer.weight": (120, 16)}
    content = open_checkpoint(find_listing(zero2, None)).content()
    where = [fault.where for fault in unlike(content, {**_shapes(content), **shapes}, shown)]
    assert where == ["output_layer.weight"]
    assert list(unlike(content, {**_shapes(content), **shapes}, {"vocab_size": 112})) == []


def _shapes(content: Any) -> dict[str, tuple[int, ...]]:
    return {name: held.shape for name, held in content.weights.items()}
