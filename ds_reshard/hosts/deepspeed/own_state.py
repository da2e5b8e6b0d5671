"""A script that gives the engine's optimizer its state by itself, past `load_checkpoint`.

Rung 2 of the ladder (methods on classes): each of DeepSpeed's wrappers has a `load_state_dict` of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError, UnsupportedLayout
from ds_reshard.hooks import Call
from ds_reshard.hosts.deepspeed.resume_session import policy_of
from ds_reshard.hosts.deepspeed.settings import parse_settings
from ds_reshard.operations.watching import under_way
from ds_reshard.resume.policy_sources import asked_policy

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_MEND = "save by engine.save_checkpoint, and load by engine.load_checkpoint"


def load_state_dict(call: Call) -> object:
    """Load a state; raise an error if that drops a resume policy, or if shards are of another number of ranks.

    Not collective: ranks are given the same policy, and shards of one save. An engine that has trained goes back, and
    does not resume. Inside `load_checkpoint` both are that load's affair.
    """
    if under_way():
        return call()
    optimizer, states = list(call.passed.values())[:2]
    _refuse_policy(optimizer, _engine_of(optimizer))
    reads = call.passed.get("load_optimizer_states", True) or call.passed.get("load_from_fp32_weights", False)
    if reads and not getattr(optimizer, "elastic_checkpoint", False):  # which merges shards of any number
        _refuse_other_shards(optimizer, states)
    return call()


def refuse_policy_of_engine(optimizer: object) -> None:
    """Raise the same error if torch's own optimizer is that of an engine, as at stage 0 in fp32."""
    engine = _engine_of(optimizer)
    if engine is not None:
        _refuse_policy(optimizer, engine)


def _refuse_policy(optimizer: object, engine: DeepSpeedEngine | None) -> None:
    if engine is not None and engine.global_steps:
        return
    policy = asked_policy()
    if engine is not None:
        policy = policy_of(engine, parse_settings(engine._config._param_dict), module_only=False)
    if not policy.is_default:
        what = f"cannot be applied: the script gives {type(optimizer).__name__} its state past engine.load_checkpoint"
        raise ConfigError.of(", ".join(policy.asked.values()), what, mend=f"{_MEND}; or leave it out")


def _engine_of(optimizer: object) -> DeepSpeedEngine | None:
    """The engine of an optimizer, which has no way back to it; one that has loaded nothing is noted nowhere."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    engines = (one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine))
    return next((engine for engine in engines if getattr(engine, "optimizer", None) is optimizer), None)


def _refuse_other_shards(optimizer: object, states: object) -> None:
    """DeepSpeed takes as much of a shard as fits, and says nothing (`_get_padded_tensor`, stage_1_and_2.py, 0.19.8)."""
    shards: Iterable[object] = states.values() if isinstance(states, Mapping) else ()
    shards = states if isinstance(states, list | tuple) else shards
    live = _counts(getattr(optimizer, "partition_count", None))
    for shard in shards:
        saved = _counts(shard.get("partition_count")) if isinstance(shard, Mapping) else ()
        if live and saved and saved != live:
            where, what = f"{type(optimizer).__name__}.load_state_dict", "is given shards of another number of ranks"
            raise UnsupportedLayout.of(where, what, f"{max(live)} ranks", f"{max(saved)}", mend=_MEND)


def _counts(said: object) -> tuple[int, ...]:
    """Of how many ranks the flat buffers are: a number for each at stages 1 and 2, and one for all at stage 3."""
    found = said if isinstance(said, list | tuple) else [said]
    return tuple(one for one in found if isinstance(one, int))
