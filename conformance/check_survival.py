"""The daemon's code exchanged, or the daemon killed, again and again under load.

32 hosts keep four calls each in flight: small and large ones, slow ones, and ones
that count in a server of the host's own, so that a call carried out twice shows.
One host has a question open all the time, and a call of 20 s runs. After each
upgrade nothing at all may differ; after each kill -9 every child must be there
still, and a call has its result or says that it may have been lost.

    python3 check_survival.py --upgrades 1000
    python3 check_survival.py --kills 100
"""
import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time

from check_storm import is_lost
from link import Link, connect
from place import Failed, Place, expect

ANSWER_LIMIT_S = 60
# What a call may take whose daemon is replaced meanwhile.
PROBE_LIMIT_S = 30
LONG_CALL_S, SHORTER_CALL_S = 20, 3


class Worker:
    """One host, with calls in flight until it is told to stop."""

    def __init__(self, number, seed):
        self.link = Link()
        self.rng = random.Random("%d %d" % (seed, number))
        self.number, self.made, self.lost = number, 0, 0
        self.added = self.adds_lost = 0
        self.found = []
        self.stopped = False

    async def run(self, lanes):
        await asyncio.gather(*(self.lane() for _ in range(lanes)))

    async def lane(self):
        while not self.stopped:
            await self.call()

    async def call(self):
        self.made += 1
        word = "host %d call %d " % (self.number, self.made)
        kind = self.rng.choice(["echo", "echo", "sleep", "sleep", "add", "big"])
        text = word + "." * (self.rng.randrange(3000, 250000) if self.rng.random() < 0.08 else 10)
        name, arguments = {
            "echo": ("pool_echo", {"text": text}),
            "sleep": ("pool_sleep", {"seconds": self.rng.uniform(0.001, 0.15), "text": word}),
            "add": ("mine_add", {"n": 1}),
            "big": ("pool_big", {"bytes": self.rng.randrange(10, 250000)}),
        }[kind]
        request_id, future = self.link.begin("tools/call", {"name": name, "arguments": arguments})
        self.link.methods.clear()
        try:
            answer = await asyncio.wait_for(asyncio.shield(future), ANSWER_LIMIT_S)
        except asyncio.TimeoutError:
            self.found.append("%s(%s) had no answer within %d s" % (word, kind, ANSWER_LIMIT_S))
            self.stopped = True
            return
        # Hours of answers are not kept, only how many came to each request.
        self.link.heard.clear()
        self.link.answers[request_id][:] = [None] * len(self.link.answers[request_id])
        if is_lost(answer):
            self.lost += 1
            self.adds_lost += kind == "add"
            return
        said = "".join(block.get("text", "") for block in answer.get("result", {}).get("content", []))
        right = {"echo": said == text, "sleep": word in said, "add": said.isdigit(),
                 "big": len(said) == arguments.get("bytes")}
        self.added += kind == "add"
        if not right[kind]:
            self.found.append("%s(%s) got %s" % (word, kind, str(answer)[:200]))

    async def check_counter(self):
        """Each call that was answered was carried out once; what was lost, once or not at all."""
        answer = await self.link.request("tools/call", {"name": "mine_add", "arguments": {"n": 0}})
        value = int(answer["result"]["content"][0]["text"])
        if not self.added <= value <= self.added + self.adds_lost:
            self.found.append("host %d counted %d calls, %d of them lost; its server carried out %d"
                              % (self.number, self.added + self.adds_lost, self.adds_lost, value))

    def check_answers(self):
        for request_id, answers in self.link.answers.items():
            if len(answers) != 1:
                self.found.append("host %d: %d answers to request %r" % (self.number, len(answers), request_id))
        if self.link.noise:
            self.found.append("host %d heard %r" % (self.number, self.link.noise[0][:100]))


async def in_thread(function, *arguments):
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


async def status_of(place):
    """The status of the daemon, waited for where it is just being replaced."""
    deadline = time.monotonic() + PROBE_LIMIT_S
    while True:
        status = await in_thread(place.status)
        if status is not None:
            return status
        expect(time.monotonic() < deadline, "no daemon came back within %d s", PROBE_LIMIT_S)


def children(status):
    return {row["id"]: row["pid"] for row in status["instances"]}


async def probe(link):
    """How long a call takes that is sent now."""
    began = time.monotonic()
    answer = await link.request("tools/call", {"name": "pool_echo", "arguments": {"text": "?"}}, PROBE_LIMIT_S)
    expect("result" in answer, "a call after the event got %s", str(answer)[:200])
    return time.monotonic() - began


async def upgrade(place, _daemon):
    code, _out, err = await in_thread(place.run, "reload", "--upgrade")
    expect(code == 0, "an upgrade failed: %s", err.strip()[-300:])


