"""What people see of a load: progress, the event of it in a file, spans of OpenTelemetry."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from saves import Saves

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import Run as Topology
from nanotron_builder import write

from ds_reshard.errors import ConfigError
from ds_reshard.hosts.deepspeed.settings import parse_settings
from ds_reshard.hosts.fsdp.settings import ask_settings
from ds_reshard.operations import watching

pytestmark = pytest.mark.distributed
SAVED, RUN, MODEL = Run(2, 2), Run(1, 2), Model(groups=2)


def _events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_load_is_one_line(saves: Saves, worlds: Any, tmp_path: Path) -> None:
    """Another layout, the same one by DeepSpeed, and a refused one; whatever was in the file stays."""
    folder, file = str(saves(SAVED, MODEL)[0]), tmp_path / "events.jsonl"
    file.write_text('{"event": "of another job"}\n')
    asked = {"events": str(file)}
    worlds[2].run("load", run=RUN, model=MODEL, folder=folder, reshard=asked)
    left = {**asked, "reshard": {"unchanged": "deepspeed"}}
    worlds[2].run("load", run=SAVED, model=MODEL, folder=folder, reshard=left)
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    next(damaged.glob("global_step3/*optim_states.pt")).unlink()
    told = worlds[2].run("load_refused", run=RUN, model=MODEL, folder=str(damaged), reshard=asked)
    other, direct, own, refused = _events(file)
    assert other == {"event": "of another job"}
    assert (direct["result"], direct["loaded_by"], direct["ranks"]) == ("loaded", "ds_reshard", 2)
    assert [one["name"] for one in direct["phases"]] == ["prepare", "read", "resume"]
    assert 0 < direct["bytes"] == direct["phases"][1]["bytes"]
    assert sum(one["seconds"] for one in direct["phases"]) <= direct["seconds"]
    assert direct["checkpoint"] == folder and direct["error"] is None
    assert {row["name"] for row in direct["report"]["rows"]} >= {"iteration"}
    assert (own["result"], own["loaded_by"], own["bytes"]) == ("loaded", "deepspeed", 0)
    assert [one["name"] for one in own["phases"]] == ["prepare", "deepspeed"]
    assert (refused["result"], refused["error"]) == (told[0]["error"], told[0]["text"]) and refused["report"] is None


def test_an_event_that_cannot_be_written_is_a_warning(saves: Saves, worlds: Any, tmp_path: Path) -> None:
    """The load is as it was."""
    folder = str(saves(SAVED, MODEL)[0])
    held = worlds[2].run("load", run=RUN, model=MODEL, folder=folder, reshard={"events": str(tmp_path)})
    plain = worlds[2].run("load", run=RUN, model=MODEL, folder=folder)
    assert_same(held, plain)


def test_a_named_pipe_that_nobody_reads_is_waited_for_by_no_load(tmp_path: Path) -> None:
    """Whoever collected the events has gone; who is there is told."""
    file = tmp_path / "events"
    os.mkfifo(file)

    def load() -> None:
        with watching.watched("deepspeed", "checkpoints", watching.Asked(events=str(file))):
            pass

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(30)
    assert not loading.is_alive()
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    load()
    assert json.loads(os.read(reader, 10_000))["result"] == "loaded"
    os.close(reader)


def test_spans(saves: Saves, worlds: Any, tmp_path: Path) -> None:
    folder = str(saves(SAVED, MODEL)[0])
    told = worlds[2].run("watching_jobs.load_with_spans", run=RUN, model=MODEL, folder=folder)
    assert told[1]["spans"] == []  # rank 0 tells
    *phases, whole = told[0]["spans"]
    assert [span["name"] for span in phases] == [f"ds_reshard.{name}" for name in ("prepare", "read", "resume")]
    assert {span["inside"] for span in phases} == {whole["id"]} and whole["name"] == "ds_reshard.load"
    assert phases[1]["attributes"]["ds_reshard.bytes"] > 0 and whole["attributes"]["ds_reshard.checkpoint"] == folder
    assert all(whole["start"] <= span["start"] <= span["end"] <= whole["end"] for span in phases)
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    next(damaged.glob("global_step3/*optim_states.pt")).unlink()
    given = {"run": RUN, "model": MODEL, "folder": str(damaged), "damaged": True}
    told = worlds[2].run("watching_jobs.load_with_spans", **given)
    assert told[0]["error"] and told[0]["spans"][-1]["status"] == "ERROR"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_slow_load_shows_how_far_all_ranks_are(saves: Saves, worlds: Any, terminal: bool) -> None:
    """One line that is rewritten on a terminal, lines in a log; of rank 0 alone; no thread is left."""
    folder = str(saves(SAVED, MODEL)[0])
    given = {"run": RUN, "model": MODEL, "folder": folder, "reshard": {"reshard": {"threads": 1}}}
    first, second = worlds[2].run("watching_jobs.load_slowly", terminal=terminal, **given)
    lines = re.findall(r"loading \S+: \d+ of \d+ MiB read, \d+ MiB/s, (?:\d+ s left|nothing yet)", first["shown"])
    assert lines and ("\r" in first["shown"]) is terminal, first["shown"]
    assert first["shown"].count(f"ds_reshard: loaded {folder}/global_step3 (ZeRO ") == 1
    assert "MiB" not in second["shown"] and "loaded" not in second["shown"]
    assert "ds-reshard-progress" not in first["threads"] + second["threads"]
    assert_same([first["held"], second["held"]], worlds[2].run("load", run=RUN, model=MODEL, folder=folder))


def test_progress_off_and_a_store_that_is_gone(saves: Saves, worlds: Any) -> None:
    folder = str(saves(SAVED, MODEL)[0])
    given = {"run": RUN, "model": MODEL, "folder": folder, "terminal": True}
    off = {"progress": "off", "reshard": {"threads": 1}}
    assert "MiB/s" not in worlds[2].run("watching_jobs.load_slowly", reshard=off, **given)[0]["shown"]
    on = {"reshard": {"threads": 1}}
    lost = worlds[2].run("watching_jobs.load_slowly", reshard=on, lost=True, **given)
    assert "MiB read by rank 0, " in lost[0]["shown"]


def test_what_is_asked(tmp_path: Path) -> None:
    """The JSON before what is asked of all hosts; any other value is a ConfigError that names it."""
    for section in (
        {"progress": "on"},
        {"progress": 3},
        {"events": ""},
        {"events": 3},
        {"timeout_s": 0},
        {"timeout_s": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(section))):
            parse_settings({"ds_reshard": section})
        with pytest.raises(ConfigError, match=next(iter(section))):
            ask_settings(json.dumps(section), place="DS_RESHARD_SETTINGS")
    try:
        ask_settings('{"progress": "off", "events": "all.jsonl"}', place="DS_RESHARD_SETTINGS")
        assert watching.asked() == watching.Asked(progress="off", events="all.jsonl")
        assert watching.asked("auto", "own.jsonl") == watching.Asked(progress="auto", events="own.jsonl")
    finally:
        watching.ask(None, None)
        watching._FOR_ALL.clear()
    assert watching.asked() == watching.Asked()


def test_events_of_a_folder_of_torch(tmp_path: Path) -> None:
    """One process, torch.distributed.checkpoint's own load with the hooks of FSDP on; a fresh start has no event."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ds_reshard

    state = {"weight": torch.arange(6.0)}
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    file = tmp_path / "events.jsonl"
    watching.ask(None, str(file))
    try:
        with ds_reshard.install("fsdp"):
            dcp.load(state, checkpoint_id=str(tmp_path / "saved"))
        with watching.watched("nanotron", None):
            pass
    finally:
        watching._FOR_ALL.clear()
    (told,) = _events(file)
    assert (told["host"], told["result"], told["checkpoint"]) == ("fsdp", "loaded", str(tmp_path / "saved"))


