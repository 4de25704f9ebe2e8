"""Clients of both eras on a server of both eras, through mcpx: the same as straight at the server.

The client halves of the official Python and TypeScript SDKs make every request
of the plan below of eras_fixture.py, and write down all that they are answered,
asked and told. mcpx is told which era to speak to the server, so that every
cell of host era × server era is met, over stdio and over HTTP. The measure is
what the same client in the same mode gets without mcpx; what may differ across
the eras is the table CANNOT, each row with its rule.

A plan is {"mode", "server", "answers", "steps"}; a step is one of

    {"do": "request", "method", "params"}   "progress": true asks for progress; "refuse" says
                                            how the person refuses what is asked meanwhile
    {"do": "list", "method"}                all pages of a list
    {"do": "cancel", "params"}              call a tool, and give up once it has begun
    {"do": "level", "level"}                log from here on
    {"do": "watch" | "unwatch", "uris"}     have changes announced
    {"do": "wait", "method", "uri"}         until a change was announced

and its record {"result" or "error", "asked", "logs", "progress"}.
"""
import collections
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equal
import install
from door import open_door
from place import run_plan

HERE = Path(__file__).resolve().parent
FIXTURE = HERE / "eras_fixture.py"
SERVER = "eras"  # its name in the config

MODERN = "2026-07-28"
MODES = ("legacy", "auto", MODERN)
ERAS = ("legacy", "modern")
TRANSPORTS = ("stdio", "http")

CLIENT_LIMIT_S = 120
# Nobody thinks here; a question that does not reach its host must not hold up the rest.
QUESTION_TIMEOUT = "5s"

ANSWERS = {
    "form": {
        "name": "Ada", "mail": "ada@example.test", "age": 36, "ratio": 1.5, "sure": False, "color": "green",
        "pet": "d", "days": ["mo"], "pets": ["c", "d"], "ok": True,
    },
    "sampling": {
        "role": "assistant", "model": "scripted", "stopReason": "endTurn",
        "content": {"type": "text", "text": "sampled"},
    },
    "roots": [{"uri": "file:///project/one", "name": "one"}],
}


# ---------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------


def call(name, arguments=None, **more):
    return ask("tools/call", {"name": name, "arguments": arguments or {}}, **more)


def ask(method, params, **more):
    return dict({"do": "request", "method": method, "params": params}, **more)


def listing(what):
    return {"do": "list", "method": what + "/list"}


def wait(method, uri=None):
    return {"do": "wait", "method": "notifications/" + method, "uri": uri, "seconds": 8}


def completion(ref, value, **context):
    params = {"ref": ref, "argument": {"name": "style", "value": value}}
    return ask("completion/complete", dict(params, context={"arguments": context}) if context else params)


META = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "example.test/mine": {"x": [1, None]},
}
PROMPT, TEMPLATE = {"type": "ref/prompt", "name": "greet"}, {"type": "ref/resource", "uri": "eras://item/{id}"}
WATCHED = ["eras://text", "eras://item/1"]
WORDS = "grüße, 世界 \u2028 \U0001f600"

STEPS = {
    "tools": listing("tools"),
    "prompts": listing("prompts"),
    "resources": listing("resources"),
    "templates": listing("resources/templates"),
    "echo": call("echo", {"message": WORDS}),
    "structured": call("weather", {"city": "Kyiv"}),
    "structured list": call("primes"),
    "every content": call("every_content"),
    "tool failure": call("fails"),
    "error": call("breaks", {"code": -32603}),
    "error of its own": call("breaks", {"code": -31000}),
    "error of old kinds": call("breaks", {"code": -32010}),
    "error reserved for MCP": call("breaks", {"code": -32050}),
    "no such tool": call("no_such_tool"),
    "meta": ask("tools/call", {"name": "sees", "arguments": {}, "_meta": META}),
    "progress": call("counts", progress=True),
    "progress not asked for": call("counts"),
    "header": call("region", {"region": "Öst, west"}),
    "log without level": call("logs"),
    "level": {"do": "level", "level": "warning"},
    "log": call("logs"),
    "lower level": {"do": "level", "level": "debug"},
    "log all": call("logs"),
    "form": call("asks_form"),
    "form declined": call("asks_form", refuse="decline"),
    "form cancelled": call("asks_form", refuse="cancel"),
    "page": call("asks_page"),
    "page declined": call("asks_page", refuse="decline"),
    "page wanted": call("wants_page"),
    "sampling": call("asks_model"),
    "roots": call("asks_roots"),
    "two rounds": call("asks_twice"),
    "three at once": call("asks_at_once"),
    "work around a question": call("works_and_asks", progress=True),
    "cancel": {"do": "cancel", "params": {"name": "works", "arguments": {}}, "progress": True},
    "cancelled": call("cancelled"),
    "prompt": ask("prompts/get", {"name": "plain"}),
    "prompt with arguments": ask("prompts/get", {"name": "greet", "arguments": {"who": "Ada", "style": "Hi"}}),
    "prompt without its argument": ask("prompts/get", {"name": "greet", "arguments": {}}),
    "prompt of every content": ask("prompts/get", {"name": "rich"}),
    "prompt that asks": ask("prompts/get", {"name": "asks"}),
    "no such prompt": ask("prompts/get", {"name": "no_such_prompt"}),
    "text": ask("resources/read", {"uri": "eras://text"}),
    "blob": ask("resources/read", {"uri": "eras://blob"}),
    "resource that asks": ask("resources/read", {"uri": "eras://asks"}),
    "of a template": ask("resources/read", {"uri": "eras://item/42"}),
    "no such resource": ask("resources/read", {"uri": "eras://nowhere"}),
    "completion": completion(PROMPT, "Good"),
    "completion in context": completion(PROMPT, "", who="Ada"),
    "completion of a template": completion(TEMPLATE, "H"),
    "watch": {"do": "watch", "uris": WATCHED},
    "touch": call("touch", {"uri": WATCHED[0]}),
    "touched": wait("resources/updated", WATCHED[0]),
    "touch again": call("touch", {"uri": WATCHED[1]}),
    "touched again": wait("resources/updated", WATCHED[1]),
    "more tools": call("grow", {"kind": "tools"}),
    "tools changed": wait("tools/list_changed"),
    "tools then": listing("tools"),
    "new tool": call("grown_0"),
    "more prompts": call("grow", {"kind": "prompts"}),
    "prompts changed": wait("prompts/list_changed"),
    "prompts then": listing("prompts"),
    "more resources": call("grow", {"kind": "resources"}),
    "resources changed": wait("resources/list_changed"),
    "resources then": listing("resources"),
    "unwatch": {"do": "unwatch", "uris": WATCHED},
    "touch unwatched": call("touch", {"uri": WATCHED[0]}),
    # A host of the newest revision that refuses this just never comes back.
    "sampling refused": call("asks_model", refuse="error"),
    "asked after a refusal": call("asks_form"),
}

