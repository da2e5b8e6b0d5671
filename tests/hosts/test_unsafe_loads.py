"""What acts in a checkpoint is refused by every load, also where the framework itself would read the file.

On every rank the same error, before anything is unpickled: the mark that the payload would leave is not there.
Checkpoints are real; the manager of EasyR1 and verl is a synthetic class with their calls.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import gathered, same_bits
from late_jobs import Late
from saves import UNIVERSAL, Saves, Universals
from unlisted_class import Stranger

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import nanotron_builder
from payloads import ACTING, Attack, before, put_before, twice

from ds_reshard.containers.dcp_directory import read_directory

pytestmark = [pytest.mark.distributed, pytest.mark.acts]

MODEL = Model(groups=2)
TAG = "global_step3"
DEEPSPEED = {"ds_reshard": {"reshard": {"unchanged": "deepspeed"}}}
Harm = Callable[[Path, Path], None]


def prefix(payload: str = "thrown away") -> Harm:
    """Instructions before the file's own; what they give is thrown away."""
    return lambda path, mark: put_before(path, ACTING[payload][0](f"touch {mark}"))


def two(path: Path, mark: Path) -> None:
    path.write_bytes(twice(path.read_bytes(), ACTING["thrown away"][0](f"touch {mark}")))


def key(path: Path, mark: Path) -> None:
    """An entry of the file beside those that DeepSpeed reads."""
    content = torch.load(path, weights_only=False)
    content["extra"] = Attack(f"touch {mark}")
    torch.save(content, path)


def config(path: Path, mark: Path) -> None:
    content = torch.load(path, weights_only=False)
    content["ds_config"] = {**(content.get("ds_config") or {}), "extra": Attack(f"touch {mark}")}
    torch.save(content, path)


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


WAYS: dict[str, tuple[Run, Run]] = {
    "unchanged": (Run(2, 2), Run(2, 2)),
    "unchanged, stage 3": (Run(3, 2), Run(3, 2)),
    "unchanged, stage 0": (Run(0, 2), Run(0, 2)),
    "unchanged, by DeepSpeed": (Run(2, 2), Run(2, 2, config=DEEPSPEED)),
    "another size": (Run(2, 2), Run(2, 3)),
    "another stage": (Run(2, 2), Run(3, 3)),
}
HARMS: dict[str, Harm] = {
    "a key": key,
    "ds_config": config,
    "thrown away": prefix(),
    "from the stack": prefix("by name from the stack"),
    "a swapped memo": prefix("a memo whose harmless name is exchanged"),
    "__setstate__": prefix("BUILD with __setstate__"),
    "in bytes": prefix("a pickle in bytes"),
    "two data.pkl": two,
}


def _files(run: Run) -> list[str]:
    models = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(run.dp)]
    model = models[-1] if run.stage == 3 else "mp_rank_00_model_states.pt"
    return [model] if run.stage == 0 else [model, optim(run.dp - 1)]


def _cases() -> list[tuple[str, str, str]]:
    """Each way with two harms, and each harm with three ways of stage 2; in the model's and an optimizer's file."""
    ways = [(way, harm) for way in WAYS for harm in ("a key", "thrown away")]
    harms = [(way, harm) for way in ("unchanged", "unchanged, by DeepSpeed", "another size") for harm in HARMS]
    chosen = dict.fromkeys([*ways, *harms])
    return [(way, harm, file) for way, harm in chosen for file in _files(WAYS[way][0])]


@pytest.mark.parametrize(("way", "harm", "file"), _cases())
def test_deepspeed_loads_nothing_that_acts(
    worlds: Any, saves: Saves, tmp_path: Path, way: str, harm: str, file: str
) -> None:
    saved, target = WAYS[way]
    folder = tmp_path / "saved"
    shutil.copytree(saves(saved, MODEL)[0], folder)
    HARMS[harm](folder / TAG / file, tmp_path / "ran")
    told = worlds[target.dp].run("load_refused", run=target, model=MODEL, folder=str(folder))
    _assert_refused([(one["error"], one["text"]) for one in told], tmp_path / "ran", file)
    assert all(one["unchanged"] and one["step"] != "EngineUnusable" for one in told)


