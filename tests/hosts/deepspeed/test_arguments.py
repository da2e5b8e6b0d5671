"""The arguments of `load_checkpoint`, and the settings, keep their meaning under another layout."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same, gathered, same_bits
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True)
PAIRS = (
    (Run(2, 2), Run(1, 3)),
    (Run(1, 2), Run(3, 3)),
    (Run(3, 2), Run(2, 3)),
    (Run(3, 3), Run(3, 2)),
    (Run("bf16", 2), Run(1, 3)),
    (Run(3, 2), Run("bf16", 1)),
    (Run(3, 2), Run(0, 1)),
    (Run(0, 2), Run(3, 2)),
)


def _weights_equal(saved: Any, loaded: Any) -> None:
    for rank in loaded:
        wrong = [n for n, t in saved[0]["weights"].items() if not same_bits(t, rank["weights"][n])]
        assert not wrong, f"weights differ: {wrong}"


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_without_optimizer_states_weights_load_and_masters_follow_them(
    worlds: Any, saves: Saves, source: Run, target: Run
) -> None:
    """`load_optimizer_states=False`: weights equal, masters are the weights, no moments, this run's lr."""
    folder, saved = saves(source, MODEL)
    loaded = worlds[target.dp].run(
        "load", run=target, model=MODEL, folder=str(folder), arguments={"load_optimizer_states": False}
    )
    _weights_equal(saved, loaded)
    for (name, kind), values in gathered(loaded).items():
        if kind == "fp32":
            assert same_bits(values, saved[0]["weights"][name].float().view(-1)), name
        else:
            assert not values.any(), f"{name} {kind} is not fresh"
    assert loaded[0]["steps"] == saved[0]["steps"]
    assert loaded[0]["scheduler"] == saved[0]["scheduler"]
    assert "optimizer" in loaded[0]["client_keys"]


@pytest.mark.parametrize(("source", "target"), PAIRS[:5], ids=str)
def test_module_only_leaves_counters_and_scheduler_alone(worlds: Any, saves: Saves, source: Run, target: Run) -> None:
    """`load_module_only=True`: weights equal, step 0, scheduler untouched."""
    folder, saved = saves(source, MODEL)
    loaded = worlds[target.dp].run(
        "load", run=target, model=MODEL, folder=str(folder), arguments={"load_module_only": True}
    )
    _weights_equal(saved, loaded)
    assert loaded[0]["steps"] == (0, 0, 0)
    assert loaded[0]["scheduler"] == 0


def test_without_scheduler_states_the_schedule_starts_anew(worlds: Any, saves: Saves) -> None:
    """`load_lr_scheduler_states=False` loads all but the scheduler, and hands its state to the caller."""
    folder, saved = saves(Run(2, 2), MODEL)
    loaded = worlds[3].run(
        "load", run=Run(3, 3), model=MODEL, folder=str(folder), arguments={"load_lr_scheduler_states": False}
    )
    assert loaded[0]["scheduler"] == 0
    assert "lr_scheduler" in loaded[0]["client_keys"]
    for rank in (*saved, *loaded):
        rank["scheduler"] = None
    assert_same(saved, loaded)


@pytest.mark.parametrize("arguments", [{}, {"load_optimizer_states": False}, {"load_module_only": True}], ids=str)
@pytest.mark.parametrize("source", [Run(3, 2), Run(2, 2), Run(0, 2), Run(0, 2, "none"), Run(3, 2, "none")], ids=str)
def test_an_engine_without_an_optimizer_takes_the_weights(
    worlds: Any, saves: Saves, source: Run, arguments: dict[str, Any]
) -> None:
    """A reference model: in bf16 DeepSpeed gives it a BF16_Optimizer that has no parameters, and in fp32 none."""
    folder, saved = saves(source, MODEL)
    given = {"folder": str(folder), "dtype": source.dtype, "arguments": arguments}
    told = worlds[1].run("load_without_optimizer", **given)
    assert isinstance(told[0], dict), told
    _weights_equal(saved, told)