def test_events_of_nanotron(worlds: Any, tmp_path: Path) -> None:
    """A trainer that resumes leaves and says one line, one that begins none (a synthetic stand-in of nanotron)."""
    folder, file = write(Topology(dp=2), tmp_path / "saved"), tmp_path / "events.jsonl"
    for found in (str(folder), None):
        (shown,) = worlds[1].run("watching_jobs.resume_nanotron", file=str(file), run=Topology(), folder=found)
        assert (f"ds_reshard: loaded {folder}/7 into this run's topology" in shown) is (found is not None)
    (told,) = _events(file)
    assert (told["host"], told["result"], told["loaded_by"]) == ("nanotron", "loaded", "ds_reshard")
    assert told["checkpoint"] == f"{folder}/7" and told["bytes"] > 0 and told["report"]["host"] == "nanotron"


def test_the_event_of_a_load_tells_no_secret(tmp_path: Path) -> None:
    """Neither the URL that was given nor an error of somebody else's that repeats it."""
    url, file = "S3://key:not-to-be-shown@bucket/run", tmp_path / "events.jsonl"
    with pytest.raises(ValueError), watching.watched("deepspeed", url, watching.Asked(events=str(file))):
        raise ValueError(f"no such place: {url}?sign=not-to-be-shown")
    (told,) = _events(file)
    assert (told["checkpoint"], told["error"]) == ("S3://bucket/run", "no such place: S3://bucket/run")
