"""An interpreter that begins with the frameworks imported: a script that it runs costs a fork, not their imports.

It is a command like python's own, and `sys.executable` of what it runs: launchers start their ranks with it too. What
it runs has arguments, environment, folder, paths and streams of its own, and no engine; ds_reshard is imported and has
patched nothing. A test that is about the order of imports starts python itself.

    python interpreters.py serve SOCKET COMMAND    one that waits, and forks itself for each call of COMMAND
    python interpreters.py call SOCKET ARGUMENTS   what COMMAND does: passes on a call and ends as it ended
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

_LENGTH_NBYTES = 8


def call(address: str, arguments: list[str]) -> None:
    """Have a call run with the streams of this process, and end as it ends; when this process is killed, so is it."""
    asked = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(asked).to_bytes(_LENGTH_NBYTES, "big")], [0, 1, 2])
        server.sendall(asked)
        answer = server.recv(16)
    status = int(answer) if answer else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def serve(address: str, command: str) -> dict[str, object]:
    """Fork for every call until standard input is closed; returns in each fork, with what it is to run."""
    import selectors

    waiting = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        waiting.register(door, selectors.EVENT_READ, "call")
        waiting.register(0, selectors.EVENT_READ, "end")
        print("ready", flush=True)
        while True:
            for key, _ in waiting.select():
                if key.data == "end":
                    sys.exit()
                if key.data == "call":
                    asked = _accepted(door, waiting)
                    if asked is not None:
                        waiting.close()
                        return {**asked, "command": command}
                    continue
                client, child, ended = key.data
                if key.fileobj is client:  # which says nothing: it was killed
                    os.kill(child, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                for one in (client, ended):
                    waiting.unregister(one)
                os.close(ended)
                with client, contextlib.suppress(OSError):  # who asked may have been killed too
                    client.sendall(str(status).encode())
                break  # what else was ready may belong to the same call


def _accepted(door: socket.socket, waiting: object) -> dict[str, object] | None:
    """A call, in the fork that runs it; None in the server, which waits for the client and for the fork."""
    client, _ = door.accept()
    asked, nbytes, streams = b"", 0, []
    with contextlib.suppress(OSError), client.makefile("rb", buffering=0) as request:
        head, streams, _, _ = socket.recv_fds(client, _LENGTH_NBYTES, 3)
        nbytes = int.from_bytes(head, "big")
        while len(asked) < nbytes and (more := request.read(nbytes - len(asked))):
            asked += more
    if not nbytes or len(asked) < nbytes:  # who asked was killed meanwhile
        client.close()
        for stream in streams:
            os.close(stream)
        return None
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(child)
        for one in (client, ended):
            waiting.register(one, 1, (client, child, ended))
        return None
    from lifetimes import die_with_parent

    die_with_parent()
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    found: dict[str, object] = json.loads(asked)
    return found


def load() -> None:
    """What a first engine, torchrun and accelerate import; nothing here starts a thread."""
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    import gc

    import accelerate.commands.launch  # noqa: F401
    import deepspeed.launcher.launch
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.elastic.multiprocessing.errors
    import torch.distributed.launcher.api
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from lifetimes import to_huge_pages
    from package import import_with

    import_with("deepspeed", "accelerate", "transformers", "torch", "fsdp", "dcp")
    del sys.path[0]
    for name in ("deepspeed.launcher.launch", "accelerate.commands.launch"):
        del sys.modules[name]  # runpy warns of a module that is there before it is run
    torch.set_num_threads(1)
    gc.freeze()
    to_huge_pages()


def run(folder: str, environment: dict[str, str], arguments: list[str], command: str, paths: list[str]) -> None:
    """What python does with these arguments."""
    import runpy
    import types
    import warnings

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = command
    warned = list(filter(None, environment.get("PYTHONWARNINGS", "").split(",")))
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            warned.append(arguments.pop(0))
        else:
            sys.stdout.reconfigure(write_through=True)
    sys.warnoptions[:] = warned
    warnings._processoptions(warned)
    how = arguments.pop(0) if arguments[0] in ("-m", "-c") else ""
    what, *sys.argv[1:] = arguments
    first = {"-m": os.getcwd(), "-c": ""}.get(how, os.path.dirname(os.path.abspath(what)))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if how == "-m":
        sys.argv[0] = "-m"
        runpy._run_module_as_main(what)
        return
    sys.argv[0] = how or what
    text = what
    if not how:
        main.__file__ = what
        with open(what, "rb") as script:
            text = script.read()
    exec(compile(text, main.__file__ if not how else "<string>", "exec"), vars(main))


def end(status: int) -> None:
    """What python does at its end, but for taking apart all modules: in a fork each would have to be copied first."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "call":
        call(sys.argv[2], sys.argv[3:])
    base = sys.path[1:]
    load()
    told = serve(*sys.argv[2:])
    status = 0
    try:
        run(**told, paths=base)
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    end(status)
