"""What can be seen of a running mcpx from outside: status, log, processes, descriptors, memory, files.

Shared by `faults.py` and `fuzz.py`. Nothing here changes anything; the socket is asked in the way of
`mcpx status --json`, because starting a program for every look would cost more than the looks are worth.
"""

import collections
import json
import os
import re
import socket
from pathlib import Path

from place import Failed

# A daemon that is stopped or starting answers late; one that says nothing for this long is not well.
STATUS_LIMIT_S = 20

# What mcpx writes when a mistake of its own was caught, and what Python writes when none was.
MISTAKES = re.compile(r"internal error|Traceback \(most recent call last\)")

# A daemon that somebody stopped has not crashed.
ORDERLY_END = "mcpx ends:"


def open_files(pid):
    """Number of descriptors of a process; 0 when it has gone."""
    try:
        return len(os.listdir("/proc/%d/fd" % pid))
    except OSError:
        return 0


def memory_kib(pid):
    """Resident memory in KiB; 0 when it has gone."""
    try:
        text = Path("/proc/%d/status" % pid).read_text()
    except OSError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+)", text)
    return int(found.group(1)) if found else 0


def cpu_seconds(pid):
    """Processor time that a process has used so far; 0.0 when it has gone."""
    try:
        fields = Path("/proc/%d/stat" % pid).read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid):
    """Whether a process lives; a zombie does not."""
    try:
        return Path("/proc/%d/stat" % pid).read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def held_by(pid):
    """What the descriptors of a process are of, and the ends of its sockets as far as they can be told."""
    try:
        sockets = Path("/proc/%d/net/unix" % pid).read_text().splitlines()
    except OSError:
        sockets = []
    paths = {row.split()[6]: " ".join(row.split()[5:6] + row.split()[7:]) for row in sockets[1:]}
    held = []
    for entry in Path("/proc/%d/fd" % pid).glob("*"):
        try:
            target = os.readlink(str(entry))
            flags = entry.parent.with_name("fdinfo").joinpath(entry.name).read_text()
        except OSError:
            continue
        of_process = re.search(r"^Pid:\s*(-?\d+)", flags, re.M)
        inode = re.search(r"socket:\[(\d+)\]", target)
        more = "pid " + of_process.group(1) if of_process else paths.get(inode.group(1), "") if inode else ""
        held.append("%s %s %s" % (entry.name, target, more))
    return sorted(held, key=lambda line: int(line.split()[0]))


class Watch:
    """The view on the daemon of one Place."""

    def __init__(self, place):
        self.place = place
        self.state = place.dirs["XDG_STATE_HOME"] / "mcpx"
        self._read = {}  # log file -> how far it was read

    def record(self):
        """The record of the running daemon, or None."""
        for path in self.state.glob("daemon-*.json"):
            try:
                return json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # it is being written or removed
        return None

    def socket_path(self):
        """The socket of the place's daemon, or None where there is none."""
        found = sorted(self.place.dirs["XDG_RUNTIME_DIR"].glob("mcpx/*.sock"))
        return str(found[0]) if found else None

    def ask(self, operation, seconds=STATUS_LIMIT_S, **arguments):
        """The answer to one control request, or None when no daemon answers."""
        path = self.socket_path()
        if path is None:
            return None
        body = json.dumps(arguments).encode() if arguments else b""
        head = "%s /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(seconds)
            try:
                link.connect(path)
                link.sendall((head % ("POST" if arguments else "GET", operation, len(body))).encode() + body)
                data = b"".join(iter(lambda: link.recv(1 << 20), b""))
            except OSError:
                return None
        answer = data.partition(b"\r\n\r\n")[2]
        return json.loads(answer) if answer else None

    def status(self, seconds=STATUS_LIMIT_S):
        """What `mcpx status --json` shows, or None when no daemon answers."""
        return self.ask("status", seconds)

    def mistakes(self):
        """What the daemons have logged since the last look that is a mistake of mcpx itself."""
        found = []
        for path in sorted(self.state.glob("logs/daemon-*.log")):
            text = path.read_text(errors="replace")
            start = self._read.get(path, 0)
            self._read[path] = len(text)
            for line in text[start if start <= len(text) else 0 :].splitlines():
                if MISTAKES.search(line):
                    found.append(line.replace("\\x0a", "\n"))
        return found

    def tail(self, size=1500):
        """The end of the daemon's log, for a report."""
        return "\n".join(path.read_text(errors="replace")[-size:] for path in self.state.glob("logs/daemon-*.log"))

    def ended_in_order(self):
        """Whether the last daemon ended because it was told to."""
        lines = [line for path in self.state.glob("logs/daemon-*.log") for line in path.read_text().splitlines()]
        return any(ORDERLY_END in line for line in lines[-40:])

    def footprint(self):
        """What the daemon holds now: descriptors, memory in KiB, processes, its tables."""
        status = self.status()
        if status is None:
            raise Failed("no daemon answers")
        pid = status["daemon"]["pid"]
        return {
            "pid": pid,
            "descriptors": open_files(pid),
            "memory": memory_kib(pid),
            "processes": len(self.place.survivors()),
            "tables": status["tables"],
        }

    def files(self):
        """How many files mcpx has written, by name; what differs from run to run is taken out of the names."""
        names = collections.Counter()
        for top in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"):
            for path in self.place.dirs[top].rglob("*"):
                name = str(path.relative_to(self.place.root))
                names[re.sub(r"\d{4,}", "N", re.sub(r"[0-9a-f]{12,}", "H", name))] += 1
        return names
