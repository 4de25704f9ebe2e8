"""The tests of mcpx, in the sections of mcpx.py, same names, same order.

    python3 -m pytest            everything
    python3 -m pytest -k wire    what has a word in its name

Most of it needs no process, socket or clock. Where only processes show a thing, each test has a Lab: private
HOME and XDG directories, and so a daemon of its own. A LabHost speaks JSON lines to `mcpx.py serve`, as a coding
agent does. The good server is `mcpx.py demo-server`; the bad ones are this file run again as
`python test_mcpx.py --role NAME`, and write down what they saw, so that a test can look at all three ends.
Nothing is waited for by sleeping: every wait names what it waits for and has a deadline whose failure prints
what the hosts, the shims, the daemon and the servers have said.
"""
from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import fcntl
import glob
import http.client
import itertools
import json
import marshal
import os
import queue
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
MCPX = os.path.join(HERE, "mcpx.py")

# How long anything may take that should happen at once. Long, because a busy machine is not a bug.
PATIENCE_S = 20
# Between two looks at something that cannot wake us (a file, a process table).
LOOK_EVERY_S = 0.02

SESSION = "dev.mcpx/session"
PARENT = "dev.mcpx/parent-session"
CWD = "dev.mcpx/cwd"
RESTARTED = "dev.mcpx/restarted"
RELATED_TASK = "io.modelcontextprotocol/related-task"


# ---------------------------------------------------------------------------
# Roles: the servers that behave badly
#
# A role is an Upstream with one bad habit and is otherwise well behaved. It records every event (start, each
# message, begin and end of a call, EOF, TERM) as a JSON line in the file given with --record. Runs before
# pytest is imported: a test may start dozens of them.
# ---------------------------------------------------------------------------


def read_only(tool):
    tool.hints = {"readOnlyHint": True}
    return tool


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(LOOK_EVERY_S / 4)


class Upstream:
    """A decent server that writes down what happens to it."""

    capabilities = {"tools": {"listChanged": True}, "resources": {"subscribe": True}, "logging": {}}

    def __init__(self, options):
        self.options = options
        self.writing = threading.Lock()
        self.asked = {}  # our question's id -> the queue its answer goes to

    def record(self, event, **more):
        path = self.options.get("--record")
        if path:
            line = json.dumps(dict(more, event=event, pid=os.getpid(), at=time.monotonic())) + "\n"
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, line.encode())
            os.close(fd)

    def write(self, data, step=1 << 20):
        with self.writing:
            while data:
                data = data[os.write(1, data[:step]):]

    def send(self, message):
        self.write(json.dumps(dict(message, jsonrpc="2.0")).encode() + b"\n")

    def run(self):
        self.record("start", argv=sys.argv)
        if "--gate" in self.options:
            wait_for_file(self.options["--gate"])
        self.on_start()
        for line in sys.stdin.buffer:
            self.on_line(line)
        self.record("eof")
        self.on_eof()
        os._exit(0)

    def on_start(self):
        pass

    def on_eof(self):
        pass

    def on_line(self, line):
        message = json.loads(line)
        self.record("got", message=message if len(line) < 100_000 else {"method": message.get("method")})
        if "method" not in message:
            waiting = self.asked.pop(message.get("id"), None)
            if waiting:
                waiting.put(message)
        elif "id" in message:
            self.on_request(message)

    def on_request(self, message):
        method, params = message["method"], message.get("params") or {}
        if method == "tools/call":
            threading.Thread(target=self.run_tool, args=(message,), daemon=True).start()
            return
        answer = getattr(self, "on_" + method.replace("/", "_"), None)
        if answer is None:
            self.send({"id": message["id"], "error": {"code": -32601, "message": "no " + method}})
        else:
            self.send({"id": message["id"], "result": answer(params)})

    def on_initialize(self, params):
        return {"protocolVersion": params["protocolVersion"], "capabilities": self.capabilities,
                "serverInfo": {"name": self.options["--role"], "version": "1"}}

    def on_ping(self, params):
        return {}

    def on_tools_list(self, params):
        return {"tools": self.tools()}

    def on_resources_list(self, params):
        return {"resources": [{"uri": "role://one", "name": "one"}]}

    def on_resources_templates_list(self, params):
        return {"resourceTemplates": [{"uriTemplate": "role://made-by/{name}", "name": "made"}]}

    def on_resources_read(self, params):
        return {"contents": [{"uri": params["uri"], "text": str(os.getpid())}]}

    def on_resources_subscribe(self, params):
        return {}

    on_resources_unsubscribe = on_logging_setLevel = on_resources_subscribe

    def tools(self):
        found = []
        for name in sorted(dir(self)):
            if name.startswith("tool_"):
                tool = {"name": name[5:], "description": name[5:], "inputSchema": {"type": "object"}}
                hints = getattr(getattr(self, name), "hints", None)
                found.append(dict(tool, annotations=hints) if hints else tool)
        return found

    def run_tool(self, message):
        params = message["params"]
        name, arguments = params["name"], params.get("arguments") or {}
        tag = str(arguments.get("tag", ""))[:100]
        arguments = {key: value for key, value in arguments.items() if key != "tag"}
        self.record("begin", tool=name, tag=tag, wire_id=message["id"])
        try:
            result = self.call_tool(name, arguments, message)
        except Exception as error:  # noqa: B902: a server reports its own mistakes as a failed tool
            result = {"content": [{"type": "text", "text": repr(error)}], "isError": True}
        self.record("end", tool=name, tag=tag)
        if isinstance(result, str):
            result = {"content": [{"type": "text", "text": result}]}
        if result is not None:
            self.send({"id": message["id"], "result": result})

    def call_tool(self, name, arguments, message):
        return getattr(self, "tool_" + name)(**arguments)

    def ask(self, method, params):
        """Ask the host; returns its whole answer."""
        our_id = "q%d" % random.randrange(1 << 40)
        waiting = self.asked[our_id] = queue.Queue()
        self.record("asked", method=method)
        self.send({"id": our_id, "method": method, "params": params})
        return waiting.get()

    @read_only
    def tool_echo(self, text):
        return text

    def tool_whoami(self):
        return json.dumps({"pid": os.getpid(), "cwd": os.getcwd(), "argv": sys.argv, "env": dict(os.environ)})

    def tool_hold(self, until):
        """Do not answer before a file is there; a cancel does not stop it, so that its answer comes late."""
        wait_for_file(until)
        return "held"

    @read_only
    def tool_watch(self, until):
        wait_for_file(until)
        return "watched"

    def tool_touch(self, uri):
        self.send({"method": "notifications/resources/updated", "params": {"uri": uri}})
        return uri

    def tool_link(self, uri):
        return {"content": [{"type": "resource_link", "uri": uri, "name": uri}]}

    def tool_length(self, text):
        return str(len(text))


class Silent(Upstream):
    """Takes everything and never says a word."""

    def on_request(self, message):
        pass


class Noisy(Upstream):
    """Prints what people print on stdout: banners, colours, blank lines, JSON of other kinds, CRLF, a BOM."""

    def on_start(self):
        self.write(b"\xef\xbb\xbfWelcome to Noisy 1.0!\r\n\r\n")

    def send(self, message):
        frame = json.dumps(dict(message, jsonrpc="2.0")).encode()
        for noise in (b"\x1b[32mINFO\x1b[0m ready", b"", b"42", b'"ok"', b'{"a":1}', b"[]", b"[1]", b"null", b"{bad"):
            self.write(noise + b"\r\n")
        self.write(b"\xef\xbb\xbf" + frame + b"\r\n")


class Mortal(Upstream):
    """Does what it is asked, notes it in a ledger, and dies before it has answered."""

    def die(self, how):
        sys.stderr.write("first words\nthe fuse blew\n")
        sys.stderr.flush()
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "mute":  # the process goes on, nobody hears it
            os.close(1)
            return
        if how == "heir":  # somebody else keeps the pipes open
            if os.fork() == 0:
                time.sleep(600)
        os._exit({"exit": 3, "zero": 0, "heir": 0}[how])

    def note(self, ledger, text):
        with open(ledger, "a") as file:
            file.write(text + "\n")
        with open(ledger) as file:
            return file.read().count(text)

    def tool_spend(self, ledger, how="exit"):
        self.note(ledger, "spent")
        self.die(how)

    @read_only
    def tool_look(self, ledger, lives):
        if self.note(ledger, "looked") <= lives:
            self.die("exit")
        return "seen"

    def tool_repeat(self, ledger, lives):
        if self.note(ledger, "repeated") <= lives:
            self.die("exit")
        return "again"

    tool_repeat.hints = {"idempotentHint": True}


class Stubborn(Upstream):
    """Does not go when told: --ignore eof, or eof+term."""

    def on_start(self):
        signal.signal(signal.SIGTERM, self.on_term)

    def on_term(self, *_):
        self.record("term")
        if "term" not in self.options["--ignore"]:
            os._exit(0)

    def on_eof(self):
        while True:
            time.sleep(1)


class LastWords(Upstream):
    """Writes what it was told only when it has seen the end of its input, and takes its time."""

    told = ()

    def on_start(self):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))

    def tool_tell(self, text):
        self.told += (text,)
        return "noted"

    def on_eof(self):
        time.sleep(0.7)
        with open(self.options["--out"], "w") as file:
            file.write("\n".join(self.told))


class Brood(Upstream):
    """Starts helpers that leave its process group: one in its own session, one that nobody is the parent of."""

    def on_start(self):
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        helper = ["sh", "-c", "sleep 600; :", self.options["--out"]]
        pids = [subprocess.Popen(helper, start_new_session=True, **quiet).pid]
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.setsid()
            orphan = subprocess.Popen(helper, start_new_session=True, **quiet)
            os.write(write_end, str(orphan.pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        pids.append(int(os.read(read_end, 20)))
        if "--kept" in self.options:
            pids.append(subprocess.Popen([self.options["--kept"], "600"], start_new_session=True, **quiet).pid)
        self.pids = pids

    def tool_helpers(self):
        return json.dumps(self.pids)


class Flood(Upstream):
    """Says far more than anybody asked for."""

    def tool_flood(self, kind, count):
        if kind == "stderr":
            for n in range(count):
                sys.stderr.write("complaint %d %s\n" % (n, "x" * 200))
            return "complained"
        flood = {
            "log": {"method": "notifications/message", "params": {"level": "info", "data": "x" * 500}},
            "list": {"method": "notifications/tools/list_changed"},
            "answers": {"id": 999_999_999, "result": {}},
            "unknown": {"method": "notifications/never/heard/of"},
        }[kind]
        for _ in range(count):
            self.send(flood)
        return "flooded"


class Deaf(Upstream):
    """Stops reading once it has been greeted."""

    def on_line(self, line):
        super().on_line(line)
        if b"notifications/initialized" in line:
            while True:
                time.sleep(1)


class HeadFirst(Upstream):
    """Reads nothing while an answer of its own is being taken."""

    def on_request(self, message):
        if message["method"] == "tools/call":
            self.run_tool(message)
        else:
            super().on_request(message)

    def tool_fat(self, size):
        return "x" * size


class Closing(HeadFirst):
    """Closes an end of its own pipes and lives on."""

    def tool_shut(self, fd):
        if fd == 0:
            os.close(0)
            self.send({"method": "notifications/shut"})
        else:
            os.close(fd)
        while True:
            time.sleep(1)


class Old(Upstream):
    """Knows the first revision only."""

    def on_initialize(self, params):
        return dict(super().on_initialize(params), protocolVersion="2024-11-05")


class Strict(Upstream):
    """Exits on a second handshake, and on anything but a handshake before it."""

    stage = ("initialize", "notifications/initialized")

    def on_line(self, line):
        method = json.loads(line).get("method")
        if self.stage:
            if method != self.stage[0]:
                os._exit(4)
            self.stage = self.stage[1:]
            time.sleep(0.2)  # a handshake that takes a while: whoever is impatient is caught
        elif method in ("initialize", "notifications/initialized"):
            os._exit(5)
        super().on_line(line)


class Lock(Upstream):
    """Holds a file for as long as it lives, as a browser its profile, and takes a second to go."""

    def on_start(self):
        self.held = open(self.options["--lock"], "w")
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.record("collision")
            sys.stderr.write("profile is in use\n")
            os._exit(6)

    def on_eof(self):
        time.sleep(0.7)


class Pages(Upstream):
    """Lists its tools two at a time; one of its cursors is the empty string."""

    def on_tools_list(self, params):
        tools = self.tools()
        start = int(params["cursor"] or 4) if "cursor" in params else 0
        page = {"tools": tools[start:start + 2]}
        if start + 2 < len(tools):
            page["nextCursor"] = "" if start + 2 == 4 else str(start + 2)
        return page


class Versions(Upstream):
    """Has the tools that a file names, and reads it anew each time."""

    def tools(self):
        with open(self.options["--tools"]) as file:
            return super().tools() + [{"name": n, "inputSchema": {"type": "object"}} for n in file.read().split()]

    def tool_announce(self, times=1):
        for _ in range(times):
            self.send({"method": "notifications/tools/list_changed"})
        return "announced"

    def tool_exit(self):
        os._exit(0)


class Bytes(Upstream):
    """Writes answers that are not quite answers."""

    def call_tool(self, name, arguments, message):
        frame = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result":
                            {"content": [{"type": "text", "text": "TEXT"}]}}).encode()
        odd = {
            "bad_utf8": frame.replace(b"TEXT", b"\xff\xfe") + b"\n",
            "raw_nul": frame.replace(b"TEXT", b"a\0b") + b"\n",
            "surrogate": frame.replace(b"TEXT", b"\\ud800") + b"\n",
            "half": frame[:len(frame) // 2],
            "bare": frame,
            "glued": b"no newline here" + frame + b"\n",
            "drops": None,
        }
        if name not in odd:
            return super().call_tool(name, arguments, message)
        if name == "drops":
            self.write(frame.replace(b"TEXT", "aé漢😀z".encode()) + b"\n", step=1)
            return None
        self.write(odd[name])
        if name in ("half", "bare"):
            os._exit(0)
        return None

    @read_only
    def tool_bad_utf8(self):
        """Listed only: call_tool answers."""

    tool_raw_nul = tool_surrogate = tool_glued = tool_drops = tool_bad_utf8

    def tool_half(self):
        """Listed only."""

    tool_bare = tool_half


class Curious(Upstream):
    """Asks its host, once a file is there."""

    QUESTIONS = {
        "elicitation/create": {"message": "who?", "requestedSchema": {
            "type": "object", "properties": {"answer": {"type": "string"}}}},
        "sampling/createMessage": {"maxTokens": 5, "messages": [
            {"role": "user", "content": {"type": "text", "text": "hi"}}]},
        "roots/list": {},
    }

    def tool_mutter(self, text, until):
        """Log before and after a wait."""
        self.send({"method": "notifications/message", "params": {"level": "info", "data": text}})
        wait_for_file(until)
        self.send({"method": "notifications/message", "params": {"level": "info", "data": text}})
        return text

    def tool_inquire(self, method="elicitation/create", after=None):
        if after:
            wait_for_file(after)
        answer = self.ask(method, self.QUESTIONS[method])
        return json.dumps(answer.get("result") or answer)


class Patient(Upstream):
    """Skips a line that is no JSON, as servers on the SDKs do: it may be half of one, from a daemon that was killed."""

    def on_line(self, line):
        try:
            json.loads(line)
        except ValueError:
            self.record("half a line", size=len(line))
        else:
            super().on_line(line)


class Duet(Curious):
    """`follow` asks when `lead` has its answer; then `lead` ends, and last comes what `follow` was told."""

    def on_start(self):
        self.led = queue.Queue()

    def call_tool(self, name, arguments, message):
        if name != "lead":
            return super().call_tool(name, arguments, message)
        self.ask("elicitation/create", self.QUESTIONS["elicitation/create"])
        self.led.put(message["id"])

    def tool_lead(self):
        """Ask, and leave the answer to the call of the other."""

    def tool_follow(self):
        lead, told = self.led.get(), queue.Queue()
        self.asked["f"] = told
        self.send({"id": "f", "method": "elicitation/create", "params": dict(
            self.QUESTIONS["elicitation/create"], message="follow?")})
        self.send({"id": lead, "result": {"content": [{"type": "text", "text": "led"}]}})
        return json.dumps(told.get()["result"])


class Loose(Curious):
    """Careless with its questions."""

    def tool_stammer(self):
        """Ask twice under one id, and be content with the first answer."""
        told = self.asked["again"] = queue.Queue()
        for _ in range(2):
            self.send({"id": "again", "method": "elicitation/create", "params": self.QUESTIONS["elicitation/create"]})
        told.get()
        return "stammer"

    def tool_afterthought(self, until):
        """Ask one thing, and with its answer another, for which it does not wait."""
        self.ask("elicitation/create", self.QUESTIONS["elicitation/create"])
        self.send({"id": "after", "method": "elicitation/create", "params": self.QUESTIONS["elicitation/create"]})
        wait_for_file(until)
        return "afterthought"

    def tool_forget(self):
        """Ask two things, and end with the first answer."""
        told = self.asked["one"] = self.asked["two"] = queue.Queue()
        for name in ("one", "two"):
            self.send({"id": name, "method": "elicitation/create", "params": self.QUESTIONS["elicitation/create"]})
        told.get()
        return "forget"


class Wide(Upstream):
    """Has a long answer."""

    def tool_pour(self, until):
        wait_for_file(until)
        return "x" * (4 << 20)


class Everywhere(Curious):
    """Says which process answers, whatever it is asked."""

    capabilities = dict(Upstream.capabilities, prompts={}, completions={})

    def on_prompts_list(self, params):
        return {"prompts": [{"name": "who"}]}

    def on_prompts_get(self, params):
        return {"messages": [{"role": "user", "content": {"type": "text", "text": str(os.getpid())}}]}

    def on_completion_complete(self, params):
        return {"completion": {"values": [str(os.getpid())]}}

    def tool_who(self):
        return str(os.getpid())

    def tool_who_asks(self):
        self.ask("elicitation/create", dict(self.QUESTIONS["elicitation/create"], message=str(os.getpid())))
        return str(os.getpid())


class Tasks(Upstream):
    """Core tasks of 2025-11-25."""

    capabilities = dict(Upstream.capabilities, tasks={"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}})

    def on_start(self):
        self.open = {}  # task id -> [task, its result or None]

    def tools(self):
        support = self.options.get("--support", "optional")
        return [dict(tool, execution={"taskSupport": support}) if tool["name"] == "hold" else tool
                for tool in super().tools()]

    def on_request(self, message):
        params = message.get("params") or {}
        if message["method"] == "tools/call" and "task" in params:
            now = "2026-01-01T00:00:00Z"
            task = {"taskId": "t%d" % len(self.open), "status": "working", "createdAt": now,
                    "lastUpdatedAt": now, "ttl": None, "pollInterval": 50}
            self.open[task["taskId"]] = [task, None]
            self.send({"id": message["id"], "result": {"task": dict(task)}})
            threading.Thread(target=self.work, args=(task["taskId"], params), daemon=True).start()
        elif message["method"] == "tasks/result":
            threading.Thread(target=self.give_result, args=(message,), daemon=True).start()
        elif message["method"].startswith("tasks/") and "taskId" in params and params["taskId"] not in self.open:
            self.send({"id": message["id"], "error": {"code": -32602, "message": "no such task"}})
        else:
            super().on_request(message)

    def work(self, task_id, params):
        text = self.call_tool(params["name"], params["arguments"], None)
        self.settle(task_id, "completed", {"content": [{"type": "text", "text": text}]})

    def settle(self, task_id, status, result):
        entry = self.open[task_id]
        if entry[0]["status"] == "working":
            entry[1] = result
            entry[0]["status"] = status

    def give_result(self, message):
        task_id = message["params"]["taskId"]
        while self.open[task_id][1] is None:
            time.sleep(LOOK_EVERY_S / 4)
        result = dict(self.open[task_id][1], _meta={RELATED_TASK: {"taskId": task_id}})
        self.send({"id": message["id"], "result": result})

    def on_tasks_get(self, params):
        return self.open[params["taskId"]][0]

    def on_tasks_list(self, params):
        return {"tasks": [entry[0] for entry in self.open.values()]}

    def on_tasks_cancel(self, params):
        self.settle(params["taskId"], "cancelled", {"content": [], "isError": True})
        return self.open[params["taskId"]][0]


class Broken(Upstream):
    """Fails before it has said hello, in the way that --how names, until the file --repaired is there."""

    def on_start(self):
        if os.path.exists(self.options.get("--repaired", "")):
            return
        how = self.options["--how"]
        if how != "quiet":
            sys.stderr.write("".join("line %d\n" % n for n in range(1, 5)) + "no key: set DEMO_KEY\n")
            sys.stderr.flush()
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how != "refuse":
            os._exit(2 if how == "exit" else 0)

    def on_request(self, message):
        if self.options["--how"] == "refuse":
            self.send({"id": message["id"], "error": {"code": -31999, "message": "licence expired"}})
        else:
            super().on_request(message)


ROLES = {role.__name__.lower(): role for role in (
    Upstream, Silent, Noisy, Mortal, Stubborn, LastWords, Brood, Flood, Deaf, HeadFirst, Closing, Old, Strict, Lock, Pages,
    Versions, Bytes, Curious, Patient, Duet, Loose, Wide, Everywhere, Tasks, Broken)}


def play_role(arguments):
    options = dict(zip(arguments[::2], arguments[1::2]))
    ROLES[options["--role"]](options).run()


if __name__ == "__main__":
    play_role(sys.argv[1:])

import atexit  # noqa: E402: see the banner above
import functools  # noqa: E402
import pty  # noqa: E402
import py_compile  # noqa: E402
import resource  # noqa: E402
import struct  # noqa: E402
import termios  # noqa: E402
import textwrap  # noqa: E402

import pytest  # noqa: E402

sys.path.insert(0, HERE)
import mcpx  # noqa: E402


# ---------------------------------------------------------------------------
# The lab: private directories, hosts, commands, and what must be left behind: nothing
# ---------------------------------------------------------------------------


def is_running(pid):
    """Whether the process lives; a zombie does not."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        if os.path.isdir("/proc/self"):
            return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE).stdout.strip()
    return bool(state) and not state.startswith(b"Z")


def tail(path, size=6000):
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size))
        return file.read().decode("utf-8", "replace")


def program(*arguments):
    """mcpx as its file starts itself, from byte code: to compile it in each of a thousand processes takes minutes."""
    return [sys.executable, "-I", "-S", "-c", mcpx.boot_code(), MCPX, *arguments]


def impatient(lab, monkeypatch, **constants):
    """Have this test run a copy of the program in which these constants are shorter, as `NAME=(from, to)`."""
    changes = [("\n%s = %s\n" % (name, old), "\n%s = %s\n" % (name, new)) for name, (old, new) in constants.items()]
    monkeypatch.setattr(sys.modules[__name__], "MCPX", newer_code(lab, *changes, version=mcpx.__version__))


@functools.lru_cache(None)
def compiled_directory():
    path = tempfile.mkdtemp(prefix="mx", dir="/tmp")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    os.mkdir(os.path.join(path, "cache"))
    py_compile.compile(os.path.abspath(__file__), cfile=os.path.join(path, "roles.pyc"), doraise=True)
    return path


def compiled(name):
    """Byte code for all labs of this run: the `cache` of mcpx, and this file as `roles.pyc`."""
    return os.path.join(compiled_directory(), name)


class Refused(Exception):
    """A request was answered with a JSON-RPC error."""

    def __init__(self, error):
        super().__init__(json.dumps(error))
        self.error = error


class Host:
    """A coding agent's end of `mcpx.py serve NAME …`: it sends, and keeps all that it has seen."""

    def __init__(self, lab, names, cwd=None, env=None, revision="2025-06-18", capabilities=None, replies=None,
                 reads=True):
        self.lab, self.names = lab, names
        self.revision, self.capabilities = revision, capabilities or {}
        self.replies = dict({"ping": lambda params: {}}, **(replies or {}))  # questions answered by themselves
        self.welcome = None  # the answer to `initialize`
        self.seen, self.news = [], threading.Condition()
        self.writing, self.last_id = threading.Lock(), 0
        self.errors_path = lab.path("shim-%d.err" % len(lab.hosts))
        with open(self.errors_path, "wb") as errors:
            self.process = subprocess.Popen(
                program("serve", *names), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, cwd=cwd or lab.work, env=dict(lab.env, **(env or {})), start_new_session=True)
        self.pid = self.process.pid
        self.reader = threading.Thread(target=self._read, daemon=True)
        if reads:
            self.reader.start()

    # -- what comes in

    def _read(self):
        for line in self.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = {"garbage": line}
            if isinstance(message, dict) and message.get("method") in self.replies and "id" in message:
                reply = self.replies[message["method"]](message.get("params"))
                self.send({"id": message["id"], "result": reply})
            with self.news:
                self.seen.append(message)
                self.news.notify_all()
        with self.news:
            self.seen.append({"end": True})
            self.news.notify_all()

    def expect(self, test, what, within=PATIENCE_S, kind=dict):
        """The first message, past or to come, for which `test` is true; a batch is one of kind `list`."""
        deadline, looked = time.monotonic() + within, 0
        with self.news:
            while True:
                for message in self.seen[looked:]:
                    if isinstance(message, kind) and test(message):
                        return message
                looked = len(self.seen)
                ended = looked and self.seen[-1] == {"end": True}
                if ended or not self.news.wait(max(0, deadline - time.monotonic())):
                    break
        pytest.fail("host %s did not see %s%s\n%s" % (
            "+".join(self.names), what, ", its server ended" if ended else "", self.lab.report()))

    def all(self, method):
        with self.news:
            return [m for m in self.seen if isinstance(m, dict) and m.get("method") == method]

    def answers(self, host_id):
        with self.news:
            return [m for m in self.seen if isinstance(m, dict) and "method" not in m
                    and same_id(m.get("id"), host_id)]

    def answer(self, host_id, within=PATIENCE_S):
        return self.expect(lambda m: "method" not in m and "id" in m and same_id(m["id"], host_id),
                           "an answer to %r" % (host_id,), within)

    def notification(self, method, within=PATIENCE_S, **params):
        def matches(message):
            return message.get("method") == method and params.items() <= message.get("params", {}).items()
        return self.expect(matches, "%s %s" % (method, params or ""), within)

    # -- what goes out

    def write(self, data):
        with self.writing:
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def send(self, message):
        self.write(json.dumps(dict(message, jsonrpc="2.0"), ensure_ascii=False).encode() + b"\n")

    def notify(self, method, **params):
        self.send({"method": method, "params": params})

    def request(self, method, params=None, host_id=None):
        if host_id is None:
            self.last_id += 1
            host_id = self.last_id
        self.send({"id": host_id, "method": method, "params": params or {}})
        return host_id

    def ask(self, method, params=None, within=PATIENCE_S):
        answer = self.answer(self.request(method, params), within)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]

    def begin(self, tool, meta=None, host_id=None, task=None, **arguments):
        """Send a call and do not wait; returns its id."""
        params = {"name": tool, "arguments": arguments}
        if meta:
            params["_meta"] = meta
        if task is not None:
            params["task"] = task
        return self.request("tools/call", params, host_id)

    def result(self, host_id, within=PATIENCE_S):
        answer = self.answer(host_id, within)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]

    def call(self, tool, meta=None, within=PATIENCE_S, **arguments):
        """Call and wait; the text of the result."""
        return text_of(self.result(self.begin(tool, meta, **arguments), within))

    def whoami(self, meta=None, prefix=""):
        result = self.result(self.begin(prefix + "whoami", meta))
        return result.get("structuredContent") or json.loads(text_of(result))

    def hello(self):
        """Send `initialize` only; returns its id."""
        return self.request("initialize", {
            "protocolVersion": self.revision, "capabilities": self.capabilities,
            "clientInfo": {"name": "lab", "version": "1"}})

    def greet(self, within=PATIENCE_S):
        self.welcome = self.result(self.hello(), within)
        self.notify("notifications/initialized")
        return self

    def tools(self):
        return [tool["name"] for tool in self.ask("tools/list")["tools"]]

    def settle(self):
        """Whatever the daemon sent to this host before now has been seen afterwards."""
        self.ask("tools/list")

    # -- the end

    def close(self, within=PATIENCE_S):
        """As a host does that ends in good order; returns the shim's exit status."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if not self.reader.is_alive() and self.reader.ident is None:
            self.process.stdout.close()
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail("the shim did not end after the end of its input\n" + self.lab.report())
        if self.reader.ident is not None:
            self.reader.join(PATIENCE_S)
        garbage = [m for m in self.seen if isinstance(m, dict) and "garbage" in m]
        assert not garbage, "a host was sent what is not JSON"
        return status

    def kill(self):
        self.process.kill()
        self.process.wait()


def same_id(one, other):
    return type(one) is type(other) and one == other


def text_of(result):
    assert not result.get("isError"), result
    return "".join(block.get("text", "") for block in result["content"])


def is_lost(error):
    """The mark is what counts, never the words."""
    return error["code"] == -32000 and error.get("data") == {"mcpxStreamLost": True}


class Lab:
    """Private directories, one configuration, and everything that a test starts in them."""

    def __init__(self, root):
        self.root = root
        self.hosts = []
        for name in ("home", "config", "state", "tmp", "work"):
            os.mkdir(self.path(name))
        self.home, self.work, self.state = self.path("home"), self.path("work"), self.path("state")
        # A unix socket's path may have 104 bytes; a test's own directory can be longer than that.
        self.runtime = tempfile.mkdtemp(prefix="mx", dir="/tmp")
        self.config = self.path("config", "mcpx", "config.json")
        os.mkdir(os.path.dirname(self.config))
        self.env = {
            "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": self.home, "TMPDIR": self.path("tmp"),
            "XDG_CONFIG_HOME": self.path("config"), "XDG_STATE_HOME": self.state,
            "XDG_CACHE_HOME": compiled("cache"), "XDG_RUNTIME_DIR": self.runtime}

    def path(self, *parts):
        return os.path.join(self.root, *parts)

    def directory(self, *parts):
        os.makedirs(self.path(*parts), exist_ok=True)
        return self.path(*parts)

    # -- configuration

    def configure(self, servers, **settings):
        """Write the configuration; `_` in a setting's name stands for a dot."""
        # A host that leaves in the middle of a call does not want its answer; None asks for the default.
        settings = dict({"shim_drainTimeout": "200ms", "shim_closeTimeout": "200ms", "drainTimeout": "500ms"}, **settings)
        settings = {name.replace("_", "."): value for name, value in settings.items() if value is not None}
        self.write_config(json.dumps({"mcpServers": servers, "mcpx": settings}, indent=1))

    def write_config(self, text):
        with open(self.config + ".new", "w") as file:
            file.write(text)
        os.rename(self.config + ".new", self.config)

    def record_of(self, name):
        """Where the role called `name` writes down what it sees."""
        return self.path(name + ".record")

    def role(self, role, name=None, *options, **settings):
        """A server's entry: a role of this file, recorded under `name`."""
        record = ["--record", self.record_of(name)] if name else []
        return entry(["-I", "-S", compiled("roles.pyc"), "--role", role, *record, *options], settings)

    def seen(self, name, event=None, **fields):
        """The events that a role recorded, in order."""
        try:
            with open(self.record_of(name)) as file:
                events = [json.loads(line) for line in file]
        except FileNotFoundError:
            return []
        return [e for e in events if event in (None, e["event"]) and fields.items() <= e.items()]

    def got(self, name, method):
        """The messages of one method that reached a role."""
        return [e["message"] for e in self.seen(name, "got") if e["message"].get("method") == method]

    # -- processes

    def start(self, *names, **options):
        host = Host(self, names, **options)
        self.hosts.append(host)
        return host

    def host(self, *names, **options):
        """A host that has been greeted."""
        return self.start(*names, **options).greet()

    def run(self, *arguments, cwd=None, env=None, input=None, within=60):
        try:
            return subprocess.run(
                program(*arguments), cwd=cwd or self.work, env=dict(self.env, **(env or {})),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, input=input, timeout=within,
                universal_newlines=True, start_new_session=True)
        except subprocess.TimeoutExpired:
            pytest.fail("mcpx %s did not return\n%s" % (" ".join(arguments), self.report()))

    def command(self, *arguments, **options):
        """A command that must succeed; its output, parsed when it was asked for as JSON."""
        done = self.run(*arguments, **options)
        assert done.returncode == 0, "mcpx %s: %s\n%s\n%s" % (
            " ".join(arguments), done.returncode, done.stderr, self.report())
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    def status(self):
        return self.command("status", "--json")

    def daemon_pid(self):
        return self.status()["daemon"]["pid"]

    def instances(self, server=None):
        return [i for i in self.status()["instances"] if server in (None, i["server"])]

    def pids(self, server):
        return sorted(i["pid"] for i in self.instances(server) if i["pid"])

    def processes(self):
        """All that runs on this lab's account, by pid: found by its environment or its command line."""
        mark, found = ("XDG_STATE_HOME=" + self.state).encode(), {}
        if not os.path.isdir("/proc/self"):
            listing = subprocess.run(["ps", "-axo", "pid=,command="], stdout=subprocess.PIPE).stdout
            rows = [line.split(None, 1) for line in listing.splitlines()]
            return {int(pid): command.decode() for pid, command in rows if self.root.encode() in command}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/environ" % pid, "rb") as environ, open("/proc/%s/cmdline" % pid, "rb") as line:
                    command = line.read()
                    mine = mark in environ.read().split(b"\0") or self.root.encode() in command
            except OSError:
                continue
            if mine and int(pid) != os.getpid() and is_running(int(pid)):
                found[int(pid)] = command.replace(b"\0", b" ").decode("utf-8", "replace")
        return found

    # -- waiting

    def wait_for(self, what, probe, within=PATIENCE_S):
        deadline = time.monotonic() + within
        while True:
            found = probe()
            if found:
                return found
            if time.monotonic() > deadline:
                pytest.fail("waited in vain for %s\n%s" % (what, self.report()))
            time.sleep(LOOK_EVERY_S)

    def wait_gone(self, *pids, within=PATIENCE_S):
        self.wait_for("the end of %s" % (pids,), lambda: not any(map(is_running, pids)), within)

    def wait_begun(self, name, tag=None, count=1):
        """Until that many calls (with that tag) are being worked on by the role."""
        fields = {"tag": tag} if tag else {}
        self.wait_for("a call %s to reach %s" % (tag or "", name),
                      lambda: len(self.seen(name, "begin", **fields)) >= count)

    def gate(self, name):
        return self.path(name + ".gate")

    def open_gate(self, name):
        with open(self.gate(name), "w"):
            pass

    def report(self):
        """What everybody has said, for the message of a failed test."""
        parts = []
        for host in self.hosts[-12:]:
            with host.news:
                seen = "\n".join(json.dumps(m, default=repr)[:300] for m in host.seen[-8:])
            parts.append("--- host %s (pid %d, %s) saw\n%s\n%s" % (
                "+".join(host.names), host.pid, host.process.poll(), seen, tail(host.errors_path, 1500)))
        for folder, _, files in os.walk(os.path.join(self.state, "mcpx", "logs")):
            parts += ["--- %s\n%s" % (name, tail(os.path.join(folder, name))) for name in files]
        # A command line may hold a whole program; its end tells who it is.
        parts += ["--- processes"] + ["%d %s" % (pid, line[-200:]) for pid, line in self.processes().items()]
        return "\n".join(parts)

    # -- the end

    def send_home(self):
        """End the hosts, all at once and in good order."""
        for host in self.hosts:
            with contextlib.suppress(OSError):
                host.process.stdin.close()
        for host in self.hosts:
            host.close()
        self.hosts = []

    def close(self):
        """End everything in good order, then say what was left behind."""
        left = []
        try:
            self.send_home()
            done = self.run("stop")
            if done.returncode not in (0, 1):
                left.append("stop failed: %s" % done.stderr)
            deadline = time.monotonic() + PATIENCE_S
            while self.processes() and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_S)
            left += ["process %d: %s" % (pid, line[-200:]) for pid, line in self.processes().items()]
            left += self.leftovers()
            assert not left, "left behind: %s\n%s" % ("\n".join(left), self.report())
        finally:
            self.kill_everything()
            for host in self.hosts:
                host.kill()
            shutil.rmtree(self.runtime, ignore_errors=True)

    def kill_everything(self):
        """SIGKILL to all of them, again until none is left: one may be starting another at this moment."""
        deadline = time.monotonic() + PATIENCE_S
        while self.processes():
            assert time.monotonic() < deadline, self.report()
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_EVERY_S)

    def leftovers(self):
        """Sockets, temporary directories and records of children that nobody needs any more."""
        sockets = [os.path.join(folder, name) for top in (self.runtime, self.path("tmp"))
                   for folder, _, files in os.walk(top) for name in files if name.endswith(".sock")]
        records = self.path("state", "mcpx", "children")
        temporary = [name for name in os.listdir(self.path("tmp")) if name != "mcpx-%d" % os.getuid()]
        return sockets + temporary + (os.listdir(records) if os.path.isdir(records) else [])


def entry(arguments, settings):
    """A server started by this interpreter; `env`, `cwd` and `inherit` are the entry's, the rest are settings."""
    own = {key: settings.pop(key) for key in ("env", "cwd", "envFile") if key in settings}
    return dict(own, command=sys.executable, args=arguments, mcpx=settings)


def demo(*options, **settings):
    return entry(program("demo-server", *options)[1:], settings)


def new_lab(root):
    lab = Lab(os.path.realpath(root))
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(tmp_path):
    """A lab for one test."""
    yield from new_lab(str(tmp_path))


@pytest.fixture(scope="module")
def calm_lab(tmp_path_factory):
    for lab in new_lab(str(tmp_path_factory.mktemp("calm"))):
        lab.configure({
            "demo": demo(scope="session"),
            "common": demo(scope="global"),
            "bytes": lab.role("bytes", "bytes", scope="session"),
            "noisy": lab.role("noisy", "noisy", scope="session"),
            "plain": lab.role("upstream", "plain", scope="session"),
            "together": lab.role("upstream", "together", scope="global"),
            "old": lab.role("old", None, scope="global"),
            "headfirst": lab.role("headfirst", "headfirst", scope="session"),
            "flood": lab.role("flood", "flood", scope="session"),
            "alone": lab.role("upstream", "alone", scope="global", sharing="exclusive"),
            "pages": lab.role("pages", "pages", scope="global"),
            "paged": demo("--page", "2", scope="global"),
        }, backoff_first="50ms", backoff_max="100ms")
        yield lab


@pytest.fixture
def calm(calm_lab):
    """One lab for all the tests that leave its daemon as they found it."""
    yield calm_lab
    calm_lab.send_home()


# ---------------------------------------------------------------------------
# The file as a whole
# ---------------------------------------------------------------------------

def test_importing_the_file_has_no_side_effects(tmp_path):
    code = ("import sys, os, threading; before = set(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') "
            "else set(); import mcpx; after = set(os.listdir('/proc/self/fd')) if before else set(); "
            "assert before == after, (before, after); assert threading.active_count() == 1; "
            "assert sys.pycache_prefix is None; print('fine')")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
                          env=dict(os.environ, HOME=str(tmp_path)))
    assert done.stdout == "fine\n" and not done.stderr, done.stderr
    assert os.listdir(str(tmp_path)) == []


def test_the_sections_stand_in_their_order():
    with open(MCPX, encoding="utf-8") as file:
        lines = file.read().split("\n")
    ruler = "# " + "-" * 75
    found = [lines[i + 1][2:].split(":")[0] for i, line in enumerate(lines)
             if line == ruler and i + 1 < len(lines) and ":" in lines[i + 1]]
    assert found == ["Constants", "Errors", "Wire", "Revisions", "Identity and scopes", "Settings and config", "Log",
                     "Platform", "Reactor", "Upstream", "Children", "Keeping", "Pool", "Surface", "Questions", "Host", "HTTP",
                     "Snapshot", "Daemon", "Shim", "Demo", "Commands"]


@pytest.mark.parametrize("word, sections", [
    ("selectors.", {"Reactor"}), ("subprocess.Popen", {"Children", "Commands"}), ("os.kill(", {"Children"}),
    ("print(", {"Commands"}), ("argparse.", {"Commands"})])
def test_boundaries_between_sections_hold(word, sections):
    with open(MCPX, encoding="utf-8") as file:
        text = file.read()
    section, used = None, set()
    for before, line in zip([""] + text.split("\n"), text.split("\n")):
        if before == "# " + "-" * 75 and line.startswith("# ") and ":" in line:
            section = line[2:].split(":")[0]
        elif word in line.split("#")[0] and not line.lstrip().startswith('"'):
            used.add(section)
    assert used == sections


def test_only_the_standard_library_is_imported():
    import ast
    with open(MCPX, encoding="utf-8") as file:
        tree = ast.parse(file.read(), feature_version=(3, 9))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    names -= {"__future__"}
    assert all(name in sys.builtin_module_names or _is_standard(name) for name in names), names


def _is_standard(name):
    import importlib.util
    origin = importlib.util.find_spec(name).origin or ""
    return "site-packages" not in origin


def test_the_readme_has_the_settings_as_they_are():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()
    for row in mcpx.SETTINGS.values():
        default = row.default if isinstance(row.default, str) else json.dumps(row.default)
        assert "| `%s` | `%s` | %s | %s |\n" % (
            row.name, default, "server" if row.per_server else "daemon", row.meaning) in text


# ---------------------------------------------------------------------------
# Wire: where a message ends, and what is one
# ---------------------------------------------------------------------------

FRAMES = [b'{"a":1}', "{\"text\":\"né 漢字 🎉\"}".encode(), b"", b"x" * 5000, b'["\xff"]', b"\r", b"last"]


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096, 10 ** 6])
def test_wire_lines_are_the_same_however_the_stream_is_cut(size, grows, monkeypatch):
    monkeypatch.setattr(mcpx, "LONG_LINE_BYTES", 100)
    stream = b"".join(frame + b"\n" for frame in FRAMES) + b"tail"
    buffer, lines = mcpx.LineBuffer(10 ** 6, grows), []
    for start in range(0, len(stream), size):
        lines += buffer.feed(stream[start:start + size])
    assert lines == FRAMES
    assert buffer.rest() == b"tail" and buffer.rest() == b""


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("size", [1, 10, 99, 10 ** 6])
def test_wire_a_line_over_the_limit_is_replaced_and_the_next_one_works(size, grows, monkeypatch):
    monkeypatch.setattr(mcpx, "LONG_LINE_BYTES", 50)
    stream = b'{"id":7,' + b"x" * 200 + b"\n" + b"good\n" + b"y" * 101 + b"\n" + b"z" * 100 + b"\n"
    buffer, lines = mcpx.LineBuffer(100, grows), []
    for start in range(0, len(stream), size):
        lines += buffer.feed(stream[start:start + size])
    assert [isinstance(line, mcpx.Oversize) for line in lines] == [True, False, True, False]
    assert lines[0].head.startswith(b'{"id":7,') and lines[0].size == 208
    assert lines[1] == b"good" and lines[3] == b"z" * 100


def test_wire_memory_stays_bounded_while_an_endless_line_arrives():
    buffer = mcpx.LineBuffer(1000)
    for _ in range(1000):
        assert buffer.feed(b"a" * 1000) == []
    assert buffer.partial == 10 ** 6
    assert sum(map(len, buffer._parts)) <= 1000


@pytest.mark.parametrize("data, code", [
    (b"{bad", -32700), (b"", -32700), (b'{"a":NaN}', -32700), (b'{"a":Infinity}', -32700), (b'"\xff"', -32700),
    (b'{"a":"\x00"}', -32700), (b"[" * 100000, -32700), (b'{"a":1}}', -32700), (b'"\xed\xa0\x80"', -32700)])
def test_wire_what_is_not_json_is_a_parse_error(data, code):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.parse_json(data)
    assert caught.value.code == code


@pytest.mark.parametrize("message, kind", [
    ({"jsonrpc": "2.0", "id": 1, "method": "m"}, "request"),
    ({"jsonrpc": "2.0", "id": "", "method": "m", "params": {}}, "request"),
    ({"jsonrpc": "2.0", "method": "m"}, "notification"),
    ({"jsonrpc": "2.0", "id": 1, "result": {}}, "answer"),
    ({"jsonrpc": "2.0", "id": None, "error": {}}, "answer")])
def test_wire_kinds(message, kind):
    assert mcpx.message_kind(message) == kind


@pytest.mark.parametrize("message", [
    42, "ok", [], None, {}, {"a": 1}, {"jsonrpc": "2.0"}, {"jsonrpc": "1.0", "id": 1, "method": "m"},
    {"jsonrpc": "2.0", "id": 1, "method": 5}, {"jsonrpc": "2.0", "id": 1.5, "method": "m"},
    {"jsonrpc": "2.0", "id": None, "method": "m"}, {"jsonrpc": "2.0", "id": True, "method": "m"},
    {"jsonrpc": "2.0", "id": [1], "method": "m"}, {"jsonrpc": "2.0", "id": 1, "method": "m", "params": [1]},
    {"jsonrpc": "2.0", "result": {}}])
def test_wire_what_is_json_but_no_message_is_an_invalid_request(message):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.message_kind(message)
    assert caught.value.code == -32600


ID_LINES = [
    b'{"jsonrpc":"2.0","id":5,"result":{"n":1.0,"e":1e2,"big":123456789012345678901234567890}}',
    b'{"result":{"content":[{"type":"text","text":"say \\"id\\":5,"}]},"jsonrpc":"2.0","id":5}',
    b'{"id" : 5 , "jsonrpc":"2.0","result":{}}',
    b'{"jsonrpc":"2.0","id":5,"result":{"id":5,"list":[{"id":5}]}}',
    b'{"result":{"id":6},"id":5,"jsonrpc":"2.0"}',
    b'{"jsonrpc":"2.0","\\u0069d":5,"result":{"id":5}}',
    b'{"jsonrpc":"2.0","result":{"a":"\\ud800"},"id":5}',
    b'\xef\xbb\xbf{"jsonrpc":"2.0","id":5,"result":{}}',
    b'{"jsonrpc":"2.0","id":5,"result":{"text":"\\\\\\"id\\":5"}}',
    b'{"jsonrpc":"2.0","result":"\\"","id":5}',
]


@pytest.mark.parametrize("line", ID_LINES)
@pytest.mark.parametrize("new_id", [1, "x", 'quote"d', "\u00e9", -3])
def test_wire_an_id_is_replaced_and_nothing_else(line, new_id):
    message = mcpx.parse_json(line)
    replaced = mcpx.parse_json(mcpx.with_id(line, message, new_id))
    assert replaced == dict(message, id=new_id)


def test_wire_replacing_an_id_keeps_the_spelling_of_numbers():
    line = ID_LINES[0]
    assert mcpx.with_id(line, mcpx.parse_json(line), 9) == line.replace(b'"id":5', b'"id":9')


def test_wire_a_lone_surrogate_leaves_as_the_escape_it_came_as():
    value = mcpx.parse_json(b'{"a":"\\ud800 \xc3\xa9"}')
    assert json.loads(mcpx.encode_json(value)) == value


@pytest.mark.parametrize("head, expected", [
    (b'{"jsonrpc":"2.0","id":12,"method":"x","par', 12), (b'{"jsonrpc":"2.0","method":"x","id":"a","p', "a"),
    (b'{"id":3,', 3), (b'{"params":{"id":3,', None), (b"garbage", None), (b'{"jsonrpc":"2.0","id":1', None)])
def test_wire_the_id_of_an_unreadable_line_is_told_only_where_it_is_plain(head, expected):
    assert mcpx.guess_id(head) == expected


ODD_TEXT = "aé漢😀\u2028\u0000\\\"z"


def as_line(message):
    return json.dumps(dict(message, jsonrpc="2.0"), ensure_ascii=False).encode() + b"\n"


def echo_request(host_id, text):
    return {"id": host_id, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": text}}}


def test_a_message_that_arrives_byte_by_byte_is_one_message(calm):
    host = calm.host("demo")
    for byte in as_line(echo_request("split", ODD_TEXT)):
        host.write(bytes([byte]))
    assert text_of(host.result("split")) == ODD_TEXT


def test_a_message_may_be_cut_at_any_byte(calm):
    """Each message is cut at another place; its second half travels together with the first half of the next."""
    host = calm.host("demo")
    lines = [as_line(echo_request(n, ODD_TEXT)) for n in range(100, 300)]
    rest = b""
    for n, line in enumerate(lines):
        cut = n % len(line)
        host.write(rest + line[:cut])
        rest = line[cut:]
    host.write(rest)
    assert [text_of(host.result(n)) for n in range(100, 300)] == [ODD_TEXT] * 200


@pytest.mark.parametrize("before, after", [
    (b"", b"\r\n"), (b"\xef\xbb\xbf", b"\n"), (b"\n\r\n  \n", b"\n"), (b"", b"  \n\n\n")],
    ids=["crlf", "bom", "blank-lines-before", "blanks-after"])
def test_what_other_systems_put_around_a_line_is_understood(calm, before, after):
    host = calm.start("demo")
    for message in ({"id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}},
            {"method": "notifications/initialized"}, echo_request(2, "x")):
        host.write(before + as_line(message)[:-1] + after)
    assert host.result(1)["protocolVersion"] == "2025-06-18"
    assert text_of(host.result(2)) == "x"


@pytest.mark.parametrize("line", [
    b"{bad", b"{}", b"42", b'"ok"', b"null", b"[]", b"\0\0\0", b'{"jsonrpc":"2.0","method":5,"id":"m5"}',
    b'{"jsonrpc":"2.0","id":"nul","method":"tools/call","params":{"name":"echo","arguments":{"text":"a\0b"}}}',
    b'{"jsonrpc":"2.0","id":"utf","method":"tools/call","params":{"name":"echo","arguments":{"text":"\xff"}}}',
    b'{"jsonrpc":"2.0","id":"deep","method":"ping","params":' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    b'{"jsonrpc":"2.0","id":4711,"result":{"nobody":"asked"}}',
    b'{"jsonrpc":"2.0","id":4711,"error":{"code":1,"message":"nobody asked"}}',
    b'{"jsonrpc":"2.0","method":"notifications/never/heard/of","params":{"a":1}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":{"odd":1}}}',
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":[],"progress":"x"}}',
], ids=["bad-json", "empty-object", "number", "string", "null", "empty-batch", "nul-bytes", "method-is-a-number",
        "nul-in-a-string", "invalid-utf8", "nested-deep", "unasked-result", "unasked-error",
        "unknown-notification", "cancel-of-nonsense", "progress-of-nonsense"])
def test_a_bad_line_of_a_host_costs_that_line_only(calm, line):
    host = calm.host("plain", revision="2025-11-25")
    pid = host.whoami()["pid"]
    before = len(calm.seen("plain", "got", pid=pid))
    host.write(line + b"\n")
    assert host.call("echo", text="next") == "next"
    assert host.whoami()["pid"] == pid
    mine = [e["message"].get("method") for e in calm.seen("plain", "got", pid=pid)[before:]]
    others = ("notifications/never/heard/of", "ping", "tools/list", "resources/list", "resources/templates/list")
    assert [m for m in mine if m not in others] == ["tools/call", "tools/call"]


@pytest.mark.parametrize("line, code", [
    (b'{"jsonrpc":"2.0","id":3,"method":5}', -32600),
    (b'{"jsonrpc":"2.0","id":3}', -32600),
    (b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":[1]}', None),
    (b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":7}}', None),
    (b'{"jsonrpc":"2.0","id":3,"method":"no/such/method"}', -32601)])
def test_a_bad_request_is_refused_under_its_own_id(calm, line, code):
    host = calm.host("demo", revision="2025-11-25")
    host.last_id = 10
    host.write(line + b"\n")
    answer = host.answer(3)
    assert "error" in answer or answer["result"].get("isError")
    assert code is None or answer["error"]["code"] == code
    assert host.call("echo", text="x") == "x"


def test_an_id_comes_back_as_it_was_written(calm):
    host = calm.host("demo")
    for host_id in ("1", 0, -5, 2 ** 53 - 1, "漢字\n", "", "x" * 300):
        host.send(echo_request(host_id, repr(host_id)))
        assert text_of(host.result(host_id)) == repr(host_id)
        assert len(host.answers(host_id)) == 1


def test_an_id_of_another_kind_is_no_request_to_the_server(calm):
    host = calm.host("plain", revision="2025-11-25")
    pid = host.whoami()["pid"]
    for host_id in (None, True, [1], {"a": 1}):
        host.send(echo_request(host_id, "odd"))
    assert host.call("echo", text="x") == "x"
    assert [e["tool"] for e in calm.seen("plain", "begin", pid=pid)] == ["whoami", "echo"]
    # A fraction is an id in JSON-RPC, and none in MCP: either view is fine, silence is not.
    host.send(echo_request(1.5, "half"))
    host.expect(lambda m: m.get("id") == 1.5 or (m.get("id") is None and "error" in m), "an answer to 1.5")
    assert host.call("echo", text="x") == "x"


def test_an_id_in_use_is_refused_and_the_first_call_goes_on(calm, tmp_path):
    host = calm.host("plain")
    gate = str(tmp_path / "gate")
    host.begin("hold", host_id=7, until=gate, tag=gate)
    calm.wait_begun("plain", gate)
    host.send(echo_request(7, "second"))
    assert host.answer(7)["error"]["code"] == -32600
    open(gate, "w").close()
    host.expect(lambda m: m.get("id") == 7 and "result" in m, "the answer to the first call")
    assert [("error" in m) for m in host.answers(7)] == [True, False]
    host.send(echo_request(7, "free again"))
    host.expect(lambda m: m.get("id") == 7 and "free again" in json.dumps(m), "the answer to the third call")


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1 << 20, 8 << 20])
def test_a_result_of_any_size_arrives_whole(calm, size):
    host = calm.host("demo")
    assert len(host.call("big", bytes=size)) == size


@pytest.mark.parametrize("escapes", [False, True], ids=["plain", "with escapes"])
@pytest.mark.parametrize("revision", mcpx.REVISIONS)
def test_large_content_of_all_kinds_is_what_small_content_would_be(lab, revision, escapes):
    """To a host of each revision, for which some of it has to be spelled in another way."""
    lab.configure({"large": fake(lab, "large", """
        def call(name, arguments, host_id):
            with open(os.path.join(os.path.dirname(NOTES), "large.json"), "rb") as file:
                write(b'{"jsonrpc":"2.0","id":%d,"result":%s}\\n' % (host_id, file.read()))
        """)})
    sent = {"content": [{"type": "text", "text": "aé漢" * (1 << 17)}, {"type": "text", "text": 'short and "quoted"'},
                        {"type": "image", "mimeType": "image/png", "data": "aGk+" * (1 << 18)},
                        {"type": "audio", "mimeType": "audio/wav", "data": "YXVk" * (1 << 18)},
                        {"type": "resource_link", "uri": "file:///a", "name": "a", "description": "d" * 9000}],
            "structuredContent": {"text": "s" * (1 << 20), "number": 1.5}, "isError": False, "x-own": [1.5, "o" * 9000]}
    with open(lab.path("large.json"), "w", encoding="utf-8") as file:
        json.dump(sent, file, ensure_ascii=escapes)
    if revision == mcpx.MODERN:
        got = lab.start("large").ask("tools/call", {"name": "echo", "arguments": {}, "_meta": MODERN_META})
        expected = dict(sent, resultType="complete", _meta=got["_meta"])
    else:
        host = lab.host("large", revision=revision)
        got, expected = host.result(host.begin("echo")), mcpx.spell_result("tools/call", sent, revision)
    assert got == expected


@pytest.mark.parametrize("size", [4_096, 65_536, 1 << 20, 8 << 20])
def test_an_argument_of_any_size_arrives_whole(calm, size):
    host = calm.host("demo")
    text = ("é漢😀" * (size // 9 + 1))[:size]
    assert host.call("echo", text=text) == text


def test_big_messages_both_ways_at_once_do_not_lock_up(calm):
    """The server reads nothing while it writes 8 MiB; its host has sent 20 MiB by then."""
    host, other = calm.host("headfirst"), calm.host("common")
    fat = host.begin("fat", size=8 << 20)
    lengths = [host.begin("length", text="y" * (1 << 20)) for _ in range(20)]
    assert other.call("echo", text="meanwhile") == "meanwhile"
    assert len(text_of(host.result(fat))) == 8 << 20
    assert [text_of(host.result(n)) for n in lengths] == [str(1 << 20)] * 20


def test_hosts_that_send_big_messages_at_once_do_not_mix_them(calm):
    hosts = [calm.host("together") for _ in range(5)]
    ids = [(host, host.begin("echo", text=mark * 200_000), mark)
           for mark in "abcd" for host in hosts]
    for host, host_id, mark in ids:
        assert text_of(host.result(host_id, 40)) == mark * 200_000


@pytest.mark.parametrize("tool, text", [
    ("raw_nul", None), ("bad_utf8", None), ("surrogate", "\ud800"), ("drops", "aé漢😀z")])
def test_an_odd_answer_is_passed_on_or_refused_and_the_next_is_good(calm, tool, text):
    host = calm.host("bytes")
    answer = host.answer(host.begin(tool))
    if text is None:
        assert "error" in answer or "content" in answer["result"]
    else:
        assert text_of(answer["result"]) == text
    assert host.call("echo", text="next") == "next"


def test_noise_glued_to_an_answer_does_not_leave_the_link_dead(calm):
    host = calm.host("bytes")
    host.begin("glued")
    assert host.call("echo", text="next") == "next"


def test_a_last_answer_without_a_newline_is_delivered(calm):
    host = calm.host("bytes")
    assert host.call("bare") == "TEXT"
    assert host.call("echo", text="next") == "next"


def test_half_an_answer_is_no_answer(calm):
    host = calm.host("bytes")
    with pytest.raises(Refused) as refused:
        host.result(host.begin("half"))
    assert is_lost(refused.value.error)
    assert host.call("echo", text="next") == "next"


def test_what_a_server_prints_besides_its_messages_does_not_reach_its_host(calm):
    before = calm.status()["counters"].get("noiseLines", 0)
    host = calm.host("noisy")
    assert [host.call("echo", text=str(n)) for n in range(5)] == list("01234")
    assert "echo" in host.tools()
    assert all("id" in m or m["method"].startswith("notifications/") for m in host.seen), host.seen
    assert calm.status()["counters"]["noiseLines"] > before


@pytest.mark.parametrize("kind", ["stderr", "log", "list", "answers", "unknown"])
def test_a_server_that_says_too_much_is_heard_when_it_answers(calm, kind):
    host, other = calm.host("flood"), calm.host("common")
    flood = host.begin("flood", kind=kind, count=3000)
    assert other.call("echo", text="meanwhile") == "meanwhile"
    assert text_of(host.result(flood)) in ("flooded", "complained")
    assert host.call("echo", text="next") == "next"
    if kind == "list":
        assert len(host.all("notifications/tools/list_changed")) < 300


def test_half_a_line_and_the_end_is_a_clean_end(calm):
    host = calm.host("demo")
    host.write(b'{"jsonrpc":"2.0","id":9,"meth')
    assert host.close() == 0


def test_a_line_over_the_limit_is_refused_and_others_go_on(lab):
    lab.configure({"demo": demo(scope="session")}, limits_lineBytes="256KiB")
    host, other = lab.host("demo", revision="2025-11-25"), lab.host("demo")
    for n in range(3):
        host.send(echo_request("fat%d" % n, "x" * (600 << 10)))
        host.expect(lambda m: "error" in m and m.get("id") in (None, "fat%d" % n), "a refusal")
        assert host.call("echo", text="x" * 1000) == "x" * 1000
    with pytest.raises(Refused) as refused:
        host.call("big", bytes=600 << 10)
    assert "limits.lineBytes" in refused.value.error["message"]
    assert host.call("echo", text="next") == "next"
    assert other.call("echo", text="x") == "x"


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25"])
def test_a_batch_is_answered_as_one_where_the_revision_has_batches(calm, revision):
    host = calm.host("demo", revision=revision)
    host.last_id = 100
    batch = [dict(echo_request("a", "A"), jsonrpc="2.0"), {"jsonrpc": "2.0", "method": "notifications/x"},
             dict(echo_request("b", "B"), jsonrpc="2.0"), {"jsonrpc": "2.0", "id": "c", "method": "no/such"}]
    host.write(json.dumps(batch).encode() + b"\n")
    if revision == "2025-03-26":
        answers = {m["id"]: m for m in host.expect(bool, "one answer to the batch", kind=list)}
        assert text_of(answers["a"]["result"]) == "A" and text_of(answers["b"]["result"]) == "B"
        assert answers["c"]["error"]["code"] == -32601
    else:
        refusal = host.expect(lambda m: "error" in m, "a refusal")
        assert refusal["error"]["code"] == -32600 and refusal.get("id") is None
    assert host.call("echo", text="next") == "next"


ADVERSARIAL = [
    '{"jsonrpc":"2.0","id":7,"result":{},"id":8}',
    '{"jsonrpc":"2.0","id":7,"result":{},"\\u0069d":8}',
    '{"jsonrpc":"2.0","id":7,"result":{"a":"},\\"id\\":9}"},"id":8}',
    '{"jsonrpc":"2.0","id":7,"result":{"id":3}}x',
    '{"jsonrpc":"2.0","id":7,"result":{}} {"id":1}',
    '{"jsonrpc":"2.0","id":07,"result":{}}',
    '{"jsonrpc":"2.0","id":7.0,"result":{}}',
    '{"jsonrpc":"2.0","id":"7","result":{}}',
    '{"jsonrpc":"2.0","id":null,"result":{}}',
    '{"jsonrpc":"2.0","id":7,"result":NaN}',
    '{"jsonrpc":"2.0","id":7,"result":1e999}',
    '{"jsonrpc":"2.0","id":7,"result":\x0b{}}',
    '{"jsonrpc":"2.0","id":7,"result":{}\x0c}',
    '{"jsonrpc":"2.0","id":7,"result":{"a":"\t"}}',
    '{"result":{},"jsonrpc":"2.0","id":7,"id":8}',
    '{"result":{},"result":{},"jsonrpc":"2.0","id":7}',
    '{"result":{"id":5},"id":9,"jsonrpc":"2.0","id":7}',
    '{"result":{}, "jsonrpc":"2.0","id":7}}',
    '{"jsonrpc":"2.0","id":7,"error":{"code":1,"message":"x"}}',
    '{"jsonrpc":"2.0","id":7,"result":{}', '{"jsonrpc":"2.0","id":7,"result":', '{"result":{}}',
    '{"jsonrpc":"2.0","id":7,"result":{},"x":1}',
]


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_wire_what_is_not_exactly_a_form_is_left_to_the_parser(text):
    assert mcpx.parse_answer(text.encode()) is None


def random_json(rng, depth=0):
    kind = rng.randrange(7 if depth < 3 else 4)
    text = "".join(rng.choice(['"', "\\", "id", '"id":7', "{", "}", "é", "\u2028", "a", "\n", "\U0001f600", ","])
                   for _ in range(rng.randrange(6)))
    return (rng.randrange(-9, 10 ** 12), text, rng.choice([True, None, 1.5]), text, {},
            [random_json(rng, depth + 1) for _ in range(3)] if depth < 3 else 0,
            {text + str(n): random_json(rng, depth + 1) for n in range(3)} if depth < 3 else 0)[kind]


LONG = "long \u00e9 " * 4
OUTLINES = [
    # Where a real one stands, a NaN that is put in is none too many.
    '{"jsonrpc":"2.0","id":7,"result":[NaN,"%s"]}', '{"jsonrpc":"2.0","id":7,"result":["%s",NaN]}',
    '{"jsonrpc":"2.0","id":7,"result":[Infinity,"%s"]}', '{"jsonrpc":"2.0","id":7,"result":["%s",-Infinity]}',
    '{"jsonrpc":"2.0","id":7,"result":[-"%s"]}', '{"jsonrpc":"2.0","id":7,"result":[1"%s"]}',
    '{"jsonrpc":"2.0","id":7,"result":["%s""%s"]}', '{"jsonrpc":"2.0","id":7,"result":["%s"N]}',
    '{"jsonrpc":"2.0","id":7,"result":["%s",1e999]}', '{"jsonrpc":"2.0","id":7,"result":{"%s":1}}',
    # What is in the string has to be looked at after all.
    '{"jsonrpc":"2.0","id":7,"result":["%s\\n"]}', '{"jsonrpc":"2.0","id":7,"result":["\\"%s"]}',
    '{"jsonrpc":"2.0","id":7,"result":["%s\\x"]}', '{"jsonrpc":"2.0","id":7,"result":["%s\t"]}',
    '{"jsonrpc":"2.0","id":7,"result":["\x1f%s"]}', '{"jsonrpc":"2.0","id":7,"result":["%s\udcff"]}',
    '{"jsonrpc":"2.0","id":7,"result":["%s\udcc3"]}', '{"jsonrpc":"2.0","id":7,"result":["\udced\udca0\udc80%s"]}',
    # There is no end, or none of what is usual.
    '{"jsonrpc":"2.0","id":7,"result":["%s]}', '{"jsonrpc":"2.0","id":7,"result":["%s\\"]}',
    '{"jsonrpc":"2.0","id":7,"result":["%s"]', '{"jsonrpc":"2.0","id":7,"result":["%s"],"id":8}',
    '{"result":["%s"],"jsonrpc":"2.0","id":7,"id":8}', '{"result":["%s"],"id":8,"jsonrpc":"2.0","id":7}',
]


@pytest.mark.parametrize("text", OUTLINES + ADVERSARIAL)
def test_wire_what_has_long_strings_and_is_unusual_is_left_to_the_parser(text, monkeypatch):
    monkeypatch.setattr(mcpx, "LONG_STRING_BYTES", 10)
    line = text.replace("%s", LONG).encode("utf-8", "surrogateescape")
    assert mcpx.parse_answer(line, outlined=True) is None


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_wire_a_long_string_is_looked_through_to_its_last_byte(cut, monkeypatch):
    """Also where a character is cut by the pieces in which it is looked through, and where it is not whole at the end."""
    monkeypatch.setattr(mcpx, "LOOK_BYTES", cut)
    text = "aé漢😀" * 3
    assert mcpx._is_plain(text.encode(), 0, len(text.encode()))
    for bad in (text.encode()[:-1], text.encode() + b"\0", b"\\" + text.encode()):
        with contextlib.suppress(UnicodeDecodeError):
            assert not mcpx._is_plain(bad, 0, len(bad))


def test_wire_what_was_left_in_its_line_is_written_as_it_came(monkeypatch):
    """Into any text around it: whoever reads that sees what the parser would have made of the whole."""
    monkeypatch.setattr(mcpx, "LONG_STRING_BYTES", 10)
    rng, outlines = random.Random(6), 0
    for _ in range(5000):
        result, wire_id = [random_json(rng), LONG * rng.randrange(3), random_json(rng), {"x": LONG}], rng.randrange(10 ** 9)
        message = ({"jsonrpc": "2.0", "id": wire_id, "result": result} if rng.random() < 0.5 else
                   {"result": result, "jsonrpc": "2.0", "id": wire_id})
        line = bytearray(json.dumps(message, ensure_ascii=False).encode())
        outlined = mcpx.parse_answer(line, outlined=True)
        if outlined is None:
            continue
        found, place = outlined
        outlines += 1
        assert isinstance(found["result"][3]["x"], mcpx.LongText) and str(found["result"][3]["x"]) == LONG
        assert mcpx.parse_json(bytes(mcpx.with_id(place, found, "é"))) == dict(message, id="é")
        assert mcpx.parse_json(mcpx.encode_json(found)) == message
        surrogate = mcpx.encode_json([found, "\ud800"])
        assert json.loads(surrogate) == [message, "\ud800"]
        with pytest.raises(TypeError):
            mcpx.encode_json([found, object()])
        assert mcpx.encode_json({"a": 1}) == b'{"a":1}'
    assert outlines > 1000


def test_wire_the_forms_are_read_and_answered_as_the_parser_would():
    rng = random.Random(5)
    for _ in range(5000):
        result, wire_id, new_id = random_json(rng), rng.randrange(10 ** 9), rng.choice([5, "é\"x", -3, 2 ** 70])
        ascii_only, spaces = rng.random() < 0.5, rng.choice([(",", ":"), (", ", ": ")])
        message = ({"jsonrpc": "2.0", "id": wire_id, "result": result} if rng.random() < 0.5 else
                   {"result": result, "jsonrpc": "2.0", "id": wire_id})
        line = json.dumps(message, ensure_ascii=ascii_only, separators=spaces).encode()
        found, place = mcpx.parse_answer(line)
        assert found == message == mcpx.parse_json(line)
        again = mcpx.with_id(place, found, new_id)
        assert mcpx.parse_json(again) == dict(message, id=new_id)
        assert again[:place.start] == line[:place.start] and again.endswith(line[place.end:])


# ---------------------------------------------------------------------------
# Revisions: every host speaks the one it knows
# ---------------------------------------------------------------------------

NEWEST_TOOL = {
    "name": "t", "title": "T", "description": "d", "icons": [{"src": "data:,"}],
    "inputSchema": {"type": "object", "$schema": "x"}, "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True}, "execution": {"taskSupport": "optional"}, "_meta": {"k": 1}, "vendor": 1}
TOOL_MEMBERS = {
    "2024-11-05": {"name", "description", "inputSchema", "vendor"},
    "2025-03-26": {"name", "description", "inputSchema", "annotations", "vendor"},
    "2025-06-18": {"name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta", "vendor"},
    "2025-11-25": set(NEWEST_TOOL),
    "2026-07-28": set(NEWEST_TOOL) - {"execution"}}


@pytest.mark.parametrize("revision", mcpx.REVISIONS)
def test_revisions_a_tool_has_what_its_revision_defines(revision):
    before = json.dumps(NEWEST_TOOL)
    spelled = mcpx.spell_result("tools/list", {"tools": [NEWEST_TOOL]}, revision)["tools"][0]
    assert set(spelled) == TOOL_MEMBERS[revision]
    assert json.dumps(NEWEST_TOOL) == before, "a stored value was edited"
    if revision == "2025-03-26":
        assert spelled["annotations"] == {"readOnlyHint": True, "title": "T"}


@pytest.mark.parametrize("revision", mcpx.REVISIONS)
@pytest.mark.parametrize("type_name", sorted(mcpx.TYPES))
def test_revisions_every_row_of_the_table_is_obeyed(type_name, revision):
    """Each member of each type is dropped exactly where its revision lacks it."""
    rank = mcpx.RANK[revision]
    for member, (first, last, inner) in mcpx.TYPES[type_name].items():
        assert mcpx.R24 <= first <= last <= mcpx.RM
        assert inner is None or (inner[0] if isinstance(inner, list) else inner) in mcpx.TYPES
        value = [] if isinstance(inner, list) else {}
        if member == "structuredContent":
            value = {"a": 1}
        elif member == "outputSchema":
            value = {"type": "object"}
        spelled = mcpx.spell(type_name, {member: value}, rank)
        assert (member in spelled) == (first <= rank <= last), member


def test_revisions_the_same_object_comes_back_where_nothing_changes():
    result = {"content": [{"type": "text", "text": "x"}], "structuredContent": {"a": 1}}
    assert mcpx.spell_result("tools/call", result, "2025-11-25") is result
    assert mcpx.spell_result("tools/call", result, "2025-06-18") is result


@pytest.mark.parametrize("revision, kinds", [
    ("2024-11-05", ["text", "resource", "text"]), ("2025-03-26", ["text", "audio", "text"]),
    ("2025-06-18", ["text", "audio", "resource_link"]), ("2025-11-25", ["text", "audio", "resource_link"])])
def test_revisions_content_of_newer_kinds_becomes_content_that_is_known(revision, kinds):
    result = {"content": [{"type": "text", "text": "x", "_meta": {}},
                          {"type": "audio", "data": "AA==", "mimeType": "audio/wav"},
                          {"type": "resource_link", "uri": "file:///a", "name": "a", "title": "A", "icons": []}]}
    spelled = mcpx.spell_result("tools/call", result, revision)["content"]
    assert [block["type"] for block in spelled] == kinds
    assert ("_meta" in spelled[0]) == (revision >= "2025-06-18")
    assert ("icons" in spelled[2]) == (revision >= "2025-11-25")
    if revision == "2024-11-05":
        assert spelled[1]["resource"]["blob"] == "AA=="
    if kinds[2] == "text":
        assert "file:///a" in spelled[2]["text"]


@pytest.mark.parametrize("content, added", [([], True), ([{"type": "image", "data": "", "mimeType": "i"}], True),
                                            ([{"type": "text", "text": "have"}], False)])
def test_revisions_structured_content_stays_readable_for_older_hosts(content, added):
    spelled = mcpx.spell_result("tools/call", {"content": content, "structuredContent": {"n": 1}}, "2025-03-26")
    assert "structuredContent" not in spelled
    texts = [block["text"] for block in spelled["content"] if block["type"] == "text"]
    assert ('{"n":1}' in texts) == added


def test_revisions_a_form_for_an_older_host_is_plain():
    schema = {"$schema": "x", "type": "object", "properties": {
        "s": {"type": "string", "default": "d"}, "b": {"type": "boolean", "default": True},
        "e": {"type": "string", "oneOf": [{"const": "a", "title": "A"}]}}}
    params = {"mode": "form", "message": "m", "requestedSchema": schema}
    spelled = mcpx.spell_params("elicitation/create", params, "2025-06-18")
    assert spelled == {"message": "m", "requestedSchema": {"type": "object", "properties": {
        "s": {"type": "string"}, "b": {"type": "boolean", "default": True},
        "e": {"type": "string", "enum": ["a"], "enumNames": ["A"]}}}}
    assert mcpx.spell_params("elicitation/create", params, "2025-11-25") is params


@pytest.mark.parametrize("method, params, revision, code", [
    ("elicitation/create", {"mode": "url"}, "2025-06-18", -32602),
    ("elicitation/create", {"requestedSchema": {"properties": {"a": {"type": "array"}}}}, "2025-06-18", -32602),
    ("elicitation/create", {}, "2025-03-26", -32601),
    ("sampling/createMessage", {"messages": [{"content": {"type": "audio"}}]}, "2024-11-05", -32602),
    ("sampling/createMessage", {"tools": [{}]}, "2025-06-18", -32602)])
def test_revisions_what_cannot_be_shown_is_refused(method, params, revision, code):
    assert mcpx.refusal_of_question(method, params, revision).code == code
    assert mcpx.refusal_of_question(method, params, "2025-11-25") is None


@pytest.mark.parametrize("asked, given", [(r, r) for r in mcpx.LEGACY_REVISIONS] + [
    ("2026-07-28", "2025-11-25"), ("2099-01-01", "2025-11-25"), ("1.0", "2025-11-25")])
def test_revisions_negotiation(asked, given):
    assert mcpx.negotiate(asked) == given


@pytest.mark.parametrize("capabilities, method, params, good", [
    ({}, "roots/list", {}, False), ({"roots": {}}, "roots/list", {}, True),
    ({"elicitation": {}}, "elicitation/create", {}, True), ({"elicitation": {}}, "elicitation/create", {"mode": "url"}, False),
    ({"elicitation": {"url": {}}}, "elicitation/create", {"mode": "url"}, True),
    ({"elicitation": {"url": {}}}, "elicitation/create", {}, False),
    ({"sampling": {}}, "sampling/createMessage", {}, True),
    ({"sampling": {}}, "sampling/createMessage", {"tools": [{}]}, False),
    ({"sampling": {"tools": {}}}, "sampling/createMessage", {"tools": [{}]}, True)])
def test_revisions_whether_a_host_can_be_asked(capabilities, method, params, good):
    assert mcpx.covers(capabilities, method, params) is good


def test_revisions_nothing_is_declared_upstream_that_the_host_did_not_declare():
    everything = {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {"url": {}}, "tasks": {}, "odd": 1}
    for size in range(len(everything) + 1):
        for names in itertools.combinations(everything, size):
            host = {name: everything[name] for name in names}
            for confined in (True, False):
                told = mcpx.declared_capabilities(host, "2025-11-25", confined)
                assert set(told) <= set(host)
                assert ("roots" in told) == ("roots" in host and confined)


def test_revisions_hop_keys_are_taken_out_and_all_others_pass():
    meta = {"progressToken": 1, "traceparent": "x", "io.modelcontextprotocol/clientInfo": {}, "vendor/x": {"a": [1]}}
    params = {"name": "t", "_meta": meta}
    assert mcpx.strip_hop_meta(params)["_meta"] == {"progressToken": 1, "traceparent": "x", "vendor/x": {"a": [1]}}
    assert "io.modelcontextprotocol/clientInfo" in meta


@pytest.mark.parametrize("asked, given", [
    ("2024-11-05", "2024-11-05"), ("2025-03-26", "2025-03-26"), ("2025-06-18", "2025-06-18"),
    ("2025-11-25", "2025-11-25"), ("2026-07-28", "2025-11-25"), ("2099-01-01", "2025-11-25"), ("x", "2025-11-25")])
def test_a_host_gets_the_revision_it_asked_for_or_the_newest(calm, asked, given):
    host = calm.host("common", revision=asked)
    assert host.welcome["protocolVersion"] == given
    assert host.call("echo", text="x") == "x"


def test_hosts_of_all_revisions_share_one_instance_each_in_its_own_words(calm):
    seen = {}
    for revision in ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"):
        host = calm.host("common", revision=revision)
        tool = [t for t in host.ask("tools/list")["tools"] if t["name"] == "echo"][0]
        result = host.result(host.begin("whoami"))
        seen[revision] = ("annotations" in tool, "structuredContent" in result)
        assert json.loads(text_of(result))["pid"] == calm.pids("common")[0]
    assert seen == {"2024-11-05": (False, False), "2025-03-26": (True, False),
                    "2025-06-18": (True, True), "2025-11-25": (True, True)}


def test_a_server_of_the_first_revision_serves_hosts_of_the_newest(calm):
    for revision in ("2024-11-05", "2025-11-25"):
        host = calm.host("old", revision=revision)
        assert host.welcome["protocolVersion"] == revision
        assert host.call("echo", text="x") == "x"


def test_before_the_handshake_only_ping_is_answered(calm):
    host = calm.start("common")
    assert host.ask("ping") == {}
    for method in ("tools/list", "server/discover", "tools/call"):
        with pytest.raises(Refused):
            host.ask(method, {"name": "echo", "arguments": {"text": "x"}})
    assert host.greet().call("echo", text="x") == "x"


def test_a_host_that_does_not_wait_for_the_handshake_gets_all_its_answers(calm):
    host = calm.start("common")
    hello = {"id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}}
    host.write(as_line(hello) + as_line({"method": "notifications/initialized"})
               + as_line({"id": 2, "method": "tools/list"}) + as_line(echo_request(3, "x")))
    assert host.result(1)["serverInfo"]["name"] and host.result(2)["tools"]
    assert text_of(host.result(3)) == "x"


def test_one_server_passed_through_looks_as_if_launched_directly(calm):
    direct = subprocess.run(
        [sys.executable, MCPX, "demo-server"], stdout=subprocess.PIPE, env=calm.env, timeout=PATIENCE_S,
        input=b"".join(map(as_line, (
            {"id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {},
                                                         "clientInfo": {"name": "w", "version": "1"}}},
            {"method": "notifications/initialized"}, {"id": 2, "method": "tools/list"},
            {"id": 3, "method": "prompts/list"}, {"id": 4, "method": "resources/list"},
            {"id": 5, "method": "resources/templates/list"}))))
    plain = {m["id"]: m["result"] for m in map(json.loads, direct.stdout.splitlines()) if "id" in m}
    host = calm.host("demo", revision="2025-11-25")
    assert host.welcome["serverInfo"] == plain[1]["serverInfo"]
    assert host.welcome.get("instructions") == plain[1].get("instructions")
    assert host.ask("tools/list")["tools"] == plain[2]["tools"]
    assert host.ask("prompts/list")["prompts"] == plain[3]["prompts"]
    assert host.ask("resources/list")["resources"] == plain[4]["resources"]
    assert host.ask("resources/templates/list")["resourceTemplates"] == plain[5]["resourceTemplates"]


@pytest.mark.parametrize("server", ["pages", "paged"])
def test_a_list_in_pages_is_seen_whole(calm, server):
    host = calm.host(server)
    found, cursor = [], {}
    while True:
        page = host.ask("tools/list", cursor)
        found += [tool["name"] for tool in page["tools"]]
        if "nextCursor" not in page:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert len(found) == len(set(found)) and {"echo", "whoami"} <= set(found)
    assert {"touch", "set"} & set(found)
    with pytest.raises(Refused) as refused:
        host.ask("tools/list", {"cursor": "never given"})
    assert refused.value.error["code"] == -32602


@pytest.mark.parametrize("modern", [False, True], ids=["legacy", "modern"])
def test_a_list_longer_than_a_page_comes_in_pages_of_that_size(lab, modern):
    lab.configure({"demo": demo(scope="global"), "other": demo(scope="global")}, list_pageSize=7)
    meta = {"_meta": MODERN_META} if modern else {}

    def pages(host, kind):
        found, params = [], meta
        while True:
            page = host.ask(kind.replace("Templates", "s/templates") + "/list", params)
            found.append([item["name"] for item in page[kind]])
            if "nextCursor" not in page:
                return found
            params = dict(meta, cursor=page["nextCursor"])
    host = lab.start("demo", "other")
    if not modern:
        host.greet()
    paged = {kind: pages(host, kind) for kind in ("tools", "resources", "prompts", "resourceTemplates")}
    assert all(len(page) == 7 for kind in paged for page in paged[kind][:-1])
    assert len(paged["tools"]) > 3 and [len(page) for page in paged["resources"]] == [7, 1]
    assert len(paged["prompts"]) == len(paged["resourceTemplates"]) == 1
    reset(lab, list_pageSize=0)
    assert {kind: pages(host, kind) for kind in paged} == {kind: [sum(paged[kind], [])] for kind in paged}


def test_prompts_resources_and_completion_are_passed_through(calm):
    host = calm.host("demo")
    assert "Ada" in json.dumps(host.ask("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}))
    assert host.ask("resources/read", {"uri": "demo://note/1"})["contents"][0]["uri"] == "demo://note/1"
    completion = host.ask("completion/complete", {"ref": {"type": "ref/prompt", "name": "greet"},
                                                  "argument": {"name": "name", "value": ""}})
    assert isinstance(completion["completion"]["values"], list)
    assert host.answer(host.begin("fail", message="no luck"))["result"]["isError"]
    with pytest.raises(Refused) as refused:
        host.call("error", code=-32050, message="own words")
    assert (refused.value.error["code"], refused.value.error["message"]) == (-32050, "own words")


# ---------------------------------------------------------------------------
# Identity and scopes: who is asking, and which instance is theirs
# ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """A clone with linked work trees, a submodule, a bare repository with a work tree, made by git."""
    root = tmp_path_factory.mktemp("git")
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_GLOBAL": os.devnull,
           "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def git(directory, *arguments):
        subprocess.run(("git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main") + arguments,
                       cwd=str(directory), env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name in ("main", "library"):
        (root / name / "sub").mkdir(parents=True)
        git(root / name, "init")
        git(root / name, "commit", "--allow-empty", "-m", "x")
    git(root / "main", "worktree", "add", "../linked")
    git(root / "main", "worktree", "add", "inside")
    git(root / "main", "submodule", "add", "../library", "module")
    git(root, "clone", "--bare", "main", "bare.git")
    git(root / "bare.git", "worktree", "add", "../from-bare", "HEAD")
    (root / "link").symlink_to(root / "linked")
    (root / "plain").mkdir()
    (root / "liar").mkdir()
    (root / "liar" / ".git").write_text("gitdir: %s\n" % (root / "main" / ".git" / "worktrees" / "linked"))
    return root


@pytest.mark.parametrize("where, worktree, repo", [
    ("main", "main", "main/.git"), ("main/sub", "main", "main/.git"), ("linked", "linked", "main/.git"),
    ("link", "linked", "main/.git"), ("main/inside", "main/inside", "main/.git"),
    ("main/module", "main/module", "main/.git/modules/module"), ("bare.git", None, "bare.git"),
    ("from-bare", "from-bare", "bare.git"), ("plain", None, None), ("liar", None, None),
    ("main/.git", None, "main/.git")])
def test_identity_work_trees_and_repositories_are_told_without_git(repositories, where, worktree, repo, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("GIT_DIR", str(repositories / "main" / ".git"))
    place = mcpx.find_place(str(repositories / where))
    real = os.path.realpath(str(repositories))
    assert place.cwd == os.path.realpath(str(repositories / where))
    assert place.worktree == (os.path.join(real, worktree) if worktree else None)
    assert place.repo == (os.path.join(real, repo) if repo else None)


def test_identity_a_deleted_or_relative_directory_is_unknown(tmp_path):
    gone = tmp_path / "gone"
    for path in (str(gone), "relative", "", "/proc/nothing\0here", 5):
        assert mcpx.find_place(path).cwd is None


def test_identity_places_where_programs_start_are_not_where_work_is(tmp_path):
    assert mcpx.find_place("/").cwd is None
    assert mcpx.find_place("/tmp").cwd is None
    assert mcpx.find_place(str(tmp_path), (str(tmp_path),)).cwd is None
    assert mcpx.find_place(str(tmp_path)).cwd == os.path.realpath(str(tmp_path))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything, so nothing can be made unreadable for it")
def test_identity_a_forbidden_git_directory_is_cannot_be_told(tmp_path):
    (tmp_path / ".git").mkdir(mode=0o000)
    place = mcpx.find_place(str(tmp_path))
    assert place.cwd and place.repo is None and "cannot be told" in place.reason


KEYS = ("dev.mcpx/session", "ai.opencode/sessionID")


@pytest.mark.parametrize("meta, keys, session, source", [
    ({}, KEYS, "mcp-1", "process"), ({"dev.mcpx/session": "a"}, KEYS, "a", "named"),
    ({"ai.opencode/sessionID": "b"}, KEYS, "b", "named"),
    ({"ai.opencode/sessionID": "b", "dev.mcpx/session": "a"}, KEYS, "a", "named"),
    ({"ai.opencode/sessionID": "b", "dev.mcpx/session": "a"}, KEYS[::-1], "b", "named"),
    ({"dev.mcpx/session": ""}, KEYS, "mcp-1", "process"), ({"dev.mcpx/session": 5}, KEYS, "mcp-1", "process"),
    ({"dev.mcpx/session": None, "ai.opencode/sessionID": "b"}, KEYS, "b", "named"),
    ({"sessionID": "c"}, KEYS, "mcp-1", "process"), ({"sessionID": "c"}, ("sessionID",), "c", "named"),
    ({"dev.mcpx/session": "a"}, (), "mcp-1", "process")])
def test_identity_the_first_good_key_names_the_session(meta, keys, session, source):
    base = mcpx.Identity("process", "mcp-1", pid=1, started="0")
    identity = base.with_meta(meta, keys, 77)
    assert (identity.session, identity.source, identity.call) == (session, source, 77)
    assert identity.named == (source == "named")


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "\x1b[31m", "mcp-1"])
def test_identity_names_that_nobody_may_use_are_refused(name):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.Identity("process", "mcp-1").with_meta({"dev.mcpx/session": name}, KEYS, 1)
    assert caught.value.code == -32602


def test_identity_a_named_session_does_not_inherit_the_connections_parent():
    base = mcpx.Identity("process", "own", True, parent="P")
    assert mcpx.scope_key("parent-session", base.with_meta({}, KEYS, 1)).text == "session:P"
    named = base.with_meta({"dev.mcpx/session": "other"}, KEYS, 1)
    assert mcpx.scope_key("parent-session", named).text == "session:other"
    both = base.with_meta({"dev.mcpx/session": "other", "dev.mcpx/parent-session": "Q"}, KEYS, 1)
    assert mcpx.scope_key("parent-session", both).text == "session:Q"


FULL = dict(session="s", parent="p", place=mcpx.Place("/w/sub", "/w", "/r/.git", None), pid=9, started="55", call=3)
SCOPE_TABLE = {
    # scope: (everything known, no repository, no directory, nothing known)
    "global": ("global", "global", "global", "global"),
    "repo": ("repo:/r/.git", "cwd:/w/sub", "call:3", "call:3"),
    "worktree": ("worktree:/w", "cwd:/w/sub", "call:3", "call:3"),
    "cwd": ("cwd:/w/sub", "cwd:/w/sub", "call:3", "call:3"),
    "session": ("session:s", "session:s", "session:s", "call:3"),
    "parent-session": ("session:p", "session:p", "session:p", "call:3"),
    "pid": ("pid:9@55", "pid:9@55", "pid:9@55", "call:3"),
    "call": ("call:3", "call:3", "call:3", "call:3")}


@pytest.mark.parametrize("scope", mcpx.SCOPES)
def test_scopes_degrade_only_towards_call(scope):
    identities = [mcpx.Identity("process", **FULL),
                  mcpx.Identity("process", **dict(FULL, place=mcpx.Place("/w/sub", None, None, "not a repository"))),
                  mcpx.Identity("process", **dict(FULL, place=None)), mcpx.Identity("process", call=3)]
    keys = [mcpx.scope_key(scope, identity) for identity in identities]
    assert tuple(key.text for key in keys) == SCOPE_TABLE[scope]
    for key in keys:
        expected_kind = {"parent-session": "session"}.get(scope, scope)
        assert bool(key.degraded) == (key.text.split(":")[0] != expected_kind)


def test_scopes_a_session_without_parent_meets_its_sub_sessions():
    parent = mcpx.Identity("process", "p", True, call=1)
    child = mcpx.Identity("process", "c", True, parent="p", call=2)
    assert mcpx.scope_key("parent-session", parent).text == mcpx.scope_key("parent-session", child).text


SCOPES = ("global", "repo", "worktree", "cwd", "session", "parent-session", "pid", "call")

# Who comes second, and under which scopes it finds what the first caller left.
MEETINGS = {
    "the same host": "global repo worktree cwd session parent-session pid",
    "another host in the same directory": "global repo worktree cwd",
    "another host in another directory": "global",
    "another host in the other work tree": "global repo",
    "another host in a folder of the work tree": "global repo worktree",
    "another session of the same host": "global repo worktree cwd pid",
    "the same session in another host": "global session parent-session",
    "the same session on the command line": "global session parent-session",
    "a session of the same host below the first": "global repo worktree cwd parent-session pid",
    "a session of another host below the first": "global parent-session",
    "another host that names the first's directory": "global repo worktree cwd",
}


def git(*arguments, cwd):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments], cwd=cwd, check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def town_lab(tmp_path_factory):
    """A lab with two plain directories, a repository with two work trees, and a server for every scope."""
    for lab in new_lab(str(tmp_path_factory.mktemp("town"))):
        lab.plain, lab.other = lab.directory("plain"), lab.directory("other")
        lab.tree, lab.tree2 = lab.directory("tree"), lab.path("tree2")
        lab.folder = lab.directory("tree", "folder")
        if shutil.which("git"):
            git("init", cwd=lab.tree)
            git("commit", "--allow-empty", "-m", "first", cwd=lab.tree)
            git("worktree", "add", lab.tree2, cwd=lab.tree)
        lab.configure({"%s-%s" % (scope, sharing): demo(scope=scope, sharing=sharing)
                       for scope in SCOPES for sharing in ("shared", "exclusive")}, maxInstances=200)
        yield lab


@pytest.fixture
def town(town_lab):
    yield town_lab
    town_lab.send_home()


@pytest.mark.skipif(not shutil.which("git"), reason="the work trees are made with git")
@pytest.mark.parametrize("sharing", ["shared", "exclusive"])
@pytest.mark.parametrize("scope", SCOPES)
def test_who_finds_what_another_left(town, scope, sharing):
    server = "%s-%s" % (scope, sharing)
    hosts = [town.start(server, cwd=cwd) for cwd in (
        town.plain, town.plain, town.other, town.tree, town.tree2, town.folder)]
    for host in hosts:
        host.greet()
    first, neighbour, stranger, tree, tree2, folder = hosts

    def meets(situation, one, other, meta=None, other_meta=None):
        """Whether `other` reads what `one` has written, and reaches the same process."""
        one.call("set", meta, name=situation, value="left by the first")
        if other is not None:
            read = other.call("get", other_meta, name=situation)
            if scope != "call":  # there a third and a fourth call would reach yet other processes
                same = one.whoami(meta)["instance"] == other.whoami(other_meta)["instance"]
                assert same == (read == "left by the first"), situation
        else:
            read = town.command("call", server + ".get", "name=" + situation, "--session", meta[SESSION],
                                cwd=town.other).strip()
        assert read in ("", "left by the first"), situation
        return read != ""

    found = {
        "the same host": meets("the same host", first, first),
        "another host in the same directory": meets("neighbour", first, neighbour),
        "another host in another directory": meets("stranger", first, stranger),
        "another host in the other work tree": meets("tree", tree, tree2),
        "another host in a folder of the work tree": meets("folder", tree, folder),
        "another session of the same host": meets("names", first, first, {SESSION: "ann"}, {SESSION: "bob"}),
        "the same session in another host": meets("hosts", first, stranger, {SESSION: "cid"}, {SESSION: "cid"}),
        "the same session on the command line": meets("command", first, None, {SESSION: "dan"}),
        "a session of the same host below the first": meets(
            "child", first, first, {SESSION: "eve"}, {SESSION: "eve-1", PARENT: "eve"}),
        "a session of another host below the first": meets(
            "far child", first, stranger, {SESSION: "fay"}, {SESSION: "fay-1", PARENT: "fay"}),
        "another host that names the first's directory": meets(
            "named directory", tree, stranger, None, {CWD: town.tree}),
    }
    assert found == {situation: scope in scopes.split() for situation, scopes in MEETINGS.items()}


@pytest.mark.skipif(not shutil.which("git"), reason="the work trees are made with git")
def test_two_names_of_one_work_tree_are_one(town):
    inner = town.path("tree", "inner")
    git("worktree", "add", inner, cwd=town.tree)
    os.symlink(town.tree2, town.path("link"))
    os.makedirs(town.path("tree2", "a", "b"))
    os.makedirs(town.path("lost"))
    with open(town.path("lost", ".git"), "w") as file:
        file.write("gitdir: %s\n" % town.path("tree", ".git", "worktrees", "tree2"))

    def key(server, cwd, **env):
        return town.command("why", server, "--json", cwd=cwd, env=env)["key"]

    common = "repo:" + town.path("tree", ".git")
    assert [key("repo-shared", d) for d in (town.tree, town.tree2, inner, town.path("link", "a", "b"))] == [common] * 4
    assert [key("worktree-shared", d) for d in (town.tree, town.folder, inner, town.path("link", "a", "b"))] == [
        "worktree:" + d for d in (town.tree, town.tree, inner, town.tree2)]
    assert key("worktree-shared", town.plain, GIT_DIR=town.path("tree", ".git")) == "cwd:" + town.plain
    # A .git file that something else's directory is pointed at by proves nothing.
    assert key("worktree-shared", town.path("lost")) not in ("worktree:" + town.path("lost"),
                                                            "worktree:" + town.tree2)


@pytest.mark.parametrize("scope", ["cwd", "worktree", "repo"])
def test_where_desktop_programs_start_is_nobodys_directory(town, scope):
    server = scope + "-shared"
    for cwd in ("/", town.home, town.path("tmp")):
        answer = town.command("why", server, "--json", cwd=cwd)
        assert answer["key"].startswith("call:") and answer["degraded"]
    host = town.host(server, cwd=town.home)
    assert host.whoami()["instance"] != host.whoami()["instance"]
    assert any(d["server"] == server and d["scope"] == scope for d in town.status()["degradations"])


def test_a_host_in_nobodys_directory_is_asked_for_its_root(town):
    roots = {"roots": [{"uri": "file://" + town.other, "name": "o"}]}
    asked = town.host("cwd-shared", cwd=town.home, capabilities={"roots": {}}, replies={"roots/list": lambda p: roots})
    there = town.host("cwd-shared", cwd=town.other)
    assert asked.whoami()["instance"] == there.whoami()["instance"]


def test_why_says_who_asked_and_what_it_came_to(town):
    answer = town.command("why", "session-shared", "--session", "greta", "--json")
    assert (answer["server"], answer["scope"], answer["key"]) == ("session-shared", "session", "session:greta")
    assert answer["evidence"] and answer["degraded"] is None
    text = town.command("why", "session-shared", "--session", "greta")
    assert "session:greta" in text


def test_the_keys_that_name_a_session_can_be_changed_while_running(lab):
    lab.configure({"demo": demo(scope="session")})
    host = lab.host("demo")

    def sees(meta):
        return host.whoami(meta)["instance"]

    own = sees(None)
    one = sees({SESSION: "one"})
    assert one != own
    assert sees({"ai.opencode/sessionID": "one"}) == one
    assert sees({SESSION: "one", "ai.opencode/sessionID": "two"}) == one
    assert sees({SESSION: "", "ai.opencode/sessionID": "one"}) == one
    for nothing in ({"other/key": "one"}, {SESSION: ""}, {SESSION: 5}, {SESSION: None}, {SESSION: ["one"]}):
        assert sees(nothing) == own, nothing
    # Nobody can name what was made from a connection.
    thief = lab.host("demo")
    answer = thief.answer(thief.begin("whoami", {SESSION: "mcp-%d" % host.pid}))
    assert own not in json.dumps(answer)
    lab.configure({"demo": demo(scope="session")}, **{"transport_sessionMetaKeys": ["other/key", SESSION]})
    lab.command("reload")
    assert sees({"other/key": "one"}) == one
    assert sees({"ai.opencode/sessionID": "one"}) == own
    assert sees({SESSION: "one", "other/key": "three"}) not in (own, one)


def test_whoever_names_a_session_in_another_way_than_meta_names_it_whatever_the_keys_are(lab):
    web = Web(lab, demo=demo(scope="session"))
    reset(lab, transport_sessionMetaKeys=["other/key", "third/key"])
    assert web.tool("demo", "set", {"other/key": "ann", "third/key": "bob"}, value="ann's") == "ok"
    assert web.tool("demo", "get", {"third/key": "ann"}) == "ann's"
    assert web.tool("demo", "get", {"third/key": "bob"}) == web.tool("demo", "get", {SESSION: "ann"}) == ""
    # What is given in _meta wins, as ever.
    assert web.tool("demo", "get", {"other/key": "bob"}, {"Mcpx-Session": "ann"}) == ""
    assert lab.command("call", "demo.get", "--session", "ann", "--json")["content"][0]["text"] == "ann's"
    assert web.tool("demo", "get", headers={"Mcpx-Session": "ann"}) == "ann's"
    body = {"server": "demo", "tool": "get", "arguments": {}, "session": "ann"}
    assert b"ann's" in web.send("POST", "/v1/call", body)[2]


def test_the_environment_of_a_host_names_its_session(lab):
    lab.configure({"demo": demo(scope="session"), "family": demo(scope="parent-session")})
    named = lab.host("demo", "family", env={"MCPX_SESSION_ID": "nell", "MCPX_PARENT_SESSION_ID": "mum"})
    mother = lab.host("demo", "family", env={"MCPX_SESSION_ID": "mum"})
    assert named.whoami(prefix="demo_")["session"] == "nell"
    assert named.whoami(prefix="demo_")["instance"] != mother.whoami(prefix="demo_")["instance"]
    assert named.whoami(prefix="family_")["instance"] == mother.whoami(prefix="family_")["instance"]
    same = lab.command("call", "demo.whoami", "--json", env={"MCPX_SESSION_ID": "nell"})
    assert same["structuredContent"]["instance"] == named.whoami(prefix="demo_")["instance"]


def test_a_connection_may_carry_many_sessions_and_directories(lab):
    """One host, three sessions, two directories, all mixed; then one session moves."""
    lab.configure({"demo": demo(scope="session"), "here": demo(scope="cwd")})
    host = lab.host("demo", "here")
    places = [lab.directory("one"), lab.directory("two")]
    asked = []
    for n in range(30):
        meta = {SESSION: "s%d" % (n % 3), CWD: places[n % 2]}
        asked.append((n, host.begin("demo_add", meta), host.begin("here_add", meta)))
    for _, one, two in asked:
        host.result(one), host.result(two)
    for n in range(3):
        assert host.call("demo_add", {SESSION: "s%d" % n}, n=0) == "10"
    for place in places:
        assert host.call("here_add", {SESSION: "s0", CWD: place}, n=0) == "15"


def test_a_resource_that_a_named_call_gave_is_read_where_it_came_from(calm):
    host = calm.host("plain")
    for name in ("red", "blue"):
        uri = "role://made-by/" + name
        pid = host.whoami({SESSION: name})["pid"]
        host.result(host.begin("link", {SESSION: name}, uri=uri))
        assert host.ask("resources/read", {"uri": uri})["contents"][0]["text"] == str(pid)


# ---------------------------------------------------------------------------
# Settings and config: what is in force
# ---------------------------------------------------------------------------

@pytest.mark.parametrize("name", sorted(mcpx.SETTINGS))
def test_settings_every_default_is_valid_and_explained(name):
    row = mcpx.SETTINGS[name]
    mcpx.parse_setting(row, row.default)
    assert row.meaning and row.name == name


def test_settings_none_is_without_a_test_that_sets_it():
    """Given to a helper that writes a configuration, or in an `mcpx` object; a name in a text does not count."""
    import ast
    with open(os.path.abspath(__file__), encoding="utf-8") as file:
        tree = ast.parse(file.read(), feature_version=(3, 9))
    given = set()

    def take(node, prefix=""):
        for part in ast.walk(node) if not prefix else [node]:
            for key, value in zip(part.keys, part.values) if isinstance(part, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    given.add(prefix + key.value.replace("_", "."))
                    take(value, prefix + key.value + ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            helper = getattr(node.func, "id", getattr(node.func, "attr", None))
            if helper in ("configure", "reset", "demo", "role", "fake"):
                for keyword in node.keywords:
                    given.add((keyword.arg or "").replace("_", "."))
                    take(keyword.value, keyword.arg + "." if keyword.arg else "")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == "mcpx":
                    take(value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    given.add(target.slice.value)
    assert sorted(set(mcpx.SETTINGS) - given) == []


@pytest.mark.parametrize("name, text, value", [
    ("idleTimeout", "500ms", 0.5), ("idleTimeout", "2s", 2), ("idleTimeout", "15m", 900), ("idleTimeout", "1h", 3600),
    ("idleTimeout", 3, 3), ("idleTimeout", 0.25, 0.25), ("limits.lineBytes", "64MiB", 64 << 20),
    ("limits.lineBytes", 1000, 1000), ("max", 3, 3), ("scope", "global", "global")])
def test_settings_values_are_read_in_their_unit(name, text, value):
    assert mcpx.parse_setting(mcpx.SETTINGS[name], text) == value


@pytest.mark.parametrize("name, text", [
    ("idleTimeout", "soon"), ("idleTimeout", -1), ("idleTimeout", True), ("idleTimeout", [1]), ("max", 1.5), ("max", -1),
    ("scope", "globl"), ("inheritEnv", "PATH"), ("inheritEnv", [1]), ("limits.lineBytes", "1parsec"), ("envFile", 1)])
def test_settings_bad_values_are_refused(name, text):
    with pytest.raises(ValueError):
        mcpx.parse_setting(mcpx.SETTINGS[name], text)


CONFIG = """{
  // servers
  "mcpServers": {
    "one": {"command": "one", "args": ["a // no comment", "b,]"], /* both
       kinds */ "mcpx": {"scope": "cwd"},},
    "two": {"command": ["two", "x"], "environment": {"K": "v"}, "enabled": false, "autoApprove": []},
  },
  "mcpx": {"maxInstances": 3, "stop": {"eofGrace": "1s"}, "idleTimeout": "9s",},
}"""


def build(text, path="/c/config.json"):
    return mcpx.build_config(mcpx.parse_config_text(text, path), path, text)


def test_config_comments_trailing_commas_and_dialects_are_understood():
    config = build("\ufeff" + CONFIG)
    one, two = config.servers["one"], config.servers["two"]
    assert one.args == ["a // no comment", "b,]"] and config.get("scope", one) == "cwd"
    assert (two.command, two.args, two.env, two.disabled) == ("two", ["x"], {"K": "v"}, True)
    assert config.get("maxInstances") == 3 and config.get("stop.eofGrace") == 1 and config.get("idleTimeout", two) == 9
    assert config.get("scope", two) == "session" and "autoApprove" in config.notes[0]


@pytest.mark.parametrize("text, words", [
    ('{"mcpServers": {\n"a": {"command": "x" "y"}}}', ["line 2", "not valid JSON"]),
    ('{"mcpx": {\n\n"maxInstance": 3}}', ["line 3", "maxInstance", "did you mean maxInstances"]),
    ('{"mcpx": {"maxInstances": "many"}}', ["maxInstances", "whole number"]),
    ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', ["a", "twice"]),
    ('[]', ["one object"]), ('{"mcpServers": []}', ["takes an object"]), ('', ["not valid JSON"])])
def test_config_an_error_names_file_line_and_key(text, words):
    with pytest.raises(mcpx.ConfigError) as caught:
        build(text)
    for word in ["/c/config.json"] + words:
        assert word in str(caught.value)


@pytest.mark.parametrize("entry, words", [
    ({}, ["neither command nor url"]), ({"command": "x", "mcpx": {"scope": "globl"}}, ["scope", "takes one of"]),
    ({"command": "x", "mcpx": {"maxInstances": 1}}, ["whole daemon"]), ({"command": "x", "args": "y"}, ["args", "a list"]),
    ({"command": "x", "args": [1]}, ["strings"]), ("x", ["takes an object"]), ({"url": "http://x"}, ["url"])])
def test_config_a_mistake_in_one_server_breaks_that_one_alone(entry, words):
    config = build(json.dumps({"mcpServers": {"bad": entry, "good": {"command": "x"}}}))
    assert config.servers["good"].broken is None
    for word in words:
        assert word in config.servers["bad"].broken


@pytest.mark.parametrize("text, expected", [
    ("${A}", "1"), ("x${A}y${B:-z}", "1".join(["x", "yz"])), ("${EMPTY:-d}", "d"), ("${EMPTY}", ""), ("{env:A}", "1"),
    ("${env:A}", "1"), ("$A costs $5 {x}", "$A costs $5 {x}"), ("${A", "${A")])
def test_config_variables(text, expected):
    assert mcpx.expand_variables(text, {"A": "1", "EMPTY": ""}) == expected


def test_config_a_variable_that_is_not_set_is_named():
    with pytest.raises(mcpx.StartFailed) as caught:
        mcpx.expand_variables("${NOT_THERE}", {})
    assert "NOT_THERE" in caught.value.message


def define(entry, env=None, key="session:s", identity=None, settings=None):
    config = build(json.dumps({"mcpServers": {"s": entry}, "mcpx": settings or {}}))
    identity = identity or mcpx.Identity("process", "s", True, place=mcpx.Place("/work", None, None, "x"), call=1)
    return mcpx.Definition(config, config.servers["s"], identity, mcpx.Key(key), env or {"PATH": "/bin"}, b"k" * 32)


def test_config_two_callers_with_different_tokens_have_different_definitions():
    entry = {"command": "x", "env": {"TOKEN": "${TOKEN}"}}
    a, b = (define(entry, {"TOKEN": token, "PATH": "/bin"}) for token in "ab")
    assert a.digest != b.digest and a.shape != b.shape and "a" not in (a.digest,)


@pytest.mark.parametrize("one, two, same", [
    ({"command": "x", "env": {"A": "1", "B": "2"}}, {"command": "x", "env": {"B": "2", "A": "1"}}, True),
    ({"command": "x", "args": ["1"]}, {"command": "x", "args": ["2"]}, False),
    ({"command": "x"}, {"command": "y"}, False), ({"command": "x", "cwd": "/a"}, {"command": "x", "cwd": "/b"}, False),
    ({"command": "x", "args": ["{tmpdir}", "{port}", "{id}"]}, {"command": "x", "args": ["{tmpdir}", "{port}", "{id}"]}, True)])
def test_config_what_makes_a_definition_another(one, two, same):
    assert (define(one).digest == define(two).digest) is same


def test_config_inherited_variables_split_the_pool_and_others_do_not():
    entry = {"command": "x", "mcpx": {"inheritEnv": ["AWS_PROFILE"]}}
    digests = [define(entry, dict({"PATH": "/bin"}, **extra)).digest
               for extra in ({"AWS_PROFILE": "a"}, {"AWS_PROFILE": "b"}, {"AWS_PROFILE": "a", "LANG": "C"})]
    assert digests[0] != digests[1] and digests[0] == digests[2]


def test_config_shared_scopes_get_the_base_environment_and_private_ones_the_callers():
    env = {"PATH": "/bin", "HOME": "/h", "SECRET_TOKEN": "x", "LC_ALL": "C", "EXTRA": "e"}
    private = define({"command": "x", "mcpx": {"scope": "session"}}, env)
    shared = define({"command": "x", "env": {"OWN": "1"}, "mcpx": {"scope": "global", "inheritEnv": ["EXTRA"]}}, env, "global")
    assert private.env == env
    assert shared.env == {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "EXTRA": "e", "OWN": "1"}


@pytest.mark.parametrize("of_entry", [True, False], ids=["in the entry", "as a setting"])
def test_config_an_env_file_gives_variables_and_what_the_entry_says_wins(tmp_path, of_entry):
    path = tmp_path / "own.env"
    path.write_text("\ufeff# comment\n\nexport TOKEN='a long one'\nLEVEL=file\n  SPACED = x y \nEMPTY=\nno equals sign\n=nameless\n",
                    encoding="utf-8")
    entry = {"command": "x", "env": {"LEVEL": "entry"}}
    (entry if of_entry else entry.setdefault("mcpx", {}))["envFile"] = "${DIR}/own.env"
    first = define(entry, {"DIR": str(tmp_path)})
    assert {name: first.env.get(name) for name in ("TOKEN", "LEVEL", "SPACED", "EMPTY")} == {
        "TOKEN": "a long one", "LEVEL": "entry", "SPACED": "x y", "EMPTY": ""}
    assert not {"no equals sign", ""} & set(first.env) and "a long one" in first.secrets
    path.write_text("TOKEN=other\n")
    assert define(entry, {"DIR": str(tmp_path)}).digest != first.digest


def test_files_of_a_person_are_read_without_waiting_and_within_bounds(tmp_path):
    os.mkfifo(str(tmp_path / "pipe"))
    (tmp_path / "long").write_text("A=%s" % ("x" * mcpx.PERSON_FILE_BYTES))
    (tmp_path / "latin").write_bytes(b"A=\xe9")
    for path in [str(tmp_path / name) for name in ("pipe", "long", "latin", "missing")] + ["/dev/zero", "/", "a\0b"]:
        with pytest.raises(mcpx.StartFailed, match="cannot be read"):
            define({"command": "x", "envFile": path})
        with pytest.raises(mcpx.ConfigError, match="cannot be read|there is no"):
            mcpx.load_config(path)


def test_config_what_a_caller_names_is_safe_as_a_file_name():
    identity = mcpx.Identity("process", "../../etc/passwd", True, place=mcpx.Place("/work", None, None, "x"), call=1)
    definition = define({"command": "x", "args": ["/p/{session}", "{cwd}", "/k/{key}"]}, key="session:../x", identity=identity)
    assert "/.." not in definition.argv[1] and definition.argv[1].count("/") == 2
    assert definition.argv[2] == "/work" and definition.argv[3].count("/") == 2


def test_config_safe_names_differ_where_the_names_differ():
    names = ["a/b", "a_b", "a.b", "a b", ".a", "a", "A", "ä", ""]
    assert len({mcpx.safe_file_name(name) for name in names}) == len(names)
    assert all("/" not in mcpx.safe_file_name(name) and mcpx.safe_file_name(name) for name in names)


def test_config_a_placeholder_that_cannot_be_told_is_an_error_with_advice():
    identity = mcpx.Identity("process", None, call=1)
    with pytest.raises(mcpx.StartFailed) as caught:
        define({"command": "x", "args": ["{cwd}"]}, key="call:1", identity=identity)
    assert "{cwd}" in caught.value.message


def test_config_relative_commands_are_relative_to_the_file_and_plain_ones_are_not():
    assert define({"command": "./bin/x"}).argv[0] == "/c/bin/x"
    assert define({"command": "bin/x"}).argv[0] == "/c/bin/x"
    assert define({"command": "x"}).argv[0] == "x"


def test_config_secrets_are_masked_wherever_it_is_shown():
    value = {"mcpServers": {"a": {"env": {"K": "canary"}, "headers": {"H": "canary"}, "args": ["--token=canary"]}}}
    assert "canary" not in json.dumps(mcpx.masked(value))


def test_config_the_socket_path_is_always_short_enough(tmp_path):
    for length in (10, 60, 95, 103, 107, 200):
        runtime = tmp_path / ("é" * (length // 2))
        path = mcpx.socket_path("/c", {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": "/tmp/" + "x" * length})
        assert len(os.fsencode(path)) <= mcpx.MAX_SOCKET_PATH


def test_a_change_of_the_configuration_touches_what_it_names(lab):
    def servers(*names, **changed):
        return {name: lab.role("upstream", name, *changed.get(name, ()), scope="global") for name in names}

    def configure(*names, **changed):
        lab.configure(servers(*names, **changed), coldWait="2s")

    configure("keep", "change", "drop")
    keep, change, drop = lab.host("keep"), lab.host("change"), lab.host("drop")
    merged = lab.host("keep", "change", "drop")
    merged.settle()
    kept, changed, dropped = keep.whoami()["pid"], change.whoami()["pid"], drop.whoami()["pid"]
    held = change.begin("hold", until=lab.gate("held"), tag="held")
    lab.wait_begun("change", "held")
    configure("keep", "change", "added", change=("--new", "argument"))
    lab.command("reload")
    lab.wait_gone(dropped)
    with pytest.raises(Refused) as refused:
        drop.call("echo", text="x")
    assert "drop" in refused.value.error["message"]
    assert lab.host("added").call("echo", text="x") == "x"
    assert keep.whoami()["pid"] == kept
    merged.notification("notifications/tools/list_changed")
    assert not any(tool.startswith("drop_") for tool in merged.tools())
    assert merged.call("keep_echo", text="x") == "x"
    lab.open_gate("held")
    assert text_of(change.result(held)) == "held"
    lab.wait_gone(changed)
    assert "argument" in change.whoami()["argv"]
    # What is half written changes nothing, says where the fault is, and is picked up by itself when it is mended.
    lab.write_config('{ "mcpServers": {\n  "keep": {"command": 5,, }\n')
    done = lab.run("reload")
    assert done.returncode != 0 and "config.json" in done.stderr + done.stdout
    assert lab.run("config", "--check").returncode == 2
    assert keep.whoami()["pid"] == kept and change.call("echo", text="x") == "x"
    configure("keep", "mended")
    lab.wait_gone(*lab.pids("change"))
    assert lab.host("mended").call("echo", text="x") == "x"
    assert keep.whoami()["pid"] == kept


def test_a_configuration_may_be_swapped_through_a_link(lab):
    lab.configure({"one": demo(scope="global")})
    os.rename(lab.config, lab.path("first.json"))
    os.symlink(lab.path("first.json"), lab.config)
    assert lab.host("one").call("echo", text="x") == "x"
    with open(lab.path("second.json"), "w") as file:
        json.dump({"mcpServers": {"two": demo(scope="global")}}, file)
    os.symlink(lab.path("second.json"), lab.path("link"))
    os.rename(lab.path("link"), lab.config)
    lab.wait_for("the new server", lambda: "two" in [s["name"] for s in lab.status()["servers"]])
    assert lab.host("two").call("echo", text="x") == "x"


def test_comments_trailing_commas_and_variables_in_a_configuration(lab):
    lab.write_config("""\ufeff// what a person writes
    { "mcpServers": { /* one */
        "plain": { "command": "${PYTHON}", "args": ["%s", "--role", "upstream", "--a", "${ONE}", "--b", "${NO:-none}",
                                                    "--c", "$5 {x}",],
                   "env": {"KEY": "${ONE}-key"}, },
        "unset": { "command": "${PYTHON}", "args": ["${NEVER_SET_HERE}"] },
      }, }""" % os.path.abspath(__file__))
    host = lab.host("plain", env={"PYTHON": sys.executable, "ONE": "1"})
    me = host.whoami()
    assert me["argv"][3:] == ["--a", "1", "--b", "none", "--c", "$5 {x}"] and me["env"]["KEY"] == "1-key"
    assert "NEVER_SET_HERE" in complaint(lab.start("unset", env={"PYTHON": sys.executable}))["message"]


def attempt(host):
    """Say hello, unless that has worked before, and call; the first error on the way, or None."""
    if not host.welcome:
        hello = host.answer(host.hello())
        if "error" in hello:
            return hello["error"]
        host.welcome = hello["result"]
        host.notify("notifications/initialized")
    return host.answer(host.begin("echo", text="x")).get("error")


def complaint(host):
    """The error that a host is told of a server that cannot be had, at its handshake or at its first call."""
    error = attempt(host)
    assert error, "it can be had"
    return error


def test_no_secret_is_shown_or_left_readable(lab):
    secret = "canary-4711"
    lab.configure({
        "good": dict(lab.role("upstream", None), env={"TOKEN": secret}),
        "common": lab.role("upstream", None, scope="global", inheritEnv=["OTHER_TOKEN"]),
        "bad": dict(lab.role("broken", None, "--how", "exit"), env={"TOKEN": secret}),
    }, coldWait="2s", log_level="debug")
    mask = os.umask(0)
    try:
        host = lab.host("good", env={"OTHER_TOKEN": secret})
        assert host.whoami()["env"]["TOKEN"] == secret
        assert lab.host("common", env={"OTHER_TOKEN": secret}).whoami()["env"]["OTHER_TOKEN"] == secret
        complaint(lab.start("bad", env={"OTHER_TOKEN": secret}))
    finally:
        os.umask(mask)
    for words in (["status"], ["status", "--json"], ["config"], ["config", "--json"], ["why", "good", "--json"],
                  ["doctor"], ["ls"], ["logs"], ["settings"]):
        done = lab.run(*words)
        assert secret not in done.stdout + done.stderr, words
    assert not any(secret in command for command in lab.processes().values())
    for top in (os.path.join(lab.state, "mcpx"), os.path.join(lab.runtime, "mcpx")):
        for folder, _, files in os.walk(top):
            assert os.stat(folder).st_mode & 0o077 == 0, folder
            for path in (os.path.join(folder, name) for name in files):
                assert os.lstat(path).st_mode & 0o077 == 0, path
                if not path.endswith((".sock", ".hold")):
                    with open(path, "rb") as file:
                        assert secret.encode() not in file.read(), path


# ---------------------------------------------------------------------------
# Log
# ---------------------------------------------------------------------------

def test_log_files_are_bounded_rotated_and_private(tmp_path):
    sink = mcpx.RotatedFile(str(tmp_path / "logs" / "x.log"), 1000, 3)
    for number in range(200):
        sink.write(b"%050d\n" % number)
    files = sorted(os.listdir(str(tmp_path / "logs")))
    assert files == ["x.log", "x.log.1", "x.log.2"]
    for name in files:
        info = os.stat(str(tmp_path / "logs" / name))
        assert info.st_size <= 1000 and info.st_mode & 0o777 == 0o600
    os.unlink(str(tmp_path / "logs" / "x.log"))
    sink._checked_at = -10
    sink.write(b"after\n")
    assert (tmp_path / "logs" / "x.log").read_bytes() == b"after\n"


def test_log_repeats_are_folded_and_escapes_cannot_steer_a_terminal(tmp_path):
    log = mcpx.Log(mcpx.RotatedFile(str(tmp_path / "l"), 10 ** 6, 1))
    for _ in range(50):
        log.info("same %s", "\x1b[2Jx\n")
    log.info("other")
    lines = (tmp_path / "l").read_text().splitlines()
    assert len(lines) == 3 and "49 more times" in lines[1] and "\x1b" not in lines[0]


def test_log_a_full_or_missing_disk_does_not_raise():
    sink = mcpx.RotatedFile("/dev/full", 10 ** 6, 1)
    sink.write(b"x")
    mcpx.RotatedFile("/proc/nowhere/x.log", 10, 1).write(b"x")


# ---------------------------------------------------------------------------
# Reactor
# ---------------------------------------------------------------------------

@pytest.fixture
def loop():
    made = mcpx.Loop(mcpx.Log())
    yield made
    made.close()


def turn_until(loop, condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the loop did not get there"
        loop.turn(0.05)


def pair(loop, limit=10 ** 6):
    """Two ends of ours joined back to back: (stream, its lines, its end, the raw other end)."""
    import socket
    ours, other = socket.socketpair()
    lines, ends = [], []
    fd = ours.detach()
    stream = mcpx.Stream(loop, fd, fd, limit, lines.extend, ends.append, lambda rest: lines.append(rest))
    return stream, lines, ends, other


def test_reactor_timers_come_in_order_and_cancelled_ones_do_not(loop):
    seen = []
    loop.call_later(0.02, lambda: seen.append("b"))
    loop.call_later(0.01, lambda: seen.append("a"))
    loop.call_later(0.0, lambda: seen.append("never")).cancel()
    turn_until(loop, lambda: seen == ["a", "b"])


def test_reactor_a_mistake_in_one_callback_does_not_end_the_loop(loop, tmp_path):
    loop.log = mcpx.Log(mcpx.RotatedFile(str(tmp_path / "l"), 10 ** 6, 1))
    seen = []
    loop.soon(lambda: 1 / 0)
    loop.soon(lambda: seen.append(True))
    loop.turn(0)
    assert seen and "ZeroDivisionError" in (tmp_path / "l").read_text()


def test_reactor_lines_cut_anywhere_arrive_whole_and_the_rest_at_the_end(loop):
    _, lines, ends, other = pair(loop)
    for byte in b"one\ntwo\nthr":
        other.send(bytes([byte]))
        loop.turn(0)
    other.close()
    turn_until(loop, lambda: ends)
    assert lines == [b"one", b"two", b"thr"] and ends == ["end of stream"]


def test_reactor_a_peer_that_does_not_read_blocks_nobody(loop):
    stream, _, _, other = pair(loop)
    _, lines, _, second = pair(loop)
    stream.write(b"x" * (8 << 20) + b"\n")
    second.send(b"hello\n")
    turn_until(loop, lambda: lines == [b"hello"])
    assert stream.queued_bytes > 0
    received = 0
    while received < (8 << 20) + 1:
        loop.turn(0)
        received += len(other.recv(1 << 20))
    turn_until(loop, lambda: stream.queued_bytes == 0)
    other.close()
    second.close()


def test_reactor_many_small_messages_keep_their_order_under_a_slow_reader(loop):
    stream, _, _, other = pair(loop)
    expected = b"".join(b"%d\n" % n for n in range(100000))
    for n in range(100000):
        stream.write(b"%d\n" % n)
    data = b""
    while len(data) < len(expected):
        loop.turn(0)
        data += other.recv(1000 if len(data) < 50000 else 1 << 20)
    assert data == expected
    other.close()


def test_reactor_closing_happens_at_the_end_of_the_turn_and_once(loop):
    stream, _, ends, other = pair(loop)
    loop.soon(lambda: (stream.close("a"), stream.close("b"), stream.write(b"dropped"), ends.append("still valid")))
    loop.turn(0)
    loop.turn(0)
    assert ends == ["still valid", "a"]
    other.close()


def test_reactor_exit_statuses_reach_their_own_callback(loop):
    seen = {}
    for status in (0, 3, 7):
        process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(%d)" % status])
        process.returncode = 0
        loop.on_exit(process.pid, lambda code, status=status: seen.__setitem__(status, mcpx.describe_status(code)))
    turn_until(loop, lambda: len(seen) == 3, 20)
    assert seen == {0: "exit status 0", 3: "exit status 3", 7: "exit status 7"}


def test_reactor_a_thread_that_hangs_is_given_up_and_its_late_result_dropped(loop):
    import threading
    gate, seen = threading.Event(), []
    loop.in_thread(lambda: gate.wait(5), lambda value, error: seen.append(error), 0.02)
    turn_until(loop, lambda: seen)
    assert isinstance(seen[0], TimeoutError)
    gate.set()
    loop.in_thread(lambda: "done", lambda value, error: seen.append(value), 5)
    turn_until(loop, lambda: len(seen) == 2)
    assert seen[1] == "done"


def test_reactor_a_stream_writes_pieces_in_order_however_little_the_reader_takes():
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    log = mcpx.Log()
    loop = mcpx.Loop(log)
    nothing_fd, other_fd = os.pipe()
    stream = mcpx.Stream(loop, nothing_fd, write_fd, 1 << 20, lambda lines: None, lambda reason: None)
    rng, expected, got = random.Random(3), b"", b""
    for number in range(200):
        piece = bytes([number % 256]) * rng.choice([0, 1, 10, 5000, 70000, 300000])
        stream.write(memoryview(piece) if number % 3 == 0 and piece else piece)
        expected += piece
        loop.turn(0)
        if number % 2:
            got += os.read(read_fd, rng.choice([1, 4096, 100000])) if stream.queued_bytes else b""
    while len(got) < len(expected):
        loop.turn(0)
        got += os.read(read_fd, 1 << 17)
    assert got == expected and stream.queued_bytes == 0 and stream.written_total == len(expected)
    loop.close()
    for fd in (read_fd, other_fd, nothing_fd, write_fd):
        os.close(fd)


# ---------------------------------------------------------------------------
# Upstream: requests in flight, each with its own answer, cancel and progress
# ---------------------------------------------------------------------------

class FakeStream:
    """Takes what an Upstream writes; `say` feeds it what a server would."""

    queued_total = 0

    def __init__(self):
        self.sent, self.lines = [], mcpx.LineBuffer(10 ** 6)

    def write(self, data):
        self.sent.append(json.loads(data))


class Recorder:
    """An owner of an Upstream, or a host of a call: writes down what it is told."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        return lambda *arguments: self.events.append((name,) + arguments)


@pytest.fixture
def upstream():
    import collections
    stream, owner = FakeStream(), Recorder()
    made = mcpx.Upstream(stream, owner, collections.Counter())
    made.say = lambda *messages: made.on_lines([json.dumps(m).encode() if isinstance(m, dict) else m for m in messages])
    return made


def call(answers, method="tools/call", **more):
    made = mcpx.Call(method, {"name": "t"}, lambda c, message, line: answers.append(message), Recorder(), **more)
    return made


def test_upstream_answers_find_their_call_whatever_the_order(upstream):
    answers = [[], [], []]
    for box in answers:
        upstream.send(call(box))
    for wire_id in (2, 3, 1):
        upstream.say({"jsonrpc": "2.0", "id": wire_id, "result": {"n": wire_id}})
    assert [box[0]["result"]["n"] for box in answers] == [1, 2, 3]
    assert not upstream.in_flight


def test_upstream_late_doubled_and_foreign_answers_are_counted_and_dropped(upstream):
    box = []
    upstream.send(call(box))
    for wire_id in (1, 1, 99, "1", 1.0, None):
        upstream.say({"jsonrpc": "2.0", "id": wire_id, "result": {}})
    assert len(box) == 1 and upstream.counters["lateAnswers"] == 5


def test_upstream_progress_goes_to_the_call_that_asked_for_it_and_must_increase(upstream):
    quiet, asking = call([]), call([])
    asking.token = "host-token"
    upstream.send(quiet)
    upstream.send(asking)
    assert upstream.stream.sent[1]["params"]["_meta"]["progressToken"] == 2
    for token, value in ((2, 1), (2, 1), (1, 5), (2, 3), (2, 2), (77, 1), ("2", 9)):
        upstream.say({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": value}})
    assert [event[2]["progress"] for event in asking.host.events] == [1, 3]
    assert not quiet.host.events and upstream.counters["droppedProgress"] == 5


NOISE = [b"banner", b"\x1b[31mred\x1b[0m", b"", b"42", b'"ok"', b'{"a":1}', b"\xff\xfe", b'{"jsonrpc":"2.0"', b"\xef\xbb\xbf",
         b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', b"null", b"[]"]


def test_upstream_noise_is_skipped_and_frames_among_it_arrive(upstream):
    box = []
    upstream.send(call(box))
    upstream.say(*NOISE)
    upstream.say(b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"result":{"ok":true}}\r')
    assert box == [{"jsonrpc": "2.0", "id": 1, "result": {"ok": True}}]


def test_upstream_a_frame_that_noise_was_glued_to_is_still_an_answer(upstream):
    box = []
    upstream.send(call(box))
    upstream.say(b'Debug: starting{"jsonrpc":"2.0","id":1,"result":{}}')
    assert box and "result" in box[0]


@pytest.mark.parametrize("line", [b'{"jsonrpc":"2.0","id":1,"result":{"t":"\xff"}}', b'{"result":{"t":"\xff"},"jsonrpc":"2.0","id":1}'])
def test_upstream_an_answer_with_bad_bytes_is_an_error_for_its_caller_alone(upstream, line):
    box, other = [], []
    upstream.send(call(box))
    upstream.send(call(other))
    upstream.say(line)
    assert "cannot be read" in box[0]["error"]["message"] and not other


def test_upstream_a_cancelled_call_stays_until_the_server_is_done_with_it(upstream):
    box = []
    cancelled = call(box)
    upstream.send(cancelled)
    upstream.cancel(cancelled, "why")
    assert upstream.stream.sent[-1]["params"] == {"requestId": 1, "reason": "why"}
    assert upstream.in_flight
    upstream.say({"jsonrpc": "2.0", "id": 1, "result": {}})
    assert not box and not upstream.in_flight


def test_upstream_initialize_is_never_cancelled(upstream):
    first = call([], "initialize")
    upstream.send(first)
    upstream.cancel(first, None)
    assert len(upstream.stream.sent) == 1


def test_upstream_pings_are_answered_here_and_questions_are_passed_on(upstream):
    upstream.say({"jsonrpc": "2.0", "id": "p", "method": "ping"}, {"jsonrpc": "2.0", "id": 1, "method": "roots/list"})
    assert upstream.stream.sent == [{"jsonrpc": "2.0", "id": "p", "result": {}}]
    assert upstream.owner.events == [("on_question", {"jsonrpc": "2.0", "id": 1, "method": "roots/list"})]


@pytest.mark.parametrize("revision, good", [(r, True) for r in mcpx.LEGACY_REVISIONS] + [("2026-07-28", False), (None, False), ("1", False)])
def test_upstream_handshake_takes_any_legacy_revision_and_no_other(upstream, revision, good):
    outcome = []
    upstream.handshake({"roots": {}}, outcome.append)
    assert upstream.stream.sent[0]["params"]["capabilities"] == {"roots": {}}
    upstream.say({"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": revision, "capabilities": {}, "serverInfo": {}}})
    assert (outcome == [None]) is good
    assert ([m.get("method") for m in upstream.stream.sent[1:]] == ["notifications/initialized"]) is good


def test_hosts_that_use_the_same_ids_each_get_their_own_answers(calm):
    hosts = [calm.host("common") for _ in range(6)]
    for n in range(20):
        for number, host in enumerate(hosts):
            host.begin("sleep", host_id=1000 + n, seconds=random.Random(n * 7 + number).random() / 5,
                       text="%d of %d" % (n, number))
            host.begin("echo", host_id=str(1000 + n), text="word %d of %d" % (n, number))
    for n in range(20):
        for number, host in enumerate(hosts):
            assert "%d of %d" % (n, number) in text_of(host.result(1000 + n))
            assert text_of(host.result(str(1000 + n))) == "word %d of %d" % (n, number)
    assert all(len(host.answers(1000 + n)) == 1 for host in hosts for n in range(20))


def test_a_cancel_ends_the_call_it_names_and_no_other(calm, tmp_path):
    one, two = calm.host("together"), calm.host("together")
    gate = str(tmp_path / "gate")
    tags = [str(tmp_path / "one"), str(tmp_path / "two")]
    before = len(calm.got("together", "notifications/cancelled"))
    one.begin("hold", host_id=7, until=gate, tag=tags[0])
    two.begin("hold", host_id=7, until=gate, tag=tags[1])
    for tag in tags:
        calm.wait_begun("together", tag)
    one.notify("notifications/cancelled", requestId=424242, reason="never was")
    one.notify("notifications/cancelled", requestId="7", reason="another type")
    one.notify("notifications/cancelled", requestId=7, reason="no longer wanted")
    cancels = calm.wait_for("the cancel", lambda: calm.got("together", "notifications/cancelled")[before:])
    open(gate, "w").close()
    assert text_of(two.result(7)) == "held"
    calm.wait_for("the late answer", lambda: calm.seen("together", "end", tag=tags[0]))
    one.notify("notifications/cancelled", requestId=one.last_id, reason="it was answered long ago")
    two.notify("notifications/cancelled", requestId=7, reason="it was answered just now")
    assert one.call("echo", text="x") == "x" and two.call("echo", text="x") == "x"
    assert one.answers(7) == [] and len(two.answers(7)) == 1
    cancels = calm.got("together", "notifications/cancelled")[before:]
    wire_id = calm.seen("together", "begin", tag=tags[0])[0]["wire_id"]
    assert [c["params"]["requestId"] for c in cancels] == [wire_id]


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_host_that_leaves_takes_its_calls_with_it(calm, tmp_path, how):
    one, two = calm.host("together"), calm.host("together")
    gate, tag = str(tmp_path / "gate"), str(tmp_path)
    one.begin("hold", until=gate, tag=tag)
    staying = two.begin("hold", until=gate, tag=tag)
    calm.wait_begun("together", tag, count=2)
    before = len(calm.got("together", "notifications/cancelled"))
    getattr(one, how)()
    calm.wait_for("one cancel", lambda: len(calm.got("together", "notifications/cancelled")) == before + 1)
    open(gate, "w").close()
    assert text_of(two.result(staying)) == "held"
    assert len(calm.got("together", "notifications/cancelled")) == before + 1


@pytest.mark.parametrize("tokens", [("t", "t"), (1, 1), (1, "1")])
def test_progress_goes_to_the_host_that_asked_under_its_own_token(calm, tokens):
    hosts = [calm.host("common"), calm.host("common")]
    calls = [host.begin("sleep", {"progressToken": token}, seconds=0.4 + n / 5, every=0.05, text="host %d" % n)
             for n, (host, token) in enumerate(zip(hosts, tokens))]
    for host, token, host_id in zip(hosts, tokens, calls):
        host.result(host_id)
        said = host.all("notifications/progress")
        assert len(said) >= 3
        assert all(same_id(m["params"]["progressToken"], token) for m in said)
        values = [m["params"]["progress"] for m in said]
        assert values == sorted(set(values))
        assert host.seen.index(said[-1]) < host.seen.index(host.answer(host_id))
    said = len(hosts[0].all("notifications/progress"))
    hosts[0].call("sleep", seconds=0.2, every=0.05)
    hosts[0].settle()
    assert len(hosts[0].all("notifications/progress")) == said, "progress that nobody gave a token for"


def test_a_slow_call_does_not_hold_up_anything_else(calm, tmp_path):
    slow, quick, other = calm.host("together"), calm.host("together"), calm.host("common")
    gate = str(tmp_path / "gate")
    held = slow.begin("hold", until=gate, tag=gate)
    calm.wait_begun("together", gate)
    for n in range(30):
        assert quick.call("echo", text=str(n)) == str(n)
    assert quick.ask("ping") == {} and quick.tools() and other.call("echo", text="x") == "x"
    assert slow.ask("ping") == {} and slow.call("echo", text="x") == "x"
    assert slow.answers(held) == []
    open(gate, "w").close()
    assert text_of(slow.result(held)) == "held"


def test_a_call_limit_ends_the_call_and_keeps_the_server(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global", callTimeout="700ms"), "demo": demo()},
                  stop_eofGrace="300ms", stop_termGrace="300ms")
    host, other = lab.host("plain"), lab.host("demo")
    pid = host.whoami()["pid"]
    with pytest.raises(Refused) as refused:
        host.call("hold", until=lab.gate("never"))
    assert "callTimeout" in refused.value.error["message"]
    assert "mcpxStreamLost" not in json.dumps(refused.value.error)
    lab.wait_for("one cancel at the server", lambda: len(lab.got("plain", "notifications/cancelled")) == 1)
    assert host.whoami()["pid"] == pid
    # A process that is stopped cannot be asked to end, and still ends.
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Refused):
        host.call("echo", text="x")
    assert other.call("echo", text="x") == "x"


@pytest.mark.parametrize("how, words", [("exit", "3"), ("signal", "KILL"), ("zero", "0"), ("mute", ""), ("heir", "")])
def test_a_server_that_dies_in_a_call_is_reported_and_replaced(lab, how, words):
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global"), "demo": demo()}, backoff_first="50ms",
                  stop_eofGrace="300ms", stop_termGrace="300ms")
    one, two, other = lab.host("mortal"), lab.host("mortal"), lab.host("demo")
    pid = one.whoami()["pid"]
    held = [host.begin("hold", until=lab.gate("never")) for host in (one, two)]
    lab.wait_begun("mortal", count=3)
    spent = one.begin("spend", ledger=lab.path("ledger"), how=how)
    for host, host_id in ((one, spent), (one, held[0]), (two, held[1])):
        error = host.answer(host_id, 5)["error"]
        assert is_lost(error), error
        assert "mortal" in error["message"] and words in error["message"] and "the fuse blew" in error["message"]
    result = one.result(one.begin("whoami"))
    assert result["_meta"][RESTARTED]["reason"]
    assert RESTARTED not in one.result(one.begin("whoami")).get("_meta", {})
    assert two.result(two.begin("echo", text="x"))["_meta"][RESTARTED]["reason"]
    assert json.loads(text_of(result))["pid"] != pid
    assert "echo" in one.tools() and other.call("echo", text="x") == "x"
    with open(lab.path("ledger")) as file:
        assert file.read() == "spent\n"
    lab.wait_gone(pid)
    row = lab.status()["servers"]
    assert [s["restarts"] >= 1 and bool(s["lastError"]) for s in row if s["name"] == "mortal"] == [True]


def test_what_may_be_repeated_is_repeated_once(lab):
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global")}, backoff_first="50ms", backoff_max="50ms")
    host = lab.host("mortal")
    host.tools()
    assert host.call("look", ledger=lab.path("one"), lives=1) == "seen"
    assert host.call("repeat", ledger=lab.path("two"), lives=1) == "again"
    error = host.answer(host.begin("look", ledger=lab.path("three"), lives=5))["error"]
    assert is_lost(error)
    with open(lab.path("three")) as file:
        assert file.read() == "looked\n" * 2
    # Nothing that was cancelled is sent again.
    watch = host.begin("watch", until=lab.gate("never"), tag="cancelled")
    lab.wait_begun("mortal", "cancelled")
    host.notify("notifications/cancelled", requestId=watch)
    lab.wait_for("the cancel", lambda: lab.got("mortal", "notifications/cancelled"))
    host.answer(host.begin("spend", ledger=lab.path("four")))
    assert host.call("echo", text="x") == "x"
    assert len(lab.seen("mortal", "begin", tag="cancelled")) == 1 and host.answers(watch) == []


def test_what_one_host_subscribed_to_does_not_depend_on_another(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")}, backoff_first="50ms")
    one, two = lab.host("plain"), lab.host("plain")

    def wanted():
        """What the server was asked for, in order."""
        return [(e["message"]["method"][10:], e["message"]["params"]["uri"]) for e in lab.seen("plain", "got")
                if "subscribe" in e["message"].get("method", "")]

    for host, uri in ((one, "role://x"), (two, "role://x"), (two, "role://y")):
        host.ask("resources/subscribe", {"uri": uri})
    assert wanted() == [("subscribe", "role://x"), ("subscribe", "role://y")]
    one.call("touch", uri="role://x"), one.call("touch", uri="role://y")
    one.notification("notifications/resources/updated", uri="role://x")
    two.notification("notifications/resources/updated", uri="role://x")
    two.notification("notifications/resources/updated", uri="role://y")
    one.settle()
    assert len(one.all("notifications/resources/updated")) == 1
    one.ask("resources/unsubscribe", {"uri": "role://x"})
    one.call("touch", uri="role://x")
    lab.wait_for("the second update", lambda: len(two.all("notifications/resources/updated")) == 3)
    one.settle()
    assert len(one.all("notifications/resources/updated")) == 1
    assert ("unsubscribe", "role://x") not in wanted()
    # A new process is told what the hosts still want.
    one.ask("resources/subscribe", {"uri": "role://z"})
    one.ask("logging/setLevel", {"level": "warning"})
    pid = one.whoami()["pid"]
    os.kill(pid, signal.SIGKILL)
    lab.wait_gone(pid)
    new = one.whoami()["pid"]
    assert new != pid
    again = [e["message"] for e in lab.seen("plain", "got", pid=new)]
    assert sorted(m["params"]["uri"] for m in again if m.get("method") == "resources/subscribe") == [
        "role://x", "role://y", "role://z"]
    assert [m["params"]["level"] for m in again if m.get("method") == "logging/setLevel"] == ["warning"]
    one.call("touch", uri="role://z")
    one.notification("notifications/resources/updated", uri="role://z")
    two.close()
    lab.wait_for("the end of the subscriptions", lambda: {
        ("unsubscribe", "role://x"), ("unsubscribe", "role://y")} <= set(wanted()))
    assert ("unsubscribe", "role://z") not in wanted()


def test_each_host_sees_the_log_messages_it_asked_for(lab):
    lab.configure({"demo": demo(scope="global"), "plain": lab.role("upstream", "plain", scope="global")})
    hosts = [lab.host("demo"), lab.host("demo")]
    talkative, terse = hosts
    talkative.ask("logging/setLevel", {"level": "debug"})
    terse.ask("logging/setLevel", {"level": "error"})
    for host, name in ((talkative, "talkative"), (terse, "terse")):
        for level in ("debug", "info", "error", "critical"):
            host.call("log", level=level, text="%s %s" % (name, level))
    for host in hosts:
        host.settle()
    said = [[json.dumps(m["params"]["data"]) for m in host.all("notifications/message")] for host in hosts]
    assert [any("talkative " + level in line for line in said[0]) for level in ("debug", "info", "error")] == [True] * 3
    assert [any("terse " + level in line for line in said[1]) for level in ("debug", "info", "error", "critical")] == [
        False, False, True, True]
    assert not any("terse" in line for line in said[0]) and not any("talkative" in line for line in said[1])
    with pytest.raises(Refused) as refused:
        terse.ask("logging/setLevel", {"level": "shout"})
    assert refused.value.error["code"] == -32602
    # The server is set to the most that anybody wants, and set again when that changes.
    loud, quiet = lab.host("plain"), lab.host("plain")
    loud.call("echo", text="x")
    loud.ask("logging/setLevel", {"level": "info"})
    quiet.ask("logging/setLevel", {"level": "error"})

    def level():
        return ([m["params"]["level"] for m in lab.got("plain", "logging/setLevel")] or [None])[-1]
    lab.wait_for("the level", lambda: level() == "info")
    quiet.call("echo", text="x")
    assert level() == "info"
    loud.close()
    lab.wait_for("the lower level", lambda: quiet.call("echo", text="x") and level() == "error")


def test_log_messages_of_two_hosts_calls_at_once_reach_each_its_own(lab):
    """What logs is learned; calls of it by hosts that want log messages take turns, for a while."""
    lab.configure({"curious": lab.role("curious", "curious", scope="global")})
    one, two = lab.host("curious"), lab.host("curious")
    for host in (one, two):
        host.ask("logging/setLevel", {"level": "info"})
    open_gate, gate, late = lab.path("open"), lab.path("gate"), lab.path("late")
    open(open_gate, "w").close()
    one.call("mutter", text="alone", until=open_gate)
    two.call("hold", until=open_gate)

    def said(host):
        host.settle()
        return [m["params"]["data"] for m in host.all("notifications/message")]
    # One that is known to be quiet is no candidate; the other one that logs waits until it cannot be mistaken.
    quiet = two.begin("hold", until=gate)
    first = one.begin("mutter", text="one", until=gate)
    lab.wait_begun("curious", count=4)
    second = two.begin("mutter", text="two", until=gate)
    assert two.call("echo", text="not held up") == "not held up"
    assert len(lab.seen("curious", "begin")) == 5
    open(gate, "w").close()
    for host, call in ((two, quiet), (one, first), (two, second)):
        host.result(call)
    assert (said(one), said(two)) == (["alone"] * 2 + ["one"] * 2, ["two"] * 2)
    # Nobody waits for long on account of log messages: then they are nobody's.
    first = one.begin("mutter", text="long", until=late)
    lab.wait_begun("curious", count=7)
    second = two.begin("mutter", text="longer", until=late)
    lab.wait_begun("curious", count=8)
    open(late, "w").close()
    assert text_of(one.result(first)) + text_of(two.result(second)) == "longlonger"
    assert said(one)[4:5] == ["long"] and "longer" not in said(one) and "long" not in said(two)
    # All of it is known to the next daemon as well.
    lab.command("stop")
    os.unlink(gate)
    first = one.begin("mutter", text="anew", until=gate)
    lab.wait_begun("curious", count=9)
    second = two.begin("mutter", text="again", until=gate)
    assert two.call("echo", text="x") == "x"
    open(gate, "w").close()
    one.result(first), two.result(second)
    assert said(one)[-2:] == ["anew"] * 2 and said(two)[-2:] == ["again"] * 2


# ---------------------------------------------------------------------------
# Children: how they start, where, with what, and how they end
# ---------------------------------------------------------------------------

def test_children_every_state_and_event_is_in_the_table_or_ignored_on_purpose():
    states = {"running", "closing", "terminating", "killing", "sweeping", "gone"}
    events = {"stop", "kill", "exit", "deadline", "clear"}
    # An exit happens once; a deadline needs a timer; "clear" only follows a sweep.
    impossible = {(s, "exit") for s in ("sweeping", "gone")} | {("running", "deadline")} | {
        (s, "clear") for s in states - {"sweeping"}}
    decided = set(mcpx.CHILD_STEPS) | mcpx.CHILD_IGNORED
    assert decided | impossible == set(itertools.product(states, events))
    assert not decided & impossible
    for next_state, method in mcpx.CHILD_STEPS.values():
        assert next_state in states and hasattr(mcpx.Child, method)


def test_private_instances_get_their_callers_environment_and_shared_ones_do_not(lab):
    scopes = ("global", "repo", "worktree", "cwd", "session", "parent-session", "pid", "call")
    servers = {scope: lab.role("upstream", None, scope=scope) for scope in scopes}
    servers["chosen"] = lab.role("upstream", None, scope="global", inheritEnv=["WISH"])
    servers["fixed"] = dict(lab.role("upstream", None, scope="global"), env={"WISH": "fixed"})
    lab.configure(servers)
    place = lab.directory("place")
    host = lab.host(*servers, env={"WISH": "mine", "LC_ALL": "C"}, cwd=place)
    given = {name: host.whoami(prefix=name + "_")["env"] for name in servers}
    assert {name: env.get("WISH") for name, env in given.items()} == {
        "global": None, "repo": None, "worktree": None, "cwd": None, "session": "mine", "parent-session": "mine",
        "pid": "mine", "call": "mine", "chosen": "mine", "fixed": "fixed"}
    assert all(env["HOME"] == lab.home and env["PATH"] and env["MCPX_INSTANCE"] for env in given.values())
    # The daemon that this host started keeps nothing of it.
    if os.path.isdir("/proc/self"):
        with open("/proc/%d/environ" % lab.daemon_pid(), "rb") as file:
            assert b"WISH=" not in file.read()
    directories = {name: host.whoami(prefix=name + "_")["cwd"] for name in servers}
    assert directories == {
        "global": lab.home, "chosen": lab.home, "fixed": lab.home, "repo": place, "worktree": place, "cwd": place,
        "session": place, "parent-session": place, "pid": place, "call": place}


def test_callers_with_different_tokens_never_share(lab):
    lab.configure({
        "written": dict(lab.role("upstream", None, scope="global"), env={"TOKEN": "${TOKEN}"}),
        "argued": lab.role("upstream", None, "--token", "${TOKEN}", scope="global"),
        "inherited": lab.role("upstream", None, scope="global", inheritEnv=["TOKEN"]),
        "blind": lab.role("upstream", None, scope="global"),
    })
    names = ("written", "argued", "inherited", "blind")
    hosts = [lab.host(*names, env={"TOKEN": token}) for token in ("red", "blue", "red")]
    for name in names:
        pids = [host.whoami(prefix=name + "_")["pid"] for host in hosts]
        assert pids[0] == pids[2] and (pids[0] == pids[1]) == (name == "blind"), name
    assert [host.whoami(prefix="inherited_")["env"]["TOKEN"] for host in hosts] == ["red", "blue", "red"]
    shown = json.dumps([lab.status(), lab.command("why", "argued", "--json", env={"TOKEN": "red"})])
    assert "blue" not in shown


def test_a_server_starts_where_it_is_told_to(lab):
    folder, bins = lab.directory("config", "mcpx", "inside"), lab.directory("bin")
    script = "#!%s\nimport runpy, sys\nsys.argv = [%r, '--role', 'upstream']\nrunpy.run_path(%r, run_name='__main__')\n"
    with open(os.path.join(bins, "only-here"), "w") as file:
        file.write(script % (sys.executable, __file__, os.path.abspath(__file__)))
    os.chmod(os.path.join(bins, "only-here"), 0o755)
    shutil.copy(os.path.join(bins, "only-here"), os.path.join(folder, "beside"))
    lab.configure({
        "absolute": dict(lab.role("upstream", None), cwd=lab.directory("absolute")),
        "relative": dict(lab.role("upstream", None), cwd="inside"),
        "variable": dict(lab.role("upstream", None), cwd="${PLACE}"),
        "beside": {"command": "./inside/beside"},
        "onpath": {"command": "only-here"},
        "missing": dict(lab.role("upstream", None), cwd=lab.path("not-there")),
    }, coldWait="5s")
    host = lab.host("absolute", "relative", "variable", "onpath", "beside", env={
        "PLACE": lab.directory("variable"), "PATH": bins + os.pathsep + os.environ["PATH"]})
    assert host.whoami(prefix="absolute_")["cwd"] == lab.path("absolute")
    assert host.whoami(prefix="relative_")["cwd"] == folder
    assert host.whoami(prefix="variable_")["cwd"] == lab.path("variable")
    assert host.whoami(prefix="onpath_")["cwd"] == lab.work
    assert host.whoami(prefix="beside_")["cwd"] == lab.work
    assert lab.path("not-there") in complaint(lab.start("missing"))["message"]


def test_a_directory_that_vanishes_takes_nobody_with_it(lab):
    lab.configure({"demo": demo(scope="session"), "here": demo(scope="cwd")})
    gone = lab.directory("gone")
    host = lab.host("demo", cwd=gone)
    host.whoami()
    shutil.rmtree(gone)
    assert host.call("echo", text="x") == "x"
    assert lab.host("here").call("echo", text="x") == "x"
    assert lab.host("demo").call("echo", text="x") == "x"


def test_placeholders_give_each_instance_its_own(lab):
    lab.configure({"plain": lab.role(
        "upstream", None, "--key", "{key}", "--id", "{id}", "--session", "{session}", "--cwd", "{cwd}",
        "--tmpdir", "{tmpdir}", "--port", "{port}", "--profile", "{tmpdir}/profile-{session}", "--json", '{"a": 1}')})
    host = lab.host("plain")
    seen = []
    for name in ("ann", "../../ann", "a/b c"):
        argv = host.whoami({SESSION: name})["argv"]
        seen.append(dict(zip(argv[1::2], argv[2::2])))
    for one in seen:
        assert os.path.isdir(one["--tmpdir"]) and os.stat(one["--tmpdir"]).st_mode & 0o077 == 0
        assert one["--cwd"] == lab.work and 0 < int(one["--port"]) < 65536
        assert os.path.dirname(one["--profile"]) == one["--tmpdir"], "a session's name is one file name"
        assert one["--json"] == '{"a": 1}'
    for what in ("--key", "--id", "--tmpdir", "--port", "--session"):
        assert len({one[what] for one in seen}) == 3, what
    assert {one["--id"] for one in seen} <= {i["id"] for i in lab.instances("plain")}
    lab.command("stop", "plain")
    lab.wait_for("the directories' removal", lambda: not any(os.path.exists(one["--tmpdir"]) for one in seen))


@pytest.mark.parametrize("how, words", [
    ("exit", ("2", "no key: set DEMO_KEY")), ("signal", ("KILL", "no key: set DEMO_KEY")), ("quiet", ("0",)),
    ("refuse", ("licence expired",)), ("missing", ("no-such-program",)), ("forbidden", ("config.json",))])
def test_why_a_server_did_not_start_is_in_the_error(lab, how, words):
    server = lab.role("broken", None, "--how", how)
    if how == "missing":
        server = {"command": "no-such-program"}
    elif how == "forbidden":
        server = {"command": lab.config}
    lab.configure({"broken": server, "good": demo()}, coldWait="5s", backoff_first="50ms")
    good, broken = lab.host("good"), lab.start("broken")
    error = complaint(broken)
    assert all(word in error["message"] for word in words), error
    assert how == "refuse" or "broken" in error["message"]
    row = [s for s in lab.status()["servers"] if s["name"] == "broken"][0]
    assert words[-1] in row["lastError"]
    assert good.call("echo", text="x") == "x"


def test_a_server_that_keeps_failing_is_tried_ever_less_and_recovers_by_itself(lab):
    lab.configure({"broken": lab.role("broken", "broken", "--how", "exit", "--repaired", lab.path("repaired"),
                                      scope="global")},
                  backoff_first="200ms", backoff_max="500ms", coldWait="300ms")
    hosts = [lab.start("broken") for _ in range(3)]
    began, tries = time.monotonic(), 0
    while time.monotonic() - began < 2:
        for host in hosts:
            complaint(host)
            tries += 1
    # 200, 400, then every 500 ms: five or six starts in two seconds.
    assert len(lab.seen("broken", "start")) <= 8, "%d tries" % tries
    with open(lab.path("repaired"), "w"):
        pass
    for host in hosts:
        lab.wait_for("the repaired server", lambda: attempt(host) is None, 5)


@pytest.mark.parametrize("ignores, order", [("", ["eof"]), ("eof", ["term"]), ("eof+term", ["term"])])
def test_a_server_is_told_to_end_before_it_is_made_to(lab, ignores, order):
    role = lab.role("stubborn", "stubborn", "--ignore", ignores) if ignores else lab.role("upstream", "stubborn")
    lab.configure({"stubborn": role}, stop_eofGrace="400ms", stop_termGrace="400ms")
    host = lab.host("stubborn")
    pid = host.whoami()["pid"]
    began = time.monotonic()
    lab.command("stop", "stubborn")
    lab.wait_gone(pid, within=5)
    took = time.monotonic() - began
    events = [e for e in lab.seen("stubborn", pid=pid) if e["event"] in ("eof", "term")]
    assert [e["event"] for e in events] == (["eof"] + order if ignores else order)
    assert took < 4
    # Not below what is set, nor near the 3 s that each of them has by default.
    if ignores:
        assert 0.35 <= events[1]["at"] - events[0]["at"] < 2.5
    if ignores == "eof+term":
        assert took >= 0.75 and began + took - events[1]["at"] < 2.5
    # The host is still there, and its next call gets a new process.
    assert host.whoami()["pid"] != pid


@pytest.mark.parametrize("end", ["host", "stop", "sigterm", "busy"])
def test_a_server_may_write_its_last_words(lab, end):
    lab.configure({"lastwords": lab.role("lastwords", "lastwords", "--out", lab.path("words"))},
                  drainTimeout="300ms")
    host = lab.host("lastwords")
    for word in ("one", "two", "three"):
        host.call("tell", text=word)
    daemon = lab.daemon_pid()
    if end == "busy":
        host.begin("hold", until=lab.gate("never"))
        lab.wait_begun("lastwords", count=4)
    if end == "host":
        host.close()
    elif end == "sigterm":
        os.kill(daemon, signal.SIGTERM)
    else:
        lab.command("stop")
    lab.wait_for("the last words", lambda: os.path.exists(lab.path("words"))
                 and os.path.getsize(lab.path("words")) == len("one\ntwo\nthree"))


@pytest.mark.parametrize("end", ["stop", "sigterm", "child", "crash"])
def test_what_a_server_started_ends_with_it(lab, end):
    kept = lab.path("kept-helper")
    shutil.copy(shutil.which("sleep"), kept)
    lab.configure({"brood": lab.role("brood", "brood", "--out", lab.path("marker"), "--kept", kept,
                                     scope="global", keepProcesses=["*kept-helper*"])},
                  stop_eofGrace="1s", stop_termGrace="1s", backoff_first="50ms")
    # Somebody's own process, that looks the same.
    twin = subprocess.Popen(["sh", "-c", "sleep 600; :", lab.path("marker")], env=lab.env, start_new_session=True)
    host = lab.host("brood")
    pid = host.whoami()["pid"]
    helpers = json.loads(host.call("helpers"))
    owned = helpers.pop()
    assert all(map(is_running, helpers + [owned]))
    daemon = lab.daemon_pid()
    try:
        if end == "stop":
            lab.command("stop", "brood")
        elif end == "sigterm":
            os.kill(daemon, signal.SIGTERM)
        elif end == "child":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(daemon, signal.SIGKILL)
            lab.wait_gone(daemon)
            assert host.call("echo", text="x") == "x"
            lab.command("stop")
        lab.wait_gone(pid, *helpers)
        assert is_running(owned) and is_running(twin.pid)
    finally:
        os.killpg(twin.pid, signal.SIGKILL)
        twin.wait()
        for extra in [p for p, command in lab.processes().items() if command.startswith(kept)]:
            os.kill(extra, signal.SIGKILL)


def test_layers_of_shells_around_a_server_end_with_it(lab):
    inner = " ".join([sys.executable, os.path.abspath(__file__), "--role", "upstream"])
    lab.configure({"deep": {"command": "sh", "args": ["-c", "sh -c '%s; :'; :" % inner]}})
    host = lab.host("deep")
    pid = host.whoami()["pid"]
    (top,) = lab.pids("deep")
    assert top != pid
    host.close()
    lab.wait_gone(pid, top)


@pytest.mark.parametrize("how", ["restart", "config", "crash", "idle"])
def test_a_server_that_holds_a_lock_never_meets_its_own_successor(lab, how):
    def server(*options):
        return lab.role("lock", "lock", "--lock", lab.path("the.lock"), *options, scope="global",
                        **({"idleTimeout": "300ms"} if how == "idle" else {}))

    lab.configure({"lock": server()}, backoff_first="50ms")
    host = lab.host("lock")
    pid = host.whoami()["pid"]
    if how == "restart":
        restart = threading.Thread(target=lab.command, args=("restart", "lock"), daemon=True)
        restart.start()
        lab.wait_for("the end of its input", lambda: lab.seen("lock", "eof", pid=pid))
    elif how == "config":
        lab.configure({"lock": server("--new", "1")}, backoff_first="50ms")
        lab.command("reload")
        lab.wait_for("the end of its input", lambda: lab.seen("lock", "eof", pid=pid))
    elif how == "crash":
        daemon = lab.daemon_pid()
        os.kill(daemon, signal.SIGKILL)
        lab.wait_gone(daemon)
    else:
        lab.wait_for("the end of its input", lambda: lab.seen("lock", "eof", pid=pid))
    assert host.whoami()["pid"] != pid or how == "crash"
    assert host.call("echo", text="x") == "x"
    assert lab.seen("lock", "collision") == []
    if how == "restart":
        restart.join(PATIENCE_S)


def test_a_server_that_reads_nothing_holds_up_nobody_else(lab):
    lab.configure({"deaf": lab.role("deaf", "deaf", scope="global"), "demo": demo(scope="global")}, coldWait="500ms",
                  stop_eofGrace="300ms", stop_termGrace="300ms")
    stuck, stuck2, other = lab.host("deaf"), lab.host("deaf"), lab.host("demo")
    ids = [host.begin("echo", text="x" * (4 << 20)) for host in (stuck, stuck2)]
    for n in range(20):
        assert other.call("echo", text=str(n)) == str(n)
    stuck.notify("notifications/cancelled", requestId=ids[0])
    stuck2.close()
    lab.command("stop", "deaf")
    assert lab.pids("deaf") == []
    assert other.call("echo", text="x") == "x"


def test_a_server_that_stops_reading_gets_no_more_calls_than_may_wait_for_it(lab):
    lab.configure({"slow": lab.role("headfirst", "slow", scope="global"), "demo": demo(scope="global")},
                  limits_childQueueBytes="1MiB")
    host, small, other = lab.host("slow"), lab.host("slow"), lab.host("demo")
    held = host.begin("hold", until=lab.gate("slow"))
    lab.wait_begun("slow")
    calls = [host.begin("length", text="x" * (1 << 20)) for _ in range(8)]
    for refused in (host.answer(calls[-1]), small.answer(small.begin("length", text="x"))):
        message = refused["error"]["message"]
        assert "limits.childQueueBytes" in message and "server slow" in message
    assert host.answers(held) == host.answers(calls[0]) == [] and small.ask("ping") == {}
    assert other.call("echo", text="x") == "x"
    lab.open_gate("slow")
    assert text_of(host.result(held)) == "held"
    answers = [host.answer(call) for call in calls]
    taken = [answer for answer in answers if "result" in answer]
    # The pipe itself holds up to a megabyte: those that were taken are the first, and they are all answered.
    assert answers[:len(taken)] == taken and 1 <= len(taken) <= 4
    assert {text_of(answer["result"]) for answer in taken} == {str(1 << 20)}
    assert small.call("length", text="xy") == "2"


def test_a_server_strict_about_its_handshake_sees_exactly_one(lab):
    lab.configure({"strict": lab.role("strict", "strict", scope="global")})
    revisions = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] * 2
    hosts = [lab.start("strict", revision=revision, capabilities={"roots": {}} if n % 2 else {})
             for n, revision in enumerate(revisions)]
    hellos = [(host, host.hello()) for host in hosts]
    for host, hello in hellos:
        assert host.result(hello)["protocolVersion"] == host.revision
        host.notify("notifications/initialized")
    pids = {host.whoami()["pid"] for host in hosts}
    assert len(pids) == 1
    (pid,) = pids
    got = [e["message"].get("method") for e in lab.seen("strict", "got", pid=pid)]
    assert got[:2] == ["initialize", "notifications/initialized"]
    assert got.count("initialize") == got.count("notifications/initialized") == 1


# ---------------------------------------------------------------------------
# Pool: which instance, now, later or never; and for how long
# ---------------------------------------------------------------------------

def test_pool_every_instance_state_can_be_left_by_an_exit_but_down():
    states = {state for state, _ in mcpx.INSTANCE_STEPS} | set(mcpx.INSTANCE_STEPS.values())
    assert {state for state, event in mcpx.INSTANCE_STEPS if event == "exit"} == states - {"down"}


def test_pool_waiting_calls_are_taken_in_turn_by_host():
    queue = mcpx.FairQueue()
    calls = {name: [mcpx.Call("m", {"n": n}, None, name) for n in range(3)] for name in "ab"}
    for made in calls["a"] + calls["b"]:
        queue.push(made)
    order = [queue.pop() for _ in range(6)]
    assert [c.host for c in order] == ["a", "b", "a", "b", "a", "b"]
    assert [c.params["n"] for c in order if c.host == "a"] == [0, 1, 2] and len(queue) == 0


def test_pool_a_call_can_leave_the_queue_and_come_back_first():
    queue = mcpx.FairQueue()
    one, two = mcpx.Call("m", {}, None, "a"), mcpx.Call("m", {}, None, "a")
    queue.push(one)
    queue.push(two)
    assert queue.remove(one) and not queue.remove(one) and len(queue) == 1
    queue.push(one, first=True)
    assert queue.drain() == [one, two] and len(queue) == 0


def test_pool_a_holder_is_given_every_child_at_once_whatever_it_has_not_done_yet(loop):
    ours, theirs = socket.socketpair()
    holder = mcpx.Holder(loop, mcpx.Log(), "/nowhere", 5.0)
    holder.connection = ours
    holder._watch()
    done = []

    class Child:
        def descriptors(self):
            return (theirs.fileno(),)
    for name in ("a", "b", "c"):
        holder.hold(name, Child())
    holder.drop("b", lambda: done.append("b"))
    got = []
    for _ in range(4):
        data, fds, _, _ = socket.recv_fds(theirs, 65, 8)
        got.append((data[:1], data[1:].rstrip(b"\0"), len(fds)))
        for fd in fds:
            os.close(fd)
    assert got == [(b"h", b"a", 1), (b"h", b"b", 1), (b"h", b"c", 1), (b"d", b"b", 0)]
    theirs.send(b"kkk")
    loop.turn(1)
    assert done == []
    theirs.send(b"k")
    loop.turn(1)
    assert done == ["b"] and not holder._queue and not holder._sent
    holder.close()
    theirs.close()


def test_snapshot_of_older_code_gives_what_that_did_not_know_and_what_it_called_otherwise():
    call = mcpx.Call("tools/call", {"name": "x"}, None, host_id=5)
    call.timer = mcpx.Timer(1.5, None)
    holder = mcpx.Holder(None, None, "/nowhere", 5.0)
    version, nodes, root, descriptors = marshal.loads(mcpx.SnapshotWriter().dump([call, holder]))
    for node in nodes:
        if node[0] == "object":
            names = node[2][::2]
            if node[1] == "Call":
                node[2][2 * names.index("timer")] = "turn_timer"
                node[2].extend(["a slot of old", 7])
            elif node[1] == "Holder":
                place = 2 * names.index("_sent")
                del node[2][place:place + 2]
    call, holder = mcpx.SnapshotReader(marshal.dumps((version, nodes, root, descriptors)), dry=True).load()
    assert (call.timer.at, call.host_id, call.params, holder._sent) == (1.5, 5, {"name": "x"}, 0)


def journal(tmp_path, writer="i1", boot="boot"):
    return mcpx.Journal(str(tmp_path / "journal"), boot, writer, mcpx.Log())


def test_pool_what_is_in_the_journal_is_there_for_the_next_daemon(tmp_path):
    one = journal(tmp_path)
    number = one.add_child("i1-1")
    mark = one.enter(number, 7, b"t" * 8, b"k" * 8, 1, 1)
    one.set(mark, mcpx.WRITTEN)
    one.take_over()
    two = journal(tmp_path, "i2")
    assert (two.is_new, two.former, two.children) == (False, "i1", {"i1-1": number})
    assert list(two.calls()) == [(mark, (mcpx.WRITTEN, 1, number, 1, 7, b"t" * 8, b"k" * 8))]
    assert mark not in two.free
    assert journal(tmp_path, boot="another boot").is_new and list(journal(tmp_path).calls()) == []


def test_pool_a_childs_number_is_not_used_again_while_calls_of_it_are_open(tmp_path):
    one = journal(tmp_path)
    number = one.add_child("i1-1")
    mark = one.enter(number, 7, b"t" * 8, b"k" * 8, 1, 1)
    one.remove_child("i1-1")
    assert one.add_child("i1-2") != number, "the next daemon would take the call for one of this child"
    one.release(mark)
    assert one.add_child("i1-3") == number


def test_pool_a_journal_without_room_proves_nothing_until_it_is_cleared(tmp_path):
    one = journal(tmp_path)
    number = one.add_child("i1-1")
    marks = [one.enter(number, n, b"t" * 8, b"k" * 8, 1, 1) for n in range(mcpx.JOURNAL_CALLS)]
    assert not one.overflowed() and None not in marks
    assert one.enter(number, 0, b"t" * 8, b"k" * 8, 1, 1) is None and one.overflowed()
    assert journal(tmp_path).overflowed()
    one.release(marks[0])
    one.release(marks[0])
    assert one.free == [marks[0]], "an entry that is freed twice would be given to two calls"
    one.clear()
    assert not one.overflowed() and len(one.free) == mcpx.JOURNAL_CALLS
    for n in range(mcpx.JOURNAL_CHILDREN):
        one.add_child("i1-%d" % n)
    assert one.add_child("one more") is None and one.overflowed()


@pytest.mark.parametrize("argv, key", [
    (["npx", "-y", "pkg@1"], ("npx", "pkg@1")), (["/usr/bin/uvx", "pkg"], ("uvx", "pkg")), (["pipx", "run", "x"], ("pipx", "x")),
    (["node", "x.js"], None), (["npx"], None)])
def test_pool_package_launchers_are_told_by_their_package(argv, key):
    assert mcpx.launcher_key(argv) == key


def test_an_instance_of_a_connection_ends_with_the_host(lab):
    lab.configure({"session": demo(scope="session"), "pid": demo(scope="pid"), "family": demo(scope="parent-session")})
    for leave in ("close", "kill"):
        host, other = lab.host("session", "pid", "family"), lab.host("session", "pid", "family")
        prefixes = ("session_", "pid_", "family_")
        pids = [host.whoami(prefix=p)["pid"] for p in prefixes]
        others = [other.whoami(prefix=p)["pid"] for p in prefixes]
        getattr(host, leave)()
        lab.wait_gone(*pids)
        assert [other.whoami(prefix=p)["pid"] for p in prefixes] == others
        other.close()


def test_a_named_session_outlives_its_host_until_it_is_idle(lab):
    lab.configure({"demo": demo(scope="session", idleTimeout="1s")})
    host = lab.host("demo")
    pid = host.whoami({SESSION: "ann"})["pid"]
    host.call("set", {SESSION: "ann"}, value="kept")
    host.kill()
    again = lab.host("demo")
    assert again.call("get", {SESSION: "ann"}) == "kept"
    lab.wait_gone(pid)
    result = again.result(again.begin("get", {SESSION: "ann"}))
    assert text_of(result) == "" and result["_meta"][RESTARTED]["reason"]


def test_a_session_that_connects_twice_keeps_its_instance(calm):
    busy = calm.host("demo")
    busy_pid = busy.whoami({SESSION: "twice-busy"})["pid"]
    old = calm.host("demo")
    pid = old.whoami({SESSION: "twice"})["pid"]
    for _ in range(4):
        new = calm.host("demo")
        assert new.whoami({SESSION: "twice"})["pid"] == pid
        old.close()
        old = new
        assert old.whoami({SESSION: "twice"})["pid"] == pid
    assert busy.whoami({SESSION: "twice-busy"})["pid"] == busy_pid
    calm.command("stop", "demo")


def test_idle_is_what_has_no_call_no_subscription_and_no_task(lab):
    """One instance that is really idle tells when the others' time would have been up as well."""
    lab.configure({"tasks": lab.role("tasks", "tasks", scope="session", idleTimeout="500ms")})
    host = lab.host("tasks", revision="2025-11-25")

    def pid(name):
        return host.whoami({SESSION: name})["pid"]

    working = pid("call")
    held = host.begin("hold", {SESSION: "call"}, until=lab.gate("held"))
    tasking = pid("task")
    created = host.result(host.begin("hold", {SESSION: "task"}, task={"ttl": 60_000}, until=lab.gate("task")))
    subscribed = pid("subscription")
    host.ask("resources/subscribe", {"uri": "role://one", "_meta": {SESSION: "subscription"}})
    for n in range(2):
        lab.wait_gone(pid("nothing%d" % n))
    assert is_running(working) and is_running(tasking) and is_running(subscribed)
    # Lists, pings and the host's being there are no reason to stay, nor to start.
    starts = len(lab.seen("tasks", "start"))
    assert host.tools() and host.ask("ping") == {}
    assert len(lab.seen("tasks", "start")) == starts
    lab.open_gate("held")
    assert text_of(host.result(held)) == "held"
    lab.wait_gone(working)
    lab.open_gate("task")
    lab.wait_for("the task's end", lambda: host.ask(
        "tasks/get", {"taskId": created["task"]["taskId"]})["status"] == "completed")
    host.ask("resources/unsubscribe", {"uri": "role://one", "_meta": {SESSION: "subscription"}})
    lab.wait_gone(subscribed)
    result = host.result(host.begin("echo", {SESSION: "call"}, text="x"))
    assert text_of(result) == "x" and RESTARTED in result["_meta"]


def test_a_full_server_says_who_holds_it_and_takes_the_next_when_it_is_free(lab):
    def configure(**settings):
        lab.configure({"one": lab.role("upstream", "one", scope="session", max=1, queueTimeout="400ms"),
                       "patient": lab.role("upstream", "patient", scope="session", max=1)}, **settings)

    configure()
    host, other = lab.host("one", "patient"), lab.host("one", "patient")
    held = host.begin("one_hold", {SESSION: "alice"}, until=lab.gate("held"))
    lab.wait_begun("one")
    error = other.answer(other.begin("one_echo", {SESSION: "bob"}, text="x"))["error"]
    assert "alice" in error["message"] and "max" in error["message"]
    lab.open_gate("held")
    host.result(held)
    # It is idle now, but somebody's: it was named and used a moment ago.
    error = other.answer(other.begin("one_echo", {SESSION: "bob"}, text="x"))["error"]
    assert "alice" in error["message"]
    # With nobody to come back for it the least recently used one makes room.
    configure(keep="1ms")
    lab.command("reload")
    host.call("patient_echo", text="mine")
    waiting = other.begin("patient_echo", text="next")
    lab.wait_for("the call to queue", lambda: lab.status()["tables"]["waiting"] == 1)
    assert other.answers(waiting) == []
    host.close()
    assert text_of(other.result(waiting)) == "next"
    assert other.call("one_echo", {SESSION: "bob"}, text="x") == "x"
    assert len(lab.pids("one")) == 1


def test_instances_of_a_call_end_with_it_and_stay_within_the_cap(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="call", max=2)})
    host, leaver = lab.host("plain"), lab.host("plain")
    ids = [host.begin("whoami") for _ in range(6)]
    leaver.begin("hold", until=lab.gate("never"))
    pids = [json.loads(text_of(host.result(n)))["pid"] for n in ids]
    assert len(set(pids)) == 6
    leaver.kill()
    lab.wait_gone(*{e["pid"] for e in lab.seen("plain", "start")})
    alive, most = set(), 0
    for event in lab.seen("plain"):
        if event["event"] == "begin":
            alive.add(event["pid"])
            most = max(most, len(alive))
        elif event["event"] == "end":
            alive.discard(event["pid"])
    assert most <= 2
    lab.wait_for("empty tables", lambda: at_rest(lab))


def at_rest(lab):
    tables = lab.status()["tables"]
    return all(tables[name] == 0 for name in ("calls", "waiting", "leases", "questions", "tokens"))


def test_a_floor_of_instances_is_kept(lab):
    lab.configure({"demo": demo(scope="session", idleTimeout="300ms", min=1),
                   "other": demo(scope="session", idleTimeout="300ms")})
    host = lab.host("demo", "other")
    pids = {host.whoami({SESSION: name}, "demo_")["pid"] for name in ("a", "b", "c")}
    lab.wait_for("two of them to go", lambda: len([p for p in pids if is_running(p)]) <= 1)
    lab.wait_gone(host.whoami({SESSION: "a"}, "other_")["pid"])
    assert len(lab.pids("demo")) == 1


def test_a_warm_process_is_taken_and_replaced(lab):
    lab.configure({"plain": dict(lab.role("upstream", "plain", scope="session", warm=1, inheritEnv=[]),
                                 cwd=lab.directory("place"))})
    host = lab.host("plain")
    host.tools()

    def untouched():
        return {e["pid"] for e in lab.seen("plain", "start") if is_running(e["pid"])
                and not lab.seen("plain", "got", pid=e["pid"])}
    warm = lab.wait_for("a process that waits for work", untouched)
    taken = host.whoami({SESSION: "a"})["pid"]
    assert taken in warm
    later = lab.wait_for("its replacement", lambda: untouched() - warm)
    assert host.whoami({SESSION: "b"})["pid"] in later
    assert [e["message"]["method"] for e in lab.seen("plain", "got", pid=taken)][:2] == [
        "initialize", "notifications/initialized"]


def test_an_exclusive_server_does_one_thing_at_a_time_in_order(calm, tmp_path):
    one, two = calm.host("alone"), calm.host("alone")
    gate, tag = str(tmp_path / "gate"), str(tmp_path)
    first = one.begin("hold", until=gate, tag=tag)
    calm.wait_begun("alone", tag)
    waiting = [two.begin("echo", text=str(n), tag=tag) for n in range(5)]
    calm.wait_for("the others to wait", lambda: calm.status()["tables"]["waiting"] >= 5)
    assert two.ask("ping") == {} and "echo" in two.tools()
    dropped = one.begin("echo", text="never", tag=tag + "-dropped")
    one.notify("notifications/cancelled", requestId=dropped)
    open(gate, "w").close()
    assert text_of(one.result(first)) == "held"
    assert [text_of(two.result(n)) for n in waiting] == list("01234")
    steps = [e["event"] for e in calm.seen("alone") if e.get("tag") == tag]
    assert steps == ["begin", "end"] * 6
    assert calm.seen("alone", "begin", tag=tag + "-dropped") == [] and one.answers(dropped) == []
    answered = [m["id"] for m in two.seen if m.get("id") in waiting]
    assert answered == waiting


def test_no_more_calls_wait_for_one_instance_than_may(lab):
    lab.configure({"alone": lab.role("upstream", "alone", scope="session", sharing="exclusive"),
                   "late": lab.role("upstream", "late", "--gate", lab.gate("late"), scope="global")},
                  limits_waiting=2, coldWait="100ms")
    host, other, early = lab.host("alone"), lab.host("alone"), lab.host("late")
    hers = {SESSION: "ann"}
    held = host.begin("hold", hers, until=lab.gate("alone"))
    lab.wait_begun("alone")
    waiting = [host.begin("echo", hers, text=text) for text in "ab"]
    lab.wait_for("both to wait", lambda: lab.status()["tables"]["waiting"] == 2)
    for caller in (host, other):
        error = caller.answer(caller.begin("echo", hers, text="too many"))["error"]
        assert "server alone" in error["message"] and "limits.waiting" in error["message"]
    assert other.call("echo", text="mine") == "mine"
    lab.open_gate("alone")
    assert [text_of(host.result(call)) for call in [held] + waiting] == ["held", "a", "b"]
    assert host.call("echo", hers, text="again") == "again"
    # Those that wait for a start as well.
    waiting = [early.begin("echo", text=text) for text in "ab"]
    error = early.answer(early.begin("echo", text="too many"))["error"]
    assert "server late" in error["message"] and "limits.waiting" in error["message"]
    lab.open_gate("late")
    assert [text_of(early.result(call)) for call in waiting] == ["a", "b"]


def test_a_caller_with_many_calls_does_not_starve_another(calm, tmp_path):
    greedy, modest = calm.host("alone"), calm.host("alone")
    gate, tag = str(tmp_path / "gate"), str(tmp_path)
    greedy.begin("hold", until=gate, tag=tag)
    calm.wait_begun("alone", tag)
    many = [greedy.begin("echo", text="g", tag=tag) for _ in range(20)]
    calm.wait_for("the calls to queue", lambda: calm.status()["tables"]["waiting"] >= 20)
    few = [modest.begin("echo", text="m", tag=tag + "-modest") for _ in range(2)]
    calm.wait_for("the calls to queue", lambda: calm.status()["tables"]["waiting"] >= 22)
    open(gate, "w").close()
    for host, ids in ((greedy, many), (modest, few)):
        for host_id in ids:
            host.result(host_id)
    order = [e["tag"] for e in calm.seen("alone", "begin") if e["tag"].startswith(tag)]
    assert [n for n, t in enumerate(order) if t.endswith("-modest")][-1] <= 6, order


# ---------------------------------------------------------------------------
# Surface: what a host sees, without waiting for anything
# ---------------------------------------------------------------------------

def make_schema(tools=(), resources=(), templates=(), capabilities=None, revision="2025-11-25"):
    schema = mcpx.Schema("k", "/nowhere")
    schema.known, schema.revision = True, revision
    schema.capabilities = capabilities if capabilities is not None else {"tools": {}, "resources": {}}
    schema.lists = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools], "prompts": [],
                    "resources": [{"uri": uri, "name": uri} for uri in resources],
                    "resourceTemplates": [{"uriTemplate": text, "name": text} for text in templates]}
    return schema


def test_surface_one_server_keeps_its_names_and_its_order():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = make_schema(["z.dotted", "a", "ü", "x" * 100])
    page = json.loads(surface.page("tools", "2025-11-25", None, 1000))
    assert [tool["name"] for tool in page["tools"]] == ["z.dotted", "a", "ü", "x" * 100]
    assert surface.resolve("tools", "z.dotted") == ("s", "z.dotted")


def test_surface_merged_names_are_legal_reversible_and_stable():
    names = ["t", "with.dot", "ünï", "x" * 60, "x" * 61, "a_b"]
    surface = mcpx.Surface(["s", "s_a"])
    surface.schemas = {"s": make_schema(names), "s_a": make_schema(["b", "t"])}
    listed = [tool["name"] for tool in json.loads(surface.page("tools", "2025-11-25", None, 1000))["tools"]]
    assert listed == [tool["name"] for tool in json.loads(surface.page("tools", "2025-11-25", None, 1000))["tools"]]
    assert listed[0] == "s_t"
    for name in listed:
        assert len(name) <= 64 and name.replace("_", "").replace("-", "").isalnum() and name.isascii()
        server, own = surface.resolve("tools", name)
        assert mcpx.merged_name(server, own) == name
    assert len(set(listed)) == len(listed)
    with pytest.raises(mcpx.RpcError):
        surface.resolve("tools", "t")


def test_surface_pages_cover_a_list_once_and_old_cursors_are_refused():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = schema = make_schema(["t%d" % n for n in range(25)])
    seen, cursor = [], None
    while True:
        page = json.loads(surface.page("tools", "2025-11-25", cursor, 10))
        seen += [tool["name"] for tool in page["tools"]]
        cursor = page.get("nextCursor")
        if cursor is None:
            break
        last = cursor
    assert seen == ["t%d" % n for n in range(25)]
    assert schema.set_list("tools", []) and not schema.set_list("tools", [])
    for bad in (last, "", "x", 5, "0.-1"):
        with pytest.raises(mcpx.RpcError) as caught:
            surface.page("tools", "2025-11-25", bad, 10)
        assert caught.value.code == -32602


def test_surface_capabilities_shown_are_those_of_the_host_s_revision():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = make_schema(capabilities={"tools": {}, "completions": {}, "tasks": {"list": {}}, "logging": {}})
    for revision in mcpx.LEGACY_REVISIONS:
        shown = surface.initialize_result(revision)
        assert shown["protocolVersion"] == revision
        assert ("completions" in shown["capabilities"]) == (revision >= "2025-03-26")
        assert ("tasks" in shown["capabilities"]) == (revision == "2025-11-25")
        assert shown["capabilities"]["tools"] == {"listChanged": True} and "prompts" not in shown["capabilities"]


@pytest.mark.parametrize("template, uri, good", [
    ("demo://note/{name}", "demo://note/1", True), ("demo://note/{name}", "demo://note/a/b", False),
    ("file:///{+path}", "file:///a/b", True), ("a{?q}", "a?q=1", True), ("demo://x", "demo://y", False), (None, "x", False),
    ("a.b{x}", "aXb1", False)])
def test_surface_templates(template, uri, good):
    assert mcpx.template_matches(template, uri) is good


def test_surface_a_uri_goes_to_the_server_that_lists_it_then_by_template_then_as_seen():
    surface = mcpx.Surface(["a", "b", "c"])
    surface.schemas = {"a": make_schema(resources=["x://1"]), "b": make_schema(templates=["y://{n}"]), "c": make_schema()}
    assert surface.servers_for_uri("x://1", {}) == ["a"]
    assert surface.servers_for_uri("y://1", {}) == ["b", "a", "c"]
    assert surface.servers_for_uri("z://1", {"z://1": "c"}) == ["c", "a", "b"]


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"lists":{}}', b"\xff", b'{"revision":"x"}'])
def test_surface_a_damaged_cache_file_is_ignored(tmp_path, loop, damage):
    store = mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32)
    definition = define({"command": "x"})
    schema = store.get(definition, {})
    schema.known, schema.capabilities = True, {"tools": {}}
    schema.lists["tools"] = [{"name": "t"}]
    store.save(schema)
    again = mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32).get(definition, {})
    assert again.known and again.lists["tools"] == [{"name": "t"}] and os.stat(again.path).st_mode & 0o777 == 0o600
    with open(again.path, "wb") as file:
        file.write(damage)
    assert not mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32).get(definition, {}).known
    assert not store.get(definition, {"roots": {}}).known, "other capabilities are another schema"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads descriptors from /proc")
def test_a_daemon_whose_starter_has_died_meanwhile_keeps_nothing_of_it(lab):
    lab.configure({"demo": demo(scope="session")})
    read_fd, write_fd = os.pipe()
    pipe = os.readlink("/proc/self/fd/%d" % write_fd)
    os.close(read_fd)
    daemon = subprocess.Popen(program("daemon", "--ready-fd", str(write_fd)), env=lab.env, pass_fds=(write_fd,),
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(write_fd)
    try:
        lab.wait_for("the daemon", lambda: lab.run("status").returncode == 0)
        assert pipe not in [os.readlink(path) for path in glob.glob("/proc/%d/fd/*" % daemon.pid) if os.path.islink(path)]
    finally:
        lab.command("stop")
        daemon.wait(PATIENCE_S)


def test_logs_are_followed_line_by_line_also_into_a_new_file(lab):
    """What is piped into another program comes when it is written, not when a buffer is full."""
    lab.configure({"talks": fake(lab, "talks", """
        def call(name, arguments, host_id):
            print(arguments["text"], file=sys.stderr, flush=True)
            say(host_id, "said")
        """)}, log={"maxBytes": "20KiB"})
    follow = subprocess.Popen(program("logs", "talks", "-f", "-n", "1"), env=lab.env, stdout=subprocess.PIPE)
    watchdog = threading.Timer(PATIENCE_S * 2, follow.kill)
    watchdog.start()
    try:
        lines = (line.decode().rstrip() for line in follow.stdout)
        host = lab.host("talks")
        for text in ["first", "second"] + ["%d %s" % (n, "x" * 900) for n in range(40)] + ["a\x1b[31m"]:
            assert host.call("echo", text=text) == "said"
            assert next(lines) == text.replace("\x1b", "\\x1b")
    finally:
        watchdog.cancel()
        follow.kill()
        follow.communicate()


def test_callers_from_the_shell_share_with_those_of_the_same_parent(lab):
    lab.configure({"demo": demo(scope="parent-session", idleTimeout="1h")})
    family = ("--parent-session", "p")
    lab.command("call", "demo.set", "value=ours", "--session", "a", *family)
    assert lab.command("call", "demo.get", "--session", "b", *family).strip() == "ours"
    assert lab.command("call", "demo.get", "--session", "a").strip() == ""
    assert lab.command("why", "demo", "--session", "b", *family, "--json")["key"] == "session:p"


def test_a_disabled_or_unknown_server_is_said_to_be_that_at_every_door(lab):
    web = Web(lab, demo=demo(scope="session"), off=dict(demo(), disabled=True), out=dict(demo(), enabled=False))
    for name, reason in (("off", "is disabled"), ("out", "is disabled"), ("nobody", "there is no server")):
        told = [lab.run(*words, input=PING.decode() + "\n").stderr for words in (
            ("call", name + ".echo"), ("ls", name), ("why", name), ("serve", name))]
        told.append(web.send("POST", "/mcp/" + name, {})[2].decode())
        for text in told:
            assert reason in text and name in text and "configured are: demo" in text.replace("\\", ""), (name, told)
    assert lab.command("ls", "demo")


def test_a_known_server_is_listed_at_once_and_started_by_the_first_call(lab):
    """The second host meets a server that would need for ever to start, and then one that is gone."""
    lab.configure({"slow": lab.role("upstream", "slow", "--gate", lab.gate("open"), scope="global"),
                   "gone": {"command": lab.path("gone"), "mcpx": {"scope": "global"}}})
    with open(lab.path("gone"), "w") as file:
        file.write("#!/bin/sh\nexec '%s' '%s' --role upstream\n" % (sys.executable, os.path.abspath(__file__)))
    os.chmod(lab.path("gone"), 0o755)
    lab.open_gate("open")
    tools = lab.host("slow").tools()
    assert lab.host("gone").tools() == tools
    lab.command("stop")
    os.remove(lab.gate("open"))
    os.remove(lab.path("gone"))
    starts = len(lab.seen("slow", "start"))
    host, gone = lab.host("slow"), lab.host("gone")
    assert host.tools() == gone.tools() == tools
    assert len(lab.seen("slow", "start")) == starts, "a list has started a server"
    call = host.begin("echo", text="x")
    lab.wait_for("the start", lambda: len(lab.seen("slow", "start")) > starts)
    lab.open_gate("open")
    assert text_of(host.result(call)) == "x"
    with pytest.raises(Refused) as refused:
        gone.call("echo", text="x")
    assert lab.path("gone") in refused.value.error["message"]


def test_one_slow_server_among_ten_holds_up_nobody(lab):
    servers = {"s%d" % n: demo(scope="global") for n in range(9)}
    servers["slow"] = lab.role("upstream", "slow", "--gate", lab.gate("slow"), scope="global")
    lab.configure(servers, coldWait="2s")
    slow = lab.start("slow")
    hello = slow.hello()
    lab.wait_for("the slow one's start", lambda: lab.seen("slow", "start"))
    hosts = [lab.start("s%d" % n) for n in range(9)]
    for host in hosts:
        assert host.greet(10).call("echo", text="x") == "x"
    # A host is answered before it loses patience, and told when there is more.
    slow.result(hello, 10)
    slow.notify("notifications/initialized")
    assert slow.answer(slow.request("tools/list"), 10)
    lab.open_gate("slow")
    slow.notification("notifications/tools/list_changed")
    assert "echo" in slow.tools() and slow.call("echo", text="x") == "x"
    assert len(lab.seen("slow", "start")) <= 2


def test_a_start_goes_on_when_its_host_has_given_up(lab):
    lab.configure({"slow": lab.role("upstream", "slow", "--gate", lab.gate("slow"), scope="global")}, coldWait="30s")
    for _ in range(3):
        host = lab.start("slow")
        host.hello()
        assert host.ask("ping") == {}
        lab.wait_for("a start", lambda: lab.seen("slow", "start"))
        host.close()
    lab.open_gate("slow")
    assert "echo" in lab.host("slow").tools()
    assert len(lab.seen("slow", "start")) == 1


def test_a_server_that_never_answers_is_given_up(lab):
    lab.configure({"silent": lab.role("silent", "silent", startTimeout="600ms"), "good": demo()},
                  coldWait="300ms", stop_eofGrace="200ms")
    silent, good = lab.start("silent"), lab.host("good")
    error = complaint(silent)
    assert "silent" in error["message"]
    assert good.call("echo", text="x") == "x"


def test_new_tools_are_announced_to_all_and_listed_afresh(lab):
    lab.configure({"demo": demo(scope="global")})
    one, two = lab.host("demo"), lab.host("demo")
    assert "novel" not in one.tools() + two.tools()
    one.call("add_tool", name="novel")
    for host in (one, two):
        host.notification("notifications/tools/list_changed")
        lab.wait_for("the new tool", lambda: "novel" in host.tools())
    assert "novel" in lab.host("demo").tools()
    assert "novel" in lab.command("ls", "demo")


def test_a_server_that_comes_back_different_is_announced(lab):
    def has(*tools):
        with open(lab.path("tools"), "w") as file:
            file.write(" ".join(tools))

    has("old")
    lab.configure({"versions": lab.role("versions", "versions", "--tools", lab.path("tools"), scope="global")},
                  backoff_first="50ms")
    one, two = lab.host("versions"), lab.host("versions")
    assert "old" in one.tools() and "old" in two.tools()
    one.call("echo", text="x")
    has("new")
    one.answer(one.begin("exit"))
    assert one.call("echo", text="x") == "x"
    for host in (one, two):
        host.notification("notifications/tools/list_changed")
        lab.wait_for("the new tool", lambda: "new" in host.tools() and "old" not in host.tools())
    # A storm of announcements is not passed on as a storm.
    before = len(two.all("notifications/tools/list_changed"))
    has("new", "newer")
    one.call("announce", times=100)
    lab.wait_for("the announcement", lambda: len(two.all("notifications/tools/list_changed")) > before)
    lab.wait_for("the newer tool", lambda: "newer" in two.tools())
    assert len(two.all("notifications/tools/list_changed")) - before <= 20


def test_several_servers_in_one_host_keep_their_names_apart(lab):
    lab.configure({"left": demo(scope="session"), "right": demo(scope="session"),
                   "role": lab.role("upstream", None, scope="session"),
                   "broken": lab.role("broken", None, "--how", "exit")}, coldWait="3s")
    host = lab.host("left", "right", "role", "broken", capabilities={"elicitation": {}},
                    replies={"elicitation/create": lambda p: {"action": "accept", "content": {"answer": p["message"]}}})
    tools = host.tools()
    assert {"left_echo", "right_echo", "role_hold"} <= set(tools) and len(tools) == len(set(tools))
    assert not [t for t in tools if not t.startswith(("left_", "right_", "role_"))]
    host.call("left_set", value="L"), host.call("right_set", value="R")
    assert (host.call("left_get"), host.call("right_get")) == ("L", "R")
    prompts = [p["name"] for p in host.ask("prompts/list")["prompts"]]
    assert {"left_greet", "right_greet"} <= set(prompts)
    assert "Bo" in json.dumps(host.ask("prompts/get", {"name": "right_greet", "arguments": {"name": "Bo"}}))
    uris = [r["uri"] for r in host.ask("resources/list")["resources"]]
    assert "demo://state" in uris and "role://one" in uris
    assert host.ask("resources/read", {"uri": "role://one"})["contents"][0]["uri"] == "role://one"
    assert "left" in host.call("left_ask", message="how") or "how" in host.call("left_ask", message="how")
    for unknown in ("echo", "left_never", "never_echo"):
        answer = host.answer(host.begin(unknown, text="x"))
        assert "error" in answer or answer["result"]["isError"]
    assert host.tools() == tools, "the order of a list is the same each time"


# ---------------------------------------------------------------------------
# Questions: to the host whose call asked, or to nobody
# ---------------------------------------------------------------------------

ALL_CAPABILITIES = {"elicitation": {}, "sampling": {}, "roots": {}}


def replies_of(name):
    return {
        "elicitation/create": lambda params: {"action": "accept", "content": {"answer": name}},
        "sampling/createMessage": lambda params: {"role": "assistant", "model": name,
                                                  "content": {"type": "text", "text": name}},
        "roots/list": lambda params: {"roots": [{"uri": "file:///" + name, "name": name}]},
    }


def asked(host):
    return [m for m in host.seen if "method" in m and "id" in m]


def test_a_question_goes_to_the_host_whose_call_asked(lab):
    lab.configure({"curious": lab.role("curious", "curious", scope="global"), "demo": demo(scope="global")},
                  question_timeout="60s")
    hosts = [lab.host("curious", "demo", capabilities=ALL_CAPABILITIES, replies=replies_of(name))
             for name in ("ann", "bob")]
    for name, host in zip(("ann", "bob"), hosts):
        for method in ("elicitation/create", "sampling/createMessage"):
            assert name in host.call("curious_inquire", method=method)
        assert name in host.call("demo_ask", message="who?") and name in host.call("demo_sample", text="hi")
        assert len(asked(host)) == 4
    # Other hosts' calls of a tool that does not ask go on while a person thinks.
    slow = lab.host("curious", capabilities=ALL_CAPABILITIES)
    thinking = slow.begin("inquire")
    question = slow.expect(lambda m: m.get("method") == "elicitation/create", "the question")
    assert hosts[0].call("curious_echo", text="x") == "x"
    slow.send({"id": question["id"], "result": {"action": "decline"}})
    assert "decline" in text_of(slow.result(thinking))


def test_calls_of_a_tool_that_is_known_to_ask_do_not_overlap(lab):
    lab.configure({"curious": lab.role("curious", "curious", scope="global")}, question_timeout="8s")
    hosts = {name: lab.host("curious", capabilities=ALL_CAPABILITIES, replies=replies_of(name))
             for name in ("ann", "bob")}
    for name, host in hosts.items():
        assert name in host.call("inquire")
    ids = [(name, host, host.begin("inquire")) for _ in range(3) for name, host in hosts.items()]
    for name, host, host_id in ids:
        assert name in text_of(host.result(host_id))


def test_a_question_that_only_one_call_can_have_asked_is_answered(lab):
    """Two calls are in flight; the one that can end does, and what remains must be the one that asked."""
    lab.configure({"curious": lab.role("curious", "curious", scope="global")}, question_timeout="60s")
    ann, bob = (lab.host("curious", capabilities=ALL_CAPABILITIES, replies=replies_of(name)) for name in ("ann", "bob"))
    held = bob.begin("hold", until=lab.gate("bob"))
    lab.wait_begun("curious")
    question = ann.begin("inquire")
    lab.wait_for("the question", lambda: lab.seen("curious", "asked"))
    lab.open_gate("bob")
    assert text_of(bob.result(held)) == "held"
    assert "ann" in text_of(ann.result(question))
    assert asked(bob) == []


@pytest.mark.parametrize("tool", ["stammer", "forget"])
def test_a_question_that_its_call_does_not_wait_for_is_not_put_to_another_host(lab, tool):
    """Its id is used twice, or the call ends all the same: whoever is left has not asked."""
    lab.configure({"curious": lab.role("loose", "curious", scope="global")}, question_timeout="60s")
    ann, bob = (lab.host("curious", capabilities=ALL_CAPABILITIES, replies=replies_of(name)) for name in ("ann", "bob"))
    lab.open_gate("known")
    assert bob.call("hold", until=lab.gate("known")) == "held"     # that it does not ask
    ann.call(tool)                                                 # that it does
    held = bob.begin("hold", until=lab.gate("bob"))
    lab.wait_begun("curious", count=3)
    call = ann.begin(tool)
    wanted = 1 if tool == "stammer" else 2
    questions = lab.wait_for("open questions", lambda: (lambda found: len(found) >= wanted and found)(
        [q for q in lab.status()["questions"] if q["why"]]))
    assert len(questions) == wanted
    lab.command("answer", str(questions[0]["id"]), "decline")
    assert text_of(ann.result(call)) == tool
    lab.wait_for("no open questions", lambda: not lab.status()["questions"])
    lab.open_gate("bob")
    assert text_of(bob.result(held)) == "held"
    bob.settle()
    assert asked(bob) == []


def test_a_second_question_of_a_modern_request_that_ends_is_not_put_to_another_client(lab):
    """It was known whose it is; each request over HTTP is somebody's own."""
    web = Web(lab, demo=demo(), curious=lab.role("loose", "curious", scope="global"))

    def call(tool, **arguments):
        params = {"name": tool, "arguments": arguments}

        def again(asked=None, answered=()):
            if asked is not None:
                params.update(requestState=asked["requestState"],
                              inputResponses={key: {"action": "decline"} for key in answered})
            return web.modern("curious", "tools/call", params)[1][-1]["result"]
        return again
    first = call("afterthought", until=lab.gate("first"))
    asked = first()
    asked = first(asked, asked["inputRequests"])       # and here is the second question
    held = []
    hold = call("watch", until=lab.gate("other"))
    other = threading.Thread(target=lambda: held.append(hold()), daemon=True)
    other.start()
    lab.wait_begun("curious", count=2)
    lab.open_gate("first")
    lab.wait_for("the end of the first call", lambda: lab.seen("curious", "end", tool="afterthought"))
    assert text_of(first(asked)) == "afterthought"
    lab.wait_for("no questions", lambda: not lab.status()["questions"])
    lab.open_gate("other")
    other.join(PATIENCE_S)
    assert text_of(held[0]) == "watched"


def test_a_question_of_nobody_knows_whom_is_asked_of_nobody(lab, monkeypatch):
    impatient(lab, monkeypatch, QUIESCE_S=("2.0", "0.4"))
    lab.configure({"curious": lab.role("curious", "curious", scope="global")}, question_timeout="1500ms")
    ann, bob = (lab.host("curious", capabilities=ALL_CAPABILITIES, replies=replies_of(name)) for name in ("ann", "bob"))
    one = ann.begin("inquire", after=lab.gate("ann"))
    two = bob.begin("inquire", after=lab.gate("bob"))
    lab.wait_begun("curious", count=2)
    lab.open_gate("ann")
    questions = lab.wait_for("the open question", lambda: lab.status()["questions"])
    assert (questions[0]["server"], questions[0]["method"]) == ("curious", "elicitation/create")
    assert "cancel" in text_of(ann.result(one))
    assert asked(ann) == asked(bob) == []
    lab.open_gate("bob")
    assert "bob" in text_of(bob.result(two))
    assert lab.status()["questions"] == []


def test_a_question_that_its_host_does_not_answer_is_cancelled_in_time_and_no_other(lab):
    lab.configure({"brief": lab.role("curious", "brief", scope="global", **{"question.timeout": "400ms"}),
                   "long": lab.role("curious", "long", scope="global")}, question_timeout="1h")
    host, other = lab.host("brief", "long", capabilities=ALL_CAPABILITIES), lab.host("brief", capabilities={})
    thinking = host.begin("long_inquire")
    open_question = host.expect(lambda m: m.get("method") == "elicitation/create", "the question that may wait")
    for method, words in (("elicitation/create", '"action": "cancel"'), ("sampling/createMessage", "deadline")):
        began = time.monotonic()
        assert words in host.call("brief_inquire", method=method)
        assert 0.4 <= time.monotonic() - began < 8
        question = asked(host)[-1]
        assert question["method"] == method
        host.notification("notifications/cancelled", requestId=question["id"])
        # An answer that comes now is for nobody.
        host.send({"id": question["id"], "result": {"action": "accept", "content": {"answer": "late"}}})
        assert other.call("echo", text="x") == "x"
    assert host.answers(thinking) == []
    host.send({"id": open_question["id"], "result": {"action": "decline"}})
    assert "decline" in text_of(host.result(thinking))


def test_a_call_does_not_wait_for_ever_for_an_exclusive_server(lab):
    lab.configure({"alone": lab.role("upstream", "alone", scope="global", sharing="exclusive", queueTimeout="500ms")})
    ann, bob = lab.host("alone"), lab.host("alone")
    held = ann.begin("hold", until=lab.gate("go"))
    lab.wait_begun("alone")
    error = bob.answer(bob.begin("echo", text="late"), 10)["error"]
    assert "exclusive" in error["message"] and "queueTimeout" in error["message"]
    assert lab.status()["hosts"][0]["id"] in error["message"] or lab.status()["hosts"][1]["id"] in error["message"]
    lab.open_gate("go")
    assert text_of(ann.result(held)) == "held" and bob.call("echo", text="x") == "x"
    assert [e["message"]["params"]["arguments"].get("text") for e in lab.seen("alone", "got")
            if e["message"].get("method") == "tools/call"] == [None, "x"]


def test_a_cancelled_call_keeps_an_exclusive_server_for_a_while_or_until_it_is_answered(lab):
    lab.configure({name: lab.role("upstream", name, scope="global", sharing="exclusive", cancelGrace=grace)
                   for name, grace in (("brief", "400ms"), ("long", "1h"))})
    ann, bob, waiting = lab.host("brief", "long"), lab.host("brief", "long"), {}
    for name in ("long", "brief"):
        held = ann.begin(name + "_hold", until=lab.gate(name))
        lab.wait_begun(name)
        waiting[name] = bob.begin(name + "_echo", text=name)
        lab.wait_for("the other to wait", lambda: lab.status()["tables"]["waiting"] == len(waiting))
        began = time.monotonic()
        ann.notify("notifications/cancelled", requestId=held)
    # The server is still at it: nobody opened its gate.
    assert text_of(bob.result(waiting["brief"], 8)) == "brief"
    assert lab.seen("brief", "begin")[1]["at"] - began >= 0.4
    assert lab.seen("brief", "end", tool="hold") == [] and bob.answers(waiting["long"]) == []
    lab.open_gate("long")
    assert text_of(bob.result(waiting["long"])) == "long"
    assert [e["tool"] for e in lab.seen("long") if e["event"] in ("begin", "end")] == ["hold", "hold", "echo", "echo"]
    lab.open_gate("brief")
    assert bob.call("brief_echo", text="x") == "x" and ann.answers(held) == []


def test_an_exclusive_server_never_asks_the_wrong_host(lab):
    lab.configure({"curious": lab.role("curious", None, scope="global", sharing="exclusive")}, question_timeout="60s")
    hosts = {name: lab.host("curious", capabilities=ALL_CAPABILITIES, replies=replies_of(name))
             for name in ("ann", "bob", "cid")}
    ids = [(name, host, host.begin("inquire")) for _ in range(3) for name, host in hosts.items()]
    for name, host, host_id in ids:
        assert name in text_of(host.result(host_id))


@pytest.mark.parametrize("capabilities", [{}, {"elicitation": {}}, {"roots": {"listChanged": True}}, {"sampling": {}}],
                         ids=["none", "elicitation", "roots", "sampling"])
@pytest.mark.parametrize("scope", ["session", "global"])
def test_a_server_is_promised_what_its_host_can_do_and_asked_questions_get_an_answer(lab, capabilities, scope):
    lab.configure({"curious": lab.role("curious", "curious", scope=scope)}, question_timeout="1s")
    host = lab.host("curious", capabilities=capabilities, replies=replies_of("xavier"), revision="2025-11-25")
    pid = host.whoami()["pid"]
    (hello,) = [e["message"] for e in lab.seen("curious", "got", pid=pid) if e["message"].get("method") == "initialize"]
    expected = {k for k in capabilities if k != "roots" or scope == "session"}
    assert {"elicitation", "sampling", "roots"} & set(hello["params"]["capabilities"]) == expected
    for method, capability in (("elicitation/create", "elicitation"), ("sampling/createMessage", "sampling"),
                               ("roots/list", "roots")):
        text = host.call("inquire", method=method)
        assert ("xavier" in text) == (capability in expected), text
        assert capability in expected or '"code"' in text or "cancel" in text
    assert len(asked(host)) == len(expected)


def test_a_question_ends_with_the_call_and_with_the_host(lab):
    lab.configure({"curious": lab.role("curious", "curious", scope="global")}, question_timeout="60s")
    host, other = lab.host("curious", capabilities=ALL_CAPABILITIES), lab.host("curious")
    host.begin("inquire")
    host.expect(lambda m: m.get("method") == "elicitation/create", "the question")
    host.kill()
    lab.wait_for("the question's end", lambda: at_rest(lab))
    assert other.call("echo", text="x") == "x"


def test_tasks_belong_to_the_host_that_began_them(lab):
    lab.configure({"tasks": lab.role("tasks", "tasks", scope="global")})
    one, two = lab.host("tasks", revision="2025-11-25"), lab.host("tasks", revision="2025-11-25")
    assert one.welcome["capabilities"]["tasks"]
    old = lab.host("tasks", revision="2025-06-18")
    assert "tasks" not in old.welcome["capabilities"]
    assert [t["execution"] for t in one.ask("tools/list")["tools"] if t["name"] == "hold"] == [
        {"taskSupport": "optional"}]
    assert not any("execution" in t for t in old.ask("tools/list")["tools"])
    ids = {}
    for host, name in ((one, "one"), (two, "two"), (one, "three")):
        task = host.result(host.begin("hold", until=lab.gate(name), task={"ttl": 60_000}))["task"]
        assert task["status"] == "working"
        ids[name] = {"taskId": task["taskId"]}
    assert len({t["taskId"] for t in ids.values()}) == 3
    for method in ("tasks/get", "tasks/cancel", "tasks/result"):
        with pytest.raises(Refused) as refused:
            two.ask(method, ids["one"])
        assert refused.value.error["code"] == -32602
    waiting = one.request("tasks/result", ids["one"])
    assert one.ask("tasks/get", ids["one"])["status"] == "working"
    lab.open_gate("one")
    result = one.result(waiting)
    assert text_of(result) == "held" and result["_meta"][RELATED_TASK] == ids["one"]
    assert one.ask("tasks/get", ids["one"])["status"] == "completed"
    assert one.ask("tasks/cancel", ids["three"])["status"] == "cancelled"
    if "list" in one.welcome["capabilities"]["tasks"]:
        listed = {t["taskId"] for t in one.ask("tasks/list")["tasks"]}
        assert listed == {ids["one"]["taskId"], ids["three"]["taskId"]}
    assert two.ask("tasks/get", ids["two"])["status"] == "working"
    lab.open_gate("two")
    assert text_of(two.ask("tasks/result", ids["two"])) == "held"


# ---------------------------------------------------------------------------
# Host: one that misbehaves is nobody else's trouble
# ---------------------------------------------------------------------------

def test_a_host_that_does_not_read_is_cut_off_and_others_do_not_notice(lab):
    lab.configure({"demo": demo(scope="global")}, limits_hostQueueBytes="8MiB")
    other = lab.host("demo")
    lazy = lab.start("demo", reads=False)
    lazy.hello()
    lazy.notify("notifications/initialized")
    for _ in range(20):
        with contextlib.suppress(OSError):
            lazy.begin("big", bytes=4 << 20)
    for n in range(20):
        assert other.call("echo", text=str(n)) == str(n)
    lab.wait_for("the lazy one's end", lambda: len(lab.status()["hosts"]) == 1 or at_rest(lab))
    assert other.call("echo", text="x") == "x"
    lazy.kill()
    lazy.process.stdout.close()
    lab.wait_for("one host", lambda: len(lab.status()["hosts"]) == 1)
    lab.wait_for("empty tables", lambda: at_rest(lab))


def test_a_host_has_no_more_requests_in_flight_than_it_may(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")}, limits_inFlight=3)
    host, other = lab.host("plain"), lab.host("plain")
    held = [host.begin("hold", until=lab.gate("plain")) for _ in range(3)]
    for method, params in (("tools/call", {"name": "echo", "arguments": {"text": "x"}}), ("tools/list", {})):
        error = host.answer(host.request(method, params))["error"]
        assert "3 requests" in error["message"] and "limits.inFlight" in error["message"]
    assert other.call("echo", text="x") == "x"
    host.notify("notifications/cancelled", requestId=held[0])
    assert host.call("echo", text="room") == "room"
    lab.open_gate("plain")
    assert [text_of(host.result(call)) for call in held[1:]] == ["held", "held"]
    assert host.call("echo", text="x") == "x" and len(lab.seen("plain", "begin", tool="hold")) == 3


def test_a_host_too_many_is_told_so_and_the_others_go_on(lab):
    lab.configure({"demo": demo(scope="global")}, limits_hosts=2)
    hosts = [lab.host("demo") for _ in range(2)]
    late = lab.start("demo")
    with contextlib.suppress(OSError):
        late.hello()
    late.expect(lambda m: "error" in m or "end" in m, "a refusal")
    assert late.close() != 0
    assert "2 hosts" in tail(late.errors_path) and "limits.hosts" in tail(late.errors_path)
    refused = lab.run("call", "demo.echo", "text=x")
    assert refused.returncode != 0 and "limits.hosts" in refused.stderr
    # To look at it, and to make room, is possible all the same.
    assert len(lab.status()["hosts"]) == 2
    assert [host.call("echo", text="x") for host in hosts] == ["x", "x"]
    hosts[0].close()
    lab.wait_for("one host", lambda: len(lab.status()["hosts"]) == 1)
    assert lab.host("demo").call("echo", text="x") == "x" == hosts[1].call("echo", text="x")


def test_nothing_of_a_host_remains_after_it(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global"), "demo": demo(scope="session")},
                  limits_hostQueueBytes="8MiB")
    stays = lab.host("plain", "demo")
    stays.call("plain_echo", text="x"), stays.call("demo_echo", text="x")
    daemon = lab.daemon_pid()

    def open_files():
        return len(os.listdir("/proc/%d/fd" % daemon)) if os.path.isdir("/proc/self") else 0

    before = open_files()
    for n in range(8):
        host = lab.host("plain", "demo")
        host.call("demo_echo", text="x")
        host.ask("resources/subscribe", {"uri": "role://one"})
        host.begin("plain_hold", {"progressToken": n}, until=lab.gate("end"))
        if n % 3 == 0:
            host.write(b'{"jsonrpc":"2.0","id":1,')
        host.kill() if n % 2 else host.close()
    lab.open_gate("end")
    lab.wait_for("one host and one instance of each", lambda: (
        len(lab.status()["hosts"]), len(lab.status()["instances"])) == (1, 2))
    lab.wait_for("empty tables", lambda: at_rest(lab))
    lab.wait_for("closed descriptors", lambda: open_files() <= before + 1)
    assert stays.call("plain_echo", text="x") == "x"


def cpu_seconds(pid):
    with open("/proc/%d/stat" % pid) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads processor time from /proc")
def test_nobody_runs_in_circles_where_a_pipe_has_ended(lab):
    lab.configure({"closing": lab.role("closing", None, scope="session"), "demo": demo(scope="global")},
                  stop_eofGrace="300ms", stop_termGrace="300ms")
    reader_gone = lab.start("demo", reads=False)
    reader_gone.process.stdout.close()
    reader_gone.hello()
    hosts = [lab.host("closing") for _ in range(3)]
    calls = [host.begin("shut", fd=fd) for fd, host in enumerate(hosts)]
    # The server that hears nothing more: what is sent to it gets an error, or waits for its end.
    with contextlib.suppress(OSError):
        hosts[0].begin("echo", text="x" * (1 << 20))
    assert is_lost(hosts[1].answer(calls[1])["error"])
    half = lab.host("demo")
    half.process.stdin.close()
    half.process.wait(PATIENCE_S)
    other = lab.host("demo")
    assert other.call("echo", text="x") == "x"
    watched = [lab.daemon_pid()] + [h.pid for h in lab.hosts if h.process.poll() is None]
    before = {pid: cpu_seconds(pid) for pid in watched}
    time.sleep(1)  # not a wait: the span that is measured
    spent = {pid: cpu_seconds(pid) - before[pid] for pid in watched if is_running(pid)}
    assert sum(spent.values()) < 0.3, spent
    assert other.call("echo", text="x") == "x"


# ---------------------------------------------------------------------------
# HTTP: who may, who asks, and what goes on which stream
# ---------------------------------------------------------------------------

MODERN_META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28",
               "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}, "sampling": {}, "roots": {}}}
BOTH_TYPES = "application/json, text/event-stream"


# Not from the range that the system gives clients, and for each worker its own: a port that is free
# now is somebody else's a moment later.
WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
PORTS = itertools.cycle(range(10_000 + WORKER % 8 * 2500, 10_000 + WORKER % 8 * 2500 + 2500))
for _ in range(random.randrange(2500)):
    next(PORTS)


def free_port():
    while True:
        port = next(PORTS)
        with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as holder:
            holder.bind(("127.0.0.1", port))
            return port


class Web:
    """The TCP door of a lab's daemon: raw requests, legacy sessions, requests of 2026-07-28."""

    def __init__(self, lab, auth="none", **servers):
        self.lab, self.port = lab, free_port()
        lab.configure(servers, http={"listen": "127.0.0.1:%d" % self.port, "auth": auth})
        lab.run("call", "%s.echo" % next(iter(servers)), "text=x")     # starts the daemon
        lab.wait_for("the door", self.is_open)

    def is_open(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def send(self, method, path, body=None, headers=(), timeout=PATIENCE_S):
        """Return (status, headers, body) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = json.dumps(body) if body is not None and not isinstance(body, (str, bytes)) else body
            base = {"Content-Type": "application/json", "Accept": BOTH_TYPES} if body is not None else {}
            connection.request(method, path, data, dict(base, **dict(headers)))
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def raw(self, data, timeout=PATIENCE_S):
        """Return everything that comes back for these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            pieces = []
            while True:
                piece = connection.recv(65536)
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)

    def modern(self, server, method, params=None, meta=(), headers=(), **more):
        """Send a request of 2026-07-28; returns (status, messages in order)."""
        params = dict(params or {}, _meta=dict(MODERN_META, **dict(meta)))
        named = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method}
        for member in ("name", "uri", "taskId"):
            if member in params and method != "completion/complete":
                named["Mcp-Name"] = params[member]
        named.update(headers)
        message = dict({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, **more)
        status, answered, body = self.send("POST", "/mcp/" + server, message, named)
        return status, messages_of(answered, body)

    def tool(self, server, tool, meta=(), headers=(), **arguments):
        """Call a tool as 2026-07-28; returns its text, or the answer where it has none."""
        status, messages = self.modern(server, "tools/call", {"name": tool, "arguments": arguments}, meta, headers)
        answer = messages[-1]
        return answer["result"]["content"][0]["text"] if "content" in answer.get("result", {}) else answer


def messages_of(headers, body):
    if headers.get_content_type() == "text/event-stream":
        return [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ") and line[6:].strip()]
    return [json.loads(body)] if body else []


class WebSession:
    """A legacy Streamable HTTP session of one host."""

    def __init__(self, web, server, revision="2025-11-25", capabilities=(), headers=()):
        self.web, self.path, self.headers, self.last = web, "/mcp/" + server, dict(headers), 0
        status, answered, body = web.send("POST", self.path, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": revision, "capabilities": dict(capabilities), "clientInfo": {"name": "w", "version": "1"}}},
            self.headers)
        assert status == 200, body
        self.id = answered["Mcp-Session-Id"]
        self.headers.update({"Mcp-Session-Id": self.id, "MCP-Protocol-Version": revision})
        assert web.send("POST", self.path, {"jsonrpc": "2.0", "method": "notifications/initialized"}, self.headers)[0] == 202

    def request(self, method, params=None):
        """Return (status, messages) of one request."""
        self.last += 1
        status, headers, body = self.web.send("POST", self.path, {
            "jsonrpc": "2.0", "id": self.last, "method": method, "params": params or {}}, self.headers)
        return status, messages_of(headers, body)

    def tool(self, name, **arguments):
        """Call a tool and return its text."""
        return self.request("tools/call", {"name": name, "arguments": arguments})[1][-1]["result"]["content"][0]["text"]


@pytest.fixture(scope="module")
def web_lab(tmp_path_factory):
    for made in new_lab(tmp_path_factory.mktemp("web")):
        made.web = Web(made, demo=demo(scope="session"), shared=demo(scope="global"), percall=demo(scope="call"),
                       old=demo("--era", "legacy", scope="global"), new=demo("--era", "modern", scope="global"))
        yield made


@pytest.fixture
def web(web_lab):
    return web_lab.web


# Who comes second over HTTP, and under which scopes it reaches the process of the first caller.
HTTP_MEETINGS = {
    "an unnamed request after another": "global",
    "a session named in _meta, twice": "global session parent-session",
    "a session named in a header, then in _meta": "global session parent-session",
    "two sessions by name": "global",
    "an unnamed request from the same directory": "global repo worktree cwd",
    "a named session from the same directory as another": "global repo worktree cwd",
    "a sub-session and its parent": "global parent-session",
    "two sub-sessions of one parent": "global parent-session",
    "a legacy session, twice": "global session parent-session",
    "a legacy session after another": "global",
    "a legacy session that names itself as the modern one does": "global session parent-session",
    "a host over stdio that names the same session": "global session parent-session",
    "the command line with the same session": "global session parent-session",
}


@pytest.fixture(scope="module")
def spread_lab(tmp_path_factory):
    """A server for every scope that says which process answers."""
    for made in new_lab(os.path.realpath(tmp_path_factory.mktemp("spread"))):
        servers = {scope: made.role("everywhere", scope, scope=scope, protocol="legacy") for scope in SCOPES}
        made.web = Web(made, **dict(servers, plain=demo()))
        yield made


@pytest.mark.parametrize("scope", SCOPES)
def test_who_reaches_which_process_over_http(spread_lab, scope):
    """Each way to be named, and every method that reaches a server: not calls of tools alone."""
    lab, web = spread_lab, spread_lab.web
    here = lab.directory("here")
    fresh = itertools.count()

    def ask(method, params, meta=(), headers=()):
        return web.modern(scope, method, params, meta, headers)[1][-1]["result"]

    def who(meta=(), headers=()):
        return ask("tools/call", {"name": "who", "arguments": {}}, meta, headers)["content"][0]["text"]

    def name():
        return "%s-%d" % (scope, next(fresh))

    def legacy_who(session, meta=None):
        params = {"name": "who", "arguments": {}}
        return session.request("tools/call", dict(params, _meta=meta) if meta else params)[1][-1]["result"]["content"][0]["text"]
    ann, bob, cid, dan, eve, fay, guy, ida = [name() for _ in range(8)]
    session = WebSession(web, scope)
    host = lab.host(scope)
    found = {
        "an unnamed request after another": who() == who(),
        "a session named in _meta, twice": who({SESSION: ann}) == who({SESSION: ann}),
        "a session named in a header, then in _meta": who((), {"Mcpx-Session": bob}) == who({SESSION: bob}),
        "two sessions by name": who({SESSION: ann}) == who({SESSION: bob}),
        "an unnamed request from the same directory": who({CWD: here}) == who((), {"Mcpx-Cwd": here}),
        "a named session from the same directory as another": who({SESSION: cid, CWD: here}) == who({SESSION: dan, CWD: here}),
        "a sub-session and its parent": who({SESSION: eve}) == who({SESSION: name(), PARENT: eve}),
        "two sub-sessions of one parent": who({SESSION: name(), PARENT: fay}) == who(
            {SESSION: name()}, {"Mcpx-Parent-Session": fay}),
        "a legacy session, twice": legacy_who(session) == legacy_who(session),
        "a legacy session after another": legacy_who(session) == legacy_who(WebSession(web, scope)),
        "a legacy session that names itself as the modern one does": who({SESSION: guy}) == legacy_who(
            WebSession(web, scope, headers={"Mcpx-Session": guy})),
        "a host over stdio that names the same session": who({SESSION: guy}) == host.call("who", {SESSION: guy}),
        "the command line with the same session": who({SESSION: guy}) == lab.command(
            "call", scope + ".who", "--session", guy).strip(),
    }
    assert found == {situation: scope in scopes.split() for situation, scopes in HTTP_MEETINGS.items()}
    # The same process, whatever is asked of it.
    meta, can_be_asked = {SESSION: ida}, {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
    first = ask("tools/call", {"name": "who_asks", "arguments": {}}, dict(meta, **can_be_asked))
    others = [ask("resources/read", {"uri": "role://one"}, meta)["contents"][0]["text"],
              ask("prompts/get", {"name": "who"}, meta)["messages"][0]["content"]["text"],
              ask("completion/complete", {"ref": {"type": "ref/prompt", "name": "who"}, "argument": {"name": "a", "value": ""}},
                  meta)["completion"]["values"][0], who(meta)]
    stays = scope in ("global", "session", "parent-session")
    assert len(set(others)) == (1 if stays else 4)
    if stays and "inputRequests" in first:
        (key, question), = first["inputRequests"].items()
        assert question["params"]["message"] == others[0]
        retry = {"name": "who_asks", "arguments": {}, "requestState": first["requestState"],
                 "inputResponses": {key: {"action": "accept", "content": {"answer": "x"}}}}
        assert ask("tools/call", retry, dict(meta, **can_be_asked))["content"][0]["text"] == others[0]
    elif scope != "global":
        assert first["inputRequests"]
    for session in [session]:
        web.send("DELETE", session.path, headers=session.headers)


@pytest.mark.parametrize("scope, header", [("session", "Mcpx-Session"), ("parent-session", "Mcpx-Parent-Session"), ("cwd", "Mcpx-Cwd")])
def test_a_legacy_session_whose_requests_are_named_one_by_one_reaches_each_its_own(spread_lab, scope, header):
    session = WebSession(spread_lab.web, scope)
    names = [spread_lab.directory("d%d" % n) if scope == "cwd" else "%s-one-%d" % (scope, n) for n in range(2)]

    def who(name=None):
        headers = dict(session.headers, **({header: name} if name else {}))
        session.last += 1
        _, answered, body = spread_lab.web.send("POST", session.path, legacy(
            session.last, "tools/call", name="who", arguments={}), headers)
        return messages_of(answered, body)[-1]["result"]["content"][0]["text"]
    order = [None, names[0], names[1], None, names[0], names[0], names[1], None]
    pids = [who(name) for name in order]
    assert pids[1] == pids[4] == pids[5] and pids[2] == pids[6]
    assert len({pids[1], pids[2], pids[0]}) == 3
    assert scope == "cwd" or pids[0] == pids[3] == pids[7]
    spread_lab.web.send("DELETE", session.path, headers=session.headers)


def test_header_annotations_that_are_not_valid_are_not_shown_over_http():
    good = {"type": "string", "x-mcp-header": "Region"}
    schema = {"type": "object", "default": {"x-mcp-header": "kept: it is data"}, "properties": {
        "region": good, "again": dict(good, **{"x-mcp-header": "REGION"}), "x-mcp-header": {"type": "string"},
        "number": {"type": "number", "x-mcp-header": "N"}, "token": {"type": "string", "x-mcp-header": "a b"},
        "deep": {"type": "object", "properties": {"flag": {"type": "boolean", "x-mcp-header": "Flag"}}},
        "list": {"type": "array", "items": {"type": "string", "x-mcp-header": "Item"}}},
        "anyOf": [{"properties": {"other": {"type": "string", "x-mcp-header": "Other"}}}]}
    before = json.dumps(schema)
    clean = mcpx.without_bad_headers(schema, set())
    assert json.dumps(schema) == before
    properties = clean["properties"]
    assert properties["region"] == good and properties["x-mcp-header"] == {"type": "string"}
    assert properties["deep"]["properties"]["flag"]["x-mcp-header"] == "Flag"
    assert clean["default"] == schema["default"]
    left = json.dumps([properties["again"], properties["number"], properties["token"], properties["list"], clean["anyOf"]])
    assert "x-mcp-header" not in left
    assert set(mcpx.header_parameters(clean)) == {"mcp-param-region", "mcp-param-flag"}


@pytest.mark.parametrize("scope", ["call", "global"])
def test_a_task_that_is_over_can_be_looked_at_again(lab, scope):
    """Its instance need not stay for that: one of `call` scope ends with the task."""
    web = Web(lab, demo=demo(), tasks=lab.role("tasks", "tasks", "--support", "required", scope=scope))
    extension = {"io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
    gate = lab.path("gate")
    task = web.modern("tasks", "tools/call", {"name": "hold", "arguments": {"until": gate}}, extension)[1][-1]["result"]
    assert task["resultType"] == "task" and task["status"] == "working"

    def look():
        return web.modern("tasks", "tasks/get", {"taskId": task["taskId"]}, extension)[1][-1]["result"]
    assert look()["status"] == "working"
    open(gate, "w").close()
    lab.wait_for("the end of the task", lambda: look()["status"] == "completed")
    if scope == "call":
        lab.wait_for("the end of its instance", lambda: lab.instances("tasks") == [])
    for _ in range(2):
        assert look()["result"]["content"] == [{"type": "text", "text": "held"}]
    assert lab.status()["tables"]["tasks"] == 1


@pytest.mark.parametrize("head", [
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\x85",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: \x0b5", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\xa0",
    b"POST /\xa0HTTP/1.1\r\nHost: a", b"E\x85a HTTP/1.1\r\nHost: a", b"P[T / HTTP/1.1\r\nHost: a", b"\xcbOST / HTTP/1.1\r\nHost: a",
    b"GET /\xe1 HTTP/1.1\r\nHost: a", b"GET / HTTP/1.11\r\nHost: a", b"GET / HTTP/0.1\r\nHost: a", b"GET / HTTP/1.1\r\nHost: a\r\n): b",
    b"GET / HTTP/1.1\r\nHost: a\x7fb", b"GET  / HTTP/1.1\r\nHost: a"])
def test_a_head_that_another_parser_could_read_otherwise_is_refused(head):
    def read():
        _, _, _, headers = mcpx.parse_head(head)
        length, coding = headers.get("Content-Length"), headers.get("Transfer-Encoding")
        if coding not in (None, "chunked") or length is not None and not (length.isascii() and length.isdigit()):
            raise mcpx.HttpError(400, "refused when the body is prepared")
    with pytest.raises(mcpx.HttpError) as refused:
        read()
    assert refused.value.status in (400, 505)


@pytest.mark.parametrize("line, status, closes", [
    ("Content-Length: ", 400, True), ("Content-Length: 0", 404, False), ("Connection: ,Close", 404, True),
    ("Connection: keep-alive, close", 404, True), ("Connection: closed", 404, False)])
def test_a_connection_ends_when_its_client_says_so(web, line, status, closes):
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) as connection:
        connection.sendall(("GET /nothing HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % line).encode())
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        if closes:
            assert connection.recv(65536) == b""
        else:
            connection.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 404")


def sessions_do_not_share(web):
    one, two = WebSession(web, "demo"), WebSession(web, "demo")
    one.tool("set", value="one's")
    two.tool("set", value="two's")
    assert (one.tool("get"), two.tool("get")) == ("one's", "two's")


def a_named_session_is_kept(web):
    named = {"dev.mcpx/session": "kept"}
    assert web.tool("demo", "set", named, value="mine") == "ok"
    assert web.tool("demo", "get", named) == "mine"
    assert web.tool("demo", "get", headers={"Mcpx-Session": "kept"}) == "mine"
    assert web.tool("demo", "get", {"dev.mcpx/session": "other"}, {"Mcpx-Session": "kept"}) == ""
    assert web.lab.command("call", "demo.get", "--session", "kept", "--json")["content"][0]["text"] == "mine"


def unnamed_requests_are_alone(web):
    pids = {json.loads(web.tool("demo", "whoami"))["pid"] for _ in range(4)}
    assert len(pids) == 4
    web.tool("demo", "set", value="lost")
    assert web.tool("demo", "get") == ""


@pytest.mark.parametrize("story", [
    pytest.param(sessions_do_not_share, id="2025-11-25/transport/http-mcp-clients-do-not-share-scoped-instances"),
    pytest.param(a_named_session_is_kept, id="2026-07-28/transport/client-named-session-is-kept-across-requests"),
    pytest.param(unnamed_requests_are_alone, id="2026-07-28/transport/unnamed-requests-are-their-own-scope")])
def test_transport(web, story):
    story(web)


@pytest.mark.parametrize("server, tool", [("old", "ask"), ("old", "sample"), ("new", "ask"), ("new", "sample"), ("new", "roots")])
def test_a_question_reaches_a_modern_host_inside_a_result_and_the_retry_goes_on(web, server, tool):
    arguments = {"ask": {"message": "?"}, "sample": {"text": "t"}, "roots": {}}[tool]
    reply = {"ask": {"action": "accept", "content": {"answer": "42"}}, "roots": {"roots": [{"uri": "file:///r"}]},
             "sample": {"role": "assistant", "model": "m", "content": {"type": "text", "text": "s"}}}[tool]
    params = {"name": tool, "arguments": arguments}
    _, messages = web.modern(server, "tools/call", params)
    asked = messages[-1]["result"]
    assert asked["resultType"] == "input_required"
    key, = asked["inputRequests"]
    retry = dict(params, inputResponses={key: reply}, requestState=asked["requestState"])
    _, messages = web.modern(server, "tools/call", retry, id=2)
    assert json.loads(messages[-1]["result"]["content"][0]["text"]) == reply


def test_a_state_that_was_changed_used_or_meant_for_another_call_is_refused_with_the_reason(web):
    params = {"name": "ask", "arguments": {"message": "?"}}
    asked = web.modern("old", "tools/call", params)[1][-1]["result"]
    key, = asked["inputRequests"]
    state, reply = asked["requestState"], {key: {"action": "decline"}}

    def refusal(state, **changed):
        answer = web.modern("old", "tools/call", dict(params, inputResponses=reply, requestState=state, **changed))[1][-1]
        assert answer["error"]["code"] == -32602
        return answer["error"]["message"]
    assert "signature" in refusal(state[:-1] + ("0" if state[-1] != "0" else "1"))
    assert "not made here" in refusal("v1.x") and "not made here" in refusal(5)
    assert "another request" in refusal(state, arguments={"message": "!"})
    good = web.modern("old", "tools/call", dict(params, inputResponses=reply, requestState=state))[1][-1]
    assert json.loads(good["result"]["content"][0]["text"]) == {"action": "decline"}
    assert "gone" in refusal(state) or "used" in refusal(state)
    assert "without requestState" in web.modern("old", "tools/call", dict(params, inputResponses=reply))[1][-1]["error"]["message"]


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_question_inside_a_result_is_open_as_long_as_its_server_says(lab, era):
    web = Web(lab, demo=demo(), brief=demo("--era", era, scope="global", **{"question.timeout": "1s"}))
    reset(lab, question_timeout="1h")
    params = {"name": "ask", "arguments": {"message": "?"}}
    result = web.modern("brief", "tools/call", params)[1][-1]["result"]
    key, = result["inputRequests"]
    over = time.time() + 1
    lab.wait_for("the end of its time", lambda: time.time() > over and not lab.status()["questions"])
    late = dict(params, inputResponses={key: {"action": "accept", "content": {"answer": "late"}}},
                requestState=result["requestState"])
    answer = json.dumps(web.modern("brief", "tools/call", late)[1][-1])
    # An old server has been told that it is cancelled; a modern one waits for nothing, and hears nothing more.
    assert ("cancel" if era == "legacy" else "expired") in answer and "late" not in answer
    assert web.tool("brief", "echo", text="x") == "x"


@pytest.mark.parametrize("server", ["old", "new"])
def test_a_legacy_session_is_asked_on_the_stream_of_its_own_post(web, server):
    session = WebSession(web, server, capabilities={"elicitation": {}})
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    message = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "ask", "arguments": {"message": "?"}}}
    connection.request("POST", session.path, json.dumps(message), dict(
        session.headers, **{"Content-Type": "application/json", "Accept": BOTH_TYPES}))
    stream = connection.getresponse()

    def next_message():
        while True:
            line = stream.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: ") and line[6:].strip():
                return json.loads(line[6:])
    question = next_message()
    assert question["method"] == "elicitation/create"
    status, _, _ = web.send("POST", session.path, {"jsonrpc": "2.0", "id": question["id"], "result": {
        "action": "accept", "content": {"answer": "yes"}}}, session.headers)
    assert status == 202
    answer = next_message()
    assert answer["id"] == 7 and "yes" in answer["result"]["content"][0]["text"]
    connection.close()


@pytest.mark.parametrize("server", ["old", "new"])
def test_progress_and_log_of_a_modern_request_come_on_its_own_stream(web, server):
    params = {"name": "sleep", "arguments": {"seconds": 0.1, "every": 0.04}}
    _, messages = web.modern(server, "tools/call", params, {"progressToken": "mine"})
    assert [m["params"]["progressToken"] for m in messages[:-1]] == ["mine", "mine"]
    quiet = web.modern(server, "tools/call", {"name": "log", "arguments": {"level": "info", "text": "x"}})[1]
    loud = web.modern(server, "tools/call", {"name": "log", "arguments": {"level": "info", "text": "x"}},
                      {"io.modelcontextprotocol/logLevel": "info"})[1]
    assert len(quiet) == 1 and [m.get("method") for m in loud] == ["notifications/message", None]


@pytest.mark.parametrize("server", ["old", "new"])
def test_a_listen_stream_is_acknowledged_then_told_what_it_asked_for_under_its_own_id(web, server):
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    wanted = {"toolsListChanged": True, "resourceSubscriptions": ["demo://state"]}
    message = {"jsonrpc": "2.0", "id": "L1", "method": "subscriptions/listen",
               "params": {"notifications": wanted, "_meta": MODERN_META}}
    connection.request("POST", "/mcp/" + server, json.dumps(message), {
        "Content-Type": "application/json", "Accept": BOTH_TYPES, "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "subscriptions/listen"})
    stream, seen = connection.getresponse(), []
    while len(seen) < 3:
        line = stream.readline()
        if line.startswith(b"data: "):
            seen.append(json.loads(line[6:]))
            if len(seen) == 1:
                web.tool(server, "touch", uri="demo://state")
                web.tool(server, "add_tool", name="later-%s" % server)
    assert all(m["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == "L1" for m in seen)
    assert seen[0]["method"] == "notifications/subscriptions/acknowledged" and seen[0]["params"]["notifications"] == wanted
    assert {m["method"] for m in seen[1:]} == {"notifications/resources/updated", "notifications/tools/list_changed"}
    connection.close()


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_modern_host_over_stdio_reaches_servers_of_either_era(web_lab, era):
    """Each request stands alone on the pipe: discover, lists, state, questions by retry, progress, cancel, listen."""
    server = {"legacy": "old", "modern": "new"}[era]
    host = web_lab.start(server)

    def ask(method, params=None, **meta):
        return host.ask(method, dict(params or {}, _meta=dict(MODERN_META, **meta)))
    discovered = ask("server/discover")
    assert discovered["supportedVersions"][0] == "2026-07-28" and discovered["resultType"] == "complete"
    assert discovered["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "demo"
    listed = ask("tools/list")
    assert {"ttlMs", "cacheScope", "resultType"} <= set(listed) and len(listed["tools"]) >= 16
    mine = {"dev.mcpx/session": "mine"}
    ask("tools/call", {"name": "set", "arguments": {"value": "v-" + era}}, **mine)
    assert text_of(ask("tools/call", {"name": "get", "arguments": {}}, **mine)) == "v-" + era
    params = {"name": "ask", "arguments": {"message": "?"}}
    asked = ask("tools/call", params)
    key, = asked["inputRequests"]
    answered = ask("tools/call", dict(params, inputResponses={key: {"action": "decline"}}, requestState=asked["requestState"]))
    assert json.loads(text_of(answered)) == {"action": "decline"}
    ask("tools/call", {"name": "sleep", "arguments": {"seconds": 0.1, "every": 0.04}}, progressToken="p")
    assert {m["params"]["progressToken"] for m in host.all("notifications/progress")} == {"p"}
    missing = host.answer(host.request("resources/read", {"uri": "demo://none", "_meta": MODERN_META}))
    assert missing["error"]["code"] == -32602 and missing["error"]["data"]["uri"] == "demo://none"
    slow = host.request("tools/call", {"name": "sleep", "arguments": {"seconds": 600}, "_meta": MODERN_META})
    listen = host.request("subscriptions/listen", {"notifications": {"resourceSubscriptions": ["demo://state"]}, "_meta": MODERN_META})
    host.notification("notifications/subscriptions/acknowledged")
    ask("tools/call", {"name": "touch", "arguments": {"uri": "demo://state"}})
    changed = host.notification("notifications/resources/updated")
    assert changed["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == listen
    for host_id in (slow, listen):
        host.notify("notifications/cancelled", requestId=host_id)
    web_lab.wait_for("nothing under way", lambda: not web_lab.status()["tables"]["requests"])
    assert host.answers(slow) == [] and host.answers(listen) == []
    refused = host.answer(host.request("tools/list", {}))
    assert refused["error"]["code"] == -32602 and "initialize" in refused["error"]["message"]
    assert host.close() == 0


@pytest.mark.parametrize("tool, reply", [
    ("ask", {"action": "accept", "content": {"answer": "42"}}), ("roots", {"roots": [{"uri": "file:///r"}]}),
    ("sample", {"role": "assistant", "model": "m", "content": {"type": "text", "text": "s"}})])
def test_a_legacy_host_is_asked_in_its_own_way_by_a_modern_server(web_lab, tool, reply):
    method = {"ask": "elicitation/create", "roots": "roots/list", "sample": "sampling/createMessage"}[tool]
    host = web_lab.host("new", capabilities={"elicitation": {}, "roots": {}, "sampling": {}}, replies={method: lambda params: reply})
    arguments = {"ask": {"message": "?"}, "sample": {"text": "t"}, "roots": {}}[tool]
    assert json.loads(host.call(tool, **arguments)) == reply
    bare = web_lab.host("new")
    with pytest.raises(Refused):
        bare.call(tool, **arguments) if tool != "ask" else bare.call("sample", text="t")


def test_a_question_that_was_taken_for_that_of_a_call_which_ends_is_put_by_another_of_its_host(lab):
    lab.configure({"duet": lab.role("duet", "duet", scope="global")})
    host = lab.start("duet")

    def begin(tool, **more):
        return host.request("tools/call", dict({"name": tool, "arguments": {}, "_meta": MODERN_META}, **more))
    led = host.result(begin("lead"))
    key, = led["inputRequests"]
    follow = begin("follow")
    lead = begin("lead", inputResponses={key: {"action": "decline"}}, requestState=led["requestState"])
    assert text_of(host.result(lead)) == "led"
    asked = host.result(follow)
    (key, question), = asked["inputRequests"].items()
    assert question["params"]["message"] == "follow?"
    told = host.result(begin("follow", inputResponses={key: {"action": "cancel"}}, requestState=asked["requestState"]))
    assert json.loads(text_of(told)) == {"action": "cancel"}


def test_an_open_question_goes_when_nobody_waits_for_it_any_more(lab):
    """Two hosts' calls ask at once, so nobody can be told; then both are cancelled."""
    lab.configure({"demo": demo("--era", "legacy", scope="global")})
    hosts = [lab.host("demo", capabilities={"elicitation": {}}) for _ in range(2)]
    begun = [host.begin("sleep", seconds=600) for host in hosts]
    lab.wait_for("both calls", lambda: [i["inFlight"] for i in lab.instances("demo")] == [2])
    begun += [host.begin("ask", message="?") for host in hosts]
    lab.wait_for("open questions", lambda: [q["host"] for q in lab.status()["questions"]] == [None, None], 10)
    for number, host_id in enumerate(begun):
        hosts[number % 2].notify("notifications/cancelled", requestId=host_id)
    lab.wait_for("none", lambda: lab.status()["questions"] == [])
    assert hosts[0].all("elicitation/create") == hosts[1].all("elicitation/create") == []


def test_a_question_of_a_cancelled_call_is_never_put_to_another_host(web_lab):
    """Ada's call asks after she has cancelled it, while Bob has a call on the same child."""
    replies = {"elicitation/create": lambda params: {"action": "accept", "content": {"answer": "not mine"}}}
    ada = web_lab.host("old", capabilities={"elicitation": {}}, replies=replies)
    bob = web_lab.host("old", capabilities={"elicitation": {}}, replies=replies)
    instance = web_lab.instances("old")[0] if web_lab.instances("old") else None
    assert instance is None or instance["scope"] == "global"
    first = ada.begin("sleep", seconds=600)
    ada.notify("notifications/cancelled", requestId=first)
    ada.settle()
    begun = bob.begin("sleep", seconds=0.5)
    asked = ada.begin("ask", message="from ada")
    ada.notify("notifications/cancelled", requestId=asked)
    bob.result(begun)
    bob.settle()
    assert bob.all("elicitation/create") == []


@pytest.mark.parametrize("change, status, code", [
    (dict(headers={"MCP-Protocol-Version": "2025-11-25"}), 400, None), (dict(headers={"Mcp-Method": "tools/list"}), 400, -32020),
    (dict(headers={"Mcp-Name": "set"}), 400, -32020), (dict(headers={"Mcp-Name": "=?base64?Z2V0?="}), 200, None),
    (dict(headers={"Mcp-Name": "=?base64?Z2V?="}), 400, -32020),
    (dict(meta={"io.modelcontextprotocol/protocolVersion": "2027-01-01"}, headers={"MCP-Protocol-Version": "2027-01-01"}), 400, -32022),
    (dict(meta={"io.modelcontextprotocol/clientCapabilities": 5}), 400, -32602),
    (dict(meta={"io.modelcontextprotocol/logLevel": "loud"}), 400, -32602)])
def test_a_modern_head_that_disagrees_with_its_body_is_refused(web, change, status, code):
    got, messages = web.modern("shared", "tools/call", {"name": "get", "arguments": {}}, **change)
    assert got == status and (code is None or messages[-1]["error"]["code"] == code)


@pytest.mark.parametrize("method", ["ping", "initialize", "logging/setLevel", "resources/subscribe", "no/such"])
def test_methods_that_2026_07_28_has_not_are_404(web, method):
    status, messages = web.modern("shared", method)
    assert (status, messages[-1]["error"]["code"], messages[-1]["id"]) == (404, -32601, 1)


def test_a_session_ends_with_its_delete_and_is_404_from_then_on(web):
    session = WebSession(web, "demo")
    pid = json.loads(session.tool("whoami"))["pid"]
    assert web.send("DELETE", session.path, headers=session.headers)[0] == 204
    assert session.request("tools/list")[0] == 404
    web.lab.wait_for("its instance has gone", lambda: not is_running(pid))
    for headers, status in (({"Mcp-Session-Id": "nobody"}, 404), ({}, 400)):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        assert web.send("POST", "/mcp/demo", body, headers)[0] == status
    assert WebSession(web, "demo", headers={"Mcp-Session-Id": "stale"}).tool("echo", text="x") == "x"


def test_a_session_whose_client_leaves_before_it_has_begun_is_not_kept(lab):
    """Nobody has been told its name, so nobody would ever end it."""
    web = Web(lab, demo=demo(scope="session"), slow=lab.role("upstream", "slow", "--gate", lab.gate("open"), scope="global"))
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) as connection:
        connection.sendall((HELLO % (b"", len(PING), PING)).replace(b"/mcp/shared", b"/mcp/slow"))
        lab.wait_for("the session", lambda: lab.status()["tables"]["sessions"] == 1)
    lab.wait_for("its end", lambda: lab.status()["tables"]["sessions"] == 0)
    lab.open_gate("open")
    assert WebSession(web, "slow").tool("echo", text="x") == "x"


def test_a_session_goes_on_after_an_orderly_restart_and_is_404_after_a_crash(lab):
    web = Web(lab, demo=demo(scope="session"))
    session = WebSession(web, "demo")
    assert session.tool("set", value="v") == "ok"
    lab.command("stop")
    lab.command("call", "demo.echo", "text=x")
    lab.wait_for("the door", web.is_open)
    status, messages = session.request("tools/call", {"name": "get", "arguments": {}})
    assert status == 200 and messages[-1]["result"]["_meta"][RESTARTED]["reason"]
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    lab.command("call", "demo.echo", "text=x")
    lab.wait_for("the door", web.is_open)
    assert session.request("tools/list")[0] == 404
    assert WebSession(web, "demo").tool("echo", text="x") == "x"


@pytest.mark.parametrize("method, path, headers, status", [
    ("GET", "/mcp/shared", {}, 405), ("PUT", "/mcp/shared", {}, 405), ("GET", "/", {}, 404), ("POST", "/mcp/nobody", {}, 404),
    ("POST", "/mcp/shared", {"Origin": "https://evil.example"}, 403), ("POST", "/mcp/shared", {"Host": "evil.example"}, 403),
    ("POST", "/mcp/shared", {"Origin": "http://localhost.evil.example"}, 403), ("POST", "/mcp/shared", {"Origin": "null"}, 403),
    ("GET", "/v1/status", {"Host": "evil.example"}, 403), ("POST", "/mcp/shared", {"Origin": "http://localhost:1"}, 200),
    ("POST", "/mcp/shared", {"Content-Type": "text/plain"}, 415), ("POST", "/mcp/shared", {"Accept": "text/html"}, 406),
    ("POST", "/mcp/shared", {"Accept": "*/*"}, 200), ("POST", "/mcp/shared", {"Accept": "application/json"}, 200)])
def test_what_comes_to_the_wrong_door_is_turned_away(web, method, path, headers, status):
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}}
    assert web.send(method, path, body if method == "POST" else None, headers)[0] == status


HELLO = (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s")
PING = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18",
                                                                                 "capabilities": {}}}).encode()


CHUNKED = (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
           b"%x%%s\r\n%s\r\n0\r\n%%s\r\n") % (len(PING), PING.replace(b"%", b"%%"))


@pytest.mark.parametrize("data, status", [
    (CHUNKED % (b";a=b", b"T: 1\r\n"), 200), (CHUNKED % (b";" + b"a" * 1100, b""), 400),
    (CHUNKED % (b"", b"transfer-encoding: chunked\r\n"), 400), (CHUNKED % (b"", b"A: b\r\nHost: x\r\n"), 400),
    (CHUNKED % (b"", b"A: " + b"b" * 70000 + b"\r\n"), 431), (CHUNKED % (b"", b"A : b\r\n"), 400),
    (HELLO % (b"", len(PING), PING), 200), (HELLO % (b"A: b\r\n c\r\n", len(PING), PING), 400),
    (HELLO % (b"A : b\r\n", len(PING), PING), 400), (HELLO % (b"nonsense\r\n", len(PING), PING), 400),
    (HELLO % (b"A: b\rC: d\r\n", len(PING), PING), 400), (HELLO % (b"A: \0\r\n", len(PING), PING), 400),
    (HELLO % (b"Content-Length: 5\r\n", len(PING), PING), 400), (HELLO % (b"Host: x\r\n", len(PING), PING), 400),
    (HELLO % (b"Transfer-Encoding: chunked\r\n", len(PING), PING), 400), (b"POST /mcp/shared HTTP/1.1\nHost: localhost\n\n", 400),
    (b"nonsense\r\n\r\n", 400), (HELLO % (b"X: " + b"y" * 70000 + b"\r\n", len(PING), PING), 431),
    (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", 413),
    (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
     b"%x\r\n%s\r\n0\r\n\r\n" % (len(PING), PING), 200),
    (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501)])
def test_heads_that_two_readers_could_read_in_two_ways_are_refused(web, data, status):
    answer = web.raw(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]


def test_pipelined_requests_are_answered_in_order_and_byte_by_byte_is_fine(web):
    requests = b"".join(HELLO % (b"", len(PING), PING) for _ in range(3))
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) as connection:
        for byte in requests[:len(requests) // 3]:
            connection.send(bytes([byte]))
        connection.sendall(requests[len(requests) // 3:])
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 3 or received.count(b'"serverInfo"') < 3:
            received += connection.recv(65536)


def test_a_list_in_several_fields_is_one_list(web):
    """Connection and Accept may be repeated; what counts is in any of them."""
    last = HELLO % (b"Connection: keep-alive\r\nConnection:\r\nConnection: close\r\n", len(PING), PING)
    assert web.raw(last + HELLO % (b"", len(PING), PING)).count(b"HTTP/1.1 200") == 1
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    session = WebSession(web, "shared")
    head = "".join("%s: %s\r\n" % pair for pair in session.headers.items()).encode()
    data = json.dumps(body).encode()
    for accepts, kind in ((b"Accept: text/plain\r\nAccept: application/json\r\n", b"application/json"),
                          (b"Accept: text/plain\r\nAccept: text/event-stream\r\n", b"text/event-stream")):
        assert b"Content-Type: " + kind in web.raw(HELLO % (head + accepts, len(data), data))


def test_the_body_is_asked_for_only_after_the_head_was_accepted(web):
    head = b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) as connection:
        connection.sendall(head % (b"/mcp/shared", b"localhost", len(PING)))
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(PING)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert web.raw(head % (b"/mcp/shared", b"evil.example", len(PING))).startswith(b"HTTP/1.1 403")


def test_a_thousand_idle_connections_do_not_keep_a_bystander_out(web):
    idle = [socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) for _ in range(300)]
    try:
        assert web.tool("shared", "echo", text="still here") == "still here"
    finally:
        for connection in idle:
            connection.close()
    web.lab.wait_for("they are gone", lambda: web.lab.status()["tables"]["connections"] == 0)


GET_HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n"


def refusal_of(answer, status):
    """The text of an HTTP refusal, read from all that came back."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"Connection: close" in head, answer[:300]
    return json.loads(body)["error"]["message"]


def read_all(connection):
    """What comes until the other end closes."""
    pieces = []
    while not pieces or pieces[-1]:
        pieces.append(connection.recv(65536))
    return b"".join(pieces)


def is_served(connection):
    """Whether a request on this connection is answered."""
    connection.sendall(GET_HEALTH + b"\r\n")
    return connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_connection_too_many_is_told_so_and_the_others_go_on(lab):
    web = Web(lab, demo=demo(scope="global"))
    reset(lab, http_connections=2)
    lab.wait_for("no connection", lambda: lab.status()["tables"]["connections"] == 0)
    with contextlib.ExitStack() as stack:
        first, second, late = (stack.enter_context(socket.create_connection(("127.0.0.1", web.port), PATIENCE_S))
                               for _ in range(3))
        assert is_served(first) and is_served(second)
        with contextlib.suppress(OSError):
            late.sendall(GET_HEALTH + b"\r\n")
        assert "http.connections" in refusal_of(read_all(late), 503)
        # To look at it is possible all the same, and costs the others nothing.
        assert lab.status()["tables"]["connections"] == 2
        assert is_served(first) and is_served(second)
        second.close()
        lab.wait_for("one connection", lambda: lab.status()["tables"]["connections"] == 1)
        assert web.tool("demo", "echo", text="x") == "x" and is_served(first)


def test_sessions_over_http_too_many_are_refused_and_the_others_go_on(lab):
    web = Web(lab, demo=demo(scope="global"))
    reset(lab, limits_hosts=2)
    sessions = [WebSession(web, "demo") for _ in range(2)]
    status, headers, body = web.send("POST", "/mcp/demo", json.loads(PING))
    assert status == 503 and b"limits.hosts" in body and "Mcp-Session-Id" not in headers
    assert [session.tool("echo", text="x") for session in sessions] == ["x", "x"]
    assert web.send("DELETE", sessions[0].path, headers=sessions[0].headers)[0] == 204
    assert WebSession(web, "demo").tool("echo", text="x") == "x"


def test_a_head_may_be_as_long_as_is_set_and_no_longer(lab):
    web = Web(lab, demo=demo(scope="global"))

    def head(size):
        """A request whose head has that many bytes, without the empty line after it."""
        return GET_HEALTH + b"Connection: close\r\nX-Fill: " + b"y" * (size - len(GET_HEALTH) - 27)
    for setting, limit in (("1KiB", 1 << 10), ("100KiB", 100 << 10)):
        reset(lab, http_headBytes=setting)
        assert web.raw(head(limit) + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert "http.headBytes" in refusal_of(web.raw(head(limit + 1) + b"\r\n\r\n"), 431)
        # Where it never ends, too; and a body is no part of it.
        assert "http.headBytes" in refusal_of(web.raw(head(limit + 200)), 431)
        assert WebSession(web, "demo").tool("echo", text="x" * (300 << 10)) == "x" * (300 << 10)


def test_a_request_that_does_not_arrive_in_time_is_refused_and_one_that_takes_its_time_is_not(lab, monkeypatch):
    impatient(lab, monkeypatch, HTTP_SWEEP_S=("2.5", "0.05"))
    web = Web(lab, demo=demo(scope="global"))
    reset(lab, http_readTimeout="400ms")
    with contextlib.ExitStack() as stack:
        idle, served, *slow = (stack.enter_context(socket.create_connection(("127.0.0.1", web.port), PATIENCE_S))
                               for _ in range(5))
        assert is_served(served)
        began = time.monotonic()
        # Half a head, half a body, half a body in pieces: alone, or after a good request on the same connection.
        slow[0].sendall(GET_HEALTH)
        slow[1].sendall(HELLO % (b"", len(PING), PING[:-1]))
        assert is_served(slow[2])
        slow[2].sendall(b"POST /mcp/demo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc")
        assert web.tool("demo", "sleep", seconds=0.8), "the time of an answer counted"
        for connection in slow:
            assert "http.readTimeout" in refusal_of(read_all(connection), 408)
        assert 0.4 <= time.monotonic() - began < 8
        assert is_served(idle) and is_served(served), "a connection between two requests is not late"


def test_a_connection_without_a_request_is_closed_after_a_while(lab, monkeypatch):
    impatient(lab, monkeypatch, HTTP_SWEEP_S=("2.5", "0.05"))
    web = Web(lab, demo=demo(scope="global"))
    reset(lab, http_idleTimeout="400ms")
    with contextlib.ExitStack() as stack:
        fresh, served, reading = (stack.enter_context(socket.create_connection(("127.0.0.1", web.port), PATIENCE_S))
                                  for _ in range(3))
        reading.sendall(GET_HEALTH)
        began = time.monotonic()
        assert is_served(served)
        assert web.tool("demo", "sleep", seconds=0.8), "it was closed while a request was being answered"
        assert read_all(fresh) == read_all(served) == b""
        assert 0.4 <= time.monotonic() - began < 8
        reading.sendall(b"\r\n")
        assert reading.recv(65536).startswith(b"HTTP/1.1 200"), "it was closed in the middle of a request"


def test_a_modern_host_that_hangs_up_has_cancelled_and_a_legacy_one_has_not(web):
    for modern in (True, False):
        before = web.lab.instances("shared")[0]["calls"] if web.lab.instances("shared") else 0
        params = {"name": "sleep", "arguments": {"seconds": 3}}
        headers = {"Content-Type": "application/json", "Accept": BOTH_TYPES}
        if modern:
            params["_meta"] = MODERN_META
            headers.update({"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "sleep"})
        else:
            headers.update(WebSession(web, "shared").headers)
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
        connection.request("POST", "/mcp/shared", json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}),
                           headers)
        web.lab.wait_for("the call", lambda: any(i["calls"] > before and i["inFlight"] for i in web.lab.instances("shared")))
        connection.close()
        web.lab.wait_for("the connection has gone", lambda: web.lab.status()["tables"]["connections"] == 0)
        assert bool(sum(i["inFlight"] for i in web.lab.instances("shared"))) is not modern
        web.lab.wait_for("nothing in flight", lambda: not sum(i["inFlight"] for i in web.lab.instances("shared")))


def test_the_control_api_describes_itself_and_its_errors_have_one_shape(web):
    description = json.loads(web.send("GET", "/v1/openapi.json")[2])
    assert set(description["paths"]) >= {"/v1/" + name for name in (
        "health status protocol servers tools call resource prompt complete asks events stop restart reload").split()}
    assert json.loads(web.send("GET", "/v1/health")[2])["status"] == "ok"
    protocol = json.loads(web.send("GET", "/v1/protocol")[2])
    assert protocol["settings"]["http.listen"] == "127.0.0.1:%d" % web.port
    body = {"server": "demo", "tool": "set", "arguments": {"value": "by api"}, "session": "api"}
    assert web.send("POST", "/v1/call", body)[0] == 200
    assert web.lab.command("call", "demo.get", "--session", "api", "--json")["content"][0]["text"] == "by api"
    for method, path, body, status in (("GET", "/v1/nothing", None, 404), ("PUT", "/v1/status", {}, 405), ("POST", "/v1/call", {}, 400),
                                       ("POST", "/v1/call", "{", 500), ("POST", "/v1/stop", {"name": "nobody"}, 400)):
        got, _, text = web.send(method, path, body)
        assert got == status and set(json.loads(text)["error"]) >= {"code", "message"}, (path, got, text)


def test_events_are_shown_as_they_happen_and_replayed(web):
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    connection.request("GET", "/v1/events", headers={"Last-Event-ID": "0"})
    stream = connection.getresponse()
    WebSession(web, "demo").tool("echo", text="x")
    seen = ""
    while not ("event: instance" in seen and '"started"' in seen):
        seen += stream.readline().decode()
    connection.close()


def test_the_token_is_wanted_at_every_door_and_shown_to_its_user_only(lab):
    web = Web(lab, auth="token", demo=demo(scope="global"))
    url = lab.command("url", "demo", "--json")
    good = url["headers"]
    assert os.stat(os.path.join(lab.state, "mcpx", "token")).st_mode & 0o777 == 0o600
    for path in ("/mcp/demo", "/v1/status", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": good["Authorization"][:-1]},
                        {"Authorization": "Basic " + good["Authorization"][7:]}):
            status, answered, body = web.send("GET", path, headers=headers)
            assert status == 401 and "WWW-Authenticate" in answered and good["Authorization"][7:].encode() not in body
    assert web.send("GET", "/v1/health", headers=good)[0] == 200
    session = WebSession(web, "demo", headers=good)
    assert session.tool("echo", text="x") == "x"
    # The unix socket needs none: its mode and the peer's uid are the check.
    unix = socket.socket(socket.AF_UNIX)
    unix.connect(lab.status()["daemon"]["socket"])
    unix.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert unix.recv(65536).startswith(b"HTTP/1.1 200")
    unix.close()


def test_whether_a_token_is_wanted_can_be_changed_while_running(lab):
    web = Web(lab, auth="none", demo=demo(scope="global"))
    wrong = {"Authorization": "Bearer wrong"}
    assert lab.command("url", "demo", "--json")["headers"] == {}
    for headers in ({}, wrong):
        assert WebSession(web, "demo", headers=headers).tool("echo", text="x") == "x"
        assert web.send("GET", "/v1/status", headers=headers)[0] == 200
    assert "http.auth is none" in lab.run("logs").stdout
    reset(lab, http={"listen": "127.0.0.1:%d" % web.port, "auth": "token"})
    lab.wait_for("the door", web.is_open)
    good = lab.command("url", "demo", "--json")["headers"]
    for headers, status in (({}, 401), (wrong, 401), (good, 200)):
        assert web.send("GET", "/v1/status", headers=headers)[0] == status
    assert WebSession(web, "demo", headers=good).tool("echo", text="x") == "x"


def test_the_door_has_the_names_it_is_given_besides_localhost(lab):
    web = Web(lab, demo=demo(scope="global"))

    def status(**headers):
        status, _, body = web.send("POST", "/mcp/demo", json.loads(PING), headers)
        assert (b"http.allowedHosts" in body) is (status == 403)
        return status
    names = ("desk.example", "Desk.Example:%d" % web.port, "tower.example")
    assert {status(Host=name) for name in names} == {status(Origin="https://" + name) for name in names} == {403}
    reset(lab, http_allowedHosts=["desk.example", "Tower.Example"])
    assert [status(Host=name) for name in names] == [status(Origin="https://" + name) for name in names] == [200] * 3
    for name in ("other.example", "example", "desk.example.evil.example", "x.desk.example"):
        both = status(Host="desk.example", Origin="http://" + name)
        assert status(Host=name) == status(Origin="http://" + name) == both == 403
    assert status() == status(Host="localhost", Origin="http://127.0.0.1:1") == 200


def test_without_a_token_only_loopback_is_served(lab):
    lab.configure({"demo": demo(scope="global")}, http={"listen": "0.0.0.0:%d" % free_port(), "auth": "none"})
    assert lab.host("demo").call("echo", text="stdio works") == "stdio works"
    assert "refused on 0.0.0.0" in lab.run("logs").stdout


def test_a_taken_port_is_reported_and_hosts_over_stdio_are_served(lab):
    with contextlib.closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        lab.configure({"demo": demo(scope="global")}, http={"listen": "127.0.0.1:%d" % port, "auth": "none"})
        assert lab.host("demo").call("echo", text="x") == "x"
        assert "127.0.0.1:%d" % port in lab.run("logs").stdout


PLAIN = b"POST /mcp/up HTTP/1.1\r\nHost: a\r\nContent-Length: 3"


@pytest.mark.parametrize("head", [
    PLAIN + b"\r\n folded", PLAIN + b"\r\nBad Name: x", PLAIN + b"\r\nX y", PLAIN + b"\r\nX: a\rb",
    PLAIN + b"\r\nX: a\nb", PLAIN + b"\r\nX: \0", PLAIN + b"\r\nX: \xe9", PLAIN + b"\r\nX : a", PLAIN + b"\r\n: a",
    b"POST  /mcp/up HTTP/1.1\r\nHost: a", b"POST /mcp/up HTTP/1.0\r\nHost: a", b"POST //x HTTP/1.1\r\nHost: a",
    b"POST /a b HTTP/1.1\r\nHost: a", b"PUT /a HTTP/1.1\r\nHost: a", b"POST http://a/ HTTP/1.1\r\nHost: a", b"\r\nPOST / HTTP/1.1"])
def test_http_an_unusual_head_is_not_read_as_a_plain_one(head):
    assert mcpx.parse_plain_head(head) is None


def test_http_a_plain_head_is_read_as_http_server_reads_it():
    head = PLAIN + b"\r\nAccept:application/json\r\nx-Two:  a b  \r\nMcp-Session-Id: q:1"
    command, target, version, headers = mcpx.parse_plain_head(head)
    other = mcpx.parse_any_head(head)
    assert (command, target, version) == other[:3]
    for name in ("host", "Accept", "X-TWO", "mcp-session-id", "Content-Length"):
        assert headers.get(name) == other[3].get(name)


# ---------------------------------------------------------------------------
# Daemon: one, detached, and replaceable
# ---------------------------------------------------------------------------

def daemons(lab):
    """What runs here and is neither a shim nor a server."""
    shims, servers = {h.pid for h in lab.hosts}, set(lab.pids(None))
    return [pid for pid, command in lab.processes().items() if pid not in shims | servers and "mcpx-holder" not in command]


def test_thirty_hosts_started_at_once_find_one_daemon_and_one_server(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")})
    hosts = [lab.start("plain") for _ in range(30)]
    for host in hosts:
        host.greet(60)
    pids = {host.whoami()["pid"] for host in hosts}
    assert len(pids) == 1
    assert len(lab.seen("plain", "start")) == 1
    lab.wait_for("one daemon", lambda: len(daemons(lab)) == 1)
    assert daemons(lab) == [lab.daemon_pid()]
    assert len(lab.status()["hosts"]) == 30


def test_a_host_that_captures_all_output_gets_its_end(lab):
    """The daemon that the first shim starts keeps none of its descriptors, nor its directory."""
    lab.configure({"demo": demo(scope="global")})
    reads, write = os.pipe()
    spare = [os.dup(write) for _ in range(4)]
    folder = lab.directory("folder")
    done = subprocess.run(
        [sys.executable, MCPX, "serve", "demo"], cwd=folder, env=lab.env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, timeout=PATIENCE_S, pass_fds=spare, start_new_session=True,
        input=as_line({"id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}})
        + as_line({"method": "notifications/initialized"}) + as_line(echo_request(2, "x")))
    for fd in (write, *spare):
        os.close(fd)
    answers = {m["id"]: m for m in map(json.loads, done.stdout.splitlines()) if "id" in m}
    assert answers[1]["result"]["protocolVersion"] == "2025-06-18", lab.report()
    assert select.select([reads], [], [], PATIENCE_S)[0] and os.read(reads, 1) == b""
    os.close(reads)
    daemon = lab.daemon_pid()
    assert is_running(daemon) and os.getsid(daemon) != os.getsid(0)
    if os.path.isdir("/proc/self"):
        assert os.readlink("/proc/%d/cwd" % daemon) != folder
        with open("/proc/%d/stat" % daemon) as file:
            assert int(file.read().rpartition(")")[2].split()[1]) != os.getpid(), "it hangs below its starter"


def test_an_interrupt_at_the_terminal_ends_one_host_only(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")})
    first, other = lab.host("plain"), lab.host("plain")
    pid, daemon = first.whoami()["pid"], lab.daemon_pid()
    held = other.begin("hold", until=lab.gate("held"))
    lab.wait_begun("plain", count=2)
    for number in (signal.SIGINT, signal.SIGHUP):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, number)
    first.process.wait(PATIENCE_S)
    lab.open_gate("held")
    assert text_of(other.result(held)) == "held"
    assert other.whoami()["pid"] == pid and lab.daemon_pid() == daemon


def test_a_daemon_killed_in_mid_call_is_replaced_and_no_host_is_cut_off(lab):
    lab.configure({"plain": lab.role("upstream", "plain", scope="global"), "demo": demo(scope="session")},
                  stop_eofGrace="500ms", stop_termGrace="500ms", backoff_first="50ms")
    one, two, idle = lab.host("plain"), lab.host("plain"), lab.host("demo")
    one.tools(), two.tools(), idle.call("set", value="x")
    one.ask("resources/subscribe", {"uri": "role://x"})
    one.ask("logging/setLevel", {"level": "warning"})
    calls = [(host, host.begin("hold", until=lab.gate("go"), tag="once"),
              host.begin("watch", until=lab.gate("go"), tag="again")) for host in (one, two)]
    lab.wait_begun("plain", count=4)
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    new = lab.wait_for("a new daemon", lambda: lab.run("status").returncode == 0 and lab.daemon_pid())
    assert new != daemon
    lab.open_gate("go")
    for host, held, watch in calls:
        assert text_of(host.result(watch)) == "watched"
        assert text_of(host.result(held)) == "held"
        assert len(host.answers(held)) == len(host.answers(watch)) == 1
        assert host.process.poll() is None
    assert len(lab.seen("plain", "begin")) == 4, "a call was repeated though its server goes on with it"
    assert len(lab.seen("plain", "start")) == 1
    assert "echo" in one.tools() and idle.call("echo", text="x") == "x"
    one.call("touch", uri="role://x")
    one.notification("notifications/resources/updated", uri="role://x")
    pid = one.whoami()["pid"]
    assert [m["params"]["level"] for m in (e["message"] for e in lab.seen("plain", "got", pid=pid))
            if m.get("method") == "logging/setLevel"][-1:] == ["warning"]
    assert len(daemons(lab)) == 1
    lab.wait_for("empty tables", lambda: at_rest(lab))
    # Of each server there is one process, none of the old daemon's besides it.
    lab.wait_for("one process of the server", lambda: len(
        {e["pid"] for e in lab.seen("plain", "start") if is_running(e["pid"])}) == 1)


def test_daemons_killed_one_after_another_lose_no_answer(lab):
    """Their servers go on meanwhile, and the next daemon hands on what they answer."""
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")}, backoff_first="50ms", backoff_max="50ms",
                  stop_eofGrace="200ms", stop_termGrace="200ms")
    hosts = [lab.host("plain") for _ in range(3)]
    for name in ("first", "second", "third"):
        ids = [(host, host.begin("watch", until=lab.gate(name), tag=name)) for _ in range(5) for host in hosts]
        lab.wait_begun("plain", name, count=len(ids))
        daemon = lab.daemon_pid()
        os.kill(daemon, signal.SIGKILL)
        lab.open_gate(name)
        for host, host_id in ids:
            assert text_of(host.result(host_id)) == "watched"
            assert len(host.answers(host_id)) == 1
        assert lab.daemon_pid() != daemon
        assert len(lab.seen("plain", "begin", tag=name)) == len(ids)
    assert len(lab.seen("plain", "start")) == 1


def kill_daemon(lab):
    """End the daemon as the system does when it is out of memory."""
    daemon = lab.wait_for("a daemon", lambda: lab.run("status").returncode == 0 and lab.daemon_pid())
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    return daemon


def holders(lab):
    return [pid for pid, command in lab.processes().items() if "mcpx-holder" in command]


def test_servers_and_their_state_outlive_a_daemon_that_is_killed(lab):
    """Also an open question: it is withdrawn on both sides, and the next one is asked."""
    lab.configure({"mine": demo(scope="session"), "curious": lab.role("curious", "curious", scope="session"),
                   "alone": lab.role("upstream", "alone", scope="global", sharing="exclusive")})
    host = lab.host("mine", "curious", "alone", capabilities={"elicitation": {}})
    other = lab.host("alone")
    host.call("mine_set", value="kept")
    asked = host.begin("curious_inquire")
    question = host.expect(lambda m: m.get("method") == "elicitation/create", "the question")
    held = host.begin("alone_hold", until=lab.gate("go"), tag="held")
    lab.wait_begun("alone", "held")
    waiting = other.begin("echo", text="waits", tag="waits")
    other.settle()
    before = {i["id"]: i["pid"] for i in lab.instances()}
    for _ in range(2):
        kill_daemon(lab)
        assert host.call("mine_get") == "kept"
    withdrawn = host.notification("notifications/cancelled", requestId=question["id"])
    assert withdrawn["params"]["reason"]
    assert json.loads(text_of(host.result(asked))) == {"action": "cancel"}
    assert {i["id"]: i["pid"] for i in lab.instances()} == before
    # Who waits for an exclusive server waits for the call that a dead daemon has sent, too.
    assert lab.seen("alone", "begin", tag="waits") == [] and other.answers(waiting) == []
    lab.open_gate("go")
    assert (text_of(host.result(held)), text_of(other.result(waiting))) == ("held", "waits")
    host.replies["elicitation/create"] = lambda params: {"action": "accept", "content": {"answer": "again"}}
    assert json.loads(host.call("curious_inquire"))["content"] == {"answer": "again"}
    assert "dev.mcpx/restarted" not in json.dumps(host.seen)
    host.close()
    lab.wait_for("the end of the sessions", lambda: {i["server"] for i in lab.instances()} == {"alone"})
    lab.wait_for("empty tables", lambda: at_rest(lab))


def test_a_modern_call_that_was_held_for_an_answer_is_lost_with_the_daemon_and_says_so(lab):
    lab.configure({"curious": lab.role("curious", "curious", scope="global")})
    host = lab.start("curious")
    params = {"name": "inquire", "arguments": {}, "_meta": MODERN_META}
    asked = host.result(host.request("tools/call", params))
    kill_daemon(lab)
    key, = asked["inputRequests"]
    params.update(inputResponses={key: {"action": "decline"}}, requestState=asked["requestState"])
    assert is_lost(host.answer(host.request("tools/call", params))["error"])
    # A new round of the same call is none of the old one's.
    assert host.result(host.request("tools/call", {"name": "inquire", "arguments": {}, "_meta": MODERN_META}))["inputRequests"]


def test_a_question_that_waits_for_a_person_outlives_the_daemon(lab):
    """Two hosts' calls ask at once, so it is nobody's; `mcpx answer` answers it to the next daemon."""
    lab.configure({"curious": lab.role("curious", "curious", scope="global")})
    hosts = [lab.host("curious", capabilities={"elicitation": {}}) for _ in range(2)]
    held = hosts[0].begin("hold", until=lab.gate("never"), tag="held")
    lab.wait_begun("curious", "held")
    asked = hosts[1].begin("inquire")
    lab.wait_for("the open question", lambda: [q["why"] for q in lab.status()["questions"] if q["why"]])
    kill_daemon(lab)
    question, = lab.wait_for("it again", lambda: lab.run("asks").returncode == 0 and lab.status()["questions"])
    assert question["params"]["message"] == "who?" and question["deadline"] > 60 and question["host"] is None
    assert "who?" in lab.command("asks")
    lab.command("answer", str(question["id"]), "accept", "answer=a person")
    assert json.loads(text_of(hosts[1].result(asked)))["content"] == {"answer": "a person"}
    assert hosts[0].all("elicitation/create") == hosts[1].all("elicitation/create") == []
    hosts[0].notify("notifications/cancelled", requestId=held)


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_subscription_outlives_the_daemon(lab, era):
    lab.configure({"demo": demo("--era", era, scope="global")})
    host, other = lab.host("demo"), lab.host("demo")
    host.ask("resources/subscribe", {"uri": "demo://state"})
    for n in range(2):
        kill_daemon(lab)
        lab.wait_for("both hosts", lambda: lab.run("status").returncode == 0 and len(lab.status()["hosts"]) == 2)
        other.call("touch", uri="demo://state")
        host.expect(lambda m: len(host.all("notifications/resources/updated")) == n + 1, "an update after crash %d" % n)


def test_an_adopted_server_that_dies_is_noticed_and_replaced(lab):
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global"), "demo": demo(scope="global")})
    host = lab.host("mortal", "demo")
    pid = host.whoami(prefix="mortal_")["pid"]
    kill_daemon(lab)
    lost = host.begin("mortal_hold", until=lab.gate("never"), tag="lost")
    lab.wait_begun("mortal", "lost")
    os.kill(pid, signal.SIGKILL)
    answer = host.answer(lost)
    assert is_lost(answer["error"]) and "exit status unknown (adopted)" in answer["error"]["message"]
    result = host.result(host.begin("mortal_whoami"))
    assert json.loads(text_of(result))["pid"] != pid
    assert RESTARTED in result["_meta"], "its state was lost in silence"
    # And where the host has said nothing to it since, which is one of many.
    for other in [lab.host("mortal") for _ in range(3)]:
        other.whoami()
    pid = json.loads(text_of(result))["pid"]
    kill_daemon(lab)
    lab.wait_for("a daemon that has adopted it", lambda: lab.run("status").returncode == 0 and pid in lab.pids("mortal"))
    os.kill(pid, signal.SIGKILL)
    lab.wait_gone(pid)
    for each, tool in [(host, "mortal_whoami")] + [(other, "whoami") for other in lab.hosts[1:]]:
        result = each.result(each.begin(tool))
        assert RESTARTED in result.get("_meta", {}), "its state was lost in silence"
    lab.command("stop")
    lab.wait_gone(pid)


def test_a_host_whose_first_answer_came_after_the_daemons_death_hears_of_its_servers_loss(lab):
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global")}, backoff_first="50ms", backoff_max="50ms")
    for _ in range(3):
        lab.host("mortal").whoami()
    host = lab.host("mortal")
    call = host.begin("hold", until=lab.gate("go"), tag="held")
    lab.wait_begun("mortal", "held")
    kill_daemon(lab)
    lab.open_gate("go")
    assert text_of(host.result(call)) == "held"
    pid, = lab.pids("mortal")
    os.kill(pid, signal.SIGKILL)
    lab.wait_gone(pid)
    assert RESTARTED in host.result(host.begin("whoami")).get("_meta", {}), "its state was lost in silence"


@pytest.mark.parametrize("nonsense", [b"ax {}", b"a", b"dx", b"c welcome", b"c welcome x y z", b"s {bad", b"HTTP/1.1 400 Bad Request",
                                      b"\xff\xfe"])
def test_a_shim_outlives_nonsense_from_what_listens_on_its_socket(lab, nonsense):
    lab.configure({"demo": demo(scope="global")})
    path = mcpx.socket_path(lab.config, lab.env)
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    impostor = socket.socket(socket.AF_UNIX)
    impostor.bind(path)
    impostor.listen()
    host = lab.start("demo")
    hello = host.hello()
    link, _ = impostor.accept()
    link.recv(1 << 20)
    link.sendall(b"c welcome 0.1.0 67108864 0.5 0.5 134217728\n" + nonsense + b"\n")
    link.close()
    impostor.close()
    os.unlink(path)
    assert host.result(hello)["serverInfo"]
    host.notify("notifications/initialized")
    assert host.call("echo", text="there") == "there"


def test_every_host_of_a_shared_instance_hears_that_it_was_lost_with_the_daemon(lab):
    lab.configure({"demo": demo(scope="cwd")}, crashKeep=0)
    one, two = lab.host("demo"), lab.host("demo")
    for host in (one, two):
        host.call("set", name="a", value="b")
    kill_daemon(lab)
    for host in (one, two):
        result = host.result(host.begin("echo", text="x"))
        assert "dev.mcpx/restarted" in result.get("_meta", {}), result
        assert "dev.mcpx/restarted" not in host.result(host.begin("echo", text="x")).get("_meta", {})


@pytest.mark.parametrize("deaths", ["both at once", "the server, then the daemon", "the daemon before it could repeat it"])
def test_a_request_that_may_be_repeated_is_repeated_once_whoever_died_with_it(lab, deaths):
    backoff = "1500ms" if "before" in deaths else "50ms"
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global")}, backoff_first=backoff, backoff_max=backoff)
    host = lab.host("mortal")
    host.tools()
    call = host.begin("watch", until=lab.gate("never"), tag="w")
    lab.wait_begun("mortal", "w")
    server, daemon = lab.seen("mortal", "begin", tag="w")[0]["pid"], lab.daemon_pid()
    if deaths == "both at once":
        os.kill(daemon, signal.SIGSTOP)  # so that it does not see the server die
    os.kill(server, signal.SIGKILL)
    if deaths == "the server, then the daemon":
        lab.wait_begun("mortal", "w", count=2)
    elif deaths != "both at once":
        lab.wait_for("the loss of the server", lambda: server not in lab.pids("mortal"))
    os.kill(daemon, signal.SIGKILL)
    lab.wait_begun("mortal", "w", count=2)
    lab.wait_for("the next daemon", lambda: lab.run("status").returncode == 0 and lab.status()["hosts"])
    os.kill(lab.seen("mortal", "begin", tag="w")[1]["pid"], signal.SIGKILL)
    assert is_lost(host.answer(call)["error"])
    assert len(lab.seen("mortal", "begin", tag="w")) == 2


def test_a_lost_call_is_not_made_again_when_the_daemon_dies_before_its_host_knows(lab):
    """The error lies behind megabytes that the shim does not read; it must not take the call for a new one."""
    lab.configure({"mortal": lab.role("mortal", "mortal", scope="global"),
                   "wide": lab.role("wide", "wide", scope="global")},
                  backoff_first="50ms", backoff_max="50ms")
    host = lab.host("mortal", "wide")
    host.tools()
    call = host.begin("mortal_hold", until=lab.gate("never"), tag="once")
    lab.wait_begun("mortal", "once")
    server, daemon = lab.seen("mortal", "begin", tag="once")[0]["pid"], lab.daemon_pid()
    poured = host.begin("wide_pour", until=lab.gate("pour"), tag="poured")
    lab.wait_begun("wide", "poured")
    os.kill(host.pid, signal.SIGSTOP)
    try:
        lab.open_gate("pour")
        lab.wait_for("the answer that waits", lambda: lab.status()["tables"]["calls"] == 1)
        os.kill(server, signal.SIGKILL)
        lab.wait_for("the loss of the server", lambda: server not in lab.pids("mortal"))
        os.kill(daemon, signal.SIGKILL)
        lab.wait_gone(daemon)
    finally:
        os.kill(host.pid, signal.SIGCONT)
    assert is_lost(host.answer(call)["error"])
    assert is_lost(host.answer(poured)["error"])
    assert len(lab.seen("mortal", "begin", tag="once")) == len(lab.seen("wide", "begin", tag="poured")) == 1


@pytest.mark.parametrize("spoiled", [
    lambda record: record.pop("ready"), lambda record: record["ready"].pop("upstream"),
    lambda record: record["ready"].update(questions=[5]), lambda record: record["ready"]["upstream"].pop("era"),
    lambda record: record.update(boot="another")], ids=["not ready", "no handshake", "nonsense", "no era", "another boot"])
def test_a_server_that_cannot_be_taken_over_ends_and_the_others_go_on(lab, spoiled):
    lab.configure({"good": demo(scope="global"), "bad": demo(scope="global")})
    host = lab.host("good", "bad")
    good, bad = (host.whoami(prefix=name + "_")["pid"] for name in ("good", "bad"))
    folder = lab.path("state", "mcpx", "children")
    path, = [path for path in (os.path.join(folder, name) for name in os.listdir(folder))
             if json.loads(open(path).read())["server"] == "bad"]
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)      # else it might write the record again
    with open(path) as file:
        record = json.load(file)
    spoiled(record)
    with open(path, "w") as file:
        json.dump(record, file)
    os.kill(daemon, signal.SIGKILL)
    assert host.whoami(prefix="good_")["pid"] == good
    assert host.whoami(prefix="bad_")["pid"] != bad
    lab.wait_gone(bad)
    assert host.whoami(prefix="good_")["pid"] == good, "what was closed was somebody else's"


def test_a_call_of_a_servers_only_host_writes_no_file(lab):
    """What the next daemon must know of it is written when it comes."""
    lab.configure({"demo": demo(scope="global")})
    host = lab.host("demo")

    def written():
        found = {}
        for folder, _, files in os.walk(lab.state):
            for name in files:
                if not name.endswith(".log"):
                    facts = os.stat(os.path.join(folder, name))
                    found[name] = (facts.st_ino, facts.st_mtime_ns)
        return found

    def use():
        for _ in range(5):
            assert host.call("echo", text="x") == "x"
        host.call("sleep", seconds=0.3)  # what a call leaves to be written comes in the next turn
        return written()
    before = use()
    assert [name for name, facts in use().items() if before.get(name) != facts] == []


def test_a_listener_that_leaves_before_its_subscription_is_made_leaves_nothing(lab):
    web = Web(lab, demo=demo(), slow=fake(lab, "slow", """
        HELLO["capabilities"]["resources"] = {"subscribe": True}
        old = take
        def take(message):
            if message.get("method") == "resources/list":
                send(id=message["id"], result={"resources": [{"uri": "slow://x", "name": "x"}]})
            elif message.get("method") == "resources/subscribe":
                note("got", "resources/subscribe")
                while not os.path.exists(sys.argv[1]):
                    time.sleep(0.02)
                send(id=message["id"], result={})
            else:
                old(message)
        """, lab.gate("slow"), scope="global", idleTimeout="300ms"))
    assert web.modern("slow", "resources/list")[1][-1]["result"]["resources"]
    body = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {
        "notifications": {"resourceSubscriptions": ["slow://x"]}, "_meta": MODERN_META}}
    client = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    client.request("POST", "/mcp/slow", json.dumps(body), {
        "Content-Type": "application/json", "Accept": BOTH_TYPES, "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "subscriptions/listen"})
    lab.wait_for("the subscription", lambda: notes(lab, "slow", "got", "resources/subscribe"))
    client.close()
    lab.wait_for("the end of its request", lambda: not lab.status()["tables"]["requests"])
    lab.open_gate("slow")
    lab.wait_for("the end of the idle server", lambda: lab.instances("slow") == [])


def test_losing_the_holder_costs_nothing(lab):
    lab.configure({"demo": demo(scope="session")})
    host = lab.host("demo")
    assert host.call("set", value="kept") == "ok"
    pid, = lab.wait_for("the holder", lambda: holders(lab))
    os.kill(pid, signal.SIGKILL)
    lab.wait_for("another holder", lambda: [p for p in holders(lab) if p != pid])
    assert host.call("get") == "kept"
    kill_daemon(lab)
    assert host.call("get") == "kept"
    # Without both of them the server ends, and its loss is told.
    server = host.whoami()["pid"]
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)      # else it would start another one at once
    for pid in holders(lab) + [daemon]:
        os.kill(pid, signal.SIGKILL)
    result = host.result(host.begin("get"))
    assert text_of(result) == "" and "dev.mcpx/restarted" in result["_meta"]
    lab.wait_gone(server)


def test_servers_do_not_wait_for_ever_for_a_daemon_to_come_back(lab):
    lab.configure({"demo": demo(scope="session")}, crashKeep="500ms")
    host, other = lab.host("demo"), lab.host("demo")
    pids = [host.whoami()["pid"], other.whoami()["pid"]]
    lab.wait_for("the holder", lambda: holders(lab))
    daemon = lab.daemon_pid()
    host.kill(), other.kill()
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon, *pids)
    lab.wait_for("the end of the holder", lambda: not holders(lab))
    assert lab.command("call", "demo.echo", "text=x").strip() == "x"


def test_a_request_that_no_daemon_has_handed_on_is_new_to_the_next_one(lab):
    """Large ones are cut in the middle of the pipe; each is carried out exactly once."""
    lab.configure({"plain": lab.role("patient", "plain", scope="global")})
    host = lab.host("plain")
    host.call("echo", text="x")
    for n in range(4):
        big = "%d" % n + "x" * 2_000_000
        calls = [host.begin("length", text=big, tag="t%d-%d" % (n, k)) for k in range(3)]
        if n % 2:
            lab.wait_begun("plain", "t%d-0" % n)
        kill_daemon(lab)
        for call in calls:
            answer = host.answer(call)
            assert is_lost(answer["error"]) if "error" in answer else text_of(answer["result"]) == str(len(big))
            assert len(host.answers(call)) == 1
    for n in range(4):
        for k in range(3):
            assert len(lab.seen("plain", "begin", tag="t%d-%d" % (n, k))) <= 1
    assert host.call("echo", text="x") == "x"
    assert len(lab.seen("plain", "start")) == 1


def test_a_line_over_the_limit_is_refused_by_the_next_daemon_too(lab):
    """Its rest, which comes later, is nobody's request."""
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")}, limits_lineBytes="256KiB")
    host = lab.host("plain", revision="2025-06-18")
    host.call("echo", text="x")
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)      # so that it cannot have refused the line before it dies
    line = as_line(echo_request("over", "y" * (600 << 10)))
    host.write(line[:300 << 10])
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    host.write(line[300 << 10:])
    assert host.call("echo", text="after") == "after"
    error = host.answer("over")["error"]
    assert "limits.lineBytes" in error["message"]
    assert not [m for m in host.seen if m.get("id", 0) is None], "the rest of the line was read as one"


def test_large_requests_in_flight_beyond_the_shims_memory_are_lost_with_a_mark(lab):
    """The shim keeps only who asked; no daemon may take what it keeps for a request."""
    lab.configure({"plain": lab.role("patient", "plain", scope="global")}, shim_keepBytes="1MiB")
    host = lab.host("plain")
    host.call("echo", text="x")
    daemon = lab.daemon_pid()
    big = [host.begin("length", text="x" * (700 << 10), tag="t%d" % n) for n in range(4)]
    lab.wait_begun("plain", "t3")
    os.kill(daemon, signal.SIGKILL)
    for call in big:
        answer = host.answer(call)
        assert is_lost(answer["error"]) if "error" in answer else text_of(answer["result"]) == str(700 << 10)
    assert host.call("echo", text="x") == "x"
    assert all(len(lab.seen("plain", "begin", tag="t%d" % n)) == 1 for n in range(4))


@pytest.mark.parametrize("room", ["1MiB", None], ids=["too many", "enough room"])
def test_requests_that_no_server_has_seen_are_repeated_as_far_as_the_shim_remembers(lab, room):
    """They wait for a server that is starting when the daemon dies."""
    lab.configure({"late": lab.role("upstream", "late", "--gate", lab.gate("late"), scope="global")},
                  coldWait="100ms", shim_keepBytes=room)
    host = lab.host("late")
    big = [host.begin("length", text="x" * (400 << 10), tag="t%d" % n) for n in range(4)]
    small = [host.begin("echo", text="small") for _ in range(2)]
    daemon = lab.daemon_pid()
    lab.wait_for("all to wait", lambda: lab.status()["tables"]["waiting"] == 6)
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    lab.open_gate("late")
    assert [text_of(host.result(call)) for call in small] == ["small"] * 2
    answers = [host.answer(call) for call in big]
    lost = [answer for answer in answers if "error" in answer]
    assert all(is_lost(answer["error"]) for answer in lost)
    assert bool(lost) is (room is not None)
    kept = [n for n, answer in enumerate(answers) if "result" in answer]
    assert {text_of(answers[n]["result"]) for n in kept} <= {str(400 << 10)}
    begun = [e["tag"] for e in lab.seen("late", "begin", tool="length")]
    assert sorted(begun) == ["t%d" % n for n in kept], "a call was made that was reported as lost, or twice"
    assert host.call("echo", text="x") == "x"


def test_a_pid_of_somebody_else_in_the_records_is_left_alone(lab):
    """The machine has been restarted, and the numbers in the daemon's record and its children's are others' now."""
    lab.configure({"demo": demo(scope="global"), "other": demo(scope="global")})
    host = lab.host("demo", "other")
    host.call("demo_echo", text="x"), host.call("other_echo", text="x")
    daemon = lab.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    host.kill()
    lab.kill_everything()
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        for folder, _, files in os.walk(os.path.join(lab.state, "mcpx")):
            for path in (os.path.join(folder, name) for name in files if name.endswith(".json")):
                with open(path) as file:
                    record = json.load(file)
                if isinstance(record, dict) and "pid" in record:
                    with open(path, "w") as file:
                        json.dump(dict(record, pid=stranger.pid), file)
        assert lab.run("status").returncode == 1
        assert lab.host("demo").call("echo", text="x") == "x"
        lab.command("stop")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def newer_code(lab, *changes, version="9.9.9"):
    """A copy of the program under another version, with pieces replaced; returns its path."""
    with open(MCPX) as file:
        text = file.read()
    for old, new in (('__version__ = "%s"' % mcpx.__version__, '__version__ = "%s"' % version),) + changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = lab.path("newer-%d.py" % len(os.listdir(lab.root)))
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o755)
    return path


def run_code(lab, path, *arguments, input=None):
    return subprocess.run([sys.executable, path, *arguments], env=lab.env, cwd=lab.work, stdout=subprocess.PIPE, input=input,
                          stderr=subprocess.PIPE, timeout=60, universal_newlines=True)


def test_the_code_is_exchanged_under_hosts_that_notice_nothing(lab):
    """Calls in flight, progress, a subscription, an open question, HTTP streams, queued calls: all of it goes on."""
    web = Web(lab, demo=demo("--era", "legacy", scope="global"), alone=demo(scope="global", sharing="exclusive"),
              asker=demo("--era", "legacy", scope="global"), mine=demo(scope="session"), curious=lab.role("curious", "curious", scope="session"))
    answers = []
    host = lab.host("demo", "alone", "mine", "curious", capabilities={"elicitation": {}})
    other = lab.host("demo")
    session = WebSession(web, "demo")
    host.call("mine_set", value="kept"), host.call("demo_set", value="shared")
    host.ask("resources/subscribe", {"uri": "demo://state"})
    slow = host.begin("demo_sleep", {"progressToken": "p"}, seconds=5, every=0.2, text="slow")
    queued = [host.begin("alone_sleep", seconds=0.3, text="q%d" % n) for n in range(5)]
    asked = host.begin("curious_inquire")
    question = host.expect(lambda m: m.get("method") == "elicitation/create", "the question")
    held = web.modern("asker", "tools/call", {"name": "ask", "arguments": {"message": "?"}})[1][-1]["result"]
    streams = [threading.Thread(target=lambda: answers.append(session.tool("sleep", seconds=4, text="legacy")), daemon=True),
               threading.Thread(target=lambda: answers.append(web.tool("demo", "sleep", seconds=4, text="modern")), daemon=True)]
    for stream in streams:
        stream.start()
    lab.wait_for("all calls", lambda: sum(i["inFlight"] for i in lab.instances("demo")) == 3)
    before, daemon = {i["id"]: i["pid"] for i in lab.instances()}, lab.daemon_pid()
    big = "x" * 3_000_000
    for n in range(6):
        # Half a line in the shim's socket, an answer half written: cut wherever they are.
        echo = other.begin("echo", text=big)
        lab.command("reload", "--upgrade")
        assert text_of(other.result(echo)) == big
        status = lab.status()
        assert status["daemon"]["upgrades"] == n + 1 and status["daemon"]["pid"] == daemon
        assert {i["id"]: i["pid"] for i in status["instances"]}.items() >= before.items()
    host.send({"id": question["id"], "result": {"action": "accept", "content": {"answer": "a"}}})
    assert json.loads(text_of(host.result(asked)))["content"] == {"answer": "a"}
    assert "slow" in text_of(host.result(slow))
    assert [m["params"]["progress"] for m in host.all("notifications/progress")][-1] > 2
    for n, call in enumerate(queued):
        assert "q%d" % n in text_of(host.result(call))
    for stream in streams:
        stream.join(PATIENCE_S)
    assert sorted("legacy" in a or "modern" in a for a in answers) == [True, True]
    assert (host.call("mine_get"), host.call("demo_get")) == ("kept", "shared")
    other.call("set", value="new"), other.call("touch", uri="demo://state")
    host.notification("notifications/resources/updated", uri="demo://state")
    key, = held["inputRequests"]
    reply = {"name": "ask", "arguments": {"message": "?"}, "requestState": held["requestState"],
             "inputResponses": {key: {"action": "accept", "content": {"answer": "42"}}}}
    assert "42" in web.modern("asker", "tools/call", reply)[1][-1]["result"]["content"][0]["text"]
    assert session.tool("get") == "new"
    for each in (host, other):
        ids = [m["id"] for m in each.seen if isinstance(m, dict) and "id" in m and "method" not in m]
        assert len(ids) == len(set(ids))
    lab.wait_for("rest", lambda: at_rest(lab))
    assert not [line for line in open(glob.glob(lab.path("state", "mcpx", "logs", "daemon-*.log"))[0]) if " error " in line]


def test_the_code_is_exchanged_while_a_server_makes_its_handshake(lab):
    gate = lab.path("go")
    lab.configure({"slow": lab.role("upstream", "slow", "--gate", gate, scope="global")})
    host = lab.start("slow")
    hello = host.hello()
    lab.wait_for("the server", lambda: lab.seen("slow", "start"))
    daemon = lab.daemon_pid()
    lab.command("reload", "--upgrade")
    assert lab.daemon_pid() == daemon and host.answers(hello) == []
    open(gate, "w").close()
    assert host.result(hello)["serverInfo"]["name"] == "upstream"
    host.notify("notifications/initialized")
    assert host.call("echo", text="x") == "x" and len(lab.seen("slow", "start")) == 1


def test_the_number_of_descriptors_stays_the_same_over_upgrades(lab):
    web = Web(lab, demo=demo(scope="global"))
    host = lab.host("demo")
    assert host.call("echo", text="x") == web.tool("demo", "echo", text="x") == "x"
    daemon = lab.daemon_pid()

    def kinds():
        links = [os.readlink("/proc/%d/fd/%s" % (daemon, fd)) for fd in os.listdir("/proc/%d/fd" % daemon)]
        # The log is opened at its first line, and one that only repeats is not written.
        return collections.Counter(re.sub(r"\d+", "", link) for link in links if "/logs/" not in link)
    lab.command("reload", "--upgrade")
    before = kinds()
    for _ in range(3):
        lab.command("reload", "--upgrade")
    assert host.call("echo", text="x") == "x"
    assert kinds() == before
    copies = glob.glob(lab.path("state", "mcpx", "code-*", "*"))
    assert 1 <= len(copies) <= 2


def test_a_newer_serve_brings_its_code_along_and_an_older_one_does_not(lab):
    lab.configure({"demo": demo(scope="global")})
    host = lab.host("demo")
    assert host.call("set", value="kept") == "ok"
    daemon, pid = lab.daemon_pid(), host.whoami()["pid"]
    newer = newer_code(lab)
    script = [{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "script", "version": "1"}}},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "get", "arguments": {}}}]
    lines = run_code(lab, newer, "serve", "demo", input="".join(json.dumps(m) + "\n" for m in script)).stdout.splitlines()
    assert text_of(json.loads(lines[1])["result"]) == "kept"
    lab.wait_for("the newer version", lambda: lab.status()["daemon"]["version"] == "9.9.9")
    assert (lab.daemon_pid(), host.whoami()["pid"], host.call("get")) == (daemon, pid, "kept")
    old = lab.host("demo")
    assert old.call("get") == "kept"
    assert lab.status()["daemon"]["version"] == "9.9.9" and lab.status()["daemon"]["upgrades"] == 1
    os.unlink(newer)                     # what runs is a copy of its own
    assert lab.host("demo").call("get") == "kept"
    assert "9.9.9" in lab.run("doctor").stdout


def test_a_newer_serve_leaves_the_code_of_the_daemon_where_that_is_set(lab):
    lab.configure({"demo": demo(scope="global")}, upgrade="manual")
    host = lab.host("demo")
    newer = newer_code(lab)
    called = json.loads(run_code(lab, newer, "call", "demo.whoami", "--json").stdout)
    script = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "script", "version": "1"}}}
    served = json.loads(run_code(lab, newer, "serve", "demo", input=json.dumps(script) + "\n").stdout)
    assert served["result"]["serverInfo"] and called["structuredContent"]["pid"] == host.whoami()["pid"]
    daemon = lab.status()["daemon"]
    assert (daemon["version"], daemon["upgrades"]) == (mcpx.__version__, 0)
    assert run_code(lab, newer, "reload", "--upgrade").returncode == 0
    daemon = lab.status()["daemon"]
    # One, not a second one after the first had gone unnoticed.
    assert (daemon["version"], daemon["upgrades"]) == ("9.9.9", 1) and host.call("echo", text="x") == "x"


BAD_CODE = {
    "syntax": (("import sys\n\n# The boot", "import sys sys\n\n# The boot"), "SyntaxError"),
    "fails at once": (("def check_snapshot(fd):\n", "def check_snapshot(fd):\n    raise ValueError('unfit')\n"), "unfit"),
    "hangs in the check": (("def check_snapshot(fd):\n", "def check_snapshot(fd):\n    time.sleep(600)\n"), "upgradeTimeout"),
    "fails after the exec": (("        self._watch_doors()\n        self._take_signals()\n        self._write_record()\n",
                              "        self._watch_doors()\n        raise ValueError('too late')\n"), "too late")}


@pytest.mark.parametrize("what", sorted(BAD_CODE))
def test_code_that_cannot_take_over_changes_nothing(lab, what):
    change, text = BAD_CODE[what]
    lab.configure({"demo": demo(scope="global")}, upgradeTimeout="2s" if "hangs" in what else "20s")
    host = lab.host("demo")
    assert host.call("set", value="kept") == "ok"
    slow = host.begin("sleep", seconds=1, text="slow")
    daemon, pid = lab.daemon_pid(), lab.pids("demo")
    bad = newer_code(lab, change)
    if what != "syntax":
        done = run_code(lab, bad, "reload", "--upgrade")
        assert done.returncode == 1 and text in done.stderr, done.stderr
    else:
        # The file cannot even run its own command: the daemon is told of it by hand.
        done = control(lab, "upgrade", file=bad)
        assert text in done["error"]["message"]
    assert "slow" in text_of(host.result(slow))
    assert (lab.daemon_pid(), lab.pids("demo"), host.call("get")) == (daemon, pid, "kept")
    assert lab.status()["daemon"]["version"] == mcpx.__version__
    lab.command("reload", "--upgrade")   # the way is free for code that is good
    assert host.call("get") == "kept"


def control(lab, operation, **arguments):
    """Send a control request as a command does; returns the message that answers it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(lab.status()["daemon"]["socket"])
        body = json.dumps(arguments).encode()
        connection.sendall(b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
            operation.encode(), len(body)) + body)
        return json.loads(connection.makefile("rb").read().partition(b"\r\n\r\n")[2])


def test_a_look_up_that_hangs_holds_up_no_upgrade(lab):
    """Its caller was served long ago; a thread that nobody waits for any more ends with the old code."""
    lab.configure({"demo": demo(scope="cwd")}, upgradeTimeout="15s")
    host = lab.host("demo")
    assert host.call("echo", text="x") == "x"
    os.mkfifo(lab.path("work", "HEAD"))
    os.mkdir(lab.path("work", "objects")), os.mkdir(lab.path("work", "refs")), os.mkfifo(lab.path("work", "commondir"))
    assert host.call("echo", {"dev.mcpx/cwd": lab.work}, text="y") == "y"
    lab.command("reload", "--upgrade")
    assert host.call("echo", text="z") == "z"


def test_code_that_others_could_write_is_not_run(lab):
    lab.configure({"demo": demo(scope="global")})
    assert lab.host("demo").call("echo", text="x") == "x"
    newer = newer_code(lab)
    os.chmod(newer, 0o777)
    assert "only you can write" in control(lab, "upgrade", file=newer)["error"]["message"]
    assert "error" in control(lab, "upgrade", file=lab.path("nothing.py"))
    assert "error" in control(lab, "upgrade", file="relative.py")
    assert lab.status()["daemon"]["upgrades"] == 0


def test_the_code_is_never_exchanged_on_the_word_of_an_http_caller(web):
    status, _, _ = web.send("POST", "/v1/upgrade", {"file": MCPX})
    assert status == 404 and web.lab.status()["daemon"]["upgrades"] == 0


def test_a_daemon_without_work_ends_and_the_next_call_starts_another(lab):
    lab.configure({"demo": demo(scope="session")}, idleExit="500ms")
    host = lab.host("demo")
    daemon = lab.daemon_pid()
    assert host.call("echo", text="x") == "x"
    host.close()
    lab.wait_gone(daemon)
    assert lab.run("status").returncode == 1
    assert lab.command("call", "demo.echo", "text=again").strip() == "again"


@pytest.mark.parametrize("thing", ["stale socket", "lock file", "garbage record", "damaged cache"])
def test_what_a_dead_daemon_left_is_no_obstacle(lab, thing):
    lab.configure({"demo": demo(scope="global")})
    assert lab.command("call", "demo.echo", "text=x").strip() == "x"
    record = lab.status()["daemon"]
    lab.command("stop")
    state = os.path.join(lab.state, "mcpx")
    if thing == "stale socket":
        with socket.socket(socket.AF_UNIX) as dead:
            os.makedirs(os.path.dirname(record["socket"]), mode=0o700, exist_ok=True)
            dead.bind(record["socket"])
    elif thing == "lock file":
        for name in os.listdir(state):
            if name.endswith(".lock"):
                with open(os.path.join(state, name), "w") as file:
                    file.write(str(os.getpid()))
    elif thing == "damaged cache":
        for folder, _, files in os.walk(os.path.join(state, "cache")):
            for name in files:
                with open(os.path.join(folder, name), "w") as file:
                    file.write("{half")
        assert "echo" in lab.host("demo").tools()
    else:
        name = [n for n in os.listdir(state) if n.endswith(".lock")][0]
        for path in (os.path.join(state, name.replace(".lock", ".json")), os.path.join(state, "children", "x.json")):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write("{half")
    assert lab.command("call", "demo.echo", "text=x").strip() == "x"
    if thing == "garbage record":
        with contextlib.suppress(OSError):
            os.remove(os.path.join(state, "children", "x.json"))


@pytest.mark.parametrize("how", ["removed", "a file in its place"])
def test_a_state_directory_that_vanishes_stops_nobody_and_is_made_again(lab, how):
    lab.configure({"demo": demo(scope="session"), "other": demo(scope="global")}, backoff_first="50ms", backoff_max="50ms")
    host = lab.host("demo")
    assert host.call("set", value="kept") == "ok"
    state, aside = os.path.join(lab.state, "mcpx"), lab.path("aside")
    os.rename(state, aside)
    if how == "a file in its place":
        open(state, "w").close()
    assert host.call("get") == "kept"
    newcomer = lab.host("demo", "other")
    assert newcomer.call("other_echo", text="x") == newcomer.call("demo_echo", text="x") == "x"
    pid = newcomer.whoami(prefix="demo_")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert newcomer.whoami(prefix="demo_")["pid"] != pid
    assert lab.run("status").returncode == 0
    if how == "removed":
        shutil.rmtree(state, ignore_errors=True)
    else:
        os.remove(state)
    os.rename(aside, state)
    assert host.call("get") == "kept"
    assert lab.host("demo").call("echo", text="x") == "x"
    daemon = lab.daemon_pid()
    lab.command("restart", "other")
    assert newcomer.call("other_echo", text="x") == "x" and lab.daemon_pid() == daemon


def test_a_runtime_directory_that_vanishes_is_made_again(lab):
    lab.configure({"demo": demo(scope="session")})
    host = lab.host("demo")
    assert host.call("set", value="kept") == "ok"
    daemon = lab.daemon_pid()
    shutil.rmtree(os.path.join(lab.runtime, "mcpx"))
    assert host.call("get") == "kept"
    lab.wait_for("the door", lambda: lab.run("status").returncode == 0)
    assert lab.daemon_pid() == daemon
    assert lab.host("demo").call("echo", text="x") == "x" and host.call("get") == "kept"
    assert len(daemons(lab)) == 1
    # And what is needed after a crash is there again.
    lab.wait_for("a door of a holder", lambda: glob.glob(os.path.join(lab.runtime, "mcpx", "*.hold")))
    kill_daemon(lab)
    result = host.result(host.begin("get"))
    assert text_of(result) == "kept" and RESTARTED not in result.get("_meta", {})


@pytest.mark.parametrize("damage", [b"", b"\0" * 7, b"\xff" * 32, b"x" * 100000], ids=["empty", "short", "garbage", "long"])
def test_damaged_secrets_are_made_anew(lab, damage):
    web = Web(lab, demo=demo(scope="global"), auth="token")
    folder = os.path.join(lab.state, "mcpx")
    lab.command("url", "demo", "--json")
    lab.command("stop")
    for name in ("secret", "token"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(damage)
    told = lab.command("url", "demo", "--json")
    lab.wait_for("the door", web.is_open)
    head = dict(told["headers"])
    assert len(head["Authorization"]) > 30
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}}
    assert web.send("POST", "/mcp/demo", body, head)[0] == 200
    assert web.send("POST", "/mcp/demo", body)[0] == 401


@pytest.mark.parametrize("long_name", ["r" * 90, "r" * 200, "漢字 with space " * 5])
def test_a_runtime_directory_too_long_for_a_socket_is_no_obstacle(lab, long_name):
    lab.configure({"demo": demo(scope="global")})
    lab.env["XDG_RUNTIME_DIR"] = lab.directory(long_name)
    host = lab.host("demo")
    assert host.call("echo", text="x") == "x"
    assert lab.command("call", "demo.whoami", "--json")["structuredContent"]["pid"] == host.whoami()["pid"]
    assert len(lab.status()["daemon"]["socket"].encode()) < 104


def test_launchers_with_and_without_a_runtime_directory_meet(lab):
    lab.configure({"demo": demo(scope="global")})
    pid = lab.host("demo").whoami()["pid"]
    for value in (None, lab.path("nowhere")):
        env = {key: v for key, v in lab.env.items() if key != "XDG_RUNTIME_DIR"}
        if value:
            env["XDG_RUNTIME_DIR"] = value
        done = subprocess.run([sys.executable, MCPX, "call", "demo.whoami", "--json"], env=env, cwd=lab.work,
                              stdout=subprocess.PIPE, timeout=PATIENCE_S)
        assert json.loads(done.stdout)["structuredContent"]["pid"] == pid


# ---------------------------------------------------------------------------
# Shim: it stays while its host does
# ---------------------------------------------------------------------------

def test_shim_json_without_the_json_module_is_json():
    value = {"a": ["x\u00e9\ud800\n\"", 1, 2.5, None, True, {"b": []}], "c": {}, "": "\x00"}
    assert json.loads(mcpx.to_json(value)) == value


@pytest.mark.parametrize("kind", ["pipe", "socket", "file", "null"])
def test_shim_writes_whole_and_in_order_to_any_descriptor_without_changing_its_flags(kind, tmp_path):
    import socket
    import threading
    if kind == "pipe":
        read_fd, write_fd = os.pipe()
    elif kind == "socket":
        ends = [end.detach() for end in socket.socketpair()]
        read_fd, write_fd = ends
    else:
        path = str(tmp_path / "out") if kind == "file" else os.devnull
        write_fd, read_fd = os.open(path, os.O_WRONLY | os.O_CREAT), None
    writer, expected = mcpx.HostWriter(write_fd), b""
    for number in range(300):
        data = (b"%d" % number) * random.choice((1, 100, 20000)) + b"\n"
        writer.put(data)
        expected += data
    received = []

    def read():
        data = os.read(read_fd, 50000)
        while data:
            received.append(data)
            data = os.read(read_fd, 50000)
    reader = threading.Thread(target=read, daemon=True)
    if read_fd is not None:
        if kind != "file":
            assert not writer.flush(), "a full pipe must not block the writer"
        reader.start()
    deadline = time.monotonic() + 20
    while not writer.flush():
        assert time.monotonic() < deadline
    assert os.get_blocking(write_fd) and writer.pending_bytes == 0
    if writer._socket is not None:
        writer._socket.close()
    for fd in {write_fd, writer._own_fd} - {None}:
        os.close(fd)
    if read_fd is not None:
        reader.join(20)
        assert not reader.is_alive()
        os.close(read_fd)
        assert b"".join(received) == expected
    elif kind == "file":
        assert (tmp_path / "out").read_bytes() == expected


def test_shim_loads_next_to_nothing(tmp_path):
    """Sets do not flake, milliseconds do: which modules has a shim loaded when it has served a host?"""
    config = tmp_path / "config.json"
    command = mcpx.own_command("demo-server")
    config.write_text(json.dumps({"mcpServers": {"demo": {"command": command[0], "args": command[1:]}}}))
    (tmp_path / "run").mkdir(mode=0o700)
    env = dict(os.environ, HOME=str(tmp_path), MCPX_CONFIG=str(config), XDG_STATE_HOME=str(tmp_path / "state"),
               XDG_CACHE_HOME=str(tmp_path / "cache"), XDG_RUNTIME_DIR=str(tmp_path / "run"))
    env.pop("MCPX_SESSION_ID", None)
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize",
             "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}}
    request = json.dumps(hello).encode() + b"\n"

    def modules(*arguments, data=b""):
        done = subprocess.run([sys.executable, "-X", "importtime", "-I", "-S", "-c"] + list(arguments), input=data,
                              env=env, capture_output=True, timeout=60)
        names = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if line.startswith("import time:")}
        return names, done.stdout
    try:
        shim = mcpx.own_command("serve", "demo")[4:]
        modules(*shim, data=request)     # starts the daemon and compiles
        loaded, answer = modules(*shim, data=request)
        assert json.loads(answer)["result"]["serverInfo"]["name"] == "demo"
        bare, _ = modules("import os, time")
        assert loaded - bare == {"select", "_socket", "_json"}
    finally:
        subprocess.run(mcpx.own_command("stop"), env=env, capture_output=True, timeout=60)


def started_from(lab, *arguments, request=None, env=None):
    """Run this file as a host does and return (whether a part of it was loaded, what it wrote, its exit status).

    The module `mcpx` of the process is asked as it ends: the code at the head is run, then one line more.
    """
    code = mcpx.boot_code()
    # The head's last word is main(), which does not come back.
    asked = code.replace('.split(b"<boot>")[2])', '.split(b"<boot>")[2].replace(b"module.main()", b"sys.stderr.write('
                         '(\\"part\\" if module.IS_PART else \\"whole\\") + chr(10)); module.main()"))')
    assert asked != code
    done = subprocess.run([sys.executable, "-I", "-S", "-c", asked, MCPX, *arguments], env=dict(lab.env, **(env or {})),
                          cwd=lab.work, input=request, capture_output=True, timeout=60)
    return done.stderr.decode().split("\n")[0], done.stdout, done.returncode


@pytest.fixture
def fresh_cache(lab):
    """A byte-code cache of the test's own, and where the shim's part would be in it."""
    lab.env["XDG_CACHE_HOME"] = lab.directory("cache")
    lab.configure({"demo": demo(scope="global")})
    return lambda: [str(path) for path in Path(lab.path("cache")).rglob("*.shim")]


HELLO_LINE = (json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}}) + "\n").encode()


def test_a_shim_loads_its_part_of_the_file_and_no_more(lab, fresh_cache):
    how, answer, status = started_from(lab, "serve", "demo", request=HELLO_LINE)
    assert (how, status) == ("whole", 0) and json.loads(answer)["result"]
    part, = fresh_cache()
    how, answer, status = started_from(lab, "serve", "demo", request=HELLO_LINE)
    assert (how, status) == ("part", 0) and json.loads(answer)["result"]
    assert os.path.getsize(part) < os.path.getsize(part[:-4] + "pyc") / 8
    # What is no plain serve goes on as ever, from a part as well: an unknown server, an option, none at all.
    for arguments, said in ((["serve", "nobody"], "nobody"), (["serve"], "demo"), (["serve", "--nonsense"], "--nonsense")):
        done = lab.run(*arguments, input=HELLO_LINE.decode())
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], lambda data: b"x" * len(data),
    lambda data: bytes(8) + data[8:]], ids=["empty", "cut off", "a byte", "all", "of another source"])
def test_a_damaged_part_of_the_file_is_not_used_and_made_anew(lab, fresh_cache, damage):
    started_from(lab, "serve", "demo", request=HELLO_LINE)
    part, = fresh_cache()
    good = Path(part).read_bytes()
    Path(part).write_bytes(damage(good))
    how, answer, status = started_from(lab, "serve", "demo", request=HELLO_LINE)
    assert (how, status) == ("whole", 0) and json.loads(answer)["result"]
    assert started_from(lab, "serve", "demo", request=HELLO_LINE)[0] == "part"


@pytest.mark.parametrize("trouble", ["others may write there", "a file stands in the way"])
def test_a_shim_without_a_private_cache_loads_everything_and_works(lab, fresh_cache, trouble):
    if trouble == "a file stands in the way":
        Path(lab.path("cache", "mcpx")).write_text("")
    else:
        os.mkdir(lab.path("cache", "mcpx"))
        os.chmod(lab.path("cache", "mcpx"), 0o777)
    for _ in range(2):
        how, answer, status = started_from(lab, "serve", "demo", request=HELLO_LINE)
        assert (how, status) == ("whole", 0) and json.loads(answer)["result"]
    assert fresh_cache() == []


def test_a_shim_that_has_only_its_part_does_without_a_daemon_where_none_can_be_had(lab, fresh_cache):
    started_from(lab, "serve", "demo", request=HELLO_LINE)
    lab.command("stop")
    shutil.rmtree(lab.state)
    Path(lab.state).write_text("no directory")
    try:
        host = lab.host("demo")
        assert host.call("echo", text="alone") == "alone" and host.close() == 0
    finally:
        os.remove(lab.state)


def test_shim_every_name_that_its_part_uses_is_in_it(monkeypatch):
    """The names of its code are known here, in the language, or asked for after the rest has been loaded."""
    for made_later in ("_decoder", "_ID_PATTERN"):
        monkeypatch.setattr(mcpx, made_later, None)      # as in a process that has read nothing yet
    with open(MCPX, encoding="utf-8") as file:
        parts = mcpx._part_of(compile(file.read(), MCPX, "exec"))
    marshal.loads(marshal.dumps(parts))
    there = {name for _, name, _ in parts} | set(vars(builtins)) | {"__file__", "__name__", "__spec__", "__qualname__",
                                                                  "__module__"}

    def used(code):
        local = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in local:
                yield step.argval
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                yield from used(const)
    missing = {(name, other) for kind, name, value in parts if kind in ("function", "class") for other in used(value[0])
               if other not in there}
    assert missing == {("main", "run_from_byte_code"), ("main", "keep_part"), ("main", "start_over"),
                       ("main", "parse_command_line"), ("main", "show"), ("main", "complain"), ("main", "Output"),
                       ("run_shim", "run_standalone")}


@pytest.mark.parametrize("line", [
    "status", "status --json", "ls", "ls demo", "ls demo extra", "call", "call demo.echo", "call demo.echo a=b c=d --json",
    "call --json demo.echo", "call demo.echo -- -x", "why", "why demo", "stop", "stop demo", "restart", "answer 1 accept a=b",
    "answer 1 perhaps", "answer 1", "logs", "logs demo", "logs -f", "reload", "url demo --json --json", "serve", "serve a b",
    "serve --json", "demo-server", "doctor x", "status ''", "call demo.echo --timeout 3"])
def test_options_without_argparse_are_those_of_argparse(line, capsys):
    name, *words = shlex.split(line)
    command = mcpx.COMMANDS[name]
    found = command.plain_options(words)
    try:
        expected = vars(command.parser(name).parse_args(words))
    except SystemExit:
        expected = None
    if found is not None:
        assert vars(found) == expected
    assert found is not None or expected is None or any(w.startswith("-") for w in words), "it could have been told"


@pytest.mark.parametrize("where", ["full", "closed"])
def test_a_command_whose_output_cannot_be_written_says_so(lab, where):
    lab.configure({"demo": demo()})
    if where == "full" and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    shell = '"$@" >/dev/full' if where == "full" else '"$@" >&-'
    done = subprocess.run(["sh", "-c", shell, "sh"] + program("settings"), env=lab.env, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("mcpx: the output cannot be written") and done.stderr.count(b"\n") == 1


def test_shim_the_files_head_is_shell_and_python_and_names_its_licence():
    with open(MCPX, encoding="utf-8") as file:
        head = file.read(8192)
    assert len(head[:4096].split("<boot>")) == 4 and "MIT" in head and os.access(MCPX, os.X_OK)
    boot = head.split("<boot>")[2]
    assert "'" not in boot and "\\" not in boot
    compile(boot, "boot", "exec")


@pytest.mark.parametrize("end", ["eof", "eof in a call", "sigterm"])
def test_a_shim_ends_with_its_host_before_the_host_loses_patience(lab, end):
    """Hosts send SIGTERM two seconds after the end of input."""
    lab.configure({"plain": lab.role("upstream", "plain", scope="global")}, shim_drainTimeout=None,
                  shim_closeTimeout=None)
    host = lab.host("plain")
    if end == "eof in a call":
        host.begin("hold", until=lab.gate("never"))
        lab.wait_begun("plain")
    if end == "sigterm":
        host.process.send_signal(signal.SIGTERM)
    assert host.close(2) == 0


def test_a_shim_outlives_a_stopped_daemon_and_starts_one_for_the_next_request(lab):
    lab.configure({"demo": demo(scope="session")})
    host, other = lab.host("demo"), lab.host("demo")
    host.call("set", value="lost on purpose")
    daemon = lab.daemon_pid()
    lab.command("stop")
    assert not is_running(daemon) and host.process.poll() is None
    # A daemon that was stopped stays so until somebody wants something.
    assert lab.run("status").returncode == 1
    result = host.result(host.begin("get"))
    assert text_of(result) == "" and RESTARTED in result["_meta"]
    assert other.call("echo", text="x") == "x"
    assert lab.daemon_pid() != daemon


def test_a_listener_that_is_no_daemon_does_not_hold_a_host_for_ever(lab, monkeypatch):
    """Something accepts on the socket and says nothing; the host gets an answer, good or bad, within seconds."""
    impatient(lab, monkeypatch, HELLO_WAIT_S=("5.0", "0.5"))
    lab.configure({"demo": demo(scope="session")})
    lab.command("call", "demo.echo", "text=x")
    path = lab.status()["daemon"]["socket"]
    lab.command("stop")
    with socket.socket(socket.AF_UNIX) as squatter:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        squatter.bind(path)
        squatter.listen(5)
        host = lab.start("demo")
        host.answer(host.hello(), 30)
        host.close()
    if lab.run("status").returncode:
        with contextlib.suppress(OSError):
            os.unlink(path)


@pytest.mark.parametrize("why", ["asked for", "no socket can be had"])
def test_a_shim_can_do_without_a_daemon(lab, why):
    lab.configure({"demo": demo(scope="session")})
    if why == "asked for":
        host = lab.start("demo", "--standalone")
    else:
        shutil.rmtree(lab.path("state"))
        with open(lab.path("state"), "w") as file:
            file.write("no directory")
        host = lab.start("demo")
    host.greet()
    host.call("set", value="kept")
    assert host.call("get") == "kept"
    pid = host.whoami()["pid"]
    assert [p for p in lab.processes() if p not in (host.pid, pid)] == []
    if why != "asked for":
        assert tail(host.errors_path).strip(), "it runs alone and does not say so"
    assert host.close() == 0
    lab.wait_gone(pid)
    if why != "asked for":
        os.remove(lab.path("state"))


def test_serving_an_unknown_server_says_which_names_there_are(lab):
    lab.configure({"demo": demo()})
    host = lab.start("demmo")
    with contextlib.suppress(OSError):
        host.hello()
    host.expect(lambda m: "error" in m or "end" in m, "a refusal")
    with contextlib.suppress(OSError):
        host.process.stdin.close()
    host.process.wait(PATIENCE_S)
    said = tail(host.errors_path) + json.dumps([m for m in host.seen if "error" in m])
    assert "demmo" in said and "demo" in said.replace("demmo", "")


# ---------------------------------------------------------------------------
# Commands: what a person asks for
# ---------------------------------------------------------------------------

def test_commands_say_what_they_did_and_their_status_says_how_it_went(lab):
    lab.configure({"demo": demo(scope="session"), "off": dict(demo(), disabled=True)})
    nothing = lab.run("status")
    assert nothing.returncode == 1 and nothing.stdout + nothing.stderr
    assert lab.command("call", "demo.echo", "text=hello world").strip() == "hello world"
    assert lab.command("call", "demo.add", "n=41", "--session", "s").strip() == "41"
    assert lab.command("call", "demo.add", "--json-args", '{"n": 1}', "--session", "s").strip() == "42"
    assert lab.command("call", "demo.echo", "text=x", "--json")["content"] == [{"type": "text", "text": "x"}]
    failed = lab.run("call", "demo.fail", "message=no luck")
    assert failed.returncode == 1 and "no luck" in failed.stdout + failed.stderr
    for words in (["call", "demo"], ["call", "demo.echo", "text"], ["no-such-command"], ["call"]):
        assert lab.run(*words).returncode == 2, words
    for words in (["call", "demmo.echo", "text=x"], ["call", "demo.never"], ["why", "demmo"], ["stop", "demmo"]):
        done = lab.run(*words)
        assert done.returncode in (1, 2) and done.stderr.strip() and "Traceback" not in done.stderr, words
    assert "demo" in lab.command("ls") and "echo" in lab.command("ls", "demo")
    assert [t["name"] for t in json.loads(lab.run("ls", "demo", "--json").stdout)["tools"] if t["name"] == "echo"]
    assert lab.command("status") and lab.command("settings") and lab.command("config", "--check")
    assert lab.command("status", "--json")["daemon"]["config"] == lab.config
    # A session that the command line made up ends with the command; one that was named stays.
    lab.wait_for("one instance", lambda: [i["key"] for i in lab.instances("demo")] == ["session:s"])
    (instance,) = lab.instances("demo")
    lab.command("stop", instance["id"])
    assert not is_running(instance["pid"])
    assert lab.command("stop") and lab.run("status").returncode == 1
    assert lab.run("stop").returncode in (0, 1)


def test_two_configurations_have_two_daemons(lab):
    lab.configure({"demo": demo(scope="global")})
    pid = lab.host("demo").whoami()["pid"]
    other = lab.path("other.json")
    shutil.copy(lab.config, other)
    try:
        for words in (["--config", other, "call", "demo.whoami", "--json"],
                      ["call", "demo.whoami", "--json", "--config", other]):
            assert lab.command(*words)["structuredContent"]["pid"] != pid
        by_env = lab.command("call", "demo.whoami", "--json", env={"MCPX_CONFIG": other})
        assert by_env["structuredContent"]["pid"] not in (pid,)
        assert lab.status()["daemon"]["pid"] != lab.command("status", "--json", "--config", other)["daemon"]["pid"]
    finally:
        lab.command("stop", "--config", other)


def test_a_restart_gives_a_new_process_and_says_so(lab):
    lab.configure({"demo": demo(scope="global")})
    host = lab.host("demo")
    pid = host.whoami()["pid"]
    lab.command("restart", "demo")
    lab.wait_gone(pid)
    result = host.result(host.begin("whoami"))
    assert result["structuredContent"]["pid"] != pid and result["_meta"][RESTARTED]["reason"]


def test_logs_show_what_a_server_complained_about_and_do_not_grow_for_ever(lab):
    lab.configure({"flood": lab.role("flood", None, scope="global")}, **{"log_maxBytes": "200KiB", "log_files": 2})
    host = lab.host("flood")
    assert host.call("flood", kind="stderr", count=10_000) == "complained"
    assert "complaint 9999" in lab.wait_for(
        "the last complaint", lambda: "complaint 9999" in lab.command("logs", "flood") and lab.command("logs", "flood"))
    logs = os.path.join(lab.state, "mcpx", "logs")
    sizes = {name: os.path.getsize(os.path.join(logs, name)) for name in os.listdir(logs)}
    assert all(size <= 220 << 10 for size in sizes.values()), sizes
    assert sum(size for name, size in sizes.items() if "flood" in name) <= 3 * (220 << 10)
    assert len(lab.command("logs", "flood", "-n", "5").splitlines()) <= 6


def test_the_log_of_the_daemon_is_rotated_as_the_others_are(lab):
    lab.configure({"demo": demo()}, log_maxBytes="2KiB", log_files=2)
    host = lab.host("demo")
    log, = glob.glob(os.path.join(lab.state, "mcpx", "logs", "daemon*.log"))
    for n in range(40):
        lab.configure({"demo": demo(), "new%d." % n: demo()}, log_maxBytes="2KiB", log_files=2)
        lab.wait_for("the change", lambda: host.call("echo", text="x") and "new%d." % n in tail(log))
    sizes = {path: os.path.getsize(path) for path in glob.glob(log + "*")}
    assert sorted(sizes) == [log, log + ".1"] and max(sizes.values()) <= 2 << 10, sizes


def test_the_demonstration_needs_nothing(lab):
    done = lab.run("demo", within=90)
    assert done.returncode == 0, done.stderr
    assert all(scope in done.stdout for scope in SCOPES)


# ---------------------------------------------------------------------------
# All at once
# ---------------------------------------------------------------------------

def test_after_a_storm_everybody_has_one_answer_and_nothing_is_left(lab):
    """16 hosts with 10 calls each, random delays and cancels; servers are killed, two hosts vanish."""
    rng = random.Random(4711)
    lab.configure({"demo": demo(scope="global"), "mine": demo(scope="session"),
                   "alone": demo(scope="global", sharing="exclusive")},
                  backoff_first="10ms", backoff_max="50ms", stop_eofGrace="1s")
    hosts = [lab.start("demo", "mine", "alone") for _ in range(16)]
    for host in hosts:
        host.greet(60)
    victims = [hosts[3], hosts[11]]
    calls = []  # (host, id, what its text must hold, cancelled?)
    for n in range(10):
        for number, host in enumerate(hosts):
            if host in victims and n == 7:
                host.kill()
            if host in victims and n >= 7:
                continue
            word = "%d-%d" % (number, n)
            server = rng.choice(("demo_", "mine_", "alone_"))
            if rng.random() < 0.5:
                host_id = host.begin(server + "echo", {"progressToken": n}, text=word)
            else:
                host_id = host.begin(server + "sleep", {"progressToken": n}, seconds=rng.random() / 10,
                                     every=0.02, text=word)
            cancelled = rng.random() < 0.2
            if cancelled:
                host.notify("notifications/cancelled", requestId=host_id)
            calls.append((host, host_id, word, cancelled))
        if n in (2, 5, 8):
            for pid in rng.sample(lab.pids(None), 2):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    for host, host_id, word, cancelled in calls:
        if host in victims or cancelled:
            continue
        answer = host.answer(host_id, 60)
        assert len(host.answers(host_id)) == 1
        if "error" in answer:
            assert answer["error"]["code"] in (-32000, -32603), answer
        else:
            assert word in text_of(answer["result"])
    for host, host_id, word, cancelled in calls:
        assert not cancelled or len(host.answers(host_id)) <= 1
    lab.wait_for("empty tables", lambda: at_rest(lab))
    assert len(lab.status()["hosts"]) == 14
    for host in hosts:
        if host not in victims:
            host.close()
    lab.wait_for("no host", lambda: lab.status()["hosts"] == [])
    lab.wait_for("no private instance", lambda: lab.instances("mine") == [])
    lab.wait_for("empty tables", lambda: at_rest(lab))


# ---------------------------------------------------------------------------
# Cases: what users of such tools have reported, each named after what they saw
#
# Most cases are shown by the tests above; here are those that need more than one part of mcpx at once. A fake is a
# server written out by its test: a script of a few lines over the skeleton below, that starts quickly and notes
# what happens to it. Where a machine lacks what a case needs (another user, /proc, a kernel's namespaces), the
# test is skipped and says why.
# ---------------------------------------------------------------------------

FAKE = r'''
import json, os, signal, subprocess, sys, threading, time
NOTES = os.path.splitext(os.path.abspath(__file__))[0] + ".notes"
HELLO = {"capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": "fake", "version": "1"}}

def note(*words):
    fd = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, (os.getpid(), *words))) + "\n").encode())
    os.close(fd)

def write(data):
    while data:
        data = data[os.write(1, data):]

def send(**message):
    write(json.dumps(dict(message, jsonrpc="2.0")).encode() + b"\n")

def say(host_id, text):
    send(id=host_id, result={"content": [{"type": "text", "text": text}]})

def tools():
    return ["echo", "pid"]

def call(name, arguments, host_id):
    say(host_id, str(os.getpid()) if name == "pid" else arguments.get("text", ""))

def hello(params, host_id):
    send(id=host_id, result=dict(HELLO, protocolVersion=params["protocolVersion"]))

def listed(host_id):
    send(id=host_id, result={"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools()]})

def take(message):
    method, host_id, params = message.get("method"), message.get("id"), message.get("params") or {}
    note("got", method, host_id)
    if method == "initialize":
        hello(params, host_id)
    elif method == "tools/list":
        listed(host_id)
    elif method == "tools/call":
        call(params["name"], params.get("arguments") or {}, host_id)
    elif method == "ping":
        send(id=host_id, result={})
    elif method and host_id is not None:
        send(id=host_id, error={"code": -32601, "message": "no " + method})

def start():
    pass

def end():
    pass

def run():
    for line in sys.stdin.buffer:
        take(json.loads(line))
'''
FAKE_END = '''
note("start")
start()
run()
note("eof")
end()
'''


def fake(lab, name, body="", *arguments, **settings):
    """A server of a few lines: what it does otherwise than the skeleton is in `body`."""
    return entry(["-I", "-S", script(lab, name, body), *arguments], settings)


def script(lab, name, body=""):
    path = lab.path(name + ".py")
    with open(path, "w") as file:
        file.write(FAKE + textwrap.dedent(body) + FAKE_END)
    return path


def notes(lab, name, *words):
    """What a fake noted that begins with these words, in order, as [pid, word, …]."""
    try:
        with open(lab.path(name + ".notes")) as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:
        return []
    words = [str(word) for word in words]
    return [[int(row[0]), *row[1:]] for row in rows if row[1:1 + len(words)] == words]


def starts(lab, name):
    return [row[0] for row in notes(lab, name, "start")]


def zombies_of(pid):
    """Children of a process that have ended and were not collected."""
    listing = subprocess.run(["ps", "-A", "-o", "ppid=,pid=,stat="], stdout=subprocess.PIPE).stdout.decode()
    rows = [line.split() for line in listing.splitlines()]
    return [int(row[1]) for row in rows if int(row[0]) == pid and row[2].startswith("Z")]


def refused(host, tool, within=PATIENCE_S, **arguments):
    """The error that a call is answered with."""
    answer = host.answer(host.begin(tool, **arguments), within)
    assert "error" in answer, answer
    return answer["error"]


def reset(lab, **settings):
    """Change settings of a daemon that runs; `_` in a name stands for a dot."""
    with open(lab.config) as file:
        config = json.load(file)
    config["mcpx"].update((name.replace("_", "."), value) for name, value in settings.items())
    lab.write_config(json.dumps(config))
    lab.command("reload")


# -- processes: how they start and end

def test_a_server_behind_two_shells_that_do_not_pass_on_the_end_leaves_no_process_and_no_zombie(lab):
    """The shells get no end of input, and only they are the daemon's children."""
    path = script(lab, "deep", "def end():\n    time.sleep(600)\n")
    inner = "exec 3<&0; '%s' -S '%s' <&3 & wait" % (sys.executable, path)
    lab.configure({"deep": {"command": "sh", "args": ["-c", "exec 4<&0; sh -c \"%s\" <&4 & wait" % inner],
                            "mcpx": {"scope": "session", "idleTimeout": "300ms"}}},
                  stop_eofGrace="200ms", stop_termGrace="200ms")
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        host = lab.host("deep")
        daemon = lab.daemon_pid()
        for leave in (host.close, lambda: None):    # the host leaves; then the instance of a named session is idle
            pid = int(host.call("pid", {SESSION: "kept"} if leave is not host.close else None))
            layers = [p for p, command in lab.processes().items() if path in command]
            assert pid in layers and len(layers) >= 3
            leave()
            lab.wait_gone(*layers, within=10)
            lab.wait_for("no zombie", lambda: zombies_of(daemon) == [])
            host = lab.host("deep")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("end", ["idle", "killed", "stop"])
def test_a_browser_that_left_its_session_and_its_environment_ends_with_its_server(lab, end):
    """Neither the process group nor a mark in the environment leads to it, only its having been a descendant."""
    marker = lab.path("browser")
    lab.configure({"browser": fake(lab, "browser", """
        QUIET = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        def call(name, arguments, host_id):
            command = ["sh", "-c", "sleep 600; :", sys.argv[1]]
            browser = subprocess.Popen(command, env={}, start_new_session=True, **QUIET)
            say(host_id, str(browser.pid))
        """, marker, scope="global", **({"idleTimeout": "400ms"} if end == "idle" else {}))},
        stop_eofGrace="300ms", stop_termGrace="300ms")
    twin = subprocess.Popen(["sh", "-c", "sleep 600; :", marker], env={}, start_new_session=True)
    try:
        host = lab.host("browser")
        browser = int(host.call("open"))
        (server,) = starts(lab, "browser")
        assert os.getsid(browser) == browser
        if end == "killed":
            time.sleep(0.3)  # not a wait: the age of the browser; what was started just now cannot have been seen
            lab.status()
            os.kill(server, signal.SIGKILL)
        elif end == "stop":
            lab.command("stop")
        lab.wait_gone(server, browser)
        assert is_running(twin.pid)
    finally:
        for pid in [twin.pid] + [p for p, command in lab.processes().items() if command.endswith(marker + " ")]:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        twin.wait()


def test_stopping_is_bounded_and_says_which_server_had_to_be_killed(lab):
    body = """
        def start():
            signal.signal(signal.SIGTERM, {"good": signal.SIG_DFL, "deaf": signal.SIG_DFL, "stone": signal.SIG_IGN,
                                           "slow": lambda *_: time.sleep(30)}[sys.argv[1]])
        def end():
            time.sleep(0 if sys.argv[1] == "good" else 600)
        """
    names = ("good", "deaf", "stone", "slow")
    lab.configure({name: fake(lab, name, body, name, scope="global") for name in names},
                  stop_eofGrace="300ms", stop_termGrace="300ms")
    host = lab.host(*names)
    pids = {name: int(host.call(name + "_pid")) for name in names}
    began = time.monotonic()
    said = lab.command("stop")
    took = time.monotonic() - began
    assert not any(map(is_running, pids.values())), "it returned before they were gone"
    assert took < 5
    killed = said.partition("children")[2]
    assert "stone" in killed and "slow" in killed, said
    assert "good" not in killed and "deaf" not in killed, said


def test_a_call_that_is_cut_off_by_a_stop_gets_one_clear_answer(lab):
    lab.configure({"plain": fake(lab, "plain", "def call(name, arguments, host_id):\n    note('call')\n")},
                  drainTimeout="100ms")
    host = lab.host("plain")
    held = host.begin("echo", text="x")
    lab.wait_for("the call", lambda: notes(lab, "plain", "call"))
    lab.command("stop")
    assert is_lost(host.answer(held)["error"])
    assert len(host.answers(held)) == 1 and host.process.poll() is None
    assert len(notes(lab, "plain", "call")) == 1, "the call was made twice"


@pytest.mark.parametrize("signalled", [False, True], ids=["at the end of input", "at SIGTERM"])
def test_a_container_client_is_given_the_time_to_end_its_container(lab, signalled):
    """`docker run` cannot forward a KILL: the container is only ended by the client, which takes its time."""
    container = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    lab.configure({"docker": fake(lab, "docker", """
        def stop_container(*_):
            note("stopping")
            time.sleep(0.5)
            os.kill(int(sys.argv[1]), signal.SIGTERM)
            os._exit(0)
        def start():
            signal.signal(signal.SIGTERM, stop_container)
        def end():
            time.sleep(600) if sys.argv[2] == "True" else stop_container()
        """, str(container.pid), str(signalled))}, stop_eofGrace="1s", stop_termGrace="2s")
    try:
        host = lab.host("docker")
        host.call("pid")
        host.close()
        assert container.wait(PATIENCE_S) == -signal.SIGTERM, "it was left, or not ended by its client"
        assert [row[1] for row in notes(lab, "docker") if row[1] in ("eof", "stopping")] == ["eof", "stopping"]
    finally:
        container.kill()
        container.wait()


@pytest.mark.skipif(not shutil.which("git"), reason="the work tree is made with git")
def test_relative_commands_and_the_home_directory_are_found_and_servers_run_where_their_callers_work(lab):
    for folder in ("home", os.path.join("config", "mcpx")):
        path = os.path.join(lab.directory(folder, "bin"), "fake")
        with open(path, "w") as file:
            file.write("#!%s\n" % sys.executable + FAKE + "def call(name, arguments, host_id):\n    say(host_id, "
                       "json.dumps([os.path.realpath(os.getcwd()), os.path.abspath(__file__)]))\n" + FAKE_END)
        os.chmod(path, 0o755)
    lab.configure({
        "dotted": {"command": "./bin/fake", "mcpx": {"scope": "global"}},
        "bare": {"command": "bin/fake", "mcpx": {"scope": "cwd"}},
        "home": {"command": "~/bin/fake", "mcpx": {"scope": "worktree"}},
        "given": {"command": "${HOME}/bin/fake", "cwd": "~", "mcpx": {"scope": "session"}}})
    tree, folder = lab.directory("tree"), lab.directory("tree", "folder")
    git("init", cwd=tree)
    host = lab.host("dotted", "bare", "home", "given", cwd=folder)
    places = {name: json.loads(host.call(name + "_echo")) for name in ("dotted", "bare", "home", "given")}
    beside, at_home = (lab.path(*parts, "bin", "fake") for parts in (("config", "mcpx"), ("home",)))
    assert places == {"dotted": [lab.home, beside], "bare": [folder, beside], "home": [tree, at_home],
                      "given": [lab.home, at_home]}


def test_calls_whose_clients_vanish_or_whose_servers_crash_leave_no_process_behind(lab):
    """scope=call: a third of the calls is answered, a third loses its client, a third its server."""
    body = """
        def call(name, arguments, host_id):
            note("call", name)
            if name == "crash":
                os._exit(1)
            if name == "echo":
                say(host_id, "x")
        """
    web = Web(lab, percall=fake(lab, "percall", body, scope="call", max=3))
    good, leaver, doomed = lab.host("percall"), lab.host("percall"), lab.host("percall")
    params = {"_meta": MODERN_META, "name": "never", "arguments": {}}
    dropped = []
    for n in range(2):
        dropped.append(http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S))
        dropped[-1].request("POST", "/mcp/percall", json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}), {
            "Content-Type": "application/json", "Accept": BOTH_TYPES, "MCP-Protocol-Version": "2026-07-28",
            "Mcp-Method": "tools/call", "Mcp-Name": "never"})
    leaver.begin("never")
    lab.wait_for("three calls that never end", lambda: len(notes(lab, "percall", "call", "never")) == 3)
    crashing = [doomed.begin("crash") for _ in range(3)]
    fine = [good.begin("echo") for _ in range(3)]
    lab.wait_for("the others to wait", lambda: lab.status()["tables"]["waiting"] == 6)
    assert len(lab.pids("percall")) == 3
    for connection in dropped:
        connection.close()
    leaver.kill()
    assert [text_of(good.result(n)) for n in fine] == ["x"] * 3
    assert all(is_lost(doomed.answer(n)["error"]) for n in crashing)
    lab.wait_for("no instance", lambda: lab.instances("percall") == [])
    lab.wait_for("empty tables", lambda: at_rest(lab))
    lab.wait_gone(*starts(lab, "percall"))


def test_the_least_recently_used_session_makes_room_for_the_next(lab):
    web = Web(lab, plain=fake(lab, "plain", scope="session", max=3))
    reset(lab, keep="1ms")

    def pid(name):
        return int(web.tool("plain", "pid", {SESSION: name}))

    pids = {name: pid(name) for name in "abc"}
    assert pid("a") == pids["a"]
    for name, goes in (("d", "b"), ("e", "c"), ("f", "a")):
        pids[name] = pid(name)
        lab.wait_gone(pids[goes])
        assert len(lab.pids("plain")) == 3
    assert [pid(name) for name in "def"] == [pids[name] for name in "def"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads descriptors from /proc")
def test_a_terminal_that_is_interrupted_and_closed_ends_its_own_host_only(lab):
    """The daemon was started from that terminal; it keeps neither the terminal nor its signals."""
    lab.configure({"plain": fake(lab, "plain", """
        def call(name, arguments, host_id):
            note("call")
            while not os.path.exists(arguments["until"]):
                time.sleep(0.01)
            say(host_id, str(os.getpid()))
        """, scope="global")})
    terminal, window = pty.openpty()

    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    shim = subprocess.Popen([sys.executable, MCPX, "serve", "plain"], stdin=window, stdout=window, stderr=window,
                            cwd=lab.work, env=lab.env, start_new_session=True, preexec_fn=take_terminal)
    name = os.ttyname(window)
    os.close(window)
    os.write(terminal, as_line({"id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}}))
    lab.wait_for("the daemon", lambda: lab.run("status").returncode == 0)
    other = lab.host("plain")
    held = other.begin("hold", until=lab.gate("go"))
    lab.wait_for("the call", lambda: notes(lab, "plain", "call"))
    daemon, server = lab.daemon_pid(), starts(lab, "plain")[0]
    for pid in (daemon, server):
        assert os.getsid(pid) != shim.pid
        for fd in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(OSError):
                assert os.readlink("/proc/%d/fd/%s" % (pid, fd)) != name
    os.write(terminal, b"\x03")
    shim.wait(PATIENCE_S)
    os.close(terminal)
    lab.open_gate("go")
    assert text_of(other.result(held)) == str(server)
    assert lab.daemon_pid() == daemon


# -- servers that die, do not come up, or say nothing

def test_a_server_killed_while_idle_is_back_with_its_handshake_at_the_next_call(lab):
    """It refuses everything before its handshake, and comes back with another tool."""
    lab.configure({"strict": fake(lab, "strict", """
        STAGE = ["initialize", "notifications/initialized"]
        usual = take
        def take(message):
            if STAGE and message.get("method") != STAGE.pop(0):
                os._exit(4)
            usual(message)
        def tools():
            return ["echo", "pid"] + (["second-life"] if os.path.exists(sys.argv[1]) else [])
        """, lab.gate("later"), scope="global")}, backoff_first="20ms")
    one, two = lab.host("strict"), lab.host("strict")
    first = int(one.call("pid"))
    assert "second-life" not in one.tools() + two.tools()
    lab.open_gate("later")
    os.kill(first, signal.SIGKILL)
    lab.wait_gone(first)
    result = one.result(one.begin("pid"))
    second = int(text_of(result))
    assert second != first and result["_meta"][RESTARTED]["reason"]
    for host in (one, two):
        host.notification("notifications/tools/list_changed")
        lab.wait_for("the new tool", lambda: "second-life" in host.tools())
    assert [row[2] for row in notes(lab, "strict", "got") if row[0] == second][:2] == [
        "initialize", "notifications/initialized"]
    (row,) = [s for s in lab.status()["servers"] if s["name"] == "strict"]
    assert row["restarts"] == 1 and "SIGKILL" in row["lastError"]


NPX = """#!%s
import os, subprocess, sys, time
package = sys.argv[2]
install = os.path.join(%r, package.replace("/", "-"))
def note(word):
    with open(install + ".log", "a") as file:
        file.write(word + "\\n")
if not os.path.exists(install + ".done"):
    try:
        os.mkdir(install)
    except FileExistsError:
        note("collision")
        sys.stderr.write("npm error ENOTEMPTY: directory not empty, rename\\n")
        sys.exit(190)
    note("begin")
    # Another package may be installed at the same time, and has to be, before this one is done.
    while sys.argv[3] and not os.path.exists(os.path.join(%r, sys.argv[3] + ".log")):
        time.sleep(0.01)
    time.sleep(0.15)
    os.rename(install, install + ".done")
    note("end")
note("runs")
os.execv(%r, [%r, "-I", "-S", %r])
"""


def test_one_package_that_many_sessions_start_at_once_is_installed_once_at_a_time(lab):
    """npm's directory of a package is not locked: two installations at once break each other."""
    bins, installs = lab.directory("bin"), lab.directory("installs")
    with open(os.path.join(bins, "npx"), "w") as file:
        file.write(NPX % (sys.executable, installs, installs, sys.executable, sys.executable, script(lab, "plain")))
    os.chmod(os.path.join(bins, "npx"), 0o755)
    lab.configure({
        "one": {"command": "npx", "args": ["-y", "@scope/one", "two"], "mcpx": {"scope": "session"}},
        "again": {"command": "npx", "args": ["-y", "@scope/one", ""], "mcpx": {"scope": "global"}},
        "two": {"command": "npx", "args": ["-y", "two", "@scope-one"], "mcpx": {"scope": "session"}}})
    lab.env["PATH"] = bins + os.pathsep + lab.env["PATH"]
    hosts = [lab.start("one") for _ in range(3)] + [lab.start("again"), lab.start("two")]
    hellos = [host.hello() for host in hosts]
    for host, hello in zip(hosts, hellos):
        host.welcome = host.result(hello)
        host.notify("notifications/initialized")
    calls = [host.begin("echo", {SESSION: str(n)}, text="x") for n, host in enumerate(hosts)]
    assert [text_of(host.result(n)) for host, n in zip(hosts, calls)] == ["x"] * 5
    with open(os.path.join(installs, "@scope-one.log")) as file:
        words = file.read().split()
    assert words[:3] == ["begin", "end", "runs"] and words.count("runs") == len(words) - 2 >= 4, words


def test_a_package_runner_that_met_another_installation_is_tried_again(lab):
    """Somebody outside is installing the same package: ENOTEMPTY once, and nobody sees it."""
    bins = lab.directory("bin")
    with open(os.path.join(bins, "npx"), "w") as file:
        file.write("#!/bin/sh\nif [ -e '%s' ]; then exec '%s' -I -S '%s'; fi\n: >'%s'\n"
                   "echo 'npm error ENOTEMPTY: directory not empty' >&2\nexit 190\n" % (
                       lab.path("tried"), sys.executable, script(lab, "plain"), lab.path("tried")))
    os.chmod(os.path.join(bins, "npx"), 0o755)
    lab.configure({"one": {"command": "npx", "args": ["-y", "one"], "mcpx": {"scope": "global"}}}, backoff_first="50ms")
    lab.env["PATH"] = bins + os.pathsep + lab.env["PATH"]
    assert lab.host("one").call("echo", text="x") == "x"


def test_an_error_of_a_start_names_the_program_and_hides_what_is_secret(lab):
    """The secret is in the environment, an argument, what the server says of itself, and its name."""
    secret = "canary-31337"
    lab.configure({
        "missing": {"command": "no-such-program", "args": ["--token", "${SECRET}"], "env": {"API_KEY": "${SECRET}"}},
        "telling": fake(lab, "telling", """
            def start():
                sys.stderr.write("one\\ntwo\\nthree\\nfour\\nrefused: key " + os.environ["API_KEY"] + " has expired\\n")
                sys.stderr.flush()
                os._exit(2)
            """),
        "argued": fake(lab, "argued", """
            def start():
                sys.stderr.write("no access for " + sys.argv[1] + "\\n")
                sys.stderr.flush()
                os._exit(3)
            """, "--token=${SECRET}"),
        "crashing": fake(lab, "crashing", """
            def call(name, arguments, host_id):
                sys.stderr.write("dying with " + os.environ["API_KEY"] + "\\n")
                sys.stderr.flush()
                os._exit(4)
            """, scope="global"),
    }, coldWait="5s", log_level="debug", callTimeout="5s")
    config = json.load(open(lab.config))
    for name in ("telling", "crashing"):
        config["mcpServers"][name]["env"] = {"API_KEY": "${SECRET}"}
    lab.write_config(json.dumps(config))
    env = {"SECRET": secret}
    errors = {name: complaint(lab.start(name, env=env)) for name in ("missing", "telling", "argued", "crashing")}
    assert "no-such-program" in errors["missing"]["message"]
    for name, code, words in (("telling", 2, "has expired"), ("argued", 3, "no access"), ("crashing", 4, "dying")):
        assert words in errors[name]["message"] and "status %d" % code in errors[name]["message"], errors[name]
        assert sys.executable in errors[name]["message"] or name in errors[name]["message"]
    shown = [json.dumps(errors)] + [tail(host.errors_path) for host in lab.hosts]
    for words in (["status"], ["status", "--json"], ["doctor"], ["logs"], ["logs", "telling"], ["ls"], ["settings"],
                  ["why", "argued", "--json"], ["config", "--json"], ["call", "argued.echo"]):
        done = lab.run(*words, env=env)
        shown.append(done.stdout + done.stderr)
    for folder, _, files in os.walk(os.path.join(lab.state, "mcpx")):
        shown += [tail(os.path.join(folder, name), 1 << 20) for name in files]
    assert [text[max(0, text.index(secret) - 150):][:250] for text in shown if secret in text] == []


def test_status_tells_what_each_instance_is_and_why_something_is_not_shared(lab):
    half = "def call(name, arguments, host_id):\n    name == 'pid' and say(host_id, 'x')\n"
    dying = "def call(name, arguments, host_id):\n    os._exit(7)\n"
    lab.configure({"shared": fake(lab, "shared", half, scope="global"), "placed": fake(lab, "placed", scope="worktree"),
                   "doomed": fake(lab, "doomed", dying, scope="global")})
    one, two = lab.host("shared", "doomed"), lab.host("shared", "placed", cwd="/")
    one.call("shared_pid"), two.call("shared_pid"), two.call("placed_pid")
    held = one.begin("shared_echo")
    refused(one, "doomed_echo")
    lab.wait_for("the call in flight", lambda: lab.instances("shared")[0]["inFlight"])
    status = lab.status()
    (row,) = [i for i in status["instances"] if i["server"] == "shared"]
    assert (row["scope"], row["key"], row["hosts"], row["inFlight"], row["pid"]) == (
        "global", "global", 2, 1, starts(lab, "shared")[0])
    assert row["uptime"] > 0 and row["oldestInFlight"] > 0
    (doomed,) = [s for s in status["servers"] if s["name"] == "doomed"]
    assert "7" in doomed["lastError"] and "restarts" in doomed
    (degraded,) = [d for d in status["degradations"] if d["server"] == "placed"]
    assert degraded["scope"] == "worktree" and degraded["reason"]
    text = lab.command("status")
    for word in ("shared", "global", str(row["pid"]), "doomed", "exit status 7", "placed", degraded["reason"][:20]):
        assert word in text, (word, text)
    one.notify("notifications/cancelled", requestId=held)


def test_a_server_that_is_stopped_in_mid_call_is_found_out_and_replaced(lab):
    """SIGSTOP: alive, silent, and it cannot even be asked to end."""
    lab.configure({"wedged": fake(lab, "wedged", """
        def call(name, arguments, host_id):
            note("call")
            if name == "pid":
                say(host_id, str(os.getpid()))
        """, scope="global", pingAfter="200ms", pingTimeout="300ms"), "other": fake(lab, "other", scope="global")},
        stop_eofGrace="100ms", stop_termGrace="100ms", backoff_first="20ms")
    one, two, other = lab.host("wedged"), lab.host("wedged"), lab.host("other")
    pid = int(one.call("pid"))
    calls = [(host, host.begin("echo")) for host in (one, two)]
    lab.wait_for("both calls", lambda: len(notes(lab, "wedged", "call")) == 3)
    os.kill(pid, signal.SIGSTOP)
    (row,) = lab.instances("wedged")
    assert row["inFlight"] == 2 and row["oldestInFlight"] > 0
    assert other.call("echo", text="x") == "x"
    for host, host_id in calls:
        error = host.answer(host_id)["error"]
        assert "wedged" in error["message"] and "ping" in error["message"], error
    lab.wait_gone(pid)
    assert int(one.call("pid")) != pid
    lab.wait_for("empty tables", lambda: at_rest(lab))


def test_two_hundred_calls_that_are_never_answered_leave_nothing_and_their_late_answers_go_nowhere(lab):
    lab.configure({"hoard": fake(lab, "hoard", """
        HELD = []
        def call(name, arguments, host_id):
            if name == "echo":
                HELD.append(host_id)
                note("held")
                return
            for late in HELD:
                say(late, "too late")
            say(host_id, str(len(HELD)))
        """, scope="global")}, coldWait="5s")
    stays, leaves = lab.host("hoard"), lab.host("hoard")
    ids = [stays.begin("echo") for _ in range(100)]
    for _ in range(100):
        leaves.begin("echo")
    lab.wait_for("all calls", lambda: len(notes(lab, "hoard", "held")) == 200)
    for host_id in ids:
        stays.notify("notifications/cancelled", requestId=host_id)
    leaves.kill()
    lab.wait_for("200 cancels", lambda: len(notes(lab, "hoard", "got", "notifications/cancelled")) == 200)
    assert stays.call("pid") == "200"
    lab.wait_for("empty tables", lambda: at_rest(lab))
    assert [m for m in stays.seen if "id" in m and m["id"] in ids] == []
    assert lab.status()["counters"]["lateAnswers"] == 200


def test_a_server_that_closed_its_input_costs_the_next_call_and_no_more(lab):
    lab.configure({"closed": fake(lab, "closed", """
        def call(name, arguments, host_id):
            say(host_id, str(os.getpid()))
            if name == "echo":
                os.close(0)
                note("closed")
                time.sleep(600)
        """, scope="global"), "other": fake(lab, "other", scope="global")},
        backoff_first="20ms", stop_eofGrace="100ms", stop_termGrace="100ms")
    host, other = lab.host("closed"), lab.host("other")
    first = int(host.call("echo"))
    lab.wait_for("the close", lambda: notes(lab, "closed", "closed"))
    answer = host.answer(host.begin("pid", text="x" * (1 << 20)), 5)
    # Nothing of the call was read: it may be sent to the next one, or be reported.
    assert is_lost(answer["error"]) if "error" in answer else text_of(answer["result"]) != str(first)
    assert int(host.call("pid")) != first
    lab.wait_gone(first)
    assert other.call("echo", text="x") == "x"


def test_a_server_that_dies_after_every_call_is_never_held_back(lab):
    """Only a server that fails before it has done anything is failing to start."""
    lab.configure({"brief": fake(lab, "brief", """
        def call(name, arguments, host_id):
            say(host_id, str(os.getpid()))
            os._exit(1)
        """, scope="global")}, backoff_first="30s")
    host = lab.host("brief")
    pids = set()
    for _ in range(6):
        pids.add(int(host.call("pid", within=5)))
        lab.wait_gone(*pids)
    assert len(pids) == 6


def test_while_a_broken_server_is_left_alone_its_callers_are_told_until_when(lab):
    lab.configure({"broken": fake(lab, "broken", """
        def start():
            sys.stderr.write("no licence\\n")
            sys.stderr.flush()
            os._exit(9)
        """, scope="global")}, backoff_first="40s", backoff_max="40s", coldWait="5s")
    complaint(lab.start("broken"))
    began = time.monotonic()
    error = complaint(lab.start("broken"))
    assert time.monotonic() - began < 5
    assert "no licence" in error["message"] and any("%ds" % n in error["message"] for n in range(30, 42)), error
    (row,) = [s for s in lab.status()["servers"] if s["name"] == "broken"]
    assert 25 < row["nextTry"] <= 40
    assert len(starts(lab, "broken")) <= 2


def test_a_server_that_has_ended_before_anybody_looks_is_noticed(loop):
    """The first child of a daemon, gone before its exit was asked for: without a status nobody could ever stop it."""
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    deadline = time.monotonic() + PATIENCE_S
    while is_running(process.pid):
        assert time.monotonic() < deadline
        time.sleep(LOOK_EVERY_S)
    process.returncode, seen = 0, []
    loop.on_exit(process.pid, seen.append)
    turn_until(loop, lambda: seen)
    assert os.WEXITSTATUS(seen[0]) == 3


# -- what goes over the wire

def test_an_answer_that_noise_was_glued_to_reaches_its_caller(calm):
    host = calm.host("bytes")
    answer = host.answer(host.begin("glued"))
    assert "error" in answer or text_of(answer["result"]) == "TEXT"


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1 << 20, 8 << 20])
def test_big_results_and_arguments_arrive_whole_over_http(web, size):
    text = ("é漢😀" * (size // 9 + 1))[:size // 3]
    assert web.tool("shared", "echo", text=text) == text
    assert len(WebSession(web, "shared").tool("big", bytes=size)) == size


def test_one_byte_over_the_documented_limit_is_refused_and_one_less_is_not(lab):
    limit = 64 << 10
    lab.configure({"plain": fake(lab, "plain", "def call(name, arguments, host_id):\n    say(host_id, 'taken')\n")},
                  limits_lineBytes="64KiB")
    host = lab.host("plain", revision="2025-11-25")
    line = as_line(echo_request("just", "x"))
    host.write(as_line(echo_request("just", "x" * (limit - len(line) + 2))))       # the newline is not counted
    assert text_of(host.result("just")) == "taken"
    host.write(as_line(echo_request("over", "x" * (limit - len(line) + 3))))
    error = host.expect(lambda m: "error" in m and m.get("id") in ("over", None), "a refusal")["error"]
    assert "limits.lineBytes" in error["message"]
    assert host.call("echo") == "taken" and len(notes(lab, "plain", "got", "tools/call")) == 2


def test_a_screenshot_of_ten_megabytes_arrives_as_it_was_sent(lab):
    lab.configure({"shots": fake(lab, "shots", """
        def call(name, arguments, host_id):
            image = {"type": "image", "mimeType": "image/png", "data": "aGk+" * 2621440, "annotations": {}}
            text = {"type": "text", "text": "\\u6f22\\ud83d\\ude00" * (5 << 18)}
            send(id=host_id, result={"content": [image, text], "isError": False, "x-own": [1.50, None]})
        """)})
    host = lab.host("shots", revision="2025-11-25")
    image = {"type": "image", "mimeType": "image/png", "data": "aGk+" * 2621440, "annotations": {}}
    text = {"type": "text", "text": "漢😀" * (5 << 18)}
    assert host.result(host.begin("echo")) == {"content": [image, text], "isError": False, "x-own": [1.5, None]}


def test_characters_cut_anywhere_arrive_whole_over_http(web):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "echo", "arguments": {"text": ODD_TEXT}, "_meta": MODERN_META}}, ensure_ascii=False).encode()
    head = ("POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAccept: %s\r\n"
            "MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: echo\r\nConnection: close\r\n"
            "Content-Length: %d\r\n\r\n" % (BOTH_TYPES, len(body))).encode()
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        for byte in body:
            connection.send(bytes([byte]))
        answer = b"".join(iter(lambda: connection.recv(7), b""))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["result"]["content"][0]["text"] == ODD_TEXT
    session = WebSession(web, "shared")
    body = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {
        "name": "sleep", "arguments": {"seconds": 0.1, "every": 0.04, "text": ODD_TEXT}, "_meta": {"progressToken": 1}}}
    _, headers, data = web.send("POST", "/mcp/shared", body, session.headers)
    assert headers.get_content_type() == "text/event-stream"
    assert text_of(messages_of(headers, data)[-1]["result"]) == ODD_TEXT


def test_what_mcpx_writes_ends_in_plain_newlines_whatever_the_others_write(calm):
    """Host and server both write CRLF and byte order marks."""
    hello = {"id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}}
    messages = (hello, {"method": "notifications/initialized"}, echo_request(2, "x"), echo_request(3, ODD_TEXT))
    host = calm.start("noisy", reads=False)
    host.write(b"".join(b"\xef\xbb\xbf" + as_line(message)[:-1] + b"\r\n" for message in messages))
    answers = {}
    for line in host.process.stdout:
        assert line.endswith(b"\n") and b"\r" not in line and not line.startswith(b"\xef\xbb\xbf"), line
        message = json.loads(line)
        answers[message.get("id")] = message
        if {1, 2, 3} <= set(answers):
            break
    assert text_of(answers[3]["result"]) == ODD_TEXT


def test_an_escape_that_is_no_character_goes_through_untouched_in_both_directions(calm):
    host = calm.host("bytes")
    host.write(as_line(echo_request("sur", "ESCAPE")).replace(b"ESCAPE", b"\\ud800"))
    assert text_of(host.result("sur")) == "\ud800"


def test_a_line_that_is_no_request_is_answered_with_the_code_that_says_so(calm):
    host = calm.host("demo", revision="2025-11-25")
    lines = ((b"{bad", -32700), (b"{}", -32600), (b"42", -32600))
    for line, _ in lines:
        host.write(line + b"\n")
    assert host.call("echo", text="x") == "x"
    refusals = [m for m in host.seen if "error" in m]
    assert [m["error"]["code"] for m in refusals] == [code for _, code in lines]
    assert all(m.get("id") is None for m in refusals)


FRAMINGS = {
    "waits for a header": ("pass", "startTimeout"),
    "answers with a header": (
        "write(('Content-Length: %d\\r\\n\\r\\n' % len(answer) + answer).encode())", "Content-Length"),
    "answers in several lines": ("write(json.dumps(json.loads(answer), indent=2).encode() + b'\\n')", "line"),
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_server_that_frames_otherwise_is_reported_with_what_it_did_and_what_is_expected(lab, framing):
    action, word = FRAMINGS[framing]
    lab.configure({"lsp": fake(lab, "lsp", """
        def take(message):
            if message.get("method") == "initialize":
                answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {
                    "protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "f", "version": "1"}}})
                %s
        """ % action, startTimeout="700ms")}, coldWait="5s", stop_eofGrace="100ms")
    error = complaint(lab.start("lsp"))
    assert "lsp" in error["message"] and word in error["message"], error


def test_a_batch_is_never_met_with_silence(calm):
    host = calm.host("demo", revision="2025-03-26")
    host.last_id = 100
    host.write(b"[]\n")
    assert host.expect(lambda m: "error" in m, "a refusal of nothing")["error"]["code"] == -32600
    host.write(json.dumps([dict(echo_request("good", "G"), jsonrpc="2.0"), 5]).encode() + b"\n")
    answers = host.expect(bool, "one answer to the batch", kind=list)
    assert [text_of(m["result"]) for m in answers if m.get("id") == "good"] == ["G"]
    assert [m["error"]["code"] for m in answers if m.get("id") is None] == [-32600]
    assert host.call("echo", text="next") == "next"


def test_answers_that_a_server_puts_into_one_batch_reach_their_callers(lab):
    lab.configure({"batcher": fake(lab, "batcher", """
        HELD = []
        def call(name, arguments, host_id):
            content = [{"type": "text", "text": arguments["text"]}]
            HELD.append({"jsonrpc": "2.0", "id": host_id, "result": {"content": content}})
            if len(HELD) == 2:
                write(json.dumps(HELD).encode() + b"\\n")
        """, scope="global")})
    one, two = lab.host("batcher", revision="2025-03-26"), lab.host("batcher", revision="2025-11-25")
    first, second = one.begin("echo", text="1"), two.begin("echo", text="2")
    assert (text_of(one.result(first)), text_of(two.result(second))) == ("1", "2")


# -- who asks, and what they share

def test_requests_before_the_end_of_a_slow_handshake_are_answered_or_refused_but_not_lost(lab):
    """A strict server that is new; one host writes all at once, one leaves out `initialized`, one everything."""
    lab.configure({"strict": fake(lab, "strict", """
        STAGE = ["initialize", "notifications/initialized"]
        usual = take
        def take(message):
            if STAGE:
                if message.get("method") != STAGE.pop(0):
                    os._exit(4)
                time.sleep(0.3)
            usual(message)
        """, scope="global")})
    hello = {"id": "hello", "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}}
    eager, forgetful, rude = lab.start("strict"), lab.start("strict"), lab.start("strict")
    requests = as_line({"id": "list", "method": "tools/list"}) + as_line(echo_request("call", "x"))
    eager.write(as_line(hello) + as_line({"method": "notifications/initialized"}) + requests)
    forgetful.write(as_line(hello) + requests)
    rude.write(requests)
    for host in (eager, forgetful):
        assert host.result("hello")["serverInfo"]["name"] == "fake"
    assert eager.seen[0]["id"] == "hello", eager.seen
    assert len(eager.result("list")["tools"]) == 2 and text_of(eager.result("call")) == "x"
    for host in (forgetful, rude):
        for host_id in ("list", "call"):
            answer = host.answer(host_id)
            assert "result" in answer or answer["error"]["code"] < -32000, answer
    assert len(starts(lab, "strict")) == 1


def test_a_host_that_cancels_its_own_handshake_is_greeted_all_the_same(lab):
    """`initialize` must not be cancelled: who does it anyway does not break the server for others."""
    lab.configure({"slow": fake(lab, "slow", """
        def start():
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        """, lab.gate("go"), scope="global")})
    early = lab.start("slow")
    # This one does so before there is a daemon that could hear of it.
    early.write(as_line({"id": "hello", "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "early", "version": "1"}}})
        + as_line({"method": "notifications/cancelled", "params": {"requestId": "hello"}}))
    host, other = lab.start("slow"), lab.start("slow")
    hello, second = host.hello(), other.hello()
    lab.wait_for("the start", lambda: starts(lab, "slow"))
    host.notify("notifications/cancelled", requestId=hello, reason="impatient")
    assert host.ask("ping") == {}
    lab.open_gate("go")
    assert host.result(hello) and other.result(second) and early.result("hello")
    assert notes(lab, "slow", "got", "notifications/cancelled") == []


def test_a_question_outside_any_call_is_refused_at_once_and_ids_of_both_sides_do_not_meet(lab):
    """Everybody counts from 1: two hosts, and the server with its questions."""
    lab.configure({"asker": fake(lab, "asker", """
        WAITING = {}
        def take_answer(message):
            note("answer", json.dumps(message.get("result") or message["error"]["code"]).replace(" ", ""))
            caller = WAITING.pop(message["id"], None)
            if caller is not None:
                say(caller, json.dumps(message.get("result") or message["error"]))
        usual = take
        def take(message):
            take_answer(message) if "method" not in message else usual(message)
        def call(name, arguments, host_id):
            if name == "echo":
                WAITING[1] = host_id
                send(id=1, method=arguments["method"], params=arguments["params"])
            else:
                say(host_id, "the call is over")
                send(id=1, method="sampling/createMessage", params={"maxTokens": 5, "messages": []})
        """, scope="global")}, question_timeout="60s")
    replies = {"elicitation/create": lambda params: {"action": "accept", "content": {"answer": "ann"}}}
    ann = lab.host("asker", capabilities={"elicitation": {}}, replies=replies)
    bob = lab.host("asker")
    form = {"message": "?", "requestedSchema": {"type": "object", "properties": {"answer": {"type": "string"}}}}
    first = ann.begin("echo", host_id=1000, method="elicitation/create", params=form)
    assert "ann" in text_of(ann.result(first))
    assert "code" in bob.call("echo", method="roots/list", params={}) or "roots" in notes(lab, "asker", "answer")[-1][2]
    before = len(notes(lab, "asker", "answer"))
    assert bob.call("pid") == "the call is over"
    lab.wait_for("an answer to the question of no call", lambda: len(notes(lab, "asker", "answer")) > before, 4)
    assert notes(lab, "asker", "answer")[-1][2].startswith("-")
    assert bob.ask("ping") == {} and ann.ask("ping") == {}
    assert len(asked(ann)) == 1 and asked(bob) == []


def test_the_same_server_written_in_another_order_is_one_and_another_directory_is_another(lab):
    lab.configure({"x": dict(fake(lab, "x", scope="global"), env={"A": "1", "TOKEN": "${TOKEN}"})})
    pids = [lab.host("x", env={"TOKEN": token}).call("pid") for token in ("a", "b")]
    config = json.load(open(lab.config))
    entry_of = config["mcpServers"]["x"]
    entry_of["env"] = dict(reversed(list(entry_of["env"].items())))
    lab.write_config(json.dumps(config))
    lab.command("reload")
    again = [lab.host("x", env={"TOKEN": token}).call("pid") for token in ("a", "b")]
    assert again == pids and len(set(pids)) == 2
    keys = json.dumps([(i["key"], i["id"]) for i in lab.instances("x")])
    assert '"a"' not in keys and '"b"' not in keys


@pytest.mark.skipif(not shutil.which("git"), reason="the work tree is made with git")
def test_the_server_of_a_deleted_work_tree_goes_when_it_is_idle(lab):
    lab.configure({"git": fake(lab, "git", scope="worktree", idleTimeout="700ms")})
    tree = lab.directory("tree")
    git("init", cwd=tree)
    host = lab.host("git", cwd=tree)
    pid = int(host.call("pid"))
    shutil.rmtree(tree)
    lab.wait_gone(pid)
    answer = host.answer(host.begin("pid"))
    assert "result" in answer or tree in answer["error"]["message"]


# -- time: limits, idleness, lists

def test_progress_keeps_a_long_call_alive_and_silence_ends_it(lab):
    lab.configure({"worker": fake(lab, "worker", """
        def call(name, arguments, host_id):
            note("call", name)
            if name == "echo":
                def work():
                    for n in range(1, 13):
                        time.sleep(0.1)
                        send(method="notifications/progress", params={"progressToken": TOKENS[host_id], "progress": n})
                    say(host_id, "done")
                threading.Thread(target=work).start()
        TOKENS = {}
        usual = take
        def take(message):
            TOKENS[message.get("id")] = ((message.get("params") or {}).get("_meta") or {}).get("progressToken")
            usual(message)
        """, scope="global", callTimeout="600ms")})
    host, other = lab.host("worker"), lab.host("worker")
    working = host.begin("echo", {"progressToken": "mine"})
    silent = other.begin("pid")
    error = other.answer(silent)["error"]
    assert "callTimeout" in error["message"]
    assert text_of(host.result(working)) == "done"
    assert [m["params"]["progress"] for m in host.all("notifications/progress")] == list(range(1, 13))
    assert len(starts(lab, "worker")) == 1 and len(notes(lab, "worker", "got", "notifications/cancelled")) == 1
    assert mcpx.SETTINGS["callTimeout"].default in ("24h", 0) or "h" in mcpx.SETTINGS["callTimeout"].default


def test_a_chatty_server_is_idle_when_nobody_calls_it(lab):
    """It sends notifications all the time, and its host stays."""
    lab.configure({"chatty": fake(lab, "chatty", """
        def start():
            def chat():
                while True:
                    time.sleep(0.05)
                    send(method="notifications/message", params={"level": "info", "data": "still here"})
                    send(method="notifications/tools/list_changed")
            threading.Thread(target=chat, daemon=True).start()
        """, scope="global", idleTimeout="500ms")})
    host = lab.host("chatty")
    pid = int(host.call("pid"))
    lab.wait_gone(pid, within=10)
    begun = len(starts(lab, "chatty"))
    assert host.tools() == ["echo", "pid"]
    assert len(starts(lab, "chatty")) == begun, "a list has started it"
    assert int(host.call("pid")) != pid


def test_an_empty_list_while_a_server_warms_up_is_not_taken_for_the_truth(lab):
    """Empty, then an error, then two tools: hosts of each moment end up with two, and so does the stored copy."""
    def phase(word):
        with open(lab.path("phase.new"), "w") as file:
            file.write(word)
        os.rename(lab.path("phase.new"), lab.path("phase"))

    lab.configure({"warming": fake(lab, "warming", """
        def listed(host_id):
            phase = open(sys.argv[1]).read()
            note("listed", phase)
            names = {"empty": [], "full": ["one", "two"]}.get(phase)
            if names is None:
                return send(id=host_id, error={"code": -32603, "message": "still warming up"})
            send(id=host_id, result={"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in names]})
        """, lab.path("phase"), scope="global")}, backoff_first="20ms")
    phase("empty")
    early = lab.host("warming")
    assert early.tools() == []
    phase("error")
    middle = lab.start("warming")
    middle.hello()
    phase("full")
    early.notification("notifications/tools/list_changed")
    lab.wait_for("two tools", lambda: early.tools() == ["one", "two"])
    assert middle.answer(1)
    middle.notify("notifications/initialized")
    lab.wait_for("two tools", lambda: middle.tools() == ["one", "two"])
    # Restarted, it is empty again; what was stored is better than that.
    phase("empty")
    for server in starts(lab, "warming"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
    lab.command("stop")
    late = lab.host("warming")
    assert late.tools() == ["one", "two"]
    late.answer(late.begin("echo"))
    lab.wait_for("a look at the new process", lambda: notes(lab, "warming", "listed")[-1][2] == "empty")
    late.settle()
    assert late.tools() == ["one", "two"], "an empty list has replaced a good one at its first sight"
    phase("full")


def test_a_session_without_a_stream_of_its_own_lists_what_is_new(lab):
    """Over HTTP nobody can tell it; it asks again and gets the new list."""
    web = Web(lab, demo=demo(scope="global"))
    session = WebSession(web, "demo")
    before = [t["name"] for t in session.request("tools/list")[1][-1]["result"]["tools"]]
    session.request("tools/call", {"name": "add_tool", "arguments": {"name": "fresh"}})
    lab.wait_for("the new tool", lambda: [t["name"] for t in session.request("tools/list")[1][-1]["result"]["tools"]]
                 == before + ["fresh"])


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_a_server_that_ignores_what_it_does_not_know_does_not_hang_anybody(lab, monkeypatch, era):
    """It does not even refuse: a probe of another era gets no answer."""
    impatient(lab, monkeypatch, PROBE_WAIT_S=("5.0", "0.5"))
    web = Web(lab, other=fake(lab, "other"), mute=fake(lab, "mute", """
        usual = take
        def take(message):
            if message.get("method") in ("initialize", "notifications/initialized", "tools/list", "tools/call"):
                usual(message)
        """, scope="global"))
    began = time.monotonic()
    if era == "legacy":
        host = lab.host("mute")
        assert host.call("echo", text="x") == "x"
        error = host.answer(host.request("no/such/method"), 5)["error"]
        assert error["code"] == -32601
    else:
        assert web.tool("mute", "echo", text="x") == "x"
    assert mcpx.PROBE_WAIT_S <= 5 and time.monotonic() - began < 5
    assert [i["revision"] for i in lab.instances("mute")] == ["2025-11-25"]
    # Nor does it wait for that answer for ever: an idle server ends, also by a time that is shorter now.
    reset(lab, idleTimeout="300ms")
    lab.wait_for("its end", lambda: not lab.instances("mute"))


# -- the daemon's door

@pytest.mark.parametrize("planted", ["file", "directory", "dangling link"])
def test_what_somebody_put_where_the_socket_belongs_is_not_deleted(lab, planted):
    lab.configure({"plain": fake(lab, "plain")})
    path = mcpx.socket_path(lab.config, lab.env)
    os.makedirs(os.path.dirname(path), mode=0o700)
    if planted == "file":
        with open(path, "w") as file:
            file.write("precious")
    elif planted == "directory":
        os.mkdir(path)
    else:
        os.symlink(lab.path("nowhere"), path)
    before = os.lstat(path)
    done = lab.run("call", "plain.echo", "text=x", within=30)
    host = lab.start("plain")
    hello = host.answer(host.hello(), 30)
    assert os.lstat(path).st_ino == before.st_ino, "it was removed"
    assert done.returncode == 0 or path in done.stderr, done.stderr
    # It goes on without that place, and says which one it is.
    assert "result" in hello and path in tail(host.errors_path), tail(host.errors_path)
    host.close()
    os.rmdir(path) if planted == "directory" else os.unlink(path)


def test_a_daemon_that_ends_late_does_not_remove_its_successors_socket(lab):
    """The old one is in its drain when its socket is replaced."""
    lab.configure({"plain": fake(lab, "plain", "def call(name, arguments, host_id):\n    note('call')\n"
                                 "    name == 'pid' and say(host_id, str(os.getpid()))\n")}, drainTimeout="2s")
    host = lab.host("plain")
    host.begin("echo")
    lab.wait_for("the call", lambda: notes(lab, "plain", "call"))
    old, path = lab.daemon_pid(), lab.status()["daemon"]["socket"]
    os.kill(old, signal.SIGTERM)
    other = lab.start("plain")
    hello = other.hello()
    lab.wait_gone(old)
    assert other.result(hello)
    other.notify("notifications/initialized")
    assert other.call("pid") and host.call("pid")
    assert lab.daemon_pid() != old and os.path.exists(path)
    lab.wait_for("one daemon", lambda: len(daemons(lab)) == 1)


def test_a_daemon_that_cannot_be_started_for_a_while_gives_quick_errors_and_then_works(lab, monkeypatch):
    """Its program file is away; the host's process stays, and needs nobody to reconnect it."""
    copy = lab.path("mcpx.py")
    shutil.copy(MCPX, copy)
    monkeypatch.setattr(sys.modules[__name__], "MCPX", copy)
    lab.configure({"plain": fake(lab, "plain", scope="global")})
    host = lab.host("plain")
    pid, daemon = int(host.call("pid")), lab.daemon_pid()
    os.rename(copy, copy + ".away")
    os.kill(daemon, signal.SIGKILL)
    lab.wait_gone(daemon)
    for _ in range(3):
        began = time.monotonic()
        error = host.answer(host.begin("echo", text="x"))["error"]
        assert time.monotonic() - began < 3 and "daemon" in error["message"], error
    assert host.process.poll() is None
    os.rename(copy + ".away", copy)
    began = time.monotonic()
    lab.wait_for("an answer", lambda: "result" in host.answer(host.begin("echo", text="x")))
    assert time.monotonic() - began < 5
    assert int(host.call("pid")) == pid


def test_two_versions_that_call_in_turn_do_not_restart_each_other(lab, monkeypatch):
    """The newer one also speaks another link: it brings its code once, and both go on with it."""
    lab.configure({"plain": fake(lab, "plain", scope="global")})
    old = lab.host("plain")
    pid, daemon = old.call("pid"), lab.daemon_pid()
    newer = newer_code(lab, ("LINK_VERSION = 1\n", "LINK_VERSION = 2\n"))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "MCPX", newer)
            new = lab.host("plain")
        for host in (old, new, lab.host("plain")) * 3:
            assert host.call("pid") == pid
    status = lab.status()
    assert (status["daemon"]["version"], status["daemon"]["upgrades"], status["daemon"]["pid"]) == ("9.9.9", 1, daemon)
    assert {row["version"] for row in status["hosts"]} == {mcpx.__version__, "9.9.9"}
    assert len(starts(lab, "plain")) == 1 and len(daemons(lab)) == 1


class Impostor:
    """Listens where the daemon should, and is none."""

    def __init__(self, lab, manner):
        self.path, self.manner, self.open = mcpx.socket_path(lab.config, lab.env), manner, []
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen(16)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self.socket.accept()[0]
                self.open.append(connection)
                if self.manner == "garbage":
                    connection.sendall(b"\xff\x00 SSH-2.0-nonsense\n" * 3)
                elif self.manner == "hangs up":
                    connection.recv(65536)
                    connection.close()

    def close(self):
        self.socket.close()
        os.unlink(self.path)
        for connection in self.open:
            connection.close()


@pytest.mark.parametrize("manner", ["garbage", "hangs up"])
def test_a_listener_that_talks_nonsense_does_not_hold_a_host_for_ever(lab, manner):
    lab.configure({"plain": fake(lab, "plain")})
    impostor = Impostor(lab, manner)
    try:
        host = lab.start("plain")
        assert host.answer(host.hello(), 20)
        host.close()
    finally:
        with contextlib.suppress(OSError):
            impostor.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads limits from /proc")
def test_a_low_limit_of_descriptors_is_raised_and_one_that_cannot_be_is_survived(lab):
    lab.configure({"plain": fake(lab, "plain", scope="session"), "shared": fake(lab, "shared", scope="global")})

    def daemon_with(soft, hard):
        lab.run("stop")
        process = subprocess.Popen([sys.executable, MCPX, "daemon"], env=lab.env, cwd=lab.work, start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
        lab.wait_for("the daemon", lambda: lab.run("status").returncode == 0)
        return process

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    first = daemon_with(256, hard)
    with open("/proc/%d/limits" % first.pid) as file:
        (row,) = [line.split() for line in file if line.startswith("Max open files")]
    assert row[3] == row[4] or int(row[3]) >= 4096
    lab.run("stop")
    first.wait(PATIENCE_S)
    second = daemon_with(40, 40)
    host = lab.host("shared", "plain")
    assert host.call("shared_echo", text="x") == "x"
    path = lab.status()["daemon"]["socket"]
    idle = []
    for _ in range(40):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        idle.append(connection)
    # Neither a new connection nor a new process can be had, and those that are there go on.
    lab.wait_for("full tables", lambda: len(os.listdir("/proc/%d/fd" % second.pid)) >= 38)
    error = host.answer(host.begin("plain_echo", text="x")).get("error")
    assert error is None or "plain" in error["message"]
    before = cpu_seconds(second.pid)
    for n in range(20):
        assert host.call("shared_echo", text=str(n)) == str(n)
        time.sleep(0.02)
    assert cpu_seconds(second.pid) - before < 0.3
    for connection in idle:
        connection.close()
    lab.wait_for("room again", lambda: "result" in host.answer(host.begin("plain_echo", text="x")))
    assert lab.host("shared").call("echo", text="x") == "x"
    lab.run("stop")
    second.wait(PATIENCE_S)


def test_every_launcher_of_one_user_meets_the_same_daemon(lab):
    """Without a runtime directory, with one that others may write to, and from an empty environment."""
    lab.configure({"plain": fake(lab, "plain", scope="global")})
    home = {"HOME": lab.home, "PATH": lab.env["PATH"], "MCPX_CONFIG": lab.config}
    world = lab.directory("world")
    os.chmod(world, 0o777)
    environments = [dict(home), dict(home, XDG_RUNTIME_DIR=world), dict(home, XDG_RUNTIME_DIR=lab.path("missing")),
                    dict(home, XDG_RUNTIME_DIR=lab.runtime), dict(home, XDG_RUNTIME_DIR="relative")]

    def pid(env):
        done = subprocess.run([sys.executable, MCPX, "call", "plain.pid"], env=env, cwd=lab.work, timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
    try:
        assert len({pid(env) for env in environments}) == 1
        assert os.listdir(world) == [], "a directory that others may write to was used"
    finally:
        subprocess.run([sys.executable, MCPX, "stop"], env=home, cwd=lab.work, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_take_the_place_of_the_socket_nor_call_through_it(lab):
    lab.configure({"plain": fake(lab, "plain", scope="global")})
    theirs = tempfile.mkdtemp(prefix="mx", dir="/tmp")
    try:
        os.makedirs(os.path.join(theirs, "mcpx"))
        for path in (theirs, os.path.join(theirs, "mcpx")):
            os.chown(path, 65534, 65534)
        lab.env["XDG_RUNTIME_DIR"] = theirs
        assert lab.host("plain").call("echo", text="x") == "x"
        path = lab.status()["daemon"]["socket"]
        assert not path.startswith(theirs) and os.listdir(os.path.join(theirs, "mcpx")) == []
        for part in (path, os.path.dirname(path)):
            os.chmod(part, 0o777)                # even where nothing but the check of the peer is left
        code = ("import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
                "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
                "s.sendall(b'GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(s.recv(100))")
        done = subprocess.run([sys.executable, "-c", code, path], stdout=subprocess.PIPE, timeout=60)
        assert b"200" not in done.stdout, done
        for part in (path, os.path.dirname(path)):
            os.chmod(part, 0o700)
    finally:
        shutil.rmtree(theirs)


# -- over HTTP

def legacy(host_id, method, **params):
    return {"jsonrpc": "2.0", "id": host_id, "method": method, "params": params}


def opened(web, path, body, headers):
    """A POST whose answer is being waited for; the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    connection.request("POST", path, json.dumps(body), dict(
        {"Content-Type": "application/json", "Accept": BOTH_TYPES}, **headers))
    return connection


@pytest.mark.parametrize("session_id", ["nobody", "x" * 8192, "%00../..\"';", "\u00e9\u00ff", "mcp-1"])
def test_a_session_that_nobody_knows_is_404_and_a_new_one_can_be_begun_with_its_id(web, session_id):
    before = web.lab.status()["tables"]["sessions"]
    headers = {"Mcp-Session-Id": session_id}
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    call = legacy(1, "tools/call", name="echo", arguments={})
    for method, body in (("POST", legacy(1, "tools/list")), ("POST", call), ("POST", initialized), ("GET", None),
                         ("DELETE", None)):
        status, answered, text = web.send(method, "/mcp/demo", body, dict(headers, Accept=BOTH_TYPES))
        assert status == 404, (method, status, text)
        assert "Mcp-Session-Id" not in answered and b"Traceback" not in text
    assert web.lab.status()["tables"]["sessions"] == before
    session = WebSession(web, "demo", headers=headers)
    assert session.id != session_id and session.tool("echo", text="x") == "x"
    assert web.send("DELETE", session.path, headers=session.headers)[0] == 204


def test_a_failed_request_makes_no_session_and_shows_no_traceback(web):
    before = web.lab.status()["tables"]["sessions"]
    for body in ("{bad", "[]", "null", '{"jsonrpc":"2.0","id":1}', json.dumps(legacy(1, "initialize")),
                 json.dumps(legacy(1, "initialize", protocolVersion=5)), json.dumps(legacy(1, "tools/list"))):
        status, answered, text = web.send("POST", "/mcp/demo", body)
        assert 400 <= status < 500 or b'"error"' in text, (body, status, text)
        assert b"Traceback" not in text and "error" in json.loads(text)
    assert web.lab.status()["tables"]["sessions"] == before


def test_a_quiet_call_and_an_idle_stream_send_their_heads_at_once(web):
    """What is in between must see that there is something to wait for: status, headers, a first byte, no buffering."""
    session = WebSession(web, "shared")
    sleep = json.dumps(legacy(77, "tools/call", name="sleep", arguments={"seconds": 30}))
    for name, method, request in (("call", "POST", sleep), ("stream", "GET", None)):
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=2)
        headers = dict(session.headers, Accept=BOTH_TYPES, **{"Content-Type": "application/json"})
        try:
            connection.request(method, "/mcp/shared", request, headers)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.headers.get_content_type() == "text/event-stream", name
            assert answer.headers["X-Accel-Buffering"] == "no" and "no-cache" in answer.headers["Cache-Control"], name
            assert answer.readline(), name
        except socket.timeout:
            pytest.fail("the %s has sent nothing for two seconds" % name)
        finally:
            connection.close()
    web.send("DELETE", session.path, headers=session.headers)


@pytest.mark.parametrize("headers, good", [
    ({}, True), ({"Origin": "http://localhost:%d"}, True), ({"Origin": "http://127.0.0.1:%d"}, True),
    ({"Origin": "http://[::1]:%d"}, True), ({"Host": "LOCALHOST:%d"}, True), ({"Host": "127.0.0.1:%d"}, True),
    ({"Host": "[::1]:%d"}, True),
    ({"Origin": "null"}, False), ({"Origin": "https://evil.example"}, False),
    ({"Origin": "http://evil.example:%d"}, False),
    ({"Origin": "http://localhost.evil.example"}, False), ({"Origin": "http://127.0.0.1.evil.example"}, False),
    ({"Origin": "http://localhost@evil.example"}, False), ({"Host": "evil.example"}, False),
    ({"Host": "evil.example:%d"}, False), ({"Host": "localhost.evil.example"}, False)],
    ids=lambda value: " ".join("%s: %s" % pair for pair in value.items()) if isinstance(value, dict) else "")
def test_a_web_page_can_do_nothing_with_any_method(web, headers, good):
    headers = {name: value % web.port if "%d" in value else value for name, value in headers.items()}
    hello = json.loads(PING)
    before = web.lab.status()["tables"]["sessions"]
    for method, path in (("POST", "/mcp/shared"), ("GET", "/mcp/shared"), ("DELETE", "/mcp/shared"),
                         ("OPTIONS", "/mcp/shared"), ("GET", "/v1/status")):
        body = hello if method == "POST" else None
        status, answered, text = web.send(method, path, body, headers)
        assert (status == 403) is not good, (method, path, status)
        assert "Access-Control-Allow-Origin" not in answered
        if status == 200 and method == "POST":
            web.send("DELETE", path, headers={"Mcp-Session-Id": answered["Mcp-Session-Id"]})
    assert web.lab.status()["tables"]["sessions"] == before


def test_a_request_of_http_1_0_without_a_host_is_answered(web):
    answer = web.raw(b"GET /v1/health HTTP/1.0\r\n\r\n")
    assert answer.split(b" ", 2)[1] in (b"200", b"400") and b"Traceback" not in answer


def test_nothing_is_served_or_told_without_the_token_by_any_method(lab):
    web = Web(lab, auth="token", plain=fake(lab, "plain"))
    with open(os.path.join(lab.state, "mcpx", "token")) as file:
        token = file.read().strip()
    near = [token[:-1] + ("a" if token[-1] != "a" else "b"), token + "x", token[1:], token.swapcase(), token[:8], ""]
    started = len(starts(lab, "plain"))
    requests = [("POST", "/mcp/plain", json.loads(PING)), ("POST", "/v1/stop", {}),
                ("POST", "/v1/call", {"server": "plain", "tool": "pid", "arguments": {}})]
    requests += [(method, path, None) for method, path in (
        ("DELETE", "/mcp/plain"), ("GET", "/mcp/plain"), ("GET", "/v1/status"), ("GET", "/v1/events"))]
    for method, path, body in requests:
        for given in [None] + near:
            headers = {} if given is None else {"Authorization": "Bearer " + given}
            status, answered, text = web.send(method, path, body, headers)
            assert status == 401 and "Bearer" in answered["WWW-Authenticate"], (method, path, given, status)
            assert b"plain" not in text and token.encode() not in text
    assert lab.status()["tables"]["sessions"] == 0 and len(starts(lab, "plain")) == started


@pytest.mark.parametrize("accept, kind", [
    (None, "application/json"), ("*/*", "application/json"), ("application/*", "application/json"),
    ("application/json", "application/json"), ("text/event-stream", "text/event-stream"),
    ("application/json;q=0.5 , text/event-stream ; q=0.9", "application/json"),
    ("APPLICATION/JSON, Text/Event-Stream", "application/json"), ("text/html, */*;q=0.1", "application/json"),
    ("text/html", None), ("image/*", None), ("application/json;q=0", None)])
def test_any_accept_that_mcpx_can_satisfy_is_good(web, accept, kind):
    head = "POST /mcp/shared HTTP/1.1\r\nHost: localhost\r\nContent-Type: Application/JSON; Charset=UTF-8\r\n"
    head += ("" if accept is None else "Accept: %s\r\n" % accept) + "Content-Length: %d\r\n\r\n" % len(PING)
    answer = web.raw(head.encode() + PING)
    status, headers = answer.split(b" ", 2)[1], answer.partition(b"\r\n\r\n")[0].lower()
    if kind is None:
        assert status == b"406"
    else:
        assert status == b"200" and ("content-type: " + kind).encode() in headers, answer[:300]


def test_after_a_refusal_the_connection_is_in_step_or_closed(web):
    """Bad bodies in front of a good request on one connection: what is answered is answered in order."""
    bad = b"{bad json"
    data = HELLO % (b"", len(bad), bad) + HELLO % (b"", len(PING), PING)
    answer = web.raw(data)
    parts = answer.split(b"HTTP/1.1 ")[1:]
    assert parts[0].startswith(b"400") and b"-32700" in parts[0]
    assert len(parts) == 2 and parts[1].startswith(b"200") and b"serverInfo" in parts[1]


def test_both_loopback_families_are_served_and_a_port_that_becomes_free_is_taken(lab):
    try:
        with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    port = holder.getsockname()[1]
    lab.configure({"plain": fake(lab, "plain")}, http={"listen": "localhost:%d" % port, "auth": "none"})
    assert lab.host("plain").call("echo", text="x") == "x"
    holder.close()
    lab.command("reload")

    def served(host):
        connection = http.client.HTTPConnection(host, port, timeout=2)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/v1/health")
            return connection.getresponse().status == 200
        return False
    for host in ("127.0.0.1", "::1", "localhost"):
        lab.wait_for("the door on %s" % host, lambda: served(host), 10)
    (url,) = [word for word in lab.command("url", "plain").split() if word.startswith("http://")]
    assert served(url[7:].rpartition(":")[0].strip("[]"))


def test_sessions_over_http_that_nobody_ends_go_by_themselves(lab):
    """Some say so, some close their connection, some vanish with a stream open; one is in use all along."""
    web = Web(lab, plain=fake(lab, "plain", """
        def call(name, arguments, host_id):
            note("call", name)
            while "until" in arguments and not os.path.exists(arguments["until"]):
                time.sleep(0.01)
            say(host_id, str(os.getpid()))
        """, scope="session"))
    reset(lab, http_sessionTimeout="1s")
    used = WebSession(web, "plain")
    waiting = legacy(1, "tools/call", name="echo", arguments={"until": lab.gate("go")})
    busy = opened(web, used.path, waiting, used.headers)
    ended, left = [WebSession(web, "plain") for _ in range(2)], [WebSession(web, "plain") for _ in range(6)]
    streams = []
    for session in left[:3]:
        streams.append(socket.create_connection(("127.0.0.1", web.port), PATIENCE_S))
        streams[-1].sendall(("GET %s HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
                             "Mcp-Session-Id: %s\r\n\r\n" % (session.path, session.id)).encode())
        streams[-1].recv(1)
    # A dead peer: the kernel answers nothing more, as after a lost network; here, a reset.
    for stream in streams:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    for session in ended:
        assert web.send("DELETE", session.path, headers=session.headers)[0] == 204
        assert session.request("tools/list")[0] == 404
    lab.wait_for("the one in use", lambda: lab.status()["tables"]["sessions"] == 1)
    lab.open_gate("go")
    answer = busy.getresponse()
    assert answer.status == 200 and b'"content"' in answer.read()
    busy.close()
    assert used.tool("pid") and web.send("DELETE", used.path, headers=used.headers)[0] == 204
    assert left[0].request("tools/list")[0] == 404
    lab.wait_for("empty tables", lambda: at_rest(lab) and lab.instances("plain") == [])


def test_dropping_a_request_in_mid_call_is_no_cancel_is_not_repeated_and_breaks_nothing(lab):
    web = Web(lab, plain=fake(lab, "plain", """
        def call(name, arguments, host_id):
            note("call", name, arguments.get("text"))
            threading.Timer(0.2, lambda: say(host_id, "done")).start()
        """, scope="global"))
    session = WebSession(web, "plain")
    for n in range(30):
        connection = opened(web, session.path, legacy(1000 + n, "tools/call", name="echo", arguments={"text": str(n)}),
                            session.headers)
        lab.wait_for("the call", lambda: notes(lab, "plain", "call", "echo", n))
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    assert session.tool("pid") == "done"
    assert [len(notes(lab, "plain", "call", "echo", n)) for n in range(30)] == [1] * 30
    assert notes(lab, "plain", "got", "notifications/cancelled") == []
    lab.wait_for("empty tables", lambda: at_rest(lab) and lab.status()["tables"]["connections"] == 0)


def test_a_result_that_the_network_cut_off_is_delivered_once_to_who_takes_up_its_stream(lab):
    web = Web(lab, plain=fake(lab, "plain", """
        def call(name, arguments, host_id):
            if TOKENS.get(host_id):
                send(method="notifications/progress", params={"progressToken": TOKENS[host_id], "progress": 1})
            while "until" in arguments and not os.path.exists(arguments["until"]):
                time.sleep(0.01)
            say(host_id, "the result")
        TOKENS = {}
        usual = take
        def take(message):
            TOKENS[message.get("id")] = ((message.get("params") or {}).get("_meta") or {}).get("progressToken")
            threading.Thread(target=usual, args=(message,)).start()
        """, scope="global"))
    session, other = WebSession(web, "plain"), WebSession(web, "plain")

    def events(answer):
        """(id, message) of each event until the stream ends or pauses."""
        found, last = [], None
        while True:
            line = answer.readline()
            if not line:
                return found
            if line.startswith(b"id: "):
                last = line[4:].strip().decode()
            if line.startswith(b"data: ") and line[6:].strip():
                found.append((last, json.loads(line[6:])))
                if found[-1][1].get("method") == "notifications/progress":
                    return found

    def resume(who, last_id):
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last_id}
        connection.request("GET", "/mcp/plain", headers=dict(who.headers, **headers))
        return connection, connection.getresponse()

    request = legacy(500, "tools/call", name="echo", arguments={"until": lab.gate("go")})
    request["params"]["_meta"] = {"progressToken": "p"}
    connection = opened(web, session.path, request, session.headers)
    ((last_id, _),) = events(connection.getresponse())
    connection.close()
    for stranger_id in (last_id, "999-1", "nonsense"):
        connection, answer = resume(other, stranger_id)
        if answer.status == 200:
            connection.sock.settimeout(0.2)
            with contextlib.suppress(socket.timeout):
                assert "result" not in str(events(answer))
        connection.close()
    connection, answer = resume(session, last_id)
    lab.open_gate("go")
    assert [m["result"]["content"][0]["text"] for _, m in events(answer) if m.get("id") == 500] == ["the result"]
    connection.close()
    # A second time, after it was delivered whole and its id was seen, there is nothing left to tell.
    assert other.tool("echo", until=lab.gate("go")) == "the result"


# -- configuration and environment

def test_a_command_is_found_by_its_callers_path_and_runs_with_it(lab):
    """The daemon was started with a bare PATH; the program's own interpreter is only on the caller's."""
    def version(name):
        bins = lab.directory(name)
        with open(os.path.join(bins, "fakenode"), "w") as file:
            file.write("#!/bin/sh\nFAKENODE=%s exec '%s' -S \"$@\"\n" % (name, sys.executable))
        with open(os.path.join(bins, "server"), "w") as file:
            file.write("#!/usr/bin/env fakenode\n" + FAKE + "def call(name, arguments, host_id):\n    say(host_id, "
                       "os.environ['FAKENODE'] + ' ' + os.environ['PATH'].split(':')[0])\n" + FAKE_END)
        for program in ("fakenode", "server"):
            os.chmod(os.path.join(bins, program), 0o755)
        return bins

    old, new = version("old"), version("new")
    lab.configure({"mine": {"command": "server", "mcpx": {"scope": "session"}},
                   "common": {"command": "server", "mcpx": {"scope": "global"}},
                   "absent": {"command": "no-such-server"}}, coldWait="5s")
    bare = subprocess.Popen([sys.executable, MCPX, "daemon"], env=dict(lab.env, PATH="/usr/bin:/bin"), cwd="/",
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    lab.wait_for("the daemon", lambda: lab.run("status").returncode == 0)
    hosts = {bins: lab.host("mine", "common", env={"PATH": bins + ":/usr/bin:/bin"}) for bins in (old, new)}
    for bins, host in hosts.items():
        assert host.call("mine_echo") == "%s %s" % (os.path.basename(bins), bins)
    told = [hosts[old].call("common_echo"), hosts[new].call("common_echo")]
    if told[0] == told[1]:
        # One for both: then it is said which program runs.
        why = lab.command("why", "common", env={"PATH": new + ":/usr/bin:/bin"})
        assert os.path.join(old, "server") in why, why
    error = complaint(lab.start("absent", env={"PATH": old + ":/usr/bin"}))
    assert "no-such-server" in error["message"] and old + ":/usr/bin" in error["message"], error
    lab.command("stop")
    bare.wait(PATIENCE_S)


def test_a_server_started_again_has_the_environment_of_who_starts_it(lab):
    body = """
        def call(name, arguments, host_id):
            say(host_id, " ".join(os.environ.get(n, "-") for n in ("SSH_AUTH_SOCK", "DISPLAY", "LANG", "API_TOKEN")))
        """
    lab.configure({"common": fake(lab, "common", body, scope="global"),
                   "split": fake(lab, "split", body, scope="global", inheritEnv=["API_TOKEN"])})
    first = {"SSH_AUTH_SOCK": "/a", "DISPLAY": ":1", "LANG": "C", "API_TOKEN": "one"}
    second = {"SSH_AUTH_SOCK": "/b", "DISPLAY": ":2", "LANG": "C.UTF-8", "API_TOKEN": "two"}
    one, two = lab.host("common", "split", env=first), lab.host("common", "split", env=second)
    assert one.call("common_echo") == two.call("common_echo") == "/a :1 C -"
    assert (one.call("split_echo"), two.call("split_echo")) == ("/a :1 C one", "/b :2 C.UTF-8 two")
    one.close()
    lab.command("stop", "common")
    assert two.call("common_echo") == "/b :2 C.UTF-8 -", "an old login's environment is used for a new process"


@pytest.mark.parametrize("key, name, expected", [
    ("mcpServers", "claude", [["x1", "d"], "x1"]), ("servers", "cursor", [["x1", "cost $5 ${"], "x1"]),
    ("mcp", "opencode", [["x1"], "x1"])])
def test_a_configuration_copied_from_another_host_is_understood(lab, key, name, expected):
    """Keys, arrays and ways to name a variable are that host's; one that is not set breaks its entry alone."""
    path = script(lab, "plain", """
        def call(name, arguments, host_id):
            say(host_id, json.dumps([sys.argv[1:], os.environ.get("K")]))
        """)
    start = [sys.executable, "-I", "-S", path]
    entries = {
        "claude": {"command": start[0], "args": start[1:] + ["${X}", "${NO:-d}"], "env": {"K": "${X}"}},
        "cursor": {"command": start[0], "args": start[1:] + ["${env:X}", "cost $5 ${"], "env": {"K": "${env:X}"}},
        "opencode": {"type": "local", "command": start + ["{env:X}"], "environment": {"K": "{env:X}"}, "enabled": True},
        "unset": {"command": start[0], "args": start[1:] + ["${NEVER_SET}"]}}
    lab.write_config("\ufeff// copied\n" + json.dumps({key: {n: entries[n] for n in (name, "unset")}})[:-1] + ",}")
    assert json.loads(lab.host(name, env={"X": "x1"}).call("echo")) == expected
    error = complaint(lab.start("unset", env={"X": "x1"}))
    assert "NEVER_SET" in error["message"] and "x1" not in error["message"]


# -- resources

@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads memory and descriptors from /proc")
def test_hundreds_of_clients_that_leave_rudely_cost_neither_memory_nor_descriptors(lab):
    """Sessions over HTTP, ended in every way; what a client leaves behind would add up here."""
    web = Web(lab, plain=fake(lab, "plain", scope="global"))
    daemon = lab.daemon_pid()

    def size():
        with open("/proc/%d/statm" % daemon) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/%d/fd" % daemon))

    rng, sizes, connection = random.Random(3), [], http.client.HTTPConnection("127.0.0.1", web.port, timeout=PATIENCE_S)
    base = {"Content-Type": "application/json", "Accept": BOTH_TYPES, "MCP-Protocol-Version": "2025-06-18"}
    call = json.dumps(legacy(1, "tools/call", name="echo", arguments={"text": "x" * 20_000}))
    for n in range(600):
        connection.request("POST", "/mcp/plain", PING, base)
        answer = connection.getresponse()
        answer.read()
        headers = dict(base, **{"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]})
        connection.request("POST", "/mcp/plain", call, headers)
        if rng.random() < 0.3:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()                       # in mid-call
        else:
            connection.getresponse().read()
        connection.request("DELETE", "/mcp/plain", headers=headers)
        connection.getresponse().read()
        if n % 100 == 99:
            sizes.append(size())
    connection.close()
    lab.wait_for("empty tables", lambda: at_rest(lab) and not any(
        lab.status()["tables"][name] for name in ("sessions", "connections", "hosts", "requests")))
    # The last 400 have sent and received 16 MB.
    assert sizes[-1][0] - sizes[1][0] < 8 << 20, sizes
    assert size()[1] <= sizes[0][1], sizes


def test_ten_hosts_and_three_servers_are_three_processes_and_nothing_runs_before_its_first_call(lab):
    names = ("a", "b", "c")
    lab.configure({name: fake(lab, name, scope="global") for name in names})
    lab.host(*names).tools()                         # the lists are known from now on
    lab.command("stop")
    known = {name: len(starts(lab, name)) for name in names}
    hosts = [lab.host(*names) for _ in range(10)]
    for host in hosts:
        assert len(host.tools()) == 6
    assert {name: len(starts(lab, name)) for name in names} == known
    for host in hosts:
        for name in names:
            host.call(name + "_pid")
    assert len(lab.pids(None)) == 3
    assert {name: len(starts(lab, name)) for name in names} == {name: count + 1 for name, count in known.items()}


# -- names

def test_long_and_odd_tool_names_stay_as_they_are_alone_and_fit_where_servers_are_merged(lab):
    names = ["t" * 60, "with.dots", "with-dash_and_line", "\u6f22\u5b57", "echo"]
    body = """
        def tools():
            return %r
        def call(name, arguments, host_id):
            say(host_id, sys.argv[1] + " " + name)
        """ % (names,)
    lab.configure({name: fake(lab, name, body, name) for name in ("left", "a-rather-long-name-of-a-server")})
    alone = lab.host("left")
    assert alone.tools() == names
    assert [alone.call(name) for name in names] == ["left " + name for name in names]
    merged = lab.host("left", "a-rather-long-name-of-a-server")
    shown = merged.tools()
    assert len(set(shown)) == 10 and all(len(name) <= 64 for name in shown), shown
    assert {merged.call(name) for name in shown} == {
        "%s %s" % (server, name) for server in ("left", "a-rather-long-name-of-a-server") for name in names}
    lab.command("stop")
    assert lab.host("left", "a-rather-long-name-of-a-server").tools() == shown == merged.tools()


# -- the kernel's and the service manager's side

PID_STORY = """
import json, os, subprocess, sys, time
mcpx, work, marker = sys.argv[1:]

def host(pid=None):
    while True:
        if pid:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(pid - 1))
        command = [sys.executable, mcpx, "serve", "plain"]
        shim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=work)
        if pid in (None, shim.pid):
            return shim
        shim.kill()
        shim.wait()

def ask(shim, method, params):
    shim.stdin.write(json.dumps({"jsonrpc": "2.0", "id": method, "method": method, "params": params}).encode() + b"\\n")
    shim.stdin.flush()
    for line in shim.stdout:
        message = json.loads(line)
        if message.get("id") == method:
            return message["result"]

def child(shim):
    client = {"name": "p", "version": "1"}
    ask(shim, "initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
    shim.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\\n')
    return ask(shim, "tools/call", {"name": "pid", "arguments": {}})["content"][0]["text"]

first = host()
children = [child(first)]
first.kill()
first.wait()
second = host(first.pid)
children.append(child(second))
print(json.dumps([first.pid, second.pid] + children))
second.stdin.close()
second.wait()
subprocess.run([sys.executable, mcpx, "stop"], stdout=subprocess.DEVNULL)
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="a number is only given out again in a pid namespace")
def test_a_host_with_the_number_of_one_that_is_gone_does_not_inherit_its_server(lab):
    """The old host's server takes its time to end, so it is still there when the number is given out again."""
    lab.configure({"plain": fake(lab, "plain", "def end():\n    time.sleep(1)\n", scope="pid")})
    namespace = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run(namespace + ["true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine does not allow a pid namespace")
    done = subprocess.run(namespace + [sys.executable, "-c", PID_STORY, MCPX, lab.work, lab.root], env=lab.env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    first, second, old, new = json.loads(done.stdout)
    assert first == second and old != new
    assert len(starts(lab, "plain")) == 2


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything, so nothing can be made unreadable for it")
def test_doctor_says_who_can_grant_the_access_that_a_server_lacks(lab):
    """Folders that macOS guards look empty or forbidden to a server, and nothing else says why."""
    lab.configure({"files": dict(fake(lab, "files"), cwd=lab.directory("guarded"))})
    os.chmod(lab.path("guarded"), 0)
    try:
        done = lab.run("doctor")
        assert done.returncode == 1 and "files" in done.stdout and "Privacy & Security" in done.stdout
    finally:
        os.chmod(lab.path("guarded"), 0o700)


def test_the_service_unit_leaves_the_end_of_the_servers_to_the_daemon():
    """systemd's default signals every process of the unit at once: no server could write its last words."""
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()
    lines = text.partition("[Unit]")[2].partition("```")[0].splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line)
    assert unit["KillMode"] == "process" and unit["Type"] == "notify"

    def seconds(name):
        return mcpx.parse_setting(mcpx.SETTINGS[name], mcpx.SETTINGS[name].default)
    assert float(unit["TimeoutStopSec"]) > sum(map(seconds, ("drainTimeout", "stop.eofGrace", "stop.termGrace")))
    assert os.path.isabs(unit["ExecStart"].replace("%h", "/home/you").split()[0])