def test_an_explicit_tag_and_latest(worlds: Any, tmp_path: Path) -> None:
    """`tag` chooses; without it `latest` does."""
    early = worlds[2].run("save", run=Run(1, 2), model=MODEL, folder=str(tmp_path), steps=2, tag="early")
    late = worlds[2].run("save", run=Run(1, 2), model=MODEL, folder=str(tmp_path), steps=4, tag="late")
    assert_same(early, worlds[3].run("load", run=Run(3, 3), model=MODEL, folder=str(tmp_path), tag="early"))
    assert_same(late, worlds[3].run("load", run=Run(3, 3), model=MODEL, folder=str(tmp_path)))


def test_a_folder_without_latest_gives_none(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """Scripts rely on `(None, None)` where there is nothing to resume from."""
    folder, _ = saves(Run(2, 2), MODEL)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "latest").unlink()
    loaded = worlds[2].run("load", run=Run(3, 2), model=MODEL, folder=str(tmp_path / "copy"))
    assert loaded[0]["path"] is None and loaded[0]["client_keys"] == []
    loaded = worlds[2].run("load", run=Run(3, 2), model=MODEL, folder=str(tmp_path / "nothing"))
    assert loaded[0]["path"] is None


@pytest.mark.parametrize("now", [Run(3, 2), Run(2, 2)], ids=["resharded", "unchanged"])
def test_the_folder_of_a_tag(worlds: Any, saves: Saves, tmp_path: Path, now: Run) -> None:
    """DeepSpeed finds no tag in it, warns and loads nothing: refused, and the error's line loads it."""
    folder, saved = saves(Run(2, 2), MODEL)
    given = next(path for path in Path(folder).iterdir() if path.is_dir())
    for more in ({}, {"load_module_only": True}):
        refused = worlds[2].run("load_refused", run=now, model=MODEL, folder=str(given), **more)
        assert {r["error"] for r in refused} == {"CheckpointNotFound"} and all(r["unchanged"] for r in refused)
    line = re.search(r"give its parent and its name: '(.+)', tag='(.+)'", refused[0]["text"])
    assert line is not None and Path(line[1]) == Path(folder).resolve()
    assert_same(saved, worlds[2].run("load", run=now, model=MODEL, folder=line[1], tag=line[2]))


def test_frozen_parameters_left_out_of_the_save(worlds: Any, tmp_path: Path) -> None:
    """`exclude_frozen_parameters` with `load_module_strict=False` (HF Trainer with PEFT)."""
    for source, target in ((Run(2, 2), Run(3, 3)), (Run(3, 2), Run(1, 1)), (Run(3, 2), Run(3, 3))):
        folder = tmp_path / f"{source}-{target}"
        saved = worlds[source.dp].run(
            "save", run=source, model=MODEL, folder=str(folder), save_options={"exclude_frozen_parameters": True}
        )
        loaded = worlds[target.dp].run(
            "load", run=target, model=MODEL, folder=str(folder), arguments={"load_module_strict": False}
        )
        fresh = worlds[target.dp].run("fresh", run=target, model=MODEL)
        for rank in loaded:
            for name, values in rank["weights"].items():
                kept = fresh if name.startswith("tower") else saved
                assert same_bits(values, kept[0]["weights"][name]), name
        for rank in (*saved, *loaded):
            rank["weights"] = {}
        assert_same(saved, loaded)
        refused = worlds[target.dp].run("load_refused", run=target, model=MODEL, folder=str(folder))
        assert {r["error"] for r in refused} == {"ModelMismatch"}
        assert all(r["unchanged"] and "tower.weight" in r["text"] for r in refused)


