"""The command that an error gives to mend it: it is run on the same folder, and mends it, or leads to the next line.

FOLLOWED says which tests follow the lines of errors that need a run of their own.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run, ds_config
from messages import amended
from preflight_answers import change
from saves import Saves
from unlisted_class import Stranger

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import nanotron_builder as nanotron

from ds_reshard.cli.main import main
from ds_reshard.operations import convert
from ds_reshard.resume.policy_sources import FLAGS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ZERO2, NADAM, FP32 = (Run(2, 2), Model(groups=2)), (Run(1, 2), Model(optimizer="nadam")), (Run(1, 2, "fp32"), Model())
OUT = "convert {source} {out} --to "
ROWS = [
    (ZERO2, OUT + "zero4", "(choose from 'zero1', 'zero2',", OUT + "zero2"),
    (ZERO2, OUT + "universal --dp 2", "--dp: --to universal writes whole tensors", OUT + "universal"),
    (ZERO2, OUT + "zero2 --sub-group-size 9", "or --to zero3", OUT + "zero3 --sub-group-size 9"),
    (ZERO2, OUT + "zero1 --dtype float32", "--to safetensors", OUT + "safetensors --dtype float32"),
    (ZERO2, OUT + "zero3 --threads 4 --memory 2", "--memory 4,", OUT + "zero3 --threads 4 --memory 4"),
    (ZERO2, OUT + "zero3 --threads 4 --memory 2", "or --threads 2", OUT + "zero3 --threads 2 --memory 2"),
    (ZERO2, "convert {source} {folder}/no/out --to zero3", "mkdir -p {folder}/no", OUT + "zero3"),
    (
        ZERO2,
        "convert {source} {folder}/there --to zero3",
        "--force",
        "convert {source} {folder}/there --to zero3 --force",
    ),
    (ZERO2, "convert {source} {source}/out --to zero3", "name a folder apart", OUT + "zero3"),
    (ZERO2, OUT + "zero3 --zero-stage 1", "--to nanotron", OUT + "zero3"),
    (NADAM, OUT + "universal", "--to zero1", OUT + "zero1"),
    (FP32, OUT + "bf16", "--to zero1", OUT + "zero1"),
    (ZERO2, "inspect {source} --tag none", "global_step3", "inspect {source} --tag global_step3"),
]


@pytest.mark.parametrize(("saved", "faulty", "line", "mended"), ROWS, ids=[f"{row[1]}: {row[2]}" for row in ROWS])
def test_the_command_of_an_error_mends_it(
    saves: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: tuple[Run, Model],
    faulty: str,
    line: str,
    mended: str,
) -> None:
    folder, _ = saves(*saved)
    (tmp_path / "there").mkdir()
    filled = {"source": shutil.copytree(folder, tmp_path / "source"), "folder": tmp_path, "out": tmp_path / "out"}
    try:
        status = main([word.format(**filled) for word in faulty.split()])
    except SystemExit as ended:
        status = int(ended.code or 0)
    told = capsys.readouterr().err
    assert status != 0 and line.format(**filled) in " ".join(told.split()), told
    assert main([word.format(**filled) for word in mended.split()]) == 0, capsys.readouterr().err


Z1 = ds_config(Run(1, 1))
ADAMW = {**Z1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}}
WARMUP = {**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}}
PLAIN, STATELESS = (Run(2, 2), Model()), (Run(2, 2), Model(scheduler=False))
SGD, OVERRIDE = "--model test_mending_lines:_sgd", "-- --override-opt-param-scheduler"
TRUST = "--trust unlisted_class.Stranger"
COMING = [
    # what was saved, the JSON and the command line of the coming run, what the error says, and both as it says
    (PLAIN, Z1, "--world 7", "run on as many data-parallel ranks as divide it (1)", Z1, "--world 1"),
    (PLAIN, Z1, "--world 1 --nodes 2", "give at most as many as ranks", Z1, "--world 1 --nodes 1"),
    (PLAIN, Z1, "--world 1 --tag none", "global_step3", Z1, "--world 1 --tag global_step3"),
    (PLAIN, Z1, "--world 1 --tag cut", "load another tag", Z1, "--world 1 --tag global_step3"),
    (PLAIN, Z1, "--world 1 --tag stranger", TRUST, Z1, f"--world 1 --tag stranger {TRUST}"),
    (PLAIN, Z1, "--world 1 -- --reset-dataloader", "leave out --reset-dataloader", Z1, "--world 1 --"),
    (PLAIN, Z1, f"--world 1 {SGD}", "load_optimizer_states=False", Z1, f"--world 1 {SGD} -- --no-load-optim"),
    (STATELESS, WARMUP, "--world 1", "--no-load-lr-state", WARMUP, "--world 1 -- --no-load-lr-state"),
    (
        STATELESS,
        ADAMW,
        "--world 1 -- --strict-opt-param-scheduler",
        "used with --override-opt-param-scheduler",
        ADAMW,
        f"--world 1 {OVERRIDE}",
    ),
    (
        PLAIN,
        WARMUP,
        "--world 1 -- --override-optim-hparams lr",
        "use --override-opt-param-scheduler (scheduler: override)",
        WARMUP,
        f"--world 1 {OVERRIDE}",
    ),
]


def _sgd() -> Any:
    import jobs

    net = jobs.Net(Model())
    return net, torch.optim.SGD(jobs._groups(net, Model()), momentum=0.9)


@pytest.mark.acts
@pytest.mark.usefixtures("foreseen")
@pytest.mark.parametrize(
    ("saved", "config", "asked", "line", "mended", "again"), COMING, ids=[f"{row[2]}: {row[3]}" for row in COMING]
)
def test_what_mends_a_load_mends_it(
    saves: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: tuple[Run, Model],
    config: dict[str, Any],
    asked: str,
    line: str,
    mended: dict[str, Any],
    again: str,
) -> None:
    """Flags, keys of the JSON and tags that errors name: preflight, which agrees with the load, says yes with them."""
    folder, path = tmp_path / "saved", tmp_path / "ds.json"
    shutil.copytree(saves(*saved)[0], folder)
    for name in ("cut", "stranger"):
        shutil.copytree(folder / "global_step3", folder / name)
    change("*rank_1_mp_rank_00_optim_states.pt")(folder)  # the first of its tags: cut
    model = folder / "stranger" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(model, weights_only=False), "mine": Stranger(7)}, model)
    for status, what, words in ((1, config, asked), (0, mended, again)):
        path.write_text(json.dumps(what))
        ended = main(["preflight", str(folder), "--config", str(path), *words.split()])
        told = capsys.readouterr()
        assert ended == status or (status == 1 and ended == 2), told.out + told.err
        assert status == 0 or line in " ".join((told.out + told.err).split()), told.out + told.err


Places = dict[str, str]
"""The folder that is converted, and what stands in a mending line for a folder, file or number of the reader's own."""
Written = Callable[[Path], Places]
ONE, PP2, FP32_RUN = nanotron.Run(), nanotron.Run(pp=2), nanotron.Run(masters=False)
STEP = str(nanotron.STEP)


