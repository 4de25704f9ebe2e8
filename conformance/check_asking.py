#!/usr/bin/env python3
"""Fifty hosts of two eras and two transports on one server that asks: whose question is it?

usage: check_asking.py [--hosts N] [--seed N] [--mcpx FILE] [--keep]

Every host makes calls, of tools that ask and of tools that never do, all at
once. It answers what it is asked with a secret of its own, so each result
must contain its caller's secret; the text of each question names its call, so
each host sees whether it was asked for another. That must never happen. A
question whose host cannot be told waits in `mcpx asks`, where the person of
this check answers it, for the host whose call it is.

The first round is made before mcpx knows which tools ask, the second after
that: then at most one question in a hundred may wait. In the third round some
persons think for seconds and some hosts never come back with an answer; that
may neither hold up the other hosts nor get them a wrong question. In the last
round hosts cancel calls whose questions are still to come.
"""
import argparse
import asyncio
import collections
import concurrent.futures
import itertools
import json
import os
import random
import re
import socket
import sys
import time
from pathlib import Path

import place as places
from asking_fixture import TOOLS
from link import CLIENT_INFO, Link, LinkClosed
from place import Failed, Place, expect

LEGACY = "2025-11-25"
MODERN = "2026-07-28"
FIXTURE = Path(__file__).resolve().parent / "asking_fixture.py"
SERVER = "asking"  # its name in the config

CAPABILITIES = {"elicitation": {"form": {}}, "sampling": {}}
META = "io.modelcontextprotocol/"

HOSTS = 50
CANCELLING_HOSTS = 5  # at most, in the last round
THINKING_HOSTS = 6  # in the third round
# Of the questions of the second and third round, these may have to wait for a person.
WAITING_LIMIT = 0.01

DELAY_S = 0.08  # before a question or a result: anything up to this
LONG_S = 4.0  # the same for the call that outlasts cancelled ones
THINKING_S = 4.0  # what a person takes who thinks, at most
CALL_LIMIT_S = 40
START_LIMIT_S = 30
# More than a call may take: who waits for those who never come back is found.
QUESTION_TIMEOUT = "60s"
POLL_S = 0.4  # how often the person looks
HANDS = 3  # commands that the person runs at once, besides looking
COMMAND_EVERY = 6  # every so many-th answer is given by a command

CALL_ID = re.compile(r"question (\d+) of call <([^>]+)>")

UNKNOWN = "confirm"  # asks, but is not called before the last round
ASKING = [name for name, kinds in TOOLS.items() if kinds and name != UNKNOWN]
QUIET = [name for name, kinds in TOOLS.items() if not kinds]


# ---------------------------------------------------------------------------
# Calls and questions
# ---------------------------------------------------------------------------


class Call:
    """One call of the check: what is sent, and what it must come to."""

    def __init__(self, call_id, tool, rng, longest=DELAY_S, cancel_after=None, left=False):
        self.id = call_id
        self.tool = tool
        self.times = rng.choice([1, 2]) if TOOLS[tool] else 0
        self.delays = [round(rng.uniform(0, longest), 3) for _ in range(self.times + 1)]
        self.cancel_after = cancel_after
        self.left = left  # its host does not come back with an answer

    def params(self):
        return {"name": self.tool, "arguments": {"id": self.id, "times": self.times, "delays": self.delays}}

    def has_end(self):
        """Is its answer waited for?"""
        return self.cancel_after is None and not self.left

    def questions(self):
        return [(self.id, number + 1) for number in range(self.times)]

    def fault(self, answer, secret):
        """What is wrong with the answer, or None."""
        try:
            told = json.loads(answer["result"]["content"][0]["text"])
        except (KeyError, IndexError, ValueError):
            return "%s (%s) got %s" % (self.id, self.tool, str(answer)[:300])
        if told != {"id": self.id, "answers": [secret] * self.times}:
            return "%s (%s, asks %d times) came to %s" % (self.id, self.tool, self.times, str(told)[:300])
        return None