def test_a_frozen_weight_with_two_names_left_out_of_the_save(worlds: Any, tmp_path: Path) -> None:
    """LoRA over tied embeddings: DeepSpeed leaves out the first name alone. Stage 3 has nothing under the second."""
    model = Model(frozen=True, renamed=True)
    for source, target in ((Run(3, 2), Run(2, 1)), (Run(3, 2), Run(0, 1)), (Run(2, 2), Run(3, 1))):
        folder = tmp_path / f"{source}-{target}"
        given: dict[str, Any] = {"save_options": {"exclude_frozen_parameters": True}}
        saved = worlds[2].run("save", run=source, model=model, folder=str(folder), **given)
        given = {"arguments": {"load_module_strict": False}}
        loaded = worlds[1].run("load", run=target, model=model, folder=str(folder), **given)
        fresh = worlds[1].run("fresh", run=target, model=model)
        kept = saved if source.stage == 2 else fresh
        for name in ("tower.weight", "towers.0"):
            assert same_bits(loaded[0]["weights"][name], kept[0]["weights"][name]), (source, target, name)
        for rank in (*saved, *loaded):
            rank["weights"] = {name: value for name, value in rank["weights"].items() if "tower" not in name}
        assert_same(saved, loaded)


def test_masters_from_weights_when_the_config_says_so(worlds: Any, saves: Saves) -> None:
    """`zero_optimization.load_from_fp32_weights=false`: moments load, masters are the 16-bit weights."""
    folder, saved = saves(Run(2, 2), MODEL)
    for target in (
        Run(1, 3, options={"load_from_fp32_weights": False}),
        Run("bf16", 3, options={"load_from_fp32_weights": False}),
    ):
        loaded = worlds[3].run("load", run=target, model=MODEL, folder=str(folder))
        truth, got = gathered(saved), gathered(loaded)
        for (name, kind), values in got.items():
            expected = saved[0]["weights"][name].float().view(-1) if kind == "fp32" else truth[name, kind]
            assert same_bits(values, expected), (name, kind)


@pytest.mark.parametrize("home", [Run(2, 2), Run(3, 2), Run(0, 2, "none")], ids=str)
def test_a_custom_load_function_is_deepspeeds_to_call(worlds: Any, saves: Saves, home: Run) -> None:
    """Under the layout that was saved; what it leaves out stays as this run has built it."""
    given = {"model": MODEL, "folder": str(saves(home, MODEL)[0]), "arguments": {}}
    truth = worlds[2].run("custom_jobs.load", run=home, hooks=False, **given)
    loaded = worlds[2].run("custom_jobs.load", run=home, hooks=True, **given)
    assert not any(one["refused"] for one in loaded) and truth[0]["seen"] == loaded[0]["seen"]
    _weights_equal(truth, loaded)


@pytest.mark.parametrize(
    ("home", "target", "arguments"),
    [
        (Run(2, 2), Run(1, 3), {}),
        (Run(2, 2), Run(3, 3), {}),
        (Run(2, 2), Run(1, 2), {"load_module_only": True}),
        (Run(3, 2), Run(3, 2), {"load_optimizer_states": False}),
    ],
    ids=str,
)
def test_a_custom_load_function_is_refused_under_another_layout(
    worlds: Any, saves: Saves, home: Run, target: Run, arguments: dict[str, Any]
) -> None:
    """Or where DeepSpeed's own load goes wrong."""
    given = {"model": MODEL, "folder": str(saves(home, MODEL)[0]), "arguments": arguments, "hooks": True}
    for one in worlds[target.dp].run("custom_jobs.load", run=target, **given):
        assert "custom_load_fn=...): is called by DeepSpeed's own load" in one["refused"] and not one["seen"]


def test_client_state_of_plain_classes_comes_back_equal(worlds: Any, tmp_path: Path) -> None:
    """numpy, Namespace, paths, dates, enums, torch types: the same values as DeepSpeed returns."""
    saved = worlds[2].run("save_client", run=Run(2, 2), folder=str(tmp_path))
    loaded = worlds[1].run("load_client", run=Run(3, 1), folder=str(tmp_path))
    assert loaded[0] == saved[0]
    assert "shape" in loaded[0]