def _of_nanotron(run: nanotron.Run = ONE, **others: nanotron.Run) -> Written:
    """A checkpoint of nanotron, and others of other runs."""
    return lambda at: {name: str(nanotron.write(one, at / name)) for name, one in {"source": run, **others}.items()}


def _converted(
    to: str, run: nanotron.Run = ONE, names: dict[str, str] | None = None, **others: nanotron.Run
) -> Written:
    """The same, converted; under other names, beside the map that gives its own back."""

    def made(at: Path) -> Places:
        places = _of_nanotron(run, **others)(at)
        maps = [names, {new: old for old, new in names.items()}] if names else []
        for number, one in enumerate(maps):
            (at / f"map{number}.json").write_text(json.dumps(one))
        convert(places["source"], str(at / "other"), to=to, names=str(at / "map0.json") if names else None)
        return {**places, "first": places["source"], "source": str(at / "other"), "map.json": str(at / "map1.json")}

    return made


def _and(written: Written, change: Callable[[Path, Path], object]) -> Written:
    """The same, changed: given are the folders of the source's step and of the first other's."""

    def made(at: Path) -> Places:
        places = written(at)
        source, *others = (next(Path(place).glob("*7")) for place in places.values() if Path(place).is_dir())
        change(source, *others[:1])
        return places

    return made


