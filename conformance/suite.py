#!/usr/bin/env python3
"""Run the official conformance suite against mcpx.

usage: suite.py [--quick] [--only NAME] [--list] [--rounds N] [--keep] [--mcpx FILE]

    --quick       both requirement sets once, through a child of each era
    --only NAME   only the legs whose name contains NAME (may be repeated);
                  a dot stands for the end of a name
    --list        print the legs
    --rounds N    how often eight runs at once are repeated (10)
    --keep        leave the directories of failed legs, with the suite's results
    --mcpx FILE   another mcpx.py than the one next to this directory

The suite is a client that looks for faults in a server over HTTP. Here the
server is mcpx, and behind it, as its one pooled server, is suite_fixture.py
over stdio: in `global` scope and shared, so that everything meets in it. Each
revision's requirement set is run whole, with the scenarios that do not count.

A scenario passes when none of its checks fails. Whatever fails, warns or tests
nothing must be in KNOWN, with a reason; an entry of KNOWN that did not show
fails the leg too. The last line is `N passed, N failed`.
"""
import argparse
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

import install
import place as places
from place import Failed, Place, expect, wait_until

# The suite needs node 22; npm has it as a package.
install.NPM_SETS.setdefault(
    "suite",
    {"@modelcontextprotocol/conformance": "0.2.0-alpha.12", "node-" + install.NODE_PLATFORM: "22.23.5"},
)

LEGACY = "2025-11-25"
MODERN = "2026-07-28"
FIXTURE = Path(__file__).resolve().parent / "suite_fixture.py"
SERVER = "suite"  # its name in the config

# How many scenarios count and how many do not, in the pinned suite.
SCENARIOS = {LEGACY: (30, 3), MODERN: (37, 13)}
SCENARIO_LIMIT_MS = 30_000
# On a loaded machine; the longest run alone takes a quarter of a minute, a start a quarter of a second.
RUN_LIMIT_S = 600
START_LIMIT_S = 60
AT_ONCE = 8
# Started servers that wait for a request, where each request has its own.
WARM = 10
SHOWN_FINDINGS = 40

# Where a result was put: server-<scenario>-<time>.
RESULT_NAME = re.compile(r"server-(.+)-\d{4}-\d\d-\d\dT[\d-]+Z\Z")


# ---------------------------------------------------------------------------
# What is known
# ---------------------------------------------------------------------------


class Known:
    """A check that is expected not to succeed: on which legs, and why.

    `says` is a part of the check's message, so that nothing else that goes wrong
    there passes for what is known.
    """

    def __init__(self, legs, scenario, check, says, reason):
        self.legs = legs
        self.scenario = scenario
        self.check = check
        self.says = says
        self.reason = reason

    def matches(self, finding):
        return (
            finding.scenario == self.scenario and finding.check == self.check and self.says in (finding.message or "")
        )


SHARED = MODERN + " on a shared legacy server"
OWN = MODERN + " on legacy servers of one's own"
BRIDGED = MODERN, SHARED, OWN
TOGETHER = "eight at once", "eight at once, restarts"
EMPTY = "(nothing tested)"
NOTHING_TESTED = "no check succeeded or failed"

