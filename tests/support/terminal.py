"""A process on a terminal of its own."""

import fcntl
import os
import pty
import struct
import subprocess
import termios


def run_on_terminal(command: list[str], typed: bytes = b"", **options) -> tuple[int, str]:
    """The exit code of a command, and what it shows on a terminal of 40 x 120 on which `typed` was typed."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    child = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, **options)
    os.close(side)
    os.write(terminal, typed)
    seen = b""
    while True:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
    return child.wait(), seen.decode()
