"""What `make docs` adds to the pages of docs/: those that lie elsewhere, and a reference made of the docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import ds_reshard

# Pages of the site that are files elsewhere, with the folder that their links begin in.
ELSEWHERE = {
    "index.md": "README.md",
    "measuring.md": "benchmarks/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for name, source in ELSEWHERE.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_inside(text, root / source, root)))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, *, page: object, config: MkDocsConfig, files: Files) -> str:
    root = Path(config.config_file_path).parent
    path = getattr(page, "file").src_uri  # noqa: B009  mkdocs' Page is not typed as such in a hook
    return markdown if path in ELSEWHERE else _inside(markdown, root / "docs" / path, root)


def _inside(text: str, source: Path, root: Path) -> str:
    """The text with links to what the site has; what it has not is named without a link."""

    def linked(match: re.Match[str]) -> str:
        image, told, name, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        if "://" in name or not name:
            return match.group(0)
        path = (source.parent / name).resolve()
        page = next((page for page, of in ELSEWHERE.items() if path == root / of), None)
        if page is None and path.is_relative_to(root / "docs"):
            page = path.relative_to(root / "docs").as_posix()
        if page is None:
            return "" if image else told
        return f"{image}[{told}]({page}{anchor})"

    return _LINK.sub(linked, text)


def reference() -> str:
    """Every exported name with its signature and docstring."""
    parts = ["# Reference", "", "What `import ds_reshard` offers; `ds-reshard COMMAND --help` tells each command."]
    for name in ds_reshard.__all__:
        value = getattr(ds_reshard, name)
        if not callable(value):
            continue
        signature = "" if inspect.isclass(value) and issubclass(value, Exception) else str(inspect.signature(value))
        parts += ["", f"## {name}", "", "```python", f"{name}{signature}", "```", "", inspect.getdoc(value) or ""]
    return "\n".join(parts) + "\n"