def question_of(params):
    """(id of the call, number of the question) that the text of a question names."""
    text = params["message"] if "message" in params else params["messages"][0]["content"]["text"]
    number, call_id = CALL_ID.search(text).groups()
    return call_id, int(number)


def answer_with(method, secret):
    if method == "elicitation/create":
        return {"action": "accept", "content": {"secret": secret}}
    return {"role": "assistant", "model": "none", "content": {"type": "text", "text": secret}}


# ---------------------------------------------------------------------------
# Hosts
# ---------------------------------------------------------------------------


class Host:
    """One host. `heard` counts the questions it was asked, `found` is what went wrong."""

    def __init__(self, name, rng, port):
        self.name = name
        self.secret = "%s-%08x" % (name, rng.getrandbits(32))
        self.port = port
        self.thinking_s = 0.0  # before each answer
        self.mine = set()  # ids of the calls that it made
        self.heard = collections.Counter()
        self.found = []

    async def make(self, call):
        """Make a call to its end; notes what is wrong with its answer."""
        self.mine.add(call.id)
        try:
            answer = await asyncio.wait_for(self.call(call), CALL_LIMIT_S)
        except asyncio.TimeoutError:
            self.found.append("%s (%s) got no answer within %g s" % (call.id, call.tool, CALL_LIMIT_S))
            return
        except (LinkClosed, Failed, OSError, asyncio.IncompleteReadError) as error:
            self.found.append("%s (%s): %r" % (call.id, call.tool, error))
            return
        if call.has_end():
            fault = call.fault(answer, self.secret)
            if fault:
                self.found.append(fault)

    def on_question(self, method, params, call=None):
        """Answer a question; `call` is that which it came with, where that says whose it is."""
        asked = question_of(params)
        self.heard[asked] += 1
        if asked[0] not in self.mine:
            self.found.append("LEAK: %s was asked question %d of %s" % (self.name, asked[1], asked[0]))
        elif call is not None and asked[0] != call.id:
            self.found.append("LEAK: %s was asked question %d of %s in answer to %s" % (
                self.name, asked[1], asked[0], call.id))
        return answer_with(method, self.secret)

    def think(self, seconds):
        """From now on, take so long for every answer."""
        self.thinking_s = seconds

    async def start(self, place):
        raise NotImplementedError

    async def call(self, call):
        """Make a call and return the answer, or None where it was cancelled."""
        raise NotImplementedError

    async def close(self):
        """Go away, in order."""


class StdioHost(Host):
    """What the two eras have in common over stdio."""

    async def start(self, place):
        self.link = Link(LEGACY, CAPABILITIES, lambda method, params: self.on_question(method, params or {}))
        await self.link.start(place.mcpx("serve", SERVER), place.env(), place.work)

    def think(self, seconds):
        super().think(seconds)
        self.link.thinking_s = seconds

    async def finish(self, request_id, future, call):
        """Wait for an answer; or cancel the request, and wait for nothing."""
        if call.cancel_after is None:
            return await future
        await asyncio.sleep(call.cancel_after)
        if not future.done():
            self.link.notify("notifications/cancelled", {"requestId": request_id})
        return None

    async def close(self):
        for request_id, answers in self.link.answers.items():
            if len(answers) != 1:
                self.found.append("%s: request %r got %d answers" % (self.name, request_id, len(answers)))
        self.found += ["%s: a line that is not JSON: %r" % (self.name, line[:80]) for line in self.link.noise]
        status = await self.link.close()
        if status:
            self.found.append("%s: the shim ended with %d" % (self.name, status))


class LegacyStdioHost(StdioHost):
    async def start(self, place):
        await super().start(place)
        await self.link.initialize(START_LIMIT_S)

    async def call(self, call):
        request_id, future = self.link.begin("tools/call", call.params())
        return await self.finish(request_id, future, call)