# What the suite wants of a server of the newest revision can be more than a legacy
# server can be made to give; the reasons say what is missing.
KNOWN = [
    Known(
        BRIDGED + ("straight " + MODERN,) + TOGETHER,
        "tasks-status-notifications",
        EMPTY,
        NOTHING_TESTED,
        "The suite skips this scenario itself, whatever the server.",
    ),
    Known(
        ("straight " + MODERN,),
        "tasks-request-headers",
        "sep-2663-server-rejects-mismatched-mcp-name-on-tasks-get",
        "tasks/get with mismatched Mcp-Name returned a result",
        "The SDK's own HTTP server does not know that Mcp-Name is the task's id; mcpx does.",
    ),
    Known(
        (SHARED, OWN),
        "server-stateless",
        "sep-2575-server-rejects-undeclared-capability",
        "although the client did not declare the 'sampling' capability",
        "A legacy server learns in mid-call that nobody can be asked; what its tool makes of that is its own answer.",
    ),
    Known(
        (SHARED, OWN),
        "server-stateless",
        "sep-2575-missing-capability-http-400",
        "server did not return MissingRequiredClientCapabilityError",
        "The same: no such error, so no status for it.",
    ),
    Known(
        (SHARED, OWN),
        "input-required-result-basic-elicitation",
        "sep-2322-elicitation-incomplete",
        'inputRequests missing expected key "user_name"',
        "The suite wants the question under the key user_name; a legacy question has no key.",
    ),
    Known(
        (SHARED, OWN),
        "input-required-result-missing-input-response",
        "sep-2322-missing-response-rerequests",
        "Server returned JSON-RPC error instead of re-requesting",
        "Answers without a requestState belong to no call that a legacy server holds, and would run the tool again.",
    ),
    Known(
        (SHARED, OWN),
        "input-required-result-ignore-extra-params",
        "sep-2322-ignore-unexpected-params",
        "inputResponses without requestState",
        "The same: answers without a requestState.",
    ),
    Known(
        (SHARED,),
        "server-stateless",
        "sep-2575-server-no-log-without-loglevel",
        "dropped or failed to yield frame structures",
        "Half a second is waited for a tool not seen before, a moment after another's question: it starts after one.",
    ),
    Known(
        (SHARED,),
        "input-required-result-basic-list-roots",
        "sep-2322-list-roots-incomplete",
        "Expected InputRequiredResult with roots/list",
        "A server that several hosts share is not told that there are roots: it would keep the first host's.",
    ),
    Known(
        (SHARED,),
        "input-required-result-multiple-input-requests",
        "sep-2322-multiple-inputs-incomplete",
        "Expected InputRequiredResult",
        "The same: one of the three questions is for roots.",
    ),
    Known(
        (SHARED, OWN),
        "tasks-required-task-error",
        "sep-2663-server-returns-missing-capability-when-required",
        "returned a successful response from a client that did not declare",
        "A core task is waited for on behalf of a client without the extension, so nothing is missing.",
    ),
    Known(
        (SHARED, OWN),
        "tasks-mrtr-composition",
        "sep-2663-mrtr-synchronous-before-task-creation",
        'round 1 MUST be InputRequiredResult; got {"resultType":"task"',
        "A core task asks while it runs; there is no round before it.",
    ),
    Known(
        (OWN,),
        "server-stateless",
        "sep-2575-server-sends-prompts-list-changed-on-subscription",
        "no notifications/prompts/list_changed arrived",
        "Each request has a server of its own here; the one whose list changes is not the one that is listened to.",
    ),
    Known(
        (OWN,),
        "server-stateless",
        "sep-2575-server-sends-tools-list-changed-on-subscription",
        "no notifications/tools/list_changed arrived",
        "The same for tools.",
    ),
]


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


class Finding:
    """A check that did not succeed."""

    def __init__(self, scenario, check, status, message):
        self.scenario = scenario
        self.check = check
        self.status = status
        self.message = message

    def __str__(self):
        return "%s %s %s: %s" % (self.status, self.scenario, self.check, (self.message or "")[:300])


class Run:
    """One run of the suite, from its start to what it found."""

    def __init__(self, process, revision, directory, scenarios):
        self.process = process
        self.revision = revision
        self.directory = directory
        self.scenarios = scenarios  # what has to be in the results
        self.started = time.monotonic()
        self.seconds = 0.0
        self.findings = []
        self.checks = 0  # that succeeded

    def finish(self):
        """Wait for the end and read the results."""
        try:
            self.process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.findings.append(Finding("(all)", "(run)", "FAILURE", "not done in %d s" % RUN_LIMIT_S))
        self.seconds = time.monotonic() - self.started
        results = read_results(self.directory)
        for scenario in self.scenarios:
            self._take(scenario, results.get(scenario))
        return self

    def _take(self, scenario, checks):
        if checks is None:
            self.findings.append(Finding(scenario, "(run)", "FAILURE", "left no result"))
            return
        succeeded = sum(1 for check in checks if check["status"] == "SUCCESS" and not is_wire_check(check))
        self.checks += sum(1 for check in checks if check["status"] == "SUCCESS")
        bad = [check for check in checks if check["status"] in ("FAILURE", "WARNING")]
        for check in bad:
            self.findings.append(Finding(scenario, check["id"], check["status"], check.get("errorMessage")))
        if not bad and not succeeded:
            self.findings.append(Finding(scenario, EMPTY, "WARNING", NOTHING_TESTED))

    def failed(self):
        """The scenarios that fail by the suite's own count."""
        return {finding.scenario for finding in self.findings if finding.status == "FAILURE"}


