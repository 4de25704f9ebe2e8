"""Many hosts, many calls in flight, one child; and things die in the middle.

Whatever happens, every request is answered exactly once, under its own id,
with its own content; progress comes under a token of that request and only
until its answer; afterwards nothing is left over.
"""
import asyncio
import os
import random
import signal
import time

from link import Link, LinkClosed, connect
from place import Failed, expect, processes, wait_until

ANSWER_LIMIT_S = 60

# A cancelled call holds its place until the server answers all the same, or for
# a while (10 s in mcpx), because a server may go on working.
REST_LIMIT_S = 20

# Tables that count what is under way; at rest they are all zero.
AT_REST = ("calls", "waiting", "leases", "questions", "tokens", "hosts")

class Call:
    """One request of the storm: what is sent, and what may come back."""

    def __init__(self, label, rng):
        self.label = label
        self.kind = rng.choice(["echo", "echo", "sleep", "sleep", "big", "fail", "error", "cancel"])
        self.size = rng.choice([10, 1000, 60000])
        self.seconds = rng.uniform(0.0, 0.6)
        self.cancel_after = rng.uniform(0.0, 0.3)
        self.request_id = None
        self.answered = False
        self.progress = []  # values heard under our token
        self.late_progress = 0  # of these, after the answer

    def arguments(self):
        return {
            "echo": {"text": self.label + "." * self.size},
            "sleep": {"seconds": self.seconds, "every": 0.1, "text": self.label},
            "big": {"bytes": self.size},
            "fail": {"message": self.label},
            "error": {"code": -31000, "message": self.label},
            "cancel": {"seconds": 30, "every": 0.1, "text": self.label},
        }[self.kind]

    def params(self):
        name = "sleep" if self.kind == "cancel" else self.kind
        return {"name": name, "arguments": self.arguments(), "_meta": {"progressToken": self.label}}

    def is_right(self, answer):
        """Whether this is what the tool says to these arguments."""
        if self.kind == "error":
            return answer.get("error", {}).get("code") == -31000 and self.label in answer["error"]["message"]
        if self.kind == "cancel":
            return "result" in answer or "error" in answer
        text = "".join(block.get("text", "") for block in answer.get("result", {}).get("content", []))
        if self.kind == "big":
            return len(text) == self.size
        return self.label in text and bool(answer["result"].get("isError")) == (self.kind == "fail")


def is_lost(answer):
    """The answer that says: this call was lost with what carried it."""
    error = answer.get("error") or {}
    return error.get("code") == -32000 and (error.get("data") or {}).get("mcpxStreamLost") is True


class StormHost:
    """One host process's worth of calls over one link."""

    def __init__(self, number, calls, seed):
        self.link = Link()
        self.link.on_message = self.on_message
        rng = random.Random("%d %d" % (seed, number))
        self.calls = [Call("host %d call %d" % (number, index), rng) for index in range(calls)]
        self.by_token = {call.label: call for call in self.calls}
        self.found = []

    def on_message(self, message):
        if message.get("method") != "notifications/progress":
            return
        params = message["params"]
        call = self.by_token.get(params["progressToken"])
        if call is None:
            self.found.append("progress under a token that is not ours: %r" % params["progressToken"])
        elif call.answered:
            call.late_progress += 1
        else:
            call.progress.append(params["progress"])

    async def run(self, may_be_lost):
        """All calls at once; notes what is wrong in `found`."""
        await asyncio.gather(*(self.make(call, may_be_lost) for call in self.calls))

    async def make(self, call, may_be_lost):
        call.request_id, future = self.link.begin("tools/call", call.params())
        if call.kind == "cancel":
            await asyncio.sleep(call.cancel_after)
            if not future.done():
                self.link.notify("notifications/cancelled", {"requestId": call.request_id})
            return  # an answer may or may not come, see check_answers
        try:
            answer = await asyncio.wait_for(asyncio.shield(future), ANSWER_LIMIT_S)
        except asyncio.TimeoutError:
            self.found.append("%s (%s) got no answer within %d s" % (call.label, call.kind, ANSWER_LIMIT_S))
            return
        except LinkClosed as error:
            self.found.append("%s (%s): %s" % (call.label, call.kind, error))
            return
        call.answered = True
        if not call.is_right(answer) and not (may_be_lost and is_lost(answer)):
            self.found.append("%s (%s) got %s" % (call.label, call.kind, str(answer)[:250]))

    def check_answers(self, may_be_lost):
        """After the dust has settled: no second answers, no strange ones, progress in order."""
        known = {call.request_id for call in self.calls}
        for request_id, answers in self.link.answers.items():
            if len(answers) > 1:
                self.found.append("request %r got %d answers" % (request_id, len(answers)))
            if request_id not in known and request_id not in self.link.methods:
                self.found.append("an answer to %r, which nobody asked" % request_id)
        for call in self.calls:
            if call.late_progress:
                self.found.append("%s heard progress after its answer" % call.label)
            if any(b <= a for a, b in zip(call.progress, call.progress[1:])):
                self.found.append("%s heard progress that does not rise: %s" % (call.label, call.progress))
            if call.kind == "sleep" and call.seconds > 0.25 and not call.progress and not may_be_lost:
                self.found.append("%s heard no progress" % call.label)
        self.found += ["a line that is not JSON: %r" % line[:80] for line in self.link.noise]

    def lost(self):
        return sum(1 for answers in self.link.answers.values() for answer in answers if is_lost(answer))


