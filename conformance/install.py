#!/usr/bin/env python3
"""Install the peers that the conformance checks talk to.

A peer is a published program that is not ours: reference servers, SDKs, hosts.
Each set below lives in a directory of its own under the peers directory
($MCPX_PEERS, else $XDG_CACHE_HOME/mcpx-peers, else ~/.cache/mcpx-peers), never
in the source tree, and is installed by the ordinary npm and pip clients.

A set is complete when its stamp file names exactly the versions pinned here.
The stamp is written last, so an interrupted or outdated install is redone.

usage: install.py [SET ...]        (no SET: all of them)
"""
import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

# The name node's packages use for this machine, for example linux-x64.
NODE_PLATFORM = "%s-%s" % (
    sys.platform,
    {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower()),
)

NPM_SETS = {
    "servers": {
        "@modelcontextprotocol/server-everything": "2026.8.31",
        "@modelcontextprotocol/server-memory": "2026.8.31",
        "@modelcontextprotocol/server-filesystem": "2026.8.31",
    },
    # Inspector 2 needs node 22.19 or newer, so it brings a node of its own.
    "inspector": {"@modelcontextprotocol/inspector": "2.12.0", "node-" + NODE_PLATFORM: "24.22.3"},
    "opencode": {"opencode-ai": "1.18.33"},
    # The only published package found that carries the schema files of the
    # revisions: the official suite validates every response against them.
    "schemas": {"@modelcontextprotocol/conformance": "0.2.0-alpha.12"},
    # The official TypeScript SDK as a client; 2.x speaks both eras.
    "tsclient": {"@modelcontextprotocol/client": "2.4.0"},
}

PIP_SETS = {
    "pyservers": {"mcp-server-time": "2026.10.19", "mcp-server-git": "2026.10.19"},
    # jsonschema checks recorded frames; the SDK depends on it anyway.
    "sdk1": {"mcp": "1.30.0", "jsonschema": "4.26.0"},
    "sdk2": {"mcp": "2.3.0"},
}

# What bench.py measures beside mcpx: other ways to put something between hosts and servers.
BENCH_NPM = {"supergateway": "4.0.0", "mcp-remote": "0.15.1", "mcp-proxy": "6.7.19", "mcp-hub": "4.2.1"}
BENCH_PIP = {"mcp-proxy": "0.13.0", "fastmcp": "4.2.3", "mcp-broker": "2.1.1"}
NPM_SETS.update(("bench-npm-" + name, {name: version}) for name, version in BENCH_NPM.items())
PIP_SETS.update(("bench-pip-" + name, {name: version}) for name, version in BENCH_PIP.items())

SETS = list(NPM_SETS) + list(PIP_SETS)

# The newest of these that exists makes the virtual environments; the SDKs need 3.10.
OLDEST_SDK_PYTHON = (3, 10)


class InstallError(Exception):
    """A peer could not be installed; the message says which and why."""


def peers_dir():
    """The directory that holds every set, outside the source tree."""
    explicit = os.environ.get("MCPX_PEERS")
    if explicit:
        return Path(explicit).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mcpx-peers"


def pins_of(name):
    """The exact versions of a set, as its stamp records them."""
    pins = NPM_SETS.get(name) or PIP_SETS[name]
    return {"packages": pins, "python": "%d.%d" % sys.version_info[:2] if name in PIP_SETS else None}


def is_installed(name):
    """True if the set is complete and at the pinned versions."""
    try:
        return json.loads((peers_dir() / name / "stamp.json").read_text()) == pins_of(name)
    except (OSError, ValueError):
        return False


def run_installer(argv, cwd, log):
    """Run npm or pip; its output goes to a log that the error points at."""
    with open(log, "ab") as out:
        code = subprocess.call(argv, cwd=str(cwd), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    if code:
        tail = Path(log).read_text(errors="replace")[-1500:]
        raise InstallError("%s ended with status %d, see %s:\n%s" % (" ".join(argv[:2]), code, log, tail))


def install_npm(name, target, log):
    if not shutil.which("npm"):
        raise InstallError("npm is not on PATH; install node 20 or newer")
    # A manifest of our own, so that npm does not walk up to somebody else's.
    (target / "package.json").write_text(json.dumps({"private": True, "dependencies": NPM_SETS[name]}))
    # Install scripts only download or warm things; the packages work without.
    run_installer(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], target, log)


def install_pip(name, target, log):
    if sys.version_info[:2] < OLDEST_SDK_PYTHON:
        raise InstallError("the SDKs need Python %d.%d or newer; run with such a python3" % OLDEST_SDK_PYTHON)
    venv.create(str(target / "venv"), with_pip=True)
    wanted = ["%s==%s" % pin for pin in PIP_SETS[name].items()]
    python = str(target / "venv" / "bin" / "python")
    run_installer([python, "-m", "pip", "install", "--disable-pip-version-check"] + wanted, target, log)


@contextlib.contextmanager
def one_installer_at_a_time(root):
    """Two runs started together must not write the same directory."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(name, say=print):
    """Make sure that one set is there. Raises InstallError."""
    root = peers_dir()
    with one_installer_at_a_time(root):
        if is_installed(name):
            return
        started = time.monotonic()
        target = root / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (install_npm if name in NPM_SETS else install_pip)(name, target, target / "install.log")
        stamp = target / "stamp.json"
        stamp.with_suffix(".tmp").write_text(json.dumps(pins_of(name)))
        os.replace(stamp.with_suffix(".tmp"), stamp)
        say("installed %s in %.0f s" % (name, time.monotonic() - started))


# ---------------------------------------------------------------------------
# Where things are, for the checks
# ---------------------------------------------------------------------------


def npm_package(set_name, package):
    return peers_dir() / set_name / "node_modules" / package


def node_script(set_name, package, path):
    """The command line of a script in a node package."""
    return ["node", str(npm_package(set_name, package) / path)]


def bare_python():
    """An interpreter with nothing installed beside it, made if need be: a .pth file of some package may take
    longer to import at every start than what is measured."""
    root = peers_dir()
    python = root / ("bare-%d.%d" % sys.version_info[:2]) / "bin" / "python3"
    with one_installer_at_a_time(root):
        if not python.exists():
            venv.create(str(python.parent.parent), clear=True, symlinks=True)
    return str(python)


def venv_program(set_name, program):
    return str(peers_dir() / set_name / "venv" / "bin" / program)


def opencode_binary():
    """The program itself: the package's launcher would only look for it."""
    return str(npm_package("opencode", "opencode-" + NODE_PLATFORM) / "bin" / "opencode")


def inspector_command():
    """The inspector on a node that it supports."""
    node = str(npm_package("inspector", "node-" + NODE_PLATFORM) / "bin" / "node")
    package = npm_package("inspector", "@modelcontextprotocol/inspector")
    entry = json.loads((package / "package.json").read_text())["bin"]
    script = entry if isinstance(entry, str) else entry["mcp-inspector"]
    return [node, str(package / re.sub(r"^\./", "", script))]


def main(names):
    unknown = sorted(set(names) - set(SETS))
    if unknown:
        print("no such set: %s (there are %s)" % (", ".join(unknown), ", ".join(SETS)), file=sys.stderr)
        return 2
    for name in names or SETS:
        try:
            install(name)
        except InstallError as error:
            print("cannot install %s: %s" % (name, error), file=sys.stderr)
            return 1
    print("peers are in %s" % peers_dir())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