def _assert_refused(told: list[tuple[str, str]], mark: Path, file: str) -> None:
    assert {error for error, _ in told} == {"UnsafePickle"}, told
    assert len({text for _, text in told}) == 1, told
    assert file in told[0][1] and "nothing was run" in told[0][1]
    assert any(what in told[0][1] for what in ("posix.system", "builtins.eval", "is in the zip directory twice"))
    assert not mark.exists()


@pytest.mark.parametrize("direct", [False, True], ids=["by DeepSpeed's hand", "by ours"])
@pytest.mark.parametrize(
    "place", ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/first.weight/fp32.pt"]
)
def test_a_universal_checkpoint_that_acts(
    worlds: Any, universals: Universals, tmp_path: Path, direct: bool, place: str
) -> None:
    """As DeepSpeed would load it, with a feature of the engine that we leave to it, and as we do."""
    folder = tmp_path / "saved"
    shutil.copytree(universals(Run(2, 2), MODEL)[0], folder)
    prefix()(next(path for path in folder.rglob("*") if str(path).endswith(place)), tmp_path / "ran")
    if direct:
        run = Run(2, 3, config=UNIVERSAL)
        told = worlds[3].run("load_refused", run=run, model=MODEL, folder=str(folder))
        _assert_refused([(one["error"], one["text"]) for one in told], tmp_path / "ran", place)
    else:
        run = Run(3, 2, config=UNIVERSAL)
        found = worlds[2].run(
            "refused_jobs.load_with_feature", run=run, model=MODEL, folder=str(folder), switch="zenflow"
        )
        _assert_refused(found, tmp_path / "ran", place)


EXPERTS = "expert_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("file", [EXPERTS, "mp_rank_00_model_states.pt"])
def test_a_checkpoint_that_is_left_to_deepspeed_whole(worlds: Any, saves: Saves, tmp_path: Path, file: str) -> None:
    """Files of experts of an old release, for an engine that has some (switched on by hand): none is read here."""
    folder = tmp_path / "saved"
    shutil.copytree(saves(Run(2, 2), MODEL)[0], folder)
    torch.save({"a": 1}, folder / TAG / EXPERTS)
    prefix()(folder / TAG / file, tmp_path / "ran")
    told = worlds[2].run(
        "refused_jobs.load_with_feature", run=Run(2, 2), model=MODEL, folder=str(folder), switch="has_moe_layers"
    )
    _assert_refused(told, tmp_path / "ran", file)


