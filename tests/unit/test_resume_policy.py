"""The resume policy as a value: its places, its flags, its contradictions, and what follows from it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_reshard
from ds_reshard import ConfigError, ResumePolicy, WriteFailed
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import DATALOADER, ITERATION, OPTIMIZER, SCHEDULER, Given, combine, defaults, from_json
from ds_reshard.resume.policy_sources import FLAGS
from ds_reshard.resume.report import ResumeReport, Row, batch_size_warning, because, publish, publish_or_log, unwritable


@pytest.fixture(autouse=True)
def nothing_asked() -> Iterator[None]:
    policy_sources.forget()
    yield
    policy_sources.forget()


def parse(*flags: str, parser: argparse.ArgumentParser | None = None) -> ResumePolicy:
    ds_reshard.add_arguments(parser or argparse.ArgumentParser()).parse_args(list(flags))
    return policy_sources.asked_policy()


@pytest.mark.parametrize("known", [(), ("--finetune",)])
def test_a_parser_with_the_flags_is_refused_among_the_parents_of_another(known: tuple[str, ...]) -> None:
    """argparse gives that the actions alone, in place of the parser's methods, which tell what was parsed."""
    common = argparse.ArgumentParser(add_help=False)
    theirs = [common.add_argument(name, action="store_true") for name in known]
    child = argparse.ArgumentParser(parents=[common])
    ds_reshard.add_arguments(common)
    assert [type(one) for one in theirs] == [argparse._StoreTrueAction] * len(known)
    for make in (argparse.ArgumentParser, argparse.ArgumentParser().add_subparsers().add_parser):
        with pytest.raises(ConfigError, match=r"(?s)among the parents of another.*call add_arguments on the parser"):
            make("x", parents=[common])
    ds_reshard.add_arguments(child).parse_args(["--finetune"])
    assert policy_sources.asked_policy().finetune and policy_sources.adopted("finetune") is bool(known)


EACH = {
    "--override-opt-param-scheduler": {"scheduler": "override"},
    "--override-opt_param-scheduler": {"scheduler": "override"},
    "--use-checkpoint-opt-param-scheduler": {"scheduler": "checkpoint"},
    "--use-checkpoint-opt_param-scheduler": {"scheduler": "checkpoint"},
    "--strict-opt-param-scheduler": {"scheduler": "strict"},
    "--no-load-lr-state": {"scheduler": "reset"},
    "--no-load-optim": {"optimizer": "skip"},
    "--load-masters-only": {"optimizer": "masters"},
    "--override-optim-hparams=betas, eps": {"hyperparameters": ("betas", "eps")},
    "--no-load-rng": {"rng": False},
    "--finetune": {"finetune": True},
    "--reset-iteration": {"iteration": "reset"},
    "--reset-dataloader": {"dataloader": "reset"},
    "--resume-report=r.json": {"report": "r.json"},
}


@pytest.mark.parametrize("flag", EACH)
def test_each_flag_is_its_json_key(flag: str) -> None:
    expected = ResumePolicy(**EACH[flag])
    assert parse(flag) == expected
    assert combine([from_json({k: list(v) if isinstance(v, tuple) else v for k, v in EACH[flag].items()})]) == expected


def test_every_flag_is_in_the_table_above() -> None:
    assert {name for flag in FLAGS for name in flag.names} == {text.partition("=")[0] for text in EACH}


def test_nothing_given_is_the_frameworks_own_behaviour() -> None:
    policy = parse()
    assert policy == ResumePolicy() and policy.is_default
    assert policy.loads_masters and policy.loads_moments and policy.keeps_position and policy.keeps_iteration
    assert not policy.schedule_is_this_runs
    assert ResumePolicy(report="x").is_default


