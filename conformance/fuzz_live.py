"""Hostile hosts, clients and servers against a running daemon, for `fuzz.py`.

A bystander host calls all the time. Whatever the others send, the daemon must not log a mistake of its own, must
not vanish, must not keep the bystander waiting, and must hold nothing when they have gone.
"""

import glob
import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import fuzz_mutate
import fuzz_parts
from faults_watch import Watch, cpu_seconds
from place import Failed, Place, wait_until

HERE = Path(__file__).resolve().parent

# A bystander's call may not make the daemon work for longer than this, nor wait longer than that in all: processor
# time is what mcpx answers for, the wait includes what a busy machine adds.
HANG_CPU_S = 1.0
HANG_WAIT_S = 15.0
ANSWER_LIMIT_S = 20.0

# Caches fill up in the first minutes; more than this between the middle of a run and its end is a leak.
GROWTH_KIB = 24 * 1024

# Everything ends soon, so that a run comes to rest.
SETTINGS = {
    "http.auth": "none",
    "callTimeout": "5s",
    "startTimeout": "5s",
    "coldWait": "3s",
    "idleTimeout": "2s",
    "keep": "1s",
    "max": 6,
    "cancelGrace": "1s",
    "question.timeout": "3s",
    "queueTimeout": "10s",
    "http.sessionTimeout": "5s",
    "backoff.first": "50ms",
    "backoff.max": "200ms",
    "stop.eofGrace": "1s",
    "stop.termGrace": "1s",
}

META = "io.modelcontextprotocol/"
ENVELOPE = {
    META + "protocolVersion": "2026-07-28",
    META + "clientCapabilities": {"elicitation": {"form": {}}, "roots": {}, "sampling": {}},
}
CAPABILITIES = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {"listChanged": True}}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ShimHost:
    """A host on the standard streams of `mcpx.py serve NAME`; answers what it is asked, truly or not."""

    def __init__(self, place, name, revision="2025-11-25", lies=None):
        self.revision, self.lies = revision, lies
        self.noise, self.answers, self.news = [], {}, threading.Condition()
        self.ids = 0
        self.outgoing = queue.Queue()
        self.stderr = open(place.root / ("shim-%d.err" % time.monotonic_ns()), "w+b")
        self.process = subprocess.Popen(
            place.mcpx("serve", name),
            env=place.env(),
            cwd=str(place.work),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
        )
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                messages = json.loads(line)
            except ValueError:
                self.noise.append(line)
                continue
            for message in messages if isinstance(messages, list) else [messages]:
                self._take(message)
        with self.news:
            self.news.notify_all()

    def _take(self, message):
        if "method" in message:
            if "id" in message:
                self._reply(message)
            return
        with self.news:
            key = json.dumps(message.get("id"))
            self.answers[key] = self.answers.get(key, 0) + 1
            self.news.notify_all()

    def _reply(self, question):
        results = {
            "ping": {},
            "roots/list": {"roots": [{"uri": "file:///tmp", "name": "n"}]},
            "elicitation/create": {"action": "accept", "content": {"a": "x"}},
            "sampling/createMessage": {"role": "assistant", "model": "m", "content": {"type": "text", "text": "t"}},
        }
        reply = {"jsonrpc": "2.0", "id": question["id"], "result": results.get(question["method"], {})}
        if self.lies is not None and self.lies.random() < 0.5:
            self.send(fuzz_mutate.mutate_line(self.lies, reply))
        self.send(json.dumps(reply).encode())

    def _write(self):
        while True:
            data = self.outgoing.get()
            if data is None:
                break
            try:
                self.process.stdin.write(data)
                self.process.stdin.flush()
            except (BrokenPipeError, ValueError):
                return  # it has ended; whoever waits for it sees that
        self.process.stdin.close()

    def send(self, line):
        """Queue bytes for the host's standard output; a line end is added."""
        self.outgoing.put(line + b"\n")

    def begin(self, method, params):
        self.ids += 1
        name = "own-%d" % self.ids
        self.send(json.dumps({"jsonrpc": "2.0", "id": name, "method": method, "params": params}).encode())
        return name

    def wait(self, name, seconds=ANSWER_LIMIT_S):
        """Wait for the answer to a request of ours; returns whether it came."""
        deadline, key = time.monotonic() + seconds, json.dumps(name)
        with self.news:
            while key not in self.answers and self.process.poll() is None:
                if not self.news.wait(max(0.0, deadline - time.monotonic())):
                    break
            return key in self.answers

    def greet(self):
        name = self.begin(
            "initialize",
            {
                "protocolVersion": self.revision,
                "capabilities": CAPABILITIES,
                "clientInfo": {"name": "f", "version": "1"},
            },
        )
        if not self.wait(name, 60):
            raise Failed("no answer to initialize")
        self.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        return self

    def said(self):
        """What the shim has written to its standard error."""
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    def problems(self):
        """What is wrong with this host's view: lines that are no JSON, a shim that ended or complained."""
        said = self.said()
        found = ["a host was sent %r" % line[:200] for line in self.noise[:3]]
        if "Traceback" in said:
            found.append("the shim: %s" % said[-1500:])
        if self.process.poll() is not None and not self.outgoing.empty():
            found.append("the shim ended with %s while its host was there" % self.process.poll())
        return found

    def close(self):
        self.outgoing.put(None)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.stderr.close()


