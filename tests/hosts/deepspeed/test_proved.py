"""`"verify": "fingerprint"`: a load compares what lies in the engine with what was read, before training goes on."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same, gathered
from saves import Saves

from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import fingerprint

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)


def proved(worlds: Any, run: Run, model: Model, folder: Any, **more: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = worlds[run.dp].run(
        "fingerprint_jobs.load_proved", run=run, model=model, folder=str(folder), **more
    )
    assert len({(rank["error"], rank.get("text")) for rank in told}) == 1, "ranks disagree"
    return told


LOADS = (
    (Run(1, 2), Run(3, 3), MODEL),
    (Run(3, 3, options={"sub_group_size": 60}), Run(1, 2), MODEL),
    (Run(1, 2), Run(1, 2), MODEL),
    (Run(3, 2), Run(3, 2), Model(groups=2, optimizer="amsgrad")),
    (Run(2, 3, options={"round_robin_gradients": True}), Run("bf16", 2), Model(optimizer="nadam", empty=True)),
    (Run("bf16", 2), Run(2, 3, options={"parameter_alignment": True}), Model(optimizer="sgd", groups=2)),
    (Run(0, 2), Run(2, 3), Model(groups=2)),
    (Run(2, 2, "fp32"), Run(0, 1, "fp32"), Model(groups=2)),
    (Run(3, 2), Run(0, 2), Model(optimizer="adagrad")),
    (Run(2, 2), Run(2, 1, options={"offload_optimizer": {"device": "cpu"}}), Model(groups=2)),
)


@pytest.mark.parametrize(("source", "target", "model"), LOADS, ids=lambda value: str(value)[:40])
def test_what_is_proved_is_what_the_files_hold(
    worlds: Any, saves: Saves, source: Run, target: Run, model: Model
) -> None:
    """Every rank has the fingerprints that the saving run's memory had, and those of `ds-reshard fingerprint`.

    Masters, states and weights of the whole engine; the unchanged layout is read directly, as it could not be proved
    otherwise. What the ranks hold is compared bit for bit besides.
    """
    folder, saved = saves(source, model)
    loaded = proved(worlds, target, model, folder)
    truth = {key: str(fingerprint_of(tensor)) for key, tensor in gathered(saved).items()}
    weights = {(name, "weight"): str(fingerprint_of(t.contiguous())) for name, t in saved[0]["weights"].items()}
    files = {(t.name, t.kind): t.fingerprint for t in fingerprint(str(folder)).tensors}
    for rank in loaded:
        assert truth.items() <= rank["proved"].items()
        assert rank["proved"].items() <= (truth | weights).items()
        assert all(files[key] == number for key, number in rank["proved"].items() if key in files)
        assert rank["proved"] == loaded[0]["proved"]
    number, unproved = len(loaded[0]["proved"]), loaded[0]["unproved"]
    assert loaded[0]["row"] == f"{number} tensors proved" + (f", {unproved} not" if unproved else "")
    assert_same(saved, [rank["contents"] for rank in loaded])


HARMS = {
    "one sign": "exp_avg",
    "two elements swapped": "fp32",
    "a range zeroed": "exp_avg_sq",
    "shifted": "exp_avg",
    "states exchanged": "exp_avg",
    "one bit of a weight": "first.weight[weight]",
    "moments exchanged by the plan": "exp_avg",
    "halves exchanged by the plan": "exp_avg",
    "copies lost by the plan": "exp_avg",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(("source", "target"), ((Run(1, 2), Run(2, 3)), (Run(1, 2), Run(3, 3))), ids=str)
def test_a_change_after_the_read_is_caught(worlds: Any, saves: Saves, source: Run, target: Run, harm: str) -> None:
    """On one rank of three: all three raise the same error, which names tensor and rank, and none may step.

    The files are sound, and so is every byte that was read: no checksum sees any of this.
    """
    folder, _ = saves(source, MODEL)
    told = proved(worlds, target, MODEL, folder, harm=harm)
    assert [(rank["error"], rank["step"]) for rank in told] == [("FingerprintMismatch", "EngineUnusable")] * 3
    assert any(HARMS[harm] in where for where in told[0]["where"])
    assert "of rank 2 is not what was read" in told[0]["text"]


def test_a_load_that_deepspeed_carries_out_is_said_not_to_be_proved(worlds: Any, saves: Saves) -> None:
    """DeepSpeed loads what only the saved layout can hold; the report says that nothing was proved."""
    model = Model(optimizer="odd_own")
    folder, _ = saves(Run(1, 2), model)
    loaded = proved(worlds, Run(1, 2), model, folder)
    assert loaded[0]["row"] == "no tensor was proved: DeepSpeed loaded it"
    assert loaded[0]["proved"] == {}


def test_weights_alone_are_proved(worlds: Any, saves: Saves) -> None:
    """Without the optimizer's states: masters are made from the weights, and only the weights are proved."""
    folder, _ = saves(Run(1, 2), MODEL)
    loaded = proved(worlds, Run(2, 3), MODEL, folder, load_optimizer_states=False)
    assert {kind for _, kind in loaded[0]["proved"]} == {"weight"}
    files = {(t.name, t.kind): t.fingerprint for t in fingerprint(str(folder)).tensors}
    assert loaded[0]["proved"].items() <= files.items()


def test_what_is_cast_is_proved_as_it_was_cast(worlds: Any, saves: Saves) -> None:
    """fp32 weights into a bf16 run: the fingerprints are those of the bf16 weights."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    loaded = proved(worlds, Run(2, 3), Model(groups=2), folder, load_optimizer_states=False)
    cast = {(n, "weight"): str(fingerprint_of(t.bfloat16().contiguous())) for n, t in saved[0]["weights"].items()}
    assert loaded[0]["proved"] == cast
    assert {(t.name, t.kind): t.fingerprint for t in fingerprint(str(folder)).tensors}.items().isdisjoint(cast.items())