def is_wire_check(check):
    """The check that the suite adds to every scenario: were the messages valid?"""
    return check["id"].startswith("wire-schema")


def read_results(directory):
    """The checks of each scenario, from the files that the suite left."""
    results = {}
    for path in sorted(directory.glob("server-*/checks.json")):
        name = RESULT_NAME.match(path.parent.name)
        results[name.group(1)] = json.loads(path.read_text())
    return results


def requirements(revision):
    """(scored, not scored): the server scenarios of a revision's requirement set.

    Fails when they are not as many as the pinned suite has: a set that is not
    read whole would pass.
    """
    package = install.npm_package("suite", "@modelcontextprotocol/conformance")
    text = (package / "requirements" / (revision + ".yaml")).read_text()
    scored = re.search(r"^server:\n((?: +- .*\n)+)", text, re.M).group(1)
    others = text.partition("\nnot_scored:\n")[2]
    entries = re.findall(r"- scenario: (\S+)\n +leg: server\n", others)
    found = re.findall(r"- (\S+)", scored), entries
    counts = tuple(map(len, found))
    expect(counts == SCENARIOS[revision], "the set of %s has %d and %d scenarios", revision, *counts)
    return found


# ---------------------------------------------------------------------------
# The suite, the fixture and mcpx
# ---------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def start(place, argv, log, port):
    """Start a server of ours and wait until its port is open."""
    with open(place.root / log, "ab") as out:
        process = subprocess.Popen(
            argv, cwd=str(place.work), env=place.env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )

    def ready():
        expect(process.poll() is None, "%s ended: %s", log, (place.root / log).read_text(errors="replace")[-800:])
        return answers(port)

    wait_until(ready, START_LIMIT_S, "%s listens" % log)
    return process


@contextlib.contextmanager
def straight(place):
    """The fixture by itself, over HTTP; the value is its address."""
    port = free_port()
    argv = [install.venv_program("sdk2", "python"), str(FIXTURE), "--http", str(port)]
    process = start(place, argv, "fixture.log", port)
    try:
        yield "http://127.0.0.1:%d/mcp" % port
    finally:
        end(process)


def end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(places.STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Mcpx:
    """A daemon with the fixture as its one server; can be restarted on its port."""

    def __init__(self, place, protocol, scope="global"):
        self.place = place
        self.port = free_port()
        self.url = "http://127.0.0.1:%d/mcp/%s" % (self.port, SERVER)
        self.process = None
        self.children = []  # for each start of the daemon: process id -> revision that it spoke
        fixture = {
            "command": install.venv_program("sdk2", "python"),
            "args": [str(FIXTURE)],
            "cwd": str(FIXTURE.parent),
            "mcpx": {"scope": scope, "sharing": "shared", "protocol": protocol},
        }
        if scope != "global":
            # The suite waits for less time than a server takes to start.
            fixture["mcpx"].update(warm=WARM, inheritEnv=[])
        place.configure({SERVER: fixture}, **{"http.listen": "127.0.0.1:%d" % self.port, "http.auth": "none"})

    def start(self):
        self.children.append({})
        self.process = start(self.place, self.place.mcpx("daemon"), "daemon.log", self.port)

    def stop(self):
        self.count_children()
        end(self.process)

    def restart(self):
        self.stop()
        self.start()

    def count_children(self):
        status = self.place.status() or {"instances": []}
        self.children[-1].update((instance["pid"], instance["revision"]) for instance in status["instances"])

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_error):
        self.stop()