# The one request that only legacy hosts have.
LEGACY_STEPS = {"ping": {"do": "request", "method": "ping"}}


def steps_for(mode):
    return dict(STEPS, **LEGACY_STEPS) if mode == "legacy" else STEPS


# ---------------------------------------------------------------------------
# Asking
# ---------------------------------------------------------------------------


CLIENTS = {
    "python": lambda: [install.venv_program("sdk2", "python"), str(HERE / "clients" / "eras_client.py")],
    "typescript": lambda: [
        "node",
        str(HERE / "clients" / "eras_client.mjs"),
        str(install.npm_package("tsclient", "@modelcontextprotocol/client")),
    ],
}


def transcript(place, sdk, mode, server):
    """What the plan comes to for a client that is given a server."""
    plan = {"mode": mode, "server": server, "answers": ANSWERS, "steps": list(steps_for(mode).values())}
    return run_plan(place, CLIENTS[sdk](), plan, sdk + " client", CLIENT_LIMIT_S)


def fixture_argv(*options):
    return [install.venv_program("sdk2", "python"), str(FIXTURE)] + list(options)


def stdio_server(place, argv):
    return {"command": argv[0], "args": argv[1:], "env": place.env(), "cwd": str(place.work)}


STRAIGHT = {}  # (sdk, mode) -> transcript without mcpx


def straight(place, sdk, mode):
    if (sdk, mode) not in STRAIGHT:
        STRAIGHT[sdk, mode] = transcript(place, sdk, mode, stdio_server(place, fixture_argv()))
    return STRAIGHT[sdk, mode]


# ---------------------------------------------------------------------------
# The bridge
# ---------------------------------------------------------------------------


Cell = collections.namedtuple("Cell", "sdk mode era transport")


def host_era(cell):
    return "legacy" if cell.mode == "legacy" else "modern"


def bridged(place, cell):
    """The transcript of a client that has mcpx in between."""
    argv = fixture_argv("--era", cell.era)
    # A request over HTTP of the newest revision says by itself only that it is a request; the session's
    # name makes one caller of them.
    settings = {"scope": "session", "protocol": cell.era, "question.timeout": QUESTION_TIMEOUT}
    entry = {"command": argv[0], "args": argv[1:], "mcpx": settings}
    if cell.transport == "stdio":
        place.configure({SERVER: entry})
        return transcript(place, cell.sdk, cell.mode, stdio_server(place, place.mcpx("serve", SERVER)))
    with open_door(place, {SERVER: entry}) as url:
        server = {"url": url + SERVER, "headers": {"Mcpx-Session": "one"}}
        return transcript(place, cell.sdk, cell.mode, server)


# ---------------------------------------------------------------------------
# What a bridge cannot carry
# ---------------------------------------------------------------------------


class Cannot:
    """A difference that the two eras make, or the protocol asks of a proxy.

    In which cells (`host` and `era` of the server, "" is either), in which steps,
    and a text that the line of the difference has; `rule` says why. It must show
    in every cell that it is for.
    """

    def __init__(self, host, era, steps, text, rule):
        self.host = host
        self.era = era
        self.steps = steps
        self.text = text
        self.rule = rule

    def concerns(self, cell):
        return host_era(cell) in (self.host or ERAS) and cell.era in (self.era or ERAS)

    def matches(self, step, line):
        return step in self.steps and self.text in line

    def __str__(self):
        return "%s %s (%s)" % (self.steps[0], self.text, self.rule)