def _metadata(step: Path, change: Callable[[Any], object]) -> None:
    path = step / "checkpoint_metadata.json"
    held = json.loads(path.read_text())
    change(held["metas"])
    path.write_text(json.dumps(held))


def _file(path: Path, change: Callable[[Any], object]) -> None:
    """Change what torch.save wrote."""
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)


def _several_stages(source: Path, like: Path) -> None:
    """A folder that says nothing of nanotron's data, and a run that has two stages of them."""
    for path in source.glob("mp_rank_*_model_states.pt"):
        _file(path, lambda held: held.pop("nanotron"))
    _metadata(like, lambda metas: metas["data_stages"].append(metas["data_stages"][0]))


def _maximized(source: Path, like: Path) -> None:
    for path in like.glob("optimizer/*.pt"):
        _file(path, lambda held: [group.update(maximize=True) for group in held["param_groups"]])


def _factored(at: Path) -> Places:
    """What Adafactor of transformers keeps of a matrix."""
    at = at / "source"
    at.mkdir()
    torch.save({"w": torch.zeros(4, 6)}, at / "pytorch_model.bin")
    states = {0: {"step": 3, "exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(6)}}
    torch.save({"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}, at / "optimizer.pt")
    return {"source": str(at)}


OF_MODEL = {param.name: f"model.{param.name}" for param in nanotron.MODEL}
OF_GROUP = {**{name: name for name in OF_MODEL}, nanotron.MODEL[-1].name: "0"}
TO = "convert {source} {out} --to "
LIKE, WEIGHTS = TO + "nanotron --like {DIR}", r"(--to \w+) or torch((?: without --like)?), for the weights"
OF_FORMATS: dict[str, tuple[Written, str, str | tuple[str, ...]]] = {
    # what lies there, the command that is refused, and where in what it says the line is that mends it; of a chain, in
    # each error after the other
    "stages that no file tells": (_of_nanotron(DIR=PP2), TO + "nanotron --pp 2", "(--like DIR)"),
    "--like of another topology": (_of_nanotron(DIR=PP2), LIKE + " --tp 2 --pp 1", "(leave out --pp and --tp)"),
    "ranks that would hold nothing": (_of_nanotron(), TO + "nanotron --dp 99", "or (--zero-stage 0)"),
    "chunks that cannot be cut": (_of_nanotron(), TO + "nanotron --tp 3", "another (--tp)"),
    "--like of another framework": (
        _converted("zero2"),
        "convert {first} {out} --to nanotron --like {source}",
        "(--like) .*: is no checkpoint of nanotron; .* leave it out",
    ),
    "no arrangement": (_converted("zero2", DIR=ONE), TO + "nanotron", "(--like DIR)"),
    "other names": (_converted("dcp", names=OF_MODEL, DIR=ONE), LIKE, "(--names map.json)"),
    "the name of a param group": (_converted("universal", names=OF_GROUP), TO + "dcp", "(--names)"),
    "several data stages": (
        _and(_converted("zero2", odd=ONE, DIR=ONE), _several_stages),
        TO + "nanotron --like {odd}",
        "(--like DIR)",
    ),
    "another optimizer": (
        _and(_converted("zero2", odd=ONE, DIR=ONE), _maximized),
        TO + "nanotron --like {odd}",
        "(--like DIR)",
    ),
    "no optimizer": (_converted("safetensors", DIR=ONE), LIKE, WEIGHTS),
    "no counters": (_converted("pytorch", DIR=ONE), LIKE, WEIGHTS),
    "no step": (
        _and(_of_nanotron(), lambda step: _metadata(step, lambda metas: metas.pop("last_train_step"))),
        TO + "zero2",
        WEIGHTS,
    ),
    "lost states": (
        _and(_of_nanotron(), lambda step: shutil.rmtree(step / "optimizer")),
        TO + "torch",
        "or (remove lr_scheduler)",
    ),
    "factored states": (_factored, TO + "torch", "(move optimizer.pt) out of the folder, for the weights"),
    "fp32": (_of_nanotron(FP32_RUN), TO + "bf16", "To mend: (--to zero1)"),
    "files of FSDP ranks": (_of_nanotron(), TO + "fsdp", "(--to dcp), which"),
    "no experts": (_of_nanotron(), TO + "zero1 --ep 2", "(--ep) 2: .*; leave it out"),
    "tensor-parallel ranks of a whole": (
        _of_nanotron(),
        TO + "dcp --tp 2",
        "(--tp): dcp has no such option; leave it out",
    ),
    "another step": (_of_nanotron(), "inspect {source} --tag 3", "(--tag 7)"),
    "no arrangement, and no optimizer": (
        _converted("safetensors", DIR=ONE),
        TO + "nanotron",
        ("(--like DIR)", WEIGHTS),
    ),
    "no arrangement, and other names": (
        _converted("dcp", names=OF_MODEL, DIR=ONE),
        TO + "nanotron",
        ("(--like DIR)", "(--names map.json)"),
    ),
    "ranks of a whole, on two axes": (
        _of_nanotron(),
        TO + "dcp --tp 2 --ep 2",
        ("(--tp): dcp has no such option; leave it out", "(--ep).*; leave it out"),
    ),
}


@pytest.mark.parametrize("case", OF_FORMATS)
def test_the_line_that_a_format_gives_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """It is taken out of the error: the command that was refused, changed as each line in turn says, ends well."""
    made, faulty, patterns = OF_FORMATS[case]
    places = {**made(tmp_path), "out": str(tmp_path / "out")}
    words = [word.format(**places) for word in faulty.split()]
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        assert main(words) != 0
        told = " ".join(capsys.readouterr().err.split())
        found = re.search(pattern, told)
        assert found is not None, told
        line = f"leave out {found[1]}" if "leave it out" in found[0] else "".join(found.groups())
        if "--" not in line:
            (named,) = Path(places["source"]).rglob(line.split()[1])
            named.rename(tmp_path / "moved")
            line = "ds-reshard " + " ".join(words)
        filled = {**places, "--names": f"--names {places.get('map.json')}"} if found[1] == "--names" else places
        filled = {**filled, "--tp": "--tp 2"} if "another" in found[0] else filled
        words = amended(words, line, filled)
    assert main(words) == 0, capsys.readouterr().err


def _unscheduled(to: str) -> Written:
    def made(at: Path) -> Places:
        source = nanotron.write(ONE, at / "first")
        shutil.rmtree(source / STEP / "lr_scheduler")
        convert(str(source), str(at / "other"), to=to)
        return {"source": str(at / "other")}

    return made


_BEGIN = ("(--reset-iteration), to begin", "(--override-opt-param-scheduler), for this")
STATELESS_RUN = {"iteration": "reset", "dataloader": "reset"}
LOADS: dict[str, tuple[Written, dict[str, Any], dict[str, Any], str | tuple[str, ...]]] = {
    # what lies there, the policy of the coming run, the run itself, and where the flag is that mends it
    "no scheduler": (_unscheduled("dcp"), {}, {}, "(--override-opt-param-scheduler), for this run's"),
    "no scheduler, anew": (_unscheduled("dcp"), {}, {}, "or (--no-load-lr-state)"),
    "no steps": (_converted("pytorch"), {}, {}, "(--reset-iteration), to begin at 0"),
    "no states": (_converted("safetensors"), {"scheduler": "override", **STATELESS_RUN}, {}, "(--no-load-optim)"),
    "masters on one side": (_converted("zero2"), {}, {"run": FP32_RUN}, "or (--no-load-optim) to begin"),
    "another batch": (_of_nanotron(), {}, {"accumulation": 4}, "(--override-optim-hparams global_batch_size)"),
    "another batch, this run's schedule": (
        _of_nanotron(),
        {},
        {"accumulation": 4},
        "or (--override-opt-param-scheduler) to use",
    ),
    "other names": (_converted("dcp", names=OF_MODEL), {}, {}, "DS_RESHARD_SETTINGS='({.*?})'"),
    "weights alone, from nothing asked": (_converted("safetensors"), {}, {}, (*_BEGIN, "(--no-load-optim)")),
    "weights alone, of other names": (
        _converted("safetensors", names=OF_MODEL),
        {},
        {},
        (*_BEGIN, "DS_RESHARD_SETTINGS='({.*?})'", "(--no-load-optim)"),
    ),
}


@pytest.mark.parametrize("case", LOADS)
def test_what_mends_a_load_of_nanotron_mends_it(worlds: Any, tmp_path: Path, case: str) -> None:
    """The flag, or the setting, that each error in turn names, given to the same run."""
    made, policy, how, patterns = LOADS[case]
    places, how = made(tmp_path), {"run": ONE, **how}
    how["folder"] = places["source"]

    def refused(**asked: Any) -> str:
        if "accumulation" in how:  # a folder of its own
            return str(worlds[1].run("nanotron_jobs.start_refused", **how, **asked)[0][1])
        return str(worlds[1].run("nanotron_jobs.other", **how, **asked)[0].get("text", ""))

    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        told = refused(policy=policy)
        found = re.search(pattern, told)
        assert found is not None, told
        name, *value = found[1].split()
        if name.startswith("{"):
            how["names"] = places[json.loads(found[1])["names"]]
        else:
            (flag,) = (one for one in FLAGS if name in one.names)
            policy = {**policy, flag.key: value if value else flag.value}
            policy = policy if flag.value != "skip" else {key: policy[key] for key in policy if key != "scheduler"}
    assert refused(policy=policy) == ""


FOLLOWED = {
    # of errors whose lines are followed to their end where the run is that they need
    "names of wrappers": "hosts/deepspeed/test_wrapped_names.py::test_the_line_of_the_error_renames_them",
    "entries that no module loads": (
        "hosts/deepspeed/test_odd_models.py::test_entries_that_no_module_loads_are_judged_before_the_load"
    ),
    "states of what is frozen now": (
        "hosts/fsdp/test_dcp_reader.py::test_states_of_what_is_frozen_now_are_refused_and_each_way_out_works"
    ),
    "verl's folder under other ranks": (
        "hosts/fsdp/test_fsdp_convert.py::test_a_manager_under_other_ranks_is_told_what_to_convert"
    ),
    "numbers of several groups of verl": "hosts/fsdp/test_fsdp_convert.py::test_numbers_of_two_groups_are_not_guessed",
    "the folder of a tag": "hosts/deepspeed/test_arguments.py::test_the_folder_of_a_tag",
    "the folder of accelerate": (
        "hosts/accelerate/test_resume_accelerate.py::"
        "test_a_place_above_a_folder_or_inside_one_is_refused_with_the_line_that_loads_it"
    ),
    "a batch that ranks cannot divide": "unit/test_batch.py::test_each_way_that_is_offered_passes",
    "a position at other processes": (
        "hosts/accelerate/test_positions.py::test_what_cannot_be_found_out_is_told_with_the_line_that_says_it"
    ),
    "either clock of a placeholder": (
        "hosts/accelerate/test_positions.py::test_either_clock_of_a_scheduler_on_a_placeholder"
    ),
    "a loose load of accelerate's own": (
        "hosts/accelerate/test_loose_loads.py::test_none_of_what_is_trained_is_an_error_and_its_line_mends_it"
    ),
    "torch's own load": (
        "hosts/deepspeed/test_wrapped_names.py::test_torchs_own_load_that_finds_nothing_is_mended_by_its_lines"
    ),
    "two maps of names": "hosts/deepspeed/test_wrapped_names.py::test_ranks_with_two_maps_load_nothing",
    "the base of an adapter": (
        "hosts/deepspeed/test_wrapped_names.py::test_a_base_is_loaded_for_what_is_new_by_the_lines_of_the_error"
    ),
    "rows of a vocabulary": (
        "hosts/deepspeed/test_grid_tensor.py::test_rows_that_no_padding_explains_are_not_made_of_zeros"
    ),
    "gloo for an Accelerator": (
        "hosts/accelerate/test_prepare_matrix.py::test_an_accelerator_that_believes_it_is_alone_is_refused"
    ),
    "classes of several files": "hosts/test_unsafe_loads.py::test_what_all_files_need_stands_in_one_line",
    "classes to trust": "hostile/test_unsafe_checkpoints.py::test_all_classes_stand_in_one_line_of_each_tool",
    "a position beside an engine": (
        "hosts/deepspeed/test_resume_unowned.py::test_a_position_that_counts_the_batches_of_other_ranks_is_a_warning"
    ),
    "a position beside no engine": (
        "hosts/accelerate/test_positions.py::test_a_count_of_micro_batches_is_told_without_deepspeed"
    ),
    "a schedule of the other clock": (
        "hosts/accelerate/test_late_resume.py::test_a_schedule_as_it_was_saved_is_refused_on_another_clock"
    ),
    "lengths of other processes, this run's": ("hosts/accelerate/test_positions.py::test_the_checkpoints_schedule"),
    "lengths of other processes, by batches": (
        "hosts/accelerate/test_positions.py::test_the_checkpoints_schedule_of_other_lengths_goes_on_by_batches"
    ),
    "a schedule that had taken steps": (
        "hosts/accelerate/test_positions.py::test_a_schedule_that_had_taken_steps_is_refused_and_each_line_mends_it"
    ),
    "a strict schedule": ("hosts/deepspeed/test_resume.py::test_strict_lists_every_difference_and_loads_what_agrees"),
    "a rate that is not used": ("hosts/deepspeed/test_resume.py::test_a_learning_rate_that_is_not_used_is_warned_of"),
    "what ranks do not hold alike": (
        "hosts/fsdp/test_fsdp_asked.py::test_each_way_out_of_what_ranks_do_not_hold_alike_saves_what_loads_equal"
    ),
    "moments of an optimizer that is not known": (
        "hosts/deepspeed/test_resume_odd.py::test_an_optimizer_whose_states_are_not_known_is_refused_and_its_line_mends_it"
    ),
    "moments that DeepSpeed alone keeps": (
        "hosts/deepspeed/test_resume_odd.py::test_what_deepspeed_alone_loads_keeps_its_moments_and_the_line_of_its_warning_mends_it"
    ),
    "an engine that holds half a checkpoint": (
        "hosts/deepspeed/test_bad_input.py::test_faults_that_show_while_copying_make_the_engine_refuse_work"
    ),
    "a state that a script gives the optimizer": (
        "hosts/deepspeed/test_refusals.py::test_a_state_that_the_script_gives_the_optimizer_itself"
    ),
    "flags that no load has applied": (
        "hosts/deepspeed/test_resume_launched.py::test_ranks_of_another_environment_get_the_flags_by_the_line_of_the_error"
    ),
    "another vocabulary": ("hosts/deepspeed/test_grid_tensor.py::test_a_run_with_another_vocabulary_is_refused"),
    "a feature beside a writer": ("hosts/deepspeed/test_refusals.py::test_a_feature_beside_a_writer_is_refused"),
    "Megatron-LM's flags": ("hosts/megatron/test_megatron_mending_lines.py::test_the_flags_of_the_line_mend_a_load"),
    "Megatron-LM's loads, line after line": (
        "hosts/megatron/test_megatron_mending_chains.py::test_lines_lead_to_a_load_or_to_an_end"
    ),
    "Megatron-LM's fp16 with torch's Adam": (
        "hosts/megatron/test_megatron_torch_adam.py::test_a_line_that_mends_fp16_with_torchs_adam"
    ),
}


@pytest.mark.parametrize("error", FOLLOWED)
def test_lines_that_are_followed_elsewhere_are_followed_there(error: str) -> None:
    file, _, name = FOLLOWED[error].partition("::")
    assert name and f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
