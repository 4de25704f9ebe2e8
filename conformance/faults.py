#!/usr/bin/env python3
"""Many hosts on stateful servers, and everything breaks: nobody may notice more than a delay or one honest error.

usage: faults.py [--seed N] [--seconds N] [--faults N] [--hosts N] [--mode NAME] [--upgrade] [--holder]
                 [--quick] [--keep]

    --seed N      where chance starts (from the clock); printed, and the same seed chooses the same again
    --seconds N   how long to go on (60); with --faults, whichever comes last
    --faults N    how many faults at least
    --hosts N     hosts at a time (10)
    --mode NAME   only faults of one mode (see MODES), instead of another mode in each epoch
    --upgrade     also upgrade the daemon in mid-flight, by `mcpx.py reload --upgrade`
    --keep        leave the directories, for a look at the logs
    --holder      also kill what keeps the children's pipes, and expect children to outlive the daemon
    --quick       what CI runs: a fixed seed, about half a minute

A step begins calls, lets some faults happen among them and waits until the dust has settled; then the answers, what
the servers have written down, and what `mcpx status` counts must agree. An epoch is some steps; at its end all hosts
go, and nothing may be left. The last line is `N faults, N calls, N problems`.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import faults_hosts
from faults_model import SCOPES, Call, Ledger, genuine
from faults_watch import Watch, held_by, is_running
from fuzz_live import free_port
from place import Failed, Place

HERE = Path(__file__).resolve().parent
# One short epoch of each mode, however long that takes here.
QUICK = {"seed": "11", "hosts": 6, "steps": 2}

# The settings of the daemon under test: as short as a loaded machine allows.
CALL_TIMEOUT_S = 6
SETTINGS = {
    "callTimeout": "%ds" % CALL_TIMEOUT_S,
    "startTimeout": "6s",
    "coldWait": "10s",
    "question.timeout": "2s",
    "cancelGrace": "2s",
    "idleTimeout": "1500ms",
    "keep": "500ms",
    "drainTimeout": "1s",
    "shim.drainTimeout": "300ms",
    "shim.closeTimeout": "300ms",
    "stop.eofGrace": "1s",
    "stop.termGrace": "1s",
    "backoff.first": "50ms",
    "backoff.max": "200ms",
    "queueTimeout": "25s",
    "max": 24,
    "http.auth": "none",
    "log.level": "info",
}

# So long the next daemon waits for the hosts of a dead one, cancels for them, and lets that take effect.
ORPHANS_S = 20
# Within this time after the death of a daemon no server can have ended by idleTimeout.
OUTLIVE_S = 1.2

STEPS_PER_EPOCH = 12
# How long a call may take in all, whatever happened to it: the limit of a call whose answer was lost on the way,
# after a wait in a queue behind others of that kind.
ANSWER_LIMIT_S = CALL_TIMEOUT_S * 3 + 15
# How long what a fault has done may still show, after it is over: a handshake whose answer was lost, and back-off.
AFTERMATH_S = {"child wire": 8.0, "daemon": 2.5, "child": 2.5}
# At rest the daemon may be this much larger than after the second epoch: the tables of its allocator, its caches.
GROWTH_KIB = 16 * 1024
# Idle time, the graces of a server that does not go, and what a loaded machine adds.
REST_LIMIT_S = 25
OWN_LIMIT_S = 80
# A question's state may be redeemed for a minute after its time, by a host that has no connection to lose.
OWN_TABLES = ("tokens", "instances", "slots", "held")
PROBLEMS_SHOWN = 15
LOG_SHOWN = 6000  # characters
# Files that are made when they are first needed and then stay, and how many of a kind: the code that runs and the
# code before it are kept by an upgrade.
STAYING = {"state/mcpx/starter-H.lock": 1, "state/mcpx/secret": 1, "state/mcpx/token": 1, "state/mcpx/code-H": 1}
STAYING["state/mcpx/code-H/mcpx-H.py"] = 2

# mode -> kinds of faults, with how often each is drawn. "gentle" ones do no harm: every call must have its result.
GENTLE = {
    "host delay": 3,
    "host split": 3,
    "http delay": 2,
    "http split": 2,
    "wire delay": 3,
    "wire split": 3,
    "stop child": 2,
    "stop wire": 1,
    "stop shim": 2,
    "stop daemon": 2,
    "deaf host": 2,
    "link delay": 2,
    "link split": 2,
}
MODES = {
    "gentle": GENTLE,
    "hosts": dict(
        GENTLE,
        **{
            "link cut": 3,
            "host ff": 3,
            "host nul": 2,
            "host newline": 3,
            "host drop": 2,
            "host twice": 3,
            "host glue": 2,
            "kill shim": 2,
            "host vanish": 2,
            "http cut": 3,
            "http hangup": 3,
            "http ff": 2,
            "http nul": 1,
        }
    ),
    "children": dict(GENTLE, **{"kill child": 4, "kill wire": 3, "wire cut": 2, "call die": 3}),
    "wires": dict(
        GENTLE,
        **{
            "wire ff": 3,
            "wire nul": 1,
            "wire newline": 2,
            "wire drop": 2,
            "wire twice": 4,
            "wire glue": 2,
            "wire cut": 2,
        }
    ),
    "daemon": dict(GENTLE, **{"kill daemon": 5}),
    "everything": dict(
        GENTLE,
        **{
            "link cut": 2,
            "kill daemon": 2,
            "kill child": 3,
            "kill wire": 2,
            "kill shim": 2,
            "host vanish": 2,
            "host ff": 2,
            "host twice": 2,
            "host drop": 1,
            "http cut": 2,
            "http hangup": 2,
            "wire ff": 2,
            "wire twice": 2,
            "wire glue": 1,
            "wire cut": 2,
            "call die": 2,
        }
    ),
}


class Wire:
    """One running faults_wire.py: its process, its server, and the way to order harm."""

    def __init__(self, facts, writer):
        self.pid, self.child, self.server, self.instance = (
            facts["wire"],
            facts["child"],
            facts["server"],
            facts["instance"],
        )
        self.writer = writer

    def order(self, order):
        self.writer.write(json.dumps(order).encode() + b"\n")


class Driver:
    """Everything in one event loop: hosts, calls, faults, and the verdicts."""

    def __init__(self, options):
        self.options, self.seed = options, options.seed
        self.place = Place("faults")
        self.watch = Watch(self.place)
        self.port = free_port()
        self.dirs = [self.place.root / ("dir%d" % n) for n in range(3)]
        for path in self.dirs:
            path.mkdir()
        self.ledger = Ledger(self.place.root / "ledger")
        self.hosts, self.calls, self.by_id = [], {}, {}
        self.wires, self.harms = [], []  # harms under way: (kind, predicate on calls, until)
        self.hits = []  # what wires have done in this step, for a look when it has gone wrong
        self.shown_step = None  # of which that and the log were shown
        self.problems, self.counts = [], collections.Counter()
        self.step_number = self.serial = 0
        self.killed_daemon = self.killed_holder = self.killed_host = False  # in this step
        self.daemon, self.killed_at = None, 0.0
        self.rest_before = {}  # pid of a daemon -> memory after its first epoch
        self.base = None

    # -- noting ----------------------------------------------------------------

    def problem(self, text):
        self.problems.append(text)
        if len(self.problems) <= PROBLEMS_SHOWN:
            print("PROBLEM seed %s step %d: %s" % (self.seed, self.step_number, text), flush=True)
            if self.step_number != self.shown_step:
                self.shown_step = self.step_number
                for hit in self.hits:
                    print("    wire: %s" % hit, flush=True)
                print("    log: " + "\n    log: ".join(self.watch.tail(LOG_SHOWN).splitlines()[1:]), flush=True)

    def hear(self, host, message):
        """A host has been sent a message."""
        if "method" in message:
            self._hear_notice(host, message)
            return
        call = self.by_id.get(message.get("id"))
        if message.get("id") is None and message.get("error", {}).get("code") in (-32700, -32600):
            return  # a line that nobody could read; its call is known to have been damaged
        if call is None:
            self.problem("host %s got an answer to nothing: %s" % (host.token, json.dumps(message)[:300]))
        elif call.host is not host:
            self.problem(
                "host %s got the answer of host %s: %s" % (host.token, call.host.token, json.dumps(message)[:300])
            )
        elif (message.get("result") or {}).get("resultType") == "input_required":
            self._answer_in_result(host, call, message["result"])
        else:
            wrong = call.on_answer(message)
            if wrong:
                self.problem("%s got %s" % (self.describe(call), wrong))

    def _hear_notice(self, host, message):
        params = message.get("params") or {}
        if message["method"] == "notifications/progress":
            call = self.by_id.get(params.get("progressToken"))
            if call is None or call.host is not host:
                self.problem("host %s heard progress that is not its own: %s" % (host.token, params))
            elif call.answers and call.copies == 1:
                self.problem("%s heard progress after its answer" % self.describe(call))
            elif params["progress"] <= call.progress and call.copies == 1 and not call.harms:
                self.problem("%s heard progress that does not rise" % self.describe(call))
            else:
                call.progress = params["progress"]
        elif message["method"] == "elicitation/create":
            self._hear_question(host, message, params)
        elif message["method"] == "ping":
            host.post({"jsonrpc": "2.0", "id": message["id"], "result": {}})

    def _hear_question(self, host, message, params):
        label = (params.get("message") or "").rpartition("] ")[2]
        if not self.is_of(host, label):
            self.problem("host %s was asked what belongs to %s" % (host.token, label))
        host.post({"jsonrpc": "2.0", "id": message["id"], "result": {"action": "accept", "content": {"answer": label}}})

    def _answer_in_result(self, host, call, result):
        """A question that travels in a result: repeat the request with the answer."""
        responses = {}
        for key, question in (result.get("inputRequests") or {}).items():
            label = question["params"]["message"].rpartition("] ")[2]
            # Which of its own calls an older server asks for cannot always be told, whose they are can.
            if not self.is_of(host, label):
                self.problem("%s was asked what belongs to %s" % (self.describe(call), label))
            responses[key] = {"action": "accept", "content": {"answer": label}}
        params = dict(call.params, inputResponses=responses)
        if "requestState" in result:
            params["requestState"] = result["requestState"]
        self.post_call(host, call, params)

    def is_of(self, host, label):
        """Whether a label is that of a call of this host, be it long over."""
        return label.partition(".")[0] == host.token.partition("~")[0]

    def unanswered(self, host, message, why):
        """An HTTP exchange has ended without an answer."""
        call = self.by_id.get(message.get("id"))
        if call is None or call.settled:
            return
        call.void = why
        if not call.harms and call.arrived and not host.dead and not call.cancelled:
            self.problem("%s got no answer: %s" % (self.describe(call), why))

    def describe(self, call):
        return "%s of %s %s (%s on %s, begun %.1f s ago, harms %s)" % (
            call.label,
            call.host.kind,
            call.host.revision,
            call.tool,
            call.server,
            time.monotonic() - call.began,
            sorted(call.harms),
        )

    # -- calls -------------------------------------------------------------------

    def owner_of(self, host, server, label, named_session, named_dir):
        """Who may be served by the process that serves this call."""
        scope = SCOPES[server]
        if scope == "global":
            return genuine("all")
        if scope == "cwd":
            return genuine("d:%s" % (named_dir or host.cwd))
        if scope == "pid":
            own = "p:relay" if host.relayed else "p:" + host.token
            return genuine(own) if host.kind == "stdio" else genuine("c:" + label)
        session = named_session or host.session
        if session:
            return genuine("s:" + session)
        if host.kind == "http" and host.modern:
            return genuine("c:" + label)
        return genuine("s:%s %s" % (host.token, host.session_id if host.kind == "http" else ""))

    def begin(self, host, rng, tool=None, server=None, **arguments):
        """Begin one call, drawn at random where it is not given."""
        server = server or rng.choice(host.servers)
        tool = tool or rng.choice(
            ("note", "note", "note", "look", "look", "keep", "wait", "wait", "watch", "fat", "ask")
        )
        if tool == "ask" and server == "excl":
            tool = "note"
        self.serial += 1
        label = genuine("%s.%d" % (host.token.partition("~")[0], self.serial))
        named_session = "%s-%s" % (host.token, rng.choice("AB")) if server == "sess" and rng.random() < 0.25 else None
        named_dir = str(rng.choice(self.dirs)) if server == "dir" and rng.random() < 0.25 else None
        owner = self.owner_of(host, server, label, named_session, named_dir)
        if tool in ("wait", "watch"):
            arguments["seconds"] = round(rng.uniform(0.0, 0.5), 3)
        if tool == "fat":
            arguments["size"] = rng.choice((100, 70000, 300000))
        if rng.random() < 0.15:
            arguments["pad"] = "p\u00e9" * rng.choice((10, 3000, 60000))
        arguments.update(label=label, owner=owner)
        call = Call(label, host, server, tool, owner, arguments)
        call.session_named = named_session or named_dir
        meta = host.meta(
            **{
                name: value
                for name, value in (("dev.mcpx/session", named_session), ("dev.mcpx/cwd", named_dir))
                if value
            }
        )
        call.meta = meta
        call.params = {"name": host.tool_name(server, tool), "arguments": arguments, "_meta": meta}
        now = time.monotonic()
        for kind, touches, until in self.harms:
            if (until is None or now < until) and touches(call):
                call.harm(kind)
        self.calls[label] = call
        self.counts["calls"] += 1
        self.post_call(host, call, call.params)
        return call

    def post_call(self, host, call, params):
        request_id = host.request_id()
        call.ids.append(request_id)
        call.written = False
        self.by_id[request_id] = call
        params = dict(params, _meta=dict(params["_meta"], progressToken=request_id))

        def on_written(order):
            call.written = True
            fault = order["fault"] if order else None
            if fault in ("ff", "nul", "newline", "glue"):
                call.arrived = False
            elif fault == "twice":
                call.copies = 2
            elif fault == "drop":
                call.arrived, call.void = False, "it was lost on its way to mcpx"
            if fault in ("cut", "hangup"):
                call.harm("http wire")

        host.post({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}, on_written, harm=True)

    def cancel(self, call):
        """Give a call up, as a host does whose person has changed their mind."""
        if not call.settled and call.host.kind == "stdio" and not call.host.dead:
            call.cancelled, call.void = True, "it was cancelled"
            call.host.post(
                {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": call.ids[-1]}}
            )

    def under_way(self):
        return [call for call in self.calls.values() if not call.settled]

    def harm(self, kind, touches, aftermath=0.0):
        """From now on, calls for which `touches(call)` may end in an honest error; returns a function that ends it."""
        for call in self.under_way():
            if touches(call):
                call.harm(kind)
        entry = [kind, touches, None]
        self.harms.append(entry)

        def over():
            entry[2] = time.monotonic() + aftermath

        return over

    # -- hosts -------------------------------------------------------------------

    async def add_host(self, rng):
        self.serial += 1
        token = genuine("h%d" % self.serial)
        revision = rng.choice(faults_hosts.REVISIONS[-2:] + faults_hosts.REVISIONS + (faults_hosts.MODERN,) * 3)
        servers = list(SCOPES) if rng.random() < 0.8 else [rng.choice(list(SCOPES))]
        session = "shared-%d" % rng.randrange(2) if rng.random() < 0.3 else None
        kind = rng.choice(
            (faults_hosts.HttpHost,) * 4 + (faults_hosts.RelayedHost,) * 3 + (faults_hosts.StdioHost,) * 5
        )
        host = kind(self, token, servers, revision, rng.choice(self.dirs), session)
        try:
            await host.start(self.place)
        except asyncio.TimeoutError:
            self.problem("host %s (%s) was not greeted within 60 s: %s" % (token, revision, host.complaint()))
        self.hosts.append(host)

    async def remove_host(self, host, how):
        self.hosts.remove(host)
        for call in self.under_way():
            if call.host is host:
                call.void = "its host has gone"
        await host.end(how)

    async def fill_up(self, rng):
        while len(self.hosts) < self.options.hosts:
            await self.add_host(rng)

    # -- faults --------------------------------------------------------------------

    async def fault(self, kind, rng):
        """Let one fault happen and wait until it is over; returns whether there was anything for it to strike."""
        where, _, what = kind.partition(" ")
        order = {"fault": what, "at": rng.random(), "seconds": rng.uniform(0.02, 0.5), "pieces": rng.choice((2, 7, 40))}
        if where in ("host", "http") and what != "vanish":
            return await self._harm_host_wire("stdio" if where == "host" else "http", order, rng)
        if kind in ("kill shim", "host vanish"):
            return await self._lose_host(kind, rng)
        if where == "wire":
            return await self._harm_child_wire(order, rng)
        if where == "link":
            return await self._harm_link(order, rng)
        if kind in ("kill child", "kill wire"):
            return await self._kill_child(kind, rng)
        if kind == "call die":
            return await self._call_die(rng)
        if where == "stop":
            return await self._stop(what, rng)
        if kind == "deaf host":
            return await self._deafen(rng)
        if kind == "kill daemon":
            return await self._kill_daemon()
        if kind == "kill holder":
            return self._kill_holder()
        return await self._upgrade()

    async def _harm_host_wire(self, transport, order, rng):
        hosts = [host for host in self.hosts if host.kind == transport]
        if hosts:
            host = rng.choice(hosts)
            host.harms.append(order)
            self.begin(host, rng)
        return bool(hosts)

    async def _harm_link(self, order, rng):
        """Between a shim and the daemon."""
        hosts = [host for host in self.hosts if host.relayed]
        if not hosts:
            return False
        host = rng.choice(hosts)
        over = self.harm("link", lambda call: call.host is host, 1.0) if order["fault"] == "cut" else None
        host.link_harms.append(order)
        self.begin(host, rng)
        await asyncio.sleep(0.2)
        if over is not None:
            over()
        return True

    async def _lose_host(self, kind, rng):
        hosts = [host for host in self.hosts if host.kind == "stdio"]
        if hosts:
            self.killed_host = True
            await self.remove_host(rng.choice(hosts), "kill" if kind == "kill shim" else "vanish")
        return bool(hosts)

    async def _harm_child_wire(self, order, rng):
        wires = [wire for wire in self.wires if is_running(wire.pid)]
        if not wires:
            return False
        wire, order["side"] = rng.choice(wires), rng.choice(("in", "out"))
        if order["fault"] == "twice":
            order["side"] = "out"  # a pipe does not double what a server is told; a server may well say a thing twice
        over = None
        if order["fault"] not in ("delay", "split", "twice"):
            over = self.harm("child wire", lambda call: call.server == wire.server, AFTERMATH_S["child wire"])
        # It must not strike later, when it is not expected any more.
        wire.order(dict(order, until=time.time() + 0.5))
        hosts = [host for host in self.hosts if wire.server in host.servers]
        if hosts:
            self.begin(rng.choice(hosts), rng, server=wire.server)
        await asyncio.sleep(order["seconds"] if order["fault"] == "delay" else 0.1)
        if over is not None:
            over()
        return True

    async def _kill_child(self, kind, rng):
        wires = [wire for wire in self.wires if is_running(wire.pid)]
        if wires:
            wire = rng.choice(wires)
            over = self.harm("child", lambda call: call.server == wire.server, AFTERMATH_S["child"])
            self.kill(wire.child if kind == "kill child" else wire.pid)
            await asyncio.sleep(0.1)
            over()
        return bool(wires)

    async def _call_die(self, rng):
        if not self.hosts:
            return False
        host = rng.choice(self.hosts)
        server = rng.choice(host.servers)
        over = self.harm("child", lambda call: call.server == server, AFTERMATH_S["child"])
        dying = self.begin(host, rng, tool=rng.choice(("die", "dielook")), server=server)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while not dying.settled and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        over()
        return True

    async def _stop(self, what, rng):
        if what == "daemon":
            pids = [self.daemon]
        elif what == "shim":
            pids = [host.pid for host in self.hosts if host.kind == "stdio"]
        else:
            pids = [wire.child if what == "child" else wire.pid for wire in self.wires if is_running(wire.pid)]
        if pids:
            pid = rng.choice(pids)
            self.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 0.7))
            self.kill(pid, signal.SIGCONT)
        return bool(pids)

    async def _deafen(self, rng):
        hosts = [host for host in self.hosts if host.kind == "stdio"]
        if hosts:
            host = rng.choice(hosts)
            host.may_read.clear()
            for _ in range(3):
                self.begin(host, rng, tool="fat")
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            host.may_read.set()
        return bool(hosts)

    async def _kill_daemon(self):
        before = await self.status() if self.options.holder else None
        over = self.harm("daemon", lambda call: True, AFTERMATH_S["daemon"])
        self.killed_daemon, old, self.killed_at = True, self.daemon, time.monotonic()
        began = time.monotonic()
        self.kill(old)
        for host in self.hosts:
            host.lost_session = host.kind == "http"
        await self.find_daemon(old, 20)
        if before is not None and time.monotonic() - began < OUTLIVE_S:
            self._check_children(before)
        for host in self.hosts:
            if host.kind == "http" and host.lost_session:
                host.lost_session = False
                await host.again()
        over()
        return True

    def _check_children(self, before):
        """Servers that were at work have outlived their daemon. Too early for any to have ended by being idle."""
        if self.killed_holder or before["daemon"]["pid"] == self.daemon:
            return
        if any(kind in ("child", "child wire", "link") for kind, _, _ in self.harms):
            return  # they may have died of something else
        for instance in before["instances"]:
            busy = instance["state"] == "busy" and instance["inFlight"] and not instance["key"].startswith("call:")
            if self.killed_host and instance["key"].startswith(("pid:", "session:")):
                continue  # it has gone with the one whose it was
            if busy and instance["server"] != "excl" and not is_running(instance["pid"]):
                self.problem("a server at work did not outlive its daemon: %s" % json.dumps(instance)[:400])

    async def find_daemon(self, old, seconds):
        """Wait for a daemon after `old`: hosts start it with their next requests, or a person with a command."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = await self.status(2)
            if status is not None and status["daemon"]["pid"] != old:
                self.daemon = status["daemon"]["pid"]
                return
            if not any(host.kind == "stdio" and not host.relayed for host in self.hosts):
                await self.in_thread(lambda: self.place.run("call", "glob.look", "label=x", "owner=x"))
            await asyncio.sleep(0.05)
        self.problem("no daemon came back within %d s" % seconds)

    def _kill_holder(self):
        holders = [pid for pid, text in self.place.survivors() if "mcpx-holder" in text]
        self.killed_holder = self.killed_holder or bool(holders)
        for pid in holders:
            self.kill(pid)
        return bool(holders)

    async def _upgrade(self):
        """The daemon goes on with other code: nothing ends, nothing is lost, and nobody is excused."""
        before, old = await self.status(), self.daemon
        code, out, err = await self.in_thread(lambda: self.place.run("reload", "--upgrade"))
        if code != 0 and "under way" not in err and not self.killed_daemon:
            self.problem("reload --upgrade ended with %d: %s" % (code, (err or out)[-300:]))
        after = await self.status()
        if self.killed_daemon or before is None:
            return True
        if after is None or after["daemon"]["pid"] != old:
            self.problem("the daemon is another process after an upgrade")
            return True
        pids = {instance["id"]: instance["pid"] for instance in before["instances"]}
        for instance in after["instances"]:
            if pids.get(instance["id"], instance["pid"]) != instance["pid"]:
                self.problem("instance %s has another process after an upgrade" % instance["id"])
        return True

    def kill(self, pid, number=signal.SIGKILL):
        try:
            os.kill(pid, number)
        except (ProcessLookupError, TypeError):
            pass  # it was faster

    # -- a step ----------------------------------------------------------------------

    async def in_thread(self, work):
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def status(self, seconds=20):
        return await self.in_thread(lambda: self.watch.status(seconds))

    async def step(self, kinds):
        self.step_number += 1
        self.hits = []
        rng = random.Random("%s step %d" % (self.seed, self.step_number))
        await self.fill_up(rng)
        gate = self.place.root / ("gate%d" % self.step_number)
        for _ in range(rng.randint(0, 4)):
            host = rng.choice(self.hosts)
            parked = self.begin(
                host,
                rng,
                tool="park",
                server=rng.choice([name for name in host.servers if name != "excl"] or host.servers),
                gate=str(gate),
            )
            # On a busy machine this step may take longer than a call may.
            asyncio.get_running_loop().call_later(CALL_TIMEOUT_S - 0.3, parked.harm, "a gate that stays shut")
        names, weights = list(kinds), list(kinds.values())
        chosen = rng.choices(names, weights, k=rng.randint(2, 6))
        work = [
            self._later(rng.uniform(0, 0.35), self._burst, rng.randrange(1 << 30)) for _ in range(rng.randint(2, 5))
        ]
        work += [
            self._later(rng.uniform(0, 0.3), self.fault, kind, random.Random(rng.randrange(1 << 30))) for kind in chosen
        ]
        done = await asyncio.gather(*work)
        for kind, happened in zip(chosen, done[-len(chosen) :]):
            if happened:
                self.counts["faults"] += 1
                self.counts[kind] += 1
        await self._written()
        await self._count_in_flight()
        gate.touch()
        await self._settle()
        await self._judge()
        gate.unlink()

    async def _later(self, delay, function, *arguments):
        await asyncio.sleep(delay)
        return await function(*arguments)

    async def _burst(self, seed):
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 5)):
            if self.hosts:
                call = self.begin(rng.choice(self.hosts), rng)
                if rng.random() < 0.12 and call.server != "excl":
                    asyncio.get_running_loop().call_later(rng.uniform(0, 0.3), self.cancel, call)

    async def _written(self):
        """Until all that hosts have to say has been written, or its host has gone."""
        deadline = time.monotonic() + 10
        while any(not call.written for call in self.under_way()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _expected(self):
        """The calls that mcpx must count now, and how many more it may: those whose host has hung up."""
        certain = [call for call in self.under_way() if call.arrived]
        doubtful = [
            call
            for call in self.calls.values()
            if call.void
            and not call.answers
            and call.arrived
            and (call.host.kind == "http" or call.harms)
            and time.monotonic() - call.began < CALL_TIMEOUT_S + 3
        ]
        return len(certain), len(certain) + len(doubtful)

    async def _count_in_flight(self):
        """What `mcpx status` counts as in flight are the calls in flight."""
        # What a dead daemon had in flight for hosts that do not come back counts until mcpx gives them up.
        deadline, last = max(time.monotonic() + CALL_TIMEOUT_S + 6, self.killed_at + ORPHANS_S), None
        while time.monotonic() < deadline:
            # Both looks see the same only when nothing was settled in between.
            before = self._expected()
            status = await self.status()
            after = self._expected()
            if status is not None:
                counted = status["tables"]["calls"]
                if min(before[0], after[0]) <= counted <= max(before[1], after[1]):
                    per_host = {
                        host["pid"]: host["inFlight"] for host in status["hosts"] if host["source"] == "process"
                    }
                    wrong = [
                        host.token
                        for host in self.hosts
                        if host.kind == "stdio"
                        and not host.modern
                        and not host.relayed
                        and before == after
                        and per_host.get(host.pid, 0) > sum(1 for call in self.under_way() if call.host is host)
                    ]
                    if not wrong:
                        self.daemon = status["daemon"]["pid"] if self.killed_daemon else self.daemon
                        return
                    last = "hosts %s have more in flight than they asked" % wrong
                else:
                    last = "%d calls in flight, status counts %d" % (after[0], counted)
            else:
                last = "no status"
            await asyncio.sleep(0.05)
        self.problem(
            "after the dust has settled: %s (%s)" % (last, [self.describe(call) for call in self.under_way()][:4])
        )

    async def _settle(self):
        """Wait for the answers. A call whose answer was lost on the child's wire ends later, by callTimeout."""

        def open_calls():
            return [call for call in self.under_way() if call.arrived and "child wire" not in call.harms]

        deadline = time.monotonic() + ANSWER_LIMIT_S
        while open_calls() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _judge(self):
        await asyncio.sleep(0.03)  # a second answer would come now
        now = time.monotonic()
        self.ledger.read()
        for call in list(self.calls.values()):
            if not call.settled:
                if not call.arrived and now - call.began > 2:
                    call.void = "it arrived damaged"
                elif now - call.began > ANSWER_LIMIT_S:
                    self.problem("%s has no answer" % self.describe(call))
                    call.void = "given up"
                else:
                    continue
            elif now - call.began < CALL_TIMEOUT_S + 2 and (call.harms or call.copies > 1 or call.void):
                continue  # what was interrupted may still be carried out: judged later
            wrong = self.ledger.wrong(call)
            if wrong:
                self.problem("%s: %s" % (self.describe(call), wrong))
            del self.calls[call.label]
            self.ledger.forget(call)
        # Late answers must still be told from answers to nothing.
        if len(self.by_id) > 20000:
            live = {request_id for call in self.calls.values() for request_id in call.ids}
            self.by_id = {name: call for name, call in self.by_id.items() if name in live or now - call.began < 120}
        self.harms = [entry for entry in self.harms if entry[2] is None or entry[2] > now]
        self.wires = [wire for wire in self.wires if is_running(wire.pid)]
        for line in self.watch.mistakes():
            self.problem("mcpx made a mistake: %s" % line[-1800:])
        status = await self.status()
        if status is None:
            await self.find_daemon(None, 20)
        elif status["daemon"]["pid"] != self.daemon:
            if not self.killed_daemon:
                self.problem("the daemon was replaced, and nobody had killed it")
            self.daemon = status["daemon"]["pid"]
        self.killed_daemon = self.killed_holder = self.killed_host = False

    # -- an epoch ----------------------------------------------------------------------

    async def rest(self, rng):
        """All hosts go, in all ways; then nothing may be left but a daemon as it was."""
        hosts, self.hosts = list(self.hosts), list(self.hosts)
        await asyncio.gather(
            *(self.remove_host(host, rng.choice(("orderly", "orderly", "kill", "vanish"))) for host in hosts)
        )

        began, status, tables = time.monotonic(), None, None
        while tables is None or any(tables.values()):
            # A server that has lost a request of mcpx's own is kept until that is given up.
            own_only = tables is not None and not any(tables[name] for name in tables if name not in OWN_TABLES)
            if time.monotonic() - began > (OWN_LIMIT_S if own_only else REST_LIMIT_S):
                self.problem("not at rest without hosts: %s; still there: %s" % (tables, status and status["hosts"]))
                return
            await asyncio.sleep(0.1)
            status = await self.status()
            tables = status["tables"] if status is not None else None
        # A look of ours may still be leaving while the next one counts.
        looks = [await self.in_thread(self.watch.footprint) for _ in range(3)]
        now = dict(
            looks[-1],
            descriptors=min(look["descriptors"] for look in looks),
            processes=min(look["processes"] for look in looks),
        )
        files = self.watch.files()
        if self.base is None:
            self.base = dict(now, files=files)
        for what in ("descriptors", "processes"):
            if now[what] > self.base[what]:
                held = await self.in_thread(lambda: held_by(now["pid"]))
                self.problem("%s at rest: %d at first, %d now: %s" % (what, self.base[what], now[what], held))
        more = [name for name, count in files.items() if count > max(self.base["files"][name], STAYING.get(name, 0))]
        more = [name for name in more if "/logs/" not in name and "/cache/" not in name]
        if more:
            self.problem("files that were not there at first: %s" % sorted(more)[:8])
        known = self.rest_before.setdefault(now["pid"], now["memory"])
        if now["memory"] > known + GROWTH_KIB:
            self.problem("memory at rest: %d KiB at first, %d KiB now" % (known, now["memory"]))
        self.last_rest = now

    async def epoch(self, number, until):
        rng = random.Random("%s epoch %d" % (self.seed, number))
        mode = self.options.mode or list(MODES)[number % len(MODES)]
        kinds = dict(MODES[mode])
        if self.options.upgrade:
            kinds["upgrade"] = 3
        if self.options.holder and mode in ("daemon", "everything"):
            kinds["kill holder"] = 1
        began, before = time.monotonic(), dict(self.counts)
        for _ in range(QUICK["steps"] if self.options.quick else STEPS_PER_EPOCH):
            await self.step(kinds)
            if len(self.problems) > 200 or until():
                break
        await self.rest(rng)
        rest = getattr(self, "last_rest", {})
        print(
            "epoch %d %-10s %3d faults, %4d calls, %.0f s; at rest %s KiB, %s descriptors"
            % (
                number,
                mode,
                self.counts["faults"] - before.get("faults", 0),
                self.counts["calls"] - before.get("calls", 0),
                time.monotonic() - began,
                rest.get("memory"),
                rest.get("descriptors"),
            ),
            flush=True,
        )

    async def run(self):
        control = self.place.root / "control.sock"
        server = await asyncio.start_unix_server(self._on_wire, path=str(control))
        self.configure(control)
        await self.in_thread(lambda: self.place.run("call", "glob.look", "label=x", "owner=x"))
        self.daemon = (await self.status())["daemon"]["pid"]
        await self.rest(random.Random(self.seed))
        began, number = time.monotonic(), 0

        def until():
            if self.options.quick:
                return number >= len(MODES)
            return time.monotonic() - began > self.options.seconds and self.counts["faults"] >= self.options.faults

        try:
            while not until() and len(self.problems) <= 200:
                await self.epoch(number, until)
                number += 1
        finally:
            for host in list(self.hosts):
                await self.remove_host(host, "kill")
            server.close()

    async def _on_wire(self, reader, writer):
        try:
            line = await reader.readline()
            if line:
                self.wires.append(Wire(json.loads(line), writer))
            while True:
                hit = await reader.readline()
                if not hit:
                    break
                self.hits.append(hit.decode().rstrip())
        except (OSError, asyncio.CancelledError):
            return  # the wire was killed, or the run is over

    def configure(self, control):
        python = [self.place.python, "-I", "-S"]
        servers = {}
        for name, scope in SCOPES.items():
            env = {"FAULTS_CONTROL": str(control), "FAULTS_LEDGER": str(self.ledger.path), "FAULTS_NAME": name}
            servers[name] = {
                "command": python[0],
                "args": python[1:] + [str(HERE / "faults_wire.py")] + python + [str(HERE / "faults_upstream.py")],
                "env": env,
                "mcpx": {"scope": scope},
            }
        servers["excl"]["mcpx"]["sharing"] = "exclusive"
        self.place.configure(servers, **dict(SETTINGS, **{"http.listen": "127.0.0.1:%d" % self.port}))


def parse(arguments):
    parser = argparse.ArgumentParser(description="Many hosts on stateful servers, and everything breaks.")
    parser.add_argument("--seed")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--holder", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the directories, for a look at the logs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hosts = QUICK["hosts"]
        options.seed = options.seed or QUICK["seed"]
    options.seed = options.seed or str(int(time.time()))
    return options


def main(arguments):
    options = parse(arguments)
    print("seed %s" % options.seed, flush=True)
    driver = Driver(options)
    try:
        asyncio.run(driver.run())
        for left in driver.place.leftovers():
            driver.problem("left over: %s" % left)
    except Failed as error:
        driver.problem(str(error))
    finally:
        if options.keep:
            print("directories: %s" % driver.place.root)
        else:
            driver.place.remove()
    kinds = {name: count for name, count in driver.counts.items() if name not in ("faults", "calls")}
    print("faults: %s" % ", ".join("%s %d" % row for row in sorted(kinds.items())))
    print("%d faults, %d calls, %d problems" % (driver.counts["faults"], driver.counts["calls"], len(driver.problems)))
    return 1 if driver.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