LISTS = ["tools", "prompts", "resources", "templates", "tools then", "prompts then", "resources then"]
READS = ["text", "blob", "resource that asks", "of a template"]

CANNOT = [
    Cannot(
        "legacy", "modern", ["log without level"], ".logs lacks",
        "2026-07-28 server/utilities/logging: nothing is logged for a request that names no level, and before "
        "logging/setLevel a legacy host has named none",
    ),
    Cannot(
        "legacy", "modern", ["sampling refused"], "",
        "2026-07-28 basic/patterns/mrtr: no refusal of sampling or roots can be told to a modern server, so the "
        "request fails with the host's own error",
    ),
    Cannot(
        "legacy", "modern", ["page wanted"], "",
        "-32042 is an error of 2025-11-25 alone; a modern server asks in the call, which the host sees as a question",
    ),
    Cannot(
        "", "modern", ["meta"], "roots",
        "2026-07-28 schema, ClientCapabilities: roots has no listChanged, there is no such notification",
    ),
    Cannot(
        "modern", "legacy", ["tools", "tools then"], "outputSchema is missing",
        "up to 2025-11-25 an outputSchema is one of an object, so a legacy server lists none here",
    ),
    Cannot(
        "modern", "legacy", ["structured list"], "structuredContent is missing",
        "up to 2025-11-25 structuredContent is an object, so a legacy server sends none here",
    ),
    Cannot(
        "modern", "legacy", ["error reserved for MCP"], "",
        "2026-07-28 basic: codes from -32020 to -32099 are reserved, so what a legacy server means by one goes "
        "into data.upstreamCode",
    ),
    Cannot(
        "modern", "legacy", LISTS, ".ttlMs",
        "a legacy server says nothing about caching; mcpx does so itself, as it hears of changes",
    ),
    Cannot(
        "modern", "legacy", READS, ".ttlMs",
        "a legacy server says nothing about caching; without a subscription nobody hears of changes",
    ),
]

# Only where the client begins with server/discover.
DISCOVERED = [
    Cannot("modern", "", ["greeting"], "supportedVersions", "mcpx serves every revision, and says so"),
    Cannot("modern", "", ["greeting"], ".ttlMs", "server/discover is answered by mcpx, also when no server runs"),
]


def cannot(cell, direct):
    rows = [row for row in CANNOT if row.concerns(cell)]
    # A client that is told a revision may do without server/discover.
    if "_meta" in direct["greeting"]:
        rows += [row for row in DISCOVERED if row.concerns(cell)]
    return rows


# ---------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------


def plain_record(name, record):
    shown = equal.plain(record)
    if name == "three at once":
        # Which of them reaches the person first is nobody's promise.
        shown["asked"].sort(key=lambda asked: asked["method"])
    return shown


def differences(mode, direct, other):
    """(step, line) for each place where two transcripts differ."""
    found = [("greeting", line) for line in equal.compare("greeting", plain_greeting(direct), plain_greeting(other))]
    for name, one, two in zip(steps_for(mode), direct["steps"], other["steps"]):
        lines = equal.compare(name, plain_record(name, one), plain_record(name, two))
        found += [(name, line) for line in lines]
    return found


def plain_greeting(told):
    return equal.plain_greeting(equal.plain(told["greeting"]))


def check_eras(place, cell):
    """Findings, and how many differences had to be."""
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(straight, place, cell.sdk, cell.mode), pool.submit(bridged, place, cell)
        direct, other = (one.result() for one in both)
    rows = cannot(cell, direct)
    found, seen = [], set()
    for step, line in differences(cell.mode, direct, other):
        matching = [row for row in rows if row.matches(step, line)]
        seen.update(matching)
        if not matching:
            found.append(line)
    found += ["was carried after all: %s" % row for row in rows if row not in seen]
    if other["version"] != direct["version"]:
        found.append("the host speaks %s, straight %s" % (other["version"], direct["version"]))
    return found, "%d steps, %d that cannot be equal" % (len(steps_for(cell.mode)), len(seen))


CELLS = [
    Cell(sdk, mode, era, transport) for sdk in CLIENTS for transport in TRANSPORTS for mode in MODES for era in ERAS
]


def name_of(cell):
    mode = {"legacy": "legacy", "auto": "auto", MODERN: "modern"}[cell.mode]
    return "eras %s, %s on %s, %s" % (cell.sdk, mode, cell.era, cell.transport)


# Both bridges between the eras, and a host that finds out; each SDK, mode and transport.
QUICK = [
    Cell("python", "legacy", "modern", "http"),
    Cell("python", "auto", "modern", "stdio"),
    Cell("typescript", MODERN, "legacy", "http"),
]


def checks():
    """(name, function of a place, whether it is one of the quick ones) of every cell."""
    return [(name_of(cell), functools.partial(check_eras, cell=cell), cell in QUICK) for cell in CELLS]