class Bystander:
    """A host that minds its own business and notes how long that took."""

    def __init__(self, live):
        self.live = live
        self.host = ShimHost(live.place, "calm").greet()
        self.found = []
        self.worst = (0.0, 0.0)  # longest wait, most processor time of the daemon during one call
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.is_set():
            pid, started, cpu = self.live.pid, time.monotonic(), cpu_seconds(self.live.pid)
            name = self.host.begin("tools/call", {"name": "say", "arguments": {"text": "x"}})
            answered = self.host.wait(name, HANG_WAIT_S)
            waited, worked = time.monotonic() - started, cpu_seconds(pid) - cpu
            self.worst = max(self.worst[0], waited), max(self.worst[1], worked)
            if not answered:
                self.found.append("a bystander's call was not answered within %g s" % HANG_WAIT_S)
            elif worked > HANG_CPU_S and waited > HANG_CPU_S:
                self.found.append("a bystander waited %.2f s while the daemon worked for %.2f s" % (waited, worked))
            self.host.answers.clear()
            self._over.wait(0.02)

    def close(self):
        self._over.set()
        self._thread.join(HANG_WAIT_S + 5)
        self.host.close()


class Live:
    """A place with a daemon, a bystander, and the looks at both."""

    def __init__(self):
        self.place = Place("fuzz")
        self.watch = Watch(self.place)
        self.port = free_port()
        self.configure()
        self.pid = 0
        self.bystander = Bystander(self)
        for server in self.servers:
            self.place.run("call", server + ".say", "text=x")  # their logs are open from here on
        self.pid = self.watch.status()["daemon"]["pid"]
        self.before = self.half = None

    def configure(self):
        def server(kind, scope, **env):
            env["PYTHONDONTWRITEBYTECODE"] = "1"
            return {
                "command": sys.executable,
                "args": [str(HERE / "fuzz_child.py"), kind],
                "env": env,
                "mcpx": {"scope": scope},
            }

        servers = {
            "calm": server("calm", "global"),
            "target": server("calm", "global"),
            "wild": server("wild", "global"),
            "wild-modern": server("wild", "global", FUZZ_ERA="modern"),
            "born": server("wild", "session", FUZZ_SEED="{session}"),
            "born-modern": server("wild", "session", FUZZ_SEED="{session}", FUZZ_ERA="modern"),
        }
        self.servers = list(servers)
        self.place.configure(servers, **dict(SETTINGS, **{"http.listen": "127.0.0.1:%d" % self.port}))

    def problems(self):
        """What has gone wrong since the last look."""
        found = self.watch.mistakes()
        found += self.bystander.found
        self.bystander.found = []
        status = self.watch.status()
        if status is None or status["daemon"]["pid"] != self.pid:
            if not self.watch.ended_in_order():
                found.append("the daemon is gone")
            deadline = time.monotonic() + ANSWER_LIMIT_S
            while status is None and time.monotonic() < deadline:
                time.sleep(0.2)
                status = self.watch.status()
            if status is None:
                raise Failed("no daemon came back")
            self.pid = status["daemon"]["pid"]
            self.before = self.half = None
        return found

    def rest(self):
        """What the daemon holds when only the bystander is there. Raises Failed when it does not come to rest."""
        # A server may have said of a task that it goes on for ever: such a one is ended by hand.
        for server in self.servers[1:]:
            self.watch.ask("stop", name=server)

        def at_rest():
            tables = self.watch.status()["tables"]
            # The bystander's own: its host, its call, the instance that serves it; the request that asks.
            busy = {
                name: count
                for name, count in tables.items()
                if count
                > (1 if name in ("calls", "leases", "tokens", "hosts", "instances", "slots", "requests") else 0)
            }
            return None if busy and busy != {"connections": 0} else tables

        # A server that lies keeps its instance until the last request of mcpx's own is given up.
        def shown():
            status = self.watch.status()
            return "rest; there are %s: %s" % (status["tables"], status["instances"])

        wait_until(at_rest, 80, shown)
        return self.watch.footprint()

    def growth(self, allowance_kib=GROWTH_KIB):
        """Compare what is held at rest with the beginning and with the middle of the run."""
        now = self.rest()
        found = []
        if self.before and now["pid"] == self.before["pid"]:
            # What has just ended is let go of at the end of a turn of the daemon's loop, and a look counts itself.
            for _ in range(20):
                if now["descriptors"] <= self.before["descriptors"] and now["processes"] <= self.before["processes"]:
                    break
                time.sleep(0.1)
                now = self.watch.footprint()
            if now["descriptors"] > self.before["descriptors"] + 1:
                found.append("descriptors grew from %d to %d" % (self.before["descriptors"], now["descriptors"]))
            if now["processes"] > self.before["processes"]:
                found.append("processes grew from %d to %d" % (self.before["processes"], now["processes"]))
            base = self.half or self.before
            if now["memory"] > base["memory"] + allowance_kib + base["memory"] // 4:
                found.append("memory grew from %d to %d KiB" % (base["memory"], now["memory"]))
        return found

    def shows_escapes(self):
        """What people are shown must not steer their terminal."""
        found = []
        for arguments in (["status"], ["ls"], ["logs"], ["logs", "wild"], ["asks"], ["call", "wild.say", "text=x"]):
            _code, out, err = self.place.run(*arguments)
            bad = [c for c in out + err if (c < " " and c not in "\n\t\r") or "\x7f" <= c < "\xa0" or c == "\u202e"]
            if bad:
                found.append("mcpx %s prints %r" % (" ".join(arguments), bad[0]))
        return found

    def close(self):
        self.bystander.close()
        left = self.place.leftovers()
        self.place.remove()
        return left


