"""`make pictures`: what the commands show on a terminal, drawn from a real run of examples/08_trainer.py, in docs/.

Nothing is asked of anybody else by the pictures: they name fonts, and load none.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 112
TRAINER = ROOT / "examples" / "08_trainer.py"
CONFIG = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
OVERRIDE = "--override-opt-param-scheduler"
PICTURES = {
    "inspect": "ds-reshard inspect out/checkpoint-4",
    "preflight": f"ds-reshard preflight out/checkpoint-4 --config ds_config.json --world 8 -- {OVERRIDE}",
    "refused": "ds-reshard preflight out/checkpoint-4 --config ds_config.json --world 7",
}
REPORT = (
    f"torchrun --nproc-per-node 1 train.py out --stage 3 --steps 6 --lr 1e-4 {OVERRIDE} --resume-report report.json"
)
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _ranks(2, folder, "out --stage 2 --steps 4 --lr 1e-3")
        (Path(folder) / "ds_config.json").write_text(json.dumps(CONFIG))
        for name, command in PICTURES.items():
            _draw(name, command, _terminal(command, folder))
        _ranks(1, folder, REPORT.partition("train.py ")[2])
        _draw("report", REPORT, _report(Path(folder) / "report.json"))


def _environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
    return {**os.environ, **quiet, "COLUMNS": str(WIDTH), "TERM": "xterm-256color", "PYTHONPATH": f"{paths}:."}


def _ranks(count: int, folder: str, arguments: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    subprocess.run([*launch, str(TRAINER), *shlex.split(arguments)], check=True, cwd=folder, env=_environment())


def _terminal(command: str, folder: str) -> Text:
    """What the command shows on a terminal; its errors too."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "ds_reshard", *shlex.split(command)[1:]]
    with subprocess.Popen(words, cwd=folder, env=_environment(), stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode in (0, 1), shown.decode()
    return Text.from_ansi(shown.decode().replace("\r\n", "\n"))


def _report(file: Path) -> Text:
    from ds_reshard.resume.report import ResumeReport, Row

    told = json.loads(file.read_text(encoding="utf-8"))
    rows = tuple(Row(**row) for row in told["rows"])
    report = ResumeReport(host=told["host"], checkpoint=told["checkpoint"], rows=rows, warnings=tuple(told["warnings"]))
    return Text(str(report))


def _draw(name: str, command: str, shown: Text) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {command}", style="bold"), soft_wrap=False)
        console.print(shown)
        svg = console.export_svg(title="", unique_id=name)
    (ROOT / "docs" / f"{name}.svg").write_text(_FONT.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
