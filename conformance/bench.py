#!/usr/bin/env python3
"""Measure mcpx against other ways to put something between hosts and servers.

usage: bench.py [--quick] [--only PHASE] [--peers NAMES] [--json FILE] [--list]

    --quick        a check of ratios with generous margins, floors but no peers (40 s): for CI
    --only PHASE   only this phase (may be repeated); --list prints them
    --peers NAMES  comma separated, or "all" (default) or "none"
    --json FILE    all numbers, "-" for stdout
    --list         print phases, contestants and targets

All contestants put their hosts in front of the same tiny server (bench_upstream.py) and are
measured interleaved in one run, so that what else the machine does hits all alike. Beside
mcpx and its peers there are

    direct  the host launches the server itself
    raw     two byte relays in Python with mcpx's hops, a server per host (bench_floors.py)
    mux     the same with one server, and JSON decoding, a changed id and encoding

Absolute times depend on the machine; the targets are ratios within one run. Linux only.
"""
import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_client
import install
from bench_client import Broken
from bench_contestants import (
    CONFIG, PYTHON, UPSTREAM, Contestant, Running, cpu_seconds, floors, mcpx_config, memory, ours, peers, plain_mcpx)
from place import MCPX

MIB = 1 << 20
MCPX_STDIO = "mcpx"
MCPX_HTTP = ("mcpx http", "mcpx http 2026-07-28")


def say(text, *args):
    """Progress goes to stderr, results to stdout."""
    print(text % args if args else text, file=sys.stderr, flush=True)


def median(values):
    return statistics.median(values) if values else None


def p99(values):
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else None


class Plan:
    """How much is measured: counts and seconds, of a full run or a quick one."""

    def __init__(self, quick):
        self.quick = quick
        self.latency_rounds, self.latency_calls = (12, 40) if quick else (30, 40)
        self.start_rounds, self.cold_rounds = (5, 0) if quick else (15, 3)
        self.load_levels = (8,) if quick else (1, 8, 32, 256)
        self.load_rounds, self.load_seconds = (6, 0.2) if quick else (12, 0.4)
        self.peer_rounds = 3
        self.blob_sizes = (MIB,) if quick else (64 << 10, MIB, 8 * MIB)
        self.blob_rounds = {64 << 10: 60, MIB: 20, 8 * MIB: 8}
        self.memory_hosts = (1, 8) if quick else (1, 8, 32, 256)
        self.http_levels = (8,) if quick else (8, 32)
        self.crowd_hosts, self.crowd_sessions, self.crowd_servers = 1000, 200, 50


class Bench:
    """What runs in one measurement, what it found, and what failed."""

    def __init__(self, plan, contestants):
        self.plan, self.contestants = plan, contestants
        self.results = {}  # phase -> what it found
        self.failures = {}  # contestant -> {phase: why}

    def failed(self, phase, name, error):
        self.failures.setdefault(name, {})[phase] = str(error)[:300]
        say("  %s, %s: %s", phase, name, str(error)[:300])

    def start(self, phase, rows, hosts=1):
        """Start contestants with hosts that are ready; those that fail are noted and left out."""
        running = []
        for row in rows:
            one = None
            try:
                one = Running(row)
                for _ in range(hosts):
                    one.ready_host()
                running.append(one)
            except (Broken, OSError, KeyError) as error:
                self.failed(phase, row.name, "%s %s" % (error, one.tail()[-200:] if one else ""))
                if one:
                    one.stop()
        return running

    def interleaved(self, phase, running, rounds, measure):
        """Measure one after the other, round by round, in another order each time."""
        found = {one.contestant.name: [] for one in running}
        for round_number in range(rounds):
            turn = round_number % max(1, len(running))
            for one in running[turn:] + running[:turn]:
                name = one.contestant.name
                if name not in self.failures or phase not in self.failures[name]:
                    try:
                        found[name].append(measure(one))
                    except (Broken, OSError, ValueError) as error:
                        self.failed(phase, name, error)
        return {name: values for name, values in found.items() if values}

    def rows(self, *transports):
        return [row for row in self.contestants if row.transport in transports]


def stop_all(running):
    for one in running:
        one.stop()


# ---------------------------------------------------------------------------
# Phases: each returns what goes into the results under its name
# ---------------------------------------------------------------------------