# ---------------------------------------------------------------------------
# A host that sends anything
# ---------------------------------------------------------------------------

HOST_SAYINGS = [
    {
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": CAPABILITIES,
            "clientInfo": {"name": "n", "version": "1"},
        },
    },
    {"method": "notifications/initialized"},
    {"id": 2, "method": "tools/list", "params": {"cursor": "0.0"}},
    {
        "id": "a",
        "method": "tools/call",
        "params": {
            "name": "say",
            "arguments": {"text": None, "list": []},
            "_meta": {"progressToken": 5, "dev.mcpx/cwd": "/tmp", "k": []},
        },
    },
    {"id": "b", "method": "tools/call", "params": {"name": "say", "arguments": {}, "task": {"ttl": 5}}},
    {"id": "c", "method": "resources/read", "params": {"uri": "fuzz://one"}},
    {"id": "d", "method": "resources/subscribe", "params": {"uri": "fuzz://one"}},
    {"id": "e", "method": "resources/unsubscribe", "params": {"uri": "fuzz://one"}},
    {"id": "f", "method": "prompts/get", "params": {"name": "p", "arguments": {"a": "b"}}},
    {
        "id": "g",
        "method": "completion/complete",
        "params": {
            "ref": {"type": "ref/prompt", "name": "p"},
            "argument": {"name": "a", "value": "b"},
            "context": {"arguments": {}},
        },
    },
    {"id": "h", "method": "logging/setLevel", "params": {"level": "debug"}},
    {"id": "i", "method": "tasks/get", "params": {"taskId": "t"}},
    {"id": "i2", "method": "tasks/result", "params": {"taskId": "t"}},
    {"id": "i3", "method": "tasks/cancel", "params": {"taskId": "t"}},
    {"id": "i4", "method": "tasks/list", "params": {"cursor": None}},
    {"id": "j", "method": "ping"},
    {"id": "k", "method": "server/discover", "params": {"_meta": ENVELOPE}},
    {
        "id": "l",
        "method": "tools/call",
        "params": {
            "name": "say",
            "arguments": {"x": [1]},
            "_meta": dict(
                ENVELOPE,
                progressToken="p",
                **{META + "logLevel": "debug", META + "clientInfo": {"name": "n", "version": "1"}}
            ),
        },
    },
    {
        "id": "m",
        "method": "tools/call",
        "params": {
            "name": "say",
            "arguments": {},
            "requestState": "v1.e30.x",
            "inputResponses": {"k": {"action": "accept", "content": {}}},
            "_meta": ENVELOPE,
        },
    },
    {
        "id": "n",
        "method": "subscriptions/listen",
        "params": {
            "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["fuzz://one"], "taskIds": ["t"]},
            "_meta": ENVELOPE,
        },
    },
    {"id": "o", "method": "tools/list", "params": {"_meta": ENVELOPE}},
    {"id": "p", "method": "tasks/update", "params": {"taskId": "t", "inputResponses": {}, "_meta": ENVELOPE}},
    {"method": "notifications/cancelled", "params": {"requestId": "a", "reason": "r"}},
    {"method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}},
    {"method": "notifications/roots/list_changed"},
    {"method": "notifications/tasks/status", "params": {"taskId": "t", "status": "working"}},
    {"method": "notifications/own", "params": {"a": None}},
    {"id": 77, "result": {"action": "accept", "content": {"a": None}}},
    {"id": 78, "error": {"code": 1, "message": "m"}},
]


