"""The DeepSpeed JSON that an accelerator holds: what is set in it for one prepare, and taken back before the next.

accelerate writes what it fills into the one dict that all engines of a process share: a second prepare finds the
first one's values where the user had written `"auto"`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_reshard.hosts.accelerate.finding import Fill
from ds_reshard.hosts.accelerate.values import params_of

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

Values = Mapping[tuple[str, str], object]

# By the plugin's config: what the user had written where one prepare wrote something else, and what that was.
_WRITTEN: weakref.WeakKeyDictionary[HfDeepSpeedConfig, tuple[Values, Values]] = weakref.WeakKeyDictionary()


def values(config: Mapping[str, object]) -> Values:
    """All parameters of the JSON's optimizer and scheduler."""
    return {
        (section, name): value
        for section in ("optimizer", "scheduler")
        for name, value in params_of(config, section).items()
    }


def fill(config: dict[str, dict[str, dict[str, object]]], fills: Iterable[Fill]) -> None:
    for one in fills:
        config[one.section]["params"] = {**(config[one.section].get("params") or {}), one.name: one.value}


def remember(plugin: DeepSpeedPlugin, before: Values) -> None:
    """Note what a prepare has written over what stood there `before`."""
    after = values(plugin.deepspeed_config)
    written = {key: value for key, value in after.items() if key not in before or before[key] != value}
    _WRITTEN[plugin.hf_ds_config] = ({key: before[key] for key in written if key in before}, written)


def restore(plugin: DeepSpeedPlugin) -> None:
    """Give the next prepare the user's JSON; the engine that was made keeps the dict it has."""
    before, written = _WRITTEN.pop(plugin.hf_ds_config, ({}, {}))
    present = values(plugin.deepspeed_config)
    untouched = [key for key, value in written.items() if key in present and present[key] == value]
    if not untouched:
        return
    config = copy.deepcopy(plugin.deepspeed_config)
    for section, name in untouched:
        params = config[section]["params"]
        if (section, name) in before:
            params[name] = before[section, name]
        else:
            del params[name]
    plugin.deepspeed_config = plugin.hf_ds_config.config = config
