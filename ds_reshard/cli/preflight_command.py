"""`ds-reshard preflight`: its arguments, and the forecast of a load, its verdict first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from ds_reshard.cli.arguments import Command, gigabytes, number, show, switch, text
from ds_reshard.cli.doctor import version_of
from ds_reshard.cli.render import line, printable, put, render_lines, size, table
from ds_reshard.errors import ConfigError, ReshardError, faults_of
from ds_reshard.operations import coming_run, read_config
from ds_reshard.operations.forecast import Forecast, with_folder
from ds_reshard.resume import policy_sources
from ds_reshard.resume.lr_preview import ComingRun

_STEPS = 5
_SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "sp": "sequence"}


def _preflight(arguments: argparse.Namespace) -> int:
    made = _forecast(arguments)
    show(arguments, made.to_json, lambda console: render_forecast(made, console))
    return 0 if made.loads else 1


def _forecast(arguments: argparse.Namespace) -> Forecast:
    if arguments.config is None:
        if arguments.flags is None:
            mend = "name the DeepSpeed JSON of the coming run: --config FILE; or Megatron-LM's command line: -- FLAGS"
            raise ConfigError(f"--config: a load is decided by checkpoint and config together; {mend}")
        made = _megatron(arguments, arguments.flags)
    else:
        made = _deepspeed(arguments)
    made = with_folder(made, arguments.checkpoint, tag=arguments.tag or made.tag, deep=arguments.deep)
    rates, notes = _rates(arguments)
    notes = (*made.notes, *notes)
    if arguments.trust:
        notes = (
            *notes,
            f'--trust: the run refuses it unless its own settings say so: "trust": {json.dumps(arguments.trust)}',
        )
    return replace(made, rates=rates, notes=notes, bandwidth=arguments.bandwidth * 1e9)


def _megatron(arguments: argparse.Namespace, flags: Sequence[str]) -> Forecast:
    given = ["--tag"] if arguments.tag is not None else []
    given += [f"--{name}" for name in _SIZES if getattr(arguments, name) > 1]
    given += ["--no-load-module-strict"] * arguments.no_load_module_strict
    if given:
        mend = "say it in its own flags, after --: --ckpt-step, --tensor-model-parallel-size, ..."
        raise ConfigError(f"{', '.join(given)}: is not asked of a run of Megatron-LM; {mend}")
    if arguments.model is not None:
        mend = "leave it out: the model is compared as far as the flags after -- tell its sizes"
        raise ConfigError(f"--model: Megatron-LM builds its model on the GPUs of a process group; {mend}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import megatron.training.arguments  # noqa: F401

        from ds_reshard.hosts.megatron.preflight import forecast
    except ImportError as error:
        mend = "run this in the job's own environment, or give a DeepSpeed JSON: --config FILE"
        raise ConfigError(f"Megatron-LM: what it makes of the flags is its own to say: {error}; {mend}") from error
    try:
        return forecast(arguments.checkpoint, flags, world=arguments.world, nodes=arguments.nodes)
    finally:
        policy_sources.forget()


def _deepspeed(arguments: argparse.Namespace) -> Forecast:
    config, flags = _trusting(read_config(arguments.config), arguments.trust), arguments.flags or ()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs from its import on
            import deepspeed  # noqa: F401

        from ds_reshard.hosts.deepspeed.coming import fill_from_flags, load_factory
        from ds_reshard.hosts.deepspeed.preflight import PlannedRun, forecast
    except ImportError as error:
        mend = "run this in the job's own environment"
        raise ConfigError(f"DeepSpeed: what it makes of the config is its own to say: {error}; {mend}") from error
    model = load_factory(arguments.model) if arguments.model is not None else None
    if model is not None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a script finds its neighbours; after all that is installed
    sizes = {name: getattr(arguments, name) for name in ("world", "nodes", *_SIZES)}
    strict = not arguments.no_load_module_strict
    _ask(flags)
    config = fill_from_flags(config, _values(flags))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed and the factory of a model may print
            run = PlannedRun(config=config, model=model, load_module_strict=strict, **sizes)
            return forecast(arguments.checkpoint, run, tag=arguments.tag)
    finally:
        policy_sources.forget()


def _values(flags: Sequence[str]) -> Mapping[str, object]:
    """The flags of a script by their names: numbers as such, and True where nothing follows one."""
    found: dict[str, object] = {}
    for flag, after in zip(flags, (*flags[1:], "--"), strict=False):
        name, given, value = flag.removeprefix("--").partition("=")
        if flag.startswith("--"):
            said = value if given else after if not after.startswith("--") else "true"
            with contextlib.suppress(ValueError):
                found[name.replace("-", "_")] = _value(said)
    return found


def _value(said: str) -> object:
    """What a flag says; ValueError for text. Python takes numbers that JSON does not, such as .1."""
    with contextlib.suppress(ValueError):
        return json.loads(said.lower())
    return float(said)


def _trusting(config: Mapping[str, object], classes: Sequence[str]) -> Mapping[str, object]:
    """The config, with these classes beside those that it trusts."""
    section = config.get("ds_reshard", {})
    trusted = section.get("trust", []) if isinstance(section, dict) else None
    if not classes or not isinstance(section, dict) or not isinstance(trusted, list):
        return config  # what is no section is named where it is read
    return {**config, "ds_reshard": {**section, "trust": [*trusted, *classes]}}


def _ask(flags: Sequence[str]) -> None:
    """The resume policy of the script's flags; those that are the script's own are passed over."""
    parser = argparse.ArgumentParser(prog="--", add_help=False, allow_abbrev=False)
    dests, adopted = policy_sources.define(parser)
    given, _ = parser.parse_known_args(list(flags))
    policy_sources.ask(policy_sources.given(given, dests, adopted=adopted))


def _rates(arguments: argparse.Namespace) -> tuple[ComingRun | None, tuple[str, ...]]:
    """What `lr` says of the first updates."""
    flags = arguments.flags if arguments.config is None else None  # beside a JSON they are the script's own
    try:
        version = version_of("deepspeed")
        made = coming_run(
            arguments.checkpoint, arguments.config, flags=flags, tag=arguments.tag, steps=_STEPS, version=version
        )
        return made, ()
    except ReshardError as error:
        return None, (f"learning rates are not foreseen: {faults_of(error)[0].line()}",)


def render_forecast(made: Forecast, console: Console) -> None:
    """The verdict, the reasons, what the load takes from where, the rates, the cost, and what is not known."""
    line(console, made.verdict, "bold green" if made.loads else "bold red")
    render_lines(made.faults, console, told=1)
    for fault in made.folder:
        line(console, f"this load does not meet: {fault.line()}", "yellow")
    if made.pickles:
        line(console, made.pickles)
    if made.report is not None:
        values = table("Values", "", "checkpoint", "this run", "used", "because of")
        for row in made.report.shown():
            values.add_row(*map(Text, map(printable, row)))
        put(console, values)
        for warning in made.report.warnings:
            line(console, warning, "yellow")
    if made.batch:
        batch = table("Batch", "", "checkpoint", "this run")
        for name, told in made.batch.items():
            batch.add_row(name, *("-" if value is None else str(value) for value in told))
        put(console, batch)
    if made.rates is not None:
        _render_rates(made.rates, console)
    if made.costs:
        _render_costs(made, console)
    for note in made.notes:
        line(console, f"note: {note}", "dim")


def _render_rates(rates: ComingRun, console: Console) -> None:
    for curve in rates.curves:
        for part, numbers in enumerate(rates.groups if curve.unknown is None else ()):
            told = ", ".join(f"{rate:.6g}" for rate in curve.rates[part])
            line(console, f"learning rate, param groups {', '.join(map(str, numbers))}: {curve.title}: {told}, ...")
    for why in dict.fromkeys(curve.unknown for curve in rates.curves if curve.unknown is not None):
        line(console, f"learning rate: not known: {why}", "yellow")


def _render_costs(made: Forecast, console: Console) -> None:
    costs = table("Cost", "rank", "reads", "files", "optimizer", "weights", "host memory", "GPU memory")
    for cost in made.costs:
        held = (cost.optimizer_nbytes, cost.weights_nbytes, *made.memory(cost))
        costs.add_row(str(cost.rank), size(cost.read_nbytes), str(len(cost.files)), *map(size, held))
    put(console, costs)
    line(
        console,
        f"a node of {-(-made.world // made.nodes)} ranks reads {size(made.node_nbytes)} of {made.node_files} files: "
        f"{made.seconds:.3g} s at {made.bandwidth / 1e9:g} GB/s",
    )


PREFLIGHT = Command(
    "preflight",
    _preflight,
    "whether a checkpoint will load into a run that is not started yet, and what it will do; status 0 or 1",
    "checkpoints --config ds_config.json --world 384 --nodes 48",
    "checkpoint --tag --config --trust",
    {
        "--world": number("how many ranks it will have", required=True),
        "--nodes": number("on so many nodes (default: %(default)s)", default=1),
        **{f"--{name}": number(f"{what}-parallel size (default: 1)", default=1) for name, what in _SIZES.items()},
        "--model": text(
            "MODULE:FUNCTION",
            "imports it, and calls it on torch's meta device; gives the model, or model and optimizer, to be compared",
        ),
        "--no-load-module-strict": switch(
            "the script loads with load_module_strict=False, as transformers' Trainer does a model of PEFT"
        ),
        "--deep": switch("read every byte, too, and look at all values"),
        "--bandwidth": gigabytes("gigabytes a second that a node reads (default: %(default)s)"),
    },
    usage="%(prog)s CKPT --world N [--config FILE] [OPTION ...] [-- SCRIPT-FLAG ... | MEGATRON-FLAG ...]",
)