class HostTarget:
    """Mutated lines on the standard input of shims of several revisions."""

    name = "host"

    def __init__(self, live, seed):
        self.live, self.seed, self.hosts = live, seed, {}

    def step(self, number):
        rng = random.Random("%s host %d" % (self.seed, number))
        kind = rng.choice(("2025-11-25", "2025-11-25", "2025-03-26", "2024-11-05", "silent"))
        host = self.hosts.get(kind)
        if host is None or host.process.poll() is not None or rng.random() < 0.01:
            if host is not None:
                host.close()
            host = self.hosts[kind] = ShimHost(self.live.place, "target", kind)
            if kind != "silent":
                host.greet()
        for _ in range(rng.randint(1, 20)):
            message = dict({"jsonrpc": "2.0"}, **rng.choice(HOST_SAYINGS))
            line = fuzz_mutate.mutate_line(rng, message)
            if rng.random() < 0.1:
                line = b"[" + line + b"," + json.dumps(message).encode() + b"]"
            host.send(line)
        canary = host.begin("ping", {})
        found = [] if host.wait(canary) else ["a host's ping was not answered within %g s" % ANSWER_LIMIT_S]
        found += host.problems()
        host.answers.clear()
        return found

    def hang_up(self):
        """Leave nothing connected; the next step connects anew."""
        for host in self.hosts.values():
            host.close()
        self.hosts = {}

    close = hang_up


# ---------------------------------------------------------------------------
# A client that sends anything
# ---------------------------------------------------------------------------


