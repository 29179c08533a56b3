"""Other processes. One imports torch, once, and forks for each program that it is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

SERVER = """
import json, os, sys, torch
from rowstep import storage

os.dup2(1, 2)
torch.set_num_threads(1)
for line in sys.stdin:
    program, *sys.argv[1:] = json.loads(line)
    if os.fork() == 0:
        exec(program)
        sys.exit()
    print(json.dumps({"ended with": os.wait()[1]}), flush=True)
"""


class Others:
    def __init__(self) -> None:
        # Python 3.12 warns of forks where there are threads, and NumPy has some.
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SERVER]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        self._server.communicate()

    def run(self, program: str, *arguments: object) -> str:
        """What a program prints, errors and warnings as well; or the number of the signal that ended it."""
        self.start(program, *arguments)
        return self.rest()

    def start(self, program: str, *arguments: object) -> None:
        assert self._server.stdin
        print(json.dumps([program, *map(str, arguments)]), file=self._server.stdin, flush=True)

    def line(self) -> str:
        assert self._server.stdout
        return self._server.stdout.readline()

    def kill(self, pid: int) -> str:
        """What it has printed until it was killed."""
        os.kill(pid, signal.SIGKILL)
        return self.rest()

    def rest(self) -> str:
        printed = ""
        while not (line := self.line()).startswith('{"ended with": '):
            assert line, "the server has ended"
            printed += line
        status: int = json.loads(line)["ended with"]
        assert os.WIFSIGNALED(status) or status == 0, printed
        return printed or (str(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else "")
