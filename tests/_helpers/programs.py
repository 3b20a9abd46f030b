"""Programs of Python that tests run, each in a process of its own that has imported torch: that takes longer than most
of them do. A process starts as a fork of one that has imported torch and nothing of this package.

Windows has no fork, and the forks of a process that has looked for a GPU cannot use it: there each imports torch anew.
"""

import faulthandler
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _helpers import parallel

# What much of torch imports, and what the first tangent of a process does.
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch._decomp.decompositions_for_jvp"])


def start_method():
    """Of multiprocessing, and of torch.multiprocessing.start_processes."""
    forks = "forkserver" in multiprocessing.get_all_start_methods() and not parallel.has_gpu()
    return "forkserver" if forks else "spawn"


def run_script(path, *words, **options):
    """As subprocess.run with `python path words...`, on one thread: what it returned, printed and said on stderr.

    options: cwd and environ, this process' own by default; timeout in seconds.
    """
    return _start(str(path), None, words, **options)


def run_code(code, *words, **options):
    """The same of `python -c code words...`."""
    return _start("-c", code, words, **options)


def run_ranks(path, count, *words, **options):
    """As torchrun on one machine with `path words...`: what each rank returned, printed and said. torchrun is a process
    more, and with it each imports torch anew.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    group = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    group["TORCHELASTIC_RUN_ID"] = "none"
    environ = options.pop("environ", os.environ)

    def run(rank):
        own = {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
        return run_script(path, *words, environ={**environ, **own}, **options)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def _start(path, code, words, cwd=None, environ=None, timeout=300):
    environ = dict(os.environ if environ is None else environ)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        argv = [path, *map(str, words)]
        given = argv, code, str(cwd or os.getcwd()), environ, _path_of_python(environ), outputs, timeout
        process = multiprocessing.get_context(start_method()).Process(target=_run, args=given)
        process.start()
        process.join(timeout + 30)  # it ends itself, if it can
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout)
        texts = [Path(output).read_text(encoding="utf-8") for output in outputs]
    return subprocess.CompletedProcess(argv, process.exitcode, *texts)


def _path_of_python(environ):
    """sys.path where nobody adds to it, as pytest does; "" is for the program's folder."""
    command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.split("\n")[:-1]


def _run(argv, code, cwd, environ, python_path, outputs, timeout):
    """In the new process. When its time is up it says where each thread stands, and ends with 1."""
    for number, output in enumerate(outputs, 1):
        file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    faulthandler.dump_traceback_later(timeout, exit=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [entry or os.path.dirname(argv[0]) for entry in python_path]  # "" again for code: the folder it is in
    sys.argv = argv
    import torch  # after its variables are set, where it is not there yet

    torch.set_num_threads(1)
    if code is None:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