def begin_run(place, url, revision, name, scenario=None):
    """Start the suite: the whole requirement set, or one scenario of it."""
    directory = place.root / ("results-" + name)
    directory.mkdir()
    node = install.npm_package("suite", "node-" + install.NODE_PLATFORM) / "bin" / "node"
    script = install.npm_package("suite", "@modelcontextprotocol/conformance") / "dist" / "index.js"
    argv = [str(node), str(script), "server", "--url", url, "--output-dir", str(directory)]
    argv += ["--timeout", str(SCENARIO_LIMIT_MS)]
    if scenario:
        argv += ["--scenario", scenario, "--spec-version", revision, "--force"]
    else:
        argv += ["--requirements", revision]
    with open(directory / "suite.log", "wb") as out:
        process = subprocess.Popen(
            argv, cwd=str(place.work), env=place.env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    scenarios = [scenario] if scenario else sum(requirements(revision), [])
    return Run(process, revision, directory, scenarios)


def meet(url):
    """A first call by a caller that can be asked anything.

    What a legacy server may ask, it learns once, from the caller that starts
    it; the suite's first requests declare nothing.
    """
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "suite-runner", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}, "sampling": {}, "roots": {}},
    }
    params = {"name": "test_simple_text", "arguments": {}, "_meta": meta}
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": MODERN,
        "Mcp-Method": "tools/call",
        "Mcp-Name": params["name"],
    }
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=START_LIMIT_S) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise Failed("the first call failed: %s" % error) from error
    expect("simple text" in text, "the first call was answered with %s", text[:300])


# ---------------------------------------------------------------------------
# Legs
# ---------------------------------------------------------------------------


class Leg:
    """A named check: a function of (place, leg) that returns (findings, note)."""

    def __init__(self, name, function, revision=None, protocol=None, scope="global", quick=False):
        self.name = name
        self.function = function
        self.revision = revision
        self.protocol = protocol
        self.scope = scope
        self.quick = quick
        self.rounds = 1

    def judge(self, runs):
        """What is unexpected in these runs, and which entries of KNOWN are out of date."""
        rows = [row for row in KNOWN if self.name in row.legs]
        found = [finding for run in runs for finding in run.findings]
        unexpected = [str(finding) for finding in found if not any(row.matches(finding) for row in rows)]
        ran = {scenario for run in runs for scenario in run.scenarios}
        for row in rows:
            if row.scenario not in ran:
                unexpected.append("OUT OF DATE: there is no scenario %s" % row.scenario)
            elif not any(row.matches(finding) for finding in found):
                unexpected.append("OUT OF DATE: %s %s was not seen" % (row.scenario, row.check))
        return unexpected


def score(run):
    """How many scenarios pass, by the suite's own count."""
    scored, others = requirements(run.revision)
    failed = run.failed()
    return "scored %d of %d, not scored %d of %d, %d checks" % (
        len(set(scored) - failed),
        len(scored),
        len(set(others) - failed),
        len(others),
        run.checks,
    )


def check_straight(place, leg):
    """The suite and the fixture without mcpx: what cannot pass at all."""
    with straight(place) as url:
        run = begin_run(place, url, leg.revision, "straight").finish()
    return leg.judge([run]), score(run)


def check_through(place, leg):
    """One requirement set through mcpx."""
    with Mcpx(place, leg.protocol, leg.scope) as mcpx:
        if leg.protocol == "legacy":
            meet(mcpx.url)
        run = begin_run(place, mcpx.url, leg.revision, "through").finish()
    wanted = {"legacy": LEGACY, "modern": MODERN}.get(leg.protocol, leg.revision)
    # A started server that waits for its first request has not been spoken to.
    spoken = {revision for revision in mcpx.children[-1].values() if revision is not None}
    found = leg.judge([run])
    if spoken != {wanted}:
        found.append("the children spoke %s, wanted is %s" % (", ".join(sorted(spoken)) or "nothing", wanted))
    return found, "%s, %d children" % (score(run), len(mcpx.children[-1]))