async def kill(_place, daemon):
    os.kill(daemon, signal.SIGKILL)


async def survive(place, event, rounds, hosts, seed):
    workers = [Worker(number, seed) for number in range(hosts)]
    patient, watch = Link(capabilities={"elicitation": {}}), Link()
    patient.thinking_s = 10 ** 6         # the person answers when we say so
    links = [worker.link for worker in workers] + [patient, watch]
    await asyncio.gather(*(connect(place, ["pool", "mine"], link) for link in links))
    await asyncio.gather(*(link.initialize() for link in links))
    for worker in workers:
        await worker.call()
        await worker.link.request("tools/call", {"name": "mine_add", "arguments": {"n": 0}})
    asked_id, asked = patient.begin("tools/call", {"name": "mine_ask", "arguments": {"message": "?"}})
    tasks = [asyncio.ensure_future(worker.run(4)) for worker in workers]
    before = await status_of(place)
    daemon, pids, pauses, found = before["daemon"]["pid"], children(before), [], []
    long_call = None
    upgrading, long_s = event is upgrade, LONG_CALL_S if rounds > 20 else SHORTER_CALL_S
    for number in range(rounds):
        if long_call is None or long_call.done():
            _id, long_call = watch.begin("tools/call", {"name": "pool_sleep", "arguments": {"seconds": long_s}})
        waiting = asyncio.ensure_future(asyncio.sleep(0.01)) if upgrading else None
        await event(place, daemon)
        pauses.append(await probe(watch))
        if waiting is not None:
            await waiting
        status = await status_of(place) if not upgrading or number % 10 == 9 else None
        if status is not None:
            if upgrading and status["daemon"]["pid"] != daemon:
                found.append("round %d: another daemon runs" % number)
            if not pids.items() <= children(status).items():
                found.append("round %d: children changed: %s, now %s" % (number, pids, children(status)))
                break
            daemon = status["daemon"]["pid"]
        if not upgrading:
            await asyncio.sleep(random.uniform(0.05, 0.4))
        if any(worker.found for worker in workers) or found:
            break
    for worker in workers:
        worker.stopped = True
    await asyncio.gather(*tasks)
    answer = await asyncio.wait_for(long_call, long_s + ANSWER_LIMIT_S)
    if "result" not in answer and (upgrading or not is_lost(answer)):
        found.append("the call of %d s got %s" % (long_s, str(answer)[:200]))
    if upgrading:
        question = next(message for message, _line in patient.heard if message.get("method") == "elicitation/create")
        patient.send({"jsonrpc": "2.0", "id": question["id"],
                      "result": {"action": "accept", "content": {"answer": "42"}}})
    answer = await asyncio.wait_for(asked, ANSWER_LIMIT_S)
    if upgrading and "42" not in str(answer.get("result")):
        found.append("the question that was open all the time ended in %s" % str(answer)[:200])
    for worker in workers:
        await worker.check_counter()
    await asyncio.gather(*(link.close() for link in links))
    for worker in workers:
        worker.check_answers()
        found += worker.found
    made, lost = sum(worker.made for worker in workers), sum(worker.lost for worker in workers)
    if upgrading and lost:
        found.append("%d calls were lost" % lost)
    pauses.sort()
    note = "%d rounds, %d calls, %d lost, %d children; a call at that moment took %.0f ms, 95 %% %.0f, at most %.0f" % (
        len(pauses), made, lost, len(pids), statistics.median(pauses) * 1e3, pauses[int(len(pauses) * 0.95)] * 1e3,
        pauses[-1] * 1e3)
    return found, note


def check_survival(place, what="upgrades", rounds=10, hosts=8, seed=1):
    place.configure({"pool": place.demo_server(scope="global"), "mine": place.demo_server(scope="session", max=100)},
                    **{"maxInstances": 200, "question.timeout": "24h"})
    found, note = asyncio.run(survive(place, {"upgrades": upgrade, "kills": kill}[what], rounds, hosts, seed))
    return found[:20], note


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrades", type=int, metavar="N")
    parser.add_argument("--kills", type=int, metavar="N")
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    status = 0
    for what in ("upgrades", "kills"):
        rounds = getattr(options, what)
        if rounds:
            place = Place("survival")
            try:
                found, note = check_survival(place, what, rounds, options.hosts, options.seed)
                found += place.leftovers()
                print("%s, seed %d: %s" % (what, options.seed, note))
                for line in found:
                    print("  " + line)
                if found:
                    status = 1
                    print(place.logs())
            except Failed as error:
                status = 1
                print("%s, seed %d: %s\n%s" % (what, options.seed, error, place.logs()))
            finally:
                place.remove()
    return status


if __name__ == "__main__":
    sys.exit(main())