@pytest.mark.acts
def test_an_unknown_class_is_named_and_can_be_trusted(worlds: Any, tmp_path: Path) -> None:
    """A class outside the allow-list is refused with the line that accepts it; with that line it loads."""
    worlds[2].run("save_client", run=Run(2, 2), folder=str(tmp_path), stranger=True)
    refused = worlds[1].run("load_refused", run=Run(1, 1), model=Model(), folder=str(tmp_path))
    assert refused[0]["error"] == "TrustRequired" and refused[0]["unchanged"]
    assert '"trust": ["unlisted_class.Stranger"]' in refused[0]["text"]
    loaded = worlds[1].run("load_client", run=Run(1, 1), folder=str(tmp_path), trust=["unlisted_class.Stranger"])
    assert loaded[0]["stranger"] == "Stranger(7)"


def test_param_groups_merge_when_they_agree(worlds: Any, saves: Saves) -> None:
    """A group whose members come from two saved groups that disagree is an error that lists the fields."""
    folder, _ = saves(Run(2, 2), Model(groups=2))
    refused = worlds[3].run("load_refused", run=Run(1, 3), model=Model(groups=1), folder=str(folder))
    assert {r["error"] for r in refused} == {"ParamGroupMismatch"}
    assert all("'lr'" in r["text"] and "'weight_decay'" in r["text"] and r["unchanged"] for r in refused)
    folder, saved = saves(Run(2, 2), Model(groups=1))
    loaded = worlds[3].run("load", run=Run(1, 3), model=Model(groups=2), folder=str(folder))
    assert all(group["lr"] == saved[0]["groups"][0][1]["lr"] for _, group in loaded[0]["groups"])


SETTINGS = (
    ({"threds": 1}, "ds_reshard.threds"),
    ({"reshard": {"verify": "md5"}}, 'one of "crc32", "fingerprint", "off"'),
    ({"reshard": {"device": "gpu"}}, 'one of "auto", "cpu", "cuda"'),
    pytest.param(
        {"reshard": {"device": "cuda"}},
        "asks for a CUDA device, and this process has none",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    ),
    ({"reshard": {"threads": 0}}, "from 1 to 256"),
    ({"reshard": {"threads": True}}, "from 1 to 256"),
    ({"reshard": {"unchanged": True}}, '"direct" or "deepspeed"'),
    ({"reshard": {"always": True}}, '"unchanged": "deepspeed" leaves it to DeepSpeed'),
    ({"reshard": {"unchanged": "deepspeed", "verify": "fingerprint"}}, "DeepSpeed proves nothing that it loads"),
    ({"reshard": {"speed": 3}}, "one of unchanged, threads, memory_mib, device, verify"),
    ({"enabled": 1}, "true or false"),
    ({"trust": "a.B"}, "a list"),
)


@pytest.mark.parametrize(("section", "text"), SETTINGS, ids=str)
def test_a_wrong_setting_is_named(worlds: Any, saves: Saves, section: dict[str, Any], text: str) -> None:
    """Unknown keys and wrong types name the key and the allowed values."""
    folder, _ = saves(Run(2, 2), MODEL)
    refused = worlds[1].run("load_refused", run=Run(1, 1), model=MODEL, folder=str(folder), reshard=section)
    assert refused[0]["error"] == "ConfigError" and text in refused[0]["text"] and refused[0]["unchanged"]


def test_disabled_in_the_json_deepspeed_answers_itself(worlds: Any, saves: Saves) -> None:
    """`"enabled": false`: DeepSpeed's own refusal."""
    folder, _ = saves(Run(2, 2), MODEL)
    from worlds import WorkerFailed

    with pytest.raises(WorkerFailed, match="Automatic adjustment"):
        worlds[1].run("load", run=Run(2, 1), model=MODEL, folder=str(folder), reshard={"enabled": False})