def check_eight(place, leg):
    """Eight runs at once, four of each revision, after one of each alone."""
    with straight(place) as url:
        beside = longest(run_eight(place, url, "straight"))
    with Mcpx(place, "follow") as mcpx:
        runs = run_alone(place, mcpx.url)
        times = []
        for number in range(leg.rounds):
            together = run_eight(place, mcpx.url, "round%d" % number)
            times.append(longest(together))
            runs += together
    found = leg.judge(runs) + wrong_children(mcpx)
    span = "%.1f to %.1f s, straight %.1f s" % (min(times), max(times), beside)
    return found, "%d rounds of %d runs in %s, %d children" % (leg.rounds, AT_ONCE, span, len(mcpx.children[0]))


def run_alone(place, url):
    """One run of each revision by itself: mcpx sees which tools ask and which log."""
    return [begin_run(place, url, revision, "alone-" + revision).finish() for revision in (LEGACY, MODERN)]


def run_eight(place, url, name, step=None):
    """Eight runs at once: whole ones, or the scenario at place `step` of each set, which start again at their ends."""
    runs = []
    for number in range(AT_ONCE):
        revision = (LEGACY, MODERN)[number % 2]
        scenarios = sum(requirements(revision), [])
        scenario = None if step is None else scenarios[step % len(scenarios)]
        runs.append(begin_run(place, url, revision, "%s-%d" % (name, number), scenario))
    return [run.finish() for run in runs]


def longest(runs):
    """How many seconds runs took that were started together."""
    return max(run.seconds for run in runs)


def wrong_children(mcpx):
    """What is wrong with the children of each daemon: at most one for each era, and each era its own.

    Not every scenario needs a child, so only all restarts together must have had both.
    """
    found = []
    for pids in mcpx.children:
        revisions = sorted(str(revision) for revision in pids.values())
        if len(revisions) != len(set(revisions)) or not set(revisions) <= {LEGACY, MODERN}:
            found.append("one daemon had children of %s" % ", ".join(revisions))
    for part in (mcpx.children[:1], mcpx.children[1:]):
        spoken = {revision for pids in part for revision in pids.values()}
        if part and spoken != {LEGACY, MODERN}:
            found.append("the children spoke %s, wanted is one for each era" % ", ".join(sorted(map(str, spoken))))
    return found


def check_restarts(place, leg):
    """Eight runs at once, scenario by scenario, with a new daemon before each."""
    steps = max(sum(counts) for counts in SCENARIOS.values())
    with straight(place) as url:
        beside = sum(longest(run_eight(place, url, "straight%d" % step, step)) for step in range(steps))
    seconds = 0.0
    with Mcpx(place, "follow") as mcpx:
        runs = run_alone(place, mcpx.url)
        for step in range(steps):
            mcpx.restart()
            together = run_eight(place, mcpx.url, "step%d" % step, step)
            seconds += longest(together)
            runs += together
    found = leg.judge(runs) + wrong_children(mcpx)
    note = "%d steps of %d runs in %.0f s, straight %.0f s, at most %d children"
    return found, note % (steps, AT_ONCE, seconds, beside, max(map(len, mcpx.children)))


def check_resumption(place, leg):
    """A client that loses its stream in mid-call comes back for the rest.

    The suite tests this only with servers that hang up by themselves.
    """
    with Mcpx(place, leg.protocol) as mcpx:
        client = HttpClient(mcpx.port)
        client.initialize()
        reply = client.post({"id": 1, "method": "tools/call", "params": {"name": "test_reconnection", "arguments": {}}})
        first = read_until(reply, "\n\n", "id: ")
        last_id = re.findall(r"^id: (.*)$", first, re.M)[-1]
        reply.close()
        rest = read_until(client.get(last_id), "\n\n", '"id":1')
    expect("Reconnection test completed." in rest, "after the reconnection came %r", rest[:300])
    expect(first.count("notifications/message") + rest.count("notifications/message") == 1, "lost or twice: %r", rest)
    return [], "the answer came on the second stream"


