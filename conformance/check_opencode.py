"""opencode as the host: how it starts, shares, kills and leaves servers behind mcpx."""
import signal
from concurrent.futures import ThreadPoolExecutor

from fake_model import FakeModel
from opencode import Opencode
from place import expect, is_alive, processes, wait_until

# A shim must notice that its host is gone, and the daemon that its shim is.
RELEASE_LIMIT_S = 15


def configure(place):
    """One server of each kind: per session, which is the default, and for all."""
    place.configure(
        {"demo": place.demo_server(scope="session"), "shared": place.demo_server("--name", "shared", scope="global")}
    )


def call(server, tool, **arguments):
    return ["%s_%s" % (server, tool), arguments]


def instances(place, server):
    status = place.status()
    expect(status is not None, "no daemon runs")
    return [one for one in status["instances"] if one["server"] == server and one.get("pid")]


def working(place, server):
    return [one for one in instances(place, server) if one["inFlight"]]


def shims(place):
    """Processes that an opencode of this place launched as servers."""
    mark = str(place.root)
    return [pid for pid, _parent, text in processes() if mark in text and " serve " in text and "mcpx" in text]


def check_call(place):
    """A call goes through; the daemon that this opencode started outlives it, its child does not."""
    configure(place)
    with FakeModel() as model:
        host = Opencode(place, model, ["demo"]).start_run(
            [
                [call("demo", "set", name="x", value="from opencode")],
                [call("demo", "get", name="x"), call("demo", "echo", text="grüße")],
                [call("demo", "fail", message="as wanted")],
            ]
        )
        try:
            _set, got, echoed, failed = host.finish_run()
        finally:
            host.stop()
    expect(got == "from opencode", "get returned %r", got)
    expect(echoed == "grüße", "echo returned %r", echoed)
    expect("as wanted" in failed, "fail returned %r", failed)
    # opencode sends SIGTERM to all descendants of its servers before it goes.
    expect(place.status() is not None, "the daemon did not survive the end of the opencode that started it")
    wait_until(lambda: not instances(place, "demo"), RELEASE_LIMIT_S, "the session's child is released")


def check_two_sessions(place):
    """Two sessions of one `opencode serve` at once: one link, each gets its own answers."""
    configure(place)
    with FakeModel() as model:
        host = Opencode(place, model, ["demo"]).start_serve()
        try:
            sessions = [host.new_session(), host.new_session()]
            with ThreadPoolExecutor(2) as pool:
                plays = [
                    [[call("demo", "echo", text="I am " + session), call("demo", "sleep", seconds=0.3)]]
                    for session in sessions
                ]
                results = list(pool.map(host.play, sessions, plays))
            for session, result in zip(sessions, results):
                expect(result[0] == "I am " + session, "session %s got %r", session, result[0])
            # This host has one connection per directory and names no session: one child.
            expect(len(instances(place, "demo")) == 1, "%d children for one host", len(instances(place, "demo")))
        finally:
            host.stop()
    wait_until(lambda: not instances(place, "demo"), RELEASE_LIMIT_S, "the host's child is released")


def check_two_processes(place):
    """Two opencode processes at once: a session's state is its own, a global server's is shared."""
    configure(place)
    with FakeModel() as model:
        hosts = [Opencode(place, model, ["demo", "shared"], name) for name in ("one", "two")]
        for host in hosts:
            turns = [
                [call("demo", "set", name="x", value=host.base.name), call("shared", "add", n=1)],
                [call("demo", "sleep", seconds=2)],  # the other one sets its value meanwhile
                [call("demo", "get", name="x")],
            ]
            host.start_run(turns)
        try:
            results = [host.finish_run() for host in hosts]
        finally:
            for host in hosts:
                host.stop()
    for host, result in zip(hosts, results):
        expect(result[-1] == host.base.name, "opencode %s read %r", host.base.name, result[-1])
    counts = sorted(result[1] for result in results)
    expect(counts == ["1", "2"], "the shared counter went to %s", counts)
    expect(len(instances(place, "shared")) == 1, "the shared server has no single child")


def check_killed(place):
    """kill -9 in mid-call: the shim ends, the session's child goes, the daemon and shared child stay."""
    configure(place)
    with FakeModel() as model:
        turns = [
            [call("shared", "add", n=1)],
            [call("demo", "sleep", seconds=120), call("shared", "sleep", seconds=120)],
        ]
        host = Opencode(place, model, ["demo", "shared"]).start_run(turns)
        try:
            wait_until(lambda: model.has_called("demo_sleep"), 60, "the model asks for the long call")
            busy = wait_until(lambda: working(place, "demo"), 30, "the call is under way")
            launched = shims(place)
            expect(launched, "no shim was found")
        finally:
            host.stop(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, launched)), RELEASE_LIMIT_S, "the shims have ended")
    wait_until(lambda: not is_alive(busy[0]["pid"]), RELEASE_LIMIT_S, "the child of the killed session has ended")
    shared = instances(place, "shared")
    expect(len(shared) == 1, "the shared child went with the killed host")
    wait_until(lambda: not working(place, "shared"), RELEASE_LIMIT_S, "its call was cancelled")
    tables = place.status()["tables"]
    expect(tables["calls"] == 0 and tables["hosts"] == 0, "left in the tables: %s", tables)