# ---------------------------------------------------------------------------
# What disturbs
# ---------------------------------------------------------------------------


def children(place):
    """The demo servers that run in a place. The process table is quicker to ask than mcpx."""
    mark = str(place.root)
    return [pid for pid, _parent, text in processes() if mark in text and " demo-server" in text]


async def kill_children(place, _daemon, rng):
    """kill -9 the shared child three times at random moments."""
    for _ in range(3):
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        for pid in children(place):
            kill(pid)


async def kill_daemon(_place, daemon, rng):
    """kill -9 the daemon once, while most calls are in flight."""
    await asyncio.sleep(rng.uniform(0.2, 0.4))
    kill(daemon)


async def nothing(_place, _daemon, _rng):
    """The calm storm."""


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was faster


DISTURBANCES = {"calm": nothing, "child killed": kill_children, "daemon killed": kill_daemon}


# ---------------------------------------------------------------------------
# At rest
# ---------------------------------------------------------------------------


def open_files(pid):
    """How many descriptors a process has, where that can be told without a tool.

    A daemon that took a child over from a dead one watches it by a descriptor, one that started it by SIGCHLD.
    """
    directory, count = "/proc/%d/fd" % pid, 0
    try:
        for name in os.listdir(directory):
            try:
                count += os.readlink(os.path.join(directory, name)) != "anon_inode:[pidfd]"
            except FileNotFoundError:
                continue
    except FileNotFoundError:
        return 0
    return count


def at_rest(place):
    """What the daemon holds when nobody is connected, once it has come to rest."""

    def tables():
        status = place.status()
        return status if status and not any(status["tables"].get(name) for name in AT_REST) else None

    try:
        status = wait_until(tables, REST_LIMIT_S, "tables at zero")
    except Failed:
        raise Failed("not at rest: %s" % (place.status() or {}).get("tables")) from None
    return {
        "descriptors of the daemon": open_files(status["daemon"]["pid"]),
        "processes": len(place.survivors()),
        "instances": len(status["instances"]),
    }


async def one_call(place):
    """A single host that comes, calls and goes: it proves that things work."""
    link = await connect(place, ["demo"])
    try:
        await link.initialize()
        answer = await link.request("tools/call", {"name": "echo", "arguments": {"text": "still here"}})
        expect("still here" in str(answer.get("result")), "a call at rest got %s", str(answer)[:300])
    finally:
        await link.close()


# ---------------------------------------------------------------------------
# The check
# ---------------------------------------------------------------------------


async def storm(place, disturbance, hosts, calls, seed):
    await one_call(place)
    before = at_rest(place)
    daemon = place.status()["daemon"]["pid"]
    rng = random.Random(seed)
    crowd = [StormHost(number, calls, seed) for number in range(hosts)]
    try:
        await asyncio.gather(*(connect(place, ["demo"], host.link) for host in crowd))
        await asyncio.gather(*(host.link.initialize() for host in crowd))
        may_be_lost = disturbance != "calm"
        await asyncio.gather(DISTURBANCES[disturbance](place, daemon, rng), *(host.run(may_be_lost) for host in crowd))
        await asyncio.sleep(0.5)  # a second answer would come now
    finally:
        statuses = await asyncio.gather(*(host.link.close() for host in crowd))
    found = []
    for host in crowd:
        host.check_answers(may_be_lost)
        found += host.found
    if any(statuses):
        found.append("shims ended with %s" % sorted(set(statuses)))
    await one_call(place)
    after = at_rest(place)
    for what, count in before.items():
        if after[what] > count:
            found.append("%s: %d before, %d after" % (what, count, after[what]))
    return found, "%d calls, %d lost" % (hosts * calls, sum(host.lost() for host in crowd))


def check_storm(place, disturbance, hosts=32, calls=20):
    place.configure({"demo": place.demo_server(scope="global")})
    # A new seed each day of the month: some variety, and still repeatable.
    seed = int(os.environ.get("MCPX_STORM_SEED", time.localtime().tm_mday))
    found, note = asyncio.run(storm(place, disturbance, hosts, calls, seed))
    return ["seed %d: %s" % (seed, line) for line in found[:20]], note


async def stampede(place, hosts):
    """Hosts that all start at once where nothing runs: one daemon, one child, all served."""
    crowd = [Link() for _ in range(hosts)]
    try:
        await asyncio.gather(*(connect(place, ["demo"], link) for link in crowd))
        await asyncio.gather(*(link.initialize(90) for link in crowd))
        count = {"name": "add", "arguments": {"n": 1}}
        answers = await asyncio.gather(*(link.request("tools/call", count, 60) for link in crowd))
        status = await asyncio.get_running_loop().run_in_executor(None, place.status)
    finally:
        await asyncio.gather(*(link.close() for link in crowd))
    values = sorted(int(answer["result"]["content"][0]["text"]) for answer in answers)
    expect(values == list(range(1, hosts + 1)), "a counter shared by all went %s", values)
    expect(len(status["instances"]) == 1, "%d children for one key", len(status["instances"]))
    running = place.survivors()
    expect(len(running) == 3, "one daemon, its holder and one child should be left, there are %s", running)
    return []


def check_stampede(place, hosts=32):
    place.configure({"demo": place.demo_server(scope="global")})
    return asyncio.run(stampede(place, hosts))