def test_flags_that_a_script_has_are_left_to_it_and_read() -> None:
    """Megatron-DeepSpeed defines several of them itself; they keep their help, default and destination."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--no-load-optim", action="store_true", default=None, help="theirs")
    parser.add_argument("--override-opt_param-scheduler", action="store_true", dest="theirs")
    before = parser._option_string_actions["--no-load-optim"]
    kind = type(before)
    assert parse("--no-load-optim", "--override-opt_param-scheduler", parser=parser) == ResumePolicy(
        optimizer="skip", scheduler="override"
    )
    assert parser._option_string_actions["--no-load-optim"] is before and type(before) is kind
    assert "--override-opt-param-scheduler" not in parser._option_string_actions
    assert policy_sources.adopted("optimizer") and not policy_sources.adopted("iteration")


def test_arguments_that_are_intermixed_are_told() -> None:
    """Python 3.12.8 and later do not call `parse_known_args` for that (argparse.py; synthetic stand-in)."""

    class Later(argparse.ArgumentParser):
        def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
            return argparse.ArgumentParser.parse_known_args(self, args, namespace)

    for kind in (argparse.ArgumentParser, Later):
        parser = ds_reshard.add_arguments(kind())
        parser.add_argument("data", nargs="*")
        assert parser.parse_intermixed_args(["a", "--no-load-optim", "b"] if kind is not Later else ["--no-load-optim"])
        assert policy_sources.asked_policy() == ResumePolicy(optimizer="skip")
        policy_sources.forget()


def test_adding_the_arguments_twice_adds_them_once() -> None:
    parser = ds_reshard.add_arguments(argparse.ArgumentParser())
    count = len(parser._actions)
    assert len(ds_reshard.add_arguments(parser)._actions) == count


def test_a_flag_of_another_kind_is_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--finetune", type=str)
    with pytest.raises(ConfigError, match="of another kind"):
        ds_reshard.add_arguments(parser)


def test_parsing_again_for_defaults_takes_nothing_back() -> None:
    parser = ds_reshard.add_arguments(argparse.ArgumentParser())
    parser.parse_args(["--finetune"])
    parser.parse_args([])
    assert parse() == ResumePolicy(finetune=True)
    assert parse("--no-load-lr-state") == ResumePolicy(scheduler="reset"), "what is said anew counts"


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--no-load-optim", {"dest": "load_optim", "action": "store_false"}),
        ("--finetune", {"action": "count", "default": 0}),
        ("--no-load-rng", {"action": "store_const", "const": "no", "default": "yes"}),
        ("--reset-iteration", {"action": "store_true", "default": True}),
    ],
)
def test_a_flag_whose_value_does_not_tell_if_it_was_given_is_refused(flag: str, options: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(flag, **options)
    with pytest.raises(ConfigError, match="of another kind"):
        ds_reshard.add_arguments(parser)


def test_a_destination_that_a_script_uses_otherwise_is_left_to_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ft", dest="finetune", default="lora")
    assert parse(parser=parser).is_default
    assert parse("--finetune", parser=parser).finetune


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-load-lr-state", "--override-opt-param-scheduler"], "contradict"),
        (["--no-load-optim", "--load-masters-only"], "contradict"),
        (["--finetune", "--load-masters-only"], "finetune"),
        (["--finetune", "--use-checkpoint-opt-param-scheduler"], "finetune"),
        (["--override-optim-hparams", "a-b"], "names separated by commas"),
        (["--override-optim-hparams", ","], "names separated by commas"),
        (["--override-optim-hparams", "lr", "--strict-opt-param-scheduler"], "learning rate"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(*flags)
    assert "To mend" in str(caught.value)
    assert policy_sources.asked_policy().is_default, "what was refused must not stay asked for"


def test_two_places_that_differ_are_both_named() -> None:
    parse("--override-opt-param-scheduler")
    with pytest.raises(ConfigError) as caught:
        policy_sources.asked_policy(from_json({"scheduler": "reset"}))
    assert "--override-opt-param-scheduler (command line)" in str(caught.value)
    assert '"scheduler": "reset" (ds_reshard.resume in the DeepSpeed JSON)' in str(caught.value)
    agreed = policy_sources.asked_policy(from_json({"scheduler": "override", "rng": True}))
    assert agreed == ResumePolicy(scheduler="override")


@pytest.mark.parametrize(
    "section",
    [
        [],
        {"scheduler": "overide"},
        {"schedulers": "override"},
        {"optimizer": True},
        {"rng": 1},
        {"finetune": "yes"},
        {"hyperparameters": "betas"},
        {"hyperparameters": ["be tas"]},
        {"iteration": None},
        {"report": 3},
        {"report": ""},
    ],
    ids=repr,
)
def test_a_wrong_json_value_is_named_with_what_is_allowed(section: Any) -> None:
    with pytest.raises(ConfigError, match="resume in the DeepSpeed JSON") as caught:
        from_json(section)
    assert "expected" in str(caught.value) and "To mend" in str(caught.value)


POLICIES = st.builds(
    dict,
    scheduler=st.sampled_from(SCHEDULER),
    optimizer=st.sampled_from(OPTIMIZER),
    iteration=st.sampled_from(ITERATION),
    dataloader=st.sampled_from(DATALOADER),
    finetune=st.booleans(),
    rng=st.booleans(),
    hyperparameters=st.sampled_from([(), ("betas",), ("eps", "betas")]),
)


@given(POLICIES)
def test_a_policy_split_over_places_is_the_policy(values: dict[str, Any]) -> None:
    """However the keys are spread over two places, and in which order, the policy is the same or refused alike."""
    whole = _made([Given(place="one", values=values)])
    keys = sorted(values)
    halves = [Given(place=str(n), values={k: values[k] for k in keys[n::2]}) for n in range(2)]
    assert _made(halves) == whole == _made(halves[::-1])


def _made(places: list[Given]) -> Any:
    try:
        return combine(places)
    except ConfigError as error:
        return str(error)


@given(POLICIES)
def test_what_follows_from_a_policy_is_consistent(values: dict[str, Any]) -> None:
    policy = _made([Given(place="one", values=values)])
    if isinstance(policy, str):
        return
    assert policy.loads_masters or not policy.loads_moments
    if policy.finetune:
        assert not (policy.loads_masters or policy.keeps_position or policy.keeps_iteration)
    if policy.scheduler == "checkpoint":
        assert policy.keeps_position and not policy.schedule_is_this_runs
    if policy.scheduler == "reset":
        assert not policy.keeps_position and policy.schedule_is_this_runs
    if policy.scheduler == "override" and policy.iteration == "load":
        assert policy.keeps_position and policy.schedule_is_this_runs
    for name in defaults():
        assert because(policy, name)


def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="lr", checkpoint=0.1, this_run=0.5, used=0.5, because="--override-opt-param-scheduler")
    report = ResumeReport(host="deepspeed", checkpoint="somewhere", rows=(row,), warnings=("look",))
    publish(report, path=str(tmp_path / "report.json"))
    assert ds_reshard.last_report() is report
    assert "--override-opt-param-scheduler" in str(report) and "look" in str(report)
    monkeypatch.setattr("os.replace", _fail)
    with pytest.raises(WriteFailed, match=r"other.json: the resume report cannot be written: no space"):
        publish(report, path=str(tmp_path / "other.json"))
    publish_or_log(report, str(tmp_path / "other.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_file_of_a_report_is_as_any_file(tmp_path: Any) -> None:
    """A link stays one, and others may read the file as the umask says."""
    (tmp_path / "link.json").symlink_to("report.json")
    before = os.umask(0o027)
    try:
        publish(ResumeReport(host="deepspeed", checkpoint="c", rows=()), path=str(tmp_path / "link.json"))
    finally:
        os.umask(before)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o640


def _fail(*_: object) -> None:
    raise OSError("no space")


def test_a_report_needs_a_folder_that_is_there(tmp_path: Any) -> None:
    assert unwritable(None) == unwritable(str(tmp_path / "report.json")) == []
    for path, what in ((tmp_path / "absent" / "report.json", "its folder is not there"), (tmp_path, "is a folder")):
        (fault,) = unwritable(str(path))
        assert fault.error == "ConfigError" and str(path) in fault.where and what in fault.what


def test_no_report_takes_the_place_of_a_device(tmp_path: Any) -> None:
    """Where root runs a job, /dev/stdout and /dev/null would be files from then on."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stdout").symlink_to("pipe")
    for name in ("pipe", "stdout"):
        (fault,) = unwritable(str(tmp_path / name))
        assert fault.error == "ConfigError" and "is a device or a pipe" in fault.what


