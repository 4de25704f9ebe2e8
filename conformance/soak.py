#!/usr/bin/env python3
"""Hosts come and go at full load, for as long as you like; what the daemon holds must stay as it was.

usage: soak.py [--seconds N] [--hosts N] [--seed N]

    --seconds N   how long (1800)
    --hosts N     hosts over stdio at a time (32), each with four calls in flight and a server of its own
    --seed N      where chance starts (from the clock); printed

A host lives some seconds; then it leaves in good order, or is killed in the middle of its calls, and another comes.
Two more clients per HTTP era open sessions or connections, call, and go. Every few seconds the daemon's memory,
descriptors, processes and tables are looked at: those of the last fifth must be those of the second. The last line
is `N hosts, N calls, N problems`.
"""
import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import threading
import time

from check_survival import Worker, in_thread
from faults_watch import Watch
from fuzz_live import free_port
from link import LinkClosed, connect
from place import Failed, Place, wait_until

LIFE_S = (2.0, 20.0)
LOOK_EVERY_S = 5.0
# What the last looks may be above those of the second fifth: the noise of a full load.
MEMORY_SLACK = 1.10
MEMORY_SLACK_KIB = 2048
COUNT_SLACK = 1.15
HTTP_CALLS = 40
MODERN = "2026-07-28"
META = "io.modelcontextprotocol/"


class Guest(Worker):
    """A host that does not stay. It may be killed with its calls in flight, which is nobody's mistake."""

    killed = False

    async def call(self):
        try:
            await super().call()
        except LinkClosed:
            self.stopped = True
            if not self.killed:
                self.found.append("host %d lost its server: %s" % (self.number, self.link.complaint()))


class Soak:
    """Everything in one event loop, but for the clients over HTTP."""

    def __init__(self, options):
        self.options, self.rng = options, random.Random(options.seed)
        self.place = Place("soak")
        self.watch = Watch(self.place)
        self.port = free_port()
        self.hosts = self.calls = 0
        self.over = False
        self.found, self.samples = [], []

    # -- who comes and goes ------------------------------------------------------------

    async def seat(self, number):
        """One place among the hosts: as one leaves, another comes."""
        while not self.over:
            self.hosts += 1
            guest = Guest(number * 100000 + self.hosts, self.options.seed)
            await connect(self.place, ["pool", "mine"], guest.link)
            await guest.link.initialize()
            work = asyncio.ensure_future(guest.run(4))
            await asyncio.sleep(self.rng.uniform(*LIFE_S))
            guest.stopped = True
            if self.rng.random() < 0.25:
                guest.killed = True
                guest.link.process.kill()
            await work
            if not guest.killed:
                await guest.check_counter()
                await guest.link.close()
                guest.check_answers()
            else:
                await guest.link.process.wait()
            self.calls += guest.made
            self.found += guest.found

    def http_client(self, modern):
        """A client over HTTP: connections that end, sessions that are deleted."""
        while not self.over:
            try:
                self.http_visit(modern)
            except (OSError, http.client.HTTPException) as error:
                self.found.append("over HTTP (%s): %r" % ("modern" if modern else "legacy", error))
                return

    def http_visit(self, modern):
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}

        def post(method, params, request_id=None, **more):
            message = {"jsonrpc": "2.0", "method": method, "params": params}
            if request_id is not None:
                message["id"] = request_id
            link.request("POST", "/mcp/pool", json.dumps(message), dict(headers, **more))
            answer = link.getresponse()
            return answer.headers, answer.read().decode()

        if not modern:
            hello = {"protocolVersion": "2025-11-25", "capabilities": {},
                     "clientInfo": {"name": "soak", "version": "1"}}
            answered, _body = post("initialize", hello, 0)
            headers["Mcp-Session-Id"] = answered["Mcp-Session-Id"]
            post("notifications/initialized", {})
        for number in range(1, HTTP_CALLS):
            text = "visit %d" % number
            params = {"name": "echo", "arguments": {"text": text}}
            more = {}
            if modern:
                params["_meta"] = {META + "protocolVersion": MODERN, META + "clientCapabilities": {}}
                more = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": "echo"}
            _answered, body = post("tools/call", params, number, **more)
            self.calls += 1
            if text not in body:
                self.found.append("over HTTP: %s got %s" % (text, body[:200]))
        if not modern:
            link.request("DELETE", "/mcp/pool", headers={"Mcp-Session-Id": headers["Mcp-Session-Id"]})
            link.getresponse().read()
        link.close()

    # -- what is held ------------------------------------------------------------------

    async def look(self, until):
        """Look every few seconds, and print a line about once in a thirtieth of the time."""
        printed = 0.0
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY_S)
            sample = await in_thread(self.watch.footprint)
            self.samples.append(sample)
            if time.monotonic() - printed > self.options.seconds / 30:
                printed = time.monotonic()
                self.show("%5d s left" % (until - printed), sample)
            self.found += ["mcpx made a mistake: %s" % line[-1500:] for line in self.watch.mistakes()]
            if self.found:
                break
        self.over = True

    def show(self, when, sample):
        print("%s  %6d KiB, %4d descriptors, %4d processes, %3d instances; %d hosts, %d calls so far" % (
            when, sample["memory"], sample["descriptors"], sample["processes"], sample["tables"]["instances"],
            self.hosts, self.calls), flush=True)

    def judge(self):
        fifth = len(self.samples) // 5
        if not fifth:
            return
        parts = self.samples[fifth:2 * fifth], self.samples[-fifth:]
        for name, slack, more in (("memory", MEMORY_SLACK, MEMORY_SLACK_KIB), ("descriptors", COUNT_SLACK, 4),
                                  ("processes", COUNT_SLACK, 4)):
            before, after = (statistics.median(sample[name] for sample in part) for part in parts)
            print("%s: %d in the second fifth, %d in the last" % (name, before, after))
            if after > before * slack + more:
                self.found.append("%s grew from %d to %d" % (name, before, after))

    async def run(self):
        self.place.configure(
            {"pool": self.place.demo_server(scope="global"), "mine": self.place.demo_server(scope="session", max=100)},
            **{"maxInstances": 200, "keep": "1s", "http.listen": "127.0.0.1:%d" % self.port,
               "http.auth": "none"})
        self.place.run("call", "pool.echo", "text=x")
        self.show("at first    ", self.watch.footprint())
        threads = [threading.Thread(target=self.http_client, args=(modern,), daemon=True)
                   for modern in (True, False) for _ in range(2)]
        for thread in threads:
            thread.start()
        await asyncio.gather(self.look(time.monotonic() + self.options.seconds),
                             *(self.seat(number) for number in range(self.options.hosts)))
        for thread in threads:
            await in_thread(thread.join, 60)
        self.judge()
        wait_until(lambda: self.watch.status()["tables"]["instances"] < 2, 60, "only what is shared is left")
        time.sleep(2)
        self.show("at rest     ", self.watch.footprint())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print("seed %d" % options.seed, flush=True)
    soak = Soak(options)
    try:
        asyncio.run(soak.run())
        soak.found += ["left over: %s" % left for left in soak.place.leftovers()]
    except Failed as error:
        soak.found.append(str(error))
    finally:
        for problem in soak.found[:15]:
            print("PROBLEM %s" % problem)
        if soak.found:
            print(soak.place.logs())
        soak.place.remove()
    print("%d hosts, %d calls, %d problems" % (soak.hosts, soak.calls, len(soak.found)))
    return 1 if soak.found else 0


if __name__ == "__main__":
    sys.exit(main())