def modern_params(params):
    """Params with what every request of the modern era carries."""
    meta = {"protocolVersion": MODERN, "clientInfo": CLIENT_INFO, "clientCapabilities": CAPABILITIES}
    return dict(params, _meta={META + name: value for name, value in meta.items()})


class ModernHost(Host):
    """Questions come as the answer to a call here, and the answers go into a retry."""

    async def call(self, call):
        params = call.params()
        while True:
            answer = await self.request(modern_params(params), call)
            result = (answer or {}).get("result") or {}
            if result.get("resultType") != "input_required":
                return answer
            # Over stdio, two calls of a host have one asker, so either may carry the other's questions.
            mine = call if isinstance(self, ModernHttpHost) else None
            responses = {
                key: self.on_question(entry["method"], entry.get("params") or {}, mine)
                for key, entry in (result.get("inputRequests") or {}).items()
            }
            if call.left:
                return answer
            await asyncio.sleep(self.thinking_s)
            params = dict(call.params(), inputResponses=responses, requestState=result.get("requestState"))

    async def request(self, params, call):
        raise NotImplementedError


class ModernStdioHost(ModernHost, StdioHost):
    async def start(self, place):
        await StdioHost.start(self, place)
        answer = await self.link.request("server/discover", modern_params({}), START_LIMIT_S)
        expect("result" in answer, "server/discover got %s", str(answer)[:300])

    async def request(self, params, call):
        request_id, future = self.link.begin("tools/call", params)
        return await self.finish(request_id, future, call)


class LegacyHttpHost(Host):
    """A session; what is asked comes on the stream of one of its calls."""

    async def start(self, place):
        self.ids = itertools.count(1)
        self.headers = {}
        params = {"protocolVersion": LEGACY, "capabilities": CAPABILITIES, "clientInfo": CLIENT_INFO}
        async with self.post(id=0, method="initialize", params=params) as reply:
            self.headers = {"Mcp-Session-Id": reply.headers["mcp-session-id"], "MCP-Protocol-Version": LEGACY}
            async for message in reply.messages():
                expect("result" in message, "initialize got %s", str(message)[:300])
        await self.tell(method="notifications/initialized")

    def post(self, **message):
        return Exchange(self.port, "POST", "/mcp/" + SERVER, dict(message, jsonrpc="2.0"), self.headers)

    async def tell(self, **message):
        """Send what has no answer."""
        async with self.post(**message) as reply:
            expect(reply.status == 202, "%s got status %d", str(message)[:100], reply.status)

    async def call(self, call):
        request_id = next(self.ids)
        async with self.post(id=request_id, method="tools/call", params=call.params()) as reply:
            async for message in reply.messages():
                if "method" not in message:
                    return message
                if "id" in message:
                    # Of several calls of one session any stream may carry it: they have one asker.
                    result = self.on_question(message["method"], message.get("params") or {})
                    await asyncio.sleep(self.thinking_s)
                    await self.tell(id=message["id"], result=result)
        raise Failed("the stream of the call ended without its answer")

    async def close(self):
        async with Exchange(self.port, "DELETE", "/mcp/" + SERVER, None, self.headers) as reply:
            if reply.status not in (200, 202, 204):
                self.found.append("%s: DELETE got status %d" % (self.name, reply.status))


class ModernHttpHost(ModernHost):
    async def start(self, place):
        self.ids = itertools.count(1)

    async def request(self, params, call):
        headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": call.tool}
        message = {"jsonrpc": "2.0", "id": next(self.ids), "method": "tools/call", "params": params}
        async with Exchange(self.port, "POST", "/mcp/" + SERVER, message, headers) as reply:
            async for answer in reply.messages():
                if "method" not in answer:
                    return answer
        raise Failed("the stream of the call ended without its answer")


KINDS = (LegacyStdioHost, ModernStdioHost, LegacyHttpHost, ModernHttpHost)