class HttpClient:
    """A legacy session over HTTP, one connection for each request."""

    def __init__(self, port):
        self.port = port
        self.headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}

    def initialize(self):
        hello = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "suite-runner", "version": "1"}}
        reply = self.post({"id": 0, "method": "initialize", "params": hello})
        self.headers["Mcp-Session-Id"] = reply.getheader("Mcp-Session-Id")
        self.headers["MCP-Protocol-Version"] = LEGACY
        self.post({"method": "notifications/initialized"})

    def post(self, message):
        return self._send("POST", json.dumps(dict(message, jsonrpc="2.0")), self.headers)

    def get(self, last_id):
        return self._send("GET", None, dict(self.headers, Accept="text/event-stream", **{"Last-Event-ID": last_id}))

    def _send(self, method, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_LIMIT_S)
        connection.request(method, "/mcp/" + SERVER, body, headers)
        reply = connection.getresponse()
        expect(reply.status in (200, 202), "%s was answered with status %d", method, reply.status)
        return reply


def read_until(reply, end_mark, mark):
    """Read a stream up to the end of the event that has `mark` in it."""
    text = ""
    while mark not in text or not text.endswith(end_mark):
        data = reply.read1(65536)
        expect(data, "the stream ended after %r", text[-300:])
        text += data.decode()
    return text


LEGS = [
    Leg(LEGACY, check_through, LEGACY, "follow", quick=True),
    Leg(MODERN, check_through, MODERN, "follow", quick=True),
    Leg("resumption", check_resumption, LEGACY, "follow", quick=True),
    Leg(LEGACY + " on a modern server", check_through, LEGACY, "modern"),
    Leg(SHARED, check_through, MODERN, "legacy"),
    Leg(OWN, check_through, MODERN, "legacy", scope="session"),
    Leg("straight " + LEGACY, check_straight, LEGACY),
    Leg("straight " + MODERN, check_straight, MODERN),
    Leg("eight at once", check_eight),
    Leg("eight at once, restarts", check_restarts),
]


# ---------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------


def run_leg(leg, keep):
    """Run one leg in a place of its own; prints its line and returns whether it passed."""
    place = Place(leg.name)
    started = time.monotonic()
    findings, note = [], ""
    try:
        try:
            findings, note = leg.function(place, leg)
        except Failed as failure:
            findings = [str(failure)]
        except Exception:  # a fault of this runner, or an answer it did not expect
            findings = [traceback.format_exc().strip()]
        findings += ["left over: " + left for left in place.leftovers()]
        show(leg, findings, note, time.monotonic() - started)
        if findings and keep:
            print("      results and logs are in %s" % place.root)
    finally:
        if not (keep and findings):
            place.remove()
    return not findings


def show(leg, findings, note, seconds):
    notes = [note] if note else []
    print("%s  %s  (%s)" % ("FAIL" if findings else "PASS", leg.name, ", ".join(notes + ["%.1f s" % seconds])))
    for finding in findings[:SHOWN_FINDINGS]:
        print("      " + finding.replace("\n", "\n      "))
    if len(findings) > SHOWN_FINDINGS:
        print("      and %d more" % (len(findings) - SHOWN_FINDINGS))
    sys.stdout.flush()


def chosen(options):
    if options.only:
        return [leg for leg in LEGS if any(part in leg.name + "." for part in options.only)]
    return [leg for leg in LEGS if leg.quick or not options.quick]


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--mcpx", metavar="FILE", type=Path)
    options = parser.parse_args(argv)
    legs = chosen(options)
    missing = {name for row in KNOWN for name in row.legs} - {leg.name for leg in LEGS}
    if missing:
        print("KNOWN names legs that do not exist: %s" % ", ".join(sorted(missing)), file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(leg.name for leg in legs))
        return 0
    if not legs:
        print("no leg is called like that", file=sys.stderr)
        return 2
    if options.mcpx:
        places.MCPX = options.mcpx.resolve()
    try:
        for name in ("suite", "sdk2"):
            install.install(name, lambda text: print(text, flush=True))
    except install.InstallError as error:
        print("a peer could not be installed: %s" % error, file=sys.stderr)
        return 1
    # So that a run that is stopped still takes its daemon and its directories with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for leg in legs:
        leg.rounds = options.rounds
    passed = [run_leg(leg, options.keep) for leg in legs]
    print("%d passed, %d failed" % (sum(passed), len(passed) - sum(passed)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
