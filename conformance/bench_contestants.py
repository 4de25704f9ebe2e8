"""What bench.py compares: the host that launches its server itself, floors, mcpx, peers.

Each is a row: how its front is started (if it has one), how a host reaches it, which files
it wants. A running one lives in a Place of its own, so that all its processes can be found,
measured and ended.
"""
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import install
from bench_client import HOSTS, Broken, Watch
from place import MCPX, Place

HERE = Path(__file__).resolve().parent
PYTHON = install.bare_python()
UPSTREAM = [PYTHON, str(HERE / "bench_upstream.py")]
FLOORS = str(HERE / "bench_floors.py")
FRONT_LIMIT_S = 60
HOST_CAP_STDIO_PEER = 32  # their shims take 40 to 90 MiB each


class Contestant:
    """A row of the comparison; nothing of it runs yet.

    transport  "stdio", "http", "modern" or "sse"
    host       command line of a host's process, or the path of the URL
    front      command line of what all hosts share, or None
    files      name -> text, written before anything starts
    needs      sets of install.py
    In all texts {dir}, {port} and {socket} stand for those of the running one.
    """

    def __init__(self, name, transport, host, front=None, files=None, needs=(), env=None, max_hosts=256):
        self.name, self.transport, self.host, self.front = name, transport, host, front
        self.files, self.needs, self.env, self.max_hosts = files or {}, needs, env or {}, max_hosts

    @property
    def is_peer(self):
        """Is it somebody else's program?"""
        return bool(self.needs)


class Running:
    """A started contestant and the hosts made from it. Raises Broken where its front does not come up."""

    alive = set()  # those that were not stopped, for the end of a run that failed

    def __init__(self, contestant):
        self.contestant = contestant
        self.place = Place(contestant.name)
        self.alive.add(self)
        self.port = free_port()
        self.socket = str(self.place.root / "s")
        self.hosts, self.front = [], None
        self.log = open(self.place.root / "log", "ab")
        self.environ = self.place.env(MCPX_PYTHON=PYTHON, **self._filled(contestant.env))
        for name, text in contestant.files.items():
            path = self.place.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._fill(text))
        if contestant.front:
            try:
                self._start_front()
            except Broken:
                self.stop()
                raise

    def _fill(self, text):
        for name, value in (("dir", self.place.root), ("port", self.port), ("socket", self.socket)):
            text = text.replace("{%s}" % name, str(value))
        return text

    def _filled(self, env):
        return {name: self._fill(value) for name, value in env.items()}

    def argv(self, command):
        return [self._fill(part) for part in command]

    def _start_front(self):
        self.front = subprocess.Popen(
            self.argv(self.contestant.front), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env=self.environ, cwd=str(self.place.work))
        deadline = time.monotonic() + FRONT_LIMIT_S
        uses_socket = any("{socket}" in part for part in self.contestant.front)
        while not accepts(self.socket if uses_socket else self.port):
            if self.front.poll() is not None or time.monotonic() > deadline:
                raise Broken("its front did not come up: " + self.tail())
            time.sleep(0.005)

    def tail(self):
        """The end of what it wrote to stderr."""
        return (self.place.root / "log").read_text(errors="replace")[-600:]

    def new_host(self, **env):
        """Start a host; what it has to say is up to the caller."""
        host = HOSTS[self.contestant.transport](len(self.hosts) + 1)
        host.join(Watch())
        self.hosts.append(host)
        if self.contestant.transport == "stdio":
            host.start(self.argv(self.contestant.host), dict(self.environ, **env), str(self.place.work), self.log)
        else:
            self._connect(host)
        return host

    def _connect(self, host):
        """Some fronts listen before they can serve: try until they can."""
        deadline = time.monotonic() + FRONT_LIMIT_S
        while True:
            try:
                host.start(self.port, self.contestant.host)
                return
            except Broken:
                if time.monotonic() > deadline:
                    raise
                host.close()
                time.sleep(0.02)

    def ready_host(self, **env):
        """A host that has made its handshake, listed the tools and called once."""
        host = self.new_host(**env)
        host.initialize()
        host.list_tools()
        host.call()
        return host

    def drop(self, host):
        self.hosts.remove(host)
        host.close()

    def pids(self):
        """All processes of it."""
        return [pid for pid, _text in self.place.survivors()]

    def stop(self):
        """End it, in order where it can, and remove its directories."""
        self.alive.discard(self)
        for host in self.hosts:
            if hasattr(host, "process"):
                host.process.stdin.close()
        for host in list(self.hosts):
            try:
                self.drop(host)
            except (OSError, Broken):
                pass
        if self.front is not None:
            self.front.terminate()
            try:
                self.front.wait(5)
            except subprocess.TimeoutExpired:
                self.front.kill()
                self.front.wait()
        self.log.close()
        self.place.remove()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def accepts(address):
    """Does somebody listen on this port, or on the socket at this path?"""
    probe = socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX)
    try:
        probe.connect(("127.0.0.1", address) if isinstance(address, int) else address)
        return True
    except OSError:
        return False
    finally:
        probe.close()