def test_the_batch_size_warning_names_both_sizes() -> None:
    assert batch_size_warning(64, 64) == () == batch_size_warning(None, 64)
    (text,) = batch_size_warning(64, 32)
    assert "64" in text and "32" in text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([from_json({"scheduler": "override"})], '"scheduler": "override"'),
        ([Given(place="flags", values={"scheduler": "override"}, spelled={"scheduler": "--mine"})], "--mine"),
        ([], "host"),
    ],
    ids=["the JSON", "a flag", "nobody"],
)
def test_a_report_names_what_was_given_as_it_was_given(given: list[Given], why: str) -> None:
    """The JSON key where one was written there, the flag where one was; and the framework by its name."""
    assert because(combine(given), "schedule") == why
    row = Row(name="group 0: lr", checkpoint=1.0, this_run=2.0, used=2.0, because=because(combine(given), "schedule"))
    last = str(ResumeReport(host="deepspeed", checkpoint="c", rows=(row,))).splitlines()[-1]
    assert last.split() == ["group", "0:", "lr", "1", "2", "2", *("DeepSpeed" if why == "host" else why).split()]


def test_the_table_of_a_report_is_as_wide_as_what_is_in_it() -> None:
    rows = tuple(
        Row(name=name, checkpoint=(0.9, 0.999), this_run=(0.9, 0.999), used="the script's own", because=why)
        for name, why in (("group 0: weight_decay", "--override-opt-param-scheduler"), ("data", "host"))
    )
    lines = str(ResumeReport(host="deepspeed", checkpoint="c", rows=rows)).splitlines()
    assert max(map(len, lines)) <= 100 and not any("─" in line or "━" in line for line in lines)


@pytest.mark.parametrize(
    ("configured", "shown"),
    [
        ("", "ds_reshard: loaded it\n"),
        ("logging.warning('')", "WARNING:root:\nds_reshard: loaded it\n"),
        ("logging.basicConfig(level=logging.INFO)", "INFO:ds_reshard:loaded it\n"),
        ("logging.getLogger('ds_reshard').setLevel(logging.WARNING)", ""),
    ],
    ids=["not at all", "by a library", "at INFO", "to be silent"],
)
def test_a_line_is_seen_however_logging_is_configured(configured: str, shown: str) -> None:
    """On stderr, once; but where this logger's own level says that it is not wanted."""
    program = f"import logging; {configured}\nfrom ds_reshard.resume.report import say; say('loaded it')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", shown)


def test_a_line_is_not_said_where_the_script_has_closed_stderr() -> None:
    """As daemons do: the load goes on."""
    program = "import sys; sys.stderr.close(); from ds_reshard.resume.report import say; say('loaded it'); print('on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "on\n")
