"""Two hosts at once on one child: whose question, whose progress, whose answer."""
import asyncio

from check_frames import CAPABILITIES, answer, texts
from check_upstreams import node_entry
from link import Link, LinkClosed, connect
from place import expect

REVISION = "2025-11-25"
ROUNDS = 4
STEPS = 4  # progress notifications per slow call
ANSWER_LIMIT_S = 10

ASKING = (
    ("trigger-sampling-request", {"prompt": "on behalf of %s"}, "sampled by %s"),
    ("trigger-elicitation-request", {}, "- Name: %s"),
)


def host(name):
    """A raw host whose every answer carries its name."""

    def answers(method, params):
        if method == "sampling/createMessage":
            return dict(answer(method, params), content={"type": "text", "text": "sampled by " + name})
        if method == "elicitation/create":
            return {"action": "accept", "content": {"name": name}}
        return answer(method, params)

    capabilities = {key: value for key, value in CAPABILITIES[REVISION].items() if key != "tasks"}
    return Link(REVISION, capabilities, answers)


def quiet_calls(name, number):
    """Calls that ask nobody: (tool, arguments, text that must come back)."""
    label = "%s round %d" % (name, number)
    return [
        ("trigger-long-running-operation", {"duration": 0.4, "steps": STEPS}, "completed"),
        ("echo", {"message": label}, label),
    ]


def asking_calls(name):
    return [
        (tool, {key: value % name for key, value in arguments.items()}, text % name)
        for tool, arguments, text in ASKING
    ]


async def make(link, name, number, calls):
    """Make calls together; returns what is wrong with their answers."""
    found = []

    async def one(tool, arguments, text):
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "%s %d %s" % (name, number, tool)}}
        try:
            reply = await link.request("tools/call", params, ANSWER_LIMIT_S)
        except LinkClosed as error:
            found.append("%s of %s: %s" % (tool, name, error))
            return
        if text not in texts(reply):
            found.append("%s of %s got %s" % (tool, name, str(reply)[:300]))

    await asyncio.gather(*(one(*call) for call in calls))
    return found


def misdirected(link, name):
    """Progress of others, or questions that come from others' calls."""
    for params in link.notifications("notifications/progress"):
        if not str(params["progressToken"]).startswith(name):
            yield "%s heard progress %s" % (name, params)
    for message, _line in link.heard:
        if message.get("method") == "sampling/createMessage" and name not in str(message["params"]["messages"]):
            yield "%s was asked on behalf of another: %s" % (name, str(message["params"]["messages"])[:200])


async def take_turns(links):
    """Each round one host asks, and the other has calls under way meanwhile."""
    found = []
    for number in range(ROUNDS):
        asker = list(links)[number % len(links)]
        rounds = [
            make(link, name, number, quiet_calls(name, number) + (asking_calls(name) if name == asker else []))
            for name, link in links.items()
        ]
        for lines in await asyncio.gather(*rounds):
            found += lines
    for name, link in links.items():
        heard = len(link.notifications("notifications/progress"))
        if heard != ROUNDS * STEPS:
            found.append("%s heard %d of %d progress notifications" % (name, heard, ROUNDS * STEPS))
    return found


async def ask_together(links):
    """Once it was seen which tools ask, calls of theirs by different hosts are kept apart."""
    first, link = next(iter(links.items()))
    for call in asking_calls(first):
        found = await make(link, first, 0, [call])
        expect(not found, "even alone: %s", found)
    for link in links.values():
        link.thinking_s = 1  # so that the calls would overlap for sure
    results = await asyncio.gather(*(make(link, name, 1, asking_calls(name)) for name, link in links.items()))
    return [line for lines in results for line in lines]


async def share(place, behaviour):
    links = {name: host(name) for name in ("Ada", "Bob")}
    try:
        for link in links.values():
            await connect(place, ["everything"], link)
            await link.initialize()
        found = await behaviour(links)
        status = await asyncio.get_running_loop().run_in_executor(None, place.status)
    finally:
        await asyncio.gather(*(link.close() for link in links.values()))
    expect(len(status["instances"]) == 1, "%d children, wanted is one that both share", len(status["instances"]))
    return found + [line for name, link in links.items() for line in misdirected(link, name)]


def check_sharing(place, behaviour=take_turns):
    place.configure({"everything": dict(node_entry("server-everything"), mcpx={"scope": "global"})})
    return asyncio.run(share(place, behaviour))