# ---------------------------------------------------------------------------
# The rows
# ---------------------------------------------------------------------------

CONFIG = "config/mcpx/config.json"


def mcpx_config(servers=None, **settings):
    """The text of a configuration for mcpx with the server `up`, and others."""
    up = {"command": UPSTREAM[0], "args": UPSTREAM[1:], "mcpx": {"scope": "global"}}
    return json.dumps({"mcpServers": dict({"up": up}, **(servers or {})), "mcpx": settings})


def ours():
    """mcpx in the form that the README recommends, as `python3 mcpx.py`, and over HTTP."""
    files = {CONFIG: mcpx_config()}
    door = {CONFIG: mcpx_config(None, **{"http.listen": "127.0.0.1:{port}", "http.auth": "none"})}
    front = [str(MCPX), "daemon"]
    return [
        Contestant("mcpx", "stdio", [str(MCPX), "serve", "up"], files=files),
        Contestant("mcpx http", "http", "/mcp/up", front, door),
        Contestant("mcpx http 2026-07-28", "modern", "/mcp/up", front, door),
    ]


def plain_mcpx():
    """mcpx as `python3 mcpx.py`: the same but for its start."""
    return Contestant("python3 mcpx.py", "stdio", [PYTHON, str(MCPX), "serve", "up"], files={CONFIG: mcpx_config()})


def floors():
    shim = [PYTHON, "-I", "-S", FLOORS, "shim", "{socket}"]
    return [
        Contestant("direct", "stdio", UPSTREAM),
        Contestant("raw", "stdio", shim, [PYTHON, "-I", "-S", FLOORS, "raw", "{socket}"] + UPSTREAM),
        Contestant("mux", "stdio", shim, [PYTHON, "-I", "-S", FLOORS, "mux", "{socket}"] + UPSTREAM),
    ]


