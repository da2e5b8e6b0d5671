"""What acts in a checkpoint of Megatron-LM is refused before Megatron, or torch below it, unpickles anything."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import Failed
from releases import RELEASES, WITH_TRAINING, home
from stages import FORMATS, OVERRIDE

sys.path.insert(0, str(Path(__file__).parents[2] / "hostile"))
from payloads import ACTING, before, put_before

from ds_reshard.containers.pickle_table import ALLOWED

pytestmark = [pytest.mark.slow, pytest.mark.acts]


def _act(mark: Path) -> bytes:
    return ACTING["thrown away"][0](f"touch {mark}")


def into_file(name: str) -> Any:
    def run(folder: Path, mark: Path) -> str:
        put_before(next(folder.rglob(name)), _act(mark))
        return name

    return run


def into_directory(folder: Path, mark: Path) -> str:
    path = next(folder.rglob(".metadata"))
    path.write_bytes(before(path.read_bytes(), _act(mark)))
    return ".metadata"


def into_object(folder: Path, mark: Path, begins: str = "") -> str:
    """The archive of an object is exchanged; what the directory says of it is told anew."""
    place = next(folder.rglob(".metadata"))
    metadata = pickle.loads(place.read_bytes())
    objects = [one for one in metadata.storage_data if one.offset is None]
    index = next(one for one in objects if one.fqn.startswith(begins) and "rng_state" not in one.fqn)
    held = metadata.storage_data[index]
    path = place.parent / held.relative_path
    content = path.read_bytes()
    (folder / "one.pt").write_bytes(content[held.offset : held.offset + held.length])
    put_before(folder / "one.pt", _act(mark))
    made = (folder / "one.pt").read_bytes()
    (folder / "one.pt").unlink()
    path.write_bytes(content + made)
    metadata.storage_data[index] = type(held)(held.relative_path, len(content), len(made), None)
    place.write_bytes(pickle.dumps(metadata))
    return held.relative_path


def into_common(folder: Path, mark: Path) -> str:
    """A file of its own up to 0.18, an object of the directory in 0.19."""
    files = list(folder.rglob("common.pt"))
    return into_file("common.pt")(folder, mark) if files else into_object(folder, mark, "common_state")


HARMS = {
    "arguments and weights": ("torch-bf16", into_file("model_optim_rng.pt")),
    "states of the distributed optimizer": ("torch-sharded", into_file("distrib_optim.pt")),
    "common state": ("dist-bf16", into_common),
    "directory": ("dist-bf16", into_directory),
    "groups among the tensors": ("dist-sharded", into_object),
}


@pytest.mark.parametrize("release", WITH_TRAINING)
@pytest.mark.parametrize("harm", HARMS)
def test_a_training_resumes_from_nothing_that_acts(stages: Any, release: str, harm: str, tmp_path: Path) -> None:
    kind, into = HARMS[harm]
    folder = tmp_path / "saved"
    shutil.copytree(stages.first(release, FORMATS[kind]).folder, folder)
    file = into(folder, tmp_path / "ran")
    told = stages.refused(release, OVERRIDE, options=FORMATS[kind], folder=folder)
    assert told["error"] == "UnsafePickle" and file in told["message"] and "nothing was run" in told["message"]
    assert not (tmp_path / "ran").exists()


def test_each_name_of_the_table_is_one_of_a_release(releases: Any) -> None:
    """In the source of the module that is named; an enum may be imported there from its old place."""
    for release in RELEASES:
        assert releases[release]
    names = [(module, name) for module, name in ALLOWED if module.startswith("megatron.")]
    missing = set(names)
    for release in RELEASES:
        for module, name in names:
            path = home(release).joinpath(*module.split("."))
            for source in (path.with_suffix(".py"), path / "__init__.py"):
                if source.is_file() and re.search(rf"\b{name}\b", source.read_text()):
                    missing.discard((module, name))
    assert missing == set()


@pytest.mark.parametrize("release", WITH_TRAINING[-1:])
def test_arguments_are_not_taken_from_what_acts(stages: Any, release: str, tmp_path: Path) -> None:
    """`--use-checkpoint-args` opens a file before the ranks have joined."""
    folder = tmp_path / "saved"
    shutil.copytree(stages.first(release, FORMATS["torch-bf16"]).folder, folder)
    into_file("model_optim_rng.pt")(folder, tmp_path / "ran")
    told = stages.refused(release, "--use-checkpoint-args", options=FORMATS["torch-bf16"], folder=folder)
    assert told["error"] == "UnsafePickle" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("harm", [into_common, into_directory, into_object])
def test_a_loop_of_ones_own_loads_nothing_that_acts(releases: Any, release: str, harm: Any, tmp_path: Path) -> None:
    runner = releases[release]
    folder = tmp_path / "saved"
    runner.run("core_loops:loop", kind="sharded", steps=2, save=str(folder), sharded_files=True)
    runner.run("core_loops:loop", kind="sharded", steps=1, load=str(folder), sharded_files=True)
    file = harm(folder, tmp_path / "ran")
    with pytest.raises(Failed) as caught:
        runner.run("core_loops:loop", kind="sharded", steps=1, load=str(folder), sharded_files=True)
    told = caught.value.ranks[0]
    assert told["error"] == "UnsafePickle" and file in told["message"] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("release", RELEASES[-1:])
def test_states_of_a_loop_of_ones_own(releases: Any, release: str, tmp_path: Path) -> None:
    """`load_parameter_state` of the distributed optimizer opens a file itself."""
    runner = releases[release]
    folder = tmp_path / "saved"
    runner.run("core_loops:loop", kind="sharded", steps=2, save=str(folder))
    put_before(folder / "optimizer.pt", _act(tmp_path / "ran"))
    with pytest.raises(Failed) as caught:
        runner.run("core_loops:loop", kind="sharded", steps=1, load=str(folder))
    assert caught.value.error == "UnsafePickle" and not (tmp_path / "ran").exists()
