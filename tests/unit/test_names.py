"""The names of a DeepSpeed folder's files say what kind of checkpoint it is, and what is none of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_reshard.formats.zero.names import Listing, read_listing

FOLDER = "ckpt/step"


def listing(*names: str, folders: tuple[str, ...] = ()) -> Listing:
    return read_listing(FOLDER, {name: 10 + i for i, name in enumerate(names)}, frozenset(folders))


def model(dp_rank: int | None = None, mp_rank: int = 0) -> str:
    prefix = "" if dp_rank is None else f"zero_pp_rank_{dp_rank}_"
    return f"{prefix}mp_rank_{mp_rank:02}_model_states.pt"


def optim(dp_rank: int, prefix: str = "", mp_rank: int = 0) -> str:
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02}_optim_states.pt"


# name: (files, model, optim, partitioned, prefix)
SOUND = {
    "stage 0": ([model()], {0: model()}, {}, False, ""),
    "stage 1 of fp16": ([model(), optim(0), optim(1)], {0: model()}, {0: optim(0), 1: optim(1)}, False, ""),
    "BF16_Optimizer": (
        [model(), optim(0, "bf16_"), optim(1, "bf16_")],
        {0: model()},
        {0: optim(0, "bf16_"), 1: optim(1, "bf16_")},
        False,
        "bf16_",
    ),
    "stage 3, twelve ranks": (
        [*(model(r) for r in range(12)), *(optim(r, "bf16_") for r in range(12))],
        {r: model(r) for r in range(12)},
        {r: optim(r, "bf16_") for r in range(12)},
        True,
        "bf16_",
    ),
    "without the underscore of old releases": (
        ["zero_pp_rank_0_mp_rank_00optim_states.pt"],
        {},
        {0: "zero_pp_rank_0_mp_rank_00optim_states.pt"},
        False,
        "",
    ),
    "others beside it": ([model(), "zero_to_fp32.py", "README.md", "latest"], {0: model()}, {}, False, ""),
    "pipeline": (["layer_00-model_states.pt", model()], {0: model()}, {}, False, ""),
    "pipeline with tensor ranks": (["layer_12-model_03-model_states.pt"], {}, {}, False, ""),
    "experts": (["layer_1_expert_7_mp_rank_00_model_states.pt", model()], {0: model()}, {}, False, ""),
    "tensor ranks of the model": ([model(), model(mp_rank=1)], {0: model()}, {}, False, ""),
    "tensor ranks of stage 3": ([model(0, 0), model(0, 1)], {0: model(0, 0)}, {}, True, ""),
    "tensor ranks of the optimizer": ([model(), optim(0, mp_rank=3)], {0: model()}, {}, False, ""),
    "not whole names": ([f"{model()}.tmp", f"x{optim(0)}", f"{optim(0)}\n"], {}, {}, False, ""),
    "nothing": ([], {}, {}, False, ""),
}


@pytest.mark.parametrize("files, models, optims, partitioned, prefix", SOUND.values(), ids=SOUND)
def test_files_are_sorted_into_what_zero_calls_them(files, models, optims, partitioned, prefix):
    found = listing(*files)
    assert (found.model, found.optim, found.partitioned_model, found.optim_prefix, found.faults) == (
        models,
        optims,
        partitioned,
        prefix,
        (),
    )
    assert found.nbytes == {name: 10 + i for i, name in enumerate(files)}


REFUSED = {
    "a name that DeepSpeed's pattern finds": (
        [model(), "mp_rank_xx_model_states.pt"],
        "CheckpointDamaged",
        "that DeepSpeed would load as part of this save",
    ),
    "layers on other axes": (["layer_12-slice_03-model_states.pt"], "UnsupportedLayout", "a grid with other axes"),
    "experts with tensor ranks": (
        ["layer_1_expert_7_mp_rank_01_model_states.pt"],
        "UnsupportedLayout",
        "mixture-of-experts",
    ),
    "experts of old releases": (["expert_7_mp_rank_00_model_states.pt"], "UnsupportedLayout", "mixture-of-experts"),
    "models of two saves": ([model(), model(0)], "CheckpointDamaged", "model files of two checkpoints"),
    "optimizers of two saves": (
        [model(), optim(0), optim(0, "bf16_")],
        "CheckpointDamaged",
        "optimizer files of two checkpoints",
    ),
}


@pytest.mark.parametrize("files, error, what", REFUSED.values(), ids=REFUSED)
def test_what_is_not_one_zero_checkpoint_is_named(files, error, what):
    """One fault that names the folder, what was found and what to do."""
    (found,) = listing(*files).faults
    assert (found.error, found.where) == (error, FOLDER)
    assert what in found.what
    assert found.mend


def test_many_foreign_files_are_one_fault():
    assert len(listing(*(f"layer_{i:02}-slice_00-model_states.pt" for i in range(40))).faults) == 1


def test_all_that_is_wrong_is_said():
    found = listing("layer_00-slice_00-model_states.pt", model(mp_rank=1), model(0), optim(0), optim(0, "bf16_"))
    assert [fault.error for fault in found.faults] == ["UnsupportedLayout", *["CheckpointDamaged"] * 2]


def test_each_column_of_the_grid_has_its_files():
    """The number after mp_rank_ is the column's; a layer's file has that of its tensor-parallel rank."""
    layer, expert = "layer_02-model_01-model_states.pt", "layer_1_expert_7_mp_rank_00_model_states.pt"
    found = listing(model(), model(mp_rank=1), optim(0, mp_rank=1), optim(1, mp_rank=1), layer, expert)
    assert {number: tuple(files) for number, files in found.columns.items()} == {
        0: ({0: model()}, {}),
        1: ({0: model(mp_rank=1)}, {0: optim(0, mp_rank=1), 1: optim(1, mp_rank=1)}),
    }
    assert (found.column(1).model, found.column(1).optim) == tuple(found.columns[1])
    assert (found.layers, found.experts) == ({(2, 1): layer}, {(1, 7): expert})


@pytest.mark.parametrize(
    ("files", "folders", "nvme", "universal"),
    [
        ([model(), optim(0)], [], False, False),
        ([model(), optim(0)], ["offloaded_tensors"], True, False),
        ([model()], ["zero"], False, True),
        ([model(), optim(0)], ["zero"], False, False),
    ],
)
def test_folders_beside_the_files_tell_of_other_layouts(files, folders, nvme, universal):
    found = listing(*files, folders=tuple(folders))
    assert (found.nvme, found.universal) == (nvme, universal)


@given(st.permutations([model(), model(0), optim(0), optim(1), optim(0, "bf16_"), "layer_00-model_states.pt"]))
def test_the_order_of_the_folder_does_not_matter(names):
    """Two ranks that list one folder say the same."""
    nbytes = dict.fromkeys(names, 1)
    assert read_listing(FOLDER, nbytes) == read_listing(FOLDER, dict(sorted(nbytes.items())))


def test_a_path_is_the_folder_and_the_name():
    assert listing(model()).path(model()) == "ckpt/step/mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    "names", [(optim(0), "zero_pp_rank_00_mp_rank_00_optim_states.pt"), (model(0), model(0).replace("k_0_", "k_00_"))]
)
def test_two_files_of_one_rank_are_a_fault(names):
    """DeepSpeed writes no leading zeros of a data-parallel rank: one of the two is not its own."""
    found = listing(*names)
    assert any(fault.error == "CheckpointDamaged" for fault in found.faults)
