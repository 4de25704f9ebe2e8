"""Real servers through mcpx, asked by the official SDKs, compared with asking them directly."""
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equal
import everything
import install
from place import expect, run_plan

CLIENTS = Path(__file__).resolve().parent / "clients"

CLIENT_LIMIT_S = 150

SDKS = ("sdk1", "sdk2")


# ---------------------------------------------------------------------------
# The upstreams: how each is started, what it is asked, and a text that its
# answers must contain (so that two equal failures do not look like success)
# ---------------------------------------------------------------------------


class Upstream:
    """A published server: its config entry for a place, and its questions."""

    def __init__(self, name, peers, entry, steps, proof):
        self.name = name
        self.peers = peers
        self.entry = entry  # place -> {"command", "args", "env"}
        self.steps = steps  # place -> [step]
        self.proof = proof


def node_entry(package, *arguments, **env):
    argv = install.node_script("servers", "@modelcontextprotocol/" + package, "dist/index.js")
    return {"command": argv[0], "args": argv[1:] + list(arguments), "env": env}


def python_entry(program, *arguments):
    return {"command": install.venv_program("pyservers", program), "args": list(arguments), "env": {}}


def tools(*calls):
    return [{"method": "tools/list"}] + [everything.call(name, arguments) for name, arguments in calls]


def memory_steps(_place):
    entity = {"name": "mcpx", "entityType": "bridge", "observations": ["shares servers"]}
    return tools(
        ("create_entities", {"entities": [entity]}),
        ("search_nodes", {"query": "bridge"}),
        ("delete_entities", {"entityNames": ["mcpx"]}),
        ("read_graph", {}),
    )


def filesystem_steps(place):
    note = str(place.work / "note.txt")
    return tools(
        ("write_file", {"path": note, "content": "written through the server\n"}),
        ("read_text_file", {"path": note}),
        ("list_directory", {"path": str(place.work)}),
        ("read_text_file", {"path": "/etc/hostname"}),  # outside: refused
    )


def time_steps(_place):
    clock = {"source_timezone": "Europe/Kyiv", "time": "12:00", "target_timezone": "America/Lima"}
    return tools(("convert_time", clock), ("convert_time", dict(clock, time="noon")))


def git_steps(place):
    repo = {"repo_path": str(repository(place))}
    return tools(
        ("git_status", repo),
        ("git_log", dict(repo, max_count=1)),
        ("git_show", dict(repo, revision="HEAD")),
        ("git_branch", dict(repo, branch_type="local")),
    )


def repository(place):
    """A git repository with one commit, made on first use."""
    repo = place.work / "repo"
    if not (repo / ".git").exists():
        repo.mkdir()
        (repo / "file.txt").write_text("one\n")
        who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.test"]
        date = "2025-01-01T00:00:00Z"
        env = place.env(GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
        for command in (["init", "-q", "-b", "main"], ["add", "."], who + ["commit", "-q", "-m", "first"]):
            subprocess.run(["git"] + command, cwd=str(repo), env=env, check=True, stdout=subprocess.DEVNULL)
    return repo


UPSTREAMS = [
    Upstream(
        "everything",
        "servers",
        lambda place: node_entry("server-everything"),
        lambda place: everything.LIST_STEPS + tools(("echo", {"message": "hi"}), ("get-sum", {"a": 1, "b": 2})),
        "Echo: hi",
    ),
    Upstream(
        "memory",
        "servers",
        lambda place: node_entry("server-memory", MEMORY_FILE_PATH=str(place.work / "memory.json")),
        memory_steps,
        "shares servers",
    ),
    Upstream(
        "filesystem",
        "servers",
        lambda place: node_entry("server-filesystem", str(place.work)),
        filesystem_steps,
        "written through the server",
    ),
    Upstream(
        "time",
        "pyservers",
        lambda place: python_entry("mcp-server-time", "--local-timezone", "UTC"),
        time_steps,
        "America/Lima",
    ),
    Upstream(
        "git",
        "pyservers",
        lambda place: python_entry("mcp-server-git", "--repository", str(repository(place))),
        git_steps,
        "first",
    ),
]


# ---------------------------------------------------------------------------
# Asking
# ---------------------------------------------------------------------------


def ask(place, sdk, argv, env, steps, abilities=False):
    """Run an SDK host against a server command; returns its transcript."""
    server = {"command": argv[0], "args": argv[1:], "env": env, "cwd": str(place.work)}
    plan = {"server": server, "abilities": abilities, "steps": steps}
    client = CLIENTS / (sdk + "_client.py")
    return run_plan(place, [install.venv_program(sdk, "python"), str(client)], plan, sdk + " host", CLIENT_LIMIT_S)


def ask_directly(place, sdk, entry, steps, abilities=False):
    env = place.env(**entry["env"])
    return ask(place, sdk, [entry["command"]] + entry["args"], env, steps, abilities)


def ask_through_mcpx(place, sdk, name, steps, abilities=False, options=()):
    return ask(place, sdk, place.mcpx("serve", name, *options), place.env(), steps, abilities)


def check_upstream(upstream, sdk, place):
    """Lists and calls give what they give directly."""
    entry = upstream.entry(place)
    place.configure({upstream.name: entry})
    steps = upstream.steps(place)
    direct = ask_directly(place, sdk, entry, steps)
    expect(upstream.proof in json.dumps(direct), "the server itself does not work: %s", equal.short(direct))
    bridged = ask_through_mcpx(place, sdk, upstream.name, steps)
    return equal.differences(steps, direct, bridged)


def equality_steps(place, entry, slow):
    """The whole plan for the reference server as it shows itself to this host."""
    survey = ask_directly(place, "sdk1", entry, everything.LIST_STEPS, abilities=True)
    return everything.plan(everything.listed([step["result"] for step in survey["steps"]]), slow=slow)


def compared(place, entry, steps, options=()):
    """Ask directly and through mcpx side by side: both mostly wait for timers of the server."""
    with ThreadPoolExecutor(2) as pool:
        direct = pool.submit(ask_directly, place, "sdk1", entry, steps, True)
        bridged = pool.submit(ask_through_mcpx, place, "sdk1", "everything", steps, True, options)
        return direct.result(), equal.differences(steps, direct.result(), bridged.result())


def check_equality(place, slow):
    """Everything that the reference server can do, with a host that can do everything."""
    entry = node_entry("server-everything")
    place.configure({"everything": entry})
    steps = equality_steps(place, entry, slow)
    direct, found = compared(place, entry, steps)
    if not slow:
        # A second host finds a daemon, a cache, and a child of another session.
        again = ask_through_mcpx(place, "sdk1", "everything", steps, True)
        found += ["second host, " + line for line in equal.differences(steps, direct, again)]
    return found


def check_standalone(place):
    """The same with the daemon's work done in the shim; afterwards no daemon may run."""
    entry = node_entry("server-everything")
    place.configure({"everything": entry})
    _direct, found = compared(place, entry, equality_steps(place, entry, False), ["--standalone"])
    return found + ["still running: %s" % (one,) for one in place.survivors()]