def test_verification_off_and_one_thread_load_the_same(worlds: Any, saves: Saves) -> None:
    """Settings change how bytes move, never which."""
    folder, saved = saves(Run(3, 2), MODEL)
    for reshard in ({"reshard": {"verify": "off"}}, {"reshard": {"threads": 1, "memory_mib": 1}}):
        assert_same(saved, worlds[3].run("load", run=Run(1, 3), model=MODEL, folder=str(folder), reshard=reshard))


ROUND, ALIGNED = {"round_robin_gradients": True}, {"parameter_alignment": True}
EQUAL = [
    *(Run(stage, 2) for stage in (0, 1, 2, 3, "bf16")),
    Run(0, 2, "fp32"),
    Run(2, 2, options=ROUND),
    Run(1, 2, options=ALIGNED),
    Run(3, 2, options={"sub_group_size": 60}),
]
OTHERS = [
    (Run(1, 2), Run(2, 2)),
    (Run(1, 2), Run("bf16", 2)),
    (Run(2, 2), Run(2, 3)),
    (Run(2, 2, options=ROUND), Run(2, 2)),
    (Run(1, 2), Run(1, 2, options=ALIGNED)),
    (Run(1, 2, options={"elastic_checkpoint": True}), Run(1, 2, options={"elastic_checkpoint": True})),
    (Run(3, 2, options={"sub_group_size": 60}), Run(3, 2)),
    (Run(2, 2), Run(2, 2, "fp32")),
    (Run(0, 2, "fp32"), Run(0, 2)),
]


@pytest.mark.parametrize(
    ("saved", "run", "unchanged", "loader"),
    [
        *((run, run, "deepspeed", "DeepSpeed") for run in EQUAL),
        (Run(0, 2), Run(0, 3), "deepspeed", "DeepSpeed"),
        *((run, run, "direct", "ds_reshard") for run in EQUAL),
        *((saved, run, "deepspeed", "ds_reshard") for saved, run in OTHERS),
    ],
    ids=str,
)
def test_equal_buffers_are_deepspeeds_where_that_is_asked_for(
    worlds: Any, saves: Saves, saved: Run, run: Run, unchanged: str, loader: str
) -> None:
    """`"unchanged": "deepspeed"`: its own method, if nothing of the layout differs; else ds_reshard loads."""
    folder, _ = saves(saved, MODEL)
    config = {**run.config, "ds_reshard": {"reshard": {"unchanged": unchanged}}}
    counts = worlds[run.dp].run("load_counting", run=replace(run, config=config), model=MODEL, folder=str(folder))
    assert counts == [(1, 0) if loader == "DeepSpeed" else (0, 1)] * run.dp


def test_a_mesh_of_data_and_sequence_parallel_ranks(worlds: Any, tmp_path: Path) -> None:
    """Four ranks as 2 x 2 (data x sequence) partition the optimizer over two; it loads at any other size."""
    mesh = {"mesh": [2, 2]}
    saved = worlds[4].run("save", run=Run(2, 2, config=mesh), model=MODEL, folder=str(tmp_path))
    assert_same(saved, worlds[3].run("load", run=Run(3, 3), model=MODEL, folder=str(tmp_path)))
    other = worlds[3].run("save", run=Run(3, 3), model=MODEL, folder=str(tmp_path / "other"))
    loaded = worlds[4].run("load", run=Run(1, 2, config=mesh), model=MODEL, folder=str(tmp_path / "other"))
    assert_same(other, loaded)
    refused = worlds[4].run("load_refused", run=Run(3, 4, config=mesh), model=MODEL, folder=str(tmp_path / "other"))
    assert {r["error"] for r in refused} == {"UnsupportedLayout"} and all(r["unchanged"] for r in refused)
