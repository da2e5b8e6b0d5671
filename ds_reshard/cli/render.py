"""What the subcommands show in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.hooks import HookStatus

_STYLE = {
    "installed": "green",
    "available": "cyan",
    "vendored": "cyan",
    "refused": "bold red",
    "framework absent": "dim",
}


def render_hooks(statuses: Sequence[HookStatus], console: Console) -> None:
    """One row a patch: host and version, state, whether the version is tested, target, summary and reason."""
    table = Table(title="Hooks", title_justify="left", show_lines=True)
    for heading in ("host", "state", "tested", "patch"):
        table.add_column(heading, overflow="fold")
    for status in statuses:
        module, _, name = status.target.partition(":")
        patch = Text(f"{name}\n")
        patch.append(f"of {module}\n{status.summary}", style="dim")
        if status.reason:
            patch.append(f"\n{status.reason}", style=_STYLE[status.state])
        table.add_row(
            Text(f"{status.host} {status.version or ''}".rstrip()),
            Text(status.state, style=_STYLE[status.state]),
            Text("yes" if status.tested else "no"),
            patch,
        )
    console.print(table)


def render_inspection(inspection: object, console: Console) -> None:
    """Not drawn yet: `inspect --json` shows everything."""
    raise NotImplementedError("ds-reshard inspect has no terminal view yet; use --json")
