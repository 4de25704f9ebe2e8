"""A private place for one check: directories, a config, a daemon, no traces.

Every check gets a fresh Place. Its HOME, TMPDIR and XDG directories lie below
one directory with a name that nobody else has, so a process that belongs to
the check is recognised by that name in its environment or command line, however
often it forked or detached itself.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MCPX = Path(__file__).resolve().parent.parent / "mcpx.py"

# What a host passes on to what it launches, apart from the directories we set.
KEPT_ENV = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "PYENV_VERSION", "PYENV_ROOT")

# mcpx stop returns when all is gone; this is for a loaded machine.
STOP_LIMIT_S = 40
GONE_LIMIT_S = 8

# Left in TMPDIR by node and by opencode (the libraries it unpacks) themselves.
FOREIGN_TEMP = ("node-compile-cache", "v8-compile-cache", "opencode", "*.so")


class Failed(Exception):
    """A check found something wrong; the message says what."""


def expect(condition, message, *details):
    """Fail with the message unless the condition holds."""
    if not condition:
        raise Failed(message % details if details else message)


def processes():
    """(pid, parent, text) of every process we may look at; text is environment and command line."""
    if os.path.isdir("/proc/self"):
        return _linux_processes()
    listing = subprocess.run(["ps", "axeww", "-o", "pid=,ppid=,command="], stdout=subprocess.PIPE, check=False)
    rows = (line.split(None, 2) for line in listing.stdout.decode(errors="replace").splitlines())
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) == 3]


def _linux_processes():
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
            if stat[0] == "Z":
                continue  # a zombie runs nothing; its parent has yet to collect it
            text = b"\0".join(Path("/proc", name, part).read_bytes() for part in ("cmdline", "environ"))
        except OSError:
            continue  # it ended, or it is not ours to read
        found.append((int(name), int(stat[1]), text.decode(errors="replace").replace("\0", " ")))
    return found


def is_alive(pid):
    return any(pid == other for other, _parent, _text in processes())


def run_plan(place, argv, plan, who, seconds):
    """Give a client program a plan in JSON on stdin; returns the JSON that it prints.

    Fails, naming `who`, when the program fails or is late.
    """
    try:
        done = subprocess.run(
            argv,
            input=json.dumps(plan).encode(),
            env=place.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Failed("the %s did not end within %d s" % (who, seconds)) from late
    expect(done.returncode == 0, "the %s failed: %s", who, done.stderr.decode(errors="replace")[-1500:])
    return json.loads(done.stdout)


def wait_until(condition, seconds, what):
    """Poll until the condition is true; its value is returned.

    Fails with `what`: a text, or a function that returns it.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise Failed("not within %g s: %s" % (seconds, what() if callable(what) else what))
        time.sleep(0.05)


class Place:
    """The directories of one check and the mcpx that lives in them."""

    def __init__(self, name, python=None):
        self.name = name
        # The path of a unix socket is short by law, so this one must be too.
        self.root = Path(tempfile.mkdtemp(prefix="mx-", dir="/tmp")).resolve()
        self.python = python or os.environ.get("MCPX_PYTHON") or sys.executable
        self.dirs = {
            "HOME": self.root / "home",
            "XDG_CONFIG_HOME": self.root / "config",
            "XDG_STATE_HOME": self.root / "state",
            "XDG_CACHE_HOME": self.root / "cache",
            "XDG_DATA_HOME": self.root / "data",
            "XDG_RUNTIME_DIR": self.root / "r",
            "TMPDIR": self.root / "tmp",
        }
        for path in self.dirs.values():
            path.mkdir(mode=0o700)
        self.work = self.root / "work"
        self.work.mkdir()

    # --- starting things ----------------------------------------------------

    def env(self, **more):
        """The environment that a host in this place would have."""
        env = {key: os.environ[key] for key in KEPT_ENV if key in os.environ}
        env.update({key: str(path) for key, path in self.dirs.items()})
        env.update(more)
        return env

    def configure(self, servers, **settings):
        """Write the config file. `servers` are mcpServers entries."""
        config = {"mcpServers": servers, "mcpx": settings}
        path = self.dirs["XDG_CONFIG_HOME"] / "mcpx" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config, indent=1))

    def mcpx(self, *arguments):
        """The command line of an mcpx command."""
        return [self.python, str(MCPX)] + list(arguments)

    def demo_server(self, *options, **mcpx):
        """A config entry for the built-in demo server."""
        return {"command": self.python, "args": [str(MCPX), "demo-server"] + list(options), "mcpx": mcpx}

    def run(self, *arguments, seconds=60, **env):
        """Run an mcpx command to its end and return (status, stdout, stderr)."""
        done = subprocess.run(
            self.mcpx(*arguments),
            cwd=str(self.work),
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def status(self):
        """What `mcpx status --json` says, or None when no daemon runs."""
        code, out, err = self.run("status", "--json")
        if code == 1:
            return None
        expect(code == 0, "mcpx status ended with %d: %s", code, err.strip()[-300:])
        return json.loads(out)

    # --- looking around -----------------------------------------------------

    def survivors(self):
        """Processes of this place that still run, as (pid, command line)."""
        mark = str(self.root)
        return [(pid, text[:160]) for pid, _parent, text in processes() if mark in text and pid != os.getpid()]

    def logs(self, limit=2500):
        """The ends of mcpx's log files, for a failure report."""
        parts = []
        for path in sorted((self.dirs["XDG_STATE_HOME"] / "mcpx").glob("logs/*.log")):
            text = path.read_text(errors="replace").strip()
            if text:
                parts.append("--- %s\n%s" % (path.name, text[-limit:]))
        return "\n".join(parts)

    # --- the end ------------------------------------------------------------

    def leftovers(self):
        """Stop everything as a person would, then list what is still there."""
        left = []
        try:
            code, out, err = self.run("stop", seconds=STOP_LIMIT_S)
            if code not in (0, 1):  # 1: no daemon was running
                left.append("mcpx stop ended with %d: %s" % (code, (err or out).strip()[-300:]))
        except subprocess.TimeoutExpired:
            left.append("mcpx stop did not return within %d s" % STOP_LIMIT_S)
        try:
            wait_until(lambda: not self.survivors(), GONE_LIMIT_S, "all processes gone")
        except Failed:
            left += ["process %d still runs: %s" % survivor for survivor in self.survivors()]
        return left + self._files_left()

    def _files_left(self):
        state = self.dirs["XDG_STATE_HOME"] / "mcpx"
        left = ["socket %s" % path.name for path in self.dirs["XDG_RUNTIME_DIR"].rglob("*") if path.is_socket()]
        left += ["child record %s" % path.name for path in (state / "children").glob("*")]
        left += [
            "temporary file %s" % path.name
            for path in self.dirs["TMPDIR"].iterdir()
            if not any(path.match(pattern) for pattern in FOREIGN_TEMP)
        ]
        return left

    def remove(self):
        """Remove the place and end, by pid, whatever of it refused to go."""
        for pid, _text in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        shutil.rmtree(self.root, ignore_errors=True)
