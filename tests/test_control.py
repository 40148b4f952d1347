"""Budgets that another process asks for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny import batch, build, compressed, gradients, loss_of, nothing_held

from daf_hf import control
from daf_hf.cli import main
from daf_hf.control import ControlError, ask

MB = 1e6


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch):
    """A folder of our own, and a listener of our own in it."""
    folder = tmp_path_factory.mktemp("c") / "d"
    monkeypatch.setattr(control, "_folder", lambda user: folder)
    monkeypatch.setattr(control, "_listener", None)
    yield folder
    if control._listener is not None:
        control._listener.close()


def test_another_process_changes_the_budget_in_mid_step(capsys):
    model, inputs = build("bert"), batch("bert")
    daf, compressor = compressed(model, 0.2)
    with daf:
        loss = loss_of(model(**inputs))
        before = compressor.held_bytes()
        assert main(["budget", str(os.getpid()), "0.16"]) == 0
        assert compressor.held_bytes() <= 0.16 * MB < before
    assert "budget 0.2 -> 0.16 MB" in capsys.readouterr().out
    loss.backward()
    assert nothing_held(compressor)


def test_what_is_asked_while_the_lock_is_held_waits():
    model = build("bert")
    daf, compressor = compressed(model, 0.3)
    with daf, ThreadPoolExecutor(1) as threads:
        with compressor.lock:
            answer = threads.submit(ask, os.getpid(), "0.2")
            time.sleep(0.1)
            assert not answer.done() and compressor.arena.limit_bytes == 0.3 * MB
        assert "0.2 MB" in answer.result()


@pytest.fixture
def training():
    """Enters a block that compresses another model, each time."""
    models = []

    def block():
        models.append(build("bert"))
        return compressed(models[-1], 0.3)

    return block


@pytest.mark.parametrize("mb", ["-1", "much"])
def test_a_bad_budget_is_refused_on_both_sides(mb, capsys, training):
    daf, compressor = training()
    with daf:
        assert main(["budget", str(os.getpid()), mb]) == 1
        assert f"budget_mb='{mb}'" in capsys.readouterr().err
        with pytest.raises(ControlError, match=f"budget_mb='{mb}'"):
            ask(os.getpid(), mb)
        assert compressor.arena.limit_bytes == 0.3 * MB


def test_who_does_not_train_says_so(capsys, training):
    with pytest.raises(ControlError, match="does not train under daf_hf"):
        ask(os.getpid(), "1")
    daf, _ = training()
    with daf:
        pass
    with pytest.raises(ControlError, match="trains nothing"):
        ask(os.getpid(), "1")
    assert main(["budget", "999999999", "1"]) == 1
    assert "there is no process 999999999" in capsys.readouterr().err


def test_the_answer_says_why_it_is_not_what_was_asked(bert_model, bert_batch):
    daf, compressor = compressed(bert_model, 0.3)
    with daf:
        gradients(bert_model, bert_batch, daf)
        daf.step()
        answer = ask(os.getpid(), "0.001")
        assert "0.001 is below the least that would do" in answer
        assert 0.001 * MB < compressor.arena.limit_bytes < 0.3 * MB
        assert "the next forward pass chooses" in ask(os.getpid(), "recommended")
        assert ask(os.getpid(), "0.25").endswith("0.25 MB")


def test_what_killed_processes_left_is_cleared_and_nothing_else(folder):
    folder.mkdir(mode=0o700)
    dead, alive = folder / "999999999.sock", folder / "999999998.sock"
    with socket.socket(socket.AF_UNIX) as there, socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(dead))  # nobody listens
        there.bind(str(alive))
        there.listen()
        control._clear(folder)
    assert not dead.exists() and alive.exists()


def test_two_models_are_not_told_apart(training):
    first, _ = training()
    second, _ = training()
    with first, second, pytest.raises(ControlError, match="trains 2 models"):
        ask(os.getpid(), "1")


def test_who_leaves_in_between_does_no_harm(folder, training):
    daf, _ = training()
    with daf:
        for said in (b"", b"0.", b"\xff\n", b"x" * 10_000):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(folder / f"{os.getpid()}.sock"))
                connection.sendall(said)
        assert "0.25 MB" in ask(os.getpid(), "0.25")


def test_a_folder_that_others_may_enter_is_not_used(folder, caplog, training):
    caplog.set_level("INFO", "daf_hf")
    folder.mkdir(mode=0o755)
    with training()[0]:
        assert not list(folder.iterdir())
    assert "no process can ask" in caplog.text


def test_the_socket_ends_with_the_process_and_a_stale_one_is_no_obstacle(folder):
    code = (
        "import sys, pathlib; from daf_hf import control\n"
        f"control._folder = lambda user: pathlib.Path({str(folder)!r})\n"
        "class Budget:\n"
        "    installed, undecided, limit_bytes, asked_bytes = True, False, 3e6, 3e6\n"
        "    def set(self, mb, cause): self.limit_bytes = self.asked_bytes = float(mb) * 1e6\n"
        "budget = Budget(); control.listen(budget); print('there', flush=True)\n"
        "sys.stdin.read()\n"
    )

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        assert process.stdout.readline() == "there\n"
        return process

    process = start()
    assert "budget 3 -> 2 MB" in ask(process.pid, "2")
    process.communicate("")
    assert not list(folder.iterdir())
    process = start()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with pytest.raises(ControlError, match=r"does not train|no process"):
        ask(process.pid, "2")
    assert [path.name for path in folder.iterdir()] == [f"{process.pid}.sock"]


def test_a_forked_child_does_not_answer_for_its_parent(training):
    daf, _ = training()
    with daf:
        ask(os.getpid(), "0.29")
        child = os.fork()
        if not child:
            os._exit(0 if control._listener is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert "0.28 MB" in ask(os.getpid(), "0.28")


def test_who_says_nothing_does_not_keep_others_waiting(monkeypatch, training):
    monkeypatch.setattr(control, "LISTENING", 0.1)
    daf, _ = training()
    with daf:
        path = control._folder(os.getuid()) / f"{os.getpid()}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(str(path))
            monkeypatch.setattr(control, "TIMEOUT", 5)
            assert "0.2 MB" in ask(os.getpid(), "0.2")
