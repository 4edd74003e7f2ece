"""Terminals: raw mode and back, sizes, detaching and coming back."""

import os
import signal
import termios

from tests.egress import room

ECHO = termios.ECHO | termios.ICANON


def modes(terminal):
    return termios.tcgetattr(terminal.master)[3] & ECHO


def test_a_command_without_tty_reads_the_terminal_by_lines(cloche, on_terminal):
    terminal = on_terminal(
        cloche, "run", "--", "sh", "-c", "echo ready; read x; echo got $x; test -t 0 || echo no terminal"
    )
    terminal.read_until(b"ready\r\n")
    assert modes(terminal) == ECHO
    terminal.type(b"word\n")
    terminal.read_until(b"got word\r\nno terminal\r\n")
    assert terminal.wait() == 0


def test_tty_gives_the_command_a_terminal_of_our_size_and_ours_comes_back(cloche, on_terminal):
    resized = 'until [ "$(stty size)" = "40 120" ]; do sleep 0.01; done; echo resized'
    script = f"stty size; echo $TERM; echo ready; {resized}; read x; echo got $x; exit 4"
    terminal = on_terminal(cloche, "run", "--tty", "--", "sh", "-c", script)
    shown = terminal.read_until(b"ready\r\n")
    assert b"30 100\r\nxterm-256color\r\n" in shown
    assert modes(terminal) == 0, "raw while it runs"
    termios.tcsetwinsize(terminal.master, (40, 120))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.read_until(b"resized\r\n")
    terminal.type(b"word\r")
    terminal.read_until(b"got word\r\n")
    assert terminal.wait() == 4
    assert modes(terminal) == ECHO


def test_ctrl_c_goes_through_the_terminal_inside(cloche, on_terminal):
    terminal = on_terminal(
        cloche,
        "run",
        "--tty",
        "--",
        "sh",
        "-c",
        "trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 1; done",
    )
    terminal.read_until(b"ready\r\n")
    terminal.type(b"\x03")
    terminal.read_until(b"interrupted\r\n")
    assert terminal.wait() == 5
    assert modes(terminal) == ECHO


def test_the_terminal_comes_back_when_the_client_is_terminated(cloche, on_terminal):
    terminal = on_terminal(cloche, "run", "--tty", "--", "sh", "-c", "echo ready; exec sleep 1000")
    terminal.read_until(b"ready\r\n")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait() == 143
    assert modes(terminal) == ECHO


def test_the_terminal_comes_back_when_the_keeper_dies(kept, on_terminal):
    terminal = on_terminal(kept, "run", "--tty", "--", "sh", "-c", "echo ready; exec sleep 1000")
    terminal.read_until(b"ready\r\n")
    kept.keeper.kill()
    terminal.read_until(b"the keeper ended while the command ran")
    assert terminal.wait() == 125
    assert modes(terminal) == ECHO


def test_tty_without_a_terminal_of_ours(cloche):
    ran = cloche("run", "--tty", "--", "sh", "-c", "test -t 0 && test -t 1 && stty size")
    assert (ran.returncode, ran.stdout) == (0, b"24 80\r\n")


def attach_words(terminal):
    terminal.read_until(b"come back with: cloche ")
    return terminal.read_until(b"\r\n").decode().split()


def test_a_shell_is_detached_and_taken_up_again(kept, on_terminal):
    kept("create", "--name", "one")
    shell = on_terminal(kept, "shell", "one")
    shell.type(b"echo $((40 + 2)) > answer; echo mar''ked\r")
    shell.read_until(b"marked\r\n")
    shell.type(b"\x10\x11")
    words = attach_words(shell)
    assert shell.wait() == 0
    assert modes(shell) == ECHO
    again = on_terminal(kept, *words)
    again.read_until(b"marked\r\n")
    again.type(b"cat answer; exit 6\r")
    again.read_until(b"42\r\n")
    assert again.wait() == 6


def test_ctrl_p_alone_reaches_the_shell(kept, on_terminal):
    kept("create", "--name", "one")
    shell = on_terminal(
        kept, "shell", "one", "--", "sh", "-c", "stty raw -echo; echo ready; head -c 2 | od -An -c; echo end"
    )
    shell.read_until(b"ready")
    shell.type(b"\x10")
    shell.type(b"x")
    assert b"020   x" in shell.read_until(b"end")
    assert shell.wait() == 0


def test_a_shell_of_its_own_ends_with_it_unless_it_is_detached(kept, on_terminal, until):
    first = on_terminal(kept, "shell")
    first.type(b"exit 3\r")
    assert first.wait() == 3
    until(lambda: kept("list", "--json").stdout == b"[]\n")
    second = on_terminal(kept, "shell")
    second.type(b"echo mar''ked\r")
    second.read_until(b"marked\r\n")
    second.type(b"\x10\x11")
    words = attach_words(second)
    assert second.wait() == 0
    assert kept("exec", words[1], "--", "echo", "there").stdout == b"there\n"


def test_tables_fit_the_terminal_and_errors_have_words_without_colour(kept, on_terminal):
    kept("create", "--name", "a" * 63)
    listing = on_terminal(kept, "list", columns=80)
    shown = listing.read_until(b"running")
    assert listing.wait() == 0
    lines = (shown + listing.seen).decode().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" in lines[1]
    wrong = on_terminal(kept, "info", "nobody")
    assert b"cloche: error: there is no sandbox 'nobody'" in wrong.read_until(b"'nobody'")
    assert wrong.wait() == 125


def test_the_person_at_the_terminal_is_asked(kept, on_terminal):
    with room.serving() as server:
        led = f"new.test:80:{server.address}"
        command = [
            "run",
            "--ask",
            "--resolve",
            led,
            "--",
            "sh",
            "-c",
            "curl -sS http://new.test/$0; read x; echo got $x",
        ]
        terminal = on_terminal(kept, *command, "1")
        terminal.read_until(b"[N]o? ")
        terminal.type(b"no\n")
        terminal.read_until(b"somebody who was asked refused it")
        terminal.type(b"on\n")
        terminal.read_until(b"got on\r\n")
        assert terminal.wait() == 0
        assert server.connections == 0
        terminal = on_terminal(kept, *command, "2")
        assert b"new.test:80" in terminal.read_until(b"[N]o? ")
        terminal.type(b"once\n")
        terminal.read_until(b"hello from /2\r\n")
        terminal.type(b"on\n")
        assert terminal.wait() == 0
        assert server.connections == 1
    assert kept("list").stdout == b""


def test_a_person_is_asked_while_a_terminal_inside_is_raw(kept, on_terminal):
    with room.serving() as server:
        led = f"new.test:80:{server.address}"
        script = "curl -sS http://new.test/3; stty -icanon; head -c 1; echo; echo end"
        terminal = on_terminal(kept, "run", "--ask", "--tty", "--resolve", led, "--", "sh", "-c", script)
        terminal.read_until(b"[N]o? ")
        assert modes(terminal) == ECHO, "as it was, to type the answer"
        terminal.type(b"s\n")
        terminal.read_until(b"hello from /3")
        assert modes(terminal) == 0
        terminal.type(b"x")
        terminal.read_until(b"end\r\n")
        assert terminal.wait() == 0
    assert modes(terminal) == ECHO