class Exchange:
    """One HTTP request on a connection of its own, and the messages that it is answered with."""

    def __init__(self, port, method, path, body, headers):
        data = b"" if body is None else json.dumps(body).encode()
        lines = {
            "Host": "127.0.0.1:%d" % port,
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Content-Length": len(data),
            "Connection": "close",
        }
        lines.update(headers)
        head = "%s %s HTTP/1.1\r\n" % (method, path) + "".join("%s: %s\r\n" % pair for pair in lines.items())
        self.port = port
        self.request = head.encode() + b"\r\n" + data

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(self.request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *rest = head.split("\r\n")
        self.status = int(first.split()[1])
        pairs = [line.split(":", 1) for line in rest if line]
        self.headers = {name.strip().lower(): value.strip() for name, value in pairs}
        return self

    async def __aexit__(self, *_error):
        self.writer.close()

    async def _lines(self):
        """The lines of the body, of whatever framing."""
        if self.headers.get("transfer-encoding") != "chunked":
            size = int(self.headers.get("content-length", -1))
            body = await (self.reader.readexactly(size) if size >= 0 else self.reader.read())
            for line in body.decode().split("\n") + [""]:
                yield line
            return
        rest = b""
        while True:
            size = int((await self.reader.readline()).split(b";")[0], 16)
            piece = await self.reader.readexactly(size)
            await self.reader.readline()
            if not size:
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.decode().rstrip("\r")

    async def messages(self):
        """The JSON-RPC messages of the body: one of JSON, or those of an event stream."""
        is_stream = self.headers.get("content-type", "").startswith("text/event-stream")
        data = []
        async for line in self._lines():
            if not is_stream:
                data.append(line)
            elif line.startswith("data:"):
                data.append(line[5:].strip())
            if line or not data:
                continue
            text, data = "\n".join(data).strip(), []
            if text:
                yield json.loads(text)


# ---------------------------------------------------------------------------
# The person
# ---------------------------------------------------------------------------


class Person:
    """Looks at `mcpx asks` and answers what waits there, for the host whose call it is.

    By `mcpx answer` now and then, otherwise by the control API: on a loaded machine
    a command for each question would take longer than a call may. A completion is
    no form that a person fills in, so those always go to the API.
    """

    def __init__(self, place, port, hosts):
        self.place = place
        self.port = port
        self.hosts = hosts
        self.waited = collections.Counter()  # questions that were found waiting
        self.why = collections.Counter()
        self.found = []
        self._seen = set()
        self._answers = []
        # A look must not queue behind the answers: a completion waits for seconds only.
        self._eyes = concurrent.futures.ThreadPoolExecutor(1)
        self._hands = concurrent.futures.ThreadPoolExecutor(HANDS)

    async def watch(self):
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            code, out, err = await self._run(self._eyes, "asks", "--json")
            if code:
                self.found.append("mcpx asks ended with %d: %s" % (code, err.strip()[-300:]))
                return
            for question in json.loads(out)["questions"]:
                if question["host"] is None and question["why"] and question["id"] not in self._seen:
                    self._seen.add(question["id"])
                    self.waited[question_of(question["params"])] += 1
                    self.why[question["why"]] += 1
                    by_command = len(self._answers) % COMMAND_EVERY == 0
                    self._answers.append(asyncio.ensure_future(self.answer(question, by_command)))

    async def rest(self):
        """Until every answer is given."""
        for answer in self._answers:
            await answer

    async def answer(self, question, by_command):
        number, call_id = str(question["id"]), question_of(question["params"])[0]
        secret = next(host.secret for host in self.hosts if call_id in host.mine)
        if by_command and question["method"] == "elicitation/create":
            code, out, err = await self._run(self._hands, "answer", number, "accept", "secret=" + secret)
            if code and not is_late(err):
                self.found.append("mcpx answer ended with %d: %s" % (code, (err or out).strip()[-300:]))
            return
        body = {"result": answer_with(question["method"], secret)}
        async with Exchange(self.port, "POST", "/v1/asks/" + number, body, {}) as reply:
            async for told in reply.messages():
                if reply.status != 200 and not is_late(str(told)):
                    self.found.append("POST /v1/asks got %d: %s" % (reply.status, told))

    async def _run(self, threads, *arguments):
        return await asyncio.get_running_loop().run_in_executor(threads, self.place.run, *arguments)


def is_late(text):
    """Does this say that the question was settled meanwhile?"""
    return "no open question" in text


# ---------------------------------------------------------------------------
# Rounds
# ---------------------------------------------------------------------------


class Round:
    """Calls of many hosts, all at once, and what became of their questions."""

    def __init__(self, name, place, port, hosts):
        self.name = name
        self.hosts = hosts
        self.person = Person(place, port, hosts)
        self.calls = []  # (host, call)

    def add(self, host, tool, rng, **how):
        call = Call("%s.%s.%d" % (host.name, self.name, len(self.calls)), tool, rng, **how)
        self.calls.append((host, call))
        return call

    async def run(self):
        started = time.monotonic()
        watching = asyncio.ensure_future(self.person.watch())
        try:
            await asyncio.gather(*(host.make(call) for host, call in self.calls))
        finally:
            await self.person.rest()
            watching.cancel()
        self.seconds = time.monotonic() - started
        return self.findings()

    def expected(self):
        """The questions of calls that were neither cancelled nor left."""
        return [question for _host, call in self.calls if call.has_end() for question in call.questions()]

    def findings(self):
        found = list(self.person.found)
        heard = sum((host.heard for host in self.hosts), collections.Counter())
        for question in self.expected():
            # One that waits goes to its host after all, when it becomes plain whose it is.
            if heard[question] > 1 or heard[question] + self.person.waited[question] == 0:
                found.append("question %d of %s was put %d times" % (question[1], question[0], heard[question]))
        return found

    def share(self):
        """The share of questions that had to wait for a person."""
        expected = self.expected()
        return sum(1 for question in expected if self.person.waited[question]) / max(1, len(expected))

    def note(self):
        expected = self.expected()
        waited = sum(1 for question in expected if self.person.waited[question])
        text = "%s: %.0f s" % (self.name, self.seconds)
        if expected:
            text += ", %d of %d questions waited (%.1f %%)" % (waited, len(expected), 100 * self.share())
        return text


def ordinary_round(name, place, port, hosts, rng, more=False):
    """Each host makes a call that asks and one that does not; with `more`, some make a third."""
    made = Round(name, place, port, hosts)
    for host in hosts:
        made.add(host, rng.choice(ASKING), rng)
        made.add(host, rng.choice(QUIET), rng)
        if more and rng.random() < 0.5:
            made.add(host, rng.choice(ASKING + QUIET), rng)
    rng.shuffle(made.calls)
    return made


def thinking_round(name, place, port, hosts, rng):
    """An ordinary round, but for persons who think and hosts that never answer."""
    made = Round(name, place, port, hosts)
    modern = ModernStdioHost, ModernHttpHost
    leaving = [rng.choice([host for host in hosts if isinstance(host, kind)]) for kind in modern]
    thinking = rng.sample([host for host in hosts if host not in leaving], THINKING_HOSTS)
    for host in hosts:
        host.think(rng.uniform(1, THINKING_S) if host in thinking else 0)
        made.add(host, rng.choice(ASKING), rng, left=host in leaving)
        made.add(host, rng.choice(QUIET), rng)
    # They are at it when the others come.
    slow = thinking + leaving
    made.calls.sort(key=lambda pair: pair[0] not in slow)
    return made


def cancelling_round(name, place, port, hosts, rng):
    """Hosts cancel calls that ask all the same, and one other host has a call that outlasts them.

    They ask late, and the tool is new to mcpx: it must still not take the questions for the other's.
    """
    made = Round(name, place, port, hosts)
    stdio = [host for host in hosts if isinstance(host, StdioHost)]
    for host in rng.sample(stdio, min(len(stdio) - 1, CANCELLING_HOSTS)):
        made.add(host, UNKNOWN, rng, longest=1.0, cancel_after=rng.uniform(DELAY_S, 2 * DELAY_S))
    cancelling = [host for host, _call in made.calls]
    other = made.add(rng.choice([host for host in hosts if host not in cancelling]), rng.choice(QUIET), rng)
    other.delays = [LONG_S]
    return made


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def ask_around(place, port, count, rng):
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    rng.shuffle(kinds)
    hosts = [kind("%s%d" % (kind.__name__[:-4], number), rng, port) for number, kind in enumerate(kinds)]
    # The door has to be open before the first host over HTTP comes.
    stdio = [host for host in hosts if isinstance(host, StdioHost)]
    over_http = [host for host in hosts if host not in stdio]
    notes, found = [], []
    started = []
    begun = time.monotonic()
    try:
        for group in (stdio, over_http):
            started += group
            await asyncio.gather(*(host.start(place) for host in group))
        notes.append("%d hosts in %.0f s" % (count, time.monotonic() - begun))
        first = ordinary_round("first", place, port, hosts, rng)
        found += await first.run()
        second = ordinary_round("second", place, port, hosts, rng, more=True)
        found += await second.run()
        third = thinking_round("thinking", place, port, hosts, rng)
        found += await third.run()
        for made in (second, third):
            if made.share() > WAITING_LIMIT:
                found.append("%s: of the questions of tools known to ask, %.1f %% waited: %s" % (
                    made.name, 100 * made.share(), dict(made.person.why)))
        for host in hosts:
            host.think(0)
        last = cancelling_round("cancels", place, port, hosts, rng)
        found += await last.run()
        notes += [made.note() for made in (first, second, third, last)]
        status = await asyncio.get_running_loop().run_in_executor(None, place.status)
    finally:
        await asyncio.gather(*(host.close() for host in started), return_exceptions=True)
    expect(len(status["instances"]) == 1, "%d children, wanted is one that all share", len(status["instances"]))
    for host in hosts:
        found += host.found
    return found, ", ".join(notes)


def check_asking(place, hosts=HOSTS, seed=None):
    port = free_port()
    entry = {
        "command": place.python,
        "args": [str(FIXTURE)],
        "mcpx": {"scope": "global", "sharing": "shared", "protocol": "legacy", "question.timeout": QUESTION_TIMEOUT},
    }
    place.configure({SERVER: entry}, **{"http.listen": "127.0.0.1:%d" % port, "http.auth": "none"})
    # A new seed each day of the month: some variety, and still repeatable.
    if seed is None:
        seed = int(os.environ.get("MCPX_STORM_SEED", time.localtime().tm_mday))
    found, note = asyncio.run(ask_around(place, port, hosts, random.Random(seed)))
    found.sort(key=lambda line: not line.startswith("LEAK"))
    return ["seed %d: %s" % (seed, line) for line in found[:20]], "seed %d, %s" % (seed, note)


# ---------------------------------------------------------------------------
# By itself
# ---------------------------------------------------------------------------


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--mcpx", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(argv)
    if options.mcpx:
        places.MCPX = options.mcpx.resolve()
    place = Place("asking")
    started = time.monotonic()
    found = []
    try:
        try:
            found, note = check_asking(place, options.hosts, options.seed)
            print(note)
        except Failed as failure:
            found = [str(failure)]
        found += ["left over: " + left for left in place.leftovers()]
        if found:
            found.append("logs in %s\n%s" % (place.root, place.logs()))
    finally:
        if not (options.keep and found):
            place.remove()
    for line in found:
        print("      " + line.replace("\n", "\n      "))
    print("%s  (%.1f s)" % ("FAIL" if found else "PASS", time.monotonic() - started))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