def post(path, value, *headers):
    """An HTTP request with a JSON body, as bytes."""
    body = json.dumps(value).encode()
    lines = [
        "POST %s HTTP/1.1" % path,
        "Host: localhost",
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
    ]
    lines += list(headers) + ["Content-Length: %d" % len(body)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def modern_headers(message):
    params = message.get("params", {})
    name = params.get("name") or params.get("uri") or params.get("taskId")
    found = ["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: %s" % message["method"]]
    return found + (["Mcp-Name: %s" % name] if name else [])


class HttpTarget:
    """Mutated requests on the TCP door and on the socket, in pieces, dropped at any time."""

    name = "http"

    def __init__(self, live, seed):
        self.live, self.seed, self.session = live, seed, b"none"

    def request(self, rng):
        kind = rng.randrange(8)
        message = dict({"jsonrpc": "2.0"}, **rng.choice(HOST_SAYINGS))
        if kind < 3:
            modern = (
                isinstance(message.get("params"), dict)
                and "_meta" in message["params"]
                and META + "protocolVersion" in message["params"]["_meta"]
            )
            headers = (
                modern_headers(message) if modern else ["Mcp-Session-Id: SESSION", "MCP-Protocol-Version: 2025-11-25"]
            )
            value = fuzz_mutate.mutate_value(rng, message) if rng.random() < 0.7 else message
            return post("/mcp/" + rng.choice(("target", "target,calm", "wild", "nobody", "a%00")), value, *headers)
        if kind == 3:
            return post("/mcp/target", dict({"jsonrpc": "2.0"}, **HOST_SAYINGS[0]))
        if kind == 4:
            method = rng.choice(("GET", "DELETE", "OPTIONS", "PUT", "HEAD"))
            path = rng.choice(
                ("/mcp/target", "/v1/events", "/v1/status", "/v1/openapi.json", "/v1/tools?server=target", "/", "*")
            )
            return (
                "%s %s HTTP/1.1\r\nHost: localhost\r\nMcp-Session-Id: SESSION\r\n"
                "Last-Event-ID: 0-0\r\nAccept: */*\r\n\r\n" % (method, path)
            ).encode()
        path, body = rng.choice(
            [
                (
                    "/v1/call",
                    {
                        "server": "target",
                        "tool": "say",
                        "arguments": {"a": 1},
                        "session": "s",
                        "cwd": "/tmp",
                        "parentSession": "p",
                    },
                ),
                ("/v1/resource", {"server": "target", "uri": "fuzz://one"}),
                ("/v1/prompt", {"server": "target", "prompt": "p", "arguments": {}}),
                (
                    "/v1/complete",
                    {
                        "server": "target",
                        "ref": {"type": "ref/prompt", "name": "p"},
                        "argument": {"name": "a", "value": ""},
                    },
                ),
                ("/v1/asks/1", {"action": "accept", "content": {}}),
                ("/v1/restart", {"name": "nobody"}),
                ("/v1/reload", {}),
            ]
        )
        return post(path, fuzz_mutate.mutate_value(rng, body) if rng.random() < 0.8 else body)

    def step(self, number):
        rng = random.Random("%s http %d" % (self.seed, number))
        data = b"".join(self.request(rng) for _ in range(rng.choice((1, 1, 1, 2, 5))))
        if rng.random() < 0.6:
            data = fuzz_mutate.mutate_bytes(rng, data, fuzz_mutate.HTTP_PIECES)
        data = data.replace(b"SESSION", self.session)
        answer, cut = self.exchange(rng, data)
        start = answer.find(b"Mcp-Session-Id: ")
        if start >= 0:
            self.session = answer[start + 16 :].split(b"\r\n")[0]
        while answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            answer = answer[25:]
        if answer and not answer.startswith(b"HTTP/1.1 "):
            return ["an answer that is no HTTP: %r" % answer[:200]]
        return ["a connection was closed without an answer to %r" % data[:400]] if cut and not answer else []

    def exchange(self, rng, data):
        """Send bytes in pieces; returns (what came back, whether the daemon hung up before we did)."""
        local = rng.random() < 0.3
        link = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        link.settimeout(ANSWER_LIMIT_S)
        answer, complete = b"", False
        with link:
            link.connect(
                glob.glob(str(self.live.place.root) + "/r/mcpx/*.sock")[0] if local else ("127.0.0.1", self.live.port)
            )
            try:
                for piece in [data] if rng.random() < 0.5 else split(rng, data):
                    link.sendall(piece)
                if rng.random() < 0.2:
                    return answer, False  # vanish
                # Half of a request is answered by nothing: wait a little, not for ever.
                link.settimeout(0.15)
                while len(answer) < 1 << 20:
                    piece = link.recv(1 << 16)
                    if not piece:
                        complete = True
                        break
                    answer += piece
            except OSError:
                complete = False
        return answer, complete and bool(data.strip(b"\r\n"))

    def hang_up(self):
        """Nothing stays connected between steps."""

    close = hang_up


def split(rng, data):
    """Bytes in a few pieces of random size."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 6)))
    return [data[a:b] for a, b in zip([0] + cuts, cuts + [len(data)])]


# ---------------------------------------------------------------------------
# A server that says anything
# ---------------------------------------------------------------------------


class ChildTarget:
    """Calls of tools whose server says mutated messages before the true answer; and servers that lie from birth."""

    name = "child"

    def __init__(self, live, seed):
        self.live, self.seed, self.hosts = live, seed, {}

    def step(self, number):
        rng = random.Random("%s child %d" % (self.seed, number))
        server = rng.choice(("wild", "wild", "wild", "wild-modern", "born", "born-modern"))
        revision = rng.choice(("2025-11-25", "2025-06-18", "2024-11-05"))
        host = self.hosts.get((server, revision))
        if host is None or host.process.poll() is not None:
            host = self.hosts[(server, revision)] = ShimHost(
                self.live.place, server, revision, random.Random("%s lies" % self.seed)
            ).greet()
        found, names = [], []
        for index in range(rng.randint(1, 4)):
            arguments = {"seed": "%s.%d.%d" % (self.seed, number, index), "count": rng.randint(1, 15), "h": 1}
            meta = {"progressToken": "t%d" % index}
            if server.startswith("born"):
                meta["dev.mcpx/session"] = "%s-%d" % (self.seed, number)
            if rng.random() < 0.3:
                meta.update(ENVELOPE)
            names.append(host.begin("tools/call", {"name": "wild", "arguments": arguments, "_meta": meta}))
        if rng.random() < 0.2:
            names.append(host.begin(rng.choice(("resources/list", "prompts/list", "resources/templates/list")), {}))
        for name in names:
            if not host.wait(name):
                found.append("a call of %s by a host of %s was not answered" % (server, revision))
            elif host.answers[json.dumps(name)] != 1:
                found.append("a call of %s was answered %d times" % (server, host.answers[json.dumps(name)]))
        found += host.problems()
        host.answers.clear()
        for path in self.live.watch.state.glob("logs/server-wild*.log"):
            if "FUZZ not a message" in path.read_text(errors="replace"):
                found.append("a server was sent what is no message, see %s" % path.name)
        return found

    def hang_up(self):
        """Leave nothing connected; the next step connects anew."""
        for host in self.hosts.values():
            host.close()
        self.hosts = {}

    close = hang_up


# ---------------------------------------------------------------------------
# Too much of it
# ---------------------------------------------------------------------------


def long_line(middle):
    return (
        b'{"jsonrpc":"2.0","id":"big","method":"tools/call","params":{"name":"say","arguments":{"a":' + middle + b"}}}"
    )


# name -> (whether it goes over HTTP, the bytes)
FLOODS = {
    "300,000 empty objects": (False, lambda: b"{}\n" * 300000),
    "300,000 lines of noise": (False, lambda: b"x\n" * 300000),
    "20,000 requests for a list": (
        False,
        lambda: b"".join(b'{"jsonrpc":"2.0","id":%d,"method":"tools/list"}\n' % n for n in range(20000)),
    ),
    "a batch of 200,000": (False, lambda: b"[" + b"{}," * 200000 + b"{}]"),
    "brackets without end": (False, lambda: b"[" * 8000000),
    "a number of four million digits": (False, lambda: long_line(b"9" * 4000000)),
    "three thousand long numbers": (False, lambda: long_line(b"[" + b",".join([b"9" * 4300] * 3000) + b"]")),
    "a million equal keys": (False, lambda: long_line(b"{" + b'"a":1,' * 1000000 + b'"a":1}')),
    "500,000 keys": (False, lambda: long_line(b"{" + b",".join(b'"%d":1' % n for n in range(500000)) + b"}")),
    "a long line of escapes": (False, lambda: long_line(b'"' + b"\\ud800" * 1000000 + b'"')),
    "60,000 pipelined requests": (True, lambda: b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60000),
    "9,000 headers": (True, lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 9000 + b"\r\n"),
    "a header without end": (True, lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 4000000),
    "a million tiny chunks": (
        True,
        lambda: b"POST /mcp/target HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1000000,
    ),
    "a target of 60,000 bytes": (True, lambda: b"GET /mcp/" + b"%41" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "10,000 server names": (True, lambda: post("/mcp/" + ",".join(["target"] * 8000), HOST_SAYINGS[0])),
    "a million empty lines": (False, lambda: b"\n" * 1000000),
}


class FloodTarget:
    """One thing in great number, at once; then a pause in which the bystander must have been served."""

    name = "flood"
    # Room that the allocator has kept from one flood for the next: it goes up and down by this much, for ever.
    allowance_kib = 160 * 1024

    def __init__(self, live, _seed):
        self.live = live

    def step(self, number):
        name = list(FLOODS)[number % len(FLOODS)]
        over_http, make = FLOODS[name]
        self.live.bystander.worst = (0.0, 0.0)
        found = self.over_http(make()) if over_http else self.over_stdio(make())
        return ["%s: %s" % (name, text) for text in found + self.live.problems()]

    def over_stdio(self, data):
        host = ShimHost(self.live.place, "target").greet()
        host.send(data)
        canary = host.begin("ping", {})
        found = [] if host.wait(canary, 60) else ["the host's own next ping was not answered"]
        found += host.problems()
        host.close()
        return found

    def over_http(self, data):
        with socket.create_connection(("127.0.0.1", self.live.port)) as link:
            link.settimeout(0.5)
            sender = threading.Thread(target=self._send, args=(link, data), daemon=True)
            sender.start()
            deadline, quiet = time.monotonic() + 30, 0
            while time.monotonic() < deadline and quiet < 2:
                try:
                    if not link.recv(1 << 20):
                        break
                    quiet = 0
                except socket.timeout:
                    quiet += 1
                except OSError:
                    break
        sender.join(5)
        return []

    def _send(self, link, data):
        try:
            link.sendall(data)
        except OSError:
            return  # it was refused in the middle, as it should be

    def hang_up(self):
        """Nothing stays connected between steps."""

    close = hang_up


# ---------------------------------------------------------------------------
# A daemon that lies to its shims
# ---------------------------------------------------------------------------

DAEMON_SAYINGS = [
    b"c welcome 0.1.0 67108864 0.5 0.5 134217728",
    b"c welcome",
    b"c welcome x y z",
    b"c bye mcpx stop",
    b"c fail no such server",
    b"c",
    b'a1 {"jsonrpc":"2.0","id":"own-1","result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{}}}',
    b"a1",
    b"a",
    b"ax {}",
    b"a99999999999999999999 {}",
    b"d1",
    b"d",
    b"dx",
    b'm {"jsonrpc":"2.0","method":"notifications/x"}',
    b"m",
    b"s {}",
    b"s",
    b's {"initialize":5,"revision":"2025-11-25","used":[1],"subscriptions":7}',
    b"HTTP/1.1 400 Bad Request",
    b"\xff\xfe",
    b"\0",
    b"",
]


class ShimTarget:
    """Something else listens where the daemon should, and talks nonsense; then the daemon is there again."""

    name = "shim"

    def __init__(self, live, seed):
        self.live, self.seed = live, seed
        self.place = Place("shim")
        self.place.configure(
            {
                "calm": {
                    "command": sys.executable,
                    "args": [str(HERE / "fuzz_child.py"), "calm"],
                    "mcpx": {"scope": "global"},
                }
            }
        )
        config = str(self.place.dirs["XDG_CONFIG_HOME"] / "mcpx" / "config.json")
        self.path = fuzz_parts.mcpx.socket_path(config, self.place.env())
        os.makedirs(os.path.dirname(self.path), 0o700, exist_ok=True)

    def step(self, number):
        rng = random.Random("%s shim %d" % (self.seed, number))
        self.place.run("stop")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(5)
        listener.settimeout(10)
        host = ShimHost(self.place, "calm")
        host.begin(
            "initialize",
            {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "f", "version": "1"}},
        )
        try:
            link, _ = listener.accept()
            self.lie(rng, link)
        except socket.timeout:
            return ["a shim did not connect"]
        finally:
            listener.close()
            if os.path.exists(self.path):
                os.unlink(self.path)
        found = []
        # What was taken for the answer to initialize is the liar's; everything after it must work.
        name = host.begin(
            "initialize",
            {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "f", "version": "1"}},
        )
        if not host.wait(name, 40):
            found.append(
                "a shim did not find back to its daemon: alive %s, %s" % (host.process.poll() is None, host.said())
            )
        host.noise = []  # a shim passes on what its daemon says, as it is
        found += host.problems()
        host.close()
        return found

    def lie(self, rng, link):
        link.settimeout(5)
        try:
            link.recv(1 << 20)
            if rng.random() < 0.5:
                link.sendall(DAEMON_SAYINGS[0] + b"\n")
            for _ in range(rng.randint(1, 8)):
                data = rng.choice(DAEMON_SAYINGS)
                if rng.random() < 0.3:
                    data = fuzz_mutate.mutate_bytes(rng, data, fuzz_mutate.JSON_PIECES)
                link.sendall(data + b"\n")
            link.sendall(b"a1 half of an ans")
            time.sleep(rng.choice((0, 0, 0.05)))
        except OSError:
            return  # the shim has hung up, which is a good answer
        finally:
            link.close()

    def hang_up(self):
        """Nothing stays connected between steps."""

    def close(self):
        left = self.place.leftovers()
        self.place.remove()
        if left:
            raise Failed("left over by shims: %s" % left)


TARGETS = [FloodTarget, HostTarget, HttpTarget, ChildTarget, ShimTarget]
