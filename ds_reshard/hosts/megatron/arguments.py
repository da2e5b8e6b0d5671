"""The seam of `parse_args`, and the policy as Megatron's arguments and every other place give it.

Rung 3 of the ladder: `megatron.training.arguments.parse_args` is what every entry point of every version ends
in; its `extra_args_provider` is Megatron's extension point, but only the entry script may give one.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from ds_reshard.resume import asked
from ds_reshard.resume.flags import FLAGS, add_arguments, given
from ds_reshard.resume.policy import Given, ResumePolicy

Provider = Callable[[ArgumentParser], ArgumentParser]


def parse_args(
    original: Callable[[Provider, bool], Namespace], extra_args_provider: Provider | None, ignore_unknown_args: bool
) -> Namespace:
    """Megatron's arguments, its own flags and those of the script adopted, and the resume flags that it has not.

    What was given is this process's policy from here on; what a YAML file says instead of the command line is met
    by `policy_of`. Raises ConfigError for flags that contradict each other or another place.
    """

    def with_resume_flags(parser: ArgumentParser) -> ArgumentParser:
        return add_arguments(extra_args_provider(parser) if extra_args_provider is not None else parser)

    return original(with_resume_flags, ignore_unknown_args)


def policy_of(arguments: Namespace) -> ResumePolicy:
    """What every place has asked for, and what a program has set in Megatron's arguments since they were parsed.

    Megatron itself sets `finetune` when it falls back to `--pretrained-checkpoint`: nobody has asked for that.
    """
    set_now = given(arguments, _DESTS)
    if getattr(arguments, "pretrained_checkpoint", None) is not None and not asked.asked_policy().finetune:
        values = {key: value for key, value in set_now.values.items() if key != "finetune"}
        set_now = Given(place=set_now.place, values=values, spelled=set_now.spelled)
    return asked.asked_policy(set_now)


_DESTS = {flag.dest: flag for flag in FLAGS}
