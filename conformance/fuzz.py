#!/usr/bin/env python3
"""Throw bent input at every door of mcpx.

usage: fuzz.py [--target NAME] [--seconds N] [--seed N] [--quick] [--replay FILE] [--keep DIR]

    --target NAME  only this target (may be repeated); see below
    --seconds N    how long each target is fuzzed (60); in this process, seconds of its CPU
    --seed N       where chance starts (from the clock); printed, and the same seed makes the same inputs
    --quick        what CI runs: a fixed seed, about 20 seconds in all
    --replay FILE  one input that an earlier run has kept, for a target in this process
    --keep DIR     where inputs that break something are kept (a temporary directory)

In this process, led by coverage: `lines` (framing), `json` (JSON-RPC), `head` (HTTP, against h11), `config`.
Against a running daemon, by mutation: `flood` (too much), `host`, `http`, `child` (a server that
lies), `shim` (a daemon that lies).

A run fails on a promise that is not kept, a mistake in the daemon's log, a daemon that vanishes, a bystander that
has to wait for over a second of the daemon's work, or growth. The last line is `N inputs, N problems`.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import fuzz_live
import fuzz_mutate
import fuzz_parts
import install
from place import Failed

# In CI each target gets this many inputs, the same ones every time, however busy the machine is.
QUICK_COUNTS = {
    "lines": 4000,
    "json": 10000,
    "head": 1200,
    "config": 1500,
    "flood": 8,
    "host": 120,
    "http": 60,
    "child": 25,
    "shim": 4,
}
QUICK_SEED = 1
HANG_S = 1

# Problems shown in full; the rest is counted.
SHOWN = 12


class Hang(Exception):
    """One input took too long."""


def on_alarm(*_):
    raise Hang("an input took more than %d s of the CPU" % HANG_S)


def signature(text):
    """What makes two problems one: the words without numbers, names and quotations."""
    last = [line for line in text.strip().splitlines() if line.strip()][-1:]
    return re.sub(r"[0-9a-f]{6,}|\d+|'[^']*'|\"[^\"]*\"", "#", " ".join(last))[:160]


class Limit:
    """How long a target is fuzzed: for some seconds of a clock, or for a number of inputs."""

    # A shorter run has no middle with which its end could be compared: caches are still filling.
    LONG_S = 60

    def __init__(self, seconds=None, count=None, clock=time.monotonic):
        self.seconds, self.count, self.clock, self.started = seconds, count, clock, clock()

    def reached(self, count):
        return count >= self.count if self.count is not None else self.clock() - self.started > self.seconds

    def is_half_over(self):
        return (self.seconds or 0) >= self.LONG_S and self.clock() - self.started > self.seconds / 2


class Findings:
    """What was found, each kind once."""

    def __init__(self, keep):
        self.keep, self.kinds = Path(keep), {}

    def add(self, where, text, data=None):
        kind = (where.partition(",")[0], signature(text))
        if kind in self.kinds:
            self.kinds[kind] += 1
            return
        self.kinds[kind] = 1
        note = ""
        if data is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            path = self.keep / ("%s-%d" % (kind[0], len(self.kinds)))
            path.write_bytes(data)
            note = "\n    input %s: %r" % (path, data[:300])
        if len(self.kinds) <= SHOWN:
            print("FOUND %s: %s%s" % (where, text.strip()[-2500:], note), flush=True)


def attempt(check, seed, data):
    """Run one input; returns what went wrong as text, or None."""
    # Time of this process, not of the clock: a busy or a halted machine is no hang, and no part waits for anything.
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        check(random.Random(seed), data)
    except fuzz_parts.Broken as error:
        return str(error)
    except RecursionError:
        return traceback.format_exc(limit=-3)
    except Exception:  # whatever it is, it must not come out of a parser
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def fuzz_part(name, limit, seed, findings):
    """Fuzz a part in this process up to a limit. Returns the number of inputs and a note."""
    seeds, pieces, check = fuzz_parts.PARTS[name]
    rng = random.Random("%s %s" % (seed, name))
    corpus, coverage = fuzz_mutate.Corpus(seeds, pieces), fuzz_mutate.Coverage(fuzz_parts.mcpx.__file__)
    count = 0
    while not limit.reached(count):
        data = corpus.draw(rng)
        count += 1
        # Tracing is slow: half of the inputs are only checked.
        if count % 2:
            with coverage:
                problem = attempt(check, count, data)
            corpus.note(data, coverage.edges)
        else:
            problem = attempt(check, count, data)
        if problem:
            kind = signature(problem)
            if (name, kind) not in findings.kinds:
                data = fuzz_mutate.minimise(
                    data, lambda smaller: signature(attempt(check, count, smaller) or "-") == kind
                )
            findings.add("%s, seed %s, input %d" % (name, seed, count), problem, data)
    return count, "%d steps of the code, %d inputs kept" % (len(corpus.seen), len(corpus.inputs))


def fuzz_live_target(live, target, limit, seed, findings):
    """Fuzz a running daemon up to a limit. Returns the number of steps and a note."""
    count, worst = 0, (0.0, 0.0)
    live.before, live.half = live.rest(), None
    try:
        while not limit.reached(count):
            where = "%s, seed %s, step %d" % (target.name, seed, count)
            for problem in target.step(count):
                findings.add(where, problem)
            count += 1
            if count % 20 == 0 or target.name in ("flood", "child"):
                for problem in live.problems():
                    findings.add(where, problem)
            if live.half is None and limit.is_half_over():
                target.hang_up()
                live.half = live.rest()
            worst = tuple(map(max, worst, live.bystander.worst))
    finally:
        target.close()
    for problem in live.problems() + live.growth(getattr(target, "allowance_kib", fuzz_live.GROWTH_KIB)):
        findings.add("%s, seed %s, at the end" % (target.name, seed), problem)
    return count, "a bystander waited %.2f s at most, the daemon worked %.2f s meanwhile" % worst


def run_live(names, limit_of, seed, findings):
    """The targets that need a daemon: one after another, with the same daemon."""
    total, live = 0, fuzz_live.Live()
    try:
        for kind in fuzz_live.TARGETS:
            if kind.name in names:
                count, note = fuzz_live_target(live, kind(live, seed), limit_of(kind.name), seed, findings)
                total += count
                print("%-7s %6d steps: %s" % (kind.name, count, note), flush=True)
        for problem in live.shows_escapes():
            findings.add("shown, seed %s" % seed, problem)
    except Failed as error:
        findings.add("live, seed %s" % seed, "%s\n%s" % (live.watch.tail(), error))
    finally:
        for left in live.close():
            findings.add("left over, seed %s" % seed, left)
    return total


def parse(arguments):
    parser = argparse.ArgumentParser(description="Throw bent input at every door of mcpx.")
    known = list(fuzz_parts.PARTS) + [kind.name for kind in fuzz_live.TARGETS]
    parser.add_argument("--target", action="append", choices=known)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--replay", metavar="FILE")
    parser.add_argument(
        "--keep", metavar="DIR", default=os.path.join(tempfile.gettempdir(), "mcpx-fuzz-%d" % os.getpid())
    )
    options = parser.parse_args(arguments)
    options.seed = options.seed or str(QUICK_SEED if options.quick else int(time.time()))
    options.target = options.target or known
    return options


def main(arguments):
    options = parse(arguments)
    signal.signal(signal.SIGPROF, on_alarm)
    try:
        fuzz_parts.prepare()
    except install.InstallError as error:
        print("cannot install h11: %s" % error, file=sys.stderr)
        return 1
    if options.replay:
        problem = attempt(fuzz_parts.PARTS[options.target[0]][2], 1, Path(options.replay).read_bytes())
        print(problem or "nothing is wrong with it")
        return 1 if problem else 0
    print("seed %s" % options.seed, flush=True)
    findings, total = Findings(options.keep), 0

    def limit_of(name):
        if options.quick:
            return Limit(count=QUICK_COUNTS[name])
        clock = time.process_time if name in fuzz_parts.PARTS else time.monotonic
        return Limit(seconds=options.seconds, clock=clock)

    for name in fuzz_parts.PARTS:
        if name in options.target:
            count, note = fuzz_part(name, limit_of(name), options.seed, findings)
            total += count
            print("%-7s %6d inputs: %s" % (name, count, note), flush=True)
    if any(kind.name in options.target for kind in fuzz_live.TARGETS):
        total += run_live(options.target, limit_of, options.seed, findings)
    for (where, _), count in findings.kinds.items():
        if count > 1:
            print("%s: a kind of problem was seen %d times" % (where, count))
    print("%d inputs, %d problems" % (total, len(findings.kinds)))
    return 1 if findings.kinds else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