def timed_runs(commands, rounds, env=None):
    """Seconds of each command from its launch to its end, interleaved."""
    seconds = [[] for _ in commands]
    for _ in range(rounds):
        for command, found in zip(commands, seconds):
            started = time.perf_counter()
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env, check=True)
            found.append(time.perf_counter() - started)
    return seconds


def phase_start(bench):
    """A host's start until its initialize and its tools/list are answered, beside `python3 -c pass`."""
    rows = bench.rows("stdio") + ([] if bench.plan.quick else [plain_mcpx()])
    running = bench.start("start", rows)
    found = {"python3 -c pass": []}

    def one_start(one):
        host = None
        try:
            started = time.perf_counter()
            host = one.new_host()
            host.request("initialize", bench_client.INITIALIZE)
            initialized = time.perf_counter()
            host.post(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
            host.request("tools/list", {})
            listed = time.perf_counter()
        finally:
            if host is not None:
                one.drop(host)
        return initialized - started, listed - started

    for _ in range(bench.plan.start_rounds):
        found["python3 -c pass"] += [(value, value) for value in timed_runs([[PYTHON, "-c", "pass"]], 1)[0]]
        for name, values in bench.interleaved("start", running, 1, one_start).items():
            found.setdefault(name, []).extend(values)
    stop_all(running)
    result = {name: {"initialize": [value[0] for value in values], "list": [value[1] for value in values]}
              for name, values in found.items() if values}
    for row in rows if bench.plan.cold_rounds else ():
        result.setdefault(row.name, {})["cold"] = cold_starts(bench, row)
    return result


def cold_starts(bench, row):
    """Seconds until the first host is answered where nothing runs and nothing is cached."""
    seconds = []
    for _ in range(bench.plan.cold_rounds):
        one, started = None, time.perf_counter()
        try:
            one = Running(row)
            one.new_host().initialize()
            seconds.append(time.perf_counter() - started)
        except Broken as error:
            bench.failed("cold start", row.name, error)
        finally:
            if one:
                one.stop()
    return seconds


def phase_latency(bench):
    """One small call at a time."""
    return latency(bench, "latency", bench.rows("stdio"))


def latency(bench, phase, rows):
    running = bench.start(phase, rows)
    calls = bench.plan.latency_calls
    found = bench.interleaved(phase, running, bench.plan.latency_rounds,
                              lambda one: [one.hosts[0].call() for _ in range(calls)])
    stop_all(running)
    return found


def phase_http(bench):
    """The same over HTTP, and calls per second; mux over its pipes is the floor."""
    rows = [row for row in bench.contestants if row.name in ("direct", "mux")] + bench.rows("http", "modern", "sse")
    return {"latency": latency(bench, "http", rows), "load": load(bench, "http load", rows, bench.plan.http_levels)}


def phase_load(bench):
    """Calls per second of many hosts, and CPU per call."""
    return load(bench, "load", bench.rows("stdio"), bench.plan.load_levels)


def load(bench, phase, rows, levels):
    """{hosts: {name: {rate, cpu, p99}}}. Ours and floors stay up and are interleaved; each peer joins them in turn."""
    found = {}
    for level in levels:
        at_level = found[level] = {}
        ready = [row for row in rows if row.max_hosts >= level and (level <= 32 or row.name not in ("direct", "raw"))]
        core = bench.start(phase, [row for row in ready if not row.is_peer], level)
        note(at_level, bench.interleaved(phase, core, bench.plan.load_rounds, lambda one: one_load(bench, one)))
        for row in ready:
            if row.is_peer:
                peer = bench.start(phase, [row], level)
                note(at_level, bench.interleaved(phase, core + peer, bench.plan.peer_rounds,
                                                 lambda one: one_load(bench, one)))
                stop_all(peer)
        stop_all(core)
        say("  %d hosts: %s", level, ", ".join("%s %.0f/s" % (name, median(values["rate"]))
                                               for name, values in at_level.items()))
    return found


def note(table, measured):
    for name, values in measured.items():
        for value in values:
            for field, number in value.items():
                table.setdefault(name, {}).setdefault(field, []).append(number)


def one_load(bench, one):
    pids = one.pids()
    cpu = cpu_seconds(pids)
    strays = sum(host.strays for host in one.hosts)
    latencies = bench_client.load(one.hosts, bench.plan.load_seconds)
    if not latencies:
        raise Broken("no call was answered")
    cpu = cpu_seconds(pids) - cpu
    return {"rate": len(latencies) / bench.plan.load_seconds, "cpu": cpu / len(latencies), "p99": p99(latencies),
            "strays": sum(host.strays for host in one.hosts) - strays}


def phase_results(bench):
    """Large results: 64 KiB to 8 MiB, and whether 64 MiB passes."""
    rows = bench.rows("stdio") + (bench.rows("http", "modern", "sse") if not bench.plan.quick else [])
    running = bench.start("results", rows)
    found = {}
    for size in bench.plan.blob_sizes:
        phase = "results %d KiB" % (size >> 10)
        bench.interleaved(phase, running, 1, lambda one, size=size: one.hosts[0].blob(size))  # the server makes it once
        found[size] = bench.interleaved(phase, running, bench.plan.blob_rounds[size],
                                        lambda one, size=size: one.hosts[0].blob(size))
    if not bench.plan.quick:
        found["64 MiB"] = bench.interleaved("64 MiB", running, 1, lambda one: one.hosts[0].blob(64 * MIB))
    stop_all(running)
    return found


def phase_memory(bench):
    """MiB (PSS) of everything with idle hosts that have called once; shims and daemon by themselves."""
    found, parts = {}, {}
    for row in [row for row in bench.contestants if row.transport == "stdio" or row.name == MCPX_HTTP[0]]:
        at = found[row.name] = {}
        one = None
        try:
            one = Running(row)
            for hosts in bench.plan.memory_hosts:
                if hosts > row.max_hosts or (hosts > 32 and row.name == "raw"):
                    break
                while len(one.hosts) < hosts:
                    one.ready_host()
                time.sleep(0.5)
                at[hosts] = sum(memory(pid) for pid in one.pids()) / 1024
                if row.name == MCPX_STDIO:
                    parts[hosts] = mcpx_parts(one)
        except (Broken, OSError) as error:
            bench.failed("memory", row.name, error)
        finally:
            if one:
                one.stop()
        say("  %s: %s", row.name, {hosts: round(value, 1) for hosts, value in at.items()})
    result = {"total": found, "mcpx": parts, "interpreter": bare_interpreters()}
    if not bench.plan.quick:
        result["crowded daemon"] = crowded_daemon()
    return result


def mcpx_parts(one):
    """KiB of the median shim and of the daemon; `daemon own` is memory that it shares with nobody."""
    shims = [memory(host.process.pid) for host in one.hosts]
    daemon = daemon_of(one)
    return {"shim": median(shims), "daemon": memory(daemon), "daemon own": memory(daemon, "Pss_Anon")}


def daemon_of(one):
    """The process id of mcpx's daemon in this place."""
    return next(pid for pid in one.pids() if b"\0daemon\0" in Path("/proc/%d/cmdline" % pid).read_bytes())


def bare_interpreters(count=32):
    """KiB of the median one of as many bare interpreters that wait."""
    running = [subprocess.Popen([PYTHON, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
               for _ in range(count)]
    time.sleep(1)
    kib = median([memory(process.pid) for process in running])
    for process in running:
        process.stdin.close()
        process.wait()
    return kib


def crowded_daemon():
    """MiB of the daemon with 256 hosts in 32 sessions, each with an instance of its own."""
    up = {"command": UPSTREAM[0], "args": UPSTREAM[1:], "mcpx": {"scope": "session", "max": 32}}
    row = Contestant("crowded", "stdio", [str(MCPX), "serve", "up"], files={CONFIG: mcpx_config({"up": up})})
    one = Running(row)
    try:
        for number in range(256):
            one.ready_host(MCPX_SESSION_ID="s%d" % (number % 32))
        time.sleep(1)
        return memory(daemon_of(one)) / 1024
    finally:
        one.stop()


def phase_ten(bench):
    """Ten servers of which one needs 30 s: how long the hosts of the other nine wait."""
    return {"nine": ten_servers(bench, None, 5), "ten": ten_servers(bench, 30, 5),
            "slow, lists cached": slow_but_known()}


def ten_servers(bench, slow_seconds, rounds):
    """Seconds until initialize and tools/list of nine hosts are answered, nothing running before."""
    quick = {"command": UPSTREAM[0], "args": UPSTREAM[1:]}
    servers = {"s%d" % number: quick for number in range(9)}
    servers["slow"] = {"command": UPSTREAM[0], "args": UPSTREAM[1:] + ["--slow", str(slow_seconds or 0)]}
    seconds = []
    for _ in range(rounds):
        row = Contestant("ten", "stdio", None, files={CONFIG: mcpx_config(servers)})
        one = Running(row)
        try:
            if slow_seconds:
                slow = start_host_of(one, "slow")
                slow.post(slow.body("initialize", bench_client.INITIALIZE))
            for number in range(9):
                started = time.perf_counter()
                host = start_host_of(one, "s%d" % number)
                host.initialize()
                host.list_tools()
                seconds.append(time.perf_counter() - started)
        finally:
            one.stop()
    return seconds


def start_host_of(one, server):
    one.contestant.host = [str(MCPX), "serve", server]
    return one.new_host()


def slow_but_known():
    """Seconds until a host of the slow server has its lists, once they are cached and it does not run."""
    slow = {"command": UPSTREAM[0], "args": UPSTREAM[1:] + ["--slow", "30"], "mcpx": {"coldWait": "40s"}}
    row = Contestant("slow", "stdio", [str(MCPX), "serve", "slow"], files={CONFIG: mcpx_config({"slow": slow})})
    one = Running(row)
    try:
        host = one.new_host()
        host.initialize()
        host.list_tools()
        one.drop(host)
        one.place.run("stop")
        start_host_of(one, "up").initialize()  # the daemon runs again, the server does not
        started = time.perf_counter()
        host = start_host_of(one, "slow")
        host.initialize()
        host.list_tools()
        return time.perf_counter() - started
    finally:
        one.stop()


def phase_crowd(bench):
    """One call while many hosts, sessions and servers are idle, against none of them."""
    plan = bench.plan
    row = ours()[0]
    quiet = {"command": UPSTREAM[0], "args": UPSTREAM[1:]}
    servers = {"idle%d" % number: quiet for number in range(plan.crowd_servers)}
    crowd = Contestant("crowd", "stdio", row.host, files={CONFIG: mcpx_config(servers)})
    running = [Running(row), Running(crowd)]
    try:
        for one in running:
            one.ready_host()
        caller = running[1].hosts[0]
        for number in range(plan.crowd_hosts):
            running[1].ready_host(MCPX_SESSION_ID="s%d" % (number % plan.crowd_sessions))
        time.sleep(2)
        hosts = {running[0]: running[0].hosts[0], running[1]: caller}
        found = bench.interleaved("crowd", running, plan.latency_rounds,
                                  lambda one: [hosts[one].call() for _ in range(plan.latency_calls)])
    finally:
        stop_all(running)
    return {"alone": found[row.name], "crowd": found["crowd"]}


def phase_shell(bench):
    """`mcpx call` from the shell, beside `python3 -c pass`."""
    one = Running(ours()[0])
    try:
        one.ready_host()
        command = [str(MCPX), "call", "up.echo", "text=hello"]
        rounds = bench.plan.start_rounds
        timed_runs([command], 2, one.environ)
        passed, called = timed_runs([[PYTHON, "-c", "pass"], command], rounds, one.environ)
    finally:
        one.stop()
    return {"python3 -c pass": passed, "mcpx call": called}


PHASES = {
    "start": phase_start, "latency": phase_latency, "load": phase_load, "results": phase_results,
    "memory": phase_memory, "http": phase_http, "ten": phase_ten, "crowd": phase_crowd, "shell": phase_shell,
}
QUICK_PHASES = ("start", "latency", "load", "results", "http", "shell")


# ---------------------------------------------------------------------------
# Targets: ratios within one run
# ---------------------------------------------------------------------------


class Target:
    """A bound for a number that `value(results)` gets out of what a phase has found.

    quick  the bound of --quick, generous enough for a loaded machine; None: not checked there
    """

    def __init__(self, phase, what, bound, value, at_least=False, quick=None, unit="x"):
        self.phase, self.what, self.bound, self.value = phase, what, bound, value
        self.at_least, self.quick, self.unit = at_least, quick, unit

    def measured(self, results):
        """The number, or None where a contestant that it takes did not take part or failed."""
        try:
            return self.value(results)
        except (KeyError, TypeError, ValueError):
            return None

    def holds(self, value, quick):
        if value is None:
            return False
        bound = self.quick if quick else self.bound
        return value >= bound if self.at_least else value <= bound

    def bound_text(self, quick=False):
        bound = self.quick if quick else self.bound
        return "at %s %g%s" % ("least" if self.at_least else "most", bound, {"x": " x"}.get(self.unit, " " + self.unit))


def over(found, name, floor):
    """How many times the floor: the median of the rounds' ratios, as rounds are neighbours in time."""
    if len(found[name]) != len(found[floor]):
        return median(flat(found[name])) / median(flat(found[floor]))
    return median([mid(one) / mid(other) for one, other in zip(found[name], found[floor])])


def mid(value):
    """The median of a round, or the number that it is."""
    return median(value) if isinstance(value, list) else value


def over_best_http_peer(results):
    found = results["http"]["latency"]
    best = min((name for name in found if is_http_peer(name)), key=lambda name: median(flat(found[name])))
    return max(over(found, name, best) for name in MCPX_HTTP)


def is_http_peer(name):
    return name.endswith((" http", " sse")) and name not in MCPX_HTTP


def rates(results, level):
    return {name: values["rate"] for name, values in results["load"][level].items()}


def rate(results, level, name):
    return median(rates(results, level)[name])


def over_best_peer_rate(results):
    core = ("direct", "raw", "mux", MCPX_STDIO)
    best = [rate(results, 32, name) for name in results["load"][32] if name not in core]
    best += [median(values["rate"]) for name, values in results.get("http", {}).get("load", {}).get(32, {}).items()
             if is_http_peer(name)]
    return rate(results, 32, MCPX_STDIO) / max(best)


def cpu_over_mux(results, level=8):
    return over({name: values["cpu"] for name, values in results["load"][level].items()}, MCPX_STDIO, "mux")


def start_over_pass(results, name, event):
    found = results["start"]
    return over({"it": found[name][event], "pass": found["python3 -c pass"]["initialize"]}, "it", "pass")


def daemon_per_host(results):
    parts = results["memory"]["mcpx"]
    few, many = min(parts), max(parts)
    return (parts[many]["daemon own"] - parts[few]["daemon own"]) / (many - few)


def shim_over_interpreter(results):
    parts = results["memory"]["mcpx"]
    return parts[32]["shim"] / results["memory"]["interpreter"]


TARGETS = [
    Target("latency", "small call, stdio, against mux", 1.5, lambda r: over(r["latency"], MCPX_STDIO, "mux"), quick=5),
    Target("http", "small call, HTTP, against mux", 3,
           lambda r: over(r["http"]["latency"], MCPX_HTTP[0], "mux"), quick=9),
    Target("http", "small call, HTTP 2026-07-28, against mux", 3,
           lambda r: over(r["http"]["latency"], MCPX_HTTP[1], "mux"), quick=9),
    Target("http", "small call, HTTP, against the best HTTP peer", 1, over_best_http_peer),
    Target("load", "calls per second, 8 hosts, against mux", 0.5,
           lambda r: over(rates(r, 8), MCPX_STDIO, "mux"), True, 0.15),
    Target("load", "calls per second, 32 hosts, against mux", 0.5,
           lambda r: over(rates(r, 32), MCPX_STDIO, "mux"), True),
    Target("load", "calls per second, 32 hosts, against the best peer", 2.5, over_best_peer_rate, True),
    Target("load", "calls per second, 256 hosts against 32", 0.8,
           lambda r: rate(r, 256, MCPX_STDIO) / rate(r, 32, MCPX_STDIO), True),
    Target("results", "1 MiB result against direct", 1.5,
           lambda r: over(r["results"][MIB], MCPX_STDIO, "direct"), quick=7),
    Target("results", "8 MiB result against direct", 1.5, lambda r: over(r["results"][8 * MIB], MCPX_STDIO, "direct")),
    Target("results", "64 MiB result passes (MiB per second)", 1,
           lambda r: 64 / median(r["results"]["64 MiB"][MCPX_STDIO]), True,
           unit="MiB/s"),
    Target("start", "start to initialize against python3 -c pass", 2,
           lambda r: start_over_pass(r, MCPX_STDIO, "initialize"), quick=4),
    Target("start", "start to tools/list against python3 -c pass", 2,
           lambda r: start_over_pass(r, MCPX_STDIO, "list"), quick=4),
    Target("load", "CPU per call, 8 hosts, against mux", 2, cpu_over_mux, quick=5),
    Target("memory", "memory of an idle shim against a bare interpreter", 1.25, shim_over_interpreter),
    Target("memory", "memory of the daemon per idle host", 40, daemon_per_host, unit="KiB"),
    Target("memory", "memory of the daemon, 256 hosts and 32 instances", 40,
           lambda r: r["memory"]["crowded daemon"], unit="MiB"),
    Target("crowd", "small call, 1,000 idle hosts, 200 sessions, 50 servers, against none", 1.1,
           lambda r: over(r["crowd"], "crowd", "alone")),
    Target("ten", "nine hosts' start beside a server that needs 30 s, against without it", 1.5,
           lambda r: median(r["ten"]["ten"]) / median(r["ten"]["nine"])),
    Target("ten", "a host of that server, its lists cached (seconds)", 1,
           lambda r: r["ten"]["slow, lists cached"], unit="s"),
    Target("shell", "mcpx call from the shell against python3 -c pass", 3,
           lambda r: over(r["shell"], "mcpx call", "python3 -c pass"),
           quick=6),
]


def verdicts(results, quick, with_peers):
    """(target, value, whether it holds) of all that the phases that ran can tell."""
    chosen = [target for target in TARGETS if target.phase in results and (target.quick is not None or not quick)
              and (with_peers or "peer" not in target.what)]
    values = [(target, target.measured(results)) for target in chosen]
    return [(target, value, target.holds(value, quick)) for target, value in values]


# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


def figure(value, unit=1.0):
    """A number with three digits that matter."""
    if value is None:
        return "-"
    value *= unit
    for least, form in ((100, "%.0f"), (10, "%.1f"), (1, "%.2f")):
        if value >= least:
            return form % value
    return "%.3f" % value


def table(title, head, rows):
    lines = ["### " + title, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def ratio_to(found, name, floor):
    return figure(over(found, name, floor)) + " x" if found.get(name) and found.get(floor) else "-"


def flat(values):
    """All numbers of a table's cell: those of its rounds, or the one that it is."""
    if not isinstance(values, list):
        return [values]
    return list(itertools.chain(*values)) if values and isinstance(values[0], list) else values


def latency_table(title, found):
    return table(title, ["ms", "median", "p99", "direct", "mux"], [
        [name, figure(median(flat(values)), 1e3), figure(p99(flat(values)), 1e3), ratio_to(found, name, "direct"),
         ratio_to(found, name, "mux")] for name, values in found.items()])


def load_tables(title, found):
    for level, at_level in found.items():
        rate_of = {name: values["rate"] for name, values in at_level.items()}
        head = ["", "calls/s", "direct", "mux", "p99 ms", "CPU ms/call", "strays"]
        yield table("%s, %s hosts" % (title, level), head, [
            [name, figure(median(values["rate"])), ratio_to(rate_of, name, "direct"), ratio_to(rate_of, name, "mux"),
             figure(median(values["p99"]), 1e3), figure(median(values["cpu"]), 1e3), "%d" % sum(values["strays"])]
            for name, values in at_level.items()])


def start_table(found):
    initialize = {name: values.get("initialize") for name, values in found.items()}
    return table("Start of a host", ["ms", "initialize", "p99", "python3 -c pass", "tools/list", "cold"], [
        [name, figure(median(values.get("initialize")), 1e3), figure(p99(values.get("initialize")), 1e3),
         ratio_to(initialize, name, "python3 -c pass"), figure(median(values.get("list")), 1e3),
         figure(median(values.get("cold")), 1e3)] for name, values in found.items()])


def results_table(found):
    sizes = list(found)
    names = list(dict.fromkeys(name for size in sizes for name in found[size]))
    head = ["ms (x direct)"] + [size if isinstance(size, str) else "%d KiB" % (size >> 10) for size in sizes]
    return table("Large results", head, [
        [name] + ["%s (%s)" % (figure(median(found[size].get(name)), 1e3), ratio_to(found[size], name, "direct"))
                  for size in sizes] for name in names])


def memory_table(found):
    counts = sorted({hosts for values in found["total"].values() for hosts in values})
    rows = []
    for name, values in found["total"].items():
        known = sorted(values)
        each = (values[known[-1]] - values[known[0]]) / (known[-1] - known[0]) if len(known) > 1 else None
        rows.append([name] + [figure(values.get(count)) for count in counts] + [figure(each)])
    return table("Memory (PSS, MiB) of all processes with idle hosts",
                 [""] + ["%d" % count for count in counts] + ["per extra host"], rows)


def all_tables(results):
    """Every table of what was measured."""
    if "start" in results:
        yield start_table(results["start"])
    if "latency" in results:
        yield latency_table("A small call, stdio", results["latency"])
    if "load" in results:
        yield from load_tables("Calls per second, stdio", results["load"])
    if "http" in results:
        yield latency_table("A small call, HTTP", results["http"]["latency"])
        yield from load_tables("Calls per second, HTTP", results["http"]["load"])
    if "results" in results:
        yield results_table(results["results"])
    if "memory" in results:
        yield memory_table(results["memory"])
        yield table("Memory of mcpx's parts (KiB)", ["hosts", "median shim", "daemon", "of that shared with nobody"], [
            ["%d" % hosts] + ["%d" % parts[name] for name in ("shim", "daemon", "daemon own")]
            for hosts, parts in results["memory"]["mcpx"].items()]
            + [["a bare interpreter", "%d" % results["memory"]["interpreter"], "", ""]])
    others = {"ten": "Ten servers, one needs 30 s", "crowd": "A small call in a crowd", "shell": "From the shell"}
    for phase, title in others.items():
        if phase in results:
            yield table(title, ["ms", "median", "p99"], [
                [name, figure(median(flat(values)), 1e3), figure(p99(flat(values)), 1e3)]
                for name, values in results[phase].items()])


def targets_table(found, quick):
    return table("Targets", ["what", "measured", "bound", ""], [
        [target.what, figure(value) + ("" if value is None else {"x": " x"}.get(target.unit, " " + target.unit)),
         target.bound_text(quick), "pass" if holds else "FAIL"] for target, value, holds in found])


# ---------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------


def machine():
    """What the numbers depend on."""
    version = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, check=False).stdout.decode().strip()
    return {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(), "node": version,
            "load": os.getloadavg()[0]}


def chosen_peers(names):
    """The peers that take part, installed. `names` as --peers has it."""
    if names == "none":
        return []
    wanted = None if names == "all" else names.split(",")
    rows = [row for row in peers() if wanted is None or row.name in wanted]
    for name in dict.fromkeys(name for row in rows for name in row.needs):
        install.install(name, say)
    return rows


def run_phase(bench, name):
    started = time.monotonic()
    say("%s ...", name)
    bench.results[name] = PHASES[name](bench)
    say("%s: %.0f s", name, time.monotonic() - started)


def run_quick(bench, phases):
    """Measure up to three times what does not hold: other work on the machine may have been in the way."""
    left = list(phases)
    for _attempt in range(3):
        for name in left:
            bench.failures.clear()
            run_phase(bench, name)
        left = {target.phase for target, _, holds in verdicts(bench.results, True, False) if not holds}
        if not left:
            return


def show_list():
    contestants = [row.name for row in floors() + ours() + [plain_mcpx()] + peers()]
    targets = ["%s: %s" % (target.what, target.bound_text()) for target in TARGETS]
    for title, names in (("phases", PHASES), ("contestants", contestants), ("targets", targets)):
        print("%s:\n  %s" % (title, "\n  ".join(names)))


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=list(PHASES))
    parser.add_argument("--peers", default="all")
    parser.add_argument("--json")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    if options.list:
        show_list()
        return 0
    if not sys.platform.startswith("linux"):
        print("this reads /proc: Linux only", file=sys.stderr)
        return 2
    try:
        others = chosen_peers("none" if options.quick else options.peers)
    except install.InstallError as error:
        print("a peer could not be installed: %s" % error, file=sys.stderr)
        return 1
    bench = Bench(Plan(options.quick), floors() + ours() + others)
    phases = options.only or (QUICK_PHASES if options.quick else list(PHASES))
    here = machine()
    try:
        if options.quick:
            run_quick(bench, phases)
        else:
            for name in phases:
                run_phase(bench, name)
    finally:
        stop_all(list(Running.alive))
    if options.json:
        text = json.dumps({"machine": here, "results": bench.results, "failures": bench.failures}, indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text)
    found = verdicts(bench.results, options.quick, bool(others))
    if options.json != "-":
        print("%(cpus)d CPUs, %(system)s, Python %(python)s, node %(node)s, load %(load).1f\n" % here)
        for text in ([] if options.quick else all_tables(bench.results)):
            print(text)
        print(targets_table(found, options.quick))
    for name, phases_failed in bench.failures.items():
        for phase, why in phases_failed.items():
            print("%s failed in %s: %s" % (name, phase, why), file=sys.stderr)
    return 0 if all(holds for _, _, holds in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
