"""Budgets that another process asks for: ``daf-hf budget PID MB``.

A process that trains under a budget listens at a Unix socket, in a folder of its user's that nobody
else may enter. One line comes in, the budget in MB; one goes out.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import stat
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

logger = logging.getLogger("daf_hf")

TIMEOUT = 30.0
"""Seconds to wait for an answer."""

LISTENING = 1.0
"""Seconds to wait for what somebody says who has connected: others wait meanwhile."""

_LINE_BYTES = 4096


class ControlError(RuntimeError):
    """A process cannot be asked, or refuses; says why."""


class Controlled(Protocol):
    """What can be asked for another budget."""

    installed: bool
    undecided: bool

    @property
    def limit_bytes(self) -> float: ...

    @property
    def asked_bytes(self) -> float: ...

    def set(self, budget_mb: Any, cause: str) -> None: ...


def ask(pid: int, budget_mb: str) -> str:
    """Ask a process of this user's (root: of anybody's) to change its budget.

    Args:
        pid: of the process that trains.
        budget_mb: as for ``set_budget``.

    Returns:
        What came of it, in words.

    Raises:
        ControlError: there is no such process, it does not train under a budget, or it refused.
    """
    try:
        user = psutil.Process(pid).uids().real
    except psutil.NoSuchProcess:
        raise ControlError(f"there is no process {pid}") from None
    path = _folder(user) / f"{pid}.sock"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(str(path))
            connection.sendall(f"{budget_mb}\n".encode())
            answer = _line(connection)
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError(f"process {pid} does not train under daf_hf") from None
    except TimeoutError:
        raise ControlError(
            f"process {pid} has not answered within {TIMEOUT:g} s: it may be stopped, and does "
            "what was asked once it goes on"
        ) from None
    except OSError as error:
        raise ControlError(f"process {pid} cannot be asked at {path}: {error}") from None
    outcome, _, text = answer.partition(" ")
    if outcome != "ok":
        raise ControlError(f"process {pid}: {text or 'no answer'}")
    return f"process {pid}: {text}"


def listen(budget: Controlled) -> None:
    """Let other processes ask for this budget, as long as it is there and installed.

    Where no socket can be had, that is logged, and nobody can ask.
    """
    global _listener
    with _lock:
        if _listener is None:
            try:
                _listener = _Listener()
            except (OSError, AttributeError) as error:  # no Unix sockets, no folder
                logger.info("daf_hf: no process can ask for another budget (%s)", error)
                return
        _listener.budgets.add(budget)


class _Listener:
    """The socket of this process and the thread that answers there."""

    def __init__(self) -> None:
        self.budgets: weakref.WeakSet[Controlled] = weakref.WeakSet()
        folder = _folder(os.getuid())
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        _clear(folder)
        self._path, self._process = folder / f"{os.getpid()}.sock", os.getpid()
        self._path.unlink(missing_ok=True)  # of a process that had our number before
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self._path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        atexit.register(self.close)
        threading.Thread(target=self._serve, name="daf_hf-control", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
        if self._process == os.getpid():
            self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):  # whoever asked is gone
                    connection.settimeout(LISTENING)
                    connection.sendall(f"{self._answer(_line(connection))}\n".encode())

    def _answer(self, budget_mb: str) -> str:
        with _lock:  # others begin to train meanwhile
            budgets = [budget for budget in self.budgets if budget.installed]
        if len(budgets) != 1:
            several = f"trains {len(budgets)} models, each under a budget of its own"
            return f"error {several if budgets else 'trains nothing at the moment'}"
        (budget,) = budgets
        before = budget.limit_bytes
        try:
            budget.set(budget_mb, "another process asked for it")
        except (ValueError, OSError, RuntimeError) as error:  # also no memory to move pages in
            return f"error {error}"
        why = ""
        if budget.undecided:
            why = "; the next forward pass chooses"
        elif budget.limit_bytes > budget.asked_bytes:
            why = f"; {budget_mb} is below the least that would do"
        return f"ok budget {before / 1e6:.6g} -> {budget.limit_bytes / 1e6:.6g} MB{why}"


def _folder(user: int) -> Path:
    """Where the sockets of a user's processes are, whatever the environment of who asks."""
    runtime = Path(f"/run/user/{user}")
    return runtime / "daf_hf" if runtime.is_dir() else Path(f"/tmp/daf_hf-{user}")


def _check_private(folder: Path) -> None:
    """See that nobody else can enter, or has put something else there.

    Raises:
        PermissionError: naming the folder.
    """
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not private or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder that this user alone may enter")


def _clear(folder: Path) -> None:
    """Remove what processes left there that were killed."""
    for path in folder.glob("*.sock"):
        # By asking, as a number may be that of a process which another container's /proc shows.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _line(connection: socket.socket) -> str:
    """What the other side says, up to the end of the line."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _LINE_BYTES:
        more = connection.recv(_LINE_BYTES)
        if not more:
            break
        data += more
    return data.decode(errors="replace").strip()


def _forget_in_child() -> None:
    """A forked child has its parent's socket, but not the thread that answers there."""
    global _listener, _lock
    _lock = threading.Lock()
    if _listener is not None:
        _listener._socket.close()
        _listener = None


_lock = threading.Lock()
_listener: _Listener | None = None
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