def test_a_tag_that_is_empty_is_refused(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(saves(Run(2, 2), MODEL)[0] / TAG, folder)
    torch.save({"a": 1}, folder / EXPERTS)
    (folder / "latest").write_text("")
    prefix()(folder / "mp_rank_00_model_states.pt", tmp_path / "ran")
    told = worlds[2].run(
        "refused_jobs.load_with_feature", run=Run(2, 2), model=MODEL, folder=str(folder), switch="has_moe_layers"
    )
    assert {error for error, _ in told} == {"CheckpointNotFound"} and not (tmp_path / "ran").exists(), told


def _pattern_in_tag(folder: Path, harmful: Callable[[Path], None], stage: int) -> Path:
    shutil.copytree(folder / TAG, folder / "global_step[3]")
    (folder / "latest").write_text("global_step[3]")
    harmful(folder / TAG / _files(Run(stage, 2))[0])
    return folder


def _pattern_in_folder(folder: Path, harmful: Callable[[Path], None], stage: int) -> Path:
    shutil.copytree(folder, folder.with_name("save[d]"))
    harmful(folder / TAG / _files(Run(stage, 2))[0])
    return folder.with_name("save[d]")


def _name_found_by_pattern(folder: Path, harmful: Callable[[Path], None], stage: int) -> Path:
    file = _files(Run(stage, 2))[0]
    harmful(shutil.copy(folder / TAG / file, folder / TAG / file.replace("mp_rank_00_", "mp_rank_00_aa_")))
    return folder


PATTERNS = {
    "UnsupportedLayout in the tag": _pattern_in_tag,
    "UnsupportedLayout in the folder": _pattern_in_folder,
    "CheckpointDamaged by a name": _name_found_by_pattern,
}


@pytest.mark.parametrize("left", ["stage 2", "stage 3", "whole"])
@pytest.mark.parametrize("case", PATTERNS)
def test_deepspeed_opens_no_other_file_by_pattern(
    worlds: Any, saves: Saves, tmp_path: Path, case: str, left: str
) -> None:
    """DeepSpeed gives folder, tag and `mp_rank_*` to glob: what it finds must be what was searched."""
    run = Run(3 if left == "stage 3" else 2, 2)
    shutil.copytree(saves(run, MODEL)[0], tmp_path / "saved")
    run = replace(run, config=DEEPSPEED)
    if left == "whole":
        torch.save({"a": 1}, tmp_path / "saved" / TAG / EXPERTS)
    folder = PATTERNS[case](tmp_path / "saved", lambda path: key(Path(path), tmp_path / "ran"), run.stage)
    if left == "whole":
        given = {"run": run, "model": MODEL, "folder": str(folder), "switch": "has_moe_layers"}
        told = worlds[2].run("refused_jobs.load_with_feature", **given)
    else:
        found = worlds[2].run("load_refused", run=run, model=MODEL, folder=str(folder))
        assert all(one["unchanged"] for one in found)
        told = [(one["error"], one["text"]) for one in found]
    what = case.partition(" ")[0]  # beside the fault of experts, which names the error, where it is left whole
    assert {error for error, _ in told} == {what if left != "whole" else "UnsupportedLayout"}, told
    assert what == "UnsupportedLayout" or "mp_rank_00_aa_model_states.pt" in told[0][1]
    assert len({text for _, text in told}) == 1 and "To mend" in told[0][1]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", [case for case in PATTERNS if case.startswith("Unsupported")])
def test_what_is_read_here_may_have_any_name(worlds: Any, saves: Saves, tmp_path: Path, case: str) -> None:
    shutil.copytree(saves(Run(2, 2), MODEL)[0], tmp_path / "saved")
    folder = PATTERNS[case](tmp_path / "saved", lambda path: key(Path(path), tmp_path / "ran"), 2)
    for run in (Run(2, 3), Run(2, 2)):
        told = worlds[run.dp].run("load_refused", run=run, model=MODEL, folder=str(folder))
        assert {one["error"] for one in told} == {None}, told
    assert not (tmp_path / "ran").exists()


def test_what_the_settings_trust_is_loaded(worlds: Any, tmp_path: Path) -> None:
    """A class of the script's own in client_state, on both paths; and not without it."""
    worlds[2].run("save_client", run=Run(2, 2), folder=str(tmp_path), stranger=True)
    trust = {"ds_reshard": {"trust": ["unlisted_class.Stranger"]}}
    for dp in (2, 3):
        told = worlds[dp].run("load_refused", run=Run(2, dp), model=Model(), folder=str(tmp_path))
        assert {one["error"] for one in told} == {"TrustRequired"}
        assert '"trust": ["unlisted_class.Stranger"]' in told[0]["text"]
        told = worlds[dp].run("load_refused", run=Run(2, dp, config=trust), model=Model(), folder=str(tmp_path))
        assert {one["error"] for one in told} == {None}


def test_what_all_files_need_stands_in_one_line(worlds: Any, tmp_path: Path) -> None:
    """A class in the model file, and another in the optimizer's files, which are opened later; the line loads it."""
    worlds[2].run("save_client", run=Run(2, 2), folder=str(tmp_path), stranger=True)
    truth = gathered(worlds[2].run("save", run=Run(2, 2), model=Model(), folder=str(tmp_path / "alike"), steps=1))
    for path in tmp_path.glob("*/*optim_states.pt"):
        held = torch.load(path, weights_only=False)
        for group in held["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group["exact"] = Decimal("1.5")
        torch.save(held, path)
    asked = {"model": Model(), "folder": str(tmp_path)}
    for dp in (2, 3):
        told = worlds[dp].run("load_refused", run=Run(2, dp), **asked)
        assert {one["error"] for one in told} == {"TrustRequired"} and len({one["text"] for one in told}) == 1
        line = re.search(r'by "trust": (\[.*?\])', told[0]["text"])
        assert line is not None and sorted(json.loads(line[1])) == ["decimal.Decimal", "unlisted_class.Stranger"]
        trust = {"ds_reshard": {"trust": json.loads(line[1])}}
        loaded = gathered(worlds[dp].run("load", run=Run(2, dp, config=trust), **asked))
        assert loaded.keys() == truth.keys() and all(same_bits(truth[key], loaded[key]) for key in truth)


def _add(path: Path, **values: object) -> None:
    torch.save({**torch.load(path, weights_only=False), **values}, path)


def _nanotrons(folder: Path, worlds: Any) -> tuple[str, dict[str, Any]]:
    source = nanotron_builder.write(nanotron_builder.Run(dp=2), folder)
    first, second = sorted(source.rglob("optimizer/*.pt"))
    _add(first, one=Decimal(1))
    _add(second, one=Stranger(2))
    for path in source.rglob("lr_scheduler/*.pt"):
        _add(path, one=Fraction(1, 3))
    return "nanotron_start", {"run": nanotron_builder.Run(tp=2), "folder": str(source)}


def _accelerates(folder: Path, worlds: Any) -> tuple[str, dict[str, Any]]:
    """accelerate itself reads these files with `weights_only=True`."""
    worlds[2].run("unsafe_jobs.accelerate_save", folder=str(folder), safe=False)
    _add(folder / "scheduler.bin", one=Decimal(1))
    _add(folder / "random_states_1.pkl", one=Stranger(2))
    _add(folder / "custom_checkpoint_0.pkl", one=Fraction(1, 3))
    return "accelerate_load", {"folder": str(folder)}


def _torchs(folder: Path, worlds: Any) -> tuple[str, dict[str, Any]]:
    held = {"name": "x", "epoch": 3, "one": Decimal(1), "two": Stranger(2), "three": [Fraction(1, 3)]}
    worlds[2].run("unsafe_jobs.dcp_save", folder=str(folder), run=held)
    return "dcp_load", {"folder": str(folder), "run": dict.fromkeys(held)}


@pytest.mark.parametrize("made", [_nanotrons, _accelerates, _torchs])
def test_the_one_line_of_each_host_loads(made: Any, worlds: Any, tmp_path: Path) -> None:
    """Three classes in three places: all stand in the line, and with them the load comes to its end."""
    job, given = made(tmp_path / "saved", worlds)
    refused = worlds[2].run("unsafe_jobs.trusting", work=job, trust=(), **given)
    assert refused[0][:2] == refused[1][:2] and refused[0][0] == "TrustRequired", refused
    line = re.search(r'by "trust": (\[.*?\])', refused[0][1])
    assert line is not None
    trust = json.loads(line[1])
    assert sorted(trust) == ["decimal.Decimal", "fractions.Fraction", "unlisted_class.Stranger"]
    assert [one[0] for one in worlds[2].run("unsafe_jobs.trusting", work=job, trust=trust, **given)] == ["", ""]


# -- accelerate and the Trainer ----------------------------------------------------------------------------------------

SIDE = ("random_states_1.pkl", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "pytorch_model.bin")


@pytest.mark.parametrize("file", SIDE)
def test_accelerate_loads_nothing_that_acts(worlds: Any, tmp_path: Path, file: str) -> None:
    """Without DeepSpeed; one rank's random states are every rank's affair."""
    folder = tmp_path / "saved"
    worlds[2].run("unsafe_jobs.accelerate_save", folder=str(folder), safe=False)
    told = worlds[2].run("unsafe_jobs.accelerate_load", folder=str(folder))
    assert [error for error, _, _ in told] == ["", ""], told
    prefix()(folder / file, tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.accelerate_load", folder=str(folder))
    _assert_refused([(error, text) for error, text, _ in told], tmp_path / "ran", file)
    assert all(same for _, _, same in told)


def test_accelerate_loads_the_folder_that_was_searched(worlds: Any, tmp_path: Path) -> None:
    """Two folders of one number: accelerate alone takes the one that is listed last."""
    made = tmp_path / "checkpoints" / "checkpoint_3"
    worlds[2].run("unsafe_jobs.accelerate_save", folder=str(made), safe=False)
    shutil.copytree(made, made.with_name("checkpoint_03"))
    prefix()(made.with_name("checkpoint_03") / "custom_checkpoint_0.pkl", tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.accelerate_load_latest", project=str(tmp_path))
    assert told == [("", "", True)] * 2 and not (tmp_path / "ran").exists()


def test_accelerate_gives_deepspeed_no_pattern(worlds: Any, tmp_path: Path) -> None:
    """With the hooks of accelerate alone, DeepSpeed loads what it finds by the folder's name."""
    late = Late(clock="accelerate")
    worlds[2].run("late_jobs.save_only", late=late, folder=str(tmp_path / "save[d]"))
    shutil.copytree(tmp_path / "save[d]", tmp_path / "saved")
    prefix()(tmp_path / "saved/pytorch_model/mp_rank_00_model_states.pt", tmp_path / "ran")
    told = worlds[2].run("late_jobs.resume", late=late, folder=str(tmp_path / "save[d]"), hooks=False)
    assert {one["raised"] for one in told} == {"UnsupportedLayout"}, told
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["random_states_0.pkl", "pytorch_model/mp_rank_00_model_states.pt", "scheduler.bin"])
def test_accelerate_with_deepspeed(worlds: Any, tmp_path: Path, file: str) -> None:
    late = Late(clock="accelerate")
    worlds[2].run("late_jobs.save_only", late=late, folder=str(tmp_path / "saved"))
    prefix()(tmp_path / "saved" / file, tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.accelerate_deepspeed", late=late, folder=str(tmp_path / "saved"))
    _assert_refused([(one["raised"], one["text"]) for one in told], tmp_path / "ran", file)


SKIPPED = {"resume": {"optimizer": "skip"}}


def test_accelerate_with_deepspeed_leaves_a_damaged_optimizer_out(worlds: Any, tmp_path: Path) -> None:
    """Where the policy does; what acts in it is refused all the same."""
    late = Late(clock="accelerate")
    worlds[2].run("late_jobs.save_only", late=late, folder=str(tmp_path / "saved"))
    first, second = sorted((tmp_path / "saved").glob("*/*optim_states.pt"))
    first.write_bytes(first.read_bytes()[:1000])
    given = {"late": late, "folder": str(tmp_path / "saved")}
    assert {one["raised"] for one in worlds[2].run("late_jobs.resume", **given)} == {"CheckpointDamaged"}
    told = worlds[2].run("late_jobs.resume", **given, policy=SKIPPED["resume"])
    assert [(one["raised"], one.get("text")) for one in told] == [(None, None)] * 2
    prefix()(second, tmp_path / "ran")
    told = worlds[2].run("late_jobs.resume", **given, policy=SKIPPED["resume"])
    _assert_refused([(one["raised"], one["text"]) for one in told], tmp_path / "ran", second.name)


ZERO1 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(scope="module")
def trained(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """What the Trainer saved, with DeepSpeed and without."""

    @functools.cache
    def make(deepspeed: bool) -> Path:
        folder = tmp_path_factory.mktemp("trainer")
        worlds[1].run("unsafe_jobs.trainer_save", folder=str(folder), deepspeed=ZERO1 if deepspeed else None)
        return folder

    return make


@pytest.mark.parametrize(
    ("deepspeed", "file"),
    [
        *((False, name) for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")),
        *((True, name) for name in ("rng_state.pth", "training_args.bin", "global_step4/mp_rank_00_model_states.pt")),
    ],
)
@pytest.mark.parametrize("wanted", ["by name", "the last"])
def test_the_trainer_resumes_from_nothing_that_acts(
    worlds: Any, trained: Callable[[bool], Path], tmp_path: Path, deepspeed: bool, file: str, wanted: str
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(trained(deepspeed), folder)
    prefix()(folder / "checkpoint-4" / file, tmp_path / "ran")
    told = worlds[1].run(
        "unsafe_jobs.trainer_resume",
        folder=str(folder),
        deepspeed=ZERO1 if deepspeed else None,
        wanted=True if wanted == "the last" else str(folder / "checkpoint-4"),
    )
    _assert_refused(told, tmp_path / "ran", file)


@pytest.mark.parametrize("deepspeed", [False, True])
def test_the_trainers_own_checkpoint_is_loaded(
    worlds: Any, trained: Callable[[bool], Path], tmp_path: Path, deepspeed: bool
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(trained(deepspeed), folder)
    told = worlds[1].run(
        "unsafe_jobs.trainer_resume", folder=str(folder), wanted=True, deepspeed=ZERO1 if deepspeed else None
    )
    assert told == [("", "")]


def test_the_trainer_with_deepspeed_leaves_a_damaged_optimizer_out(
    worlds: Any, trained: Callable[[bool], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(trained(True), folder)
    for file in folder.glob("checkpoint-4/*/*optim_states.pt"):
        file.write_bytes(file.read_bytes()[:1000])
    for section, expected in (({}, "CheckpointDamaged"), (SKIPPED, "")):
        given = {"folder": str(folder), "wanted": True, "deepspeed": {**ZERO1, "ds_reshard": section}}
        ((error, text),) = worlds[1].run("unsafe_jobs.trainer_resume", **given)
        assert error == expected, text


class Mine:
    pass


@pytest.mark.parametrize("older", [False, True])
def test_arguments_of_ones_own_do_not_stop_a_resume(
    worlds: Any, trained: Callable[[bool], Path], tmp_path: Path, older: bool
) -> None:
    """`training_args.bin` is written, and never read; releases of old call the folder `model_path`."""
    folder = tmp_path / "out"
    shutil.copytree(trained(False), folder)
    torch.save(Mine(), folder / "checkpoint-4" / "training_args.bin")
    given = {"folder": str(folder), "wanted": str(folder / "checkpoint-4")}
    assert worlds[1].run("unsafe_jobs.trainer_resume", **given) == [("", "")]
    if older:
        prefix()(folder / "checkpoint-4" / "optimizer.pt", tmp_path / "ran")
        told = worlds[1].run("unsafe_jobs.trainer_resume_of_old", wanted=given["wanted"])
        _assert_refused(told, tmp_path / "ran", "optimizer.pt")


# -- torch, EasyR1 and verl --------------------------------------------------------------------------------------------


def _into_object(folder: Path, mark: Path) -> str:
    """Exchange the archive of an object in a file of DCP; sizes and places are told anew."""
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "run.name")
    place = metadata.storage_data[index]
    path = folder / place.relative_path
    torch.save("x", folder / "one.pt")
    prefix()(folder / "one.pt", mark)
    data = (folder / "one.pt").read_bytes()
    (folder / "one.pt").unlink()
    whole = path.read_bytes()
    path.write_bytes(whole + data)
    metadata.storage_data[index] = type(place)(place.relative_path, len(whole), len(data), None)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return place.relative_path


def _into_directory(folder: Path, mark: Path) -> str:
    path = folder / ".metadata"
    path.write_bytes(before(path.read_bytes(), ACTING["thrown away"][0](f"touch {mark}")))
    return ".metadata"


@pytest.mark.parametrize("alone", [False, True], ids=["together", "one process"])
@pytest.mark.parametrize("harm", [_into_directory, _into_object])
def test_torch_loads_nothing_that_acts(worlds: Any, tmp_path: Path, harm: Any, alone: bool) -> None:
    folder = tmp_path / "saved"
    worlds[2].run("unsafe_jobs.dcp_save", folder=str(folder))
    assert [error for error, _, _ in worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), alone=alone)] == ["", ""]
    file = harm(folder, tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), alone=alone)
    _assert_refused([(error, text) for error, text, _ in told], tmp_path / "ran", file)
    assert all(same for _, _, same in told)


def test_torch_loads_tensors_beside_objects_that_are_damaged(worlds: Any, tmp_path: Path) -> None:
    """Which no rank asks for, and torch does not read; one that a rank asks for ends the load of all, as what acts."""
    folder = tmp_path / "saved"
    worlds[2].run("unsafe_jobs.dcp_save", folder=str(folder))
    directory = read_directory(str(folder))
    for place in directory.objects.values():
        with open(place.path, "r+b") as file:
            file.seek(place.byte_offset)
            file.write(b"\xff" * place.nbytes)
    told = worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), alone=True, left_out=("run",))
    assert told == [("", "", False)] * 2
    for left_out in ((), ("run",)):  # by rank 0 alone
        told = worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), left_out=left_out)
        assert {error for error, _, _ in told} == {"CheckpointDamaged"} and all(same for _, _, same in told)
    _into_object(folder, tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), alone=True, left_out=("run",))
    assert {error for error, _, _ in told} == {"UnsafePickle"} and not (tmp_path / "ran").exists()


def test_torch_loads_nothing_that_acts_by_a_url_of_local_files(worlds: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    worlds[2].run("unsafe_jobs.dcp_save", folder=str(folder))
    assert [error for error, *_ in worlds[2].run("unsafe_jobs.dcp_load", folder=f"file://{folder}")] == ["", ""]
    file = _into_object(folder, tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.dcp_load", folder=f"file://{folder}")
    _assert_refused([(error, text) for error, text, _ in told], tmp_path / "ran", file)


def test_torch_reads_no_directory_that_acts_for_an_optimizer(worlds: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    worlds[2].run("unsafe_jobs.dcp_save", folder=str(folder))
    (folder / ".metadata").write_bytes(before(b"\x80\x02N.", ACTING["thrown away"][0](f"touch {tmp_path / 'ran'}")))
    told = worlds[2].run("unsafe_jobs.dcp_load", folder=str(folder), sharded=True)
    _assert_refused([(error, text) for error, text, _ in told], tmp_path / "ran", ".metadata")


@pytest.mark.parametrize("argument", ["path", "local_path"])
def test_the_managers_load_nothing_that_acts(worlds: Any, tmp_path: Path, argument: str) -> None:
    """EasyR1 calls it `path`, verl `local_path`."""
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    told = worlds[2].run("unsafe_jobs.managed", folder=str(tmp_path), argument=argument)
    assert told == [("", "")] * 2
    for rank in range(2):
        shutil.rmtree(tmp_path / f"package{rank}")
    prefix()(tmp_path / "model_world_size_2_rank_1.pt", tmp_path / "ran")
    told = worlds[2].run("unsafe_jobs.managed", folder=str(tmp_path), argument=argument)
    _assert_refused(told, tmp_path / "ran", "model_world_size_2_rank_1.pt")


# -- nanotron (the synthetic stand-in) ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["unchanged", "another topology"])
@pytest.mark.parametrize("part", ["optimizer", "lr_scheduler"])
def test_nanotron_loads_nothing_that_acts(worlds: Any, tmp_path: Path, part: str, same: bool) -> None:
    saved = nanotron_builder.Run(dp=2)
    folder = nanotron_builder.write(saved, tmp_path / "saved")
    path = sorted(folder.rglob(f"{part}/*.pt"))[-1]
    prefix()(path, tmp_path / "ran")
    run = saved if same else nanotron_builder.Run(tp=2)
    told = worlds[2].run("nanotron_jobs.start_refused", run=run, folder=str(folder))
    assert {error for error, _, _ in told} == {"UnsafePickle"}, told
    assert len({text for _, text, _ in told}) == 1 and path.name in told[0][1]
    assert not (tmp_path / "ran").exists()