def peers():
    """Other programs, each in the form that its own documentation gives."""
    url = "http://127.0.0.1:{port}/mcp"
    servers = {"mcp.json": json.dumps({"mcpServers": {"up": {"command": UPSTREAM[0], "args": UPSTREAM[1:]}}})}
    cap = HOST_CAP_STDIO_PEER

    py_proxy = install.venv_program("bench-pip-mcp-proxy", "mcp-proxy")
    py_proxy_front = [py_proxy, "--log-level", "ERROR", "--port", "{port}", "--pass-environment", "--"] + UPSTREAM
    remote = install.node_script("bench-npm-mcp-remote", "mcp-remote", "dist/proxy.js")
    gateway = install.node_script("bench-npm-supergateway", "supergateway", "dist/index.js") + ["--logLevel", "none"]
    gateway_front = gateway + ["--stdio", " ".join(UPSTREAM), "--port", "{port}"]
    gateway_http = gateway_front + ["--outputTransport", "streamableHttp", "--stateful"]
    node_proxy = install.node_script("bench-npm-mcp-proxy", "mcp-proxy", "dist/bin/mcp-proxy.mjs")
    node_proxy_front = node_proxy + ["--host", "127.0.0.1", "--port", "{port}", "--"] + UPSTREAM
    hub = install.node_script("bench-npm-mcp-hub", "mcp-hub", "dist/cli.js")
    fast = [install.venv_program("bench-pip-fastmcp", "fastmcp"), "run", "{dir}/mcp.json", "--no-banner",
            "--log-level", "ERROR", "--transport"]
    broker = install.venv_program("bench-pip-mcp-broker", "mcp-broker")
    broker_client = [broker + "-client", "--socket-path", "{socket}", "--profile", "bench"]
    broker_front = [broker, "start", "--config", "{dir}/broker.yaml", "--runtime-root", "{dir}",
                    "--socket-path", "{socket}"]
    needs_proxy, needs_gateway = ["bench-pip-mcp-proxy"], ["bench-npm-supergateway"]
    return [
        Contestant("fastmcp", "stdio", fast + ["stdio"], None, servers, ["bench-pip-fastmcp"], max_hosts=cap),
        Contestant("mcp-broker", "stdio", broker_client, broker_front, {"broker.yaml": BROKER},
                   ["bench-pip-mcp-broker"], max_hosts=cap),
        Contestant("mcp-proxy", "stdio", [py_proxy, "--log-level", "ERROR", "--transport", "streamablehttp", url],
                   py_proxy_front, None, needs_proxy, max_hosts=cap),
        Contestant("mcp-remote", "stdio", remote + [url, "--allow-http", "--transport", "http-only"],
                   py_proxy_front, None, needs_proxy + ["bench-npm-mcp-remote"],
                   {"MCP_REMOTE_CONFIG_DIR": "{dir}/auth"}, max_hosts=cap),
        Contestant("supergateway", "stdio", gateway + ["--streamableHttp", url], gateway_http, None, needs_gateway,
                   max_hosts=cap),
        Contestant("mcp-proxy http", "http", "/mcp", py_proxy_front, None, needs_proxy),
        Contestant("fastmcp http", "http", "/mcp", fast + ["http", "--port", "{port}"], servers, ["bench-pip-fastmcp"]),
        Contestant("supergateway http", "http", "/mcp", gateway_http, None, needs_gateway, max_hosts=cap),
        Contestant("supergateway sse", "sse", "/sse", gateway_front, None, needs_gateway),
        Contestant("npm mcp-proxy http", "http", "/mcp", node_proxy_front, None, ["bench-npm-mcp-proxy"]),
        Contestant("mcp-hub sse", "sse", "/mcp", hub + ["--port", "{port}", "--config", "{dir}/mcp.json"], servers,
                   ["bench-npm-mcp-hub"]),
    ]


BROKER = """schema_version: 1
runtime:
  root: "{dir}"
  socket_path: "{socket}"
  log_dir: "{dir}/log.d"
  state_dir: "{dir}/state.d"
  secrets_dir: "{dir}/secrets"
broker:
  identity: {broker_id: bench, environment: local, bundle_version: unbundled}
profiles:
  bench: {max_tools: 200, compact_tools_enabled: false}
upstreams:
  up:
    enabled: true
    mode: shared
    transport: stdio
    command: "%s"
    args: %s
    profiles: [bench]
""" % (UPSTREAM[0], json.dumps(UPSTREAM[1:]))


# ---------------------------------------------------------------------------
# What processes cost
# ---------------------------------------------------------------------------


def memory(pid, field="Pss"):
    """KiB of a process, as smaps_rollup has them; 0 once it has gone."""
    try:
        for line in Path("/proc/%d/smaps_rollup" % pid).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def cpu_seconds(pids):
    """CPU time that these processes have used, all their threads together."""
    nanoseconds = 0
    for pid in pids:
        try:
            for thread in os.listdir("/proc/%d/task" % pid):
                nanoseconds += int(Path("/proc/%d/task/%s/schedstat" % (pid, thread)).read_text().split()[0])
        except OSError:
            continue
    return nanoseconds / 1e9

